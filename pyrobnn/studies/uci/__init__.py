"""The standard UCI regression benchmark: protocol, rules of the methods, and a sweep that survives being killed."""

from __future__ import annotations

from pyrobnn.studies.uci.fits import DATASETS, run_task, tasks
from pyrobnn.studies.uci.linear_floor import LinearFloor
from pyrobnn.studies.uci.rules import RULES, Rule
from pyrobnn.studies.uci.scores import mixture_scores
from pyrobnn.studies.uci.sweep import Sweep, append_record, read_records
from pyrobnn.studies.uci.tables import compare_with_published, read_published, summarize

__all__ = [
    "DATASETS",
    "RULES",
    "LinearFloor",
    "Rule",
    "Sweep",
    "append_record",
    "compare_with_published",
    "mixture_scores",
    "read_published",
    "read_records",
    "run_task",
    "summarize",
    "tasks",
]
