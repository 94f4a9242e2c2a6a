"""A table as a data set: what is no feature or no target is refused or warned of, never guessed at in silence."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from pyrobnn.data.columns import (
    DATE,
    Columns,
    Missing,
    check_names,
    constant_features,
    has_units,
    is_boolean,
    is_date,
    near_duplicates,
    numbers,
    refuse_gaps,
)
from pyrobnn.data.dataset import Dataset, Task
from pyrobnn.data.reading import read_frame

__all__ = ["from_csv", "from_frame", "read_features"]

#: different values up to which whole numbers may be meant as classes
_FEW_VALUES = 10


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
    frame, name = read_frame(path), Path(path)
    return _dataset(frame, target, task, features, drop, missing, name.stem, name.name)


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
    return _dataset(frame.set_axis(names, axis=1), target, task, features, drop, missing, name, name)


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


def _dataset(
    frame: pd.DataFrame,
    target: str,
    task: Task | None,
    features: Sequence[str] | None,
    drop: Sequence[str],
    missing: Missing,
    name: str,
    where: str,
) -> Dataset:
    """As :func:`from_frame`; ``where`` is the table's name in messages."""
    if task not in (None, "regression", "classification"):
        raise ValueError(f"'task' must be 'regression' or 'classification', got {task!r}")
    if frame.empty:
        raise ValueError(f"{where} holds no rows of data")
    frame = _chosen(where, frame, target, features, drop)
    if missing == "refuse":
        refuse_gaps(where, frame.isna(), "use missing='drop' or missing='impute' (command line: --missing)")
    columns = Columns.fit(frame.drop(columns=[target]), missing, where)
    x, keep = columns.transform(frame, where)
    known = frame[target].notna().to_numpy()
    notes = []
    if not (keep & known).all():
        notes = [f"{int((~(keep & known)).sum())} of {len(frame)} rows have a missing value and are left out"]
    y, class_names = _target(where, frame[target][keep & known], task)
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
    if not class_names and bool((y == y[0]).all()):
        rows = "one row" if len(y) == 1 else f"{len(y)} rows of one value, {y[0].item():g}"
        raise ValueError(f"{where}: target {target!r} has {rows}: there is nothing to learn")
    for text in (*notes, *doubts(dataset)):
        warnings.warn(f"{where}: {text}", UserWarning, stacklevel=3)
    values = np.unique(y.numpy())
    if task is None and not class_names and _may_be_classes(values, len(y)):
        raise ValueError(
            f"{where}: the target {target!r} has {len(values)} values, all whole numbers, which may be "
            "numbers or classes: say task='regression' or task='classification' (command line: --task)"
        )
    return dataset


def _may_be_classes(values: np.ndarray, num_data: int) -> bool:
    """Whether so few whole numbers, each about ten times in so many rows, may be labels."""
    return bool((values % 1 == 0).all()) and len(values) <= min(_FEW_VALUES, num_data / 10)


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


def doubts(dataset: Dataset) -> list[str]:
    """Columns that are legal and probably not meant, in sentences."""
    x, y = dataset.x.numpy(), dataset.y.numpy().reshape(-1)
    found = constant_features(x, dataset.feature_names)
    if twins := near_duplicates(dataset.class_names):
        found.append(f"of the classes of {dataset.target_name!r} {twins}")
    named = [("feature", *each) for each in zip(dataset.feature_names, x.T)]
    for part, name, cells in [*named, ("target", dataset.target_name, y)]:
        values, counts = np.unique(cells, return_counts=True)
        if part == "feature" and len(values) > 2 and np.array_equal(cells, y):
            found.append(f"the feature {name!r} equals the target {dataset.target_name!r}: drop it")
        elif part == "feature" and len(values) >= 10 and len(values) == len(cells) and _consecutive(values):
            found.append(
                f"the feature {name!r} numbers the rows ({values[0]:g} … {values[-1]:g}): drop it if it is a counter "
                "or a label, which new data do not continue"
            )
        if len(values) <= _FEW_VALUES or dataset.task == "classification" and part == "target":
            continue
        # repeated, and farther from all others than those are from each other
        for end, beside, others in ((0, 1, values[1:]), (-1, -2, values[:-1])):
            if counts[end] > 1 and abs(values[end] - values[beside]) > np.ptp(others):
                found.append(
                    f"the {part} {name!r} is {values[end]:g} in {counts[end]} of {len(cells)} rows and in the others "
                    f"between {others[0]:g} and {others[-1]:g}: if it stands for a missing value, leave the cells empty"
                )
    return found


def _consecutive(values: np.ndarray) -> bool:
    return bool(values[0] % 1 == 0 and (np.diff(values) == 1).all())


def guessed(dataset: Dataset) -> str:
    """What kind of a task was read from the target, and why, in a sentence."""
    if dataset.task == "regression":
        return f"regression of {dataset.target_name!r}, whose values are numbers"
    return f"classification of {dataset.target_name!r}, whose values are labels, into {dataset.num_outputs} classes"
