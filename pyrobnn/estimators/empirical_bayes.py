"""Noise and prior width by the evidence, with a new search for each mode; and which models they are found so for.

Reference: A Practical Bayesian Framework for Backpropagation Networks (MacKay, 1992).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import torch
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn

from pyrobnn.core.findings import warn
from pyrobnn.estimators.climb import Climb, climb, log_prior, squared_ratio, with_known_noise
from pyrobnn.estimators.comparison import quiet
from pyrobnn.estimators.fits import RunOptions, at_weights, subset
from pyrobnn.estimators.left_out import at_rows, in_standard_units, leverage
from pyrobnn.estimators.prior_widths import select_prior_width
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.method import Method
from pyrobnn.model import BNN
from pyrobnn.model.likelihoods.catalogue import HomoskedasticGaussian, StudentT
from pyrobnn.posterior import Posterior

#: the noise that a search begins with, as a share of a linear model's; the precision of the prior is its fourth power
#: times the declared one: under a narrow prior a wave's mode is a constant
SHARES = (1.0, 0.5)
by_evidence = attrgetter("evidence")


def empirical_bayes(
    method: Method, model: BNN, x: Tensor, y: Tensor
) -> Callable[..., tuple[Posterior, str]] | None:
    """How noise or widths are better found than together with the weights; None where they are not.

    Noise maximised with the weights comes out right from ten rows per weight on (at 2, 4 and 8, 90 % intervals held 73,
    82 and 88 %), unless a line leaves nothing: then it goes to zero.

    Returns: a function (method, model, x, y, options) → (posterior, words), or None.
    """
    likelihood = model.likelihood
    if not isinstance(method, Laplace):
        return None
    if likelihood.targets.kind == "label":
        return select_prior_width if method.is_tuned else None
    if type(likelihood) not in (HomoskedasticGaussian, StudentT):
        return None
    if likelihood.own.kinds["scale"] == "fixed":
        return None
    if len(x) < 10 * model.num_weights:
        return fit_by_evidence
    scale, least_noise = linear_residual_scale(model, *subset(x, y))
    return fit_by_evidence if torch.le(scale, least_noise).any() else None


def fit_by_evidence(
    method: Laplace,
    model: BNN,
    x: Tensor,
    y: Tensor,
    options: RunOptions,
) -> tuple[Posterior, str]:
    """The fit whose noise and prior have the largest evidence, and that noise in words.

    Weights and noise that are maximised together fit the noise where rows are few. Where a Gram matrix takes at most
    2^27 operations, two nets climb the evidence; with more rows each fit has known noise. Both begin with a Bayesian
    linear regression's, and with half of it under a prior four times as wide, of several targets also with half of the
    largest for all. They go on with the noise that residuals ask for, and with the tuned prior, as the evidence rises.
    """
    rows = subset(x, y)
    linear_noise, least_noise = linear_residual_scale(model, *rows)
    search = _NoiseSearch(method, model, rows, options, linear_noise, least_noise)
    with quiet():
        best, num_tried = search.best()
    posterior = best.posterior
    ratios = ", ".join(f"{ratio:.2g}" for ratio in best.scale / linear_noise)
    words = f"noise {ratios} times a linear model's, the best of {num_tried} by the evidence"
    if len(rows[0]) == len(x):
        warn(posterior.meta["warnings"])
        return posterior, words
    posterior = replace(method, tune=None).fit(posterior.bnn, x, y, **options)
    return posterior, f"{words}, of {len(rows[0]):,} of {len(x):,} rows"


class _Start(NamedTuple):
    """Noise (out,), and the factor on the precision of a prior that is tuned, with which a search begins."""

    scale: Tensor
    factor: float


class Attempt(NamedTuple):
    """A fit with known noise: its log evidence, that noise (out,), and the factor on the declared prior's precision."""

    evidence: float
    scale: Tensor
    factor: float
    posterior: Posterior


@dataclass(frozen=True, eq=False)
class _NoiseSearch:
    """Fits of the same rows, each with known noise.

    ``linear_noise`` is that of a linear model and ``least_noise`` the least to resolve, both (out,).
    """

    method: Laplace
    model: BNN
    rows: tuple[Tensor, Tensor]
    options: RunOptions
    linear_noise: Tensor
    least_noise: Tensor

    def best(self) -> tuple[Attempt, int]:
        """The fit of the largest evidence, and of how many."""
        climbs = self.climbs() if _can_climb(self.model, self.rows[1].numel()) else []
        if climbs:
            top = max(climbs, key=by_evidence)
            net = at_weights(self.model, top.weights).net
            return self.attempt(top.scale, top.factor, net), len(climbs)
        fits = self.fits()
        return max(fits, key=by_evidence), len(fits)

    def climbs(self) -> list[Climb]:
        """Climbs of two nets, those that ended somewhere: of the second net from the better start of the first."""
        starts = self._starts()
        ends = [self._climb(self.model, start) for start in starts]
        better_start = starts[ends.index(max(ends, key=by_evidence))]
        ends.append(self._climb(self.model.reinitialized(1), better_start))
        return [end for end in ends if end.evidence > -math.inf]

    def _climb(self, net: BNN, start: _Start) -> Climb:
        return climb(
            net, *self.rows, start.scale, self.least_noise, start.factor, self.method.is_tuned
        )

    def _starts(self) -> list[_Start]:
        """Where a search begins.

        Of several targets also with the same noise for all, half of the largest: where a line nearly explains one, its
        small noise holds all hidden units where they are linear.
        """
        factors = [share**4 if self.method.is_tuned else 1.0 for share in SHARES]
        starts = [
            _Start(share * self.linear_noise, factor) for share, factor in zip(SHARES, factors)
        ]
        if len(self.linear_noise) > 1:
            same_noise = self.linear_noise.max().expand_as(self.linear_noise)
            starts.append(_Start(SHARES[-1] * same_noise, factors[-1]))
        return starts

    def fits(self) -> list[Attempt]:
        """At most twelve fits: from each start, and then from the best so far for as long as a turn gains a nat.

        A turn is a fit with the noise that the residuals of the best ask for, and one with the prior tuned for it.
        """
        tries = [self.attempt(*start) for start in self._starts()]
        gained = math.inf
        while gained >= 1 and len(tries) < 12:
            best = max(tries, key=by_evidence)
            # the square of what they ask for: small steps end early
            ratio = _residual_ratio(best.posterior, *self.rows) ** 2
            tries.append(self.attempt(best.scale * ratio, best.factor))
            if self.method.is_tuned:
                better = max(tries, key=by_evidence)
                tuned = better.posterior.meta["tuned"]["prior_precision_factor"]["all"]
                tries.append(self.attempt(better.scale, tuned))
            gained = max(tries, key=by_evidence).evidence - best.evidence
        return tries

    def attempt(
        self,
        scale: Tensor,
        factor: float,
        init: nn.Module | None = None,
    ) -> Attempt:
        """The fit with that noise, and with that factor on the precision of the declared prior."""
        scale = torch.maximum(scale, self.least_noise)
        known = with_known_noise(self.model, scale, factor)
        posterior = self.method.fit(known, *self.rows, **self.options, init=init)
        if self.method.is_tuned:
            # of the declared prior's
            posterior.meta["tuned"]["prior_precision_factor"]["all"] *= factor
        evidence = -math.inf if posterior.log_evidence is None else posterior.log_evidence
        return Attempt(evidence + log_prior(self.model, scale), scale, factor, posterior)


def _can_climb(model: BNN, num_targets: int) -> bool:
    """Whether a Gram matrix and its factor take at most 2^27 operations, and every weight has a prior."""
    owners = [module for module in model.net.modules() if [*module.parameters(recurse=False)]]
    layers = [module for module in owners if type(module) is nn.Linear]
    size = model.num_weights
    if num_targets > size:
        operations = num_targets * size**2
    elif len(layers) == len(owners):
        # the Gram matrix of a layer is a product of two
        sides = sum(layer.in_features + layer.out_features for layer in layers)
        operations = num_targets**2 * (sides + num_targets // 3)
    else:
        operations = num_targets**2 * size
    return operations <= 2**27 and model.initial_values().keys() <= model.priors.keys()


def _residual_ratio(posterior: Posterior, x: Tensor, y: Tensor) -> Tensor:
    """The factor on the noise of each output (out,) that its residuals ask for."""
    fit = at_rows(posterior, x, y)
    used = leverage(fit.cov, fit.root).sum(0)
    squared = squared_ratio(fit.likelihood, fit.targets, fit.f, fit.params, used)
    return squared.clamp_min(1e-8).sqrt().cpu()


def linear_residual_scale(model: BNN, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Noise (out,) of a Bayesian linear regression of each target, in the model's units, and the least to resolve."""
    x, y = in_standard_units(model, x, y)
    regression = BayesianRidge(alpha_2=1e-12)  # the default prior of the noise hides an exact line
    inputs = x.flatten(1).numpy()
    scales = [regression.fit(inputs, column.numpy()).alpha_ ** -0.5 for column in y.T]
    least_noise = _least_noise(y)
    return torch.maximum(torch.tensor(scales, dtype=y.dtype), least_noise), least_noise


def _least_noise(y: Tensor) -> Tensor:
    """The least noise (out,) to resolve: a ten-thousandth of the targets' standard deviation."""
    return 1e-4 * y.std(0).clamp_min(1e-12)


def is_exact(posterior: Posterior, x: Tensor, y: Tensor) -> bool:
    """Whether a model passes through every target: its known noise is the least to resolve.

    Were that noise inferred its posterior would reach down to zero, where no sampler arrives.
    """
    scale = posterior.bnn.likelihood.own.fixed.get("scale")
    if scale is None:
        return False
    _, targets = in_standard_units(posterior.bnn, x, y)
    return bool((scale.cpu() <= 1.001 * _least_noise(targets)).all())
