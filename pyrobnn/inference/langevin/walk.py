"""Stochastic-gradient chains: their batches and compiled step, and the loop with its choice of a step size."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyrobnn.inference.fitting.batches import permuted_rows
from pyrobnn.inference.fitting.problem import Problem, snapshot
from pyrobnn.inference.fitting.watch import COMPILING, Watch
from pyrobnn.inference.langevin.step import State, StepSize, chooser_for
from pyrobnn.model import Density
from pyrobnn.model.compile import compiled
from pyrobnn.posterior import Posterior

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun

#: memory of the preconditioner: each warm-up step weighs 1 − RMSPROP
RMSPROP = 0.99
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

    def __call__(self, batch: Batch, *state: Tensor) -> tuple[Tensor, ...]:
        step = transition(self.config, self.problem, gradient_of(self.problem, batch.per_chain))
        args = (*state, self.control, batch.rows, *batch.tensors)
        key = tuple(value.shape for value in batch.tensors)
        if key not in self.kernels:
            begun = time.perf_counter()
            name = f"the {type(self.config).__name__} step"
            self.kernels[key] = compiled(step, *args, enabled=self.config.compile, name=name)
            self.seconds += time.perf_counter() - begun
        return self.kernels[key](*args)


class Run:
    """What is kept on the way; at the end ``z`` (chain, draw, dim) and ``lp`` (chain, draw)."""

    z: Tensor
    lp: Tensor
    loss: Tensor

    def __init__(self, z: Tensor):
        self.losses: list[Tensor] = []
        self.step_size = self.seconds = self.compile_seconds = 0.0
        self.step, self.stopped = 0, "error"
        self.forget(z)

    def forget(self, z: Tensor) -> None:
        """Start anew: the chains were sent back."""
        self.kept: list[Tensor] = []  # draws so far, (chain, dim) each
        self._lp: list[Tensor] = []
        self.kinetic = torch.zeros_like(z)

    def keep(self, z: Tensor, lp: Tensor, kinetic: Tensor) -> None:
        self.kinetic += kinetic
        self.kept.append(z)
        self._lp.append(lp)

    def usable(self) -> bool:
        """Whether an interrupted run holds draws that a check has seen."""
        return bool(self._lp and self.losses) and bool(torch.isfinite(torch.stack(self.kept)).all())

    def finish(self, seconds: float) -> None:
        """Stack what was kept."""
        self.seconds = seconds - self.compile_seconds
        # a draw without its log joint is not whole
        num_kept = len(self._lp)
        if num_kept == 0:
            raise ValueError(f"a callback stopped the run at step {self.step}, before the first draw was kept")
        self.z, self.lp = torch.stack(self.kept[:num_kept], 1), torch.stack(self._lp, 1)
        self.loss = torch.stack(self.losses)


def batch_log_joint(problem: Problem, batch: Batch) -> tuple[Callable[..., Tensor], Tensor, int | None]:
    """The log joint of a batch as a function of (z, rows), the rows, and which of their dimensions is the chain's."""
    log_joint = _of_rows(problem.density.subsampled(), batch.tensors, batch.per_chain)
    return log_joint, batch.rows, 0 if batch.per_chain else None


def _of_rows(density: Density, data: tuple[Tensor, ...], per_chain: bool) -> Callable[..., Tensor]:
    """(z, rows) → the log joint on the chain's own rows of the data, or on the batch that all chains share."""
    return lambda z, rows: density.log_joint(z, *(part[rows] if per_chain else part for part in data))


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


def gradient_of(problem: Problem, per_chain: bool) -> Slope:
    """Gradient and log joint of a batch for all chains: (z, rows, x, y) → (chain, dim), (chain,)."""
    density = problem.density.subsampled()
    # each chain draws a subsample of its own
    randomness = "error" if density.stochastic is None else "different"

    def gradient(z: Tensor, rows: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.func.grad_and_value(_of_rows(density, data, per_chain))
        in_dims = (0, 0 if per_chain else None)
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
        metric = metric_of(second) if precondition else torch.ones_like(second)
        z, v, grad, lp = config.move(z, v, lambda at: slope(at, *batch), epsilon, temperature, metric)
        if precondition:
            second = torch.lerp(second, (grad / num_data).square().mean(0), forget)
        return z, v, second, lp

    return step


@torch.no_grad()
def full_log_joint(density: Density, z: Tensor, at_once: int = 32) -> Tensor:
    """Log joint on all data at flat draws (chain, draw, dim), in unconstrained space; (chain, draw)."""
    log_joint = torch.func.vmap(density.log_joint)
    parts = [log_joint(part) for part in z.flatten(0, 1).split(at_once)]
    return torch.cat(parts).reshape(z.shape[:2])


def run_chains(config: Any, problem: Problem, z: Tensor, asked: FitRun) -> Run:
    """Run the chains of ``config`` from ``z`` (chain, dim): warm-up, then a draw every ``thinning`` steps."""
    num_steps = config.num_warmup + config.thinning * asked.num_draws
    # at rest in their places, with momenta of the right temperature
    v = math.sqrt(config.temperature) * torch.randn_like(z)
    state, run = State(0, z, v, torch.zeros_like(z[0])), Run(z)
    watch = Watch(
        num_steps,
        type(config).__name__,
        asked.callbacks,
        asked.progress,
        finished="num_draws",
        starting=COMPILING if config.compile else "",
        worth_keeping=run.usable,
    )
    started = time.perf_counter()
    with watch:
        _walk(config, problem, state, num_steps, watch, run, asked.seed)
    run.stopped = watch.stopped
    run.finish(time.perf_counter() - started)
    return run


def _walk(config: Any, problem: Problem, state: State, num_steps: int, watch: Watch, run: Run, seed: int) -> None:
    """Take the steps and keep every ``thinning``-th after the warm-up."""
    batches = chain_batches(problem, config.num_chains, config.batch_size)
    control = state.z.new_zeros(3)  # at every step: ε, how much the preconditioner forgets, temperature
    step, warmup = ChainStep(config, problem, control), config.num_warmup
    chooser = chooser_for(config, problem) if config.step_size is None else None
    report_every = max(1, num_steps // 100)
    while state.step < num_steps:
        run.step = k = state.step
        if chooser is not None and k in chooser.looks:
            if not bool(torch.isfinite(state.z).all()) and (back := chooser.restart()) is not None:
                state = back
                run.forget(state.z)
                continue
            seen = config.preconditioner is not None and bool(state.second.any())
            metric = metric_of(state.second) if seen else torch.ones_like(state.second)
            chooser.look(state, metric, batches, functools.partial(batch_log_joint, problem))
        run.step_size = config.step_size / problem.num_rows if chooser is None else chooser.value
        forget = (1.0 - RMSPROP if k else 1.0) if k < warmup and config.preconditioner is not None else 0.0
        control.copy_(torch.tensor([run.step_size, forget, config.temperature], dtype=torch.float64))
        z, v, second, lp = step(next(batches), state.z, state.v, state.second)
        run.compile_seconds = step.seconds
        state = State(k + 1, z, v, second)
        last = state.step == num_steps
        if k % CHECK_EVERY == 0 or last:
            if (back := _checked(problem, chooser, state, lp, control)) is not None:
                state = back
                run.forget(state.z)
                continue
        if state.step > warmup and (state.step - warmup) % config.thinning == 0:
            run.keep(z, lp, v.square() / config.temperature)
        if k % report_every == 0 or last:
            run.losses.append(-lp.mean() / problem.num_rows)
            present = functools.partial(_snapshot, config, problem, run, state.z, seed)
            metrics = {"loss": float(run.losses[-1]), "snapshot": present}
            if watch.tell(k + 1, metrics) and not last:
                watch.stopped = "callback"
                return


def _snapshot(config: Any, problem: Problem, run: Run, z: Tensor, seed: int) -> Posterior:
    """The draws that were kept; before the first, where the chains are, z (chain, dim)."""
    draws = problem.density.constrain(torch.stack(run.kept or [z], 1))
    return snapshot(problem, config, draws, seed=seed, meta={"temperature": config.temperature})


def _checked(problem: Problem, chooser: StepSize | None, state: State, lp: Tensor, control: Tensor) -> State | None:
    """The state to go back to, of chains that diverged; None where they may go on."""
    diverged = chooser if chooser is not None and chooser.diverged(state.z, lp) else None
    if diverged is not None and (back := diverged.restart()) is not None:
        return back
    bad = ~(torch.isfinite(state.z).all(1) & torch.isfinite(lp))
    if bool(bad.any()):
        chain = int(bad.nonzero()[0])
        wrong = (~torch.isfinite(state.z[chain])).nonzero()
        where = f", site {problem.density.site_of(int(wrong[0]))!r}" if len(wrong) else ""
        raise FloatingPointError(
            f"chain {chain} is no longer finite by step {state.step} (log joint {float(lp[chain]):g}{where}): "
            f"reduce step_size (now {float(control[0]) * problem.num_rows:g})"
        )
    if diverged is not None:
        raise FloatingPointError(diverged.divergence_message(state.step, lp, problem.num_rows))
    return None
