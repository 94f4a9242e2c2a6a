"""What is printed survives an output that lacks a sign: a code page of Windows, or ASCII."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path

import pytest

import pyrobnn
from pyrobnn.cli.terminal import printable, say
from pyrobnn.core.plain_text import PLAIN, plain, shown
from pyrobnn.diagnostics.verdict import Check, Verdict

PACKAGE = Path(pyrobnn.__file__).parent
#: draws figures and pages, whose files are UTF-8
DRAWN = ("plots", "report", "callbacks")


def words(path):
    """Texts of a file but its docstrings, those of f-strings in their parts."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    apart = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = (
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in apart
    )
    return [node.value for node in found if isinstance(node.value, str)]


def printed(encoding, monkeypatch, *values):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    print(*values, flush=True)
    return raw.getvalue().decode(encoding)


def test_every_word_of_a_check_is_ascii():
    said = [text for path in (PACKAGE / "diagnostics").glob("*.py") for text in words(path)]
    for text in said:
        assert plain(text).isascii(), text


def test_no_other_word_of_the_package_has_a_sign_that_windows_lacks():
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in DRAWN and path.name != "__init__.py":
            for text in words(path):
                plain(text).encode("cp1252")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_a_verdict_prints_everywhere(encoding, monkeypatch):
    numbers = {"seen": "σ of größe is 1 ± 2.", "next": "Draw more."}
    verdict = Verdict.from_checks(
        "NUTS", "τ", [Check("ess", "fail", "draws", 40.0, 400.0, numbers=numbers)]
    )
    said = printed(encoding, monkeypatch, verdict)
    size = "gr\\xf6\\xdfe" if encoding == "ascii" else "größe"
    sd = "σ" if encoding == "utf-8" else "\\u03c3"
    assert f"fail ess: {sd} of {size} is 1 +/- 2." in said
    assert said.startswith("τ (NUTS): " if encoding == "utf-8" else "\\u03c4 (NUTS): ")
    assert "next: Draw more." in said and "draws: fail" in said


def test_the_command_line_spells_what_a_terminal_lacks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with printable():
        say("ρ ≥ 2 → 猫")
    assert raw.getvalue().decode("ascii").splitlines() == ["\\u03c1 >= 2 -> \\u732b"]
    assert sys.stdout.errors == "strict"


def test_every_sign_has_a_spelling_in_ascii():
    assert plain("".join(PLAIN)).isascii() and shown("é≥") == "é≥"
