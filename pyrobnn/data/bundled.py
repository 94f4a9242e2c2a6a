"""Data sets by name: scikit-learn's, MNIST by torchvision, the synthetic ones, and tables by the path of their file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pyrobnn.data import synthetic
from pyrobnn.data.dataset import Dataset, Task, train_test_split
from pyrobnn.data.uci_sets import UCI, VARIABLE, uci_all

if TYPE_CHECKING:
    from pyrobnn.data.columns import Missing

__all__ = ["breast_cancer", "diabetes", "digits", "fashion_mnist", "load", "mnist", "names"]

#: of the files that are read as tables
SUFFIXES = (".csv", ".tsv", ".tab", ".parquet", ".pq", ".xlsx", ".xlsm")
SYNTHETIC = (
    "gap", "polynomial", "polynomial_heteroskedastic", "sinusoid", "clusters", "cubic_clusters", "sine", "sinx3",
)  # fmt: skip


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
    images, classes = "images" in bunch, "target_names" in bunch
    x = torch.tensor(bunch.images / 16.0 if images else bunch.data, dtype=torch.float32)
    y = torch.tensor(bunch.target, dtype=torch.int64 if classes else torch.float32)
    return Dataset(
        x=x.unsqueeze(1) if images else x,
        y=y if classes else y.unsqueeze(-1),
        name=name,
        task="classification" if classes else "regression",
        feature_names=() if images else tuple(map(str, bunch.feature_names)),
        target_name=target,
        class_names=tuple(map(str, bunch.target_names)) if classes else (),
    )


def mnist(root: str | Path | None = None, *, train: bool = True) -> Dataset:
    """Handwritten digits as images (N, 1, 28, 28) with pixels in [0, 1]: ten classes, N = 60,000, or 10,000 to test on.

    Args:
        root: the folder that holds them or that they are downloaded to; by default the environment variable
            ``PYROBNN_DATA``, else ``~/.cache/pyrobnn``.
        train: the training images; False for those to test on.

    Returns:
        :class:`Dataset`. Where torchvision or the network is missing, three quarters of
        :func:`pyrobnn.data.digits` (or, to test on, the last quarter), named ``"digits"``.

    Warns:
        UserWarning: that they are the digits, and why.

    Reference: Gradient-Based Learning Applied to Document Recognition (LeCun et al., 1998),
    https://doi.org/10.1109/5.726791
    """
    return _images("MNIST", root, train)


def fashion_mnist(root: str | Path | None = None, *, train: bool = True) -> Dataset:
    """Pieces of clothing in MNIST's format: images (N, 1, 28, 28) with pixels in [0, 1], ten classes.

    Args and what is returned where it cannot be had are those of :func:`mnist`.

    Warns:
        UserWarning: that they are scikit-learn's digits, and why.

    Reference: Fashion-MNIST (Xiao et al., 2017), https://arxiv.org/abs/1708.07747
    """
    return _images("FashionMNIST", root, train)


def _images(kind: str, root: str | Path | None, train: bool) -> Dataset:
    folder = Path(root or os.environ.get(VARIABLE) or Path.home() / ".cache" / "pyrobnn")
    try:
        from torchvision import datasets

        part = getattr(datasets, kind)(str(folder), train=train, download=True)
    except (
        ImportError,
        RuntimeError,
        OSError,
    ) as error:  # RuntimeError: built for another torch, or no mirror
        stand_in = train_test_split(digits(), 0.25, seed=0)[0 if train else 1]
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        warnings.warn(
            f"{kind} cannot be had ({reason}): in its place stand {stand_in.num_data:,} of scikit-learn's digits, "
            f"8 × 8 pixels. Install the torchvision that belongs to torch {torch.__version__} (extra 'images'), and "
            "without a network name a folder that holds it as 'root'",
            UserWarning,
            stacklevel=3,
        )
        return stand_in
    x, classes = (
        part.data.unsqueeze(1).float() / 255,
        tuple(name.partition(" - ")[0] for name in part.classes),
    )
    return Dataset(x, part.targets, kind, "classification", target_name="class", class_names=classes)


REAL: dict[str, Callable[[], Dataset]] = {
    "diabetes": diabetes,
    "digits": digits,
    "breast_cancer": breast_cancer,
}


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
                f"unknown data {key!r}: choose one of {', '.join(names())}, or a path to a file "
                f"({', '.join(SUFFIXES)}); images are loaded by pyrobnn.data.mnist() and fashion_mnist()"
            )
        if target is None:
            raise ValueError(f"{key!r} is a file: name its target column (command line: --target COLUMN)")
        from pyrobnn.data.table import from_csv

        return from_csv(key, target, task=task, features=features, drop=drop, missing=missing)
    given = {"target": target, "task": task, "features": features, "drop": drop or None}
    for option, value in given.items():
        if value is not None:
            raise ValueError(
                f"data set {key!r} has its own target and features: leave out {option!r} ({value!r})"
            )
    if key in SYNTHETIC:
        noise = {"noise": "heteroskedastic"} if key.endswith("_heteroskedastic") else {}
        make: Callable[..., Dataset] = getattr(synthetic, key.removesuffix("_heteroskedastic"))
        return make(seed=seed, **noise)
    if key.startswith("study_"):
        return synthetic.study(key.removeprefix("study_"))
    return REAL[key]() if key in REAL else uci_all(key)
