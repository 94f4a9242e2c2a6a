"""The law of named faults: a cut prior, data that were not given, a tolerance, label switching."""

from __future__ import annotations

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from helpers import seeded

import pyrobnn as pb
from pyrobnn.diagnostics import Check, Verdict
from pyrobnn.diagnostics.wording import evidence
from pyrobnn.inference.fitting.problem import prepare

STATUSES = ("pass", "info", "warn", "fail")
X = torch.linspace(-1.0, 1.0, 30)
with seeded(0):
    Y = X + 0.5 * torch.randn(30)


def line(prior):
    def program(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        scale = pyro.sample("noise", prior)
        with pyro.plate("row", len(x)):
            pyro.sample("y", dist.Normal(slope * x, scale), obs=y)

    return program


def findings(program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = prepare(program, X, Y, points="free")
    return [note for note in problem.notes if not isinstance(note, str)]


@pytest.mark.parametrize(
    "prior, share",
    [
        (dist.Normal(0.0, 1.0), 0.5),
        (dist.Normal(1.0, 1.0), 0.16),
        (dist.Normal(10.0, 1.0), None),
        (dist.HalfNormal(1.0), None),
        (dist.LogNormal(0.0, 1.0), None),
    ],
)
def test_a_prior_that_is_cut_by_a_scale_is_named(prior, share):
    cut = [note for note in findings(line(prior)) if note.code == "prior_cut"]
    assert len(cut) == (share is not None)
    for note in cut:
        assert abs(note.values["share"] - share) < 0.05
        assert "'noise'" in str(note) and "'scale' of the site 'y'" in str(note)


def test_a_share_below_a_percent_is_not_said_to_be_none():
    (note,) = [note for note in findings(line(dist.Normal(4.5, 1.6))) if note.code == "prior_cut"]
    assert 0.0 < note.values["share"] < 0.005
    assert " 0% of its mass" not in str(note)
    assert " 0.0% of its mass" not in str(note)


def test_a_flat_prior_of_a_scale_is_fitted():
    flat = line(dist.ImproperUniform(dist.constraints.real, (), ()))
    assert [note for note in findings(flat) if note.code == "prior_cut"] == []


METHODS = (
    pb.NUTS(num_chains=2, num_warmup=5, compile=False),
    pb.SVI(num_steps=5, compile=False),
    pb.Laplace(num_steps=5, compile=False),
    pb.SMC(num_particles=16, compile=False),
    pb.MAP(num_steps=5, compile=False),
)


def in_a_plate(size, dim=None):
    def program(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("row", size, dim=dim):
            pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    return program


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_plate_of_another_size_is_a_sentence(method):
    words = "the plate 'row' has 29 rows, and the site 'y' inside has 30 along dimension -1: give"
    with pytest.raises(ValueError, match=words) as caught:
        method.fit(in_a_plate(29), X, Y)
    assert "Trace Shapes" not in str(caught.value)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_plate_along_a_dimension_that_the_data_have_not_is_named(method):
    words = r"a dim of the plate 'row' .*counts 30 rows along dimension -2"
    with pytest.raises(ValueError, match=words) as caught:
        method.fit(in_a_plate(30, dim=-2), X, Y)
    assert "squeeze" not in str(caught.value)


def test_a_column_of_means_is_squeezed():
    with pytest.raises(ValueError, match=r"squeeze\(-1\)"):
        METHODS[0].fit(in_a_plate(30), X[:, None], Y)


def test_a_scale_that_is_transformed_is_not_named():
    def program(x, y):
        log_scale = pyro.sample("log_scale", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, log_scale.exp()).to_event(1), obs=y)

    assert [note for note in findings(program) if note.code == "prior_cut"] == []


def test_outcomes_that_are_not_given_are_asked_for():
    with pytest.raises(ValueError, match=r"'y' is not given.*would sample 'y'.*fit\(program, x, y"):
        pb.MAP().fit(line(dist.HalfNormal(1.0)), X)


def test_a_passing_approximation_says_its_tolerance():
    of_approximation = [Check("importance", "pass"), Check("virial", "pass")]
    verdict = Verdict.from_checks("SVI", "svi", of_approximation)
    assert "the draws can be relied on: standard deviations are within 25%" in verdict.summary
    of_chains = Verdict.from_checks("NUTS", "nuts", [Check("rhat_function", "pass")])
    assert "within" not in of_chains.summary


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("pattern", "depend most on"),
        ("row_order", "depend on each other"),
        ("loo_khat", "which dominate the fit"),
    ],
)
def test_a_check_that_passes_does_not_state_its_fault(name, fault):
    numbers = {"where": "x", "value": 0.2, "limit": 0.15, "p": 0.3, "count": 2, "total": 60}
    said = {status: evidence(name, name, numbers | {"status": status}) for status in STATUSES}
    assert [status for status in STATUSES if fault in said[status]] == ["warn", "fail"]
    none = evidence("loo_khat", "loo_khat", numbers | {"status": "pass", "count": 0})
    assert none.startswith("Leave-one-out estimates are reliable for all 60 observations")


def mixture_tree(order, rng, apart=4.0):
    """Chains of a mixture of three components, each chain with the components in an order of its own."""
    location = apart * np.arange(3.0) + 0.3 * rng.normal(size=(4, 500, 3))
    weight = rng.dirichlet([50.0, 30.0, 20.0], size=(4, 500))
    for chain, components in enumerate(order):
        location[chain] = location[chain][:, components]
        weight[chain] = weight[chain][:, components]
    level = rng.normal(size=(4, 500))
    dims = ("chain", "draw")
    sites = {
        "location": ((*dims, "component"), location),
        "weight": ((*dims, "component"), weight),
        "level": (dims, level),
    }
    return xr.DataTree.from_dict({"posterior": xr.Dataset(sites)})


def test_switched_labels_are_named():
    rng = np.random.default_rng(0)
    same = [[0, 1, 2]] * 4
    assert pb.diagnose(mixture_tree(same, rng)).draws == "pass"
    switched = [[0, 1, 2], [2, 0, 1], [0, 1, 2], [1, 0, 2]]
    verdict = pb.diagnose(mixture_tree(switched, rng))
    worst = verdict.worst("draws")
    assert worst.code == "labels_switched" and verdict.draws == "fail"
    assert "label switching" in verdict.summary and "'location', 'weight'" in worst.evidence
    assert "OrderedTransform" in worst.action


def test_chains_that_disagree_under_every_order_are_not_taken_for_switched_labels():
    rng = np.random.default_rng(0)
    tree = mixture_tree([[0, 1, 2]] * 4, rng)
    tree["posterior"]["location"].values[0, :, 1] += 1.5
    assert pb.diagnose(tree).worst("draws").code == "chains_disagree"
