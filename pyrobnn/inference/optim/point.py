"""Point estimates by optimisation: what MLE, MAP and DeepEnsemble share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pyrobnn.checks import check_count
from pyrobnn.density import Density
from pyrobnn.inference.fitting.padding import padded_density
from pyrobnn.inference.fitting.problem import Problem, make_posterior
from pyrobnn.inference.fitting.ranks import ranks
from pyrobnn.inference.optim.descent import descend
from pyrobnn.inference.optim.minimize import Result, check_optimizer, minimize
from pyrobnn.inference.optim.unfinished import falling
from pyrobnn.model import BNN, NET
from pyrobnn.posterior import Posterior
from pyrobnn.seeding import seeded

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun

Loss = Callable[..., Tensor]
#: L-BFGS steps whose gain says how far from the mode a search ended
_FURTHER = 10


def check_point_options(method: Any) -> None:
    """The options MLE, MAP and DeepEnsemble share.

    Raises:
        TypeError, ValueError: naming the option.
    """
    check_optimizer(
        num_steps=method.num_steps,
        lr=method.lr,
        optimizer=method.optimizer,
        lr_schedule=method.lr_schedule,
        clip_norm=method.clip_norm,
        patience=method.patience,
    )
    if method.batch_size is not None:
        check_count("batch_size", method.batch_size)


def common_start(init: Posterior | nn.Module | None) -> bool:
    """Whether chains that start from ``init`` start around one point, or in one mode: then they agree on what is there.

    A net or a point estimate is one point, an approximation has one mode; an ensemble's members and the chains of a run
    were found apart.
    """
    if init is None:
        return False
    return not isinstance(init, Posterior) or bool(init.meta.get("common_start", init.num_chains == 1))


def shared_starts(init: Posterior | nn.Module | None, num_chains: int) -> list[int] | None:
    """The chain of ``init`` that each chain starts from, where several start from one; None where that says nothing.

    Draws of one chain, or of one island of particles, descend from each other: chains that start there have not been
    found apart.
    """
    if not isinstance(init, Posterior) or init.meta.get("kind") != "chains":
        return None
    if not 1 < init.num_chains < num_chains:
        return None
    return [chain % init.num_chains for chain in range(num_chains)]


def start_values(model: Any, init: Posterior | nn.Module | None) -> dict[str, Tensor]:
    """Site values to start from: an earlier posterior's first draw, a trained net, or the model's own net.

    Where the prior's support leaves weights of the own net out, the values are draws from the prior, always the same.

    Raises:
        TypeError: ``init`` is something else.
        ValueError: a net whose parameters are not the model's.
    """
    if init is None:
        if not isinstance(model, BNN):
            return {}
        with seeded(0, model.device):
            return model.supported(model.initial_values())
    if isinstance(init, Posterior):
        return {name: value[0, 0] for name, value in init.draws.items()}
    if not isinstance(init, nn.Module):
        raise TypeError(f"'init' must be a Posterior or a torch.nn.Module, got {type(init).__name__}")
    values = {NET + name: value.detach().clone() for name, value in init.named_parameters()}
    own = model.initial_values() if isinstance(model, BNN) else {}
    if {n: v.shape for n, v in values.items()} != {n: v.shape for n, v in own.items()}:
        raise ValueError(
            "'init' is a net with other parameters than the model's: pass the net the BNN was built from"
        )
    return values


def find_point(
    method: Any,
    problem: Problem,
    target: Callable[..., Tensor],
    run: FitRun,
) -> Result:
    """Maximise ``target(density, theta, *batch)`` with the options of ``method`` (MLE, MAP), from where ``run`` says.

    A program that subsamples is handed over as the density that draws a subsample at every call.
    """
    start = problem.density.initial(start_values(problem.model, run.init), run.seed)
    noisy, num_rows = objective_of(method, problem, start)

    def loss(theta: Tensor, *batch: Tensor) -> Tensor:
        return -target(noisy, theta, *batch) / num_rows[0]

    return optimize_points(method, problem, loss, start, run)


def objective_of(method: Any, problem: Problem, start: Tensor) -> tuple[Density, Tensor]:
    """The density that ``method`` maximises from ``start`` (…, dim), and the number of rows, twice, (2,).

    A step that is compiled and sees all data is the same graph for the next number of rows.
    """
    whole = method.compile and method.batch_size is None and ranks() is None
    density = padded_density(problem, start.reshape(-1, problem.density.dim)) if whole else problem.density
    # a constant of one element would be a literal of the compiled code
    num_rows = torch.full((2,), problem.num_rows, dtype=torch.float64, device=problem.device)
    return density.subsampled(), num_rows


def optimize_points(
    method: Any,
    problem: Problem,
    loss: Loss,
    start: Tensor,
    run: FitRun,
) -> Result:
    """Minimise ``loss(theta, *batch)`` from ``start`` with the options of ``method`` (MLE, MAP, DeepEnsemble)."""
    streamed = problem.loader is not None or method.batch_size is not None or ranks() is not None

    def snapshot(theta: Tensor) -> Posterior:
        return point_posterior(method, problem, theta, run.seed)

    return minimize(
        loss,
        start,
        problem.batches(method.batch_size) if streamed else None,
        num_steps=method.num_steps,
        lr=method.lr,
        optimizer=method.optimizer,
        lr_schedule=method.lr_schedule,
        clip_norm=method.clip_norm,
        patience=method.patience,
        callbacks=run.callbacks,
        snapshot=snapshot,
        progress=run.progress,
        name=type(method).__name__,
        compile=method.compile,
    )


def polish(
    log_joint: Callable[..., Tensor], theta: Tensor, num_steps: int, jacobian: bool = False
) -> tuple[Tensor, float]:
    """Bring ``theta`` (dim,) to the very mode of ``log_joint(z, jacobian=…)``, by :func:`descend`."""
    return descend(torch.func.grad_and_value(lambda z: -log_joint(z, jacobian=jacobian)), theta, num_steps)


def gain_left(log_joint: Callable[..., Tensor], theta: Tensor) -> float:
    """Nats that ten L-BFGS steps on all of the data gain from ``theta`` (dim,)."""
    better, _ = polish(log_joint, theta, _FURTHER)
    return max(0.0, float(log_joint(better, jacobian=False) - log_joint(theta, jacobian=False)))


def point_posterior(
    method: Any,
    problem: Problem,
    theta: Tensor,
    seed: int,
    result: Result | None = None,
    *,
    meta: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Posterior:
    """A posterior of one draw (1, 1), or of one draw a member for ``theta`` (members, dim)."""
    draws = problem.density.constrain(theta.reshape(1, -1, problem.density.dim))
    history = (
        {}
        if result is None
        else {"loss": result.losses if result.losses.dim() == 1 else result.losses.mean(1)}
    )
    apart: dict[str, Any] = {"common_start": False} if theta.dim() > 1 and len(theta) > 1 else {}
    record = apart
    if result is not None:
        record = apart | {"num_steps": result.num_steps, "stopped": result.stopped}
        record |= falling(result, result.losses, problem.num_rows, problem.density.dim)
    timings = {} if result is None else result.timings
    return make_posterior(
        problem, method, draws, seed=seed, timings=timings, history=history, meta=record | dict(meta or {}),
        notes=[*([] if result is None else result.notes(method)), *notes],
        interrupted=result is not None and result.interrupted,
    )  # fmt: skip
