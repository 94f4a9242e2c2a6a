"""How the columns of a table become inputs: numbers, truth values, categories, dates, times, and the gaps in them."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from pyrobnn.core.checks import check_choice
from pyrobnn.core.findings import Finding, warn
from pyrobnn.data.cells import (
    DATE,
    TIME,
    as_text,
    day_first_of,
    days,
    is_boolean,
    numbers,
    one_spelling,
    only_numbers,
)

Missing = Literal["refuse", "drop", "impute"]
Kind = Literal["number", "boolean", "category", "date", "time"]
#: categories that get an input each, the most frequent
_MAX_CATEGORIES = 50
#: categories from which on a column may be pooled: of fewer the variance between them is hardly known
_FEWEST_POOLED = 20
#: days of the cycles of a date, a year of the Gregorian calendar
_CYCLES = {"day": 1.0, "week": 7.0, "year": 365.2425}


@dataclass(frozen=True)
class Column:
    """One column of a table and what was learned of it.

    Attributes: ``name``; ``kind``; ``categories``, sorted, read in any case, "" for a gap; ``fill``, the median, in
    place of a gap, and ``indicator``, whether an input says where there was one; ``day_first`` of dates, None where
    their text is unambiguous, and their ``cycles``; ``pooled``, whether all categories are one input, their number in
    the order, unknown ones having numbers beyond: an estimator then makes it their effect.
    """

    name: str
    kind: Kind
    categories: tuple[str, ...] = ()
    fill: float = 0.0
    indicator: bool = False
    day_first: bool | None = None
    cycles: tuple[str, ...] = ()
    pooled: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that it becomes."""
        if self.pooled:
            names = [self.name]
        elif self.kind == "category":
            names = [f"{self.name}={category or 'missing'}" for category in self.categories]
        elif self.kind in ("date", "time"):
            names = [f"{self.name} (days)"]
            for cycle in self.cycles:
                names += [f"{self.name} ({wave} of the {cycle})" for wave in ("sine", "cosine")]
        else:
            names = [self.name]
        return (*names, f"{self.name} is missing") if self.indicator else tuple(names)

    def read(self, where: str, cells: pd.Series) -> pd.Series:
        """Cells as the column's kind has them, with gaps: text of categories, else float64; ValueError of others."""
        if self.kind == "category":
            spellings = {category.casefold(): category for category in self.categories}
            spellings |= {category: category for category in self.categories}
            text = as_text(cells).map(
                lambda cell: spellings.get(cell, spellings.get(cell.casefold(), cell)),
                na_action="ignore",
            )
            return text.fillna("") if "" in self.categories else text
        if cells.isna().all():
            return pd.Series(np.nan, index=cells.index)
        if self.kind in ("date", "time"):
            return days(
                where,
                cells,
                self.day_first,
                time=self.kind == "time",
            )
        return pd.Series(only_numbers(where, cells), index=cells.index)

    def encode(self, values: pd.Series) -> list[np.ndarray]:
        """The inputs (n,) of values as :meth:`read` gives them; an unknown category is none of the known ones."""
        if self.pooled:
            codes = {category: code for code, category in enumerate(self.categories)}
            for category in values.fillna("").unique():
                # one that is unknown has a number of its own, the same in every table
                codes.setdefault(category, len(self.categories) + zlib.crc32(category.encode()))
            inputs = [values.fillna("").map(codes).to_numpy(dtype=np.float64)]
        elif self.kind == "category":
            inputs = [(values == category).to_numpy() for category in self.categories]
        else:
            filled = values.fillna(self.fill).to_numpy()
            inputs = [filled]
            for cycle in self.cycles:
                angle = 2 * np.pi * filled / _CYCLES[cycle]
                inputs += [np.sin(angle), np.cos(angle)]
        if self.indicator:
            inputs.append((values.isna() | (values == "")).to_numpy())
        return inputs

    def report_new(self, where: str, values: pd.Series) -> None:
        """Warn of what the training table has not."""
        if self.kind == "category":
            unseen = sorted(set(values.fillna("").unique()) - set(self.categories))
            # of more categories than have an input each, the others were seen
            if unseen and (self.pooled or len(self.categories) < _MAX_CATEGORIES):
                rows = int(values.fillna("").isin(unseen).sum())
                evidence = {
                    "column": self.name,
                    "rows": rows,
                    "new": unseen[:8],
                }
                name = "new_levels" if self.pooled else "new_categories"
                report(where, Finding(name, evidence))
            return
        gaps = int(values.isna().sum())
        if gaps and not self.indicator:
            evidence = {
                "column": self.name,
                "rows": gaps,
                "fill": self.fill,
            }
            report(where, Finding("new_gaps", evidence))


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are inputs, and what is done where a value is missing.

    It is fitted to a training table and then turns any table with these columns into the same inputs. Its settings are
    plain values, which a saved posterior keeps.

    Args:
        columns: in their order.
        missing: ``"refuse"``; ``"drop"`` the row; ``"impute"``: a number gets the median and an input that says so, a
            gap among categories is a category.
    """

    columns: tuple[Column, ...]
    missing: Missing = "refuse"

    @classmethod
    def fit(
        cls,
        frame: pd.DataFrame,
        missing: Missing,
        where: str,
        pool: bool = False,
    ) -> Columns:
        """What the columns of ``frame``, the training table without its target, are; ``where`` is its name.

        With ``pool`` a column of twenty categories or more is one input.

        Raises:
            ValueError: a column that is not numbers, truth values, categories, dates or times throughout, or is empty.

        Warns:
            UserWarning: of text that names the rows, which is left out, and of rare categories.
        """
        check_choice("missing", missing, get_args(Missing))
        frame = plain(frame)
        learned = [_column(where, frame[name], missing == "impute", pool) for name in frame.columns]
        columns = tuple(column for column in learned if column is not None)
        if not columns:
            raise ValueError(f"{where} has no column to predict from: all are dropped")
        return cls(columns, missing)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(itertools.chain.from_iterable(column.inputs for column in self.columns))

    @property
    def pooled(self) -> dict[int, tuple[str, ...]]:
        """Columns that are pooled: place among the inputs → categories."""
        categories = dict[int, tuple[str, ...]]()
        place = 0
        for column in self.columns:
            if column.pooled:
                categories[place] = column.categories
            place += len(column.inputs)
        return categories

    def transform(self, frame: pd.DataFrame, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (n, input), float64, of the rows of ``frame`` that are kept, and which rows these are (N,), bool.

        Raises:
            ValueError: missing columns, missing or infinite values where they are refused, cells of another kind.

        Warns:
            UserWarning: of categories that the training table has not, and gaps where it has none.
        """
        frame = plain(frame)
        names = [column.name for column in self.columns]
        check_columns(where, names, list(frame.columns))
        cells = {column.name: column.read(where, frame[column.name]) for column in self.columns}
        values = pd.DataFrame(cells)
        keep = values.notna().all(axis=1).to_numpy() | (self.missing != "drop")
        if self.missing == "refuse":
            refuse_gaps(
                where,
                values.isna(),
                "drop or impute these rows, or fit with missing='impute' (--missing)",
            )
        if not keep.any():
            complaint = "a missing value in every row: use missing='impute' (--missing)"
            raise ValueError(f"{where} has {complaint if len(keep) else 'no rows of data'}")
        inputs = []
        for column in self.columns:
            column.report_new(where, values.loc[keep, column.name])
            inputs += column.encode(values.loc[keep, column.name])
        return np.column_stack(inputs).astype(np.float64), keep

    def settings(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Columns:
        """From the values of :meth:`settings`, also after JSON has made lists of tuples."""
        columns = []
        for values in settings["columns"]:
            lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
            columns.append(Column(**{**values, **lists}))
        return cls(tuple(columns), settings["missing"])


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with its column names as text, without spaces around, and with numbered rows."""
    return frame.set_axis([str(name).strip() for name in frame.columns], axis=1).reset_index(
        drop=True
    )


def refuse_gaps(where: str, gaps: pd.DataFrame, remedy: str) -> None:
    """Refuse a table with missing or infinite values, naming columns, rows and the remedy."""
    count = gaps.sum()
    count = count[count > 0]
    if len(count):
        columns = ", ".join(f"{column!r} ({number})" for column, number in count.items())
        rows = np.flatnonzero(gaps.any(axis=1).to_numpy()) + 1
        listed = ", ".join(map(str, rows[:8])) + (" …" if len(rows) > 8 else "")
        raise ValueError(
            f"{where} has missing or infinite values in row {listed} (column {columns}): {remedy}"
        )


def check_names(where: str, names: Sequence[str]) -> None:
    """Refuse names of columns that repeat."""
    repeated = list(dict.fromkeys(name for name in names if name and names.count(name) > 1))
    if repeated:
        raise ValueError(
            f"{where} names the column {', '.join(map(repr, repeated))} more than once: rename one"
        )


def check_columns(
    where: str,
    columns: Sequence[str],
    names: Sequence[Hashable],
    option: str = "",
) -> None:
    """Refuse columns that are not among ``names``; the nearest name to the first is suggested."""
    absent = [name for name in columns if name not in names]
    if not absent:
        return
    known = {str(name).casefold(): str(name) for name in names}
    near = get_close_matches(str(absent[0]).casefold(), known, 1)
    suggestion = f", did you mean {known[near[0]]!r}?" if near else ":"
    # one name is a whole line where the separator is another
    separators = ", separated by comma, semicolon, tab or bar," if len(known) == 1 else ""
    raise ValueError(
        f"{where} has no column {', '.join(map(repr, absent))}{option}{suggestion} "
        f"its columns{separators} are {', '.join(list(known.values())[:50])}"
    )


def _column(
    where: str,
    column: pd.Series,
    impute: bool,
    pool: bool,
) -> Column | None:
    """What the column is; None where it is to be left out."""
    gaps = column.isna()
    if gaps.all():
        raise ValueError(f"{where}: column {str(column.name)!r} holds no value: drop it")
    indicator = impute and bool(gaps.any())
    if pd.api.types.is_datetime64_any_dtype(column):
        return _date_column(where, column, None, indicator)
    values = None if _is_categorical(column) else numbers(where, column)
    if values is None:
        return _text_column(where, column, indicator, pool)
    return Column(
        str(column.name),
        "boolean" if is_boolean(column) else "number",
        fill=float(np.nanmedian(values)) if np.isfinite(values).any() else 0.0,
        indicator=impute and bool(np.isnan(values).any()),
    )


def _is_categorical(column: pd.Series) -> bool:
    """Whether a column was declared to be of categories."""
    return isinstance(column.dtype, pd.CategoricalDtype)


def _text_column(
    where: str,
    column: pd.Series,
    indicator: bool,
    pool: bool,
) -> Column | None:
    """What a column of text is: times, dates, or categories; None where it is a label of the rows."""
    text = as_text(column).dropna()
    if text.str.fullmatch(TIME).all():
        fill = float(days(where, column, None, time=True).median())
        return Column(
            str(column.name),
            "time",
            fill=fill,
            indicator=indicator,
            cycles=("day",),
        )
    if text.str.fullmatch(DATE).all():
        return _date_column(where, column, day_first_of(where, text), indicator)
    distinct = text.nunique()
    # where effects are pooled a tenth of the rows, seen before, says how much levels differ
    most_distinct = 0.9 * len(text) if pool else 0.5 * len(text)
    if _is_categorical(column) or len(text) < 10 or distinct <= most_distinct:
        return _category_column(where, column, indicator, pool)
    evidence = {
        "column": str(column.name),
        "values": distinct,
        "rows": len(text),
        "first": text.iloc[0],
    }
    report(where, Finding("column_of_labels", evidence))
    return None


def _date_column(
    where: str,
    column: pd.Series,
    day_first: bool | None,
    indicator: bool,
) -> Column:
    """A column of dates, with the cycles that they span twice and resolve."""
    known = days(where, column, day_first).dropna()
    steps = np.diff(np.unique(known))
    span = float(np.ptp(known))
    finest = float(steps.min()) if len(steps) else 0.0
    cycles = tuple(
        name for name, period in _CYCLES.items() if 2 * finest <= period <= (span + finest) / 2
    )
    return Column(str(column.name), "date", (), float(known.median()), indicator, day_first, cycles)


def _category_column(
    where: str,
    column: pd.Series,
    indicator: bool,
    pool: bool,
) -> Column:
    """A column of the most frequent categories; with an ``indicator`` a gap is one, where it is among those.

    With ``pool`` one of many categories has all of them.
    """
    name = str(column.name)
    text = one_spelling(as_text(column))
    counts = (text.fillna("") if indicator else text.dropna()).value_counts()
    if pool and len(counts) >= _FEWEST_POOLED:
        return Column(
            name,
            "category",
            tuple(sorted(counts.index)),
            pooled=True,
        )
    if len(counts) > _MAX_CATEGORIES:
        evidence = {
            "column": name,
            "categories": len(counts),
            "kept": _MAX_CATEGORIES,
        }
        evidence["rest"] = int(counts.iloc[_MAX_CATEGORIES:].sum())
        report(where, Finding("rare_categories", evidence))
    categories = tuple(sorted(counts.index[:_MAX_CATEGORIES]))
    return Column(
        name,
        "category",
        categories,
        indicator=indicator and "" not in categories,
    )


def report(where: str, finding: Finding) -> None:
    """Warn of a finding, under the name of the table that it was made in."""
    warn([f"{where}: {finding}"])
