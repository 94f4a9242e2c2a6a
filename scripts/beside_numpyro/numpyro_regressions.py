"""Regressions, in NumPyro, with sites of the same names; discrete sites are summed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist


def horseshoe(x, y):
    """Linear regression with a horseshoe prior, not centred."""
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
    with numpyro.plate("columns", x.shape[1]):
        width = numpyro.sample("width", dist.HalfCauchy(1.0))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    weight = numpyro.deterministic("weight", tau * width * z)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x @ weight, noise), obs=y)


def zero_inflated(x, y):
    """Zero-inflated Poisson regression of both parts."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    c = numpyro.sample("c", dist.Normal(0.0, 1.0))
    d = numpyro.sample("d", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        law = dist.ZeroInflatedDistribution(dist.Poisson(jnp.exp(c + d * x)), gate_logits=a + b * x)
        numpyro.sample("y", law, obs=y)


def two_regressions(x, y):
    """Rows on one of two lines, by the sum of their densities."""
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("lines", 2):
        offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
        slope = numpyro.sample("slope", dist.Normal(jnp.array([-1.0, 1.0]), 0.5))
    lines = dist.Normal(offset + slope * x[:, None], noise).log_prob(y[:, None])
    shares = jnp.log(jnp.stack([1 - share, share]))
    numpyro.factor("rows", jax.nn.logsumexp(lines + shares, -1).sum())


def overdispersed_counts(x, y):
    """Negative binomial regression with an intercept of each of twelve groups."""
    groups = x[:, 1].astype(int)
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    between = numpyro.sample("between", dist.HalfNormal(1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 0.5))
    with numpyro.plate("groups", 12):
        intercept = numpyro.sample("intercept", dist.Normal(mean, between))
    rate = jnp.exp(intercept[groups] + slope * x[:, 0])
    with numpyro.plate("rows", len(x)):
        law = dist.GammaPoisson(concentration, concentration / rate)
        numpyro.sample("y", law, obs=y)


def wide_logistic(x, y):
    """Logistic regression on forty columns, with one width of their weights."""
    width = numpyro.sample("width", dist.HalfNormal(1.0))
    offset = numpyro.sample("offset", dist.Normal(0.0, 2.0))
    with numpyro.plate("columns", x.shape[1]):
        weight = numpyro.sample("weight", dist.Normal(0.0, width))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=offset + x @ weight), obs=y)


def censored_survival(x, y):
    """Weibull times of which some are only known to be longer."""
    inputs, ended = x[:, :2], x[:, 2]
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
    offset = numpyro.sample("offset", dist.Normal(0.0, 2.0))
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    scale = jnp.exp(offset + inputs @ weight)
    with numpyro.plate("rows", len(y)):
        with numpyro.handlers.mask(mask=ended > 0):
            numpyro.sample("y", dist.Weibull(scale, shape), obs=y)
        numpyro.factor("longer", -(1 - ended) * (y / scale) ** shape)


def ordinal_regression(x, y):
    """Five ordered grades by three columns."""
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    ordered = dist.TransformedDistribution(
        dist.Normal(jnp.array([-2.0, 0.0, 0.0, 0.0]), 1.0).to_event(1),
        dist.transforms.OrderedTransform(),
    )
    cuts = numpyro.sample("cuts", ordered)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.OrderedLogistic(x @ weight, cuts), obs=y)


def missing_inputs(x, y):
    """Linear regression whose first column has gaps, which are latent."""
    center = numpyro.sample("center", dist.Normal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    missing = np.isnan(x[:, 0])
    with numpyro.plate("missing", int(missing.sum())):
        filled = numpyro.sample("filled", dist.Normal(center, spread))
    first = jnp.asarray(x[:, 0]).at[np.nonzero(missing)[0]].set(filled)
    with numpyro.plate("known", int((~missing).sum())):
        numpyro.sample("first", dist.Normal(center, spread), obs=x[~missing, 0])
    inputs = jnp.stack([first, x[:, 1], x[:, 2]], -1)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(inputs @ weight, noise), obs=y)
