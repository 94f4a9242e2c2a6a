"""Baselines: the mean, and a linear model with its noise, scored on the same held-out rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import xarray as xr
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA, PREDICTIONS, REPLICATE
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.limits import NUM_QUANTILES
from pyrobnn.diagnostics.points import COUNTS, is_censored, same_data

MEAN = "predict the mean"
LINEAR = "linear model"
SHARES = "class shares"
LOGISTIC = "logistic regression"

_Arrays = dict[str, tuple[tuple[str, ...], np.ndarray]]


def baselines(trees: Iterable[Evidence]) -> dict[str, Evidence]:
    """Baselines of the first tree that holds training and held-out outcomes, as trees of predictions.

    Of a regression the training mean with the training sd, and least squares with its residual sd (the predictive
    variance includes that of the coefficients); of classes their shares, and scikit-learn's logistic regression (C = 1)
    on standardised inputs. They are fitted to the training rows alone. Of counts they have no log density, which is no
    mass. Empty where the trees are of different data, or rows are censored, which a normal would take for observed.
    """
    trees = list(trees)
    if not same_data(trees):
        return {}
    for evidence in trees:
        y = evidence.values(OBSERVED_DATA, "y")
        y_new = evidence.values(HELD_OUT, "y")
        if y is None or y_new is None or min(y.ndim, y_new.ndim) == 0:
            continue
        if len(y) >= 3 and len(y_new) > 0:
            return {} if is_censored(evidence) else _baselines_of(evidence, y, y_new)
    return {}


def _baselines_of(evidence: Evidence, y: np.ndarray, y_new: np.ndarray) -> dict[str, Evidence]:
    """The baselines of training outcomes y and held-out ones, by their names."""
    inputs = _inputs(evidence, y, y_new)
    if evidence.has_classes:
        labels = y.reshape(-1).astype(int)
        predictions = _of_classes(labels, len(y_new), _width(evidence), inputs)
    else:
        y = y.astype(np.float64).reshape(len(y), -1)
        y_new = y_new.astype(np.float64).reshape(len(y_new), -1)
        predictions = _of_regression(y, y_new, inputs, evidence.likelihood in COUNTS)
    return {label: _evidence(evidence, arrays) for label, arrays in predictions.items()}


def _inputs(
    evidence: Evidence, y: np.ndarray, y_new: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Standardised inputs (N, feature) of the training and the held-out data; None where missing."""
    x = _table(evidence.values(CONSTANT_DATA, "x"), len(y))
    x_new = _table(evidence.values(HELD_OUT, "x"), len(y_new))
    if x is None or x_new is None or x.shape[1] != x_new.shape[1]:
        return None
    scaler = StandardScaler().fit(x)
    return scaler.transform(x), scaler.transform(x_new)


def _table(x: np.ndarray | None, num_rows: int) -> np.ndarray | None:
    """Inputs (num_rows, feature) as float64; None where they are missing, no table, or not finite."""
    if x is None or x.ndim != 2 or len(x) != num_rows:
        return None
    x = np.asarray(x, dtype=np.float64)
    return x if np.isfinite(x).all() else None


def _width(evidence: Evidence) -> int:
    """Number of classes, at least two."""
    probs = evidence.values(PREDICTIONS, "probs")
    return 2 if probs is None or probs.ndim < 2 else max(2, probs.shape[1])


def _of_regression(
    y: np.ndarray,
    y_new: np.ndarray,
    inputs: tuple[np.ndarray, np.ndarray] | None,
    counts: bool,
) -> dict[str, _Arrays]:
    ones = np.ones((len(y), 1))
    ones_new = np.ones((len(y_new), 1))
    designs = {MEAN: (ones, ones_new)}
    if inputs is not None:
        x, x_new = inputs
        designs[LINEAR] = (np.hstack([ones, x]), np.hstack([ones_new, x_new]))
    predictions: dict[str, _Arrays] = {}
    for label, (design, design_new) in designs.items():
        line = _least_squares(design, y, design_new)
        if line is not None:
            predictions[label] = _arrays(line, None if counts else y_new)
    return predictions


class _Line(NamedTuple):
    """Predictions of least squares: mean (point, output), its variance, and the residuals' variance (output,)."""

    mean: np.ndarray
    mean_var: np.ndarray
    noise: np.ndarray


def _least_squares(design: np.ndarray, y: np.ndarray, design_new: np.ndarray) -> _Line | None:
    """Least squares of y (N, output) on a design (N, column), at new rows.

    None where too few rows are left for noise.
    """
    coefficients, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    if len(y) <= rank + 1:
        return None
    noise = ((y - design @ coefficients) ** 2).sum(0) / (len(y) - rank)
    covariance = np.linalg.pinv(design.T @ design)
    leverage = np.einsum("ij,jk,ik->i", design_new, covariance, design_new)
    return _Line(design_new @ coefficients, leverage[:, None] * noise, noise)


def _arrays(line: _Line, y_new: np.ndarray | None) -> _Arrays:
    """The variables of normal predictions; with a log density of the outcomes, where these are given."""
    levels = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    z = stats.norm.ppf(levels)[:, None, None]
    sd = np.sqrt(line.noise + line.mean_var)
    point = ("pred_point", "output")
    arrays: _Arrays = {
        "mean": (point, line.mean),
        "aleatoric_var": (point, np.broadcast_to(line.noise, line.mean.shape)),
        "epistemic_var": (point, line.mean_var),
        "y_sample": ((REPLICATE, *point), line.mean + sd * z),
    }
    if y_new is not None:
        arrays["log_prob"] = (point[:1], stats.norm.logpdf(y_new, line.mean, sd).sum(1))
    return arrays


def _of_classes(
    labels: np.ndarray,
    num_new: int,
    width: int,
    inputs: tuple[np.ndarray, np.ndarray] | None,
) -> dict[str, _Arrays]:
    # Laplace's rule: a class without data is not impossible
    counts = np.bincount(labels, minlength=width) + 1.0
    by_label = {SHARES: np.tile(counts / counts.sum(), (num_new, 1))}
    present = np.unique(labels)
    if inputs is not None and len(present) > 1:
        x, x_new = inputs
        # a baseline that has all but converged is one
        with warnings.catch_warnings(action="ignore"):
            fitted = LogisticRegression(max_iter=500).fit(x, labels)
        probs = np.full((num_new, len(counts)), 1e-12)
        probs[:, present] = fitted.predict_proba(x_new)
        by_label[LOGISTIC] = probs / probs.sum(1, keepdims=True)
    dims = ("pred_point", "class")
    return {label: {"probs": (dims, probs)} for label, probs in by_label.items()}


def _evidence(evidence: Evidence, predictions: _Arrays) -> Evidence:
    """A tree of predictions beside the outcomes of `evidence`."""
    if "probs" in predictions:
        labels = np.asarray(evidence.values(HELD_OUT, "y")).reshape(-1).astype(int)
        probs = predictions["probs"][1]
        predictions["log_prob"] = (("pred_point",), np.log(probs[np.arange(len(labels)), labels]))
    data = {group: evidence.tree[group].to_dataset() for group in (OBSERVED_DATA, HELD_OUT)}
    return Evidence(xr.DataTree.from_dict(data | {PREDICTIONS: xr.Dataset(predictions)}))
