"""The README's example runs as it stands, and its promises about files hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pyrobnn as pb

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_examples_run(several, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    first, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(first, "README.md", "exec"), names)
    assert capsys.readouterr().out.split()[0] == "pass"
    if several:
        exec(compile(second, "README.md", "exec"), names)
        assert {path.name for path in tmp_path.iterdir()} >= {"nuts.nc", "draws.bin"}


def test_it_is_short_and_its_pictures_and_pages_exist():
    assert len(README.encode()) <= 9 * 1024
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links)


def test_every_method_of_the_table_exists_and_every_method_is_in_it():
    table = README.split("## Methods")[1].split("\n## ")[0]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    facts = ("fit", "kind", "claim")  # an estimator for scikit-learn has a fit too
    methods = {name for name in pb.__all__ if all(hasattr(getattr(pb, name), fact) for fact in facts)}
    assert named == methods
