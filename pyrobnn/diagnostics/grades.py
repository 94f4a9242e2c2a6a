"""How a number becomes a status: what a statistic of a check comes to, and the grades that limits give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Status = Literal["pass", "warn", "fail", "info"]

#: what a statistic is held against, to pass first
Limits = tuple[float, ...]

#: share of the points that the looser limits are held against
MOST = 0.9


@dataclass(frozen=True)
class Found:
    """What the statistic of a row came to: a status with the number that decided it, a code, and more numbers."""

    status: Status
    value: float | None = None
    code: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = None  # where it depends on the run; else that of the row


def grade(
    value: float,
    good: float,
    bad: float,
    *,
    higher: bool = False,
) -> Status:
    """The status of a distance with its two limits; of a similarity where `higher` is better."""
    if higher:
        value = -value
        good = -good
        bad = -bad
    if value <= good:
        return "pass"
    return "fail" if value > bad else "warn"


def grade_tested(
    p: float,
    effect: float,
    rates: tuple[float, float],
    limits: Limits,
) -> Status:
    """The status of an effect that counts where it is not chance: below a rate and above a limit, to warn, to fail."""
    warns, fails = (
        p < rate and effect > limit for rate, limit in zip(rates, limits[:2], strict=True)
    )
    if fails:
        return "fail"
    return "warn" if warns else "pass"


def worse(*grades: Status) -> Status:
    """The worst of some grades."""
    if "fail" in grades:
        return "fail"
    return "warn" if "warn" in grades else "pass"


def by_kind(values: np.ndarray, kinds: np.ndarray) -> list[np.ndarray]:
    """The values (point, output) at the points of each kind (point,), flat and without NaN; none where all are NaN."""
    of_kinds = []
    for kind in np.unique(kinds):
        of_kind = values[kinds == kind].ravel()
        known = of_kind[~np.isnan(of_kind)]
        if known.size:
            of_kinds.append(known)
    return of_kinds


def grade_by_kind(
    shift: np.ndarray,
    ratio: np.ndarray,
    kinds: np.ndarray,
    limits: Limits,
) -> Status:
    """The grade of sizes of shifts (sd) and of ratios of sds, at most 1, (point, output) at each kind of point.

    In the median, and at nine in ten points: of these with twice the limits of the shift, and half those of the ratio.
    """
    near, far, alike, unlike = limits[:4]
    grades = []
    for shifts in by_kind(shift, kinds):
        grades.append(grade(float(np.median(shifts)), near, far))
        grades.append(grade(float(np.quantile(shifts, MOST)), 2.0 * near, 2.0 * far))
    for ratios in by_kind(ratio, kinds):
        grades.append(
            grade(
                float(np.median(ratios)),
                alike,
                unlike,
                higher=True,
            )
        )
        low = float(np.quantile(ratios, 1.0 - MOST))
        grades.append(grade(low, unlike, unlike / 2, higher=True))
    return worse(*grades)
