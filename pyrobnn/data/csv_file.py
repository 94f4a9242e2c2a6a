"""A CSV file as a data set: what is no number, no feature or no target is said, never guessed at in silence."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from pyrobnn.data.dataset import Dataset, Task

__all__ = ["from_csv", "read_features"]

SEPARATORS = (",", ";", "\t")
#: rows from which a column of consecutive whole numbers is no coincidence
_FEWEST_COUNTED = 10
_DATE = re.compile(r"\s*\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?$")
#: a numeric target of so few values, each met so often on average, may be meant as classes
_FEW_VALUES = 10
#: rows that a message names
_LISTED = 8


def from_csv(path: str | Path, target: str, *, task: Task | None = None) -> Dataset:
    """A CSV file with a header: one column is the target, all others are numeric features.

    Cells are separated by commas, semicolons or tabs, whichever the header has most of; numbers have decimal points.
    Values are float64: a network of float32 sees them after the standardizer.

    Args:
        path: of the file, in UTF-8.
        target: name of the target column.
        task: ``"regression"`` or ``"classification"``; ``None`` decides by the column: numbers are a
            regression, text and truth values are classes, in sorted order.

    Returns:
        :class:`Dataset` named after the file. A first column without a name, as pandas writes its index, is left out.

    Raises:
        ValueError: no such file, a header with repeated or missing names, rows longer than the header, a missing target
            column, cells that are no numbers (the first is named), missing or infinite values, whole numbers too large
            for float64, a target that is constant or does not fit the task, no rows.

    Warns:
        UserWarning: of what is left out, and of columns that are legal and probably a mistake: one that counts the
            rows, one that equals the target, constant features, a target of few whole numbers without ``task``.
    """
    path = Path(path)
    frame = _read(path)
    if target not in frame.columns:
        raise ValueError(f"{path.name} has no column {target!r}: its columns are {', '.join(frame.columns)}")
    features = frame.drop(columns=[target])
    if features.shape[1] == 0:
        raise ValueError(f"{path.name} has no column besides the target: nothing to predict from")
    _check_complete(path.name, frame)
    x = np.column_stack([_feature(path.name, features[name]) for name in features.columns])
    y, class_names = _target(path.name, frame[target], task)
    dataset = Dataset(
        x=torch.tensor(x),
        y=y,
        name=path.stem,
        task="classification" if class_names else "regression",
        feature_names=tuple(features.columns),
        target_name=target,
        class_names=class_names,
    )
    if not class_names and bool((y == y[0]).all()):
        rows = "one row" if len(y) == 1 else f"{len(y)} rows of one value, {y[0].item():g}"
        raise ValueError(f"{path.name}: target {target!r} has {rows}: there is nothing to learn")
    for text in _doubts(dataset, task):
        warnings.warn(f"{path.name}: {text}", UserWarning, stacklevel=2)
    return dataset


def read_features(path: str | Path, names: Sequence[str]) -> torch.Tensor:
    """The named columns of a CSV file as float64 (N, feature), in the order of ``names``; other columns are not read.

    Args:
        path: of the file, as for :func:`from_csv`.
        names: of the features.

    Raises:
        ValueError: a file or header that :func:`from_csv` refuses, missing columns, missing values (the rows are
            named), cells that are no finite numbers.
    """
    path = Path(path)
    frame = _read(path)
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise ValueError(
            f"{path.name} lacks the column {', '.join(map(repr, missing))}: it has {', '.join(frame.columns)}"
        )
    frame = frame[list(names)]
    empty = np.flatnonzero(frame.isna().any(axis=1).to_numpy()) + 1
    if len(empty):
        listed = ", ".join(map(str, empty[:_LISTED])) + (" …" if len(empty) > _LISTED else "")
        columns = ", ".join(repr(name) for name in frame.columns[frame.isna().any()])
        raise ValueError(
            f"{path.name} has missing values in row {listed} (column {columns}): drop these rows or impute them"
        )
    x = np.column_stack([_feature(path.name, frame[name]) for name in names])
    if not np.isfinite(x).all():
        row = int((~np.isfinite(x)).any(axis=1).argmax()) + 1
        raise ValueError(f"{path.name} has infinite values, first in row {row}: drop these rows")
    return torch.tensor(x)


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}: check the path")
    try:
        separator, names = _header(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # cells beyond the header are cut off
            # without index_col such cells would shift all names by one; spaces would become part of a text
            frame = pd.read_csv(
                path,
                sep=separator,
                index_col=False,
                skipinitialspace=True,
                encoding="utf-8-sig",
                low_memory=False,
            )
    except pd.errors.ParserWarning as error:
        raise ValueError(
            f"{path.name}: rows have more cells than the header has names ({len(names)}): name every column"
        ) from error
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{path.name} is not a CSV file with a header line, in UTF-8: {str(error).strip()}"
        ) from error
    if frame.empty:
        raise ValueError(f"{path.name} holds no rows of data below its header")
    frame.columns = names
    return _without_index(path.name, frame)


def _header(path: Path) -> tuple[str, list[str]]:
    """The separator and the names of the columns; an empty name is "".

    Raises:
        ValueError: names that repeat, or a first line of data.
    """
    found = {}
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for separator in SEPARATORS:
            lines.seek(0)
            rows = csv.reader(lines, delimiter=separator, skipinitialspace=True)
            found[separator] = next((row for row in rows if any(cell.strip() for cell in row)), [])
    separator = max(SEPARATORS, key=lambda each: len(found[each]))
    # pandas calls a column without a name so when it writes what it has read
    names = [re.sub(r"^Unnamed: \d+(\.\d+)*$", "", name.strip()) for name in found[separator]]
    repeated = list(dict.fromkeys(name for name in names if name and names.count(name) > 1))
    if repeated:
        raise ValueError(
            f"{path.name} names the column {', '.join(map(repr, repeated))} more than once: rename or drop one, a copy "
            "of the target among the features would be learned by heart"
        )
    given = [name for name in names if name]
    if given and all(map(_is_number, given)) and given != [str(index) for index in range(len(given))]:
        raise ValueError(
            f"the first line of {path.name} holds numbers only, {', '.join(given[:3])} …: begin with a line of names"
        )
    return separator, names


def _without_index(file: str, frame: pd.DataFrame) -> pd.DataFrame:
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


def _check_complete(file: str, frame: pd.DataFrame) -> None:
    missing = frame.isna().sum()
    missing = missing[missing > 0]
    if len(missing):
        columns = ", ".join(f"{column!r} ({count})" for column, count in missing.items())
        first = int(frame.isna().any(axis=1).to_numpy().argmax()) + 1
        raise ValueError(
            f"{file} has missing values in column {columns}, first in row {first}: drop these rows or impute them"
        )


def _is_number(cell: str) -> bool:
    return bool(pd.notna(pd.to_numeric(cell, errors="coerce")))


def _numbers(file: str, column: pd.Series) -> np.ndarray | None:
    """The column as float64, or None where it is text.

    Raises:
        ValueError: numbers with a few cells of something else among them, or with commas inside.
    """
    if pd.api.types.is_bool_dtype(column):
        return column.to_numpy(dtype=np.float64)
    if not pd.api.types.is_numeric_dtype(column):
        text = column.astype(str).str.strip()
        commas = text.str.fullmatch(r"[+-]?\d+(,\d+)+(\.\d+)?([eE][+-]?\d+)?")
        if 2 * commas.sum() > len(text):
            raise ValueError(
                f"{file}: column {column.name!r} holds numbers with commas, such as {text[commas].iloc[0]!r}: write "
                "them with a decimal point and without separators (pandas.read_csv has the options decimal and "
                "thousands)"
            )
        column = pd.to_numeric(text, errors="coerce")
        stray = column.isna()
        if 2 * stray.sum() >= len(text):
            return None
        if stray.any():
            row = int(stray.to_numpy().argmax())
            raise ValueError(
                f"{file}: column {column.name!r} holds numbers but for {stray.sum()} of {len(text)} cells, first "
                f"{text.iloc[row]!r} in row {row + 1}: drop these rows or impute them (a target of classes: "
                "task='classification')"
            )
    values = column.to_numpy(dtype=np.float64)
    if pd.api.types.is_integer_dtype(column) and len(np.unique(values)) < column.nunique():
        raise ValueError(
            f"{file}: column {column.name!r} has {column.nunique()} distinct whole numbers of which float64 keeps "
            f"{len(np.unique(values))}: subtract an offset, or drop it if it is a label"
        )
    return values


def _feature(file: str, column: pd.Series) -> np.ndarray:
    values = _numbers(file, column)
    if values is None:
        raise ValueError(
            f"{file}: column {column.name!r} is not numeric: drop it, or encode it as numbers first (for categories: "
            "pandas.get_dummies)"
        )
    return values


def _target(file: str, column: pd.Series, task: Task | None) -> tuple[torch.Tensor, tuple[str, ...]]:
    if task not in (None, "regression", "classification"):
        raise ValueError(f"'task' must be 'regression' or 'classification', got {task!r}")
    if task == "classification":
        numeric = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
        if numeric and bool((column != column.round()).any()):
            raise ValueError(
                f"{file}: target {column.name!r} holds fractions, which are no class labels: use task='regression'"
            )
        return _classes(file, column)
    values = None if pd.api.types.is_bool_dtype(column) and task is None else _numbers(file, column)
    if values is not None:
        return torch.tensor(values).unsqueeze(-1), ()
    if task == "regression":
        raise ValueError(
            f"{file}: target {column.name!r} is not numeric: use task='classification' or another target"
        )
    labels, class_names = _classes(file, column)
    if all(_DATE.match(name) for name in class_names):
        raise ValueError(
            f"{file}: target {column.name!r} holds dates, such as {class_names[0]!r}: write a number, such as days "
            "since the first (if the dates are classes, say so with task='classification')"
        )
    units = {re.sub(r"^[+-]?(\d+\.?\d*|\.\d+)", "", name) for name in class_names}
    if len(class_names) > _FEW_VALUES and len(units) == 1:
        raise ValueError(
            f"{file}: target {column.name!r} holds numbers with {units.pop().strip()!r} behind them, such as "
            f"{class_names[0]!r}: write plain numbers (if they are classes, say so with task='classification')"
        )
    if len(class_names) > max(len(labels) // 2, 2):
        raise ValueError(
            f"{file}: target {column.name!r} is text with {len(class_names)} different values in {len(labels)} rows "
            f"({', '.join(map(repr, class_names[:3]))} …): if they are numbers, write them as such; if they are "
            "classes, say so with task='classification'"
        )
    return labels, class_names


def _classes(file: str, column: pd.Series) -> tuple[torch.Tensor, tuple[str, ...]]:
    plain = pd.api.types.is_numeric_dtype(column)
    values = column.to_numpy() if plain else column.astype(str).str.strip().to_numpy(dtype=str)
    classes, labels = np.unique(values, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"{file}: target {column.name!r} holds a single class, {classes[0]!r}")
    return torch.tensor(labels, dtype=torch.int64), tuple(str(value) for value in classes)


def _doubts(dataset: Dataset, task: Task | None) -> list[str]:
    """Columns that are legal and probably not meant, in sentences."""
    told = []
    x, y, rows = dataset.x.numpy(), dataset.y.numpy().reshape(-1), dataset.num_data
    constant = [name for name, values in zip(dataset.feature_names, x.T) if np.ptp(values) == 0]
    if constant and rows > 1:
        told.append(f"the feature {', '.join(map(repr, constant))} is constant and tells nothing")
    for name, values in zip(dataset.feature_names, x.T):
        ordered = np.sort(values)
        if rows >= _FEWEST_COUNTED and ordered[0] % 1 == 0 and bool((np.diff(ordered) == 1).all()):
            told.append(
                f"the feature {name!r} numbers the rows ({ordered[0]:g} … {ordered[-1]:g}): drop it if it is a counter "
                "or a label, which new data do not continue"
            )
        if rows > 2 and np.array_equal(values, y):
            told.append(f"the feature {name!r} equals the target {dataset.target_name!r}: drop it")
    values = np.unique(y)
    whole = task is None and dataset.task == "regression" and bool((values % 1 == 0).all())
    if whole and len(values) <= _FEW_VALUES and rows >= _FEW_VALUES * len(values):
        told.append(
            f"the target {dataset.target_name!r} has {len(values)} values, all whole numbers, and is taken for a "
            "regression: pass task='regression' to confirm it, or task='classification'"
        )
    return told
