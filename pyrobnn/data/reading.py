"""A file as a table: text in any of its dialects, Parquet, Excel; what is doubtful is refused or warned of."""

from __future__ import annotations

import csv
import re
import warnings
from pathlib import Path
from typing import Any

import pandas as pd

from pyrobnn.data.columns import check_names

SEPARATORS = (",", ";", "\t", "|")
#: suffixes of what is no text, and the library that pandas needs for it
BINARY = {".parquet": "pyarrow", ".pq": "pyarrow", ".xlsx": "openpyxl", ".xlsm": "openpyxl"}
#: numbers with a decimal comma, points between thousands; and those of which no other reading is possible
_COMMA_NUMBER = r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?"
_CERTAIN = r"[+-]?(\d+,(\d{1,2}|\d{4,})|\d{4,},\d+|0,\d+|\d{1,3}(\.\d{3})+,\d+)([eE][+-]?\d+)?"
_WITH_POINT = r"[+-]?\d*\.\d+([eE][+-]?\d+)?"


def read_frame(path: str | Path) -> pd.DataFrame:
    """The table of a file, by its suffix: ``.parquet``, ``.xlsx`` (its first sheet), else text with a header.

    Text may be compressed (``.gz``, ``.zip``, …, by its suffix). Its separator is the comma, semicolon, tab or bar that
    the header has most of; decimal commas are recognised where the separator is another. A first column without a name,
    as pandas writes its index, is left out.

    Raises:
        ValueError: no such file, or one that cannot be read; a header with repeated or missing names; rows longer than
            the header; no rows.
        ImportError: the library that reads such a file is not installed.

    Warns:
        UserWarning: of what is left out, and of decimal commas.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}: check the path")
    suffix = path.suffix.lower()
    kind = suffix[1:] if suffix in BINARY else "a table of text in UTF-8 with a header line"
    try:
        frame = _binary(path, suffix) if suffix in BINARY else _text(path)
    except ImportError as error:
        raise ImportError(
            f"{path.name} is read by {BINARY.get(suffix, 'pandas')}: pip install 'pyrobnn[tables]'"
        ) from error
    except _Refusal as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # each library has errors of its own
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"{path.name} cannot be read as {kind}: {reason or type(error).__name__}") from error
    if frame.empty:
        sheet = ", on its first sheet" if suffix.startswith(".xls") else ""
        raise ValueError(f"{path.name} holds no rows of data below its header{sheet}")
    return _without_index(path.name, frame)


class _Refusal(Exception):
    """What is wrong with a file, in a sentence of ours."""


def _binary(path: Path, suffix: str) -> pd.DataFrame:
    excel = suffix.startswith(".xls")
    frame = pd.read_excel(path) if excel else pd.read_parquet(path)
    # pandas numbers the names that repeat in a sheet
    given = pd.read_excel(path, header=None, nrows=1).iloc[0] if excel else frame.columns
    frame.columns = pd.Index(_names(path.name, given))
    return frame


def _text(path: Path) -> pd.DataFrame:
    options: dict[str, Any] = {"encoding": "utf-8-sig", "skipinitialspace": True}
    first = {"header": None, "nrows": 1, "dtype": str, "keep_default_na": False}
    line = pd.read_csv(path, sep="\x01", quoting=csv.QUOTE_NONE, **first, **options).iloc[0, 0].rstrip()
    declared = re.fullmatch(r"sep=(.)", line)  # as Excel writes it
    options["skiprows"] = 0 if declared is None else 1
    headers = {
        separator: pd.read_csv(path, sep=separator, **first, **options).iloc[0]
        for separator in (SEPARATORS if declared is None else declared[1])
    }
    separator = max(headers, key=lambda each: len(headers[each]))
    names = _names(path.name, headers[separator])
    given = [name for name in names if name]
    if (
        given
        and pd.notna(pd.to_numeric(given, errors="coerce")).all()
        and given != [*map(str, range(len(given)))]
    ):
        raise _Refusal(
            f"the first line of {path.name} holds numbers only, {', '.join(given[:3])} …: begin with a line of names"
        )
    listed = ", ".join(map(repr, names[:3])) + (" …" if len(names) > 3 else "")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # cells beyond the header are cut off
            # without index_col such cells would shift all names by one
            frame = pd.read_csv(path, sep=separator, index_col=False, low_memory=False, **options)
    except pd.errors.ParserWarning as error:
        raise _Refusal(
            f"{path.name}: rows have more cells than its first line has names, {listed}: name every column, and "
            "delete what stands before the line of names"
        ) from error
    except pd.errors.ParserError as error:
        reason = str(error).strip().rpartition("error: ")[2]
        raise _Refusal(
            f"{path.name}: below its first line, {listed}: {reason}: begin with the line of names"
        ) from error
    frame.columns = pd.Index(names)
    return frame if separator == "," else _decimal_commas(path.name, frame)


def _names(file: str, given: Any) -> list[str]:
    """Names of columns, "" for none, as pandas calls them when it writes what it has read."""
    plain = ["" if pd.isna(name) else str(name).strip() for name in given]
    names = [re.sub(r"^Unnamed: \d+(\.\d+)*$|^__index_level_\d+__$", "", name) for name in plain]
    try:
        check_names(file, names)
    except ValueError as error:
        raise _Refusal(str(error)) from None
    return names


def _decimal_commas(file: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Columns of numbers such as 1.234,56 as numbers; left alone where none is certain to be one.

    Raises:
        _Refusal: points begin a fraction in another column, or part its thousands too.
    """
    text = {
        name: frame[name].dropna().astype(str).str.strip()
        for name in frame
        if frame[name].dtype.kind not in "biufM"
    }
    found = {name: cells for name, cells in text.items() if cells.str.fullmatch(_COMMA_NUMBER).all()}
    certain = [name for name, cells in found.items() if cells.str.fullmatch(_CERTAIN).any()]
    if not certain:
        return frame
    fractions = [name for name in frame.select_dtypes("float") if (frame[name].dropna() % 1 != 0).any()]
    fractions += [name for name in text if name not in found and text[name].str.fullmatch(_WITH_POINT).any()]
    if fractions:
        raise _Refusal(
            f"{file}: column {certain[0]!r} has decimal commas and column {fractions[0]!r} has points: write all "
            "numbers one way"
        )
    warnings.warn(f"{file}: numbers have decimal commas and are read so", UserWarning, stacklevel=6)
    plain = {name: cells.str.replace(".", "").str.replace(",", ".") for name, cells in found.items()}
    return frame.assign(**{name: pd.to_numeric(cells).reindex(frame.index) for name, cells in plain.items()})


def _without_index(file: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that have a name."""
    names = list(frame.columns)
    bare = [not name and bool(frame.iloc[:, place].isna().all()) for place, name in enumerate(names)]
    if any(bare):
        warnings.warn(
            f"{file}: {sum(bare)} of {len(bare)} columns have neither a name nor a value and are left out",
            UserWarning,
            stacklevel=5,
        )
        frame = frame.loc[:, [not each for each in bare]]
        names = list(frame.columns)
    index = 0
    while index < len(names) and not names[index] and frame.iloc[:, index].is_unique and len(frame) > 1:
        index += 1
    if "" in names[index:]:
        place = names.index("", index) + 1
        raise ValueError(f"{file}: column {place} of {len(names)} has no name: name it or drop it")
    if index:
        first, last = frame.iloc[0, 0], frame.iloc[-1, 0]
        warnings.warn(
            f"{file}: the first column has no name and no value twice ({first} … {last}): taken for the index of its "
            "rows and left out",
            UserWarning,
            stacklevel=5,
        )
    return frame.iloc[:, index:]
