"""Checkpoints of a run: written atomically, checked when read and never unpickled."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import Problem, settings

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun, Method

#: what JSON holds
_Plain: TypeAlias = "None | bool | int | float | str | Sequence[_Plain] | Mapping[str, _Plain]"
_MAGIC = b"pyrobnn checkpoint 5\n"


def fingerprint(options: Mapping[str, _Plain], tensors: Mapping[str, Tensor]) -> str:
    """A digest of what a run depends on: its options (JSON-able) and its tensors, such as the data."""
    digest = hashlib.sha256(
        json.dumps(
            dict(options),
            sort_keys=True,
            default=repr,
        ).encode()
    )
    for name, value in sorted(tensors.items()):
        # cloned, as an axis of one may have any stride
        array = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        if array.numel():
            digest.update(array.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_fingerprint(config: Method, problem: Problem, run: FitRun) -> str:
    """Fingerprint of what the draws depend on and every device holds alike: neither starts nor density."""
    inputs = {"x": problem.x, "y": problem.y}
    if isinstance(run.init, torch.nn.Module):
        inputs |= {f"init {name}": value for name, value in run.init.named_parameters()}
    elif run.init is not None:
        inputs |= {f"init {name}": draws[:, [0, -1]] for name, draws in run.init.draws.items()}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    sites = [(site.name, tuple(site.shape)) for site in problem.density.sites]
    plan = {
        **settings(config),
        "num_draws": run.num_draws,
        "seed": run.seed,
        "sites": sites,
    }
    for name in ("checkpoint_every", "until", "max_seconds"):  # no draw depends on them
        del plan[name]
    return fingerprint(plan, tensors)


def write(path: str | Path, run_digest: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors for the run with this fingerprint; a reader sees the old file or the new one, never a part."""
    path = Path(path)
    body = io.BytesIO()
    torch.save({name: value.detach().cpu() for name, value in tensors.items()}, body)
    content = body.getvalue()
    head = f"{run_digest} {hashlib.sha256(content).hexdigest()}\n"
    unfinished = path.with_name(path.name + ".part")
    with open(unfinished, "wb") as file:
        file.write(_MAGIC + head.encode() + content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read(path: str | Path, run_digest: str) -> dict[str, Tensor] | None:
    """The tensors of a checkpoint, None without a file; ValueError where it is damaged or of another run."""
    path = Path(path)
    if not path.exists():
        return None
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        raise ValueError(
            f"{path} is not a pyrobnn checkpoint: choose another path or delete the file"
        )
    head, _, body = content[len(_MAGIC) :].partition(b"\n")
    owner, _, digest = head.decode(errors="replace").partition(" ")
    if digest != hashlib.sha256(body).hexdigest():
        raise ValueError(
            f"the checkpoint {path} is damaged (its checksum does not match): delete it to start again"
        )
    if owner != run_digest:
        raise ValueError(
            f"the checkpoint {path} belongs to a run with another model, data, seed or settings: resume with the "
            "same ones, or choose another path"
        )
    return torch.load(io.BytesIO(body), weights_only=True)


@dataclass(frozen=True)
class Saving:
    """Where a run is saved, as what, and how many seconds apart."""

    path: str | Path
    fingerprint: str
    every: float

    def due(self, last_written: float) -> bool:
        """Whether it is time, where the last one was written at ``time.monotonic() == last_written``."""
        return time.monotonic() - last_written > self.every

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of the run."""
        write(self.path, self.fingerprint, tensors)


def check_density(before: Tensor, now: Tensor) -> None:
    """ValueError where the log density (chain,) is off by 1e-4: more than rounding, less than another prior."""
    off = (now.double().cpu() - before.double().cpu()).abs()
    if not bool((off <= 1e-4 * before.cpu().abs().clamp(min=100.0)).all()):
        raise ValueError(
            "the checkpoint belongs to another model: where its chains are, the log density differs by "
            f"{float(off.max()):.3g} nats. Resume with the model that it was written with, or choose another path"
        )
