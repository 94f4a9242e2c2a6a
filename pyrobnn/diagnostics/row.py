"""A row of the table of checks, and the check that its statistic makes of a tree."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.grades import Found, Limits
from pyrobnn.diagnostics.verdict import Check, Question, said


def _of_any(evidence: Evidence) -> bool:
    """Of any draws and predictions."""
    return True


@dataclass(frozen=True)
class Row:
    """A check.

    Args:
        code: its name in a verdict.
        question: what it answers.
        statistic: from a tree and the limits (and the reference, where `against` one) to what was found, or None where
            there is nothing to judge, or nothing is wrong that it looks for.
        limits: numbers that the statistic is held against; their order is its own, usually to warn, to fail.
        unit: what the limits are in.
        source: paper or URL; a limit without one is this library's convention.
        applies: of which trees.
        against: whether it needs a reference.
    """

    code: str
    question: Question
    statistic: Callable[..., Found | None]
    limits: Limits
    unit: str
    source: str
    applies: Callable[[Evidence], bool] = _of_any
    against: bool = False

    def check(self, result: Found) -> Check:
        """What its statistic came to, as a check of a verdict."""
        return Check(
            self.code,
            result.status,
            self.question,
            result.value,
            self.limits[0] if result.limit is None else result.limit,
            self.source,
            result.code,
            result.numbers,
        )


def made(row: Row, evidence: Evidence, *reference: Evidence) -> Check | None:
    """The check of a row; where it raises, one that says so: a check that failed to run is not a pass."""
    try:
        with (
            warnings.catch_warnings(action="ignore", category=RuntimeWarning),
            np.errstate(all="ignore"),
        ):
            result = row.statistic(evidence, row.limits, *reference)
    except Exception as error:
        # whatever a foreign tree holds, the other checks and trees are still worth having
        numbers = {"error": said(error)}
        return Check(
            row.code,
            "warn",
            row.question,
            code="failed_to_run",
            source=row.source,
            numbers=numbers,
        )
    return None if result is None else row.check(result)
