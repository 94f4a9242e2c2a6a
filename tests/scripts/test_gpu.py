"""``make gpu`` meets its first GPU prepared: every case runs on a stand-in device, and a record is not made twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from stand_in_device import stand_in_device

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "gpu"))
import run as gpu  # noqa: E402

sys.path.pop(0)
del sys.modules["run"]  # other claims have a script of that name


@pytest.mark.parametrize(
    "name", [n if n == "laplace" else pytest.param(n, marks=pytest.mark.slow) for n in gpu.CASES]
)
def test_every_case_runs_on_the_stand_in(name, monkeypatch):
    monkeypatch.setattr(
        "pyrobnn.inference.fitting.problem.check_device",
        lambda given: given and torch.device(given),
    )
    with stand_in_device() as device:
        row = gpu.measure(name, str(device), small=True)
    assert "error" not in row, row["error"]
    json.dumps(row, allow_nan=False)
    assert row.get("where", "elsewhere") == "elsewhere"


def test_without_cuda_one_line_and_three(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 3
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1


def test_what_failed_is_a_line_and_what_is_done_is_not_done_again(tmp_path, monkeypatch, capsys):
    calls = []

    def broken(device, small):
        calls.append(device)
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu.CASES, "map", broken)
    options = [
        "--device",
        "cpu",
        "--small",
        "--only",
        "map",
        "--results",
        str(tmp_path / "rows.jsonl"),
    ]
    assert gpu.main(options) == 1 and gpu.main(options) == 0
    assert (
        calls == ["cpu"]
        and "no such kernel" in json.loads((tmp_path / "rows.jsonl").read_text())["error"]
    )
