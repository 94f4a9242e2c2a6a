"""Baselines: the mean, and a linear model with its noise, scored on the same held-out rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import xarray as xr
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.points import COUNTS, NUM_QUANTILES, has_classes, is_censored, same_data

MEAN = "predict the mean"
LINEAR = "linear model"
SHARES = "class shares"
LOGISTIC = "logistic regression"

Dims = tuple[str, ...]
Arrays = dict[str, tuple[Dims, np.ndarray]]


def baselines(trees: Iterable[Evidence]) -> dict[str, Evidence]:
    """Baselines of the first tree that holds training and held-out outcomes, as trees of predictions.

    Of a regression the training mean with the training sd, and least squares with its residual sd (the predictive
    variance includes that of the coefficients); of classes their shares, and scikit-learn's logistic regression (C = 1)
    on standardised inputs. They are fitted to the training rows alone. Of counts they have no log density, which is no
    mass. None where the trees are of different data, or rows are censored, which a normal would take for observed.
    """
    trees = list(trees)
    for evidence in trees if same_data(trees) else []:
        y = evidence.values(OBSERVED_DATA, "y")
        y_new = evidence.values(HELD_OUT, "y")
        if (
            y is None
            or y_new is None
            or min(y.ndim, y_new.ndim) == 0
            or len(y) < 3
            or len(y_new) == 0
        ):
            continue
        if is_censored(evidence):
            return {}
        pair = _inputs(evidence, y, y_new)
        if has_classes(evidence):
            found = _of_classes(y.reshape(-1).astype(int), len(y_new), _width(evidence), pair)
        else:
            y, y_new = (each.astype(np.float64).reshape(len(each), -1) for each in (y, y_new))
            found = _of_regression(y, y_new, pair, evidence.likelihood in COUNTS)
        return {label: _evidence(evidence, predictions) for label, predictions in found.items()}
    return {}


def _inputs(
    evidence: Evidence, y: np.ndarray, y_new: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Standardised inputs (N, feature) of the training and the held-out data; None where missing."""
    each = [evidence.values(group, "x") for group in (CONSTANT_DATA, HELD_OUT)]
    if any(
        x is None or x.ndim != 2 or len(x) != len(of)
        for x, of in zip(each, (y, y_new), strict=True)
    ):
        return None
    x, x_new = (np.asarray(x, dtype=np.float64) for x in each)
    finite = np.isfinite(x).all() and np.isfinite(x_new).all()
    if not finite or x.shape[1] != x_new.shape[1]:
        return None
    scaler = StandardScaler().fit(x)
    return scaler.transform(x), scaler.transform(x_new)


def _width(evidence: Evidence) -> int:
    """Number of classes, at least two."""
    probs = evidence.values(PREDICTIONS, "probs")
    return 2 if probs is None or probs.ndim < 2 else max(2, probs.shape[1])


def _of_regression(
    y: np.ndarray, y_new: np.ndarray, pair: tuple[np.ndarray, np.ndarray] | None, counts: bool
) -> dict[str, Arrays]:
    designs = {MEAN: tuple(np.ones((len(each), 1)) for each in (y, y_new))}
    if pair is not None:
        designs[LINEAR] = tuple(np.hstack(each) for each in zip(designs[MEAN], pair, strict=True))
    levels = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    point = ("pred_point", "output")
    found: dict[str, Arrays] = {}
    for label, (design, new) in designs.items():
        coefficients, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
        if len(y) <= rank + 1:
            continue
        noise = ((y - design @ coefficients) ** 2).sum(0) / (len(y) - rank)
        mean_var = (
            np.einsum("ij,jk,ik->i", new, np.linalg.pinv(design.T @ design), new)[:, None] * noise
        )
        mean = new @ coefficients
        sd = np.sqrt(noise + mean_var)
        found[label] = {
            "mean": (point, mean),
            "aleatoric_var": (point, np.broadcast_to(noise, mean.shape)),
            "epistemic_var": (point, mean_var),
            "y_sample": (("sample", *point), mean + sd * stats.norm.ppf(levels)[:, None, None]),
        }
        if not counts:
            found[label]["log_prob"] = (point[:1], stats.norm.logpdf(y_new, mean, sd).sum(1))
    return found


def _of_classes(
    labels: np.ndarray, num_new: int, width: int, pair: tuple[np.ndarray, np.ndarray] | None
) -> dict[str, Arrays]:
    # Laplace's rule: a class without data is not impossible
    counts = np.bincount(labels, minlength=width) + 1.0
    found = {SHARES: np.tile(counts / counts.sum(), (num_new, 1))}
    present = np.unique(labels)
    if pair is not None and len(present) > 1:
        with warnings.catch_warnings(
            action="ignore"
        ):  # a baseline that has all but converged is one
            fitted = LogisticRegression(max_iter=500).fit(pair[0], labels)
        probs = np.full((num_new, len(counts)), 1e-12)
        probs[:, present] = fitted.predict_proba(pair[1])
        found[LOGISTIC] = probs / probs.sum(1, keepdims=True)
    return {label: {"probs": (("pred_point", "class"), probs)} for label, probs in found.items()}


def _evidence(evidence: Evidence, predictions: Arrays) -> Evidence:
    """A tree of predictions beside the outcomes of `evidence`."""
    if "probs" in predictions:
        labels = np.asarray(evidence.values(HELD_OUT, "y")).reshape(-1).astype(int)
        probs = predictions["probs"][1]
        predictions["log_prob"] = (("pred_point",), np.log(probs[np.arange(len(labels)), labels]))
    data = {group: evidence.tree[group].to_dataset() for group in (OBSERVED_DATA, HELD_OUT)}
    return Evidence(xr.DataTree.from_dict(data | {PREDICTIONS: xr.Dataset(predictions)}))
