"""Every script of a sick posterior runs, draws its picture, and is caught by the check that its page names."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "docs" / "gallery").glob("sick_*.py"))

pytestmark = pytest.mark.skipif(not SCRIPTS, reason="the installed package has no documentation")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # that is what is wrong with them
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_check_that_is_named_catches_it(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = runpy.run_path(str(script))
    plt.close("all")
    verdict, check = told["verdict"], told["caught_by"]
    assert check in {each.name for each in (*verdict.failed, *verdict.warned)}
    assert Path(f"{script.stem}.png").stat().st_size > 5_000


def test_the_page_shows_every_script_with_its_picture_and_its_check():
    page = (ROOT / "docs" / "gallery" / "sick.md").read_text(encoding="utf-8")
    for script in SCRIPTS:
        (check,) = re.findall(r'caught_by = .*, "(\w+)"$', script.read_text(encoding="utf-8"), re.MULTILINE)
        assert f"literalinclude}} {script.name}" in page and f"`{check}`" in page
        assert f"_static/{script.stem}.png" in page
        assert (ROOT / "docs" / "_static" / f"{script.stem}.png").is_file()
