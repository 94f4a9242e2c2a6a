"""Data sets by name: scikit-learn's, the synthetic ones, and tables by the path of their file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pyrobnn.data import synthetic
from pyrobnn.data.dataset import Dataset, Task

if TYPE_CHECKING:
    from pyrobnn.data.columns import Missing

__all__ = ["breast_cancer", "diabetes", "digits", "load", "names"]

#: of the files that are read as tables
SUFFIXES = (".csv", ".tsv", ".tab", ".parquet", ".pq", ".xlsx", ".xlsm")
SYNTHETIC = tuple(
    "gap polynomial polynomial_heteroskedastic sinusoid clusters cubic_clusters sine sinx3".split()
)


def diabetes() -> Dataset:
    """Disease progression after one year from ten measurements: regression, N = 442, in original units.

    Least Angle Regression (Efron et al., 2004), https://arxiv.org/abs/math/0406456

    Example:
        >>> diabetes().x.shape, diabetes().y.shape
        (torch.Size([442, 10]), torch.Size([442, 1]))
    """
    return bundled("diabetes", "progression", scaled=False)


def digits() -> Dataset:
    """Handwritten digits as images (N, 1, 8, 8) with pixels in [0, 1]: ten classes, N = 1797.

    Example:
        >>> digits().x.shape, float(digits().x.max())
        (torch.Size([1797, 1, 8, 8]), 1.0)
    """
    return bundled("digits", "digit")


def breast_cancer() -> Dataset:
    """Malignant (0) or benign (1) from thirty measurements of cell nuclei: two classes, N = 569.

    Example:
        >>> breast_cancer().class_names
        ('malignant', 'benign')
    """
    return bundled("breast_cancer", "diagnosis")


def bundled(name: str, target: str, **options: bool) -> Dataset:
    """A set of scikit-learn's by the name of its loader, float32; ``options`` are the loader's."""
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")(**options)
    images = "images" in bunch
    classes = tuple(map(str, bunch.get("target_names", ())))
    x = torch.tensor(bunch.images / 16.0 if images else bunch.data, dtype=torch.float32)
    y = torch.tensor(bunch.target, dtype=torch.int64 if classes else torch.float32)
    return Dataset(
        x.unsqueeze(1) if images else x,
        y if classes else y.unsqueeze(-1),
        name,
        "classification" if classes else "regression",
        () if images else tuple(map(str, bunch.feature_names)),
        target,
        classes,
    )


REAL = {
    "diabetes": diabetes,
    "digits": digits,
    "breast_cancer": breast_cancer,
}


def names() -> tuple[str, ...]:
    """The names :func:`load` knows."""
    return (*REAL, *SYNTHETIC, *(f"study_{name}" for name in synthetic.studies()))


def load(
    name: str | Path,
    target: str | None = None,
    *,
    task: Task | None = None,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    missing: Missing = "refuse",
    seed: int = 0,
) -> Dataset:
    """A data set by name, or a table by the path of its file.

    Args:
        name: one of :func:`names`, or the path of a file that :func:`pyrobnn.data.from_csv` reads.
        target: the target column; needed with a file and meaningless with a name.
        task, features, drop, missing: of a file, as of :func:`pyrobnn.data.from_frame`.
        seed: of the synthetic sets; those of a study (``study_…``) have their own.

    Returns:
        :class:`Dataset` in original units.

    Raises:
        ValueError: an unknown name, a file without ``target``, or what the loader itself finds wrong.

    Example:
        >>> load("diabetes").num_data, load("clusters", seed=1).num_data
        (442, 400)
    """
    key = str(name)
    if key not in names():
        if Path(key).suffix.lower() not in SUFFIXES and not Path(key).is_file():
            raise ValueError(
                f"unknown data {key!r}: choose one of {', '.join(names())}, or a path to a file ({', '.join(SUFFIXES)})"
            )
        if target is None:
            raise ValueError(
                f"{key!r} is a file: name its target column (command line: --target COLUMN)"
            )
        from pyrobnn.data.table import from_csv

        return from_csv(
            key,
            target,
            task=task,
            features=features,
            drop=drop,
            missing=missing,
        )
    options = [option for option in (target, task, features, drop or None) if option is not None]
    if options:
        raise ValueError(
            f"data set {key!r} has its own target and features: leave out {options[0]!r}"
        )
    return _made(key, seed)


def _made(name: str, seed: int) -> Dataset:
    """A data set by a name that is known, one of a study without its seed."""
    if name in REAL:
        return REAL[name]()
    if name.startswith("study_"):
        return synthetic.study(name.removeprefix("study_"))
    if name == "polynomial_heteroskedastic":
        return synthetic.polynomial(noise="heteroskedastic", seed=seed)
    made: Dataset = getattr(synthetic, name)(seed=seed)
    return made
