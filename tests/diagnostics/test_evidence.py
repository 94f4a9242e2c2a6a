"""What a tree says is read and computed once, by one definition, under one name."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path

import arviz_stats
import numpy as np
import pytest
import trees as factory
import xarray as xr
from known_posteriors import classes_tree, exact_tree, healthy_svi

import pyrobnn
from pyrobnn.core import groups
from pyrobnn.core.chains import ess
from pyrobnn.diagnostics import Evidence, convergence, diagnose, judge, leave_one_out, loo
from pyrobnn.diagnostics.evidence import statistic
from pyrobnn.diagnostics.grades import Found
from pyrobnn.diagnostics.judge import judge_all
from pyrobnn.diagnostics.row import Row
from pyrobnn.report import write_report, write_summary
from pyrobnn.report.results import compare_rows

PACKAGE = Path(pyrobnn.__file__).parent


def test_a_statistic_is_computed_once_per_evidence_and_options():
    calls = []

    @statistic
    def counted(evidence: Evidence, *, space: str = "full") -> int:
        calls.append(space)
        return evidence.num_draws

    tree = exact_tree()
    evidence = Evidence(tree)
    assert [
        counted(evidence),
        counted(evidence, space="full"),
        counted(evidence, space="part"),
    ] == [4000] * 3
    assert calls == ["full", "part"]
    assert counted(tree=tree) == 4000 and len(calls) == 3  # a bare tree has no memory
    assert list(inspect.signature(counted).parameters) == ["tree", "space"]


def test_errors_are_not_remembered():
    calls = []

    @statistic
    def broken(evidence):
        calls.append(evidence)
        raise ValueError("broken")

    evidence = Evidence(healthy_svi())
    for count in (1, 2):
        with pytest.raises(ValueError, match="broken"):
            broken(evidence)
        assert len(calls) == count


def test_a_whole_report_smooths_every_ratio_once(monkeypatch, tmp_path):
    counts = {"ratios": 0, "tables": 0}
    smooth = leave_one_out.pareto_smooth

    def smoothed(*args):
        counts["ratios"] += 1
        return smooth(*args)

    def table(*args, **kwargs):
        counts["tables"] += args[1:] == ("tail",)
        return ess(*args, **kwargs)

    for name in ("leave_one_out", "importance"):
        module = importlib.import_module(f"pyrobnn.diagnostics.{name}")
        monkeypatch.setattr(module, "pareto_smooth", smoothed)
    monkeypatch.setattr(importlib.import_module("pyrobnn.diagnostics.convergence"), "ess", table)
    nuts = factory.regression_1d()
    svi = factory.regression_1d("SVI", iid=True, seed=3)
    trees = {"nuts": Evidence(nuts), "svi": Evidence(svi)}
    verdicts = judge_all(trees)
    write_summary(trees, verdicts, tmp_path / "summary.json")
    write_report(trees, tmp_path / "report.html", verdicts=verdicts)
    compare_rows(trees)
    # leave-one-out of each, p/q of one; convergence of the one with chains (and, traced, of nothing else)
    assert counts == {"ratios": 3, "tables": 1}


@pytest.mark.parametrize("make", [exact_tree, healthy_svi])
def test_loo_is_that_of_arviz(make):
    tree = make()
    found = loo(tree)
    if "log_q" in tree["sample_stats"]:
        stats = tree["sample_stats"]
        direct = arviz_stats.loo_approximate_posterior(
            tree, stats["log_p"], stats["log_q"], pointwise=True
        )
    else:
        reff = leave_one_out.relative_efficiency(tree)
        direct = arviz_stats.loo(tree, pointwise=True, reff=reff)
    for name in ("elpd", "p", "good_k"):
        assert getattr(found, name) == pytest.approx(getattr(direct, name), rel=1e-10), name
    # its variance is over N data; that of the ArviZ which has a class for each way of leaving out, over N − 1
    newest = hasattr(arviz_stats.utils, "ELPDDataLOO")
    factor = np.sqrt(found.n_data_points / (found.n_data_points - newest))
    assert factor * found.se == pytest.approx(direct.se, rel=1e-10)
    for name in ("scale", "n_samples", "n_data_points", "warning", "approx_posterior"):
        assert getattr(found, name) == getattr(direct, name), name
    assert newest or found.kind == direct.kind
    for name in ("elpd_i", "pareto_k"):
        pair = (np.asarray(getattr(each, name)) for each in (found, direct))
        np.testing.assert_allclose(*pair, rtol=1e-9)


def test_one_datum_without_a_tail_does_not_take_the_others_loo():
    tree = exact_tree()
    values = tree["log_likelihood"]["y"].values
    values[..., 3] = np.where(np.arange(4000).reshape(4, 1000) == 7, -2000.0, 0.0)
    values[..., 3] -= np.linspace(0, 1e-9, 4000).reshape(4, 1000)
    found = next(check for check in diagnose(tree).checks if check.name == "loo_khat")
    assert found.status == "warn" and found.numbers["rows"] == [3]


def test_a_new_check_is_a_statistic_and_a_row(monkeypatch):
    def length(evidence, limits):
        return Found("fail", float(evidence.num_draws), numbers={"next": "Stop."})

    def raises(evidence, limits):
        raise RuntimeError("no such thing")

    added = (
        Row("length", "draws", length, (1.0,), "draws", ""),
        Row("raises", "draws", raises, (), "", ""),
    )
    monkeypatch.setattr(judge, "TABLE", (*judge.TABLE, *added))
    verdict = diagnose(exact_tree())
    assert verdict.action == "Stop." and verdict.draws == "fail" and verdict.model == "pass"
    raised = next(check for check in verdict.checks if check.name == "raises")
    assert raised.status == "warn" and "no such thing" in raised.evidence


@pytest.mark.parametrize(
    "trees",
    [
        {"nuts": factory.regression_1d(), "svi": factory.regression_1d("SVI", iid=True, seed=3)},
        {"nuts": factory.regression_nd(), "svi": factory.regression_nd("SVI", iid=True)},
        {"classes": classes_tree(), "sharp": classes_tree(sharpness=3.0)},
    ],
    ids=["one input", "many inputs", "classes"],
)
def test_one_word_in_the_summary_is_one_number(trees, tmp_path):
    content = json.loads(
        write_summary(trees, None, tmp_path / "summary.json").read_text(encoding="utf-8")
    )
    for label, method in content["methods"].items():
        checks = {check["name"]: check["value"] for check in method["verdict"]["checks"]}
        for name in checks.keys() & method["scores"].keys():
            assert checks[name] == method["scores"][name], (label, name)


def test_names_of_groups_are_written_once():
    names = {
        value for name, value in vars(groups).items() if name.isupper() and isinstance(value, str)
    }
    also = {
        "log_likelihood",
        "log_prior",
        "prior_predictive",
    }  # variables, and a check, of the same name
    unmistakable = {name for name in names if "_" in name} - also
    assert len(unmistakable) >= 5
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value!r}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "groups.py"
        and path.parent.name != "plots"  # figures are called what they show
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in unmistakable
    ]
    assert not wrong


def test_convergence_is_none_for_what_never_moves():
    tree = xr.DataTree.from_dict(
        {"posterior": xr.Dataset({"w": (("chain", "draw"), np.zeros((4, 100)))})}
    )
    assert convergence(tree) is None
