"""Data sets by name, as the command line asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyrobnn.data.dataset import Dataset
from pyrobnn.data.uci_sets import OPENML, uci_all

from . import real, synthetic

__all__ = ["load", "names"]

SYNTHETIC: dict[str, Callable[[int], Dataset]] = {
    "gap": lambda seed: synthetic.gap(seed=seed),
    "polynomial": lambda seed: synthetic.polynomial(seed=seed),
    "polynomial_heteroskedastic": lambda seed: synthetic.polynomial(noise="heteroskedastic", seed=seed),
    "sinusoid": lambda seed: synthetic.sinusoid(seed=seed),
    "clusters": lambda seed: synthetic.clusters(seed=seed),
    "cubic_clusters": lambda seed: synthetic.cubic_clusters(seed=seed),
    "sine": lambda seed: synthetic.sine(seed=seed),
    "sinx3": lambda seed: synthetic.sinx3(seed=seed),
}
REAL: dict[str, Callable[[], Dataset]] = {
    "diabetes": real.diabetes,
    "digits": real.digits,
    "breast_cancer": real.breast_cancer,
}


def names() -> tuple[str, ...]:
    """The names :func:`load` knows; the UCI sets among them need the directory of ``PYROBNN_DATA``."""
    return (*REAL, *SYNTHETIC, *OPENML)


def load(name: str | Path, target: str | None = None, *, seed: int = 0) -> Dataset:
    """A data set by name, or a CSV file by path.

    Args:
        name: one of :func:`names`, or the path of a CSV file.
        target: the target column; needed with a CSV file and meaningless with a name.
        seed: of the synthetic sets.

    Returns:
        :class:`Dataset` in original units.

    Raises:
        ValueError: an unknown name, a CSV file without ``target``, or what the loader itself finds wrong.

    Example:
        >>> load("diabetes").num_data, load("clusters", seed=1).num_data
        (442, 400)
    """
    key = str(name)
    is_file = key.lower().endswith(".csv") or Path(key).is_file()
    if is_file and key not in names():
        if target is None:
            raise ValueError(f"{key!r} is a file: name its target column (command line: --target COLUMN)")
        from pyrobnn.data import csv_file

        return csv_file.from_csv(key, target)
    if key not in names():
        raise ValueError(
            f"unknown data {key!r}: choose one of {', '.join(names())}, or a path to a .csv file"
        )
    if target is not None:
        raise ValueError(f"data set {key!r} has its own target: leave out 'target' ({target!r})")
    if key in SYNTHETIC:
        return SYNTHETIC[key](seed)
    return REAL[key]() if key in REAL else uci_all(key)
