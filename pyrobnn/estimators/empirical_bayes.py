"""Noise and prior widths by the evidence, of classifiers by left-out rows too, with a new search for each mode.

Reference: A Practical Bayesian Framework for Backpropagation Networks (MacKay, 1992).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple, cast

import numpy as np
import torch
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn

from pyrobnn.core.findings import warn
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.estimators.climb import Climb, climb, log_prior, squared_ratio, with_known_noise
from pyrobnn.estimators.comparison import gain, quiet
from pyrobnn.estimators.fits import RunOptions
from pyrobnn.estimators.left_out import at_rows, in_standard_units, left_out_labels, leverage
from pyrobnn.inference.curvature.gaussian import BlockGaussian
from pyrobnn.inference.curvature.precision import tuned_model
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.method import Method
from pyrobnn.model import BNN, NET
from pyrobnn.model.likelihoods.catalogue import HomoskedasticGaussian, StudentT
from pyrobnn.posterior import Posterior

#: rows that widths and noise are found of, evenly spaced: several fits of so many take minutes
MAX_TRIED_ROWS = 20_000


class Attempt(NamedTuple):
    """A fit with known noise: its log evidence, that noise (out,), and the factor on the declared prior's precision."""

    evidence: float
    scale: Tensor
    factor: float
    posterior: Posterior

    @property
    def tuned_factor(self) -> float:
        """The factor that the fit asks for, of a prior whose width is tuned."""
        return cast(float, self.posterior.meta["tuned"]["prior_precision_factor"]["all"])


class Width(NamedTuple):
    """What a factor on the precision of each layer's prior gives: log evidence, log densities of left-out rows (N,)."""

    evidence: float
    left_out: np.ndarray
    factors: dict[str, float]
    posterior: Posterior


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


def subset(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """At most MAX_TRIED_ROWS of them, evenly spaced."""
    count = min(len(x), MAX_TRIED_ROWS)
    keep = evenly_spaced(len(x), count, torch.float64)
    return x[keep], y[keep]


# -- noise by the evidence --------------------------------------------------------------------------------------------

#: the noise that a search begins with, as a share of a linear model's; the precision of the prior is its fourth power
#: times the declared one: under a narrow prior a wave's mode is a constant
SHARES = (1.0, 0.5)
by_evidence = attrgetter("evidence")


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
    linear regression's, and with half of it under a prior four times as wide, and go on with the noise that residuals
    ask for, and in turn with the tuned prior, as the evidence rises.
    """
    rows = subset(x, y)
    linear_noise, least_noise = linear_residual_scale(model, *rows)
    search = _NoiseSearch(method, model, rows, options, linear_noise, least_noise)
    with quiet():
        climbs = search.climbs() if _can_climb(model, y.numel()) else []
        if climbs:
            top = max(climbs, key=by_evidence)
            best = search.attempt(top.scale, top.factor, _moved(model, top.weights).net)
            num_tried = len(climbs)
        else:
            tries = search.fits()
            best = max(tries, key=by_evidence)
            num_tried = len(tries)
    posterior = best.posterior
    subset_words = ""
    if len(rows[0]) < len(x):
        subset_words = f", of {len(rows[0]):,} of {len(x):,} rows"
        posterior = replace(method, tune=None).fit(
            posterior.bnn,
            x,
            y,
            **options,
        )
    else:
        warn(posterior.meta["warnings"])
    ratios = ", ".join(f"{ratio:.2g}" for ratio in best.scale / linear_noise)
    words = f"noise {ratios} times a linear model's, the best of {num_tried} by the evidence"
    return posterior, words + subset_words


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

    def climbs(self) -> list[Climb]:
        """Climbs of two nets, those that ended somewhere: of the second net from the better start of the first."""
        ends = [self._climb(self.model, share) for share in SHARES]
        better_share = SHARES[0] if ends[0].evidence >= ends[1].evidence else SHARES[1]
        ends.append(self._climb(self.model.reinitialized(1), better_share))
        return [end for end in ends if end.evidence > -math.inf]

    def _climb(self, net: BNN, share: float) -> Climb:
        scale = share * self.linear_noise
        return climb(net, *self.rows, scale, self.least_noise, share**4, self.method.is_tuned)

    def fits(self) -> list[Attempt]:
        """At most twelve fits: from each start, then from the best so far with the noise that its residuals ask for.

        By stages, of which one that gains under a nat ends: the noise by the squared ratio that the residuals ask for,
        as small steps end early; by the ratio; and with the tuned prior too, whose gain reopens the last two.
        """
        shares = SHARES if self.method.is_tuned else SHARES[:1]
        tries = [self.attempt(share * self.linear_noise, share**4) for share in shares]
        stages = ["squared ratio", "ratio"]
        if self.method.is_tuned:
            stages.append("prior")
        while stages and len(tries) < 12:
            best = max(tries, key=by_evidence)
            stage = stages[0]
            factor = best.tuned_factor if stage == "prior" else best.factor
            power = 2 if stage == "squared ratio" else 1
            ratio = _residual_ratio(best.posterior, *self.rows)
            tries.append(self.attempt(best.scale * ratio**power, factor))
            if tries[-1].evidence < best.evidence + 1:
                del stages[0]
            elif stage == "prior":
                stages = ["ratio", "prior"]
        return tries

    def attempt(
        self,
        scale: Tensor,
        factor: float,
        init: nn.Module | None = None,
    ) -> Attempt:
        """The fit with that noise, and with that factor on the precision of the declared prior."""
        scale = torch.maximum(scale, self.least_noise)
        tune = self.method.is_tuned
        known = with_known_noise(self.model, scale, factor if tune else None)
        posterior = self.method.fit(
            known,
            *self.rows,
            **self.options,
            init=init,
        )
        if tune:
            # of the declared prior's
            posterior.meta["tuned"]["prior_precision_factor"]["all"] *= factor
        evidence = -math.inf if posterior.log_evidence is None else posterior.log_evidence
        return Attempt(evidence + log_prior(self.model, scale), scale, factor, posterior)


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
    least_noise = 1e-4 * y.std(0).clamp_min(1e-12)
    return torch.maximum(torch.tensor(scales, dtype=y.dtype), least_noise), least_noise


# -- prior widths -----------------------------------------------------------------------------------------------------


def select_prior_width(
    method: Laplace,
    model: BNN,
    x: Tensor,
    y: Tensor,
    options: RunOptions,
) -> tuple[Posterior, str]:
    """The fit with the prior widths, one per layer, that evidence and left-out labels prefer; and these in words.

    Each width has its own mode: widths tuned at the declared prior's mode leave the mean where it was, underconfident
    where the classes separate, and following the labels where they do not. One width for all layers is tried first,
    wider and then narrower; of the evidence's best and the left-out labels' best the narrower is taken: with wide
    priors a net has learned its labels, and its features know the left-out row, too. Then each layer's width is updated
    as suits the last mode, as long as both criteria improve.

    A small linear model has the Gaussian nearest to its posterior. A net does not: where it has learned its labels its
    linearisation is overconfident, and the curvature at the mode makes up for that.
    """
    layers = [name.rpartition(".")[0] for name in model.priors if name.startswith(NET)]
    layers = list(dict.fromkeys(layers))
    untuned = _of_known_widths(method, model, len(layers))
    rows = subset(x, y)
    one_draw = RunOptions(**options)
    one_draw["num_draws"] = 1
    widths = _WidthSearch(model, rows, one_draw, layers, untuned)
    with quiet():
        widths.try_common_factors()
        best = widths.tune_layers(widths.narrower())
    final = widths.at_mode_of(best)
    subset_words = ""
    start = None
    if len(rows[0]) == len(x):
        start = final.net  # the mode, as it is
    else:
        subset_words = f", of {len(rows[0]):,} of {len(x):,} rows"
    posterior = untuned.fit(final, x, y, init=start, **options)
    meta = posterior.meta | {"tuned": {"prior_precision_factor": best.factors, "noise_factor": 1.0}}
    words = _words_of_widths(best.factors, len(widths.tries), subset_words)
    return replace(posterior, meta=meta), words


def _of_known_widths(method: Laplace, model: BNN, num_layers: int) -> Laplace:
    """The method of each fit with given widths: of a small linear model the Gaussian nearest to its posterior."""
    # of more weights the nearest Gaussian takes minutes
    is_small = num_layers == 1 and model.num_weights <= 1000
    has_own = bool(model.likelihood.own.kinds)
    nearest = is_small and method.structure in ("auto", "full") and not has_own
    search = method.search
    if search.batch_size is None:
        # L-BFGS on all of the data finishes it
        search = replace(search, num_steps=max(1, search.num_steps // 10))
    return replace(
        method,
        tune=None,
        curvature="variational" if nearest else "ggn",
        map=search,
    )


def _words_of_widths(factors: Mapping[str, float], num: int, subset_words: str) -> str:
    """The factors on each layer's prior, the best of ``num``; and what very narrow priors say of the inputs."""
    widths = ", ".join(f"{factor**-0.5:.2g} ({name})" for name, factor in factors.items())
    words = f"its prior's scales times {widths}, the best of {num} for the evidence and left-out rows{subset_words}"
    if min(factors.values()) >= 81:
        words += (
            ": the inputs say so little about the target that its prediction is nearly constant"
        )
    return words


@dataclass(frozen=True, eq=False)
class _WidthSearch:
    """Fits of the same rows, by an ``untuned`` method, with factors on the precision of each layer's prior."""

    model: BNN
    rows: tuple[Tensor, Tensor]
    options: RunOptions
    layers: Sequence[str]
    untuned: Laplace
    tries: list[Width] = field(default_factory=list)

    def at_mode_of(self, width: Width) -> BNN:
        """The model at the mode of a fit, with its prior."""
        return tuned_model(_at_mode(self.model, width.posterior), self.model.priors, width.factors)

    def attempt(self, factors: dict[str, float], start: Width | None = None) -> Width:
        """The fit with these factors, from the mode of another fit if one is given."""
        method = self.untuned
        around = self.model
        if start is not None:
            # on all of the data L-BFGS follows a mode to another prior, and stays in the valley where it starts
            search = method.search
            steps = 1 if search.batch_size is None else max(1, search.num_steps // 10)
            method = replace(method, map=replace(search, num_steps=steps))
            around = _at_mode(self.model, start.posterior)
        posterior = method.fit(
            tuned_model(around, self.model.priors, factors),
            *self.rows,
            **self.options,
        )
        evidence = cast(float, posterior.log_evidence)
        width = Width(evidence, left_out_labels(posterior, *self.rows), factors, posterior)
        self.tries.append(width)
        return width

    def narrower(self) -> Width:
        """Of the fits that evidence and left-out labels prefer the one of the narrower prior."""
        preferred = (
            max(self.tries, key=by_evidence),
            max(self.tries, key=lambda width: width.left_out.mean()),
        )
        return max(preferred, key=lambda width: width.factors[self.layers[0]])

    def try_common_factors(self) -> None:
        """Factors that all layers share: from one on wider priors, then narrower ones."""
        for ladder in ([3.0**-k for k in range(7)], [3.0**k for k in range(1, 7)]):
            # at a narrow prior's mode a net may be constant
            before = self.tries[0] if self.tries else None
            for factor in ladder:
                width = self.attempt(dict.fromkeys(self.layers, factor), before)
                if before is not None:
                    before = width
                best = self.narrower()
                if not any(best is recent for recent in self.tries[-2:]):
                    break

    def tune_layers(self, best: Width) -> Width:
        """The last of at most six updates of each layer's factor that improve both criteria."""
        tuning = replace(
            self.untuned,
            curvature="ggn",
            tune="per_layer",
        )
        for _ in range(6):
            model = self.at_mode_of(best)
            fit = tuning.fit(
                model,
                *self.rows,
                init=model.net,
                **self.options,
            )
            suited = fit.meta["tuned"]["prior_precision_factor"]
            factors = {
                name: best.factors[name] * suited.get(name, suited.get("all"))
                for name in self.layers
            }
            width = self.attempt(factors, best)
            gained = gain(width.left_out, best.left_out)[0]
            if width.evidence < best.evidence + 0.5 or not gained:  # nats
                break
            best = width
        return best


def _at_mode(model: BNN, posterior: Posterior) -> BNN:
    """The model with its net where the posterior's mode is, so that a search starts there."""
    approximation = cast(BlockGaussian, posterior.approximation)
    # of weights without a prior
    weights = {name: value[0, 0] for name, value in posterior.draws.items()}
    return _moved(model, weights | approximation.layout.constrain(approximation.centre))


def _moved(model: BNN, values: Mapping[str, Tensor]) -> BNN:
    """The model with its net at these weights, by site."""
    moved = copy.copy(model)
    moved.net = copy.deepcopy(model.net)
    weights = {
        name.removeprefix(NET): value for name, value in values.items() if name.startswith(NET)
    }
    moved.net.load_state_dict(weights, strict=False)  # which has buffers too
    return moved
