"""Labels of any kind as numbers: the places of the columns that they name, or their places in sorted order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence, Sized
from typing import Protocol, TypeGuard

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike


class _Table(Sized, Protocol):
    """A DataFrame of pandas or Polars."""

    @property
    def columns(self) -> Iterable[str]: ...


def is_table(values: object) -> TypeGuard[_Table]:
    """Whether values have columns with names."""
    return hasattr(values, "columns")


def column_titles(predictions: object, y: ArrayLike) -> list[str]:
    """The columns of a DataFrame of predictions, by name; none where there are no names, or not a row an outcome."""
    if not is_table(predictions) or isinstance(predictions.columns, pd.RangeIndex):
        return []
    if len(predictions) != np.asarray(y).size:
        return []
    return [str(column) for column in predictions.columns]


def in_places(
    titles: Sequence[str], y: ArrayLike, y_train: ArrayLike | None
) -> tuple[ArrayLike, ArrayLike | None, int | None]:
    """Labels as the places of the columns that they name (cat, or p_cat), words else in sorted order; their number.

    Labels that are neither stay as they are.
    """
    cells = _cells(y)
    train_cells = np.array([]) if y_train is None else _cells(y_train)
    words = cells.dtype.kind in "OUSb"
    if not words and not titles:
        return y, y_train, None
    num_missing = int(pd.isna(cells).sum())
    if num_missing:
        raise ValueError(f"'y' holds {num_missing} missing labels: drop these rows")
    names = _names_in_order(cells, train_cells, titles)
    if names is None:
        return y, y_train, None
    order = pd.Index(names)
    # the label that no column names has place 0
    places = order.get_indexer(_as_text(cells)).clip(0)
    train_places = None
    if y_train is not None:
        train_places = order.get_indexer(_as_text(train_cells)).clip(0)
    return places, train_places, len(order) if words else None


def _names_in_order(
    cells: np.ndarray, train_cells: np.ndarray, titles: Sequence[str]
) -> list[str] | None:
    """The label of each place: that of the columns, else words in sorted order; None of numbers that name no column."""
    labels = {*_as_text(cells), *_as_text(train_cells)}
    if cells.dtype.kind == "b":
        labels |= {"False", "True"}
    names = _column_names(titles, labels)
    if names is None and cells.dtype.kind in "OUSb":
        return sorted(labels)
    return names


def _column_names(titles: Sequence[str], labels: set[str]) -> list[str] | None:
    """The label of each column, in the columns' order; None where the titles are not of these labels."""
    # less a prefix that all titles share, up to its last separator
    prefix = re.sub(r"[^\W_]+$", "", os.path.commonprefix(titles))
    names = titles if labels <= {*titles} else [title.removeprefix(prefix) for title in titles]
    # one column is of its label, not of the other, which has no name then
    unnamed = [""] if len(names) == 1 else []
    fits = bool(labels & {*names}) and len(labels - {*names}) <= len(unnamed)
    return [*unnamed, *names] if fits else None


def _cells(labels: ArrayLike) -> np.ndarray:
    """Labels (N,) of the type that they have in common."""
    cells = np.asarray(labels).ravel()
    return np.array(cells.tolist()) if cells.dtype.kind == "O" else cells


def _as_text(cells: np.ndarray) -> np.ndarray:
    return np.char.mod("%g", cells) if cells.dtype.kind in "iuf" else cells.astype(str)
