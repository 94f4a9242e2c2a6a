"""What was examined: each method by its predictive, weights and predictions apart, the least examined never first."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from helpers import seeded
from known_posteriors import SAMPLE, classes_tree, exact_tree, healthy_svi
from models import normal_prior, toy_net

import pyrobnn as pb
from pyrobnn.diagnostics import diagnose
from pyrobnn.diagnostics.check_table import rates, said_rates
from pyrobnn.diagnostics.judge import judge_all
from pyrobnn.inference.optim.descent import still_falling
from pyrobnn.report import write_report, write_summary
from pyrobnn.report.results import compare_rows
from pyrobnn.report.sentences import conclude, recommended

SCRIPTS = Path(__file__).parents[2] / "scripts"


def find(verdict, name):
    return next((check for check in verdict.checks if check.name == name), None)


def with_hidden_units(tree):
    weights = tree["posterior"]["net.weight"].values
    tree["posterior"] = xr.Dataset(
        {f"net.{i}.weight": ((*SAMPLE, f"d{i}"), weights) for i in range(2)}
    )
    return tree


def wave(num, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(num, 1, generator=generator) - 2
    return x, torch.sin(2 * x) + 0.3 * torch.randn(num, 1, generator=generator)


FEW_STEPS = {"num_steps": 100, "compile": False}
WITHOUT_DENSITY = {
    "MAP": pb.MAP(polish_steps=0, **FEW_STEPS),
    "MLE": pb.MLE(**FEW_STEPS),
    "DeepEnsemble": pb.DeepEnsemble(num_members=4, **FEW_STEPS),
}


@pytest.fixture(scope="module")
def overconfident():
    """Fits whose noise is a thirtieth of that of the data."""
    model = pb.BNN(toy_net(), normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.01))
    x, y = wave(40, 0)
    return x, y, {name: method.fit(model, x, y, seed=0) for name, method in WITHOUT_DENSITY.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_DENSITY)
def test_methods_without_a_density_fail_by_what_they_predict(name, overconfident):
    x, y, fitted = overconfident
    held_out = diagnose(fitted[name].to_datatree(x, y, test=wave(10, 1)))
    found = find(held_out, "pit")
    assert held_out.model == "fail" and found.code == "too_narrow" and found.numbers["count"] == 10
    alone = diagnose(fitted[name].to_datatree(x, y))
    assert alone.model == "fail" and find(alone, "loo_pit").code == "too_narrow"


def test_calibrated_few_rows_and_training_rows_are_no_alarm():
    tree = exact_tree()
    few = tree.isel(pred_point=slice(10))
    assert find(diagnose(few), "pit").status == "info"
    assert find(diagnose(tree), "loo_pit").numbers["which"] == "left-out"
    del tree["log_likelihood"]
    assert find(diagnose(tree), "loo_pit").status == "info"


@pytest.mark.slow
def test_confidence_that_is_wrong_is_seen_in_ten_rows():
    statuses = {}
    for sharpness in (1.0, 8.0):
        tree = classes_tree(sharpness)
        parts = [tree.isel(pred_point=slice(start, start + 10)) for start in range(0, 100, 10)]
        statuses[sharpness] = [find(diagnose(part), "ece").status for part in parts]
    assert statuses[1.0].count("pass") >= 9 and statuses[8.0].count("pass") <= 2


def test_members_that_are_one_are_told():
    attrs = {"method": "DeepEnsemble", "kind": "independent", "claim": "none", "iid": 1}
    members = exact_tree(1, 6, sample_stats={}, attrs=attrs)
    assert find(diagnose(members), "claim").code == "no_density"
    same = members.isel(draw=[0] * 6)
    assert find(diagnose(same), "moving").code == "chain_stuck"
    nearly = members.copy()
    pointwise = members["log_likelihood"]["y"]
    nearly["log_likelihood"]["y"] = pointwise.mean("draw") + 1e-3 * (
        pointwise - pointwise.mean("draw")
    )
    assert find(diagnose(nearly), "claim").code == "one_point"


def test_predictions_that_nobody_looked_at_come_last():
    """NUTS whose chains disagree a little fails; a point without held-out data only warns, and came first."""
    nuts = exact_tree()
    f = (
        nuts["function"]["f"].values
        + 0.3 * np.arange(4)[:, None, None, None] * nuts["function"]["f"].values.std()
    )
    nuts["function"] = nuts["function"].to_dataset().assign(f=((*SAMPLE, "probe", "output"), f))
    point = exact_tree(1, 1, attrs={"method": "MAP", "kind": "point", "iid": 1})
    del point["predictions"], point["predictions_constant_data"]
    trees = {"map": point, "nuts": nuts}
    verdicts = judge_all(trees)
    assert [verdicts[name].status for name in trees] == ["warn", "fail"]
    assert not verdicts["map"].checked("model")
    rows = compare_rows(trees)
    assert recommended(rows, verdicts) == "nuts"
    first = conclude(rows, verdicts)[0]
    assert first.startswith("No method can be trusted yet: for nuts")


def test_a_point_that_is_recommended_was_examined_less():
    trees = {
        "map": exact_tree(1, 1, attrs={"method": "MAP", "kind": "point", "iid": 1}),
        "nuts": exact_tree(4, 20),
    }
    point = trees["map"]["predictions"].to_dataset()
    center = point["mean"].values
    drawn = center[None, :, 0] + 0.5 * np.random.default_rng(0).normal(size=(1000, len(center)))
    trees["map"]["predictions"] = point.assign(y_sample=(("sample", "pred_point"), drawn))
    verdicts = judge_all(trees)
    assert verdicts["map"].model == "pass" and verdicts["nuts"].status == "fail"
    first = conclude(compare_rows(trees), verdicts)[0]
    assert first.startswith("Use map, with care") and "point estimate" in first


# two questions


def test_a_finding_about_the_model_never_lowers_the_draws():
    assert diagnose(exact_tree()).draws == "pass"
    apart = exact_tree()
    apart["function"]["f"][2:] += 1.0
    assert diagnose(apart).draws == "fail" and diagnose(apart).model == "pass"
    narrow = exact_tree()
    narrow["predictions"]["y"] = (
        narrow["predictions"]["y"].mean() + 0.2 * narrow["predictions"]["y"]
    )
    assert diagnose(narrow).draws == "pass" and diagnose(narrow).model == "fail"


def test_both_answers_stand_in_the_page_and_the_summary(tmp_path):
    trees = {"svi": with_hidden_units(healthy_svi())}
    content = json.loads(write_summary(trees, None, tmp_path / "summary.json").read_text())
    found = content["methods"]["svi"]["verdict"]
    assert found["draws"] == "pass" and found["model"] in ("pass", "warn")
    page = write_report(trees, tmp_path / "report.html").read_text()
    assert (
        'asked">draws</span> <span class="badge pass"' in page
        and f'asked">model</span> <span class="badge {found["model"]}"' in page
    )


# searches that were stopped far from their optimum


UNFINISHED = {
    "MAP": (pb.MAP, {"polish_steps": 0}),
    "MAP of batches": (pb.MAP, {"batch_size": 10}),
    "MLE": (pb.MLE, {}),
    "DeepEnsemble": (pb.DeepEnsemble, {"num_members": 2}),
    "SVI": (pb.SVI, {}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", UNFINISHED)
def test_a_search_that_is_stopped_far_from_its_optimum_is_told(name):
    """Three and thirty steps towards a line that takes five hundred of them; whole runs are silent."""
    x = torch.linspace(-1, 1, 40)[:, None]
    y = 5.0 * x + 3.0
    with seeded(0):
        model = pb.BNN(
            torch.nn.Linear(1, 1), normal_prior(10.0), pb.likelihoods.HomoskedasticGaussian(1.0)
        )
    kind, options = UNFINISHED[name]
    status = {}
    told = {}
    for steps, lr in ((3, 0.01), (60, 0.01), (1000, 0.05)):
        posterior = kind(num_steps=steps, lr=lr, compile=False, **options).fit(model, x, y, seed=0)
        tree = posterior.to_datatree()
        found = find(diagnose(tree), "fit")
        status[steps] = (
            "pass"
            if found is None or found.code not in ("unfinished", "few_steps")
            else found.status
        )
        told[steps] = [
            note for note in posterior.meta["warnings"] if "the optimisation stopped" in note
        ]
    assert len(told[3]) == 1 and "raise num_steps" in told[3][0] and told[1000] == []
    assert (
        status[3] in ("warn", "fail") and status[60] in ("warn", "fail") and status[1000] == "pass"
    )


def test_a_run_that_a_callback_stopped_was_meant_to_end():
    x, y = wave(40, 0)
    model = pb.BNN(toy_net(), normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.3))
    stop = [lambda step, metrics: True]
    assert (
        "gain_limit"
        not in pb.MLE(num_steps=300, compile=False).fit(model, x, y, callbacks=stop).meta
    )


def test_a_rate_that_goes_to_zero_is_no_optimum():
    steps = torch.arange(100.0)
    factors = 0.5 * (1 + torch.cos(torch.pi * steps / 100))
    losses = (
        10.0 - factors.cumsum(0) / 50
    )  # falls in proportion to the rate, and is level at the end
    assert float(losses[-2] - losses[-1]) < 1e-4
    assert still_falling(losses, factors, 100.0) > 10.0
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert still_falling(10.0 + noise, factors, 100.0) < 50.0


# the rates that stand beside each check


def test_the_rates_of_every_check_are_those_of_the_study_and_stand_in_the_page(tmp_path):
    spec = importlib.util.spec_from_file_location(
        "benchmark_verdicts", SCRIPTS / "verdict" / "run.py"
    )
    study = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_verdicts"] = study  # its dataclasses look themselves up there
    spec.loader.exec_module(study)
    del sys.modules["benchmark_verdicts"]
    rows = [
        json.loads(line)
        for line in (SCRIPTS / "verdict" / "records.jsonl").read_text().splitlines()
    ]
    assert rates() == study.rates(rows)
    assert rates()["virial"]["seen"] > 0 and said_rates("no such check") == ""
    page = write_report({"nuts": exact_tree()}, tmp_path / "report.html").read_text()
    assert said_rates("pit") in page and "faults it is meant for" in said_rates("pit")


def test_a_log_likelihood_of_other_rows_fails():
    tree = exact_tree()
    values = tree["log_likelihood"]["y"]
    assert find(pb.audit(tree), "log_likelihood").status == "pass"
    for wrong in (values.values[..., ::-1], -values.values):
        tree["log_likelihood"]["y"] = values.copy(data=wrong)
        assert find(pb.audit(tree), "log_likelihood").status == "fail"


@pytest.mark.slow
def test_a_posterior_is_judged_with_the_rows_that_it_knows_or_is_given(tmp_path):
    x = torch.linspace(-1, 1, 12).unsqueeze(-1)
    model = pb.BNN(toy_net(), normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.1))
    laplace = pb.Laplace(num_steps=200, compile=False).fit(model, x, x.sin(), num_draws=100)
    whole = diagnose(laplace.to_datatree(x, x.sin())).to_dict()
    assert laplace.diagnose().to_dict() == laplace.diagnose(x, x.sin()).to_dict() == whole
    means = pb.SVI(num_steps=5, compile=False).fit(model, x, x.sin(), num_draws=100)
    assert means.diagnose().to_dict() == means.diagnose(x, x.sin()).to_dict()
    means.save(tmp_path / "means.nc")
    loaded = pb.Posterior.load(tmp_path / "means.nc", model)
    with pytest.raises(TypeError, match="data of its fit"):
        loaded.diagnose()
    normal = pb.sample(
        lambda at: -at["a"].square().sum() / 2,
        {"a": torch.zeros(2)},
        method=pb.Laplace(curvature="hessian", num_steps=200, compile=False),
    )
    assert normal.diagnose().draws != "not checked"
