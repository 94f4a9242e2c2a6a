"""Stochastic-gradient chains: the step size from curvature and gradient noise, and the loop over ``chain_steps``.

:func:`run_chains` makes a :class:`_Plan` of the steps and takes a :class:`_Walk` along it. During warm-up it *looks* at
the chains ten times, where :class:`StepSize` chooses ε anew, and all along it *checks* every 50 steps that they are
finite and conserve their energy; where they do not, they go back to the last look with half the step length.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from torch import Tensor

from pyrobnn.core.matrices import power_iteration
from pyrobnn.core.threads import threads_by_need
from pyrobnn.inference.chain_steps import (
    Batch,
    ChainStep,
    HessianProducts,
    LogJoint,
    State,
    Stepped,
    batch_log_joint,
    chain_batches,
    kinetic,
    metric_of,
)
from pyrobnn.inference.fitting.batches import Batches
from pyrobnn.inference.fitting.checkpoints import Fields, Stage, fields_of
from pyrobnn.inference.fitting.problem import Problem, snapshot
from pyrobnn.inference.fitting.shares import across
from pyrobnn.inference.fitting.watch import TRACING, Watch
from pyrobnn.posterior import Posterior

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun
    from pyrobnn.inference.sgmcmc import _StochasticGradientMCMC

#: how often chains that leave the posterior are sent back, each time with half the step length
NUM_RESTARTS = 8
#: memory of the preconditioner: each warm-up step weighs 1 − _RMSPROP
_RMSPROP = 0.99
#: steps of the power iteration at the first look, and at each of the others, which begins where the last one ended
_FIRST_PRODUCTS = 20
_LATER_PRODUCTS = 8
#: steps between two checks that every chain is still finite and conserves its energy
_CHECK_EVERY = 50


@dataclass(frozen=True, eq=False)
class Choice:
    """The step size at one time, and what it was chosen from.

    Attributes:
        saved: the chains at the last look, to which those that have diverged go back.
        share: κ, a quarter of it after each restart.
        value: ε; zero before the first look, where it is not the user's.
        restarts: how often the chains went back.
        settled: the values of the looks in the second half of warm-up.
        energies: energy less heat, and minus the log joint, at the last check (2, chain); None before one.
        spread: standard deviation of a mini-batch's log joint, at the last look.
        vector: directions (chain, dim) of the largest curvature, at the last look.
    """

    saved: State
    share: float
    value: float = 0.0
    restarts: int = 0
    settled: tuple[float, ...] = ()
    energies: Tensor | None = None
    spread: float = 0.0
    vector: Tensor | None = None


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

    ``config`` is a :class:`pyrobnn.SGLD` or :class:`pyrobnn.SGHMC`, whose ``share`` is κ and ``heating`` r. What is
    chosen at one time is a :class:`Choice`.
    """

    def __init__(self, config: _StochasticGradientMCMC, problem: Problem):
        self.share = config.share
        self.heating = config.heating
        self.num_warmup = config.num_warmup
        self.temperature = config.temperature
        self.sites = problem.density.sites
        self.chooses = config.step_size is None
        self.first_value = 0.0 if config.step_size is None else config.step_size / problem.num_rows
        size = config.batch_size
        in_batches = problem.loader is not None
        in_batches |= size is not None and size < problem.num_rows
        self.noisy = in_batches or problem.density.subsampled().stochastic is not None
        self.looks: set[int] = set()
        if self.chooses:
            self.looks = {self.num_warmup * look // 10 for look in range(10)}
        num_products = _FIRST_PRODUCTS + _LATER_PRODUCTS * len(self.looks)
        self.hessian_products = HessianProducts(problem, num_products)

    def begin(self, state: State) -> Choice:
        """The user's ε, or what there is before the first look."""
        return Choice(state, self.share, self.first_value)

    def look(
        self,
        choice: Choice,
        state: State,
        metric: Tensor,
        batches: Iterator[Batch],
        log_joint: Callable[[Batch], LogJoint],
    ) -> Choice:
        """The ε chosen at ``state``, in the preconditioner's metric (dim,)."""
        metric_root = metric.sqrt()
        is_late = 2 * state.step >= self.num_warmup
        product = self.hessian_products.at(state.z, next(batches))
        curvature, vector = _curvature(product, metric_root, state.z, choice.vector)
        bounds = [choice.share / max(curvature, 1e-30)]
        spread = choice.spread
        if self.noisy:
            log_joints = (log_joint(batch) for batch in batches)
            variance, spread = self._gradient_noise(state.z, metric_root, log_joints, is_late)
            bounds.append(0.1 / (self.heating * max(variance, 1e-30)))
        if not all(math.isfinite(bound) for bound in bounds):
            raise FloatingPointError(
                f"no step size can be chosen at step {state.step + 1}: the curvature of the log joint there, or the "
                "variance of its gradient, is not finite; start the chains elsewhere (init=), or pass a step_size"
            )
        value = min(bounds)
        settled = choice.settled
        if is_late:
            settled = (*settled, value)
            value = min(settled)
        return replace(
            choice,
            saved=state,
            value=value,
            settled=settled,
            spread=spread,
            vector=vector,
        )

    def restart(self, choice: Choice) -> tuple[Choice, State]:
        """The choice from now on, and the chains to go back to, with new momenta.

        ε is the square of the step length: a quarter of ε and κ from now on is half of the length.
        """
        saved = choice.saved
        momenta = math.sqrt(self.temperature) * torch.randn_like(saved.v)
        restarted = replace(
            choice,
            restarts=choice.restarts + 1,
            share=choice.share / 4,
            value=choice.value / 4,
            settled=tuple(value / 4 for value in choice.settled),
            energies=None,
        )
        return restarted, replace(saved, v=momenta)

    def diverged(
        self,
        choice: Choice,
        state: State,
        energies: Tensor,
    ) -> bool:
        """Whether a chain is not finite, or fell in log joint since the last check by energy that step errors added.

        ``energies`` (2, chain) as of :class:`Choice`, at ``state``.
        """
        if not self.chooses:
            return False
        if not bool(torch.isfinite(state.z).all() and torch.isfinite(energies[0]).all()):
            return True
        earlier = energies if choice.energies is None else choice.energies
        energy_error, log_joint_fall = energies - earlier
        tolerance = 10.0 + 10.0 * choice.spread + kinetic(state.v) / (1.0 if self.noisy else 20.0)
        return bool(((energy_error > tolerance) & (log_joint_fall > 0)).any())

    def _gradient_noise(
        self,
        z: Tensor,
        metric_root: Tensor,
        log_joints: Iterator[LogJoint],
        is_late: bool,
    ) -> tuple[float, float]:
        """The largest mean variance of the gradient over any site, and the sd of the log joint.

        Early on the variance is what exceeds the squared mean, the drift.
        """
        whitened = []
        values = []
        for log_joint in itertools.islice(log_joints, 8):
            chain_slopes = torch.func.vmap(
                torch.func.grad_and_value(log_joint.function),
                in_dims=(0, log_joint.chain_dim),
                randomness="different",
            )
            gradient, value = across(log_joint.shares, chain_slopes)(z, log_joint.rows)
            whitened.append(metric_root * gradient)
            values.append(value)
        spread = float(torch.stack(values).double().std(0).max())
        gradients = torch.stack(whitened).double()
        variance = gradients.var(0)
        signal = gradients.mean(0).square()
        excess = variance if is_late else variance - signal
        largest = max(float(excess[:, site.start : site.stop].mean()) for site in self.sites)
        return largest, spread


def _curvature(
    product: Callable[[Tensor], Tensor],
    metric_root: Tensor,
    z: Tensor,
    start: Tensor | None,
) -> tuple[float, Tensor]:
    """The largest eigenvalue in size, over the chains at ``z``, of the Hessian in the metric, by power iteration.

    ``product`` is the Hessian's with a vector of each chain. With the vectors (chain, dim) that were reached from
    ``start``, from which fewer steps suffice.
    """
    products = power_iteration(
        lambda unit: metric_root * product(metric_root * unit),
        torch.randn_like(z) if start is None else start,
        _FIRST_PRODUCTS if start is None else _LATER_PRODUCTS,
    )
    (vector,) = deque(products, maxlen=1)  # the others need not be held
    next_start = torch.where(torch.isfinite(vector), vector, torch.ones_like(vector))
    return float(vector.norm(dim=1).max()), next_start


@dataclass(frozen=True, eq=False)
class Run:
    """What a run of the chains gave.

    Attributes:
        z: draws (chain, draw, dim), unconstrained.
        lp: their log joint (chain, draw) by the batch of their step.
        loss: minus the mean log joint by datum, at every report.
        kinetic: the sum over draws of squared momenta by temperature (chain, dim).
        step_size: the last ε.
        stopped: why the run ended.
        seconds: without those of compiling.
    """

    z: Tensor
    lp: Tensor
    loss: Tensor
    kinetic: Tensor
    step_size: float
    stopped: str
    seconds: float
    compile_seconds: float


class _RecordState(TypedDict):
    """What a checkpoint has of the record."""

    losses: list[Tensor]
    step_size: float
    step: int
    draws: list[list[Tensor]]
    kinetic: Tensor


class _WalkState(TypedDict):
    """What a checkpoint has of the chains, the choice of their step size, and the record."""

    chains: Fields
    choice: Fields
    record: _RecordState


class _Record:
    """What has been drawn so far."""

    def __init__(self, z: Tensor):
        self.losses: list[Tensor] = []
        self.step_size = 0.0
        self.step = 0
        self.clear(z)

    def clear(self, z: Tensor) -> None:
        """Start anew: the chains were sent back."""
        # draws so far, (chain, dim) each, and their log joint (chain,)
        self.draws: list[tuple[Tensor, Tensor]] = []
        self.kinetic = torch.zeros_like(z)

    def keep(
        self,
        state: State,
        lp: Tensor,
        temperature: float,
    ) -> None:
        """Take the chains' present positions as draws."""
        self.draws.append((state.z, lp))
        self.kinetic += state.v.square() / temperature

    def state(self) -> _RecordState:
        """Draws, losses, and sums so far."""
        return {
            "losses": self.losses,
            "step_size": self.step_size,
            "step": self.step,
            "draws": [list(draw) for draw in self.draws],
            "kinetic": self.kinetic,
        }

    def restore(self, state: _RecordState) -> None:
        """Go on from what :meth:`state` gave."""
        self.losses = list(state["losses"])
        self.step_size = state["step_size"]
        self.step = state["step"]
        self.draws = [(z, lp) for z, lp in state["draws"]]
        self.kinetic = state["kinetic"]

    def usable(self) -> bool:
        """Whether an interrupted run holds draws that a check has seen."""
        return bool(self.draws and self.losses) and all(
            bool(z.isfinite().all()) for z, _ in self.draws
        )


def run_chains(
    config: _StochasticGradientMCMC,
    problem: Problem,
    z: Tensor,
    fit_run: FitRun,
) -> Run:
    """Run the chains of ``config`` from ``z`` (chain, dim): warm-up, then a draw every ``thinning`` steps."""
    # at rest in their places, with momenta of the right temperature
    v = math.sqrt(config.temperature) * torch.randn_like(z)
    state = State(0, z, v, torch.zeros_like(z[0]), z.new_zeros(len(z), dtype=torch.float64))
    record = _Record(z)
    chooser = StepSize(config, problem)
    plan = _Plan.of(config, fit_run.num_draws, chooser.looks)
    step = ChainStep(config, problem, z.new_zeros(3), plan.num_steps)
    watch = Watch(
        plan.num_steps,
        type(config).__name__,
        fit_run.callbacks,
        fit_run.progress,
        finished="num_draws",
        starting=TRACING,
        worth_keeping=record.usable,
    )
    step.announce = watch.say
    started = time.perf_counter()
    batches = chain_batches(problem, config.num_chains, config.batch_size)
    walk = _Walk(config, problem, chooser, plan, step, record, batches)
    walk.begin(state)
    stage = fit_run.stages.begin(batches)
    stage.resume(walk)
    with watch, threads_by_need(), stage:
        walk.take(watch, stage, fit_run.seed)
    seconds = time.perf_counter() - started
    if not record.draws:
        raise ValueError(
            f"a callback stopped the run at step {record.step}, before the first draw was kept"
        )
    return Run(
        z=torch.stack([position for position, _ in record.draws], 1),
        lp=torch.stack([lp for _, lp in record.draws], 1),
        loss=torch.stack(record.losses),
        kinetic=record.kinetic,
        step_size=record.step_size,
        stopped=watch.stopped,
        seconds=seconds - step.seconds,
        compile_seconds=step.seconds,
    )


class _Plan(NamedTuple):
    """How many steps there are, and after which the chains are checked, give a draw, and are reported."""

    num_steps: int
    checks: set[int]
    draws: range
    reports: set[int]

    @classmethod
    def of(
        cls,
        config: _StochasticGradientMCMC,
        num_draws: int,
        looks: set[int],
    ) -> _Plan:
        """The plan of a run; a state that a look keeps has been checked."""
        num_steps = config.num_warmup + config.thinning * num_draws
        report_every = max(1, num_steps // 100)
        return cls(
            num_steps,
            checks={num_steps, *looks, *range(1, num_steps, _CHECK_EVERY)},
            draws=range(config.num_warmup + config.thinning, num_steps + 1, config.thinning),
            reports={num_steps, *range(1, num_steps, report_every)},
        )


@dataclass(eq=False)
class _Walk:
    """The steps of a run: what they share, and where the chains are."""

    config: _StochasticGradientMCMC
    problem: Problem
    chooser: StepSize
    plan: _Plan
    step: ChainStep
    record: _Record
    batches: Batches[Batch]

    # set by :meth:`begin`
    chains: State = field(init=False)
    choice: Choice = field(init=False)

    def begin(self, chains: State) -> None:
        """Begin with these chains."""
        self.chains = chains
        self.choice = self.chooser.begin(chains)

    def state(self) -> _WalkState:
        """Where the chains are, the choice of the step size, and the record."""
        choice = fields_of(self.choice) | {"saved": fields_of(self.choice.saved)}
        return {
            "chains": fields_of(self.chains),
            "choice": choice,
            "record": self.record.state(),
        }

    def restore(self, state: _WalkState) -> None:
        """Go on from what :meth:`state` gave."""
        self.chains = State(**state["chains"])
        saved = State(**state["choice"]["saved"])
        settled = tuple(state["choice"]["settled"])
        self.choice = Choice(**{**state["choice"], "saved": saved, "settled": settled})
        self.record.restore(state["record"])

    def take(
        self,
        watch: Watch,
        stage: Stage,
        seed: int,
    ) -> None:
        """Take the steps and keep every ``thinning``-th after the warm-up."""
        while self.chains.step < self.plan.num_steps:
            with stage.changing():
                reported = self._step()
            if reported:
                present = functools.partial(self._snapshot, self.chains.z, seed)
                metrics = {"loss": float(self.record.losses[-1]), "snapshot": present}
                stop = watch.tell(self.chains.step, metrics)
                shares = self.problem.shares
                if shares is not None:
                    shares.check_state(self.chains.z)
                    stop = shares.ranks.from_first(stop)
                if stop and self.chains.step < self.plan.num_steps:
                    watch.stopped = "callback"
                    return
            stage.keep()

    def _step(self) -> bool:
        """Take one step, or go back where the chains have diverged; returns whether it is to be reported."""
        record = self.record
        state = self.chains
        choice = self.choice
        if state.step in self.chooser.looks:
            choice = self._choice_by_look(choice, state, self.batches)
        record.step = state.step
        record.step_size = choice.value
        second_weight = _second_weight(self.config, state.step)
        stepped = self.step(next(self.batches), state, choice.value, second_weight)
        state = stepped.state
        if state.step in self.plan.checks:
            choice, restart = self._choice_by_check(choice, stepped)
            if restart is not None:
                record.clear(restart.z)
                self.chains = restart
                self.choice = choice
                return False
        if state.step in self.plan.draws:
            record.keep(state, stepped.lp, self.config.temperature)
        reported = state.step in self.plan.reports
        if reported:
            record.losses.append(-stepped.lp.mean() / self.problem.num_rows)
        self.chains = state
        self.choice = choice
        return reported

    def _choice_by_look(
        self,
        choice: Choice,
        state: State,
        batches: Iterator[Batch],
    ) -> Choice:
        """The choice of a look at the chains."""
        metric = torch.ones_like(state.second)
        if self.config.preconditioner is not None and bool(state.second.any()):
            metric = metric_of(state.second)
        log_joint = functools.partial(batch_log_joint, self.problem)
        return self.chooser.look(choice, state, metric, batches, log_joint)

    def _choice_by_check(self, choice: Choice, stepped: Stepped) -> tuple[Choice, State | None]:
        """The choice from now on, and the chains to go back to where they diverged; None where they may go on."""
        energies = torch.stack([stepped.energy, -stepped.lp])
        diverged = self.chooser.diverged(choice, stepped.state, energies)
        if diverged and choice.restarts < NUM_RESTARTS:
            return self.chooser.restart(choice)
        self._check_finite(stepped)
        if diverged:
            raise FloatingPointError(
                f"by step {stepped.state.step} a chain has not conserved its energy, at each of {NUM_RESTARTS + 1} "
                f"step sizes down to {choice.value * self.problem.num_rows:.3g}: pass larger batches, or use NUTS or "
                "SVI"
            )
        return replace(choice, energies=energies), None

    def _check_finite(self, stepped: Stepped) -> None:
        """FloatingPointError where a chain is not finite."""
        z = stepped.state.z
        diverged = ~(torch.isfinite(z).all(1) & torch.isfinite(stepped.lp))
        if not bool(diverged.any()):
            return
        chain = int(diverged.nonzero()[0])
        coordinates = (~torch.isfinite(z[chain])).nonzero()
        where = ""
        if len(coordinates):
            where = f", site {self.problem.density.site_of(int(coordinates[0]))!r}"
        step_size = float(self.step.control[0]) * self.problem.num_rows
        raise FloatingPointError(
            f"chain {chain} is no longer finite by step {stepped.state.step} "
            f"(log joint {float(stepped.lp[chain]):g}{where}): reduce step_size (now {step_size:g})"
        )

    def _snapshot(self, z: Tensor, seed: int) -> Posterior:
        """The draws that were kept; before the first, where the chains are, z (chain, dim)."""
        positions = [position for position, _ in self.record.draws] or [z]
        draws = self.problem.density.constrain(torch.stack(positions, 1))
        return snapshot(
            self.problem,
            self.config,
            draws,
            seed=seed,
            meta={"temperature": self.config.temperature},
        )


def _second_weight(config: _StochasticGradientMCMC, step: int) -> float:
    """The weight of this step's squared gradient in the preconditioner's mean: all of it at the first step."""
    if config.preconditioner is None or step >= config.num_warmup:
        return 0.0
    return 1.0 - _RMSPROP if step else 1.0
