"""Latent classes, persons and places, in NumPyro, with sites of the same names; discrete sites are summed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist


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


def dawid_skene(x, y):
    """Classes of items by annotators who err, summed by hand."""
    num_items, num_annotators = y.shape
    with (
        numpyro.plate("classes", 3, dim=-2),
        numpyro.plate("annotators", num_annotators, dim=-1),
    ):
        answers = numpyro.sample("answers", dist.Dirichlet(1.0 + 3.0 * jnp.eye(3)[:, None]))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    # class × item × annotator
    logs = jnp.log(answers)[:, jnp.arange(num_annotators), y]
    numpyro.factor("items", jax.nn.logsumexp(jnp.log(shares)[:, None] + logs.sum(-1), 0).sum())


def item_response(x, y):
    """Right and wrong answers of persons to items, with difficulty and discrimination."""
    num_persons, num_items = y.shape
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("items", num_items, dim=-1):
        difficulty = numpyro.sample("difficulty", dist.Normal(0.0, spread))
        slope = numpyro.sample("slope", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("persons", num_persons, dim=-2):
        ability = numpyro.sample("ability", dist.Normal(0.0, 1.0))
        with numpyro.plate("answers", num_items, dim=-1):
            law = dist.Bernoulli(logits=slope * (ability - difficulty))
            numpyro.sample("y", law, obs=y)


def gaussian_mixture(x, y):
    """Three normals in the order of their means, by the sum of their densities."""
    shares = numpyro.sample("shares", dist.Dirichlet(2.0 * jnp.ones(3)))
    ordered = dist.TransformedDistribution(
        dist.Normal(jnp.array([-2.0, 0.5, 0.5]), 1.0).to_event(1),
        dist.transforms.OrderedTransform(),
    )
    means = numpyro.sample("means", ordered)
    with numpyro.plate("components", 3):
        widths = numpyro.sample("widths", dist.LogNormal(-0.5, 0.5))
    logs = dist.Normal(means, widths).log_prob(y[:, None]) + jnp.log(shares)
    numpyro.factor("rows", jax.nn.logsumexp(logs, -1).sum())


def areal_counts(x, y):
    """Counts of cells on a grid, whose log rates depend on their neighbours (a proper CAR)."""
    keep = numpyro.sample("keep", dist.Beta(6.0, 2.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(1.0, 1.0))
    precision = (jnp.diag(x.sum(1)) - keep * x) / scale**2
    law = dist.MultivariateNormal(jnp.zeros(len(x)), precision_matrix=precision)
    effect = numpyro.sample("effect", law)
    with numpyro.plate("cells", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + effect)), obs=y)


def eight_schools(x, y):
    """Effects of eight schools with known errors, not centred."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    between = numpyro.sample("between", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        effect = numpyro.deterministic("effect", mean + between * z)
        numpyro.sample("y", dist.Normal(effect, x), obs=y)
