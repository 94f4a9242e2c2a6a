"""MNIST and Fashion-MNIST by torchvision; where they cannot be had, scikit-learn's digits, and a word on why."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from pyrobnn.data.dataset import Dataset, train_test_split
from pyrobnn.data.real import digits
from pyrobnn.data.uci_sets import VARIABLE

__all__ = ["fashion_mnist", "mnist"]

CLOTHES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
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
    return _images("MNIST", root, train, tuple("0123456789"))


def fashion_mnist(root: str | Path | None = None, *, train: bool = True) -> Dataset:
    """Pieces of clothing in MNIST's format: images (N, 1, 28, 28) with pixels in [0, 1], ten classes.

    Args and what is returned where it cannot be had are those of :func:`mnist`.

    Warns:
        UserWarning: that they are scikit-learn's digits, and why.

    Reference: Fashion-MNIST (Xiao et al., 2017), https://arxiv.org/abs/1708.07747
    """
    return _images("FashionMNIST", root, train, CLOTHES)


def _images(kind: str, root: str | Path | None, train: bool, classes: tuple[str, ...]) -> Dataset:
    folder = Path(root or os.environ.get(VARIABLE) or Path.home() / ".cache" / "pyrobnn")
    try:
        from torchvision import datasets

        part = getattr(datasets, kind)(str(folder), train=train, download=True)
    except (
        ImportError,
        RuntimeError,
        OSError,
    ) as error:  # a RuntimeError: built for another torch, or no mirror
        parts = train_test_split(digits(), 0.25, seed=0)
        stand_in = parts[0] if train else parts[1]
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        warnings.warn(
            f"{kind} cannot be had ({reason}): in its place stand {stand_in.num_data:,} "
            f"of scikit-learn's digits, 8 × 8 pixels. For {kind} install the torchvision that belongs to torch "
            f"{torch.__version__} (extra 'images'), and without a network name a folder that holds it as 'root'",
            UserWarning,
            stacklevel=3,
        )
        return stand_in
    return Dataset(
        x=part.data.unsqueeze(1).float() / 255,
        y=part.targets,
        name=kind,
        task="classification",
        target_name="class",
        class_names=classes,
    )
