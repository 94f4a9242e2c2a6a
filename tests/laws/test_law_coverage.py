"""The law: what a default says holds of new rows, from half a row per weight to many, or it says that it may not."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from sklearn.linear_model import BayesianRidge, LogisticRegression

import pyrobnn as pb
from pyrobnn.estimators import auto

INPUTS = 21
HIDDEN = 20
NEW = 2000
#: of 90 % intervals; 2,000 new rows, but one draw of the training rows
COVERAGE = (0.80, 0.99)
#: nats by which the mean log density may fall short of a linear model's
BEHIND = 0.2
REGRESSORS = {
    "inferred": {},
    "learned": {"noise": "learned"},
    "heteroskedastic": {"noise": "heteroskedastic"},
    "student_t": {"likelihood": pb.likelihoods.StudentT()},
    "given": {"likelihood": pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))},
}


def rows(num: int, seed: int, noise: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """A weak signal among inputs that say nothing: what a net with too little noise follows."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num, INPUTS))
    return x, x[:, 0] + 0.5 * np.sin(3 * x[:, 1]) + noise * generator.normal(size=num)


def told(fit) -> tuple[object, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = fit()
    return fitted, [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.5, 2, 8])
@pytest.mark.parametrize("kind", REGRESSORS)
def test_intervals_of_the_regressor_hold_or_it_warns(kind, ratio):
    heads = 2 if kind == "heteroskedastic" else 1
    num = int(ratio * ((INPUTS + 1) * HIDDEN + (HIDDEN + 1) * heads))
    x, y = rows(num + NEW, seed=100)
    model = pb.BNNRegressor(
        hidden=(HIDDEN,), random_state=0, compile=False, num_draws=200, **REGRESSORS[kind]
    )
    fitted, notes = told(lambda: model.fit(x[:num], y[:num]))
    interval = fitted.predict_interval(x[num:])
    covered = ((y[num:] >= interval[:, 0]) & (y[num:] <= interval[:, 1])).mean()
    density = (
        fitted.posterior_.predict(torch.tensor(x[num:]))
        .log_prob(torch.tensor(y[num:, None]))
        .mean()
    )
    mean, scale = BayesianRidge().fit(x[:num], y[:num]).predict(x[num:], return_std=True)
    line = torch.distributions.Normal(torch.tensor(mean), torch.tensor(scale)).log_prob(
        torch.tensor(y[num:])
    )
    assert COVERAGE[0] <= covered <= COVERAGE[1] or notes, covered
    assert density > line.mean() - BEHIND or notes, (density, line.mean())


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [(HIDDEN,), None])
@pytest.mark.parametrize("ratio", [0.5, 2, 8])
@pytest.mark.parametrize("signal", [0.0, 1.0, 6.0])
def test_probabilities_of_the_classifier_are_no_worse_than_those_of_a_linear_one(
    signal, ratio, hidden
):
    num = int(ratio * ((INPUTS + 1) * HIDDEN + (HIDDEN + 1) * 2))
    generator = np.random.default_rng(100)
    x = generator.normal(size=(num + NEW, INPUTS))
    odds = signal * (x[:, 0] + 0.5 * np.sin(3 * x[:, 1]))
    y = (generator.uniform(size=num + NEW) < 1 / (1 + np.exp(-odds))).astype(int)
    fitted, notes = told(
        lambda: pb.BNNClassifier(hidden=hidden, random_state=0, compile=False).fit(x[:num], y[:num])
    )
    linear = LogisticRegression(C=1e6 if signal == 6 else 1.0, max_iter=1000).fit(x[:num], y[:num])

    def loss(probs: np.ndarray) -> float:
        return float(-np.log(probs[np.arange(NEW), y[num:]]).mean())

    probs = fitted.predict_proba(x[num:])
    confidence = probs.max(1).mean() - (probs.argmax(1) == y[num:]).mean()
    assert loss(probs) < loss(linear.predict_proba(x[num:])) + 0.03 or notes
    assert abs(confidence) < 0.06 or notes, confidence


@pytest.mark.parametrize("told_apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_prior_of_a_classifier_is_as_wide_as_its_classes_can_be_told_apart(
    told_apart, monkeypatch
):
    """60 rows for 50 weights: at the mode of the declared prior 0.61 sure of nothing, or a loss of 0.21."""
    search = pb.MAP(num_steps=40, lr=0.05, polish_steps=30, compile=False)
    short = pb.Laplace(tune="marginal_likelihood", map=search)
    monkeypatch.setattr(
        "pyrobnn.estimators.estimator.choose", lambda *sizes, **options: (short, "short")
    )
    generator = np.random.default_rng(1 - told_apart)
    x = generator.normal(size=(460, 5))
    y = (x[:, 0] > 0) if told_apart else generator.uniform(size=460) < 0.5
    fitted = pb.BNNClassifier(hidden=(6,), random_state=0, num_draws=200).fit(x[:60], y[:60])
    probs = fitted.predict_proba(x[60:])
    loss = float(-np.log(probs[np.arange(400), y[60:].astype(int)]).mean())
    # the frequencies of the classes, and what a linear model could not be sure of
    assert loss < 0.15 if told_apart else abs(probs[:, 1] - y[:60].mean()).max() < 0.06, probs
    assert fitted.posterior_.meta["tuned"]["prior_precision_factor"].keys() == {"net.0", "net.2"}


@pytest.mark.slow
def test_of_many_rows_the_widths_are_found_on_a_part_and_the_mode_on_all(monkeypatch):
    search = pb.MAP(num_steps=40, lr=0.05, polish_steps=30, compile=False)
    short = pb.Laplace(tune="marginal_likelihood", map=search)
    monkeypatch.setattr(
        "pyrobnn.estimators.estimator.choose", lambda *sizes, **options: (short, "short")
    )
    monkeypatch.setattr("pyrobnn.estimators.fits.MAX_TRIED_ROWS", 60)
    generator = np.random.default_rng(1)
    x = generator.normal(size=(120, 5))
    y = generator.uniform(size=120) < 0.5
    fitted = pb.BNNClassifier(hidden=(6,), random_state=0, num_draws=200).fit(x, y)
    assert (
        "of 60 of 120 rows" in fitted.method_reason_ and fitted.posterior_.meta["num_data"] == 120
    )
    assert (
        abs(fitted.predict_proba(x)[:, 1] - y.mean()).max() < 0.06
    )  # nothing is known of the labels


def followed(noise) -> tuple[pb.BNN, torch.Tensor, torch.Tensor]:
    """300 rows and 500 new ones for 691 weights."""
    x, y = (torch.tensor(part, dtype=torch.float32) for part in rows(800, 1, noise=0.5))
    net = pb.networks.mlp(INPUTS, (30,), seed=0)
    likelihood = pb.likelihoods.HomoskedasticGaussian(noise)
    return pb.BNN(net, pb.priors.FanInNormal(), likelihood), x, y[:, None]


METHODS = [
    pb.MLE(compile=False),
    pb.MAP(compile=False),
    pb.DeepEnsemble(num_members=3, compile=False),
    pb.MCDropout(p=0.05, compile=False),
    pb.SWAG(compile=False),
    pb.SVI(compile=False),
    pb.Laplace(compile=False),
    pb.Laplace(tune="marginal_likelihood", compile=False),
    pb.SGHMC(compile=False),
]


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["learned", "inferred"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_intervals_of_every_methods_defaults_hold_or_it_warns(method, noise):
    model, x, y = followed("learned" if noise == "learned" else dist.HalfNormal(1.0))
    posterior, _ = told(lambda: method.fit(model, x[:300], y[:300]))
    low, high = posterior.predict(x[300:]).quantile(torch.tensor([0.05, 0.95]))
    covered = ((y[300:] >= low) & (y[300:] <= high)).float().mean()
    verdict = pb.diagnose(posterior.to_datatree(x[:300], y[:300]))
    assert COVERAGE[0] <= covered <= COVERAGE[1] or verdict.status != "pass"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["heteroskedastic", "student_t"])
def test_noise_does_not_go_down_with_the_residuals_of_a_net_that_follows_the_data(
    kind, monkeypatch
):
    """The law's small case: 100 rows for 85 or 90 weights."""
    search = pb.MAP(num_steps=300, polish_steps=50, compile=False)
    short = pb.Laplace(tune="marginal_likelihood", map=search)
    if kind == "heteroskedastic":
        short = dataclasses.replace(
            auto.choose(100, 90, 2, varying=True, compile=False)[0], num_warmup=500
        )
    monkeypatch.setattr(
        "pyrobnn.estimators.estimator.choose", lambda *sizes, **options: (short, "short")
    )
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 15))
    y = x[:, 0] + generator.normal(size=400)
    model = pb.BNNRegressor(hidden=(5,), random_state=0, num_draws=50, **REGRESSORS[kind])
    fitted, _ = told(lambda: model.fit(x[:100], y[:100]))
    interval = fitted.predict_interval(x[100:])
    covered = ((y[100:] >= interval[:, 0]) & (y[100:] <= interval[:, 1])).mean()
    assert COVERAGE[0] <= covered <= COVERAGE[1]


@pytest.mark.slow
def test_each_output_has_a_noise_of_its_own(monkeypatch):
    """A line leaves of the first what a net explains, of the second the noise: they went down together, .72 of 90 %."""
    search = pb.MAP(num_steps=60, lr=0.05, polish_steps=20, compile=False)
    short = pb.Laplace(tune="marginal_likelihood", map=search)
    monkeypatch.setattr(
        "pyrobnn.estimators.estimator.choose", lambda *sizes, **options: (short, "short")
    )
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1100, 2))
    noise = generator.normal(size=(1100, 2))
    y = np.stack(
        [1e-6 * (np.sin(2 * x[:, 0]) + 0.3 * noise[:, 0]), 1e5 * (x[:, 1] + noise[:, 1])], 1
    )
    model = pb.BNNRegressor(hidden=(5,), random_state=0, num_draws=200)
    fitted, _ = told(lambda: model.fit(x[:100], y[:100]))
    interval = fitted.predict_interval(x[100:])
    covered = ((y[100:] >= interval[..., 0]) & (y[100:] <= interval[..., 1])).mean(0)
    assert (covered > 0.85).all() and (covered < 0.95).all(), covered
    first, second = fitted.method_reason_.partition("noise ")[2].split(" times")[0].split(", ")
    assert float(first) < 0.75 and float(second) > 0.9


def _noisy(kind: str, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables whose noise grows along a column, has two sizes by another, or is the same everywhere."""
    generator = np.random.default_rng(seed)
    columns = {"grows": 2, "by a column": 5, "constant": 20}[kind]
    x = generator.normal(size=(num, columns))
    mean = x[:, 0] + np.sin(2 * x[:, 1])
    scale = {
        "grows": 0.3 * np.exp(0.5 * x[:, 0]),
        "by a column": np.where(x[:, -1] > 0, 1.0, 0.2),
        "constant": np.full(num, 0.5),
    }
    return x, mean + scale[kind] * generator.normal(size=num)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num"), [("grows", 150), ("by a column", 500), ("constant", 250)])
def test_intervals_of_a_net_that_gives_the_noise_hold_at_its_defaults(kind, num):
    """Within three errors of 90 % of as many rows as the fit has seen: of those of another draw it knows no more."""
    x, y = _noisy(kind, num + NEW, seed=3)
    model = pb.BNNRegressor(noise="heteroskedastic", random_state=0, compile=False)
    fitted, _ = told(lambda: model.fit(x[:num], y[:num]))
    low, high = fitted.predict_interval(x[num:]).T
    covered = ((y[num:] >= low) & (y[num:] <= high)).mean()
    assert abs(covered - 0.9) < 3 * (0.09 / num) ** 0.5, covered
