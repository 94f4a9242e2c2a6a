"""Priors of every family follow the net to its dtype, and what cannot follow is refused in words."""

from __future__ import annotations

import copy
import warnings

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior, toy, toy_net
from sklearn.datasets import load_digits
from stand_in_device import stand_in_device
from torch import nn
from torch.distributions import transforms

import pyrobnn as pb
from pyrobnn.model.distribution_kinds import elementwise
from pyrobnn.model.weight_priors import site_priors

LOC = torch.tensor(0.1)
SCALE = torch.tensor(1.3)
FAMILIES = {
    "Uniform": dist.Uniform(-2 * SCALE, 2 * SCALE),
    "Logistic": dist.Logistic(LOC, SCALE),
    "SoftLaplace": dist.SoftLaplace(LOC, SCALE),
    "TransformedDistribution": dist.TransformedDistribution(
        dist.Normal(LOC, SCALE),
        [transforms.AffineTransform(LOC, SCALE), transforms.TanhTransform()],
    ),
    "inverse": dist.TransformedDistribution(
        dist.Normal(LOC, SCALE), [transforms.AffineTransform(LOC, SCALE).inv]
    ),
    "Independent": dist.Normal(LOC.expand(8, 1), SCALE).to_event(1),
    "ExpandedDistribution": dist.Uniform(-SCALE, SCALE).expand([1]),
    "MultivariateNormal": dist.MultivariateNormal(torch.zeros(1), torch.eye(1)),
    "MixtureSameFamily": dist.MixtureSameFamily(
        dist.Categorical(torch.tensor([0.3, 0.7])),
        dist.Normal(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.1])),
    ),
    "MaskedMixture": dist.MaskedMixture(
        torch.tensor(True), dist.Normal(LOC, SCALE), dist.Laplace(LOC, SCALE)
    ),
    "Delta": dist.Delta(LOC),
    "ScaleMixture": pb.priors.ScaleMixture().distribution,
    "StudentT": dist.StudentT(4.0, LOC, SCALE),
}


class Hidden(dist.Normal):
    """Keeps a number where no copy finds it."""

    def __init__(self, scale):
        super().__init__(0.0, 1.0)
        self.draw = lambda: scale * 1.0

    def sample(self, sample_shape=()):
        return self.draw()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prior_follows_to_another_dtype_and_device(family):
    prior = FAMILIES[family]
    value = torch.full(prior.shape(), 0.1)
    before = prior.log_prob(value)
    moved = pb.priors.move("w", prior, torch.zeros((), dtype=torch.float64))
    assert moved.log_prob(value.double()).dtype == torch.float64
    torch.testing.assert_close(moved.log_prob(value.double()).float(), before)
    assert prior.log_prob(value).dtype == torch.float32  # the user's own is as it was
    assert pb.priors.move("w", moved, torch.zeros((), dtype=torch.float64)) is moved
    with stand_in_device() as device:
        there = pb.priors.move("w", prior, torch.zeros((), device=device))
        torch.testing.assert_close(there.log_prob(value.to(device)).cpu(), before)


# the others have no density to optimise or no bijection to the real line
UNFITTED = {"Delta", "MaskedMixture"}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in UNFITTED])
def test_a_float64_net_is_fitted_under_it(family):
    x, y = toy(10, dtype=torch.float64)
    prior = pb.priors.DictPrior(
        {"0.weight": FAMILIES[family]}, expose_all=False, expose=["0.weight"]
    )
    model = pb.BNN(toy_net().double(), prior, pb.likelihoods.HomoskedasticGaussian(0.2))
    posterior = pb.MAP(num_steps=2, polish_steps=0, compile=False).fit(model, x, y)
    assert posterior.draws["net.0.weight"].dtype == torch.float64


def test_what_cannot_follow_is_refused():
    prior = pb.priors.IIDPrior(Hidden(torch.tensor(1.0)))
    with pytest.raises(ValueError, match="cannot follow the net to torch.float64"):
        pb.BNN(toy_net().double(), prior, pb.likelihoods.HomoskedasticGaussian(0.2))


@pytest.mark.parametrize("leaf", [True, False])
def test_numbers_with_a_graph_are_cut_from_it(leaf):
    scale = torch.tensor(1.0, requires_grad=True)
    own = scale if leaf else 2.0 * scale
    likelihood = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(own))
    model = pb.BNN(toy_net(), pb.priors.IIDPrior(dist.Normal(0.0, own)), likelihood)
    for prior in copy.deepcopy(model).priors.values():
        assert not prior.log_prob(torch.full(prior.shape(), 0.5)).requires_grad
    (mine,) = likelihood.own.priors.values()  # the user's own is as it was
    assert mine.log_prob(torch.tensor(0.5)).requires_grad
    x, y = toy(10)
    pb.MAP(num_steps=2, polish_steps=0, compile=False).fit(model, x, y)


@pytest.mark.parametrize(
    "prior", [lambda n: pb.priors.ScaleMixture(0.5, n, n), pb.priors.FanInNormal]
)
def test_a_scale_may_be_a_whole_number(prior):
    whole, real = (
        pb.BNN(toy_net(), prior(scale), pb.likelihoods.HomoskedasticGaussian(0.1))
        for scale in (100, 100.0)
    )
    for name, of in whole.priors.items():
        at = torch.ones(of.shape())
        torch.testing.assert_close(of.log_prob(at), real.priors[name].log_prob(at))


@pytest.mark.parametrize("value", [0.0, 0.003, 0.05, 1.0, 30.0])
def test_the_mixture_has_finite_second_derivatives(value):
    mixture = pb.priors.ScaleMixture().distribution
    at = torch.tensor(value)
    density = mixture.log_prob
    exact = torch.tensor(value, dtype=torch.float64)
    narrow = pb.priors.move("w", mixture, exact)
    torch.testing.assert_close(density(at).double(), narrow.log_prob(exact), rtol=1e-5, atol=1e-5)
    second = torch.func.grad(torch.func.grad(density))(at)
    step = 1e-5
    difference = (
        narrow.log_prob(exact + step) - 2 * narrow.log_prob(exact) + narrow.log_prob(exact - step)
    ) / step**2
    torch.testing.assert_close(second.double(), difference, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:100% of the draws")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("own", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["MAP", "NUTS", "SVI"])
def test_a_noise_prior_of_another_dtype(name, own, dtype):
    x, y = toy(10, dtype=dtype)
    method = {
        "MAP": pb.MAP(num_steps=2, polish_steps=1, compile=False),
        "NUTS": pb.NUTS(num_chains=1, num_warmup=2, max_tree_depth=1, compile=False),
        "SVI": pb.SVI(num_steps=2, compile=False),
    }[name]
    likelihood = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(torch.ones((), dtype=own)))
    model = pb.BNN(toy_net().to(dtype), normal_prior(), likelihood)
    posterior = method.fit(model, x, y, **({} if name == "MAP" else {"num_draws": 4}))
    assert {value.dtype for value in posterior.draws.values()} == {dtype}
    assert likelihood.own.priors["likelihood.scale"].scale.dtype == own  # the user's own


@pytest.mark.parametrize("batch", [(), (2,), (3,), (3, 2), (2, 2)])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_the_noise_of_each_output_whatever_the_batch(shape, batch):
    scale = torch.tensor([0.5, 2.0]).expand(2)[: shape[0]] if shape else torch.tensor(0.5)
    f = torch.zeros(*batch, 4, 2)
    fixed = pb.likelihoods.HomoskedasticGaussian(scale)
    assert torch.equal(fixed.loc_scale(f, {})[1], scale.expand(f.shape))
    inferred = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(torch.ones(shape)))
    draws = torch.rand((*batch, *shape), generator=torch.Generator().manual_seed(0)) + 0.1
    found = inferred.loc_scale(f, {"likelihood.scale": draws})[1]
    wide = draws.reshape(*batch, 1, *(shape or (1,)))
    assert torch.equal(found, wide.expand(f.shape))


def test_integer_inputs_are_cast_alike_by_fit_and_predict():
    x = torch.arange(10)[:, None]
    y = torch.linspace(-1, 1, 10)[:, None]
    model = pb.BNN(toy_net(), normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.2))
    posterior = pb.MAP(num_steps=2, polish_steps=0, compile=False).fit(model, x, y)
    torch.testing.assert_close(posterior.predict(x).f, posterior.predict(x.float()).f)
    posterior.to_datatree(x, y)


def conv_net(width: int = 32) -> nn.Module:
    with seeded(0):
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * width, 150),
            nn.ReLU(),
            nn.Linear(150, 10),
        )


def dense_net(width: int, depth: int, unit: type[nn.Module] = nn.ReLU) -> nn.Module:
    with seeded(0):
        layers: list[nn.Module] = [nn.Linear(64, width)]
        for _ in range(depth - 2):
            layers += [unit(), nn.Linear(width, width)]
        return nn.Sequential(*layers, unit(), nn.Linear(width, 10))


@pytest.mark.parametrize(
    "net, floor",
    [
        (conv_net(), 1.0),
        (conv_net(2), 0.0),
        (dense_net(100, 4), 1.0),
        (dense_net(100, 4, nn.Tanh), 0.0),
        (dense_net(150, 3), 0.0),
    ],
    ids=["convolutions", "few weights", "deep", "tanh", "shallow"],
)
def test_a_deep_wide_net_of_rectified_units_has_a_floor_under_its_scales(net, floor):
    weights = [name for name, param in net.named_parameters() if param.dim() > 1]
    for name in weights:
        fan_in = net.get_parameter(name)[0].numel()
        for prior, least in (
            (pb.priors.FanInNormal(), floor),
            (pb.priors.FanInNormal(floor=0.0), 0.0),
            (pb.priors.FanInNormal(floor=0.3), 0.3),
        ):
            law = elementwise(site_priors(prior, net)[name])
            assert float(law.scale.max()) == pytest.approx(max(fan_in**-0.5, least))


def test_the_mode_of_a_conv_net_is_not_the_constant_function():
    x, y = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    x = (x.float() / 16).reshape(-1, 1, 8, 8)
    accuracy = {}
    for name, prior in {
        "default": pb.priors.FanInNormal(),
        "without": pb.priors.FanInNormal(floor=0.0),
    }.items():
        model = pb.BNN(conv_net(), prior, pb.likelihoods.Categorical())
        method = pb.MAP(num_steps=150, lr=2e-3, batch_size=50, compile=False)
        with warnings.catch_warnings(action="ignore"):
            posterior = method.fit(model, x[:500], y[:500])
        best = posterior.predict(x[1000:1500]).probs.argmax(1)
        accuracy[name] = float((best == y[1000:1500]).float().mean())
    assert accuracy["default"] > 0.8 and accuracy["without"] < 0.2
