"""How the columns of a table become inputs: numbers, truth values, categories, dates, times, and the gaps in them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from pyrobnn.core.checks import check_choice
from pyrobnn.core.findings import Finding, warn

Missing = Literal["refuse", "drop", "impute"]
Kind = Literal["number", "boolean", "category", "date", "time"]
#: categories that get an input each, the most frequent
MAX_CATEGORIES = 50
DATE = r"\s*\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?"
_TIME = r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp][Mm])?"
_THOUSANDS = r"[+-]?\d{1,3}([,'’\s]\d{3})+(\.\d*)?"
#: days of the cycles of a date, a year of the Gregorian calendar
CYCLES = {"day": 1.0, "week": 7.0, "year": 365.2425}


@dataclass(frozen=True)
class Column:
    """One column of a table and what was learned of it.

    Attributes: ``name``; ``kind``; ``categories``, sorted, read in any case, "" for a gap; ``fill``, the median, in
    place of a gap, and ``indicator``, whether an input says where there was one; ``day_first`` of dates, None where
    their text is unambiguous, and their ``cycles``.
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
            names = [f"{self.name} (days)"]
            for cycle in self.cycles:
                names += [f"{self.name} ({wave} of the {cycle})" for wave in ("sine", "cosine")]
        else:
            names = [self.name]
        return (*names, f"{self.name} is missing") if self.indicator else tuple(names)

    def encode(self, values: pd.Series) -> list[np.ndarray]:
        """The inputs (n,) of values as :meth:`read` gives them; an unknown category is none of the known ones."""
        if self.kind == "category":
            inputs = [(values == category).to_numpy() for category in self.categories]
        else:
            filled = values.fillna(self.fill).to_numpy()
            inputs = [filled]
            for cycle in self.cycles:
                angle = 2 * np.pi * filled / CYCLES[cycle]
                inputs += [np.sin(angle), np.cos(angle)]
        if self.indicator:
            inputs.append((values.isna() | (values == "")).to_numpy())
        return inputs

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
            return _days(
                where,
                cells,
                self.day_first,
                time=self.kind == "time",
            )
        return pd.Series(only_numbers(where, cells), index=cells.index)

    def report_new(self, where: str, values: pd.Series) -> None:
        """Warn of what the training table has not."""
        if self.kind == "category":
            unseen = sorted(set(values.fillna("").unique()) - set(self.categories))
            # of more categories than have an input each, the others were seen
            if unseen and len(self.categories) < MAX_CATEGORIES:
                rows = int(values.fillna("").isin(unseen).sum())
                evidence = {
                    "column": self.name,
                    "rows": rows,
                    "new": unseen[:8],
                }
                report(where, Finding("new_categories", evidence))
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
    ) -> Columns:
        """What the columns of ``frame``, the training table without its target, are; ``where`` is its name.

        Raises:
            ValueError: a column that is not numbers, truth values, categories, dates or times throughout, or is empty.

        Warns:
            UserWarning: of text that names the rows, which is left out, and of rare categories.
        """
        check_choice("missing", missing, get_args(Missing))
        frame = plain(frame)
        learned = [_learned(where, frame[name], missing == "impute") for name in frame.columns]
        columns = tuple(column for column in learned if column is not None)
        if not columns:
            raise ValueError(f"{where} has no column to predict from: all are dropped")
        return cls(columns, missing)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(itertools.chain.from_iterable(column.inputs for column in self.columns))

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
            gaps = "a missing value in every row: use missing='impute' (--missing)"
            raise ValueError(f"{where} has {gaps if len(keep) else 'no rows of data'}")
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

        def column(values: Mapping[str, Any]) -> Column:
            lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
            return Column(**{**values, **lists})

        return cls(tuple(map(column, settings["columns"])), settings["missing"])


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """With names of text, without spaces around, and numbered rows."""
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


def numbers(where: str, column: pd.Series) -> np.ndarray | None:
    """The column, of numbered rows, as float64, NaN where it has gaps or is infinite, "5 %" as 5; None if it is text.

    Raises:
        ValueError: numbers with a few cells of something else among them, or with decimal commas.
    """
    if is_boolean(column):
        return column.astype("boolean").to_numpy(dtype=np.float64, na_value=np.nan)
    if pd.api.types.is_timedelta64_dtype(column):
        return (column / pd.Timedelta(days=1)).to_numpy(dtype=np.float64)
    if pd.api.types.is_numeric_dtype(column):
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
        return np.where(np.isinf(values), np.nan, values)
    text = column.dropna().astype(str).str.strip().str.replace("−", "-")
    plain_text = _without_thousands(_without_units(text))
    values = pd.to_numeric(plain_text, errors="coerce")
    stray = text[values.isna()]
    begin = f"{where}: column {column.name!r} holds numbers"
    if len(stray) and stray.str.fullmatch(r"[+-]?\d+,\d+").all():
        raise ValueError(f"{begin} with commas, such as {stray.iloc[0]!r}: write points")
    if 2 * len(stray) >= len(text):
        return None
    if len(stray):
        raise ValueError(
            f"{begin} but for {len(stray)} of {len(text)} cells, first {stray.iloc[0]!r} in row {stray.index[0] + 1}: "
            "fix the cells or drop their rows (a target of classes: task='classification')"
        )
    return values.reindex(column.index).to_numpy(dtype=np.float64)


def _without_units(text: pd.Series) -> pd.Series:
    """Without a sign of currency or percent, where all cells have the same one."""
    units = text.str.extract("((?:^|^-)[$€£¥]|[%$€£¥]$)")[0].str.lstrip("-")
    if len(units) and units.nunique(dropna=False) == 1:
        return text.str.replace(
            r"^(-?)[$€£¥]\s*|\s*[%$€£¥]$",
            r"\1",
            regex=True,
        )
    return text


def _without_thousands(text: pd.Series) -> pd.Series:
    """Without what separates the thousands."""
    digits = text.str.replace(r"[,'’\s]", "", regex=True)
    return text.mask(text.str.fullmatch(_THOUSANDS), digits)


def only_numbers(where: str, column: pd.Series) -> np.ndarray:
    """As :func:`numbers`; ValueError where the column is text."""
    values = numbers(where, column)
    if values is None:
        example = as_text(column).dropna().iloc[0]
        raise ValueError(
            f"{where}: column {column.name!r} holds text such as {example!r}, not numbers"
        )
    return values


def is_boolean(column: pd.Series) -> bool:
    """Whether a column holds truth values and gaps."""
    return pd.api.types.infer_dtype(column, skipna=True) == "boolean"


def as_text(column: pd.Series) -> pd.Series:
    """Cells as text without spaces around, 1.0 as 1, None for gaps and empty text."""

    def words(cell: Any) -> str:
        return str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell).strip()

    text = column.astype(object).map(words, na_action="ignore")
    return text.where(text.notna() & (text != ""), None).astype(object)


def one_spelling(text: pd.Series) -> pd.Series:
    """Of words that differ in case alone, the most frequent."""
    spellings = text.value_counts().sort_index()
    common = dict[str, str]()
    for spelling in spellings.sort_values(kind="stable").index:
        common[spelling.casefold()] = spelling
    return text.map(lambda cell: common[cell.casefold()], na_action="ignore")


def _learned(where: str, column: pd.Series, impute: bool) -> Column | None:
    """What the column is; None where it is to be left out."""
    name = str(column.name)
    gaps = column.isna()
    if gaps.all():
        raise ValueError(f"{where}: column {name!r} holds no value: drop it")
    indicator = impute and bool(gaps.any())
    if pd.api.types.is_datetime64_any_dtype(column):
        return _dates(where, column, None, indicator)
    are_labels = isinstance(column.dtype, pd.CategoricalDtype)
    values = None if are_labels else numbers(where, column)
    if values is not None:
        kind: Kind = "boolean" if is_boolean(column) else "number"
        fill = float(np.nanmedian(values)) if np.isfinite(values).any() else 0.0
        indicator = impute and bool(np.isnan(values).any())
        return Column(
            name,
            kind,
            fill=fill,
            indicator=indicator,
        )
    text = as_text(column).dropna()
    if text.str.fullmatch(_TIME).all():
        fill = float(_days(where, column, None, time=True).median())
        return Column(
            name,
            "time",
            fill=fill,
            indicator=indicator,
            cycles=("day",),
        )
    if text.str.fullmatch(DATE).all():
        return _dates(where, column, _day_first(where, text), indicator)
    distinct = text.nunique()
    if not are_labels and len(text) >= 10 and 2 * distinct > len(text):
        evidence = {
            "column": name,
            "values": distinct,
            "rows": len(text),
            "first": text.iloc[0],
        }
        report(where, Finding("column_of_labels", evidence))
        return None
    return _categories(where, column, indicator)


def _categories(where: str, column: pd.Series, indicator: bool) -> Column:
    """The most frequent ones; with an ``indicator`` a gap is one of them, where it is among those."""
    name = str(column.name)
    text = one_spelling(as_text(column))
    counts = (text.fillna("") if indicator else text.dropna()).value_counts()
    if len(counts) > MAX_CATEGORIES:
        evidence = {
            "column": name,
            "categories": len(counts),
            "kept": MAX_CATEGORIES,
        }
        evidence["rest"] = int(counts.iloc[MAX_CATEGORIES:].sum())
        report(where, Finding("rare_categories", evidence))
    categories = tuple(sorted(counts.index[:MAX_CATEGORIES]))
    return Column(
        name,
        "category",
        categories,
        indicator=indicator and "" not in categories,
    )


def _dates(
    where: str,
    column: pd.Series,
    day_first: bool | None,
    indicator: bool,
) -> Column:
    """With the cycles that the dates span twice and resolve."""
    known = _days(where, column, day_first).dropna()
    steps = np.diff(np.unique(known))
    span = float(np.ptp(known))
    finest = float(steps.min()) if len(steps) else 0.0
    cycles = tuple(
        name for name, days in CYCLES.items() if 2 * finest <= days <= (span + finest) / 2
    )
    return Column(str(column.name), "date", (), float(known.median()), indicator, day_first, cycles)


def _day_first(where: str, text: pd.Series) -> bool | None:
    """Whether dates that do not begin with the year begin with the day: None where all begin with the year."""
    parts = text.str.extract(r"^(\d{1,2})([-/.])(\d{1,2})[-/.](\d+)").dropna()
    if parts.empty:
        return None
    begin = parts[0].astype(int)
    middle = parts[2].astype(int)
    end = parts[3].astype(int)
    begins_with_no_month = bool((begin > 12).any())
    # 24-02-05 may begin with the year
    if (parts[1] == ".").all() or (begins_with_no_month and (end > 31).any()):
        return True
    if (middle > 12).any():
        return False
    unclear = "year" if begins_with_no_month else "month"
    raise ValueError(
        f"{where}: column {text.name!r} holds dates such as {text[parts.index[0]]!r}, where day and "
        f"{unclear} cannot be told apart: write year-month-day, such as 2024-12-31"
    )


def _days(
    where: str,
    column: pd.Series,
    day_first: bool | None,
    time: bool = False,
) -> pd.Series:
    """Days since 1970, or of times of day the share of the day, float64, NaN for gaps."""
    if not pd.api.types.is_datetime64_any_dtype(column):
        cells = as_text(column)
        text = "1970-01-01 " + cells if time else cells
        if day_first is None and not time:
            day_first = _day_first(where, cells.dropna())
        if day_first:
            text = text.str.replace(
                r"^(\d{1,2})[-/. ](\d{1,2})[-/. ]",
                r"\2/\1/",
                regex=True,
            )
        # of 28-01-2024 pandas makes one of January, also where the month is to come first
        month = text.str.extract(r"^(\d{1,2})[-/.]\d{1,2}[-/.]")[0].astype(float)
        column = pd.to_datetime(
            text.mask(month > 12),
            errors="coerce",
            format="mixed",
            utc=True,
        )
        stray = (column.isna() & cells.notna()).to_numpy()
        if stray.any():
            order = {
                None: "",
                True: " with the day first",
                False: " with the month first",
            }[day_first]
            row = int(stray.argmax())
            kind = "times of day" if time else f"dates{order}"
            cell = f"{cells.iloc[row]!r} in row {row + 1}"
            raise ValueError(f"{where}: column {column.name!r} holds {kind}, but {cell} is not")
    if column.dt.tz is not None:
        column = column.dt.tz_convert("UTC").dt.tz_localize(None)
    return ((column - pd.Timestamp(0)) / pd.Timedelta(days=1)).astype(np.float64)


def report(where: str, finding: Finding) -> None:
    """Warn of what was found in a table."""
    warn([f"{where}: {finding}"])
