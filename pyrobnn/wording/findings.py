"""Findings: what a fit has established about itself, as a code and its numbers. Sentences are made at the door."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyrobnn.wording import sentence


@dataclass(frozen=True)
class Finding:
    """One thing that a fit has to report; decisions read ``code`` and ``values``, never the sentence.

    Args:
        code: short identifier, a key of :data:`pyrobnn.wording.fits.SENTENCES`.
        values: the numbers and names that the sentence shows, plain JSON values.

    Example:
        >>> Finding("interrupted", {"method": "NUTS", "done": 10, "total": 100, "unit": "draws"}).code
        'interrupted'
    """

    code: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return sentence(self.code, self.values)


def of_meta(meta: Mapping[str, Any]) -> list[Finding | str]:
    """What a fit has kept in its ``meta``: its findings, and the sentences that have no code."""
    found = findings(meta["findings"])
    known = set(map(str, found))
    return [*found, *(text for text in meta["warnings"] if text not in known)]


def findings(kept: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Findings of what ``meta["findings"]`` holds."""
    return [Finding(each["code"], {k: v for k, v in each.items() if k != "code"}) for each in kept]


def as_json(found: Iterable[Finding | str]) -> list[dict[str, Any]]:
    """Findings as they stand in ``meta["findings"]``: the code beside its numbers."""
    return [{"code": each.code, **each.values} for each in found if isinstance(each, Finding)]
