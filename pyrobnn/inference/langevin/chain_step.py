"""The run of stochastic-gradient chains: their batches, their compiled step, and what is kept on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrobnn.compile import compiled
from pyrobnn.density import Density
from pyrobnn.inference.fitting.batches import permuted_rows
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.fitting.ranks import Ranks, ranks
from pyrobnn.inference.langevin.step import State

#: (z, \*batch) → gradient (chain, dim) and log joint (chain,)
Slope = Callable[..., tuple[Tensor, Tensor]]
#: steps between two looks at whether every chain is still finite
CHECK_EVERY = 50


class ChainStep:
    """The compiled transition, anew for every batch shape (a loader's last batch is smaller)."""

    def __init__(self, config: Any, problem: Problem, control: Tensor):
        self.config, self.problem, self.control = config, problem, control
        self.seconds = 0.0
        self.kernels: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}
        self.ranks = ranks()

    def __call__(self, batch: Batch, *state: Tensor) -> tuple[Tensor, ...]:
        slope = gradient_of(self.problem, batch.per_chain)
        if self.ranks is not None:
            mean = self._mean(self.ranks, slope, batch)
            return transition(self.config, self.problem, mean)(*state, self.control)
        step = transition(self.config, self.problem, slope)
        return self._run(step, batch.tensors, *state, self.control, batch.rows)

    def _mean(self, shared: Ranks, slope: Slope, batch: Batch) -> Slope:
        """The mean of the ranks' gradients, each on its part of the rows."""
        rows, data = batch.rows, batch.tensors
        whole = rows.shape[1] if batch.per_chain else len(data[0])
        if batch.per_chain:
            rows = shared.part(rows, 1)
        else:
            data = tuple(map(shared.part, data))
        own = rows.shape[1] if batch.per_chain else len(data[0])

        def mean(z: Tensor) -> tuple[Tensor, Tensor]:
            grad, lp = shared.mean(self._run(slope, data, z, rows), own, whole)
            return grad, lp

        return mean

    def _run(self, fn: Callable[..., Any], data: tuple[Tensor, ...], *args: Tensor) -> tuple[Tensor, ...]:
        key = tuple(value.shape for value in data)
        if key not in self.kernels:
            begun = time.perf_counter()
            name = f"the {type(self.config).__name__} step"
            self.kernels[key] = compiled(fn, *args, *data, enabled=self.config.compile, name=name)
            self.seconds += time.perf_counter() - begun
        return self.kernels[key](*args, *data)


class Run:
    """What is kept of the chains on the way.

    Attributes, of a finished run: ``z``, the draws (chain, draw, dim); ``lp``, their log joints (chain, draw);
        ``sizes``, their step sizes (draw,); ``loss`` (report,).
    """

    z: Tensor
    lp: Tensor
    sizes: Tensor
    loss: Tensor

    def __init__(self, z: Tensor):
        self.kinetic = torch.zeros_like(z)
        self.losses: list[Tensor] = []
        self.step_size = self.seconds = self.compile_seconds = 0.0
        self.step, self.stopped = 0, "error"
        self.forget()

    def forget(self) -> None:
        """Start anew: the chains were sent back."""
        self._z: list[Tensor] = []
        self._lp: list[Tensor] = []
        self._sizes: list[Tensor] = []
        self.kinetic = torch.zeros_like(self.kinetic)

    @property
    def kept(self) -> list[Tensor]:
        """Draws so far, (chain, dim) each."""
        return self._z

    def keep(self, z: Tensor, lp: Tensor, size: Tensor, kinetic: Tensor) -> None:
        self.kinetic += kinetic
        self._sizes.append(size.clone())
        self._z.append(z)
        self._lp.append(lp)

    def usable(self) -> bool:
        """Whether an interrupted run holds draws that a check has seen."""
        return bool(self._lp and self.losses) and bool(torch.isfinite(torch.stack(self._z)).all())

    def finish(self, seconds: float) -> None:
        """Stack what was kept."""
        self.seconds = seconds - self.compile_seconds
        # a draw without its log joint is not whole
        num_kept = len(self._lp)
        if num_kept == 0:
            raise ValueError(
                f"a callback stopped the run at step {self.step}, before the first draw was kept"
            )
        self.z, self.lp = torch.stack(self._z[:num_kept], 1), torch.stack(self._lp, 1)
        self.sizes, self.loss = torch.stack(self._sizes[:num_kept]), torch.stack(self.losses)


def batch_log_joint(problem: Problem, batch: Batch) -> tuple[Callable[..., Tensor], Tensor, int | None]:
    """The log joint of a batch as a function of (z, rows), the rows, and which of their dimensions is the chain's."""

    density = problem.density.subsampled()

    def log_joint(one: Tensor, index: Tensor) -> Tensor:
        data = tuple(part[index] for part in batch.tensors) if batch.per_chain else batch.tensors
        return density.log_joint(one, *data)

    return log_joint, batch.rows, 0 if batch.per_chain else None


class Batch(NamedTuple):
    """Row numbers (chain, batch) into whole tensors, or tensors that all chains share."""

    rows: Tensor
    tensors: tuple[Tensor, ...]
    per_chain: bool


def chain_batches(problem: Problem, num_chains: int, batch_size: int | None) -> Iterator[Batch]:
    """Endless mini-batches; each chain walks through permutations of its own."""
    none = torch.zeros(0, dtype=torch.int64, device=problem.device)
    if not problem.is_bnn:
        data = tuple(value for value in (problem.x, problem.y) if isinstance(value, Tensor))
        if len(data) < 2:
            data = ()  # the density calls the program with its stored arguments
        while True:
            yield Batch(none, data, per_chain=False)
    if problem.loader is not None:
        for pair in problem.batches():
            yield Batch(none, pair, per_chain=False)
    num_data = problem.num_rows
    if batch_size is None or batch_size >= num_data:
        while True:
            yield Batch(none, (problem.x, problem.y), per_chain=False)
    rows = torch.empty(num_chains, batch_size, dtype=torch.int64, device=problem.device)
    batch = Batch(rows, (problem.x, problem.y), per_chain=True)
    for drawn in permuted_rows(num_data, batch_size, problem.device, num_chains):
        rows.copy_(drawn)
        yield batch


def metric_of(second: Tensor) -> Tensor:
    """1 / root mean square gradient, scaled to geometric mean 1; no weight moves more than 10³ times that mean."""
    log = -0.5 * second.clamp_min(torch.finfo(second.dtype).tiny).log()
    return (log - log.mean()).clamp(-math.log(1e3), math.log(1e3)).exp()


def metric_at(config: Any, state: State) -> Tensor:
    """The preconditioner at ``state``; ones before it has seen a gradient."""
    if config.preconditioner is None or not bool(state.second.any()):
        return torch.ones_like(state.second)
    return metric_of(state.second)


def gradient_of(problem: Problem, per_chain: bool) -> Slope:
    """Gradient and log joint of a batch for all chains: (z, rows, x, y) → (chain, dim), (chain,)."""
    density = problem.density.subsampled()
    # each chain draws a subsample of its own
    randomness = "error" if density.stochastic is None else "different"

    def gradient(z: Tensor, rows: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        def log_joint(one: Tensor, index: Tensor) -> Tensor:
            batch = tuple(part[index] for part in data) if per_chain else data
            return density.log_joint(one, *batch)

        in_dims = (0, 0 if per_chain else None)
        slope = torch.func.grad_and_value(log_joint)
        return torch.func.vmap(slope, in_dims=in_dims, randomness=randomness)(z, rows)

    return gradient


def transition(config: Any, problem: Problem, slope: Slope) -> Callable[..., tuple[Tensor, ...]]:
    r"""One step of all chains: (z, v, second, control, \*batch) → (z, v, second, log joint of the batch)."""
    num_data = problem.num_rows
    precondition = config.preconditioner is not None

    def step(
        z: Tensor, v: Tensor, second: Tensor, control: Tensor, *batch: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        epsilon, forget, temperature = control[0], control[1], control[2]

        def gradient(z: Tensor) -> tuple[Tensor, Tensor]:
            return slope(z, *batch)

        metric = metric_of(second) if precondition else torch.ones_like(second)
        z, v, grad, lp = config.move(z, v, gradient, epsilon, temperature, metric)
        if precondition:
            second = torch.lerp(second, (grad / num_data).square().mean(0), forget)
        return z, v, second, lp

    return step


def check_chains(density: Density, z: Tensor, lp: Tensor, step: int, step_size: float) -> None:
    """Stop a run whose chains (chain, dim), or their log joints (chain,), are no longer finite.

    Raises:
        FloatingPointError: naming the chain, the site and the step.
    """
    bad = ~(torch.isfinite(z).all(1) & torch.isfinite(lp))
    if bool(bad.any()):
        chain = int(bad.nonzero()[0])
        wrong = (~torch.isfinite(z[chain])).nonzero()
        where = f", site {density.site_of(int(wrong[0]))!r}" if len(wrong) else ""
        raise FloatingPointError(
            f"chain {chain} is no longer finite by step {step + 1} (log joint {float(lp[chain]):g}{where}): "
            f"reduce step_size (now {step_size:g})"
        )


@torch.no_grad()
def full_log_joint(density: Density, z: Tensor, at_once: int = 32) -> Tensor:
    """Log joint on all data at flat draws (chain, draw, dim), in unconstrained space; (chain, draw)."""
    log_joint = torch.func.vmap(density.log_joint)
    parts = [log_joint(part) for part in z.flatten(0, 1).split(at_once)]
    return torch.cat(parts).reshape(z.shape[:2])
