"""Data sets by name, as the command line asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyrobnn.data.dataset import Dataset, Task
from pyrobnn.data.study_sets import STUDIES, study
from pyrobnn.data.uci_sets import OPENML, uci_all

from . import images, real, synthetic

if TYPE_CHECKING:
    from pyrobnn.data.columns import Missing

__all__ = ["load", "names"]

#: of the files that are read as tables
SUFFIXES = (".csv", ".tsv", ".tab", ".parquet", ".pq", ".xlsx", ".xlsm")
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
#: points of published studies, which no seed changes
PUBLISHED: dict[str, str] = {f"study_{name}": name for name in STUDIES}
REAL: dict[str, Callable[[], Dataset]] = {
    "diabetes": real.diabetes,
    "digits": real.digits,
    "breast_cancer": real.breast_cancer,
}


def names() -> tuple[str, ...]:
    """The names :func:`load` knows; the UCI sets among them need the directory of ``PYROBNN_DATA``."""
    return (*REAL, *SYNTHETIC, *PUBLISHED, *OPENML)


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
    is_file = Path(key).suffix.lower() in SUFFIXES or Path(key).is_file()
    if is_file and key not in names():
        if target is None:
            raise ValueError(f"{key!r} is a file: name its target column (command line: --target COLUMN)")
        from pyrobnn.data.table import from_csv

        return from_csv(key, target, task=task, features=features, drop=drop, missing=missing)
    if key not in names():
        function = key.lower().replace("-", "_")
        if function in images.__all__:
            raise ValueError(
                f"{key!r} is a set of images and not known by name: pyrobnn.data.{function}() loads it for a net that "
                "you build; by name there are the 'digits'"
            )
        kinds = ", ".join(SUFFIXES)
        raise ValueError(
            f"unknown data {key!r}: choose one of {', '.join(names())}, or a path to a file ({kinds})"
        )
    given = {"target": target, "task": task, "features": features, "drop": drop or None}
    for option, value in given.items():
        if value is not None:
            raise ValueError(
                f"data set {key!r} has its own target and features: leave out {option!r} ({value!r})"
            )
    if key in SYNTHETIC:
        return SYNTHETIC[key](seed)
    if key in PUBLISHED:
        return study(PUBLISHED[key])
    return REAL[key]() if key in REAL else uci_all(key)
