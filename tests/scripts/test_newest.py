"""``make newest``: outcomes are counted as pytest reports them, and the pages say what the last record says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))

from newest import run  # noqa: E402
from newest.claim_tables import RECORDS as FILE  # noqa: E402
from newest.claim_tables import sentence, table  # noqa: E402
from newest.environments import outcomes, versions  # noqa: E402
from records import read_records  # noqa: E402

RECORDS = read_records(FILE, ["tests", "newest", "pinned", "commit", "finished_at"])

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
def test_skips(): pytest.skip("no")

@pytest.fixture
def broken(): raise ValueError

def test_errs(broken): pass
"""


def test_every_outcome_of_pytest_is_counted(tmp_path):
    (tmp_path / "test_four.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "test_four.py",
    ]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    tests = outcomes(["test_four.py"], report)
    assert (tests.asked, tests.passed, tests.skipped) == (["test_four.py"], 1, 1)
    assert tests.failed == ["test_four::test_fails", "test_four::test_errs"]


def test_versions_are_those_of_the_interpreter():
    import numpy as np
    import torch

    installed = versions()
    # torch itself says the kind of its build, 2.14.1+cu130, and some of its packages do
    public, _, _ = torch.__version__.partition("+")
    assert installed["torch"].partition("+")[0] == public
    assert installed["numpy"] == np.__version__


def test_a_pinned_environment_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        run.parse(["--pinned", "/nowhere/python"])
    assert "/nowhere/python does not exist" in capsys.readouterr().err


def test_the_pages_say_what_the_last_record_says():
    """``python scripts/page.py`` writes them."""
    assert RECORDS
    assert sentence(RECORDS) in (ROOT / "README.md").read_text(encoding="utf-8")
    assert table(RECORDS) in (SCRIPTS / "newest" / "claim.md").read_text(encoding="utf-8")


def test_a_record_names_its_tests_and_what_failed():
    for record in RECORDS:
        assert record["tests"]["asked"] and record["tests"]["passed"] > 0
        assert record["newest"]["versions"].keys() >= {"python", "torch", "numpy", "arviz-stats"}
        assert record["newest"]["numbers"].keys() == record["pinned"]["numbers"].keys()


def test_the_newest_environment_has_no_constraints():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nnewest:")[2].partition("\n\n")[0]
    assert "pip install" in recipe and "constraint" not in recipe
