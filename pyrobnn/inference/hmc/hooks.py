"""What the host does while the HMC machine runs, whether the run may end, and what a finished one says about itself.

*Rank-normalization, folding, and localization: an improved R-hat* (Vehtari et al., 2021),
https://doi.org/10.1214/20-BA1221
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrobnn.callbacks import duration
from pyrobnn.core import chains
from pyrobnn.core.chains import RHAT_LIMIT, RHAT_NOTED, ess
from pyrobnn.core.checks import check_choice, check_number, divergences_by_chance
from pyrobnn.density.gradient import at_each
from pyrobnn.inference.fitting.floats import in_program_dtype
from pyrobnn.inference.fitting.problem import Problem, snapshot
from pyrobnn.inference.fitting.watch import COMPILING, Watch
from pyrobnn.inference.hmc.checkpoint import DrawFile
from pyrobnn.inference.hmc.machine import STATS
from pyrobnn.inference.hmc.run import Draws, Progress
from pyrobnn.inference.hmc.warmup import stuck_chains
from pyrobnn.likelihoods import averages
from pyrobnn.model import NET
from pyrobnn.wording.findings import Finding

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun
    from pyrobnn.posterior import Posterior

#: draws per chain up to which a run that waits for convergence goes on
MOST_DRAWS = 10_000
_VALUES = 256  # of all sites together, or of the function, that are judged
#: the smallest effective sample size that it waits for
MIN_ESS = 400.0
_NUM_PROBES = 16
#: fraction of missing information (BFMI) below which a chain's energy changes too slowly (Betancourt, 2016)
MIN_BFMI = 0.3
#: draws of each chain, and effective draws in all, below which nothing is said of them or too few are
MIN_DRAWS = 100
#: sds of one chain's log density between the means of two: chains of a net that have not come equally far
MAX_GAP = 3.0
#: share of trees at their greatest depth
MAX_SATURATED = 0.1


class Convergence(NamedTuple):
    """How far a run has come: the worst R-hat and the smallest ESS with the names of their quantities."""

    draws: int
    rhat: float
    worst: str
    ess: float
    slowest: str

    def enough(self, min_ess: float) -> bool:
        """Whether that is convergence."""
        return self.rhat <= chains.RHAT_LIMIT and self.ess >= min_ess


def check_convergence(problem: Problem, draws: Mapping[str, Tensor], stats: Tensor) -> Convergence:
    """How far the draws of at least two chains have converged; an infinite R-hat where they cannot be judged."""
    num = stats.shape[1]
    found = {name: values for name, values in judged(problem, draws, stats).items() if np.ptp(values) != 0}
    for name, values in found.items():
        if not np.isfinite(values).all():
            return Convergence(num, np.inf, name, 0.0, name)
    if not found or num < chains.MIN_DRAWS:
        return Convergence(num, np.inf, "nothing to judge by", 0.0, "nothing to judge by")
    names, stacked = list(found), np.stack(list(found.values()))
    rhat = np.nan_to_num(chains.rhat(stacked), nan=np.inf, posinf=np.inf)
    ess = np.nan_to_num(np.minimum(chains.ess(stacked), chains.ess(stacked, "tail")), nan=0.0)
    worst, slowest = int(rhat.argmax()), int(ess.argmin())
    return Convergence(num, float(rhat[worst]), names[worst], float(ess[slowest]), names[slowest])


def check_until(config: Any) -> None:
    """The options of a run that waits for convergence; its default number of draws is the most it makes."""
    if config.max_seconds is not None:
        check_number("max_seconds", config.max_seconds, above=0.0)
        if config.until is None:
            raise ValueError(
                "'max_seconds' bounds a run with until='converged': set it, or leave out max_seconds"
            )
    if config.until is None:
        return
    check_choice("until", config.until, ("converged",))
    if config.engine == "pyro":
        raise ValueError("until='converged' needs engine='compiled': leave out engine")
    if config.num_chains < 2:
        raise ValueError("until='converged' compares chains, got num_chains=1: use at least 2, better 4")
    object.__setattr__(config, "default_draws", MOST_DRAWS)


def until_converged(
    config: Any, problem: Problem, draws: Mapping[str, Tensor], stats: Tensor, stopped: str, least: float
) -> tuple[str, dict[str, Any], list[Finding]]:
    """The end of a run that waited for convergence: why it stopped, entries of ``meta``, and a finding if in vain."""
    far = check_convergence(problem, draws, stats)
    record = {"convergence": far._asdict()}
    if far.enough(least):
        return "converged" if stopped == "num_draws" else stopped, record, []
    values = {**far._asdict(), "stopped": stopped, "min_ess": least, "seconds": config.max_seconds}
    return stopped, record, [Finding("not_converged", values)]


def judged(problem: Problem, draws: Mapping[str, Tensor], stats: Tensor) -> dict[str, np.ndarray]:
    """What is identified, name → (chain, draw): as the diagnosis of the finished run judges it.

    The log density and every site but the weights of a net; of a net the function at the probes, the log prior, the log
    likelihood and the norm of each layer.
    """
    lp = stats[..., STATS.index("lp")].cpu().double()
    found = {"the log density": lp}
    sites = {name: value for name, value in draws.items() if not (problem.is_bnn and name.startswith(NET))}
    if problem.is_bnn:
        found |= _of_net(problem, draws)
        found["the log likelihood"] = lp - found["the log prior"]
    for name, value in sites.items():
        found |= _columns(name, value, max(1, _VALUES // len(sites)))
    return {name: value.detach().cpu().double().numpy() for name, value in found.items()}


def _columns(name: str, values: Tensor, most: int) -> dict[str, Tensor]:
    """At most ``most`` elements of (chain, draw, …), evenly spread, by name."""
    shape = values.shape[2:]
    if not shape:
        return {name: values}
    flat = values.reshape(*values.shape[:2], -1)
    picked = torch.linspace(0, flat.shape[2] - 1, min(most, flat.shape[2])).round().long().tolist()
    return {f"{name}[{', '.join(str(k) for k in np.unravel_index(i, shape))}]": flat[..., i] for i in picked}


def _of_net(problem: Problem, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Function values, log prior and layer norms, each (chain, draw); of a block of draws at a time."""
    from pyrobnn.posterior.datatree import layer_norms, probes

    model = problem.bnn
    x = model.unit_exposure(probes(problem.x.cpu())[0]).to(problem.device)
    num_chains, num_draws = next(iter(draws.values())).shape[:2]
    blocks: dict[str, list[Tensor]] = {}
    for chain in range(num_chains):
        for start in range(0, num_draws, 256):
            rows = {n: v[chain : chain + 1, start : start + 256].to(x.device) for n, v in draws.items()}
            one = {name: value[0] for name, value in rows.items()}
            f = at_each(lambda params: model.forward(params, x), one).unsqueeze(0)
            f = averages.identified(model.likelihood, f)
            log_prior = torch.stack([prior.log_prob(rows[name]) for name, prior in model.priors.items()]).sum(
                0
            )
            norms = {f"the norm of layer {layer}": norm for layer, norm in layer_norms(rows).items()}
            for name, value in (_columns("f", f, _VALUES) | {"the log prior": log_prior} | norms).items():
                blocks.setdefault(name, []).append(value[0].double().cpu())
    return {name: torch.cat(values).reshape(num_chains, num_draws) for name, values in blocks.items()}


def run_findings(problem: Problem, draws: Mapping[str, Tensor], result: Draws, config: Any) -> list[Finding]:
    """Everything about the run that a user has to know."""
    stats = result.stats
    found = _transitions(stats, config)
    chains, num = stats.shape[:2]
    if config.until is None and num >= MIN_DRAWS and chains > 1:
        found += _log_density_gap(stats) if problem.is_bnn else _agreement(problem, draws, stats)
    if result.unfinished:
        found.append(
            Finding("warmup_unfinished", {"num_warmup": result.num_warmup, "reason": result.unfinished})
        )
    return found


def _transitions(stats: Tensor, config: Any) -> list[Finding]:
    """Divergences, chains that stand still, trees at their greatest depth; of statistics (chain, draw, 7)."""
    diverging = stats[..., STATS.index("diverging")]
    count, total = int(diverging.sum()), diverging.numel()
    found = []
    if count == total or count > divergences_by_chance(total):
        values = {"count": count, "total": total, "target_accept": config.target_accept}
        found.append(Finding("diverged", values))
    stuck = stuck_chains(stats, torch.full((len(stats),), stats.shape[1]))
    if stuck and count < total:
        found.append(Finding("stuck_chains", {"stuck": stuck, "num_chains": len(stats)}))
    saturated = (stats[..., STATS.index("tree_depth")] >= config.max_tree_depth).double().mean().item()
    if config.trajectory is None and saturated > MAX_SATURATED:
        found.append(Finding("tree_depth", {"share": saturated, "max_tree_depth": config.max_tree_depth}))
    return found


def _agreement(problem: Problem, draws: Mapping[str, Tensor], stats: Tensor) -> list[Finding]:
    """Of a program, whose sites are identified; a net's function is judged by the diagnosis."""
    total = stats.shape[0] * stats.shape[1]
    far = check_convergence(problem, draws, stats)
    found = []
    if far.rhat > RHAT_NOTED:
        found.append(Finding("chains_disagree", {"quantity": far.worst, "rhat": far.rhat}))
    elif total >= 10 * MIN_DRAWS and far.ess < MIN_DRAWS:
        found.append(
            Finding("few_effective_draws", {"quantity": far.slowest, "ess": far.ess, "draws": total})
        )
    energy = stats[..., STATS.index("energy")].double()
    bfmi = energy.diff(dim=1).square().mean(1) / energy.var(1, correction=0)
    if total >= 10 * MIN_DRAWS and float(bfmi.min()) < MIN_BFMI:
        # where a scale is close to zero, as in a funnel's neck, chains that all stay outside agree
        found.append(Finding("slow_energy", {"chain": int(bfmi.argmin()), "bfmi": float(bfmi.min())}))
    return found


def _log_density_gap(stats: Tensor) -> list[Finding]:
    """Chains of a net in different modes have different functions; the gap says whether they have arrived in them."""
    lp = stats[:, stats.shape[1] // 2 :, STATS.index("lp")].double()
    mean, spread = lp.mean(1), float(lp.var(1).mean().sqrt())
    gap = float(mean.max() - mean.min())
    if not gap > MAX_GAP * spread > 0.0:
        return []
    values = {"low": int(mean.argmin()), "high": int(mean.argmax()), "gap": gap, "spread": spread}
    return [Finding("log_density_gap", values)]


class Hooks:
    """What happens when the host looks at a run: progress, callbacks, and the test for enough draws."""

    def __init__(
        self, problem: Problem, file: DrawFile | None, run: FitRun, num_warmup: int, config: Any
    ) -> None:
        self._problem, self._file, self._run, self._config = problem, file, run, config
        self.watch = Watch(
            run.num_draws + num_warmup,
            "NUTS",
            run.callbacks,
            run.progress,
            finished="num_draws",
            starting=COMPILING if config.compile else "looking for a step size",
            metrics=("step_size", "tree_depth", "divergences"),
        )
        self._reported, self._num_warmup = -1, num_warmup
        self._began: tuple[float, int] | None = None  # when the leapfrogs began, and after how many
        self._stopped, self._started = "num_draws", time.monotonic()
        self._prepared: float | None = None  # when the step was compiled, in seconds since the start
        limit = config.max_seconds
        self.compile_until = None if limit is None else self._started + 0.5 * limit
        # how often it was tested whether the draws are enough, and the last answer
        self._checks, self._found = 0, ""
        waits = run.until_ess is not None or config.until is not None
        self.enough: Callable[[Draws], bool] | None = self._enough if waits else None
        self.look = self._look if self.watch.active or config.max_seconds else None

    def end(self, result: Draws) -> str:
        """Why the run ended, as ``meta["stopped"]`` has it; a bar that is not full says it too."""
        stopped = self._stopped if result.stats.shape[1] < self._run.num_draws else "num_draws"
        self.watch.stopped = "interrupt" if result.interrupted else stopped
        return self.watch.stopped

    def _look(self, look: Progress) -> bool:
        if self._report(look):
            return True
        limit = self._config.max_seconds
        if limit is None:
            return False
        spent = time.monotonic() - self._started
        self._prepared = spent if self._prepared is None else self._prepared
        if look.phase == "warm-up":  # the draws have the other half of what the compile left
            limit = 0.5 * (limit + self._prepared)
        if spent < limit:
            return False
        self._stopped = "max_seconds"
        return True

    def _report(self, look: Progress) -> bool:
        """Bar and callbacks, wherever another transition is done; True if a callback asks to stop."""
        warming = look.phase == "warm-up"
        if warming and look.wanted > self._num_warmup:
            self._num_warmup = look.wanted
            why = f"the warm-up goes on to {look.wanted} transitions: {look.unfinished}"
            self.watch.extend(self._run.num_draws + look.wanted, why)
        done = look.draws if warming else look.draws + self._num_warmup
        if self._began is None or look.steps < self._began[1]:
            self._began = time.monotonic(), look.steps
            self._describe_start(look, done)
            return False
        if done == 0:
            self._describe_start(look, done)
        if done <= self._reported:
            return False
        self._reported = done
        metrics = {name: getattr(look, name) for name in ("step_size", "tree_depth", "divergences", "draws")}
        if done:
            self.watch.show(done, metrics | {"phase": self._phase(look)})
        present = partial(self._snapshot, look)
        stop = self.watch.ask(look.steps, metrics | {"phase": look.phase, "snapshot": present})
        if stop and (warming or not look.draws):
            raise ValueError(
                f"a callback stopped the run at step {look.steps}, before the first draw was kept"
            )
        self._stopped = "callback" if stop else self._stopped
        return stop

    def _snapshot(self, look: Progress) -> Posterior:
        """The draws so far; in the warm-up, and while they go to a file, those that are in memory."""
        draws = in_program_dtype(self._problem.density, look.positions())
        return snapshot(self._problem, self._config, draws, seed=self._run.seed)

    def _phase(self, look: Progress) -> str:
        if look.phase == "warm-up":
            return f"warm-up {look.draws} of {look.wanted}"
        if self.enough is None:
            return "sampling"
        if not self._checks:
            return "sampling until enough, or the end"
        return f"sampling until enough, look {self._checks}: {self._found}"

    def _describe_start(self, look: Progress, done: int) -> None:
        """The phase before the first transition; from the first leapfrogs on how long the run takes at least."""
        if self._began is None:
            return
        began, before = self._began
        least = ""
        if (steps := look.steps - before) > 0:
            # the chains have made less than one transition each, on average
            seconds = (time.monotonic() - began) * (self._run.num_draws + self._num_warmup - done)
            least = (
                f", {steps} leapfrogs without a transition: at least {duration(seconds)} left at this rate"
            )
        self.watch.say(self._phase(look) + least)

    def _enough(self, result: Draws) -> bool:
        draws = by_site(self._problem, self._file, result)
        self._checks += 1
        if self._config.until is not None:
            far = check_convergence(self._problem, draws, result.stats)
            least = self._run.until_ess or MIN_ESS
            enough, why, worth = far.enough(least), "converged", far.ess
            self._found = f"R-hat {far.rhat:.3f} of {RHAT_LIMIT}, "
        else:
            worth, least = slowest_ess(self._problem, draws), self._run.until_ess or math.inf
            enough, why, self._found = worth >= least, "until_ess", ""
        self._found += f"ESS {worth:.0f} of {least:.0f}"
        self._stopped = why if enough else self._stopped
        return enough


def slowest_ess(problem: Problem, draws: Mapping[str, Tensor]) -> float:
    """Bulk ESS of the slowest function value at 16 inputs (for a plain program: of the slowest site value)."""
    if problem.is_bnn:
        rows = torch.linspace(0, len(problem.x) - 1, min(_NUM_PROBES, len(problem.x))).long()
        x = problem.x[rows.to(problem.x.device)]
        function = partial(at_each, lambda params: problem.bnn.forward(params, x))
        num_chains, num_draws = next(iter(draws.values())).shape[:2]
        blocks = [  # a block at a time: the draws may be on disk
            function({name: value[chain, start : start + 256].to(x.device) for name, value in draws.items()})
            for chain in range(num_chains)
            for start in range(0, num_draws, 256)
        ]
        values = torch.cat(blocks).reshape(num_chains, num_draws, -1)
    else:
        values = torch.cat([value.reshape(*value.shape[:2], -1) for value in draws.values()], -1)
    return float(ess(values.detach().movedim(2, 0).double().cpu().numpy()).min())


def by_site(problem: Problem, file: DrawFile | None, result: Draws) -> dict[str, Tensor]:
    """Constrained draws, site → (chain, draw, …)."""
    if file is not None:
        return file.draws(result.stats.shape[1])
    return in_program_dtype(problem.density, result.positions)
