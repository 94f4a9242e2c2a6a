"""The numbers of one repeat: the cost of NUTS, SVI, Laplace and prediction, and what short fits are worth."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from speed.relative_time import clocked, difference, in_turn
from speed.torch_models import CASES, slowest, torch_data, torch_program

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pyrobnn.data import Dataset


def nuts(seed: int) -> dict[str, float]:
    """Thirty thousand gradients of one chain each, and what the draws of a short run are worth."""
    import pyrobnn as pb

    case = CASES["1-50-1"]
    program = torch_program(case)
    x, y = torch_data(case)
    method = pb.NUTS(num_chains=4, num_warmup=100)
    fits = [
        partial(
            method.fit,
            program,
            x,
            y,
            num_draws=draws,
            seed=seed,
        )
        for draws in (10, 60)
    ]
    short, long = (fit() for fit in fits)
    gradients = long.meta["num_gradients"] - short.meta["num_gradients"]
    cost = in_turn(difference(*fits))
    values = long.predict(x[:: len(x) // 16]).f[..., 0].numpy()
    return {
        "nuts gradient": cost * 30_000 / gradients,
        "nuts ess": 1000 * slowest(values) / long.meta["num_gradients"],
    }


def svi(seed: int) -> dict[str, float]:
    """A thousand steps of the compiled loop."""
    import pyro.distributions as dist
    import torch

    import pyrobnn as pb

    x, y = torch_data(CASES["1-50-1"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    model = pb.BNN(
        net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(0.1)
    )
    short, long = (
        partial(
            pb.SVI(num_steps=steps).fit,
            model,
            x,
            y[:, None],
            num_draws=1,
            seed=seed,
        )
        for steps in (1000, 11_000)
    )
    return {"svi step": in_turn(difference(short, long)) / 10}


def laplace_and_predict(seed: int) -> dict[str, float]:
    """A full Laplace fit at a given mode, and prediction by its draws."""
    import pyrobnn as pb

    net, x, y = trained_net()
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
    method = pb.Laplace(
        map=pb.MAP(
            num_steps=1,
            polish_steps=0,
            compile=False,
        )
    )
    fit = partial(
        method.fit,
        model,
        x[:455],
        y[:455],
        init=net,
        seed=seed,
    )
    posterior = fit(num_draws=400)
    return {
        "laplace fit": in_turn(clocked(lambda: fit(num_draws=1))),
        "predict": in_turn(clocked(lambda: posterior.predict(x[455:]))),
    }


def trained_net() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A 13-50-50-1 net after 150 steps on 455 of 506 rows, and the rows."""
    import torch
    from torch import nn

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(13, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
        )
        x = torch.randn(506, 13)
        y = torch.tanh(x @ torch.randn(13, 1) / 13**0.5) + 0.3 * torch.randn(506, 1)
        optimizer = torch.optim.Adam(
            net.parameters(),
            lr=1e-2,
            weight_decay=1 / 455,
        )
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[:455]), y[:455]).backward()
            optimizer.step()
    return net, x, y


def scores(seed: int) -> dict[str, float]:
    """Mean log density of new rows of the gap data; short fits with the default options otherwise."""
    import torch

    import pyrobnn as pb

    train = pb.data.gap(seed=seed)
    test = outside_of_gap(train, 1000 + seed)
    methods = {
        "laplace": pb.Laplace(map=pb.MAP(num_steps=300, compile=False)),
        "svi": pb.SVI(num_steps=600, lr=0.02, compile=False),
    }
    log_densities = {}
    for name, method in methods.items():
        net = pb.networks.mlp(
            1,
            (50,),
            activation="tanh",
            seed=seed,
        )
        model = pb.BNN(net, pb.priors.FanInNormal(2.0), pb.likelihoods.HomoskedasticGaussian(0.2))
        prediction = method.fit(model, train.x, train.y, seed=seed).predict(test.x)
        normal = torch.distributions.Normal(prediction.loc, prediction.scale)
        of_draws = normal.log_prob(test.y).flatten(0, 1)
        of_mixture = of_draws.logsumexp(0) - math.log(len(of_draws))
        log_densities[f"{name} score"] = float(of_mixture.mean())
    return log_densities


def outside_of_gap(train: Dataset, seed: int) -> Dataset:
    """New rows of the gap data, without those in the gap."""
    import torch

    import pyrobnn as pb

    generator = torch.Generator().manual_seed(seed)
    x = (
        6
        * torch.rand(
            1200,
            1,
            generator=generator,
            dtype=torch.float64,
        )
        - 3
    ).to(train.x.dtype)
    noise = torch.randn(
        x.shape,
        generator=generator,
        dtype=x.dtype,
    )
    y = train.true_function(x) + train.true_noise.mean() * noise
    outside = (x[:, 0].abs() > 1).nonzero()[:, 0]
    return pb.data.Dataset(x, y, "gap", "regression").subset(outside)
