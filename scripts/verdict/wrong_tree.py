"""Trees whose groups do not fit together: log-likelihoods, predictions and targets that were changed after the fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import xarray as xr
from verdict.exact_cases import HELD_OUT, Case

PREDICTED = {"f", "y", "mean", "y_sample"}


def remade(
    group: str, change: Callable[[Case, np.ndarray], np.ndarray], names: Iterable[str] = ("y",)
) -> Callable[[Case, xr.DataTree], None]:
    """Variables of a group of the tree, those of `names` that it has, as `change` makes them."""

    def spoil(case: Case, tree: xr.DataTree) -> None:
        for name in {*names} & {*tree[group].data_vars}:
            values = tree[group][name]
            tree[group][name] = values.copy(data=change(case, values.values))

    return spoil


def times(factor: float, constant: float = 0.0) -> Callable[[Case, xr.DataTree], None]:
    """The log-likelihood group alone, as of data that count more than once, are tempered or lack a constant."""
    return remade("log_likelihood", lambda _, values: factor * values + constant)


def widened(_: Case, values: np.ndarray) -> np.ndarray:
    """Outcomes twice as far from the mean of each row."""
    mean = values.mean(tuple(range(values.ndim - 1)), keepdims=True)
    return mean + 2.0 * (values - mean)


def throughout(factor: float) -> Callable[[Case, xr.DataTree], None]:
    """The log-likelihood wherever the tree holds it."""

    def spoil(case: Case, tree: xr.DataTree) -> None:
        times(factor)(case, tree)
        tree["function"]["log_likelihood"] = factor * tree["function"]["log_likelihood"]

    return spoil


def without_noise(case: Case, tree: xr.DataTree) -> None:
    """Replicates and predictions that are values of the mean."""
    f = tree["predictions"]["f"].values[..., 0]
    tree["predictions"]["y"] = tree["predictions"]["y"].copy(data=f)
    if "y_sample" in tree["predictions"]:
        sample = tree["predictions"]["y_sample"]
        count = -(-sample.shape[0] // (f.shape[0] * f.shape[1]))
        flat = np.repeat(
            f.reshape(-1, f.shape[2]),
            count,
            axis=0,
        )[: sample.shape[0]]
        tree["predictions"]["y_sample"] = sample.copy(data=flat.reshape(sample.shape))


def of_other_rows(case: Case, tree: xr.DataTree) -> None:
    """Predictions in another order than the held-out rows."""
    order = case.rng.permutation(HELD_OUT)
    for name in PREDICTED & set(tree["predictions"].data_vars):
        values = tree["predictions"][name]
        axis = next(i for i, dim in enumerate(values.dims) if values.sizes[dim] == HELD_OUT)
        tree["predictions"][name] = values.copy(data=np.take(values.values, order, axis))
