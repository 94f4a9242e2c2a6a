"""Conformal sets: coverage by simulation, weights against exact refits, and what they say where they can't."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior, toy, toy_model, toy_net

import pyrobnn as pb
from pyrobnn.estimators.conformal import Outputs, Ranking, rankings


def conjugate(x, y, noise, num_draws=500, seed=0, **meta):
    """Exact draws of a linear model with N(0, 1) weights, and its exact moments."""
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    precision = design.T @ design / noise**2 + torch.eye(design.shape[1], dtype=x.dtype)
    cov = torch.linalg.inv(precision)
    mean = cov @ (design.T @ y[:, 0] / noise**2)
    with seeded(seed):
        z = torch.randn(num_draws, len(mean), dtype=x.dtype)
        net = torch.nn.Linear(x.shape[1], 1).double()
    theta = mean + z @ torch.linalg.cholesky(cov).T
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(noise))
    draws = {"net.weight": theta[None, :, None, :-1], "net.bias": theta[None, :, -1:]}
    meta = {"claim": "exact", "kind": "chains", "method": "exact", "num_data": len(x)} | meta
    return pb.Posterior(model, draws, meta=meta), mean, cov


def linear_data(num_data, noise, seed=0, num_features=2):
    with seeded(seed):
        x = torch.randn(num_data, num_features, dtype=torch.float64)
        return x, x.sum(1, keepdim=True) + noise(num_data)


def gaussian_noise(count):
    return 0.5 * torch.randn(count, 1, dtype=torch.float64)


def heavy_noise(count):
    return 0.5 * torch.distributions.StudentT(torch.tensor(2.0).double()).sample((count, 1))


def covered(way, posterior, x, y):
    """Whether the sets hold y, by the rank alone."""
    outputs = Outputs.of(posterior, x)
    return way.inside(outputs.log_prob(y), outputs.terms(y))


def test_sets_hold_what_they_promise_where_the_model_is_wrong():
    # the model takes the noise for Gaussian with sd 0.3; of 19 rows and one more, exactly 18 ranks are kept
    held, plain = [], []
    for seed in range(100):
        x, y = linear_data(29, heavy_noise, seed)
        posterior, *_ = conjugate(x[:19], y[:19], 0.3, seed=seed)
        (way,) = rankings(posterior, (x[:19], y[:19]), None, 0.1)
        held.append(covered(way, posterior, x[19:], y[19:]).double().mean())
        low, high = posterior.predict(x[19:]).quantile(torch.tensor([0.05, 0.95]))
        plain.append(((low <= y[19:]) & (y[19:] <= high)).double().mean())
    held = torch.stack(held)
    assert abs(float(held.mean()) - 0.9) < 4 * float(held.std()) / len(held) ** 0.5
    assert float(torch.stack(plain).mean()) < 0.8


def test_weights_that_add_a_row_are_those_of_the_exact_refit():
    x, y = linear_data(20, gaussian_noise)
    posterior, *_ = conjugate(x, y, 0.5, num_draws=50_000)
    new_x, new_y = torch.tensor([[1.0, -1.0]]).double(), torch.tensor([[0.8]]).double()
    (way,) = rankings(posterior, (x, y), None, 0.1)
    log_weights = way.log_weights(Outputs.of(posterior, new_x).log_prob(new_y))[:, 0]
    _, mean, cov = conjugate(torch.cat([x, new_x]), torch.cat([y, new_y]), 0.5)
    theta = torch.cat([posterior.draws["net.weight"][0, :, 0], posterior.draws["net.bias"][0]], 1)
    weights = log_weights.exp()
    error = 5 * cov.diagonal().sqrt() * weights.square().sum().sqrt()
    assert bool(((weights @ theta - mean).abs() < error).all())
    assert bool((mean - theta.mean(0)).abs().max() > 5 * error.max())  # the row does move the posterior
    # and so are the conformities: tail probabilities under the refit
    design = torch.cat([x, torch.ones(20, 1).double()], 1)
    scale = ((design @ cov) * design).sum(1).add(0.25).sqrt()
    exact = torch.distributions.Normal(design @ mean, scale).cdf(y[:, 0])
    below = (log_weights[:, None] + way.rows[0]).logsumexp(0).exp()
    torch.testing.assert_close(below, exact, atol=0.02, rtol=0)


def test_ends_are_where_the_rank_changes():
    x, y = linear_data(59, heavy_noise, num_features=1)
    posterior, *_ = conjugate(x[:49], y[:49], 0.5)
    found = pb.conformal_interval(posterior, x[49:], train=(x[:49], y[:49]), alpha=0.2)
    (way,) = rankings(posterior, (x[:49], y[:49]), None, 0.2)
    inwards = 0.01 * found.width
    for end, inward in ((found.lower, inwards), (found.upper, -inwards)):
        assert bool(covered(way, posterior, x[49:], (end + inward)[:, None]).all())
        assert not bool(covered(way, posterior, x[49:], (end - inward)[:, None]).any())
    assert found.kind == "add-one-in" and found.trusted and not found.notes
    assert torch.equal(found.contains(y[49:]), (found.lower <= y[49:, 0]) & (y[49:, 0] <= found.upper))


def test_a_split_is_the_quantile_of_its_rows():
    x, y = linear_data(60, gaussian_noise)
    posterior, *_ = conjugate(x[:20], y[:20], 0.5, num_draws=1)
    point = pb.Posterior(posterior.model, posterior.draws, meta=posterior.meta | {"kind": "point"})
    found = pb.conformal_interval(point, x[59:], calibration=(x[20:59], y[20:59]), alpha=0.1)
    residuals = (y[20:59] - point.predict(x[20:59]).mean).abs()[:, 0].sort().values
    half = residuals[35]  # the 36th of 39: ceil(0.9 · 40)
    centre = point.predict(x[59:]).mean[:, 0]
    assert found.kind == "split" and found.khat is None
    torch.testing.assert_close(found.lower, centre - half, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.upper, centre + half, atol=1e-3, rtol=0)
    with pytest.raises(pb.Refused, match="one draw.*calibration="):
        pb.conformal_interval(point, x[59:], train=(x[:20], y[:20]))


def test_the_units_of_the_data_are_those_of_the_sets():
    x, y = linear_data(40, gaussian_noise)
    plain, *_ = conjugate(x[:30], y[:30], 0.5)
    units = pb.data.Standardizer(
        torch.tensor([3.0, -1.0]), torch.tensor([2.0, 0.1]), torch.tensor([1e5]), torch.tensor([100.0])
    )
    model = pb.BNN(
        plain.bnn.net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.5), standardizer=units
    )
    scaled = pb.Posterior(model, plain.draws, meta=plain.meta)
    raw_x = x * units.x_scale + units.x_mean
    raw_y = y * 100 + 1e5
    one = pb.conformal_interval(plain, x[30:], train=(x[:30], y[:30]))
    two = pb.conformal_interval(scaled, raw_x[30:], train=(raw_x[:30], raw_y[:30]))
    torch.testing.assert_close(two.lower, one.lower * 100 + 1e5, rtol=1e-5, atol=0)
    torch.testing.assert_close(two.upper, one.upper * 100 + 1e5, rtol=1e-5, atol=0)


def test_sets_of_classes_hold_what_they_promise_and_one_of_a_split_too():
    probs, x = torch.tensor([0.6, 0.3, 0.1]), torch.zeros(59, 1)
    with seeded():
        net = torch.nn.Linear(1, 3).double()
    model = pb.BNN(net, normal_prior(), pb.likelihoods.Categorical())
    held, split = [], []
    for seed in range(60):
        with seeded(seed):
            y = torch.multinomial(probs, 59, replacement=True)
            prior = torch.randn(2000, 3).double()
            weights = prior.log_softmax(1)[:, y[:39]].sum(1).softmax(0)
            bias = prior[torch.multinomial(weights, 200, replacement=True)]
        draws = {"net.weight": torch.zeros(1, 200, 3, 1).double(), "net.bias": bias[None]}
        meta = {"claim": "exact", "kind": "chains", "num_data": 39}
        posterior = pb.Posterior(model, draws, meta=meta)
        held.append(pb.conformal_set(posterior, x[39:], train=(x[:39], y[:39])).contains(y[39:]))
        split.append(pb.conformal_set(posterior, x[39:], calibration=(x[:39], y[:39])).contains(y[39:]))
    for each in (held, split):
        share = torch.stack(each).double().mean(1)
        assert float(share.mean()) > 0.9 - 4 * float(share.std()) / len(each) ** 0.5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_classes_of_a_net_and_of_one_logit():
    x, _ = toy()
    labels = (x[:, 0] > -1).long() + (x[:, 0] > 1).long()
    model = pb.BNN(toy_net(out=3), normal_prior(), pb.likelihoods.Categorical())
    posterior = pb.Laplace(num_steps=50, compile=False).fit(model, x, labels, num_draws=100)
    found = pb.conformal_set(posterior, x, train=(x, labels))
    assert found.member.shape == (40, 3) and bool(found.contains(labels).double().mean() >= 0.85)
    assert found.khat is not None and found.ess is not None and bool((found.ess > 0).all())
    one = pb.BNN(toy_net(), normal_prior(), pb.likelihoods.Bernoulli())
    binary = pb.MAP(num_steps=50, compile=False).fit(one, x, (labels > 1).float())
    sets = pb.conformal_set(binary, x, calibration=(x, (labels > 1).float()))
    assert sets.member.shape == (40, 2) and bool((sets.size >= 0).all())


def test_an_outlier_is_not_trusted_and_the_calibration_rows_are_fallen_back_on():
    x, y = linear_data(40, gaussian_noise)
    posterior, *_ = conjugate(x[:20], y[:20], 0.5)
    far = torch.cat([x[39:], torch.full((1, 2), 60.0).double()])
    with pytest.warns(UserWarning, match=r"at 1 of 2 points \(1\).*cannot be trusted.*calibration="):
        found = pb.conformal_interval(posterior, far, train=(x[:20], y[:20]))
    assert not found.trusted and found.khat[1] > 0.7 > found.khat[0] and found.ess[1] < found.ess[0]
    with pytest.warns(UserWarning, match="the calibration rows are used, for at 1 of 2"):
        other = pb.conformal_interval(
            posterior, far, train=(x[:20], y[:20]), calibration=(x[20:39], y[20:39])
        )
    assert other.kind == "split" and other.trusted


def test_approximations_are_corrected_where_they_can_be_and_say_where_not():
    x, y = linear_data(30, gaussian_noise)
    model = conjugate(x, y, 0.5)[0].model
    exact = pb.Laplace(num_steps=100, compile=False).fit(model, x, y, num_draws=500)
    assert not pb.conformal_interval(exact, x[:2], train=(x, y)).notes
    poor = pb.SVI(num_steps=20, compile=False).fit(toy_model(), *toy(), num_draws=100)
    with pytest.warns(UserWarning, match="draws are of SVI's approximation"):
        found = pb.conformal_interval(poor, toy()[0][:2], train=toy())
    assert not found.trusted


def test_too_few_rows_hold_everything():
    x, y = linear_data(10, gaussian_noise)
    posterior, *_ = conjugate(x[:8], y[:8], 0.5)
    with pytest.warns(UserWarning, match="8 rows cannot tell.*9 rows are the fewest"):
        found = pb.conformal_interval(posterior, x[8:], train=(x[:8], y[:8]))
    assert bool((found.lower == -torch.inf).all() and (found.width == torch.inf).all())


def test_what_makes_no_sense_is_refused_by_name():
    x, y = linear_data(20, gaussian_noise)
    posterior, *_ = conjugate(x, y, 0.5)
    cases = [
        ({}, "needs rows"),
        ({"train": (x, y), "alpha": 1.0}, "'alpha' must be > 0 and < 1"),
        ({"train": (x[:5], y[:5])}, "'train' has 5 rows but the posterior was fitted to 20"),
        ({"train": (x, y[:5])}, "as many inputs as targets"),
        ({"train": (x, y * torch.nan)}, "'y' holds 20 NaN"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            pb.conformal_interval(posterior, x, **options)
    with pytest.raises(TypeError, match="'train' must be the pair"):
        pb.conformal_interval(posterior, x, train=x)
    with pytest.raises(ValueError, match="use pyrobnn.conformal_interval"):
        pb.conformal_set(posterior, x, train=(x, y))
    none = pb.Posterior(posterior.model, posterior.draws, meta=posterior.meta | {"claim": "none"})
    with pytest.raises(pb.Refused, match="of no posterior"):
        pb.conformal_interval(none, x, train=(x, y))
    two = pb.BNN(toy_net(out=2), normal_prior(), pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)))
    fitted = pb.MAP(num_steps=5, compile=False).fit(two, *toy(out=2))
    with pytest.raises(pb.Refused, match="of one output, got 2"):
        pb.conformal_interval(fitted, toy()[0], calibration=toy(out=2))


def test_a_tempered_posterior_adds_a_row_as_it_weighs_the_others():
    rows = [torch.zeros(3, 4).double()]
    ranking = Ranking(rows, None, 1.0 / 2.0, 0.1)
    log_weights = ranking.log_weights(torch.tensor([0.0, 2.0, 4.0]).double()[:, None])
    torch.testing.assert_close(log_weights.diff(dim=0), torch.ones(2, 1).double())


@pytest.fixture(scope="module")
def table():
    with seeded():
        X = torch.randn(80, 1).double().numpy()
        return X, X[:, 0] + 0.5 * torch.randn(80).double().numpy()


@pytest.mark.filterwarnings("ignore:the draws are of")
def test_a_regressor_gives_conformal_intervals(table):
    X, y = table
    model = pb.BNNRegressor(
        pb.Laplace(num_steps=100, compile=False), hidden=(), num_draws=200, random_state=0
    )
    model.fit(X[:60], y[:60])
    found = model.predict_interval(X[60:], level=0.8, conformal=True)
    split = model.predict_interval(X[:5], level=0.8, conformal=(X[60:], y[60:]))
    assert found.shape == (20, 2) and split.shape == (5, 2) and (found[:, 0] < found[:, 1]).all()
    assert ((found[:, 0] <= y[60:]) & (y[60:] <= found[:, 1])).mean() >= 0.6
    with pytest.raises(ValueError, match="60 of the 80 calibration rows were in the fit"):
        model.predict_interval(X[:5], conformal=(X, y))
    with pytest.raises(TypeError, match="'conformal' must be"):
        model.predict_interval(X[:5], conformal="split")
    model.fit(X, y, sample_weight=[2] * 80)
    with pytest.raises(pb.Refused, match="rows with weights"):
        model.predict_interval(X[:5], conformal=True)


def test_a_classifier_gives_sets(table):
    X, y = table
    labels = (y > -1).astype(int) + (y > 1)
    model = pb.BNNClassifier(pb.MAP(num_steps=100, compile=False), hidden=(), random_state=0).fit(
        X[:60], labels[:60]
    )
    probs = model.predict_proba(X[60:])
    plain = model.predict_set(X[60:], level=0.8)
    sets = model.predict_set(X[60:], level=0.8, conformal=(X[40:60] + 1e-3, labels[40:60]))
    assert plain.dtype == bool and plain.shape == sets.shape == probs.shape
    assert ((plain * probs).sum(1) >= 0.8).all() and (plain.sum(1) >= 1).all()
    smallest = (probs * plain + 2.0 * ~plain).min(1)
    assert ((plain * probs).sum(1) - smallest < 0.8).all()  # none of its classes can be spared
