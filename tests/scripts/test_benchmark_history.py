"""Speed and scores by commit: planted regressions are found, noise is not, and the benchmark's cost is told first."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pyrobnn.studies.uci import append_record, read_records

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import benchmark_growth as growth  # noqa: E402
import benchmark_history as history  # noqa: E402
import benchmark_speed as speed  # noqa: E402
import readme_tables  # noqa: E402
import regressions  # noqa: E402
from benchmark_nuts import Ours  # noqa: E402

#: typical values, and the spread of a repeat on the scale of its changes
CENTRES = {"nuts gradient": 6.0, "svi step": 1.0, "nuts ess": 3.0, "svi score": -1.1}
SPREADS = {"nuts gradient": 0.05, "svi step": 0.08, "nuts ess": 0.15, "svi score": 0.1}


def record(generator, commit="a", machine="m", repeats=5, tails=None, **factors):
    """A record whose repeats scatter by SPREADS, a number's median changed by its factor (a difference for a score)."""
    values = {}
    for name, centre in CENTRES.items():
        noise = generator.standard_normal(repeats) if tails is None else generator.standard_t(tails, repeats)
        change = factors.get(name.replace(" ", "_"))
        if history.NUMBERS[name].kind == "factor":
            found = centre * (change or 1.0) * np.exp(SPREADS[name] * noise)
        else:
            found = centre + (change or 0.0) + SPREADS[name] * noise
        values[name] = found.tolist()
    return {
        "commit": commit,
        "code": commit,
        "machine": machine,
        "versions": {"torch": "2"},
        "values": values,
    }


def found(now, earlier):
    return {change.number.label: change for change in regressions.changes(now, earlier, history.NUMBERS)}


@pytest.mark.parametrize(
    "tails", [None, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_noise_raises_alarms_no_more_often_than_it_may(tails):
    generator, runs = np.random.default_rng(0), 400
    alarms = 0
    for _ in range(runs):
        earlier = [record(generator, str(i), tails=tails) for i in range(4)]
        alarms += bool(found(record(generator, "now", tails=tails), earlier))
    # 1 % of the runs, and five of its standard errors
    assert alarms <= runs * regressions.FALSE_ALARMS + 5 * (runs * regressions.FALSE_ALARMS) ** 0.5


@pytest.mark.parametrize(
    ("name", "factor"), [("nuts gradient", 1.5), ("svi step", 1.8), ("nuts ess", 0.3), ("svi score", -1.0)]
)
def test_a_planted_regression_is_found_and_its_opposite_is_not(name, factor):
    generator, seen = np.random.default_rng(1), 0
    better = 1 / factor if factor > 0 else -factor
    for _ in range(40):
        earlier = [record(generator, str(i)) for i in range(2)]
        worse = found(record(generator, "now", **{name.replace(" ", "_"): factor}), earlier)
        seen += history.NUMBERS[name].label in worse
        label = history.NUMBERS[name].label
        assert label not in found(record(generator, "now", **{name.replace(" ", "_"): better}), earlier)
    assert seen >= 36


def test_a_slow_drift_is_found_against_the_record_it_began_at():
    generator = np.random.default_rng(2)
    drift = [record(generator, str(i), repeats=15, nuts_gradient=1.02**i) for i in range(10)]
    assert not any(found(drift[i + 1], [drift[i]]) for i in range(9))  # each step is within the noise
    (change,) = found(drift[9], drift[:9]).values()
    assert change.commit in "01234567" and change.errors > change.allowed


def test_times_of_another_machine_and_what_was_accepted_are_no_measure():
    generator = np.random.default_rng(3)
    slow = record(generator, "now", nuts_gradient=3.0, svi_score=-3.0)
    label = history.NUMBERS["svi score"].label
    assert set(found(slow, [record(generator, machine="another")])) == {label}  # a score is one everywhere
    meant = record(generator, "b", nuts_gradient=3.0) | {"accepted": {"nuts gradient": "checks its input"}}
    assert set(found(slow, [record(generator), meant])) == {label}
    with pytest.raises(ValueError, match="3 repeats, got 2"):
        regressions.centre([1.0, 2.0])


def test_the_check_fails_with_a_line_on_each_number_and_measures_an_alarm_again(
    tmp_path, monkeypatch, capsys
):
    generator, path = np.random.default_rng(4), tmp_path / "history.jsonl"
    runs = []

    def measured(**factors):
        runs.clear()
        monkeypatch.setattr(
            history, "measure", lambda seeds: runs.append(list(seeds)) or record(generator, "now", **factors)
        )
        return history.main(["--check", "--results", str(path)])

    assert measured() == 2 and "nothing to compare with" in capsys.readouterr().out
    append_record(path, record(generator, "c0ffee"))
    assert measured() == 0 and runs == [[0, 1, 2, 3, 4]]
    assert "4 of 4 numbers are no worse than in 1 recorded commits" in capsys.readouterr().out
    assert measured(nuts_gradient=2.0) == 1 and runs == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("NUTS, a gradient of 1-50-1: "))
    assert "times that of commit c0ffee" in line and "standard errors" in line
    # an alarm that the second set of repeats does not bear out is none
    turns = iter([2.0, 0.5])
    monkeypatch.setattr(history, "measure", lambda _: record(generator, "now", nuts_gradient=next(turns)))
    assert history.main(["--check", "--results", str(path)]) == 0
    assert history.main(["--accept", "nuts gradient=meant", "--results", str(path)]) == 0
    assert read_records(path)[0]["accepted"] == {"nuts gradient": "meant"}
    assert history.main(["--accept", "nothing", "--results", str(path)]) == 2


def test_the_check_tells_its_cost_and_a_budget_cuts_its_repeats(tmp_path, monkeypatch, capsys):
    generator, path, runs = np.random.default_rng(6), tmp_path / "history.jsonl", []
    monkeypatch.setattr(history, "machine", lambda: "m")
    monkeypatch.setattr(
        history,
        "measure",
        lambda seeds: runs.append(list(seeds)) or record(generator, "now", repeats=len(seeds)),
    )
    checked = ["--check", "--results", str(path), "--budget"]
    append_record(path, record(generator, "c0ffee") | {"repeat_seconds": 30.0, "peak_mb": 800})
    assert history.main([*checked, "100s"]) == 0 and runs == [[0, 1, 2]]
    shown = capsys.readouterr().out
    assert shown.startswith("3 repeats of 7 numbers: about 1.5 min with 1 process, 800 MB a process")
    assert "left out for the budget: 2 repeats" in shown
    assert history.main([*checked, "80s"]) == 2 and len(runs) == 1  # nothing measured is no pass
    assert "nothing is measured" in capsys.readouterr().out
    monkeypatch.setattr(history, "machine", lambda: "another")
    assert history.main([*checked, "1h"]) == 0 and runs[1] == [0, 1, 2, 3, 4]
    assert "timed on another machine: 30 s a repeat on m" in capsys.readouterr().out


def two_records():
    generator = np.random.default_rng(5)
    return [record(generator, "old"), record(generator, "new") | {"accepted": {"svi step": "why"}}]


def test_the_history_is_a_table():
    rows = history.table(two_records()).splitlines()
    assert rows[2].startswith("| new | ") and rows[3].startswith("| old | ") and "(accepted)" in rows[2]
    assert rows[-1] == "Accepted at new: SVI, a step of 1-50-1; why."
    assert "No record yet" in history.table([])


@pytest.mark.slow
def test_the_history_is_a_figure(tmp_path):
    history.draw(two_records(), tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 1000


def test_the_recorded_history_holds_every_number_and_passes_its_own_check():
    records = read_records(history.RESULTS)
    assert records and set(records[-1]["values"]) == set(history.NUMBERS)
    assert (
        "history" in readme_tables.TABLES
        and regressions.changes(records[-1], records[-1:], history.NUMBERS) == []
    )


def test_the_cost_of_the_sections_is_told_first_and_what_finished_is_not_run_again(
    tmp_path, monkeypatch, capsys
):
    for name, body in {"benchmark_svi.py": "", "benchmark_nuts.py": "raise SystemExit(3)"}.items():
        (tmp_path / name).write_text(body)
    monkeypatch.setattr(speed, "HERE", tmp_path)
    costs = tmp_path / "costs.jsonl"
    asked = ["--costs", str(costs), "--sections", "svi", "nuts", "growth", "--budget"]
    known = {"dataset": "section", "method": "growth", "cpu_seconds": 7200.0, "peak_mb": 900, "code": "other"}
    append_record(costs, known | {"machine": speed.machine()})
    append_record(costs, known | {"machine": "another", "method": "svi"})
    assert speed.main([*asked, "1h"]) == 0
    shown = capsys.readouterr().out  # a section that nobody timed may take as long as the longest
    assert "left out for the budget: 3 sections, of section growth, section nuts, section svi" in shown
    assert speed.main([*asked, "7h"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith(
        "about 6.0 h with 1 process, 900 MB a process, 0.0 MB of disk; 2 of them were never timed"
    )
    assert "nuts failed (exit code 3)" in shown
    last = read_records(costs)[-1]
    assert last["method"] == "svi" and last["peak_mb"] > 1 and last["cpu_seconds"] < 60
    speed.main([*asked, "1m"])
    assert "finished before with this code (--again runs them anyhow): svi" in capsys.readouterr().out


def test_a_section_that_takes_longer_than_was_guessed_is_cut_at_the_budget(tmp_path, monkeypatch, capsys):
    child = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'import time; time.sleep(60)'!r}])"
    )
    (tmp_path / "benchmark_svi.py").write_text(child)
    monkeypatch.setattr(speed, "HERE", tmp_path)
    costs = tmp_path / "costs.jsonl"
    known = {"dataset": "section", "method": "svi", "cpu_seconds": 0.5, "peak_mb": 9, "code": "other"}
    append_record(costs, known | {"machine": speed.machine()})
    started = time.perf_counter()
    assert speed.main(["--costs", str(costs), "--sections", "svi", "--budget", "2s"]) == 0
    assert time.perf_counter() - started < 30
    assert "svi was cut at the budget: the next run goes on with it" in capsys.readouterr().out
    assert len(read_records(costs)) == 1  # what was cut is no time of the whole


def test_growth_makes_a_row_of_each_size(monkeypatch):
    asked = growth.parse(["--clock", "cpu"])
    monkeypatch.setattr(growth, "GROWTH", {"num_chains": (1, 2)})
    monkeypatch.setattr(growth, "Ours", lambda case, args: Ours(case, args | {"compile": False}))
    monkeypatch.setattr(growth, "peer_or_none", lambda *_: None)
    monkeypatch.setattr(growth, "timed", lambda ours, peer, repeats: {"machine_us": float(ours.chains)})
    rows = [(row["varied"], row["value"], row["machine_us"]) for row in growth.growth(asked)]
    assert rows == [("num_chains", 1, 1.0), ("num_chains", 2, 2.0)]
