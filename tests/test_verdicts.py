"""Verdicts on planted faults: what a fault of each kind did pass, it passes no longer."""

from __future__ import annotations

import arviz_stats
import numpy as np
import pytest
import xarray as xr
from known_posteriors import SAMPLE, exact_tree

from pyrobnn import cli
from pyrobnn.diagnostics import diagnose, loo


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
