"""The standard UCI regression benchmark: protocol, rules of the methods, and a sweep that survives being killed."""

from __future__ import annotations

from pyrobnn.benchmarks.linear_floor import LinearFloor
from pyrobnn.benchmarks.rules import RULES, Rule
from pyrobnn.benchmarks.scores import mixture_scores
from pyrobnn.benchmarks.sweep import Sweep, append_record, read_records
from pyrobnn.benchmarks.tables import compare_with_published, read_published, summarize
from pyrobnn.benchmarks.uci import DATASETS, run_task, tasks

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
