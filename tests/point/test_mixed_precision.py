"""A net trains in its own precision: in bfloat16, under autocast around the fit, and under its own."""

from __future__ import annotations

import contextlib

import pytest
import torch

import pyrobnn as pb

HALF = {"device_type": "cpu", "dtype": torch.bfloat16}


#: the types that outputs of nets were computed in; fits copy the nets
SEEN: set[torch.dtype] = set()


class Noting(torch.nn.Module):
    """A net that notes the type that its outputs were computed in, under autocast of its own where asked."""

    def __init__(self, own_autocast: bool) -> None:
        super().__init__()
        self.net = pb.networks.mlp(1, (8,), seed=0)
        self.own_autocast = own_autocast

    def forward(self, x):
        with torch.autocast(**HALF) if self.own_autocast else contextlib.nullcontext():
            output = self.net(x)
        SEEN.add(output.dtype)
        return output


def rows():
    x = torch.linspace(-1, 1, 40)[:, None]
    return x, x.sin()


def model(net) -> pb.BNN:
    return pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))


METHOD = pb.MAP(num_steps=100, polish_steps=0, compile=False)
pytestmark = pytest.mark.filterwarnings("ignore:.*(stopped far|last fifth)")


@pytest.mark.parametrize("own", [True, False])
def test_autocast_is_obeyed(own):
    bnn = model(Noting(own))
    SEEN.clear()
    around = contextlib.nullcontext() if own else torch.autocast(**HALF)
    with around:
        posterior = METHOD.fit(bnn, *rows())
    assert posterior.draws["net.net.0.weight"].dtype == torch.float32
    assert torch.bfloat16 in SEEN


def test_a_net_in_bfloat16_is_trained_in_it():
    x, y = rows()
    posterior = METHOD.fit(model(pb.networks.mlp(1, (8,), seed=0).bfloat16()), x, y)
    assert posterior.draws["net.0.weight"].dtype == torch.bfloat16
    exact = METHOD.fit(model(pb.networks.mlp(1, (8,), seed=0)), x, y)
    error = (posterior.predict(x).mean.float() - exact.predict(x).mean).abs().max()
    assert float(error) < 0.1
