"""Series and processes, in NumPyro, with sites of the same names; discrete sites are summed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist


def hidden_markov(x, y):
    """Two states, by the forward algorithm."""
    with numpyro.plate("states", 2):
        moves = numpyro.sample("moves", dist.Dirichlet(jnp.ones(2)))
        means = numpyro.sample("means", dist.Normal(jnp.array([-2.0, 2.0]), 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    seen = dist.Normal(means, noise).log_prob(y[:, None])

    def step(forward, values):
        return jax.nn.logsumexp(forward[:, None] + jnp.log(moves), 0) + values, None

    forward, _ = jax.lax.scan(step, jnp.log(moves[0]) + seen[0], seen[1:])
    numpyro.factor("series", jax.nn.logsumexp(forward))


def poisson_process(x, y):
    """A Gaussian process of log rates by its Cholesky factor."""
    length = numpyro.sample("length", dist.InverseGamma(5.0, 5.0))
    height = numpyro.sample("height", dist.HalfNormal(1.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    squares = ((x[:, None] - x) / length) ** 2
    cov = height**2 * jnp.exp(-0.5 * squares) + 1e-4 * jnp.eye(len(x))
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
    f = numpyro.deterministic("f", mean + jnp.linalg.cholesky(cov) @ z)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def autoregression(x, y):
    """An AR(1) whose missing values are latent."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    keep = numpyro.sample("keep", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    places = jnp.nonzero(jnp.isnan(y), size=15)[0]
    filled = numpyro.sample("filled", dist.Normal(0.0, 5.0).expand([15]).to_event(1))
    full = jnp.asarray(y).at[places].set(filled)
    steps = dist.Normal(level + keep * full[:-1], noise)
    numpyro.factor("steps", steps.log_prob(full[1:]).sum())


def stochastic_volatility(x, y):
    """Returns whose log variance is an AR(1), by a scan over time."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    keep = numpyro.sample("keep", dist.Beta(20.0, 1.5))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    first = mean + scale * z[0] / jnp.sqrt(1 - keep**2)

    def step(value, shock):
        value = mean + keep * (value - mean) + scale * shock
        return value, value

    _, later = jax.lax.scan(step, first, z[1:])
    h = numpyro.deterministic("h", jnp.concatenate([first[None], later]))
    with numpyro.plate("times", len(y)):
        numpyro.sample("y", dist.Normal(0.0, jnp.exp(h / 2)), obs=y)


def gaussian_process(x, y):
    """Regression by a Gaussian process, integrated out."""
    length = numpyro.sample("length", dist.InverseGamma(5.0, 5.0))
    height = numpyro.sample("height", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))
    squares = ((x[:, None] - x) / length) ** 2
    cov = height**2 * jnp.exp(-0.5 * squares) + (noise**2 + 1e-5) * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), cov), obs=y)


def seasonal_series(x, y):
    """Monthly values: a level that walks at random, and a season of two waves."""
    drift = numpyro.sample("drift", dist.HalfNormal(0.2))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    start = numpyro.sample("start", dist.Normal(0.0, 2.0))
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with numpyro.plate("steps", len(y)):
        step = numpyro.sample("step", dist.Normal(0.0, 1.0))
    level = numpyro.deterministic("level", start + drift * jnp.cumsum(step))
    angle = 2 * jnp.pi * x / 12
    waves = jnp.stack([jnp.sin(angle), jnp.cos(angle), jnp.sin(2 * angle), jnp.cos(2 * angle)], -1)
    with numpyro.plate("months", len(y)):
        numpyro.sample("y", dist.Normal(level + waves @ weight, noise), obs=y)


def change_point(x, y):
    """Yearly counts whose rate changes in a year that is summed over by hand."""
    early = numpyro.sample("early", dist.Exponential(0.5))
    late = numpyro.sample("late", dist.Exponential(0.5))
    years = jnp.arange(len(y))
    rates = jnp.where(years < years[:, None], early, late)
    logs = dist.Poisson(rates).log_prob(y).sum(-1)
    numpyro.factor("years", jax.nn.logsumexp(logs) - jnp.log(len(y)))
