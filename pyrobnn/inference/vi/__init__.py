"""Variational inference: families of guides, the ELBO and its estimators.

To read in this order:

================== ====================================================================================
``families``       the guides of our own: draws, log q and moments as functions of flat parameters
``pyro_guides``    Pyro's guides as such a family
``written_guides`` guides written by hand, which ``pyro_guides`` wraps
``elbo``           the objective of a step, a function of flat parameters
``local_noise``    its estimators with noise for every datum
``forward_kl``     KL(prior‖q) in the place of KL(q‖prior)
``kl_schedules``   the weight of the KL at every step
``guide_fit``      one fit, or two, one after the other: :func:`guide_fit.fit_guide` is what SVI calls
``elbo_value``     the ELBO on all data after a fit, its error, and importance weights
================== ====================================================================================
"""
