"""The law of components: exchanges that leave a density as it is are found, and verdicts name the order of draws."""

import json
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from pyro.ops.indexing import Vindex

import pyrobnn as pb
from pyrobnn.core.groups import EXCHANGE
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.relabelling import switched_labels
from pyrobnn.posterior import component_exchange
from pyrobnn.posterior.component_exchange import exchange_group

Y = torch.tensor(
    np.random.default_rng(0).normal(size=30) + np.repeat([-3.0, 3.0], [12, 18])
).float()
LABELS = torch.tensor([[0, 0, 1], [1, 1, 1], [2, 2, 0], [2, 1, 2], [0, 0, 0]])


def mixture(x, y):
    share = pyro.sample("share", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        level = pyro.sample("level", dist.Normal(0.0, 4.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(y)):
        law = dist.MixtureSameFamily(dist.Categorical(share), dist.Normal(level, scale))
        pyro.sample("y", law, obs=y)


def unequal_mixture(x, y):
    share = pyro.sample("share", dist.Dirichlet(torch.tensor([1.0, 1.5])))
    with pyro.plate("components", 2):
        level = pyro.sample("level", dist.Normal(0.0, 4.0))
    with pyro.plate("rows", len(y)):
        law = dist.MixtureSameFamily(dist.Categorical(share), dist.Normal(level, 1.0))
        pyro.sample("y", law, obs=y)


def ordered_mixture(x, y):
    prior = dist.TransformedDistribution(
        dist.Normal(torch.zeros(2), 4.0).to_event(1), dist.transforms.OrderedTransform()
    )
    level = pyro.sample("level", prior)
    with pyro.plate("rows", len(y)):
        law = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(level, 1.0))
        pyro.sample("y", law, obs=y)


def numbered_mixture(x, y):
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    level = [pyro.sample(f"level{number}", dist.Normal(0.0, 4.0)) for number in (1, 2)]
    shares = dist.Categorical(torch.stack([share, 1 - share]))
    with pyro.plate("rows", len(y)):
        law = dist.MixtureSameFamily(shares, dist.Normal(torch.stack(level), 1.0))
        pyro.sample("y", law, obs=y)


def hidden_markov(x, y):
    with pyro.plate("states", 2):
        moves = pyro.sample("moves", dist.Dirichlet(torch.ones(2)))
        level = pyro.sample("level", dist.Normal(0.0, 4.0))
    law = torch.tensor([0.5, 0.5])
    for time in pyro.markov(range(4)):
        state = pyro.sample(f"state{time}", dist.Categorical(law), infer={"enumerate": "parallel"})
        pyro.sample(f"y{time}", dist.Normal(Vindex(level)[state], 1.0), obs=y[time])
        law = Vindex(moves)[state]


def annotators(x, y):
    num_items, num_annotators = y.shape
    with pyro.plate("annotators", num_annotators, dim=-2), pyro.plate("classes", 3):
        says = pyro.sample("says", dist.Dirichlet(torch.ones(3)))
    share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("items", num_items, dim=-2):
        true = pyro.sample("true", dist.Categorical(share), infer={"enumerate": "parallel"})
        with pyro.plate("answers", num_annotators):
            law = Vindex(says)[torch.arange(num_annotators), true, :]
            pyro.sample("y", dist.Categorical(law), obs=y)


def groups(x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    with pyro.plate("groups", 2):
        level = pyro.sample("level", dist.Normal(mean, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(level[torch.arange(len(y)) // 15], 1.0), obs=y)


def draws_of(values, width=0.02):
    """Draws (2, 400, …) about given values, of simplexes where these sum to one."""
    random = torch.Generator().manual_seed(0)
    sites = {}
    for name, value in values.items():
        centre = torch.tensor(value)
        draws = centre + width * torch.randn(2, 400, *centre.shape, generator=random)
        is_simplex = centre.dim() and bool((centre.sum(-1) - 1.0).abs().max() < 1e-6)
        sites[name] = draws / draws.sum(-1, keepdim=True) if is_simplex else draws
    return sites


SAYS = [[[0.8, 0.1, 0.1], [0.2, 0.6, 0.2], [0.1, 0.2, 0.7]]] * 3
SYMMETRIC = {
    mixture: (
        Y,
        {"share": [0.4, 0.6], "level": [-3.0, 3.0], "scale": 1.0},
        {"share": [0], "level": [0]},
    ),
    numbered_mixture: (Y, {"share": 0.4, "level1": -3.0, "level2": 3.0}, {"share": []}),
    hidden_markov: (
        Y[10:14],
        {"moves": [[0.8, 0.2], [0.4, 0.6]], "level": [-3.0, 3.0]},
        {"moves": [0, 1], "level": [0]},
    ),
    annotators: (LABELS, {"says": SAYS, "share": [0.5, 0.3, 0.2]}, {"says": [1], "share": [0]}),
}
OTHERS = {
    unequal_mixture: {"share": [0.4, 0.6], "level": [-3.0, 3.0]},
    ordered_mixture: {"level": [-3.0, 3.0]},
    groups: {"mean": 0.0, "level": [-3.0, 3.0]},
}


@pytest.mark.parametrize("program", SYMMETRIC)
def test_components_that_the_density_does_not_tell_apart_are_found_with_their_axes(program):
    y, values, expected = SYMMETRIC[program]
    found = exchange_group(pb.Density(program, (None, y)), draws_of(values))
    (text,) = found["exchange"].values
    what = json.loads(text)
    assert what["axes"] == expected
    numbered = [["level1", "level2"]] if program is numbered_mixture else []
    assert what["numbered"] == numbered
    assert int(found["num_components"][0]) == (3 if program is annotators else 2)


@pytest.mark.parametrize("program", OTHERS)
def test_what_the_density_tells_apart_is_not_found(program):
    found = exchange_group(pb.Density(program, (None, Y)), draws_of(OTHERS[program]))
    assert not found.data_vars


def test_components_that_are_alike_in_the_draws_are_not_named():
    values = {"share": [0.5, 0.5], "level": [0.0, 0.0], "scale": 1.0}
    found = exchange_group(pb.Density(mixture, (None, Y)), draws_of(values, width=0.1))
    assert not found.data_vars


@pytest.mark.parametrize("program", SYMMETRIC)
def test_chains_in_different_orders_are_said_to_have_switched_labels(program):
    y, values, expected = SYMMETRIC[program]
    draws = draws_of(values)
    found = exchange_group(pb.Density(program, (None, y)), draws)
    order = [1, 0, 2][: int(found["num_components"][0])]
    for name, axes in expected.items():
        for axis in axes:
            draws[name][1] = draws[name][1].index_select(1 + axis, torch.tensor(order))
        if not axes:
            draws[name][1] = 1.0 - draws[name][1]
    if program is numbered_mixture:
        first = draws["level1"][1].clone()
        draws["level1"][1] = draws["level2"][1]
        draws["level2"][1] = first
    sites = xr.Dataset(
        {
            name: (("chain", "draw", *(f"{name}_{axis}" for axis in range(value.dim() - 2))), value)
            for name, value in draws.items()
        }
    )
    tree = xr.DataTree.from_dict({"posterior": sites, EXCHANGE: found})
    for site in expected:
        switched = switched_labels(Evidence.of(tree), site, 1.05)
        assert switched is not None and set(expected) <= set(switched.sites)
        assert switched.after < 1.05 < switched.before
    assert "one_order" not in [check.code for check in pb.diagnose(tree).checks]


METHODS = [
    pb.SVI(num_steps=300),
    pb.Laplace(),
    pb.NUTS(num_chains=2, num_warmup=100, compile=False),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_every_method_says_that_its_draws_are_of_one_order_or_of_several(method):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = method.fit(mixture, None, Y, num_draws=100, seed=0)
        verdict = pb.diagnose(posterior.to_datatree(None, Y))
    codes = [check.code for check in verdict.checks]
    assert ("one_order" in codes) != ("labels_switched" in codes)
    if "one_order" in codes:
        assert "one of the 2 orders of the components of 'share', 'level'" in str(verdict)
    if verdict.draws == "pass":
        assert "in one of 2 orders" in verdict.lines and "in one of 2 orders" in verdict.summary


def small_groups(x, y):
    """Two groups of one row each beside many rows that tell nothing of them."""
    with pyro.plate("groups", 2):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
    mean = torch.cat([level, level.new_zeros(len(y) - 2)])
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_a_difference_that_is_small_beside_the_log_density_is_one():
    y = torch.cat([torch.tensor([-0.3, 0.3]), torch.ones(400_000)])
    draws = draws_of({"level": [-0.5, 0.5]})
    assert not exchange_group(pb.Density(small_groups, (None, y)), draws).data_vars


def test_data_of_all_that_is_tried_are_bounded(monkeypatch):
    """Sixty points of a program of many rows were computed together: 1.8 GB for 200,000 rows."""
    numbers = []
    at_each = component_exchange.at_each

    def watched(function, *points, at_once):
        numbers.append(at_once * len(Y))
        return at_each(function, *points, at_once=at_once)

    monkeypatch.setattr(component_exchange, "at_each", watched)
    monkeypatch.setattr(component_exchange, "_DATA_AT_ONCE", 3 * len(Y))
    monkeypatch.setattr(component_exchange, "_MOST_DATA", 10 * len(Y))
    y, values, _ = SYMMETRIC[mixture]
    draws = draws_of(values)
    assert exchange_group(pb.Density(mixture, (None, y)), draws).data_vars
    assert set(numbers) == {3 * len(Y)}
    # the exchange that holds, of both sites, is not among the first two
    monkeypatch.setattr(component_exchange, "_MOST_DATA", 2 * len(Y))
    assert not exchange_group(pb.Density(mixture, (None, y)), draws).data_vars
