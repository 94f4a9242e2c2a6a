"""`diagnose`: every check that a tree allows, and the verdict that they add up to."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import xarray as xr

from pyrobnn.diagnostics import reading, thresholds
from pyrobnn.diagnostics.calibration import calibration_checks
from pyrobnn.diagnostics.convergence import convergence_checks
from pyrobnn.diagnostics.fidelity import cost_per_draw, fidelity_checks
from pyrobnn.diagnostics.importance import importance_checks
from pyrobnn.diagnostics.integrity import fit_warnings, hopeless, integrity_checks, interrupted
from pyrobnn.diagnostics.loo import loo, loo_checks
from pyrobnn.diagnostics.model_checks import model_checks
from pyrobnn.diagnostics.sampler import sampler_checks
from pyrobnn.diagnostics.verdict import Check, Verdict, said


def diagnose(tree: xr.DataTree, *, reference: xr.DataTree | None = None) -> Verdict:
    """Say whether a posterior can be believed, on what evidence, and what to do next.

    Markov chains are judged by R-hat and effective sample size *in function space* and by their sampler;
    approximations with independent draws, for which R-hat is 1 by construction, by Pareto k-hat of p/q and LOO;
    every method by calibration, by checks
    of the model, and, where a reference is given, by its distance from it. What a tree does not hold is left out: a
    missing check is never a pass. A check that raises becomes a check that says so.

    Args:
        tree: Draws as DataTree: from this library, NumPyro or PyMC; only ``posterior`` is required.
        reference: DataTree of a long NUTS run on the same model and data; None for no comparison.

    Returns:
        The verdict. Point estimates (one draw) never get better or worse than "warn": they have no epistemic
        uncertainty to judge.

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
    reading.check_tree(tree)
    if reference is not None:
        reading.check_tree(reference, "reference")
    name = reading.method(tree)
    label = reading.text(tree, "label") or name
    broken = hopeless(tree)
    if broken is not None:
        stopped = interrupted(tree)
        return Verdict.from_checks(name, label, [broken] if stopped is None else [broken, stopped])
    point = reading.is_point(tree)
    checks = _made("draws", integrity_checks, tree)
    if point:
        checks.append(_point_estimate(name))
    elif reading.is_iid(tree):
        checks += _made("importance", importance_checks, tree)
    else:
        checks += _made("convergence", convergence_checks, tree)
        checks += _made("sampler", sampler_checks, tree)
    if not point:
        checks += _made("leave_one_out", lambda t: loo_checks(t, loo(t)), tree)
    checks += _made("calibration", calibration_checks, tree)
    checks += _made("model", model_checks, tree)
    if reference is not None and reference is not tree and not point:
        checks += _made("fidelity", fidelity_checks, tree, reference)
    checks += _made("cost", _cost, tree)
    checks += _made("fit_warnings", fit_warnings, tree)
    if point:
        checks = [replace(check, status="warn") if check.status == "fail" else check for check in checks]
    nothing = not any(check.status in ("pass", "warn", "fail") for check in checks)
    return Verdict.from_checks(name, label, checks, at_least="warn" if nothing else "pass")


def _made(what: str, make: Callable[..., list[Check]], *trees: xr.DataTree) -> list[Check]:
    """The checks that `make` makes; where it raises, one that says so: a check that failed to run is not a pass."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            return make(*trees)
    except Exception as error:
        # whatever a foreign tree holds, the other checks and trees are still worth having
        return [
            Check(
                what,
                "warn",
                None,
                "",
                "numerical",
                f"The {what.replace('_', ' ')} checks could not be made: {said(error)}.",
                "Look at the draws and data that they rest on; until then this is unjudged.",
            )
        ]


def _point_estimate(name: str) -> Check:
    method = "This run" if name == "unknown" else name
    return Check(
        "point_estimate",
        "warn",
        1.0,
        "more than one draw",
        thresholds.POSTERIOR_CLAIM_SOURCE,
        f"{method} is a point estimate: no epistemic uncertainty.",
        "Use it as a baseline or a start; for uncertainty fit Laplace around it, SVI or NUTS.",
    )


def _cost(tree: xr.DataTree) -> list[Check]:
    seconds = cost_per_draw(tree)
    if seconds is None or not np.isfinite(seconds):
        return []
    shown = f"{seconds:.2g} s" if seconds >= 1.0 else f"{1e3 * seconds:.2g} ms"
    return [
        Check(
            "cost",
            "info",
            seconds,
            "",
            thresholds.PARETO_SOURCE if reading.is_iid(tree) else thresholds.ESS_SOURCE,
            f"Fitting took {shown} per effective draw of the function.",
        )
    ]
