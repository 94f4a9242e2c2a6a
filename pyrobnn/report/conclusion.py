"""Two sentences: which method to trust and why, and what to make of the rest."""

from __future__ import annotations

from collections.abc import Mapping

import xarray as xr

from pyrobnn.diagnostics import Evidence, Verdict
from pyrobnn.diagnostics.fidelity import paired_difference
from pyrobnn.diagnostics.judge import TARGET
from pyrobnn.report.comparison import Row
from pyrobnn.report.numbers import significant, with_error

NAMES = ("Pareto", "Kolmogorov", "Kruskal", "Laplace")
#: checks that say that nothing has examined the draws as those of a posterior
UNEXAMINED = ("posterior_claim", "convergence")
ORDER = {"pass": 0, "warn": 1, "fail": 2}


def _unseen(verdict: Verdict) -> bool:
    """Whether nobody has looked at the predictions: that nothing speaks against them is then no merit."""
    return verdict.status == "warn" and not verdict.checked("model")


def _without_claim(verdict: Verdict) -> bool:
    """Whether the draws were not examined as a posterior's: a point, an ensemble, chains that nothing identifies."""
    found = {check.name for check in verdict.checks}
    return not found.isdisjoint((*UNEXAMINED, "point_estimate")) or verdict.failed == verdict.passed == ()


def recommended(rows: list[Row], verdicts: Mapping[str, Verdict]) -> str | None:
    """The label to trust first: the best verdict, then the highest held-out log density, then the caller's order.

    The least examined must not win. Predictions that nobody has looked at come after those that were looked at and
    failed in something, and between two verdicts of the same status come last those whose draws nothing has examined as
    a posterior's (point estimates, ensembles, chains without an identified quantity). None where the runs are of
    different data.
    """
    if not all(row.ranked for row in rows):
        return None

    def order(row: Row) -> tuple[int, bool, bool, bool, float]:
        verdict = verdicts[row.label]
        unseen, point = _unseen(verdict), any(check.name == "point_estimate" for check in verdict.checks)
        log_prob = -row.values.get("log_prob", float("-inf"))
        rank = ORDER["fail"] if unseen else ORDER[verdict.status]
        return rank, unseen, point, _without_claim(verdict), log_prob

    return min(rows, key=order).label


def conclude(
    trees: Mapping[str, xr.DataTree | Evidence], rows: list[Row], verdicts: Mapping[str, Verdict]
) -> tuple[str, str]:
    """The recommendation, and a sentence about the other methods.

    Args:
        trees: label → DataTree.
        rows: the comparison table.
        verdicts: label → verdict; every label of `trees`.

    Returns:
        Two sentences of plain text; labels in them are the user's and not escaped.
    """
    best = recommended(rows, verdicts)
    if best is None:
        each = ", ".join(f"{row.label} {verdicts[row.label].status}" for row in rows)
        return (
            f"These runs used different data and are not ranked. Their verdicts: {each}.",
            "",
        )
    verdict = verdicts[best]
    others = [row.label for row in rows if row.label != best]
    if verdict.status == "fail" or (_unseen(verdict) and others):
        first = "No method can be trusted yet" if others else f"{best} cannot be trusted yet"
        unseen = [row.label for row in rows if _unseen(verdicts[row.label])]
        also = f"; the predictions of {_listed(unseen)} were not examined" if unseen else ""
        return f"{first}: {_evidence(verdict, best if others else '')}{also}.", _next(verdict)
    if verdict.status == "pass":
        reason = f"all {len(verdict.passed)} checks passed" if verdict.passed else "nothing spoke against it"
        if TARGET in verdict.unchecked:
            reason += ", none of which could compare its draws with the model"
        first = ", and ".join(filter(None, (f"Trust {best}: {reason}", _ranking(best, trees, rows)))) + "."
    else:
        parts = (
            f"Use {best}, with care: {_evidence(verdict)}",
            _less(best, others, verdicts),
            _ranking(best, trees, rows),
        )
        first = "; ".join(filter(None, parts)) + "."
    if not others:
        return first, _next(verdict) if verdict.status == "warn" else _cost(best, rows)
    return first, _others(others, best, rows, verdicts)


def _evidence(verdict: Verdict, label: str = "") -> str:
    deciding = (*verdict.failed, *verdict.warned)
    text = deciding[0].evidence.strip().rstrip(".") if deciding else "no check could be made"
    # the page is one sentence long here: a second clause of evidence stays in the verdict table
    text = text.split("; ")[0]
    return f"for {label}, {_lower(text)}" if label else _lower(text)


def _lower(text: str) -> str:
    """Lower-case a sentence's first letter unless the word is a name (R-hat, NUTS, Pareto)."""
    word = text.split(" ")[0]
    plain = word not in NAMES and (len(word) == 1 or (word[1:].islower() and word.isalpha()))
    return text[:1].lower() + text[1:] if plain else text


def _less(best: str, others: list[str], verdicts: Mapping[str, Verdict]) -> str:
    """That the recommended run was examined less than others, where it was."""
    if not _without_claim(verdicts[best]) or all(_without_claim(verdicts[other]) for other in others):
        return ""
    return "it was examined less than the others: its predictions were, but not its draws as those of a posterior"


def _next(verdict: Verdict) -> str:
    action = verdict.action.strip()
    return f"Next: {_lower(action.rstrip('.'))}." if action else "See the checks below for what to do next."


def _ranking(best: str, trees: Mapping[str, xr.DataTree | Evidence], rows: list[Row]) -> str:
    """Where its held-out log density stands among the others', in words; empty where it has none."""
    have = {row.label: row for row in rows if "log_prob" in row.values}
    if best not in have:
        return ""
    value, error = have[best].values["log_prob"], have[best].errors.get("log_prob")
    said = significant(value) if error is None else " ± ".join(with_error(value, error))
    subject = "its held-out log density per point"
    if len(have) == 1:
        return f"{subject} is {said}"
    leader = max(have, key=lambda label: have[label].values["log_prob"])
    others = [label for label in have if label != best]
    if all(_close(trees[best], trees[other]) for other in others):
        return f"{subject}, {said}, is within two standard errors of {'the' if len(others) == 1 else 'every'} other's"
    if leader == best:
        return f"{subject}, {said}, is the highest of {len(have)}"
    return f"{subject}, {said}, is {'close to' if _close(trees[best], trees[leader]) else 'below'} {leader}'s"


def _close(tree: xr.DataTree | Evidence, other: xr.DataTree | Evidence) -> bool:
    """Whether the held-out log densities differ by at most two standard errors of their paired difference."""
    difference = paired_difference(tree, other)
    return difference is not None and abs(difference[0]) <= 2 * difference[1]


def _others(others: list[str], best: str, rows: list[Row], verdicts: Mapping[str, Verdict]) -> str:
    by = {status: [o for o in others if verdicts[o].status == status] for status in ORDER}
    failed, careful = by["fail"], by["warn"]
    if failed:
        reason = _evidence(verdicts[failed[0]], failed[0] if len(failed) > 1 else "")
        return f"Do not rely on {_listed(failed)}: {reason}."
    if careful:
        reason = _evidence(verdicts[careful[0]], careful[0] if len(careful) > 1 else "")
        return f"{_listed(careful)} {'needs' if len(careful) == 1 else 'need'} care: {reason}."
    seconds = {row.label: row.values["fit_seconds"] for row in rows if "fit_seconds" in row.values}
    faster = [o for o in others if best in seconds and seconds.get(o, float("inf")) < 0.7 * seconds[best]]
    if faster:
        quick = min(faster, key=seconds.__getitem__)
        times = seconds[best] / max(seconds[quick], 1e-9)
        return f"{_listed(others)} passed too; {quick} was fitted {times:.0f} times as fast."
    return f"{_listed(others)} passed too."


def _listed(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _cost(best: str, rows: list[Row]) -> str:
    seconds = next(row.values.get("fit_seconds") for row in rows if row.label == best)
    return "" if seconds is None else f"Fitting took {seconds:.3g} s."
