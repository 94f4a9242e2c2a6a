"""The benchmark: exact scores, the floor, rules, and a sweep that survives being killed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from sklearn.preprocessing import PowerTransformer

from pyrobnn.data import Dataset, diabetes, uci, uci_num_hidden, uci_splits
from pyrobnn.inference.ensemble import DeepEnsemble
from pyrobnn.inference.map import MAP
from pyrobnn.inference.mc_dropout import MCDropout
from pyrobnn.inference.sgmcmc import SGHMC
from pyrobnn.inference.svi import SVI
from pyrobnn.likelihoods import HeteroskedasticGaussian
from pyrobnn.metrics import crps
from pyrobnn.model import BNN
from pyrobnn.priors import IIDPrior
from pyrobnn.studies.uci import (
    LinearFloor,
    Rule,
    Sweep,
    append_record,
    checks,
    compare_with_published,
    fits,
    mixture_scores,
    plan,
    provenance,
    read_published,
    read_records,
    summarize,
    tasks,
)
from pyrobnn.studies.uci.rules import RULES, Candidate, OfLinear
from pyrobnn.studies.uci.scores import mixture_crps
from pyrobnn.studies.uci.tables import markdown, smallest_difference

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "scripts" / "published_uci.json"


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


# -- scores -----------------------------------------------------------------------------------------------------------


def test_scores_of_one_normal_are_the_closed_forms():
    loc, scale, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 2.0]]), torch.tensor([1.5, 9.0])
    found = mixture_scores(loc, scale, y)
    normal = torch.distributions.Normal(loc[0].double(), scale[0].double())
    assert found["log_density"] == pytest.approx(float(normal.log_prob(y).mean()))
    assert found["rmse"] == pytest.approx(math.sqrt((0.25 + 49) / 2))
    assert found["coverage"] == 0.5  # 1 and 3.5 standard deviations away


def test_crps_of_a_mixture_is_what_many_draws_of_it_have():
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(3, 4, generator=generator).double()
    scale = 0.5 + torch.rand(3, 4, generator=generator).double()
    y = torch.randn(4, generator=generator).double()
    exact = mixture_crps(loc, scale, y)
    rows = torch.randint(3, (200_000,), generator=generator)
    draws = loc[rows] + scale[rows] * torch.randn(200_000, 4, generator=generator).double()
    # the error of each point's estimate is that of a mean of |draw - y|, at most
    error = (draws - y).abs().std(0) / math.sqrt(len(rows))
    assert bool(((crps(draws, y) - exact).abs() < 5 * error).all())


def test_a_mixture_is_scored_as_a_mixture():
    loc, y = torch.tensor([[-3.0], [3.0]]), torch.tensor([0.0])
    found = mixture_scores(loc, torch.ones(2, 1), y)
    assert found["log_density"] == pytest.approx(-4.5 - 0.5 * math.log(2 * math.pi))
    assert found["coverage"] == 1.0
    with pytest.raises(ValueError, match="draw, point"):
        mixture_scores(loc, torch.ones(2, 2), y)


def test_the_floor_maximises_the_evidence():
    data = diabetes()
    floor = LinearFloor.fit(data)
    x = floor.standardizer.transform_x(data.x).double()
    y = floor.standardizer.transform_y(data.y)[:, 0].double()
    precision = torch.linalg.inv(floor.covariance)
    alpha = float((precision - x.T @ x / floor.noise**2).diagonal().mean())

    def evidence(alpha, noise):
        covariance = x @ x.T / alpha + noise**2 * torch.eye(len(x), dtype=torch.float64)
        return float(torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y))

    best = evidence(alpha, floor.noise)
    assert floor.log_evidence == pytest.approx(best, rel=1e-9)
    for factor in (0.95, 1.05):
        assert evidence(alpha * factor, floor.noise) < best
        assert evidence(alpha, floor.noise * factor) < best
    mean = x @ torch.linalg.solve(x.T @ x + alpha * floor.noise**2 * torch.eye(10), x.T @ y)
    predicted, _ = floor.predict(data.x)
    expected = mean * floor.standardizer.y_scale + floor.standardizer.y_mean
    assert torch.allclose(predicted, expected.double(), rtol=1e-8)


# -- rules ------------------------------------------------------------------------------------------------------------


def line_data(num_data=60):
    with seeded(0):
        x = torch.rand(num_data, 1) * 4 - 2
        return Dataset(x, 3 * x + 1 + 0.3 * torch.randn(num_data, 1), "line", "regression")


def test_validation_chooses_the_noise_of_the_data():
    rule = Rule(
        MAP(num_steps=150, lr=0.05, compile=False, polish_steps=0),
        (1.0,),
        (0.005, 0.08, 2.0),
        choose="validation",
    )
    posterior, chosen, criterion = rule.fit(line_data(), seed=0)
    assert chosen.noise == 0.08  # 0.3 / sd(y)
    assert max(criterion, key=criterion.get) == "noise=0.08" and len(criterion) == 3
    assert posterior.meta["num_data"] == 60  # fitted anew to the whole train part


@pytest.mark.slow
def test_the_evidence_of_one_method_can_choose_for_another():
    judge = SVI(num_steps=600, lr=0.02, init_scale=0.01, local_reparameterization=True, compile=False)
    search = MAP(num_steps=300, compile=False)
    rule = Rule(search, (1.0,), (0.02, 0.08, 3.0), choose="evidence", validate_with=judge)
    posterior, chosen, criterion = rule.fit(line_data(), seed=0)
    assert chosen.noise == 0.08 and max(criterion, key=criterion.get) == "noise=0.08"
    assert posterior.meta["method"] == "MAP" and chosen.describe()["method"] == "MAP"


@pytest.mark.slow
def test_a_sampler_starts_at_modes_and_a_candidate_that_diverges_gives_way_to_the_next():
    modes = DeepEnsemble(num_members=2, num_steps=200, lr=0.05, compile=False)
    sampler = SGHMC(num_chains=2, num_warmup=0, thinning=50, compile=False)
    rule = Rule(
        sampler,
        (1.0,),
        (0.08,),
        choose="validation",
        variants=({"step_size": 1e3}, {"step_size": 1e-5}),
        validate_with=modes,  # which does not know the step size: the first candidate is as good as the second
        num_draws=2,
        init=modes,
    )
    posterior, chosen, _ = rule.fit(line_data(), seed=0)
    assert chosen.method.step_size == 1e-5
    data = line_data()
    start = chosen.init.fit(chosen.model(data, 0), data.x, data.y, seed=0)
    for name, value in posterior.draws.items():
        apart = (value[:, :1] - start.draws[name]).abs().flatten(2).amax(-1)  # (chain, member)
        assert (10 * apart.amin(1) < apart.amax(1)).all(), f"{name}: {apart}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weights did not move:UserWarning")  # of units that are off everywhere
@pytest.mark.parametrize("noise", [1e-3, 1e-2, 1e-1, 1.0, 10.0])
@pytest.mark.parametrize("method", ["map", "swag"])
def test_on_a_line_a_rule_is_no_worse_than_the_linear_model_at_any_noise(method, noise):
    """Up to a nat a weight, twice what maximum likelihood is expected to lose; noise in units of the signal's sd."""
    with seeded(0):
        x, slope = torch.randn(2000, 3), torch.randn(3)
        f = x @ slope
        y = (f / f.std() + noise * torch.randn(2000))[:, None]
    train, test = (
        Dataset(x[rows], y[rows], "line", "regression") for rows in (slice(1000), slice(1000, 2000))
    )
    posterior, chosen, _ = RULES[method].fit(train, seed=0)
    mean, scale = LinearFloor.fit(train).predict(test.x)
    floor = torch.distributions.Normal(mean, scale).log_prob(test.y[:, 0].double())
    lost = floor - posterior.predict(test.x).log_prob(test.y)
    error = float(lost.std()) / math.sqrt(len(lost))
    num_weights = sum(weight.numel() for weight in chosen.model(train, 0).net.parameters())
    assert float(lost.mean()) < num_weights / train.num_data + 2 * error


AXES = {
    "noise": (Rule(MAP(), (1.0,), (OfLinear(0.5), OfLinear(1.0)), "validation"), lambda c: c.noise.share),
    "prior": (Rule(MAP(), (1.0, 2.0), ("learned",), "validation"), lambda c: c.prior_scale),
    "option": (
        Rule(MCDropout(), (1.0,), ("learned",), "validation", ({"p": 0.1}, {"p": 0.2})),
        lambda c: c.method.p,
    ),
}


@pytest.mark.parametrize(
    "axis, best, found, tried",
    [
        ("noise", 0.6, 0.5, 3),
        ("noise", 0.1, 0.125, 5),
        ("noise", 3.0, 1.0, 2),  # never above a linear model's
        ("noise", None, 0.5, 3),  # none validates
        ("prior", 7.0, 8.0, 5),
        ("prior", 0.3, 0.25, 5),
        ("prior", 1.0, 1.0, 3),
        ("option", 0.03, 0.025, 5),
        ("option", 0.9, 0.8, 4),  # p = 1.6 is none
    ],
)
def test_a_rule_looks_beyond_the_ends_of_its_grid(axis, best, found, tried, monkeypatch):
    """``best``: the value that validates best."""
    rule, value = AXES[axis]

    def validate(self, candidate, part, held_out, seed):
        return -math.inf if best is None else -abs(math.log(value(candidate) / best))

    monkeypatch.setattr(Rule, "_validate", validate)
    monkeypatch.setattr(Candidate, "fit", lambda self, train, seed, num_draws: "fitted")
    x = torch.linspace(-1, 1, 20)[:, None]
    fitted, chosen, table = rule.fit(Dataset(x, x.sin(), "any", "regression"), 0)
    assert fitted == "fitted" and value(chosen) == found and len(table) == tried


def test_a_rule_of_several_candidates_must_choose():
    with pytest.raises(ValueError, match="must choose"):
        Rule(MAP(), (1.0, 2.0), (0.1,))


def test_variants_change_the_method_and_the_identity_of_the_rule():
    rule = Rule(DeepEnsemble(), (1.0,), (0.1,), choose="validation", variants=({"lr": 0.1}, {"lr": 0.2}))
    assert [candidate.method.lr for candidate in rule.candidates()] == [0.1, 0.2]
    assert [rule.label(candidate) for candidate in rule.candidates()] == ["lr=0.1", "lr=0.2"]
    other = Rule(DeepEnsemble(num_members=3), (1.0,), (0.1,))
    assert len({fits.rule_id("a", {"a": each}) for each in (rule, other)}) == 2


def test_every_declared_rule_can_be_written_down():
    assert len({fits.rule_id(method) for method in RULES}) == len(RULES)
    for rule in RULES.values():
        json.dumps(rule.describe())


@pytest.fixture
def small_sets(tmp_path):
    """Two folders in the layout of the UCI sets: one with two splits, one with three."""
    generator = np.random.default_rng(0)
    for name, count in (("yacht", 2), ("mine", 3)):
        folder = tmp_path / name
        folder.mkdir()
        x = generator.normal(size=(40, 2))
        np.savetxt(folder / "data.txt", np.column_stack([x, np.sin(x[:, 0]) + 0.1 * x[:, 1]]))
        (folder / "index_features.txt").write_text("0\n1\n")
        (folder / "index_target.txt").write_text("2\n")
        for split in range(count):
            rows = np.roll(np.arange(40), 7 * split)
            np.savetxt(folder / f"index_train_{split}.txt", rows[:36], fmt="%d")
            np.savetxt(folder / f"index_test_{split}.txt", rows[36:], fmt="%d")
    return tmp_path


def test_unknown_names_are_refused_with_the_known_ones(small_sets):
    with pytest.raises(ValueError, match="'yaht'.*found mine, yacht.*usual ones are boston"):
        tasks(["yaht"], ["map"], [0], root=small_sets)
    with pytest.raises(ValueError, match="mc-dropout"):
        tasks(["yacht"], ["dropout"], [0], root=small_sets)
    with pytest.raises(ValueError, match="no split 3: they are 0 … 2"):
        tasks(["yacht", "mine"], ["map"], [3], root=small_sets)


def test_a_set_that_says_how_many_hidden_units_has_them_and_its_record_says_so(small_sets):
    file = small_sets / "yacht" / "n_hidden.txt"
    rules = {"map": Rule(MAP(num_steps=2, polish_steps=0, compile=False), (1.0,), (0.1,))}
    (task,) = tasks(["yacht"], ["map"], [0], rules, root=small_sets)
    for text, expected in ((None, 50), ("7\n", 7), ("7.000e+00", 7)):
        if text is not None:
            file.write_text(text)
        assert uci_num_hidden("yacht", small_sets) == expected
        assert fits.run_task(task, root=small_sets, rules=rules)["num_hidden"] == expected
    for text in ("", "many", "0", "-3", "7.5", "nan", "inf"):
        file.write_text(text)
        with pytest.raises(ValueError, match="'yacht'.*n_hidden.txt must hold one positive whole number"):
            tasks(["yacht"], ["map"], [0], rules, root=small_sets)


def test_a_missing_file_of_a_split_is_told_before_anything_runs(small_sets, tmp_path, capsys):
    common = ["--data-root", str(small_sets), "--results", str(tmp_path / "results.jsonl"), "--data", "mine"]
    (small_sets / "mine" / "index_test_2.txt").unlink()  # the last split
    (small_sets / "mine" / "index_train_0.txt").unlink()
    with pytest.raises(ValueError, match=r"mine lacks index_train_0.txt, index_test_2.txt"):
        uci_splits("mine", small_sets)
    benchmark = script("benchmark_uci")
    for wrong in ([], ["--splits", "7"], ["--data", "yaht"], ["--methods", "dropout"], ["--check", "5%"]):
        assert benchmark.main([*common, *wrong]) == 2
        told = capsys.readouterr()
        assert told.err.count("\n") == 1 and not told.out
    for file in (small_sets / "mine").glob("index_t*_*.txt"):
        file.unlink()
    with pytest.raises(ValueError, match="mine has no splits"):
        uci_splits("mine", small_sets)


def test_a_set_has_the_splits_of_its_folder(small_sets):
    found = tasks(["yacht", "mine"], ["linear"], root=small_sets)
    assert [(task["dataset"], task["split"]) for task in found] == [
        ("yacht", 0),
        ("mine", 0),
        ("yacht", 1),
        ("mine", 1),
        ("mine", 2),
    ]
    record = fits.run_task(found[-1], root=small_sets)
    assert record["num_train"] == 36 and record["peak_mb"] > 10 and len(record["code"]) == 8


def test_the_noise_of_a_rule_is_a_share_of_what_a_line_leaves(small_sets):
    train, _ = uci("mine", 0, small_sets)
    residual = LinearFloor.fit(train).noise
    assert OfLinear(0.5).sd(train) == pytest.approx(0.5 * residual, rel=0.06)
    scaled = dataclasses.replace(train, y=1000 * train.y)  # a share knows no unit
    assert OfLinear(0.5).sd(scaled) == OfLinear(0.5).sd(train)
    assert not any(isinstance(noise, float) for rule in RULES.values() for noise in rule.noises)


def test_the_cost_is_told_and_a_budget_leaves_out_what_does_not_fit():
    known = [{"dataset": "a", "method": "map", "cpu_seconds": 10.0, "peak_mb": 400}]
    waiting = [{"dataset": name, "method": "map", "split": split} for split in (0, 1) for name in ("a", "b")]
    whole = plan.plan(waiting, known, math.inf)
    assert (whole.seconds, whole.guessed, whole.peak_mb, whole.left_out) == (40.0, 2, 400, [])
    cut = plan.plan(waiting, known, plan.duration("0.5m"))
    assert cut.tasks == waiting[:3] and cut.left_out == waiting[3:]
    assert "about 30 s with 1 process, 400 MB" in cut.describe(1)
    assert "left out for the budget: 1 fits, of b map" in cut.describe(1)
    nothing = plan.plan(waiting, known, 1.0)
    assert nothing.describe(1) == "nothing to run\nleft out for the budget: 4 fits, of a map, b map"
    assert plan.plan(waiting, known, 15, jobs=2).tasks == waiting[:3]
    for text in ("1 hour", "0h", "h", "-3m"):
        with pytest.raises(ValueError, match="a time is a number"):
            plan.duration(text)
    for text in ("5", "0%", "101%"):
        with pytest.raises(ValueError, match="a share is a percentage"):
            plan.share(text)


def test_a_record_that_cannot_be_met_again_fails_the_check(small_sets, tmp_path, capsys):
    benchmark, results = script("benchmark_uci"), tmp_path / "results.jsonl"
    common = ["--data-root", str(small_sets), "--results", str(results), "--datasets", "mine"]
    assert benchmark.main([*common, "--check", "50%"]) == 2  # nothing is no proof
    assert benchmark.main([*common, "--methods", "linear"]) == 0
    assert "about" in capsys.readouterr().out
    assert benchmark.main([*common, "--methods", "linear", "--check", "100%"]) == 0
    assert capsys.readouterr().out.count("the same number") == 3
    kept = read_records(tmp_path / "results_checks.jsonl")
    assert [(one["met"], one["nats"], one["among"]) for one in kept] == [(True, 0.0, ["mine"])] * 3
    assert benchmark.main([*common, "--methods", "linear", "--stale"]) == 0
    assert "nothing to run" in capsys.readouterr().out
    append_record(results, {**read_records(results)[0], "rule": "of another day"})
    assert benchmark.main([*common, "--methods", "linear", "--check", "100%"]) == 0
    assert "1 records of earlier settings are stale, and not checked: linear" in capsys.readouterr().out
    cut = [*common, "--methods", "linear", "--check", "100%", "--budget", "0.001s"]
    assert benchmark.main(cut) == 2  # a budget that nothing fits into proves nothing, and says so
    told = capsys.readouterr().out
    assert "left out for the budget: 3 records, of mine linear" in told and "nothing is checked" in told
    first, *rest = read_records(results)[:3]
    first["scores"]["log_density"] += 0.06
    results.unlink()
    for record in (first, *rest):
        append_record(results, record)
    assert benchmark.main([*common, "--methods", "linear", "--check", "100%"]) == 1
    assert "(-0.060 nats a point)" in capsys.readouterr().out
    results.unlink()
    for record in rest:
        append_record(results, record)
    append_record(results, {**first, "code": "of another day"})
    assert benchmark.main([*common, "--methods", "linear"]) == 0 and len(read_records(results)) == 3
    assert benchmark.main([*common, "--methods", "linear", "--stale"]) == 0
    assert [record["split"] for record in read_records(results)[3:]] == [first["split"]]


def test_a_budget_is_planned_again_with_what_was_measured(tmp_path, monkeypatch, capsys):
    benchmark = script("benchmark_uci")
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "shipped.jsonl")
    append_record(tmp_path / "shipped.jsonl", {**records("map", [0.0])[0], "rule": "r", "cpu_seconds": 40.0})
    waiting = [{"dataset": "mine", "split": split, "method": "map", "rule": "r"} for split in range(4)]
    sweep = Sweep(tmp_path / "results.jsonl", fits.key)

    def quick(task):
        return {**records("map", [0.0], task["dataset"])[0], **task, "cpu_seconds": 0.1}

    assert benchmark.run(sweep, quick, waiting, 60.0) == 0
    told = capsys.readouterr().out
    assert "left out for the budget: 3 fits, of mine map" in told and "3 to run\nabout 1 s" in told
    assert len(read_records(sweep.path)) == 4


def test_what_is_left_to_run_is_told_with_its_cost():
    made = records("linear", [0.0, 0.0, 0.0]) + records("nuts", [0.0], dataset="boston")
    for record in made:
        record |= {"rule": fits.rule_id(record["method"]), "cpu_seconds": 7.0}
    made += [{**records("map", [0.0])[0], "rule": "earlier", "cpu_seconds": 4.0}]
    timed = [{"dataset": "yacht", "method": "nuts", "gradient_us": 1000.0}]
    lines = script("benchmark_uci").rest_table(made, timed).splitlines()
    assert lines[0] == "| splits to run × CPU s of one | boston | yacht |"
    assert "| linear | 1 × 7? |  |" in lines and "| map | 1 × 4? | 3 × 4 |" in lines
    assert "| nuts |  | 3 × 818? |" in lines and lines[-1].startswith("In all 0.7 CPU hours.")


def test_stale_cells_show_as_stale_and_the_last_of_repeated_work_counts(tmp_path, monkeypatch):
    tables = script("readme_tables")
    monkeypatch.setattr(tables, "HERE", tmp_path)
    (tmp_path / "results").mkdir()

    def put(method, score, rule=None, dataset="yacht", code=None):
        (record,) = records(method, [score], dataset=dataset)
        made = {"rule": rule or fits.rule_id(method), "code": code or fits.code_of(method)}
        append_record(tmp_path / "results" / "uci.jsonl", record | made)

    put("linear", -9.0, code="earlier")
    put("linear", -3.0)
    put("map", -8.0, rule="earlier")
    put("map", -2.0)
    put("map", -4.0, rule="earlier", dataset="boston")  # of another set there is nothing newer
    put("swag", -5.0, code="earlier")
    lines = tables.uci_table("log_density", published=False).splitlines()
    assert "| linear |  | -3.000 |" in lines and "| map | -4.000 † | -2.000 |" in lines
    assert "| swag |  | -5.000 ‡ |" in lines
    assert any(line.startswith("† ") for line in lines) and any(line.startswith("‡ ") for line in lines)


def test_checked_cells_speak_for_those_of_earlier_code_when_all_of_enough_are_met(tmp_path, monkeypatch):
    tables = script("readme_tables")
    monkeypatch.setattr(tables, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    for dataset in ("yacht", "boston"):
        for record in records("map", [-2.0] * 8, dataset=dataset):
            made = {"rule": fits.rule_id("map"), "code": "earlier", "commit": "abc"}
            append_record(tmp_path / "results" / "uci.jsonl", record | made)

    def check(split, nats=0.01, made="earlier", code=None):
        (record,) = records("map", [-2.0], dataset="yacht")
        record |= {"split": split, "rule": fits.rule_id("map"), "code": made, "commit": "abc"}
        again = record | {"code": code or fits.code_of("map"), "commit": "def", "finished_at": "today"}
        again["scores"] = record["scores"] | {"log_density": -2.0 + nats}
        append_record(
            tmp_path / "results" / "uci_checks.jsonl", checks.checked_cell(record, again, ["yacht"])
        )

    def row():
        lines = tables.uci_table("log_density", published=False).splitlines()
        return next(line for line in lines if line.startswith("| map")), "\n".join(lines)

    for split in range(checks.FEWEST - 1):
        check(split)
    check(0)  # a second time is no further cell
    check(5, made=fits.code_of("map"))  # of today's code: no evidence on earlier code's
    check(6, code="of yesterday")  # by other code than today's
    assert row()[0].count("‡") == 2 and "map: 4 of 4 cells met at def" in row()[1]
    check(checks.FEWEST - 1, nats=-0.02)
    shown, told = row()
    assert shown.count("‡") == 1 and shown.count("§") == 1  # boston was not drawn from
    assert "map: 5 of 5 cells met at def (largest differences 0.020 nats" in told
    assert f"at most {100 * (1 - 0.05 ** (1 / 5)):.0f} % of its cells would not be" in told
    check(7, nats=0.06)
    shown, told = row()
    assert shown.count("‡") == 2 and "§" not in told and "map: 5 of 6 cells met" in told


def test_the_code_of_a_method_is_what_its_numbers_depend_on(monkeypatch):
    reached = {path.as_posix() for path in provenance._reached(["pyrobnn.inference.map"])}
    package = provenance.PACKAGE.as_posix()
    assert f"{package}/inference/optim/minimize.py" in reached and f"{package}/model.py" in reached
    assert not any("/hmc/" in path or "/vi/" in path or "/diagnostics/" in path for path in reached)
    before = {method: fits.code_of(method) for method in ("map", "svi-rt", "nuts")}
    read = Path.read_bytes

    def changed_by(file):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * path.match(file))
            provenance.code.cache_clear()
            after = {method: fits.code_of(method) for method in before}
        provenance.code.cache_clear()
        return [method for method in before if before[method] != after[method]]

    # NUTS is chosen by SVI's evidence: the rule says so
    assert changed_by("inference/vi/elbo.py") == ["svi-rt", "nuts"]
    # a package that gathers names is not what stands beside the name that is used, nor is what draws a figure
    assert [
        changed_by(file) for file in ("data/bundled.py", "plots/style.py", "likelihoods/survival.py")
    ] == [
        [],
        [],
        [],
    ]
    assert changed_by("data/uci_sets.py") == changed_by("data/dataset.py") == list(before)
    with pytest.raises(ValueError, match="no module of this package"):
        provenance.code("pyrobnn.nothing")


def uci_root():
    root = os.environ.get("PYROBNN_DATA")
    if not root:
        pytest.skip("the UCI sets are not here: set PYROBNN_DATA to their directory")
    return root


def test_the_floor_on_the_standard_splits_is_the_known_one():
    root = uci_root()
    floor = [fits.run_task(task, root=root) for task in tasks(["yacht"], ["linear"], root=root)]
    known = next(c for c in read_published(PUBLISHED)["columns"] if c["id"] == "linear")
    for metric in ("rmse", "log_density"):
        found = summarize(floor, metric)["yacht"]["linear"]
        assert found.mean == pytest.approx(known[metric]["yacht"][0], abs=2e-3)
        # the published error takes overlapping splits for independent: sqrt(1/20) for sqrt(1/20 + 31/277)
        assert found.error / math.sqrt(1 + 20 * 31 / 277) == pytest.approx(
            known[metric]["yacht"][1], rel=0.04
        )


def test_a_record_says_how_it_was_made():
    root = uci_root()
    rules = {"map": Rule(MAP(num_steps=20, compile=False, polish_steps=0), (1.0,), (0.2,))}
    (task,) = tasks(["yacht"], ["map"], [3], rules, root=root)
    record = json.loads(json.dumps(fits.run_task(task, root=root, rules=rules), allow_nan=False))
    assert fits.key(record) == fits.key(task)
    assert set(record["scores"]) == {"rmse", "log_density", "crps", "coverage"}
    assert record["chosen"]["settings"]["num_steps"] == 20 and record["seed"] == 3
    assert record["num_train"] + record["num_test"] == 308 and "torch" in record["versions"]


# -- sweep ------------------------------------------------------------------------------------------------------------


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
    with pytest.warns(
        UserWarning, match=r"results.jsonl: line 2 is no JSON object \(half a line\?\): left out"
    ):
        assert [record["n"] for record in read_records(path)] == [0, 2]
    with pytest.warns(
        UserWarning, match="line 1 has no 'm'; line 2 is no JSON.*; line 3 has no 'm': left out"
    ):
        assert read_records(path, ["n", "m"]) == []


def test_two_sweeps_do_not_write_to_one_file(tmp_path):
    sweep = Sweep(tmp_path / "results.jsonl", key=number)
    run = sweep.run(square, [line(n) for n in range(2)])
    next(run)
    with pytest.raises(RuntimeError, match="another sweep"):
        list(sweep.run(square, [line(5)]))
    run.close()
    assert len(list(sweep.run(square, [line(n) for n in range(2)]))) == 1


KILLED = """
import sys, time
from pyrobnn.studies.uci.sweep import Sweep

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
    results, begun = tmp_path / "results.jsonl", tmp_path / "begun.txt"
    command = [sys.executable, "-c", KILLED, str(results), str(begun)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while len(read_records(results)) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = [record["n"] for record in read_records(results)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    assert [record["n"] for record in read_records(results)] == list(range(12))
    runs = [int(text) for text in begun.read_text().split()]
    assert all(runs.count(n) == 1 for n in kept)  # nothing finished is done again
    assert len(runs) <= 13  # but for the one under way when it was killed, nothing is


def test_processes_share_the_work(tmp_path):
    sweep = Sweep(tmp_path / "results.jsonl", key=number, jobs=2)
    outcomes = [outcome for _, outcome in sweep.run(fail_on_two, [line(n) for n in range(6)])]
    assert sum(isinstance(outcome, ValueError) for outcome in outcomes) == 1
    assert sorted(record["n"] for record in read_records(sweep.path)) == [0, 1, 3, 4, 5]


ON_A_CLUSTER = """
import sys
from distributed import LocalCluster
from pyrobnn.studies.uci.sweep import Sweep, read_records

def square(task):
    return {**task, "square": task["n"] ** 2}

if __name__ == "__main__":
    tasks = [{"n": n} for n in range(6)]
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        sweep = Sweep(sys.argv[1], key=lambda record: record["n"], scheduler=cluster.scheduler_address)
        assert sorted(outcome["square"] for _, outcome in sweep.run(square, tasks)) == [0, 1, 4, 9, 16, 25]
        assert list(sweep.run(square, tasks)) == []
"""


def test_a_dask_cluster_of_two_workers_runs_the_same_sweep(tmp_path):
    pytest.importorskip("distributed", reason="dask is not installed: pip install 'pyrobnn[cluster]'")
    program, results = tmp_path / "program.py", tmp_path / "results.jsonl"
    program.write_text(ON_A_CLUSTER)  # a process of its own: dask leaves threads and settings behind
    done = subprocess.run(
        [sys.executable, str(program), str(results)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(record["n"] for record in read_records(results)) == list(range(6))


# -- tables -----------------------------------------------------------------------------------------------------------


def records(method, values, dataset="yacht"):
    return [
        {
            "dataset": dataset,
            "split": split,
            "method": method,
            "seconds": 1.0,
            "cpu_seconds": 1.0,
            "scores": {"log_density": value, "rmse": -value, "crps": 1.0, "coverage": 0.9},
        }
        for split, value in enumerate(values)
    ]


def test_the_error_is_the_standard_deviation_over_root_n():
    repeated = records("map", [-9.0]) + records("map", [-1.0, -2.0, -3.0])
    found = summarize(repeated, "log_density")["yacht"]["map"]
    assert found == (
        -2.0,
        pytest.approx(1 / math.sqrt(3)),
        3,
    )  # repeated work counts once, as it was made last
    sized = [{**record, "num_train": 90, "num_test": 10} for record in records("map", [-1.0, -2.0, -3.0])]
    found = summarize(sized, "log_density")["yacht"]["map"]
    assert found.error == pytest.approx(math.sqrt(1 / 3 + 1 / 9))  # splits that share their training rows


def test_a_table_says_what_it_cannot_tell_apart():
    two = records("map", [-1.0, -2.0, -1.0, -2.0]) + records("svi", [-2.0, -1.0, -2.0, -1.0])
    assert smallest_difference(two, "log_density") == {"yacht": pytest.approx(2 * math.sqrt(4 / 3) / 2)}
    table = markdown(two, "log_density", ["map", "svi"], ["yacht"])
    assert "differ by less cannot be told apart (two standard errors): yacht 1.155." in table
    small = [
        {**r, "scores": {"rmse": -1e-4 * r["scores"]["log_density"]}} for r in two
    ]  # an RMSE of naval's size
    table = markdown(small, "rmse", ["map", "svi"], ["yacht"])
    assert "| map | 0.00015 ± 0.00003 |" in table and "(two standard errors): yacht 0.00012." in table


def test_targets_are_judged_by_the_numbers():
    published = read_published(PUBLISHED)
    splits = range(20)
    floor = records("linear", [-3.6 - 0.01 * (split % 3) for split in splits])
    good = records("svi-rt", [-1.0 - 0.01 * (split % 5) for split in splits])
    noisy = records("map", [-3.6 - 0.01 * (split % 3) + (1.0 if split == 0 else 0.0) for split in splits])
    verdicts = {t.claim: t.met for t in compare_with_published(floor + good + noisy, published)}
    assert verdicts["svi-rt beats the linear floor by more than 5 standard errors"] is True
    assert verdicts["map beats the linear floor by more than 5 standard errors"] is False
    assert verdicts["svi-rt is at least Pyro mean-field SVI"] is True
    assert verdicts["the best method reaches the best published log density with homoskedastic noise"] is True
    worse = records("svi-rt", [-1.7 - 0.01 * (split % 5) for split in splits])
    verdicts = {t.claim: t.met for t in compare_with_published(floor + worse, published)}
    assert verdicts["svi-rt is at least Pyro mean-field SVI"] is False
    assert (
        verdicts["the best method reaches the best published log density with homoskedastic noise"] is False
    )


@pytest.mark.parametrize("lucky", [[50.0], [50.0, 50.0]])
def test_one_split_or_two_judge_nothing(lucky):
    """Neither for nor against: two that happen to be equal would have a standard error of zero."""
    published, floor = read_published(PUBLISHED), records("linear", [-3.6, -3.7, -3.65])
    few = records("svi-rt", lucky) + records("mc-dropout", [-value for value in lucky])
    found = [t for t in compare_with_published(floor + few, published) if "best method" not in t.claim]
    assert len(found) == 5 and {t.met for t in found} == {None}
    told = f"{len(lucky)} split{'s' * (len(lucky) > 1)}"
    assert "log density by 54 on " + told in found[0].evidence
    best = compare_with_published(floor + few, published)[-1]
    assert best.met is None and best.evidence.startswith(f"svi-rt 50.000 ({told})")
    assert "±" not in markdown(few, "log_density", ["svi-rt"], ["yacht"])
    # the best is the best of those that have several, though one of a single split seems better
    several = floor + few + records("map", [-3.0, -2.0, -2.5])
    best = compare_with_published(several, published)[-1]
    assert best.met is False and best.evidence.startswith("map -2.500 ± ")


def test_a_target_that_one_split_spoils_names_it_and_is_missed_all_the_same():
    floor = records("linear", [-3.6, -3.7, -3.65, -3.6, -3.7, -3.65])
    spoilt = records("map", [-2.6, -2.7, -2.65, -9.0, -2.71, -2.66])
    found = compare_with_published(floor + spoilt, read_published(PUBLISHED))[0]
    assert found.met is False and "without split 3" in found.evidence
    even = records("map", [-2.6, -2.7, -2.65, -2.6, -2.71, -2.66])
    assert "without" not in compare_with_published(floor + even, read_published(PUBLISHED))[0].evidence


def test_a_table_says_when_splits_are_missing():
    table = markdown(
        records("map", [-1.0] * 20) + records("nuts", [-1.0, -2.0, -3.0]),
        "log_density",
        ["map", "nuts"],
        ["yacht"],
    )
    assert "| map | -1.000 ± 0.000 |" in table
    assert "| nuts | -2.000 ± 0.577 (3 splits) |" in table


def test_the_published_table_is_cited():
    for column in read_published(PUBLISHED)["columns"]:
        assert (
            column["citation"]
            and column["spread"] in ("se", "std")
            and column["splits"] in ("standard", "own")
        )


def test_the_script_prints_tables_and_refuses_what_it_does_not_know(tmp_path, capsys):
    benchmark = script("benchmark_uci")
    assert benchmark.splits("0-2,7") == [0, 1, 2, 7]
    results = tmp_path / "results.jsonl"
    for record in records("linear", [-3.6, -3.5]):
        append_record(results, {**record, "rule": fits.rule_id("linear")})
    append_record(results, {**records("map", [-1.0])[0], "rule": "of another day"})
    assert benchmark.main(["--results", str(results), "--table-only"]) == 0
    shown = capsys.readouterr().out
    scores, rest = shown.split("| splits to run")
    assert "| linear | -3.550 |" in scores and "| map |" not in scores and "| map | 2 × 1 |" in rest


def test_what_the_chains_took_or_would_take_is_told_of_every_set():
    benchmark = script("benchmark_uci")
    rule = RULES["nuts"]
    ran = {"dataset": "small", "method": "nuts", "num_train": 277, "cpu_seconds": 60.0}
    rhats = [{"rhat_f_max": 1.04, "rhat_f_median": 1.0}, {"rhat_f_max": 2.0, "rhat_f_median": 1.3}, {}]
    found = [{**ran, "diagnosis": rhat} for rhat in rhats]
    found += [{"dataset": name, "method": "map", "num_train": 9} for name in ("large", "untimed")]
    timed = [{"dataset": "large", "num_train": 40_000, "gradient_us": 2000.0}]
    told = benchmark.chains_table(found, timed, {("small", "nuts"): " †"})
    assert (
        "| small | 277 | 60 † |  | 1 of 3 | 1.00 … inf |" in told
    )  # an R-hat that is not finite is no good one
    gradients = rule.method.num_chains * (rule.method.num_warmup + rule.num_draws) * 511
    assert f"| large | 40000 | not run: {gradients * 0.002:,.0f} at most | 2,000 |  |  |" in told
    assert "| untimed |  | not run, and no gradient timed |" in told and f"{gradients:,} gradients" in told


# -- README -----------------------------------------------------------------------------------------------------------


def test_tables_are_written_between_their_markers(tmp_path):
    tables = script("readme_tables")
    text = "before\n<!-- table: sizes -->\nold\n<!-- end -->\nafter\n"
    filled = tables.fill(text, {"sizes": lambda: "| new |"})
    assert filled == "before\n<!-- table: sizes -->\n| new |\n<!-- end -->\nafter\n"
    assert tables.fill(filled, {"sizes": lambda: "| new |"}) == filled
    with pytest.raises(ValueError, match="unknown table 'sizes'"):
        tables.fill(text, {})
    readme = tmp_path / "README.md"
    readme.write_text("nothing marked\n")
    assert tables.main([str(readme)]) == 0 and tables.main([str(readme), "--check"]) == 0


def test_mass_matrices_are_compared_at_the_seeds_that_all_of_them_have(tmp_path, monkeypatch):
    tables = script("readme_tables")
    monkeypatch.setattr(tables, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    for form, rates in {"diag": [10.0, 30.0, 50.0], "auto": [20.0]}.items():
        for seed, rate in enumerate(rates):
            row = {"case": "net", "mass_matrix": form, "seed": seed, "warmup gradients": 8.0 + seed}
            append_record(tmp_path / "results" / "metric.jsonl", row | {"ess per 1000 gradients": rate})
    assert tables.metric_table().splitlines()[2] == "| net | 1 | 10 |  | 2.00 |  |  | 1.00 |"


def test_the_studies_numbers_stand_beside_ours_in_order():
    tables = script("benchmark_studies")
    assert set(tables.SAID) | set(json.loads(tables.PUBLISHED.read_text())["reported"]) <= set(tables.TITLES)
    rows = [
        tables.record("images, SWAG", [0.97], data="64-64-10 on digits"),
        tables.record("nll homoskedastic, learned", [-0.2, -0.4], truth=-0.207),
    ]
    assert tables.table(rows).splitlines()[2:] == [
        "| 1: constant noise, one number learned | -0.358 | -0.300 ± 0.141 | 2 | the truth -0.207 |",
        "| 5: after SWAG, 500 draws | 0.9546 | 0.9700 | 1 | 64-64-10 on digits |",
    ]
    with seeded(0):
        net = torch.nn.Linear(1, 1)
    y = net.bias.detach().expand(2, 1).clone()
    data = Dataset(torch.zeros(2, 1), y, "at the mean", "regression")
    normal = torch.distributions.Normal(0.0, 1.0)
    expected = -normal.log_prob(net.weight.detach()).item() + 2 * math.log(0.5 * math.sqrt(2 * math.pi))
    assert tables.minus_log_joint(net, data, ["weight"]) == pytest.approx(expected, rel=1e-5)


def test_the_doubt_in_the_gap_is_a_mean_over_data_sets_with_its_error():
    tables = script("benchmark_clusters")
    case = {"data": "two_clusters", "noise": "inferred", "part": "gaps"}
    records = [
        case | {"method": method, "seed": seed, "gap_ratio": ratio, "sd at data": sd, "rhat_function": 1.004}
        for seed in (0, 1)
        for method, ratio, sd in (("nuts", 10.0 + 2 * seed, 0.02), ("svi", 2.0, 0.04))
    ]
    written = tables.gap_table([*records, records[0] | {"seed": 2}])  # a data set without SVI does not count
    assert written.splitlines()[2] == (
        "| two_clusters | inferred | 2 | 11.00 ± 1.00 | 2.00 ± 0.00 | 2.75 ± 0.25 | 0.50 ± 0.00 | 1.004 |"
    )
    scales = [(3.0, 1.0, 10.2), (1.0, 1.0, -5.0)]
    priors = [
        {**case, "part": "priors", "scale": s, "bias_scale": b, "log_evidence": e} for s, b, e in scales
    ]
    assert tables.prior_table(priors).splitlines()[2] == "| two_clusters | inferred | -5 | 10 |"
    judged = {"noise at data": 0.1, "sd at data": 0.02, "gap_ratio": 1.5, "log density": 0.25, "elbo": 99.96}
    judged |= {"khat": None, "cpu seconds": 6.6, "status": "fail", "not passed": ["cost info", "virial fail"]}
    point = judged | {"method": "MAP", "gap_ratio": None, "elbo": None, "status": "info", "not passed": []}
    named = {"scale": 3.0, "method": "SVI, as in the study"}
    written = tables.method_table([case | r | {"part": "methods"} for r in (point, judged | named)])
    assert written.splitlines()[2:] == [
        "| two_clusters | inferred | SVI, as in the study | 0.100 | 0.02 | 0.03 | 1.50 | 0.250 | 100.0 |  | 7 "
        "| fail | `virial` |",
        "| two_clusters | inferred | MAP | 0.100 | none | none | none | 0.250 |  |  | 7 | info |  |",
    ]


def test_the_features_of_the_two_tables_are_those_of_the_train_part(tmp_path):
    tables = script("benchmark_tables")
    x = np.random.default_rng(0).lognormal(size=(400, 2))
    lifted, of_test = tables.lift(x, x[:3] + 100.0, waves=8)
    assert lifted.shape == (400, 2 * 17) and lifted.var(0).sum() == pytest.approx(2)
    plain = lifted[:, :2] / lifted[:, :2].std(0)
    np.testing.assert_allclose(plain, PowerTransformer("box-cox").fit_transform(x), atol=1e-12)
    # a column with a value that is not positive has no logarithm; a new row that has none counts as the least seen
    signed = np.stack([x[:, 0] - 1.0, x[:, 1]], 1)
    plain = tables.lift(signed, x[:3], waves=0)[0][:, 1]  # those without come last
    assert np.isfinite(plain).all() and (np.argsort(plain) == np.argsort(signed[:, 0])).all()
    none = tables.lift(x, np.array([[-1.0, 1.0]]), waves=0)[1]
    np.testing.assert_allclose(none, tables.lift(x, np.array([[x[:, 0].min(), 1.0]]), waves=0)[1])
    # rows of the test part change no feature of another row
    again = tables.lift(x, x[:3], waves=8)
    np.testing.assert_array_equal(again[0], lifted)
    np.testing.assert_allclose(again[1], lifted[:3])
    assert np.abs(of_test - lifted[:3]).max() > 0.1


def test_every_member_of_the_two_tables_starts_wide():
    tables = script("benchmark_tables")
    with seeded(0):
        net = tables.wide_net(85, (16, 16), "silu", noise=0.1)
        model = BNN(net, IIDPrior(dist.Normal(0.0, 1.0)), HeteroskedasticGaussian())
    first, second = (model.reinitialized(seed).initial_values() for seed in (1, 2))
    for name, inputs in (("net.0.weight", 85), ("net.2.weight", 16)):
        assert not torch.equal(first[name], second[name])
        assert first[name].var() * inputs == pytest.approx(1.0, rel=0.2)  # a third of it as torch starts
    # what the mean alone is trained with is the same net, and the scale starts at that noise
    x = torch.ones(3, 85)
    assert {name: p.shape for name, p in net.named_parameters()} == {
        name: p.shape for name, p in net.mean_only().named_parameters()
    }
    torch.testing.assert_close(net.mean_only()(x), net(x)[:, :1])
    with torch.no_grad():
        net[-1].weight.zero_(), net[-1].bias.zero_()
    torch.testing.assert_close(torch.nn.functional.softplus(net(x)[:, 1]), torch.full((3,), 0.1))


def test_two_tables_are_read_scored_and_written_beside_the_published_numbers(tmp_path):
    tables = script("benchmark_tables")
    (tmp_path / "airfoil.csv").write_text(
        "a,b,target\n" + "".join(f"{i},{i % 7},{3 * i}\n" for i in range(50))
    )
    x, y, x_test, y_test = tables.load(tmp_path, "airfoil", validate=False)
    assert (x.shape, len(y_test)) == ((40, 2), 10)
    np.testing.assert_allclose([y.mean(), y.std()], [0, 1], atol=1e-12)
    assert len(tables.load(tmp_path, "airfoil", validate=True)[3]) == 8
    found = tables.scores(y_test, np.full(10, 0.5), y_test + 0.5)
    assert found["rmse"] == pytest.approx(0.5) and found["coverage_90"] == 1
    assert found["nll"] == pytest.approx(0.5 + math.log(0.5) + 0.5 * math.log(2 * math.pi))
    agree = tables.agreement(np.random.default_rng(0).normal(size=(4, 100, 3)))
    assert agree["rhat_max"] < 1.05 and agree["ess_min"] > 200
    spent = {"seconds": 90.0, "cpu_seconds": 170.0, "table": "airfoil", "part": "test"}
    written = tables.table(
        [
            spent | found | agree | {"method": "pyrobnn", "rule": "before", "rmse": 9.0},
            spent | found | agree | {"method": "pyrobnn", "rule": "now", "rmse": 0.3, "seed": 0},
            spent | found | agree | {"method": "pyrobnn", "rule": "now", "rmse": 0.7, "seed": 1},
            spent | {"method": "b", "rule": "now", "stopped": "cut"},
        ]
    )
    assert "| airfoil | *BDE* | 0.1215 | -0.9126 |  |  |  | 240 on 10 cores |" in written
    assert "| airfoil | pyrobnn, mean of 2 seeds | 0.5000 |" in written and "| airfoil | b | cut |" in written
