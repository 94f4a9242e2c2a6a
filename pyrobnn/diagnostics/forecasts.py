"""Predictions in whatever form they come, read into one of two: draws and PIT values of numbers, or probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard

import numpy as np
import pandas as pd
import torch
import xarray as xr
from numpy.typing import ArrayLike
from scipy.special import ndtri

from pyrobnn.core.checks import as_tensor, check_finite
from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA, PREDICTIONS, REPLICATE
from pyrobnn.core.seeding import own_stream, seeded
from pyrobnn.diagnostics.class_labels import is_table
from pyrobnn.diagnostics.limits import NUM_QUANTILES
from pyrobnn.diagnostics.prediction_metrics import pit_of

#: draws of a law without quantiles
_NUM_SAMPLES = 1000
#: fewest draws whose common error can be seen
_FEWEST_JOINT = 100
_GRID = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
_ROWS = ("pred_point", "output")


class _Prediction(Protocol):
    """A `Prediction`."""

    @property
    def likelihood(self) -> Any: ...

    def pit(self, y: torch.Tensor) -> torch.Tensor: ...

    def sample(self, *, seed: int) -> torch.Tensor: ...


class _FrozenLaw(Protocol):
    """A distribution of SciPy with its parameters."""

    args: tuple[ArrayLike, ...]
    kwds: Mapping[str, ArrayLike]
    dist: Any

    def ppf(self, q: np.ndarray) -> np.ndarray: ...

    def cdf(self, x: np.ndarray) -> np.ndarray: ...

    def pmf(self, k: np.ndarray) -> np.ndarray: ...


class _Probabilities(Protocol):
    """A distribution of labels, or a `Prediction` of classes."""

    @property
    def probs(self) -> torch.Tensor: ...


class _OfPositions(Protocol):
    """Predictions that may have several labels a row."""

    def one_position(self, y: Outcomes) -> tuple[_Prediction, torch.Tensor]: ...


#: at which side of its limit an outcome lies that was not seen
Censoring: TypeAlias = Literal["right", "left"]
#: outcomes, inputs and whatever else is read as an array
Outcomes: TypeAlias = ArrayLike | torch.Tensor | pd.DataFrame | pd.Series
Predictions: TypeAlias = (
    Outcomes
    | Mapping[float | str, Outcomes]
    | torch.distributions.Distribution
    | _FrozenLaw
    | _Prediction
)


def is_prediction(predictions: Predictions) -> TypeGuard[_Prediction]:
    """Whether predictions are a `Prediction`."""
    return hasattr(predictions, "pit") and not is_table(predictions)


def has_positions(predictions: Predictions) -> TypeGuard[_OfPositions]:
    """Whether predictions can have several labels a row, of which one is an independent point."""
    return is_prediction(predictions) and hasattr(predictions, "one_position")


def _predicts_probabilities(predictions: Predictions) -> TypeGuard[_Probabilities]:
    targets = getattr(getattr(predictions, "likelihood", None), "targets", None)
    of_classes = (torch.distributions.Categorical, torch.distributions.Bernoulli)
    return (targets is not None and targets.classes) or isinstance(predictions, of_classes)


def _is_of_scipy(predictions: Predictions) -> TypeGuard[_FrozenLaw]:
    return hasattr(predictions, "rvs") and not is_table(predictions)


def _is_of_torch(predictions: Predictions) -> TypeGuard[torch.distributions.Distribution]:
    is_law = hasattr(predictions, "cdf") or hasattr(predictions, "sample")
    return is_law and not is_table(predictions)


def optional_array(name: str, value: Outcomes | None) -> np.ndarray | None:
    """As `array_of`; None of None."""
    return None if value is None else array_of(name, value)


def array_of(name: str, value: Outcomes) -> np.ndarray:
    """Numbers (N, …), columns behind the rows."""
    tensor = as_tensor(name, value).detach().cpu().double()
    array = tensor.numpy()
    if array.size == 0 or array.ndim == 0:
        raise ValueError(f"{name!r} has shape {array.shape}: a value for each row is needed")
    check_finite(name, tensor)
    if not bool(tensor.square().isfinite().all()):
        raise ValueError(f"{name!r} holds values too large to square: use other units")
    # predictions keep their axes; all else becomes a table
    return array if name == "predictions" else array.reshape(len(array), -1)


def read(predictions: Predictions, y: np.ndarray, num_words: int | None) -> xr.Dataset:
    """Predictions of outcomes y (N, out) in one of two forms, checked.

    Of numbers PIT values and draws; of classes probabilities, of as many classes as labels that were words.
    """
    if isinstance(predictions, Mapping):
        return _of_quantiles(predictions, y)
    if _predicts_probabilities(predictions):
        return _of_probabilities(array_of("predictions", predictions.probs), y, num_words)
    if is_prediction(predictions):
        return _of_prediction(predictions, y)
    if _is_of_scipy(predictions):
        return _of_scipy(predictions, y)
    if _is_of_torch(predictions):
        return _of_torch(predictions, y)
    if isinstance(predictions, list | tuple) and len(predictions) == 2:
        raise TypeError(
            "'predictions' is a pair: for mean and sd give scipy.stats.norm(mean, sd), for draws an array"
        )
    values = _without_chains(array_of("predictions", predictions), y)
    if _are_probabilities(values, y):
        return _of_probabilities(values, y, num_words)
    return _of_array(values, y)


def _are_probabilities(values: np.ndarray, y: np.ndarray) -> bool:
    """Whether an array is of probabilities of labels.

    Rows that do not sum to one count too, so that they are refused as such; a square array of them is read as draws.
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
    joint = len(draws) >= _FEWEST_JOINT and not (np.diff(draws, axis=0) >= 0.0).all()
    return _of_draws(draws, pit_of(draws, y), joint=joint)


def seen_rows(predictions: Predictions, y: np.ndarray) -> np.ndarray | None:
    """Which outcomes (N, 2) of draws of one number were seen, (N, 1), by their second column; None where none says it.

    The other values are limits beyond which the outcome lies.
    """
    shape = tuple(getattr(predictions, "shape", ()))
    flat = len(shape) == 2 and shape[0] != len(y)
    of_one = flat or (len(shape) > 2 and (shape[-1] == 1 or shape[2:] == (len(y),)))
    if not of_one or y.shape[1] != 2 or not np.isin(y[:, 1], (0.0, 1.0)).all():
        return None
    return y[:, 1:] == 1.0


def censored(predicted: xr.Dataset, seen: np.ndarray, censoring: Censoring) -> xr.Dataset:
    """Predictions whose PIT values of limits are drawn at random from what these leave open; as they are without any.

    Args:
        predicted: of values and limits alike.
        seen: which of them are values, (N, 1).
        censoring: ``"right"``: an outcome that was not seen lies above its limit; ``"left"``: below.

    Reference: Randomized quantile residuals (Dunn & Smyth, 1996).
    """
    if seen.all():
        return predicted
    u = predicted["pit"].to_numpy()
    share = own_stream().random(u.shape)
    beyond = u + share * (1.0 - u) if censoring == "right" else u * share
    pit = np.where(seen, u, beyond)
    return predicted.assign(pit=(_ROWS, pit)).assign_attrs(censored=True)


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
    """A dataset of draws (draw, point, output) and PIT values (point, output).

    Its attributes are read by `calibration.held_out`: ``joint``, whether draws are of all points together, and
    ``levels``, of the quantiles that draws were made of.
    """
    columns = {
        "mean": (_ROWS, draws.mean(axis=0)),
        "y_sample": ((REPLICATE, *_ROWS), draws),
        "pit": (_ROWS, u),
    }
    return xr.Dataset(columns, attrs={"joint": joint, "levels": tuple(levels)})


def _of_quantiles(quantiles: Mapping[float | str, Outcomes], y: np.ndarray) -> xr.Dataset:
    """Of quantiles by level, which are joined as a normal's."""
    number = partial(pd.to_numeric, errors="coerce")
    levels = sorted(quantiles, key=number)
    p = np.array([float(number(level)) for level in levels])
    if len(set(p)) < max(2, len(p)) or not (p.min() > 0.0 and p.max() < 1.0) or y.shape[1] > 1:
        raise ValueError(
            f"quantiles need two levels or more, numbers between 0 and 1, of one outcome: got {levels}"
        )
    columns = [array_of(f"quantile {level}", quantiles[level]).ravel() for level in levels]
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


def _of_prediction(prediction: _Prediction, y: np.ndarray) -> xr.Dataset:
    """Of a `Prediction`, which knows what a censored outcome leaves open."""
    u = _numpy(prediction.pit(torch.as_tensor(y)))
    draws = _numpy(prediction.sample(seed=0).flatten(0, 1))
    predicted = _of_draws(draws, u, joint=len(draws) >= _FEWEST_JOINT)
    return predicted.assign_attrs(censored=prediction.likelihood.targets.censoring is not None)


# distributions


def _of_scipy(law: _FrozenLaw, y: np.ndarray) -> xr.Dataset:
    """Of a distribution of SciPy: PIT values at random within the step of a whole number.

    Raises:
        TypeError: If it is not frozen, or not of one number.
    """
    if not hasattr(law, "ppf") or not hasattr(law, "dist"):
        raise TypeError(
            "'predictions' of SciPy must be frozen and of one number a row: scipy.stats.norm(mean, sd)"
        )
    law_shape = np.broadcast_shapes(*map(np.shape, (*law.args, *law.kwds.values())))
    shape = law_shape if math.prod(law_shape) == y.size else _natural_shape(y)
    _check_shape(shape, y)
    target = y.reshape(shape)
    draws = np.asarray(law.ppf(_grid_before(shape)))
    if hasattr(law.dist, "pmf"):
        u = law.cdf(target - 1) + own_stream().random(target.shape) * law.pmf(target)
    else:
        u = np.asarray(law.cdf(target))
    return _of_law_draws(draws, u, shape, y)


def _of_torch(law: torch.distributions.Distribution, y: np.ndarray) -> xr.Dataset:
    """Of a distribution of torch: its quantiles, or draws of a law without; of one outcome's, one for each row."""
    law_shape = (*getattr(law, "batch_shape", ()), *getattr(law, "event_shape", ()))
    shape = law_shape or _natural_shape(y)
    _check_shape(shape, y)
    target = y.reshape(shape)
    try:
        draws = _numpy(law.icdf(torch.as_tensor(_grid_before(shape))))
        u = _numpy(law.cdf(torch.as_tensor(target)))
    except NotImplementedError:
        repeats = shape[len(law_shape) :]
        with seeded(0):
            draws = _numpy(law.sample(torch.Size((_NUM_SAMPLES, *repeats))))
        u = pit_of(draws, target)
    return _of_law_draws(draws, u, shape, y)


def _natural_shape(y: np.ndarray) -> tuple[int, ...]:
    """(N, out), of one output (N,)."""
    return y.shape if y.shape[1] > 1 else y.shape[:1]


def _check_shape(shape: tuple[int, ...], y: np.ndarray) -> None:
    if shape[:1] != y.shape[:1] or math.prod(shape) != y.size:
        raise ValueError(
            f"'predictions' are a distribution of shape {shape} and 'y' has shape {y.shape}"
        )


def _grid_before(shape: tuple[int, ...]) -> np.ndarray:
    """Levels (level, 1, …) of quantiles of a distribution of a shape."""
    return _GRID.reshape(-1, *[1] * len(shape))


def _of_law_draws(
    draws: np.ndarray,
    u: np.ndarray,
    shape: tuple[int, ...],
    y: np.ndarray,
) -> xr.Dataset:
    """Of quantiles or draws (draw, …) and PIT values of the shape of a distribution."""
    draws = np.broadcast_to(draws, (len(draws), *shape)).copy()
    return _of_draws(draws.reshape(len(draws), *y.shape), u.reshape(y.shape))


def _numpy(values: torch.Tensor) -> np.ndarray:
    return values.double().cpu().numpy()


def tree_of(
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
