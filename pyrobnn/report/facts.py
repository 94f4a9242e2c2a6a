"""What a reader has to know before any number: the data, the model, the command and the seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.points import (
    CLASSES,
    class_names,
    feature_names,
    is_classification,
    outcome,
    output_names,
    unit,
)
from pyrobnn.report.sentences import significant

_MOST_NAMES = 12


def facts(trees: Mapping[str, Evidence]) -> dict[str, str]:
    """Name → words of what all trees agree on; where they do not, that they differ."""
    sources: dict[str, Callable[[Evidence], str]] = {
        "data": _data,
        "inputs": _inputs,
        "target": _target,
        "net": lambda each: _model(each, "net"),
        "program": lambda each: _model(each, "program"),
        "prior": lambda each: _model(each, "prior"),
        "likelihood": lambda each: _model(each, "likelihood") or each.likelihood,
        "run": _run,
        "command": lambda each: each.text("command"),
        "seed": lambda each: each.text("seed"),
    }
    found: dict[str, str] = {}
    for name, source in sources.items():
        said = list(dict.fromkeys(filter(None, (_tried(source, each) for each in trees.values()))))
        if said:
            found[name] = said[0] if len(said) == 1 else f"differs: {'; '.join(said)}"
    return found


def config(trees: Mapping[str, Evidence]) -> dict[str, Any] | None:
    """What the trees were run from, as ``pyrobnn compare --config`` takes it; None where their data differ."""
    written = [evidence.json("config") for evidence in trees.values()]
    found = [each for each in written if isinstance(each, dict) and isinstance(each.get("methods"), dict)]
    studies = [{name: value for name, value in each.items() if name != "methods"} for each in found]
    if not found or any(study != studies[0] for study in studies):
        return None
    return studies[0] | {"methods": {label: own for each in found for label, own in each["methods"].items()}}


def _tried(source: Callable[[Evidence], str], evidence: Evidence) -> str:
    """What a tree says; nothing where what it holds is not of the shape that it should be."""
    try:
        return source(evidence)
    except Exception:
        return ""


def _data(evidence: Evidence) -> str:
    train, test = _length(evidence, OBSERVED_DATA), _length(evidence, HELD_OUT)
    train = train or int(evidence.number("num_data", 0))
    counts = [f"{train:,} training"] if train else []
    counts += [f"{test:,} held-out"] if test else []
    name = evidence.text("data")
    points = f"{' and '.join(counts)} points" if counts else ""
    return ": ".join(filter(None, (name, points)))


def _length(evidence: Evidence, group: str) -> int:
    """Number of data: of ``y``, or of the only outcome, whatever its name."""
    values = evidence.values(group, outcome(evidence) or "y")
    return 0 if values is None else int(values.shape[0]) if values.ndim else 1


def _inputs(evidence: Evidence) -> str:
    x = evidence.values(CONSTANT_DATA, "x")
    x = evidence.values(HELD_OUT, "x") if x is None else x
    if x is None or x.ndim != 2:
        return ""
    names = feature_names(evidence, x.shape[1])
    if names[0] in ("x", "x[0]"):
        return str(x.shape[1])
    more = ", …" if len(names) > _MOST_NAMES else ""
    return f"{len(names)}: {', '.join(names[:_MOST_NAMES])}{more}"


def _target(evidence: Evidence) -> str:
    y = evidence.values(OBSERVED_DATA, outcome(evidence) or "y")
    if y is None or y.ndim == 0:
        return evidence.text("target")
    if is_classification(evidence) or evidence.likelihood in CLASSES:
        return _shares(evidence, y)
    y = y.astype(np.float64).reshape(len(y), -1)
    of = f" {unit(evidence)}" if unit(evidence) else ""
    each = [
        f"{name}, mean {significant(float(values.mean()))}{of}, sd {significant(float(values.std()))}{of}"
        for name, values in zip(output_names(evidence, y.shape[1]), y.T, strict=True)
    ]
    return "; ".join(each[:_MOST_NAMES]) + ("; …" if len(each) > _MOST_NAMES else "")


def _shares(evidence: Evidence, y: np.ndarray) -> str:
    labels = y.reshape(-1).astype(int)
    probs = evidence.variable(PREDICTIONS, "probs")
    width = 1 if probs is None else int(probs.sizes.get("class", 1))
    counts = np.bincount(labels, minlength=max(2, width))
    names = class_names(evidence, len(counts))
    each = [f"{name} ({count / len(labels):.0%})" for name, count in zip(names, counts, strict=True)]
    shown = ", ".join(each[:_MOST_NAMES]) + (", …" if len(each) > _MOST_NAMES else "")
    return ": ".join(filter(None, (evidence.text("target"), shown)))


def _run(evidence: Evidence) -> str:
    """That it was a short one."""
    written = evidence.json("config")
    quick = isinstance(written, dict) and written.get("quick") is True
    return "quick: fewer steps and draws than in full, 500 rows at most" if quick else ""


def _model(evidence: Evidence, part: str) -> str:
    model = evidence.json("model")
    return str(model.get(part, "")) if isinstance(model, dict) else ""
