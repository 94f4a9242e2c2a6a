"""Chains on several processes: under ``torchrun`` each rank runs its own, and all end with one Posterior."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrobnn.checks import check_count
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior


@contextlib.contextmanager
def process_group(backend: str | None = None) -> Iterator[int]:
    """The ranks that ``torchrun`` started, as one process group; gives this process's rank.

    Without ``torchrun`` there is one rank, 0, and no group. A group that exists already is used and left alone.

    Args:
        backend: ``"gloo"`` or ``"nccl"``; default NCCL where each rank of this machine has a GPU, else gloo. Under NCCL
            GPU number ``LOCAL_RANK`` is the current device inside the block.

    Example:
        >>> with process_group() as rank:
        ...     rank
        0
    """
    if dist.is_available() and dist.is_initialized():
        yield dist.get_rank()
        return
    if "WORLD_SIZE" not in os.environ:
        yield 0
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    backend = backend or ("nccl" if torch.cuda.device_count() >= here else "gloo")
    # NCCL's collectives take place on the current device, by default the first one for every rank
    with torch.cuda.device(_own_gpu()) if backend == "nccl" else contextlib.nullcontext():
        dist.init_process_group(backend)
        try:
            yield dist.get_rank()
        finally:
            dist.destroy_process_group()


def fit_on_ranks(
    method: Any,
    model: BNN | Callable[..., Any],
    x: Any = None,
    y: Any = None,
    *,
    num_draws: int = 1000,
    seed: int = 0,
    init: Any = None,
    device: str | torch.device | None = None,
) -> Posterior:
    """Run ``method.num_chains`` chains on every rank and gather them all.

    Each rank has its own seed and adapts by itself, so two ranks of 4 chains are not the 8 chains of one process: they
    are as good, and no rank ever waits for another before the end.

    Args:
        method: :class:`pyrobnn.NUTS`, ``SGLD`` or ``SGHMC``.
        model, x, y, num_draws, init: as for ``method.fit``.
        seed: of the whole run; every rank derives its own.
        device: where this rank computes; default GPU number ``LOCAL_RANK`` under NCCL, else where ``x`` is.

    Returns:
        On every rank the same posterior, (ranks · num_chains, num_draws, …).

    Raises:
        TypeError: a method without chains.

    Example:
        Under ``torchrun --nproc_per_node 2 fit.py``::

            with pb.distributed.process_group() as rank:
                posterior = pb.distributed.fit_on_ranks(pb.NUTS(num_chains=2), model, x, y)
                if rank == 0:
                    posterior.save("posterior.nc")
    """
    if not hasattr(method, "num_chains"):
        raise TypeError(
            f"{type(method).__name__} has no chains to share out: use NUTS, SGLD or SGHMC, or fit on one rank"
        )
    check_count("seed", seed, minimum=0)
    active = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if active else (0, 1)
    if device is None and active and dist.get_backend() == "nccl":
        device = _own_gpu()
    posterior = method.fit(
        model, x, y, num_draws=num_draws, seed=seed * ranks + rank, init=init, device=device
    )
    return gather(posterior, seed=seed) if ranks > 1 else posterior


def gather(posterior: Posterior, *, seed: int) -> Posterior:
    """The chains of all ranks in one posterior, in the order of the ranks, on every rank.

    Args:
        posterior: this rank's; the same model, sites and number of draws on every rank.
        seed: of the whole run, for the record.
    """
    ranks = dist.get_world_size()
    metas: list[Any] = [None] * ranks
    dist.all_gather_object(metas, posterior.meta)
    timings = {
        name: max(meta["timings"].get(name, 0.0) for meta in metas) for name in posterior.meta["timings"]
    }
    notes = [f"rank {rank}: {note}" for rank, meta in enumerate(metas) for note in meta["warnings"]]
    return dataclasses.replace(
        posterior,
        draws={name: _chains_of_all(value) for name, value in sorted(posterior.draws.items())},
        sample_stats={name: _chains_of_all(value) for name, value in sorted(posterior.sample_stats.items())},
        meta={**posterior.meta, "seed": seed, "num_ranks": ranks, "timings": timings, "warnings": notes},
    )


def _chains_of_all(value: Tensor) -> Tensor:
    # collectives know no booleans
    sent = value.to(torch.uint8) if value.dtype == torch.bool else value
    if dist.get_backend() == "nccl":  # nor tensors of the CPU, where draws that went to a file lie
        sent = sent.to(_own_gpu())
    parts = [
        torch.empty_like(sent, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(parts, sent.contiguous())
    return torch.cat(parts).to(value)


def _own_gpu() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
