"""Runs on disk: checkpoints, written atomically, checked when read and never unpickled; and files of draws."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyrobnn.density.density import Density
from pyrobnn.inference.fitting.problem import Problem, settings

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun


_MAGIC = b"pyrobnn checkpoint 3\n"
_DRAWS = b"pyrobnn draws 1\n"
_HEAD = 128  # bytes of magic and fingerprint before the draws; keeps them aligned


def fingerprint(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A digest of what a run depends on: its settings (JSON-able) and its tensors, such as the data."""
    digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True, default=repr).encode())
    for name, value in sorted(tensors.items()):
        value = value.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


def run_fingerprint(config: Any, problem: Problem, run: FitRun) -> str:
    """Fingerprint of what the draws depend on and every device holds alike: neither starts nor density."""
    parts = {"x": problem.x, "y": problem.y}
    if isinstance(run.init, torch.nn.Module):
        parts |= {f"init {name}": value for name, value in run.init.named_parameters()}
    elif run.init is not None:
        parts |= {f"init {name}": draws[:, [0, -1]] for name, draws in run.init.draws.items()}
    tensors = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
    sites = [(site.name, tuple(site.shape)) for site in problem.density.sites]
    asked = {"num_draws": run.num_draws, "seed": run.seed, "streamed": run.stream_to is not None}
    plan = {**settings(config), **asked, "sites": sites}
    for name in ("checkpoint_every", "until", "max_seconds"):  # no draw depends on them
        del plan[name]
    return fingerprint(plan, tensors)


def write(path: str | Path, run: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors for the run with this fingerprint; a reader sees the old file or the new one, never a part."""
    path = Path(path)
    body = io.BytesIO()
    torch.save({name: value.detach().cpu() for name, value in tensors.items()}, body)
    content = body.getvalue()
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(_MAGIC)
        file.write(f"{run} {hashlib.sha256(content).hexdigest()}\n".encode())
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def read(path: str | Path, run: str) -> dict[str, Tensor] | None:
    """The tensors of a checkpoint, None without a file; ValueError where it is damaged or of another run."""
    path = Path(path)
    if not path.exists():
        return None
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        raise ValueError(f"{path} is not a pyrobnn checkpoint: choose another path or delete the file")
    head, _, body = content[len(_MAGIC) :].partition(b"\n")
    owner, _, digest = head.decode(errors="replace").partition(" ")
    if digest != hashlib.sha256(body).hexdigest():
        raise ValueError(
            f"the checkpoint {path} is damaged (its checksum does not match): delete it to start again"
        )
    if owner != run:
        raise ValueError(
            f"the checkpoint {path} belongs to a run with another model, data, seed or settings: resume with the "
            "same ones, or choose another path"
        )
    return torch.load(io.BytesIO(body), weights_only=True)


def check_density(before: Tensor, now: Tensor) -> None:
    """ValueError where the log density (chain,) is off by 1e-4: more than rounding, less than another prior."""
    off = (now.double().cpu() - before.double().cpu()).abs()
    if not bool((off <= 1e-4 * before.cpu().abs().clamp(min=100.0)).all()):
        raise ValueError(
            "the checkpoint belongs to another model: where its chains are, the log density differs by "
            f"{float(off.max()):.3g} nats. Resume with the model that it was written with, or choose another path"
        )


class DrawFile:
    """Constrained draws of every site in one file, site after site, each (chain, draw, \\*shape) in C order.

    ``run`` is the fingerprint of the run that fills it (64 characters); ``resume`` continues an interrupted run's file.

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
        path, head = Path(path), (_DRAWS + run.encode()).ljust(_HEAD)
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
            if file.read(len(_DRAWS)) != _DRAWS:
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
