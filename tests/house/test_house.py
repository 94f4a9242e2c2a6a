"""The size that a maintainer must hold. Caps fall with the package and never rise: a new guard deletes an old one."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from test_import_graph import MODULES, code_lines, floors, rooms

ROOT = Path(__file__).parents[2]
CAPS = {
    "lines": 29_294,
    "code lines": 16_499,
    "files": 150,
    "numbers in module constants": 260,
    "file names that stand in two rooms": 0,
    "rooms": 22,
    "floors": 9,
    "arrows between rooms": 76,
    "rooms in circles": 0,
    "scripts": 16,
    "lines of scripts": 4_943,
    "bytes of the results page": 8_192,
    "rows of the table of checks": 23,
    "warn and note calls": 10,
    "members of a likelihood": 16,
    "fields of the methods": 95,
}


def numbers_in_constants(text: str) -> int:
    """Numbers in the values of module-level names in capitals, those of tables included."""
    count = 0
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        value = getattr(node, "value", None)
        if value is not None and any(name.lstrip("_").isupper() for name in names):
            numbers = (each.value for each in ast.walk(value) if isinstance(each, ast.Constant))
            count += sum(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
    return count


@cache
def measured() -> dict[str, int]:
    from pyrobnn.diagnostics.check_table import TABLE
    from pyrobnn.inference.method import METHODS
    from pyrobnn.likelihoods import Likelihood

    texts = {name: path.read_text("utf-8") for name, path in MODULES.items()}
    scripts = [path.read_text("utf-8") for path in (ROOT / "scripts").rglob("*.py")]
    names = Counter(path.name for path in MODULES.values() if not path.name.startswith("__"))
    members = {*dir(Likelihood), *vars(Likelihood()), *Likelihood.__annotations__}
    return {
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "code lines": sum(map(code_lines, texts.values())),
        "files": len(texts),
        "numbers in module constants": sum(map(numbers_in_constants, texts.values())),
        "file names that stand in two rooms": sum(count > 1 for count in names.values()),
        "rooms": len(rooms()),
        "floors": len(floors(rooms())),
        "arrows between rooms": sum(map(len, rooms().values())),
        "rooms in circles": len(rooms()) - len(set().union(*floors(rooms()))),
        "scripts": len(scripts),
        "lines of scripts": sum(len(text.splitlines()) for text in scripts),
        "bytes of the results page": (ROOT / "scripts/results/README.md").stat().st_size,
        "rows of the table of checks": len(TABLE),
        "members of a likelihood": sum(not name.startswith("__") for name in members),
        "fields of the methods": sum(len(fields(each.cls)) for each in METHODS.values()),
        "warn and note calls": sum(t.count("warnings.warn(") + t.count(".note(") for t in texts.values()),
    }


@pytest.mark.parametrize("name", CAPS)
def test_the_house_holds_its_caps(name):
    assert measured()[name] <= CAPS[name]
