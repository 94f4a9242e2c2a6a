"""`diagnose`: every check that a tree allows, and the verdict that they add up to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.calibration import (
    check_coverage,
    check_ece,
    check_loo_pit,
    check_pit,
    check_regions,
    check_training_pit,
    few_held_out,
)
from pyrobnn.diagnostics.chains import check_chains, check_checked, check_common_start, check_length
from pyrobnn.diagnostics.consistency import check_held_weights, check_likelihood_scale, check_rounded
from pyrobnn.diagnostics.convergence import (
    check_ess,
    check_mcse,
    check_modes,
    check_rhat,
    check_weights,
)
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.fidelity import (
    check_classes,
    check_comparable,
    check_elpd_against,
    check_sd_ratio,
    check_wasserstein,
    cost_per_draw,
)
from pyrobnn.diagnostics.importance import check_correction, check_count, check_khat, check_khat_subspace
from pyrobnn.diagnostics.integrity import (
    check_copies,
    check_finite,
    check_fit_warnings,
    check_held_out_rows,
    check_interrupted,
    check_moving,
    check_optimum,
    check_repeats,
    hopeless,
)
from pyrobnn.diagnostics.loo import check_elpd, check_loo_khat, check_rows
from pyrobnn.diagnostics.marginal import check_log_evidence, with_error
from pyrobnn.diagnostics.model_checks import (
    check_collapse,
    check_dead_sites,
    check_in_between,
    check_noise_prior,
    check_prior_predictive,
    check_prior_sensitivity,
    check_spread,
    check_temperature,
)
from pyrobnn.diagnostics.moves import check_density, check_moves, check_range
from pyrobnn.diagnostics.patterns import check_order, check_pattern
from pyrobnn.diagnostics.places import check_places
from pyrobnn.diagnostics.points import same_data
from pyrobnn.diagnostics.sampler import check_acceptance, check_bfmi, check_divergences, check_tree_depth
from pyrobnn.diagnostics.target import check_score, check_virial
from pyrobnn.diagnostics.verdict import Check, Question, Verdict, said


def every(evidence: Evidence) -> bool:
    """Of every tree."""
    return True


def point(evidence: Evidence) -> bool:
    """Of point estimates."""
    return evidence.is_point


def draws(evidence: Evidence) -> bool:
    """Of everything but point estimates."""
    return not evidence.is_point


def independent(evidence: Evidence) -> bool:
    """Of independent draws, for which R-hat is 1 by construction."""
    return draws(evidence) and evidence.is_iid


def chains(evidence: Evidence) -> bool:
    """Of Markov chains."""
    return draws(evidence) and not evidence.is_iid


def check_point(evidence: Evidence) -> Check:
    """That a point estimate is one."""
    method = "This run" if evidence.method == "unknown" else evidence.method
    return Check(
        "point_estimate",
        "warn",
        1.0,
        "more than one draw",
        thresholds.POSTERIOR_CLAIM_SOURCE,
        f"{method} is a point estimate: no epistemic uncertainty.",
        "Use it as a baseline; for uncertainty fit Laplace around it, SVI or NUTS.",
    )


def check_cost(evidence: Evidence) -> Check | None:
    """Seconds per effective draw, as information."""
    seconds = cost_per_draw(evidence)
    if seconds is None or not np.isfinite(seconds):
        return None
    shown = f"{seconds:.2g} s" if seconds >= 1.0 else f"{1e3 * seconds:.2g} ms"
    return Check(
        "cost",
        "info",
        seconds,
        "",
        thresholds.PARETO_SOURCE if evidence.is_iid else thresholds.ESS_SOURCE,
        f"Fitting took {shown} per effective draw of the function.",
    )


@dataclass(frozen=True)
class Examination:
    """A check and the trees that it is made of.

    Args:
        check: from the tree's `Evidence` (and the reference's, where `against` it) to a `Check`, or None where the
            trees do not hold what it needs.
        of: which trees.
        question: what it answers.
        against: whether it needs a reference.
    """

    check: Callable[..., Check | None]
    of: Callable[[Evidence], bool] = every
    question: Question = "draws"
    against: bool = False

    @property
    def name(self) -> str:
        """What is examined, in words."""
        return self.check.__name__.removeprefix("check_").replace("_", " ")


#: every check, in the order in which a reader sees them: a new one is a function and a line here
EXAMINATIONS = (
    Examination(check_finite),
    Examination(check_moving),
    Examination(check_copies, chains),
    Examination(check_repeats, draws),
    Examination(check_places, chains),
    Examination(check_rounded, draws),
    Examination(check_held_weights, chains),
    Examination(check_interrupted),
    Examination(check_optimum),
    Examination(check_point, point),
    Examination(check_count, independent),
    Examination(check_khat, independent),
    Examination(check_khat_subspace, independent),
    Examination(check_correction, independent),
    Examination(check_moves, draws),
    Examination(check_range, chains),
    Examination(check_chains, chains),
    Examination(check_length, chains),
    Examination(check_checked, chains),
    Examination(check_common_start, chains),
    Examination(check_rhat, chains),
    Examination(check_modes, chains),
    Examination(check_ess, chains),
    Examination(check_mcse, chains),
    Examination(check_weights, chains),
    Examination(check_virial, draws),
    Examination(check_score, draws),
    Examination(check_density, chains),
    Examination(check_divergences, chains),
    Examination(check_bfmi, chains),
    Examination(check_tree_depth, chains),
    Examination(check_acceptance, chains),
    Examination(check_elpd, draws, question="model"),
    Examination(check_loo_khat, draws, question="model"),
    Examination(check_rows),
    Examination(check_likelihood_scale, draws),
    Examination(check_held_out_rows, question="model"),
    # where and how errors differ says what to change, that they differ does not: those come first
    Examination(check_pattern, question="model"),
    Examination(check_order, question="model"),
    Examination(check_regions, question="model"),
    Examination(check_pit, question="model"),
    Examination(check_coverage, question="model"),
    Examination(check_loo_pit, question="model"),
    Examination(check_training_pit, question="model"),
    Examination(check_ece, question="model"),
    Examination(check_temperature),
    Examination(check_prior_sensitivity, question="model"),
    Examination(check_noise_prior, question="model"),
    Examination(check_prior_predictive, question="model"),
    Examination(check_collapse, independent),
    Examination(check_spread, independent),
    Examination(check_dead_sites, independent),
    Examination(check_in_between, draws),
    Examination(check_wasserstein, draws, against=True),
    Examination(check_sd_ratio, draws, against=True),
    Examination(check_classes, draws, against=True),
    Examination(check_elpd_against, draws, against=True),
    Examination(check_comparable, draws, against=True),
    Examination(check_cost),
    Examination(check_fit_warnings),
)


#: checks of an approximation's function that need no reference
FUNCTION_CHECKS = ("function_moves", "psis_correction")
TARGET = "whether the draws are of the model's posterior"
#: what a reader may take for checked: the trees it concerns, and the checks that decide it
SUBJECTS = (
    ("convergence", chains, ("rhat_function",)),
    (
        TARGET,
        draws,
        ("virial", "khat", "khat_subspace", "function_moves", "psis_correction"),
    ),
    ("distance from a reference", independent, ("sd_ratio", "wasserstein", "total_variation")),
    ("leave-one-out", draws, ("loo_khat",)),
    ("calibration on held-out data", every, ("pit", "coverage_90", "ece")),
    ("the width of intervals (fewer than 20 held-out rows)", few_held_out, ("pit",)),
)


def _unchecked(evidence: Evidence, checks: list[Check]) -> tuple[str, ...]:
    """The subjects on which no check has decided anything."""
    # leave-one-out of chains that is unreliable at some data was looked at all the same
    known = () if evidence.is_iid else ("loo_khat",)
    decided = {check.name for check in checks if check.status != "info" or check.name in known}
    return tuple(words for words, of, names in SUBJECTS if of(evidence) and decided.isdisjoint(names))


def diagnose(tree: xr.DataTree | Evidence, *, reference: xr.DataTree | Evidence | None = None) -> Verdict:
    """Say whether a posterior can be believed, on what evidence, and what to do next.

    Markov chains are judged by R-hat and effective sample size *in function space* and by their sampler;
    approximations with independent draws, for which R-hat is 1 by construction, by Pareto k-hat of p/q and LOO;
    every method by calibration, by checks
    of the model, and, where a reference is given, by its distance from it. What a tree does not hold is left out: a
    missing check is never a pass. A check that raises becomes a check that says so.

    Args:
        tree: Draws as DataTree: from this library, NumPyro or PyMC; only ``posterior`` is required. Or its `Evidence`,
            which shares what it finds with whatever reads it next.
        reference: DataTree of a long NUTS run on the same model and data; None for no comparison.

    Returns:
        The verdict, with what was not checked. Point estimates (one draw) never get better than "warn": they have no
        epistemic uncertainty to judge, but predictions that may fail.

    Raises:
        TypeError: If `tree` or `reference` is no DataTree.
        ValueError: If it has no posterior group with dims ``chain`` and ``draw``.

    Caveat:
        A pass means that no check found a fault, not that there is none: chains that all miss a mode agree with
        each other.

    References:
        Bayesian workflow (Gelman et al., 2020) https://arxiv.org/abs/2011.01808

    Example:
        >>> import numpy as np, xarray as xr
        >>> f = np.random.default_rng(0).normal(size=(4, 500, 3, 1))
        >>> dims = ("chain", "draw", "probe", "output")
        >>> tree = xr.DataTree.from_dict({
        ...     "posterior": xr.Dataset({"w": (dims[:2], f[:, :, 0, 0])}), "function": xr.Dataset({"f": (dims, f)})})
        >>> diagnose(tree).status
        'pass'
    """
    evidence = Evidence.of(tree)
    evidence.require_draws()
    if reference is not None:
        reference = Evidence.of(reference, "reference")
        reference.require_draws("reference")
        if reference.tree is evidence.tree:
            reference = None
    label = evidence.text("label") or evidence.method
    broken = hopeless(evidence)
    if broken is not None:
        found = [broken, check_interrupted(evidence)]
        return Verdict.from_checks(evidence.method, label, [check for check in found if check is not None])
    found = [
        _made(examination, evidence, *([reference] if examination.against and reference is not None else []))
        for examination in EXAMINATIONS
        if examination.of(evidence) and not (examination.against and reference is None)
    ]
    checks = [check for check in found if check is not None]
    nothing = not any(check.status in ("pass", "warn", "fail") for check in checks)
    verdict = Verdict.from_checks(evidence.method, label, checks, at_least="warn" if nothing else "pass")
    return replace(verdict, unchecked=_unchecked(evidence, checks))


def _made(examination: Examination, *evidence: Evidence) -> Check | None:
    """The check; where it raises, one that says so: a check that failed to run is not a pass."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            found = examination.check(*evidence)
            return None if found is None else replace(found, question=examination.question)
    except Exception as error:
        # whatever a foreign tree holds, the other checks and trees are still worth having
        return Check(
            examination.check.__name__.removeprefix("check_"),
            "warn",
            None,
            "",
            "numerical",
            f"The check of the {examination.name} could not be made: {said(error)}.",
            "Look at the draws and data that they rest on; until then this is unjudged.",
            examination.question,
        )


def reference_label(trees: Mapping[str, xr.DataTree | Evidence]) -> str | None:
    """The run that the others are measured against: the first of chains that are exact once converged, else none."""
    for label, tree in trees.items():
        evidence = Evidence.of(tree)
        if not evidence.is_iid and evidence.claim == "exact":
            return label
    return None


def judge_all(trees: Mapping[str, xr.DataTree | Evidence]) -> dict[str, Verdict]:
    """`diagnose` every tree, with the first NUTS run as the reference of the others.

    A tree that cannot be diagnosed at all gets a verdict that says so: the others are still judged. Where a run has
    estimated the evidence with its error, the others say by how much theirs differs.
    """
    evidence = {label: Evidence.of(tree) for label, tree in trees.items()}
    reference = reference_label(evidence)
    judges = None if reference is None else evidence[reference]
    found = {
        label: _judged(
            label, each, judges if judges not in (None, each) and same_data([each, judges]) else None
        )
        for label, each in evidence.items()
    }
    estimate = with_error(evidence.values())
    if estimate is None:
        return found
    checks = {
        label: check_log_evidence(each, estimate) if same_data([each, estimate]) else None
        for label, each in evidence.items()
    }
    added = {label: () if check is None else (check,) for label, check in checks.items()}
    return {
        label: replace(verdict, checks=(*verdict.checks, *added[label])) for label, verdict in found.items()
    }


def _judged(label: str, evidence: Evidence, reference: Evidence | None) -> Verdict:
    try:
        return diagnose(evidence, reference=reference)
    except Exception as error:
        check = Check("readable", "fail", None, "", "", f"The tree cannot be judged: {said(error)}.")
        return Verdict.from_checks(evidence.method, label, [check])
