"""SMC against posteriors and evidences that are known, and what it says where it cannot know."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, assert_var_within, seeded
from models import diabetes_linear, diabetes_model, joined, normal_prior, toy, toy_model

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.smc import student_interval
from pyrobnn.inference.tempering import at_once, next_beta, parts, share, systematic
from pyrobnn.model.gradient import batched_gradient

NOISE = 0.3


def one_unit() -> tuple[pb.BNN, torch.Tensor, torch.Tensor]:
    """y = v tanh(w x): two modes that mirror each other."""
    x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
    generator = torch.Generator().manual_seed(0)
    y = 1.5 * torch.tanh(2 * x) + NOISE * torch.randn(
        x.shape, generator=generator, dtype=torch.float64
    )
    with seeded(0):
        layers = [
            torch.nn.Linear(1, 1, bias=False),
            torch.nn.Tanh(),
            torch.nn.Linear(1, 1, bias=False),
        ]
        net = torch.nn.Sequential(*layers).double()
    return pb.BNN(net, normal_prior(2.0), pb.likelihoods.HomoskedasticGaussian(NOISE)), x, y


def quadrature(x: torch.Tensor, y: torch.Tensor) -> float:
    grid = torch.linspace(-14, 14, 1401, dtype=torch.float64)
    w, v = torch.meshgrid(grid, grid, indexing="ij")
    prior = dist.Normal(0.0, 2.0)
    log_joint = prior.log_prob(w) + prior.log_prob(v)
    for one, target in zip(x[:, 0], y[:, 0], strict=True):
        log_joint = log_joint + dist.Normal(v * torch.tanh(w * one), NOISE).log_prob(target)
    return float(log_joint.logsumexp((0, 1))) + 2 * math.log(float(grid[1] - grid[0]))


def within(posterior: pb.Posterior, exact: float, nats: float) -> None:
    error = posterior.meta["log_evidence_error"]
    assert error < nats and abs(posterior.log_evidence - exact) < nats + 4 * error


@pytest.mark.slow
def test_the_evidence_and_both_modes_of_a_net_of_one_unit():
    model, x, y = one_unit()
    posterior = pb.SMC(num_particles=480, num_islands=8, max_leapfrogs=12, compile=False).fit(
        model, x, y
    )
    within(posterior, quadrature(x, y), 0.1)
    first = posterior.draws["net.0.weight"]
    assert first.shape == (8, 60, 1, 1)
    assert 0.25 < float((first > 0).double().mean()) < 0.75  # of 480 particles from few ancestors
    assert (
        posterior.meta["log_evidence_kind"] == "smc"
        and len(posterior.meta["log_evidence_by_island"]) == 8
    )
    assert pb.diagnose(posterior.to_datatree(x, y)).draws == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_default_evidence_is_within_a_tenth_of_a_nat(seed):
    model, x, y = one_unit()
    posterior = pb.SMC().fit(model, x, y, seed=seed)
    assert abs(posterior.log_evidence - quadrature(x, y)) < 0.1
    truth = diabetes_linear()
    posterior = pb.SMC().fit(diabetes_model(), truth["x"], truth["y"], seed=seed)
    assert abs(posterior.log_evidence - float(truth["log_evidence"])) < 0.15
    assert posterior.meta["log_evidence_error"] < 0.1


@pytest.mark.slow
def test_the_draws_of_a_linear_model_are_of_its_posterior():
    truth = diabetes_linear()
    posterior = pb.SMC().fit(diabetes_model(), truth["x"], truth["y"], seed=0, num_draws=2000)
    draws = joined(posterior.draws)
    assert draws.shape == (4, 2000, 11)
    assert_mean_within(draws, truth["mean"])
    assert_var_within(draws, truth["cov"].diagonal(), mean=truth["mean"])


def conjugate(x, y):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)


def scaled(x, y):
    with pyro.poutine.scale(scale=0.5):
        mean = pyro.sample("mean", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y)


DATA = torch.tensor([[0.5, -1.0, 3.0], [0.1, -2.0, 2.0]])


def test_the_evidence_of_a_program_whatever_the_number_of_draws():
    config = pb.SMC(num_particles=400, max_leapfrogs=8, compile=False)
    exact = float(
        dist.MultivariateNormal(torch.zeros(2), torch.eye(2) + 4.0).log_prob(DATA.T).sum()
    )
    few, many = (config.fit(conjugate, None, DATA, num_draws=count) for count in (30, 150))
    assert few.log_evidence == many.log_evidence and few.draws["mean"].shape == (4, 30, 3)
    within(few, exact, 0.2)
    assert many.num_draws == 150 and many.sample_stats["ancestor"].shape == (4, 150)
    mean = DATA.sum(0) / (2 + 0.25)
    assert_mean_within(many.draws["mean"], mean, min_ess=100)
    assert 1 < few.sample_stats["ancestor"].unique().numel() <= 100
    assert (
        few.meta["num_temperatures"] == len(few.history["beta"])
        and float(few.history["beta"][-1]) == 1.0
    )


def test_the_parts_of_the_density_add_up_to_the_joint():
    density = pb.Density(scaled, (None, DATA))
    for z in density.sample_prior(3, seed=0):
        base, rest = parts(density, z)
        torch.testing.assert_close(base + rest, density.log_joint(z))
        values = density.constrain(z)
        prior = dist.Normal(0.0, 2.0).log_prob(values["mean"]).sum() + dist.HalfNormal(
            1.0
        ).log_prob(values["noise"])
        torch.testing.assert_close(
            base, (prior + density.log_jacobian(z)).double(), rtol=1e-5, atol=1e-5
        )


def test_the_ladder_and_the_resampling():
    generator = torch.Generator().manual_seed(0)
    log_likelihood = 50 * torch.randn(2, 500, generator=generator, dtype=torch.float64)
    beta = next_beta(log_likelihood, 0.2, 0.6)
    assert 0.2 < beta < 1 and float(share(log_likelihood, beta - 0.2).mean()) == pytest.approx(
        0.6, abs=1e-6
    )
    assert next_beta(log_likelihood / 1e4, 0.2, 0.6) == 1.0
    log_likelihood[:, 100:] = -torch.inf  # the share is of those at which the data are possible
    assert 0.2 < next_beta(log_likelihood, 0.2, 0.6) < 1
    weights = torch.rand(3, 40, generator=generator, dtype=torch.float64)
    weights[:, 30:] = 0.0
    weights /= weights.sum(1, keepdim=True)
    index = systematic(weights, 400, torch.tensor([0.0, 0.5, 1 - 1e-12], dtype=torch.float64))
    counts = torch.stack([each.bincount(minlength=40) for each in index])
    assert bool(((counts - 400 * weights).abs() < 1).all()) and bool((index.diff() >= 0).all())


def test_chains_of_nuts_start_in_islands_of_particles():
    x, y = toy(10)
    config = pb.SMC(num_particles=40, max_leapfrogs=4, max_moves=2, ess=0.5, compile=False)
    short = {"num_warmup": 2, "trajectory": 1, "step_size": 1e-3, "compile": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        particles = config.fit(toy_model(), x, y)
        four = pb.NUTS(num_chains=4, **short).fit(toy_model(), x, y, num_draws=4, init=particles)
    assert not four.meta["common_start"]
    # steps this short leave a chain beside the particle of its island
    starts = particles.draws["net.0.bias"]
    weights = four.draws["net.0.bias"][:, 0]
    distance = (starts - weights[:, None, None]).square().sum(-1).amin(2)  # (chain, island)
    assert distance.argmin(1).tolist() == [0, 1, 2, 3]


def improper(x, y):
    where = pyro.sample("where", dist.ImproperUniform(dist.constraints.real, (), ()))
    pyro.sample("y", dist.Normal(where, 1.0), obs=torch.tensor(0.0))


def masked(x, y):
    with pyro.poutine.mask(mask=torch.tensor(False)):
        where = pyro.sample("where", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(where, 1.0), obs=torch.tensor(0.0))


def impossible(x, y):
    where = pyro.sample("where", dist.Normal(0.0, 1.0))
    pyro.factor("nowhere", torch.where(where > 100.0, 0.0, -torch.inf))


def far(x, y):
    where = pyro.sample("where", dist.Normal(torch.zeros(20), 1e6).to_event(1))
    pyro.sample("y", dist.Normal(where, 1e-6).to_event(1), obs=torch.zeros(20))


def test_what_has_no_path_from_the_prior_is_refused_in_words(monkeypatch):
    monkeypatch.setattr("pyrobnn.inference.smc._MAX_TEMPERATURES", 5)
    config = pb.SMC(num_particles=40, max_moves=1, max_leapfrogs=1, compile=False)
    for program, words in (
        (improper, "prior of 'where' is improper .*use NUTS"),
        (masked, "prior of 'where' is improper"),
        (impossible, "in none of an island's 10 draws"),
        (far, "5 temperatures led to beta = .* too far"),
    ):
        with pytest.raises(pb.Refused, match=words):
            config.fit(program)


def steep(x, y):
    where = pyro.sample("where", dist.Normal(torch.zeros(20), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(where, 0.02).to_event(1), obs=torch.full((20,), 2.0))


def test_particles_that_lag_behind_say_so():
    exact = float(20 * dist.Normal(0.0, math.sqrt(1 + 0.02**2)).log_prob(torch.tensor(2.0)))
    with warnings.catch_warnings():  # the islands' spread may be warned of too
        warnings.simplefilter("ignore")
        posterior = pb.SMC(num_particles=80, ess=0.5, max_leapfrogs=10, compile=False).fit(steep)
    assert any(
        re.search("lag behind the posterior, many of the draws .* too low by", each)
        for each in posterior.meta["warnings"]
    )
    assert posterior.log_evidence < exact


def test_one_island_says_that_it_knows_no_error():
    config = pb.SMC(num_particles=300, num_islands=1, max_leapfrogs=8, compile=False)
    with pytest.warns(UserWarning, match="a single island shows neither the error"):
        posterior = config.fit(conjugate, None, DATA)
    assert posterior.meta["log_evidence_error"] is None and posterior.num_chains == 1
    assert (
        not pb.NUTS(num_chains=2, num_warmup=2, trajectory=1, compile=False)
        .fit(conjugate, None, DATA, init=posterior, num_draws=4)
        .meta["common_start"]
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:at one temperature after the other"
)  # few particles, for an equality
def test_compiled_is_eager():
    config = pb.SMC(num_particles=40, num_islands=2, max_leapfrogs=2, max_moves=2, ess=0.5)
    fits = [
        replace(config, compile=compile).fit(conjugate, None, DATA) for compile in (True, False)
    ]
    assert fits[0].log_evidence == pytest.approx(fits[1].log_evidence, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_particles": 4}, "'num_particles' must be at least 8"),
        ({"num_particles": 10}, "must be a multiple of num_islands=4, got 10"),
        ({"num_islands": 0}, "'num_islands' must be at least 1"),
        ({"ess": 1.0}, "'ess' must be > 0 and < 1"),
        ({"max_moves": 0}, "'max_moves' must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        pb.SMC(**options)


@pytest.mark.parametrize("num_islands", [2, 4, 8])
def test_the_interval_of_the_evidence_covers_what_it_says(num_islands):
    """The standard error of four islands is off by more than three in one run of seventeen: Student's t knows."""
    covered = 0
    runs = 2000
    draws = torch.randn(
        runs, num_islands, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    for islands in 1e-3 * draws:  # so small that the log of the mean is the mean of the logs
        low, high = student_interval(islands)
        covered += low <= 0.0 <= high
    assert covered / runs == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / runs) ** 0.5)


def uneven_modes(x, y):
    """Four fifths of the mass near zero, one fifth near twenty: no chain goes from one to the other."""
    modes = dist.Normal(torch.tensor([0.0, 20.0]), torch.tensor([1.0, 0.5]))
    where = pyro.sample("where", dist.Normal(10.0, 20.0))
    mass = torch.tensor([0.8, 0.2]) / dist.Normal(10.0, 20.0).log_prob(modes.mean).exp()
    pyro.factor("modes", dist.MixtureSameFamily(dist.Categorical(mass), modes).log_prob(where))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(have not mixed|warm-up was not finished)")
def test_particles_weight_the_modes_that_chains_cannot_leave():
    """What is advised where chains disagree. Chains that start at particles would agree on the greater mode alone."""
    chains = pb.NUTS(num_warmup=30, trajectory=3, compile=False).fit(
        uneven_modes, num_draws=150, seed=1
    )
    assert "chains_disagree" in [each["code"] for each in chains.meta["findings"]]
    config = pb.SMC(num_particles=800, max_leapfrogs=8, max_moves=4, compile=False)
    share = (config.fit(uneven_modes).draws["where"] > 10.0).double().mean(1)
    error = float(share.std()) / len(share) ** 0.5
    assert abs(float(share.mean()) - 0.2) < 4 * error + 0.01 and error < 0.05


def test_large_activations_are_kept_in_the_cache():
    net = pb.networks.mlp(13, (50,), seed=0)
    prior = pb.priors.FanInNormal()
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(0.3))
    problem = prepare(model, torch.zeros(455, 13), torch.zeros(455), points="held")
    z = problem.density.sample_prior(64, seed=0)
    gradient, _ = batched_gradient(problem.density.log_joint, z)
    assert at_once(gradient, z) == 16  # 455 x 50 activations a particle
    assert at_once(gradient, z[:8]) == 8
