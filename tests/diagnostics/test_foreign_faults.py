"""Faults of trees from elsewhere, and healthy oddities: what each of them is answered to the two questions."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xarray as xr
from known_posteriors import SAMPLE, exact_tree

from pyrobnn.diagnostics import audit, diagnose

OBS = (*SAMPLE, "obs")


def tree_of(**groups):
    return xr.DataTree.from_dict({name: xr.Dataset(group) for name, group in groups.items()})


def find(verdict, name):
    return next((check for check in verdict.checks if check.name == name), None)


@pytest.mark.parametrize("far", [0.0, 5.0])
def test_chains_and_draws_that_are_exchanged_never_pass(far):
    """Four chains of 500 draws, written as 500 of four: both passed, also with one chain five sd away."""
    draws = np.random.default_rng(0).normal(size=(4, 500))
    draws[0] += far
    verdict = diagnose(tree_of(posterior={"mu": (SAMPLE, draws.T)}))
    assert verdict.draws == "fail" and find(verdict, "chains").code == "chains_exchanged"
    assert (find(verdict, "rhat_function").status == "fail") == (far > 0)


@pytest.mark.parametrize(
    ("factor", "code"), [(1.0, "calibrated"), (2.4, "too_wide"), (3.0, "too_wide")]
)
def test_replicates_too_wide_for_their_data_fail_without_a_log_likelihood(factor, code):
    rng = np.random.default_rng(0)
    x = np.linspace(-1.0, 1.0, 60)
    y = 1.0 + 2.0 * x + 0.5 * rng.normal(size=60)
    design = np.stack([np.ones(60), x], 1)
    covariance = np.linalg.inv(design.T @ design / 0.25 + 0.01 * np.eye(2))
    weights = rng.multivariate_normal(
        covariance @ design.T @ y / 0.25, factor**2 * covariance, (4, 500)
    )
    mean = weights @ design.T
    verdict = diagnose(
        tree_of(
            posterior={"w": ((*SAMPLE, "d"), weights), "mean": (OBS, mean)},
            posterior_predictive={"y": (OBS, mean + 0.5 * factor * rng.normal(size=mean.shape))},
            observed_data={"y": ("obs", y)},
        )
    )
    assert verdict.draws == "pass" and find(verdict, "loo_pit").code == code
    assert (verdict.model == "fail") == (factor > 1.0)


@pytest.mark.parametrize("draws", [10, 100])
def test_rows_that_parameters_fit_do_not_say_that_error_bars_are_too_wide(draws):
    """Few draws cannot show how many directions the posterior has: 40 of 400 made an exact posterior fail."""
    rng = np.random.default_rng(0)
    design = rng.normal(size=(200, 400)) / 20.0
    covariance = np.linalg.inv(np.eye(400) + design.T @ design / 0.01)
    y = design @ rng.normal(size=400) + 0.1 * rng.normal(size=200)
    weights = rng.multivariate_normal(covariance @ design.T @ y / 0.01, covariance, (4, draws))
    mean = weights @ design.T
    verdict = diagnose(
        tree_of(
            posterior={"w": ((*SAMPLE, "d"), weights)},
            posterior_predictive={"y": (OBS, mean + 0.1 * rng.normal(size=mean.shape))},
            observed_data={"y": ("obs", y)},
        )
    )
    assert find(verdict, "loo_pit").status == "info"


def classes(x, y, logit, rng):
    """What another library leaves of labels y (row,) with draws (chain, draw, row) of their logits."""
    p = 1.0 / (1.0 + np.exp(-logit))
    tree = tree_of(
        posterior={"logit": (SAMPLE, logit[..., 0])},
        posterior_predictive={"y": (OBS, (rng.random(p.shape) < p).astype(int))},
        observed_data={"y": ("obs", y)},
        constant_data={"x": (("obs", "feature"), x[:, None])},
        log_likelihood={"y": (OBS, np.log(np.where(y == 1, p, 1.0 - p)))},
    )
    tree.attrs["likelihood"] = "bernoulli"
    return diagnose(tree)


def test_classes_are_judged_by_their_patterns_where_no_rows_are_held_out():
    """A line on classes that change twice along x, no better than a coin, passed."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, 200)
    noise = 0.2 * rng.normal(size=(4, 500, 1))
    coin = classes(x, (np.abs(x) < 1.0).astype(int), 0.05 * x + noise, rng)
    assert coin.draws == "pass" and find(coin, "pattern").status == "fail"
    y = (rng.random(200) < 1.0 / (1.0 + np.exp(-2.0 * x))).astype(int)
    healthy = classes(x, y, (2.0 + noise) * x + noise, rng)
    assert (healthy.draws, healthy.model) == ("pass", "pass")
    few = np.repeat(np.flatnonzero(y == 0)[:30], 6)
    repeated_x = np.concatenate([x, x[few]])
    repeated_y = np.concatenate([y, y[few]])
    repeated = classes(repeated_x, repeated_y, 2.0 * repeated_x - 1.0 + noise, rng)
    assert find(repeated, "held_out_rows").code == "rows_repeated" and repeated.model == "warn"


@pytest.mark.parametrize("off", [0.0, 1.5])
def test_class_shares_are_judged_where_no_rows_are_held_out(off):
    rng = np.random.default_rng(1)
    x = rng.uniform(-2.0, 2.0, 300)
    noise = 0.1 * rng.normal(size=(4, 500, 1))
    y = (rng.random(300) < 1.0 / (1.0 + np.exp(-x))).astype(int)
    verdict = classes(x, y, (1.0 + noise) * x + off + noise, rng)
    assert find(verdict, "ece").status == ("fail" if off else "pass") and (
        verdict.model == "pass"
    ) == (not off)


def test_an_infinite_variance_and_a_function_held_at_a_point_are_healthy():
    """Student's t of two degrees of freedom, and a net without a bias at zero, warned."""
    tree = exact_tree()
    tree["function"]["f"].values[:, :, 3] = 0.0
    tree["log_likelihood"]["y"][..., 3] = -1.0
    infinite = (("pred_point", "output"), np.full((200, 1), np.inf))
    tree["predictions"] = tree["predictions"].to_dataset().assign(aleatoric_var=infinite)
    verdict = diagnose(tree, reference=exact_tree())
    assert (verdict.draws, verdict.model) == ("pass", "pass")


def test_a_verdict_is_short_and_says_its_tolerance():
    tree = exact_tree(draws=100)
    tree["function"]["f"][2:] += 1.0
    said = str(diagnose(tree))
    assert len(said.split()) < 80 and said.startswith("NUTS: do not rely on the draws")
    assert diagnose(exact_tree()).tolerance == 0.25 and "sd within 25%" in str(
        diagnose(exact_tree())
    )


def test_an_audit_that_finds_nothing_says_so_of_every_check():
    verdict = audit(exact_tree())
    assert verdict.draws == "pass" and json.loads(verdict.to_json()) == verdict.to_dict()
    assert len(verdict.checks) == 3 and all(check.evidence for check in verdict.checks)
    said = str(verdict)  # of what it has not looked at, nothing
    assert (
        "copied_chains: pass, repeated_draws: pass" in said
        and "no sign" in said
        and "relied" not in said
    )


def _foreign_line(log_likelihood=lambda value: value, chains=lambda draws: draws):
    """What another library stores of a line whose noise is known: draws, log-likelihood, replicates and data."""
    rng = np.random.default_rng(0)
    x = np.linspace(-1.0, 1.0, 60)
    y = 1.0 + 2.0 * x + 0.5 * rng.normal(size=60)
    design = np.stack([np.ones(60), x], 1)
    covariance = np.linalg.inv(design.T @ design / 0.25 + 0.01 * np.eye(2))
    weights = rng.multivariate_normal(covariance @ design.T @ y / 0.25, covariance, (4, 500))
    weights = chains(weights)
    mean = weights @ design.T
    density = -0.5 * ((y - mean) / 0.5) ** 2 - np.log(0.5 * np.sqrt(2 * np.pi))
    return tree_of(
        posterior={"w": ((*SAMPLE, "d"), weights)},
        log_likelihood={"y": (OBS, log_likelihood(density))},
        posterior_predictive={"y": (OBS, mean + 0.5 * rng.normal(size=mean.shape))},
        observed_data={"y": (("obs",), y)},
    )


def _one_chain_copied_and_shifted(draws):
    return np.concatenate([draws[:3], draws[:1] + 1e-3], axis=0)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("log_likelihood", {"log_likelihood": lambda value: value / np.log(10.0)}),
        ("log_likelihood", {"log_likelihood": np.exp}),
        ("copied_chains", {"chains": _one_chain_copied_and_shifted}),
    ],
)
def test_a_tree_of_another_library_is_audited_without_being_asked(name, fault):
    """A log-likelihood in log10, densities in place of their logarithms, a chain that is another's copy: all passed."""
    assert diagnose(_foreign_line()).draws == "pass"
    verdict = diagnose(_foreign_line(**fault))
    assert find(verdict, name).status in ("warn", "fail") and verdict.draws != "pass"


def test_what_an_audit_does_not_find_is_no_evidence():
    draws = np.random.default_rng(0).normal(size=(1, 8))
    verdict = diagnose(tree_of(posterior={"mu": (SAMPLE, draws)}))
    assert not {"copied_chains", "repeated_draws", "log_likelihood"} & {
        check.name for check in verdict.passed
    }
