"""The UCI sets and their standard splits, in the layout of *Probabilistic Backpropagation* (arXiv:1502.05336)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyrobnn.data import Dataset


def uci(name: str, split: int, root: str | Path | None = None) -> tuple[Dataset, Dataset]:
    """The train part and the test part of one standard split of a set, in original units."""
    folder = _folder(name, root)
    table = np.loadtxt(folder / "data.txt", ndmin=2)
    features, (target,), train_rows, test_rows = (
        np.loadtxt(folder / f"index_{file}.txt", ndmin=1).astype(int)
        for file in ("features", "target", f"train_{split}", f"test_{split}")
    )
    names = tuple(f"feature_{column}" for column in features)
    x = _tensor(table[:, features])
    y = _tensor(table[:, [target]])
    full = Dataset(x, y, folder.name, "regression", names, f"column_{target}")
    return full.subset(train_rows), full.subset(test_rows)


def uci_splits(name: str, root: str | Path | None = None) -> int:
    """How many standard splits a set has."""
    files = _folder(name, root).glob("index_test_*.txt")
    return sum(file.stem.rpartition("_")[2].isdigit() for file in files)


def uci_num_hidden(name: str, root: str | Path | None = None) -> int:
    """How many hidden units the benchmark gives a set: what its ``n_hidden.txt`` says, else 50."""
    path = _folder(name, root) / "n_hidden.txt"
    return int(float(path.read_text(encoding="utf-8"))) if path.is_file() else 50


def _folder(name: str, root: str | Path | None) -> Path:
    root = root or os.environ.get("PYROBNN_DATA")
    if not root:
        raise ValueError(f"no directory for UCI set {name!r}: pass 'root' or set PYROBNN_DATA")
    folders = {path.parent.name: path.parent for path in Path(root).glob("**/data.txt")}
    if name not in folders:
        names = ", ".join(sorted(folders)) or "none"
        raise ValueError(f"there is no UCI set {name!r} in {str(root)!r}: found {names}")
    return folders[name]


def _tensor(values: np.ndarray) -> Tensor:
    """In float32, or in float64 where float32 would merge distinct values of a column."""
    narrow = values.astype(np.float32)
    merged = any(
        len(np.unique(rounded)) < len(np.unique(column))
        for column, rounded in zip(values.T, narrow.T)
    )
    return torch.tensor(values if merged else narrow)
