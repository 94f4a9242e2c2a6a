"""How the columns of a table become inputs: numbers, truth values, categories, dates, times, and the gaps in them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

from pyrobnn.checks import check_choice
from pyrobnn.data.cells import (
    CLOCK,
    DATE,
    alike,
    as_text,
    clock,
    dated,
    day_first,
    days,
    numbers,
    refuse_units,
    truths,
)

Missing = Literal["refuse", "drop", "impute"]
Kind = Literal["number", "boolean", "category", "date", "time"]
#: categories that get an input each, the most frequent; the others share none
MOST_CATEGORIES = 50
#: text with more different values than this share of its rows tells rows apart and not kinds of them
_LABEL_SHARE, _FEWEST_LABELS = 0.5, 10
#: rows and columns that a message names
LISTED = 8
#: days of the cycles of a date: a sine and a cosine of each that the dates span twice and resolve
CYCLES = {"day": 1.0, "week": 7.0, "year": 365.2425}


@dataclass(frozen=True)
class Column:
    """One column of a table and what was learned of it.

    Attributes: ``name``; ``kind``; ``categories``, in sorted order, "" for a gap; ``fill``, the median, in place of a
    gap, and ``indicator``, whether an input says where there was one; ``day_first`` of dates, None where their text is
    unambiguous, and their ``cycles``.
    """

    name: str
    kind: Kind
    categories: tuple[str, ...] = ()
    fill: float = 0.0
    indicator: bool = False
    day_first: bool | None = None
    cycles: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that it becomes."""
        if self.kind == "category":
            names = [f"{self.name}={category or 'missing'}" for category in self.categories]
        elif self.kind in ("date", "time"):
            waves = [
                f"{self.name} ({wave} of the {cycle})" for cycle in self.cycles for wave in ("sine", "cosine")
            ]
            names = [f"{self.name} (days)", *waves]
        else:
            names = [self.name]
        return (*names, f"{self.name} is missing") if self.indicator else tuple(names)


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are inputs, and what is done where a value is missing.

    It is fitted to a training table and then turns any table with these columns into the same inputs, by
    scikit-learn's ``ColumnTransformer``. Its settings are plain values, which a saved posterior keeps.

    Args:
        columns: in their order.
        missing: ``"refuse"``; ``"drop"`` the row; ``"impute"``: a number gets the median and an input that says so, a
            gap among categories is a category.
    """

    columns: tuple[Column, ...]
    missing: Missing = "refuse"

    @classmethod
    def fit(cls, frame: pd.DataFrame, missing: Missing, where: str) -> Columns:
        """What the columns of ``frame`` are.

        Args:
            frame: the training table, without its target.
            missing: as above.
            where: the table's name in messages.

        Raises:
            ValueError: a column that is neither numbers nor truth values, categories, dates or times throughout, or is
                empty.

        Warns:
            UserWarning: of text that names the rows, which is left out, and of rare categories.
        """
        check_choice("missing", missing, get_args(Missing))
        columns = []
        for name in frame.columns:
            column = _learned(where, frame[name], missing)
            if column is not None:
                columns.append(column)
        if not columns:
            raise ValueError(f"{where} has no column to predict from: all are left out")
        return cls(tuple(columns), missing)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns."""
        return tuple(column.name for column in self.columns)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def plain(self) -> bool:
        """Whether the inputs are the columns themselves."""
        return all(column.kind in ("number", "boolean") and not column.indicator for column in self.columns)

    def transform(self, frame: pd.DataFrame, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (n, input), float64, of the rows that are kept, and which rows these are (N,), bool.

        Args:
            frame: a table with these columns; others are not looked at.
            where: its name in messages.

        Raises:
            ValueError: missing columns, missing values where they are refused, cells that are not of their column's
                kind, infinite numbers.

        Warns:
            UserWarning: of categories that the training table has not, and gaps where it has none.
        """
        absent = [name for name in self.names if name not in frame.columns]
        if absent:
            raise ValueError(
                f"{where} lacks the column {', '.join(map(repr, absent))}: it has {', '.join(map(str, frame.columns))}"
            )
        values = pd.DataFrame(
            {column.name: _values(where, frame[column.name], column) for column in self.columns},
            index=frame.index,
        )
        _refuse_infinite(where, values)
        gaps = values.isna()
        keep = np.ones(len(values), bool)
        if self.missing == "drop":
            keep = ~gaps.any(axis=1).to_numpy()
        elif self.missing == "refuse":
            refuse_gaps(
                where, gaps, "drop these rows or impute them, or fit anew with missing='impute' (--missing)"
            )
        for column in self.columns:
            _tell(where, values[column.name][keep], column)
        if not keep.any():
            raise ValueError(
                f"{where} has a missing value in every row: use missing='impute' (--missing impute)"
            )
        x = self._transformer().fit_transform(values[keep])
        return np.asarray(x, dtype=np.float64), keep

    def _transformer(self) -> ColumnTransformer:
        """It learns nothing when it is fitted: all that it needs was learned from the training table."""
        steps: list[tuple[str, Any, list[str]]] = []
        for column in self.columns:
            name, step = column.name, "passthrough"
            if column.kind == "category":
                # a category that is not among them is none of them: zeros
                step = OneHotEncoder(
                    categories=[np.array(column.categories, dtype=object)],
                    handle_unknown="ignore",
                    sparse_output=False,
                )
            elif self.missing == "impute":
                step = SimpleImputer(strategy="constant", fill_value=column.fill, keep_empty_features=True)
            if column.kind in ("date", "time"):
                waves = FunctionTransformer(_waves, kw_args={"cycles": column.cycles})
                step = waves if step == "passthrough" else make_pipeline(step, waves)
            steps.append((name, step, [name]))
            if column.indicator:
                steps.append((f"{name} is missing", MissingIndicator(features="all"), [name]))
        return ColumnTransformer(steps, sparse_threshold=0.0)

    def settings(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Columns:
        """From the values of :meth:`settings`, also after JSON has made lists of tuples."""

        def column(each: Mapping[str, Any]) -> Column:
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in each.items()}
            return Column(**values)

        return cls(tuple(map(column, settings["columns"])), settings["missing"])


def constant_features(x: np.ndarray, names: Sequence[str]) -> list[str]:
    """A sentence about the columns of ``x`` (n, feature) that have one value in all of several rows, or none."""
    if len(x) < 2:
        return []
    constant = [str(name) for name, values in zip(names, x.T) if np.ptp(values) == 0]
    named = ", ".join(map(repr, constant))
    if len(constant) > 1:
        return [f"the features {named} are constant and tell nothing"]
    return [f"the feature {named} is constant and tells nothing"] if constant else []


def refuse_gaps(where: str, gaps: pd.DataFrame, remedy: str) -> None:
    """Refuse a table with missing values, naming columns, rows and the remedy.

    Raises:
        ValueError: there are some.
    """
    count = gaps.sum()
    count = count[count > 0]
    if len(count):
        columns = ", ".join(f"{column!r} ({number})" for column, number in count.items())
        rows = np.flatnonzero(gaps.any(axis=1).to_numpy()) + 1
        listed = ", ".join(map(str, rows[:LISTED])) + (" …" if len(rows) > LISTED else "")
        raise ValueError(f"{where} has missing values in row {listed} (column {columns}): {remedy}")


def _refuse_infinite(where: str, values: pd.DataFrame) -> None:
    infinite = values.select_dtypes("number").abs() == np.inf
    if infinite.to_numpy().any():
        name = infinite.columns[infinite.any().to_numpy().argmax()]
        row = int(infinite.any(axis=1).to_numpy().argmax()) + 1
        raise ValueError(
            f"{where} has infinite values, first in row {row} (column {name!r}): drop these rows"
        )


def _learned(where: str, column: pd.Series, missing: Missing) -> Column | None:
    """What the column is; None where it is to be left out."""
    name, gaps = str(column.name), column.isna()
    if gaps.all():
        raise ValueError(f"{where}: column {name!r} holds no value: drop it")
    indicator = missing == "impute" and bool(gaps.any())
    if isinstance(column.dtype, pd.CategoricalDtype):
        return _categories(where, name, column, indicator)
    if dated(column):
        return _dates(name, days(where, column, None), None, indicator)
    values = numbers(where, column)
    if values is not None:
        kind: Kind = "boolean" if pd.api.types.is_bool_dtype(column) or truths(column) else "number"
        fill = float(np.nanmedian(values)) if np.isfinite(values).any() else 0.0
        return Column(name, kind, fill=fill, indicator=indicator)
    if not column.dropna().map(pd.api.types.is_scalar).all():
        raise ValueError(
            f"{where}: column {name!r} holds lists or other objects: make columns of them, or drop it"
        )
    text = as_text(column).dropna()
    if text.str.fullmatch(CLOCK).all():
        known = clock(where, column)
        return Column(name, "time", fill=float(np.nanmedian(known)), indicator=indicator, cycles=("day",))
    if text.str.match(DATE).all():
        first = day_first(where, name, text)
        return _dates(name, days(where, column, first), first, indicator)
    refuse_units(where, name, text)
    if len(text) >= _FEWEST_LABELS and text.nunique() > _LABEL_SHARE * len(text):
        warnings.warn(
            f"{where}: the column {name!r} is text with {text.nunique()} different values in {len(text)} rows "
            f"({text.iloc[0]!r} …): taken for a label of its rows and left out",
            UserWarning,
            stacklevel=5,
        )
        return None
    return _categories(where, name, column, indicator)


def _categories(where: str, name: str, column: pd.Series, indicator: bool) -> Column:
    text = as_text(column).fillna("") if indicator else as_text(column).dropna()
    counts = text.value_counts()
    frequent = sorted(counts.index[:MOST_CATEGORIES])
    if twins := alike(sorted(counts.index)):
        warnings.warn(f"{where}: of the column {name!r} {twins}", UserWarning, stacklevel=6)
    if len(counts) > len(frequent):
        rows = int(counts.iloc[MOST_CATEGORIES:].sum())
        warnings.warn(
            f"{where}: the column {name!r} has {len(counts)} categories: the {len(frequent)} most frequent are told "
            f"apart, those of the other {rows} rows are not",
            UserWarning,
            stacklevel=6,
        )
    return Column(name, "category", categories=tuple(frequent))


def _dates(name: str, values: np.ndarray, day_first: bool | None, indicator: bool) -> Column:
    known = values[~np.isnan(values)]
    steps = np.diff(np.unique(known))
    span, finest = float(np.ptp(known)), float(steps.min()) if len(steps) else 0.0
    cycles = tuple(cycle for cycle, length in CYCLES.items() if 2 * finest <= length <= (span + finest) / 2)
    return Column(
        name, "date", fill=float(np.median(known)), indicator=indicator, day_first=day_first, cycles=cycles
    )


def _values(where: str, column: pd.Series, learned: Column) -> np.ndarray | pd.Series:
    """The cells as the column's kind has them, with gaps."""
    if learned.kind == "category":
        text = as_text(column)
        return text.fillna("") if "" in learned.categories else text
    if learned.kind == "date":
        return days(where, column, learned.day_first)
    if column.isna().all():
        return np.full(len(column), np.nan)
    if learned.kind == "time":
        return clock(where, column)
    values = numbers(where, column)
    if values is None:
        text = as_text(column).dropna()
        raise ValueError(
            f"{where}: column {learned.name!r} holds text such as {text.iloc[0]!r}: the training data have numbers"
        )
    return values


def _tell(where: str, values: pd.Series, column: Column) -> None:
    """Warn of what the training table has not."""
    if column.kind == "category":
        unseen = sorted(set(values.fillna("").unique()) - set(column.categories))
        # of more categories than are told apart, the others were seen
        if unseen and len(column.categories) < MOST_CATEGORIES:
            count = int(values.fillna("").isin(unseen).sum())
            listed = ", ".join(repr(each) if each else "a missing value" for each in unseen[:LISTED])
            warnings.warn(
                f"{where}: the column {column.name!r} has categories that the training data have not, in {count} rows "
                f"({listed}): they count as none of the known ones",
                UserWarning,
                stacklevel=4,
            )
    elif values.isna().any() and not column.indicator:
        warnings.warn(
            f"{where}: the column {column.name!r} has missing values, in {int(values.isna().sum())} rows, and had none "
            f"in the training data: the median there, {column.fill:g}, stands for them",
            UserWarning,
            stacklevel=4,
        )


def _waves(values: Any, cycles: Sequence[str]) -> np.ndarray:
    """Days, and a sine and a cosine of each cycle."""
    day = np.asarray(values, dtype=np.float64)
    turns = [2 * np.pi * day / CYCLES[cycle] for cycle in cycles]
    return np.hstack([day, *(wave(turn) for turn in turns for wave in (np.sin, np.cos))])
