"""The law of joint events: one datum is not judged as many; what depends on each other is predicted step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb
from pyrobnn.diagnostics import Evidence
from pyrobnn.model import Density
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.one_step import NUM_DRAWS, joint_events, one_step

X = torch.linspace(-3.0, 3.0, 60)


def process(noise, trend=0.0):
    def gaussian_process(x, y):
        length = pyro.sample("length", dist.LogNormal(0.0, 0.5))
        noise_sd = pyro.sample("noise", dist.HalfNormal(1.0)) if noise is None else noise
        cov = torch.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-5 * torch.eye(len(x))
        cov = cov + noise_sd**2 * torch.eye(len(x))
        pyro.sample("y", dist.MultivariateNormal(trend * x, cov), obs=y)

    return gaussian_process


def state_space(noise):
    def program(x, y):
        keep = pyro.sample("keep", dist.Uniform(0.0, 0.99))
        one = torch.ones(1)
        hmm = dist.GaussianHMM(
            dist.Normal(0.0 * one, 1.0).to_event(1),
            keep.reshape(1, 1),
            dist.Normal(0.0 * one, 0.5).to_event(1),
            torch.eye(1),
            dist.Normal(0.0 * one, noise).to_event(1),
            duration=len(x),
        )
        pyro.sample("y", hmm, obs=y)

    return program


def areal(scale):
    """A conditional autoregression on a ring: the precision is the data's own parameter."""

    def program(x, y):
        strength = pyro.sample("strength", dist.Beta(2.0, 2.0))
        ring = torch.eye(len(x)).roll(1, 0) + torch.eye(len(x)).roll(-1, 0)
        precision = (torch.eye(len(x)) - 0.49 * strength * ring) / scale**2
        law = dist.MultivariateNormal(torch.zeros(len(x)), precision_matrix=precision)
        pyro.sample("y", law, obs=y)

    return program


#: program, the wrong one (noise off by 40 % and more, or a missing trend), and the values that data are drawn at
MODELS = {
    "process": (process(0.3), process(0.3 / 1.6), {"length": 1.0}),
    "process without its trend": (process(0.3, trend=2.0), process(0.3), {"length": 1.0}),
    "state space": (state_space(0.5), state_space(0.2), {"keep": 0.8}),
    "areal": (areal(1.0), areal(1 / 1.5), {"strength": 0.6}),
}


def drawn(program, values, seed):
    with seeded(seed):
        known = pyro.condition(program, {name: torch.tensor(v) for name, v in values.items()})
        return pyro.poutine.trace(known).get_trace(X, None).nodes["y"]["value"]


def near(program, values):
    """A posterior whose draws lie within 1 % of the values, which no fit has to find."""
    jitter = torch.linspace(0.99, 1.01, 100)[None]
    draws = {name: value * jitter for name, value in values.items()}
    return Posterior(program, draws, meta={"kind": "chains"})


def model_answer(program, values, y):
    tree = near(program, values).to_datatree(X, y, num_prior_draws=0)
    verdict = pb.diagnose(tree)
    return verdict.shown_answer("model"), verdict


@pytest.mark.parametrize("name", ["process", "process without its trend", "areal"])
def test_a_true_model_does_not_fail_and_a_wrong_one_is_seen(name):
    right, wrong, values = MODELS[name]
    y = drawn(right, values, seed=1)
    assert model_answer(right, values, y)[0] == "pass"
    answer, verdict = model_answer(wrong, values, y)
    assert answer in ("warn", "fail"), verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_of_twenty_sets_none_of_a_true_model_fails_and_most_of_a_wrong_one_are_seen(name):
    right, wrong, values = MODELS[name]
    data = [drawn(right, values, seed) for seed in range(20)]
    answers = [model_answer(right, values, y)[0] for y in data]
    assert "fail" not in answers and answers.count("pass") >= 18, answers
    seen = [model_answer(wrong, values, y)[0] in ("warn", "fail") for y in data]
    assert sum(seen) >= 16, seen


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_fit_of_the_true_model_does_not_fail(name):
    program, _, values = MODELS[name]
    for seed in range(4):
        y = drawn(program, values, seed)
        posterior = pb.Laplace(num_steps=500, compile=False).fit(program, X, y, num_draws=500)
        verdict = pb.diagnose(posterior.to_datatree(X, y, num_prior_draws=0))
        assert verdict.model == "pass", verdict


def test_the_steps_are_those_of_the_covariance():
    program, _, values = MODELS["state space"]
    y = drawn(program, values, seed=0)
    posterior = Posterior(program, {"keep": torch.full((1, 30), 0.8)}, meta={"kind": "chains"})
    density = Density(program, (X, y))
    nodes = density.trace({"keep": torch.tensor(0.8)})
    events = joint_events(nodes)
    assert events == {"y": 1} and NUM_DRAWS >= 30
    steps = one_step(posterior, density, events)
    states = torch.zeros(60, 60, dtype=torch.float64)  # var_0 = .8² + .5², then the recursion
    variance = 1.0
    for t in range(60):
        variance = 0.64 * variance + 0.25
        for later in range(t, 60):
            states[t, later] = states[later, t] = 0.8 ** (later - t) * variance
    cov = states + 0.25 * torch.eye(60, dtype=torch.float64)
    z = torch.linalg.solve_triangular(
        torch.linalg.cholesky(cov),
        y.double().reshape(-1, 1),
        upper=False,
    )[:, 0]
    np.testing.assert_allclose(steps["y"], torch.special.ndtr(z), atol=1e-5)


def test_independent_elements_of_an_event_are_rows_as_before():
    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(slope * x, 1.0).to_event(1), obs=y)

    y = drawn(program, {"slope": 1.0}, 0)
    tree = near(program, {"slope": 1.0}).to_datatree(X, y, num_prior_draws=0)
    evidence = Evidence(tree)
    assert not evidence.is_joint and evidence.replicates() is not None
    assert "one_step" not in tree.children


def test_an_event_that_is_not_gaussian_is_not_checked_and_says_so():
    def program(x, y):
        rate = pyro.sample("rate", dist.Gamma(2.0, 2.0))
        pyro.sample("y", dist.Multinomial(500, probs=torch.softmax(rate * X, 0)), obs=y)

    y = drawn(program, {"rate": 0.5}, 0)
    answer, verdict = model_answer(program, {"rate": 0.5}, y)
    assert answer == "not checked"
    assert [c.code for c in verdict.checks if c.question == "model"] == ["joint_event"]
    assert "'y'" in str(verdict.worst("model")) or "y are one event" in str(verdict.worst("model"))
    assert "one event" in verdict.summary


def item_response(x, y):
    spread = pyro.sample("spread", dist.HalfNormal(2.0))
    difficulty = torch.linspace(-1.0, 1.0, 15)
    with pyro.plate("student", 50, dim=-2), pyro.plate("item", 15, dim=-1):
        pyro.sample("y", dist.Bernoulli(logits=spread * x[:, None] - difficulty), obs=y)


@pytest.mark.parametrize("whole", [False, True])
def test_answers_of_students_are_a_row_each(whole):
    ability = torch.linspace(-2.0, 2.0, 50)
    with seeded(0):
        logits = ability[:, None] - torch.linspace(-1.0, 1.0, 15)
        y = torch.bernoulli(torch.sigmoid(logits))
    y = y.long() if whole else y
    posterior = near(item_response, {"spread": 1.0})
    tree = posterior.to_datatree(ability, y, num_prior_draws=0)
    verdict = pb.diagnose(tree)
    assert verdict.shown_answer("model") == "pass", verdict
    outcomes = Evidence(tree).replicates()
    assert outcomes is not None and outcomes[1].shape == (750, 1)


def test_several_observed_sites_are_all_judged():
    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("row", 60):
            pyro.sample("first", dist.Normal(slope * x, 1.0), obs=None if y is None else y[0])
            pyro.sample("second", dist.Normal(slope * x, 1.0), obs=None if y is None else y[1])

    with seeded(0):
        y = X + torch.randn(2, 60)
    posterior = near(program, {"slope": 1.0})
    assert pb.diagnose(posterior.to_datatree(X, y)).shown_answer("model") == "pass"
    y[1] *= 3.0
    assert pb.diagnose(posterior.to_datatree(X, y)).model in ("warn", "fail")


@pytest.mark.parametrize("count, code", [(8, "few_data"), (60, "few_replicates")])
def test_why_nothing_was_checked(count, code, num_draws=24):
    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("row", len(x)):
            pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    x = X[:count]
    with seeded(0):
        y = x + torch.randn(count)
    posterior = near(program, {"slope": 1.0})
    few = replace(posterior, draws={"slope": posterior.draws["slope"][:, :num_draws]})
    verdict = pb.diagnose(few.to_datatree(x, y))
    codes = [check.code for check in verdict.checks if check.name == "not_checked_model"]
    assert codes == ([code] if code else [])


def test_data_in_a_factor_are_said_to_be_there():
    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("row", len(x)):
            residuals = y - slope * x
        pyro.factor("likelihood", -0.5 * residuals.square().sum())

    verdict = pb.diagnose(near(program, {"slope": 1.0}).to_datatree(X, X))
    assert verdict.worst("model").code == "factor_only"
    assert "factor" in verdict.worst("model").evidence
    without = pb.diagnose(near(program, {"slope": 1.0}).to_datatree())
    assert without.worst("model").code == "no_data_stored"
