"""`judge`: whether predictions that anyone made fit the outcomes: the model's half of a verdict, from arrays alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from scipy import stats
from scipy.special import ndtri

from pyrobnn.core.checks import as_tensor, check_finite
from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.core.seeding import own_stream, seeded
from pyrobnn.diagnostics.baselines import baselines
from pyrobnn.diagnostics.calibration import MIN_DATA, temperature
from pyrobnn.diagnostics.check_table import ECE, OWN, TABLE, Row
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.judge import made
from pyrobnn.diagnostics.points import NUM_QUANTILES, is_classification, pit_of
from pyrobnn.diagnostics.scores import num_outputs, score
from pyrobnn.diagnostics.verdict import Check, Found, Verdict, grade_tested

#: draws of a law without quantiles; fewest draws whose common error can be seen
_NUM_SAMPLES = 1000
_JOINT = 100
_GRID = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
_ROWS = ("pred_point", "output")


def judge(
    predictions: Any,
    y: Any,
    *,
    x: Any = None,
    x_train: Any = None,
    y_train: Any = None,
) -> Verdict:
    r"""Say whether predictions fit outcomes that they were not trained on, whoever made them.

    Quantile transforms u = F(y) of right predictions are uniform, whatever x; of classes, labels are drawn from the
    probabilities. Checked are uniformity, coverage by region of x and by size of the prediction, patterns of u in x
    and in the order of the rows, rows copied from training, and the CRPS (of classes the log score) beside a linear
    model's; of classes also their shares, their calibration, and the power to which probabilities should be taken,
    :math:`p^\beta`: below 1 where they are too sharp.

    Args:
        predictions: draws of y (S, N), (S, N, out), (chain, draw, N) or (chain, draw, N, out), noise included; or a
            mapping from level to quantiles (N,); or class probabilities (N, K), or (N,) of class 1; or what has ``cdf``
            or ``sample``: a distribution of torch or SciPy, a `Prediction`. Draws of labels are judged as whole
            numbers are, by their order: the checks of classes need probabilities.
        y: outcomes (N,) or (N, out); of classes 0 … K − 1, or K labels in their sorted order; or labels that columns of
            a DataFrame are named by (cat, or p_cat).
        x: inputs (N, feature); names are taken from a DataFrame. None leaves out what depends on them.
        x_train, y_train: what the model was trained on: rows that occur again are found, and the linear model is
            fitted to it. None for a linear model cross-validated on x and y, which then warns at the most.

    Returns:
        A verdict of the model alone: its ``status`` is that of ``model``. Its ``draws`` say "not checked" in print
        and are never a pass, which predictions cannot show.

    Raises:
        ValueError: If lengths differ, numbers are not finite, quantiles cross or probabilities do not sum to one.
        TypeError: If predictions are none of these.

    Caveat:
        Right on average may be wrong where no input that is given says so. Rows are taken for independent. Each check
        warns of at most one right set of predictions in 50, and fails one in 10,000.

    References:
        Probabilistic forecasts, calibration and sharpness (Gneiting et al., 2007) https://doi.org/10.1111/j.1467-9868.2007.00587.x

    Example:
        >>> rng = np.random.default_rng(0)
        >>> y = rng.normal(size=500)
        >>> judge(torch.distributions.Normal(torch.zeros(500), 1.0), y).status
        'pass'
        >>> judge({0.05: np.full(500, -1.0), 0.5: np.zeros(500), 0.95: np.ones(500)}, y).status
        'fail'
    """
    return judged(
        predictions,
        y,
        x=x,
        x_train=x_train,
        y_train=y_train,
    )[0]


def judged(
    predictions: Any,
    y: Any,
    *,
    x: Any = None,
    x_train: Any = None,
    y_train: Any = None,
    label: str = "predictions",
) -> tuple[Verdict, Evidence]:
    """The verdict, and the tree of predictions and outcomes that a report is written of."""
    y, y_train, num_words = _in_places(_column_titles(predictions, y), y, y_train)
    outcomes = _array("y", y)
    train_outcomes = _optional_array("y_train", y_train)
    inputs = _optional_array("x", x)
    train_inputs = _optional_array("x_train", x_train)
    _check_rows("x", inputs, "y", outcomes)
    _check_rows("x_train", train_inputs, "y_train", train_outcomes)
    if inputs is not None and train_inputs is not None and train_inputs.shape[1] != inputs.shape[1]:
        raise ValueError(f"'x' has {inputs.shape[1]} columns and 'x_train' {train_inputs.shape[1]}")
    if not hasattr(predictions, "pit"):
        outcomes = _uncensored(predictions, outcomes)
    predicted = _read(predictions, outcomes, num_words)
    if "pit" in predicted:  # of censored outcomes the value, without what says whether it was seen
        width = predicted.sizes["output"]
        outcomes = outcomes[:, :width]
        train_outcomes = None if train_outcomes is None else train_outcomes[:, :width]
    if num_words is not None and "probs" not in predicted:
        raise ValueError(
            "'y' holds words or truth values, and these are predictions of numbers: give probabilities"
        )
    features = [str(column) for column in getattr(x, "columns", ())]
    tree = _tree(predicted, outcomes, inputs, train_inputs, train_outcomes, features, label)
    evidence = Evidence(tree)
    return Verdict(label, label, _model_checks(evidence)), evidence


def _model_checks(evidence: Evidence) -> tuple[Check, ...]:
    """The checks of the model; where none of them decides anything, one more that says so."""
    rows = [made(row, evidence) for row in MODEL_ROWS]
    checks = tuple(check for check in rows if check is not None)
    if any(check.decides for check in checks):
        return checks
    numbers = {"next": f"Judge {MIN_DATA} rows or more"}
    unchecked = Check(
        "not_checked_model",
        "warn",
        "model",
        code="not_checked",
        numbers=numbers,
    )
    return (*checks, unchecked)


def _check_rows(
    name: str,
    inputs: np.ndarray | None,
    outcome_name: str,
    outcomes: np.ndarray | None,
) -> None:
    """ValueError where inputs are given without as many outcomes."""
    if inputs is None:
        return
    num_outcomes = None if outcomes is None else len(outcomes)
    if len(inputs) != num_outcomes:
        raise ValueError(
            f"{name!r} has {len(inputs)} rows and {outcome_name!r} "
            f"{'none' if num_outcomes is None else num_outcomes}"
        )


def _column_titles(predictions: Any, y: Any) -> list[str]:
    """The columns of a DataFrame of predictions, by name; none where there are no names, or not a row an outcome."""
    columns = getattr(predictions, "columns", pd.RangeIndex(0))
    if isinstance(columns, pd.RangeIndex) or len(predictions) != np.asarray(y).size:
        return []
    return [str(column) for column in columns]


def _in_places(titles: Sequence[str], y: Any, y_train: Any) -> tuple[Any, Any, int | None]:
    """Labels as the places of the columns that they name (cat, or p_cat), words else in sorted order; their number."""
    cells = _cells(y)
    train_cells = _cells(y_train)
    words = cells.dtype.kind in "OUSb"
    if not words and not titles:
        return y, y_train, None
    num_missing = int(pd.isna(cells).sum())
    if num_missing:
        raise ValueError(f"'y' holds {num_missing} missing labels: drop these rows")
    text = _as_text(cells)
    train_text = _as_text(train_cells)
    labels = {*text, *train_text}
    if cells.dtype.kind == "b":
        labels |= {"False", "True"}
    names = _column_names(titles, labels)
    if names is None and not words:
        return y, y_train, None
    order = pd.Index(sorted(labels) if names is None else names)
    places = order.get_indexer(text).clip(0)
    train_places = None if y_train is None else order.get_indexer(train_text).clip(0)
    return places, train_places, len(order) if words else None


def _column_names(titles: Sequence[str], labels: set[str]) -> list[str] | None:
    """The label of each column, in the columns' order; None where the titles are not of these labels."""
    prefix = re.sub(r"[^\W_]+$", "", os.path.commonprefix(titles))
    names = titles if labels <= {*titles} else [title.removeprefix(prefix) for title in titles]
    # one column is of its label, not of the other, which has no name then
    unnamed = [""] if len(names) == 1 else []
    fits = bool(labels & {*names}) and len(labels - {*names}) <= len(unnamed)
    return [*unnamed, *names] if fits else None


def _cells(labels: Any) -> np.ndarray:
    """Labels (N,) of the type that they have in common; of None, none."""
    cells = np.asarray([] if labels is None else labels).ravel()
    return np.array(cells.tolist()) if cells.dtype.kind == "O" else cells


def _as_text(cells: np.ndarray) -> np.ndarray:
    return np.char.mod("%g", cells) if cells.dtype.kind in "iuf" else cells.astype(str)


def _optional_array(name: str, value: Any) -> np.ndarray | None:
    return None if value is None else _array(name, value)


def _array(name: str, value: Any) -> np.ndarray:
    """Numbers (N, …), columns behind the rows."""
    tensor = as_tensor(name, value).detach().cpu().double()
    array = tensor.numpy()
    if array.size == 0 or array.ndim == 0:
        raise ValueError(f"{name!r} has shape {array.shape}: a value for each row is needed")
    check_finite(name, tensor)
    if not bool(tensor.square().isfinite().all()):
        raise ValueError(f"{name!r} holds values too large to square: use other units")
    return array if name == "predictions" else array.reshape(len(array), -1)


# predictions as they stand in a tree: draws and PIT values of numbers, probabilities of classes


def _read(predictions: Any, y: np.ndarray, num_words: int | None) -> xr.Dataset:
    """Predictions in one of two forms, checked."""
    if isinstance(predictions, Mapping):
        return _of_quantiles(predictions, y)
    targets = getattr(getattr(predictions, "likelihood", None), "targets", None)
    of_classes = (torch.distributions.Categorical, torch.distributions.Bernoulli)
    if (targets is not None and targets.classes) or isinstance(predictions, of_classes):
        return _of_probabilities(_array("predictions", predictions.probs), y, num_words)
    is_law = any(hasattr(predictions, name) for name in ("cdf", "sample", "rvs"))
    if is_law and not hasattr(predictions, "columns"):
        return _of_law(predictions, y)
    if isinstance(predictions, list | tuple) and len(predictions) == 2:
        raise TypeError(
            "'predictions' is a pair: for mean and sd give scipy.stats.norm(mean, sd), for draws an array"
        )
    values = _without_chains(_array("predictions", predictions), y)
    if _are_probabilities(values, y):
        return _of_probabilities(values, y, num_words)
    return _of_array(values, y)


def _are_probabilities(values: np.ndarray, y: np.ndarray) -> bool:
    """Whether an array is of probabilities of labels.

    Probabilities that lack a class are not draws, unless as many of these.
    """
    num, width = y.shape
    if values.ndim > 2 or len(values) != num:
        return False
    shares = bool(((values >= 0.0) & (values <= 1.0 + 1e-6)).all())
    labels = width == 1 and bool((y == np.round(y)).all()) and y.min() >= 0
    if not shares or not labels:
        return False
    sums_to_one = values.ndim == 1 or np.allclose(values.sum(axis=1), 1.0, atol=1e-3)
    return sums_to_one or values.shape[1:] != (num,)


def _of_array(values: np.ndarray, y: np.ndarray) -> xr.Dataset:
    """Draws (S, N) or (S, N, out) of outcomes (N, out)."""
    num = len(y)
    if values.ndim not in (2, 3) or values.shape[1] != num or len(values) < 2:
        raise ValueError(
            f"'predictions' has shape {values.shape} for {num} outcomes: expected draws (S, {num}), (S, {num}, out) or "
            f"(chain, draw, {num}, out), probabilities ({num}, K) that sum to 1 (not to 100) of labels from 0, or a "
            f"mapping from level to quantiles ({num},)"
        )
    draws = values.reshape(*values.shape[:2], -1)
    if draws.shape[1:] != y.shape:
        raise ValueError(
            f"'predictions' has draws of shape {draws.shape[1:]} and 'y' has shape {y.shape}"
        )
    # draws in their order are quantiles: of errors in common they say nothing
    joint = len(draws) >= _JOINT and not (np.diff(draws, axis=0) >= 0.0).all()
    return _of_draws(draws, pit_of(draws, y), joint=joint)


def _uncensored(predictions: Any, y: np.ndarray) -> np.ndarray:
    """Outcomes of draws of one number, also where a second column says that all of them were seen.

    Raises:
        ValueError: If some are censored: draws alone do not say at which side.
    """
    shape = tuple(getattr(predictions, "shape", ()))
    flat = len(shape) == 2 and shape[0] != len(y)
    of_one = flat or (len(shape) > 2 and (shape[-1] == 1 or shape[2:] == (len(y),)))
    if not of_one or y.shape[1] != 2 or not np.isin(y[:, 1], (0.0, 1.0)).all():
        return y
    if not y[:, 1].all():
        raise ValueError(
            "'y' holds censored outcomes, and draws alone do not say at which side: give the prediction itself, "
            "judge(posterior.predict(x), y)"
        )
    return y[:, :1]


def _without_chains(values: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Draws (chain, draw, N, out) or (chain, draw, N) as draws (S, N, out); other arrays as they are."""
    if values.ndim not in (3, 4) or values.shape[2] != len(y):
        return values
    if values.ndim == 4:
        return values.reshape(-1, len(y), values.shape[3])
    of_one = y.shape[1] == 1 and values.shape[1:] != y.shape
    return values.reshape(-1, len(y), 1) if of_one else values


def _of_draws(
    draws: np.ndarray,
    u: np.ndarray,
    *,
    joint: bool = False,
    levels: Sequence[float] = (),
) -> xr.Dataset:
    """Of draws (draw, point, output) and PIT values (point, output): whether draws are of all points together, and the
    levels of the quantiles that they were made of."""
    columns = {
        "mean": (_ROWS, draws.mean(axis=0)),
        "y_sample": (("sample", *_ROWS), draws),
        "pit": (_ROWS, u),
    }
    return xr.Dataset(columns, attrs={"joint": joint, "levels": tuple(levels)})


def _of_quantiles(quantiles: Mapping[Any, Any], y: np.ndarray) -> xr.Dataset:
    """Of quantiles by level, which are joined as a normal's."""
    number = partial(pd.to_numeric, errors="coerce")
    levels = sorted(quantiles, key=number)
    p = np.array([float(number(level)) for level in levels])
    if len(set(p)) < max(2, len(p)) or not (p.min() > 0.0 and p.max() < 1.0) or y.shape[1] > 1:
        raise ValueError(
            f"quantiles need two levels or more, numbers between 0 and 1, of one outcome: got {levels}"
        )
    columns = [_array(f"quantile {level}", quantiles[level]).ravel() for level in levels]
    for level, column in zip(levels, columns, strict=True):
        if len(column) != len(y):
            raise ValueError(f"quantile {level} has {len(column)} rows and 'y' {len(y)}")
    q = np.stack(columns)
    crossed = np.argwhere(np.diff(q, axis=0) < 0.0)
    if crossed.size:
        at, row = crossed[0]
        raise ValueError(
            f"quantiles cross in row {row}, counted from 0: {levels[at + 1]} is {q[at + 1, row]:.6g}, below "
            f"{q[at, row]:.6g} of {levels[at]} ({len(np.unique(crossed[:, 1]))} rows): sort them"
        )
    u = _pit_between(q, p, y[:, 0])
    return _of_draws(
        _draws_between(q, p)[..., None],
        u[:, None],
        levels=tuple(p),
    )


def _pit_between(q: np.ndarray, p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """PIT values (N,): uniform between the levels of the quantiles (level, N) that an outcome lies between."""
    edges = np.array([0.0, *p, 1.0])
    low = edges[(q < y).sum(axis=0)]
    high = edges[(q <= y).sum(axis=0) + 1]
    return low + own_stream().random(len(y)) * (high - low)


def _draws_between(q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Quantiles (draw, N) on a regular grid: between the levels of `q` (level, N), and beyond them, as a normal's."""
    z = ndtri(p)
    at = ndtri(_GRID)
    below = np.clip(np.searchsorted(z, at) - 1, 0, len(p) - 2)
    slope = (q[below + 1] - q[below]) / (z[below + 1] - z[below])[:, None]
    return q[below] + (at - z[below])[:, None] * slope


def _of_probabilities(probs: np.ndarray, y: np.ndarray, num_words: int | None) -> xr.Dataset:
    """Of probabilities (N, class), or (N,) of class 1."""
    if probs.size == len(y):
        probs = np.stack([1.0 - probs.ravel(), probs.ravel()], axis=1)
    if probs.shape[0] != len(y):
        raise ValueError(f"'predictions' has {probs.shape[0]} rows and 'y' {len(y)}")
    sums = probs.sum(axis=1)
    wrong = np.flatnonzero((np.abs(sums - 1.0) > 1e-3) | (probs.min(axis=1) < 0.0))
    if wrong.size:
        row = wrong[0]
        raise ValueError(
            f"probabilities of row {row}, counted from 0, sum to {sums[row]:.4g}, not 1 "
            f"({len(wrong)} such rows): divide by the sum"
        )
    count = probs.shape[1]
    if not ((y == np.round(y)) & (y >= 0) & (y < count)).all() or num_words not in (None, count):
        raise ValueError(
            f"'y' must be labels 0 … {count - 1}, {count} words, or words that name columns of a DataFrame"
        )
    probs = probs / sums[:, None]
    log_prob = np.log(np.maximum(probs[np.arange(len(y)), y[:, 0].astype(int)], 1e-12))
    return xr.Dataset(
        {"probs": (("pred_point", "class"), probs), "log_prob": (_ROWS[:1], log_prob)}
    )


def _of_law(law: Any, y: np.ndarray) -> xr.Dataset:
    """Of a distribution of torch or SciPy, or a `Prediction`."""
    if hasattr(law, "pit"):
        return _of_prediction(law, y)
    law_shape = _law_shape(law)
    of_scipy = hasattr(law, "rvs")
    shape = y.shape if y.shape[1] > 1 else y.shape[:1]
    if math.prod(law_shape) == y.size if of_scipy else law_shape:
        shape = law_shape
    if shape[:1] != y.shape[:1] or math.prod(shape) != y.size:
        raise ValueError(
            f"'predictions' are a distribution of shape {shape} and 'y' has shape {y.shape}"
        )
    target = y.reshape(shape)
    grid = _GRID.reshape(-1, *[1] * len(shape))
    if of_scipy:
        draws, u = _of_scipy(law, grid, target)
    else:
        draws, u = _of_torch(law, grid, target, shape[len(law_shape) :])
    draws = np.broadcast_to(draws, (len(draws), *shape)).copy()
    return _of_draws(draws.reshape(len(draws), *y.shape), u.reshape(y.shape))


def _law_shape(law: Any) -> tuple[int, ...]:
    """The shape of what a distribution draws; () where its parameters are single numbers.

    Raises:
        TypeError: If it is one of SciPy that is not frozen, or not of one number.
    """
    if not hasattr(law, "rvs"):
        return (*getattr(law, "batch_shape", ()), *getattr(law, "event_shape", ()))
    if not hasattr(law, "ppf") or not hasattr(law, "dist"):
        raise TypeError(
            "'predictions' of SciPy must be frozen and of one number a row: scipy.stats.norm(mean, sd)"
        )
    return np.broadcast_shapes(*map(np.shape, (*law.args, *law.kwds.values())))


def _of_scipy(law: Any, grid: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantiles on a grid, and PIT values of outcomes, at random within the step of a whole number."""
    draws = np.asarray(law.ppf(grid))
    if hasattr(law.dist, "pmf"):
        u = law.cdf(target - 1) + own_stream().random(target.shape) * law.pmf(target)
        return draws, u
    return draws, np.asarray(law.cdf(target))


def _of_torch(
    law: torch.distributions.Distribution,
    grid: np.ndarray,
    target: np.ndarray,
    repeats: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """Quantiles on a grid and PIT values; of a law without quantiles, draws, `repeats` of them for one outcome's."""
    try:
        draws = _numpy(law.icdf(torch.as_tensor(grid)))
        return draws, _numpy(law.cdf(torch.as_tensor(target)))
    except NotImplementedError:
        with seeded(0):
            draws = _numpy(law.sample((_NUM_SAMPLES, *repeats)))
        return draws, pit_of(draws, target)


def _of_prediction(prediction: Any, y: np.ndarray) -> xr.Dataset:
    """Of a `Prediction`, which knows what a censored outcome leaves open."""
    u = _numpy(prediction.pit(torch.as_tensor(y)))
    draws = _numpy(prediction.sample(seed=0).flatten(0, 1))
    predicted = _of_draws(draws, u, joint=len(draws) >= _JOINT)
    return predicted.assign_attrs(censored=prediction.likelihood.targets.censoring is not None)


def _numpy(values: torch.Tensor) -> np.ndarray:
    return values.double().cpu().numpy()


def _tree(
    predicted: xr.Dataset,
    y: np.ndarray,
    x: np.ndarray | None,
    x_train: np.ndarray | None,
    y_train: np.ndarray | None,
    names: Sequence[str] = (),
    label: str = "",
) -> xr.DataTree:
    """Predictions and outcomes as a tree of what was held out."""
    if "probs" in predicted:
        y = y.reshape(-1).astype(int)
        y_train = None if y_train is None else y_train.reshape(-1).astype(int)
    groups = {PREDICTIONS: predicted}
    coords = {"feature": list(names)} if names else {}
    for dim, input_group, inputs, outcome_group, outcomes in (
        ("pred_point", HELD_OUT, x, HELD_OUT, y),
        ("point", CONSTANT_DATA, x_train, OBSERVED_DATA, y_train),
    ):
        if outcomes is not None:
            groups[outcome_group] = xr.Dataset({"y": ((dim, "output")[: outcomes.ndim], outcomes)})
        if inputs is not None:
            stored = groups.get(input_group, xr.Dataset())
            groups[input_group] = stored.assign(x=((dim, "feature"), inputs)).assign_coords(coords)
    tree = xr.DataTree.from_dict(groups)
    tree.attrs |= {"method": label, "iid": 1, "claim": PREDICTIONS}
    return tree


# checks of predictions alone


def _floor(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the score is as good as a linear model's (of no inputs: the mean's), in pairs and by a share."""
    predicted = evidence.tree[PREDICTIONS].to_dataset()
    # the score of a value that was not seen is not that of its limit
    if predicted.attrs.get("censored", False):
        return None
    classes = is_classification(evidence)
    name = _floor_score(evidence)
    scores = score(evidence)
    if name not in scores or len(np.asarray(evidence.values(HELD_OUT, "y"))) < MIN_DATA:
        return None
    achieved = np.asarray(scores[name].points)
    baseline, floor = _baseline_scores(evidence, predicted, name)
    if not baseline:
        return None
    if not classes:
        # what a finite number of right draws costs
        achieved = achieved / (1.0 + 1.0 / predicted.sizes["sample"])
    gap = (floor - achieved) if classes else (achieved - floor)
    error = float(gap.std(ddof=1)) / np.sqrt(len(gap))
    p = float(stats.norm.sf(gap.mean() / error)) if error > 0.0 else 1.0
    ratio = float(achieved.mean() / floor.mean()) if floor.mean() != 0.0 else 1.0
    if evidence.values(OBSERVED_DATA, "y") is None:
        # a linear model of the held-out rows themselves is no ground to fail
        limits = (limits[0], np.inf)
    status = grade_tested(p, ratio - 1.0, evidence.rates, limits)
    numbers = {
        "which": baseline,
        "score": name,
        "own": float(achieved.mean()),
        "floor": float(floor.mean()),
        "p": p,
    }
    return Found(status, ratio, "", numbers, 1.0 + limits[0])


def _floor_score(evidence: Evidence) -> str:
    """The score by which predictions and a baseline are compared."""
    if is_classification(evidence):
        return "log_prob"
    return "crps" if num_outputs(evidence) == 1 else "crps_standardized"


def _baseline_scores(
    evidence: Evidence, predicted: xr.Dataset, name: str
) -> tuple[str, np.ndarray]:
    """The best baseline's label and its score of every row; no label where a part of the rows allows none."""
    x = evidence.values(HELD_OUT, "x")
    y = np.asarray(evidence.values(HELD_OUT, "y"))
    x_train = evidence.values(CONSTANT_DATA, "x")
    y_train = evidence.values(OBSERVED_DATA, "y")
    floor = np.full(len(y), np.nan)
    label = ""
    for rows, fit_x, fit_y in _splits(y, x, x_train, y_train):
        x_rows = None if x is None else x[rows]
        fold = _tree(predicted.isel(pred_point=rows), y[rows], x_rows, fit_x, fit_y)
        trees = baselines([Evidence(fold)])
        if not trees:
            return "", floor
        label, best = list(trees.items())[-1]
        floor[rows] = score(best)[name].points
    return label, floor


def _splits(
    y: np.ndarray,
    x: np.ndarray | None,
    x_train: np.ndarray | None,
    y_train: np.ndarray | None,
) -> Iterator[tuple[np.ndarray, np.ndarray | None, np.ndarray]]:
    """Rows to predict, and inputs and outcomes to learn from: of training, or of the other four fifths."""
    if y_train is not None:
        yield np.arange(len(y)), x_train, y_train
        return
    order = own_stream().permutation(len(y))
    for rows in np.array_split(order, 5):
        fit_rows = np.setdiff1d(order, rows)
        yield rows, None if x is None else x[fit_rows], y[fit_rows]


#: the model's rows of the table, and those of predictions alone
MODEL_ROWS = (
    *(row for row in TABLE if row.question == "model"),
    Row("temperature", "model", temperature, (0.05, 0.25), ECE),  # distance of the power from 1
    Row("baseline", "model", _floor, (0.02, 0.25), OWN),  # shares of the score of a linear model
)
