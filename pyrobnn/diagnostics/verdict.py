"""What a diagnosis says: one `Check` per row of the table, and the `Verdict` that answers two questions with them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pyrobnn.core.checks import check_choice
from pyrobnn.core.plain_text import plain, shown
from pyrobnn.diagnostics import wording as words
from pyrobnn.diagnostics.grades import Status

Answer = Literal["pass", "warn", "fail"]
#: what a check answers: are these draws the posterior of this model; does this model fit these data
Question = Literal["draws", "model"]

STATUSES: tuple[Status, ...] = ("pass", "warn", "fail", "info")
QUESTIONS: tuple[Question, ...] = ("draws", "model")
#: by how much standard deviations may be off, as a share, in draws that pass: a ratio within [0.8, 1.25]
TOLERANCE = 0.25
#: codes of checks that say that nothing was checked, for want of anything to check it by, or at all
_NOTHING_THERE = ("not_checked", "nothing_identified")
#: why nothing was checked of the model
UNANSWERED = (
    "few_data",
    "few_replicates",
    "joint_event",
    "own_latents",
    "selected_by_outcome",
    "factor_only",
    "no_data_stored",
)
_NOTHING_SEEN = (
    *_NOTHING_THERE,
    *UNANSWERED,
    "linearized_only",
    "conditional_only",
    "moves_short",
)


@dataclass(frozen=True)
class Check:
    """One piece of evidence about a posterior: a code and its numbers, from which sentences are made.

    Args:
        name: Which check, a code of the table, e.g. ``"rhat_function"``; unique within a verdict.
        status: ``"pass"``, ``"warn"``, ``"fail"``, or ``"info"`` for evidence that decides nothing.
        question: What it answers: ``"draws"`` (are these draws the posterior of this model?) or ``"model"`` (does this
            model fit these data?).
        value: The number that was judged; None when there is no single number.
        limit: The number that it was held against to pass; None where there is none.
        source: Paper or URL that the limit comes from.
        code: What was found, e.g. ``"too_narrow"``; decisions read it, never a sentence. The name where empty.
        numbers: What the sentences show besides, plain JSON values.

    Raises:
        ValueError: If `status` or `question` is unknown, or `value` is not finite (NaN is never evidence).

    Example:
        >>> check = Check("ess_function", "fail", "draws", 40.0, 400.0)
        >>> check.code, check.limit
        ('ess_function', 400.0)
    """

    name: str
    status: Status
    question: Question = "draws"
    value: float | None = None
    limit: float | None = None
    source: str = ""
    code: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("status", self.status, STATUSES)
        check_choice("question", self.question, QUESTIONS)
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(
                f"'value' of check {self.name!r} is {self.value}, not finite: give None"
            )
        if not self.code:
            object.__setattr__(self, "code", self.name)

    @property
    def decides(self) -> bool:
        """Whether it decides anything: information does not."""
        return self.status != "info"

    @property
    def evidence(self) -> str:
        """One sentence saying what was seen."""
        shown_numbers = {
            "status": self.status,
            "value": self.value,
            "limit": self.limit,
            **self.numbers,
        }
        return plain(words.evidence(self.code, self.name, shown_numbers))

    @property
    def action(self) -> str:
        """The next action in one sentence; empty where none is known to help."""
        if self.status not in ("warn", "fail"):
            return ""
        return plain(words.action(self.code, self.name, self.numbers))

    def __str__(self) -> str:
        """One line: status, name, what was seen and, where the check did not pass, what to do."""
        number = "" if self.value is None else f" {self.value:.4g}"
        number += "" if self.limit is None else f" (limit {self.limit:.4g})"
        return shown(f"{self.status:4} {self.name}{number}: {self.evidence} {self.action}".rstrip())


@dataclass(frozen=True)
class Verdict:
    """Whether a posterior can be believed, as answers to two questions, on what evidence, and what to do next.

    Args:
        method: Method that made the draws, e.g. ``"NUTS"``; ``"unknown"`` for a tree without attributes.
        label: Name of this run in tables.
        checks: All evidence, in the order in which a reader should see it.

    Example:
        >>> verdict = Verdict.from_checks("NUTS", "nuts", [Check("ess_function", "fail", "draws", 40.0, 400.0)])
        >>> verdict.status, verdict.draws, verdict.model
        ('fail', 'fail', 'warn')
    """

    method: str
    label: str
    checks: tuple[Check, ...]

    @classmethod
    def from_checks(
        cls,
        method: str,
        label: str,
        checks: Iterable[Check],
        reasons: Mapping[Question, str] | None = None,
        numbers: Mapping[Question, Mapping[str, Any]] | None = None,
    ) -> Verdict:
        """The verdict of `checks`; a question that none of them decides gets one that says so, and warns.

        Its code is the reason that is known for the question, with its numbers, else ``"not_checked"``.
        """
        checks = tuple(checks)
        decided = {check.question for check in checks if check.decides}
        codes = dict.fromkeys(QUESTIONS, "not_checked") | dict(reasons or {})
        unchecked = [
            Check(
                f"not_checked_{question}",
                "warn",
                question,
                code=codes[question],
                numbers=(numbers or {}).get(question, {}),
            )
            for question in QUESTIONS
            if question not in decided
        ]
        return cls(method, label, (*checks, *unchecked))

    def answer(self, question: Question) -> Answer:
        """The worst of the checks of one question."""
        return _answer(self._about(question))

    def _about(self, question: Question) -> list[Check]:
        return [check for check in self.checks if check.question == question]

    @property
    def draws(self) -> Answer:
        """Whether these draws are the posterior of this model; a pass has standard deviations within `tolerance`."""
        return self.answer("draws")

    @property
    def model(self) -> Answer:
        """Whether this model fits these data, as far as they can tell."""
        return self.answer("model")

    @property
    def status(self) -> Answer:
        """The worse of the two answers."""
        return _answer(self.checks)

    @property
    def tolerance(self) -> float:
        """By what share the standard deviations of draws that pass may be off."""
        return TOLERANCE

    def checked(self, question: Question) -> bool:
        """Whether any check has decided anything about the question; what nobody looked at is never a pass."""
        return any(
            check.decides and check.code not in _NOTHING_SEEN for check in self._about(question)
        )

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed, those of the draws first."""
        return self._of("fail")

    @property
    def warned(self) -> tuple[Check, ...]:
        """The checks that warned, those of the draws first."""
        return self._of("warn")

    @property
    def passed(self) -> tuple[Check, ...]:
        """The checks that passed, those of the draws first."""
        return self._of("pass")

    def _of(self, status: Status) -> tuple[Check, ...]:
        checks: list[Check] = []
        for question in QUESTIONS:
            checks += [check for check in self._about(question) if check.status == status]
        return tuple(checks)

    def worst(self, question: Question) -> Check | None:
        """The check that decided the answer to a question, where it did not pass."""
        return next(
            (check for check in (*self.failed, *self.warned) if check.question == question), None
        )

    def fault(self, question: Question) -> str:
        """What is wrong, in a few words for whoever has not read the check; empty where all passed."""
        worst = self.worst(question)
        return "" if worst is None else plain(words.fault(worst.code, worst.numbers))

    def shown_answer(self, question: Question) -> str:
        """The answer to a question, or "not checked"."""
        return self.answer(question) if self.checked(question) else "not checked"

    @property
    def lines(self) -> str:
        """Both answers in words: ``"draws: pass (sd within 25 %), model: not checked"``."""
        answers = []
        for question in QUESTIONS:
            answer = self.shown_answer(question)
            bounded = question == "draws" and answer == "pass"
            within = f" (sd within {TOLERANCE:.0%}{self._order(', ')})" if bounded else ""
            answers.append(f"{question}: {answer}{within}")
        return ", ".join(answers)

    @property
    def action(self) -> str:
        """The most important next action: of the first failed check that has one, else of the first warned."""
        return next((check.action for check in (*self.failed, *self.warned) if check.action), "")

    @property
    def in_words(self) -> str:
        """Both answers, and what decided them, for a reader who knows none of the checks."""
        # predictions alone have no draws
        questions = {check.question for check in self.checks}
        return "; ".join(
            self._answer_in_words(question) for question in QUESTIONS if question in questions
        )

    def _order(self, before: str = "") -> str:
        """In which order of components the draws are right, behind other words; empty where they keep none."""
        kept = self._kept_order
        if kept is None:
            return ""
        return f"{before}in one of {kept.value:,.0f} orders of {kept.numbers['sites']}"

    @property
    def _kept_order(self) -> Check | None:
        """The check which says that the draws keep one order of components."""
        return next((check for check in self.checks if check.code == "one_order"), None)

    def _answer_in_words(self, question: Question) -> str:
        """One answer and what decided it; that a fault of the model was seen by draws that fail, which may cause it."""
        answer = self.shown_answer(question)
        text = words.opening(question, answer, self._explanation(question))
        if (
            question == "model"
            and answer in ("warn", "fail")
            and self.shown_answer("draws") == "fail"
        ):
            return f"{words.BY_DRAWS} {text}"
        return text

    def _explanation(self, question: Question) -> str:
        """The fault behind an answer; empty where nothing was checked because there was nothing to check it by.

        Of an approximation that passes, how far its standard deviations may be off.
        """
        worst = self.worst(question)
        if question == "draws" and worst is None:
            order = self._order()
            if any(check.name == "importance" for check in self.checks):
                return (
                    f"standard deviations are within {TOLERANCE:.0%} of the posterior's{order and f' {order}'}, and "
                    "smaller differences are not tested"
                )
            return f"{order}, which the model does not tell apart" if order else ""
        nothing_there = worst is not None and worst.code in _NOTHING_THERE
        return "" if nothing_there and not self.checked(question) else self.fault(question)

    @property
    def summary(self) -> str:
        """One sentence: whose verdict, and :attr:`in_words`."""
        same = not self.label or self.label.lower() == self.method.lower()
        run = self.method if same else f"{self.label} ({self.method})"
        return f"{run}: {self.in_words}."

    def __str__(self) -> str:
        """The summary, both answers, what was seen by the check that decided each, and what to do."""
        decisive = [self.worst(question) for question in QUESTIONS if self.checked(question)]
        evidence = [
            f"{check.status} {check.name}: {check.evidence}"
            for check in decisive
            if check is not None
        ]
        kept = self._kept_order
        if kept is not None:
            evidence.append(f"{kept.status} {kept.name}: {kept.evidence}")
        action = [f"next: {self.action}"] if self.action else []
        return shown("\n".join([self.summary, self.lines, *evidence, *action]))

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, lists, strings and numbers, ready for JSON."""
        names = ("method", "label", "status", "draws", "model", "tolerance", "summary", "action")
        checks = [
            {
                **asdict(check),
                "evidence": check.evidence,
                "action": check.action,
            }
            for check in self.checks
        ]
        return {name: getattr(self, name) for name in names} | {"checks": checks}

    def to_json(self) -> str:
        """`to_dict` as strict JSON (no NaN, no infinity)."""
        return json.dumps(
            self.to_dict(),
            ensure_ascii=False,
            allow_nan=False,
            indent=2,
        )


class Audit(Verdict):
    """What :func:`audit` looked for in a tree and whether it is there; a pass says nothing else of its draws."""

    @property
    def lines(self) -> str:
        """What was looked for: ``"copied_chains: pass, repeated_draws: fail"``."""
        if not self.checks:
            return "nothing could be looked for"
        return ", ".join(f"{check.name}: {check.status}" for check in self.checks)

    @property
    def in_words(self) -> str:
        """What was found."""
        faults = [plain(words.fault(check.code)) for check in (*self.failed, *self.warned)]
        if not faults:
            return "no sign that this tree was forged or damaged, in what was looked for"
        return "; ".join(faults)


def _answer(checks: Iterable[Check]) -> Answer:
    statuses = {check.status for check in checks}
    if "fail" in statuses:
        return "fail"
    return "warn" if "warn" in statuses or "pass" not in statuses else "pass"


def said(error: Exception) -> str:
    """An error in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
