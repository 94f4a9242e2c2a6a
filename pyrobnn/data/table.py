"""A table as a data set: what is no feature or no target is refused or warned of, never guessed at in silence."""

from __future__ import annotations

import csv
import dataclasses
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from pyrobnn.core.checks import check_choice
from pyrobnn.data.columns import (
    DATE,
    Columns,
    Missing,
    check_names,
    has_units,
    is_boolean,
    is_date,
    numbers,
    refuse_gaps,
    report,
)
from pyrobnn.data.dataset import Dataset, Task
from pyrobnn.wording.findings import Finding

__all__ = ["from_csv", "from_frame", "read_features"]

#: different values up to which whole numbers may be meant as classes
_FEW_VALUES = 10
SEPARATORS = (",", ";", "\t", "|")
#: suffixes of what is no text, and the library that pandas needs for it
BINARY = {".parquet": "pyarrow", ".pq": "pyarrow", ".xlsx": "openpyxl", ".xlsm": "openpyxl"}
#: numbers with a decimal comma, points between thousands; and those of which no other reading is possible
_COMMA_NUMBER = r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?"
_CERTAIN = r"[+-]?(\d+,(\d{1,2}|\d{4,})|\d{4,},\d+|0,\d+|\d{1,3}(\.\d{3})+,\d+)([eE][+-]?\d+)?"
_WITH_POINT = r"[+-]?\d*\.\d+([eE][+-]?\d+)?"


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

    Of text the separator is a comma, semicolon, tab or bar, whichever the header has most of; decimal commas are
    recognised where the separator is another, and points between thousands beside them. Text is in UTF-8, and may be
    compressed (``.csv.gz``, ``.zip``).

    Args:
        path: of the file.
        target, task, features, drop, missing: as of :func:`from_frame`.

    Returns:
        :class:`Dataset` named after the file. A first column without a name, as pandas writes its index, is left out.

    Raises:
        ValueError: no such file, a header with repeated or missing names, rows longer than the header, no rows, and
            what :func:`from_frame` refuses.
        ImportError: Parquet and Excel need libraries: ``pip install 'pyrobnn[tables]'``.

    Warns:
        UserWarning: of what is left out, of decimal commas, and as :func:`from_frame`.
    """
    path = Path(path)
    options: dict[str, Any] = {"task": task, "features": features, "drop": drop, "missing": missing}
    dataset = from_frame(read_frame(path), target, **options, name=path.name)
    return dataclasses.replace(dataset, name=path.stem)


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
        ValueError: repeated names, unknown columns, missing values where they are refused, infinite ones, columns that
            are neither numbers nor categories or dates throughout, whole numbers too large for float64, a target that
            is constant, does not fit the task or may be meant as numbers as well as classes, no rows.

    Warns:
        UserWarning: of rows and columns that are left out, and of columns that are legal and probably a mistake: one
            that counts the rows, one that equals the target, constant features, a number that may stand for a missing
            value.

    Example:
        >>> table = pd.DataFrame({"size": [1.0, 2.0, 4.0], "kind": ["a", "b", "a"], "price": [2.5, 3.5, 8.0]})
        >>> from_frame(table, "price").feature_names
        ('size', 'kind=a', 'kind=b')
    """
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"'frame' must be a pandas.DataFrame, got {type(frame).__name__}: use pandas.DataFrame(...)"
        )
    names = [str(column).strip() for column in frame.columns]
    check_names(name, names)
    if task is not None:
        check_choice("task", task, ("regression", "classification"))
    if frame.empty:
        raise ValueError(f"{name} holds no rows of data")
    frame = _chosen(name, frame.set_axis(names, axis=1), target, features, drop)
    if missing == "refuse":
        refuse_gaps(name, frame.isna(), "use missing='drop' or missing='impute' (command line: --missing)")
    columns = Columns.fit(frame.drop(columns=[target]), missing, name)
    x, keep = columns.transform(frame, name)
    known = frame[target].notna().to_numpy()
    if dropped := int((~(keep & known)).sum()):
        report(name, Finding("rows_dropped", {"count": dropped, "rows": len(frame)}))
    y, class_names = _target(name, frame[target][keep & known], task)
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
    values = np.unique(y.numpy())
    if not class_names and len(values) == 1:
        rows = "one row" if len(y) == 1 else f"{len(y)} rows of one value, {values[0]:g}"
        raise ValueError(f"{name}: target {target!r} has {rows}: there is nothing to learn")
    for finding in doubts(dataset):
        report(name, finding)
    # so few whole numbers, each about ten times, may be labels
    few = len(values) <= min(_FEW_VALUES, len(y) / 10) and bool((values % 1 == 0).all())
    if task is None and not class_names and few:
        raise ValueError(
            f"{name}: the target {target!r} has {len(values)} values, all whole numbers, which may be "
            "numbers or classes: say task='regression' or task='classification' (command line: --task)"
        )
    return dataset


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


def _chosen(
    where: str, frame: pd.DataFrame, target: str, features: Sequence[str] | None, drop: Sequence[str]
) -> pd.DataFrame:
    """The features that were asked for, and the target."""
    names = list(frame.columns)
    has = ", ".join(map(str, names))
    if target not in names:
        separated = ", separated by comma, semicolon, tab or bar" if len(names) == 1 else ""
        raise ValueError(f"{where} has no column {target!r}: its columns{separated} are {has}")
    for option, given in (("features", features or ()), ("drop", drop)):
        if isinstance(given, str):
            raise TypeError(f"{option!r} must be a list of columns, got {given!r}: write [{given!r}]")
        for name in given:
            if name not in names:
                raise ValueError(f"{where} has no column {name!r} ({option}): it has {has}")
            if name == target:
                raise ValueError(f"{where}: {name!r} is the target and cannot be among {option!r}")
    kept = [name for name in (names if features is None else features) if name not in drop and name != target]
    if not kept:
        raise ValueError(f"{where} has no column besides the target: nothing to predict from")
    return frame[[*kept, target]]


def _target(where: str, column: pd.Series, task: Task | None) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Numbers (N, 1) and no names, or labels (N,) and the names of the classes."""
    if len(column) == 0:
        raise ValueError(f"{where} holds no row with a target {column.name!r} and all features")
    numeric = pd.api.types.is_numeric_dtype(column) and not is_boolean(column)
    if task == "classification":
        if numeric and bool((column != column.round()).any()):
            raise ValueError(
                f"{where}: target {column.name!r} holds fractions, which are no class labels: use task='regression'"
            )
        return _classes(where, column, numeric)
    labels = task is None and (is_boolean(column) or isinstance(column.dtype, pd.CategoricalDtype))
    values = None if labels or is_date(column) else numbers(where, column)
    if values is not None:
        return torch.tensor(values).unsqueeze(-1), ()
    if task == "regression":
        raise ValueError(
            f"{where}: target {column.name!r} is not numeric: use task='classification' or another target"
        )
    text = column.astype(str).str.strip()
    kind = "dates" if text.str.fullmatch(DATE).all() else "numbers with a unit" if has_units(text) else None
    if kind is None and text.nunique() > max(len(text) // 2, 2):
        kind = f"text with {text.nunique()} different values in {len(text)} rows"
    if kind is not None:
        raise ValueError(
            f"{where}: target {column.name!r} holds {kind}, such as {text.iloc[0]!r}: write plain numbers, or if these "
            "are classes, say so with task='classification'"
        )
    return _classes(where, column, numeric=False)


def _classes(where: str, column: pd.Series, numeric: bool) -> tuple[torch.Tensor, tuple[str, ...]]:
    values = column.to_numpy() if numeric else column.astype(str).str.strip().to_numpy(dtype=str)
    classes, labels = np.unique(values, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"{where}: target {column.name!r} holds a single class, {str(classes[0])!r}")
    return torch.tensor(labels, dtype=torch.int64), tuple(str(value) for value in classes)


def doubts(dataset: Dataset) -> list[Finding]:
    """Columns that are legal and probably not meant."""
    x, y = dataset.x.numpy(), dataset.y.numpy().reshape(-1)
    names, target = dataset.feature_names, dataset.target_name
    found = constant_features(x, names)
    for name, cells in zip(names, x.T):
        values = np.unique(cells)
        if len(values) > 2 and np.array_equal(cells, y):
            found.append(Finding("equals_target", {"feature": name, "target": target}))
        elif (
            len(values) >= 10
            and len(values) == len(cells)
            and values[0] % 1 == 0
            and (np.diff(values) == 1).all()
        ):
            ends = {"first": float(values[0]), "last": float(values[-1])}
            found.append(Finding("row_counter", {"feature": name, **ends}))
        found += _marker("feature", name, cells)
    return found if dataset.task == "classification" else found + _marker("target", target, y)


def constant_features(x: np.ndarray, names: Sequence[str]) -> list[Finding]:
    """The columns of ``x`` (n, feature) that have one value in all of several rows, in one finding."""
    constant = [str(name) for name, values in zip(names, x.T) if len(x) > 1 and np.ptp(values) == 0]
    return [Finding("constant_features", {"features": constant})] if constant else []


def _marker(part: str, name: str, cells: np.ndarray) -> list[Finding]:
    """An extreme that is repeated, and farther from all others than those are from each other."""
    values, counts = np.unique(cells, return_counts=True)
    found = []
    for end, beside, others in ((0, 1, values[1:]), (-1, -2, values[:-1])):
        if (
            len(values) > _FEW_VALUES
            and counts[end] > 1
            and abs(values[end] - values[beside]) > np.ptp(others)
        ):
            shown = {"value": values[end], "count": counts[end], "low": others[0], "high": others[-1]}
            plain = {key: value.item() for key, value in shown.items()}
            found.append(Finding("missing_marker", {"part": part, "name": name, "rows": len(cells), **plain}))
    return found


def guessed(dataset: Dataset) -> str:
    """What kind of a task was read from the target, and why, in a sentence."""
    if dataset.task == "regression":
        return f"regression of {dataset.target_name!r}, whose values are numbers"
    return f"classification of {dataset.target_name!r}, whose values are labels, into {dataset.num_outputs} classes"


def read_frame(path: str | Path) -> pd.DataFrame:
    """The table of a file, as :func:`from_csv` says."""
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
    report(file, Finding("decimal_commas"))
    plain = {name: cells.str.replace(".", "").str.replace(",", ".") for name, cells in found.items()}
    return frame.assign(**{name: pd.to_numeric(cells).reindex(frame.index) for name, cells in plain.items()})


def _without_index(file: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that have a name."""
    names = list(frame.columns)
    bare = [not name and bool(frame.iloc[:, place].isna().all()) for place, name in enumerate(names)]
    if any(bare):
        report(file, Finding("empty_columns", {"count": sum(bare), "total": len(bare)}))
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
        report(file, Finding("index_column", {"first": str(first), "last": str(last)}))
    return frame.iloc[:, index:]
