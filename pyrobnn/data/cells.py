"""How the cells of a column are read: as numbers, text, dates and times of day."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pandas as pd

DATE = r"\s*\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?"
TIME = r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp][Mm])?"
_THOUSANDS = r"[+-]?\d{1,3}([,'’\s]\d{3})+(\.\d*)?"


def numbers(where: str, column: pd.Series) -> np.ndarray | None:
    """The column, of numbered rows, as float64, NaN where it has gaps or is infinite; None if it is text.

    Truth values are 0 and 1, durations their days, and "5 %" is 5.

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
    bare = _without_thousands(_without_units(text))
    values = pd.to_numeric(bare, errors="coerce")
    stray = text[values.isna()]
    opening = f"{where}: column {column.name!r} holds numbers"
    if len(stray) and stray.str.fullmatch(r"[+-]?\d+,\d+").all():
        raise ValueError(f"{opening} with commas, such as {stray.iloc[0]!r}: write points")
    if 2 * len(stray) >= len(text):
        return None
    if len(stray):
        raise ValueError(
            f"{opening} but for {len(stray)} of {len(text)} cells, first {stray.iloc[0]!r} in row "
            f"{stray.index[0] + 1}: fix the cells or drop their rows (a target of classes: task='classification')"
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

    def words(cell: Hashable) -> str:
        return str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell).strip()

    text = column.astype(object).map(words, na_action="ignore")
    return text.where(text.notna() & (text != ""), None).astype(object)


def one_spelling(text: pd.Series) -> pd.Series:
    """Words that differ in case alone, all in their most frequent spelling."""
    spellings = text.value_counts().sort_index()
    spelling_of = dict[str, str]()
    # by rising frequency: the most frequent overwrites the others
    for spelling in spellings.sort_values(kind="stable").index:
        spelling_of[spelling.casefold()] = spelling
    return text.map(lambda cell: spelling_of[cell.casefold()], na_action="ignore")


def day_first_of(where: str, text: pd.Series) -> bool | None:
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


def days(
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
            day_first = day_first_of(where, cells.dropna())
        if day_first:
            text = text.str.replace(
                r"^(\d{1,2})[-/. ](\d{1,2})[-/. ]",
                r"\2/\1/",
                regex=True,
            )
        # WORKAROUND(pandas<=3.1.1): of 28-01-2024 it makes one of January, also where the month is to come first; cells
        # whose first number is no month are gaps instead, which are refused below
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
