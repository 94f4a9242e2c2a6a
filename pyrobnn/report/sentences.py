"""The report's first sentences: both answers about the recommended run, what it has been seen on, and the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pyrobnn.core.groups import HELD_OUT
from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.points import is_censored, output_names
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.diagnostics.verdict import Question
from pyrobnn.report.results import COLUMNS, Row, best_labels

#: question → answer → words, of the recommended run
ANSWERS: dict[Question, dict[str, str]] = {
    "draws": {
        "pass": "The draws are those of the posterior",
        "warn": "The draws can be used with care",
        "fail": "The draws are not those of the posterior",
        "not checked": "Nothing has compared the draws with the posterior",
    },
    "model": {
        "pass": "the model fits the data",
        "warn": "the model fits the data with reservations",
        "fail": "the model does not fit the data",
        "not checked": "nothing has compared the model with data",
    },
}
#: the better answer first: draws that nobody examined come before bad ones, a model that nobody examined after one
RANKS: dict[Question, tuple[str, ...]] = {
    "draws": ("pass", "warn", "not checked", "fail"),
    "model": ("pass", "warn", "fail", "not checked"),
}
LOG_PROB = next(column for column in COLUMNS if column.key == "log_prob")


def significant(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, with a real minus sign.

    >>> significant(-0.09017), significant(53.0), significant(1234.5), significant(2.5e-7)
    ('−0.0902', '53', '1234', '2.5e−07')
    """
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}g}".replace("-", "−")
    return (f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}").replace("-", "−")


def with_error(value: float, error: float) -> tuple[str, str]:
    """A number and its standard error, to the error's second significant digit.

    >>> with_error(-0.09017, 0.0971), with_error(123.4, 25.0)
    (('−0.090', '0.097'), ('123', '25'))
    """
    if not error > 0:
        return significant(value), significant(error)
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{decimals}f}".replace("-", "−"), f"{error:.{decimals}f}"


def answer(verdict: Verdict, question: Question) -> str:
    """ "pass", "warn", "fail" or "not checked"."""
    return verdict.line(question)[0] if verdict.checked(question) else "not checked"


def recommended(rows: Sequence[Row], verdicts: Mapping[str, Verdict]) -> str | None:
    """The label to trust first: by the answers about draws and model, then by held-out log density, then by order.

    The least examined must not win: a run whose draws did not pass and whose predictions nobody looked at comes last,
    and points come after distributions. None where the runs are of different data.
    """
    if not all(row.ranked for row in rows):
        return None

    def order(row: Row) -> tuple[bool, int, int, bool, float]:
        verdict = verdicts[row.label]
        draws, model = answer(verdict, "draws"), answer(verdict, "model")
        unseen = draws != "pass" and model == "not checked"
        ranks = RANKS["draws"].index(draws), RANKS["model"].index(model)
        point = any(check.code == "point_estimate" for check in verdict.checks)
        return unseen, *ranks, point, -row.values.get("log_prob", -math.inf)

    return min(rows, key=order).label


def headline(label: str, evidence: Evidence, verdict: Verdict, rows: Sequence[Row]) -> str:
    """Both answers about one run, and what its predictions were seen to be worth.

    Args:
        label: of the run. evidence, verdict: of it.
        rows: the comparison table with its baselines.
    """
    parts = []
    for question, words in ANSWERS.items():
        said = answer(verdict, question)
        parts.append(words[said] + (f": {_fault(verdict, question)}" if said in ("warn", "fail") else ""))
    return f"{'; '.join(parts)}. {_skill(label, evidence, rows)}"


def conclude(rows: Sequence[Row], verdicts: Mapping[str, Verdict]) -> tuple[str, str]:
    """The recommendation, and a sentence about the other methods.

    Args:
        rows: the comparison table.
        verdicts: label → verdict; every label of `rows`.

    Returns:
        Two sentences of plain text; labels in them are the user's and not escaped.
    """
    best = recommended(rows, verdicts)
    if best is None:
        each = ", ".join(f"{row.label} ({verdicts[row.label].lines})" for row in rows)
        return f"These runs used different data and are not ranked. Their verdicts: {each}.", ""
    verdict = verdicts[best]
    others = [row.label for row in rows if row.label != best]
    draws, model = answer(verdict, "draws"), answer(verdict, "model")
    action = verdict.action.strip().rstrip(".")
    todo = f"Next: {_lower(action)}." if action else "See the checks below for what to do next."
    if draws == "fail":
        first = f"No method can be trusted yet: for {best}, " if others else f"{best} cannot be trusted yet: "
        return f"{first}{_fault(verdict, 'draws')}.", todo
    if draws == "not checked":
        opening = f"Use {best}, with care: nothing has compared its draws with the posterior"
    elif draws == "warn":
        opening = f"Use {best}, with care: {_fault(verdict, 'draws')}"
    else:
        opening = f"Trust the draws of {best}"
    if model in ("warn", "fail"):
        opening += f"; {ANSWERS['model'][model]}"
    first = "; ".join(filter(None, (opening, _standing(best, rows)))) + "."
    return first, _others(others, verdicts) if others else "" if verdict.status == "pass" else todo


def _fault(verdict: Verdict, question: Question) -> str:
    """What is wrong, in a few words."""
    worst = verdict.worst(question)
    return "" if worst is None else worst.fault


def _lower(text: str) -> str:
    """Lower-case a sentence's first letter unless the word is a name (R-hat, NUTS, Pareto)."""
    word = text.split(" ")[0]
    plain = word not in ("Pareto", "Laplace") and (len(word) == 1 or word[1:].islower() and word.isalpha())
    return text[:1].lower() + text[1:] if plain else text


def _standing(best: str, rows: Sequence[Row]) -> str:
    """Where its held-out log density stands among the others', in words; empty where it has none."""
    have = {row.label: row for row in rows if "log_prob" in row.values}
    if best not in have:
        return ""
    value, error = have[best].values["log_prob"], have[best].errors.get("log_prob")
    number = significant(value) if error is None else " ± ".join(with_error(value, error))
    subject = "its held-out log density per point"
    if len(have) == 1:
        return f"{subject} is {number}"
    close = best_labels(list(have.values()), LOG_PROB)
    if close == set(have):
        return f"{subject}, {number}, is within two standard errors of every other's"
    leader = max(have, key=lambda label: have[label].values["log_prob"])
    if leader == best:
        return f"{subject}, {number}, is the highest of {len(have)}"
    return f"{subject}, {number}, is {'close to' if best in close else 'below'} {leader}'s"


def _others(others: list[str], verdicts: Mapping[str, Verdict]) -> str:
    for status, opening in (("fail", "Do not rely on"), ("warn", "Take care with")):
        if found := [label for label in others if answer(verdicts[label], "draws") == status]:
            named = [f"{label} ({_fault(verdicts[label], 'draws')})" for label in found]
            return f"{opening} {_listed(named)}."
    unseen = [label for label in others if answer(verdicts[label], "draws") == "not checked"]
    if unseen:
        return f"The draws of {_listed(unseen)} were not examined as those of a posterior."
    return f"The draws of {_listed(others)} passed too."


def _listed(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _skill(label: str, evidence: Evidence, rows: Sequence[Row]) -> str:
    """What it explains of held-out data, beside a linear model; else that it was judged on training data."""
    own = next((row for row in rows if row.label == label), None)
    y = evidence.values(HELD_OUT, "y")
    if own is not None and y is not None and is_censored(evidence) and "coverage_90" in own.values:
        covered = f"the 90 % intervals of {label} hold {own.values['coverage_90']:.0%}"
        return f"On {len(y):,} held-out points, some of them censored, {covered}."
    if own is None or y is None or y.ndim == 0 or not {"r2", "accuracy"} & own.values.keys():
        return "No data were held out: this judgement rests on the data that it was fitted to."
    count = num_outputs(evidence)
    target = " and ".join(output_names(evidence, count)) if count < 3 else f"the {count} outputs"
    if "r2" not in own.values:
        words = f"classifies {own.values['accuracy']:.0%} correctly"
    elif own.values["r2"] <= 0:
        words = f"explains nothing of the variance of {target}"
    else:
        words = f"explains {own.values['r2']:.0%} of the variance of {target}"
    return f"On {len(y):,} held-out points {label} {words}{_against_linear(own, rows)}."


def _against_linear(own: Row, rows: Sequence[Row]) -> str:
    """How its log density compares with the linear baseline's, by their paired difference."""
    linear = next((row for row in rows if row.label in ("linear model", "logistic regression")), None)
    close = best_labels([own, linear], LOG_PROB) if linear is not None else set()
    if linear is None or not close:
        return ""
    name = f"a {linear.label}" if linear.label == "linear model" else linear.label
    if own.label not in close:
        return f", and predicts worse than {name}"
    return f", no better than {name}" if linear.label in close else f", and predicts better than {name}"
