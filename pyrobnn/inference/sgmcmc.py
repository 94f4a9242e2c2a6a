"""Stochastic-gradient MCMC: SGLD and SGHMC, many chains in one compiled step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pyrobnn.callbacks import ProgressBar
from pyrobnn.checks import check_choice, check_count, check_number
from pyrobnn.compile import compiled
from pyrobnn.density import Density
from pyrobnn.inference.base import Callback, Problem, check_fit, interruption, make_posterior, notify, prepare
from pyrobnn.inference.batches import check_batch_size, permuted_rows
from pyrobnn.inference.point import start_values
from pyrobnn.inference.program import check_batched, check_proper
from pyrobnn.inference.sgmcmc_plan import Plan, lay_out, start_chains
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.seeding import seeded

Schedule = Literal["constant", "polynomial", "cyclical"]

#: steps between two looks at whether a chain has left the finite numbers
CHECK_EVERY = 50


@dataclass(frozen=True)
class _StochasticGradientMCMC:
    """What the two samplers share: the run, the schedule, the preconditioner."""

    num_chains: int = 4
    num_warmup: int = 2000
    step_size: float = 0.01
    schedule: Schedule = "constant"
    decay: float = 0.55
    decay_steps: int = 100
    num_cycles: int = 4
    exploration: float = 0.5
    thinning: int = 10
    batch_size: int | None = None
    temperature: float = 1.0
    preconditioner: Literal["rmsprop"] | None = None
    compile: bool = True

    has_momentum: ClassVar[bool]

    def __post_init__(self) -> None:
        for name in ("num_chains", "decay_steps", "num_cycles", "thinning"):
            check_count(name, getattr(self, name))
        check_count("num_warmup", self.num_warmup, minimum=0)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        check_number("step_size", self.step_size, above=0)
        check_number("temperature", self.temperature, above=0)
        check_number("decay", self.decay, above=0, maximum=1)
        check_number("exploration", self.exploration, minimum=0, below=1)
        check_choice("schedule", self.schedule, ("constant", "polynomial", "cyclical"))
        if self.preconditioner is not None:
            check_choice("preconditioner", self.preconditioner, ("rmsprop",))
            if self.num_warmup == 0:
                raise ValueError(
                    "the preconditioner is learnt during warm-up and frozen after it: pass num_warmup=500 or more"
                )

    def fit(
        self,
        model: BNN | Callable[..., Any],
        x: Any = None,
        y: Any = None,
        *,
        num_draws: int = 500,
        seed: int = 0,
        init: Posterior | nn.Module | None = None,
        device: str | torch.device | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ) -> Posterior:
        """Run the chains.

        Args:
            model: a BNN, or a Pyro program ``fn(x, y)`` (full batch only).
            x, y: the data; or ``x`` a DataLoader, whose batches all chains then share.
            num_draws: draws kept of each chain, ``thinning`` steps apart.
            seed: of starts, batches and noise.
            init: where the chains start: draws of an earlier posterior (MAP, SVI, …), the weights of a trained net (all
                chains alike), or None for draws from the prior.
            device: where to compute; default where ``x`` is.
            callbacks: called with the step and ``loss`` (minus the mean log joint of the batch, per datum).
            progress: show a progress bar.

        Returns:
            Posterior with draws (num_chains, num_draws, …); sample_stats ``lp`` (log joint on all data in
            unconstrained space; for a streamed loader the batch estimate) and ``step_size``.

        Raises:
            ValueError: bad data.
            FloatingPointError: a chain that left the finite numbers (names step, chain and step size).
            KeyboardInterrupt: Ctrl-C before the first draw; later it returns the draws there are, marked.
        """
        check_fit(num_draws, seed)
        held = None if init is None else start_values(model, init)
        problem = prepare(model, x, y, points="held", device=device, values=held, stream=True)
        check_batch_size(problem, self.batch_size)
        check_proper(problem.density)
        if not problem.is_bnn:
            check_batched(problem.density.subsampled(), type(self).__name__)
        plan = lay_out(self, num_draws, problem.num_data or 1)
        with seeded(seed, problem.device):
            state = _State(problem, start_chains(model, problem.density, init, self.num_chains))
            kept, compile_seconds, fit_seconds, history, stopped = self._run(
                problem, state, plan, callbacks, progress
            )
        z, lp, notes = *kept, []
        try:
            if stopped != "interrupt" and problem.loader is None:
                lp = full_log_joint(problem.density, z)
        except KeyboardInterrupt:
            stopped = "interrupt"
        if stopped == "interrupt":
            notes.append(
                interruption(self, z.shape[1], num_draws, "draws of each chain")
                + "; lp is that of the batches, not of all data"
            )
        step_size = plan.controls[plan.keep, 0].to(z).expand(self.num_chains, -1)
        return make_posterior(
            problem,
            self,
            problem.density.constrain(z),
            seed=seed,
            timings={"compile": compile_seconds, "fit": fit_seconds},
            sample_stats={"lp": lp, "step_size": step_size},
            history=history,
            meta={"iid": False, "temperature": self.temperature, "stopped": stopped},
            notes=notes,
            interrupted=stopped == "interrupt",
        )

    def _run(
        self, problem: Problem, state: _State, plan: Plan, callbacks: Sequence[Callback], progress: bool
    ):
        batches = _batches(problem, self.num_chains, self.batch_size)
        control = plan.controls[0].to(state.z).clone()  # written at every step
        step = _Step(self, problem, control)
        z, v, second = state.tensors()
        draws, lps, losses, keep = [], [], [], set(plan.keep.tolist())
        report_every = max(1, len(plan.controls) // 100)
        bar = ProgressBar(len(plan.controls), type(self).__name__) if progress else None
        callbacks = (*callbacks, bar) if bar else callbacks
        stopped, started = "error", time.perf_counter()
        try:
            for k, row in enumerate(plan.controls.to(z)):
                control.copy_(row)
                z, v, second, lp = step(next(batches), z, v, second)
                if k in keep:
                    draws.append(z)
                    lps.append(lp)
                last = k == len(plan.controls) - 1
                if k % CHECK_EVERY == 0 or last:
                    _check_chains(problem.density, z, lp, k, float(row[0]) * (problem.num_data or 1))
                if k % report_every == 0 or last:
                    losses.append(-lp.mean() / (problem.num_data or 1))
                    if notify(callbacks, k + 1, {"loss": float(losses[-1])}) and not last:
                        stopped = "callback"
                        break
            else:
                stopped = "num_draws"
        except KeyboardInterrupt:
            stopped = "interrupt"
            # a draw without its log joint is not whole; draws that no check has seen may be wild
            if not lps or not losses or not bool(torch.isfinite(torch.stack(draws)).all()):
                raise
        finally:
            if bar is not None:
                bar.close(stopped)
        plan.stop_at(len(lps), k)
        fit_seconds = time.perf_counter() - started - step.seconds
        kept = torch.stack(draws[: len(lps)], 1), torch.stack(lps, 1)
        return kept, step.seconds, fit_seconds, {"loss": torch.stack(losses)}, stopped

    def _transition(self, problem: Problem, per_chain: bool) -> Callable[..., tuple[Tensor, ...]]:
        """One step of all chains: (z, v, second, control, rows, x, y) → (z, v, second, log joint of the batch)."""
        num_data = problem.num_data or 1
        precondition = self.preconditioner is not None
        density = problem.density.subsampled()
        # each chain draws a subsample of its own
        randomness = "error" if density.stochastic is None else "different"

        def transition(z, v, second, control, rows, *data):
            epsilon, forget, heat = control[0], control[1], control[2]

            def gradient(z: Tensor) -> tuple[Tensor, Tensor]:
                def log_joint(one: Tensor, index: Tensor) -> Tensor:
                    batch = tuple(part[index] for part in data) if per_chain else data
                    return density.log_joint(one, *batch)

                in_dims = (0, 0 if per_chain else None)
                slope = torch.func.grad_and_value(log_joint)
                return torch.func.vmap(slope, in_dims=in_dims, randomness=randomness)(z, rows)

            metric = _metric(second) if precondition else torch.ones_like(second)
            z, v, grad, lp = self._move(z, v, gradient, epsilon, heat, metric)
            if precondition:
                second = torch.lerp(second, (grad / num_data).square().mean(0), forget)
            return z, v, second, lp

        return transition


@dataclass(frozen=True)
class SGLD(_StochasticGradientMCMC):
    r"""Stochastic-gradient Langevin dynamics.

    .. math:: \theta \leftarrow \theta + \frac{\varepsilon}{2} G\, \nabla \log \tilde p(\theta, y)
        + \sqrt{\varepsilon T}\, G^{1/2} \xi, \qquad \varepsilon = \frac{\texttt{step\_size}}{N}, \quad \xi \sim N(0, I)

    :math:`\tilde p` scales the mini-batch's likelihood to all N data, so ``step_size`` is that of SGD on the loss *per
    datum*: it need not change with N or the batch size.

    Args:
        num_chains: chains, run together in one compiled step, each with its own batches.
        num_warmup: steps before the first draw.
        step_size: :math:`\varepsilon N`, the (initial) step size.
        schedule: ``"constant"``; ``"polynomial"``, with
            :math:`\varepsilon (1 + t / \texttt{decay\_steps})^{-\texttt{decay}}` at step t, warm-up included;
            ``"cyclical"``, after warm-up ``num_cycles`` cosine cycles, each an ``exploration`` share without noise
            and then draws.
        decay, decay_steps: of the polynomial schedule.
        num_cycles, exploration: of the cyclical schedule.
        thinning: steps between draws.
        batch_size: data per step; None for all.
        temperature: T; any value but 1 samples a tempered posterior, and ``meta`` says so.
        preconditioner: ``"rmsprop"`` divides by the root mean square gradient of every weight (pooled over chains,
            geometric mean 1). It is frozen after warm-up, so that the correction Γ of the paper is exactly zero.
        compile: False runs eagerly, with the same draws.

    Raises:
        ValueError, TypeError: a setting out of range.

    Caveat: there is no accept step. The draws are biased by O(step_size), most where curvature is largest: for a
    Gaussian of precision λ the full-batch variance is :math:`1 / (\lambda (1 - \varepsilon\lambda/4))`, and gradient
    noise adds to it. Halve the step size and compare.

    References:
        Bayesian Learning via Stochastic Gradient Langevin Dynamics (Welling & Teh, 2011).
        `Preconditioned SGLD (Li et al., 2016) <https://arxiv.org/abs/1512.07666>`_.
        `Cyclical Stochastic Gradient MCMC (Zhang et al., 2020) <https://arxiv.org/abs/1902.03932>`_.

    Example:
        >>> SGLD(num_chains=2, step_size=0.02).step_size
        0.02
    """

    has_momentum: ClassVar[bool] = False

    def _move(self, z, v, gradient, epsilon, heat, metric):
        grad, lp = gradient(z)
        noise = torch.randn_like(z)
        z = z + 0.5 * epsilon * metric * grad + (epsilon * heat * metric).sqrt() * noise
        return z, v, grad, lp


@dataclass(frozen=True)
class SGHMC(_StochasticGradientMCMC):
    r"""Stochastic-gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum.

    .. math:: v \leftarrow v + h\, \nabla \log \tilde p, \quad \theta \leftarrow \theta + \tfrac h2 v, \quad
        v \leftarrow c\, v + \sqrt{(1 - c^2) T}\, \xi, \quad \theta \leftarrow \theta + \tfrac h2 v

    with :math:`h = \sqrt{\texttt{step\_size} / N}` and :math:`c = 1 - \texttt{friction}`, the momentum of SGD. The
    order kick, drift, friction, drift (BAOAB) leaves a Gaussian exactly invariant
    for full batches at every stable step size.

    Args:
        friction: share of the momentum that is replaced by noise at each step, in (0, 1].
        The rest as in :class:`SGLD`.

    Raises:
        ValueError, TypeError: a setting out of range.

    Caveat: there is no accept step. The noise of mini-batch gradients heats the chain by O(step_size / friction).

    References:
        `Stochastic Gradient Hamiltonian Monte Carlo (Chen et al., 2014) <https://arxiv.org/abs/1402.4102>`_.
        `Rational Construction of Stochastic Numerical Methods for Molecular Sampling (Leimkuhler & Matthews, 2013)
        <https://arxiv.org/abs/1203.5428>`_.

    Example:
        >>> SGHMC(friction=0.1).friction
        0.1
    """

    step_size: float = 0.001
    friction: float = 0.1

    has_momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("friction", self.friction, above=0, maximum=1)

    def _move(self, z, v, gradient, epsilon, heat, metric):
        grad, lp = gradient(z)
        # with the metric as inverse mass the velocity is metric * momentum; v is the momentum in units of its own scale
        drift = epsilon.sqrt() * metric.sqrt()
        keep = 1.0 - self.friction
        v = v + drift * grad
        z = z + 0.5 * drift * v
        v = keep * v + (heat * (1.0 - keep**2)).sqrt() * torch.randn_like(v)
        z = z + 0.5 * drift * v
        return z, v, grad, lp


class _Step:
    """The compiled transition, anew for every batch shape (a loader's last batch is smaller)."""

    def __init__(self, config: _StochasticGradientMCMC, problem: Problem, control: Tensor):
        self.config, self.problem, self.control = config, problem, control
        self.seconds = 0.0
        self.kernels: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}

    def __call__(self, batch: _Batch, *state: Tensor) -> tuple[Tensor, ...]:
        args = (*state, self.control, batch.rows, *batch.tensors)
        key = tuple(value.shape for value in batch.tensors)
        if key not in self.kernels:
            begun = time.perf_counter()
            transition = self.config._transition(self.problem, batch.per_chain)
            name = f"the {type(self.config).__name__} step"
            self.kernels[key] = compiled(transition, *args, enabled=self.config.compile, name=name)
            self.seconds += time.perf_counter() - begun
        return self.kernels[key](*args)


class _State:
    """Position and momentum (chain, dim), mean squared gradient (dim,)."""

    def __init__(self, problem: Problem, z: Tensor):
        self.z = z
        self.v = torch.zeros_like(z)
        self.second = torch.zeros_like(z[0])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.z, self.v, self.second


class _Batch:
    """Row numbers (chain, batch) into whole tensors, or tensors that all chains share."""

    def __init__(self, rows: Tensor, tensors: tuple[Tensor, ...], per_chain: bool):
        self.rows = rows
        self.tensors = tensors
        self.per_chain = per_chain


def _batches(problem: Problem, num_chains: int, batch_size: int | None) -> Iterator[_Batch]:
    """Endless mini-batches; each chain walks through permutations of its own."""
    none = torch.zeros(0, dtype=torch.int64, device=problem.device)
    if not problem.is_bnn:
        data = tuple(value for value in (problem.x, problem.y) if isinstance(value, Tensor))
        if len(data) < 2:
            data = ()  # the density calls the program with its stored arguments
        while True:
            yield _Batch(none, data, per_chain=False)
    if problem.loader is not None:
        for pair in problem.batches():
            yield _Batch(none, pair, per_chain=False)
    num_data = problem.num_data
    if batch_size is None or batch_size >= num_data:
        while True:
            yield _Batch(none, (problem.x, problem.y), per_chain=False)
    rows = torch.empty(num_chains, batch_size, dtype=torch.int64, device=problem.device)
    batch = _Batch(rows, (problem.x, problem.y), per_chain=True)
    for drawn in permuted_rows(num_data, batch_size, problem.device, num_chains):
        rows.copy_(drawn)
        yield batch


def _metric(second: Tensor) -> Tensor:
    """1 / root mean square gradient, scaled to geometric mean 1; no weight moves more than 10³ times that mean."""
    log = -0.5 * second.clamp_min(torch.finfo(second.dtype).tiny).log()
    return (log - log.mean()).clamp(-math.log(1e3), math.log(1e3)).exp()


def _check_chains(density: Density, z: Tensor, lp: Tensor, step: int, step_size: float) -> None:
    bad = ~(torch.isfinite(z).all(1) & torch.isfinite(lp))
    if bool(bad.any()):
        chain = int(bad.nonzero()[0])
        wrong = (~torch.isfinite(z[chain])).nonzero()
        where = f", site {density.site_of(int(wrong[0]))!r}" if len(wrong) else ""
        raise FloatingPointError(
            f"chain {chain} left the finite numbers by step {step + 1} (log joint {float(lp[chain]):g}{where}): "
            f"reduce step_size (now {step_size:g}), or start from a MAP fit with init="
        )


@torch.no_grad()
def full_log_joint(density: Density, z: Tensor, at_once: int = 32) -> Tensor:
    """Log joint on all data at flat draws (chain, draw, dim), in unconstrained space; (chain, draw)."""
    log_joint = torch.func.vmap(density.log_joint)
    parts = [log_joint(part) for part in z.flatten(0, 1).split(at_once)]
    return torch.cat(parts).reshape(z.shape[:2])
