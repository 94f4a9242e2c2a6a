"""The UCI benchmark: exact scores, the linear floor, the rules of the methods, tables and checks."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import seeded

SCRIPTS = Path(__file__).parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))

from records import append_record, mean_and_error, read_records  # noqa: E402
from uci import run as benchmark  # noqa: E402
from uci.beside_published import beats_floor, best_published, published  # noqa: E402
from uci.claim_tables import markdown  # noqa: E402
from uci.linear_floor import LinearFloor  # noqa: E402
from uci.mixture_scoring import mixture_crps, mixture_scores  # noqa: E402
from uci.rule_search import Candidate, OfLinear, Rule  # noqa: E402
from uci.rules import RULES  # noqa: E402
from uci.standard_splits import uci  # noqa: E402

from pyrobnn.data import Dataset, diabetes  # noqa: E402
from pyrobnn.inference.mc_dropout import MCDropout  # noqa: E402
from pyrobnn.inference.point_methods import MAP, DeepEnsemble  # noqa: E402
from pyrobnn.inference.sgmcmc import SGHMC  # noqa: E402
from pyrobnn.metrics import crps  # noqa: E402


def test_scores_of_one_normal_are_the_closed_forms():
    loc = torch.tensor([[1.0, 2.0]])
    scale = torch.tensor([[0.5, 2.0]])
    y = torch.tensor([1.5, 9.0])
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
    loc = torch.tensor([[-3.0], [3.0]])
    y = torch.tensor([0.0])
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
    alpha = float(floor.ridge.lambda_)

    def evidence(alpha, noise):
        covariance = x @ x.T / alpha + noise**2 * torch.eye(len(x), dtype=torch.float64)
        return float(
            torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
        )

    best = evidence(alpha, floor.noise)
    for factor in (0.95, 1.05):
        assert evidence(alpha * factor, floor.noise) < best
        assert evidence(alpha, floor.noise * factor) < best
    mean = x @ torch.linalg.solve(x.T @ x + alpha * floor.noise**2 * torch.eye(10), x.T @ y)
    predicted, _ = floor.predict(data.x)
    expected = mean * floor.standardizer.y_scale + floor.standardizer.y_mean
    assert torch.allclose(predicted, expected.double(), rtol=1e-8)


def line_data(num_data=60):
    with seeded(0):
        x = torch.rand(num_data, 1) * 4 - 2
        return Dataset(x, 3 * x + 1 + 0.3 * torch.randn(num_data, 1), "line", "regression")


@pytest.mark.slow
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
@pytest.mark.filterwarnings(
    "ignore:.*weights did not move:UserWarning"
)  # of units that are off everywhere
@pytest.mark.parametrize("noise", [1e-3, 1e-2, 1e-1, 1.0, 10.0])
@pytest.mark.parametrize("method", ["map", "swag"])
def test_on_a_line_a_rule_is_no_worse_than_the_linear_model_at_any_noise(method, noise):
    """Up to a nat a weight, twice what maximum likelihood is expected to lose; noise in units of the signal's sd."""
    with seeded(0):
        x = torch.randn(2000, 3)
        slope = torch.randn(3)
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
    "noise": (
        Rule(MAP(), (1.0,), (OfLinear(0.5), OfLinear(1.0)), "validation"),
        lambda c: c.noise.share,
    ),
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
    with pytest.raises(ValueError, match="'yaht'.*found mine, yacht"):
        benchmark.tasks(["yaht"], ["map"], [0], small_sets)
    with pytest.raises(ValueError, match="mc-dropout"):
        benchmark.tasks(["yacht"], ["dropout"], [0], small_sets)
    with pytest.raises(ValueError, match="no split 3: they are 0 … 2"):
        benchmark.tasks(["yacht", "mine"], ["map"], [3], small_sets)


def test_a_set_has_the_splits_of_its_folder(small_sets):
    found = benchmark.tasks(["yacht", "mine"], ["linear"], None, small_sets)
    assert [(task["dataset"], task["split"]) for task in found] == [
        ("yacht", 0),
        ("mine", 0),
        ("yacht", 1),
        ("mine", 1),
        ("mine", 2),
    ]
    record = benchmark.run_task(found[-1], root=small_sets)
    assert record["num_train"] == 36 and record["peak_mb"] > 10


def test_the_noise_of_a_rule_is_a_share_of_what_a_line_leaves(small_sets):
    train, _ = uci("mine", 0, small_sets)
    residual = LinearFloor.fit(train).noise
    assert OfLinear(0.5).sd(train) == pytest.approx(0.5 * residual, rel=0.06)
    scaled = dataclasses.replace(train, y=1000 * train.y)  # a share knows no unit
    assert OfLinear(0.5).sd(scaled) == OfLinear(0.5).sd(train)
    assert not any(isinstance(noise, float) for rule in RULES.values() for noise in rule.noises)


def test_a_record_that_cannot_be_met_again_fails_the_check(small_sets, tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    common = [
        "--data-root",
        str(small_sets),
        "--results",
        str(results),
        "--data",
        "mine",
        "--methods",
        "linear",
    ]
    assert benchmark.main([*common, "--check", "50%"]) == 2  # nothing is no proof
    assert benchmark.main(common) == 0
    assert benchmark.main([*common, "--check", "100%"]) == 0
    assert capsys.readouterr().out.count("the same number") == 3
    assert [one["met"] for one in read_records(tmp_path / "checks.jsonl")] == [True] * 3
    first, *rest = (record | {"cpu_seconds": 5.0} for record in read_records(results))
    first["scores"]["log_density"] += 0.06
    results.unlink()
    for record in (first, *rest):
        append_record(results, record)
    assert benchmark.main([*common, "--check", "100%", "--budget", "1"]) == 2  # proves nothing
    assert benchmark.main([*common, "--check", "100%"]) == 1
    assert "log density" in capsys.readouterr().out


def uci_root():
    root = os.environ.get("PYROBNN_DATA")
    if not root:
        pytest.skip("the UCI sets are not here: set PYROBNN_DATA to their directory")
    return root


def test_the_floor_on_the_standard_splits_is_the_known_one():
    root = uci_root()
    tasks = benchmark.tasks(["yacht"], ["linear"], None, root)
    floor = [benchmark.run_task(task, root) for task in tasks]
    known = next(c for c in published()["columns"] if c["id"] == "linear")
    for metric in ("rmse", "log_density"):
        values = [made["scores"][metric] for made in floor]
        mean, error = mean_and_error(
            values
        )  # the published error takes overlapping splits for independent
        assert mean == pytest.approx(known[metric]["yacht"][0], abs=2e-3)
        assert error == pytest.approx(known[metric]["yacht"][1], rel=0.04)


def record(method, split, log_density, rmse=1.0, dataset="yacht"):
    scores = {"log_density": log_density, "rmse": rmse, "crps": 0.5, "coverage": 0.95}
    sizes = {"num_train": 90, "num_test": 10}
    return {
        "dataset": dataset,
        "split": split,
        "method": method,
        "scores": scores,
        "cpu_seconds": 1.0,
    } | sizes


def test_gains_over_the_linear_model_are_paired_and_need_both_scores():
    splits = range(4)
    rows = [record("linear", k, -3.0 + k, rmse=2.0 + k) for k in splits]
    rows += [record("good", k, -2.0 + k + 0.01 * k, rmse=1.0 + k + 0.01 * k) for k in splits]
    rows += [record("worse rmse", k, -2.0 + k + 0.01 * k, rmse=3.0 + k + 0.01 * k) for k in splits]
    rows += [record("one split", 0, 50.0)]
    found = beats_floor(rows)
    assert found["yacht", "good"][1] and not found["yacht", "worse rmse"][1]
    assert ("yacht", "one split") not in found
    best, ours, theirs = best_published(rows, published())["yacht"]
    assert best in ("good", "worse rmse") and ours == pytest.approx(-0.485) and theirs == -1.25


def test_a_table_gives_splits_and_the_published_columns_cite_their_source():
    text = markdown(
        [record("map", k, -1.0 - k) for k in range(3)], "log_density", ["map"], published()
    )
    assert "| map | -2.000 ± " in text and "[3]" in text and "MC dropout 2018" in text
    assert all(
        column["url"].startswith("https://")
        for column in published()["columns"]
        if column["id"] != "linear"
    )


def test_the_records_are_read_by_the_script(capsys):
    assert benchmark.main(["--table-only"]) == 0
    assert "cells beat the linear model" in capsys.readouterr().out


@pytest.fixture
def tiny_root(tmp_path):
    folder = tmp_path / "uci" / "tiny"
    folder.mkdir(parents=True)
    (folder / "data.txt").write_text("1.0 \t2.0 \t10 \n3.0 4.0 20\n5.0 6.0 30\n")
    (folder / "index_features.txt").write_text("0\n1\n")
    (folder / "index_target.txt").write_text("2\n")
    (folder / "index_train_0.txt").write_text("2\n0\n")
    (folder / "index_test_0.txt").write_text("1.0\n")
    return tmp_path


class TestUci:
    def test_indices_count_from_zero(self, tiny_root):
        train, test = uci("tiny", 0, tiny_root)
        assert train.x.tolist() == [[5, 6], [1, 2]] and train.y.tolist() == [[30], [10]]
        assert test.x.tolist() == [[3, 4]] and test.y.tolist() == [[20]]

    def test_an_offset_keeps_every_value(self, tiny_root):
        assert uci("tiny", 0, tiny_root)[0].x.dtype == torch.float32
        (tiny_root / "uci/tiny/data.txt").write_text(
            "100000001 2 10\n100000002 4 20\n100000003 6 30\n"
        )
        assert uci("tiny", 0, tiny_root)[0].x[:, 0].diff().tolist() == [-2]

    def test_root_by_variable_and_without_the_uci_folder(self, tiny_root, monkeypatch):
        monkeypatch.setenv("PYROBNN_DATA", str(tiny_root / "uci"))
        assert uci("tiny", 0)[0].num_data == 2

    def test_what_is_missing_is_named(self, tiny_root, monkeypatch):
        with pytest.raises(FileNotFoundError, match="index_train_7.txt"):
            uci("tiny", 7, tiny_root)
        with pytest.raises(ValueError, match="found tiny"):
            uci("huge", 0, tiny_root)
        monkeypatch.delenv("PYROBNN_DATA", raising=False)
        with pytest.raises(ValueError, match="set PYROBNN_DATA"):
            uci("tiny", 0)

    @pytest.mark.parametrize("name", ("bostonHousing", "concrete", "energy", "yacht"))
    def test_the_published_sets_split_without_overlap(self, name):
        try:
            train, test = uci(name, 19)
        except ValueError as error:
            pytest.skip(f"the UCI sets are not at hand: {error}")
        assert train.num_data > 270
        assert test.num_data == pytest.approx(0.1 * (train.num_data + test.num_data), abs=1)
