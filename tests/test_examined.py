"""What was examined: each method by its predictive, weights and predictions apart, the least examined never first."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import xarray as xr
from known_posteriors import SAMPLE, exact_tree, healthy_subspace, healthy_svi
from models import normal_prior, toy_net

import pyrobnn as pb
from pyrobnn.diagnostics import diagnose
from pyrobnn.diagnostics.judge import judge_all
from pyrobnn.report import write_report, write_summary
from pyrobnn.report.comparison import compare_rows
from pyrobnn.report.conclusion import conclude, recommended


def find(verdict, name):
    return next((check for check in verdict.checks if check.name == name), None)


def with_hidden_units(tree):
    weights = tree["posterior"]["net.weight"].values
    tree["posterior"] = xr.Dataset({f"net.{i}.weight": ((*SAMPLE, f"d{i}"), weights) for i in range(2)})
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
    model = pb.BNN(
        toy_net(),
        normal_prior(),
        pb.likelihoods.HomoskedasticGaussian(0.01),
    )
    x, y = wave(40, 0)
    return x, y, {name: method.fit(model, x, y, seed=0) for name, method in WITHOUT_DENSITY.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", WITHOUT_DENSITY)
def test_methods_without_a_density_fail_by_what_they_predict(name, overconfident):
    x, y, fitted = overconfident
    held_out = diagnose(fitted[name].to_datatree(x, y, test=wave(10, 1)))
    found = find(held_out, "coverage_90")
    assert held_out.predictions == "fail" and found.value < 0.5 and "of 10 held-out" in found.evidence
    alone = diagnose(fitted[name].to_datatree(x, y))
    assert alone.status == "fail" and find(alone, "training_pit").status == "fail"
    assert "too narrow" in alone.action


def test_calibrated_few_rows_and_training_rows_are_no_alarm():
    tree = exact_tree()
    few = tree.isel(pred_point=slice(10))
    assert find(diagnose(few), "coverage_90").status == "pass"
    assert find(diagnose(tree), "training_pit") is None  # leave-one-out is better
    del tree["log_likelihood"]
    assert find(diagnose(tree), "training_pit").status == "info"


def test_members_that_are_one_are_told():
    attrs = {"method": "DeepEnsemble", "kind": "independent", "claim": "none", "iid": 1}
    members = exact_tree(1, 6, sample_stats={}, attrs=attrs)
    assert find(diagnose(members), "spread").status == "pass"
    same = members.isel(draw=[0] * 6)
    assert diagnose(same).status == "fail" and "are the same" in diagnose(same).summary
    nearly = members.copy()
    pointwise = members["log_likelihood"]["y"]
    nearly["log_likelihood"]["y"] = pointwise.mean("draw") + 1e-3 * (pointwise - pointwise.mean("draw"))
    assert find(diagnose(nearly), "spread").status == "warn"


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
    assert verdicts["map"].predictions == "unchecked"
    rows = compare_rows(trees, verdicts)
    assert recommended(rows, verdicts) == "nuts"
    first = conclude(trees, rows, verdicts)[0]
    assert (
        first.startswith("No method can be trusted yet: for nuts") and "of map nothing has examined" in first
    )


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
    assert verdicts["map"].predictions == "pass" and verdicts["nuts"].status == "fail"
    first = conclude(trees, compare_rows(trees, verdicts), verdicts)[0]
    assert first.startswith("Use map, with care") and "examined less" in first


# weights and predictions


def test_weights_and_predictions_are_judged_apart():
    """k-hat over all weights of a net, and leave-one-out by the same weights, decide nothing of its function."""
    tree = healthy_svi()
    wild = tree["sample_stats"].to_dataset()
    wild["log_p"] = wild["log_p"] + 30.0 * np.random.default_rng(2).normal(size=wild["log_p"].shape)
    tree["sample_stats"] = wild
    line = diagnose(tree)
    assert (line.weights, line.predictions) == ("fail", "fail")
    net = diagnose(with_hidden_units(tree))
    assert (net.status, net.weights, net.predictions) == ("pass", "unchecked", "pass")
    assert "k-hat" in net.line("weights")[1] and "leave-one-out" in net.unchecked
    far = diagnose(tree, reference=exact_tree(noise=0.1))
    assert far.predictions == "fail" and far.weights == "unchecked"


def test_a_last_layer_is_judged_by_its_subspace():
    assert diagnose(with_hidden_units(healthy_subspace())).weights == "pass"


def test_a_fault_of_the_run_counts_for_both_lines():
    assert (diagnose(exact_tree()).weights, diagnose(exact_tree()).predictions) == ("pass", "pass")
    copied = diagnose(exact_tree().isel(chain=[0, 1, 0, 0]))
    assert (copied.weights, copied.predictions) == ("fail", "fail")


def test_both_lines_stand_in_the_page_and_the_summary(tmp_path):
    trees = {"svi": with_hidden_units(healthy_svi())}
    content = json.loads(write_summary(trees, None, tmp_path / "summary.json").read_text())
    found = content["methods"]["svi"]["verdict"]
    assert found["weights"] in ("pass", "unchecked") and found["predictions"] == "pass"
    page = write_report(trees, tmp_path / "report.html").read_text()
    assert "predictions: pass" in page and f"weights: {found['weights']}" in page
