"""Other libraries' interfaces to what this one does: Pyro's MCMC, BoTorch's models."""
