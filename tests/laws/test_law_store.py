"""The law of the parameter store: a fit begins from the program's own values, whatever the store holds, and leaves it.

Pyro's store belongs to the process: another model, or an earlier cell, has filled it under the same names.
"""

from __future__ import annotations

import dataclasses

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from pyro.infer.autoguide.initialization import init_to_median
from pyro.nn import PyroModule, PyroParam, PyroSample
from test_contract import REPRESENTATIVES, num_draws, one_of_each_kind
from test_law_gradient import OF_PROGRAMS
from torch.distributions import constraints

import pyrobnn as pb
from pyrobnn import mcmc
from pyrobnn.model import Density

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # fits this short are told so

X = torch.linspace(-1.0, 1.0, 20)
Y = 2.0 * X + 0.3 * torch.sin(7.0 * X)
OF_STORE = [name for name in OF_PROGRAMS if name != "SMC"]  # which refuses point parameters


def program(x, y=None):
    scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    shift = pyro.param("shift", lambda: torch.tensor(0.5))
    slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Normal(slope * x + shift, scale), obs=y)


class Module(PyroModule):
    """The same as a module, whose parameters Pyro keeps in its store beside the module."""

    def __init__(self):
        super().__init__()
        self.scale = PyroParam(torch.tensor(1.0), constraints.positive)
        self.slope = PyroSample(dist.Normal(0.0, 3.0))

    def forward(self, x, y=None):
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", dist.Normal(self.slope * x, self.scale), obs=y)


def fill() -> dict[str, torch.Tensor]:
    """What another model has left: other values, another shape, another constraint."""
    pyro.clear_param_store()
    pyro.param("scale", torch.full((20,), 3.0))
    pyro.param("shift", torch.tensor(0.01), constraint=constraints.positive)
    pyro.param("other", torch.zeros(2))
    return contents()


def contents() -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in pyro.get_param_store().items()}


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) for name, value in found.items()
    )


@pytest.fixture(autouse=True)
def own_store():
    with pyro.get_param_store().scope():
        yield


@pytest.mark.parametrize("model", [lambda: program, Module], ids=["program", "module"])
@pytest.mark.parametrize("name", one_of_each_kind(OF_STORE, REPRESENTATIVES | {"Laplace-hessian"}))
def test_a_fit_begins_from_the_programs_own_values_and_leaves_the_store(name, model):
    pyro.clear_param_store()
    expected = OF_PROGRAMS[name].fit(model(), X, Y, seed=0, **num_draws(name))
    assert not contents()
    before = fill()
    posterior = OF_PROGRAMS[name].fit(model(), X, Y, seed=0, **num_draws(name))
    assert same(posterior.draws, expected.draws)
    posterior.to_datatree(X, Y)
    assert same(contents(), before)


def test_smc_refuses_point_parameters_whatever_the_store_holds():
    before = fill()
    with pytest.raises(pb.Refused, match="'scale'"):
        OF_PROGRAMS["SMC"].fit(program, X, Y)
    assert same(contents(), before)


def test_pyros_sampler_begins_from_the_programs_own_values():
    def run(**options):
        kernel = mcmc.NUTS(program, max_tree_depth=3, **options)
        sampler = mcmc.MCMC(kernel, num_samples=5, warmup_steps=5, disable_progbar=True)
        sampler.method = dataclasses.replace(sampler.method, compile=False)
        with seeded():
            sampler.run(X, Y)
        return sampler.posterior.draws

    for options in ({}, {"init_strategy": init_to_median}):
        pyro.clear_param_store()
        expected = run(**options)
        before = fill()
        assert same(run(**options), expected)
        assert same(contents(), before)


def test_a_log_density_that_runs_a_program_of_its_own_sees_an_empty_store():
    def log_density(values):
        return -(values["z"] - pyro.param("scale", torch.tensor(1.0))).square().sum()

    before = fill()
    posterior = pb.sample(log_density, {"z": torch.zeros(1)}, method=pb.MAP(compile=False))
    assert posterior.draws["z"].item() == pytest.approx(1.0, abs=1e-3)
    assert same(contents(), before)


def test_a_parameter_without_an_initial_value_is_read_from_the_store():
    """As Pyro does; and a second statement in the same run has the value of the first."""

    def reads(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
        scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
        with pyro.plate("rows", len(x)):
            pyro.sample(
                "y",
                dist.Normal(slope * x + pyro.param("elsewhere"), scale * pyro.param("scale")),
                obs=y,
            )

    with pytest.raises(ValueError, match="'elsewhere' has no initial value"):
        Density(reads, (X, Y))
    before = fill()
    pyro.param("elsewhere", torch.tensor(2.5), constraint=constraints.positive)
    points = Density(reads, (X, Y)).initial_points
    assert float(points["elsewhere"]) == pytest.approx(2.5) and float(points["scale"]) == 1.0
    del pyro.get_param_store()["elsewhere"]
    assert same(contents(), before)


def test_an_earlier_posterior_is_where_a_fit_begins_if_it_is_given():
    fill()
    fitted = pb.MAP(num_steps=100, compile=False).fit(program, X, Y)
    held = OF_PROGRAMS["NUTS"].fit(program, X, Y, init=fitted, num_draws=4)
    for name in ("scale", "shift"):
        assert torch.equal(held.draws[name][0, 0], fitted.draws[name][0, 0])
    assert not torch.equal(fitted.draws["scale"][0, 0], torch.tensor(1.0))


def test_an_initial_value_that_is_drawn_is_drawn_once():
    """A density that holds it would be another at every call."""

    def drawn(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
        shift = pyro.param("shift", lambda: torch.randn(()))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(slope * x + shift, 0.5), obs=y)

    density = Density(drawn, (X, Y), points="held")
    z = torch.zeros(1)
    assert density.log_joint(z) == density.log_joint(z)
    assert torch.equal(
        density.initial_points["shift"], density.trace({"slope": z[0]})["shift"]["value"]
    )


def test_a_parameter_that_the_user_holds_keeps_its_link_to_the_store():
    value = pyro.param("kept", torch.tensor(1.0), constraint=constraints.positive)
    plain = pyro.param("plain", torch.tensor(1.0))
    Density(program, (X, Y))
    assert value.unconstrained() is not None
    assert plain.unconstrained() is not None
    assert pyro.get_param_store().param_name(plain.unconstrained()) == "plain"
