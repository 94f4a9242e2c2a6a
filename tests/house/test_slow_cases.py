"""The list of the cases that run with the slow tests."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from slow_cases import BUDGET, SHORT, listed, slow_cases

ROOT = Path(__file__).parents[2]


@functools.cache
def functions(path: str) -> set[str]:
    """The names of the functions of a file of tests."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_listed_case_is_one_of_a_test_that_exists():
    for case in listed():
        path, _, name = case.partition("::")
        assert name.partition("[")[0] in functions(path), case


def test_every_test_keeps_its_short_cases_and_one_at_least_of_the_others():
    seconds = {f"test_law[{number}]": 2.0 * BUDGET for number in range(5)}
    seconds |= {f"test_law[short {number}]": 0.9 * SHORT for number in range(50)}
    seconds |= {f"test_quick[{number}]": BUDGET / 3 for number in range(5)}
    slow = slow_cases(seconds | {"test_alone": 100.0})
    names = [case.partition("[")[0] for case in slow]
    assert names.count("test_law") == 4 and names.count("test_quick") == 2 and len(names) == 6
    assert not any("short" in case for case in slow)
