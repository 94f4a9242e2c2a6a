"""What the host does while the HMC machine runs, whether the run may end, and what a finished one says about itself.

*Rank-normalization, folding, and localization: an improved R-hat* (Vehtari et al., 2021),
https://doi.org/10.1214/20-BA1221
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core import chains
from pyrobnn.core.chains import RHAT_LIMIT, RHAT_NOTED, divergences_by_chance
from pyrobnn.core.findings import Finding
from pyrobnn.inference.fitting.problem import Problem, snapshot
from pyrobnn.inference.fitting.watch import COMPILING, Watch
from pyrobnn.inference.hmc.retrace import impossible_ends
from pyrobnn.inference.hmc.run import Draws, Progress
from pyrobnn.inference.hmc.windows import MIN_TRANSITIONS, STATS, stuck_chains
from pyrobnn.model import NET, Density
from pyrobnn.model.gradient import at_each
from pyrobnn.model.likelihoods.base import identified

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun
    from pyrobnn.posterior import Posterior

#: draws per chain up to which a run that waits for convergence goes on, and the effective draws that it waits for
MOST_DRAWS = 10_000
MIN_ESS = 400.0
_VALUES = 256  # of all sites together, or of the function, that are judged
#: fraction of missing information (BFMI) below which a chain's energy changes too slowly (Betancourt, 2016)
MIN_BFMI = 0.3
#: draws of each chain, and effective draws in all, below which nothing is said of them or too few are
MIN_DRAWS = 100
_BLOCK = 256  # draws at which a net's function is evaluated at once


class Convergence(NamedTuple):
    """How far a run has come: the worst R-hat and the smallest ESS with the names of their quantities."""

    draws: int
    rhat: float
    worst: str
    ess: float
    slowest: str

    @property
    def enough(self) -> bool:
        """Whether that is convergence."""
        return self.rhat <= RHAT_LIMIT and self.ess >= MIN_ESS


def check_convergence(problem: Problem, draws: Mapping[str, Tensor], stats: Tensor) -> Convergence:
    """How far the draws of at least two chains have converged; an infinite R-hat where they cannot be judged."""
    num = stats.shape[1]
    quantities = _identified_quantities(problem, draws, stats)
    moving = {name: values for name, values in quantities.items() if np.ptp(values) != 0}
    for name, values in moving.items():
        if not np.isfinite(values).all():
            return Convergence(num, np.inf, name, 0.0, name)
    if not moving or num < chains.MIN_DRAWS:
        return Convergence(num, np.inf, "nothing to judge by", 0.0, "nothing to judge by")
    names = list(moving)
    stacked = np.stack(list(moving.values()))
    rhat = np.nan_to_num(
        chains.rhat(stacked),
        nan=np.inf,
        posinf=np.inf,
    )
    ess = np.nan_to_num(np.minimum(chains.ess(stacked), chains.ess(stacked, "tail")), nan=0.0)
    worst = int(rhat.argmax())
    slowest = int(ess.argmin())
    return Convergence(num, float(rhat[worst]), names[worst], float(ess[slowest]), names[slowest])


def _identified_quantities(
    problem: Problem, draws: Mapping[str, Tensor], stats: Tensor
) -> dict[str, np.ndarray]:
    """What is identified, name → (chain, draw): as the diagnosis of the finished run judges it.

    The log density and every site but the weights of a net; of a net the function at the probes, the log prior, the log
    likelihood and the norm of each layer.
    """
    lp = stats[..., STATS.index("lp")].cpu().double()
    quantities = {"the log density": lp}
    sites = dict(draws)
    if problem.is_bnn:
        quantities |= _net_quantities(problem, draws)
        quantities["the log likelihood"] = lp - quantities["the log prior"]
        sites = {name: value for name, value in draws.items() if not name.startswith(NET)}
    for name, value in sites.items():
        quantities |= _columns(name, value, max(1, _VALUES // len(sites)))
    return {name: value.detach().cpu().double().numpy() for name, value in quantities.items()}


def _columns(name: str, values: Tensor, max_columns: int) -> dict[str, Tensor]:
    """At most ``max_columns`` elements of (chain, draw, …), evenly spread, by name."""
    shape = values.shape[2:]
    if not shape:
        return {name: values}
    flat = values.flatten(2)
    size = flat.shape[2]
    columns = {}
    for index in torch.linspace(0, size - 1, min(max_columns, size)).round().long().tolist():
        place = ", ".join(map(str, np.unravel_index(index, shape)))
        columns[f"{name}[{place}]"] = flat[..., index]
    return columns


def _net_quantities(problem: Problem, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Function values, log prior and layer norms, each (chain, draw); of a block of draws at a time."""
    from pyrobnn.posterior.datatree import layer_norms, probes

    model = problem.bnn
    x = model.unit_exposure(probes(problem.x.cpu())[0]).to(problem.device)
    shape = next(iter(draws.values())).shape[:2]
    blocks: dict[str, list[Tensor]] = {}
    for start in range(0, shape.numel(), _BLOCK):
        rows = {name: value.flatten(0, 1)[start : start + _BLOCK] for name, value in draws.items()}
        f = at_each(lambda params: model.forward(params, x), rows).unsqueeze(0)
        quantities = _columns("f", identified(model.likelihood, f), _VALUES)
        # as one chain
        chain = {name: value.unsqueeze(0) for name, value in rows.items()}
        log_priors = [prior.log_prob(chain[name]) for name, prior in model.priors.items()]
        quantities["the log prior"] = sum(log_priors)
        for layer, norm in layer_norms(chain).items():
            quantities[f"the norm of layer {layer}"] = norm
        for name, value in quantities.items():
            blocks.setdefault(name, []).append(value[0].double().cpu())
    return {name: torch.cat(values).reshape(shape) for name, values in blocks.items()}


def run_findings(
    problem: Problem,
    draws: Mapping[str, Tensor],
    result: Draws,
    config: Any,
) -> list[Finding]:
    """Everything about the run that a user has to know."""
    findings = _transition_findings(result.stats, config)
    num_chains, num = result.stats.shape[:2]
    if config.until is None and num >= MIN_DRAWS and num_chains > 1:
        if problem.is_bnn:
            findings += _log_density_gap(result.stats)
        else:
            findings += _agreement(problem, draws, result.stats)
    if result.unfinished:
        numbers = {"num_warmup": result.num_warmup, "reason": result.unfinished}
        findings.append(Finding("warmup_unfinished", numbers))
    return findings


def with_reasons(findings: list[Finding], density: Density, result: Draws) -> list[Finding]:
    """The findings, that of divergences with the parameters that were impossible where they ended."""
    explained = []
    for finding in findings:
        if finding.code == "diverged":
            # Pyro's own engine keeps its metric to itself
            scale = result.scale if len(result.scale) else result.z.new_ones(density.dim)
            ends = impossible_ends(density, result.z, result.stats, scale)
            finding = Finding(finding.code, {**finding.values, **ends})
        explained.append(finding)
    return explained


def _transition_findings(stats: Tensor, config: Any) -> list[Finding]:
    """Divergences, chains that stand still, trees at their greatest depth; of statistics (chain, draw, 7)."""
    diverging = stats[..., STATS.index("diverging")]
    count = int(diverging.sum())
    total = diverging.numel()
    findings = []
    if count == total or count > divergences_by_chance(total):
        numbers = {
            "count": count,
            "total": total,
            "target_accept": config.target_accept,
        }
        findings.append(Finding("diverged", numbers))
    stuck = stuck_chains(stats, torch.full((len(stats),), stats.shape[1]))
    if stuck and count < total:
        findings.append(Finding("stuck_chains", {"stuck": stuck, "num_chains": len(stats)}))
    deepest = stats[..., STATS.index("tree_depth")] >= config.max_tree_depth
    saturated = deepest.double().mean().item()
    if config.trajectory is None and saturated > 0.1:
        numbers = {"share": saturated, "max_tree_depth": config.max_tree_depth}
        findings.append(Finding("tree_depth", numbers))
    return findings


def _agreement(problem: Problem, draws: Mapping[str, Tensor], stats: Tensor) -> list[Finding]:
    """Of a program, whose sites are identified; a net's function is judged by the diagnosis."""
    total = stats.shape[0] * stats.shape[1]
    far = check_convergence(problem, draws, stats)
    findings = []
    if far.rhat > RHAT_NOTED:
        findings.append(Finding("chains_disagree", {"quantity": far.worst, "rhat": far.rhat}))
    elif total >= 10 * MIN_DRAWS and far.ess < MIN_DRAWS:
        numbers = {
            "quantity": far.slowest,
            "ess": far.ess,
            "draws": total,
        }
        findings.append(Finding("few_effective_draws", numbers))
    energy = stats[..., STATS.index("energy")].double()
    bfmi = energy.diff(dim=1).square().mean(1) / energy.var(1, correction=0)
    if total >= 10 * MIN_DRAWS and float(bfmi.min()) < MIN_BFMI:
        # where a scale is close to zero, as in a funnel's neck, chains that all stay outside agree
        numbers = {"chain": int(bfmi.argmin()), "bfmi": float(bfmi.min())}
        findings.append(Finding("slow_energy", numbers))
    return findings


def _log_density_gap(stats: Tensor) -> list[Finding]:
    """Chains of a net in different modes have different functions; the gap says whether they have arrived in them."""
    lp = stats[:, stats.shape[1] // 2 :, STATS.index("lp")].double()
    mean = lp.mean(1)
    spread = float(lp.var(1).mean().sqrt())
    gap = float(mean.max() - mean.min())
    if not gap > 3.0 * spread > 0.0:  # three sds of one chain's log density
        return []
    values = {
        "low": int(mean.argmin()),
        "high": int(mean.argmax()),
        "gap": gap,
        "spread": spread,
    }
    return [Finding("log_density_gap", values)]


class Hooks:
    """What happens when the host looks at a run: progress, callbacks, and the test for convergence."""

    def __init__(
        self,
        problem: Problem,
        run: FitRun,
        num_warmup: int,
        config: Any,
    ) -> None:
        self._problem = problem
        self._run = run
        self._config = config
        self._num_warmup = num_warmup
        self.watch = Watch(
            run.num_draws + num_warmup,
            "NUTS",
            run.callbacks,
            run.progress,
            finished="num_draws",
            starting=COMPILING if config.compile else "looking for a step size",
            metrics=("step_size", "tree_depth", "divergences"),
        )
        self._reported = -1
        self._stopped = "num_draws"
        self._converging = ""  # how far the chains have converged, in words
        self._ends = time.monotonic() + (config.max_seconds or float("inf"))
        self._halfway = 0.0
        self.enough = None if config.until is None else self._enough
        self.look = self._look if self.watch.active or config.max_seconds else None

    def begin_again(self, problem: Problem, why: str) -> None:
        """The run begins anew, in float64: the bar says so, and counts from zero."""
        self._problem = problem
        self._reported = -1
        self.watch.restart(f"the run goes on in float64: {why}")

    def end(self, result: Draws) -> str:
        """Why the run ended, as ``meta["stopped"]`` has it; a bar that is not full says it too."""
        stopped = self._stopped if result.stats.shape[1] < self._run.num_draws else "num_draws"
        self.watch.stopped = "interrupt" if result.interrupted else stopped
        return self.watch.stopped

    def _look(self, look: Progress) -> bool:
        if self._report(look):
            self._stopped = "callback"
            return True
        now = time.monotonic()
        judged = look.phase == "warm-up" and look.latest >= MIN_TRANSITIONS
        if not self._halfway:  # at the first look: the step is compiled
            self._halfway = 0.5 * (now + self._ends)
        spent = now >= (self._halfway if judged else self._ends)
        self._stopped = "max_seconds" if spent else self._stopped
        return spent

    def _report(self, look: Progress) -> bool:
        """Bar and callbacks, wherever another transition is done; True if a callback asks to stop."""
        warming = look.phase == "warm-up"
        if warming:
            self._extend_warmup(look)
            done = look.draws
            phase = f"warm-up {look.draws} of {look.wanted}"
        else:
            done = look.draws + self._num_warmup
            phase = f"sampling{self._converging}"
        if self._reported < 0:
            self.watch.say(phase)
        if done <= max(self._reported, 0):
            self._reported = max(self._reported, 0)
            return False
        self._reported = done
        metrics = {
            name: getattr(look, name)
            for name in ("step_size", "tree_depth", "divergences", "draws")
        }
        self.watch.show(done, metrics | {"phase": phase})
        present = partial(self._snapshot, look)
        stop = self.watch.ask(look.steps, metrics | {"phase": look.phase, "snapshot": present})
        if stop and (warming or not look.draws):
            raise ValueError(
                f"a callback stopped the run at step {look.steps}, before the first draw was kept"
            )
        return stop

    def _extend_warmup(self, look: Progress) -> None:
        """Where the warm-up goes on for longer than planned, the bar says so."""
        if look.wanted > self._num_warmup:
            self._num_warmup = look.wanted
            why = f"the warm-up goes on to {look.wanted} transitions: {look.unfinished}"
            self.watch.extend(self._run.num_draws + look.wanted, why)

    def _snapshot(self, look: Progress) -> Posterior:
        draws = self._problem.density.constrain(look.positions())
        return snapshot(
            self._problem,
            self._config,
            draws,
            seed=self._run.seed,
        )

    def _enough(self, result: Draws) -> bool:
        draws = self._problem.density.constrain(result.z)
        far = check_convergence(self._problem, draws, result.stats)
        rhat = f"R-hat {far.rhat:.3f} of {RHAT_LIMIT}"
        self._converging = f" until converged: {rhat}, ESS {far.ess:.0f} of {MIN_ESS:.0f}"
        if far.enough:
            self._stopped = "converged"
        return far.enough
