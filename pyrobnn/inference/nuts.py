"""NUTS and plain HMC: configuration, starts and fit; arithmetic in ``hmc.machine``, the host's loop in ``hmc.run``."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, check_choice, check_count, check_number, check_optional
from pyrobnn.core.findings import Finding
from pyrobnn.core.memory import require
from pyrobnn.inference.fitting import checkpoints
from pyrobnn.inference.fitting.batches import density_of_share
from pyrobnn.inference.fitting.floats import PrecisionLoss, full_float32, inspector
from pyrobnn.inference.fitting.initial import common_start
from pyrobnn.inference.fitting.problem import (
    Problem,
    interruption,
    launches,
    make_posterior,
    prepare,
)
from pyrobnn.inference.fitting.program import check_proper, refuse_subsampling
from pyrobnn.inference.fitting.shares import SharedLoader, Shares
from pyrobnn.inference.hmc import pyro_engine
from pyrobnn.inference.hmc.chain_convergence import Convergence, check_convergence, judged_net
from pyrobnn.inference.hmc.checkpoint import Saving
from pyrobnn.inference.hmc.hooks import MOST_DRAWS, Hooks
from pyrobnn.inference.hmc.machine import Machine
from pyrobnn.inference.hmc.metric import Form, form_of
from pyrobnn.inference.hmc.run import LEAPFROGS, Draws, Run, named_stats
from pyrobnn.inference.hmc.run_findings import run_findings, with_reasons
from pyrobnn.inference.hmc.starts import Starts, chain_starts_of
from pyrobnn.inference.hmc.windows import STATS, kept_in_warmup
from pyrobnn.inference.method import OPTIONAL, Claim, FitRun, Kind, Method, register
from pyrobnn.model import BNN, Density
from pyrobnn.model.compile import compiled
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.model.density import Program
from pyrobnn.model.gradient import Gradient, batched_gradient, is_untraceable
from pyrobnn.model.padding import padded
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
        target_accept: acceptance rate aimed at. With num_warmup=None the first draws are on trial: where more diverge
            than by chance they count as warm-up, which goes on with half or a quarter of the rejections, up to 0.99.
            ``meta["adapted"]`` has each such trial: divergences, transitions and the target from then on.
        max_tree_depth: at most 2^max_tree_depth leapfrogs per draw.
        mass_matrix: ``"diag"``; ``"dense"``; ``"auto"``: dense for a program of at most 100 values, else diag.
        trajectory: None for NUTS; a number of leapfrogs for plain HMC with paths of that length.
        engine: ``"compiled"``, or ``"pyro"`` for Pyro's own kernel, the reference: one chain after the other.
        compile: ``"auto"`` compiles the step where the forecast in ``meta["tier"]`` says that it costs less, as of
            short fits it does not; True and False are obeyed.
        checkpoint_every: seconds between checkpoints.
        until: ``"converged"`` ends the run as soon as R-hat is at most 1.01 for every identified quantity (function
            values, sites, log density) and their effective sample size, bulk and tail, is 400; num_draws is then the
            most that are drawn of each chain, 10,000 by default. Where that is spent first the fit says so.
        max_seconds: and the seconds after which it waits for no more than a draw of each chain; a compile is given up
            at half of them, the warm-up at half of what is then left, and the fit says so. None for no bound.
        capacity: rows that the step has room for: the data are filled up, by rows of weight zero, to a multiple of it,
            so that tables of 1 to ``capacity`` rows share one compile. None compiles for the rows there are. Refused
            where the density is not one of rows that can be filled up.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: draws (num_chains, num_draws, …), 1000 of each chain by default (with ``until`` at most 10,000)
    and ``sample_stats`` lp (unconstrained space, nats), energy, diverging, tree_depth, n_steps, acceptance_rate,
    step_size, each (num_chains, num_draws). ``history["warmup_metric"]`` is A, with :math:`A A^\top` the inverse mass
    matrix in unconstrained space: (dim,) its diagonal, or (dim · dim,) its rows. The chains start at draws of
    ``fit(init=…)`` (its spread is the first mass matrix), or around a net; by default those of a net at draws from the
    prior, those of a program uniform on (-2, 2) in unconstrained space, as in Stan: vague priors draw far from the
    mass. Callbacks receive the number of steps and phase, step_size, tree_depth, divergences and draws (of the slowest
    chain; in the warm-up its transitions so far, on average); True stops, once there is a draw. Ctrl-C in the warm-up
    returns nothing, but writes the ``checkpoint`` from which the same fit goes on.

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
    compile: Compile = "auto"
    checkpoint_every: float = 60.0
    until: Literal["converged"] | None = None
    max_seconds: float | None = None
    capacity: int | None = None

    kind: ClassVar[Kind] = "chains"
    claim: ClassVar[Claim] = "exact"
    points: ClassVar[Literal["free", "held"]] = "held"
    gathers: ClassVar[bool] = True
    shares_rows: ClassVar[bool] = True
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
        check_optional(check_count, "capacity", self.capacity)
        if self.capacity is not None and self.engine == "pyro":
            raise ValueError("'capacity' is of compiled steps, engine='compiled': leave it out")
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

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> Problem:
        """The problem, its point parameters held where ``init`` has them."""
        if self.engine == "pyro" and (run.checkpoint is not None or run.callbacks):
            raise ValueError("'callbacks' and 'checkpoint' need engine='compiled': leave them out")
        model, x, y = run.given
        if isinstance(x, SharedLoader):
            self._check_shared(model)
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

    def _check_shared(self, model: BNN | Program) -> None:
        """Refuse what ranks that share rows cannot do."""
        if not isinstance(model, BNN):
            raise Refused(
                "NUTS shares the rows of a net over ranks, not those of a Pyro program: pass a DataLoader that gives "
                "all rows on every rank, whose chains are shared"
            )
        if self.engine == "pyro" or self.capacity is not None:
            raise Refused(
                "rows are shared over ranks with engine='compiled' and without capacity: leave them out"
            )

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        # in the program's own floats, for the memory and what is said of the run; the density that `problem` holds may
        # become one of float64 below, and makes the start and the draws then
        density = problem.density
        form = form_of(self.mass_matrix, problem.is_bnn, density.dim)
        self._check_memory(density, run.num_draws, form)
        started = time.perf_counter()
        reason = _why_float64(problem, run)
        if reason:
            problem = problem.in_double()
        with full_float32(problem.device):
            result, stopped = self._sampled(problem, density, form, run)
        result = result._replace(float64_reason=result.float64_reason or reason)
        seconds = time.perf_counter() - started - result.compile_seconds
        if result.float64_reason:
            problem = problem.in_double()
        draws = problem.density.constrain(result.z)
        net = judged_net(problem)
        convergence = None
        if self.until is not None:
            convergence = check_convergence(net, draws, result.stats)
            if convergence.enough and stopped == "num_draws":
                stopped = "converged"
        findings = run_findings(
            net,
            draws,
            result,
            self,
            judged=convergence is not None,
        )
        notes = [
            *self._notes(problem.device, run, result),
            *self._not_converged(convergence, stopped),
            *with_reasons(findings, density, result),
        ]
        return make_posterior(
            problem,
            self,
            draws,
            seed=run.seed,
            timings={"compile": result.compile_seconds, "fit": seconds},
            sample_stats=named_stats(result.stats),
            history=result.history,
            meta=_meta(result, stopped, form, run, convergence),
            notes=notes,
            interrupted=result.interrupted,
        )

    def _check_memory(
        self,
        density: Density,
        num_draws: int,
        form: Form,
    ) -> None:
        """Refused where the run does not fit into memory."""
        remedies = "lower num_draws or num_chains"
        if form == "dense":
            remedies += ", or use mass_matrix='diag'"
        size = f"{self.num_chains} chains × {num_draws} draws × {density.dim} parameters"
        needed = self._needed_bytes(density.dim, density.dtype, num_draws, form)
        require(needed, density.device, f"a run of {size}", remedies)

    def _notes(
        self,
        device: torch.device,
        run: FitRun,
        result: Draws,
    ) -> list[Finding]:
        """How the run went otherwise than asked for: its floats, its end, its compiling."""
        notes: list[Finding] = []
        if result.float64_reason:
            notes.append(Finding("float64_run", {"reason": result.float64_reason}))
        if result.interrupted:
            notes.append(self._interruption(result.stats, run))
        if self.compile is True and result.mode != "inductor" and self.engine == "compiled":
            failed = "compiled" if result.mode in ("graph", "eager") else result.mode
            notes += launches(device, f"the step could not be {failed}")
        return notes

    def _not_converged(self, convergence: Convergence | None, stopped: str) -> list[Finding]:
        """That a run which waited for convergence has ended without it."""
        if convergence is None or convergence.enough:
            return []
        values = {
            **convergence._asdict(),
            "stopped": stopped,
            "seconds": self.max_seconds,
        }
        return [Finding("not_converged", values)]

    def _sampled(
        self,
        problem: Problem,
        density: Density,
        form: Form,
        run: FitRun,
    ) -> tuple[Draws, str]:
        """The run of either engine and why it ended."""
        start = chain_starts_of(problem.model, problem.density, run.init, run.seed, self.num_chains)
        if self.engine == "compiled":
            return self._by_machine(problem, start, form, run)
        dense = form == "dense"
        result = pyro_engine.sample(
            density.log_joint,
            start.z,
            dense,
            self._first_warmup,
            self,
            run,
        )
        return result, "interrupt" if result.interrupted else "num_draws"

    def _by_machine(
        self,
        problem: Problem,
        start: Starts,
        form: Form,
        run: FitRun,
    ) -> tuple[Draws, str]:
        """The run and why it ended; begun again in float64 where float32 cannot hold it."""
        reason = ""
        z = start.z
        earlier, save = self._checkpoint(problem, run)
        if earlier is not None and earlier["vectors"].dtype != z.dtype:
            problem = problem.in_double()
            z = z.double()
            reason = "the run that it goes on from was in float64"
        hooks = Hooks(problem, run, self._first_warmup, self, _shares_of(problem, run))
        sampled = partial(
            Run.sample,
            num_draws=run.num_draws,
            look=hooks.look,
            pause=hooks.pause,
            enough=hooks.enough,
            save=save,
        )
        with torch.no_grad(), hooks.watch:
            first = self._run(problem, z, form, run)
            chains = first.begin(z, start.scale) if earlier is None else first.restore(earlier)
            stepper = first.prepare(chains, hooks.watch.say)
            try:
                result = sampled(first, chains, stepper)
            except PrecisionLoss as loss:
                reason = f"float32 was too coarse for the positions: {loss}"
                problem = problem.in_double()
                hooks.begin_again(problem, reason)
                z = loss.z.double()
                second = self._run(problem, z, form, run)
                chains = second.begin(z)
                result = sampled(second, chains, second.prepare(chains, hooks.watch.say))
                result = result._replace(
                    num_gradients=result.num_gradients + loss.total_steps * self.num_chains,
                    compile_seconds=result.compile_seconds + stepper.seconds,
                )
            stopped = hooks.end(result)
        return result._replace(float64_reason=reason), stopped

    def _checkpoint(
        self, problem: Problem, run: FitRun
    ) -> tuple[dict[str, Tensor] | None, Saving | None]:
        """The run to go on from, where there is one, and where, as what and how often to save this one."""
        if run.checkpoint is None:
            return None, None
        fingerprint = checkpoints.run_fingerprint(self, problem, run)
        earlier = checkpoints.read(run.checkpoint, fingerprint)
        shares = _shares_of(problem, run)
        if shares is not None and shares.ranks.rank > 0:
            return earlier, None
        return earlier, Saving(run.checkpoint, fingerprint, self.checkpoint_every)

    def _run(
        self,
        problem: Problem,
        z: Tensor,
        form: Form,
        run: FitRun,
    ) -> Run:
        """The run of chains that will begin at ``z`` (chain, dim), in its dtype."""
        density = problem.density
        if self.capacity is not None:
            density = padded(density, self.capacity, z)
        shares = _shares_of(problem, run)
        if shares is not None:
            density = density_of_share(density, shares.ranks)
        # code that serves for several numbers of rows has them as arguments
        if self.capacity is None:
            density = density.in_fewer_operations(z)
        gradient, why = batched_gradient(density.log_joint, z)
        if why:
            problem.note(Finding("unbatched_chains", {"why": why}))
        num_slots = self._num_slots(density.dim, run.num_draws)
        machine = self.machine(gradient, z, num_slots)
        if shares is not None:
            local = compiled(
                gradient,
                z,
                enabled=False if is_untraceable(why) else self.compile,
                calls=LEAPFROGS * (self._first_warmup + num_slots),
                name="the gradient",
            )
            machine = replace(
                machine,
                gradient=cast(Gradient, shares.across(local)),
                traceable=False,
            )
        return Run(
            machine=machine,
            seed=run.seed,
            num_warmup=self._first_warmup,
            max_warmup=MOST_WARMUP if self.num_warmup is None else None,
            names=None if problem.is_bnn else density.site_of,
            inspect=None if problem.is_bnn else inspector(density),
            mass_matrix=form,
            step_size=self.step_size,
            on_trial=self.num_warmup is None,
            compile=False if is_untraceable(why) else self.compile,
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
        form: Form,
    ) -> int:
        """Bytes of a run's static buffers and of the copies on the way to the posterior."""
        slots = self._num_slots(dim, num_draws) + 1
        levels = 2 * (Machine.num_latest + self.max_tree_depth + 1)
        # three copies: the draws, without the whitening, and by site
        per_chain = dim * dtype.itemsize * (3 * slots + levels + 24) + slots * 8 * len(STATS)
        metric = 3 * dim * dim * dtype.itemsize if form == "dense" else 0
        return self.num_chains * per_chain + metric


def _shares_of(problem: Problem, run: FitRun) -> Shares | None:
    """The shares of a fit whose rows several ranks have; else None."""
    loader = run.given[1]
    if not isinstance(loader, SharedLoader):
        return None
    return Shares(
        loader.ranks,
        run.seed,
        problem.device,
        own_noise=False,
    )


def _why_float64(problem: Problem, run: FitRun) -> str:
    """Why a run begins in float64, in words; empty where it does not."""
    if problem.is_bnn or not isinstance(run.init, Posterior) or not run.init.meta.get("float64"):
        return ""
    return "the posterior that it starts from is one of float64"


def _meta(
    result: Draws,
    stopped: str,
    form: Form,
    run: FitRun,
    convergence: Convergence | None,
) -> dict[str, Any]:
    """What ``meta`` says of a run; of float64 and convergence only where they mattered."""
    meta: dict[str, Any] = {
        "num_warmup": result.num_warmup,
        "num_gradients": result.num_gradients,
        "stopped": stopped,
        "mass_matrix": form,
        "common_start": common_start(run.init),
    }
    if result.raises:
        meta["adapted"] = [failed._asdict() for failed in result.raises]
    if result.float64_reason:
        meta["float64"] = result.float64_reason
    if convergence is not None:
        meta["convergence"] = convergence._asdict()
    return meta
