"""The page's first sentences: whether a posterior is usable, what is wrong with it, and what it has been seen on."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.calibration import regions_of
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.names import output_names
from pyrobnn.diagnostics.points import is_censored, replicates
from pyrobnn.diagnostics.rows import in_order
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.diagnostics.verdict import Check
from pyrobnn.groups import HELD_OUT
from pyrobnn.report.comparison import COLUMNS, Row, best_labels

USABLE = {"pass": "Usable", "warn": "Usable with care", "fail": "Not usable yet"}
_LEVEL = 0.9
_MOST_FAULTS = 2
#: parts of the names of checks → the fault, as one would tell it to whoever wants to use the predictions
FAULTS = (
    (("interrupted",), "the fit was cut short"),
    (("rhat", "modes", "chains"), "the chains do not agree with each other"),
    (("ess", "mcse", "length", "num_draws"), "there are too few independent draws"),
    (
        ("divergences", "bfmi", "tree_depth", "acceptance"),
        "the sampler may have missed part of the posterior",
    ),
    (("point_estimate",), "it is a point estimate, whose error bars contain the noise alone"),
    (("function_moves", "correction"), "its function is not that of the posterior"),
    (("sd_ratio",), "its uncertainty about the function differs from the reference's"),
    (("wasserstein", "total_variation", "elpd_against"), "its predictions differ from the reference's"),
    (
        ("khat", "virial", "score", "density_moves", "posterior_claim"),
        "its draws are not those of the posterior",
    ),
    (("pattern",), "the mean misses a pattern in the data"),
    (("ece",), "its probabilities do not match the observed frequencies"),
    (("prior", "temperature"), "the prior has more influence than it should"),
    (("held_out_rows", "repeats", "copies"), "rows occur more than once in the data"),
)


def headline(label: str, evidence: Evidence, verdict: Verdict, rows: Sequence[Row]) -> str:
    """Whether the predictions of one run can be used, in a scientist's words, and on what data that was seen.

    Args:
        label: of the run. evidence, verdict: of it.
        rows: the comparison table with its baselines.
    """
    faults = [_fault(check, evidence) for check in (*verdict.failed, *verdict.warned)]
    told = list(dict.fromkeys(faults))
    more = f" (and {len(told) - _MOST_FAULTS} more)" if len(told) > _MOST_FAULTS else ""
    listed = "; ".join(told[:_MOST_FAULTS]) + more
    opening = (
        f"{USABLE[verdict.status]}: {listed}."
        if told
        else f"{USABLE[verdict.status]}: no check found a fault."
    )
    return f"{opening} {_skill(label, evidence, rows)}"


def _fault(check: Check, evidence: Evidence) -> str:
    if check.name == "coverage_by_region" and (where := _worst_region(evidence)):
        return where
    if check.name in ("coverage_90", "pit", "loo_pit", "training_pit"):
        for side in ("narrow", "wide"):
            if f"too {side}" in check.action:
                return f"error bars are too {side}"
        return "predictions are biased" if "biased" in check.action else "error bars do not fit the errors"
    for parts, words in FAULTS:
        if any(part in check.name for part in parts):
            return words
    text = check.evidence.split("; ")[0]
    if check.name == "fit_warnings":  # what happened, without the causes and remedies that follow
        text = re.split(r"(?<!warned): |\. ", text)[0]
    text = text.rstrip(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


def _worst_region(evidence: Evidence) -> str:
    """Where 90 % intervals are furthest from covering 90 %, in words; empty where nothing tells."""
    worst = (0.0, "")
    for (u, covariates), which in zip(regions_of(evidence), _which(evidence), strict=False):
        inside = (np.abs(u - 0.5) <= 0.5 * _LEVEL).mean(axis=1)
        for name, values in covariates.items():
            parts = np.array_split(in_order(values), 4)
            covered = [float(inside[part].mean()) for part in parts if len(part)]
            gap = max(covered) - min(covered)
            if len(covered) < 4 or gap <= worst[0]:
                continue
            narrow = _LEVEL - min(covered) >= max(covered) - _LEVEL
            at = int(np.argmin(covered) if narrow else np.argmax(covered))
            size = ("low", "middling", "middling", "high")[at]
            of = "predicted values" if name == "the predicted mean" else f"values of {name}"
            worst = (gap, f"error bars are too {'narrow' if narrow else 'wide'} for {size} {of} ({which})")
        if worst[1]:
            break
    return worst[1]


def _which(evidence: Evidence) -> tuple[str, ...]:
    return ("held-out data",) if replicates(evidence) is None else ("training data", "held-out data")


def _skill(label: str, evidence: Evidence, rows: Sequence[Row]) -> str:
    """What it explains of held-out data, beside a linear model; else that it was judged on training data."""
    own = next((row for row in rows if row.label == label), None)
    y = evidence.values(HELD_OUT, "y")
    if own is not None and y is not None and is_censored(evidence) and "coverage_90" in own.values:
        held = f"the 90 % intervals of {label} hold {own.values['coverage_90']:.0%}"
        return f"On {len(y):,} held-out points, some of them censored, {held}."
    if own is None or y is None or y.ndim == 0 or not {"r2", "accuracy"} & own.values.keys():
        return "No data were held out: this judgement rests on the data that it was fitted to."
    count = num_outputs(evidence)
    target = " and ".join(output_names(evidence, count)) if count < 3 else f"the {count} outputs"
    if "r2" in own.values:
        words = f"explains {own.values['r2']:.0%} of the variance of {target}".replace("-", "−")
        if own.values["r2"] <= 0:
            words = f"explains nothing of the variance of {target}"
    else:
        words = f"classifies {own.values['accuracy']:.0%} correctly"
    return f"On {len(y):,} held-out points {label} {words}{_against_linear(own, rows)}."


def _against_linear(own: Row, rows: Sequence[Row]) -> str:
    """How its log density compares with the linear baseline's, by their paired difference."""
    linear = [row for row in rows if row.label in ("linear model", "logistic regression")]
    column = next(column for column in COLUMNS if column.key == "log_prob")
    if not linear or column.key not in own.points:
        return ""
    close = best_labels([own, linear[0]], column)
    if not close:
        return ""
    name = f"a {linear[0].label}" if linear[0].label == "linear model" else linear[0].label
    if own.label not in close:
        return f", and predicts worse than {name}"
    return f", no better than {name}" if linear[0].label in close else f", and predicts better than {name}"
