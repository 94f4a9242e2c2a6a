"""Targets of inference-gym (Sountsov et al., 2020) as Pyro programs."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from posteriordb.posteriordb_programs import flat


def brownian(x, y):
    """A random walk, seen at the times ``x``; the sds of its steps and of the noise are unknown."""
    step, noise = (pyro.sample(name, dist.LogNormal(0.0, 2.0)) for name in ("step", "noise"))
    path = pyro.sample("path", flat(30))
    pyro.factor("walk", dist.Normal(0.0, step).log_prob(path.diff(prepend=torch.zeros(1))).sum())
    pyro.sample(
        "y",
        dist.Normal(path[x], noise).to_event(1),
        obs=y,
    )


def banana(x, y):
    """Two normals with sds 10 and 1, the second of which is bent around the first."""
    z = pyro.sample("z", flat(2))
    mean = torch.stack([torch.zeros(()), 0.03 * (z[0] ** 2 - 100)])
    sd = torch.tensor([10.0, 1.0])
    pyro.factor("density", dist.Normal(mean, sd).log_prob(z).sum())


def item_response(x, y):
    """Whether students answered questions, which they were asked where ``x`` is one: ability less difficulty."""
    mean = pyro.sample("mean", dist.Normal(0.75, 1.0))
    ability = pyro.sample("ability", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
    difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    pyro.factor(
        "y", (x * dist.Bernoulli(logits=mean + ability[:, None] - difficulty).log_prob(y)).sum()
    )


def stochastic_volatility(x, y):
    """Returns whose log variance is an autoregression of order one; h_t + φ h_{t-1} + φ² h_{t-2} + … by doubling."""
    mean = pyro.sample("mean", dist.Cauchy(0.0, 5.0))
    scale = pyro.sample("scale", dist.HalfCauchy(2.0))
    persistence = pyro.deterministic(
        "persistence", 2 * pyro.sample("beta", dist.Beta(20.0, 1.5)) - 1
    )
    shocks = scale * pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    path = torch.cat([shocks[:1] * (1 - persistence**2).rsqrt(), shocks[1:]])
    lag = 1
    while lag < len(y):
        path = path + persistence**lag * torch.nn.functional.pad(path[:-lag], (lag, 0))
        lag = 2 * lag
    log_variance = pyro.deterministic("log_variance", mean + path)
    pyro.sample(
        "y",
        dist.Normal(0.0, (log_variance / 2).exp()).to_event(1),
        obs=y,
    )


GYM_PROGRAMS = {
    program.__name__: program
    for program in (brownian, banana, item_response, stochastic_volatility)
}
