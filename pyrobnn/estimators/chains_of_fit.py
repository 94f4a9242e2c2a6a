"""A small fit by Laplace's approximation brought to the posterior itself, where short chains arrive there in time."""

from __future__ import annotations

import copy
from dataclasses import replace

from pyrobnn.estimators.fits import Fit
from pyrobnn.inference.curvature.precision import tuned_model
from pyrobnn.inference.refine import log_evidence, sampled
from pyrobnn.model import BNN
from pyrobnn.model.likelihoods.base import SCALE
from pyrobnn.model.likelihoods.catalogue import HomoskedasticGaussian
from pyrobnn.posterior import Posterior

#: what the chains of one fit may take, in seconds by a rule of thumb that is the same on every machine
_WORK = 10.0
#: factors of two by which the width's precision changes, at most
_MOST_STEPS = 6


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
    model, factor = _of_best_width(fit.posterior, seed)
    if SCALE in declared.priors and SCALE not in model.priors:
        model = _with_inferred_noise(model, declared)
    posterior = sampled(fit.posterior, model, _WORK, seed)
    if posterior is None:
        return None
    num_chains = posterior.meta["refine"]["chains"]
    if num_draws is not None:
        posterior = posterior.thin(num_draws)
    if "tuned" in fit.posterior.meta:
        tuned = dict(fit.posterior.meta["tuned"])
        factors = tuned["prior_precision_factor"]
        tuned["prior_precision_factor"] = {
            name: factor * before for name, before in factors.items()
        }
        posterior = replace(posterior, meta=posterior.meta | {"tuned": tuned})
    words = f"{num_chains} short chains from its draws arrived at the posterior"
    if factor != 1.0:
        words += f", of a prior {factor**-0.5:.2g} times as wide, by the evidence of the net itself"
    return replace(fit, posterior=posterior).because(words)


def _of_best_width(posterior: Posterior, seed: int) -> tuple[BNN, float]:
    """The fit's net under the prior width of the largest evidence, and the factor on its precision, a power of two.

    The evidence is that of the net itself; the fit's width suits its linear part at one mode, where the net may be too
    wiggly.
    """
    best = posterior.bnn
    best_factor = 1.0
    start = log_evidence(posterior, best, _WORK, seed)
    if start is None:
        return best, best_factor
    for ratio in (2.0, 0.5):
        evidence = start
        for step in range(1, _MOST_STEPS + 1):
            factor = ratio**step
            model = tuned_model(posterior.bnn, posterior.bnn.priors, {"all": factor})
            next_evidence = log_evidence(posterior, model, _WORK, seed)
            if next_evidence is None or next_evidence <= evidence:
                break
            evidence, best, best_factor = next_evidence, model, factor
        if best_factor != 1.0:
            break
    return best, best_factor


def _with_inferred_noise(model: BNN, declared: BNN) -> BNN:
    """The model with the noise that another declares."""
    inferred = copy.copy(model)
    inferred.likelihood = declared.likelihood
    inferred.priors = model.priors | declared.likelihood.own.priors
    return inferred
