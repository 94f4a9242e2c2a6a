"""How often a check cries wolf and how often it sees what it is for, as measured by the verdicts' own study."""

from __future__ import annotations

import functools
import json
from importlib.resources import files


@functools.cache
def rates() -> dict[str, dict[str, int]]:
    """Check → cases of ``healthy`` and ``sick`` posteriors, its ``false_alarms`` and the faults ``seen`` among them."""
    return json.loads(files("pyrobnn.diagnostics").joinpath("rates.json").read_text(encoding="utf-8"))


def said_rates(name: str) -> str:
    """The rates of a check in a sentence; empty where none were measured.

    >>> said_rates("virial").startswith("Fires on")
    True
    """
    found = rates().get(name)
    if found is None:
        return ""
    healthy, sick = found["healthy"], found["sick"]
    seen = f", catches {found['seen'] / sick:.0%} of the faults it is for ({sick} cases)" if sick else ""
    return f"Fires on {found['false_alarms'] / healthy:.1%} of healthy posteriors ({healthy} cases){seen}."
