"""Latent classes, persons and places, as users of Pyro write them."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.ops.indexing import Vindex


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


def eight_schools(x, y):
    """Effects of eight schools with known errors, not centred."""
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    between = pyro.sample("between", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        effect = pyro.deterministic("effect", mean + between * z)
        pyro.sample("y", dist.Normal(effect, x), obs=y)
