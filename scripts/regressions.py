"""Which numbers of a run are worse than those of earlier commits by more than the noise of their repeats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median, stdev
from typing import Any, Literal

from scipy.stats import t

#: chance of an alarm where nothing has changed, over all numbers and all records that they are compared with
FALSE_ALARMS = 0.01
#: repeats that a standard error needs
FEWEST = 3
#: standard error of a median over that of a mean, of normal repeats
OF_MEDIAN = math.sqrt(math.pi / 2)

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Number:
    """What a number is: its words, whether its changes are factors or differences, and which way is worse."""

    label: str
    kind: Literal["factor", "difference"]
    worse: Literal["higher", "lower"]
    #: a time depends on the machine, a score does not
    of_machine: bool

    def scaled(self, values: Sequence[float]) -> list[float]:
        """The repeats on the scale on which changes are differences, and higher is worse."""
        sign = 1.0 if self.worse == "higher" else -1.0
        return [sign * (math.log(v) if self.kind == "factor" else v) for v in values]


@dataclass(frozen=True)
class Change:
    """A number that got worse: by ``errors`` standard errors, of which ``allowed`` are noise."""

    number: Number
    before: float
    now: float
    commit: str
    errors: float
    allowed: float

    def __str__(self) -> str:
        by = f"{self.now / self.before:.2f} times" if self.number.kind == "factor" else "now"
        return (
            f"{self.number.label}: {by} that of commit {self.commit} ({self.before:.3g} → {self.now:.3g}), worse by "
            f"{self.errors:.1f} standard errors where noise explains {self.allowed:.1f}"
        )


def centre(values: Sequence[float]) -> tuple[float, float]:
    """The median of the repeats and its standard error.

    Raises:
        ValueError: fewer than three repeats, of which no error can be told.
    """
    if len(values) < FEWEST:
        raise ValueError(f"a standard error needs {FEWEST} repeats, got {len(values)}")
    return median(values), OF_MEDIAN * stdev(values) / math.sqrt(len(values))


def comparable(number: Number, name: str, now: Record, history: Sequence[Record]) -> list[Record]:
    """Earlier records that hold the number, of this machine where it is a time, none from before it was accepted."""
    found: list[Record] = []
    for record in history:
        if name in record.get("accepted", {}):
            found.clear()
        same = record["machine"] == now["machine"] or not number.of_machine
        if same and len(record["values"].get(name, ())) >= FEWEST:
            found.append(record)
    return found


def changes(now: Record, history: Sequence[Record], numbers: Mapping[str, Number]) -> list[Change]:
    """Numbers of ``now`` that are worse than in an earlier record; of several such records the latest is told.

    Each comparison is Welch's t-test of two medians; the share of false alarms is Bonferroni's over all of them. A
    slow drift is found against the first record, as a sudden one is against the last.
    """
    pairs = [
        (name, record)
        for name, number in numbers.items()
        if name in now["values"]
        for record in comparable(number, name, now, history)
    ]
    found: dict[str, Change] = {}
    for name, record in pairs:
        number = numbers[name]
        old, old_error = centre(number.scaled(record["values"][name]))
        new, new_error = centre(number.scaled(now["values"][name]))
        error = math.hypot(old_error, new_error)
        if not new > old:
            continue
        errors = (new - old) / error if error > 0 else math.inf
        share = FALSE_ALARMS / len(pairs)
        if errors <= NormalDist().inv_cdf(1 - share):  # Student's quantile is higher, and slow
            continue
        counts = [len(record["values"][name]), len(now["values"][name])]
        freedom = _freedom([old_error, new_error], counts)
        allowed = float(t.isf(share, freedom))
        if errors > allowed:
            before, after = median(record["values"][name]), median(now["values"][name])
            found[name] = Change(number, before, after, record["commit"], errors, allowed)
    return list(found.values())


def _freedom(errors: Sequence[float], counts: Sequence[int]) -> float:
    """Welch and Satterthwaite's degrees of freedom."""
    parts = sum(error**4 / (count - 1) for error, count in zip(errors, counts, strict=True))
    return sum(error**2 for error in errors) ** 2 / parts if parts > 0 else math.inf
