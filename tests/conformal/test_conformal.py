"""Conformal sets: coverage by simulation where the model is wrong, the written formula, and what is refused."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior, toy, toy_model, toy_net

import pyrobnn as pb


def inside(ends, y):
    return (ends[0] <= y.reshape(-1)) & (y.reshape(-1) <= ends[1])


def exact(x, y, noise, num_draws=100):
    """Exact draws of a linear model with N(0, 1) weights."""
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    cov = torch.linalg.inv(design.T @ design / noise**2 + torch.eye(design.shape[1], dtype=x.dtype))
    with seeded():
        z = torch.randn(num_draws, design.shape[1], dtype=x.dtype)
        net = torch.nn.Linear(x.shape[1], 1).double()
    theta = cov @ (design.T @ y[:, 0] / noise**2) + z @ torch.linalg.cholesky(cov).T
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(noise))
    draws = {"net.weight": theta[None, :, None, :-1], "net.bias": theta[None, :, -1:]}
    return pb.Posterior(model, draws, meta={"claim": "exact", "kind": "chains", "method": "exact"})


def linear(num_data, seed=0, heavy=False):
    with seeded(seed):
        x = torch.randn(num_data, 2, dtype=torch.float64)
        law = torch.distributions.StudentT(2.0) if heavy else torch.distributions.Normal(0.0, 1.0)
        return x, x.sum(1, keepdim=True) + 0.5 * law.sample((num_data, 1)).double()


def test_intervals_hold_what_they_promise_where_the_model_is_wrong():
    # the model takes the noise for Gaussian with sd 0.3; of 19 rows and one more, exactly 18 ranks are kept
    held, plain = [], []
    for seed in range(100):
        x, y = linear(59, seed, heavy=True)
        posterior = exact(x[:20], y[:20], 0.3)
        held.append(inside(pb.conformal_interval(posterior, x[39:], calibration=(x[20:39], y[20:39])), y[39:]))
        low, high = posterior.predict(x[39:]).quantile(torch.tensor([0.05, 0.95]))
        plain.append((low <= y[39:]) & (y[39:] <= high))
    held = torch.stack(held).double().mean(1)
    assert abs(float(held.mean()) - 0.9) < 4 * float(held.std()) / len(held) ** 0.5
    assert float(torch.stack(plain).double().mean()) < 0.8


def test_of_a_point_it_is_the_quantile_of_the_residuals():
    x, y = linear(60)
    point = exact(x[:20], y[:20], 0.5, num_draws=1)
    lower, upper = pb.conformal_interval(point, x[59:], calibration=(x[20:59], y[20:59]))
    half = (y[20:59] - point.predict(x[20:59]).mean).abs()[:, 0].sort().values[35]  # the 36th of 39: ceil(0.9 · 40)
    centre = point.predict(x[59:]).mean[:, 0]
    torch.testing.assert_close(lower, centre - half, rtol=1e-5, atol=0)
    torch.testing.assert_close(upper, centre + half, rtol=1e-5, atol=0)


def test_the_units_of_the_data_are_those_of_the_intervals():
    x, y = linear(40)
    plain = exact(x[:20], y[:20], 0.5)
    units = pb.data.Standardizer(
        torch.tensor([3.0, -1.0]), torch.tensor([2.0, 0.1]), torch.tensor([1e5]), torch.tensor([100.0])
    )
    likelihood = pb.likelihoods.HomoskedasticGaussian(0.5)
    model = pb.BNN(plain.bnn.net, normal_prior(), likelihood, standardizer=units)
    scaled = pb.Posterior(model, plain.draws, meta=plain.meta)
    raw_x, raw_y = x * units.x_scale + units.x_mean, y * 100 + 1e5
    one = pb.conformal_interval(plain, x[30:], calibration=(x[:30], y[:30]))
    two = pb.conformal_interval(scaled, raw_x[30:], calibration=(raw_x[:30], raw_y[:30]))
    torch.testing.assert_close(two[0], one[0] * 100 + 1e5, rtol=1e-5, atol=0)
    torch.testing.assert_close(two[1] - two[0], (one[1] - one[0]) * 100, rtol=1e-4, atol=0)


def test_sets_of_classes_hold_what_they_promise():
    probs, x = torch.tensor([0.6, 0.3, 0.1]), torch.zeros(59, 1).double()
    with seeded():
        net = torch.nn.Linear(1, 3).double()
        bias = torch.randn(50, 3).double()
    model = pb.BNN(net, normal_prior(), pb.likelihoods.Categorical())
    draws = {"net.weight": torch.zeros(1, 50, 3, 1).double(), "net.bias": bias[None]}
    posterior = pb.Posterior(model, draws, meta={"claim": "exact", "kind": "chains"})
    held = []
    for seed in range(60):
        with seeded(seed):
            y = torch.multinomial(probs, 59, replacement=True)
        sets = pb.conformal_set(posterior, x[39:], calibration=(x[:39], y[:39]))
        held.append(sets[torch.arange(len(sets)), y[39:]].double().mean())
    held = torch.stack(held)
    assert float(held.mean()) > 0.9 - 4 * float(held.std()) / len(held) ** 0.5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_counts_and_truth_values():
    x, _ = toy()
    counts = pb.BNN(toy_net(), normal_prior(), pb.likelihoods.Poisson())
    with seeded():
        y = torch.poisson(torch.full((40, 1), 0.1))  # the median and the lower quantile are zero
    fitted = pb.MAP(num_steps=50, compile=False).fit(counts, x, y)
    found = pb.conformal_interval(fitted, x, calibration=(x, y), alpha=0.2)
    assert float(inside(found, y).double().mean()) >= 0.8
    binary = pb.BNN(toy_net(), normal_prior(), pb.likelihoods.Bernoulli())
    truths = (x[:, :1] > 0).float()
    sets = pb.conformal_set(pb.MAP(num_steps=50, compile=False).fit(binary, x, truths), x, calibration=(x, truths))
    assert sets.shape == (40, 2) and float(sets[torch.arange(40), truths.long().reshape(-1)].double().mean()) >= 0.85


def test_too_few_rows_hold_everything():
    x, y = linear(10)
    with pytest.warns(UserWarning, match="8 rows cannot tell.*9 rows are the fewest"):
        found = pb.conformal_interval(exact(x, y, 0.5), x[8:], calibration=(x[:8], y[:8]))
    assert bool((found[0] == -torch.inf).all() and (found[1] == torch.inf).all())


def test_what_makes_no_sense_is_refused_by_name():
    x, y = linear(20)
    posterior = exact(x, y, 0.5)
    cases = [
        ({"calibration": (x, y), "alpha": 1.0}, ValueError, "'alpha' must be > 0 and < 1"),
        ({"calibration": (x, y[:5])}, ValueError, "one outcome for each of 20 points"),
        ({"calibration": (x, y * torch.nan)}, ValueError, "holds 20 NaN"),
        ({"calibration": x}, TypeError, "'calibration' must be the pair"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            pb.conformal_interval(posterior, x, **options)
    with pytest.raises(ValueError, match="use pyrobnn.conformal_interval"):
        pb.conformal_set(posterior, x, calibration=(x, y))
    two = pb.BNN(toy_net(out=2), normal_prior(), pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)))
    fitted = pb.MAP(num_steps=5, compile=False).fit(two, *toy(out=2))
    with pytest.raises(pb.Refused, match="of one output, got 2"):
        pb.conformal_interval(fitted, toy()[0], calibration=(toy()[0], toy()[1]))
    classes = pb.BNN(toy_model().net, normal_prior(), pb.likelihoods.Bernoulli())
    labels = (toy()[1] > 0).float()
    with pytest.raises(ValueError, match="use pyrobnn.conformal_set"):
        fitted = pb.MAP(num_steps=5, compile=False).fit(classes, toy()[0], labels)
        pb.conformal_interval(fitted, toy()[0], calibration=(toy()[0], labels))


@pytest.fixture(scope="module")
def table():
    with seeded():
        X = torch.randn(80, 1).double().numpy()
        return X, X[:, 0] + 0.5 * torch.randn(80).double().numpy()


MAP = pb.MAP(num_steps=100, compile=False)


def test_a_regressor_gives_conformal_intervals(table):
    X, y = table
    model = pb.BNNRegressor(MAP, hidden=(), random_state=0).fit(X[:40], y[:40])
    found = model.predict_interval(X[40:], level=0.8, conformal=(X[40:], y[40:]))
    assert found.shape == (40, 2) and ((found[:, 0] <= y[40:]) & (y[40:] <= found[:, 1])).mean() >= 0.8
    with pytest.raises(ValueError, match="40 of the 60 calibration rows were in the fit"):
        model.predict_interval(X[:5], conformal=(X[:60], y[:60]))
    for wrong in (True, "split"):
        with pytest.raises(TypeError, match="'conformal' must be False or a pair"):
            model.predict_interval(X[:5], conformal=wrong)


def test_a_classifier_gives_sets(table):
    X, y = table
    labels = (y > -1).astype(int) + (y > 1)
    model = pb.BNNClassifier(MAP, hidden=(), random_state=0).fit(X[:60], labels[:60])
    probs = model.predict_proba(X[60:])
    plain = model.predict_set(X[60:], level=0.8)
    sets = model.predict_set(X[60:], level=0.8, conformal=(X[40:60] + 1e-3, labels[40:60]))
    assert plain.dtype == bool and plain.shape == sets.shape == probs.shape
    assert ((plain * probs).sum(1) >= 0.8).all() and (plain.sum(1) >= 1).all()
    smallest = (probs * plain + 2.0 * ~plain).min(1)
    assert ((plain * probs).sum(1) - smallest < 0.8).all()  # none of its classes can be spared
