"""A sick fit repaired: a ladder of fits, the cheapest first, of which the one is returned that passes.

*Automatic Reparameterisation of Probabilistic Programs* (Gorinova, Moore & Hoffman, 2020),
https://arxiv.org/abs/1906.03028
*Bayesian workflow* (Gelman et al., 2020), https://arxiv.org/abs/2011.01808
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyrobnn.core.checks import Refused, check_count, check_number, check_optional, check_type
from pyrobnn.core.findings import Finding, findings
from pyrobnn.core.option_names import options_explained
from pyrobnn.diagnostics.judge import diagnose
from pyrobnn.diagnostics.verdict import Check, Verdict, said
from pyrobnn.inference.fitting.problem import (
    Callback,
    make_posterior,
    posterior_with_notes,
    prepare,
)
from pyrobnn.inference.log_density import LogDensity
from pyrobnn.inference.nuts import MOST_WARMUP, NUTS
from pyrobnn.inference.smc import SMC
from pyrobnn.model import BNN, Density
from pyrobnn.model.derived import values_at_draws
from pyrobnn.model.nodes import Node, is_latent
from pyrobnn.posterior import Posterior

#: checks of the draws that a better run can mend; the others say what is wrong with the model or its data
_MENDABLE = (
    "finite",
    "moving",
    "chains",
    "rhat_function",
    "ess_function",
    "divergences",
    "bfmi",
    "importance",
    "function_moves",
    "density_moves",
    "virial",
    "score",
)
#: those of places that the sampler cannot enter, however long it runs
_OF_SHAPE = ("divergences", "bfmi")
#: times the seconds of the first fit, and the fewest seconds, that a repair may take
_TIMES_FIRST = 10.0
_FEWEST_SECONDS = 60.0
#: share of the seconds that are left which a single step may take
_SHARE = 0.5
_HIGH_TARGET = 0.99


@dataclass(frozen=True)
class _Case:
    """What is to be repaired: a posterior with its data, and what its verdict holds against it."""

    posterior: Posterior
    x: Any
    y: Any
    faults: Sequence[Check]
    seed: int

    @property
    def was_nuts(self) -> bool:
        """Whether NUTS made the draws."""
        return self.posterior.meta.get("method") == "NUTS"

    @property
    def nuts(self) -> NUTS:
        """NUTS with the options of the fit, as far as it was one, that waits for convergence."""
        options: dict[str, Any] = {}
        if self.was_nuts:
            names = {option.name for option in fields(NUTS)}
            settings = self.posterior.meta["settings"]
            options = {name: value for name, value in settings.items() if name in names}
        options |= {
            "engine": "compiled",
            "num_chains": max(4, options.get("num_chains", 4)),
            "num_warmup": None,
            "step_size": None,
            "trajectory": None,
            "until": "converged",
        }
        return NUTS(**options)

    def fitted(
        self,
        method: NUTS | SMC,
        init: Posterior | None = None,
        until: Callback | None = None,
    ) -> Posterior:
        """The posterior of the same model and data by another method."""
        model = self.posterior.model
        if isinstance(model, LogDensity) and isinstance(method, NUTS) and init is None:
            init = model.starts(method.num_chains, self.seed)
        return method.fit(
            model,
            self.x,
            self.y,
            seed=self.seed,
            init=init,
            callbacks=[] if until is None else [until],
        )

    def judged(self, posterior: Posterior) -> Verdict:
        """The verdict on a posterior of this model."""
        return diagnose(posterior.to_datatree(self.x, self.y))


class _Tried(NamedTuple):
    """A step of the ladder that was taken: what came of it, and what is still wrong with that."""

    step: str
    posterior: Posterior
    wrong: list[str]
    seconds: float

    def record(self) -> dict[str, Any]:
        """What ``meta["repair"]`` says of it."""
        return {
            "step": self.step,
            "wrong": self.wrong,
            "seconds": round(self.seconds, 3),
            "gradients": self.posterior.meta.get("num_gradients"),
        }


_Step = Callable[[_Case, float], "Posterior | None"]


def longer_warmup(case: _Case, seconds: float) -> Posterior | None:
    """Five times the warm-up, and draws until they converge; None where the shape of the density is the fault.

    Of draws by another method NUTS as it comes.
    """
    if any(check.name in _OF_SHAPE for check in case.faults):
        return None
    nuts = replace(case.nuts, max_seconds=seconds)
    if case.was_nuts:
        raises = case.posterior.meta.get("adapted", [])
        targets = [nuts.target_accept, *(failed["target_accept"] for failed in raises)]
        nuts = replace(nuts, num_warmup=MOST_WARMUP, target_accept=targets[-1])
    return case.fitted(nuts)


def higher_target(case: _Case, seconds: float) -> Posterior | None:
    """A higher acceptance rate and deeper trees; where the rate was raised already, a diagonal metric too."""
    nuts = replace(
        case.nuts,
        num_warmup=MOST_WARMUP,
        target_accept=_HIGH_TARGET,
        max_tree_depth=12,
        max_seconds=seconds,
    )
    if "adapted" in case.posterior.meta:
        nuts = replace(nuts, mass_matrix="diag")
    return case.fitted(nuts)


def non_centred(case: _Case, seconds: float) -> Posterior | None:
    """Sites whose location or scale is latent, as location plus scale times a standard value; None without any."""
    if isinstance(case.posterior.model, BNN):
        return None
    program = case.posterior.model
    problem = prepare(program, case.x, case.y, points="held")
    sites = _chosen(hierarchical_sites(problem.density), case.faults)
    if not sites:
        return None
    reparameterised = pyro.poutine.reparam(
        program, config={site: LocScaleReparam(0.0) for site in sites}
    )
    nuts = replace(case.nuts, max_seconds=seconds)
    fit = nuts.fit(
        reparameterised,
        case.x,
        case.y,
        seed=case.seed,
    )
    density = Density(
        reparameterised,
        (case.x, case.y),
        points="held",
        double=bool(fit.meta.get("float64")),
    )
    sizes = {site.name: math.prod(site.shape) for site in problem.density.sites}
    values = values_at_draws(density, fit.draws, {site: sizes[site] for site in sites})
    draws = {site.name: (fit.draws | values)[site.name] for site in problem.density.sites}
    facts = ("num_warmup", "num_gradients", "stopped", "mass_matrix", "common_start", "convergence")
    return make_posterior(
        problem.in_double() if fit.meta.get("float64") else problem,
        nuts,
        draws,
        seed=case.seed,
        timings=fit.meta["timings"],
        sample_stats=dict(fit.sample_stats),
        meta={name: fit.meta[name] for name in facts if name in fit.meta} | {"non_centred": sites},
        notes=findings(fit.meta["findings"]),
        rows=case.posterior.rows,
    )


def tempered(case: _Case, seconds: float) -> Posterior | None:
    """SMC, whose particles come from the prior by way of all temperatures, modes weighted by their mass."""
    return case.fitted(SMC(), until=_clock(seconds))


def tempered_starts(case: _Case, seconds: float) -> Posterior | None:
    """NUTS from particles of SMC."""
    particles = case.fitted(SMC(), until=_clock(0.5 * seconds))
    return case.fitted(replace(case.nuts, max_seconds=0.5 * seconds), particles)


def weighed_modes(case: _Case, seconds: float) -> Posterior | None:
    """Of a net, short chains in several modes, which are weighted by their evidence; None of a program."""
    if not isinstance(case.posterior.model, BNN):
        return None
    return case.posterior.refine(
        seconds,
        x=case.x,
        y=case.y,
        seed=case.seed,
    )


def _clock(seconds: float) -> Callback:
    """A callback that stops a run after so many seconds."""
    ends = time.perf_counter() + seconds
    return lambda step, metrics: time.perf_counter() > ends


#: the ladder from its foot; a step returns None where it does not apply. A higher target comes after other
#: coordinates: small steps diverge less in a narrow neck and do not enter it either
LADDER: tuple[_Step, ...] = (
    longer_warmup,
    non_centred,
    higher_target,
    weighed_modes,
    tempered,
    tempered_starts,
)


@options_explained
def repair(
    posterior: Posterior,
    *,
    x: Any = None,
    y: Any = None,
    seconds: float | None = None,
    seed: int = 0,
) -> Posterior:
    """Fit again, step by step, until the verdict on the draws passes; the cheapest fit that does is returned.

    The ladder: more warm-up and draws until they converge (not of transitions that diverge or an energy that changes
    slowly); the hierarchical sites that the verdict names, or all where it names none, non-centred by Pyro's own
    ``reparam``; a higher target of the acceptance rate and another metric; of a net short chains in several modes,
    weighted by their evidence; SMC, which goes through all temperatures; NUTS from its particles. A posterior whose
    draws pass is returned as it is: no step is taken.

    Args:
        posterior: of any method; the model and its data are those of its fit.
        x, y: the data, where the posterior does not hold them: a program's dict or tuple, or after a DataLoader.
        seconds: the most that it takes, about; default ten times those of the first fit, at least 60.
        seed: of all fits.

    Returns:
        Posterior of the same model, by site as before. ``meta["repair"]`` says what was ``wrong`` (names of checks),
        what was ``tried``, each with what is still ``wrong``, ``seconds`` and ``gradients``; what was ``refused`` and
        why, by step; ``cured_by``, the name of
        a step or None; and the ``seconds`` of all.

    Raises:
        TypeError, ValueError: naming the argument.
        Refused: no data.

    Warns:
        UserWarning: nothing has helped; the posterior that was given is returned.

    Caveat: cured says that every check of the draws passes: modes that no chain has met are not seen.

    Example:
        >>> import pyro, pyro.distributions as dist, pyrobnn as pb, torch
        >>> def program(x, y):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)
        >>> healthy = pb.NUTS(compile=False).fit(program, None, torch.ones(3))
        >>> pb.repair(healthy).meta["repair"]["tried"]
        []
    """
    begun = time.perf_counter()
    check_type("posterior", posterior, Posterior, "what a fit returns")
    check_optional(
        check_number,
        "seconds",
        seconds,
        above=0.0,
    )
    check_count("seed", seed, minimum=0)
    if y is None and x is None:
        x, y = _data(posterior)
    if seconds is None:
        first = sum(posterior.meta.get("timings", {}).values())
        seconds = max(_FEWEST_SECONDS, _TIMES_FIRST * first)
    case = _Case(posterior, x, y, (), seed)
    case = replace(case, faults=faults(case.judged(posterior)))
    tried: list[_Tried] = []
    refused: dict[str, str] = {}
    for step in LADDER if case.faults else ():
        left = seconds - (time.perf_counter() - begun)
        if left <= 0 or (tried and not tried[-1].wrong):
            break
        try:
            taken = _taken(step, case, _SHARE * left)
        # a method refuses the model, or its time was too short
        except (ValueError, ArithmeticError, RuntimeError) as error:
            refused[step.__name__] = said(error)
            continue
        if taken is not None:
            tried.append(taken)
    return _result(case, tried, refused, time.perf_counter() - begun)


def faults(verdict: Verdict) -> list[Check]:
    """What a verdict holds against the draws that a better run can mend."""
    return [
        check
        for check in (*verdict.failed, *verdict.warned)
        if check.question == "draws" and check.name in _MENDABLE
    ]


def _data(posterior: Posterior) -> tuple[Tensor | None, Tensor | None]:
    """The data of the fit; Refused where the posterior does not hold them."""
    if posterior.rows is not None:
        rows = posterior.rows.checked()
        return rows.x, rows.y
    if posterior.meta.get("data_given", [True, True]) != [False, False]:
        raise Refused(
            "this posterior holds no data of its fit: give them, repair(posterior, x=x, y=y)"
        )
    return None, None


def _taken(step: _Step, case: _Case, seconds: float) -> _Tried | None:
    """What came of a step; None where it does not apply."""
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = step(case, seconds)
        if posterior is None:
            return None
        wrong = [check.name for check in faults(case.judged(posterior))]
    return _Tried(step.__name__, posterior, wrong, time.perf_counter() - begun)


def _result(
    case: _Case,
    tried: Sequence[_Tried],
    refused: Mapping[str, str],
    seconds: float,
) -> Posterior:
    """The posterior of the last step where that passes, else the one that was given; with what was done."""
    cure = tried[-1] if tried and not tried[-1].wrong else None
    wrong = [check.name for check in case.faults]
    record = {
        "wrong": wrong,
        "tried": [step.record() for step in tried],
        "refused": dict(refused),
        "cured_by": None if cure is None else cure.step,
        "seconds": round(seconds, 3),
    }
    result = case.posterior if cure is None else cure.posterior
    result = replace(result, meta=result.meta | {"repair": record})
    if not case.faults or cure is not None:
        return result
    steps = ", ".join(step.step for step in tried) or "no step applies"
    numbers = {
        "seconds": seconds,
        "tried": steps,
        "wrong": ", ".join(wrong),
    }
    return posterior_with_notes(result, [Finding("not_repaired", numbers)])


def hierarchical_sites(density: Density) -> list[str]:
    """Real latent sites of a family of location and scale, one of which depends on other latent sites."""
    z = density.sample_box(2, 0, 1.0)
    first, second = (density.run(density.constrain(point)) for point in z)
    return [
        site.name
        for site in density.sites
        if is_latent(first[site.name]) and _has_moved(first[site.name], second[site.name])
    ]


def _has_moved(node: Node, other: Node) -> bool:
    """Whether location or scale of a site of such a family differ between two runs."""
    family = _unwrapped(node["fn"])
    if (
        not {"loc", "scale"} <= set(family.arg_constraints)
        or family.support is not constraints.real
    ):
        return False
    elsewhere = _unwrapped(other["fn"])
    return any(
        not torch.equal(getattr(family, name), getattr(elsewhere, name))
        for name in ("loc", "scale")
    )


def _unwrapped(distribution: Distribution) -> Distribution:
    """The distribution without what makes an event of a batch, or masks it."""
    while hasattr(distribution, "base_dist") and not hasattr(distribution, "transforms"):
        distribution = distribution.base_dist
    return distribution


def _chosen(sites: Sequence[str], wrong: Sequence[Check]) -> list[str]:
    """Those of the sites that the verdict names, or all where it names none of them."""
    named = {str(check.numbers.get("where", "")).partition("[")[0] for check in wrong}
    return [site for site in sites if site in named] or list(sites)
