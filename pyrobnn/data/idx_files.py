"""MNIST from its own files (IDX), where torchvision has put them: nothing is downloaded."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyrobnn.data.dataset import Dataset

__all__ = ["mnist"]

#: third byte of a file of unsigned bytes
_UNSIGNED_BYTES = 8
_LABELS = tuple("0123456789")


def mnist(folder: str | Path) -> tuple[Dataset, Dataset]:
    """The training and the test images of MNIST, from a folder in torchvision's layout.

    The folder holds ``MNIST/raw`` (it is what ``torchvision.datasets.MNIST`` calls ``root``), or is ``MNIST`` or
    ``raw`` itself. Sets in the same format (Fashion-MNIST, KMNIST) are read as well, from their own ``raw``. Files may
    be packed (``.gz``). torchvision is not needed.

    Args:
        folder: where the files are: ``train-images-idx3-ubyte`` and ``train-labels-idx1-ubyte``, and those of
            ``t10k``.

    Returns:
        Training and test images (N, 1, height, width) with pixels in [0, 1], and labels 0 … 9.

    Raises:
        FileNotFoundError: a file that is not there, by name.
        ValueError: a file that is no IDX file or is cut short, as many images as labels are not, or other labels.

    Reference: Gradient-based learning applied to document recognition (LeCun et al., 1998).
    """
    raw = _raw_folder(Path(folder))
    return _part(raw, "train", "mnist"), _part(raw, "t10k", "mnist, test")


def _raw_folder(folder: Path) -> Path:
    """The folder of the files themselves."""
    candidates = [folder / "MNIST" / "raw", folder / "raw", folder]
    for candidate in candidates:
        if any(candidate.glob("train-images-idx3-ubyte*")):
            return candidate
    places = ", ".join(map(str, candidates))
    raise FileNotFoundError(
        f"no 'train-images-idx3-ubyte' (or .gz) in {places}: "
        f"torchvision.datasets.MNIST({str(folder)!r}, download=True) puts it there"
    )


def _part(raw: Path, split: str, name: str) -> Dataset:
    """The images and labels of one split, ``"train"`` or ``"t10k"``."""
    images = _read(raw, f"{split}-images-idx3-ubyte", 3)
    labels = _read(raw, f"{split}-labels-idx1-ubyte", 1)
    if len(images) != len(labels):
        raise ValueError(
            f"{raw}: {len(images)} images of {split!r} and {len(labels)} labels: the files do not belong together"
        )
    if len(labels) and int(labels.max()) >= len(_LABELS):
        raise ValueError(
            f"{raw}: a label of {split!r} is {int(labels.max())}: those of MNIST are 0 … 9"
        )
    return Dataset(
        images.float().unsqueeze(1) / 255.0,
        labels.long(),
        name,
        "classification",
        target_name="digit",
        class_names=_LABELS,
    )


def _read(raw: Path, name: str, num_axes: int) -> Tensor:
    """The unsigned bytes of an IDX file, packed or not, in their shape."""
    path = raw / name
    if not path.is_file():
        path = raw / f"{name}.gz"
    if not path.is_file():
        raise FileNotFoundError(f"{raw} lacks {name!r} (or {name}.gz)")
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is no whole .gz file: {error}") from error
    return _idx(content, path, num_axes)


def _idx(content: bytes, path: Path, num_axes: int) -> Tensor:
    """The array of an IDX file: two zeros, the type, the number of axes, their lengths (big-endian), the bytes."""
    expected_start = bytes([0, 0, _UNSIGNED_BYTES, num_axes])
    start = content[:4]
    if start != expected_start:
        raise ValueError(
            f"{path} begins with {start.hex(' ') or 'nothing'}, not with {expected_start.hex(' ')}: it is no IDX file "
            f"of unsigned bytes with {num_axes} axes"
        )
    header = 4 + 4 * num_axes
    if len(content) < header:
        raise ValueError(f"{path} has {len(content)} bytes, fewer than its header of {header}")
    shape = np.frombuffer(content[4:header], dtype=">u4").astype(int).tolist()
    num_bytes = len(content) - header
    if num_bytes != math.prod(shape):
        raise ValueError(
            f"{path} says {' x '.join(map(str, shape))} and holds {num_bytes} bytes, not {math.prod(shape)}: it is cut "
            "short or was written over"
        )
    values = np.frombuffer(
        content,
        dtype=np.uint8,
        offset=header,
    )
    return torch.from_numpy(values.copy()).reshape(shape)
