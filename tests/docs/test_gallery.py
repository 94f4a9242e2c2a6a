"""Every script of the gallery runs and draws its picture: a problem's model fits, a check sees what is sick."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from helpers import seeded

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "docs" / "gallery"
STATIC = ROOT / "docs" / "_static"
SICK = sorted(GALLERY.glob("sick_*.py"))
PROBLEMS = sorted(GALLERY.glob("problem_*.py"))  # and first_minute.py, which test_readme.py runs

pytestmark = pytest.mark.skipif(not SICK, reason="the installed package has no documentation")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # that is what is wrong with the sick ones
@pytest.mark.parametrize("script", SICK + PROBLEMS, ids=lambda path: path.stem)
def test_a_script_draws_its_picture_and_its_verdict_is_right(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with seeded(0):  # a script draws as a user would
        found = runpy.run_path(str(script))
    plt.close("all")
    verdict = found["verdict"]
    if script in SICK:
        assert found["caught_by"] in {each.name for each in (*verdict.failed, *verdict.warned)}
    else:
        assert verdict.model == "pass"
    assert Path(f"{script.stem}.png").stat().st_size > 5_000


def test_ten_problems_and_ten_sick_posteriors_have_a_thumbnail_and_a_section():
    index = (GALLERY / "index.md").read_text(encoding="utf-8")
    for name, scripts in (("problems", [GALLERY / "first_minute.py", *PROBLEMS]), ("sick", SICK)):
        page = (GALLERY / f"{name}.md").read_text(encoding="utf-8")
        assert (
            len(scripts) == 10 and page.count("\n## ") == 10 and index.count(f"]({name}.md#") == 10
        )
        for script in scripts:
            assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
            assert (
                f"literalinclude}} {script.name}" in page and f"_static/{script.stem}.png" in page
            )
            assert (
                f"_static/{script.stem}.png" in index and (STATIC / f"{script.stem}.png").is_file()
            )


def test_every_picture_has_twice_the_pixels_at_which_it_is_shown_and_few_colours(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    retina = importlib.import_module("retina")
    pictures = [*STATIC.glob("*.png"), *(ROOT / "notebooks/gallery").glob("*.png")]
    assert len(pictures) > 25
    for path in pictures:
        assert retina.width(path) and retina.in_palette(path.read_bytes()) == path.read_bytes(), (
            path.name
        )


def test_ten_checks_catch_the_sick_posteriors_and_the_page_names_them():
    page = (GALLERY / "sick.md").read_text(encoding="utf-8")
    checks = set()
    for script in SICK:
        (check,) = re.findall(
            r'caught_by = .*, "(\w+)"$', script.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert f"`{check}`" in page
        checks.add(check)
    assert len(checks) == 10
