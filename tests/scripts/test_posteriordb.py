"""NUTS at its defaults on a folder of reference posteriors, where one is at hand (see the benchmark script)."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest
import torch

FOLDER = os.environ.get("PYROBNN_POSTERIORDB")
BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "posteriordb" / "run.py"))
PATHS = sorted(Path(FOLDER).glob("*.json")) if FOLDER else []

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PATHS, reason="PYROBNN_POSTERIORDB names no folder of reference posteriors"
    ),
]


@pytest.mark.parametrize("path", PATHS or [None], ids=lambda path: path.stem if path else "none")
def test_right_at_the_defaults_or_warned_of(path):
    result = BENCHMARK["row"](
        path.stem, json.loads(path.read_text()), dtype=torch.float32, seed=0, num_draws=1000
    )
    assert result["outcome"] in ("right", "warned"), result
    # the funnel alone may fail, and has to say so
    assert result["outcome"] == "right" or path.stem.endswith("_centered"), result
