"""Verdicts on planted faults: what a fault of each kind did pass, it passes no longer."""

from __future__ import annotations

import arviz_stats
import numpy as np
import pytest
import xarray as xr
from known_posteriors import SAMPLE, exact_tree
from models import toy, toy_model

from pyrobnn import MAP, NUTS, DeepEnsemble, cli
from pyrobnn.diagnostics import Evidence, diagnose, loo
from pyrobnn.diagnostics.convergence import check_rhat


def find(verdict, name):
    return next((check for check in verdict.checks if check.name == name), None)


def foreign_tree(**sites):
    """What another library's run leaves: sites and a log-likelihood, no attributes."""
    mu = next(iter(sites.values()))
    y = np.random.default_rng(0).normal(size=30)
    pointwise = -0.5 * (y - 0.1 * mu[..., None]) ** 2
    groups = {
        "posterior": {
            name: ((*SAMPLE, *(f"{name}_{i}" for i in range(v.ndim - 2))), v) for name, v in sites.items()
        },
        "log_likelihood": {"y": ((*SAMPLE, "obs"), pointwise)},
    }
    return xr.DataTree.from_dict({name: xr.Dataset(group) for name, group in groups.items()})


def chains(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(4, 500, *shape))


# what is judged


@pytest.mark.parametrize("shape", [(), (5,), (40, 30)], ids=["scalar", "vector", "matrix"])
def test_every_named_site_of_another_library_counts(shape):
    tau = chains(*shape, seed=1)
    assert diagnose(foreign_tree(mu=chains(), tau=tau)).status == "pass"
    tau[:2] += 4.0
    verdict = diagnose(foreign_tree(mu=chains(), tau=tau))
    rhat = find(verdict, "rhat_function")
    assert verdict.status == "fail" and rhat.value > 1.5 and "tau" in rhat.evidence


def test_only_the_weights_of_a_net_are_excused():
    swapped = chains(6, seed=1)
    swapped[:2] += 4.0
    tree = foreign_tree(mu=chains(), **{"net.0.weight": swapped})
    assert (
        diagnose(tree).status == "pass" and "not identified" in find(diagnose(tree), "rhat_weights").evidence
    )
    assert find(diagnose(foreign_tree(mu=chains(), theta=chains(6))), "rhat_weights") is None


def test_convergence_that_nothing_shows_is_a_warning():
    tree = xr.DataTree.from_dict({"posterior": xr.Dataset({"net.weight": ((*SAMPLE, "d"), chains(3))})})
    tree["sample_stats"] = xr.Dataset({"diverging": (SAMPLE, np.zeros((4, 500), dtype=bool))})
    verdict = diagnose(tree)
    assert verdict.status == "warn" and "not checked" in verdict.summary


def test_a_strict_report_of_what_nothing_was_checked_of_exits_with_one(tmp_path):
    tree = xr.DataTree.from_dict({"posterior": xr.Dataset({"net.weight": ((*SAMPLE, "d"), chains(3))})})
    tree.to_netcdf(tmp_path / "weights.nc")
    foreign_tree(mu=chains()).to_netcdf(tmp_path / "judged.nc")
    out = ["--out", str(tmp_path / "report.html"), "--strict"]
    assert cli.main(["report", str(tmp_path / "weights.nc"), *out]) == 1
    assert cli.main(["report", str(tmp_path / "judged.nc"), *out]) == 0


def test_k_hat_of_leave_one_out_is_that_of_arviz_by_default():
    rng = np.random.default_rng(3)
    mu = np.cumsum(rng.normal(size=(4, 500)), axis=1) / 5
    tree = foreign_tree(mu=mu, tau=chains())
    direct = arviz_stats.loo(tree, pointwise=True)
    np.testing.assert_allclose(np.asarray(loo(tree).pareto_k), np.asarray(direct.pareto_k), rtol=1e-9)
    tree = exact_tree()
    direct = arviz_stats.loo(tree, pointwise=True)
    np.testing.assert_allclose(np.asarray(loo(tree).pareto_k), np.asarray(direct.pareto_k), rtol=1e-9)


# chains


def test_chains_from_one_start_warn_however_well_they_agree():
    assert diagnose(exact_tree()).status == "pass"
    for attrs in ({"common_start": 1}, {"settings": '{"init": "map"}'}):
        verdict = diagnose(exact_tree(attrs=attrs))
        assert verdict.status == "warn" and "missed a mode" in verdict.summary
        assert all("start" not in check.action or "own" in check.action for check in verdict.checks)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_runs_say_whether_their_chains_share_a_start():
    model, (x, y) = toy_model(), toy()
    short = {"num_chains": 2, "num_warmup": 2, "trajectory": 1, "step_size": 1e-3, "compile": False}
    point = MAP(num_steps=5, polish_steps=0, compile=False).fit(model, x, y, seed=0)
    members = DeepEnsemble(num_members=2, num_steps=5, compile=False).fit(model, x, y, seed=0)
    said = {}
    for name, options, init in (
        ("own", {}, None),
        ("map", {"init": "map"}, None),
        ("point", {}, point),
        ("members", {}, members),
    ):
        posterior = NUTS(**short, **options).fit(model, x, y, num_draws=5, seed=0, init=init)
        said[name] = bool(posterior.to_datatree(x, y).attrs["common_start"])
    assert said == {"own": False, "map": True, "point": True, "members": False}
    again = NUTS(**short).fit(model, x, y, num_draws=5, seed=0, init=posterior)
    assert not again.meta["common_start"]


@pytest.mark.parametrize(("length", "time"), [(50, 1), (300, 2)])
def test_limits_of_r_hat_hold_for_chains_that_have_converged(length, time):
    """Of 25 sets of 60 exact quantities none may fail, and (at a rate of 1 in 200) at most two warn."""
    rng = np.random.default_rng(length + time)
    statuses = []
    for _ in range(25):
        draws = rng.normal(size=(4, length, 60))
        for draw in range(1, length if time > 1 else 0):
            kept = (time - 1) / (time + 1)
            draws[:, draw] = kept * draws[:, draw - 1] + np.sqrt(1 - kept**2) * draws[:, draw]
        tree = xr.DataTree.from_dict({"posterior": xr.Dataset({"theta": ((*SAMPLE, "d"), draws)})})
        statuses.append(check_rhat(Evidence(tree)).status)
    assert statuses.count("fail") == 0 and statuses.count("warn") <= 2
