"""The names that users gave: of features, classes and outputs, and the unit of the outcome."""

from __future__ import annotations

from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.diagnostics.evidence import Evidence, labels


def feature_names(evidence: Evidence, count: int) -> list[str]:
    """Names of the features: ``x``, or ``x[0]`` …, where the tree has none."""
    unnamed = ["x"] if count == 1 else [f"x[{index}]" for index in range(count)]
    return _labels(evidence, (CONSTANT_DATA, HELD_OUT), "x", "feature", count) or unnamed


def class_names(evidence: Evidence, count: int) -> list[str]:
    """Names of the classes: their numbers where the tree has none."""
    return _labels(evidence, (PREDICTIONS,), "probs", "class", count) or [
        str(i) for i in range(count)
    ]


def output_names(evidence: Evidence, count: int) -> list[str]:
    """Names of the outputs: that of the target, or ``y``, numbered where there are several and none has a name."""
    names = _labels(evidence, (PREDICTIONS,), "mean", "output", count)
    names = names or _labels(evidence, (OBSERVED_DATA, HELD_OUT), "y", "output", count)
    if names:
        return names
    target = evidence.text("target") or evidence.outcome or "y"
    return [target] if count == 1 else [f"{target}[{index}]" for index in range(count)]


def unit(evidence: Evidence) -> str:
    """Unit of the outcome, where the tree says it (the attribute ``units`` of the observed y); else empty."""
    y = evidence.variable(OBSERVED_DATA, evidence.outcome or "y")
    return "" if y is None else str(y.attrs.get("units", ""))


def _labels(
    evidence: Evidence,
    groups: tuple[str, ...],
    variable: str,
    dim: str,
    count: int,
) -> list[str] | None:
    """The names along a dimension of the first group that has as many."""
    by_group = (labels(evidence.variable(group, variable), dim) for group in groups)
    return next((names for names in by_group if names and len(names) == count), None)
