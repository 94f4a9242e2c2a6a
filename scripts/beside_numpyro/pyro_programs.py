"""The programs as users of Pyro write them: name → program of x and y."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.ops.indexing import Vindex


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


def hidden_markov(x, y):
    """Two states by ``pyro.markov``, summed by enumeration."""
    with pyro.plate("states", 2):
        moves = pyro.sample("moves", dist.Dirichlet(torch.ones(2)))
        means = pyro.sample("means", dist.Normal(torch.tensor([-2.0, 2.0]), 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    state = 0
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(
            f"state_{t}", dist.Categorical(Vindex(moves)[state]), infer={"enumerate": "parallel"}
        )
        pyro.sample(f"y_{t}", dist.Normal(Vindex(means)[state], noise), obs=y[t])


def capture_recapture(x, y):
    """Cormack–Jolly–Seber with a survival of each interval, as among Pyro's examples."""
    num_animals, num_times = y.shape
    seen = pyro.sample("seen", dist.Uniform(0.0, 1.0))
    alive = torch.ones(num_animals)
    marked = torch.zeros(num_animals).bool()
    animals = pyro.plate("animals", num_animals, dim=-1)
    for t in pyro.markov(range(num_times)):
        survival = pyro.sample(f"survival_{t}", dist.Uniform(0.0, 1.0)) if t > 0 else 1.0
        with animals, poutine.mask(mask=marked):
            lives = marked.float() * survival * alive + (1 - marked.float())
            alive = pyro.sample(
                f"alive_{t}",
                dist.Bernoulli(lives),
                infer={"enumerate": "parallel"},
            )
            pyro.sample(f"y_{t}", dist.Bernoulli(seen * alive), obs=y[:, t])
        marked = marked | y[:, t].bool()  # in place, the masks of earlier times would change too


def graded_response(x, y):
    """Ordered grades of persons on items."""
    num_persons, num_items = y.shape
    ordered = dist.TransformedDistribution(
        dist.Normal(torch.tensor([-1.5, 0.0, 0.0]), 1.0).to_event(1),
        dist.transforms.OrderedTransform(),
    )
    with pyro.plate("items", num_items, dim=-1):
        slope = pyro.sample("slope", dist.LogNormal(0.0, 0.5))
        cuts = pyro.sample("cuts", ordered)
    with pyro.plate("persons", num_persons, dim=-2):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        with pyro.plate("answers", num_items, dim=-1):
            pyro.sample("y", dist.OrderedLogistic(slope * ability, cuts), obs=y)


def poisson_process(x, y):
    """A Gaussian process of log rates by its Cholesky factor."""
    length = pyro.sample("length", dist.InverseGamma(5.0, 5.0))
    height = pyro.sample("height", dist.HalfNormal(1.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    squares = ((x[:, None] - x) / length) ** 2
    cov = height**2 * torch.exp(-0.5 * squares) + 1e-4 * torch.eye(len(x))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
    f = pyro.deterministic("f", mean + torch.linalg.cholesky(cov) @ z)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Poisson(f.exp()), obs=y)


def zero_inflated(x, y):
    """Zero-inflated Poisson regression of both parts."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    c = pyro.sample("c", dist.Normal(0.0, 1.0))
    d = pyro.sample("d", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        law = dist.ZeroInflatedPoisson((c + d * x).exp(), gate_logits=a + b * x)
        pyro.sample("y", law, obs=y)


def autoregression(x, y):
    """An AR(1) whose missing values are latent."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    keep = pyro.sample("keep", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    missing = torch.isnan(y)
    filled = pyro.sample("filled", dist.Normal(0.0, 5.0).expand([int(missing.sum())]).to_event(1))
    full = y.clone()
    full[missing] = filled
    with pyro.plate("steps", len(y) - 1):
        pyro.sample("y", dist.Normal(level + keep * full[:-1], noise), obs=full[1:])


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


def stochastic_volatility(x, y):
    """Returns whose log variance is an AR(1), by a loop over time."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    keep = pyro.sample("keep", dist.Beta(20.0, 1.5))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    log_variance = [mean + scale * z[0] / (1 - keep**2).sqrt()]
    for t in range(1, len(y)):
        log_variance.append(mean + keep * (log_variance[-1] - mean) + scale * z[t])
    h = pyro.deterministic("h", torch.stack(log_variance))
    with pyro.plate("times", len(y)):
        pyro.sample("y", dist.Normal(0.0, (h / 2).exp()), obs=y)


def gaussian_process(x, y):
    """Regression by a Gaussian process, integrated out: the whole series is one event."""
    length = pyro.sample("length", dist.InverseGamma(5.0, 5.0))
    height = pyro.sample("height", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(0.5))
    squares = ((x[:, None] - x) / length) ** 2
    cov = height**2 * torch.exp(-0.5 * squares) + (noise**2 + 1e-5) * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), cov), obs=y)


def dawid_skene(x, y):
    """Classes of items by annotators who err, summed by enumeration."""
    num_items, num_annotators = y.shape
    annotators = pyro.plate("annotators", num_annotators, dim=-1)
    with annotators, pyro.plate("classes", 3, dim=-2):
        answers = pyro.sample("answers", dist.Dirichlet(1.0 + 3.0 * torch.eye(3)[:, None]))
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("items", num_items, dim=-2):
        kind = pyro.sample("kind", dist.Categorical(shares), infer={"enumerate": "parallel"})
        with annotators as annotator:
            pyro.sample("y", dist.Categorical(Vindex(answers)[kind, annotator]), obs=y)


def item_response(x, y):
    """Right and wrong answers of persons to items, with difficulty and discrimination."""
    num_persons, num_items = y.shape
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("items", num_items, dim=-1):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, spread))
        slope = pyro.sample("slope", dist.LogNormal(0.0, 0.5))
    with pyro.plate("persons", num_persons, dim=-2):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        with pyro.plate("answers", num_items, dim=-1):
            law = dist.Bernoulli(logits=slope * (ability - difficulty))
            pyro.sample("y", law, obs=y)


def gaussian_mixture(x, y):
    """Three normals in the order of their means, summed by enumeration."""
    shares = pyro.sample("shares", dist.Dirichlet(2.0 * torch.ones(3)))
    ordered = dist.TransformedDistribution(
        dist.Normal(torch.tensor([-2.0, 0.5, 0.5]), 1.0).to_event(1),
        dist.transforms.OrderedTransform(),
    )
    means = pyro.sample("means", ordered)
    with pyro.plate("components", 3):
        widths = pyro.sample("widths", dist.LogNormal(-0.5, 0.5))
    with pyro.plate("rows", len(y)):
        component = pyro.sample(
            "component", dist.Categorical(shares), infer={"enumerate": "parallel"}
        )
        pyro.sample("y", dist.Normal(means[component], widths[component]), obs=y)


def areal_counts(x, y):
    """Counts of cells on a grid, whose log rates depend on their neighbours (a proper CAR)."""
    keep = pyro.sample("keep", dist.Beta(6.0, 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    level = pyro.sample("level", dist.Normal(1.0, 1.0))
    precision = (torch.diag(x.sum(1)) - keep * x) / scale**2
    law = dist.MultivariateNormal(torch.zeros(len(x)), precision_matrix=precision)
    effect = pyro.sample("effect", law)
    with pyro.plate("cells", len(x)):
        pyro.sample("y", dist.Poisson((level + effect).exp()), obs=y)


def seasonal_series(x, y):
    """Monthly values: a level that walks at random, and a season of two waves."""
    drift = pyro.sample("drift", dist.HalfNormal(0.2))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    start = pyro.sample("start", dist.Normal(0.0, 2.0))
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with pyro.plate("steps", len(y)):
        step = pyro.sample("step", dist.Normal(0.0, 1.0))
    level = pyro.deterministic("level", start + drift * step.cumsum(-1))
    angle = 2 * math.pi * x / 12
    waves = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos()], -1)
    with pyro.plate("months", len(y)):
        pyro.sample("y", dist.Normal(level + waves @ weight, noise), obs=y)


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


def eight_schools(x, y):
    """Effects of eight schools with known errors, not centred."""
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    between = pyro.sample("between", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        effect = pyro.deterministic("effect", mean + between * z)
        pyro.sample("y", dist.Normal(effect, x), obs=y)


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


def change_point(x, y):
    """Yearly counts whose rate changes in a year that is summed over."""
    early = pyro.sample("early", dist.Exponential(0.5))
    late = pyro.sample("late", dist.Exponential(0.5))
    years = torch.arange(len(y))
    uniform = dist.Categorical(torch.ones(len(y)))
    change = pyro.sample("change", uniform, infer={"enumerate": "parallel"})
    with pyro.plate("years", len(y)):
        rate = torch.where(years < change, early, late)
        pyro.sample("y", dist.Poisson(rate), obs=y)


def lotka_volterra(x, y):
    """Hares and lynxes by an ODE, in a loop of Heun's steps."""
    growth = pyro.sample("growth", dist.LogNormal(math.log(0.55), 0.3).expand([2]).to_event(1))
    meeting = pyro.sample("meeting", dist.LogNormal(math.log(0.03), 0.3).expand([2]).to_event(1))
    start = pyro.sample("start", dist.LogNormal(math.log(20.0), 0.5).expand([2]).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))

    def change(state):
        hares, lynxes = state[0], state[1]
        return torch.stack(
            [
                hares * (growth[0] - meeting[0] * lynxes),
                lynxes * (meeting[1] * hares - growth[1]),
            ]
        )

    state = start
    states = []
    for _ in range(len(y)):
        states.append(state)
        for _ in range(4):
            slope = change(state)
            state = state + 0.125 * (slope + change(state + 0.25 * slope))
    logs = torch.stack(states).log()
    with pyro.plate("years", len(y)):
        pyro.sample("y", dist.LogNormal(logs, noise).to_event(1), obs=y)


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
