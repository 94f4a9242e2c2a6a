"""``make gpu`` meets its first GPU prepared: every part runs on a stand-in, and a cut leaves a record that goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from stand_in_device import stand_in_device

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import benchmark_gpu  # noqa: E402
import gpu_parts  # noqa: E402
import readme_tables  # noqa: E402

sys.path.remove(str(SCRIPTS))
#: parts that take no time, in the place of the real ones
SLOW = """
exec(open({real!r}).read())

def numbers(task):
    for i in range(8):
        yield from task.measured(str(i), 0, lambda: time.sleep(0.25) or {{"number": i}})

def broken(task):
    yield from task.measured("fine", 0, dict)
    yield from task.measured("not fine", 0, lambda: 1 / 0)
    yield from task.measured("long", 1e9, dict)

def endless(task):
    yield from task.measured("endless", 0, time.sleep, 600)

MEASURES = {{"nuts": numbers, "svi": broken, "laplace": endless}}
"""


def rehearsal(tmp_path: Path) -> list[str]:
    """The command of the script with parts that take no time."""
    (tmp_path / "gpu_parts.py").write_text(SLOW.format(real=str(SCRIPTS / "gpu_parts.py")))
    (tmp_path / "benchmark_gpu.py").write_text((SCRIPTS / "benchmark_gpu.py").read_text())
    options = ["--device", "cpu", "--results", str(tmp_path / "gpu.json")]
    return [sys.executable, str(tmp_path / "benchmark_gpu.py"), *options]


def part(tmp_path: Path, name: str = "nuts") -> dict:
    return json.loads((tmp_path / "gpu.json").read_text())["parts"][name]


@pytest.mark.filterwarnings("ignore::UserWarning")  # fits this short are told so
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("nuts", "study") else pytest.param(name, marks=pytest.mark.slow)
        for name in gpu_parts.MEASURES
    ],
)
def test_every_part_runs_on_the_stand_in_and_on_the_cpu(name, monkeypatch):
    monkeypatch.setattr(
        "pyrobnn.inference.fitting.problem.check_device", lambda given: given and torch.device(given)
    )
    if name == "study":  # every method is under the law of the device; here is the script's own way to it
        chosen = gpu_parts.study_methods
        monkeypatch.setattr(
            gpu_parts,
            "study_methods",
            lambda task: {n: v for n, v in chosen(task).items() if n in ("MAP", "NUTS")},
        )
    with stand_in_device() as device:
        task = gpu_parts.Task(str(device), small=True)
        rows = list(gpu_parts.MEASURES[name](task))
        keys = [row["key"] for row in rows]
        again = gpu_parts.Task(str(device), small=True, done=frozenset(keys))
        assert list(gpu_parts.MEASURES[name](again)) == []
    assert rows and len(set(keys)) == len(keys)
    assert [row for row in rows if not benchmark_gpu.sound(row)] == []
    json.dumps(rows, allow_nan=False)
    if name == "predict":
        assert rows[0]["elsewhere:0_device"] == "elsewhere" and rows[0]["largest_difference"] < 1e-5


def test_the_methods_of_the_study_are_what_they_say():
    for small in (True, False):
        assert set(gpu_parts.study_methods(gpu_parts.Task("cpu", small))) > {"MAP", "SVI", "Laplace", "NUTS"}


def test_without_cuda_one_line_and_three(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark_gpu.main([]) == 3
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and "finds none" in said.err


@pytest.mark.parametrize("sent", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_cut_leaves_a_record_and_goes_on(sent, tmp_path):
    command = [*rehearsal(tmp_path), "--only", "nuts"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (tmp_path / "gpu.json").exists() or not part(tmp_path)["rows"]:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(sent)
    process.wait()
    rows = part(tmp_path)["rows"]
    assert part(tmp_path)["status"] == "running" and 0 < len(rows) < 8
    # the process of the part is gone too
    deadline = time.time() + 20
    while any(str(tmp_path) in line for line in _commands()):
        assert time.time() < deadline
        time.sleep(0.1)
    # at last all is there, each measured once
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert part(tmp_path)["status"] == "finished" and part(tmp_path)["rows"][: len(rows)] == rows
    assert [row["number"] for row in part(tmp_path)["rows"]] == list(range(8))
    assert "finished earlier" in subprocess.run(command, capture_output=True, text=True).stdout


def _commands() -> list[str]:
    """Command lines of the processes of this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_what_fails_or_has_no_time_is_said(tmp_path):
    command = rehearsal(tmp_path)
    done = subprocess.run([*command, "--only", "svi"], capture_output=True, text=True)
    assert done.returncode == 1 and part(tmp_path, "svi")["status"] == "failed"
    for words in ("not fine: ZeroDivisionError", "long: expected to take", "not measured"):
        assert words in done.stdout
    late = subprocess.run([*command, "--only", "laplace", "--budget", "0.03"], capture_output=True, text=True)
    assert late.returncode == 1 and part(tmp_path, "laplace")["status"] == "cut"
    assert "minutes were over" in late.stdout and part(tmp_path, "svi")["status"] == "failed"


def test_the_target_is_judged_against_the_best_of_numpyro():
    def record(**rates):
        rows = [{"key": key.replace("_", " "), "chains": int(key.split("_")[-1]), "gradients_per_s": rate}
                for key, rate in rates.items()]  # fmt: skip
        return {"parts": {"nuts": {"rows": rows}}}

    def met(**rates):
        return benchmark_gpu.judge(record(**rates))[0]["met"]

    assert met(cuda_1024=101.0, numpyro_cpu_4=1.0)
    assert met(cuda_1024=101.0, cuda_4096=900.0, numpyro_cpu_4=1.0, numpyro_cpu_64=2.0) is False
    assert met(cuda_1024=101.0) is None and met(cpu_1024=101.0, numpyro_cpu_4=1.0) is None


def test_the_page_shows_the_record_or_says_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(readme_tables, "HERE", tmp_path)
    assert "No GPU has run this yet" in readme_tables.gpu_table()
    rows = [{"key": "cuda 1024", "chains": 1024, "gradients_per_s": 5e6, "ess_per_s": 12.0, "compile_s": 9.0}]
    parts = {"nuts": {"status": "finished", "rows": rows, "seconds": 3.0, "commit": "abc"}}
    made = {"device": "A GPU", "cpu_cores": 8, "versions": {"torch": "2.13"}, "parts": parts}
    benchmark_gpu.write(
        tmp_path / "results" / "gpu.json", {**made, "targets": benchmark_gpu.judge({"parts": parts})}
    )
    shown = readme_tables.gpu_table()
    assert "| cuda 1024 chains | 5,000,000 | 12.0 | 9.0 |" in shown and "was not measured" in shown
    assert os.listdir(tmp_path / "results") == ["gpu.json"]
