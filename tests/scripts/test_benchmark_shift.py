"""The benchmarks of classes, of shifted inputs and of gaps in the data: what they hold out, and their records."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pyrobnn as pb
from pyrobnn.data import Dataset
from pyrobnn.studies.uci import append_record, read_records

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import benchmark_classification as classes  # noqa: E402
import benchmark_conformal as conformal  # noqa: E402
import benchmark_gap as gap  # noqa: E402
import benchmark_heads as heads  # noqa: E402
import benchmark_ranks as ranks  # noqa: E402
import sweeps  # noqa: E402


def test_digits_are_moved_and_turned_as_they_say():
    images = pb.data.digits().subset([0, 1, 2])
    same = classes.corrupted(images, "rotation", 0, seed=0)
    torch.testing.assert_close(same.x, images.x)
    moved = classes.corrupted(images, "moved", 1, seed=0)
    torch.testing.assert_close(moved.x[..., 1:, 1:], images.x[..., :-1, :-1], atol=1e-5, rtol=0)
    assert float(moved.x[..., 0, :].abs().max()) < 1e-5
    half = classes.corrupted(images, "rotation", 180, seed=0)
    torch.testing.assert_close(half.x, images.x.flip(-1, -2), atol=1e-4, rtol=0)
    noisy = classes.corrupted(images, "noise", 0.5, seed=0)
    assert float((noisy.x - images.x).std()) == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize("study", [classes, conformal, gap, heads], ids=lambda study: study.__name__)
def test_a_study_refuses_a_name_that_it_does_not_know_before_anything_runs(study, tmp_path, capsys):
    results = tmp_path / "records.jsonl"
    for wrong in (["--data", "yaht"], ["--methods", "dropout"], ["--splits", "3-1"]):
        try:
            code = study.main([*wrong, "--results", str(results)])
        except SystemExit as error:  # of argparse
            code = error.code
        told = capsys.readouterr().err.splitlines()[-1]
        assert code == 2 and wrong[1] in told and not results.exists()


@pytest.mark.parametrize("study", [classes, gap], ids=lambda study: study.__name__)
def test_a_study_tells_its_cost_first_and_what_a_budget_leaves_out(study, tmp_path, capsys):
    name = "iris" if study is classes else "gap"
    options = ["--data", name, "--methods", "map", "swag", "--splits", "0", "--budget", "0.001s"]
    assert study.main([*options, "--results", str(tmp_path / "records.jsonl")]) == 0
    told = capsys.readouterr().out
    assert f"left out for the budget: 2 fits, of {name} map, {name} swag" in told


def test_chains_shared_out_over_processes_are_told_by_the_busiest():
    fast, slow = (
        {"steps": 100.0, "short": 1.0, "gathering": 0.1, "cpu_seconds": spent} for spent in (2.0, 4.0)
    )
    one = {
        "processes": 1,
        "chains": 8,
        "cpu_seconds": 4.0,
        "each": [{**slow, "steps": 200.0}],
        "gathered_bytes": 0,
    }
    two = {"processes": 2, "chains": 8, "cpu_seconds": 4.0, "each": [fast, slow], "gathered_bytes": 2e6}
    assert ranks.table([one, two]).splitlines()[2:] == [
        "| 1 | 8 | 200 | 4.0 | 1.0 | 1.00 | 0.0 | 0.100 |",
        "| 2 | 4 | 200 | 4.0 | 1.0 | 1.00 | 2.0 | 0.100 |",
    ]


def test_rows_shared_out_over_processes_are_told_by_the_busiest():
    def record(processes, *steps):
        each = [{"step": step, "mean": 0.001 * (processes - 1)} for step in steps]
        return {"processes": processes, "shared": [{"width": 50, "weights": 1_000_000, "each": each}]}

    assert ranks.table_of_rows([record(1, 0.02), record(2, 0.008, 0.01)]).splitlines()[2:] == [
        "| 50 | 1,000,000 | 1 | 20.0 | 0.00 | 1.00 | 0.00 |",
        "| 50 | 1,000,000 | 2 | 10.0 | 1.00 | 2.00 | 8.00 |",
    ]


@pytest.mark.parametrize("best", [0.25, 1.0, 2.0, 8.0, 256.0])
def test_the_prior_is_searched_for_beyond_any_grid(best, monkeypatch):
    monkeypatch.setattr(classes, "model", lambda name, train, split, scale: scale)
    asked = []

    class Judge:
        def __init__(self, **_):
            pass

        def fit(self, scale, *_, **__):
            asked.append(scale)
            return SimpleNamespace(log_evidence=-abs(math.log(scale / best)))

    monkeypatch.setattr(pb, "Laplace", Judge)
    classes.prior_scale.cache_clear()
    assert classes.prior_scale("iris", 0) == best
    assert len(set(asked)) == len(asked) and {best / 2, best * 2} <= set(asked)
    classes.prior_scale.cache_clear()


def test_unseen_digits_are_in_no_training_row():
    train, tests = classes.load("unseen", 1)
    assert int(train.y.max()) == int(tests["clean"].y.max()) == 7
    assert set(tests["other"].y.tolist()) == {8, 9}


def test_a_record_of_classes_fills_its_tables(tmp_path, monkeypatch):
    quick = {name: (pb.MAP(num_steps=3, polish_steps=0, compile=False), None) for name in classes.METHODS}
    monkeypatch.setattr(classes, "configurations", lambda: quick)
    monkeypatch.setattr(classes, "prior_scale", lambda name, split: 1.0)
    path = tmp_path / "records.jsonl"
    tasks = [
        {"data": data, "split": 0, "method": "map", "rule": classes.rule("map")}
        for data in ("iris", "unseen")
    ]
    for task in tasks:
        append_record(path, classes.run_task(task))
    records = read_records(path)
    assert {"commit", "code", "seed", "versions", "cpu_seconds"} <= records[0].keys()
    assert [classes.key(record) for record in records] == [classes.key(task) for task in tasks]
    assert "| iris | map | 1 |" in classes.table(records)
    assert 0 < records[1]["scores"]["auroc largest probability"] < 1
    assert "auroc mutual information" not in records[1]["scores"]  # of one draw there is none
    stale = [{**record, "rule": "another"} for record in records]
    assert "| map |" not in classes.table(stale)
    older = classes.table([{**record, "code": "another"} for record in records])
    assert "| iris | map ‡ | 1 |" in older and sweeps.OLDER in older
    assert sweeps.OLDER not in classes.table(records)
    assert "Not run by today's settings: iris: ensemble, laplace" in classes.table(records)
    assert "; wine: every method; " in classes.table(records)


@pytest.mark.parametrize("data", ["noise too small", "classes"])
def test_a_record_of_conformal_sets_fills_its_table(data, monkeypatch):
    quick = pb.MAP(num_steps=3, polish_steps=0, compile=False)
    monkeypatch.setattr(conformal, "methods", lambda: {"map": (quick, None)})
    record = conformal.run_task({"data": data, "split": 0, "method": "map"})
    assert conformal.key(record) == (data, 0, "map") and "add-one-in coverage" not in record["scores"]
    assert 0.8 < record["scores"]["split coverage"] <= 1.0  # however poor the fit
    assert f"| {data} | map | 1 |" in conformal.table([record])


def test_shares_that_are_off_are_told_from_ones_that_too_few_splits_tell():
    def records(*shares):
        return [{"scores": {"split coverage": share}} for share in shares]

    assert conformal.verdict(records(0.85, 0.97)) == "within"
    assert conformal.verdict(records(0.75, 0.95)) == "within two errors"
    assert conformal.verdict(records(*[0.86, 0.87] * 9)) == "off"
    assert conformal.verdict(records(*[0.93, 0.94] * 9)) == "off"


def test_the_parts_of_a_standard_split_share_no_row(tmp_path, monkeypatch):
    folder, draw = tmp_path / "yacht", torch.Generator().manual_seed(0)
    folder.mkdir()
    table = torch.rand(120, 3, generator=draw).double()
    for name, rows in (
        ("features", [0, 1]),
        ("target", [2]),
        ("train_0", range(100)),
        ("test_0", range(100, 120)),
    ):
        (folder / f"index_{name}.txt").write_text("\n".join(map(str, rows)), encoding="utf-8")
    text = "\n".join(" ".join(f"{value:.17g}" for value in row) for row in table.tolist())
    (folder / "data.txt").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYROBNN_DATA", str(tmp_path))
    monkeypatch.setattr(conformal, "methods", lambda: {"map": (quick, None)})
    quick = pb.MAP(num_steps=3, polish_steps=0, compile=False)
    train, test, [calibration] = conformal.parts("yacht", 0)
    assert [len(x) for x, _ in (train, test, calibration)] == [81, 20, 19]
    # no row twice, and the units are those of the fit
    assert len(torch.cat([x for x, _ in (train, test, calibration)]).unique(dim=0)) == 120
    assert abs(float(train[1].mean())) < 1e-5 and abs(float(test[1].mean())) > 1e-3
    conformal.uci_model.cache_clear()
    record = conformal.run_task({"data": "yacht, noise too small", "split": 0, "method": "map"})
    conformal.uci_model.cache_clear()
    assert "| noise too small | map | 1 |" in conformal.uci_table([record])
    assert "| not run |" in conformal.uci_table([record])


def test_features_with_a_gap_leave_rows_on_both_sides():
    x = torch.stack([torch.arange(90.0), (torch.arange(90) > 40).float(), torch.arange(90) % 3], 1)
    assert [column for column, *_ in gap.gaps(x)] == [0, 2]


def test_a_record_of_a_gap_fills_its_table(tmp_path):
    train, tests = gap.load("diabetes", 0)
    column, low, high = gap.gaps(pb.data.diabetes().x)[0]
    inside = (tests["inside"].x[:, column] > low) & (tests["inside"].x[:, column] < high)
    assert bool(inside.all()) and train.num_data + sum(t.num_data for t in tests.values()) == 442
    for part in (train, tests["outside"]):
        assert not bool(((part.x[:, column] > low) & (part.x[:, column] < high)).any())
    with pytest.raises(ValueError, match="there is no split"):
        gap.load("diabetes", 50)
    task = {"dataset": "gap", "split": 0, "method": "linear", "rule": gap.rule_of("linear")}
    record = gap.run_task(task)
    assert isinstance(gap.load("gap", 0)[1]["inside"], Dataset)
    # a line knows nothing of the gap: its interval is as wide there as beside it
    assert record["scores"]["inside sd"] == pytest.approx(record["scores"]["outside sd"], rel=0.05)
    assert "| gap | linear | 1 |" in gap.table([record])
    assert "| linear |" not in gap.table([{**record, "rule": "another"}])
    assert "| gap | linear ‡ | 1 |" in gap.table([{**record, "code": "another"}])
    assert "Not run by today's settings: gap: map, " in gap.table([record])


def test_the_noise_of_two_heads_follows_the_input_and_a_record_fills_its_tables():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 1, generator=generator)
    y = x + torch.where(x > 0.5, 0.5, 0.05) * torch.randn(x.shape, generator=generator)
    search = pb.MAP(num_steps=400, polish_steps=0, compile=False)
    rule = heads.HeadsRule(search, prior_scales=(1.0,), noises=("learned",))
    posterior, chosen, _ = rule.fit(Dataset(x, y, "mine", "regression"), seed=0)
    quiet, loud = posterior.predict(torch.tensor([[0.2], [0.8]])).scale.flatten().tolist()
    assert loud > 4 * quiet
    assert rule.describe()["noises"] == ["of the input"] and chosen.prior_scale == 1.0
    record = {
        "dataset": "naval", "split": 0, "method": "map", "rule": heads.fits.rule_id("map", heads.METHODS),
        "scores": {"log_density": 6.0, "rmse": 0.00042},
    }  # fmt: skip
    shown = heads.tables([record])
    assert "| map |  | 6.000 |" in shown and "| map |  | 0.00042 |" in shown
    assert "Not run by today's settings: kin8nm: every method; naval: ensemble; power" in shown
    assert "homoskedastic" not in shown.replace("heteroskedastic", "")
    assert "| map |" not in heads.tables([{**record, "rule": "another"}])
