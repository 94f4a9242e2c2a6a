"""Optimisation to a point: the compiled training loop, its learning rates, its results."""
