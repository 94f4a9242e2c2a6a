"""SGLD and SGHMC: their stationary distributions, where known exactly, and their laws."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, assert_var_within, seeded
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.sgmcmc import SGHMC, SGLD
from pyrobnn.likelihoods import HomoskedasticGaussian
from pyrobnn.model import BNN
from pyrobnn.priors import IIDPrior

PRECISION = torch.tensor([1.0, 4.0], dtype=torch.float64)
MEAN = torch.tensor([1.0, -2.0], dtype=torch.float64)


def gaussian(x=None, y=None):
    pyro.sample("z", dist.Normal(MEAN, PRECISION.rsqrt()).to_event(1))


def skewed(x=None, y=None):
    pyro.sample("z", dist.Gamma(torch.tensor(4.0, dtype=torch.float64), 2.0))


def linear_model():
    with seeded(0):
        net = torch.nn.Linear(10, 1).double()
    return BNN(net, IIDPrior(dist.Normal(0.0, 1.0)), HomoskedasticGaussian(0.7))


@pytest.fixture(scope="module")
def diabetes():
    """Standardised x, y and the exact posterior (mean, covariance) of weight and bias."""
    bunch = load_diabetes(scaled=False)
    x = torch.tensor(bunch.data)
    y = torch.tensor(bunch.target)[:, None]
    x, y = ((value - value.mean(0)) / value.std(0, correction=0) for value in (x, y))
    design = torch.cat([x, torch.ones_like(y)], 1)
    precision = design.T @ design / 0.49 + torch.eye(11, dtype=x.dtype)
    covariance = torch.linalg.inv(precision)
    return x, y, covariance @ design.T @ y[:, 0] / 0.49, covariance


def coefficients(posterior):
    return torch.cat([posterior.draws["net.weight"].flatten(2), posterior.draws["net.bias"]], -1)


def whitened(posterior, mean, covariance):
    """Draws in the posterior's own axes: standard normal if exact, slowest direction first."""
    values, vectors = torch.linalg.eigh(covariance)
    return (coefficients(posterior) - mean) @ vectors / values.sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("step_size", [pytest.param(0.1, marks=pytest.mark.slow), 0.4])
def test_sgld_has_the_variance_of_its_discretisation(step_size):
    config = SGLD(num_chains=64, num_warmup=400, step_size=step_size, thinning=20)
    draws = config.fit(gaussian, num_draws=150, seed=1).draws["z"]
    assert_mean_within(draws, MEAN)
    assert_var_within(draws, 1 / (PRECISION * (1 - step_size * PRECISION / 4)), mean=MEAN.numpy())


def test_sghmc_leaves_a_gaussian_invariant_at_a_large_step():
    config = SGHMC(num_chains=64, num_warmup=400, step_size=0.5, friction=0.5, thinning=10)
    draws = config.fit(gaussian, num_draws=150, seed=2).draws["z"]
    assert_mean_within(draws, MEAN)
    assert_var_within(draws, 1 / PRECISION, mean=MEAN.numpy())


@pytest.mark.slow
def test_temperature_widens_and_is_recorded():
    config = SGHMC(num_chains=64, num_warmup=400, step_size=0.5, friction=0.5, temperature=2.0)
    posterior = config.fit(gaussian, num_draws=150, seed=3)
    assert_var_within(posterior.draws["z"], 2 / PRECISION, mean=MEAN.numpy())
    assert posterior.meta["temperature"] == 2.0 and posterior.meta["iid"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            SGLD(num_chains=64, num_warmup=1000, step_size=0.005, thinning=100),
            marks=pytest.mark.slow,
            id="sgld",
        ),
        pytest.param(
            SGHMC(num_chains=64, num_warmup=1000, step_size=0.01, thinning=50), id="sghmc"
        ),
        pytest.param(
            SGLD(
                num_chains=64,
                num_warmup=1000,
                step_size=0.005,
                thinning=100,
                preconditioner="rmsprop",
            ),
            marks=pytest.mark.slow,
            id="psgld",
        ),
    ],
)
def test_a_skewed_positive_target_needs_the_jacobian(config):
    draws = config.fit(skewed, num_draws=40, seed=4).draws["z"]
    assert_mean_within(draws, 2.0)
    assert_var_within(draws, 1.0, mean=2.0)


@pytest.mark.slow
def test_the_preconditioner_leaves_the_target():
    steep = torch.tensor([1.0, 0.05], dtype=torch.float64)

    def program(x=None, y=None):
        pyro.sample("z", dist.Normal(torch.zeros_like(steep), steep).to_event(1))

    config = SGHMC(
        num_chains=64,
        num_warmup=600,
        step_size=0.02,
        friction=0.3,
        thinning=20,
        preconditioner="rmsprop",
    )
    draws = config.fit(program, num_draws=150, seed=5).draws["z"]
    assert_var_within(draws, steep**2, mean=0.0)


@pytest.mark.slow
def test_sghmc_recovers_the_conjugate_posterior(diabetes):
    x, y, mean, covariance = diabetes
    config = SGHMC(
        num_chains=32, num_warmup=1500, step_size=0.2, friction=0.1, thinning=30, init_steps=0
    )
    draws = whitened(config.fit(linear_model(), x, y, num_draws=100, seed=6), mean, covariance)
    assert_mean_within(draws, 0.0)
    assert_var_within(draws, 1.0, mean=0.0)


@pytest.mark.slow
def test_the_mini_batch_bias_shrinks_with_the_step_size(diabetes):
    x, y, mean, covariance = diabetes
    excess = []
    for step_size in (0.08, 0.02):
        config = SGLD(
            num_chains=32,
            num_warmup=2000,
            step_size=step_size,
            thinning=50,
            batch_size=64,
            init_steps=0,
        )
        posterior = config.fit(linear_model(), x, y, num_draws=60, seed=7)
        # the slowest direction has not mixed after so few steps: look at the others
        draws = whitened(posterior, mean, covariance)[..., :9]
        assert_mean_within(draws[..., :8], 0.0)
        excess.append(float(draws.square().mean()) - 1)
    assert excess[0] > 0.1
    assert excess[1] < 0.4 * excess[0]


def test_the_mini_batch_gradient_averages_to_the_full_one(diabetes):
    x = diabetes[0][:440]
    y = diabetes[1][:440]
    density = prepare(linear_model(), x, y, points="held").density
    gradient = torch.func.grad(density.log_joint)
    z = density.sample_prior(1, seed=0)[0]
    parts = [gradient(z, x[rows], y[rows]) for rows in torch.arange(440).split(44)]
    torch.testing.assert_close(torch.stack(parts).mean(0), gradient(z), rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("method", [pytest.param(SGLD, marks=pytest.mark.slow), SGHMC])
@pytest.mark.parametrize("batch_size", [pytest.param(None, marks=pytest.mark.slow), 32])
@pytest.mark.filterwarnings("ignore:.*of the draws")
def test_compiled_is_eager(diabetes, method, batch_size):
    x, y, *_ = diabetes
    settings = {
        "num_chains": 3,
        "num_warmup": 20,
        "thinning": 2,
        "batch_size": batch_size,
        "step_size": 0.01,
    }
    settings["init_steps"] = 0
    fast = method(**settings, preconditioner="rmsprop").fit(
        linear_model(), x, y, num_draws=5, seed=8
    )
    slow = method(**settings, preconditioner="rmsprop", compile=False).fit(
        linear_model(), x, y, num_draws=5, seed=8
    )
    torch.testing.assert_close(coefficients(fast), coefficients(slow), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(fast.sample_stats["lp"], slow.sample_stats["lp"])


@pytest.mark.filterwarnings("ignore:.*of the draws")
def test_lp_is_the_full_log_joint_and_chains_differ(diabetes):
    x, y, *_ = diabetes
    posterior = SGLD(
        num_chains=2,
        num_warmup=5,
        thinning=1,
        batch_size=16,
        step_size=0.01,
        init_steps=0,
        compile=False,
    ).fit(linear_model(), x, y, num_draws=3, seed=9)
    density = prepare(linear_model(), x, y, points="held").density
    z = density.unconstrain(posterior.draws)
    expected = torch.stack([density.log_joint(one) for one in z.flatten(0, 1)]).reshape(2, 3)
    torch.testing.assert_close(posterior.sample_stats["lp"], expected)
    assert float((coefficients(posterior)[0] - coefficients(posterior)[1]).abs().min()) > 0


@pytest.mark.filterwarnings("ignore:.*of the draws")
def test_starts_at_a_net_or_a_posterior(diabetes):
    x, y, *_ = diabetes
    tiny = {"num_chains": 2, "num_warmup": 0, "thinning": 1, "step_size": 1e-12, "compile": False}
    with seeded(3):
        net = torch.nn.Linear(10, 1).double()
    first = SGLD(**tiny).fit(linear_model(), x, y, num_draws=1, init=net)
    torch.testing.assert_close(
        first.draws["net.weight"][1, 0], net.weight.detach(), atol=1e-5, rtol=0
    )
    again = SGHMC(**tiny).fit(linear_model(), x, y, num_draws=1, init=first)
    torch.testing.assert_close(
        again.draws["net.weight"][0, 0], net.weight.detach(), atol=1e-5, rtol=0
    )
    with pytest.raises(TypeError, match="'init' must be a Posterior"):
        SGLD(**tiny).fit(linear_model(), x, y, num_draws=1, init="map")
    with seeded(3):
        other = torch.nn.Linear(3, 1).double()
    with pytest.raises(ValueError, match="other parameters than the model's"):
        SGLD(**tiny).fit(linear_model(), x, y, num_draws=1, init=other)


@pytest.mark.filterwarnings("ignore:.*of the draws")
def test_a_loader_with_a_smaller_last_batch(diabetes):
    x, y, *_ = diabetes
    loader = DataLoader(TensorDataset(x, y), batch_size=100)
    posterior = SGLD(num_chains=2, num_warmup=4, thinning=2, init_steps=20, compile=False).fit(
        linear_model(), loader, num_draws=4
    )
    assert posterior.meta["num_data"] == 442 and posterior.num_draws == 4


def test_divergence_names_step_and_step_size(diabetes):
    x, y, *_ = diabetes
    with pytest.raises(FloatingPointError, match=r"by step \d+ .* reduce step_size \(now 50\)"):
        SGLD(step_size=50.0, num_chains=2, init_steps=0, compile=False).fit(linear_model(), x, y)


@pytest.mark.filterwarnings("ignore:.*of the draws")
def test_a_callback_stops_the_run_and_keeps_what_was_drawn(diabetes):
    x, y, *_ = diabetes
    seen = []

    def stop(step, metrics):
        seen.append((step, metrics["loss"]))
        return step >= 60

    config = SGLD(num_chains=2, num_warmup=20, thinning=4, init_steps=20, compile=False)
    posterior = config.fit(linear_model(), x, y, num_draws=50, callbacks=(stop,))
    assert posterior.num_draws == (seen[-1][0] - 20) // 4
    assert posterior.sample_stats["step_size"].shape == (2, posterior.num_draws)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_chains": 0}, "'num_chains' must be at least 1"),
        ({"step_size": -1.0}, "'step_size' must be > 0"),
        ({"temperature": 0.0}, "'temperature' must be > 0"),
        ({"preconditioner": "adam"}, "'preconditioner' must be one of"),
        ({"preconditioner": "rmsprop", "num_warmup": 0}, "learnt during warm-up"),
        ({"batch_size": 0}, "'batch_size' must be at least 1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        SGLD(**settings)


def test_friction_and_sub_sampling_are_checked():
    with pytest.raises(ValueError, match="'friction' must be"):
        SGHMC(friction=1.5)
    with pytest.raises(ValueError, match="leave 'batch_size' out"):
        SGLD(batch_size=3).fit(gaussian)


def step_model():
    with seeded(0):
        net = pb.networks.mlp(1, (20,))
    return BNN(net, IIDPrior(dist.Normal(0.0, 1.0)), HomoskedasticGaussian(dist.HalfNormal(1.0)))


@pytest.mark.slow
@pytest.mark.parametrize("method", [SGLD, SGHMC])
def test_the_defaults_beat_a_linear_fit(method):
    # neither a start nor a step size is given: a fixed one, from steep draws of the prior, sent the chains far away
    x = torch.linspace(-2, 2, 60)[:, None]
    with seeded(0):
        y = x + x**2 + 0.1 * torch.randn(60, 1)
    config = method(num_chains=2, num_warmup=150, thinning=5, init_steps=300, compile=False)
    posterior = config.fit(step_model(), x, y, num_draws=10)
    design = torch.cat([x, torch.ones_like(x)], 1)
    linear = design @ torch.linalg.lstsq(design, y).solution
    assert (posterior.predict(x).mean - y).square().mean() < 0.3 * (linear - y).square().mean()
    assert posterior.meta["step_size"] > 0 and posterior.meta["warnings"] == []
    if method is SGHMC:
        assert posterior.meta["kinetic_temperature"] == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(
    ("method", "batch_size"), [(SGHMC, None), (SGLD, None), (SGLD, 64), (SGHMC, 64)]
)
@pytest.mark.slow
def test_a_chosen_step_size_samples_the_conjugate_posterior(diabetes, method, batch_size):
    x, y, mean, covariance = diabetes
    config = method(
        num_chains=32, num_warmup=200, thinning=20, batch_size=batch_size, init_steps=100
    )
    posterior = config.fit(linear_model(), x, y, num_draws=40, seed=6)
    largest = float(torch.linalg.eigvalsh(covariance).reciprocal().max())
    if batch_size is None:  # the curvature is known here
        assert posterior.meta["step_size"] == pytest.approx(
            config.share * len(x) / largest, rel=0.05
        )
    draws = whitened(posterior, mean, covariance)[..., :8]
    # biased by the heat that the choice allows, a tenth, and not much more
    assert 0.85 < float(draws.square().mean()) < 1.2
    assert float(draws.mean((0, 1)).abs().max()) < 0.25


@pytest.mark.slow
def test_chains_that_stray_go_back_with_smaller_steps():
    def quartic(x=None, y=None):  # flat where the curvature is first looked at, steep further out
        z = pyro.sample("z", dist.Normal(torch.zeros(4, dtype=torch.float64), 1e3).to_event(1))
        pyro.factor("wall", -(z**4).sum())

    posterior = SGHMC(num_chains=4, num_warmup=400, compile=False).fit(quartic, num_draws=50)
    # E[z²] of exp(-z⁴) is Γ(3/4) / Γ(1/4)
    assert float(posterior.draws["z"].square().mean()) == pytest.approx(0.338, rel=0.4)


@pytest.mark.slow
def test_heat_is_measured(diabetes):
    x, y, *_ = diabetes
    hot = SGHMC(
        num_chains=4, num_warmup=100, batch_size=8, step_size=0.3, friction=0.05, init_steps=0
    )
    posterior = hot.fit(linear_model(), x, y, num_draws=50)
    assert posterior.meta["kinetic_temperature"] > 1.2


def test_chains_whose_energy_no_step_size_conserves_are_refused(diabetes, monkeypatch):
    x, y, *_ = diabetes
    monkeypatch.setattr("pyrobnn.inference.langevin.StepSize.diverged", lambda *_: True)
    with pytest.raises(FloatingPointError, match="at each of 9 step sizes"):
        SGHMC(num_chains=2, num_warmup=20, init_steps=5, compile=False).fit(
            linear_model(), x, y, num_draws=10
        )
