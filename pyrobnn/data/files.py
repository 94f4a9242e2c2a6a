"""A file as a table: CSV in any of its dialects, TSV, Parquet, Excel; what is doubtful is refused or said."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd

SEPARATORS = (",", ";", "\t", "|")
#: suffix → what reads it, and the library that pandas needs for it
BINARY: dict[str, tuple[Callable[..., pd.DataFrame], str]] = {
    ".parquet": (pd.read_parquet, "pyarrow"),
    ".pq": (pd.read_parquet, "pyarrow"),
    ".xlsx": (pd.read_excel, "openpyxl"),
    ".xlsm": (pd.read_excel, "openpyxl"),
}
#: how files begin that are no tables of text, and what to do with them
STARTS = {
    b"\x1f\x8b": "is compressed by gzip: unpack it first",
    b"PK\x03\x04": "is a zip archive, as of Excel: name it .xlsx, or unpack it first",
    b"PAR1": "is a Parquet file: name it .parquet",
    b"\xd0\xcf\x11\xe0": "is a file of Excel 97: save it as .xlsx",
    b"%PDF": "is a PDF document: copy its table into a text file",
    **dict.fromkeys(
        (b"<!", b"<?", b"<html", b"<table"), "holds HTML or XML: pandas reads it (read_html, read_xml)"
    ),
    **dict.fromkeys((b"{", b"[{", b"[["), "holds JSON: pandas reads it (read_json)"),
}
#: a first line in which Excel writes the separator
_TOLD = re.compile(r"sep=(.)\r?\n?")
#: a number with a comma in it that is no separator of thousands
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+,\d{1,2}|\d+,\d{4,}|\d{4,},\d+|0,\d+)([eE][+-]?\d+)?")
_WITH_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
#: points between thousands and a comma before the fraction: nothing else is written so
_GROUPED = re.compile(r"[+-]?\d{1,3}(\.\d{3})+,\d+")
_MAYBE_GROUPED = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?")
_WITH_POINT = re.compile(r"[+-]?\d*\.\d+([eE][+-]?\d+)?")


def read_frame(path: str | Path) -> pd.DataFrame:
    """The table of a file, by its suffix: ``.parquet``, ``.xlsx`` (its first sheet), else text with a header.

    Of text the separator is the comma, semicolon, tab or bar that the header has most of; a decimal comma is recognised
    where the separator is another. A first column without a name, as pandas writes its index, is left out.

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
    frame = _binary(path) if path.suffix.lower() in BINARY else _text(path)
    if frame.empty:
        sheet = ", on its first sheet" if path.suffix.lower().startswith(".xls") else ""
        raise ValueError(f"{path.name} holds no rows of data below its header{sheet}")
    return _without_index(path.name, frame)


def check_names(file: str, names: list[str]) -> None:
    """Refuse names of columns that repeat.

    Raises:
        ValueError: naming them.
    """
    repeated = list(dict.fromkeys(name for name in names if name and names.count(name) > 1))
    if repeated:
        raise ValueError(
            f"{file} names the column {', '.join(map(repr, repeated))} more than once: rename or drop one, a copy "
            "of the target among the features would be learned by heart"
        )


def _binary(path: Path) -> pd.DataFrame:
    read, library = BINARY[path.suffix.lower()]
    try:
        frame = read(path)
    except ImportError as error:
        raise ImportError(f"{path.name} is read by {library}: pip install 'pyrobnn[tables]'") from error
    except Exception as error:  # each library has errors of its own
        reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"{path.name} cannot be read as {path.suffix.lower()[1:]}: {reason or type(error).__name__}"
        ) from error
    names = [_plain(str(name)) for name in frame.columns]
    if read is pd.read_excel:  # pandas numbers the names that repeat
        again = [re.sub(r"\.\d+$", "", name) for name in names]
        names = [base if base != name and base in names else name for name, base in zip(names, again)]
    check_names(path.name, names)
    frame.columns = pd.Index(names)
    return frame


def _text(path: Path) -> pd.DataFrame:
    with path.open("rb") as file:
        start = file.read(16).removeprefix(b"\xef\xbb\xbf").lstrip()
    for known, said in STARTS.items():
        if start.startswith(known):
            raise ValueError(f"{path.name} {said}")
    try:
        separator, names, skip = _header(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # cells beyond the header are cut off
            # without index_col such cells would shift all names by one; spaces would become part of a text
            frame = pd.read_csv(
                path,
                sep=separator,
                skiprows=skip,
                index_col=False,
                skipinitialspace=True,
                encoding="utf-8-sig",
                low_memory=False,
            )
    except pd.errors.ParserWarning as error:
        raise ValueError(
            f"{path.name}: rows have more cells than its first line has names, {_listed(names)}: name every column, "
            "and delete what stands before the line of names"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path.name} is not a CSV file with a header line, in UTF-8: it holds the byte "
            f"0x{error.object[error.start]:02x}, as files in Latin-1, Windows-1252 or UTF-16 do: save it as UTF-8"
        ) from error
    except (pd.errors.EmptyDataError, pd.errors.ParserError, csv.Error) as error:
        if "saw" in str(error):  # pandas counts the cells of the first line and of one below
            raise ValueError(
                f"{path.name}: its first line has the names {_listed(names)}, and another line has more cells "
                f"({str(error).strip().rpartition('error: ')[2]}): begin with the line of names, without title "
                "or comment"
            ) from error
        raise ValueError(
            f"{path.name} is not a CSV file with a header line, in UTF-8: {' '.join(str(error).split())}"
        ) from error
    frame.columns = pd.Index(names)
    if separator == ",":
        return frame
    return _with_points(path.name, _without_thousands(path.name, frame))


def _without_thousands(file: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Columns of numbers such as 1.234,56 without the points that part the thousands.

    Raises:
        ValueError: another column of numbers has points: between thousands too, or before a fraction.
    """
    found = {}
    for name in frame:
        if frame[name].dtype.kind in "biufM":
            continue
        cells = frame[name].dropna().astype(str).str.strip()
        if cells.str.fullmatch(_GROUPED).any() and cells.str.fullmatch(_MAYBE_GROUPED).all():
            found[name] = frame[name].where(frame[name].isna(), cells.str.replace(".", "", regex=False))
    if not found:
        return frame
    for name in frame.select_dtypes("float"):
        fractions = frame[name][frame[name] % 1 != 0].dropna()
        if len(fractions):
            raise ValueError(
                f"{file}: column {next(iter(found))!r} has points between thousands, so that those of {name!r}, such "
                f"as {fractions.iloc[0]:g}, may be the same or begin a fraction: write all numbers one way"
            )
    warnings.warn(f"{file}: numbers have points between thousands and are read so", UserWarning, stacklevel=5)
    return frame.assign(**found)


def _with_points(file: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Columns of numbers with decimal commas as numbers; left alone where points are in use too, or none is certain."""
    text = {
        name: frame[name].astype(str).str.strip() for name in frame if frame[name].dtype.kind not in "biufM"
    }
    commas = {
        name: cells
        for name, cells in text.items()
        if 2 * cells[frame[name].notna()].str.fullmatch(_WITH_COMMA).sum() > frame[name].notna().sum()
        or (
            cells.str.fullmatch(_WITH_COMMA).any()
            and cells[frame[name].notna()].str.fullmatch(r"[+-]?\d+(,\d+)?([eE][+-]?\d+)?").all()
        )
    }
    certain = any(cells.str.fullmatch(_DECIMAL_COMMA).any() for cells in commas.values())
    floats = any(
        dtype.kind == "f" and bool((frame[name].dropna() % 1 != 0).any())
        for name, dtype in frame.dtypes.items()
    )
    points = floats or any(cells.str.fullmatch(_WITH_POINT).any() for cells in text.values())
    if not certain or points:
        return frame
    warnings.warn(f"{file}: numbers have decimal commas and are read so", UserWarning, stacklevel=5)
    swapped = {name: cells.str.replace(",", ".").where(frame[name].notna()) for name, cells in commas.items()}
    return frame.assign(**{name: _numeric(cells) for name, cells in swapped.items()})


def _numeric(cells: pd.Series) -> pd.Series:
    """Numbers where all cells are, else the text as it is."""
    numbers = pd.to_numeric(cells, errors="coerce")
    return numbers if bool((numbers.isna() == cells.isna()).all()) else cells


def _header(path: Path) -> tuple[str, list[str], int]:
    """The separator, the names of the columns (an empty one is "") and the lines before them that name the separator.

    Raises:
        ValueError: names that repeat, or a first line of data.
    """
    found = {}
    with path.open(encoding="utf-8-sig", newline="") as lines:
        told = _TOLD.fullmatch(lines.readline())
        for separator in SEPARATORS if told is None else (told[1],):
            lines.seek(0)
            if told is not None:
                lines.readline()
            rows = csv.reader(lines, delimiter=separator, skipinitialspace=True)
            found[separator] = next((row for row in rows if any(cell.strip() for cell in row)), [])
    separator = max(found, key=lambda each: len(found[each]))
    names = [_plain(name) for name in found[separator]]
    check_names(path.name, names)
    given = [name for name in names if name]
    if given and all(map(_is_number, given)) and given != [str(index) for index in range(len(given))]:
        raise ValueError(
            f"the first line of {path.name} holds numbers only, {', '.join(given[:3])} …: begin with a line of names"
        )
    return separator, names, 0 if told is None else 1


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" … ({len(names)})" if len(names) > 3 else f" ({len(names)})")


def _plain(name: str) -> str:
    # pandas calls a column without a name so when it writes what it has read
    return re.sub(r"^Unnamed: \d+(\.\d+)*$|^__index_level_\d+__$", "", name.strip())


def _is_number(cell: str) -> bool:
    return bool(pd.notna(pd.to_numeric(cell, errors="coerce")))


def _without_index(file: str, frame: pd.DataFrame) -> pd.DataFrame:
    bare = [not name and bool(frame.iloc[:, place].isna().all()) for place, name in enumerate(frame.columns)]
    if any(bare) and len(frame):
        warnings.warn(
            f"{file}: {sum(bare)} of {len(bare)} columns have neither a name nor a value and are left out",
            UserWarning,
            stacklevel=4,
        )
        frame = frame.loc[:, [not each for each in bare]]
    names = list(frame.columns)
    left_out = 0
    while (
        left_out < len(names) and not names[left_out] and frame.iloc[:, left_out].is_unique and len(frame) > 1
    ):
        left_out += 1
    if "" in names[left_out:]:
        place = names.index("", left_out) + 1
        raise ValueError(f"{file}: column {place} of {len(names)} has no name: name it or drop it")
    if left_out:
        first, last = frame.iloc[0, 0], frame.iloc[-1, 0]
        warnings.warn(
            f"{file}: the first column has no name and no value twice ({first} … {last}): taken for the index of its "
            "rows and left out",
            UserWarning,
            stacklevel=4,
        )
    return frame.iloc[:, left_out:]
