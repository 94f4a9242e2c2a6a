"""Any approximation brought to the posterior: its draws are where some hundreds of short chains begin.

*Nested R-hat: assessing the convergence of Markov chain Monte Carlo when running many short chains* (Margossian et al.,
2024), https://arxiv.org/abs/2110.13017
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, check_count, check_number
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.floats import full_float32
from pyrobnn.inference.fitting.initial import start_chains
from pyrobnn.inference.fitting.problem import Problem, make_posterior, prepare
from pyrobnn.inference.fitting.program import refuse_subsampling
from pyrobnn.inference.method import Claim, Kind
from pyrobnn.inference.optim.occam import log_evidences
from pyrobnn.model import BNN, Density
from pyrobnn.model.likelihoods.base import SCALE, SITE
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import CHANGES
from pyrobnn.posterior.chain_groups import Groups, net_quantities, site_quantities
from pyrobnn.posterior.marginal_last_layer import LastLayer
from pyrobnn.posterior.probes import probes
from pyrobnn.posterior.rows import Rows
from pyrobnn.posterior.short_chains import (
    ShortChains,
    chains_per_group,
    seconds_per_leapfrog,
    starts_elsewhere,
)

#: groups of chains that begin at draws of the approximation, and of a net elsewhere
_NUM_GROUPS = 12
_NUM_ELSEWHERE = 4
#: leapfrogs of a chain below which it is not worth beginning: nets of 50 units arrived after 400 to 700
_FEWEST_LEAPFROGS = 450
#: draws from the prior by which the evidence of a net is found
_NUM_PRIOR_DRAWS = 512
#: chains that the draws are handed over as
_NUM_CHAINS = 4
#: sds of the function, in the median over inputs, by which groups in one mode may differ
_ONE_MODE = 0.5


@dataclass(frozen=True)
class Refinement:
    """What made the draws of :meth:`pyrobnn.Posterior.refine`, as their provenance has it."""

    seconds: float

    kind: ClassVar[Kind] = "chains"
    claim: ClassVar[Claim] = "exact"
    remedy: ClassVar[str] = "Refine for longer, or run NUTS or SMC and compare."


def refine(
    posterior: Posterior,
    seconds: float,
    x: Tensor | None,
    y: Tensor | None,
    seed: int,
) -> Posterior:
    """Draws of some hundreds of short chains that begin at the posterior's: :meth:`pyrobnn.Posterior.refine`."""
    begun = time.perf_counter()
    check_number("seconds", seconds, above=0.0)
    check_count("seed", seed, minimum=0)
    rows = _rows(posterior, x, y)
    problem = _problem(posterior, rows)
    with full_float32(problem.device), torch.no_grad():
        with seeded(seed, problem.device):
            starts = start_chains(problem.model, problem.density, posterior, _NUM_GROUPS)
        refined = _Refined(problem, starts, seed)
        clock = time.perf_counter()
        refined.run(lambda _: (time.perf_counter() - clock) / seconds)
    return _posterior(refined, posterior, rows, seconds, begun)


CHANGES["refine"] = refine


def sampled(
    posterior: Posterior,
    model: BNN,
    work: float,
    seed: int,
) -> Posterior | None:
    """Draws of a model's posterior by short chains that begin at those of an approximation to it, or to one like it.

    Args:
        posterior: has draws of the net's weights, and the data.
        model: the net under a prior of its own, its noise inferred perhaps where that of ``posterior`` is known.
        work: what it may take, in seconds by a rule of thumb that is the same on every machine.
        seed: of the moves.

    Returns:
        Of kind ``"chains"``; None where the work pays for too few steps, or the chains have not arrived.
    """
    begun = time.perf_counter()
    problem = _of_rows(posterior, model)
    step = _seconds_per_leapfrog(problem)
    if work / step < _FEWEST_LEAPFROGS:
        return None
    with full_float32(problem.device), torch.no_grad():
        starts = _starts(posterior, problem.density)
        refined = _Refined(problem, starts, seed)
        refined.run(lambda chains: chains.num_leapfrogs * step / work)
    if not refined.arrived:
        return None
    return _posterior(refined, posterior, posterior.rows, work, begun)


def log_evidence(
    posterior: Posterior,
    model: BNN,
    work: float,
    seed: int,
) -> float | None:
    """Log evidence of a net with known noise, in nats, by draws of all but its last layer from their prior.

    The same seed draws the same for another width of the prior, so that differences are known better.

    Args:
        posterior, model, work, seed: as of :func:`sampled`.

    Returns:
        None where :func:`sampled` would not begin, or nothing can be integrated out.
    """
    problem = _of_rows(posterior, model)
    last_layer = LastLayer.of(problem.density)
    too_dear = work / _seconds_per_leapfrog(problem) < _FEWEST_LEAPFROGS
    if last_layer is None or too_dear or SCALE in model.priors:
        return None
    others = [name for name in model.priors if name not in last_layer.names]
    with seeded(seed, problem.device), torch.no_grad():
        draws = {name: problem.bnn.priors[name].sample((_NUM_PRIOR_DRAWS,)) for name in others}
        return last_layer.log_evidence(draws)


def _of_rows(posterior: Posterior, model: BNN) -> Problem:
    """The problem of a net with the data of a posterior."""
    rows = posterior.rows
    if rows is None:
        raise TypeError("the posterior holds no rows of data")
    device = next(iter(posterior.draws.values())).device
    return prepare(
        model,
        rows.x,
        rows.y,
        points="held",
        device=device,
    )


def _seconds_per_leapfrog(problem: Problem) -> float:
    """Of all chains on the way to a net's posterior, by a rule of thumb."""
    num_chains = (_NUM_GROUPS + _NUM_ELSEWHERE) * _group_size(problem)
    return seconds_per_leapfrog(problem.density, problem.num_rows, num_chains)


def _starts(posterior: Posterior, density: Density) -> Tensor:
    """Positions (group, dim) of draws, evenly spread; sites that the draws lack are where their model holds them."""
    index = torch.linspace(0, posterior.num_chains * posterior.num_draws - 1, _NUM_GROUPS)
    index = index.round().long()
    values = {}
    for site in density.sites:
        if site.name in posterior.draws:
            values[site.name] = posterior.draws[site.name].flatten(0, 1)[index]
        else:
            known = posterior.bnn.likelihood.own.fixed[site.name.removeprefix(SITE)]
            values[site.name] = known.expand(_NUM_GROUPS, *site.shape)
    return density.unconstrain(values)


def _posterior(
    refined: _Refined,
    posterior: Posterior,
    rows: Rows | None,
    budget: float,
    begun: float,
) -> Posterior:
    """The draws of the chains as a posterior, beside that whose draws they began at."""
    draws, stats = refined.draws()
    elapsed = time.perf_counter() - begun
    facts = refined.facts | {
        "seconds": round(elapsed, 3),
        "budget": float(budget),
        "start": posterior.meta.get("method", "draws"),
    }
    return make_posterior(
        refined.problem,
        Refinement(float(budget)),
        draws,
        seed=refined.seed,
        timings={"fit": elapsed},
        sample_stats=stats,
        meta={"refine": facts, "num_gradients": facts["gradients"]},
        notes=refined.notes(budget),
        rows=rows,
    )


def _rows(posterior: Posterior, x: Tensor | None, y: Tensor | None) -> Rows | None:
    """The data: x and y, or else those of the fit; None for a program that was given none."""
    meta = posterior.meta
    method = meta.get("method", "this method")
    if "dropout_p" in meta:
        raise Refused(
            f"draws of {method} are one net with units left out, which says nothing of where the posterior is: refine "
            "a fit of MAP, Laplace, SVI or an ensemble, or run NUTS"
        )
    if y is not None or x is not None:
        return Rows.of(posterior.model, x, y)
    if posterior.rows is not None:
        return posterior.rows.checked()
    if meta.get("data_given", [True, True]) == [False, False]:
        return None
    raise Refused(
        "this posterior holds no rows of data (they came from a DataLoader or posthoc, or it was loaded from a file): "
        "give them, refine(x=x, y=y)"
    )


def _problem(posterior: Posterior, rows: Rows | None) -> Problem:
    """The model with its data, its point parameters held where the fit has them."""
    sites = posterior.meta.get("point_sites", ())
    fixed = {name: posterior.draws[name][0, 0] for name in sites}
    problem = prepare(
        posterior.model,
        None if rows is None else rows.x,
        None if rows is None else rows.y,
        points="held",
        device=next(iter(posterior.draws.values())).device,
        values=fixed,
        stream=False,
        deterministic=True,
        num_draws=_NUM_GROUPS * 16,
    )
    refuse_subsampling(problem.density, "refine")
    return problem.in_double() if posterior.meta.get("float64") else problem


def _group_size(problem: Problem) -> int:
    """Chains of a group."""
    rows = problem.num_rows if problem.is_bnn else 1
    return chains_per_group(problem.density, rows, _NUM_GROUPS + _NUM_ELSEWHERE)


class _Mode(NamedTuple):
    """Groups (index,) whose functions agree, and Laplace's log evidence there, in nats."""

    groups: list[int]
    log_evidence: float


class _Refined:
    """The chains of one refinement, and what is known of them.

    Args:
        problem: the model and its data.
        starts: where the groups begin that do not begin elsewhere, (group, dim).
        seed: of starts elsewhere and of moves.
    """

    def __init__(
        self,
        problem: Problem,
        starts: Tensor,
        seed: int,
    ) -> None:
        self.problem = problem
        self.seed = seed
        density = problem.density
        self.size = _group_size(problem)
        num_elsewhere = 0
        quantities = site_quantities(density)
        if problem.is_bnn:
            num_elsewhere = _NUM_ELSEWHERE
            starts = torch.cat([starts, starts_elsewhere(density, num_elsewhere, seed)])
            x = problem.bnn.unit_exposure(probes(problem.x.cpu())[0]).to(density.device)
            quantities = net_quantities(density, x)
        self.groups = Groups(density, starts, num_elsewhere, self.size, quantities, seed)
        self.modes: list[_Mode] = []

    def run(self, spent: Callable[[ShortChains], float]) -> None:
        """Move the chains until they have arrived or all of a budget is spent; ``spent`` is its share so far."""
        self.groups.run(spent)
        if not self.arrived and self.problem.is_bnn:
            self.modes = self._find_modes()

    @property
    def arrived(self) -> bool:
        """Whether the chains have arrived."""
        return self.groups.arrived

    @property
    def kept(self) -> Tensor:
        """The groups (group,) whose draws count."""
        return self.groups.kept

    def _find_modes(self) -> list[_Mode]:
        """Groups joined where their functions agree, each with its evidence; empty where all agree."""
        # without the log density, which differs within a mode
        values = self.groups.window_values()[1:]
        by_group = values.reshape(*values.shape[:2], len(self.kept), self.size)
        mean = by_group.mean(axis=(1, 3))
        sd = np.maximum(by_group.std(axis=(1, 3)), 1e-300)
        clusters: list[list[int]] = []
        for group in map(int, np.flatnonzero(self.kept.numpy())):
            cluster = _cluster_of(group, clusters, mean, sd)
            if cluster is None:
                clusters.append([group])
            else:
                cluster.append(group)
        if len(clusters) < 2:
            return []
        return [_Mode(cluster, self._evidence(cluster)) for cluster in clusters]

    def _evidence(self, cluster: list[int]) -> float:
        """Laplace's estimate at the highest place of each of its groups, in the median."""
        window = self.groups.window
        levels = torch.stack([visit.log_density for visit in window])
        places = torch.stack([visit.z for visit in window])
        tops = []
        for group in cluster:
            chains = slice(group * self.size, (group + 1) * self.size)
            best = int(levels[:, chains].argmax())
            tops.append(places[:, chains].reshape(-1, places.shape[2])[best])
        return float(log_evidences(self.problem, torch.stack(tops)).median())

    @property
    def weights(self) -> np.ndarray:
        """Share of the draws (group,) that each group is to have."""
        shares = self.kept.double().numpy()
        if self.modes:
            log_evidence = np.array([mode.log_evidence for mode in self.modes])
            mass = np.exp(log_evidence - log_evidence.max())
            for mode, share in zip(self.modes, mass / mass.sum(), strict=True):
                shares[mode.groups] = share / len(mode.groups)
        return shares / shares.sum()

    def draws(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draws and statistics (chain, draw, …): groups side by side, each of as many draws as its share says."""
        window = self.groups.window
        density = self.problem.density
        order = torch.as_tensor(self._order(len(window)), device=density.device)
        z = torch.stack([visit.z for visit in window], 1).flatten(0, 1)[order]

        def ordered(values: list[Tensor]) -> Tensor:
            """Values (short chain,) of every visit as (chain, draw)."""
            return torch.stack(values, 1).flatten()[order]

        ones = torch.ones(
            len(self.groups.chains.z),
            dtype=torch.int64,
            device=density.device,
        )
        stats = {
            "lp": ordered([visit.log_density for visit in window]),
            "energy": ordered([visit.energy for visit in window]),
            "acceptance_rate": ordered([visit.acceptance for visit in window]),
            "diverging": ordered([visit.diverging for visit in window]),
            "n_steps": ordered([visit.num_steps * ones for visit in window]),
            "step_size": ordered([visit.step_size * ones.double() for visit in window]),
        }
        return density.constrain(z), stats

    def _order(self, length: int) -> np.ndarray:
        """Indices (chain, draw) into chain × transition: whole short chains, one after the other."""
        shares = self.weights
        num_chains = int(self.kept.sum()) * self.size // _NUM_CHAINS * _NUM_CHAINS
        # systematic: a group of share w has ⌊w · num_chains⌋ or one more of the short chains
        places = (np.arange(num_chains) + 0.5) / num_chains
        group = np.searchsorted(np.cumsum(shares), places)
        group = np.minimum(group, len(shares) - 1)
        within = np.zeros(num_chains, dtype=int)
        for index in np.unique(group):
            mask = group == index
            within[mask] = np.arange(mask.sum()) % self.size
        chain = group * self.size + within
        index = chain[:, None] * length + np.arange(length)
        # groups that began at one point stay together, so that the chains show whether they have forgotten it
        return index.reshape(_NUM_CHAINS, -1)

    @property
    def facts(self) -> dict[str, Any]:
        """What ``meta["refine"]`` says."""
        chains = self.groups.chains
        arrival = self.groups.arrival
        facts: dict[str, Any] = {
            "chains": len(chains.z),
            "groups": len(self.kept),
            "groups_left_out": int((~self.kept).sum()),
            "transitions": len(chains.visits),
            "gradients": chains.num_leapfrogs * len(chains.z),
            "nested_rhat": _rounded(arrival.nested_rhat),
            "limit": _rounded(arrival.limit),
            "drift": _rounded(arrival.shift),
            "memory": _rounded(arrival.memory),
            "ess": _rounded(self.groups.ess),
            "arrived": bool(self.arrived),
        }
        if self.modes:
            weights = self.weights
            facts["modes"] = [
                {
                    "groups": mode.groups,
                    "log_evidence": _rounded(mode.log_evidence),
                    "weight": _rounded(float(weights[mode.groups].sum())),
                }
                for mode in self.modes
            ]
        return facts

    def notes(self, seconds: float) -> list[Finding]:
        """That the chains have not arrived, where they have not."""
        if self.arrived:
            return []
        facts = self.facts
        names = ("transitions", "nested_rhat", "limit", "drift", "ess")
        numbers = {name: facts[name] for name in names}
        numbers |= {"seconds": float(seconds), "modes": max(1, len(self.modes))}
        return [Finding("not_refined", numbers)]


def _cluster_of(
    group: int,
    clusters: Sequence[list[int]],
    mean: np.ndarray,
    sd: np.ndarray,
) -> list[int] | None:
    """The first cluster whose first group has the function of this group; mean and sd (quantity, group)."""
    for cluster in clusters:
        scale = np.minimum(sd[:, group], sd[:, cluster[0]])
        gap = np.abs(mean[:, group] - mean[:, cluster[0]]) / scale
        if np.median(gap) <= _ONE_MODE:
            return cluster
    return None


def _rounded(value: float) -> float | None:
    """A number that JSON can hold, to four places."""
    return round(value, 4) if math.isfinite(value) else None
