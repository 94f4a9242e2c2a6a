"""Idioms of Pyro programs: all chains at once and traced, with the numbers of one point after the other."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.model import Density
from pyrobnn.model.compile import compiled
from pyrobnn.model.gradient import batched_gradient

FOLDER = Path(__file__).parents[2] / "scripts" / "idioms"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

from programs import IDIOMS  # noqa: E402

#: those whose Python depends on the values of sites
ALONE = ("if parameter > 0: (control flow on a value)", "float(parameter) (the graph is cut)")
#: an autograd.Function of Pyro's that torch.func cannot follow
REFUSED = ("DiscreteHMM",)
FAST = (
    "OrderedLogistic",
    "missing data filled in: full[mask] = latent",
    "boolean mask of a parameter's rows",
    "recursion h[t] = a h[t-1] in place",
    "int(data[i])",
    "torch.bincount and one-hot of data",
)


def check_batched_and_traced(name):
    program, x, y = IDIOMS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        density = prepare(program, x, y, points="held").density
        z = density.sample_prior(3, seed=0)
        gradient, why = batched_gradient(density.log_joint, z)
        assert why == ""
        traced = compiled(gradient, z, enabled="trace")
        single = torch.func.grad_and_value(density.log_joint)
        alone = compiled(single, z[0], enabled="trace")
    assert traced.mode == alone.mode == "graph"
    other = density.sample_prior(3, seed=1)
    for point, slope, value in zip(other, *traced(other), strict=True):
        expected = single(point)
        torch.testing.assert_close(alone(point), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(slope, expected[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(value, expected[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FAST)
def test_an_idiom_is_batched_and_traced(name):
    check_batched_and_traced(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in IDIOMS if name not in (*FAST, *ALONE, *REFUSED)])
def test_every_idiom_is_batched_and_traced(name):
    check_batched_and_traced(name)


@pytest.mark.parametrize(
    "method",
    [
        pb.MLE(num_steps=30),
        pb.MAP(num_steps=30),
        pb.SVI(num_steps=30),
        pb.SVI(guide="full_rank", num_steps=30),
        pb.SVI(guide=AutoNormal, num_steps=30),
        pb.SVI(num_steps=30, num_particles=3),
        pb.Laplace(),
        pb.NUTS(num_chains=2, num_warmup=10),
        pb.SMC(num_particles=20),
    ],
    ids=repr,
)
def test_a_program_that_reads_its_data_is_traced_by_every_method(method):
    program, x, y = IDIOMS["missing data filled in: full[mask] = latent"]
    num_draws = 1 if isinstance(method, (pb.MLE, pb.MAP)) else 5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = method.fit(program, x, y, num_draws=num_draws)
    assert not [str(told.message) for told in caught if "could not be traced" in str(told.message)]
    assert posterior.meta["tier"]["tier"] != "eager"


@pytest.mark.parametrize("name", ALONE)
def test_what_depends_on_values_is_never_frozen(name):
    program, x, y = IDIOMS[name]
    density = Density(program, (x, y))
    z = torch.tensor([[1.5], [-1.5]])
    gradient, why = batched_gradient(density.log_joint, z)
    assert why.startswith("the program's Python depends")
    values = gradient(z)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = compiled(gradient, z.abs(), name="the program")
        alone = compiled(torch.func.grad_and_value(density.log_joint), z[0].abs(), name="a point")
    torch.testing.assert_close(call(z)[1], values)
    torch.testing.assert_close(torch.stack([alone(point)[1] for point in z]), values)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_reads_of_data_that_are_named_or_weighted_are_constants():
    def program(x, group):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        places = torch.nonzero(input=x > 0)[:, 0]
        totals = torch.bincount(group + 0, weights=2.0 * x)
        fixed = torch.bincount(input=group, weights=slope.detach() * x)
        mean = slope * torch.cat([x[places], totals]) + torch.cat([x[places], fixed])
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=torch.ones(6))

    density = Density(program, (torch.tensor([1.0, -1.0, 2.0, 3.0]), torch.tensor([0, 1, 1, 2])))
    z = torch.tensor([[0.3], [-0.5]])
    values = batched_gradient(density.log_joint, z)[0](z)[1]
    expected = torch.stack([density.log_joint(point) for point in z])
    torch.testing.assert_close(values, expected)


def test_a_mask_of_parameters_is_no_constant():
    def program(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        pyro.factor("positive", w[w > 0].sum())

    density = Density(program, (None, None))
    z = torch.tensor([[1.0, -1.0, 2.0, -2.0], [1.0, 1.0, 1.0, 1.0]])
    gradient, _ = batched_gradient(density.log_joint, z)
    prior = dist.Normal(0.0, 1.0).log_prob(z).sum(-1).double()
    torch.testing.assert_close(gradient(z)[1] - prior, torch.tensor([3.0, 4.0]).double())


def test_a_curvature_follows_a_branch_on_a_value():
    """The Hessian batches directions, not points: what is no direction is no constant either."""

    def program(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("bend", -(w**2) if w > 0 else -3.0 * w**2)

    density = Density(program, (None, None))
    hessian = torch.func.hessian(density.log_joint)
    for value, expected in ((1.0, -3.0), (-1.0, -7.0)):
        torch.testing.assert_close(float(hessian(torch.tensor([value]))), expected)


def test_what_torch_cannot_follow_is_a_sentence():
    program, x, y = IDIOMS["DiscreteHMM"]
    with pytest.raises(ValueError, match="setup_context"):
        pb.MAP().fit(program, x, y)


def test_ordinal_regression_is_sampled_at_once():
    program, x, y = IDIOMS["OrderedLogistic"]
    method = pb.NUTS(num_chains=2, num_warmup=20, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = method.fit(program, x, y, num_draws=10)
    codes = [finding["code"] for finding in posterior.meta["findings"]]
    assert "unbatched_chains" not in codes
