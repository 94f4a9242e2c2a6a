"""Warnings about rows: copies, constant columns, rows far from the training data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from pyrobnn.data.table import constant_features


def warn_about_data(x: np.ndarray, y: np.ndarray, names: Sequence[str], *, weighted: bool) -> None:
    """Warn of constant columns, and of copies where more than a tenth of the rows, with a measured number, are some.

    Args:
        x, y: (n, feature) and (n,) or (n, out).
        names: of the columns.
        weighted: whether rows have weights; then copies are not looked for.
    """
    for text in constant_features(x, names):
        warnings.warn(str(text), UserWarning, stacklevel=4)
    distinct = np.unique(np.column_stack([x, y]), axis=0)
    copies, measured = len(x) - len(distinct), max(len(np.unique(column)) for column in x.T)
    if not weighted and copies > 0.1 * len(x) and 2 * measured > len(distinct):
        warnings.warn(
            f"{copies:,} of {len(x):,} rows are copies of others, target and all, and count as observations of their "
            "own: if they are the same ones, drop them, or the fit is overconfident",
            UserWarning,
            stacklevel=4,
        )


def warn_extrapolation(train: np.ndarray, x: np.ndarray, names: Sequence[str]) -> None:
    """Warn of rows that lie beyond the training data by more than half the range of a feature.

    Args:
        train, x: (N, feature) and (n, feature).
        names: of the features.
    """
    low, high = train.min(0), train.max(0)
    beyond = np.maximum(low - x, x - high) > 0.5 * (high - low)
    if rows := int(beyond.any(1).sum()):
        worst = int(beyond.sum(0).argmax())
        warnings.warn(
            f"{rows:,} of {len(x):,} rows lie far beyond the training data, most of them in {str(names[worst])!r}, "
            f"which goes from {low[worst]:.6g} to {high[worst]:.6g} there: predictions of such rows are the prior's "
            "rather than the data's",
            UserWarning,
            stacklevel=5,
        )
