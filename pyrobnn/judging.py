"""`judge`: whether predictions that anyone made fit the outcomes: the model's half of a verdict, from arrays alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from scipy import stats
from scipy.special import ndtri

from pyrobnn.core.checks import as_tensor
from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.core.seeding import seeded
from pyrobnn.diagnostics.calibration import (
    MIN_DATA,
    RATES,
    Dependence,
    Labelled,
    dependence_of,
    normal_scores,
    temperature,
    uniform,
)
from pyrobnn.diagnostics.check_table import ECE, OWN, TABLE, Row
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.judge import made
from pyrobnn.diagnostics.patterns import class_pit, errors, merged
from pyrobnn.diagnostics.points import NUM_QUANTILES, pit_of
from pyrobnn.diagnostics.scores import score
from pyrobnn.diagnostics.verdict import Check, Found, Verdict, grade_tested
from pyrobnn.report.baselines import baselines

#: draws of a law without quantiles; fewest draws whose common error can be seen
_NUM_SAMPLES, _JOINT = 1000, 100
_GRID = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES


def judge(predictions: Any, y: Any, *, x: Any = None, x_train: Any = None, y_train: Any = None) -> Verdict:
    r"""Say whether predictions fit outcomes that they were not trained on, whoever made them.

    Quantile transforms u = F(y) of right predictions are uniform, whatever x; of classes, labels are drawn from the
    probabilities. Checked are uniformity, coverage by region of x and by size of the prediction, patterns of u in x
    and in the order of the rows, rows copied from training, and the CRPS (of classes the log score) beside a linear
    model's; of classes also their shares, their calibration, and the power to which probabilities should be taken,
    :math:`p^\beta`: below 1 where they are too sharp.

    Args:
        predictions: draws of y (S, N) or (S, N, out), noise included; or a mapping from level to quantiles (N,); or
            class probabilities (N, K), or (N,) of class 1; or what has ``cdf`` or ``sample``: a distribution of torch
            or SciPy, a `Prediction`.
        y: outcomes (N,) or (N, out); of classes 0 … K − 1, or K labels in their sorted order.
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
        Right on average may be wrong where no input that is given says so. Rows are taken for independent.

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
    names = [str(each) for each in getattr(x, "columns", ())]
    inputs, known = (
        None if each is None else _inputs(name, each) for name, each in (("x", x), ("x_train", x_train))
    )
    said = _read(predictions, y)
    past = None if y_train is None else _outcomes("y_train", y_train, said.classes)
    for name, rows, other, of in (("x", inputs, "y", said.y), ("x_train", known, "y_train", past)):
        if rows is not None and (of is None or len(rows) != len(of)):
            raise ValueError(
                f"{name!r} has {len(rows)} rows and {other!r} {'none' if of is None else len(of)}"
            )
    if inputs is not None and known is not None and known.shape[1] != inputs.shape[1]:
        raise ValueError(f"'x' has {inputs.shape[1]} columns and 'x_train' {known.shape[1]}")
    evidence = Evidence(_tree(said, inputs, known, past, names, label))
    data: dict[str, Any]
    if said.probs is not None:
        found = errors(class_pit(said.probs, said.labels), said.y, inputs, None, names)
        labelled = Labelled(said.probs, said.labels)
        data = {"temperature": labelled, "ece": labelled}
    else:
        mean, sd = said.draws.mean(axis=0)[:, 0], said.draws.std(axis=0)[:, 0]
        # where they vary by no more than those of as many draws do, errors depend on them by chance
        size, noise = len(said.draws), float(sd.mean())
        varies = mean.std() > 3.0 * noise / np.sqrt(size), sd.std() > 3.0 * noise / np.sqrt(2.0 * size)
        found = errors(said.u, said.y, inputs, mean if varies[0] else None, names)
        if varies[1]:
            found.covariates["the predicted sd"] = merged(sd)
        data = {"coverage_by_region": [found], "pit": said}
    shared = {"held_out_rows": evidence, "pattern": [found], "row_order": [found]}
    data = {**shared, **data, "baseline": (said, evidence, inputs, known, past)}
    checks = [made(_ROWS[code], of) for code, of in data.items()]
    verdict = Verdict(label, label, tuple(check for check in checks if check is not None))
    if not verdict.checked("model"):
        check = Check("not_checked_model", "warn", "model", code="not_checked")
        verdict = Verdict(label, label, (*verdict.checks, check))
    return verdict, evidence


@dataclass(frozen=True, eq=False)
class _Said:
    """Predictions beside outcomes y (N, out): draws (S, N, out) and transforms u (N, out), or probs (N, class)."""

    y: np.ndarray
    draws: Any = None
    u: Any = None
    probs: np.ndarray | None = None
    classes: np.ndarray | None = None  # words
    dependence: Dependence = Dependence()
    more: tuple[float, ...] = ()  # p-values of the counts between quantiles

    @property
    def labels(self) -> np.ndarray:
        """Labels (N,)."""
        return self.y[:, 0].astype(int)

    def take(self, rows: np.ndarray) -> _Said:
        """The predictions of some rows."""
        if self.probs is not None:
            return replace(self, y=self.y[rows], probs=self.probs[rows])
        return replace(self, y=self.y[rows], draws=self.draws[:, rows])


def _inputs(name: str, value: Any) -> np.ndarray:
    values = _array(name, value)
    return values.reshape(len(values), -1)


def _array(name: str, value: Any) -> np.ndarray:
    array = as_tensor(name, value).detach().cpu().double().numpy()
    if array.size == 0 or array.ndim == 0 or not np.isfinite(array).all():
        row = (
            f" (row {int(np.argwhere(~np.isfinite(array))[0][-1])})" if array.size and array.ndim == 1 else ""
        )
        raise ValueError(
            f"{name!r} is empty or holds NaN or infinity{row}: leave those rows out of everything"
        )
    return array


def _outcomes(name: str, y: Any, classes: np.ndarray | None = None) -> np.ndarray:
    """Outcomes (N, out); labels that are words by their place among the classes."""
    if classes is not None:
        known = np.searchsorted(classes, np.asarray(y))
        if not (np.asarray(classes)[np.minimum(known, len(classes) - 1)] == np.asarray(y)).all():
            raise ValueError(f"{name!r} has labels that 'y' has not")
        return known.reshape(-1, 1).astype(np.float64)
    values = _array(name, y)
    return values.reshape(len(values), -1)


def _read(predictions: Any, y: Any) -> _Said:
    """Predictions in one of two forms, checked."""
    words = np.asarray(y).dtype.kind in "OUSb" if not isinstance(y, torch.Tensor) else False
    classes = np.unique(np.asarray(y)) if words else None
    outcomes = _outcomes("y", y, classes)
    if isinstance(predictions, Mapping):
        return _of_quantiles(predictions, outcomes)
    kind = getattr(getattr(predictions, "likelihood", None), "targets", None)
    law = torch.distributions
    if (kind is not None and kind.classes) or isinstance(predictions, law.Categorical | law.Bernoulli):
        return _of_probabilities(_array("predictions", predictions.probs), outcomes, classes)
    if any(hasattr(predictions, name) for name in ("cdf", "sample", "rvs")) and not hasattr(
        predictions, "columns"
    ):
        return _of_law(predictions, outcomes)
    values = _array("predictions", predictions)
    num, width = outcomes.shape
    shares = values.ndim <= 2 and len(values) == num and ((values >= 0.0) & (values <= 1.0 + 1e-6)).all()
    labels = width == 1 and (outcomes == np.round(outcomes)).all() and outcomes.min() >= 0
    sums = values.ndim == 1 or (values.ndim == 2 and np.allclose(values.sum(axis=1), 1.0, atol=1e-3))
    # probabilities that forgot a class are no draws, unless as many of these
    if shares and labels and (sums or values.shape[1:] != (num,)):
        return _of_probabilities(values, outcomes, classes)
    if values.ndim not in (2, 3) or values.shape[1] != num or len(values) < 2:
        raise ValueError(
            f"'predictions' has shape {values.shape} beside {num} outcomes: expected draws (S, {num}), "
            f"probabilities ({num}, K) that sum to 1, or a mapping from level to quantiles ({num},)"
        )
    return _of_draws(values.reshape(*values.shape[:2], -1), outcomes)


def _of_draws(draws: np.ndarray, y: np.ndarray) -> _Said:
    if draws.shape[1:] != y.shape:
        raise ValueError(f"'predictions' has draws of shape {draws.shape[1:]} and 'y' has shape {y.shape}")
    # draws in their order are quantiles: of errors in common they say nothing
    joint = len(draws) >= _JOINT and not (np.diff(draws, axis=0) >= 0.0).all()
    return _Said(y, draws, pit_of(draws, y), dependence=dependence_of(draws) if joint else Dependence())


def _of_quantiles(quantiles: Mapping[Any, Any], y: np.ndarray) -> _Said:
    levels = sorted(quantiles, key=float)
    p = np.array([float(each) for each in levels])
    if len(p) < 2 or p.min() <= 0.0 or p.max() >= 1.0 or y.shape[1] > 1:
        raise ValueError(f"quantiles need two levels or more, between 0 and 1, of one outcome: got {levels}")
    columns = [_array(f"quantile {each}", quantiles[each]).ravel() for each in levels]
    for level, column in zip(levels, columns, strict=True):
        if len(column) != len(y):
            raise ValueError(f"quantile {level} has {len(column)} rows and 'y' {len(y)}")
    q = np.stack(columns)
    if (crossed := np.argwhere(np.diff(q, axis=0) < 0.0)).size:
        at, row = crossed[0]
        raise ValueError(
            f"quantiles cross in row {row}: {levels[at + 1]} is {q[at + 1, row]:.6g}, below {q[at, row]:.6g} of "
            f"{levels[at]} ({len(np.unique(crossed[:, 1]))} rows): sort them"
        )
    edges, value = np.array([0.0, *p, 1.0]), y[:, 0]
    low, high = edges[(q < value).sum(axis=0)], edges[(q <= value).sum(axis=0) + 1]
    u = low + np.random.default_rng(0).random(len(y)) * (high - low)
    counts = [(int((u <= level).sum()), level) for level in p]
    counts.append((int(((u <= p[0]) | (u > p[-1])).sum()), p[0] + 1.0 - p[-1]))
    more = tuple(float(stats.binomtest(count, len(u), share).pvalue) for count, share in counts)
    # between levels, and beyond them, as a normal's
    z, at = ndtri(p), ndtri(_GRID)
    left = np.clip(np.searchsorted(z, at) - 1, 0, len(p) - 2)
    slope = (q[left + 1] - q[left]) / (z[left + 1] - z[left])[:, None]
    draws = q[left] + (at - z[left])[:, None] * slope
    return _Said(y, draws[..., None], u[:, None], more=more)


def _of_probabilities(probs: np.ndarray, y: np.ndarray, classes: np.ndarray | None) -> _Said:
    probs = np.stack([1.0 - probs.ravel(), probs.ravel()], axis=1) if probs.size == len(y) else probs
    if probs.shape[0] != len(y):
        raise ValueError(f"'predictions' has {probs.shape[0]} rows and 'y' {len(y)}")
    sums = probs.sum(axis=1)
    if (off := np.flatnonzero((np.abs(sums - 1.0) > 1e-3) | (probs.min(axis=1) < 0.0))).size:
        raise ValueError(
            f"probabilities of row {off[0]} sum to {sums[off[0]]:.4g}, not 1 ({len(off)} such rows)"
        )
    count = probs.shape[1]
    if not ((y == np.round(y)) & (y >= 0) & (y < count)).all() or (
        classes is not None and len(classes) != count
    ):
        raise ValueError(
            f"'y' must be labels 0 … {count - 1}, or {count} words: there are {count} probabilities"
        )
    return _Said(y, probs=probs / sums[:, None], classes=classes)


def _of_law(law: Any, y: np.ndarray) -> _Said:
    """Of a distribution of torch or SciPy, or a `Prediction`."""
    shape = tuple(getattr(law, "batch_shape", ())) or y.shape
    if shape[:1] != y.shape[:1] or np.prod(shape) != y.size:
        raise ValueError(f"'predictions' are a distribution of shape {shape} and 'y' has shape {y.shape}")
    target = y.reshape(shape if hasattr(law, "batch_shape") else (y.shape if y.shape[1] > 1 else len(y)))
    if hasattr(law, "rvs"):  # SciPy's
        u, v = np.asarray(law.cdf(target)), np.random.default_rng(0).random(target.shape)
        if hasattr(law.dist, "pmf"):
            u = law.cdf(target - 1) + v * law.pmf(target)
        draws = np.asarray(law.ppf(_GRID.reshape(-1, *[1] * target.ndim)))
        return _Said(y, draws.reshape(len(draws), *y.shape), u.reshape(y.shape))
    if hasattr(law, "pit"):  # a Prediction
        draws = law.sample(seed=0).flatten(0, 1).double().cpu().numpy().reshape(-1, *y.shape)
        found = _of_draws(draws, y)
        return replace(found, u=law.pit(torch.as_tensor(y)).double().cpu().numpy().reshape(y.shape))
    try:
        grid = torch.as_tensor(_GRID).reshape(-1, *[1] * target.ndim)
        draws, u = (
            each.double().cpu().numpy() for each in (law.icdf(grid), law.cdf(torch.as_tensor(target)))
        )
    except NotImplementedError:
        with seeded(0):
            draws = law.sample((_NUM_SAMPLES,)).double().cpu().numpy()
        return replace(_of_draws(draws.reshape(len(draws), *y.shape), y), dependence=Dependence())
    return _Said(y, draws.reshape(len(draws), *y.shape), u.reshape(y.shape))


def _tree(
    said: _Said,
    x: np.ndarray | None,
    x_train: np.ndarray | None,
    y_train: np.ndarray | None,
    names: Sequence[str] = (),
    label: str = "",
) -> xr.DataTree:
    """Predictions and outcomes as a tree of what was held out."""
    rows = ("pred_point", "output")
    y, past = said.y, y_train
    if said.probs is not None:
        y, past = said.labels, None if y_train is None else y_train[:, 0].astype(int)
        log_prob = np.log(np.maximum(said.probs[np.arange(len(y)), y], 1e-12))
        predicted = {"probs": (("pred_point", "class"), said.probs), "log_prob": (rows[:1], log_prob)}
    else:
        predicted = {"mean": (rows, said.draws.mean(axis=0)), "y_sample": (("sample", *rows), said.draws)}
    arrays = {
        (HELD_OUT, "y"): (rows[: y.ndim], y),
        (HELD_OUT, "x"): (("pred_point", "feature"), x),
        (OBSERVED_DATA, "y"): (("point", "output")[: y.ndim], past),
        (CONSTANT_DATA, "x"): (("point", "feature"), x_train),
    }
    groups = {PREDICTIONS: xr.Dataset(predicted)}
    for (group, name), (dims, values) in arrays.items():
        if values is not None:
            coords = {"feature": list(names)} if name == "x" and names else {}
            groups[group] = xr.merge(
                [groups.get(group, xr.Dataset()), xr.Dataset({name: (dims, values)}, coords)]
            )
    tree = xr.DataTree.from_dict(groups)
    tree.attrs |= {"method": label, "iid": 1}
    return tree


def _calibrated(said: _Said, limits: tuple[float, ...]) -> Found | None:
    """Whether the transforms are uniform: the worst of the outputs."""
    if len(said.y) < MIN_DATA or said.u is None:
        return None
    more = [(*normal_scores(u, said.dependence), *said.more) for u in said.u.T]
    each = [uniform(u, limits, "held-out", said.dependence, p) for u, p in zip(said.u.T, more, strict=True)]
    return min(each, key=lambda found: found.numbers["p"])


def _floor(data: tuple[Any, ...], limits: tuple[float, ...]) -> Found | None:
    """Whether the score is as good as a linear model's (of no inputs: the mean's), in pairs and by a share."""
    said, evidence, x, x_train, y_train = data
    name = "log_prob" if said.probs is not None else "crps" if said.y.shape[1] == 1 else "crps_standardized"
    if name not in (scores := score(evidence)) or len(said.y) < MIN_DATA:
        return None
    own, floor, widths, which = np.asarray(scores[name].points), np.full(len(said.y), np.nan), [], ""
    for rows, past, of in _splits(said.y, x, x_train, y_train):
        part = Evidence(_tree(said.take(rows), None if x is None else x[rows], past, of))
        found = baselines([part])
        if not found:
            return None
        which, best = list(found.items())[-1]
        against = score(best)
        floor[rows] = against[name].points
        widths += [against["width_90"].value * len(rows) / len(own)] if "width_90" in against else []
    sign = -1.0 if said.probs is not None else 1.0
    if said.probs is None:
        own = own / (1.0 + 1.0 / len(said.draws))  # what a finite number of right draws costs
    gap = sign * (own - floor)
    error = float(gap.std(ddof=1)) / np.sqrt(len(gap))
    p = float(stats.norm.sf(gap.mean() / error)) if error > 0.0 else 1.0
    ratio = float(own.mean() / floor.mean()) if floor.mean() != 0.0 else 1.0
    status = grade_tested(p, ratio - 1.0, RATES, limits if y_train is not None else (limits[0], np.inf))
    numbers = {"which": which, "score": name, "own": float(own.mean()), "floor": float(floor.mean()), "p": p}
    numbers["widths"] = ""
    if widths and "width_90" in scores:
        mine = scores["width_90"].value
        numbers["widths"] = f" 90 % intervals are {mine:.4g} wide on average, those {sum(widths):.4g}."
    return Found(status, ratio, "", numbers, 1.0 + limits[0])


def _splits(
    y: np.ndarray, x: np.ndarray | None, x_train: np.ndarray | None, y_train: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray | None, np.ndarray]]:
    """Rows to predict, and inputs and outcomes to learn from: of training, or of the other four fifths."""
    order = np.random.default_rng(0).permutation(len(y))
    if y_train is not None:
        yield np.arange(len(y)), x_train, y_train
        return
    for rows in np.array_split(order, 5):
        others = np.setdiff1d(order, rows)
        yield rows, None if x is None else x[others], y[others]


#: the model's rows of the table, and those of predictions alone; each takes its arrays as they are
_ROWS = {
    row.code: replace(row, data=lambda given: given)
    for row in (
        *(replace(each, statistic=_calibrated) if each.code == "pit" else each for each in TABLE),
        Row("temperature", "model", temperature, (0.05, 0.25), ECE),  # distance of the power from 1
        Row("baseline", "model", _floor, (0.02, 0.25), OWN),  # shares of the score of a linear model
    )
}
