"""Real data that needs no download: scikit-learn's bundled sets, and any CSV file with a target column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn import datasets

from .dataset import Dataset, Task

__all__ = ["breast_cancer", "diabetes", "digits", "from_csv"]


def diabetes() -> Dataset:
    """Disease progression after one year from ten measurements: regression, N = 442, in original units.

    Least Angle Regression (Efron et al., 2004), https://arxiv.org/abs/math/0406456

    Example:
        >>> diabetes().x.shape, diabetes().y.shape
        (torch.Size([442, 10]), torch.Size([442, 1]))
    """
    bunch = datasets.load_diabetes(scaled=False)
    return Dataset(
        x=torch.tensor(bunch.data, dtype=torch.float32),
        y=torch.tensor(bunch.target, dtype=torch.float32).unsqueeze(-1),
        name="diabetes",
        task="regression",
        feature_names=tuple(bunch.feature_names),
        target_name="progression",
    )


def digits() -> Dataset:
    """Handwritten digits as images (N, 1, 8, 8) with pixels in [0, 1]: ten classes, N = 1797.

    Example:
        >>> digits().x.shape, float(digits().x.max())
        (torch.Size([1797, 1, 8, 8]), 1.0)
    """
    bunch = datasets.load_digits()
    return Dataset(
        x=torch.tensor(bunch.images / 16.0, dtype=torch.float32).unsqueeze(1),
        y=torch.tensor(bunch.target, dtype=torch.int64),
        name="digits",
        task="classification",
        target_name="digit",
        class_names=tuple(str(name) for name in bunch.target_names),
    )


def breast_cancer() -> Dataset:
    """Malignant (0) or benign (1) from thirty measurements of cell nuclei: two classes, N = 569.

    Example:
        >>> breast_cancer().class_names
        ('malignant', 'benign')
    """
    bunch = datasets.load_breast_cancer()
    return Dataset(
        x=torch.tensor(bunch.data, dtype=torch.float32),
        y=torch.tensor(bunch.target, dtype=torch.int64),
        name="breast_cancer",
        task="classification",
        feature_names=tuple(bunch.feature_names),
        target_name="diagnosis",
        class_names=tuple(str(name) for name in bunch.target_names),
    )


def from_csv(path: str | Path, target: str, *, task: Task | None = None) -> Dataset:
    """A CSV file with a header: one column is the target, all others are numeric features.

    Args:
        path: of the file.
        target: name of the target column.
        task: ``"regression"`` or ``"classification"``; ``None`` decides by the column: numbers are a
            regression, text and truth values are classes, in sorted order.

    Returns:
        :class:`Dataset` named after the file.

    Raises:
        ValueError: no such file, a missing target column, a feature column that is not numeric, missing or
            infinite values, no rows, or a target that does not fit the task.
    """
    path = Path(path)
    frame = _read(path)
    if target not in frame.columns:
        raise ValueError(
            f"{path.name} has no column {target!r}: its columns are {', '.join(map(str, frame.columns))}"
        )
    features = frame.drop(columns=[target])
    _check_features(path.name, features)
    _check_complete(path.name, frame)
    y, class_names = _target(path.name, frame[target], task)
    return Dataset(
        x=torch.tensor(features.to_numpy(dtype=np.float32)),
        y=y,
        name=path.stem,
        task="classification" if class_names else "regression",
        feature_names=tuple(map(str, features.columns)),
        target_name=target,
        class_names=class_names,
    )


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}: check the path")
    try:
        # spaces after a comma would otherwise become part of the column's name
        frame = pd.read_csv(path, skipinitialspace=True)
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not a CSV file with a header line: {str(error).strip()}") from error
    if frame.empty:
        raise ValueError(f"{path.name} holds no rows of data below its header")
    return frame


def _check_features(name: str, features: pd.DataFrame) -> None:
    if features.shape[1] == 0:
        raise ValueError(f"{name} has no column besides the target: nothing to predict from")
    text = [str(c) for c in features.columns if not pd.api.types.is_numeric_dtype(features[c])]
    if text:
        raise ValueError(
            f"{name}: column {', '.join(map(repr, text))} is not numeric: drop it, or encode it as numbers "
            "first (for categories: pandas.get_dummies)"
        )


def _check_complete(name: str, frame: pd.DataFrame) -> None:
    missing = frame.isna().sum()
    missing = missing[missing > 0]
    if len(missing):
        columns = ", ".join(f"{column!r} ({count})" for column, count in missing.items())
        raise ValueError(f"{name} has missing values in column {columns}: drop these rows or impute them")


def _target(name: str, column: pd.Series, task: Task | None) -> tuple[torch.Tensor, tuple[str, ...]]:
    numeric = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    if task is None:
        task = "regression" if numeric else "classification"
    if task == "regression":
        if not numeric:
            raise ValueError(
                f"{name}: target {column.name!r} is not numeric: use task='classification' or another target"
            )
        return torch.tensor(column.to_numpy(dtype=np.float32)).unsqueeze(-1), ()
    if task != "classification":
        raise ValueError(f"'task' must be 'regression' or 'classification', got {task!r}")
    if numeric and bool((column != column.round()).any()):
        raise ValueError(
            f"{name}: target {column.name!r} holds fractions, which are no class labels: use task='regression'"
        )
    classes, labels = np.unique(column.to_numpy(), return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"{name}: target {column.name!r} holds a single class, {classes[0]!r}")
    return torch.tensor(labels, dtype=torch.int64), tuple(str(value) for value in classes)
