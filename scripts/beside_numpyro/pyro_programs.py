"""The programs as users of Pyro write them: name → program of x and y."""

from __future__ import annotations

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
