"""The law of repeats: a program written as a loop is fitted, by every method, in the operations of one without.

Its Python runs while the fit is set up, and in no step of it.
"""

from __future__ import annotations

import dataclasses

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.ops.indexing import Vindex
from test_contract import REPRESENTATIVES, num_draws, one_of_each_kind
from test_law_gradient import OF_PROGRAMS

import pyrobnn as pb
from pyrobnn.inference.vi.elbo import Elbo
from pyrobnn.inference.vi.families import FullRank, MeanField
from pyrobnn.model import Density

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # fits this short are told so

TOSSES = torch.tensor([1.0, 1.0, 0.0] * 15)
RUNS = {"count": 0}
METHODS = OF_PROGRAMS | {"SVI-AutoNormal": pb.SVI(guide=AutoNormal, num_steps=20, compile=False)}
#: Pyro's own engine runs the program at every step, as Pyro does
METHODS.pop("NUTS-pyro", None)


def coin(x, y):
    """Pyro's first tutorial: a site for each toss."""
    RUNS["count"] += 1
    share = pyro.sample("share", dist.Beta(10.0, 10.0))
    for toss in pyro.plate("tosses", len(y)):
        pyro.sample(f"toss_{toss}", dist.Bernoulli(share), obs=y[toss])


def levels(x, y):
    """A state-space model, the normal prior of each level around the one before; a point parameter."""
    drift = pyro.sample("drift", dist.LogNormal(-1.0, 0.5))
    noise = pyro.param("noise", torch.tensor(0.5), constraint=dist.constraints.positive)
    level = torch.zeros(())
    for t in range(len(y)):
        level = pyro.sample(f"level_{t}", dist.Normal(level, drift))
        pyro.sample(f"y_{t}", dist.Normal(level, noise), obs=y[t])


def states(x, y):
    """A hidden Markov model whose states are summed out."""
    with pyro.plate("states", 2):
        moves = pyro.sample("moves", dist.Dirichlet(torch.ones(2)))
        means = pyro.sample("means", dist.Normal(torch.tensor([-1.0, 1.0]), 0.5))
    state = 0
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(f"state_{t}", dist.Categorical(Vindex(moves)[state]))
        pyro.sample(f"y_{t}", dist.Normal(Vindex(means)[state], 0.5), obs=y[t])


PROGRAMS = {
    "coin": (coin, TOSSES),
    "levels": (levels, torch.linspace(-1.0, 1.0, 30).sin()),
    "states": (states, torch.tensor([-1.2, -0.7, 0.8, 1.1] * 8)),
}
#: fields of methods that say how many steps are taken
LENGTHS = ("num_steps", "num_warmup", "init_steps", "max_moves")


def in_steps(method, times: int):
    """The method with so many times its steps, each run as it is, not from a trace, which runs the program once."""
    fields = {field.name for field in dataclasses.fields(method)}
    options = {name: times * getattr(method, name) for name in LENGTHS if name in fields}
    if getattr(method, "map", None) is not None:
        options["map"] = in_steps(method.map, times)
    return dataclasses.replace(method, compile="eager", **options)


def num_runs(method, **options) -> int:
    """How often a fit runs the coin's program."""
    RUNS["count"] = 0
    posterior = method.fit(coin, None, TOSSES, seed=0, **options)
    assert posterior.draws["share"].isfinite().all()
    return RUNS["count"]


@pytest.mark.parametrize(
    "name", one_of_each_kind(METHODS, REPRESENTATIVES | {"Laplace-hessian", "SVI-AutoNormal"})
)
def test_no_step_of_a_fit_runs_the_program(name, monkeypatch):
    # on a slow machine the prior of a program as long as this one would be looked at in some fits only
    monkeypatch.setattr("pyrobnn.inference.fitting.program._CHEAP_SECONDS", float("inf"))
    short = num_runs(in_steps(METHODS[name], 1), **num_draws(name))
    long = num_runs(in_steps(METHODS[name], 3), **num_draws(name))
    # a look at what float32 rounds is a run, too
    assert long < short + 15


def test_a_search_inside_of_a_fit_has_what_the_fit_has_found(monkeypatch):
    made = []

    def counted(self, *args):
        made.append(self)
        return whole(self, *args)

    whole = Density.in_fewer_operations
    monkeypatch.setattr(Density, "in_fewer_operations", counted)
    METHODS["Laplace-hessian"].fit(coin, None, TOSSES, seed=0, num_draws=6)
    assert len(made) == 1


def test_the_mode_is_that_of_the_conjugate_posterior():
    posterior = pb.MAP(num_steps=300, lr=0.05).fit(coin, None, TOSSES, seed=0)
    heads = float(TOSSES.sum())
    mode = (heads + 9.0) / (len(TOSSES) + 18.0)
    assert float(posterior.draws["share"]) == pytest.approx(mode, abs=1e-4)


def both(name: str) -> tuple[Density, Density]:
    """The density of a program in float64, and the same in fewer operations."""
    program, y = PROGRAMS[name]
    density = Density(program, (None, y), double=True)
    merged = density.in_fewer_operations()
    assert merged.is_merged and not density.is_merged
    return density, merged


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_two_derivatives_are_the_programs(name):
    density, merged = both(name)
    z = density.sample_box(1, seed=5)[0]
    for one, other in zip(merged.log_parts(z), density.log_parts(z), strict=True):
        assert one.item() == pytest.approx(other.item(), rel=1e-10)
    for jacobian in (True, False):
        slope, value = torch.func.grad_and_value(merged.log_joint)(z, jacobian=jacobian)
        expected_slope, expected = torch.func.grad_and_value(density.log_joint)(
            z, jacobian=jacobian
        )
        torch.testing.assert_close((slope, value), (expected_slope, expected))
    direction = torch.linspace(-1.0, 1.0, density.dim, dtype=z.dtype)

    def product(of: Density) -> torch.Tensor:
        return torch.func.grad(lambda u: torch.func.grad(of.log_joint)(u) @ direction)(z)

    torch.testing.assert_close(product(merged), product(density))


def test_points_that_are_held_are_those_that_are_given():
    density, merged = both("levels")
    values = {"noise": torch.tensor(0.2, dtype=torch.float64)}
    held, held_merged = density.holding(values), merged.holding(values)
    assert held_merged.is_merged and held_merged.dim == density.dim - 1
    z = held.sample_box(1, seed=2)[0]
    torch.testing.assert_close(held_merged.log_joint(z), held.log_joint(z))


@pytest.mark.parametrize("family", [MeanField, FullRank])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bound_is_the_programs(name, family):
    density, merged = both(name)
    start = density.sample_box(1, seed=1)[0]
    guide = family(start[: density.dim - _num_points(density)], 0.1)
    theta = torch.cat([guide.initial(), start[density.dim - _num_points(density) :]])
    weight, key = torch.tensor(0.7, dtype=torch.float64), torch.tensor(3)
    gradients = []
    for each in (density, merged):
        elbo = Elbo(each, guide)
        slope, tracked = torch.func.grad(lambda t, elbo=elbo: elbo(t, weight, key), has_aux=True)(
            theta
        )
        gradients.append((slope, tracked))
    torch.testing.assert_close(*gradients)


def _num_points(density: Density) -> int:
    return sum(site.size for site in density.sites if site.kind == "point")


def test_a_copy_that_is_changed_has_the_operations_of_its_own_program():
    density, merged = both("coin")
    changed = merged.with_programs(lambda program: pyro.poutine.scale(program, scale=2.0))
    z = density.sample_box(1, seed=0)[0]
    jacobian = density.log_jacobian(z)
    expected = 2 * (density.log_joint(z) - jacobian) + jacobian
    torch.testing.assert_close(changed.log_joint(z), expected)
