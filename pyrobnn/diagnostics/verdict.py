"""What a diagnosis says: one `Check` per piece of evidence, and the `Verdict` that they add up to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from pyrobnn.signs import plain, shown

Status = Literal["pass", "warn", "fail", "info"]
Answer = Literal["pass", "warn", "fail"]
#: what a check answers: are these draws the posterior of this model; does this model fit these data
Question = Literal["draws", "model"]
QUESTIONS: tuple[Question, ...] = ("draws", "model")

STATUSES: tuple[Status, ...] = ("pass", "warn", "fail", "info")


@dataclass(frozen=True)
class Check:
    """One piece of evidence about a posterior, with the threshold that it was held against.

    Args:
        name: Short identifier, unique within a verdict, e.g. ``"rhat_f"``.
        status: ``"pass"``, ``"warn"``, ``"fail"``, or ``"info"`` for evidence that decides nothing.
        value: The number that was judged; None when there is no single number.
        threshold: The rule in words, e.g. ``"<= 1.01"``; empty for information.
        source: Paper or URL that the threshold comes from.
        evidence: One sentence saying what was seen.
        action: The next action in one plain sentence; empty when there is none. Signs in these words (≤, ±) are kept
            as ASCII, so that they can be printed anywhere.
        question: ``"draws"`` (are these draws the posterior of this model?) or ``"model"`` (does this model fit these
            data?).

    Raises:
        ValueError: If `status` is unknown, or `value` is not finite (NaN is never evidence).

    Example:
        >>> Check("rhat_f", "pass", 1.002, "<= 1.01", "Vehtari et al. (2021)", "R-hat is 1.002.", "").status
        'pass'
    """

    name: str
    status: Status
    value: float | None
    threshold: str
    source: str
    evidence: str
    action: str = ""
    question: Question = "draws"

    @property
    def code(self) -> str:
        """What was found, for decisions: never read a sentence for one."""
        return self.name

    @property
    def limit(self) -> str:
        """What the value was held against."""
        return self.threshold

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(
                f"'status' of check {self.name!r} is {self.status!r}; expected one of {STATUSES}."
            )
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(
                f"'value' of check {self.name!r} is {self.value}; a check that has no finite number takes "
                "None and says why in 'evidence'."
            )
        for field in ("threshold", "evidence", "action"):
            object.__setattr__(self, field, plain(getattr(self, field)))

    def __str__(self) -> str:
        """One line: status, name, what was seen and, where the check did not pass, what to do."""
        value = "" if self.value is None else f" {self.value:.4g}"
        held = f" ({self.threshold})" if self.threshold else ""
        action = f" {self.action}" if self.status in ("fail", "warn") else ""
        return shown(f"{self.status:4} {self.name}{value}{held}: {self.evidence}{action}".rstrip())


@dataclass(frozen=True)
class Verdict:
    """Whether a posterior can be believed, on what evidence, and what to do next.

    The status is the worst among the checks that decide; ``"info"`` never decides.

    Args:
        method: Method that made the draws, e.g. ``"NUTS"``; ``"unknown"`` for a tree without attributes.
        label: Name of this run in tables.
        status: ``"pass"``, ``"warn"`` or ``"fail"``.
        checks: All evidence, in the order in which a reader should see it.
        unchecked: What nobody has looked at, in words: what a pass does not say.

    Raises:
        ValueError: If `status` is unknown.

    Example:
        >>> check = Check("ess_f", "fail", 40.0, ">= 400", "Vehtari et al. (2021)", "ESS is 40.", "Draw more.")
        >>> verdict = Verdict.from_checks("NUTS", "nuts", [check])
        >>> verdict.status, verdict.action
        ('fail', 'Draw more.')
    """

    method: str
    label: str
    status: Literal["pass", "warn", "fail"]
    checks: tuple[Check, ...]
    unchecked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.status not in STATUSES[:3]:
            raise ValueError(f"'status' is {self.status!r}; expected one of {STATUSES[:3]}.")

    def __str__(self) -> str:
        """The summary, both lines, what to do, and a line for each check that did not pass."""
        lines = [self.summary, self.lines]
        lines += [f"next: {self.action}"] if self.action else []
        return shown("\n".join([*lines, *map(str, (*self.failed, *self.warned))]))

    @classmethod
    def from_checks(
        cls, method: str, label: str, checks: Iterable[Check], *, at_least: Literal["pass", "warn"] = "pass"
    ) -> Verdict:
        """The verdict that `checks` add up to: fail over warn over pass, and never better than `at_least`."""
        checks = tuple(checks)
        worst: Literal["pass", "warn", "fail"] = at_least
        for check in checks:
            if check.status == "fail":
                worst = "fail"
            elif check.status == "warn" and worst == "pass":
                worst = "warn"
        return cls(method, label, worst, checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "fail")

    @property
    def warned(self) -> tuple[Check, ...]:
        """The checks that warned."""
        return tuple(check for check in self.checks if check.status == "warn")

    @property
    def passed(self) -> tuple[Check, ...]:
        """The checks that passed."""
        return tuple(check for check in self.checks if check.status == "pass")

    @property
    def draws(self) -> Answer:
        """Whether these draws are the posterior of this model."""
        return self.line("draws")[0]

    @property
    def model(self) -> Answer:
        """Whether this model fits these data, as far as they can tell."""
        return self.line("model")[0]

    def checked(self, question: Question) -> bool:
        """Whether any check has decided anything about the question; what nobody looked at is never a pass."""
        return any(check.status != "info" for check in self.checks if check.question == question)

    def line(self, question: Question) -> tuple[Answer, str]:
        """The answer to one question, and the evidence for it in a sentence."""
        own = [check for check in self.checks if check.question == question]
        for status in ("fail", "warn"):
            bad = [check for check in own if check.status == status]
            if bad:
                return status, bad[0].evidence
        passed = [check for check in own if check.status == "pass"]
        if passed:
            return "pass", f"{len(passed)} {'check' if len(passed) == 1 else 'checks'} passed."
        return "warn", "Not checked."

    @property
    def lines(self) -> str:
        """Both answers in words: ``"draws: pass, model: not checked"``."""
        return ", ".join(
            f"{question}: {self.line(question)[0] if self.checked(question) else 'not checked'}"
            for question in QUESTIONS
        )

    @property
    def action(self) -> str:
        """The most important next action: of the first failed check that has one, else of the first warned."""
        return next((check.action for check in (*self.failed, *self.warned) if check.action), "")

    @property
    def summary(self) -> str:
        """One sentence: whose verdict, the status and the evidence that decided it."""
        deciding = self.failed or self.warned
        same = not self.label or self.label.lower() == self.method.lower()
        name = self.method if same else f"{self.label} ({self.method})"
        if deciding:
            rest = f" (and {len(deciding) - 1} more)" if len(deciding) > 1 else ""
            return f"{name}: {self.status}: {deciding[0].evidence.rstrip('.')}{rest}."
        if self.passed:
            return f"{name}: {self.status}: {self.praise}."
        return f"{name}: {self.status}: no check could be made on this tree."

    @property
    def praise(self) -> str:
        """How many checks passed, and what was not checked."""
        passed = f"all {len(self.passed)} checks passed"
        return f"{passed}; not checked: {', '.join(self.unchecked)}" if self.unchecked else passed

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, lists, strings and numbers, ready for JSON."""
        return {
            "method": self.method,
            "label": self.label,
            "status": self.status,
            "draws": self.draws,
            "model": self.model,
            "summary": self.summary,
            "action": self.action,
            "not_checked": list(self.unchecked),
            "checks": [asdict(check) | {"code": check.code, "limit": check.limit} for check in self.checks],
        }

    def to_json(self) -> str:
        """`to_dict` as strict JSON (no NaN, no infinity)."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=2)


def grade(value: float, good: float, bad: float, *, higher: bool = False) -> Status:
    """The status of a distance with its two limits; of a similarity where `higher` is better."""
    if higher:
        value, good, bad = -value, -good, -bad
    return "pass" if value <= good else "fail" if value > bad else "warn"


def grade_tested(p: float, effect: float, rates: tuple[float, float], limits: tuple[float, float]) -> Status:
    """The status of an effect that counts where it is no chance: below a rate and above a limit, to warn, to fail."""
    warns, fails = (p < rate and effect > limit for rate, limit in zip(rates, limits, strict=True))
    return "fail" if fails else "warn" if warns else "pass"


def worse(*grades: Status) -> Status:
    """The worst of some grades."""
    return "fail" if "fail" in grades else "warn" if "warn" in grades else "pass"


def said(error: Exception) -> str:
    """An error in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
