"""The README's example runs as it stands, and its promises about files hold."""

from __future__ import annotations

import json
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
    short = "NUTS(num_warmup=20, trajectory=8, compile=False)"
    fewer = first.replace("NUTS()", short).replace(
        "seed=0)  # four", "seed=0, num_draws=50)  # four"
    )
    exec(compile(first if several else fewer, "README.md", "exec"), names)
    verdict = names["verdict"]
    assert capsys.readouterr().out == f"{verdict.status} {verdict.summary}\n"
    assert names["posterior"].num_draws == (1000 if several else 50)
    if several:
        assert verdict.status == "pass"
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


def test_ten_lines_are_ten():
    lines = README.split("## Ten lines")[1].split("```python\n")[1].split("```")[0].splitlines()
    assert len([line for line in lines if line.strip()]) == 10 and max(map(len, lines)) <= 100


def test_it_says_where_to_get_it_and_claims_no_release_and_no_speed_of_a_gpu():
    first_page = README.split("## Methods")[0]
    assert "clone this repository" in first_page and "make compare" in first_page
    assert "pip install pyrobnn" not in README and "pip install 'pyrobnn" not in README
    assert not re.search(r"gpu|cuda", README.split("## Speed")[1].split("\n## ")[0], re.IGNORECASE)


def test_the_picture_has_a_caption_that_names_its_method_and_the_numbers_behind_it():
    numbers = json.loads((ROOT / "docs/_static/first_minute.json").read_text())
    caption = re.search(r"first_minute\.png\)\n\n\*(.+?)\*\n\n", README, re.DOTALL).group(1)
    assert numbers["method"] in caption and "90 %" in caption
    low, high = np.array(numbers["low"]), np.array(numbers["high"])
    x = np.array(numbers["x"])
    in_gap, at_data = abs(x) < 0.5, (1.2 < abs(x)) & (abs(x) < 2.8)
    assert (high - low)[in_gap].min() > 2 * (high - low)[at_data].max()


@pytest.mark.slow
def test_the_picture_is_what_its_script_draws_today(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(
        compile((ROOT / "docs/gallery/first_minute.py").read_text(), "first_minute.py", "exec"), {}
    )
    plt.close("all")
    assert Path("first_minute.png").stat().st_size > 10_000
    drawn = json.loads(Path("first_minute.json").read_text())
    shown = json.loads((ROOT / "docs/_static/first_minute.json").read_text())
    assert drawn["method"] == shown["method"] and drawn["x"] == shown["x"]
    width = np.array(shown["high"]) - np.array(shown["low"])
    for name in ("mean", "low", "high"):
        assert (abs(np.array(drawn[name]) - np.array(shown[name])) < 0.1 * width).all(), name
