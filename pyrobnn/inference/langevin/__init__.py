"""Stochastic-gradient MCMC: step size, plan, run and checks."""
