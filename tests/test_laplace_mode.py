"""Where Laplace is centred: the same mode whatever brings the data, or a word that it is none."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from models import diabetes_linear, normal_prior
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.likelihoods import HomoskedasticGaussian

#: how the data come: batch size of a loader, and of MAP
SOURCES = {
    "shuffled loader": (50, True, None),
    "loader with a short last batch": (100, False, None),
    "loader of one batch": (1000, False, None),
    "mini-batches": (None, False, 50),
    "a mini-batch above N": (None, False, 1000),
}
NOISES = {"fixed": 0.7, "inferred": dist.LogNormal(-0.5, 0.5), "learned": "learned"}


def fitted(noise: str, source: str | None) -> pb.Posterior:
    """Linear regression, so that there is one mode to be found."""
    loader_size, shuffle, batch_size = SOURCES[source] if source else (None, False, None)
    truth = diabetes_linear()
    data = truth["x"], truth["y"]
    if loader_size:
        data = (DataLoader(TensorDataset(*data), batch_size=loader_size, shuffle=shuffle),)
    with pb.seeding.seeded(0):
        net = torch.nn.Linear(10, 1).double()
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(NOISES[noise]))
    search = pb.MAP(num_steps=30, lr=0.05, batch_size=batch_size, compile=False)
    return pb.Laplace(map=search, importance=False).fit(model, *data, num_draws=1)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("noise", NOISES)
def test_the_same_mode_whatever_brings_the_data(noise, source):
    tensors, other = fitted(noise, None), fitted(noise, source)
    assert tensors.meta["newton_distance"] < 1e-3 and other.meta["newton_distance"] < 1e-3
    assert other.log_evidence == pytest.approx(tensors.log_evidence, abs=1e-3)
    if noise == "fixed":
        assert other.log_evidence == pytest.approx(float(diabetes_linear()["log_evidence"]), abs=1e-3)
    assert other.meta["num_data"] == len(diabetes_linear()["x"])
