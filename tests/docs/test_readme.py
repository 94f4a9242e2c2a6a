"""The README's example runs as it stands, and its promises about files hold."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

import pyrobnn as pb

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_examples_run(several, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    minute, first, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    quick = minute.replace("Regressor()", "Regressor('map', hidden=(2,), compile=False)")
    state = np.random.get_state()  # scikit-learn's random_state=None draws from it
    exec(compile(minute if several else quick, "README.md", "exec"), names)
    np.random.set_state(state)
    assert names["low"].shape == (2,) and (names["low"] < names["high"]).all()
    assert "draws: " in capsys.readouterr().out
    exec(compile(first, "README.md", "exec"), names)
    assert capsys.readouterr().out.split()[0] == "pass"
    if several:
        exec(compile(second, "README.md", "exec"), names)
        assert {path.name for path in tmp_path.iterdir()} >= {"nuts.nc"}


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
    methods = {
        name for name in pb.__all__ if all(hasattr(getattr(pb, name), fact) for fact in facts)
    }
    assert named == methods


@pytest.mark.slow
def test_the_script_of_the_picture_draws_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(
        compile((ROOT / "docs/gallery/first_minute.py").read_text(), "first_minute.py", "exec"), {}
    )
    plt.close("all")
    assert Path("first_minute.png").stat().st_size > 10_000
