"""NUTS and plain HMC: configuration and fit. The arithmetic is in ``hmc.machine``, the host's loop in ``hmc.run``."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pyrobnn.core.checks import check_choice, check_count, check_number
from pyrobnn.inference.fitting.floats import PrecisionLoss, full_float32, inspector
from pyrobnn.inference.fitting.initial import common_start, shared_starts, start_values
from pyrobnn.inference.fitting.problem import (
    Problem,
    interruption,
    launches,
    make_posterior,
    prepare,
)
from pyrobnn.inference.fitting.program import check_proper, refuse_subsampling
from pyrobnn.inference.fitting.sizes import free_bytes, require
from pyrobnn.inference.hmc import checkpoint as checkpoints
from pyrobnn.inference.hmc import pyro_engine
from pyrobnn.inference.hmc.checkpoint import DrawFile, run_fingerprint
from pyrobnn.inference.hmc.hooks import (
    MIN_ESS,
    Hooks,
    by_site,
    check_until,
    run_findings,
    until_converged,
)
from pyrobnn.inference.hmc.machine import STATS, Machine
from pyrobnn.inference.hmc.metric import described, form_of
from pyrobnn.inference.hmc.run import Draws, Run, named_stats
from pyrobnn.inference.hmc.starts import chains_per_call, gradient_of, starts
from pyrobnn.inference.hmc.warmup import kept_in_warmup
from pyrobnn.inference.method import OPTIONAL, Claim, FitRun, Kind, Method, register
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.wording.findings import Finding

#: twice the length past which no measured case got cheaper, whatever its number of chains (scripts/benchmark_warmup.py)
DEFAULT_WARMUP = 200
#: up to which the default warm-up goes on where it is not finished: the length of Stan's
MOST_WARMUP = 1000
_BLOCK = 64  # draws per chain between writes to a file


@register("nuts", standard=True, quick={"num_warmup": 150, "num_draws": 150, "max_tree_depth": 6})
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
        mass_matrix: ``"diag"``; ``"low_rank"``, a diagonal and up to 20 directions from draws and gradients;
            ``"dense"``; ``"auto"``: low rank where the directions of half the chains serve the others, else diag.
        trajectory: None for NUTS; a number of leapfrogs for plain HMC with paths of that length.
        engine: ``"compiled"``, or ``"pyro"`` for Pyro's own kernel, the reference: one chain after the other.
        compile: compile the step; False gives the same draws within float tolerance, slower.
        checkpoint_every: seconds between checkpoints.
        until: ``"converged"`` ends the run as soon as R-hat is at most 1.01 for every identified quantity (function
            values, sites, log density) and their effective sample size, bulk and tail, is 400 (or ``fit``'s
            ``until_ess``); num_draws is then the most that are drawn of each chain, 10,000 by default. Where that is
            spent first the fit says so.
        max_seconds: and the seconds after which it waits no longer. A compile that takes half of them is given up, and
            the step runs as it is; the warm-up is cut at half of what is left, and the fit says so. None for no bound.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: draws (num_chains, num_draws, …), 1000 of each chain by default (with ``until`` at most 10,000)
    and ``sample_stats`` lp (unconstrained space, nats), energy, diverging, tree_depth, n_steps, acceptance_rate,
    step_size, each (num_chains, num_draws). The chains start at draws of ``fit(init=…)`` (its spread is the first mass
    matrix), or around a net; by default those of a net at draws from the prior, those of a program uniform on (-2, 2)
    in unconstrained space, as in Stan: vague priors draw far from the mass. Callbacks are told the number of steps and
    phase, step_size, tree_depth, divergences and draws (of the slowest chain in this phase); True stops, once there is
    a draw. Ctrl-C in the warm-up returns nothing, but writes the ``checkpoint`` from which the same fit goes on.

    Refused: a program that subsamples, or has latent values without a density; too little memory or disk; no start with
    a finite density; a checkpoint or file of draws that is damaged or of another run.

    Caveat: exact only once it has converged, and a Bayesian network's posterior has many modes: look at R-hat of the
    function values (``pyrobnn.diagnose``), not of the weights. Chains in modes of their own are not weighted by the
    modes' mass, and starting them at particles of SMC hides the smaller modes: use SMC's own draws there. Point
    parameters (a learned noise scale) are held.

    References:
        *The No-U-Turn Sampler* (Hoffman & Gelman, 2014), https://arxiv.org/abs/1111.4246
        *A Conceptual Introduction to Hamiltonian Monte Carlo* (Betancourt, 2017), https://arxiv.org/abs/1701.02434
        *Preconditioning HMC by Minimizing Fisher Divergence* (Seyboldt et al., 2026), https://arxiv.org/abs/2603.18845

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
    mass_matrix: Literal["auto", "diag", "dense", "low_rank"] = "auto"
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
        if self.num_warmup is not None:
            check_count("num_warmup", self.num_warmup, minimum=0)
        if self.step_size is not None:
            check_number("step_size", self.step_size, above=0.0)
        check_number("target_accept", self.target_accept, above=0.0, below=1.0)
        check_count("max_tree_depth", self.max_tree_depth)
        check_choice("mass_matrix", self.mass_matrix, ("auto", "diag", "dense", "low_rank"))
        if self.trajectory is not None:
            check_count("trajectory", self.trajectory)
        check_choice("engine", self.engine, ("compiled", "pyro"))
        if self.engine == "pyro" and self.mass_matrix == "low_rank":
            raise ValueError("mass_matrix='low_rank' needs engine='compiled': Pyro has 'diag' and 'dense'")
        check_number("checkpoint_every", self.checkpoint_every, minimum=0.0)
        check_until(self)

    @property
    def _first_warmup(self) -> int:
        """Transitions of the warm-up as planned."""
        return DEFAULT_WARMUP if self.num_warmup is None else self.num_warmup

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        check_memory(problem, self, run.num_draws, self._first_warmup, run.stream_to is not None)
        started = time.perf_counter()
        with full_float32(problem.device):
            z, scale = starts(problem, run.init, run.seed, self.num_chains)
            if self.engine == "pyro":
                drawn, stats, gradients, interrupted = pyro_engine.sample(
                    problem.density.log_joint,
                    z,
                    num_draws=run.num_draws,
                    num_warmup=self._first_warmup,
                    seed=run.seed,
                    config=self,
                    progress=run.progress,
                )
                result = Draws(drawn, stats, 0.0, gradients, torch.ones(0), {}, interrupted)
                file, stopped = None, "interrupt" if interrupted else "num_draws"
            else:
                result, file, stopped = self._by_machine(problem, z, scale, run)
        seconds = time.perf_counter() - started - result.compile_seconds
        draws = by_site(problem, file, result)
        notes: list[Finding] = []
        if result.interrupted:
            notes.append(self._interruption(result.stats, run))
        if self.compile and result.mode != "inductor" and self.engine == "compiled":
            done = "compiled" if result.mode in ("graph", "eager") else result.mode
            notes += launches(problem.device, f"the step could not be {done}")
        convergence: dict[str, Any] = {}
        if self.until is not None:
            least = run.until_ess or MIN_ESS
            stopped, convergence, found = until_converged(self, problem, draws, result.stats, stopped, least)
            notes += found
        return make_posterior(
            problem if file is None else _on_cpu(problem),
            self,
            draws,
            seed=run.seed,
            timings={"compile": result.compile_seconds, "fit": seconds},
            sample_stats=named_stats(result.stats),
            history=result.history,
            point_values=None if file is None else _on_cpu(problem.density.initial_points),
            meta={
                "num_warmup": result.num_warmup or self._first_warmup,
                "num_gradients": result.num_gradients,
                "stopped": stopped,
                "mass_matrix": described(result.scale, self.mass_matrix),
                **convergence,
                "common_start": common_start(run.init),
                "superchains": shared_starts(run.init, self.num_chains),
                **({"float64": result.float64_reason} if result.float64_reason else {}),
            },
            notes=[*notes, *run_findings(problem, draws, result, self)],
            interrupted=result.interrupted,
        )

    def _interruption(self, stats: Tensor, run: FitRun) -> Finding:
        """How far Ctrl-C let the run come; Pyro's engine runs one chain after the other."""
        chains, draws = stats.shape[:2]
        if draws == run.num_draws and chains < self.num_chains:
            return interruption(self, chains, self.num_chains, "chains")
        which = "each chain" if chains == self.num_chains else f"the first of {self.num_chains} chains"
        return interruption(self, draws, run.num_draws, f"draws of {which}", run.checkpoint)

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> tuple[Problem, FitRun]:
        """The problem, its point parameters held where ``init`` has them."""
        if run.until_ess is not None:
            check_number("until_ess", run.until_ess, above=0.0)
        asked = (run.checkpoint, run.until_ess, run.stream_to, *run.callbacks)
        if self.engine == "pyro" and any(option is not None for option in asked):
            raise ValueError(
                "'callbacks', 'checkpoint', 'until_ess' and 'stream_to' need engine='compiled': leave them out"
            )
        model, x, y = run.given
        if not isinstance(model, BNN):
            density = prepare(model, x, y, points="free", device=device).density
            refuse_subsampling(density, "NUTS")
            check_proper(density)
        held = None if run.init is None else start_values(model, run.init)
        return prepare(model, x, y, points="held", device=device, values=held), run

    def _by_machine(
        self, problem: Problem, z: Tensor, scale: Tensor | None, run: FitRun
    ) -> tuple[Draws, DrawFile | None, str]:
        """The run, its draws on disk, and why it ended; begun again in float64 where float32 cannot hold it."""
        earlier, save, file, name = None, None, None, ""
        if run.checkpoint is not None or run.stream_to is not None:
            name = run_fingerprint(self, problem, run)
        if run.checkpoint is not None:
            earlier = checkpoints.read(run.checkpoint, name)
            save = run.checkpoint, name, self.checkpoint_every
        if run.stream_to is not None:
            sizes = self.num_chains, run.num_draws
            file = DrawFile(run.stream_to, name, problem.density, *sizes, resume=earlier is not None)
        hooks = Hooks(problem, file, run, self._first_warmup, self)
        reason = ""
        if earlier is not None and earlier["vectors"].dtype != z.dtype:
            z, reason = z.double(), "the run that it goes on from was in float64"
        with torch.no_grad(), hooks.watch:
            chains = self._chains(problem, z, run, file)
            if earlier is None:
                chains.begin(z, scale)
            else:
                chains.restore(earlier)
            options: dict[str, Any] = {
                "look": hooks.look,
                "enough": hooks.enough,
                "save": save,
                "compile_until": hooks.compile_until,
            }
            try:
                result = chains.sample(run.num_draws, **options)
            except PrecisionLoss as loss:
                first, reason = chains, f"float32 was too coarse for the positions: {loss}"
                chains = self._chains(problem, loss.z.double(), run, file)
                chains.begin(loss.z.double())
                result = chains.sample(run.num_draws, **options)
                result = result._replace(
                    num_gradients=result.num_gradients + first.total_steps * self.num_chains,
                    compile_seconds=result.compile_seconds + first.compile_seconds,
                )
            stopped = hooks.end(result)
        return result._replace(float64_reason=reason), file, stopped

    def _chains(self, problem: Problem, z: Tensor, run: FitRun, file: DrawFile | None) -> Run:
        """The run of chains that will begin at ``z`` (chain, dim), in its dtype."""
        density, in_float64 = problem.density, z.dtype != problem.density.dtype
        gradient, why = gradient_of(problem, z, in_float64, self.compile)
        if why:
            problem.note(Finding("unbatched_chains", {"why": why}))
        most = MOST_WARMUP if self.num_warmup is None else None
        longest = max(self._first_warmup, most or 0)
        machine = Machine(
            gradient,
            self.num_chains,
            density.dim,
            num_slots(density.dim, self, run.num_draws, longest, file is not None),
            z.dtype,
            z.device,
            self.max_tree_depth,
            self.trajectory,
            self.target_accept,
        )
        compiles = self.compile and not why
        return Run(
            machine,
            seed=run.seed,
            num_warmup=self._first_warmup,
            most=most,
            names=None if problem.is_bnn else density.site_of,
            inspect=None if problem.is_bnn or in_float64 else inspector(density),
            mass_matrix=form_of(self.mass_matrix, problem.is_bnn),
            step_size=self.step_size,
            compile=compiles,
            chains_per_call=chains_per_call(gradient, z) if compiles else None,
            file=file,
        )


def _on_cpu(what: Any) -> Any:
    """The problem, or tensors by name, where a posterior with its draws on disk computes."""
    if isinstance(what, dict):
        return {name: value.cpu() for name, value in what.items()}
    return replace(what, model=what.model.to(torch.device("cpu"))) if what.is_bnn else what


def num_slots(dim: int, config: NUTS, num_draws: int, num_warmup: int, streamed: bool) -> int:
    """Draws per chain that the machine holds: those of a warm-up window, and all draws or a block of them."""
    kept = kept_in_warmup(num_warmup, config.num_chains, dim)
    return max(_BLOCK if streamed else num_draws, kept)


def needed_bytes(
    dim: int, dtype: torch.dtype, config: NUTS, num_draws: int, num_warmup: int, streamed: bool
) -> int:
    """Bytes of a run's static buffers and of the copies on the way to the posterior."""
    chains, item = config.num_chains, dtype.itemsize
    slots = num_slots(dim, config, num_draws, num_warmup, streamed) + 1
    levels = 2 * (config.max_tree_depth + 1)
    copies = 2 if streamed else 3  # the draws, without the whitening, and by site
    rows = slots + num_draws if streamed else slots
    need = chains * (dim * item * (copies * slots + levels + 24) + rows * 8 * len(STATS))
    if config.mass_matrix == "low_rank":  # a window of draws and one of gradients, copied in float64
        need += chains * kept_in_warmup(num_warmup, chains, dim) * dim * (2 * item + 6 * 8)
    return need + (dim * dim * item * 3 if config.mass_matrix == "dense" else 0)


def check_memory(problem: Problem, config: NUTS, num_draws: int, num_warmup: int, streamed: bool) -> None:
    """NotEnoughMemory, naming bytes and options to change, where the buffers of a run do not fit."""
    dim, dtype = problem.density.dim, problem.density.dtype
    form = form_of(config.mass_matrix, problem.is_bnn or config.engine == "pyro")
    config = replace(config, mass_matrix="low_rank" if form == "auto" else form)  # the most that it may need
    need = needed_bytes(dim, dtype, config, num_draws, num_warmup, streamed)
    options = ["lower num_chains" if streamed else "lower num_draws or num_chains"]
    free = free_bytes(problem.device)
    if not streamed and needed_bytes(dim, dtype, config, num_draws, num_warmup, True) <= free:
        options.append("write the draws to disk with fit(stream_to=PATH)")
    if form != "diag":
        options.append("use mass_matrix='diag'")
    what = f"a run of {config.num_chains} chains × {num_draws} draws × {dim} parameters"
    require(need, problem.device, what, ", or ".join(options))
