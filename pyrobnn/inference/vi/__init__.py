"""Variational inference: families of guides, the ELBO and its estimators."""
