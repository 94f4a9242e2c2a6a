"""The law of latent values of single data: errors of a right model pass; a wrong one is found."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import pyrobnn as pb

NUM_DATA = 500
NUM_DRAWS = 600
GRID = np.linspace(-6.0, 6.0, 401)
#: likelihood, data of an effect, number of trials (sd, exposure), sd of the effects, slope
RIGHT = [
    ("normal", 1, 1.0, 1.0, 0.0),
    ("normal", 1, 0.5, 1.0, 1.0),
    ("normal", 2, 1.0, 1.0, 0.0),
    ("normal", 3, 1.0, 1.0, 0.0),
    ("poisson", 1, 1.0, 0.5, 0.5),
    ("poisson", 1, 20.0, 0.5, 0.5),
    ("poisson", 2, 2.0, 0.7, 0.5),
    ("binomial", 1, 1, 1.0, 0.5),
    ("binomial", 1, 10, 1.0, 0.5),
    ("binomial", 2, 10, 1.0, 0.5),
]


def law(kind, eta, size):
    if kind == "normal":
        return stats.norm(eta, size)
    if kind == "poisson":
        return stats.poisson(np.exp(eta) * size)
    return stats.binom(size, 1.0 / (1.0 + np.exp(-eta)))


def log_density(kind, eta, size, y):
    distribution = law(kind, eta, size)
    return distribution.logpdf(y) if kind == "normal" else distribution.logpmf(y)


def tree(
    kind,
    rows_of_group,
    size,
    spread,
    slope,
    *,
    seed,
    curve=0.0,
    growth=0.0,
    far=False,
):
    """Exact draws, by a grid, of a normal effect of each group, given the slope and the spread."""
    rng = np.random.default_rng([seed, rows_of_group])
    x = rng.normal(size=NUM_DATA)
    group = np.arange(NUM_DATA) // rows_of_group
    effect = rng.normal(size=group.max() + 1)
    base = slope * x
    true = base + spread * effect[group] + curve * (x**2 - 1.0)
    noise = size * np.exp(growth * true) if growth else size
    y = law(kind, true, noise).rvs(random_state=rng).astype(float)

    log_posterior = np.zeros((len(effect), len(GRID)))
    terms = log_density(kind, base[:, None] + spread * GRID, size, y[:, None])
    np.add.at(log_posterior, group, terms)
    log_posterior += stats.norm.logpdf(GRID)
    weights = np.exp(log_posterior - log_posterior.max(axis=1, keepdims=True))
    share = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
    cells = [np.searchsorted(row, rng.random(NUM_DRAWS)) for row in share]
    within = rng.random((NUM_DRAWS, len(effect))) - 0.5
    effects = GRID[np.minimum(np.stack(cells, 1), len(GRID) - 1)] + within * (GRID[1] - GRID[0])

    eta = base + spread * effects[:, group]
    replicates = law(kind, eta, size).rvs(random_state=rng).astype(float)
    dims = ("chain", "draw", "obs")
    shape = (4, NUM_DRAWS // 4, -1)
    terms = log_density(kind, eta, size, y)
    groups = {
        "posterior": {"effect": (("chain", "draw", "group"), effects.reshape(shape))},
        "posterior_predictive": {"y": (dims, replicates.reshape(shape))},
        "log_likelihood": {"y": (dims, terms.reshape(shape))},
        "observed_data": {"y": ("obs", y)},
        "constant_data": {"x": (("obs", "feature"), x[:, None])},
    }
    if far:
        # an approximation whose weights are useless, as of many sites
        log_q = 20.0 * rng.normal(size=(4, NUM_DRAWS // 4))
        groups["sample_stats"] = {
            "log_p": (dims[:2], np.zeros_like(log_q)),
            "log_q": (dims[:2], log_q),
        }
    made = xr.DataTree.from_dict({name: xr.Dataset(group) for name, group in groups.items()})
    made.attrs |= {"iid": int(far), "claim": "exact"}
    return made


def model_checks(made):
    return [check for check in pb.diagnose(made).checks if check.question == "model"]


@pytest.mark.parametrize("far", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", RIGHT)
def test_a_right_model_passes(case, far):
    for seed in (0,) if far else (0, 1):
        checks = model_checks(tree(*case, seed=seed, far=far))
        assert [check for check in checks if check.status in ("warn", "fail")] == []
        # the order of the rows and the input are compared with the errors in any case
        assert any(check.name == "pattern" and check.status == "pass" for check in checks)


def test_how_large_errors_are_is_not_judged_where_a_datum_has_seen_itself():
    checks = model_checks(tree("binomial", 1, 10, 1.0, 0.5, seed=0))
    (size,) = [check for check in checks if check.name == "coverage_by_region"]
    assert (size.status, size.code) == ("info", "own_latents")
    assert size.numbers == {"num_values": NUM_DATA, "num_data": NUM_DATA}
    assert "500 values for 500" in size.evidence


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(
    "case, wrong, name",
    [
        (("normal", 20, 1.0, 0.7, 1.0), {"curve": 0.8}, "pattern"),
        (("poisson", 20, 2.0, 0.5, 0.5), {"curve": 0.4}, "pattern"),
        (("normal", 20, 1.0, 0.7, 1.0), {"growth": 0.5}, "coverage_by_region"),
        # the input is no part of what a datum has seen of itself
        (("normal", 1, 1.0, 0.7, 1.0), {"curve": 1.0}, "pattern"),
    ],
)
def test_a_wrong_model_is_found(case, wrong, name, far):
    checks = model_checks(tree(*case, seed=0, far=far, **wrong))
    assert any(check.name == name and check.status in ("warn", "fail") for check in checks)
