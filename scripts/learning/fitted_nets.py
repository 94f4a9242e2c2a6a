"""The net of all parts: one hidden layer, its prior, its units, and the posterior of SMC."""

from __future__ import annotations

import itertools
import math

import pyro.distributions as dist
import torch
from torch import Tensor

import pyrobnn as pb

SMC = pb.SMC(num_particles=128)
SINE = type("Sine", (torch.nn.Module,), {"forward": lambda self, z: z.sin()})
PRIORS = list(itertools.product((1.0, 2.0, 4.0), (0.1, dist.HalfNormal(0.5))))


def net(
    num_inputs: int,
    scale: float,
    noise: float | dist.HalfNormal,
    units: pb.data.Standardizer,
    activation: str | type[torch.nn.Module] = "tanh",
) -> pb.BNN:
    """The net of all parts."""
    # wider biases of a sine: any phase
    prior = pb.priors.FanInNormal(scale, 2.0 if activation is SINE else 1.0)
    mlp = pb.networks.mlp(
        num_inputs,
        (50,),
        activation=activation,
        seed=0,
    )
    return pb.BNN(
        mlp,
        prior,
        pb.likelihoods.HomoskedasticGaussian(noise),
        standardizer=units,
    )


def most_evidence(
    x: Tensor,
    y: Tensor,
    units: pb.data.Standardizer,
    seed: int,
) -> pb.Posterior:
    """The posterior of the prior that has most evidence."""
    fits = (
        SMC.fit(
            net(x.shape[1], scale, noise, units),
            x,
            y,
            seed=seed,
        )
        for scale, noise in PRIORS
    )
    return max(fits, key=lambda posterior: posterior.log_evidence or -math.inf)


def units_of(x: Tensor, y: Tensor) -> pb.data.Standardizer:
    """Standard units of the inputs ``x`` and the targets ``y``, which need not be of the same rows."""
    of_x = pb.data.Standardizer.fit(pb.data.Dataset(x, torch.zeros(len(x), 1), "x", "regression"))
    of_y = pb.data.Standardizer.fit(pb.data.Dataset(x[: len(y)], y, "y", "regression"))
    return pb.data.Standardizer(of_x.x_mean, of_x.x_scale, of_y.y_mean, of_y.y_scale)
