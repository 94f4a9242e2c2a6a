"""The width of a classifier's prior, by the evidence and by rows left out, with a new mode for each width."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from torch import Tensor

from pyrobnn.estimators.comparison import quiet
from pyrobnn.estimators.fits import RunOptions, at_weights, subset
from pyrobnn.estimators.left_out import left_out_labels
from pyrobnn.inference.curvature.gaussian import BlockGaussian
from pyrobnn.inference.curvature.precision import tuned_model
from pyrobnn.inference.laplace import Laplace
from pyrobnn.model import BNN, NET
from pyrobnn.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Width:
    """What a factor on the prior's precision gives: log evidence, and log densities of left-out rows (N,)."""

    evidence: float
    left_out: np.ndarray
    factor: float
    posterior: Posterior


def select_prior_width(
    method: Laplace,
    model: BNN,
    x: Tensor,
    y: Tensor,
    options: RunOptions,
) -> tuple[Posterior, str]:
    """The fit with the prior width that evidence and left-out labels prefer; and that width in words.

    Each width has its own mode: one tuned at the declared prior's mode leaves the mean where it was, underconfident
    where the classes separate, and following the labels where they do not. Of the evidence's best and the left-out
    labels' best the narrower is taken: with wide priors a net has learned its labels, and its features know the
    left-out row, too.

    A small linear model has the Gaussian nearest to its posterior. A net does not: where it has learned its labels its
    linearisation is overconfident, and the curvature at the mode makes up for that.
    """
    layers = [name.rpartition(".")[0] for name in model.priors if name.startswith(NET)]
    layers = list(dict.fromkeys(layers))
    rows = subset(x, y)
    one_draw = RunOptions(**options)
    one_draw["num_draws"] = 1
    search = _WidthSearch(model, rows, one_draw, _of_known_width(method, model, len(layers)))
    with quiet():
        search.try_factors()
    best = search.best()
    final = tuned_model(_at_mode(model, best.posterior), model.priors, {"all": best.factor})
    subset_words = ""
    start = None
    if len(rows[0]) == len(x):
        start = final.net  # the mode, as it is
    else:
        subset_words = f", of {len(rows[0]):,} of {len(x):,} rows"
    posterior = search.untuned.fit(final, x, y, init=start, **options)
    factors = dict.fromkeys(layers, best.factor)
    meta = posterior.meta | {"tuned": {"prior_precision_factor": factors, "noise_factor": 1.0}}
    words = (
        f"its prior's scale times {best.factor**-0.5:.2g}, the best of {len(search.tries)} for the evidence and "
        f"left-out rows{subset_words}"
    )
    if best.factor >= 81:
        words += (
            ": the inputs say so little about the target that its prediction is nearly constant"
        )
    return replace(posterior, meta=meta), words


def _of_known_width(method: Laplace, model: BNN, num_layers: int) -> Laplace:
    """The method of each fit with a given width: of a small linear model the Gaussian nearest to its posterior."""
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


@dataclass(frozen=True, eq=False)
class _WidthSearch:
    """Fits of the same rows, by an ``untuned`` method, with factors on the prior's precision."""

    model: BNN
    rows: tuple[Tensor, Tensor]
    options: RunOptions
    untuned: Laplace
    tries: list[Width] = field(default_factory=list)

    def try_factors(self) -> None:
        """Wider and wider priors, then narrower ones, each until the best was not among the last two."""
        for power in range(7):
            self.attempt(3.0**-power)
            if self.best() not in self.tries[-2:]:
                break
        width = self.tries[0]
        for power in range(1, 7):
            # at a narrow prior's mode a net may be constant: each begins at the mode of the one before
            width = self.attempt(3.0**power, width)
            if self.best() not in self.tries[-2:]:
                break

    def best(self) -> Width:
        """Of the fits that evidence and left-out labels prefer the one of the narrower prior."""
        by_evidence = max(self.tries, key=lambda width: width.evidence)
        by_labels = max(self.tries, key=lambda width: width.left_out.mean())
        return max(by_evidence, by_labels, key=lambda width: width.factor)

    def attempt(self, factor: float, start: Width | None = None) -> Width:
        """The fit with this factor, from the mode of another fit if one is given."""
        method = self.untuned
        around = self.model
        if start is not None:
            # on all of the data L-BFGS follows a mode to another prior, and stays in the valley where it starts
            search = method.search
            steps = 1 if search.batch_size is None else max(1, search.num_steps // 10)
            method = replace(method, map=replace(search, num_steps=steps))
            around = _at_mode(self.model, start.posterior)
        posterior = method.fit(
            tuned_model(around, self.model.priors, {"all": factor}),
            *self.rows,
            **self.options,
        )
        evidence = cast(float, posterior.log_evidence)
        width = Width(evidence, left_out_labels(posterior, *self.rows), factor, posterior)
        self.tries.append(width)
        return width


def _at_mode(model: BNN, posterior: Posterior) -> BNN:
    """The model with its net where the posterior's mode is, so that a search starts there."""
    approximation = cast(BlockGaussian, posterior.approximation)
    # of weights without a prior
    weights = {name: value[0, 0] for name, value in posterior.draws.items()}
    return at_weights(model, weights | approximation.layout.constrain(approximation.centre))
