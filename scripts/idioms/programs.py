"""Idioms of Pyro programs, as tutorials and textbooks write them: name → program and its data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor
from torch.distributions import constraints

NUM = 24
GENERATOR = torch.Generator().manual_seed(0)
X = torch.linspace(-1.0, 1.0, NUM)
Y = X + 0.3 * torch.randn(NUM, generator=GENERATOR)
GROUP = torch.arange(NUM) % 4
COUNTS = torch.poisson(torch.exp(X), generator=GENERATOR)
GRADES = torch.bucketize(Y, torch.tensor([-0.5, 0.0, 0.5]))
GAPS = Y.clone()
GAPS[::5] = math.nan

Program = Callable[[Tensor, Tensor], Any]
IDIOMS: dict[str, tuple[Program, Tensor, Tensor]] = {}


def idiom(name: str, x: Tensor = X, y: Tensor = Y) -> Callable[[Program], Program]:
    """Register a program under the name of what is particular about it."""

    def register(program: Program) -> Program:
        IDIOMS[name] = (program, x, y)
        return program

    return register


def normal(name: str, scale: float = 1.0) -> Tensor:
    """A real parameter."""
    return pyro.sample(name, dist.Normal(0.0, scale))


def positive(name: str) -> Tensor:
    """A positive parameter."""
    return pyro.sample(name, dist.HalfNormal(1.0))


def observe(loc: Tensor, y: Tensor, scale: float | Tensor = 0.3) -> None:
    """Independent normal data."""
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(loc, scale), obs=y)


@idiom("plate over rows")
def regression(x, y):
    observe(normal("a") + normal("b") * x, y, positive("noise"))


@idiom("loop over rows, a site each")
def loop_of_sites(x, y):
    slope = normal("slope")
    for i in range(len(y)):
        pyro.sample(f"y_{i}", dist.Normal(slope * x[i], 0.3), obs=y[i])


@idiom("sequential plate")
def sequential_plate(x, y):
    slope = normal("slope")
    for i in pyro.plate("row", len(y)):
        pyro.sample(f"y_{i}", dist.Normal(slope * x[i], 0.3), obs=y[i])


@idiom("nested plates", y=Y.reshape(4, 6), x=X.reshape(4, 6))
def nested_plates(x, y):
    with pyro.plate("group", 4, dim=-2):
        level = normal("level")
        with pyro.plate("row", 6, dim=-1):
            pyro.sample("y", dist.Normal(level + x, 0.3), obs=y)


@idiom("index by group", x=GROUP)
def index_by_group(group, y):
    spread = positive("spread")
    with pyro.plate("group", 4):
        level = normal("level")
    observe(spread * level[group], y)


@idiom("centred hierarchy", x=GROUP)
def centred(group, y):
    spread = positive("spread")
    with pyro.plate("group", 4):
        level = pyro.sample("level", dist.Normal(0.0, spread))
    observe(level[group], y)


@idiom("boolean mask of data as an index")
def boolean_index(x, y):
    low = normal("low")
    high = normal("high")
    above = x > 0
    pyro.sample("below", dist.Normal(low * x[~above], 0.3).to_event(1), obs=y[~above])
    pyro.sample("above", dist.Normal(high * x[above], 0.3).to_event(1), obs=y[above])


@idiom("boolean mask of a parameter's rows")
def boolean_index_of_latents(x, y):
    with pyro.plate("row_effect", len(x)):
        effect = normal("effect")
    observed = x > -0.5
    pyro.sample("y", dist.Normal(effect[observed], 0.3).to_event(1), obs=y[observed])


@idiom("missing data filled in: full[mask] = latent", y=GAPS)
def imputation(x, y):
    slope = normal("slope")
    missing = y.isnan()
    with pyro.plate("gap", int(missing.sum())):
        filled = normal("filled")
    full = y.clone()
    full[missing] = filled
    pyro.sample("y", dist.Normal(slope * x, 0.3).to_event(1), obs=full)


@idiom("missing data filled in by torch.where", y=GAPS)
def imputation_by_where(x, y):
    slope = normal("slope")
    with pyro.plate("row", len(y)):
        filled = normal("filled")
        full = torch.where(y.isnan(), filled, y)
        pyro.factor("y", dist.Normal(slope * x, 0.3).log_prob(full))


@idiom("missing data masked", y=GAPS)
def masked(x, y):
    slope = normal("slope")
    with pyro.plate("row", len(y)), pyro.poutine.mask(mask=y.isfinite()):
        pyro.sample("y", dist.Normal(slope * x, 0.3), obs=y)


@idiom("obs_mask", y=GAPS.nan_to_num())
def obs_mask(x, y):
    slope = normal("slope")
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(slope * x, 0.3), obs=y, obs_mask=GAPS.isfinite())


@idiom("OrderedLogistic", y=GRADES)
def ordered_logistic(x, y):
    slope = normal("slope")
    cut = dist.TransformedDistribution(
        dist.Normal(torch.zeros(3), 1.0).to_event(1), dist.transforms.OrderedTransform()
    )
    cutpoints = pyro.sample("cutpoints", cut)
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.OrderedLogistic(slope * x, cutpoints), obs=y)


@idiom("ordinal probabilities by cumulative differences", y=GRADES)
def cumulative(x, y):
    slope = normal("slope")
    cutpoints = pyro.sample("first", dist.Normal(0.0, 1.0)) + torch.tensor([-1.0, 0.0, 1.0])
    below = torch.sigmoid(cutpoints - slope * x[:, None])
    zero = torch.zeros(len(x), 1)
    edges = torch.cat([zero, below, zero + 1.0], -1)
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Categorical(edges.diff(dim=-1)), obs=y)


@idiom("zeros filled by an index in a loop")
def filled_zeros(x, y):
    slope = normal("slope")
    mean = torch.zeros(len(x))
    for i in range(len(x)):
        mean[i] = slope * x[i]
    observe(mean, y)


@idiom("empty filled by slices")
def filled_empty(x, y):
    slope = normal("slope")
    mean = torch.empty(len(x))
    mean[:12] = slope * x[:12]
    mean[12:] = -slope * x[12:]
    observe(mean, y)


@idiom("a matrix filled in its corners")
def filled_matrix(x, y):
    r = pyro.sample("r", dist.Uniform(-0.9, 0.9))
    cov = torch.eye(2)
    cov[0, 1] = r
    cov[1, 0] = r
    pairs = torch.stack([x, y], -1)
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), cov), obs=pairs)


@idiom("recursion h[t] = a h[t-1] in a list")
def recursion(x, y):
    keep = pyro.sample("keep", dist.Uniform(0.0, 1.0))
    states = [torch.zeros(())]
    for t in range(1, len(y)):
        states.append(keep * states[-1] + x[t])
    observe(torch.stack(states), y)


@idiom("recursion h[t] = a h[t-1] in place")
def recursion_in_place(x, y):
    keep = pyro.sample("keep", dist.Uniform(0.0, 1.0))
    states = torch.zeros(len(y))
    for t in range(1, len(y)):
        states[t] = keep * states[t - 1].clone() + x[t]
    observe(states, y)


@idiom("int(data[i])", x=GROUP)
def int_of_data(group, y):
    levels = [normal(f"level_{k}") for k in range(4)]
    mean = torch.stack([levels[int(group[i])] for i in range(len(y))])
    observe(mean, y)


@idiom("data[i].item() in an if")
def item_of_data(x, y):
    low = normal("low")
    high = normal("high")
    mean = torch.stack([high * x[i] if x[i].item() > 0 else low * x[i] for i in range(len(x))])
    observe(mean, y)


@idiom("if x[i] > 0 of data")
def branch_on_data(x, y):
    slope = normal("slope")
    mean = torch.stack([slope * x[i] if x[i] > 0 else x[i] * 0 for i in range(len(x))])
    observe(mean, y)


@idiom("data.max().item() as a size", x=GROUP)
def size_of_data(group, y):
    with pyro.plate("group", int(group.max()) + 1):
        level = normal("level")
    observe(level[group], y)


@idiom("len(data.unique()) as a size", x=GROUP)
def unique_of_data(group, y):
    with pyro.plate("group", len(group.unique())):
        level = normal("level")
    observe(level[group], y)


@idiom("data[group == k] in a loop over groups", x=GROUP)
def loop_over_groups(group, y):
    for k in range(4):
        level = normal(f"level_{k}")
        rows = y[group == k]
        pyro.sample(f"y_{k}", dist.Normal(level, 0.3).expand([len(rows)]).to_event(1), obs=rows)


@idiom("torch.bincount and one-hot of data", x=GROUP)
def one_hot(group, y):
    with pyro.plate("group", 4):
        level = normal("level")
    design = torch.nn.functional.one_hot(group, 4).float()
    observe(design @ level, y)


@idiom("Gaussian process, marginal likelihood")
def gaussian_process(x, y):
    length = pyro.sample("length", dist.LogNormal(0.0, 0.5))
    cov = torch.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 0.1 * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), cov), obs=y)


@idiom("LKJ Cholesky factor")
def correlated(x, y):
    factor = pyro.sample("factor", dist.LKJCholesky(2, 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    tril = scale[:, None] * factor
    pairs = torch.stack([x, y], -1)
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), scale_tril=tril), obs=pairs)


@idiom("GaussianHMM", y=Y[:, None])
def linear_gaussian(x, y):
    keep = pyro.sample("keep", dist.Uniform(0.0, 0.99))
    unit = dist.Normal(torch.zeros(1), 1.0).to_event(1)
    small = dist.Normal(torch.zeros(1), 0.5).to_event(1)
    hmm = dist.GaussianHMM(unit, keep.reshape(1, 1), small, torch.eye(1), small, len(y))
    pyro.sample("y", hmm, obs=y)


@idiom("DiscreteHMM")
def discrete_hmm(x, y):
    stay = pyro.sample("stay", dist.Beta(2.0, 2.0))
    levels = pyro.sample("levels", dist.Normal(torch.tensor([-1.0, 1.0]), 0.5).to_event(1))
    row = torch.stack([stay, 1 - stay])
    transition = torch.stack([row, row.flip(0)]).log()
    hmm = dist.DiscreteHMM(torch.zeros(2), transition, dist.Normal(levels, 0.5), len(y))
    pyro.sample("y", hmm, obs=y)


@idiom("MixtureSameFamily")
def mixture(x, y):
    weight = pyro.sample("weight", dist.Dirichlet(torch.ones(2)))
    levels = pyro.sample("levels", dist.Normal(torch.tensor([-1.0, 1.0]), 0.5).to_event(1))
    law = dist.MixtureSameFamily(dist.Categorical(weight), dist.Normal(levels, 0.5))
    with pyro.plate("row", len(y)):
        pyro.sample("y", law, obs=y)


@idiom("ZeroInflatedPoisson", y=COUNTS)
def zero_inflated(x, y):
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    rate = normal("rate")
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.ZeroInflatedPoisson((rate * x).exp(), gate=gate), obs=y)


@idiom("NegativeBinomial2", y=COUNTS)
def negative_binomial(x, y):
    rate = normal("rate")
    concentration = pyro.sample("concentration", dist.Gamma(2.0, 0.5))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.GammaPoisson(concentration, concentration / (rate * x).exp()), obs=y)


@idiom("Binomial with total counts", y=COUNTS.clamp_max(5.0))
def binomial(x, y):
    slope = normal("slope")
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Binomial(5, logits=slope * x), obs=y)


@idiom("Multinomial", y=torch.tensor([5.0, 9.0, 10.0]))
def multinomial(x, y):
    share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
    pyro.sample("y", dist.Multinomial(24, probs=share), obs=y)


@idiom("censoring by pyro.factor")
def censored(x, y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 2.0))
    time = y.exp()
    with pyro.plate("row", len(y)):
        died = dist.Exponential(rate).log_prob(time)
        pyro.factor("time", torch.where(x > 0.5, -rate * time, died))


@idiom("truncation: TruncatedPolynomial by log_prob in a factor", y=Y.abs())
def truncated(x, y):
    scale = positive("scale")
    inside = torch.special.log_ndtr(3.0 / scale)
    with pyro.plate("row", len(y)):
        pyro.factor("y", dist.Normal(0.0, scale).log_prob(y) - inside)


@idiom("Uniform whose bound is a parameter", y=Y.abs())
def dependent_bound(x, y):
    top = pyro.sample("top", dist.Uniform(1.0, 5.0))
    middle = pyro.sample("middle", dist.Uniform(0.0, top))
    observe(middle * torch.ones(len(y)), y)


@idiom("poutine.scale")
def scaled(x, y):
    slope = normal("slope")
    with pyro.poutine.scale(scale=0.5):
        observe(slope * x, y)


@idiom("poutine.reparam (LocScaleReparam)", x=GROUP)
def reparametrised(group, y):
    def program(group, y):
        spread = positive("spread")
        with pyro.plate("group", 4):
            level = pyro.sample("level", dist.Normal(0.0, spread))
        observe(level[group], y)

    config = {"level": LocScaleReparam(0.0)}
    pyro.poutine.reparam(program, config=config)(group, y)


@idiom("a net by PyroModule weights", x=X[:, None])
def net_in_a_program(x, y):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(5, 1), 1.0).to_event(2))
    out = pyro.sample("out", dist.Normal(torch.zeros(5), 0.5).to_event(1))
    observe(torch.tanh(torch.nn.functional.linear(x, weights)) @ out, y)


@idiom("horseshoe")
def horseshoe(x, y):
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    with pyro.plate("basis", 3):
        width = pyro.sample("width", dist.HalfCauchy(1.0))
        weight = pyro.sample("weight", dist.Normal(0.0, tau * width))
    observe(torch.stack([x, x**2, x**3], -1) @ weight, y)


@idiom("ImproperUniform")
def flat(x, y):
    slope = pyro.sample("slope", dist.ImproperUniform(constraints.real, (), ()))
    observe(slope * x, y)


@idiom("ODE by Euler steps in a loop")
def euler(x, y):
    rate = positive("rate")
    state = torch.ones(())
    states = []
    for _ in range(len(y)):
        state = state - 0.1 * rate * state
        states.append(state)
    observe(torch.stack(states), y)


@idiom("if parameter > 0: (control flow on a value)")
def branch_on_value(x, y):
    slope = normal("slope")
    observe(slope * x if slope > 0 else 0.5 * slope * x, y)


@idiom("float(parameter) (the graph is cut)")
def cut(x, y):
    slope = normal("slope")
    observe(slope * x + float(slope) * 0.1, y)
