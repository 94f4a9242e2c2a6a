"""Laplace on networks as they are used: units, loaders, hidden parameters, images, and how uncertainty must look."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import joint_covariance, normal_prior, toy, toy_net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.data import Standardizer
from pyrobnn.inference.laplace import Laplace
from pyrobnn.likelihoods import Categorical, HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings("ignore:.*not a mode")


@pytest.mark.slow
@pytest.mark.parametrize(
    "structure, growth",
    [
        ("full", 2.0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("kron", 2.0), ("diag", 1.0))),
    ],
)
def test_uncertainty_of_a_sinusoid_grows_outside_the_data(structure, growth):
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(150, 1, generator=generator)
    y = torch.sin(x) + 0.3 * torch.randn(150, 1, generator=generator)
    units = Standardizer(x.mean(0), x.std(0), y.mean(0), y.std(0))
    net = pb.networks.mlp(1, (30,), 1, seed=0)
    noise = HomoskedasticGaussian(float(0.3 / units.y_scale))
    model = pb.BNN(net, normal_prior(3.0), noise, standardizer=units)
    fit = pb.MAP(num_steps=400, lr=0.03, polish_steps=100, compile=False).fit(model, x, y)
    method = Laplace(structure=structure, tune="marginal_likelihood")
    posterior = method.fit(model, x, y, init=fit, num_draws=400)
    sd = posterior.predict(
        torch.tensor([[-8.0], [-4.0], [1.0], [3.0], [5.0], [7.0], [9.0], [14.0], [18.0]])
    )
    left = sd.epistemic_var[:2]
    inside = sd.epistemic_var[2:7]
    right = sd.epistemic_var[7:]
    assert float(min(left[1], right[0])) > growth * float(inside.mean())
    assert float(left[0]) > float(left[1]) and float(right[1]) > float(right[0])
    grid = torch.linspace(0.5, 9.5, 50)[:, None]
    rmse = (posterior.predict(grid).mean - torch.sin(grid)).square().mean().sqrt()
    assert float(rmse) < 0.15
    # draws of the same weights through the network itself underfit badly: why linearising is the default
    if structure == "full":
        plain = Laplace(structure=structure, predictive="draws", tune="marginal_likelihood")
        drawn = plain.fit(model, x, y, init=fit, num_draws=100).predict(grid)
        assert float(drawn.epistemic_var.mean()) > 10 * float(
            posterior.predict(grid).epistemic_var.mean()
        )


def test_a_loader_is_its_data():
    x, y = toy()
    model = pb.BNN(toy_net(), normal_prior(), HomoskedasticGaussian(0.2))
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    whole = Laplace().fit(model, x, y, init=toy_net(), num_draws=3)
    streamed = Laplace().fit(model, loader, init=toy_net(), num_draws=3)
    assert streamed.log_evidence == pytest.approx(whole.log_evidence)
    torch.testing.assert_close(streamed.draws, whole.draws)
    # a short search by batches is no finding where the steps on all of the data end at the mode
    searched = Laplace(num_steps=20, compile=False).fit(model, loader, num_draws=1).meta
    assert searched["newton_distance"] < 0.1 and not searched["findings"]


def test_hidden_parameters_are_held_where_training_left_them():
    x, y = toy()
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, hide=["0.weight"])
    model = pb.BNN(toy_net(), prior, HomoskedasticGaussian("learned"))
    posterior = Laplace(num_steps=50, compile=False).fit(model, x, y, num_draws=4)
    assert posterior.meta["point_sites"] == ["likelihood.scale", "net.0.weight"]
    weight = posterior.draws["net.0.weight"]
    assert torch.equal(weight, weight[:, :1].expand_as(weight))
    assert not torch.equal(weight[0, 0], toy_net()[0].weight.detach())
    assert len(posterior.approximation.index) == 17


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_convolutional_net_has_every_structure_and_subset(structure, subset):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 1, 8, 8, generator=generator)
    y = torch.arange(24) % 3
    net = pb.networks.small_cnn(3, channels=(2, 4), seed=0)
    model = pb.BNN(net, normal_prior(), Categorical())
    method = Laplace(structure=structure, subset=subset, tune="per_layer")
    posterior = method.fit(model, x, y, init=net, num_draws=20)
    prediction = posterior.predict(x)
    assert prediction.probs.shape == (24, 3)
    assert (prediction.epistemic_entropy > 0).any()
    probit = pb.Posterior.predict(
        Laplace(structure=structure, predictive="linearized").fit(
            model, x, y, init=net, num_draws=300
        ),
        x,
    ).probs
    assert torch.isfinite(probit).all()


def test_the_last_layers_covariance_of_several_outputs():
    x, _ = toy(dtype=torch.float64)
    net = toy_net(out=3).double()
    model = pb.BNN(net, normal_prior(), Categorical())
    y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    posterior = Laplace(subset="last_layer").fit(model, x, y, init=net, num_draws=2)
    f, cov = posterior.network.output_moments(x[:6])
    joint = joint_covariance(posterior.network, x[:6])
    torch.testing.assert_close(cov, torch.stack([joint[i, :, i] for i in range(6)]))
    torch.testing.assert_close(f, net(x[:6]).detach())
    assert float(cov[:, 0, 1].abs().min()) > 0


def test_a_layer_without_factors_is_named():
    with seeded(0):
        net = nn.Sequential(nn.Linear(1, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    x, y = toy()
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.2))
    scales = tuple(name for name in model.priors if ".1." in name)
    with pytest.raises(
        ValueError, match="ConvTranspose2d.*, of which this subset has none.*'diag'"
    ):
        Laplace(structure="kron", subset=scales).fit(model, x, y, init=net)
    full = Laplace(predictive="linearized").fit(model, x, y, init=net, num_draws=5)
    diagonal = Laplace(structure="diag").fit(model, x, y, init=net, num_draws=5)
    factor = full.approximation.blocks[0]
    size = len(factor.index)
    torch.testing.assert_close(
        factor.quad(torch.eye(size)).to(torch.float32), diagonal.approximation.blocks[0].prec
    )


@pytest.mark.cuda
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_on_a_gpu(structure):
    x, y = toy(dtype=torch.float64)
    model = pb.BNN(toy_net().double(), normal_prior(), HomoskedasticGaussian(0.2))
    method = Laplace(structure=structure, tune="marginal_likelihood", predictive="linearized")
    there = method.fit(model, x, y, init=toy_net().double(), num_draws=3, device="cuda")
    here = method.fit(model, x, y, init=toy_net().double(), num_draws=3)
    assert there.log_evidence == pytest.approx(here.log_evidence, abs=1e-6)
    for there_value, here_value in zip(there.moments(x), here.moments(x)):
        torch.testing.assert_close(there_value.cpu(), here_value)


class Tied(nn.Module):
    """Scores of words by the embedding that they were read with."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.words(x).mean(1))))


def tied():
    with seeded():
        net = Tied()
        x = torch.randint(0, 5, (30, 3))
    return net, x, x[:, 0]


def test_a_layer_that_shares_its_weight_is_no_last_layer():
    net, x, y = tied()
    model = pb.BNN(net, normal_prior(1.0), Categorical())
    with pytest.raises(
        pb.Refused, match=r"'net.head', shares 'net.head.weight' with .* as 'net.words.weight'"
    ):
        Laplace(subset="last_layer", compile=False).fit(model, x, y, seed=0)
    search = pb.MAP(num_steps=20, compile=False)
    whole = Laplace(structure="kron", map=search, compile=False).fit(model, x, y, seed=0)
    assert whole.predict(x).probs.isfinite().all()
    assert "last_layer" not in pb.posthoc(net, x, y).meta["held_out_log_density"]


def test_a_prior_of_a_shared_parameter_is_asked_for_by_its_first_name():
    net, _, _ = tied()
    normal = dist.Normal(0.0, 1.0)
    with pytest.raises(ValueError, match="two modules share this parameter.*say 'words.weight'"):
        pb.BNN(net, pb.priors.IIDPrior(normal, hide=["head.weight"]), Categorical())
    own = {name: normal for name, _ in net.named_parameters()}
    by_second = {"head.weight": normal} | own
    del by_second["words.weight"]
    with pytest.raises(ValueError, match="no entry for 'words.weight', which is 'head.weight' too"):
        pb.BNN(net, pb.priors.DictPrior(by_second), Categorical())
    assert "net.words.weight" in pb.BNN(net, pb.priors.DictPrior(own), Categorical()).priors
