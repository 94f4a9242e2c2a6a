"""Fits on several processes that end as one Posterior: ranks of ``torchrun``, or workers of a cluster.

Chains and members are shared out and gathered at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyrobnn.core.checks import Refused, check_count
from pyrobnn.core.findings import Finding
from pyrobnn.core.workers import executor_of, outcomes, said
from pyrobnn.inference.fitting.problem import Callback, posterior_with_notes
from pyrobnn.inference.fitting.shares import Ranks, gives_shares, shared_loader
from pyrobnn.inference.method import METHODS
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.joined import joined_meta

if TYPE_CHECKING:
    from pyrobnn.inference.method import Method
    from pyrobnn.model.density import Program

#: draws, sample_stats and meta of a fit
_Shown = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]


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
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    backend = backend or ("nccl" if torch.cuda.device_count() >= local_ranks else "gloo")
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
    method: Method,
    model: BNN | Program,
    x: Any = None,
    y: Any = None,
    *,
    num_draws: int | None = None,
    seed: int = 0,
    init: Posterior | nn.Module | None = None,
    device: str | torch.device | None = None,
    checkpoint: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    gather: bool = True,
) -> Posterior:
    r"""Share a fit over the ranks of the process group that there is: the rows of a loader, or else chains and members.

    *Rows*, where ``x`` is a DataLoader with torch's ``DistributedSampler``: all ranks make the steps that one process
    makes whose batches are the unions of the ranks' batches, up to rounding, with the same random numbers of weights.
    Gradients are averaged by ``torch.distributed.all_reduce``; parameters are compared at every look and are the same
    bit for bit. The rows that the sampler repeats to give all ranks as many are left out, and the order of an epoch
    follows its number, as ``set_epoch`` makes it. What follows a training, such as an ELBO, is computed from all rows
    on every rank. NUTS gathers all rows on every rank, and each leapfrog's gradient is the mean over ranks of those of
    their parts; its chains are the same on all ranks. Batch-norm layers in training mode see a rank's part of the
    batch; dropout and what a data set draws at random differ from rank to rank.

    *Chains, or members of an ensemble*, of any other data: each rank runs ``method.num_chains`` of them with its own
    seed and adapts alone, so that its draws depend on its number.

    Args:
        method: rows are shared by :class:`pyrobnn.MLE`, ``MAP``, ``DeepEnsemble``, ``MCDropout``, ``SVI``, ``SWA``,
            ``SWAG``, ``SGLD``, ``SGHMC`` and ``NUTS``; chains of ``NUTS``, ``SGLD`` and ``SGHMC``, members of
            ``DeepEnsemble``.
        model, x, y, init: as for ``method.fit``. Where rows are shared the net begins alike on every rank.
        num_draws: of each chain, by default 1000; where rows are shared as for ``method.fit``. Points and ensembles,
            which have one draw a member, take no notice.
        seed: of the whole run, from which every rank derives its own where chains or members are shared.
        device: where this rank computes; default GPU number ``LOCAL_RANK`` under NCCL, else where ``x`` is.
        checkpoint: a file, to whose name every rank adds its number where chains or members are shared; of rows rank
            0 writes one for all. Ranks that ``torchrun --max-restarts`` starts again go on from there, to the same
            draws; several machines need a disk that all of them see.
        callbacks, progress: as for ``method.fit``, on rank 0 alone. A callback that stops rank 0 stops all where rows
            are shared, else the chains of rank 0.
        gather: False leaves every rank with the chains or members that it ran; each saves them to a file of its own,
            and ``Posterior.load([paths], model)`` joins the files.

    Returns:
        On every rank the same posterior: of shared rows that of the one fit, else (ranks · num_chains, num_draws, …) or
        (1, ranks · num_members, …); without ``gather`` those of the rank. ``meta["shared"]`` is ``"rows"``,
        ``"chains"`` or ``"members"``, and ``meta["num_ranks"]`` how many ranks there were.

    Raises:
        TypeError: a method without chains or members.
        Refused: rows that a method cannot share, or shares of another process group.
        ValueError: nets or loaders that differ from rank to rank.
        RuntimeError: parameters that differ from rank to rank on the way.

    References: `PyTorch Distributed (Li et al., 2020) <https://arxiv.org/abs/2006.15704>`_, of gradients by all-reduce.

    Example:
        Under ``torchrun --nproc_per_node 2 fit.py``::

            with pb.distributed.process_group() as rank:
                posterior = pb.distributed.fit_on_ranks(pb.NUTS(num_chains=2), model, x, y)
                if rank == 0:
                    posterior.save("posterior.nc")
    """
    ranks = Ranks()
    if device is None and ranks.active and dist.get_backend() == "nccl":
        device = _own_gpu()
    shown: dict[str, Any] = {}
    if ranks.rank == 0 and callbacks:
        shown["callbacks"] = callbacks
    if ranks.rank == 0 and progress:
        shown["progress"] = progress
    if gives_shares(x) and (method.shares_rows or ranks.count > 1):
        return _fit_to_shares(
            method,
            model,
            x,
            y,
            ranks,
            num_draws,
            {
                "seed": seed,
                "init": init,
                "device": device,
                "checkpoint": checkpoint,
                **shown,
            },
        )
    count = 1000 if num_draws is None else num_draws
    job = _Job(method, model, x, y, count, seed, init, checkpoint)
    posterior = job(ranks.count, ranks.rank, device=device, **shown)
    if ranks.count == 1:
        return posterior
    if not gather:
        facts = {
            "shared": "chains" if _along(method) == 0 else "members",
            "num_ranks": ranks.count,
            "rank": ranks.rank,
            "seed": seed,
        }
        return dataclasses.replace(posterior, meta=posterior.meta | facts)
    fits: list[Any] = [None] * ranks.count
    dist.all_gather_object(fits, _shown(posterior))
    return _joined(method, posterior, dict(enumerate(fits)), seed)


def _fit_to_shares(
    method: Method,
    model: BNN | Program,
    loader: DataLoader,
    y: Any,
    ranks: Ranks,
    num_draws: int | None,
    options: dict[str, Any],
) -> Posterior:
    """The fit of all ranks to the rows that the ranks' loaders share out; ``options`` of ``fit``."""
    if not method.shares_rows:
        sharing = [kind.cls.__name__ for kind in METHODS.values() if kind.cls.shares_rows]
        raise Refused(
            f"{type(method).__name__} cannot share rows over ranks, and the DataLoader gives each rank its share: use "
            f"{', '.join(sharing)}, or pass a DataLoader that gives all rows on every rank, whose chains are shared"
        )
    whole = shared_loader(loader, ranks)
    if isinstance(model, BNN):
        weights = [*model.net.state_dict().values()]
        if not ranks.agree([value for value in weights if isinstance(value, Tensor)]):
            raise ValueError(
                "the ranks begin with different nets: build the net alike on every rank, after torch.manual_seed(0), "
                "or load the same weights"
            )
    if num_draws is not None and _has_free_draws(method):
        options["num_draws"] = num_draws
    if options["init"] is None:
        del options["init"]
    posterior = method.fit(model, whole, y, **options)
    meta = {"shared": "rows", "num_ranks": ranks.count}
    return dataclasses.replace(posterior, meta=posterior.meta | meta)


def fit_on_workers(
    method: Method,
    model: BNN | Program,
    x: Any = None,
    y: Any = None,
    *,
    workers: Executor | int,
    num_jobs: int,
    num_draws: int = 1000,
    seed: int = 0,
    init: Posterior | nn.Module | None = None,
    checkpoint: str | Path | None = None,
) -> Posterior:
    """Run ``num_jobs`` fits on the workers of a cluster and join their chains, or members, in one posterior.

    Job k's draws are those of rank k of :func:`fit_on_ranks` with as many ranks, on whichever worker it runs. Dask
    gives the job of a worker that died to another one, which goes on from its checkpoint.

    Args:
        method, model, x, y, num_draws, seed, init, checkpoint: as in :func:`fit_on_ranks`.
        workers: how many processes of this machine, each with a job at a time in a new process, so that one that dies
            takes no other along; or any executor, of a Dask cluster
            ``distributed.Client("tcp://host:8786").get_executor(pure=False)``. Jobs in threads of one process run one
            after another: start Dask's workers with ``--nthreads 1``. Processes begin by importing the program: keep
            the call under ``if __name__ == "__main__":``.
        num_jobs: how many fits.

    Returns:
        The posterior of the jobs that ended: one whose worker died, or whose fit failed, is left out, and
        ``meta["findings"]`` has its number and the reason under ``"lost_jobs"``.

    Raises:
        TypeError: a method without chains or members.
        Exception: where every job was lost, what the first of them raised; wrong arguments at once.

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
    job = partial(_Job(method, model, x, y, num_draws, seed, init, checkpoint), num_jobs)
    posteriors: dict[int, Posterior] = {}
    lost: dict[int, BaseException] = {}
    with executor_of(workers) as executor:
        for number, outcome in outcomes(executor, job, range(num_jobs)):
            if isinstance(outcome, Posterior):
                posteriors[number] = outcome
            elif isinstance(outcome, (TypeError, ValueError, NotImplementedError)):
                raise outcome  # of the arguments, which are those of all jobs
            else:
                lost[number] = outcome
    if not posteriors:
        raise lost[0]
    first = next(iter(posteriors.values()))
    if num_jobs == 1:
        return first
    shown = {number: _shown(posterior) for number, posterior in posteriors.items()}
    whole = _joined(method, first, shown, seed)
    if not lost:
        return whole
    reasons = {str(number): said(error) for number, error in lost.items()}
    return posterior_with_notes(
        whole, [Finding("lost_jobs", {"reasons": reasons, "num_jobs": num_jobs})]
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    """The fit of one rank, or of one job of a cluster, which it reaches by pickle.

    The arguments are those of :func:`fit_on_ranks`.
    """

    method: Method
    model: BNN | Program
    x: Any
    y: Any
    num_draws: int
    seed: int
    init: Posterior | nn.Module | None
    checkpoint: str | Path | None

    def __post_init__(self) -> None:
        _along(self.method)
        check_count("seed", self.seed, minimum=0)

    def __call__(
        self,
        ranks: int,
        rank: int,
        **options: Any,
    ) -> Posterior:
        """The fit of rank ``rank`` of ``ranks``, with further ``options`` of ``fit``."""
        if self.init is not None:
            options["init"] = self.init
        if hasattr(self.method, "num_chains"):
            options["num_draws"] = self.num_draws
        if self.checkpoint is not None:
            options["checkpoint"] = f"{self.checkpoint}.{rank}"
        return self.method.fit(
            self.model,
            self.x,
            self.y,
            seed=self.seed * ranks + rank,
            **options,
        )


def _along(method: Method) -> int:
    """The dimension along which the draws of two fits are joined: chains, or the members of an ensemble."""
    if hasattr(method, "num_chains"):
        return 0
    if hasattr(method, "num_members"):
        return 1
    raise TypeError(
        f"{type(method).__name__} has no chains or members to share out: use NUTS, SGLD, SGHMC or DeepEnsemble"
    )


def _shown(posterior: Posterior) -> _Shown:
    """What the other ranks need of a fit, on the CPU."""
    draws = {name: value.cpu() for name, value in posterior.draws.items()}
    stats = {name: value.cpu() for name, value in posterior.sample_stats.items()}
    return draws, stats, posterior.meta


def _joined(
    method: Method,
    posterior: Posterior,
    fits: Mapping[int, _Shown],
    seed: int,
) -> Posterior:
    """The chains or members of all fits in one posterior, in the order of their ranks."""
    draws, stats, metas = zip(*fits.values(), strict=True)
    dim = _along(method)
    return dataclasses.replace(
        posterior,
        draws=_concatenated(posterior.draws, draws, dim),
        sample_stats=_concatenated(posterior.sample_stats, stats, dim),
        meta={
            **posterior.meta,
            "seed": seed,
            **joined_meta(dict(zip(fits, metas, strict=True)), dim),
        },
    )


def _concatenated(
    example: Mapping[str, Tensor], fits: Sequence[Mapping[str, Tensor]], dim: int
) -> dict[str, Tensor]:
    """The tensors of all fits by name, with the types and on the devices of ``example``."""
    joined = {}
    for name, values in example.items():
        joined[name] = torch.cat([fit[name] for fit in fits], dim).to(values)
    return joined


def _has_free_draws(method: Method) -> bool:
    """Whether draws are as many as are asked for: a point is one draw, and an ensemble has one a member."""
    return method.kind != "point" and not hasattr(method, "num_members")


def _own_gpu() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
