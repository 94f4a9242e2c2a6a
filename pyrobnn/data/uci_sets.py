"""The UCI regression benchmark with its standard splits, from a local directory.

The layout, one folder per set: ``data.txt`` (rows of numbers), ``index_features.txt`` and
``index_target.txt`` (0-based columns), ``index_train_S.txt`` and ``index_test_S.txt`` (0-based rows of split S), and
``n_hidden.txt``, the hidden units of the net that the benchmark fits to the set.

Reference: Probabilistic Backpropagation (Hernández-Lobato & Adams, 2015) https://arxiv.org/abs/1502.05336
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from pyrobnn.data.dataset import Dataset

__all__ = ["uci", "uci_all", "uci_num_hidden", "uci_splits"]

VARIABLE = "PYROBNN_DATA"
#: hidden units of a set whose folder does not say how many
NUM_HIDDEN = 50
#: sets that :func:`pyrobnn.data.load` knows by name
UCI = ("bostonHousing", "concrete", "energy", "yacht")


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
    root = root or os.environ.get(VARIABLE)
    if not root:
        raise ValueError(f"no directory for UCI set {name!r}: pass 'root' or set {VARIABLE}")
    for base in (Path(root) / "uci", Path(root)):
        if (base / name / "data.txt").is_file():
            return base / name
    found = sorted({path.parent.name for path in Path(root).glob("**/data.txt")})
    raise ValueError(
        f"there is no UCI set {name!r} in {str(root)!r}: found {', '.join(found) or 'none'} "
        "(a set is a folder with data.txt)"
    )


def _read(folder: Path) -> Dataset:
    table = np.loadtxt(folder / "data.txt", ndmin=2)
    features = _integers(folder, "index_features.txt", table.shape[1])
    target = int(_integers(folder, "index_target.txt", table.shape[1])[0])
    names = tuple(f"feature_{column}" for column in features)
    x, y = _tensor(table[:, features]), _tensor(table[:, [target]])
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
