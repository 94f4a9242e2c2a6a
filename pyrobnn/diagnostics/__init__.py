"""Whether a posterior can be believed: evidence, thresholds and next actions, from a DataTree alone."""

from __future__ import annotations

from pyrobnn.diagnostics.verdict import Check, Verdict

__all__ = ["Check", "Verdict"]
