"""The same models in NumPyro, with sites of the same names; discrete sites are summed by hand."""

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


def gaussian_process(x, y):
    """Regression by a Gaussian process, integrated out."""
    length = numpyro.sample("length", dist.InverseGamma(5.0, 5.0))
    height = numpyro.sample("height", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))
    squares = ((x[:, None] - x) / length) ** 2
    cov = height**2 * jnp.exp(-0.5 * squares) + (noise**2 + 1e-5) * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), cov), obs=y)


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


def eight_schools(x, y):
    """Effects of eight schools with known errors, not centred."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    between = numpyro.sample("between", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        effect = numpyro.deterministic("effect", mean + between * z)
        numpyro.sample("y", dist.Normal(effect, x), obs=y)


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


def change_point(x, y):
    """Yearly counts whose rate changes in a year that is summed over by hand."""
    early = numpyro.sample("early", dist.Exponential(0.5))
    late = numpyro.sample("late", dist.Exponential(0.5))
    years = jnp.arange(len(y))
    rates = jnp.where(years < years[:, None], early, late)
    logs = dist.Poisson(rates).log_prob(y).sum(-1)
    numpyro.factor("years", jax.nn.logsumexp(logs) - jnp.log(len(y)))


def lotka_volterra(x, y):
    """Hares and lynxes by an ODE, in a scan of Heun's steps."""
    growth = numpyro.sample("growth", dist.LogNormal(jnp.log(0.55), 0.3).expand([2]).to_event(1))
    meeting = numpyro.sample("meeting", dist.LogNormal(jnp.log(0.03), 0.3).expand([2]).to_event(1))
    start = numpyro.sample("start", dist.LogNormal(jnp.log(20.0), 0.5).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))

    def change(state):
        hares, lynxes = state
        return jnp.stack(
            [
                hares * (growth[0] - meeting[0] * lynxes),
                lynxes * (meeting[1] * hares - growth[1]),
            ]
        )

    def year(state, _):
        first = state
        for _ in range(4):
            slope = change(state)
            state = state + 0.125 * (slope + change(state + 0.25 * slope))
        return state, first

    _, states = jax.lax.scan(year, start, None, length=len(y))
    with numpyro.plate("years", len(y)):
        numpyro.sample("y", dist.LogNormal(jnp.log(states), noise).to_event(1), obs=y)


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
        gaussian_process,
        dawid_skene,
        item_response,
        gaussian_mixture,
        areal_counts,
        seasonal_series,
        overdispersed_counts,
        wide_logistic,
        censored_survival,
        ordinal_regression,
        eight_schools,
        missing_inputs,
        change_point,
        lotka_volterra,
    )
}
