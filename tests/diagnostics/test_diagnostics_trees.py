"""A diagnosis takes what a tree holds: other libraries' trees, single draws, missing groups; and it is quick."""

from __future__ import annotations

import json
import time
import tracemalloc

import numpy as np
import pytest
import xarray as xr
from known_posteriors import (
    HEALTHY,
    SAMPLE,
    classes_tree,
    exact_tree,
    gaussian_tree,
    healthy_stats,
    healthy_svi,
    line_data,
    posterior_of,
)
from scipy import stats
from scipy.special import logsumexp

import pyrobnn as pb
from pyrobnn.diagnostics import Check, Verdict, diagnose, fidelity, pit, score


def find(verdict, name):
    return next((check for check in verdict.checks if check.name == name), None)


def keep_groups(tree, *names):
    kept = xr.DataTree.from_dict({name: tree[name].to_dataset() for name in names})
    kept.attrs.update(tree.attrs)
    return kept


def replace_f(tree, f):
    tree["function"] = tree["function"].to_dataset().assign(f=((*SAMPLE, "probe", "output"), f))


def shortened(tree, num_draws):
    return tree.map_over_datasets(
        lambda group: group.isel(draw=slice(num_draws), missing_dims="ignore")
    )


def point_tree(**attrs):
    tree = exact_tree(1, 1, sample_stats={"lp": np.zeros((1, 1))})
    tree.attrs.update({"method": "MAP", "label": "map", "iid": 1, **attrs})
    return tree


# words


def test_a_check_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match="not finite|is nan"):
        Check("a", "pass", "draws", float("nan"))
    with pytest.raises(ValueError, match="status"):
        Check("a", "fine")
    with pytest.raises(ValueError, match="question"):
        Check("a", "pass", "weights")


def test_a_verdict_is_its_worst_check_and_information_never_decides():
    checks = {
        name: Check(name, name, numbers={"seen": f"{name} seen.", "next": f"do {name}."})
        for name in ("pass", "warn", "fail", "info")
    }
    assert Verdict.from_checks("m", "l", [checks["info"], checks["pass"]]).draws == "pass"
    verdict = Verdict.from_checks("m", "l", [checks["warn"], checks["info"], checks["fail"]])
    assert verdict.status == "fail" and verdict.action == "do fail." and "fail seen" in str(verdict)
    assert [check.name for check in verdict.warned] == ["warn", "not_checked_model"]
    assert verdict.warned[-1].evidence.endswith(" check the model.")
    assert json.loads(verdict.to_json()) == verdict.to_dict()


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="must be a DataTree, .* of type dict"):
        diagnose({"posterior": 1})
    with pytest.raises(ValueError, match="no 'posterior'"):
        diagnose(xr.DataTree())
    with pytest.raises(ValueError, match="chain"):
        diagnose(xr.DataTree.from_dict({"posterior": xr.Dataset({"w": ("draw", np.zeros(3))})}))
    with pytest.raises(TypeError, match="reference"):
        diagnose(exact_tree(), reference=3)


# trees from elsewhere, and trees that lack groups


def test_a_numpyro_like_tree_is_judged_on_its_log_likelihood():
    tree = keep_groups(exact_tree(), "posterior", "sample_stats", "log_likelihood")
    tree.attrs.clear()
    tree["log_likelihood"] = xr.Dataset(
        {"obs": ((*SAMPLE, "obs_dim_0"), tree["log_likelihood"]["y"].values)}
    )
    verdict = diagnose(tree)
    assert verdict.draws == "pass" and verdict.method == "unknown"
    assert "log-likelihood" in find(verdict, "rhat_function").numbers["where"]
    assert find(verdict, "loo_khat") is not None and find(verdict, "bfmi").status == "pass"


@pytest.mark.parametrize("name", HEALTHY)
def test_no_missing_group_breaks_a_diagnosis_or_makes_it_pass_by_silence(name):
    tree = shortened(HEALTHY[name](), 200)
    full = {check.name for check in diagnose(tree).checks}
    for group in [group for group in tree.children if group != "posterior"]:
        without = tree.copy()
        del without[group]
        json.loads(diagnose(without).to_json())
    alone = diagnose(keep_groups(tree, "posterior"))
    assert alone.status == "warn" and len(alone.passed) == 0
    assert len(full) > len(alone.checks)


def test_one_chain_warns():
    tree = exact_tree(1, 2000, sample_stats=healthy_stats((1, 2000)))
    verdict = diagnose(tree)
    assert verdict.draws == "warn" and find(verdict, "chains").code == "one_chain"


def test_nan_draws_fail_with_their_number():
    tree = exact_tree()
    values = tree["posterior"]["net.weight"].values.copy()
    values[0, :3] = np.nan
    tree["posterior"] = xr.Dataset({"net.weight": ((*SAMPLE, "d"), values)})
    verdict = diagnose(tree)
    assert verdict.draws == "fail" and verdict.checks[0].numbers["count"] == 6
    json.loads(verdict.to_json())


# trees of before claims were written have the kind of their evidence
@pytest.mark.parametrize(
    "attrs",
    [{"claim": "approximate"}, {"log_evidence_kind": "elbo"}, {"log_evidence_kind": "laplace"}],
)
def test_an_approximation_stopped_before_its_density_was_computed_is_not_said_to_have_none(attrs):
    attrs = {"method": "SVI", "iid": 1, **attrs}
    tree = exact_tree(1, 20, sample_stats={"lp": np.zeros((1, 20))}, attrs=attrs)
    verdict = diagnose(tree)
    assert find(verdict, "claim").code == "density_missing"


@pytest.mark.parametrize("attrs", [{}, {"method": "MLE"}, {"method": "unknown", "iid": 0}])
def test_a_point_estimate_warns_at_most_and_holds_no_nan(attrs):
    verdict = diagnose(point_tree(**attrs), reference=exact_tree())
    assert verdict.status == "warn" and not verdict.failed
    assert find(verdict, "claim").code == "point_estimate"
    assert "nan" not in verdict.to_json().lower() and "r-hat is" not in verdict.to_json().lower()


@pytest.mark.parametrize("method", ["DeepEnsemble", "MCDropout", "SWAG"])
def test_methods_without_a_density_say_that_they_are_no_posterior(method):
    tree = exact_tree(
        1, 20, sample_stats={"lp": np.zeros((1, 20))}, attrs={"method": method, "iid": 1}
    )
    verdict = diagnose(tree)
    claim = find(verdict, "claim")
    assert (
        claim.status == "warn" and claim.code == "no_density" and claim.numbers["method"] == method
    )
    assert find(verdict, "loo_khat") is None and find(verdict, "rhat_function") is None


# the model


def test_a_tempered_run_tells_its_temperature():
    tree = exact_tree(attrs={"temperature": 0.1})
    found = find(diagnose(tree), "fit")
    assert found.status == "warn" and found.value == 0.1 and found.code == "tempered"


# scores


def test_scores_match_closed_forms():
    """Predictive N(0, 1) for y ~ N(0, 1): CRPS 1/√π, log density −½ log 2π − ½, coverage nominal."""
    rng = np.random.default_rng(0)
    size = 2000
    shape = (4, 300)
    y = rng.normal(size=size)
    f = np.zeros((*shape, size, 1))
    tree = xr.DataTree.from_dict(
        {
            "posterior": xr.Dataset({"w": (SAMPLE, rng.normal(size=shape))}),
            "predictions": xr.Dataset(
                {
                    "y": ((*SAMPLE, "pred_point"), rng.normal(size=(*shape, size))),
                    "f": ((*SAMPLE, "pred_point", "output"), f),
                    "mean": (("pred_point", "output"), np.zeros((size, 1))),
                    "aleatoric_var": (("pred_point", "output"), np.ones((size, 1))),
                    "log_prob": ("pred_point", stats.norm.logpdf(y)),
                }
            ),
            "predictions_constant_data": xr.Dataset({"y": ("pred_point", y)}),
        }
    )
    tree.attrs["likelihood"] = "gaussian"
    found = score(tree)
    expected = {
        "crps": 1 / np.sqrt(np.pi),
        "log_prob": -0.5 * np.log(2 * np.pi) - 0.5,
        "rmse": 1.0,
        "coverage_50": 0.5,
        "coverage_90": 0.9,
        "coverage_95": 0.95,
    }
    for name, value in expected.items():
        assert abs(found[name].value - value) < 5 * found[name].data_se, name
    assert found["width_90"].value == pytest.approx(2 * stats.norm.ppf(0.95), rel=0.01)
    values = pit(tree).ravel()
    assert stats.kstest(values, "uniform").pvalue > 1e-4


def test_data_error_does_not_shrink_with_draws():
    few = score(exact_tree(4, 50))
    many = score(exact_tree(4, 1000))
    assert many["crps"].data_se == pytest.approx(few["crps"].data_se, rel=0.1)


def test_overconfident_classes_are_caught():
    found = find(diagnose(classes_tree(sharpness=4.0)), "ece")
    assert found.status in ("warn", "fail") and found.code == "overconfident"
    assert score(classes_tree())["accuracy"].data_se > 0


def test_narrow_intervals_are_caught():
    x, y, _ = line_data()
    tree = exact_tree()
    replicates = tree["predictions"]["y"].values
    center = replicates.mean(axis=(0, 1))
    tree["predictions"] = (
        tree["predictions"]
        .to_dataset()
        .assign(y=((*SAMPLE, "pred_point"), center + 0.4 * (replicates - center)))
    )
    verdict = diagnose(tree)
    assert find(verdict, "pit").status == "fail" and find(verdict, "pit").code == "too_narrow"


# fidelity


def test_fidelity_measures_shift_and_scale_against_the_reference():
    reference = exact_tree()
    tree = exact_tree()
    f = tree["function"]["f"].values
    mean = f.mean(axis=(0, 1))
    sd = f.std(axis=(0, 1))
    tree["function"] = (
        tree["function"]
        .to_dataset()
        .assign(f=((*SAMPLE, "probe", "output"), mean + 0.5 * sd + (f - mean)))
    )
    found = fidelity(tree, reference)
    np.testing.assert_allclose(found.per_point["wasserstein"], 0.5, atol=1e-6)
    np.testing.assert_allclose(found.per_point["sd_ratio"], 1.0, atol=1e-6)
    tree["function"] = (
        tree["function"]
        .to_dataset()
        .assign(f=((*SAMPLE, "probe", "output"), mean + 0.3 * (f - mean)))
    )
    tree.attrs |= {"claim": "none", "remedy": pb.DeepEnsemble.remedy}  # its members have no guide
    narrow = find(diagnose(tree, reference=reference), "reference")
    assert narrow.status == "fail" and narrow.action == pb.DeepEnsemble.remedy
    assert find(diagnose(exact_tree(seed=0), reference=reference), "reference").status == "pass"


def test_a_reference_that_has_not_converged_decides_nothing():
    reference = exact_tree()
    f = reference["function"]["f"].values.copy()
    f[:2] += 5.0
    replace_f(reference, f)
    found = find(diagnose(healthy_svi(), reference=reference), "reference")
    assert found.status == "info" and found.code == "reference_undecided"


def test_class_fidelity():
    tree = classes_tree(sharpness=3.0)
    reference = classes_tree()
    assert find(diagnose(tree, reference=reference), "reference").status in ("warn", "fail")


# size


def big_tree(chains=4, draws=1000, weights=751, num=455):
    rng = np.random.default_rng(0)
    shape = (chains, draws)
    f = rng.normal(size=(*shape, 30, 1)).astype(np.float32)
    y = rng.normal(size=num).astype(np.float32)
    train = 0.1 * rng.normal(size=(*shape, num)).astype(np.float32)
    groups = {
        "posterior": {
            "net.0.weight": ((*SAMPLE, "w"), rng.normal(size=(*shape, weights)).astype(np.float32))
        },
        "sample_stats": {name: (SAMPLE, value) for name, value in healthy_stats(shape).items()},
        "function": {
            "f": ((*SAMPLE, "probe", "output"), f),
            "log_prior": (SAMPLE, rng.normal(size=shape)),
            "probe_x": (("probe", "feature"), rng.normal(size=(30, 10))),
        },
        "log_likelihood": {"y": ((*SAMPLE, "obs"), stats.norm.logpdf(y, train).astype(np.float32))},
        "log_prior": {"log_prior": (SAMPLE, 19 * rng.normal(size=shape))},
        "posterior_predictive": {
            "y": ((*SAMPLE, "obs"), train + rng.normal(size=(*shape, num)).astype(np.float32))
        },
        "observed_data": {"y": ("obs", y)},
        "constant_data": {"x": (("obs", "feature"), rng.normal(size=(num, 10)).astype(np.float32))},
    }
    return xr.DataTree.from_dict({name: xr.Dataset(group) for name, group in groups.items()})


def test_a_full_size_diagnosis_is_quick_and_small():
    tree = big_tree()
    start = time.process_time()
    verdict = diagnose(tree)
    seconds = time.process_time() - start
    assert verdict.status == "pass", verdict.to_json()
    assert seconds < 25.0


@pytest.mark.slow
def test_a_full_size_diagnosis_is_small():
    tree = big_tree()
    tracemalloc.start()
    diagnose(tree)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5e9


def test_mixture_log_density_is_the_one_stored():
    x, y, _ = line_data()
    mean, covariance = posterior_of(x, y, 0.5, 10.0)
    tree = gaussian_tree(mean, covariance, mean, covariance, 500, x, y, 0.5)
    f = tree["predictions"]["f"].values[..., 0]
    new = tree["predictions_constant_data"]["y"].values
    direct = (logsumexp(stats.norm.logpdf(new, f, 0.5), axis=(0, 1)) - np.log(500)).mean()
    assert score(tree)["log_prob"].value == pytest.approx(direct)
