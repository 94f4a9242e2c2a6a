"""A table as a data set: what cannot be a feature or a target is refused or warned of, never guessed at in silence."""

from __future__ import annotations

import csv
import dataclasses
import re
import warnings
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from pyrobnn.core.checks import check_choice, check_optional, check_type
from pyrobnn.core.findings import Finding
from pyrobnn.data.cells import DATE, is_boolean, numbers, one_spelling
from pyrobnn.data.columns import (
    Columns,
    Missing,
    check_columns,
    check_names,
    plain,
    refuse_gaps,
    report,
)
from pyrobnn.data.dataset import Dataset, Task

__all__ = ["from_csv", "from_frame", "read_features"]

SEPARATORS = (",", ";", "\t", "|")
#: what stands for a gap, beside pandas' own "", "NA", "nan", "null", …
GAPS = ("?", "-", "–")
#: suffixes of files that are not text
BINARY = (".parquet", ".pq", ".xlsx", ".xlsm")
#: a number with a decimal comma, points between thousands
_COMMA_NUMBER = r"[+-]?(\d+|\d{1,3}([.'’\s]\d{3})+)(,\d+)?([eE][+-]?\d+)?"
#: how a reason of pandas' begins, and what it means
_REASONS = {
    r".*in line (\d+), saw (\d+)": r"line \1 has \2 cells, too many; fix it, or delete what is above the names",
    "Length of header": "its first line has fewer names than its rows have cells; delete what is above it or name all",
    "No columns to parse": "it is empty",
    ".*EOF inside string": "a quotation mark is not closed",
    ".*codec can't decode|null": "it is not text; save it as CSV, or give it the suffix of its format, such as .xlsx",
    "Excel file format": "it is not an Excel file; give it the suffix of its format, such as .csv",
}


def from_csv(
    path: str | Path,
    target: str,
    *,
    task: Task | None = None,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    missing: Missing = "refuse",
) -> Dataset:
    """A file with a header as a data set: CSV, TSV, Parquet (``.parquet``) or Excel (``.xlsx``, its first sheet).

    Of text the separator is a comma, semicolon, tab or bar, whichever the header has most of; where it is a semicolon
    numbers may have decimal commas, and points between thousands. Empty cells, ``NA``, ``?`` and ``-`` are gaps. Text
    is in UTF-8, UTF-16 or Windows-1252 (Latin-1), and may be compressed (``.csv.gz``, ``.zip``).

    Args:
        path: of the file.
        target, task, features, drop, missing: as of :func:`from_frame`.

    Returns:
        :class:`Dataset` named after the file. Columns without a name, as pandas writes its index, are left out.

    Raises:
        ValueError: no such file, a header with repeated names, rows longer than the header, no rows, and what
            :func:`from_frame` refuses. Parquet and Excel need ``pip install 'pyrobnn[tables]'``.

    Warns:
        UserWarning: of what is left out, of decimal commas, and as :func:`from_frame`.
    """
    path = Path(path)
    options: dict[str, Any] = {
        "task": task,
        "features": features,
        "drop": drop,
        "missing": missing,
    }
    return dataclasses.replace(
        from_frame(
            read_frame(path),
            target,
            **options,
            name=path.name,
        ),
        name=path.stem,
    )


def read_frame(path: str | Path) -> pd.DataFrame:
    """The table of a file, as :func:`from_csv` says."""
    path = Path(path)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{str(path)!r} {problem}: check the path")
    suffix = path.suffix.lower()
    separator = ","
    try:
        if suffix in BINARY:
            frame = _binary_table(path)
        else:
            frame, separator = _text_table(path)
    except Exception as error:  # each library has errors of its own; one that is missing is named
        text = "a table of text that begins with the line of names"
        kind = suffix[1:] if suffix in BINARY else text
        raise ValueError(f"{path.name} cannot be read as {kind}: {_reason(error)}") from error
    frame = frame.set_axis(pd.Index(list(map(_column_name, frame.columns))), axis=1)
    check_names(path.name, list(frame.columns))
    if frame.empty:
        sheet = ", on its first sheet" if _is_excel(path) else ""
        raise ValueError(f"{path.name} holds no rows of data below its header{sheet}")
    frame = _named_columns(path.name, frame)
    return _decimal_commas(path.name, frame) if separator == ";" else frame


def _is_excel(path: Path) -> bool:
    return path.suffix.lower().startswith(".xls")


def _binary_table(path: Path) -> pd.DataFrame:
    """The table of a file that is not text; an index that has a name is a column."""
    frame = pd.read_excel(path) if _is_excel(path) else pd.read_parquet(path)
    named = [name for name in frame.index.names if name is not None]
    return frame.reset_index(named) if named else frame


def _text_table(path: Path) -> tuple[pd.DataFrame, str]:
    """The table and its separator."""
    for encoding in ("utf-8-sig", "utf-16", "cp1252"):
        try:
            return _decoded_table(path, encoding)
        except UnicodeError as error:
            wrong = error
    raise wrong


def _decoded_table(path: Path, encoding: str) -> tuple[pd.DataFrame, str]:
    """The table and its separator, read in one encoding.

    The header as one cell finds the separator, the header by itself its names; then the rows are read.
    """
    options: dict[str, Any] = {"encoding": encoding, "skipinitialspace": True}
    first_line: dict[str, Any] = {
        "header": None,
        "nrows": 1,
        "dtype": str,
        "keep_default_na": False,
    }
    # a separator that no text has: the line of names is one cell
    header = str(
        pd.read_csv(
            path,
            sep="\x1f",
            quoting=csv.QUOTE_NONE,
            **first_line,
            **options,
        ).iloc[0, 0]
    )
    if "\0" in header:
        raise UnicodeError("null characters")
    separator = max(SEPARATORS, key=re.sub('"[^"]*("|$)', "", header).count)
    names = pd.read_csv(
        path,
        sep=separator,
        **first_line,
        **options,
    ).iloc[0]
    # cells beyond the header are cut off
    with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
        # without index_col such cells would shift all names by one
        frame = pd.read_csv(
            path,
            sep=separator,
            index_col=False,
            low_memory=False,
            na_values=GAPS,
            **options,
        )
    frame.columns = pd.Index(names.str.strip())
    return frame, separator


def _reason(error: Exception) -> str:
    """Why a library could not read a file, in words of a user's where there are any."""
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    for begin, words in _REASONS.items():
        match = re.match(begin, reason)
        if match:
            return match.expand(words)
    return reason


def _column_name(name: Hashable) -> str:
    """The name of a column; "" where pandas made it up."""
    return re.sub(r"^Unnamed: \d+(\.\d+)*$|^__index_level_\d+__$", "", str(name))


def _named_columns(file: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that have a name; warns of the others."""
    names = list(frame.columns)
    unnamed = names.count("")
    if not unnamed:
        return frame
    report(file, Finding("unnamed_columns", {"count": unnamed, "total": len(names)}))
    return frame.loc[:, [name != "" for name in names]]


def _decimal_commas(file: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Columns of numbers such as 1.234,56 as numbers."""
    converted = {}
    for name in frame.columns[[dtype.kind not in "biufM" for dtype in frame.dtypes]]:
        cells = frame[name].dropna().astype(str).str.strip()
        if len(cells) and cells.str.fullmatch(_COMMA_NUMBER).all():
            digits = cells.str.replace(r"[.'’\s]", "", regex=True).str.replace(",", ".")
            converted[name] = pd.to_numeric(digits).reindex(frame.index)
    if not converted:
        return frame
    points = [
        name for name in frame.select_dtypes("float") if (frame[name].dropna() % 1 != 0).any()
    ]
    if points:
        raise ValueError(
            f"{file}: column {next(iter(converted))!r} has decimal commas and column {points[0]!r} has points: write "
            "all numbers one way"
        )
    report(file, Finding("decimal_commas"))
    return frame.assign(**converted)


def from_frame(
    frame: pd.DataFrame,
    target: str,
    *,
    task: Task | None = None,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    missing: Missing = "refuse",
    name: str = "table",
) -> Dataset:
    """A DataFrame as a data set: one column is the target, the others are features.

    Numbers are features as they are, truth values 0 and 1. A column of categories becomes an input for each of them
    (the 50 most frequent), of dates the days since 1970, with a sine and a cosine of the cycles (day, week, year) that
    the dates span twice and resolve, of times of day (13:45) the share of the day, its sine and its cosine. Text that
    is different in more than half of the rows is taken for a label of the rows and left out. Values are float64: a
    network of float32 sees them after the standardizer.

    Args:
        frame: the table; its index is not looked at.
        target: name of the target column.
        task: ``"regression"`` or ``"classification"``; ``None`` decides by the column: numbers are a regression, text
            and truth values are classes, in sorted order; whole numbers of few different values are asked about.
        features: the columns to predict from; default all but the target.
        drop: columns to leave out.
        missing: what to do where a feature is missing, now and in prediction: ``"refuse"``; ``"drop"`` the row;
            ``"impute"``: a number gets its column's median, and an input says that it was missing; a gap among
            categories is a category. Rows without a target are dropped unless it is ``"refuse"``.
        name: of the data set, in messages and reports.

    Returns:
        :class:`Dataset`, whose ``columns`` turn another table into the same inputs.

    Raises:
        TypeError: no DataFrame.
        ValueError: repeated or unknown columns, missing or infinite values where they are refused, columns of several
            kinds, a target that is constant, does not fit the task or may be meant as numbers as well as classes.

    Warns:
        UserWarning: of rows and columns that are left out, and of what is probably a mistake: a column that equals the
            target or is constant.

    Example:
        >>> table = pd.DataFrame({"size": [1.0, 2.0, 4.0], "kind": ["a", "b", "a"], "price": [2.5, 3.5, 8.0]})
        >>> from_frame(table, "price").feature_names
        ('size', 'kind=a', 'kind=b')
    """
    check_type("frame", frame, pd.DataFrame, "a pandas.DataFrame")
    check_optional(check_choice, "task", task, ("regression", "classification"))
    frame = _chosen(name, _checked(name, frame), target, features, drop)
    gaps = frame.isna() | frame.isin([np.inf, -np.inf])
    columns = Columns.fit(frame.drop(columns=[target]), missing, name)
    if missing == "refuse":
        refuse_gaps(name, gaps, "use missing='drop' or missing='impute' (command line: --missing)")
    x, keep = columns.transform(frame, name)
    # keep: rows with all features; known: with a target; x holds the kept rows only
    known = ~gaps[target].to_numpy()
    complete = keep & known
    if not complete.all():
        evidence = {"count": int((~complete).sum()), "rows": len(frame)}
        report(name, Finding("rows_dropped", evidence))
    y, class_names = _target(name, frame[target][complete], task)
    dataset = Dataset(
        x=torch.tensor(x[known[keep]]),
        y=y,
        name=name,
        task="classification" if class_names else "regression",
        feature_names=columns.inputs,
        target_name=target,
        class_names=class_names,
        columns=columns,
    )
    _report_useless(dataset, x)
    return dataset


def _checked(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The table with names of text, of which none repeats, and with rows."""
    frame = plain(frame)
    check_names(name, list(frame.columns))
    if frame.empty:
        raise ValueError(f"{name} holds no rows of data")
    return frame


def _chosen(
    where: str,
    frame: pd.DataFrame,
    target: str,
    features: Sequence[str] | None,
    drop: Sequence[str],
) -> pd.DataFrame:
    """The features that were asked for, and the target."""
    names = list(frame.columns)
    check_columns(where, [target], names)
    for option, listed in (("features", features or ()), ("drop", drop)):
        if isinstance(listed, str):
            raise TypeError(
                f"{option!r} must be a list of columns, got {listed!r}: write [{listed!r}]"
            )
        check_columns(where, listed, names, f" ({option})")
        if target in listed:
            raise ValueError(f"{where}: {target!r} is the target and cannot be among {option!r}")
    candidates = names if features is None else features
    inputs = [name for name in candidates if name not in drop and name != target]
    if not inputs:
        raise ValueError(f"{where} has no column besides the target: nothing to predict from")
    return frame[[*inputs, target]]


def _target(
    where: str, column: pd.Series, task: Task | None
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Numbers (N, 1) and no names, or labels (N,) and the names of the classes."""
    name = str(column.name)
    if len(column) == 0:
        raise ValueError(f"{where} holds no row with a target {name!r} and all features")
    if task != "classification":
        values = _target_numbers(where, column, task)
        if values is not None:
            _check_numbers(where, name, values, task)
            return torch.tensor(values).unsqueeze(-1), ()
        if task == "regression":
            raise ValueError(f"{where}: target {name!r} is not numeric: use task='classification'")
    labels, class_names = _labels(where, column, task)
    if len(class_names) < 2:
        raise ValueError(f"{where}: target {name!r} holds a single class, {class_names[0]!r}")
    return torch.tensor(labels, dtype=torch.int64), class_names


def _target_numbers(where: str, column: pd.Series, task: Task | None) -> np.ndarray | None:
    """The target as numbers (N,); None of dates, text, and (unless ``task`` says so) of truth values and categories."""
    if pd.api.types.is_datetime64_any_dtype(column):
        return None
    are_classes = is_boolean(column) or isinstance(column.dtype, pd.CategoricalDtype)
    if task is None and are_classes:
        return None
    return numbers(where, column)


def _check_numbers(
    where: str,
    name: str,
    values: np.ndarray,
    task: Task | None,
) -> None:
    """Refuse a target (N,) of one value, or, of no ``task``, of numbers that may be meant as classes."""
    distinct = np.unique(values)
    if len(distinct) == 1:
        rows = "one row" if len(values) == 1 else f"{len(values)} rows of one value, {values[0]:g}"
        raise ValueError(f"{where}: target {name!r} has {rows}: there is nothing to learn")
    # so few whole numbers, each about ten times, may be labels
    if task is None and len(distinct) <= min(10, len(values) / 10) and (distinct % 1 == 0).all():
        raise ValueError(
            f"{where}: the target {name!r} has {len(distinct)} values, all whole numbers, which may be "
            "numbers or classes: say task='regression' or task='classification' (command line: --task)"
        )


def _labels(where: str, column: pd.Series, task: Task | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class of each cell (N,), and the names of the classes in their order."""
    name = str(column.name)
    numeric = pd.api.types.is_numeric_dtype(column) and not is_boolean(column)
    if task == "classification" and numeric and bool((column != column.round()).any()):
        raise ValueError(f"{where}: target {name!r} holds fractions, which cannot be class labels")
    text = column.astype(str).str.strip()
    if task is None:
        _check_classes(where, name, text)
    merged = one_spelling(text)
    if merged.nunique() < text.nunique():
        evidence = {"target": name, "one": text[merged != text].iloc[0]}
        report(where, Finding("merged_classes", evidence))
    cells = column.to_numpy() if numeric else merged.to_numpy(dtype=str)
    classes, labels = np.unique(cells, return_inverse=True)
    return labels, tuple(map(str, classes))


def _check_classes(where: str, name: str, text: pd.Series) -> None:
    """Refuse dates, and text of as many values as rows, which nobody has said to be classes."""
    distinct = text.nunique()
    are_dates = text.str.fullmatch(DATE).all()
    if are_dates or distinct > max(len(text) // 2, 2):
        kind = "dates" if are_dates else f"text with {distinct} different values"
        raise ValueError(
            f"{where}: target {name!r} holds {kind} in {len(text)} rows, such as {text.iloc[0]!r}: write plain "
            "numbers, or if these are classes, say so with task='classification'"
        )


def constant_features(x: np.ndarray, names: Sequence[str]) -> list[Finding]:
    """The columns of ``x`` (n, feature) that have one value in all of several rows, in one finding."""
    constant = [str(name) for name, values in zip(names, x.T) if len(x) > 1 and np.ptp(values) == 0]
    return [Finding("constant_features", {"features": constant})] if constant else []


def _report_useless(dataset: Dataset, x: np.ndarray) -> None:
    """Warn of features that are constant over all rows ``x`` (n, feature), or equal a target of numbers."""
    for finding in constant_features(x, dataset.feature_names):
        report(dataset.name, finding)
    if dataset.task == "regression":
        _report_copies(dataset.name, dataset)


def _report_copies(where: str, dataset: Dataset) -> None:
    """Warn of features that equal the target."""
    y = dataset.y[:, 0]
    for feature, cells in zip(dataset.feature_names, dataset.x.T):
        if len(cells.unique()) > 2 and torch.equal(cells, y):
            evidence = {"feature": feature, "target": dataset.target_name}
            report(where, Finding("equals_target", evidence))


def read_features(path: str | Path, columns: Columns) -> tuple[torch.Tensor, np.ndarray]:
    """The inputs of a new file (n, input), float64, and which of its rows they are (N,), bool.

    Args:
        path: of the file, as for :func:`from_csv`.
        columns: of the training table; others are not read.

    Raises:
        ValueError: a file or header that :func:`from_csv` refuses, and what :meth:`Columns.transform` does.
    """
    x, keep = columns.transform(read_frame(path), Path(path).name)
    return torch.tensor(x), keep
