"""Data sets by name: scikit-learn's, the synthetic ones, UCI's with their splits, and tables by the path of their file.

The UCI regression benchmark of *Probabilistic Backpropagation* (Hernández-Lobato & Adams, 2015),
https://arxiv.org/abs/1502.05336, is read from a directory with a folder for each set: ``data.txt`` (rows of numbers),
``index_features.txt`` and ``index_target.txt`` (0-based columns), ``index_train_S.txt`` and ``index_test_S.txt``
(0-based rows of split S), and ``n_hidden.txt``, the hidden units of the benchmark's net.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pyrobnn.data import synthetic
from pyrobnn.data.dataset import Dataset, Task

if TYPE_CHECKING:
    from pyrobnn.data.columns import Missing

__all__ = ["breast_cancer", "diabetes", "digits", "load", "names"]
__all__ += ["uci", "uci_all", "uci_num_hidden", "uci_splits"]

#: of the files that are read as tables
SUFFIXES = (".csv", ".tsv", ".tab", ".parquet", ".pq", ".xlsx", ".xlsm")
SYNTHETIC = (
    "gap",
    "polynomial",
    "polynomial_heteroskedastic",
    "sinusoid",
    "clusters",
    "cubic_clusters",
    "sine",
    "sinx3",
)
#: sets of UCI that :func:`load` knows by name; hidden units of a set whose folder does not say how many
UCI = ("bostonHousing", "concrete", "energy", "yacht")
NUM_HIDDEN = 50


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


def bundled(name: str, target: str, **options: Any) -> Dataset:
    """A set of scikit-learn's by the name of its loader, float32; ``options`` are the loader's."""
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")(**options)
    images, classes = "images" in bunch, tuple(map(str, bunch.get("target_names", ())))
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


REAL = {"diabetes": diabetes, "digits": digits, "breast_cancer": breast_cancer}


def names() -> tuple[str, ...]:
    """The names :func:`load` knows; the UCI sets among them need the directory of ``PYROBNN_DATA``."""
    return (*REAL, *SYNTHETIC, *(f"study_{name}" for name in synthetic.studies()), *UCI)


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
            raise ValueError(f"{key!r} is a file: name its target column (command line: --target COLUMN)")
        from pyrobnn.data.table import from_csv

        return from_csv(key, target, task=task, features=features, drop=drop, missing=missing)
    if given := [each for each in (target, task, features, drop or None) if each is not None]:
        raise ValueError(f"data set {key!r} has its own target and features: leave out {given[0]!r}")
    if key in REAL:
        return REAL[key]()
    if key in UCI:
        return uci_all(key)
    if key.startswith("study_"):
        return synthetic.study(key.removeprefix("study_"))
    if key == "polynomial_heteroskedastic":
        return synthetic.polynomial(noise="heteroskedastic", seed=seed)
    made: Dataset = getattr(synthetic, key)(seed=seed)
    return made


def uci(name: str, split: int, root: str | Path | None = None) -> tuple[Dataset, Dataset]:
    """The train part and the test part of one standard split of a UCI set, in original units.

    Args:
        name: folder of the set, such as ``"concrete"``.
        split: number of the split, from 0.
        root: directory that holds the sets, or holds them under ``uci/``; by default the environment
            variable ``PYROBNN_DATA``.

    Raises:
        ValueError: no root, no such set (the message lists those found) or no such split.
    """
    folder = _folder(name, root)
    full = _read(folder)
    parts = [_integers(folder, f"index_{part}_{split}.txt", full.num_data) for part in ("train", "test")]
    return full.subset(parts[0]), full.subset(parts[1])


def uci_splits(name: str, root: str | Path | None = None) -> int:
    """How many standard splits a UCI set has; arguments and errors as in :func:`uci`."""
    files = _folder(name, root).glob("index_test_*.txt")
    return sum(file.stem.rpartition("_")[2].isdigit() for file in files)


def uci_num_hidden(name: str, root: str | Path | None = None) -> int:
    """How many hidden units the benchmark gives a UCI set: what its ``n_hidden.txt`` says, else 50."""
    path = _folder(name, root) / "n_hidden.txt"
    return int(float(path.read_text(encoding="utf-8"))) if path.is_file() else NUM_HIDDEN


def uci_all(name: str, root: str | Path | None = None) -> Dataset:
    """All rows of a UCI set, unsplit; arguments and errors as in :func:`uci`."""
    return _read(_folder(name, root))


def _folder(name: str, root: str | Path | None) -> Path:
    root = root or os.environ.get("PYROBNN_DATA")
    if not root:
        raise ValueError(f"no directory for UCI set {name!r}: pass 'root' or set PYROBNN_DATA")
    found = {path.parent.name: path.parent for path in Path(root).glob("**/data.txt")}
    if name not in found:
        raise ValueError(
            f"there is no UCI set {name!r} in {str(root)!r}: found {', '.join(sorted(found)) or 'none'} "
            "(a set is a folder with data.txt)"
        )
    return found[name]


def _read(folder: Path) -> Dataset:
    table = np.loadtxt(folder / "data.txt", ndmin=2)
    features = _integers(folder, "index_features.txt", table.shape[1])
    target = int(_integers(folder, "index_target.txt", table.shape[1])[0])
    x, y = _tensor(table[:, features]), _tensor(table[:, [target]])
    names = tuple(f"feature_{column}" for column in features)
    return Dataset(x, y, folder.name, "regression", names, f"column_{target}")


def _integers(folder: Path, file: str, below: int) -> np.ndarray:
    if not (folder / file).is_file():
        raise ValueError(f"there is no file {file} in {folder}")
    values = np.loadtxt(folder / file, ndmin=1).astype(int)  # some are written as floats
    if not values.size or values.min() < 0 or values.max() >= below:
        raise ValueError(f"{folder / file} must hold numbers of 0 … {below - 1}: they count from 0")
    return values


def _tensor(values: np.ndarray) -> torch.Tensor:
    """In float32, or in float64 where float32 would merge distinct values of a column."""
    narrow = values.astype(np.float32)
    merged = any(len(np.unique(few)) < len(np.unique(many)) for many, few in zip(values.T, narrow.T))
    return torch.tensor(values if merged else narrow)
