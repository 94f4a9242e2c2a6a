"""Workarounds for other libraries: each says up to which version it is needed, and goes when no such version is left.

The grammar is a comment ``WORKAROUND(torch<=2.13): why``: the last version, or the first that needs it no more.
"""

from __future__ import annotations

import configparser
import io
import re
import tokenize
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "pyrobnn").rglob("*.py"))
GRAMMAR = re.compile(r"#:? WORKAROUND\(([\w.-]+)(<=?)([\d.]+)\): \S")
#: a library with a version, as a sentence names it
VERSION = re.compile(r"\b([A-Za-z][\w-]+) v?(\d+\.\d+(?:\.\d+)?)\b")


def comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def lower_bounds() -> dict[str, Version]:
    """The least version of each library that setup.cfg allows, and of Python."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options"]["install_requires"].splitlines()
    lines.append("python" + config["options"]["python_requires"])
    bounds = {}
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            requirement = Requirement(line)
            bounds[requirement.name] = Version(
                next(part.version for part in requirement.specifier if part.operator == ">=")
            )
    return bounds


def workarounds(text: str) -> list[tuple[str, str, str]]:
    """The workarounds of a file: library, ``"<"`` or ``"<="``, and version."""
    matches = map(GRAMMAR.match, comments(text))
    return [(match[1], match[2], match[3]) for match in matches if match is not None]


def obsolete(text: str, bounds: dict[str, Version]) -> list[str]:
    """The workarounds of a file for versions below all that are allowed."""
    listed = []
    for library, operator, version in workarounds(text):
        if not SpecifierSet(operator + version).contains(bounds[library]):
            listed.append(f"{library}{operator}{version}")
    return listed


@pytest.mark.parametrize(
    ("bound", "expected"),
    [("2.11", []), ("2.13", ["torch<2.13"]), ("2.14", ["torch<2.13", "torch<=2.13"])],
)
def test_a_workaround_that_no_allowed_version_needs_is_listed(bound, expected):
    text = "x = 1  # WORKAROUND(torch<2.13): its name\n# WORKAROUND(torch<=2.13): it crashes\n"
    assert obsolete(text, {"torch": Version(bound)}) == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_workaround_is_obsolete(path):
    assert obsolete(path.read_text("utf-8"), lower_bounds()) == []


def test_every_workaround_is_written_alike_and_names_a_library_that_is_required():
    libraries = lower_bounds()
    texts = {path: path.read_text("utf-8") for path in FILES}
    for path, text in texts.items():
        marked = [comment for comment in comments(text) if "WORKAROUND" in comment]
        assert len(marked) == len(workarounds(text)) == text.count("WORKAROUND"), path
        assert {library for library, _, _ in workarounds(text)} <= libraries.keys(), path
    assert sum(len(workarounds(text)) for text in texts.values()) > 10


def test_a_comment_that_names_a_version_of_a_library_is_a_workaround():
    names = {name.casefold() for name in lower_bounds()} | {"pyro", "inductor"}
    planted = "# before torch 2.12 there is no such operator"
    assert VERSION.search(planted)[1].casefold() in names
    for path in FILES:
        for comment in comments(path.read_text("utf-8")):
            said = {name.casefold() for name, _ in VERSION.findall(comment)}
            assert GRAMMAR.match(comment) or not said & names, (path, comment)
