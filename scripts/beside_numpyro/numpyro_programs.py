"""The same models in NumPyro, with sites of the same names; discrete sites are summed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
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


def capture_recapture(x, y):
    """Cormack–Jolly–Seber: after the last sight, dead or never seen again."""
    num_animals, num_times = y.shape
    seen = numpyro.sample("seen", dist.Uniform(0.0, 1.0))
    survival = [
        numpyro.sample(f"survival_{t}", dist.Uniform(0.0, 1.0)) for t in range(1, num_times)
    ]
    unseen = jnp.ones(())
    never_again = [unseen]
    for rate in reversed(survival):
        unseen = 1 - rate + rate * (1 - seen) * unseen
        never_again.insert(0, unseen)
    first = y.argmax(1)
    last = num_times - 1 - y[:, ::-1].argmax(1)
    total = jnp.log(jnp.stack(never_again))[last].sum()
    for t in range(1, num_times):
        between = (first < t) & (t <= last)
        total += (
            between * (jnp.log(survival[t - 1]) + jnp.log(jnp.where(y[:, t], seen, 1 - seen)))
        ).sum()
    numpyro.factor("animals", total)


def graded_response(x, y):
    """Ordered grades of persons on items."""
    num_persons, num_items = y.shape
    ordered = dist.TransformedDistribution(
        dist.Normal(jnp.array([-1.5, 0.0, 0.0]), 1.0).to_event(1),
        dist.transforms.OrderedTransform(),
    )
    with numpyro.plate("items", num_items, dim=-1):
        slope = numpyro.sample("slope", dist.LogNormal(0.0, 0.5))
        cuts = numpyro.sample("cuts", ordered)
    with numpyro.plate("persons", num_persons, dim=-2):
        ability = numpyro.sample("ability", dist.Normal(0.0, 1.0))
        with numpyro.plate("answers", num_items, dim=-1):
            numpyro.sample("y", dist.OrderedLogistic(slope * ability, cuts), obs=y)


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


def zero_inflated(x, y):
    """Zero-inflated Poisson regression of both parts."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    c = numpyro.sample("c", dist.Normal(0.0, 1.0))
    d = numpyro.sample("d", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        law = dist.ZeroInflatedDistribution(dist.Poisson(jnp.exp(c + d * x)), gate_logits=a + b * x)
        numpyro.sample("y", law, obs=y)


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


PROGRAMS = {
    program.__name__: program
    for program in (
        horseshoe,
        hidden_markov,
        capture_recapture,
        graded_response,
        poisson_process,
        zero_inflated,
        autoregression,
        two_regressions,
        stochastic_volatility,
    )
}
