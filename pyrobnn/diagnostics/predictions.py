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
    predictions: Any, y: Any, *, x: Any = None, x_train: Any = None, y_train: Any = None
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
    return judged(predictions, y, x=x, x_train=x_train, y_train=y_train)[0]


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
    columns = getattr(predictions, "columns", pd.RangeIndex(0))
    named = not isinstance(columns, pd.RangeIndex) and len(predictions) == np.asarray(y).size
    y, y_train, num_words = _in_places([str(each) for each in columns] if named else [], y, y_train)
    outcomes = _array("y", y)
    past, inputs, known = (
        None if each is None else _array(name, each)
        for name, each in (("y_train", y_train), ("x", x), ("x_train", x_train))
    )
    for name, rows, other, of in (
        ("x", inputs, "y", outcomes),
        ("x_train", known, "y_train", past),
    ):
        if rows is not None and (of is None or len(rows) != len(of)):
            raise ValueError(
                f"{name!r} has {len(rows)} rows and {other!r} {'none' if of is None else len(of)}"
            )
    if inputs is not None and known is not None and known.shape[1] != inputs.shape[1]:
        raise ValueError(f"'x' has {inputs.shape[1]} columns and 'x_train' {known.shape[1]}")
    names = [str(each) for each in getattr(x, "columns", ())]
    if not hasattr(predictions, "pit"):
        outcomes = _seen(predictions, outcomes)
    predicted = _read(predictions, outcomes, num_words)
    if "pit" in predicted:  # of censored outcomes the value, without what says whether it was seen
        width = predicted.sizes["output"]
        outcomes = outcomes[:, :width]
        past = None if past is None else past[:, :width]
    if num_words is not None and "probs" not in predicted:
        raise ValueError(
            "'y' holds words or truth values, and these are predictions of numbers: give probabilities"
        )
    evidence = Evidence(_tree(predicted, outcomes, inputs, known, past, names, label))
    checks = tuple(check for row in MODEL_ROWS if (check := made(row, evidence)) is not None)
    if not any(check.decides for check in checks):
        few = {"next": f"Judge {MIN_DATA} rows or more"}
        checks = (
            *checks,
            Check("not_checked_model", "warn", "model", code="not_checked", numbers=few),
        )
    return Verdict(label, label, checks), evidence


def _in_places(titles: Sequence[str], y: Any, y_train: Any) -> tuple[Any, Any, int | None]:
    """Labels as the places of the columns that they name (cat, or p_cat), words else in sorted order; their number."""
    cells = [np.asarray([] if each is None else each).ravel() for each in (y, y_train)]
    cells = [np.array(each.tolist()) if each.dtype.kind == "O" else each for each in cells]
    if not (words := cells[0].dtype.kind in "OUSb") and not titles:
        return y, y_train, None
    if count := int(pd.isna(cells[0]).sum()):
        raise ValueError(f"'y' holds {count} missing labels: drop these rows")
    text = [
        np.char.mod("%g", each) if each.dtype.kind in "iuf" else each.astype(str) for each in cells
    ]
    known = {*text[0], *text[1], *(("False", "True") if cells[0].dtype.kind == "b" else ())}
    prefix = re.sub(r"[^\W_]+$", "", os.path.commonprefix(titles))
    named = titles if known <= {*titles} else [title.removeprefix(prefix) for title in titles]
    # one column is of its label, not of the other, which has no name then
    other = [""] * (len(named) == 1)
    fits = bool(known & {*named}) and len(known - {*named}) <= len(other)
    if not fits and not words:
        return y, y_train, None
    order = [*other, *named] if fits else sorted(known)
    y, past = (pd.Index(order).get_indexer(each).clip(0) for each in text)
    return y, None if y_train is None else past, len(order) if words else None


def _array(name: str, value: Any) -> np.ndarray:
    """Numbers (N, …), columns behind the rows."""
    array = (tensor := as_tensor(name, value).detach().cpu().double()).numpy()
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
    kind = getattr(getattr(predictions, "likelihood", None), "targets", None)
    law = torch.distributions
    if (kind is not None and kind.classes) or isinstance(
        predictions, law.Categorical | law.Bernoulli
    ):
        return _of_probabilities(_array("predictions", predictions.probs), y, num_words)
    if not hasattr(predictions, "columns") and any(
        hasattr(predictions, a) for a in ("cdf", "sample", "rvs")
    ):
        return _of_law(predictions, y)
    if isinstance(predictions, list | tuple) and len(predictions) == 2:
        raise TypeError(
            "'predictions' is a pair: for mean and sd give scipy.stats.norm(mean, sd), for draws an array"
        )
    values = _without_chains(_array("predictions", predictions), y)
    num, width = y.shape
    shares = (
        values.ndim <= 2 and len(values) == num and ((values >= 0.0) & (values <= 1.0 + 1e-6)).all()
    )
    labels = width == 1 and (y == np.round(y)).all() and y.min() >= 0
    sums = values.ndim == 1 or (
        values.ndim == 2 and np.allclose(values.sum(axis=1), 1.0, atol=1e-3)
    )
    # probabilities that lack a class are not draws, unless as many of these
    if shares and labels and (sums or values.shape[1:] != (num,)):
        return _of_probabilities(values, y, num_words)
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


def _seen(predictions: Any, y: np.ndarray) -> np.ndarray:
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
    columns = values.ndim == 4 and values.shape[2] == len(y)
    labels = (
        values.ndim == 3
        and values.shape[2] == len(y)
        and y.shape[1] == 1
        and values.shape[1:] != y.shape
    )
    return (
        values.reshape(-1, len(y), *values.shape[3:], *[1] * labels)
        if columns or labels
        else values
    )


def _of_draws(
    draws: np.ndarray, u: np.ndarray, *, joint: bool = False, levels: Sequence[float] = ()
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
    number = partial(pd.to_numeric, errors="coerce")
    levels = sorted(quantiles, key=number)
    p = np.array([float(number(each)) for each in levels])
    if len(set(p)) < max(2, len(p)) or not (p.min() > 0.0 and p.max() < 1.0) or y.shape[1] > 1:
        raise ValueError(
            f"quantiles need two levels or more, numbers between 0 and 1, of one outcome: got {levels}"
        )
    columns = [_array(f"quantile {each}", quantiles[each]).ravel() for each in levels]
    for level, column in zip(levels, columns, strict=True):
        if len(column) != len(y):
            raise ValueError(f"quantile {level} has {len(column)} rows and 'y' {len(y)}")
    q = np.stack(columns)
    if (crossed := np.argwhere(np.diff(q, axis=0) < 0.0)).size:
        at, row = crossed[0]
        raise ValueError(
            f"quantiles cross in row {row}, counted from 0: {levels[at + 1]} is {q[at + 1, row]:.6g}, below "
            f"{q[at, row]:.6g} of {levels[at]} ({len(np.unique(crossed[:, 1]))} rows): sort them"
        )
    edges = np.array([0.0, *p, 1.0])
    value = y[:, 0]
    low = edges[(q < value).sum(axis=0)]
    high = edges[(q <= value).sum(axis=0) + 1]
    u = low + own_stream().random(len(y)) * (high - low)
    # between levels, and beyond them, as a normal's
    z = ndtri(p)
    at = ndtri(_GRID)
    left = np.clip(np.searchsorted(z, at) - 1, 0, len(p) - 2)
    draws = q[left] + (at - z[left])[:, None] * (
        (q[left + 1] - q[left]) / (z[left + 1] - z[left])[:, None]
    )
    return _of_draws(draws[..., None], u[:, None], levels=tuple(p))


def _of_probabilities(probs: np.ndarray, y: np.ndarray, num_words: int | None) -> xr.Dataset:
    probs = (
        np.stack([1.0 - probs.ravel(), probs.ravel()], axis=1) if probs.size == len(y) else probs
    )
    if probs.shape[0] != len(y):
        raise ValueError(f"'predictions' has {probs.shape[0]} rows and 'y' {len(y)}")
    sums = probs.sum(axis=1)
    if (off := np.flatnonzero((np.abs(sums - 1.0) > 1e-3) | (probs.min(axis=1) < 0.0))).size:
        first = f"probabilities of row {off[0]}, counted from 0, sum to {sums[off[0]]:.4g}, not 1"
        raise ValueError(f"{first} ({len(off)} such rows): divide by the sum")
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
    own = (*getattr(law, "batch_shape", ()), *getattr(law, "event_shape", ()))
    shape = own or (y.shape if y.shape[1] > 1 else y.shape[:1])
    if hasattr(law, "rvs"):
        if not hasattr(law, "ppf") or not hasattr(law, "dist"):
            raise TypeError(
                "'predictions' of SciPy must be frozen and of one number a row: scipy.stats.norm(mean, sd)"
            )
        own = np.broadcast_shapes(*map(np.shape, (*law.args, *law.kwds.values())))
        shape = own if math.prod(own) == y.size else shape
    if shape[:1] != y.shape[:1] or math.prod(shape) != y.size:
        raise ValueError(
            f"'predictions' are a distribution of shape {shape} and 'y' has shape {y.shape}"
        )
    target = y.reshape(shape)
    grid = _GRID.reshape(-1, *[1] * len(shape))
    if hasattr(law, "rvs"):  # SciPy's
        draws = np.asarray(law.ppf(grid))
        u = np.asarray(law.cdf(target))
        if hasattr(law.dist, "pmf"):
            u = law.cdf(target - 1) + own_stream().random(shape) * law.pmf(target)
    else:
        try:
            draws = _numpy(law.icdf(torch.as_tensor(grid)))
            u = _numpy(law.cdf(torch.as_tensor(target)))
        except NotImplementedError:
            with seeded(0):
                draws = _numpy(law.sample((_NUM_SAMPLES, *shape[len(own) :])))
            u = pit_of(draws, target)
    draws = np.broadcast_to(draws, (len(draws), *shape)).copy()
    return _of_draws(draws.reshape(len(draws), *y.shape), u.reshape(y.shape))


def _of_prediction(prediction: Any, y: np.ndarray) -> xr.Dataset:
    """Of a `Prediction`, which knows what a censored outcome leaves open."""
    u = _numpy(prediction.pit(torch.as_tensor(y)))
    draws = _numpy(prediction.sample(seed=0).flatten(0, 1))
    found = _of_draws(draws, u, joint=len(draws) >= _JOINT)
    return found.assign_attrs(censored=prediction.likelihood.targets.censoring is not None)


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
    for dim, of_inputs, inputs, of_outcomes, outcomes in (
        ("pred_point", HELD_OUT, x, HELD_OUT, y),
        ("point", CONSTANT_DATA, x_train, OBSERVED_DATA, y_train),
    ):
        if outcomes is not None:
            groups[of_outcomes] = xr.Dataset({"y": ((dim, "output")[: outcomes.ndim], outcomes)})
        if inputs is not None:
            stored = groups.get(of_inputs, xr.Dataset())
            groups[of_inputs] = stored.assign(x=((dim, "feature"), inputs)).assign_coords(coords)
    tree = xr.DataTree.from_dict(groups)
    tree.attrs |= {"method": label, "iid": 1, "claim": PREDICTIONS}
    return tree


# checks of predictions alone


def _floor(evidence: Evidence, limits: tuple[float, ...]) -> Found | None:
    """Whether the score is as good as a linear model's (of no inputs: the mean's), in pairs and by a share."""
    predicted = evidence.tree[PREDICTIONS].to_dataset()
    x = evidence.values(HELD_OUT, "x")
    if predicted.attrs.get(
        "censored", False
    ):  # the score of a value that was not seen is not that of its limit
        return None
    classes = is_classification(evidence)
    known = evidence.values(OBSERVED_DATA, "y")
    name = "log_prob" if classes else "crps" if num_outputs(evidence) == 1 else "crps_standardized"
    y = np.asarray(evidence.values(HELD_OUT, "y"))
    if name not in (scores := score(evidence)) or len(y) < MIN_DATA:
        return None
    own = np.asarray(scores[name].points)
    floor = np.full(len(y), np.nan)
    which = ""
    for rows, inputs, outcomes in _splits(y, x, evidence.values(CONSTANT_DATA, "x"), known):
        part = predicted.isel(pred_point=rows)
        found = baselines(
            [Evidence(_tree(part, y[rows], None if x is None else x[rows], inputs, outcomes))]
        )
        if not found:
            return None
        which, best = list(found.items())[-1]
        floor[rows] = score(best)[name].points
    if not classes:
        own = own / (
            1.0 + 1.0 / predicted.sizes["sample"]
        )  # what a finite number of right draws costs
    gap = (floor - own) if classes else (own - floor)
    error = float(gap.std(ddof=1)) / np.sqrt(len(gap))
    p = float(stats.norm.sf(gap.mean() / error)) if error > 0.0 else 1.0
    ratio = float(own.mean() / floor.mean()) if floor.mean() != 0.0 else 1.0
    status = grade_tested(
        p, ratio - 1.0, evidence.rates, limits if known is not None else (limits[0], np.inf)
    )
    numbers = {
        "which": which,
        "score": name,
        "own": float(own.mean()),
        "floor": float(floor.mean()),
        "p": p,
    }
    return Found(status, ratio, "", numbers, 1.0 + limits[0])


def _splits(
    y: np.ndarray, x: np.ndarray | None, x_train: np.ndarray | None, y_train: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray | None, np.ndarray]]:
    """Rows to predict, and inputs and outcomes to learn from: of training, or of the other four fifths."""
    if y_train is not None:
        yield np.arange(len(y)), x_train, y_train
        return
    order = own_stream().permutation(len(y))
    for rows in np.array_split(order, 5):
        others = np.setdiff1d(order, rows)
        yield rows, None if x is None else x[others], y[others]


#: the model's rows of the table, and those of predictions alone
MODEL_ROWS = (
    *(row for row in TABLE if row.question == "model"),
    Row("temperature", "model", temperature, (0.05, 0.25), ECE),  # distance of the power from 1
    Row("baseline", "model", _floor, (0.02, 0.25), OWN),  # shares of the score of a linear model
)
