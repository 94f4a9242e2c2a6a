"""The model: the user's net stays as it was, and what a prior says is what the program samples."""

from __future__ import annotations

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import normal_prior, toy, toy_model, toy_net
from torch import nn

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import prepare


def test_the_users_net_is_copied():
    net = toy_net()
    before = copy.deepcopy(net.state_dict())
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.1))
    with torch.no_grad():
        model.net[0].weight.add_(1.0)
    assert type(net) is nn.Sequential
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_program_can_be_looked_into():
    x, y = toy()
    model = toy_model(pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)))
    with torch.random.fork_rng():
        trace = pyro.poutine.trace(model.pyro_model).get_trace(x, y)
    assert trace.nodes["net.0.weight"]["value"].shape == (8, 1)
    assert trace.nodes["likelihood.data"]["is_observed"]
    assert torch.isfinite(trace.log_prob_sum())
    relations = pyro.infer.inspect.get_model_relations(model.pyro_model, model_args=(x, y))
    assert relations["observed"] == ["likelihood.data"]
    assert set(relations["plate_sample"]) == {"likelihood.data_plate"}


def test_render_model_draws_it():
    pytest.importorskip("graphviz", reason="rendering needs the graphviz package of the dev extra")
    x, y = toy()
    graph = pyro.render_model(toy_model().pyro_model, model_args=(x, y))
    assert "net.0.weight" in graph.source


def test_forward_is_the_net_at_given_weights():
    x, _ = toy()
    net = toy_net()
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.1))
    torch.testing.assert_close(model.forward({}, x), net(x))
    doubled = {name: 2 * value for name, value in model.initial_values().items()}
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(model.forward(doubled, x), other(x))


def test_hidden_parameters_are_points():
    net = toy_net()
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, hide_modules=[net[0]])
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(0.1))
    assert set(model.priors) == {"net.2.weight", "net.2.bias"}
    density = prepare(model, *toy(), points="free").density
    assert {site.name: site.kind for site in density.sites} == {
        "net.2.weight": "latent",
        "net.2.bias": "latent",
        "net.0.weight": "point",
        "net.0.bias": "point",
    }


@pytest.mark.parametrize(
    "selection, message",
    [
        ({"hide": ["0.wieght"]}, "'0.wieght'"),
        ({"expose_parameters": ["kernel"]}, "'kernel'"),
        ({"hide_modules": [nn.Linear(1, 1)]}, "names no parameter"),
        ({"expose_module_types": (nn.Conv2d,)}, "Conv2d"),
        ({"hide_all": True}, "no Bayesian parameter"),
    ],
)
def test_hide_and_expose_must_match_something(selection, message):
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, **selection)
    with pytest.raises(ValueError, match=message):
        pb.BNN(toy_net(), prior, pb.likelihoods.HomoskedasticGaussian(0.1))


@pytest.mark.parametrize(
    "prior, scale",
    [
        (pb.priors.FanInNormal(), 8**-0.5),
        (pb.priors.LayerwiseNormalPrior("radford", expose_all=True), 8**-0.5),
        (pb.priors.LambdaPrior(lambda name, module, param: dist.Normal(0.0, 0.25)), 0.25),
        (
            pb.priors.DictPrior(
                {f"{i}.{p}": dist.Normal(0.0, 0.5) for i in (0, 2) for p in ("weight", "bias")}
            ),
            0.5,
        ),
    ],
)
def test_every_kind_of_prior(prior, scale):
    if isinstance(
        prior, pb.priors.LayerwiseNormalPrior
    ):  # tyxe's needs a fan-in, which biases lack
        prior = pb.priors.LayerwiseNormalPrior(
            "radford", expose_all=False, hide_parameters=["bias"]
        )
    model = pb.BNN(toy_net(), prior, pb.likelihoods.HomoskedasticGaussian(0.1))
    site = model.priors["net.2.weight"]
    assert site.shape() == (1, 8)
    torch.testing.assert_close(site.base_dist.scale, torch.full((1, 8), scale))


def test_dict_prior_without_an_entry_is_named():
    prior = pb.priors.DictPrior({"0.weight": dist.Normal(0.0, 1.0)})
    with pytest.raises(ValueError, match="no entry for '0.bias'"):
        pb.BNN(toy_net(), prior, pb.likelihoods.HomoskedasticGaussian(0.1))


def test_scale_mixture_density_and_draws():
    prior = pb.priors.ScaleMixture(0.3, 2.0, 0.1).distribution
    grid = torch.linspace(-20, 20, 200_001, dtype=torch.float64)
    assert torch.trapezoid(prior.log_prob(grid).exp(), grid).item() == pytest.approx(1.0, abs=1e-6)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = prior.expand((200_000,)).sample().double()
    var = 0.3 * 4 + 0.7 * 0.01
    fourth = 3 * (0.3 * 16 + 0.7 * 1e-4)
    assert abs(draws.square().mean() - var) < 5 * ((fourth - var**2) / len(draws)) ** 0.5


def test_wrong_arguments_are_named():
    likelihood = pb.likelihoods.HomoskedasticGaussian(0.1)
    with pytest.raises(TypeError, match="'net' must be"):
        pb.BNN(lambda x: x, normal_prior(), likelihood)
    with pytest.raises(TypeError, match="'prior' must be"):
        pb.BNN(toy_net(), dist.Normal(0.0, 1.0), likelihood)
    with pytest.raises(TypeError, match=r"the class FanInNormal itself: write FanInNormal\(…\)$"):
        pb.BNN(toy_net(), pb.priors.FanInNormal, likelihood)
    with pytest.raises(TypeError, match="'likelihood' must be"):
        pb.BNN(toy_net(), normal_prior(), dist.Normal(0.0, 1.0))
    with pytest.raises(TypeError, match="must be a distribution of pyro"):
        pb.likelihoods.HomoskedasticGaussian(torch.distributions.HalfNormal(1.0))


def test_reinitialized_changes_the_weights_by_seed():
    model = toy_model()
    first = model.reinitialized(1)
    again = model.reinitialized(1)
    other = model.reinitialized(2)
    assert torch.equal(first.net[0].weight, again.net[0].weight)
    assert not torch.equal(first.net[0].weight, other.net[0].weight)


def test_standardizer_gives_original_units():
    x, y = toy()
    data = pb.data.Dataset(10 + 3 * x, 100 * y, "toy", "regression")
    units = pb.data.Standardizer.fit(data)
    model = pb.BNN(
        toy_net(), normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.1), standardizer=units
    )
    problem = prepare(model, data.x, data.y, points="held")
    torch.testing.assert_close(problem.y.std(correction=0), torch.tensor(1.0))
    draws = {name: value[None, None] for name, value in model.initial_values().items()}
    p = pb.Posterior(model, draws).predict(data.x)
    torch.testing.assert_close(
        p.aleatoric_var.sqrt(), torch.full((40, 1), 0.1 * units.y_scale.item())
    )
    torch.testing.assert_close(p.mean, model.forward({}, problem.x) * units.y_scale + units.y_mean)
    standard = pb.Prediction(p.standard_f, model.likelihood, {}).log_prob(problem.y)
    expected = standard - units.y_scale.log().double()  # float32 data: six digits
    torch.testing.assert_close(p.log_prob(data.y), expected, rtol=1e-5, atol=1e-5)
