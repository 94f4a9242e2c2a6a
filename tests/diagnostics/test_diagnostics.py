"""Six planted failures are caught, six healthy runs pass, and nothing that a tree lacks breaks a diagnosis."""

from __future__ import annotations

import json

import arviz_stats
import numpy as np
import pytest
import xarray as xr
from known_posteriors import (
    HEALTHY,
    SAMPLE,
    TRUTH,
    exact_tree,
    gaussian_tree,
    healthy_laplace,
    healthy_stats,
    healthy_svi,
    line_data,
    line_tree,
    posterior_of,
)
from scipy import stats

from pyrobnn.core.chains import ess_of_families
from pyrobnn.diagnostics import (
    Check,
    Verdict,
    diagnose,
    importance,
    leave_one_out,
    loo,
    refit_points,
)


def check(verdict, name):
    found = [each for each in verdict.checks if each.name == name]
    assert len(found) == 1, f"{name} not once among {[each.name for each in verdict.checks]}"
    return found[0]


def as_text(verdict):
    return verdict.to_json().lower()


# six planted failures


def test_chains_in_different_function_modes_fail_and_name_the_place():
    x, y, _ = line_data()
    tree = exact_tree()
    f = tree["function"]["f"].values.copy()
    at = int(np.argmin(np.abs(tree["function"]["probe_x"].values[:, 0] - 1.3)))
    f[2:, :, at] += 1.0
    tree["function"] = (
        tree["function"].to_dataset().assign(f=(("chain", "draw", "probe", "output"), f))
    )
    verdict = diagnose(tree)
    assert verdict.status == "fail"
    assert "x=1.3" in check(verdict, "rhat_function").evidence
    modes = check(verdict, "rhat_function")
    assert modes.code == "chains_disagree"
    for found in verdict.checks:  # starts in common would hide the modes
        assert "MAP" not in found.action, found
    assert "another seed" in modes.action


def test_a_frozen_chain_is_advised_other_starts_not_a_common_one():
    tree = exact_tree()
    draws = {name: np.array(values) for name, values in tree["posterior"].data_vars.items()}
    for values in draws.values():
        values[1] = values[1, :1]
    dims = {name: values.dims for name, values in tree["posterior"].data_vars.items()}
    tree["posterior"] = (
        tree["posterior"].to_dataset().assign({n: (dims[n], v) for n, v in draws.items()})
    )
    moving = check(diagnose(tree), "moving")
    assert moving.status == "fail" and moving.numbers["chains"] == [1]
    assert "another seed" in moving.action and "MAP" not in moving.action


def test_mean_field_on_a_correlated_posterior_fails_by_khat():
    x, y, _ = line_data()
    covariance = np.array([[1.0, 0.98], [0.98, 1.0]]) * 0.01
    mean_field = np.diag(1.0 / np.diag(np.linalg.inv(covariance)))
    tree = gaussian_tree(TRUTH, mean_field, TRUTH, covariance, 4000, x, y, 0.5)
    verdict = diagnose(tree)
    khat = check(verdict, "importance")
    assert verdict.draws == "fail" and khat.code == "khat" and khat.value > 0.7
    assert "full_rank" in verdict.action and "NUTS" in verdict.action


@pytest.mark.parametrize(
    ("chains", "draws", "status"), [(4, 15, "fail"), (4, 60, "warn"), (4, 2, "fail")]
)
def test_too_few_draws_are_caught_by_ess(chains, draws, status):
    tree = exact_tree(chains, draws)
    verdict = diagnose(tree)
    name = "chains" if draws < 4 else "ess_function"
    assert check(verdict, name).status == status
    assert "num_draws" in check(verdict, name).action


def test_centred_funnel_fails_by_divergences_and_energy():
    rng = np.random.default_rng(0)
    shape = (4, 1000)
    energy = np.cumsum(
        rng.normal(size=shape), axis=1
    )  # a random walk: heavy-tailed, crossed slowly
    bad = {**healthy_stats(shape), "energy": energy, "diverging": rng.random(shape) < 0.03}
    verdict = diagnose(exact_tree(sample_stats=bad))
    assert verdict.status == "fail"
    assert check(verdict, "divergences").status == "fail"
    assert check(verdict, "bfmi").status == "fail"
    assert "non-centred" in verdict.action


def test_constant_noise_on_heteroskedastic_data_fails_by_region():
    x, y, _ = line_data(num=400, noise=0.4, slope_of_noise=0.8)
    noise = float((y - TRUTH[0] - TRUTH[1] * x).std())
    mean, covariance = posterior_of(x, y, noise, 10.0)
    weights = np.random.default_rng(1).multivariate_normal(mean, covariance, (4, 500))
    verdict = diagnose(line_tree(weights, x, y, noise, sample_stats=healthy_stats((4, 500))))
    region = check(verdict, "coverage_by_region")
    assert verdict.status == "fail" and region.status == "fail"
    assert verdict.draws == "pass" and region.question == "model" and region.numbers["where"] == "x"
    wide = check(diagnose(line_tree(weights, x, y, 20 * noise)), "coverage_by_region").numbers
    assert wide["low"] == wide["high"] == 1 and wide["low_at"] != wide["high_at"]
    far = check(diagnose(line_tree(weights * [1, 1e-5], 1e5 * x, y, noise)), "coverage_by_region")
    assert (
        far.status == "fail" and "e+" not in far.numbers["low_at"] + far.numbers["high_at"]
    )  # places are in digits


# six healthy runs


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_pass(name):
    verdict = diagnose(HEALTHY[name]())
    assert verdict.status == "pass", verdict.to_json()
    assert verdict.action == "" and len(verdict.passed) >= 2


# evidence


@pytest.mark.parametrize("name", ["svi", "laplace"])
def test_rhat_is_never_evidence_for_independent_draws(name):
    tree = HEALTHY[name]()
    for text in (as_text(diagnose(tree)), as_text(diagnose(tree, reference=exact_tree()))):
        assert "r-hat" not in text and "rhat" not in text


def test_khat_agrees_with_arviz():
    tree = healthy_svi()
    ratio = tree["sample_stats"]["log_p"] - tree["sample_stats"]["log_q"]
    log_weights, k = (-ratio).azstats.psislw(dim=["chain", "draw"])
    found = importance(tree)
    assert found.k == pytest.approx(float(k), abs=1e-12)
    np.testing.assert_allclose(found.log_weights, log_weights.values, atol=1e-12)


@pytest.mark.parametrize("spread", [30.0, 1e3, 1e6])
def test_khat_of_hopeless_ratios_is_never_small(spread):
    """At spreads that underflow, arviz_stats.psislw answers k-hat 0.02 with NaN weights."""
    tree = healthy_laplace()
    ratio = spread * np.random.default_rng(0).normal(size=(1, 1000))
    tree["sample_stats"] = (
        tree["sample_stats"].to_dataset().assign(log_p=tree["sample_stats"]["log_q"] + ratio)
    )
    found = importance(tree)
    assert found.k > 5 and found.ess < 2 and np.isfinite(found.ess)
    verdict = diagnose(tree)
    assert verdict.draws == "fail" and check(verdict, "importance").status == "fail"
    json.loads(verdict.to_json())


def test_khat_of_an_exact_approximation_is_zero():
    found = importance(healthy_laplace())
    assert found.k <= 0.0 and found.ess == pytest.approx(1000.0)


def test_khat_of_a_known_pareto_tail():
    """p/q for N(0, 1) by N(0, s²) has tail index 1 − s² exactly (Vehtari et al., 2024)."""
    scale = 0.5
    size = 40_000
    draws = scale * np.random.default_rng(0).normal(size=(1, size, 1))
    tree = xr.DataTree.from_dict(
        {
            "posterior": xr.Dataset({"w": ((*SAMPLE, "d"), draws)}),
            "sample_stats": xr.Dataset(
                {
                    "log_p": (SAMPLE, stats.norm.logpdf(draws[..., 0])),
                    "log_q": (SAMPLE, stats.norm.logpdf(draws[..., 0], scale=scale)),
                }
            ),
        }
    )
    tail = 3 * np.sqrt(size)
    assert abs(importance(tree).k - (1 - scale**2)) < 5 * (1 + 0.75) / np.sqrt(tail)


def two_places_tree(sd, seed):
    """Draws (1, 1000, 2) of the normal with the mean and the sd of two places at −1 and 1, each of this sd."""
    whole = np.hypot(1.0, sd)
    draws = whole * np.random.default_rng(seed).normal(size=(1, 1000, 2))
    places = [stats.norm.logpdf(draws, at, sd) for at in (-1.0, 1.0)]
    found = {
        "log_p": np.logaddexp(*places).sum(-1),
        "log_q": stats.norm.logpdf(draws, scale=whole).sum(-1),
    }
    groups = {
        "posterior": xr.Dataset({"w": ((*SAMPLE, "d"), draws)}),
        "sample_stats": xr.Dataset({name: (SAMPLE, value) for name, value in found.items()}),
    }
    tree = xr.DataTree.from_dict(groups)
    tree.attrs.update(method="SVI", kind="independent", claim="approximate", iid=1)
    return tree


@pytest.mark.parametrize("seed", range(5))
def test_a_normal_with_the_moments_of_two_places_is_told(seed):
    found = check(diagnose(two_places_tree(0.3, seed)), "importance")
    at = np.linspace(-3, 3, 2000)
    exact = (stats.norm.cdf(at, -1, 0.3) + stats.norm.cdf(at, 1, 0.3)) / 2 - stats.norm.cdf(
        at, scale=np.hypot(1, 0.3)
    )
    assert (found.status, found.code) == ("warn", "importance")
    assert found.numbers["distance"] == pytest.approx(np.abs(exact).max(), abs=0.06)
    assert found.numbers["ratio"] == pytest.approx(1.0, abs=0.1)
    assert check(diagnose(two_places_tree(3.0, seed)), "importance").status == "pass"


def test_loo_agrees_with_arviz_for_chains_and_approximations():
    tree = exact_tree()
    found = loo(tree)
    direct = arviz_stats.loo(tree, pointwise=True, reff=1.0)
    assert found.elpd == pytest.approx(direct.elpd, abs=0.02)
    svi = healthy_svi()
    approximate = loo(svi)
    direct = arviz_stats.loo_approximate_posterior(
        svi, svi["sample_stats"]["log_p"], svi["sample_stats"]["log_q"], pointwise=True
    )
    assert approximate.elpd == pytest.approx(direct.elpd, abs=1e-10)
    np.testing.assert_allclose(np.asarray(approximate.pareto_k), np.asarray(direct.pareto_k))


def test_a_datum_that_no_draw_moves_is_no_fault():
    tree = exact_tree()
    tree["log_likelihood"]["y"][..., 3] = -1.0
    assert loo(tree) is not None and diagnose(tree).status == "pass"


def test_loo_of_thinned_log_likelihood_pairs_it_with_the_right_densities():
    tree = healthy_svi()
    kept = np.linspace(0, 1999, 700).round().astype(int)
    thin = tree["log_likelihood"]["y"].values[:, kept]
    tree["log_likelihood"] = xr.Dataset({"y": ((*SAMPLE, "obs"), thin)})
    pair = [tree["sample_stats"][name].values[:, kept].ravel() for name in ("log_p", "log_q")]
    direct = arviz_stats.loo_approximate_posterior(tree, *pair, pointwise=True)
    assert loo(tree).elpd == pytest.approx(direct.elpd, abs=1e-10)


def test_loo_of_many_data_is_that_of_a_spread_of_them(monkeypatch):
    tree = exact_tree()
    full = loo(tree)
    monkeypatch.setattr(leave_one_out, "MAX_ROWS", 50)
    monkeypatch.setattr(leave_one_out, "MAX_DATA", 40)
    part = loo(exact_tree())
    assert part.n_data_points == 40
    assert abs(full.elpd / full.n_data_points - part.elpd / 40) < 5 * part.se / 40
    rows = part.elpd_i["obs"].values
    np.testing.assert_allclose(part.elpd_i, full.elpd_i[rows])


def test_an_outlier_is_listed_for_refitting():
    x, y, _ = line_data(num=30)
    y[7] += 40.0
    mean, covariance = posterior_of(x, y, 0.5, 10.0)
    weights = np.random.default_rng(0).multivariate_normal(mean, covariance, (4, 500))
    tree = line_tree(weights, x, y, 0.5)
    assert refit_points(loo(tree))[0] == 7
    found = check(diagnose(tree), "loo_khat")
    assert found.status == "warn" and found.numbers["rows"][0] == 7


def test_chains_in_pairs_from_one_start_do_not_agree_before_they_have_left_it():
    """Sixteen pairs."""
    assert check(diagnose(exact_tree(32, 50)), "rhat_function").status == "pass"
    x, y, _ = line_data()
    rng = np.random.default_rng(0)
    weights = np.repeat(rng.normal(size=(16, 1, 2)), 2, axis=0) + 0.01 * rng.normal(
        size=(32, 50, 2)
    )
    assert check(diagnose(line_tree(weights, x, y, 0.5)), "rhat_function").status == "fail"


def test_many_short_chains_in_modes_are_seen():
    """Every fourth chain in each of four modes."""
    tree = exact_tree(32, 50)
    assert check(diagnose(tree), "rhat_function").status == "pass"
    x, y, _ = line_data()
    weights = tree["posterior"]["net.weight"].values.copy()
    weights += 2.0 * weights.std((0, 1)) * (np.arange(32) % 4)[:, None, None]
    assert check(diagnose(line_tree(weights, x, y, 0.5)), "rhat_function").status == "fail"


def test_particles_of_few_ancestors_are_worth_their_number_of_families():
    rng = np.random.default_rng(0)
    family = np.repeat(np.arange(10), 50)[None].repeat(4, 0)
    alone = np.arange(500)[None].repeat(4, 0)
    draws = rng.normal(size=(200, 4, 500))
    modes = np.sign(rng.normal(size=(200, 4, 10))).repeat(50, -1)  # that no particle leaves
    for values, ancestor, worth in (
        (draws, alone, 2000),
        (draws, family, 2000),
        (modes, family, 40),
        (modes, alone, 2000),
    ):
        assert 0.9 < np.median(ess_of_families(values, ancestor)) / worth < 1.15


def test_islands_whose_modes_have_few_ancestors_do_not_pass():
    rng = np.random.default_rng(1)
    side = rng.permuted(np.tile([-1.0, 1.0], (4, 5)), axis=1).repeat(
        50, -1
    )  # each island has half of either mode
    theta = 3.0 * side + rng.normal(size=side.shape)
    ancestor = np.arange(10).repeat(50)[None].repeat(4, 0)
    found = {}
    for name, more in {"few": {"ancestor": ancestor}, "unknown": {}}.items():
        sets = {
            "posterior": {"theta": theta},
            "sample_stats": {"lp": -0.5 * (theta - 3.0 * side) ** 2} | more,
        }
        groups = {
            key: xr.Dataset({n: (("chain", "draw"), v) for n, v in each.items()})
            for key, each in sets.items()
        }
        found[name] = diagnose(xr.DataTree.from_dict(groups))
    status = {
        name: {c.name: c.status for c in verdict.checks}["ess_function"]
        for name, verdict in found.items()
    }
    assert status["few"] == "fail"


@pytest.mark.parametrize("draws", ["pass", "warn", "fail"])
def test_a_fault_of_the_model_seen_by_draws_that_fail_is_said_to_be_seen_by_them(draws):
    checks = [Check("function_moves", draws, "draws"), Check("pattern", "fail", "model")]
    verdict = Verdict.from_checks("SVI", "svi", checks)
    assert ("judged by these draws, the model does not fit" in verdict.summary) == (draws == "fail")
