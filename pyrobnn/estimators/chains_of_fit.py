"""A small fit by Laplace's approximation brought to the posterior itself, where short chains arrive there in time."""

from __future__ import annotations

import copy
from dataclasses import replace

from pyrobnn.estimators.fits import Fit
from pyrobnn.inference.refine import sampled
from pyrobnn.model import BNN
from pyrobnn.model.likelihoods.base import SCALE
from pyrobnn.model.likelihoods.catalogue import HomoskedasticGaussian

#: what the chains of one fit may take, in seconds by a rule of thumb that is the same on every machine
_WORK = 10.0


def at_posterior(
    fit: Fit,
    declared: BNN,
    num_draws: int | None,
    seed: int,
) -> Fit | None:
    """A linearised fit with draws of the posterior itself, by short chains that begin at its own.

    Args:
        fit: of a net or of a linear model with normal noise.
        declared: the model whose noise is inferred, under its prior; the widths of the weights' prior are the fit's.
        num_draws: of each chain, at most; None for all.
        seed: of the moves.

    Returns:
        The same method, its draws of kind ``"chains"``; None where they are too dear, or have not arrived.
    """
    model = fit.posterior.bnn
    if fit.posterior.network is None or type(model.likelihood) is not HomoskedasticGaussian:
        return None
    if SCALE in declared.priors and SCALE not in model.priors:
        model = _with_inferred_noise(model, declared)
    posterior = sampled(fit.posterior, model, _WORK, seed)
    if posterior is None:
        return None
    num_chains = posterior.meta["refine"]["chains"]
    if num_draws is not None:
        posterior = posterior.thin(num_draws)
    words = f"{num_chains} short chains from its draws arrived at the posterior"
    return replace(fit, posterior=posterior).because(words)


def _with_inferred_noise(model: BNN, declared: BNN) -> BNN:
    """The model with the noise that another declares."""
    inferred = copy.copy(model)
    inferred.likelihood = declared.likelihood
    inferred.priors = model.priors | declared.likelihood.own.priors
    return inferred
