"""The share of lines that tests run: counted by part of the package, and told with the least first."""

from __future__ import annotations

import sys
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import record_coverage  # noqa: E402


def test_lines_that_no_test_ran_count_in_their_part(tmp_path):
    data = coverage.CoverageData(str(tmp_path / ".coverage"))
    seeding = ROOT / "pyrobnn" / "seeding.py"
    data.add_lines({str(seeding): range(1, len(seeding.read_text(encoding="utf-8").splitlines()) + 1)})
    data.write()
    parts = record_coverage.measured(tmp_path / ".coverage")
    assert parts["seeding"][0] > 0 and parts["seeding"][1] == 0
    assert parts["inference"][1] == parts["inference"][0] > parts["model"][0]
    with pytest.raises(SystemExit, match="make coverage"):
        record_coverage.measured(tmp_path / "none")


def test_the_part_that_is_tested_least_comes_first():
    record = {"commit": "1234567890", "python": "3.13.0", "parts": {"model": [100, 2], "plots": [300, 30]}}
    rows = record_coverage.table([record]).splitlines()
    assert rows[2:5] == ["| `plots` | 300 | 90.0% |", "| `model` | 100 | 98.0% |", "| all | 400 | 92.0% |"]
