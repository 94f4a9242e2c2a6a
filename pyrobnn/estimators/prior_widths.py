"""Prior widths of a classifier's layers, by the evidence and by rows left out, with a new mode for each width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
from torch import Tensor

from pyrobnn.estimators.comparison import gain, quiet
from pyrobnn.estimators.fits import RunOptions, at_weights, subset
from pyrobnn.estimators.left_out import left_out_labels
from pyrobnn.inference.curvature.gaussian import BlockGaussian
from pyrobnn.inference.curvature.precision import tuned_model
from pyrobnn.inference.laplace import Laplace
from pyrobnn.model import BNN, NET
from pyrobnn.posterior import Posterior


class Width(NamedTuple):
    """What a factor on the precision of each layer's prior gives: log evidence, log densities of left-out rows (N,)."""

    evidence: float
    left_out: np.ndarray
    factors: dict[str, float]
    posterior: Posterior


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
            max(self.tries, key=lambda width: width.evidence),
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
    return at_weights(model, weights | approximation.layout.constrain(approximation.centre))
