"""Draws on disk: one memory-mapped file that a run fills block by block, so that memory holds a block only."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyrobnn.density import Density

_MAGIC = b"pyrobnn draws 1\n"
_HEAD = 128  # bytes of magic and fingerprint before the draws; keeps them aligned


class DrawFile:
    """Constrained draws of every site in one file, site after site, each (chain, draw, \\*shape) in C order.

    The operating system keeps as much of the file in memory as it has room for, and nothing must stay there.

    Args:
        path: the file.
        run: fingerprint of the run that fills it (64 characters).
        density: sites and bijections.
        num_chains, num_draws: sizes.
        resume: continue the file of an interrupted run; otherwise begin a new one.

    Raises:
        ValueError: the disk has too little room; ``path`` holds something else; the file to resume is missing or of
            another run.
    """

    def __init__(
        self,
        path: str | Path,
        run: str,
        density: Density,
        num_chains: int,
        num_draws: int,
        *,
        resume: bool = False,
    ) -> None:
        self._density, self._num_draws = density, num_draws
        shapes = {site.name: (num_chains, num_draws, *site.shape) for site in density.sites}
        sizes = [math.prod(shape) for shape in shapes.values()]
        dtype = torch.empty((), dtype=density.dtype).numpy().dtype
        path, head = Path(path), (_MAGIC + run.encode()).ljust(_HEAD)
        if resume:
            _check_same(path, head, _HEAD + sum(sizes) * dtype.itemsize)
        else:
            _create(path, head, _HEAD + sum(sizes) * dtype.itemsize)
        self._map = np.memmap(path, dtype, "r+", _HEAD, (sum(sizes),))
        parts = torch.from_numpy(self._map).split(sizes)
        self._sites = {
            name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)
        }

    def write(self, chain: int, start: int, z: Tensor) -> None:
        """Store unconstrained draws (draw, dim) of a chain from its draw ``start`` on."""
        for name, value in self._density.constrain(z).items():
            self._sites[name][chain, start : start + len(z)] = value.cpu()

    def draws(self, count: int) -> dict[str, Tensor]:
        """The first ``count`` draws of every chain, site → (chain, count, \\*shape): views of the file."""
        return {name: value[:, :count] for name, value in self._sites.items()}

    def flush(self) -> None:
        """Make what was written survive a loss of power (it survives the process in any case)."""
        self._map.flush()


def _create(path: Path, head: bytes, size: int) -> None:
    if path.exists():
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(
                    f"{path} exists and is no file of draws: choose another path for 'stream_to'"
                )
    free = shutil.disk_usage(path.absolute().parent).free
    if size > free:
        raise ValueError(
            f"the draws need {size:,} bytes on disk but {free:,} are free at {path.absolute().parent}: lower "
            "num_draws or num_chains, or choose another disk for 'stream_to'"
        )
    path.unlink(missing_ok=True)  # a new file: an earlier posterior may still be reading the old one
    with open(path, "xb") as file:
        file.write(head)
        file.flush()
        if hasattr(os, "posix_fallocate"):  # room that is promised now cannot be missing later
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


def _check_same(path: Path, head: bytes, size: int) -> None:
    if not path.exists():
        raise ValueError(
            f"the draws of the interrupted run are missing: {path} does not exist. Pass the 'stream_to' that the run "
            "began with, or delete its checkpoint to start again"
        )
    with open(path, "rb") as file:
        same = file.read(_HEAD) == head
    if not same or path.stat().st_size != size:
        raise ValueError(
            f"{path} holds the draws of another run than the checkpoint: pass the 'stream_to' that the run began "
            "with, or delete its checkpoint to start again"
        )
