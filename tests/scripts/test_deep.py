"""The study of deep nets: its pages are its records, and a quick look at one method runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))

from deep.claim_tables import METHODS, table, text  # noqa: E402


@pytest.mark.parametrize("page", ["scripts/deep/claim.md", "docs/howto/deep-nets.md"])
def test_the_pages_have_the_records(page):
    """``python scripts/page.py`` writes them."""
    assert f"<!-- table -->\n{text()}\n<!-- end -->" in (ROOT / page).read_text(encoding="utf-8")


def record(net: str, method: str, steps: int) -> dict:
    return {
        "net": net,
        "method": method,
        "num_steps": steps,
        "num_train": 1198,
        "weights": 99550,
        "log_density": -0.1035,
        "accuracy": 0.96,
        "ece": 0.0175,
        "auroc": {"turned": 0.187, "photographs": 0.905},
        "cpu_seconds": 8.6,
        "peak_mb": 1500,
        "file_mb": 0.4,
    }


def test_scores_stand_where_there_were_steps_enough():
    records = [record("resnet18", "MAP", 4), record("cnn", "SWAG", 400), record("cnn", "MAP", 400)]
    scored, costs = table(records).split("\n\nResNet-18")
    rows = scored.splitlines()[4:]
    assert rows == [
        "| MAP | -0.103 | 0.960 | 0.018 | 0.19 | 0.91 | 9 | 1,500 | 0.4 |",
        "| SWAG | -0.103 | 0.960 | 0.018 | 0.19 | 0.91 | 9 | 1,500 | 0.4 |",
    ]
    assert costs.splitlines()[-1] == "| MAP | 9 | 1,500 | 0.4 |"


@pytest.mark.slow
def test_a_quick_look_at_the_net_of_the_loop(tmp_path):
    from deep.run import main

    results = tmp_path / "records.jsonl"
    method = "last-layer Laplace, loop's net"
    assert method in METHODS
    options = ["--num-train", "100", "--num-steps", "5", "--num-test", "20", "--num-draws", "2"]
    with torch.random.fork_rng():  # a script seeds its process
        main(["--here", "--methods", method, "--results", str(results), *options])
    (made,) = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    assert (made["num_test"], made["num_train"], made["num_draws"]) == (20, 100, 2)
    assert 0 < made["accuracy"] < 1 and made["file_mb"] > 0.4
