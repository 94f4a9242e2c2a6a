"""The cells of one column: which of them are numbers, text, truth values or dates."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

DATE = re.compile(r"\s*\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?$")
_YEAR = r"\s*\d{4}[-/.]"
#: a time of day; a datetime.time reads so as text
CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?")
#: so few different values may be meant as classes, also where they are written with digits
FEW_VALUES = 10
_SECONDS = 86_400.0
#: a truth value in words: more than two of them are several ways to write one thing
_TRUTHS = frozenset("yes no y n true false t f 1 0 1.0 0.0".split())


def numbers(where: str, column: pd.Series) -> np.ndarray | None:
    """The column as float64, NaN where it has gaps, or None where it is text.

    Raises:
        ValueError: numbers with a few cells of something else among them, with commas inside, or whole numbers of which
            float64 does not keep all distinct ones.
    """
    gaps = column.isna().to_numpy()
    if pd.api.types.is_bool_dtype(column) or truths(column):
        return column.astype("boolean").to_numpy(dtype=np.float64, na_value=np.nan)
    if pd.api.types.is_timedelta64_dtype(column):
        return column.dt.total_seconds().to_numpy(dtype=np.float64) / _SECONDS
    if not pd.api.types.is_numeric_dtype(column):
        text = column[~gaps].astype(str).str.strip()
        found = pd.to_numeric(text, errors="coerce")
        stray = found.isna()
        commas = text.str.fullmatch(r"[+-]?\d+(,\d+)+(\.\d+)?([eE][+-]?\d+)?")
        # with few thousands among them, the cells that are no numbers are those with commas
        if 2 * commas.sum() > len(text) or (stray.any() and commas[stray].all()):
            raise ValueError(
                f"{where}: column {column.name!r} holds numbers with commas, such as {text[commas].iloc[0]!r}: write "
                "them with a decimal point and without separators (pandas.read_csv has the options decimal and "
                "thousands)"
            )
        if 2 * stray.sum() >= len(text):
            return None
        if stray.any():
            first = int(np.flatnonzero(~gaps)[stray.to_numpy().argmax()]) + 1
            raise ValueError(
                f"{where}: column {column.name!r} holds numbers but for {stray.sum()} of {len(text)} cells, first "
                f"{text[stray].iloc[0]!r} in row {first}: drop these rows or leave the cells empty (a target of "
                "classes: task='classification')"
            )
        column = found.reindex(column.index)
    if pd.api.types.is_complex_dtype(column):
        raise ValueError(f"{where}: column {column.name!r} holds complex numbers: split it in two")
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    kept = len(np.unique(values[~np.isnan(values)]))
    whole = pd.api.types.is_integer_dtype(column)
    if whole and kept < column.nunique():
        raise ValueError(
            f"{where}: column {column.name!r} has {column.nunique()} distinct whole numbers of which float64 keeps "
            f"{kept}: subtract an offset, or drop it if it is a label"
        )
    return values


def day_first(where: str, name: str, text: pd.Series) -> bool | None:
    """How dates are written that do not begin with the year: None where all do.

    Raises:
        ValueError: it may be either.
    """
    text = text[~text.str.match(_YEAR)]
    if text.empty:
        return None
    parts = text.str.extract(r"^\s*(\d{1,4})([-/.])(\d{1,2})")
    if (parts[1] == ".").all() or (parts[0].astype(int) > 12).any():
        return True
    if (parts[2].astype(int) > 12).any():
        return False
    raise ValueError(
        f"{where}: column {name!r} holds dates such as {text.iloc[0]!r}, where day and month cannot be told apart: "
        "write year-month-day"
    )


def dated(column: pd.Series) -> bool:
    """Whether a column has a type of dates or of spans between them."""
    return pd.api.types.is_datetime64_any_dtype(column) or isinstance(column.dtype, pd.PeriodDtype)


def days(where: str, column: pd.Series, day_first: bool | None) -> np.ndarray:
    """Days since 1970 of a column of dates, float64, NaN for gaps.

    Raises:
        ValueError: text that is no date; the first is named.
    """
    if isinstance(column.dtype, pd.PeriodDtype):
        column = column.dt.to_timestamp()
    if not dated(column):
        text = as_text(column)
        first = text.str.match(_YEAR).fillna(False).astype(bool)
        # with dayfirst pandas takes 2024-01-05 for the first of May
        found = pd.to_datetime(text.where(first), errors="coerce", format="mixed", utc=True)
        others = text.where(~first)
        found = found.fillna(
            pd.to_datetime(others, errors="coerce", dayfirst=bool(day_first), format="mixed", utc=True)
        )
        wrong = (found.isna() & text.notna()).to_numpy()
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{where}: column {column.name!r} holds dates, but {text.iloc[row]!r} in row {row + 1} is none"
            )
        column = found
    if getattr(column.dt, "tz", None) is not None:
        column = column.dt.tz_convert("UTC").dt.tz_localize(None)
    nanoseconds = column.astype("datetime64[ns]").to_numpy()
    since = (nanoseconds - np.datetime64(0, "ns")) / np.timedelta64(1, "s")
    return np.asarray(np.where(np.isnat(nanoseconds), np.nan, since / _SECONDS), dtype=np.float64)


def clock(where: str, column: pd.Series) -> np.ndarray:
    """Times of day such as 13:45 as shares of a day, float64, NaN for gaps.

    Raises:
        ValueError: text that is no time of day, from 24:00 on too; the first is named.
    """
    text = as_text(column)
    right = text.str.fullmatch(CLOCK).fillna(False).astype(bool)
    parts = text.where(right).str.split(":", expand=True).astype(np.float64).reindex(columns=range(3))
    wrong = (
        text.notna() & ~(right & (parts[0] < 24) & (parts[1] < 60) & (parts[2].fillna(0) < 60))
    ).to_numpy()
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{where}: column {column.name!r} holds times of day, but {text.iloc[row]!r} in row {row + 1} is none: "
            "write spans of time as numbers"
        )
    seconds = 3600 * parts[0] + 60 * parts[1] + parts[2].fillna(0)
    return seconds.to_numpy(dtype=np.float64) / _SECONDS


def with_units(text: pd.Series) -> bool:
    """Whether all cells (without gaps) are a number with the same unit or currency, or digits parted in some way."""
    # with the signs that word processors write, and the brackets of accountants
    units = text.str.extract(r"^[-+−–(]?([$€£¥“\"]?\s*)\d[\d.,\s']*?(\s*[^\d.,')]{0,12})\)?$")
    return bool(units.notna().all().all()) and len(units.drop_duplicates()) == 1


def refuse_units(where: str, name: str, text: pd.Series) -> None:
    """Refuse numbers with one unit, currency or other separators, which are no categories.

    Args:
        text: the cells, without gaps.

    Raises:
        ValueError: naming the column and what stands around its numbers.
    """
    if with_units(text) and text.nunique() > FEW_VALUES:
        raise ValueError(
            f"{where}: column {name!r} holds numbers written such as {text.iloc[0]!r}: write plain numbers, with a "
            "decimal point and without units and separators, or drop it"
        )


def as_text(column: pd.Series) -> pd.Series:
    """Cells as text without spaces around, None for gaps and empty text."""
    text = column.astype(object).map(lambda cell: str(cell).strip(), na_action="ignore")
    return text.where(text.notna() & (text != ""), None).astype(object)


def truths(column: pd.Series) -> bool:
    """Whether a column of objects holds truth values and gaps."""
    return column.dtype == object and bool(
        column.dropna().map(lambda cell: isinstance(cell, (bool, np.bool_))).all()
    )


def alike(labels: Iterable[str]) -> str | None:
    """Labels that mean the same, as words: truth values in several ways, or the first that differ in nothing but case
    and spaces; None where there are none."""
    labels = list(labels)
    folded = {" ".join(label.casefold().split()) for label in labels}
    if 2 < len(folded) and folded <= _TRUTHS:
        return f"{', '.join(map(repr, labels))} are two truth values in {len(labels)} ways and count as different"
    known: dict[str, str] = {}
    for label in labels:
        if (other := known.setdefault(" ".join(label.casefold().split()), label)) != label:
            return f"{other!r} and {label!r} differ in case or spaces only and count as different"
    return None
