"""Hamiltonian Monte Carlo: the machine that moves all chains at once, its warm-up, its files and its checks."""
