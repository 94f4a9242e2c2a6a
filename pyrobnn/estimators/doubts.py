"""What is doubtful of rows, in words: copies, constant or rounded columns, rows far from the training data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from pyrobnn.data.columns import constant_features

#: share of the rows that may be copies of others without a word
COPIES = 0.1
#: of a column's standard deviation, the steps of float32 that its values may have without a word
COARSE = 0.1
#: of a feature's range in the training data, how far beyond it a row may be predicted without a word
FAR = 0.5


def tell_doubts(x: np.ndarray, y: np.ndarray, names: Sequence[str], *, weighted: bool) -> None:
    """Warn of constant columns, of columns that float32 has rounded, and of copies.

    Copies are told where more than a tenth of the rows, with a measured number, are copies of others.

    Args:
        x, y: (n, feature) and (n,) or (n, out).
        names: of the columns.
        weighted: whether rows have weights; then copies are not looked for.
    """
    for text in constant_features(x, names):
        warnings.warn(text, UserWarning, stacklevel=4)
    for text in _coarse(x, names):
        warnings.warn(text, UserWarning, stacklevel=4)
    if weighted:
        return
    distinct = np.unique(np.column_stack([x, y]), axis=0)
    copies, measured = len(x) - len(distinct), max(len(np.unique(column)) for column in x.T)
    if copies > COPIES * len(x) and 2 * measured > len(distinct):
        warnings.warn(
            f"{copies:,} of {len(x):,} rows are copies of others, target and all, and count as observations of their "
            "own: if they are the same ones, drop them, or the fit is too sure",
            UserWarning,
            stacklevel=4,
        )


def _coarse(x: np.ndarray, names: Sequence[str]) -> list[str]:
    """A sentence about each column whose values float32 holds exactly, in steps that are large beside their spread."""
    found = []
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = x.astype(np.float32)
        steps = np.spacing(np.abs(narrow).max(0)).tolist()
    for name, values, held, step in zip(names, x.T, narrow.T, steps):
        spread = float(values.std())
        if step > COARSE * spread > 0 and np.array_equal(values, held):
            found.append(
                f"the feature {str(name)!r} comes in steps of {step:.3g}, those of float32 at {values[0]:.3g}, "
                f"and has a standard deviation of {spread:.3g}: what it says is rounded away; pass float64, or "
                "subtract its mean before it becomes float32"
            )
    return found


def tell_far(train: np.ndarray, x: np.ndarray, names: Sequence[str]) -> None:
    """Warn of rows that lie beyond the training data by more than half the range of a feature.

    Args:
        train, x: (N, feature) and (n, feature).
        names: of the features.
    """
    low, high = train.min(0), train.max(0)
    beyond = np.maximum(low - x, x - high) > FAR * (high - low)
    if rows := int(beyond.any(1).sum()):
        worst = int(beyond.sum(0).argmax())
        warnings.warn(
            f"{rows:,} of {len(x):,} rows lie far beyond the training data, most of them in {str(names[worst])!r}, "
            f"which goes from {low[worst]:.6g} to {high[worst]:.6g} there: no check has looked at such rows, and what "
            "is predicted of them is the prior's rather than the data's",
            UserWarning,
            stacklevel=5,
        )
