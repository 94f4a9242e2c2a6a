from __future__ import annotations

import pytest
import torch
from torch import nn

from pyrobnn.networks import mlp, small_cnn


def test_mlp_is_the_written_formula():
    net = mlp(3, hidden=(5, 4), num_outputs=2, activation="tanh", seed=0)
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    first, second, last = (layer for layer in net if isinstance(layer, nn.Linear))
    hidden = torch.tanh(torch.tanh(x @ first.weight.T + first.bias) @ second.weight.T + second.bias)
    torch.testing.assert_close(net(x), hidden @ last.weight.T + last.bias)


def test_mlp_without_hidden_layers_is_linear():
    net = mlp(3, hidden=(), seed=0)
    assert [type(layer) for layer in net] == [nn.Linear]
    assert sum(p.numel() for p in net.parameters()) == 4


def test_seed_decides_the_weights_and_leaves_the_generator():
    before = torch.get_rng_state()
    one, same, other = (mlp(2, seed=seed)(torch.ones(1, 2)) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("activation", ["relu", "softplus", nn.Mish])
def test_activation_by_name_and_by_class(activation):
    net = mlp(1, hidden=(3,), activation=activation, seed=0)
    expected = {"relu": nn.ReLU, "softplus": nn.Softplus}.get(activation, activation)
    assert isinstance(net[1], expected)


def test_small_cnn_takes_images_and_flattened_pixels():
    net = small_cnn(10, in_channels=2, image_size=9, channels=(4, 6), seed=0)
    images = torch.rand(5, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    assert net(images).shape == (5, 10)
    torch.testing.assert_close(net(images.flatten(1)), net(images))
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in net.modules())


def test_every_parameter_gets_a_gradient():
    net = small_cnn(3, seed=0)
    net(torch.rand(4, 64, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in net.parameters())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mlp(0), ValueError, "'num_inputs' must be at least 1, got 0"),
        (lambda: mlp(2.0), TypeError, "'num_inputs' must be an integer"),
        (lambda: mlp(2, hidden=50), TypeError, r"write hidden=\(50,\)"),
        (lambda: mlp(2, hidden=(50, -1)), ValueError, r"'hidden\[1\]' must be at least 1"),
        (lambda: mlp(2, activation="swish"), ValueError, "must be one of 'tanh', 'relu'"),
        (lambda: mlp(2, activation=nn.Tanh()), TypeError, "nn.Module class"),
        (
            lambda: small_cnn(10, image_size=2, channels=(4, 4)),
            ValueError,
            "cannot be halved 2 times",
        ),
        (lambda: small_cnn(True), TypeError, "'num_classes' must be an integer"),
        (lambda: small_cnn(2, channels=4), TypeError, r"channels=\(4,\)"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
