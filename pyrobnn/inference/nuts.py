"""NUTS and plain HMC: configuration, starts and fit; arithmetic in ``hmc.machine``, the host's loop in ``hmc.run``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from pyrobnn.core.checks import (
    Refused,
    check_choice,
    check_count,
    check_number,
    check_optional,
)
from pyrobnn.core.findings import Finding
from pyrobnn.core.memory import require
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.floats import PrecisionLoss, full_float32, inspector
from pyrobnn.inference.fitting.initial import common_start, start_chains
from pyrobnn.inference.fitting.problem import (
    Problem,
    interruption,
    launches,
    make_posterior,
    prepare,
)
from pyrobnn.inference.fitting.program import check_proper, refuse_subsampling
from pyrobnn.inference.hmc import checkpoint as checkpoints
from pyrobnn.inference.hmc import pyro_engine
from pyrobnn.inference.hmc.hooks import (
    MOST_DRAWS,
    Convergence,
    Hooks,
    check_convergence,
    run_findings,
    with_reasons,
)
from pyrobnn.inference.hmc.machine import MAX_ENERGY_ERROR, Machine
from pyrobnn.inference.hmc.metric import form_of
from pyrobnn.inference.hmc.run import Draws, Run, named_stats
from pyrobnn.inference.hmc.windows import STATS, kept_in_warmup
from pyrobnn.inference.method import OPTIONAL, Claim, FitRun, Kind, Method, register
from pyrobnn.model import BNN, Density
from pyrobnn.model.gradient import Gradient, batched_gradient
from pyrobnn.model.handlers import RADIUS
from pyrobnn.posterior import Posterior

#: twice the length past which no measured case got cheaper, and up to which it goes on where it is not finished: Stan's
DEFAULT_WARMUP = 200
MOST_WARMUP = 1000


@register(
    "nuts",
    standard=True,
    quick={
        "num_warmup": 150,
        "num_draws": 150,
        "max_tree_depth": 6,
    },
)
@dataclass(frozen=True)
class NUTS(Method):
    r"""The No-U-Turn Sampler: draws from the exact posterior, every chain in one compiled step.

    Hamiltonian dynamics of :math:`H(z, r) = -\log p(z, y) + \tfrac12 r^\top M^{-1} r` propose distant points; a
    trajectory ends where it turns back, and its points are drawn with weights :math:`e^{-H}`. During warm-up every
    chain first has a step size of its own, to leave a steep start; then step size and mass matrix are adapted, pooled
    over chains, and frozen.

    Args:
        num_chains: chains; they share each gradient call, so more cost less than proportionally.
        num_warmup: transitions of warm-up, on average over chains. None takes 200, and up to 1000 where it is not
            finished (chains that stand still or disagree, a density that rises); a number is kept to, with a warning.
        step_size: the first step size; None finds one.
        target_accept: acceptance rate aimed at; raise it towards 1 when there are divergences.
        max_tree_depth: at most 2^max_tree_depth leapfrogs per draw.
        mass_matrix: ``"diag"``; ``"dense"``; ``"auto"``: dense for a program of at most 100 values, else diag.
        trajectory: None for NUTS; a number of leapfrogs for plain HMC with paths of that length.
        engine: ``"compiled"``, or ``"pyro"`` for Pyro's own kernel, the reference: one chain after the other.
        compile: compile the step; False gives the same draws within float tolerance, slower.
        checkpoint_every: seconds between checkpoints.
        until: ``"converged"`` ends the run as soon as R-hat is at most 1.01 for every identified quantity (function
            values, sites, log density) and their effective sample size, bulk and tail, is 400; num_draws is then the
            most that are drawn of each chain, 10,000 by default. Where that is spent first the fit says so.
        max_seconds: and the seconds after which it waits for no more than a draw of each chain; a compile is given up
            at half of them, the warm-up at half of what is then left, and the fit says so. None for no bound.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: draws (num_chains, num_draws, …), 1000 of each chain by default (with ``until`` at most 10,000)
    and ``sample_stats`` lp (unconstrained space, nats), energy, diverging, tree_depth, n_steps, acceptance_rate,
    step_size, each (num_chains, num_draws). ``history["warmup_metric"]`` is A, with :math:`A A^\top` the inverse mass
    matrix in unconstrained space: (dim,) its diagonal, or (dim · dim,) its rows. The chains start at draws of
    ``fit(init=…)`` (its spread is the first mass matrix), or around a net; by default those of a net at draws from the
    prior, those of a program uniform on (-2, 2) in unconstrained space, as in Stan: vague priors draw far from the
    mass. Callbacks receive the number of steps and phase, step_size, tree_depth, divergences and draws (of the slowest
    chain in this phase); True stops, once there is a draw. Ctrl-C in the warm-up returns nothing, but writes the
    ``checkpoint`` from which the same fit goes on.

    Refused: a program that subsamples, or has latent values without a density; too little memory; no start with a
    finite density; a checkpoint that is damaged or of another run.

    Caveat: exact only once it has converged, and a Bayesian network's posterior has many modes: look at R-hat of the
    function values (``pyrobnn.diagnose``), not of the weights. Chains in modes of their own are not weighted by the
    modes' mass: use SMC's own draws there. Point parameters (a learned noise scale) are held.

    References:
        *The No-U-Turn Sampler* (Hoffman & Gelman, 2014), https://arxiv.org/abs/1111.4246
        *A Conceptual Introduction to Hamiltonian Monte Carlo* (Betancourt, 2017), https://arxiv.org/abs/1701.02434

    Example:
        >>> import pyro, pyro.distributions as dist, pyrobnn as pb, torch
        >>> def program(x, y):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)
        >>> nuts = pb.NUTS(num_chains=2, num_warmup=50, compile=False)
        >>> posterior = nuts.fit(program, None, torch.ones(3), num_draws=20)
        >>> posterior.draws["mean"].shape
        torch.Size([2, 20])
    """

    num_chains: int = 4
    num_warmup: int | None = None
    step_size: float | None = None
    target_accept: float = 0.8
    max_tree_depth: int = 10
    mass_matrix: Literal["auto", "diag", "dense"] = "auto"
    trajectory: int | None = None
    engine: Literal["compiled", "pyro"] = "compiled"
    compile: bool = True
    checkpoint_every: float = 60.0
    until: Literal["converged"] | None = None
    max_seconds: float | None = None

    kind: ClassVar[Kind] = "chains"
    claim: ClassVar[Claim] = "exact"
    points: ClassVar[Literal["free", "held"]] = "held"
    gathers: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = OPTIONAL

    def __post_init__(self) -> None:
        check_count("num_chains", self.num_chains)
        check_optional(
            check_count,
            "num_warmup",
            self.num_warmup,
            minimum=0,
        )
        check_optional(
            check_number,
            "step_size",
            self.step_size,
            above=0.0,
        )
        check_number(
            "target_accept",
            self.target_accept,
            above=0.0,
            below=1.0,
        )
        check_count("max_tree_depth", self.max_tree_depth)
        check_choice("mass_matrix", self.mass_matrix, ("auto", "diag", "dense"))
        check_optional(check_count, "trajectory", self.trajectory)
        check_choice("engine", self.engine, ("compiled", "pyro"))
        check_number(
            "checkpoint_every",
            self.checkpoint_every,
            minimum=0.0,
        )
        check_optional(
            check_number,
            "max_seconds",
            self.max_seconds,
            above=0.0,
        )
        check_optional(check_choice, "until", self.until, ("converged",))
        if self.max_seconds is not None and self.until is None:
            raise ValueError(
                "'max_seconds' bounds a run with until='converged': set it, or leave it out"
            )
        if self.until is not None:
            if self.engine == "pyro":
                raise ValueError("until='converged' needs engine='compiled': leave out engine")
            if self.num_chains < 2:
                raise ValueError(
                    "until='converged' compares chains, got num_chains=1: use at least 2"
                )
            object.__setattr__(self, "default_draws", MOST_DRAWS)

    @property
    def _first_warmup(self) -> int:
        """Transitions of the warm-up as planned."""
        return DEFAULT_WARMUP if self.num_warmup is None else self.num_warmup

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> tuple[Problem, FitRun]:
        """The problem, its point parameters held where ``init`` has them."""
        if self.engine == "pyro" and (run.checkpoint is not None or run.callbacks):
            raise ValueError("'callbacks' and 'checkpoint' need engine='compiled': leave them out")
        model, x, y = run.given
        if not isinstance(model, BNN):
            density = prepare(
                model,
                x,
                y,
                points="free",
                device=device,
                check_derivative=False,
            ).density
            refuse_subsampling(density, "NUTS")
            check_proper(density)
        return super()._prepare(run, device)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        density = problem.density
        form = form_of(self.mass_matrix, problem.is_bnn, density.dim)
        self._check_memory(problem, run.num_draws, form)
        started = time.perf_counter()
        reason = ""
        if not problem.is_bnn and isinstance(run.init, Posterior) and run.init.meta.get("float64"):
            problem = problem.in_double()
            reason = "the posterior that it starts from is one of float64"
        with full_float32(problem.device):
            result, stopped = self._sampled(problem, density, form, run)
        result = result._replace(float64_reason=result.float64_reason or reason)
        seconds = time.perf_counter() - started - result.compile_seconds
        if result.float64_reason:
            problem = problem.in_double()
        draws = problem.density.constrain(result.z)
        convergence = None
        if self.until is not None:
            convergence = check_convergence(problem, draws, result.stats)
            if convergence.enough and stopped == "num_draws":
                stopped = "converged"
        meta = {
            "num_warmup": result.num_warmup,
            "num_gradients": result.num_gradients,
            "stopped": stopped,
            "mass_matrix": form,
            "common_start": common_start(run.init),
        }
        if result.float64_reason:
            meta["float64"] = result.float64_reason
        if convergence is not None:
            meta["convergence"] = convergence._asdict()
        notes = self._notes(problem, run, result)
        if convergence is not None and not convergence.enough:
            notes.append(self._not_converged(convergence, stopped))
        notes += with_reasons(run_findings(problem, draws, result, self), density, result)
        return make_posterior(
            problem,
            self,
            draws,
            seed=run.seed,
            timings={"compile": result.compile_seconds, "fit": seconds},
            sample_stats=named_stats(result.stats),
            history=result.history,
            meta=meta,
            notes=notes,
            interrupted=result.interrupted,
        )

    def _check_memory(self, problem: Problem, num_draws: int, form: str) -> None:
        """Refused where the run does not fit into memory."""
        density = problem.density
        remedies = "lower num_draws or num_chains"
        if form == "dense":
            remedies += ", or use mass_matrix='diag'"
        size = f"{self.num_chains} chains × {num_draws} draws × {density.dim} parameters"
        needed = self._needed_bytes(density.dim, density.dtype, num_draws, form)
        require(needed, problem.device, f"a run of {size}", remedies)

    def _notes(
        self,
        problem: Problem,
        run: FitRun,
        result: Draws,
    ) -> list[Finding]:
        """How the run went otherwise than asked for: its floats, its end, its compiling."""
        notes: list[Finding] = []
        if result.float64_reason:
            notes.append(Finding("float64_run", {"reason": result.float64_reason}))
        if result.interrupted:
            notes.append(self._interruption(result.stats, run))
        if self.compile and result.mode != "inductor" and self.engine == "compiled":
            failed = "compiled" if result.mode in ("graph", "eager") else result.mode
            notes += launches(problem.device, f"the step could not be {failed}")
        return notes

    def _not_converged(self, convergence: Convergence, stopped: str) -> Finding:
        reached = convergence._asdict()
        return Finding(
            "not_converged",
            {
                **reached,
                "stopped": stopped,
                "seconds": self.max_seconds,
            },
        )

    def _sampled(
        self,
        problem: Problem,
        density: Density,
        form: str,
        run: FitRun,
    ) -> tuple[Draws, str]:
        """The run of either engine and why it ended."""
        z, scale = starts(problem, run.init, run.seed, self.num_chains)
        if self.engine == "compiled":
            return self._by_machine(problem, z, scale, form, run)
        dense = form == "dense"
        result = pyro_engine.sample(density.log_joint, z, dense, self._first_warmup, self, run)
        return result, "interrupt" if result.interrupted else "num_draws"

    def _by_machine(
        self,
        problem: Problem,
        z: Tensor,
        scale: Tensor | None,
        form: str,
        run: FitRun,
    ) -> tuple[Draws, str]:
        """The run and why it ended; begun again in float64 where float32 cannot hold it."""
        reason = ""
        earlier, save = self._checkpoint(problem, run)
        if earlier is not None and earlier["vectors"].dtype != z.dtype:
            problem = problem.in_double()
            z = z.double()
            reason = "the run that it goes on from was in float64"
        hooks = Hooks(problem, run, self._first_warmup, self)
        with torch.no_grad(), hooks.watch:
            chains = self._chains(problem, z, form, run)
            if earlier is None:
                chains.begin(z, scale)
            else:
                chains.restore(earlier)
            try:
                result = chains.sample(
                    run.num_draws,
                    look=hooks.look,
                    enough=hooks.enough,
                    save=save,
                )
            except PrecisionLoss as loss:
                coarse = chains
                z = loss.z.double()
                problem = problem.in_double()
                reason = f"float32 was too coarse for the positions: {loss}"
                hooks.begin_again(problem, reason)
                chains = self._chains(problem, z, form, run)
                chains.begin(z)
                result = chains.sample(
                    run.num_draws,
                    look=hooks.look,
                    enough=hooks.enough,
                    save=save,
                )
                result = result._replace(
                    num_gradients=result.num_gradients + coarse.total_steps * self.num_chains,
                    compile_seconds=result.compile_seconds + coarse.compile_seconds,
                )
            stopped = hooks.end(result)
        return result._replace(float64_reason=reason), stopped

    def _checkpoint(
        self, problem: Problem, run: FitRun
    ) -> tuple[dict[str, Tensor] | None, tuple[str | Path, str, float] | None]:
        """The run to go on from, where there is one, and where, as what and how often to save this one."""
        if run.checkpoint is None:
            return None, None
        fingerprint = checkpoints.run_fingerprint(self, problem, run)
        earlier = checkpoints.read(run.checkpoint, fingerprint)
        return earlier, (run.checkpoint, fingerprint, self.checkpoint_every)

    def _chains(
        self,
        problem: Problem,
        z: Tensor,
        form: str,
        run: FitRun,
    ) -> Run:
        """The run of chains that will begin at ``z`` (chain, dim), in its dtype."""
        density = problem.density
        gradient, why = batched_gradient(density.log_joint, z)
        if why:
            problem.note(Finding("unbatched_chains", {"why": why}))
        return Run(
            self.machine(gradient, z, self._num_slots(density.dim, run.num_draws)),
            seed=run.seed,
            num_warmup=self._first_warmup,
            max_warmup=MOST_WARMUP if self.num_warmup is None else None,
            names=None if problem.is_bnn else density.site_of,
            inspect=None if problem.is_bnn else inspector(density),
            mass_matrix=form,
            step_size=self.step_size,
            compile=self.compile and not why,
            compile_within=None if self.max_seconds is None else 0.5 * self.max_seconds,
        )

    def machine(
        self,
        gradient: Gradient,
        z: Tensor,
        num_slots: int,
    ) -> Machine:
        """The transition of chains that begin at ``z`` (chain, dim) and keep ``num_slots`` draws each."""
        limits = self.max_tree_depth, self.trajectory, self.target_accept
        return Machine(gradient, len(z), z.shape[1], num_slots, z.dtype, z.device, *limits)

    def _interruption(self, stats: Tensor, run: FitRun) -> Finding:
        """How far Ctrl-C let the run come; Pyro's engine runs one chain after the other."""
        chains, draws = stats.shape[:2]
        if draws == run.num_draws and chains < self.num_chains:
            return interruption(self, chains, self.num_chains, "chains")
        owner = "each chain"
        if chains != self.num_chains:
            owner = f"the first of {self.num_chains} chains"
        return interruption(self, draws, run.num_draws, f"draws of {owner}", run.checkpoint)

    def _num_slots(self, dim: int, num_draws: int) -> int:
        """Draws per chain that the machine holds: all of them, or those of a warm-up window."""
        longest = MOST_WARMUP if self.num_warmup is None else self.num_warmup
        return max(num_draws, kept_in_warmup(longest, self.num_chains, dim))

    def _needed_bytes(
        self,
        dim: int,
        dtype: torch.dtype,
        num_draws: int,
        form: str,
    ) -> int:
        """Bytes of a run's static buffers and of the copies on the way to the posterior."""
        slots = self._num_slots(dim, num_draws) + 1
        levels = 2 * (Machine.num_latest + self.max_tree_depth + 1)
        # three copies: the draws, without the whitening, and by site
        per_chain = dim * dtype.itemsize * (3 * slots + levels + 24) + slots * 8 * len(STATS)
        metric = 3 * dim * dim * dtype.itemsize if form == "dense" else 0
        return self.num_chains * per_chain + metric


def starts(
    problem: Problem,
    init: Posterior | nn.Module | None,
    seed: int,
    num_chains: int,
) -> tuple[Tensor, Tensor | None]:
    """Positions (chain, dim) with finite density and gradient; the first whitening scale if ``init`` has one.

    Chains of one draw each are starts as they are: they say nothing of the scale.
    """
    density = problem.density
    uniform = not problem.is_bnn
    scale = None
    with seeded(seed, problem.device):
        if init is None:
            z = _drawn(density, num_chains, uniform)
        else:
            z = start_chains(problem.model, density, init, num_chains)
            if not _are_starts(init):
                scale = _spread(density, init)
                if scale is None:
                    # around one point: apart, so that R-hat has something to judge
                    z = z + 0.1 * torch.randn_like(z)
        # the box shrinks, for a density that is finite near zero alone; every second try is from the prior
        tries = (_drawn(density, num_chains, uniform != bool(i % 2), 0.9**i) for i in range(100))
        z = finite_starts(problem, z, tries)
    return z.detach().contiguous(), scale


def _are_starts(init: Posterior | nn.Module) -> bool:
    """Whether it holds chains of one draw each."""
    if not isinstance(init, Posterior):
        return False
    return init.num_draws == 1 and init.meta.get("kind") == "chains"


def _spread(density: Density, init: Posterior | nn.Module) -> Tensor | None:
    """The sd (dim,) of an earlier posterior's draws in unconstrained space; None where there is one point."""
    if not isinstance(init, Posterior) or init.num_chains * init.num_draws == 1:
        return None
    draws = {site.name: init.draws[site.name].flatten(0, 1) for site in density.sites}
    return density.unconstrain(draws).std(0).clamp(min=1e-6)


def _drawn(
    density: Density,
    num: int,
    uniform: bool,
    shrink: float = 1.0,
) -> Tensor:
    """Starts (num, dim) from the box or from the prior, by torch's present random state."""
    seed = int(torch.randint(2**31, ()))
    if uniform:
        return density.sample_box(num, seed, shrink * RADIUS)
    return density.sample_prior(num, seed)


@torch.no_grad()
def finite_starts(problem: Problem, z: Tensor, tries: Iterable[Tensor]) -> Tensor:
    """The starts ``z`` (chain, dim), those from which a chain cannot move replaced by others of ``tries``.

    A start has a finite density and a finite gradient, not zero everywhere, as on a plateau.
    A log density so low that its rounding exceeds the energy error that ends a trajectory lets it go nowhere: of such
    starts the best is kept. Refused where no start of a chain is finite.
    """
    gradients, _ = batched_gradient(problem.density.log_joint, z)
    lowest = -MAX_ENERGY_ERROR / torch.finfo(z.dtype).eps
    todo = torch.arange(len(z), device=z.device)
    chosen = z.clone()
    best = torch.full(
        (len(z),),
        -torch.inf,
        dtype=torch.float64,
        device=z.device,
    )
    for draws in itertools.chain([z], tries):
        gradient, value = gradients(draws[todo])
        finite = value.isfinite() & gradient.isfinite().all(1)
        moves = finite & (value >= lowest) & (gradient != 0).any(1)
        better = moves | (finite & (value > best[todo]))
        best[todo[better]] = value[better]
        chosen[todo[better]] = draws[todo[better]]
        todo = todo[~moves]
        if not len(todo):
            return chosen
    if bool((best == -torch.inf).any()):
        worst = z[int(best.argmin())]
        gradient, value = torch.func.grad_and_value(problem.density.log_joint)(worst)
        raise Refused(_why_no_start(problem, worst, gradient, value))
    # a plateau everywhere has no better start, nor has a density that is low everywhere
    return chosen


def _why_no_start(
    problem: Problem,
    z: Tensor,
    gradient: Tensor,
    value: Tensor,
) -> str:
    """Which site is to blame that no start has a finite density."""
    density = problem.density
    bad = (~torch.isfinite(gradient)).nonzero()
    places = density.impossible(z)
    if places:
        return (
            f"no start with a finite density in 100 draws: {places[0]}. Check how the program computes it, or pass "
            "fit(init=...) with a posterior that has a finite density"
        )
    names = [*density.observed]
    if bool(torch.isfinite(density.log_parts(z)[1])):
        names = [site.name for site in density.sites]
        if len(bad):
            names = [density.site_of(int(bad[0]))]
    where = f"the site {', '.join(map(repr, names))}"
    return (
        f"no start with a finite density in 100 draws: the log density is {float(value):g}, because of "
        f"{where}. Check its support and scale, or pass fit(init=...) with a posterior that has a finite density"
    )
