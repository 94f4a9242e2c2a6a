"""The study's cases: four sets of 400 points, two models of the noise, and the net of 1-50-1."""

from __future__ import annotations

import pyro.distributions as dist
import torch

import pyrobnn as pb
from pyrobnn.data import Dataset, synthetic

DATA = ("four_clusters", "four_cubic_clusters", "two_clusters", "two_cubic_clusters")
NOISES = ("inferred", "heteroskedastic")
#: seed of the 400 fresh points at which predictions are scored
UNSEEN = 1000


def model_of(
    data: Dataset,
    noise: str,
    scale: float,
    bias_scale: float,
) -> pb.BNN:
    """The net of the study under a fan-in normal prior."""
    likelihood: pb.likelihoods.Likelihood
    if noise == "heteroskedastic":
        num_outputs = 2
        likelihood = pb.likelihoods.HeteroskedasticGaussian()
    else:
        num_outputs = 1
        likelihood = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    net = pb.networks.mlp(1, (50,), num_outputs, seed=0)
    prior = pb.priors.FanInNormal(scale, bias_scale)
    return pb.BNN(
        net,
        prior,
        likelihood,
        standardizer=pb.data.Standardizer.fit(data),
    )


def fresh(name: str, seed: int) -> Dataset:
    """Another draw of a study's clusters, 400 points."""
    f = synthetic._cubic if "cubic" in name else torch.cos
    shape = synthetic._TWO_CLUSTERS if "two" in name else synthetic._FOUR_CLUSTERS
    return synthetic._clustered(name, f, 400, seed, shape)
