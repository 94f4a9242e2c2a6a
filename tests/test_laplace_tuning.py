"""Tuned prior precision and noise against brute force: refits of the evidence on scaled models at the same mode."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from models import diabetes_linear, normal_prior, toy, toy_net
from scipy import optimize

import pyrobnn as pb
from pyrobnn.inference import laplace_tuning
from pyrobnn.inference.laplace import Laplace
from pyrobnn.likelihoods import Categorical, HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings("ignore:.*not a mode")


def layered_prior(scales: dict[str, float]) -> pb.priors.LambdaPrior:
    return pb.priors.LambdaPrior(lambda name, *_: dist.Normal(0.0, scales[name.split(".")[0]]))


def trained_net(num_data: int):
    x, y = toy(num_data, dtype=torch.float64)
    model = pb.BNN(toy_net().double(), normal_prior(), HomoskedasticGaussian(0.2))
    posterior = pb.MAP(num_steps=100, compile=False).fit(model, x, y)
    net = toy_net().double()
    values = {name.removeprefix("net."): value[0, 0] for name, value in posterior.draws.items()}
    net.load_state_dict(values)
    return x, y, net


def evidence(structure, x, y, net, scales, noise) -> float:
    model = pb.BNN(net, layered_prior({"0": scales[0], "2": scales[1]}), HomoskedasticGaussian(noise))
    return Laplace(structure=structure, importance=False).fit(model, x, y, init=net, num_draws=1).log_evidence


#: 25 weights: 12 data take the full structure's Gram side, 60 the other
CASES = [("full", 12), ("full", 60), ("kron", 60), ("diag", 60)]


@pytest.mark.parametrize("structure, num_data", CASES)
def test_tuned_prior_precision_is_the_brute_force_maximum(structure, num_data):
    x, y, net = trained_net(num_data)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.2))
    method = Laplace(structure=structure, tune="marginal_likelihood")
    posterior = method.fit(model, x, y, init=net, num_draws=2000)
    factor = posterior.meta["tuned"]["prior_precision_factor"]["all"]

    def loss(log_tau):
        return -evidence(structure, x, y, net, [float(torch.tensor(-log_tau / 2).exp())] * 2, 0.2)

    best = optimize.minimize_scalar(loss, bounds=(-6, 6), method="bounded", options={"xatol": 1e-3})
    assert posterior.log_evidence == pytest.approx(-best.fun, abs=1e-5)
    assert factor == pytest.approx(float(torch.tensor(best.x).exp()), rel=5e-3)
    # the returned model is the tuned one: its prior has the scale that was found
    scale = posterior.model.priors["net.0.bias"].base_dist.scale[0]
    assert float(scale) == pytest.approx(factor**-0.5)


@pytest.mark.parametrize("structure, num_data", CASES)
def test_prior_precision_per_layer_and_noise_together(structure, num_data):
    x, y, net = trained_net(num_data)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian("learned"))
    method = Laplace(structure=structure, tune="marginal_likelihood", tune_per_layer=True)
    posterior = method.fit(model, x, y, init=net, num_draws=1)
    factors = posterior.meta["tuned"]["prior_precision_factor"]
    assert list(factors) == ["net.0", "net.2"]
    scales = [value**-0.5 for value in factors.values()]
    noise = float(posterior.draws["likelihood.scale"][0, 0])

    def loss(log_values):
        first, second, sigma = torch.tensor(log_values).exp().tolist()
        return -evidence(structure, x, y, net, [first, second], sigma)

    start = torch.tensor([*scales, noise]).double().log().numpy()
    assert posterior.log_evidence == pytest.approx(-loss(start), abs=1e-5)
    best = optimize.minimize(loss, start, method="Nelder-Mead", options={"maxfev": 25})
    assert -best.fun - posterior.log_evidence < 1e-4


def test_one_factor_and_noise_together():
    x, y, net = trained_net(60)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian("learned"))
    posterior = Laplace(tune="marginal_likelihood").fit(model, x, y, init=net, num_draws=1)
    scale = posterior.meta["tuned"]["prior_precision_factor"]["all"] ** -0.5
    noise = float(posterior.draws["likelihood.scale"][0, 0])

    def loss(log_values):
        one, sigma = torch.tensor(log_values).exp().tolist()
        return -evidence("full", x, y, net, [one, one], sigma)

    start = torch.tensor([scale, noise]).double().log().numpy()
    assert posterior.log_evidence == pytest.approx(-loss(start), abs=1e-5)
    best = optimize.minimize(loss, start, method="Nelder-Mead", options={"maxfev": 25})
    assert -best.fun - posterior.log_evidence < 1e-4


def test_classes_are_tuned_too():
    x, _ = toy()
    net = toy_net(out=3)
    model = pb.BNN(net, normal_prior(), Categorical())
    y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    fit = pb.MAP(num_steps=100, compile=False).fit(model, x, y)
    plain = Laplace(structure="kron").fit(model, x, y, init=fit, num_draws=1)
    tuned = Laplace(structure="kron", tune="marginal_likelihood").fit(model, x, y, init=fit, num_draws=1)
    assert tuned.log_evidence > plain.log_evidence
    assert tuned.meta["tuned"]["noise_factor"] == 1.0


def test_cross_validation_picks_the_best_held_out_score():
    x, y, net = trained_net(60)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.07))
    posterior = Laplace(tune="cross_validation").fit(model, x, y, init=net, num_draws=1, seed=3)
    factor = posterior.meta["tuned"]["prior_precision_factor"]["all"]

    def score(tau: float) -> float:
        order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
        held, kept = order[:12], order[12:]
        scaled = pb.BNN(net, normal_prior(tau**-0.5), HomoskedasticGaussian(0.07))
        fit = Laplace(predictive="linearized").fit(scaled, x[kept], y[kept], init=net, num_draws=1)
        mean, var = fit.moments(x[held])
        return float(dist.Normal(mean, (var + 0.07**2).sqrt()).log_prob(y[held]).mean())

    grid = torch.logspace(-4, 4, 25).double().tolist()
    scores = [score(tau) for tau in grid]
    assert factor == pytest.approx(grid[scores.index(max(scores))], rel=1e-5)


def test_no_signal_ends_at_the_bound_and_says_so():
    truth = diabetes_linear()
    net = torch.nn.utils.skip_init(torch.nn.Linear, 10, 1, dtype=torch.float64)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.zero_()
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.7))
    with pytest.warns(UserWarning, match="at its bound"):
        posterior = Laplace(tune="marginal_likelihood").fit(
            model, truth["x"], truth["y"], init=net, num_draws=5
        )
    assert all(torch.isfinite(value).all() for value in posterior.draws.values())


def test_the_bracket_contains_the_minimum():
    for centre in (-7.3, 0.1, 5.9):
        low, high = laplace_tuning._bracket(lambda v, centre=centre: (v - centre) ** 2)
        assert low < centre < high
