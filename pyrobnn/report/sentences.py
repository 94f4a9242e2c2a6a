"""The sentences of a report: data and model, both answers about the recommended run, its skill, and the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA
from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.points import (
    class_names,
    feature_names,
    has_classes,
    outcome,
    output_names,
    unit,
)
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.report.results import COLUMNS, Row, best_labels

_MOST_NAMES = 12
#: the better answer first; draws that were not examined may be as good or as bad as those with a warning
RANKS = ("pass", "warn", "fail", "not checked")
LOG_PROB = next(column for column in COLUMNS if column.key == "log_prob")


def significant(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, with a real minus sign.

    >>> significant(-0.09017), significant(53.0), significant(1234.5), significant(2.5e-7)
    ('−0.0902', '53', '1234', '2.5e−07')
    """
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}g}".replace("-", "−")
    return (f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}").replace("-", "−")


def recommended(rows: Sequence[Row], verdicts: Mapping[str, Verdict]) -> str | None:
    """The label to trust first: by the answers about draws and model, then by held-out log density, then by order.

    A run whose draws did not pass and whose model was not checked comes last, and points come after distributions.
    None where the runs are of different data.
    """
    if not all(row.ranked for row in rows):
        return None

    def order(row: Row) -> tuple[bool, int, int, bool, float]:
        verdict = verdicts[row.label]
        draws = verdict.shown_answer("draws")
        model = verdict.shown_answer("model")
        unseen = draws != "pass" and model == "not checked"
        ranks = RANKS.index("warn" if draws == "not checked" else draws), RANKS.index(model)
        point = any(check.code == "point_estimate" for check in verdict.checks)
        return unseen, *ranks, point, -row.values.get("log_prob", -math.inf)

    return min(rows, key=order).label


def headline(label: str, evidence: Evidence, verdict: Verdict, rows: Sequence[Row]) -> str:
    """Both answers about one run, and the skill of its predictions; `rows` is the table with its baselines."""
    return f"{label}: {verdict.in_words}. {_skill(label, evidence, rows)}".rstrip()


def conclude(rows: Sequence[Row], verdicts: Mapping[str, Verdict]) -> tuple[str, str]:
    """The recommendation, and a sentence about the other methods: plain text, labels not escaped."""
    best = recommended(rows, verdicts)
    if best is None:
        each = ", ".join(f"{row.label} ({verdicts[row.label].lines})" for row in rows)
        return f"These runs used different data and are not ranked. Their verdicts: {each}.", ""
    if not any(check.question == "draws" for each in verdicts.values() for check in each.checks):
        return " ".join(each.summary for each in verdicts.values()), ""
    verdict = verdicts[best]
    others = [row.label for row in rows if row.label != best]
    draws = verdict.shown_answer("draws")
    action = verdict.action.strip().rstrip(".")
    todo = (
        f"Next{f' for {best}' if others else ''}: {action}." if action else "See the checks below."
    )
    if draws == "fail":
        first = (
            f"No method can be trusted yet: for {best}, "
            if others
            else f"{best} cannot be trusted yet: "
        )
        return f"{first}{verdict.fault('draws')}.", todo
    first = (
        f"Trust the draws of {best}."
        if draws == "pass"
        else f"Use {best}, with care: {verdict.fault('draws')}."
    )
    return first, " ".join(filter(None, (_others(others, verdicts), action and todo)))


def _others(others: list[str], verdicts: Mapping[str, Verdict]) -> str:
    """The worst of the others, with their faults."""
    for status, opening in (("fail", "Do not rely on"), ("warn", "Take care with")):
        found = {
            label: verdicts[label].fault("draws")
            for label in others
            if verdicts[label].draws == status
        }
        if named := ", ".join(f"{label} ({fault})" for label, fault in found.items()):
            return f"{opening} {named}."
    return ""


def _skill(label: str, evidence: Evidence, rows: Sequence[Row]) -> str:
    """Its share of held-out variance, beside a linear model; else that it was judged on training data."""
    own = next((row for row in rows if row.label == label), None)
    y = evidence.values(HELD_OUT, "y")
    if own is None or y is None or y.ndim == 0:
        return "No data were held out: this judgement rests on the data that it was fitted to."
    count = num_outputs(evidence)
    target = " and ".join(output_names(evidence, count)) if count < 3 else f"the {count} outputs"
    if "accuracy" in own.values:
        words = f"classifies {own.values['accuracy']:.0%} correctly"
    elif "r2" in own.values:
        r2 = own.values["r2"]
        share = "over 99%" if r2 > 0.99 else f"{r2:.0%}" if r2 > 0 else "nothing"
        words = f"explains {share} of the variance of {target}"
    else:  # of censored rows, and predictions without training data
        return ""
    return f"On {len(y):,} held-out points {label} {words}{_against_linear(own, rows)}."


def _against_linear(own: Row, rows: Sequence[Row]) -> str:
    """How its log density compares with the linear baseline's, by their paired difference."""
    linear = next(
        (row for row in rows if row.label in ("linear model", "logistic regression")), None
    )
    close = best_labels([own, linear], LOG_PROB) if linear is not None else set()
    if linear is None or not close:
        return ""
    name = f"a {linear.label}" if linear.label == "linear model" else linear.label
    if own.label not in close:
        return f", and predicts worse than {name}"
    return (
        f", no better than {name}"
        if linear.label in close
        else f", and predicts better than {name}"
    )


def facts(trees: Mapping[str, Evidence]) -> dict[str, str]:
    """Data, model, command and seed in words, name → the value of all trees, or their different values."""
    found: dict[str, list[str]] = {}
    for evidence in trees.values():
        model = evidence.json("model")
        config = evidence.json("config")
        parts = {"likelihood": evidence.likelihood} | (model if isinstance(model, dict) else {})
        quick = isinstance(config, dict) and config.get("quick") is True
        own = {
            "data": _data(evidence),
            "inputs": _inputs(evidence),
            "target": _target(evidence),
            **{
                part: str(parts.get(part, "")) for part in ("net", "program", "prior", "likelihood")
            },
            "run": "quick: fewer steps and draws than in full, 500 rows at most" if quick else "",
            **{name: evidence.text(name) for name in ("command", "seed")},
        }
        for name, words in own.items():
            if words and words not in found.setdefault(name, []):
                found[name].append(words)
    return {
        name: words[0] if len(words) == 1 else f"differs: {'; '.join(words)}"
        for name, words in found.items()
        if words
    }


def _data(evidence: Evidence) -> str:
    outcomes = [
        evidence.values(group, outcome(evidence) or "y") for group in (OBSERVED_DATA, HELD_OUT)
    ]
    train, test = (0 if each is None else len(np.atleast_1d(each)) for each in outcomes)
    counts = {"training": train or int(evidence.number("num_data", 0)), "held-out": test}
    shown = " and ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    return ": ".join(filter(None, (evidence.text("data"), f"{shown} points" if shown else "")))


def _inputs(evidence: Evidence) -> str:
    x = evidence.values(CONSTANT_DATA, "x")
    if x is None or x.ndim != 2:
        return ""
    names = feature_names(evidence, x.shape[1])
    return str(len(names)) if names[0] in ("x", "x[0]") else f"{len(names)}: {_first(names, ', ')}"


def _target(evidence: Evidence) -> str:
    y = evidence.values(OBSERVED_DATA, outcome(evidence) or "y")
    if y is None or y.ndim == 0 or y.size == 0:
        return evidence.text("target")
    if has_classes(evidence):
        counts = np.bincount(y.reshape(-1).astype(int), minlength=2)
        names = class_names(evidence, len(counts))
        shares = [
            f"{name} ({count / y.size:.0%})" for name, count in zip(names, counts, strict=True)
        ]
        return ": ".join(filter(None, (evidence.text("target"), _first(shares, ", "))))
    y = y.astype(np.float64).reshape(len(y), -1)
    of = f" {unit(evidence)}" if unit(evidence) else ""
    each = [
        f"{name}, mean {significant(float(values.mean()))}{of}, sd {significant(float(values.std()))}{of}"
        for name, values in zip(output_names(evidence, y.shape[1]), y.T, strict=True)
    ]
    return _first(each, "; ")


def _first(words: Sequence[str], between: str) -> str:
    return between.join([*words[:_MOST_NAMES], *(["…"] if len(words) > _MOST_NAMES else [])])
