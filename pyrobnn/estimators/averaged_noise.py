"""Noise that a net gives, found with the uncertainty of the mean and of the noise averaged out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.seeding import generator
from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.point_methods import MAP
from pyrobnn.likelihoods import HeteroskedasticGaussian
from pyrobnn.likelihoods.base import Sampled, Targets
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.wording.findings import Finding, as_json


class Averaged(HeteroskedasticGaussian):
    r"""The mean under a noise that is held, and the noise under squared errors that are held.

    .. math:: -\frac{(y - f)^2}{2 s^2} - \log\sigma - \frac{q}{2 \sigma^2} - \tfrac12 \log 2\pi

    y is (N, 3·out): the targets, s and q. With :math:`s = \sigma` and :math:`q = ((y - f)^2 + v) e^{2w}` of the round
    before, v the variance of the mean and w that of :math:`\log\sigma`, it is the Gaussian log density averaged over
    both: residuals of a mean that follows the data are not taken for the noise.
    """

    targets = Targets(heads=2, linear_mean=True)

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return y.to(dtype)

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return Sampled(self, f, params, 3 * (f.shape[-1] // 2))

    def log_prob(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        y, held, square = y.chunk(3, -1)
        loc, scale = self.loc_scale(f, params)
        misfit = ((y - loc) / held).square() + square / scale.square()
        return -(scale.log() + 0.5 * misfit + 0.5 * math.log(2 * math.pi)).sum(-1)


def fit_noise_em(
    method: Laplace, model: BNN, x: Tensor, y: Tensor, start: Tensor, options: dict[str, Any]
) -> tuple[Posterior, str]:
    """The fit whose mode is that of the log density averaged over the Gaussian around it, and how it came about.

    Weights of the mean and of the noise that are maximised together fit the noise where there are few rows per weight.
    Here a search for the mode and Laplace's approximation around it take turns: each search knows how uncertain the
    Gaussian before it left the mean and the noise of each row, and has the prior's width that suited it, where this is
    tuned. The first starts with the noise that a linear model leaves, so that it goes down from there.

    A net that finds features for its residuals, round after round, uses up more of the data than its curvature says. So
    the last mode is sought from the start again, with the noise and the width that were found, and fits that are made
    in the same way without a fifth of the rows tell by how much the noise must be raised to be that of new ones.

    Args:
        method: Laplace, linearised, and tuned where the priors are normal.
        model: with a :class:`pyrobnn.likelihoods.HeteroskedasticGaussian`.
        x, y: (N, feature) and (N, out), in the units of the data.
        start: standard deviation (out,) of what a linear model leaves, in the units in which the net computes.
        options: of ``method.fit``.

    Reference: Bayesian Interpolation (MacKay, 1992), whose noise is the residuals' over N − γ: the fixed point of these
    rounds where the model is linear; Variational Heteroscedastic Gaussian Process Regression (Lázaro-Gredilla &
    Titsias, 2011).
    """
    units, likelihood = model.standardizer, cast(HeteroskedasticGaussian, model.likelihood)
    inside = (x, y) if units is None else (units.transform_x(x), units.transform_y(y))
    rounds = BNN(model.net, model.prior, Averaged(likelihood.min_scale))
    common = {name: value for name, value in options.items() if name != "num_draws"}
    # each round goes on from the one before
    search = replace(method.search, num_steps=max(1, method.search.num_steps // 5))
    held = torch.cat([start.expand_as(y), start.square().expand_as(y)], 1)
    mode, factor, log_scale, moved, rounds_made = None, 1.0, start.log().expand_as(y), math.inf, 0
    # until log σ moves by less than .05 on average
    while rounds_made < 3 or (moved >= 0.05 and rounds_made < 8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what holds of the last fit follows below
            data = inside[0], torch.cat([inside[1], held], 1)
            mode = search.fit(rounds, *data, init=mode, **common)
            found = method.fit(rounds, *data, init=mode, num_draws=1, **common)
        rounds, rounds_made = found.bnn, rounds_made + 1
        if method.tune is not None:
            factor *= found.meta["tuned"]["prior_precision_factor"]["all"]
        before = log_scale
        log_scale, held = _averaged(found, *inside)
        moved = float((log_scale - before).abs().mean())
    fresh = BNN(model.net, model.prior, rounds.likelihood)
    final = BNN(model.net, model.prior, likelihood, standardizer=units)
    fresh.priors = final.priors = rounds.priors
    with warnings.catch_warnings():
        # the mode is that of the averaged density: what a fit finds wrong with it as a mode of the other says nothing
        warnings.simplefilter("ignore", UserWarning)
        wider = _too_small(search, replace(method, tune=None), fresh, inside, held, common)
        held = held * torch.cat([wider, wider.square()])
        mode = search.fit(fresh, inside[0], torch.cat([inside[1], held], 1), **common)
        posterior = method.fit(final, x, y, init=mode, **options)
    raised = float(wider.max())
    notes = [Finding("noise_still_moving", {"moved": moved, "rounds": rounds_made})] if moved >= 0.05 else []
    notes += [Finding("noise_raised", {"factor": raised})] if raised > 1.5 else []
    for note in notes:
        warnings.warn(str(note), UserWarning, stacklevel=4)
    if method.tune is not None:
        posterior.meta["tuned"]["prior_precision_factor"]["all"] *= factor
    meta = posterior.meta | {"warnings": [str(note) for note in notes], "findings": as_json(notes)}
    return (
        replace(posterior, meta=meta),
        f"mean and noise found in {rounds_made} rounds, each with the other's uncertainty averaged out, and the "
        f"noise raised {raised:.2f} times, as rows left out ask for",
    )


def _too_small(
    search: MAP,
    around: Laplace,
    model: BNN,
    data: tuple[Tensor, Tensor],
    held: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Factors on σ (out,), one at least, under which rows that a fit has not seen have the largest density."""
    x, y = data
    order = torch.randperm(len(y), generator=generator(options["seed"]))
    size = max(1, len(y) // 5)
    found = []
    for part in range(min(5, -(-500 // size))):  # 500 rows tell a noise to 3 %
        out = order[part * size : (part + 1) * size]
        kept = torch.cat([order[: part * size], order[(part + 1) * size :]])
        known = x[kept], torch.cat([y, held], 1)[kept]
        mode = search.fit(model, *known, **options)
        fit = around.fit(model, *known, init=mode, num_draws=1, **options)
        found.append(_moments(fit, x[out], y[out]))
    square, var, scale, log_var = (torch.cat(each) for each in zip(*found))
    # the predictive is a mixture over the noise: of the same variance as a normal, it has shorter 90 % intervals
    nodes, weights = (torch.tensor(each).to(y) for each in np.polynomial.hermite_e.hermegauss(7))
    scales = scale * (log_var.sqrt() * nodes[:, None, None]).exp()
    log_weights = (weights / weights.sum()).log()[:, None, None]
    factors = torch.logspace(0, 1, 100).to(y)

    def density(factor: Tensor) -> Tensor:
        total = (factor * scales).square() + var
        return (log_weights - 0.5 * (square / total + total.log())).logsumexp(0).mean(0)

    return factors[torch.stack([density(factor) for factor in factors]).argmax(0)]


def _averaged(posterior: Posterior, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """log σ (N, out), and what :class:`Averaged` takes beside the targets, (N, 2·out)."""
    square, var, scale, log_var = _moments(posterior, x, y)
    raised = (square + var) * (2 * log_var).clamp_max(2.0).exp()
    return scale.log(), torch.cat([scale, raised], 1)


def _moments(posterior: Posterior, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Squared residuals, the variance of the mean, σ and the variance of its logarithm, each (N, out)."""
    device = posterior.bnn.device
    # as the method that is chosen makes it
    f, cov = (part.to(y) for part in cast(Linearized, posterior.network).output_moments(x.to(device)))
    loc, scale = posterior.bnn.likelihood.loc_scale(f, {})
    var, raw_var = cov.diagonal(dim1=1, dim2=2).chunk(2, -1)
    log_var = raw_var * (f.chunk(2, -1)[1].sigmoid() / scale).square()
    return (y - loc).square(), var, scale, log_var
