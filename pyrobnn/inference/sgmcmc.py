"""Stochastic-gradient MCMC: SGLD and SGHMC, many chains in one compiled step."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pyrobnn.core.checks import check_choice, check_count, check_number, check_optional
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.chain_steps import Moved, Setting, kinetic
from pyrobnn.inference.fitting.batches import check_batch_size
from pyrobnn.inference.fitting.checkpoints import Stages
from pyrobnn.inference.fitting.initial import common_start, start_chains
from pyrobnn.inference.fitting.problem import Problem, interruption, make_posterior
from pyrobnn.inference.fitting.program import check_batched, check_proper
from pyrobnn.inference.langevin import Run, run_chains
from pyrobnn.inference.method import OPTIONAL, Claim, FitRun, Kind, Method, register
from pyrobnn.inference.optim.minimize import minimize
from pyrobnn.inference.optim.training import Optimizer, Training
from pyrobnn.model import NET, Density
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.model.gradient import Gradient, at_each
from pyrobnn.posterior import Posterior


@dataclass(frozen=True)
class _StochasticGradientMCMC(Method):
    """What the two samplers share: the run and the preconditioner."""

    num_chains: int = 4
    num_warmup: int = 2000
    step_size: float | None = None
    thinning: int = 10
    batch_size: int | None = None
    temperature: float = 1.0
    preconditioner: Literal["rmsprop"] | None = None
    init_steps: int = 1000
    compile: Compile = "auto"

    kind: ClassVar[Kind] = "chains"
    claim: ClassVar[Claim] = "approximate"
    default_draws: ClassVar[int] = 500
    points: ClassVar[Literal["free", "held"]] = "held"
    trains: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = OPTIONAL
    shares_rows: ClassVar[bool] = True
    has_momentum: ClassVar[bool]
    #: ε times the largest curvature that a chosen step size aims at; stable below 4
    share: ClassVar[float]

    def __post_init__(self) -> None:
        check_count("num_chains", self.num_chains)
        check_count("thinning", self.thinning)
        check_count(
            "num_warmup",
            self.num_warmup,
            minimum=0,
        )
        check_optional(check_count, "batch_size", self.batch_size)
        check_count(
            "init_steps",
            self.init_steps,
            minimum=0,
        )
        check_optional(
            check_number,
            "step_size",
            self.step_size,
            above=0,
        )
        check_number(
            "temperature",
            self.temperature,
            above=0,
        )
        check_optional(check_choice, "preconditioner", self.preconditioner, ("rmsprop",))
        if self.preconditioner is not None and self.num_warmup == 0:
            raise ValueError(
                "the preconditioner is learnt during warm-up and frozen after it: pass num_warmup=500 or more"
            )

    @property
    @abc.abstractmethod
    def heating(self) -> float:
        """Factor of the rise in temperature by the noise of mini-batch gradients."""

    @abc.abstractmethod
    def move(
        self,
        z: Tensor,
        v: Tensor,
        gradient: Gradient,
        setting: Setting,
    ) -> Moved:
        """One step of all chains from positions and momenta (chain, dim)."""

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        check_batch_size(problem, self.batch_size)
        check_proper(problem.density)
        check_batched(problem.density.subsampled(), type(self).__name__)
        share = problem.of_share(run.seed)
        with seeded(run.seed, problem.device):
            begun = time.perf_counter()
            if run.init is None and self.init_steps and problem.is_bnn:
                z = _find_modes(self, share, run.stages)
            else:
                z = start_chains(problem.model, problem.density, run.init, self.num_chains)
            searching = time.perf_counter() - begun
            chains = run_chains(self, share, z, run)
        lp, stopped = _log_joint_on_all_data(problem, chains)
        notes = []
        if stopped == "interrupt":
            notes.append(
                interruption(
                    self,
                    chains.z.shape[1],
                    run.num_draws,
                    "draws of each chain",
                    run.checkpoint,
                )
            )
        meta = {
            "temperature": self.temperature,
            "stopped": stopped,
            "common_start": common_start(run.init),
            "step_size": chains.step_size * problem.num_rows,
        }
        if self.has_momentum:
            meta["kinetic_temperature"] = float(chains.kinetic.mean()) / chains.z.shape[1]
        return make_posterior(
            problem,
            self,
            problem.density.constrain(chains.z),
            seed=run.seed,
            timings={
                "compile": chains.compile_seconds,
                "fit": chains.seconds,
                "start": searching,
            },
            sample_stats={"lp": lp, "step_size": torch.full_like(lp, chains.step_size)},
            history={"loss": chains.loss},
            meta=meta,
            notes=notes,
            interrupted=stopped == "interrupt",
        )

    def _num_gradients(self, num_draws: int) -> int:
        return self.num_chains * (self.num_warmup + self.thinning * num_draws)

    @property
    def _num_parallel(self) -> int:
        return self.num_chains


@register("sgld", quick={"num_draws": 200})
@dataclass(frozen=True)
class SGLD(_StochasticGradientMCMC):
    r"""Stochastic-gradient Langevin dynamics.

    .. math:: \theta \leftarrow \theta + \frac{\varepsilon}{2} G\, \nabla \log \tilde p(\theta, y)
        + \sqrt{\varepsilon T}\, G^{1/2} \xi, \qquad \varepsilon = \frac{\texttt{step\_size}}{N}, \quad \xi \sim N(0, I)

    :math:`\tilde p` scales the mini-batch's likelihood to all N data, so ``step_size`` is that of SGD on the mean loss.

    Args:
        num_chains: chains, run together in one compiled step, each with its own batches.
        num_warmup: steps before the first draw.
        step_size: :math:`\varepsilon N`; None chooses it in warm-up from the curvature and the gradient noise that the
            chains meet (:mod:`pyrobnn.inference.langevin`); ``meta`` has it.
        thinning: steps between draws.
        batch_size: data per step; None for all.
        temperature: T; any value but 1 samples a tempered posterior, and ``meta`` says so.
        preconditioner: ``"rmsprop"`` divides by the root mean square gradient of every weight (pooled over chains,
            geometric mean 1). It is frozen after warm-up, so that the correction Γ of the paper is exactly zero.
        init_steps: Adam's, from nets initialised anew to where the chains of a BNN start, if ``fit`` is given no
            ``init``; with 0 steps they start at draws from the prior.
        compile: ``"auto"`` compiles the step where the forecast in ``meta["tier"]`` says that it costs less, as of
            short fits it does not; True and False are obeyed.

    Returns, by ``fit``: draws (num_chains, num_draws, …), ``thinning`` steps apart; sample_stats ``lp`` (log joint on
    all data in unconstrained space; of a streamed loader or an interrupted run that of batches) and ``step_size``;
    ``meta`` has the ``step_size`` and, with momentum, the ``kinetic_temperature`` (1 in equilibrium). The
    chains start at draws of ``init`` (MAP, SVI, …), all alike at a trained net, or at modes found by ``init_steps`` of
    Adam (a plain program: at draws from the prior). Where inputs are all but collinear Adam does not arrive: pass
    ``init=MAP().fit(…)``. Batches of a DataLoader are shared by all chains. A net in training mode is trained so, as by
    :class:`pyrobnn.MAP`.

    Fails with FloatingPointError where a chain is no longer finite (names step, chain and step size), or does not
    conserve its energy at any step size tried.

    Caveat: there is no accept step. The draws are biased by O(step_size), most where curvature is largest: for a
    Gaussian of precision λ the full-batch variance is :math:`1 / (\lambda (1 - \varepsilon\lambda/4))`, and gradient
    noise adds to it. Halve the step size and compare.

    References:
        Bayesian Learning via Stochastic Gradient Langevin Dynamics (Welling & Teh, 2011).
        `Preconditioned SGLD (Li et al., 2016) <https://arxiv.org/abs/1512.07666>`_.

    Example:
        >>> SGLD(num_chains=2, step_size=0.02).step_size
        0.02
    """

    has_momentum: ClassVar[bool] = False
    # the variance of the stiffest direction is then 11 % too large
    share: ClassVar[float] = 0.4

    @property
    def heating(self) -> float:
        return 0.25

    def move(
        self,
        z: Tensor,
        v: Tensor,
        gradient: Gradient,
        setting: Setting,
    ) -> Moved:
        """One step of all chains, a leapfrog step whose momentum is drawn anew (``v`` is for its energy)."""
        epsilon, temperature, metric = setting
        grad, lp = gradient(z)
        kick = 0.5 * (epsilon * metric).sqrt() * grad
        noise = torch.randn_like(z)
        arriving = kinetic(v + kick)
        leaving = kinetic(temperature.sqrt() * noise)
        return Moved(
            z + 0.5 * epsilon * metric * grad + (epsilon * temperature * metric).sqrt() * noise,
            temperature.sqrt() * noise + kick,
            grad,
            lp,
            energy=arriving - lp,
            heat=leaving - arriving,
        )


@register("sghmc", quick={"num_draws": 200})
@dataclass(frozen=True)
class SGHMC(_StochasticGradientMCMC):
    r"""Stochastic-gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum.

    .. math:: v \leftarrow v + h\, \nabla \log \tilde p, \quad \theta \leftarrow \theta + \tfrac h2 v, \quad
        v \leftarrow c\, v + \sqrt{(1 - c^2) T}\, \xi, \quad \theta \leftarrow \theta + \tfrac h2 v

    with :math:`h = \sqrt{\texttt{step\_size} / N}` and :math:`c = 1 - \texttt{friction}`, the momentum of SGD. The
    order (BAOAB) leaves a Gaussian exactly invariant for full batches at every stable step size.

    Args:
        friction: share of the momentum that is replaced by noise at each step, in (0, 1].

    The other arguments are those of :class:`SGLD`.

    Caveat: there is no accept step. The noise of mini-batch gradients heats the chain by O(step_size / friction).

    References:
        `Stochastic Gradient Hamiltonian Monte Carlo (Chen et al., 2014) <https://arxiv.org/abs/1402.4102>`_.
        `Rational Construction of Stochastic Numerical Methods for Molecular Sampling (Leimkuhler & Matthews, 2013)
        <https://arxiv.org/abs/1203.5428>`_.

    Example:
        >>> SGHMC(friction=0.1).friction
        0.1
    """

    friction: float = 0.1

    has_momentum: ClassVar[bool] = True
    # exact on a Gaussian at any stable step; a quarter of the longest leaves room for curvature that changes
    share: ClassVar[float] = 0.25

    @property
    def heating(self) -> float:
        keep = (1.0 - self.friction) ** 2
        return max(keep / (1.0 - keep), 0.25)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(
            "friction",
            self.friction,
            above=0,
            maximum=1,
        )

    def move(
        self,
        z: Tensor,
        v: Tensor,
        gradient: Gradient,
        setting: Setting,
    ) -> Moved:
        epsilon, temperature, metric = setting
        grad, lp = gradient(z)
        # with the metric as inverse mass the velocity is metric * momentum; v is the momentum in units of its own scale
        drift = epsilon.sqrt() * metric.sqrt()
        keep = 1.0 - self.friction
        energy = kinetic(v + 0.5 * drift * grad) - lp
        v = v + drift * grad
        z = z + 0.5 * drift * v
        before = kinetic(v)
        v = keep * v + (temperature * (1.0 - keep**2)).sqrt() * torch.randn_like(v)
        return Moved(
            z + 0.5 * drift * v,
            v,
            grad,
            lp,
            energy,
            heat=kinetic(v) - before,
        )


def _log_joint_on_all_data(problem: Problem, chains: Run) -> tuple[Tensor, str]:
    """Log joint of every draw, and why the run ended: of batches where there is a loader, or after Ctrl-C."""
    if chains.stopped == "interrupt" or problem.loader is not None:
        return chains.lp, chains.stopped
    try:
        z = chains.z.flatten(0, 1)
        with torch.no_grad():
            log_joint = at_each(problem.density.log_joint, z, at_once=32)
        return log_joint.unflatten(0, chains.z.shape[:2]), chains.stopped
    except KeyboardInterrupt:
        return chains.lp, "interrupt"


def _find_modes(
    config: _StochasticGradientMCMC,
    problem: Problem,
    stages: Stages,
) -> Tensor:
    """Starting points (num_chains, dim) near modes: nets initialised anew, trained together by Adam.

    For two thirds of ``init_steps`` the likelihood's own parameters stay.
    """
    density = problem.density.subsampled()
    num_steps = config.init_steps
    seeds = torch.randint(2**31, (config.num_chains,)).tolist()
    start = torch.stack(
        [density.initial(problem.bnn.reinitialized(seed).initial_values(), seed) for seed in seeds]
    )
    switch = num_steps - num_steps // 3
    free = torch.arange(num_steps + 1, device=start.device) >= switch
    optimizer = Optimizer(schedule=_cosines(num_steps, switch))
    batches = problem.batches(config.batch_size)
    result = minimize(
        _losses_from(start, density, problem.num_rows),
        start,
        batches,
        Training(num_steps, 0.01, optimizer, config.compile),
        leading=lambda step: (free[step],),
        stage=stages.begin(batches),
        name=f"the start of {type(config).__name__}",
    )
    if result.stopped == "interrupt":  # before the first draw
        raise KeyboardInterrupt
    return result.params


def _losses_from(start: Tensor, density: Density, num_rows: int) -> Callable[..., Tensor]:
    r"""(thetas, whether all is free, \*batch) → losses by datum; else the weights move alone, from ``start``."""
    weights = torch.zeros(
        density.dim,
        dtype=torch.bool,
        device=start.device,
    )
    for site in density.sites:
        weights[site.start : site.stop] = site.name.startswith(NET)

    def loss(
        theta: Tensor,
        still: Tensor,
        free: Tensor,
        *batch: Tensor,
    ) -> Tensor:
        point = torch.where(weights | free, theta, still)
        return -density.log_joint(point, *batch) / num_rows

    def losses(thetas: Tensor, *batch: Tensor) -> Tensor:
        return torch.func.vmap(
            loss,
            in_dims=(0, 0, *(None for _ in batch)),
            randomness="error" if density.stochastic is None else "different",
        )(thetas, start, *batch)

    return losses


def _cosines(num_steps: int, switch: int) -> Callable[[int], float]:
    """A schedule that falls from one to zero before the step ``switch``, and again after it."""

    def factor(step: int) -> float:
        begun = 0
        length = switch
        if step >= switch:
            begun = switch
            length = num_steps - switch
        return 0.5 * (1.0 + math.cos(math.pi * (step - begun) / length))

    return factor
