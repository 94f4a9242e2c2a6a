"""Records: lines that survive a crash, sweeps that go on where they were stopped, budgets."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import Timeout

SCRIPTS = Path(__file__).parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))

from records import Sweep, append_record, mean_and_error, read_records, within_budget  # noqa: E402


def line(number):
    return {"n": number}


def number(record):
    return record["n"]


def square(task):
    return {**task, "square": task["n"] ** 2}


def fail_on_two(task):
    if task["n"] == 2:
        raise ValueError("two is refused")
    return square(task)


def test_what_is_finished_is_not_run_again(tmp_path):
    sweep = Sweep(tmp_path / "results.jsonl", key=number)
    first = [outcome["n"] for _, outcome in sweep.run(square, [line(n) for n in (0, 1, 1)])]
    second = [outcome["n"] for _, outcome in sweep.run(square, [line(n) for n in range(4)])]
    assert (first, second) == ([0, 1], [2, 3])
    assert [record["square"] for record in read_records(sweep.path)] == [0, 1, 4, 9]


def test_a_failed_fit_leaves_no_line_and_ends_nothing(tmp_path):
    sweep = Sweep(tmp_path / "results.jsonl", key=number)
    outcomes = [outcome for _, outcome in sweep.run(fail_on_two, [line(n) for n in range(4)])]
    assert isinstance(outcomes[2], ValueError)
    assert [record["n"] for record in read_records(sweep.path)] == [0, 1, 3]
    assert sweep.pending([line(n) for n in range(4)]) == [line(2)]


def test_closing_the_run_keeps_what_is_finished(tmp_path):
    sweep = Sweep(tmp_path / "results.jsonl", key=number)
    run = sweep.run(square, [line(n) for n in range(4)])
    next(run)
    run.close()
    assert [record["n"] for record in read_records(sweep.path)] == [0]


def test_a_torn_line_spoils_no_other(tmp_path):
    path = tmp_path / "results.jsonl"
    append_record(path, {"n": 0, "square": 0})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"n": 1, "squ')
    append_record(path, {"n": 2, "square": 4})
    with pytest.warns(UserWarning, match=r"lines \[2\] are torn"):
        assert [record["n"] for record in read_records(path)] == [0, 2]
    with pytest.warns(UserWarning, match=r"lines \[1, 2, 3\] are torn or incomplete"):
        assert read_records(path, ["n", "m"]) == []


def test_a_budget_takes_what_fits_by_earlier_records():
    records = [
        {"dataset": "a", "method": "m", "cpu_seconds": seconds} for seconds in (1.0, 3.0, 2.0)
    ]
    tasks = [{"dataset": name, "split": 0, "method": "m"} for name in ("a", "b", "a")]
    runs, rest, seconds = within_budget(tasks, records, budget=4.5)
    assert (runs, rest, seconds) == (
        [tasks[0], tasks[2]],
        [tasks[1]],
        4.0,
    )  # an unknown set costs the most


def test_the_error_of_splits_that_share_rows():
    mean, error = mean_and_error([1.0, 2.0, 3.0], overlap=1 / 9)
    assert mean == 2.0 and error == pytest.approx((1 / 3 + 1 / 9) ** 0.5)
    assert math.isnan(mean_and_error([1.0, 2.0])[1])


def test_two_sweeps_do_not_write_to_one_file(tmp_path):
    sweep = Sweep(tmp_path / "results.jsonl", key=number)
    run = sweep.run(square, [line(n) for n in range(2)])
    next(run)
    with pytest.raises(Timeout):
        list(sweep.run(square, [line(5)]))
    run.close()
    assert len(list(sweep.run(square, [line(n) for n in range(2)]))) == 1


KILLED = """
import sys, time
from records import Sweep

def work(task):
    with open(sys.argv[2], "a") as log:
        log.write(f"{task['n']}\\n")
    time.sleep(0.15)
    return {**task, "done": True}

sweep = Sweep(sys.argv[1], key=lambda record: record["n"])
for _ in sweep.run(work, [{"n": n} for n in range(12)]):
    pass
"""


@pytest.mark.slow
def test_a_killed_sweep_loses_nothing_and_repeats_nothing(tmp_path):
    results = tmp_path / "results.jsonl"
    begun = tmp_path / "begun.txt"
    command = [sys.executable, "-c", KILLED, str(results), str(begun)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(SCRIPTS)})
    deadline = time.monotonic() + 120
    while len(read_records(results)) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = [record["n"] for record in read_records(results)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SCRIPTS)}, check=True, timeout=120)
    assert [record["n"] for record in read_records(results)] == list(range(12))
    runs = [int(text) for text in begun.read_text().split()]
    assert all(runs.count(n) == 1 for n in kept)  # nothing finished is done again
    assert len(runs) <= 13  # but for the one under way when it was killed, nothing is


def test_processes_share_the_work(tmp_path):
    sweep = Sweep(tmp_path / "results.jsonl", key=number, jobs=2)
    outcomes = [outcome for _, outcome in sweep.run(fail_on_two, [line(n) for n in range(6)])]
    assert sum(isinstance(outcome, ValueError) for outcome in outcomes) == 1
    assert sorted(record["n"] for record in read_records(sweep.path)) == [0, 1, 3, 4, 5]


def test_only_what_is_slower_or_scores_less_is_worse():
    from speed.numbers_of_speed import NUMBERS, worse

    old = {name: [1.0, 1.1, 0.9, 1.2, 1.0] for name in NUMBERS}
    noisy = [1.02, 0.98, 1.01, 1.0, 0.99]  # factors on the repeats
    new = {
        name: [value * factor for value, factor in zip(values, noisy)]
        for name, values in old.items()
    }
    record = {"against": "before", "old": old, "new": new}
    assert not worse(record, 1e-3)
    new["svi step"] = [1.5 * value for value in new["svi step"]]
    new["nuts ess"] = [0.5 * value for value in new["nuts ess"]]
    new["laplace fit"] = [0.5 * value for value in new["laplace fit"]]
    assert [each.partition(":")[0] for each in worse(record, 1e-3)] == [
        NUMBERS[name].label for name in ("svi step", "nuts ess")
    ]


def test_an_executor_runs_a_sweep(tmp_path):
    with ThreadPoolExecutor(2) as workers:
        sweep = Sweep(tmp_path / "results.jsonl", key=number, jobs=workers)
        outcomes = {
            task["n"]: outcome
            for task, outcome in sweep.run(fail_on_two, [line(n) for n in range(4)])
        }
    assert isinstance(outcomes[2], ValueError)
    assert sorted(record["square"] for record in read_records(sweep.path)) == [0, 1, 9]
