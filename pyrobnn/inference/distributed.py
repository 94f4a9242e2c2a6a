"""Fits on several processes that end as one Posterior: ranks of ``torchrun``, or workers of a cluster.

Chains and members are shared out and gathered at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrobnn.core.checks import check_count
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
    # its functions take the group there is at their import as a default. Imported later, by the compiler, they would
    # keep its threads running to the end of the interpreter, which then ends by SIGABRT
    import_module("torch.distributed.nn.functional")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    backend = backend or ("nccl" if torch.cuda.device_count() >= here else "gloo")
    # NCCL's collectives take place on the current device, by default the first one for every rank
    with torch.cuda.device(_own_gpu()) if backend == "nccl" else contextlib.nullcontext():
        dist.init_process_group(backend, **_fresh_store())
        try:
            yield dist.get_rank()
        finally:
            dist.destroy_process_group()


def _fresh_store() -> dict[str, Any]:
    """Ranks that torchrun started again meet in a part of its store where no addresses of dead ranks are."""
    env = os.environ
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    # agents of several machines count apart: there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes a store for each start
    alone = env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
    if restarts == "0" or not alone or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store, rank, ranks = next(dist.rendezvous("env://"))
    return {
        "store": dist.PrefixStore(f"start {restarts}", store),
        "rank": rank,
        "world_size": ranks,
    }


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
    checkpoint: str | Path | None = None,
) -> Posterior:
    """Run chains, or the members of an ensemble, on every rank and gather them all.

    Each rank runs ``method.num_chains`` of them with its own seed and adapts alone: its draws depend on its number.

    Args:
        method: :class:`pyrobnn.NUTS`, ``SGLD``, ``SGHMC`` or ``DeepEnsemble``.
        model, x, y, num_draws, init: as for ``method.fit``; an ensemble has one draw a member.
        seed: of the whole run, from which every rank derives its own.
        device: where this rank computes; default GPU number ``LOCAL_RANK`` under NCCL, else where ``x`` is.
        checkpoint: of NUTS: a file to whose name every rank adds its number. Ranks that ``torchrun --max-restarts``
            starts again go on from there, to the same draws; several machines need a disk that all of them see.

    Returns:
        On every rank the same posterior: (ranks · num_chains, num_draws, …) or (1, ranks · num_members, …).

    Raises:
        TypeError: a method without chains or members.

    Example:
        Under ``torchrun --nproc_per_node 2 fit.py``::

            with pb.distributed.process_group() as rank:
                posterior = pb.distributed.fit_on_ranks(pb.NUTS(num_chains=2), model, x, y)
                if rank == 0:
                    posterior.save("posterior.nc")
    """
    active = dist.is_available() and dist.is_initialized()
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if active else (0, 1)
    if device is None and active and dist.get_backend() == "nccl":
        device = _own_gpu()
    job = _job(method, (model, x, y), num_draws, seed, init, checkpoint)
    posterior = job(num_ranks, rank, device=device)
    if num_ranks == 1:
        return posterior
    parts: list[Any] = [None] * num_ranks
    dist.all_gather_object(parts, _shown(posterior))
    return _joined(method, posterior, parts, seed)


def fit_on_workers(
    method: Any,
    model: BNN | Callable[..., Any],
    x: Any = None,
    y: Any = None,
    *,
    workers: Executor,
    num_jobs: int,
    num_draws: int = 1000,
    seed: int = 0,
    init: Any = None,
    checkpoint: str | Path | None = None,
) -> Posterior:
    """Run ``num_jobs`` fits on the workers of a cluster and join their chains, or members, in one posterior.

    Job k's draws are those of rank k of :func:`fit_on_ranks` with as many ranks, on whichever worker it runs. Dask
    gives the job of a worker that died to another one, which goes on from its checkpoint.

    Args:
        method, model, x, y, num_draws, seed, init, checkpoint: as in :func:`fit_on_ranks`.
        workers: any executor; of a Dask cluster ``distributed.Client("tcp://host:8786").get_executor(pure=False)``.
            Jobs in threads of one process run one after another: start Dask's workers with ``--nthreads 1``.
        num_jobs: how many fits.

    Raises:
        TypeError: a method without chains or members.

    Example:
        >>> import pyrobnn as pb
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> data = pb.data.sinusoid(num_data=20)
        >>> net = pb.networks.mlp(1, (4,), seed=0)
        >>> model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
        >>> members = pb.DeepEnsemble(num_members=2, num_steps=10, compile=False)
        >>> with ThreadPoolExecutor(2) as workers:
        ...     posterior = pb.distributed.fit_on_workers(members, model, data.x, data.y, workers=workers, num_jobs=3)
        >>> posterior.num_draws
        6
    """
    check_count("num_jobs", num_jobs)
    job = partial(_job(method, (model, x, y), num_draws, seed, init, checkpoint), num_jobs)
    parts = list(workers.map(job, range(num_jobs)))
    return _joined(method, parts[0], [*map(_shown, parts)], seed) if num_jobs > 1 else parts[0]


def _job(
    method: Any,
    problem: Sequence[Any],
    num_draws: int,
    seed: int,
    init: Any,
    checkpoint: str | Path | None,
) -> Callable[..., Posterior]:
    """``job(ranks, rank)``, the fit of one rank."""
    _along(method)
    check_count("seed", seed, minimum=0)
    options = {"init": init} if init is not None else {}
    if hasattr(method, "num_chains"):
        options["num_draws"] = num_draws
    return partial(_fit_rank, method, problem, options, seed, checkpoint)


def _fit_rank(
    method: Any,
    problem: Any,
    options: Any,
    seed: int,
    checkpoint: Any,
    ranks: int,
    rank: int,
    **where: Any,
) -> Posterior:
    own = {} if checkpoint is None else {"checkpoint": f"{checkpoint}.{rank}"}
    return method.fit(*problem, seed=seed * ranks + rank, **options, **own, **where)


def _along(method: Any) -> int:
    """The dimension along which the draws of two fits are joined: chains, or the members of an ensemble."""
    if hasattr(method, "num_chains"):
        return 0
    if hasattr(method, "num_members"):
        return 1
    raise TypeError(
        f"{type(method).__name__} has no chains or members to share out: use NUTS, SGLD, SGHMC or DeepEnsemble"
    )


def _shown(posterior: Posterior) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """What the others need of a fit, on the CPU."""
    draws = {name: value.cpu() for name, value in posterior.draws.items()}
    return (
        draws,
        {name: value.cpu() for name, value in posterior.sample_stats.items()},
        posterior.meta,
    )


def _joined(method: Any, posterior: Posterior, parts: Sequence[Any], seed: int) -> Posterior:
    """The chains or members of all fits in one posterior, in the order of their ranks."""
    draws, stats, metas = zip(*parts, strict=True)

    def cat(own: Mapping[str, Tensor], values: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            name: torch.cat([v[name] for v in values], _along(method)).to(own[name]) for name in own
        }

    timings = {
        name: max(meta["timings"].get(name, 0.0) for meta in metas) for name in metas[0]["timings"]
    }
    notes = [f"rank {rank}: {note}" for rank, meta in enumerate(metas) for note in meta["warnings"]]
    found = [each for meta in metas for each in meta["findings"]]
    joined = {
        "seed": seed,
        "num_ranks": len(metas),
        "timings": timings,
        "warnings": notes,
        "findings": found,
    }
    return dataclasses.replace(
        posterior,
        draws=cat(posterior.draws, draws),
        sample_stats=cat(posterior.sample_stats, stats),
        meta={**posterior.meta, **joined},
    )


def _own_gpu() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
