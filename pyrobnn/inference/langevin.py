"""Stochastic-gradient chains: the step size from curvature and gradient noise, batches, compiled step and loop."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from pyrobnn.inference.fitting.batches import permuted_rows
from pyrobnn.inference.fitting.problem import Problem, snapshot
from pyrobnn.inference.fitting.watch import COMPILING, Watch
from pyrobnn.model import Density
from pyrobnn.model.compile import Compiled, compiled
from pyrobnn.posterior import Posterior

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun
    from pyrobnn.inference.sgmcmc import _StochasticGradientMCMC

#: a log joint of (z, rows), the rows, and which of their dimensions is the chain's
_LogJoint = tuple[Callable[..., Tensor], Tensor, int | None]

#: how often chains that leave the posterior are sent back, each time with half the step length
NUM_RESTARTS = 8


@dataclass(eq=False)
class State:
    """All chains at one step of the plan.

    Position and momentum (chain, dim), mean squared gradient (dim,), and the heat (chain,) that the noise has added.
    """

    step: int
    z: Tensor
    v: Tensor
    second: Tensor
    heat: Tensor


def kinetic(momentum: Tensor) -> Tensor:
    """The energy (chain,) of momenta (chain, dim), in float64."""
    return 0.5 * momentum.double().square().sum(1)


class StepSize:
    r"""Chooses :math:`\varepsilon` during warm-up and keeps it afterwards.

    .. math:: \varepsilon = \min\Big( \frac{\kappa}{\lambda_{\max}}, \ \frac{0.1}{r \max_s \bar V_s} \Big)

    :math:`\lambda_{\max}` is the largest curvature of the log joint over the chains, and beyond
    :math:`\varepsilon \lambda_{\max} = 4` no chain is stable. :math:`\bar V_s` is the mean variance of a mini-batch's
    gradient over a site's coordinates, which raises the temperature by :math:`r \varepsilon \bar V`. Both bounds are
    taken anew ten times in warm-up, as the chains move; the smallest of the second half stays.

    Exact dynamics change the energy :math:`\tfrac12 |v|^2 - \log p` by the heat of their noise alone; the rest of a
    change is the error of the steps (shadow work: Sivak, Chodera & Crooks, 2013). Chains go back to the last look, with
    a quarter of :math:`\kappa` where one is no longer finite, or its log joint has fallen while an error beyond ten
    nats and a twentieth of its kinetic energy arose. Mini-batches may heat it by all of that; their log joint is noisy.

    ``config`` is a :class:`pyrobnn.SGLD` or :class:`pyrobnn.SGHMC`, whose ``share`` is κ and ``heating`` r.
    """

    def __init__(self, config: _StochasticGradientMCMC, problem: Problem):
        self.share = config.share
        self.heating = config.heating
        self.num_warmup = config.num_warmup
        self.temperature = config.temperature
        self.density = problem.density
        num_data = problem.num_rows
        size = config.batch_size
        self.noisy = problem.loader is not None or (size is not None and size < num_data)
        self.noisy |= problem.density.subsampled().stochastic is not None
        self.looks = {self.num_warmup * look // 10 for look in range(10)}
        self.value = 0.0
        self.restarts = 0
        self.settled: list[float] = []
        # energy less heat, and minus the log joint, at the last check
        self.heights: Tensor | None = None
        self.spread = 0.0  # standard deviation of a mini-batch's log joint, at the last look
        self.vector: Tensor | None = None
        self.saved: State

    def look(
        self,
        state: State,
        metric: Tensor,
        batches: Iterator[Batch],
        log_joint: Callable[[Batch], _LogJoint],
    ) -> None:
        """Choose ε at ``state``; ``log_joint(batch)`` gives a function of (z, rows) and the rows of every chain."""
        self.saved = state
        root = metric.sqrt()
        late = 2 * state.step >= self.num_warmup
        curvature = self._curvature(state.z, root, *log_joint(next(batches)))
        bounds = [self.share / max(curvature, 1e-30)]
        if self.noisy:
            log_joints = (log_joint(batch) for batch in batches)
            variance = self._noise(state.z, root, log_joints, late)
            bounds.append(0.1 / (self.heating * max(variance, 1e-30)))
        if not all(math.isfinite(bound) for bound in bounds):
            raise FloatingPointError(
                f"no step size can be chosen at step {state.step + 1}: the curvature of the log joint there, or the "
                "variance of its gradient, is not finite; start the chains elsewhere (init=), or pass a step_size"
            )
        self.value = min(bounds)
        if late:
            self.settled.append(self.value)
            self.value = min(self.settled)

    def restart(self) -> State | None:
        """The state to go back to, with half the step length from now on; None when that has been tried enough."""
        self.restarts += 1
        if self.restarts > NUM_RESTARTS:
            return None
        self.share = self.share / 4
        self.value = self.value / 4
        self.settled = [value / 4 for value in self.settled]
        self.heights = None
        return replace(self.saved, v=math.sqrt(self.temperature) * torch.randn_like(self.saved.v))

    def diverged(self, state: State, lp: Tensor, energy: Tensor) -> bool:
        """Whether a chain is not finite, or fell in log joint since the last check by energy that step errors added."""
        if not bool(torch.isfinite(state.z).all() and torch.isfinite(energy).all()):
            return True
        heights = torch.stack([energy, -lp])
        added, climbed = heights - (heights if self.heights is None else self.heights)
        self.heights = heights
        allowed = 10.0 + 10.0 * self.spread + kinetic(state.v) / (1.0 if self.noisy else 20.0)
        return bool(((added > allowed) & (climbed > 0)).any())

    def _curvature(
        self,
        z: Tensor,
        root: Tensor,
        log_joint: Callable[..., Tensor],
        rows: Tensor,
        dim: int | None,
    ) -> float:
        """Largest eigenvalue, over the chains, of minus the Hessian in the metric, by power iteration."""

        def product(z: Tensor, vector: Tensor, rows: Tensor) -> Tensor:
            # reverse over reverse: forward mode does not follow the float64 sums of the density
            def slope(point: Tensor) -> Tensor:
                return (torch.func.grad(log_joint)(point, rows) * vector).sum()

            return torch.func.grad(slope)(z)

        batched = torch.func.vmap(
            product,
            in_dims=(0, 0, dim),
            randomness="different",
        )
        if self.vector is None:
            num_steps = 20
            vector = torch.randn_like(z)
        else:
            num_steps = 8
            vector = self.vector
        for _ in range(num_steps):
            vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(1e-30)
            vector = root * batched(z, root * vector, rows)
        size = vector.norm(dim=1)
        self.vector = torch.where(torch.isfinite(vector), vector, torch.ones_like(vector))
        return float(size.max())

    def _noise(
        self,
        z: Tensor,
        root: Tensor,
        log_joints: Iterator[_LogJoint],
        late: bool,
    ) -> float:
        """The largest mean variance of the gradient over any site; early on beyond the squared mean, the drift."""
        whitened = []
        values = []
        for log_joint, rows, dim in itertools.islice(log_joints, 8):
            slope = torch.func.grad_and_value(log_joint)
            of_chains = torch.func.vmap(
                slope,
                in_dims=(0, dim),
                randomness="different",
            )
            gradient, value = of_chains(z, rows)
            whitened.append(root * gradient)
            values.append(value)
        self.spread = float(torch.stack(values).double().std(0).max())
        gradients = torch.stack(whitened).double()
        variance = gradients.var(0)
        signal = gradients.mean(0).square()
        excess = variance if late else variance - signal
        return max(float(excess[:, site.start : site.stop].mean()) for site in self.density.sites)


#: memory of the preconditioner: each warm-up step weighs 1 − RMSPROP
RMSPROP = 0.99
#: steps between two checks that every chain is still finite and conserves its energy
CHECK_EVERY = 50


class ChainStep:
    """The compiled transition, anew for every batch shape (a loader's last batch is smaller)."""

    def __init__(
        self,
        config: _StochasticGradientMCMC,
        problem: Problem,
        control: Tensor,
    ):
        self.config = config
        self.problem = problem
        self.control = control
        self.seconds = 0.0
        self.kernels: dict[tuple[torch.Size, ...], Compiled] = {}

    def __call__(self, batch: Batch, *state: Tensor) -> tuple[Tensor, ...]:
        step = transition(self.config, self.problem, batch.per_chain)
        args = (*state, self.control, batch.rows, *batch.tensors)
        key = tuple(value.shape for value in batch.tensors)
        if key not in self.kernels:
            name = f"the {type(self.config).__name__} step"
            self.kernels[key] = compiled(
                step,
                *args,
                enabled=self.config.compile,
                name=name,
            )
            self.seconds += self.kernels[key].seconds
        return self.kernels[key](*args)


class Run:
    """What is kept on the way; at the end ``z`` (chain, draw, dim) and ``lp`` (chain, draw)."""

    z: Tensor
    lp: Tensor
    loss: Tensor

    def __init__(self, z: Tensor):
        self.losses: list[Tensor] = []
        self.step_size = self.seconds = self.compile_seconds = 0.0
        self.step = 0
        self.stopped = "error"
        self.forget(z)

    def forget(self, z: Tensor) -> None:
        """Start anew: the chains were sent back."""
        # draws so far, (chain, dim) each, and their log joint (chain,)
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.kinetic = torch.zeros_like(z)

    def keep(
        self,
        state: State,
        lp: Tensor,
        temperature: float,
    ) -> None:
        """Take the chains' present positions as draws."""
        self.kept.append((state.z, lp))
        self.kinetic += state.v.square() / temperature

    def usable(self) -> bool:
        """Whether an interrupted run holds draws that a check has seen."""
        return bool(self.kept and self.losses) and all(
            bool(z.isfinite().all()) for z, _ in self.kept
        )

    def finish(self, seconds: float) -> None:
        """Stack what was kept."""
        self.seconds = seconds - self.compile_seconds
        if not self.kept:
            raise ValueError(
                f"a callback stopped the run at step {self.step}, before the first draw was kept"
            )
        self.z = torch.stack([z for z, _ in self.kept], 1)
        self.lp = torch.stack([lp for _, lp in self.kept], 1)
        self.loss = torch.stack(self.losses)


def batch_log_joint(problem: Problem, batch: Batch) -> _LogJoint:
    """The log joint of a batch as a function of (z, rows), the rows, and which of their dimensions is the chain's."""
    log_joint = _of_rows(problem.density.subsampled(), batch.tensors, batch.per_chain)
    return log_joint, batch.rows, 0 if batch.per_chain else None


def _of_rows(density: Density, data: tuple[Tensor, ...], per_chain: bool) -> Callable[..., Tensor]:
    """(z, rows) → the log joint on the chain's own rows of the data, or on the batch that all chains share."""

    def of_own_rows(z: Tensor, rows: Tensor) -> Tensor:
        return density.log_joint(z, *(tensor[rows] for tensor in data))

    def of_shared_batch(z: Tensor, rows: Tensor) -> Tensor:
        return density.log_joint(z, *data)

    return of_own_rows if per_chain else of_shared_batch


class Batch(NamedTuple):
    """Row numbers (chain, batch) into whole tensors, or tensors that all chains share."""

    rows: Tensor
    tensors: tuple[Tensor, ...]
    per_chain: bool


def chain_batches(problem: Problem, num_chains: int, batch_size: int | None) -> Iterator[Batch]:
    """Endless mini-batches; each chain walks through permutations of its own."""
    none = torch.zeros(
        0,
        dtype=torch.int64,
        device=problem.device,
    )
    if not problem.is_bnn:
        data = tuple(value for value in (problem.x, problem.y) if isinstance(value, Tensor))
        if len(data) < 2:
            data = ()  # the density calls the program with its stored arguments
        yield from itertools.repeat(Batch(none, data, per_chain=False))
    num_data = problem.num_rows
    if problem.loader is not None or batch_size is None or batch_size >= num_data:
        yield from (Batch(none, pair, per_chain=False) for pair in problem.batches())
        return
    rows = torch.empty(
        num_chains,
        batch_size,
        dtype=torch.int64,
        device=problem.device,
    )
    batch = Batch(
        rows,
        (problem.x, problem.y),
        per_chain=True,
    )
    for drawn in permuted_rows(num_data, batch_size, problem.device, num_chains):
        rows.copy_(drawn)
        yield batch


def metric_of(second: Tensor) -> Tensor:
    """1 / root mean square gradient, scaled to geometric mean 1; no weight moves more than 10³ times that mean."""
    log = -0.5 * second.clamp_min(torch.finfo(second.dtype).tiny).log()
    return (log - log.mean()).clamp(-math.log(1e3), math.log(1e3)).exp()


def transition(
    config: _StochasticGradientMCMC, problem: Problem, per_chain: bool
) -> Callable[..., tuple[Tensor, ...]]:
    r"""One step of all chains: (z, v, second, heat, control, rows, \*data) → these four after it, log joint of the
    batch, energy less the heat."""
    density = problem.density.subsampled()
    num_data = problem.num_rows
    precondition = config.preconditioner is not None
    # each chain draws a subsample of its own
    randomness = "error" if density.stochastic is None else "different"

    def step(
        z: Tensor,
        v: Tensor,
        mean_square: Tensor,
        heat: Tensor,
        control: Tensor,
        rows: Tensor,
        *data: Tensor,
    ) -> tuple[Tensor, ...]:
        epsilon, forget, temperature = control.unbind()
        metric = metric_of(mean_square) if precondition else torch.ones_like(mean_square)
        slope = torch.func.grad_and_value(_of_rows(density, data, per_chain))
        rows_dim = 0 if per_chain else None
        of_chains = torch.func.vmap(
            slope,
            in_dims=(0, rows_dim),
            randomness=randomness,
        )
        z, v, grad, lp, energy, added = config.move(
            z, v, lambda point: of_chains(point, rows), epsilon, temperature, metric
        )
        if precondition:
            mean_square = torch.lerp(mean_square, (grad / num_data).square().mean(0), forget)
        return z, v, mean_square, heat + added, lp, energy - heat

    return step


@torch.no_grad()
def full_log_joint(density: Density, z: Tensor, at_once: int = 32) -> Tensor:
    """Log joint on all data at flat draws (chain, draw, dim), in unconstrained space; (chain, draw)."""
    log_joint = torch.func.vmap(density.log_joint)
    values = [log_joint(draws) for draws in z.flatten(0, 1).split(at_once)]
    return torch.cat(values).reshape(z.shape[:2])


def run_chains(
    config: _StochasticGradientMCMC,
    problem: Problem,
    z: Tensor,
    asked: FitRun,
) -> Run:
    """Run the chains of ``config`` from ``z`` (chain, dim): warm-up, then a draw every ``thinning`` steps."""
    num_steps = config.num_warmup + config.thinning * asked.num_draws
    # at rest in their places, with momenta of the right temperature
    v = math.sqrt(config.temperature) * torch.randn_like(z)
    state = State(0, z, v, torch.zeros_like(z[0]), z.new_zeros(len(z), dtype=torch.float64))
    run = Run(z)
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


class _Plan(NamedTuple):
    """After which steps the chains are checked, give a draw, and are reported."""

    checks: set[int]
    draws: range
    reports: set[int]

    @classmethod
    def of(
        cls,
        config: _StochasticGradientMCMC,
        num_steps: int,
        looks: set[int],
    ) -> _Plan:
        """The plan of a run; a state that a look keeps has been checked."""
        report_every = max(1, num_steps // 100)
        return cls(
            checks={num_steps, *looks, *range(1, num_steps, CHECK_EVERY)},
            draws=range(config.num_warmup + config.thinning, num_steps + 1, config.thinning),
            reports={num_steps, *range(1, num_steps, report_every)},
        )


def _walk(
    config: _StochasticGradientMCMC,
    problem: Problem,
    state: State,
    num_steps: int,
    watch: Watch,
    run: Run,
    seed: int,
) -> None:
    """Take the steps and keep every ``thinning``-th after the warm-up."""
    batches = chain_batches(problem, config.num_chains, config.batch_size)
    # at every step: ε, how much the preconditioner forgets, temperature
    control = state.z.new_zeros(3)
    step = ChainStep(config, problem, control)
    chooser = StepSize(config, problem) if config.step_size is None else None
    plan = _Plan.of(config, num_steps, set() if chooser is None else chooser.looks)
    while state.step < num_steps:
        run.step = state.step
        run.step_size = _step_size(config, problem, chooser, state, batches)
        forget = _forgetting(config, state.step)
        settings = [run.step_size, forget, config.temperature]
        control.copy_(torch.tensor(settings, dtype=torch.float64))
        *tensors, lp, energy = step(next(batches), state.z, state.v, state.second, state.heat)
        run.compile_seconds = step.seconds
        state = State(state.step + 1, *tensors)
        if state.step in plan.checks:
            restart = _checked(problem, chooser, state, lp, energy, control)
            if restart is not None:
                state = restart
                run.forget(state.z)
                continue
        if state.step in plan.draws:
            run.keep(state, lp, config.temperature)
        if state.step in plan.reports:
            run.losses.append(-lp.mean() / problem.num_rows)
            present = functools.partial(_snapshot, config, problem, run, state.z, seed)
            stop = watch.tell(state.step, {"loss": float(run.losses[-1]), "snapshot": present})
            if stop and state.step < num_steps:
                watch.stopped = "callback"
                return


def _step_size(
    config: _StochasticGradientMCMC,
    problem: Problem,
    chooser: StepSize | None,
    state: State,
    batches: Iterator[Batch],
) -> float:
    """The ε of the next step: the user's, or the chooser's, which looks at the chains now and then."""
    if chooser is None:
        return cast(float, config.step_size) / problem.num_rows
    if state.step in chooser.looks:
        metric = torch.ones_like(state.second)
        if config.preconditioner is not None and bool(state.second.any()):
            metric = metric_of(state.second)
        chooser.look(state, metric, batches, functools.partial(batch_log_joint, problem))
    return chooser.value


def _forgetting(config: _StochasticGradientMCMC, step: int) -> float:
    """The weight of this step's squared gradient in the preconditioner's mean: all of it at the first step."""
    if config.preconditioner is None or step >= config.num_warmup:
        return 0.0
    return 1.0 - RMSPROP if step else 1.0


def _snapshot(
    config: _StochasticGradientMCMC,
    problem: Problem,
    run: Run,
    z: Tensor,
    seed: int,
) -> Posterior:
    """The draws that were kept; before the first, where the chains are, z (chain, dim)."""
    positions = [position for position, _ in run.kept] or [z]
    draws = problem.density.constrain(torch.stack(positions, 1))
    return snapshot(
        problem,
        config,
        draws,
        seed=seed,
        meta={"temperature": config.temperature},
    )


def _checked(
    problem: Problem,
    chooser: StepSize | None,
    state: State,
    lp: Tensor,
    energy: Tensor,
    control: Tensor,
) -> State | None:
    """The state to go back to, of chains that diverged; None where they may go on."""
    diverged = chooser is not None and chooser.diverged(state, lp, energy)
    if chooser is not None and diverged:
        restart = chooser.restart()
        if restart is not None:
            return restart
    bad = ~(torch.isfinite(state.z).all(1) & torch.isfinite(lp))
    if bool(bad.any()):
        chain = int(bad.nonzero()[0])
        wrong = (~torch.isfinite(state.z[chain])).nonzero()
        where = f", site {problem.density.site_of(int(wrong[0]))!r}" if len(wrong) else ""
        raise FloatingPointError(
            f"chain {chain} is no longer finite by step {state.step} (log joint {float(lp[chain]):g}{where}): "
            f"reduce step_size (now {float(control[0]) * problem.num_rows:g})"
        )
    if chooser is not None and diverged:
        raise FloatingPointError(
            f"by step {state.step} a chain has not conserved its energy, at each of {NUM_RESTARTS + 1} step sizes "
            f"down to {chooser.value * problem.num_rows:.3g}: pass larger batches, or use NUTS or SVI"
        )
    return None
