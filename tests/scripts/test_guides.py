"""The study of normal guides: its page is its records, which say of each problem what the page says."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))

from records import read_records  # noqa: E402
from verdict.claim_tables import GUIDE_FITS, guides_text  # noqa: E402


def test_the_page_has_the_records():
    """``python scripts/page.py`` writes them."""
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert f"<!-- table: guides -->\n{guides_text()}\n<!-- end -->" in page


def test_every_problem_has_every_fit():
    records = read_records(SCRIPTS / "verdict" / "guides.jsonl")
    problems = {record["problem"] for record in records}
    assert len(problems) > 2
    assert {(record["problem"], record["fit"]) for record in records} == {
        (problem, fit) for problem in problems for fit in GUIDE_FITS
    }


def test_the_bound_and_not_the_search_prefers_the_noise():
    """Where a guide takes function for noise, one from NUTS does too, and at the noise of NUTS the ELBO is lower."""
    by_problem: dict[str, dict[str, dict]] = {}
    for record in read_records(SCRIPTS / "verdict" / "guides.jsonl"):
        by_problem.setdefault(record["problem"], {})[record["fit"]] = record
    noisy = []
    for problem, fits in by_problem.items():
        default, from_nuts, known = (fits[name] for name in GUIDE_FITS)
        if default["noise"] < 1.2 * default["true_noise"]:
            continue
        noisy.append(problem)
        assert from_nuts["noise"] > 1.2 * default["true_noise"], problem
        error = 3 * (known["elbo_error"] + default["elbo_error"])
        assert known["elbo"] < default["elbo"] - error, problem
    assert len(noisy) > 2
