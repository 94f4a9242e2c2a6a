"""`diagnose`, every row of the table that a tree allows and the verdict that they add up to; `audit` and `judge_all`.

`judge`, of predictions without draws, is in predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import xarray as xr

from pyrobnn.core.groups import LOG_PRIOR, OBSERVED_DATA, POSTERIOR_PREDICTIVE
from pyrobnn.diagnostics.check_table import AUDIT, OF_DENSITY, TABLE
from pyrobnn.diagnostics.evidence import FEWEST_DRAWS, Evidence
from pyrobnn.diagnostics.integrity import hopeless
from pyrobnn.diagnostics.limits import MIN_DATA
from pyrobnn.diagnostics.own_latents import own_latents
from pyrobnn.diagnostics.points import same_data
from pyrobnn.diagnostics.row import made
from pyrobnn.diagnostics.target import beside_posterior
from pyrobnn.diagnostics.verdict import Audit, Check, Question, Verdict, said


def diagnose(
    tree: xr.DataTree | Evidence, *, reference: xr.DataTree | Evidence | None = None
) -> Verdict:
    """Say whether these draws are the posterior of their model, and whether the model fits the data.

    Markov chains are judged by R-hat and effective sample size *in function space* and by their sampler;
    approximations with independent draws, for which R-hat is 1 by construction, by importance weights; both by Stein's
    identities, by what Hamiltonian moves change of them and, where a reference is given, by their distance from it. The
    model is judged by how data that were left out, or held out, lie in their predictions. What a tree does not hold is
    left out: a missing check is never a pass. A check that raises becomes a check that says so. Of a tree that this
    library did not make, what `audit` finds wrong is said too.

    Args:
        tree: Draws as DataTree: from this library, NumPyro or PyMC; only ``posterior`` is required. Or its `Evidence`,
            which shares what it finds with whatever reads it next.
        reference: DataTree of a long NUTS run on the same model and data; None for no comparison.

    Returns:
        The verdict. A question that nothing could be checked of is answered "warn", by a check of code
        ``"not_checked"``, or one that says why (``"few_data"``, ``"joint_event"``, ``"moves_short"``, …), or of
        ``"linearized_only"`` and ``"conditional_only"`` where the draws could be compared with the posterior of a
        linearised net, or of some weights given the others, and not with the model's. Point estimates (one draw) never
        get better than "warn" for their draws.

    Raises:
        TypeError: If `tree` or `reference` is not a DataTree.
        ValueError: If it has no posterior group with dims ``chain`` and ``draw``.

    Caveat:
        A pass means that no check found a fault, not that there is none: chains that all miss a mode agree with
        each other. Standard deviations of draws that pass may be off by `Verdict.tolerance`.

    References:
        Bayesian workflow (Gelman et al., 2020) https://arxiv.org/abs/2011.01808

    Example:
        >>> import numpy as np, xarray as xr
        >>> f = np.random.default_rng(0).normal(size=(4, 500, 3, 1))
        >>> dims = ("chain", "draw", "probe", "output")
        >>> tree = xr.DataTree.from_dict({
        ...     "posterior": xr.Dataset({"w": (dims[:2], f[:, :, 0, 0])}), "function": xr.Dataset({"f": (dims, f)})})
        >>> verdict = diagnose(tree)
        >>> verdict.draws, verdict.checked("model")
        ('pass', False)
    """
    evidence = Evidence.of(tree)
    evidence.require_draws()
    if reference is not None:
        reference = Evidence.of(reference, "reference")
        reference.require_draws("reference")
        if reference.tree is evidence.tree:
            reference = None
    broken = hopeless(evidence)
    if broken is not None:
        # the first row, `finite`
        return Verdict.from_checks(evidence.method, evidence.label, [TABLE[0].check(broken)])
    stand_in = other_target(evidence)
    checks = _checks(evidence, reference, stand_in)
    reasons: dict[Question, str] = {} if stand_in is None else {"draws": stand_in}
    code, model_numbers = why_unanswered(evidence)
    numbers: dict[Question, Mapping[str, Any]] = {"model": model_numbers}
    short = next((check for check in checks if check.code == "moves_short"), None)
    if short is not None:
        reasons["draws"] = short.code
        numbers["draws"] = short.numbers
    if code:
        reasons["model"] = code
        checks = [_without_leave_one_out(check) for check in checks]
    return Verdict.from_checks(evidence.method, evidence.label, checks, reasons, numbers)


def _without_leave_one_out(check: Check) -> Check:
    """Leave-one-out estimates that are reliable do not say that the model fits, where nothing else of it is checked."""
    if check.code == "loo_khat" and check.status == "pass":
        return replace(check, status="info")
    return check


def why_unanswered(evidence: Evidence) -> tuple[str, dict[str, Any]]:
    """Why no check of the model can be made, as a code and its numbers; an empty code where that is not known."""
    names = evidence.names(OBSERVED_DATA)
    if not names:
        if evidence.names(LOG_PRIOR):
            return "factor_only", {}
        return "no_data_stored", {}
    replicated = [name for name in names if name in evidence.names(POSTERIOR_PREDICTIVE)]
    joint = _joint_outcome(evidence)
    if joint is not None:
        return "joint_event", {"where": joint}
    selected = [str(view.outcome) for view in evidence.by_outcome if view.is_selected]
    if selected:
        return "selected_by_outcome", {"where": ", ".join(selected)}
    count = max(evidence.tree[OBSERVED_DATA][name].size for name in names)
    if count < MIN_DATA:
        return "few_data", {"count": count, "needed": MIN_DATA}
    if replicated and evidence.num_draws < FEWEST_DRAWS:
        return "few_replicates", {"count": evidence.num_draws, "needed": FEWEST_DRAWS}
    own = own_latents(evidence, count)
    if own is not None:
        return "own_latents", own._asdict()
    return "", {}


def _joint_outcome(evidence: Evidence) -> str | None:
    """The first outcome that is one event and has no predictives of its values in turn; None if there is none."""
    for view in evidence.by_outcome:
        if view.is_joint and view.one_step is None:
            return str(view.outcome)
    return None


def _checks(evidence: Evidence, reference: Evidence | None, stand_in: str | None) -> list[Check]:
    """The checks of all rows that apply; where the target is a stand-in, a pass against its density decides nothing."""
    checks = []
    for row in TABLE:
        if not row.applies(evidence):
            continue
        if not row.against:
            check = made(row, evidence)
        elif reference is not None:
            check = made(row, evidence, reference)
        else:
            continue
        if check is None:
            continue
        if row.code in OF_DENSITY and _says_nothing(check, evidence, stand_in):
            check = replace(check, status="info")
        checks.append(check)
    return [*checks, *_signs_of_damage(evidence)]


def _signs_of_damage(evidence: Evidence) -> list[Check]:
    """What `audit` finds wrong of a tree that this library did not make; that it finds nothing shows nothing."""
    if not evidence.is_foreign:
        return []
    audited = [made(row, evidence) for row in AUDIT if row.applies(evidence)]
    return [check for check in audited if check is not None and check.status in ("warn", "fail")]


def _says_nothing(check: Check, evidence: Evidence, stand_in: str | None) -> bool:
    """Whether a check of the density decides nothing of a net's own posterior, in function space.

    A pass against a stand-in does not; nor do single weights, where the function was held against the posterior.
    """
    if check.code == "beside_posterior":
        return False
    compared = beside_posterior(evidence) and evidence.has_hidden_units
    return bool(compared) or (check.status == "pass" and stand_in is not None)


def other_target(evidence: Evidence) -> str | None:
    """The code of what the draws are compared with where that is not the model's posterior; None where it is.

    A Gauss-Newton Gaussian *is* the posterior of the linearised net, and that of the last layer is the posterior given
    the others, whatever the posterior of the model is: a check of the density may fail there, but a pass shows nothing.
    """
    if evidence.is_linearized:
        return "linearized_only"
    return "conditional_only" if evidence.held_sites else None


def audit(tree: xr.DataTree | Evidence) -> Audit:
    """Say whether a tree was forged or damaged: chains copied, draws repeated, another log-likelihood.

    No fit of this library makes such a tree, so `diagnose` looks for it in trees of other libraries only.

    Args:
        tree: Draws as DataTree; only ``posterior`` is required.

    Returns:
        A verdict that says what was looked for and what was found, and nothing else of the draws.

    Raises:
        TypeError, ValueError: As `diagnose`.
    """
    evidence = Evidence.of(tree)
    evidence.require_draws()
    rows = [made(row, evidence) for row in AUDIT if row.applies(evidence)]
    checks = tuple(check for check in rows if check is not None)
    return Audit(evidence.method, evidence.label, checks)


def reference_label(trees: Mapping[str, xr.DataTree | Evidence]) -> str | None:
    """The run that the others are measured against: the first of chains that are exact once converged, else none."""
    for label, tree in trees.items():
        evidence = Evidence.of(tree)
        if not evidence.is_iid and evidence.claim == "exact":
            return label
    return None


def judge_all(trees: Mapping[str, xr.DataTree | Evidence]) -> dict[str, Verdict]:
    """`diagnose` every tree, with the first run of exact chains as the reference of the others.

    A tree that cannot be diagnosed at all gets a verdict that says so: the others are still judged.
    """
    evidence = {label: Evidence.of(tree) for label, tree in trees.items()}
    label_of_reference = reference_label(evidence)
    reference_run = None if label_of_reference is None else evidence[label_of_reference]
    verdicts = {}
    for label, run in evidence.items():
        try:
            comparable = (
                reference_run is not None
                and reference_run is not run
                and same_data([run, reference_run])
            )
            verdicts[label] = diagnose(run, reference=reference_run if comparable else None)
        except Exception as error:
            check = Check(
                "readable",
                "fail",
                code="unreadable",
                numbers={"error": said(error)},
            )
            verdicts[label] = Verdict.from_checks(run.method, label, [check])
    return verdicts
