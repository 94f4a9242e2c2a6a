"""The report: verdicts first, then numbers and figures, on one self-contained page; and the same as JSON."""

from __future__ import annotations

from pyrobnn.report.page import write_report, write_summary

__all__ = ["write_report", "write_summary"]
