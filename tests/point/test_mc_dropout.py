"""MC dropout: the variance of a linear layer, masks of the net's own layers, coherence of draws."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, assert_var_within, seeded
from torch import nn

from pyrobnn.core.checks import Refused
from pyrobnn.inference.mc_dropout import MCDropout
from pyrobnn.inference.point_methods import MAP
from pyrobnn.likelihoods import Categorical, HomoskedasticGaussian
from pyrobnn.model import BNN
from pyrobnn.networks import mlp, small_cnn
from pyrobnn.priors import IIDPrior

STILL = {"num_steps": 0, "compile": False}


def bnn(net, likelihood=None):
    return BNN(net, IIDPrior(dist.Normal(0.0, 1.0)), likelihood or HomoskedasticGaussian(0.3))


def linear(width_in=4, width_out=1, seed=0):
    return mlp(width_in, (), width_out, seed=seed)[0]


def data(n=40, width=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, width, generator=generator)
    return x, x[:, :1] + 0.3 * torch.randn(n, 1, generator=generator)


def images(n=12):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(n, 1, 8, 8, generator=generator), torch.arange(n) % 3


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_a_linear_layer_has_the_exact_mean_and_variance(p):
    x, y = data()
    net = linear()
    posterior = MCDropout(p=p, **STILL).fit(bnn(net), x, y, init=net, num_draws=8000, seed=3)
    f = posterior.function(x[:6])[..., 0]
    weight = net.weight.detach()[0]
    expected = (x[:6] * weight).square().sum(1) * p / (1 - p)
    mean = net(x[:6]).detach()[:, 0]
    assert_mean_within(f, mean)
    assert_var_within(f, expected, mean=mean.numpy())
    assert posterior.meta["dropout_p"] == pytest.approx({"": p})


def test_the_nets_own_layers_are_masks_on_the_next_weights():
    x, y = data()
    net = nn.Sequential(
        linear(4, 6),
        nn.Tanh(),
        nn.Dropout(0.3),
        linear(6, 2, 1),
        nn.Dropout(0.5),
        nn.ReLU(),
        linear(2),
    )
    posterior = MCDropout(**STILL).fit(bnn(net), x, y, init=net, num_draws=200)
    assert posterior.meta["dropout_p"] == pytest.approx({"3": 0.3, "6": 0.5})
    weight = posterior.draws["net.3.weight"][0]
    columns = (weight == 0).all(1)
    assert bool((columns == (weight == 0).any(1)).all())
    scaled = torch.where(columns[:, None], 0.0, net[3].weight.detach() / 0.7)
    torch.testing.assert_close(weight, scaled)
    assert float(posterior.draws["net.0.weight"].std(1).max()) == 0
    assert float(posterior.draws["net.3.bias"].std(1).max()) == 0
    # f by hand for one draw: the same units dropped for every input
    kept = (~columns[5]).float() / 0.7
    second = (posterior.draws["net.6.weight"][0, 5] != 0).any(0).float() / 0.5
    hidden = torch.tanh(net[0](x)) * kept
    expected = net[6](torch.relu(net[3](hidden) * second))
    torch.testing.assert_close(posterior.function(x)[0, 5], expected.detach())


def test_dropout2d_drops_channels_of_a_cnn():
    x, y = images()
    with seeded(4):
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.Dropout2d(0.25),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3),
            nn.Dropout2d(0.5),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24, 3),
        )
    posterior = MCDropout(**STILL).fit(bnn(net, Categorical()), x, y, init=net, num_draws=100)
    assert posterior.meta["dropout_p"] == pytest.approx({"4": 0.25, "8": 0.5})
    first = posterior.draws["net.4.weight"][0]
    last = posterior.draws["net.8.weight"][0]
    assert 0.1 < float((first[:, 0, :, 0, 0] == 0).float().mean()) < 0.4
    groups = (last[:, 0] == 0).unflatten(1, (6, 4))  # channel by channel, four pixels each
    assert bool((groups.all(2) == groups.any(2)).all())


def test_p_inserts_before_every_weight_layer():
    x, y = images()
    net = small_cnn(3, channels=(2, 4), seed=0)
    posterior = MCDropout(p=0.2, **STILL).fit(bnn(net, Categorical()), x, y, init=net, num_draws=40)
    # the first convolution has one input channel, the whole image
    assert list(posterior.meta["dropout_p"]) == ["5", "9"]
    assert posterior.predict(x).probs.shape == (12, 3)


def test_training_masks_are_fresh_for_every_datum():
    x, y = data(n=400)
    net = linear()
    seen = []
    posterior = MCDropout(p=0.5, num_steps=1, lr=1e-9, compile=False).fit(
        bnn(net), x, y, callbacks=(lambda step, metrics: seen.append(metrics["loss"]),)
    )
    assert torch.allclose(posterior.stacked()["net.bias"][0], net.bias, atol=1e-6)
    # the loss with a mask for each datum concentrates on its expectation: squared error + Σ (w x)² p / (1 − p)
    weight = net.weight.detach()[0]
    mean = net(x).detach()
    spread = (x * weight).square().sum(1, keepdim=True)
    log_normal = dist.Normal(0.0, 0.3).log_prob(torch.zeros(()))
    expected = -(log_normal - ((y - mean).square() + spread) / (2 * 0.09)).sum()
    prior = sum(dist.Normal(0.0, 1.0).log_prob(p.detach()).sum() for p in net.parameters())
    # one mask shared by all data would be off by the spread itself
    sd = float(((y - mean).square() + spread).std() / 0.18 / 20) * 2
    assert seen[0] == pytest.approx(float(expected - prior) / 400, abs=5 * sd)


@pytest.mark.slow
def test_training_lowers_the_loss_and_compiled_is_eager():
    x, y = data()
    fits = [
        MCDropout(p=0.1, num_steps=60, batch_size=10, compile=compile).fit(
            bnn(mlp(4, (8,), 1, seed=0)), x, y, num_draws=3, seed=5
        )
        for compile in (True, False)
    ]
    torch.testing.assert_close(
        fits[0].draws["net.0.weight"], fits[1].draws["net.0.weight"], rtol=1e-3, atol=1e-4
    )
    loss = fits[0].history["loss"]
    assert float(loss[-10:].mean()) < 0.7 * float(loss[:10].mean())
    assert fits[0].meta["iid"] and "not the posterior" in fits[0].meta["warnings"][0]
    assert fits[0].approximation is None


@pytest.mark.slow
def test_starts_at_a_posterior_and_leaves_the_net_alone():
    x, y = data()
    net = nn.Sequential(linear(4, 5), nn.ReLU(), nn.Dropout(0.2), linear(5))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.eval()
    start = MAP(num_steps=30, compile=False).fit(bnn(net), x, y)
    net.train()
    posterior = MCDropout(**STILL).fit(bnn(net), x, y, init=start, num_draws=2)
    torch.testing.assert_close(
        posterior.draws["net.0.weight"][0, 0], start.draws["net.0.weight"][0, 0]
    )
    assert net.training and all(
        bool((value == before[name]).all()) for name, value in net.state_dict().items()
    )


def test_what_cannot_be_a_mask_is_refused():
    x, y = data()
    cases = [
        (mlp(4, (5,), 1, seed=0), "no dropout layer .* pass p=0.05"),
        (
            nn.Sequential(linear(4, 5), nn.Dropout(0.1), nn.Tanh(), linear(5)),
            "'1' is not a mask .* right before",
        ),
        (
            nn.Sequential(linear(4, 1), nn.Dropout(0.1)),
            "no linear or convolution layer follows .*'1'",
        ),
        (nn.Sequential(nn.AlphaDropout(0.1), linear(4, 1)), "'0' is an alpha dropout"),
    ]
    for net, message in cases:
        with pytest.raises(ValueError, match=message):
            MCDropout(**STILL).fit(bnn(net), x, y, init=net)
    pictures, labels = images()
    with seeded(0):
        net = nn.Sequential(nn.Dropout(0.1), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    with pytest.raises(ValueError, match="drops 64 units .* use nn.Dropout2d"):
        MCDropout(**STILL).fit(bnn(net, Categorical()), pictures, labels, init=net)


def test_settings_are_checked():
    for settings, message in [
        ({"p": 0.0}, "'p' must be > 0"),
        ({"p": 1.0}, "'p' must be .*< 1"),
        ({"lr": 0.0}, "'lr' must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            MCDropout(**settings)
    x, y = data()
    with pytest.raises(ValueError, match="pass it as init="):
        MCDropout(p=0.1, num_steps=0).fit(bnn(linear()), x, y)
    with pytest.raises(Refused, match="must be a pyrobnn.BNN"):
        MCDropout(p=0.1).fit(lambda x, y: None, x, y)
    with pytest.raises(ValueError, match="two or more inputs"):
        MCDropout(p=0.1).fit(bnn(linear(1)), x[:, :1], y)


def test_a_convolution_in_groups_is_masked_by_channels():
    """Dropping a channel of its input is masking the weights that its group has for it."""
    x, y = images()
    with seeded(6):
        body = [nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(6, 6, 3, groups=6)]
        net = nn.Sequential(*body, nn.Flatten(), nn.Linear(24, 3))
    posterior = MCDropout(p=0.4, **STILL).fit(
        bnn(net, Categorical()), x, y, init=net, num_draws=6, seed=1
    )
    assert posterior.meta["dropout_p"].keys() == {"1", "2", "4"}
    for index in range(6):
        drawn = {
            name: posterior.draws[f"net.{name}"][0, index] for name, _ in net.named_parameters()
        }
        ratios = [drawn[f"{layer}.weight"] / net[layer].weight.detach() for layer in (1, 2, 4)]
        # every output of a group has the same channels, and each of its own as many as there are
        first = ratios[0].reshape(2, 3, 2, 9)
        kept = first[:, :1, :, :1]
        torch.testing.assert_close(first, kept.expand_as(first))
        in_channels = [kept.flatten(), ratios[1][:, 0, 0, 0]]
        h = net[0](x)
        for layer, scale in zip((1, 2), in_channels, strict=True):
            h = net[layer](h * scale[:, None, None])
        expected = net[4](h.flatten(1) * ratios[2][0])
        f = posterior.standard_function(x)[0, index]
        torch.testing.assert_close(f, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own_layers", [True, False])
def test_batch_norm_in_training_mode_has_statistics_of_every_mask(own_layers):
    x, y = data(200)
    with seeded(7):
        dropout = [nn.Dropout(0.3)] if own_layers else []
        net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), *dropout, nn.Linear(8, 1)
        )
    method = MCDropout(p=None if own_layers else 0.3, num_steps=60, batch_size=50, compile=False)
    with pytest.warns(UserWarning, match="statistics of each batch"):
        posterior = method.fit(bnn(net), x, y, num_draws=3, seed=2)
    assert "batch_statistics" in {finding["code"] for finding in posterior.meta["findings"]}
    assert net[1].num_batches_tracked == 0
    draws = posterior.draws
    for index in range(3):
        weight, bias = (draws[f"net.0.{name}"][0, index] for name in ("weight", "bias"))
        hidden = nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(draws["net.1.running_mean"][0, index], hidden.mean(0))
        torch.testing.assert_close(draws["net.1.running_var"][0, index], hidden.var(0))
    means = draws["net.1.running_mean"][0]
    assert bool((means[0] == means[1]).all()) == own_layers  # its masks come after the norm
    losses = posterior.history["loss"]
    assert losses[-10:].mean() < losses[:10].mean()
    # a row alone is what it is beside others
    alone = torch.cat([posterior.predict(x[row : row + 1]).mean for row in range(3)])
    torch.testing.assert_close(alone, posterior.predict(x[:3]).mean)


def test_batch_norm_in_evaluation_mode_keeps_its_statistics():
    x, y = data(50)
    with seeded(8):
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).eval()
    posterior = MCDropout(p=0.3, num_steps=5, compile=False).fit(bnn(net), x, y, num_draws=2)
    assert "net.1.running_mean" not in posterior.draws
