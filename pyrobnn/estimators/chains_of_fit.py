"""A small fit by Laplace's approximation brought to the posterior itself, where short chains arrive there in time."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn

from pyrobnn.estimators.fits import Fit
from pyrobnn.inference.refine import sampled
from pyrobnn.model import BNN
from pyrobnn.model.likelihoods.base import SCALE
from pyrobnn.model.likelihoods.catalogue import HomoskedasticGaussian
from pyrobnn.posterior import Posterior

#: what the chains of one fit may take, in seconds by a rule of thumb that is the same on every machine
_WORK = 10.0


def at_posterior(
    fit: Fit,
    declared: BNN,
    num_draws: int | None,
    seed: int,
) -> Fit:
    """The fit with draws of the posterior in place of a linearised net's, where short chains arrive at it.

    Args:
        fit: of any kind; one that is no linearised net with hidden units and normal noise stays as it is.
        declared: the model whose noise is inferred, under its prior; the widths of the weights' prior are the fit's.
        num_draws: of each chain, at most; None for all.
        seed: of the moves.

    Returns:
        The same method, whose reason says whether chains have arrived; draws of kind ``"chains"`` if so.
    """
    model = _with_declared_noise(fit.posterior, declared)
    if model is None:
        return fit
    posterior = sampled(fit.posterior, model, _WORK, seed)
    if posterior is None:
        return fit
    facts = posterior.meta["refine"]
    if num_draws is not None:
        posterior = posterior.thin(num_draws)
    words = f"{facts['chains']} short chains from its draws arrived at the posterior"
    return replace(fit, posterior=posterior).because(words)


def _with_declared_noise(posterior: Posterior, declared: BNN) -> BNN | None:
    """The fit's net under the fit's prior, its noise inferred as declared; None where no chains are to begin."""
    model = posterior.bnn
    is_net = isinstance(model.net, nn.Sequential) and len(model.net) > 1
    normal = type(model.likelihood) is HomoskedasticGaussian
    if posterior.network is None or not is_net or not normal:
        return None
    if SCALE in model.priors or SCALE not in declared.priors:
        return model
    inferred = copy.copy(model)
    inferred.likelihood = declared.likelihood
    inferred.priors = model.priors | declared.likelihood.own.priors
    return inferred
