"""From a DataTree, which may lack any group but `posterior`, to the arrays that figures and tables need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy import stats

from pyrobnn.diagnostics.reading import text, variable

FEWEST_DRAWS = 25
NUM_QUANTILES = 400

Trees = xr.DataTree | Mapping[str, xr.DataTree]


def as_trees(trees: Trees) -> dict[str, xr.DataTree]:
    """One tree or a mapping of them, as a dict from label to tree, in the caller's order.

    Raises:
        TypeError: if something else than a DataTree was given.
        ValueError: if the mapping is empty.
    """
    if isinstance(trees, xr.DataTree):
        attrs = trees.attrs
        return {str(attrs.get("label") or attrs.get("method") or "model"): trees}
    if not isinstance(trees, Mapping):
        raise TypeError(
            f"'trees' is a {type(trees).__name__}; expected a DataTree or a mapping of labels to DataTrees: "
            "call posterior.to_datatree(x=…, y=…) first."
        )
    if not trees:
        raise ValueError(
            "'trees' is empty; give at least one DataTree, e.g. {'nuts': posterior.to_datatree(…)}."
        )
    for label, tree in trees.items():
        if not isinstance(tree, xr.DataTree):
            raise TypeError(
                f"trees[{label!r}] is a {type(tree).__name__}; expected a DataTree: "
                "call posterior.to_datatree(x=…, y=…) first."
            )
    return {str(label): tree for label, tree in trees.items()}


def draws_first(values: xr.DataArray) -> np.ndarray:
    """Chains and draws merged into one leading axis: shape (sample, ...)."""
    other = [dim for dim in values.dims if dim not in ("chain", "draw")]
    ordered = values.transpose("chain", "draw", *other).values
    return ordered.reshape(ordered.shape[0] * ordered.shape[1], *ordered.shape[2:])


def is_classification(tree: xr.DataTree) -> bool:
    """Whether the tree predicts class probabilities."""
    return variable(tree, "predictions", "probs") is not None


@dataclass(frozen=True)
class Points:
    """Predictions at points with known outcomes, one output of a regression.

    Args:
        y, mean, aleatoric_sd, epistemic_sd: shape (point,), in original units.
        draws: predictive draws of y, shape (sample, point), or None.
        held_out: False where only the training data could be used.
    """

    y: np.ndarray
    mean: np.ndarray
    aleatoric_sd: np.ndarray | None
    epistemic_sd: np.ndarray | None
    total_sd: np.ndarray
    draws: np.ndarray | None
    held_out: bool

    @property
    def sample(self) -> np.ndarray | None:
        """Draws of y (sample, point); quantiles of its Gaussian for a point estimate, whose draws are too few."""
        if self.draws is not None and len(self.draws) >= FEWEST_DRAWS:
            return self.draws
        if self.aleatoric_sd is None:
            return self.draws
        return (
            self.mean
            + self.total_sd * stats.norm.ppf((np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES)[:, None]
        )

    @property
    def pit(self) -> np.ndarray | None:
        """Share of the predictive at or below the outcome, shape (point,); None without draws."""
        sample = self.sample
        return None if sample is None else (sample < self.y).mean(0) + 0.5 * (sample == self.y).mean(0)


def _column(values: xr.DataArray, output: int) -> np.ndarray:
    return (values.isel(output=output) if "output" in values.dims else values).values


def regression_points(tree: xr.DataTree, output: int = 0) -> Points | None:
    """Held-out predictions with outcomes; else the training data's posterior predictive; else None."""
    if is_classification(tree):
        return None
    y = variable(tree, "predictions_constant_data", "y")
    mean = variable(tree, "predictions", "mean")
    draws = variable(tree, "predictions", "y_sample")
    if draws is None:
        draws = variable(tree, "predictions", "y")
    if y is not None and mean is not None and mean.size:
        aleatoric = variable(tree, "predictions", "aleatoric_var")
        epistemic = variable(tree, "predictions", "epistemic_var")
        sds = [
            None if v is None else np.sqrt(np.maximum(_column(v, output), 0)) for v in (aleatoric, epistemic)
        ]
        samples = None
        if draws is not None:
            one = draws.isel(output=output) if "output" in draws.dims else draws
            samples = one.values if "sample" in one.dims else draws_first(one)
        if sds[0] is not None and sds[1] is not None:
            total = np.hypot(sds[0], sds[1])
        elif samples is not None:
            total = samples.std(0)
        else:
            return None
        return Points(
            _column(y, output), _column(mean, output), sds[0], sds[1], total, samples, held_out=True
        )
    outcome = outcome_draws(tree, output)
    if outcome is None:
        return None
    y, samples = outcome
    return Points(y, samples.mean(0), None, None, samples.std(0), samples, held_out=False)


def outcome_draws(tree: xr.DataTree, output: int = 0) -> tuple[np.ndarray, np.ndarray] | None:
    """Training outcomes (obs,) of a regression and posterior predictive draws (sample, obs), or None."""
    if is_classification(tree) or text(tree, "likelihood") in ("categorical", "bernoulli"):
        return None
    y, draws = variable(tree, "observed_data", "y"), variable(tree, "posterior_predictive", "y")
    if y is None or draws is None:
        y, draws = _single_outcome(tree)
    if y is None or draws is None:
        return None
    samples = draws_first(draws.isel(output=output) if "output" in draws.dims else draws)
    outcomes = _column(y, output)
    if samples.ndim != 2 or samples.size == 0 or outcomes.ndim != 1 or outcomes.dtype.kind not in "fiu":
        return None
    return outcomes, samples


def _single_outcome(tree: xr.DataTree) -> tuple[xr.DataArray | None, xr.DataArray | None]:
    """Trees of other libraries name the outcome as they like: take it if there is exactly one."""
    if "observed_data" not in tree.children or "posterior_predictive" not in tree.children:
        return None, None
    shared = [
        name for name in tree["observed_data"].data_vars if name in tree["posterior_predictive"].data_vars
    ]
    if len(shared) != 1:
        return None, None
    return tree["observed_data"][shared[0]], tree["posterior_predictive"][shared[0]]


@dataclass(frozen=True)
class ClassPoints:
    """Class probabilities at points with known labels.

    Args:
        y: labels, shape (point,). probs: shape (point, class).
        aleatoric, epistemic: entropies in nats, shape (point,), or None. x: inputs (point, feature) or None.
    """

    y: np.ndarray
    probs: np.ndarray
    aleatoric: np.ndarray | None
    epistemic: np.ndarray | None
    x: np.ndarray | None

    @property
    def correct(self) -> np.ndarray:
        """Whether the most probable class is the label, shape (point,)."""
        return self.probs.argmax(1) == self.y


def class_points(tree: xr.DataTree) -> ClassPoints | None:
    """Held-out class probabilities with labels, or None. One probability per point is read as P(y = 1)."""
    probs, y = variable(tree, "predictions", "probs"), variable(tree, "predictions_constant_data", "y")
    if probs is None or y is None or probs.size == 0:
        return None
    values = probs.values.reshape(len(probs), -1)
    if values.shape[1] == 1:
        values = np.concatenate([1 - values, values], axis=1)
    entropies = [variable(tree, "predictions", f"{kind}_entropy") for kind in ("aleatoric", "epistemic")]
    x = variable(tree, "predictions_constant_data", "x")
    return ClassPoints(
        y.values.reshape(-1).astype(int),
        values,
        *(None if e is None else e.values.reshape(-1) for e in entropies),
        None if x is None else x.values.reshape(len(values), -1),
    )


@dataclass(frozen=True)
class Gap:
    """The widest gap between neighbouring training inputs of a 1-D problem.

    Args:
        low, high: its ends. ratio: epistemic sd at its centre over the median at the training inputs; None
            when the method claims no epistemic uncertainty at all.
    """

    low: float
    high: float
    ratio: float | None


def widest_gap(tree: xr.DataTree, output: int = 0) -> Gap | None:
    """The gap that a Bayesian model should be unsure in, or None where the inputs leave none.

    A gap counts when it is at least 5 % of the input range and five times the mean spacing.
    """
    x, grid = variable(tree, "constant_data", "x"), variable(tree, "grid", "x")
    variance = variable(tree, "grid", "epistemic_var")
    if (
        x is None
        or grid is None
        or variance is None
        or x.size == 0
        or x.values.reshape(len(x), -1).shape[1] != 1
    ):
        return None
    inputs = np.sort(x.values.reshape(-1))
    spacing = np.diff(inputs)
    span = inputs[-1] - inputs[0]
    if len(spacing) < 3 or spacing.max() < max(0.05 * span, 5 * span / len(spacing)):
        return None
    left = int(spacing.argmax())
    low, high = float(inputs[left]), float(inputs[left + 1])
    sd = np.sqrt(np.maximum(_column(variance, output), 0))
    points = grid.values.reshape(-1)
    inside = np.median(np.interp(inputs, points, sd))
    ratio = float(np.interp(0.5 * (low + high), points, sd) / inside) if inside > 0 else None
    return Gap(low, high, ratio)
