"""The sentences of a report: data and model, both answers about the recommended run, its skill, and the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA
from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.baselines import LINEAR, LOGISTIC
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.fidelity import REGIONS
from pyrobnn.diagnostics.labels import class_names, feature_names, output_names, unit
from pyrobnn.diagnostics.scores import num_outputs
from pyrobnn.report.results import COLUMNS, Results, Row, best_labels

_MOST_NAMES = 12
#: settings whose names are no words
_NAMES = {
    "num_warmup": "warm-up transitions",
    "num_data": "number of training points",
    "lr": "learning rate",
    "until": "runs until",
    "device": "computed on",
    "timings": "seconds",
    "common_start": "chains from one start",
}
#: settings that are stored as 0 or 1, for no or yes
FLAGS = ("common_start", "interrupted", "layer_products")
#: the better answer first
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


def name_in_words(name: str) -> str:
    """The name of a setting as one says it.

    >>> name_in_words("num_warmup"), name_in_words("num_chains"), name_in_words("created_at")
    ('warm-up transitions', 'number of chains', 'created at')
    """
    if name in _NAMES:
        return _NAMES[name]
    words = name.replace("_", " ")
    return f"number of {words.removeprefix('num ')}" if words.startswith("num ") else words


def in_words(value: object) -> str:
    """A setting as one says it; "" where there is none. Of several, those that are set.

    >>> in_words({"num_chains": 4, "until": None, "compile": True}), in_words(12345), in_words([])
    ('number of chains 4, compile yes', '12,345', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{int(value):,}"
    if isinstance(value, float | np.floating):
        return significant(float(value), 4)
    if isinstance(value, Mapping):
        entries = ((name_in_words(str(name)), in_words(entry)) for name, entry in value.items())
        return ", ".join(f"{name} {words}" for name, words in entries if words)
    if isinstance(value, list | tuple):
        return ", ".join(in_words(entry) for entry in value)
    return str(value)


def recommended(rows: Sequence[Row], verdicts: Mapping[str, Verdict]) -> str | None:
    """The label to trust first: by the answers about draws and model, then by held-out log density, then by order.

    A run whose draws did not pass and whose model was not checked comes last, and points come after distributions.
    None where the runs are of different data. The rows are those of the methods, without baselines.
    """
    if not all(row.ranked for row in rows):
        return None

    def order(row: Row) -> tuple[bool, int, int, bool, float]:
        verdict = verdicts[row.label]
        draws = verdict.shown_answer("draws")
        model = verdict.shown_answer("model")
        is_unseen = draws != "pass" and model == "not checked"
        # draws that were not examined may be as good or as bad as those with a warning
        rank_of_draws = RANKS.index("warn" if draws == "not checked" else draws)
        rank_of_model = RANKS.index(model)
        is_point = any(check.code == "point_estimate" for check in verdict.checks)
        loss = -row.values.get("log_prob", -math.inf)
        return is_unseen, rank_of_draws, rank_of_model, is_point, loss

    return min(rows, key=order).label


def headline(
    label: str,
    evidence: Evidence,
    verdict: Verdict,
    rows_and_baselines: Sequence[Row],
) -> str:
    """Both answers about one run, and the skill of its predictions."""
    return f"{label}: {verdict.in_words}. {_skill(label, evidence, rows_and_baselines)}".rstrip()


def conclude(rows: Sequence[Row], verdicts: Mapping[str, Verdict]) -> tuple[str, str]:
    """The recommendation, and a sentence about the other methods: plain text, labels not escaped.

    The rows are those of the methods, without baselines.
    """
    best = recommended(rows, verdicts)
    if best is None:
        answers = ", ".join(f"{row.label} ({verdicts[row.label].lines})" for row in rows)
        return f"These runs used different data and are not ranked. Their verdicts: {answers}.", ""
    if not any(_asks_about_draws(verdict) for verdict in verdicts.values()):
        return " ".join(verdict.summary for verdict in verdicts.values()), ""
    verdict = verdicts[best]
    other_labels = [row.label for row in rows if row.label != best]
    action = verdict.action.strip().rstrip(".")
    next_step = ""
    if action:
        addressee = f" for {best}" if other_labels else ""
        next_step = f"Next{addressee}: {action}."
    draws = verdict.shown_answer("draws")
    if draws == "fail":
        alone = f"{best} cannot be trusted yet: "
        opening = f"No method can be trusted yet: for {best}, " if other_labels else alone
        return f"{opening}{verdict.fault('draws')}.", next_step or "See the checks below."
    if draws == "pass":
        advice = f"Trust the draws of {best}."
    else:
        advice = f"Use {best}, with care: {verdict.fault('draws')}."
    warning = _warning_of_others(other_labels, verdicts)
    return advice, " ".join(filter(None, (warning, next_step)))


def beside_reference(results: Results) -> list[str]:
    """Of every method how far its function lies from that of the reference run, region by region, in a sentence.

    The first says so where the reference itself is in doubt.
    """
    reference = results.reference
    sentences = []
    for row in results.rows:
        places = []
        for region in REGIONS.values():
            shift = row.values.get(f"shift[{region}]")
            ratio = row.values.get(f"sd_ratio[{region}]")
            if shift is not None and ratio is not None:
                if ratio:
                    width = f"its sd is {significant(ratio, 2)} times that of {reference}"
                else:
                    width = "it has no width"
                places.append(f"{region} it is off by {significant(shift, 2)} sd and {width}")
        if places:
            sentences.append(
                f"The function of {row.label} compared with {reference}: {'; '.join(places)}."
            )
    if sentences and reference is not None and results.verdicts[reference].draws != "pass":
        doubt = (
            f"The draws of {reference} did not pass: a difference from them may be their own error."
        )
        sentences.insert(0, doubt)
    return sentences


def _asks_about_draws(verdict: Verdict) -> bool:
    return any(check.question == "draws" for check in verdict.checks)


def _warning_of_others(labels: Sequence[str], verdicts: Mapping[str, Verdict]) -> str:
    """The worst of the methods that are not recommended, with their faults."""
    for status, opening in (("fail", "Do not rely on"), ("warn", "Take care with")):
        worst = [label for label in labels if verdicts[label].draws == status]
        if worst:
            faults = [f"{label} ({verdicts[label].fault('draws')})" for label in worst]
            return f"{opening} {', '.join(faults)}."
    return ""


def _skill(label: str, evidence: Evidence, rows_and_baselines: Sequence[Row]) -> str:
    """Its share of held-out variance, beside a linear model; else that it was judged on training data."""
    row = next((row for row in rows_and_baselines if row.label == label), None)
    y = evidence.values(HELD_OUT, "y")
    if row is None or y is None or y.ndim == 0:
        return "No data were held out: the model is judged on its training data."
    words = _skill_in_words(row, evidence)
    if not words:
        return ""
    return (
        f"On {len(y):,} held-out points {label} {words}{_against_linear(row, rows_and_baselines)}."
    )


def _skill_in_words(row: Row, evidence: Evidence) -> str:
    """What it explains or classifies; "" of censored rows, and of predictions without training data."""
    if "accuracy" in row.values:
        return f"classifies {row.values['accuracy']:.0%} correctly"
    if "r2" not in row.values:
        return ""
    r2 = row.values["r2"]
    if r2 > 0.99:
        share = "over 99%"
    else:
        share = f"{r2:.0%}" if r2 > 0 else "nothing"
    count = num_outputs(evidence)
    target = " and ".join(output_names(evidence, count)) if count < 3 else f"the {count} outputs"
    return f"explains {share} of the variance of {target}"


def _against_linear(row: Row, rows_and_baselines: Sequence[Row]) -> str:
    """How its log density compares with the linear baseline's, by their paired difference."""
    linear = next(
        (baseline for baseline in rows_and_baselines if baseline.label in (LINEAR, LOGISTIC)), None
    )
    if linear is None:
        return ""
    near_best = best_labels([row, linear], LOG_PROB)
    if not near_best:
        return ""
    name = f"a {linear.label}" if linear.label == LINEAR else linear.label
    if row.label not in near_best:
        return f", and predicts worse than {name}"
    if linear.label in near_best:
        return f", no better than {name}"
    return f", and predicts better than {name}"


def facts(trees: Mapping[str, Evidence]) -> dict[str, str]:
    """Data, model, command and seed in words, name → the value of all trees, or their different values."""
    words: dict[str, list[str]] = {}
    for evidence in trees.values():
        for name, text in _facts_of(evidence).items():
            if text and text not in words.setdefault(name, []):
                words[name].append(text)
    return {name: _one_or_all(texts) for name, texts in words.items() if texts}


def _one_or_all(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"differs: {'; '.join(texts)}"


def _facts_of(evidence: Evidence) -> dict[str, str]:
    model = evidence.json("model")
    config = evidence.json("config")
    quick = isinstance(config, dict) and config.get("quick") is True
    parts = {"likelihood": evidence.likelihood} | (model if isinstance(model, dict) else {})
    names = ("net", "program", "prior", "likelihood")
    return {
        "data": _data(evidence),
        "inputs": _inputs(evidence),
        "target": _target(evidence),
        **{name: str(parts.get(name, "")) for name in names},
        "run": "quick: fewer steps and draws than in full, 500 rows at most" if quick else "",
        **{name: evidence.text(name) for name in ("command", "seed")},
    }


def _data(evidence: Evidence) -> str:
    """The name of the data, and how many points were trained on and held out."""
    train = _num_outcomes(evidence, OBSERVED_DATA) or int(evidence.number("num_data", 0))
    counts = {"training": train, "held-out": _num_outcomes(evidence, HELD_OUT)}
    shown = " and ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    return ": ".join(filter(None, (evidence.text("data"), f"{shown} points" if shown else "")))


def _num_outcomes(evidence: Evidence, group: str) -> int:
    """How many outcomes a group holds."""
    y = evidence.values(group, evidence.outcome or "y")
    return 0 if y is None else len(np.atleast_1d(y))


def _inputs(evidence: Evidence) -> str:
    """The number of inputs, and their names where they have any."""
    x = evidence.values(CONSTANT_DATA, "x")
    if x is None or x.ndim != 2:
        return ""
    names = feature_names(evidence, x.shape[1])
    return str(len(names)) if names[0] in ("x", "x[0]") else f"{len(names)}: {_listed(names, ', ')}"


def _target(evidence: Evidence) -> str:
    """The outcome: shares of its classes, or mean and sd of each output."""
    y = evidence.values(OBSERVED_DATA, evidence.outcome or "y")
    if y is None or y.ndim == 0 or y.size == 0:
        return evidence.text("target")
    if evidence.has_classes:
        counts = np.bincount(y.reshape(-1).astype(int), minlength=2)
        names = class_names(evidence, len(counts))
        shares = [
            f"{name} ({count / y.size:.0%})" for name, count in zip(names, counts, strict=True)
        ]
        return ": ".join(filter(None, (evidence.text("target"), _listed(shares, ", "))))
    y = y.astype(np.float64).reshape(len(y), -1)
    suffix = f" {unit(evidence)}" if unit(evidence) else ""
    outputs = []
    for name, values in zip(
        output_names(evidence, y.shape[1]),
        y.T,
        strict=True,
    ):
        mean = significant(float(values.mean()))
        sd = significant(float(values.std()))
        outputs.append(f"{name}, mean {mean}{suffix}, sd {sd}{suffix}")
    return _listed(outputs, "; ")


def _listed(words: Sequence[str], between: str) -> str:
    """At most 12 words, with … for the rest."""
    return between.join([*words[:_MOST_NAMES], *(["…"] if len(words) > _MOST_NAMES else [])])
