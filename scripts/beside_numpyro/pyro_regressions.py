"""Regressions, as users of Pyro write them."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine


def horseshoe(x, y):
    """Linear regression with a horseshoe prior, not centred."""
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    tau = pyro.sample("tau", dist.HalfCauchy(0.1))
    with pyro.plate("columns", x.shape[1]):
        width = pyro.sample("width", dist.HalfCauchy(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    weight = pyro.deterministic("weight", tau * width * z)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ weight, noise), obs=y)


def zero_inflated(x, y):
    """Zero-inflated Poisson regression of both parts."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    c = pyro.sample("c", dist.Normal(0.0, 1.0))
    d = pyro.sample("d", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        law = dist.ZeroInflatedPoisson((c + d * x).exp(), gate_logits=a + b * x)
        pyro.sample("y", law, obs=y)


def two_regressions(x, y):
    """Rows on one of two lines, summed by enumeration."""
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("lines", 2):
        offset = pyro.sample("offset", dist.Normal(0.0, 1.0))
        slope = pyro.sample("slope", dist.Normal(torch.tensor([-1.0, 1.0]), 0.5))
    with pyro.plate("rows", len(x)):
        line = pyro.sample("line", dist.Bernoulli(share), infer={"enumerate": "parallel"}).long()
        pyro.sample("y", dist.Normal(offset[line] + slope[line] * x, noise), obs=y)


def overdispersed_counts(x, y):
    """Negative binomial regression with an intercept of each of twelve groups."""
    values, groups = x[:, 0], x[:, 1].long()
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    between = pyro.sample("between", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    concentration = pyro.sample("concentration", dist.Gamma(2.0, 0.5))
    with pyro.plate("groups", 12):
        intercept = pyro.sample("intercept", dist.Normal(mean, between))
    rate = (intercept[groups] + slope * values).exp()
    with pyro.plate("rows", len(x)):
        law = dist.GammaPoisson(concentration, concentration / rate)
        pyro.sample("y", law, obs=y)


def wide_logistic(x, y):
    """Logistic regression on forty columns, with one width of their weights."""
    width = pyro.sample("width", dist.HalfNormal(1.0))
    offset = pyro.sample("offset", dist.Normal(0.0, 2.0))
    with pyro.plate("columns", x.shape[1]):
        weight = pyro.sample("weight", dist.Normal(0.0, width))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=offset + x @ weight), obs=y)


def censored_survival(x, y):
    """Weibull times of which some are only known to be longer."""
    inputs, ended = x[:, :2], x[:, 2]
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    offset = pyro.sample("offset", dist.Normal(0.0, 2.0))
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    scale = (offset + inputs @ weight).exp()
    with pyro.plate("rows", len(y)):
        with poutine.mask(mask=ended.bool()):
            pyro.sample("y", dist.Weibull(scale, shape), obs=y)
        pyro.factor("longer", -(1 - ended) * (y / scale) ** shape)


def ordinal_regression(x, y):
    """Five ordered grades by three columns."""
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    ordered = dist.TransformedDistribution(
        dist.Normal(torch.tensor([-2.0, 0.0, 0.0, 0.0]), 1.0).to_event(1),
        dist.transforms.OrderedTransform(),
    )
    cuts = pyro.sample("cuts", ordered)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.OrderedLogistic(x @ weight, cuts), obs=y)


def missing_inputs(x, y):
    """Linear regression whose first column has gaps, which are latent."""
    center = pyro.sample("center", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    missing = torch.isnan(x[:, 0])
    with pyro.plate("missing", int(missing.sum())):
        filled = pyro.sample("filled", dist.Normal(center, spread))
    first = x[:, 0].clone()
    first[missing] = filled
    with pyro.plate("known", int((~missing).sum())):
        pyro.sample("first", dist.Normal(center, spread), obs=x[~missing, 0])
    inputs = torch.stack([first, x[:, 1], x[:, 2]], -1)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(inputs @ weight, noise), obs=y)
