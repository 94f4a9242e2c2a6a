"""The law of recognition: a file gives back what was predicted, or says that the model is another one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers import seeded
from models import normal_prior
from test_law_dense import METHODS
from torch import nn

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.posterior import recognition

# runs this short are told to be too short
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ROWS = 12
NOISE = 0.5
#: two in every run of the tests, with draws of their own and of a Gaussian
NAMES = [
    pytest.param(name, marks=() if name in ("SVI", "last layer") else pytest.mark.slow)
    for name in METHODS
]


def net(shift: float = 0.0, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """A net whose batch-norm layer has statistics of a training, moved by ``shift``."""
    with seeded(0):
        layers = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), activation(), nn.Linear(4, 1)
        ).eval()
    layers[1].running_mean += shift
    layers[1].running_var *= 1.0 + shift
    return layers


def model(layers: nn.Module, likelihood: Likelihood | None = None, **options) -> pb.BNN:
    noise = likelihood or pb.likelihoods.HomoskedasticGaussian(NOISE)
    return pb.BNN(layers, normal_prior(), noise, **options)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 3, generator=generator), torch.randn(ROWS, 1, generator=generator)


def fitted(name: str, bnn: pb.BNN) -> pb.Posterior:
    method, options = METHODS[name]
    return method.fit(bnn, *rows(), seed=0, **options)


@pytest.mark.parametrize("name", NAMES)
def test_buffers_come_from_the_file(name, tmp_path):
    x, _ = rows()
    posterior = fitted(name, model(net(shift=0.7)))
    path = posterior.save(tmp_path / "posterior.nc")
    anew = model(net())
    loaded = pb.Posterior.load(path, anew)
    torch.testing.assert_close(loaded.predict(x).f, posterior.predict(x).f)
    # the model that was given stays as it is
    assert torch.equal(anew.net[1].running_mean, torch.zeros(4))
    if posterior.meta["kind"] != "point":
        joined = pb.Posterior.load([path], anew)
        assert torch.equal(joined.model.net[1].running_mean, torch.full((4,), 0.7))


UNITS = pb.data.Standardizer(torch.zeros(3), torch.ones(3), torch.zeros(1), torch.full((1,), 2.0))
OTHERS = {
    "activation": lambda: model(net(activation=nn.ReLU)),
    "noise": lambda: model(net(), pb.likelihoods.HomoskedasticGaussian(2 * NOISE)),
    "likelihood": lambda: model(net(), pb.likelihoods.Bernoulli()),
    "units": lambda: model(net(), standardizer=UNITS),
    "type": lambda: model(net().double()),
    "names": lambda: model(nn.Sequential(net())),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", NAMES)
def test_another_model_is_refused(name, other, tmp_path):
    path = fitted(name, model(net())).save(tmp_path / "posterior.nc")
    with pytest.raises(ValueError, match="was fitted with another model"):
        pb.Posterior.load(path, OTHERS[other]())


def test_rounding_of_a_mean_of_zero_is_no_other_model(monkeypatch):
    """A net that cancels to zero predicts another zero on another machine."""
    expected = {"mean": [1e-9, -2e-9], "sd": [0.5, 0.5]}
    posterior = pb.MAP(num_steps=1, compile=False).fit(model(net()), *rows())
    for mean, sd, is_other in (
        ([3e-9, 1e-9], [0.5, 0.5], False),
        ([1e-2, 0.0], [0.5, 0.5], True),
        ([1e-9, -2e-9], [0.5, 0.6], True),
    ):
        predicted = {"mean": mean, "sd": sd}
        monkeypatch.setattr(recognition, "first_predictions", lambda _, made=predicted: made)
        if is_other:
            with pytest.raises(ValueError, match="another model"):
                recognition.check_predictions("file", posterior, expected)
        else:
            recognition.check_predictions("file", posterior, expected)


def test_a_buffer_of_another_shape_is_named(tmp_path):
    path = fitted("SVI", model(net())).save(tmp_path / "posterior.nc")
    layers = net()
    layers[1].running_mean = torch.zeros(1)
    with pytest.raises(ValueError, match="the buffer '1.running_mean' has shape"):
        pb.Posterior.load(path, model(layers))


@pytest.mark.parametrize("name", NAMES)
def test_a_net_in_bfloat16_is_stored_and_looked_at(name, tmp_path):
    x, y = rows()
    bnn = model(net().bfloat16())
    try:
        posterior = fitted(name, bnn)
    except Refused as refusal:  # torch has no matrices of this type
        assert "net.float()" in str(refusal)
        return
    loaded = pb.Posterior.load(posterior.save(tmp_path / "posterior.nc"), bnn)
    for site, draws in posterior.draws.items():
        assert torch.equal(loaded.draws[site], draws)
    torch.testing.assert_close(loaded.predict(x).f, posterior.predict(x).f)
    assert posterior.predict(x).mean.dtype == torch.float32
    assert "log_likelihood" in posterior.to_datatree(x, y).children


def test_a_net_in_float16_is_refused():
    with pytest.raises(ValueError, match="'0.weight' of 'net' is float16"):
        model(net().half())


def test_a_parametrized_net_says_how_it_is_kept():
    with seeded(0):
        layers = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)
        )
    posterior = fitted("SVI", model(layers))
    with pytest.raises(Refused, match="posterior.save"):
        pickle.dumps(posterior)
    assert torch.equal(
        copy.deepcopy(posterior).predict(rows()[0]).f, posterior.predict(rows()[0]).f
    )
