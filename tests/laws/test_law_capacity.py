"""The law of capacity: rows that are filled in weigh nothing, and tables of every size up to it are one code."""

from __future__ import annotations

import dataclasses
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, seeded
from test_law_likelihood import CASES, data, linear

import pyrobnn as pb
from pyrobnn.core import private_trace
from pyrobnn.model import Density
from pyrobnn.model.compile.inductor import DECOMPOSITIONS
from pyrobnn.model.compile.right_code import RIGHT, identity_of
from pyrobnn.model.gradient import batched_gradient
from pyrobnn.model.padding import padded, row_weights

N = 60
with seeded(1):
    X = torch.randn(N, 2, dtype=torch.float64)
    Y = X[:, 0] - 0.5 * X[:, 1] + 0.3 * torch.randn(N, dtype=torch.float64)


def slopes():
    zeros = torch.zeros(2, dtype=torch.float64)
    return pyro.sample("slopes", dist.Normal(zeros, 1.0).to_event(1))


def in_a_plate(x, y):
    mean = x @ slopes()
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


def at_half_its_weight(x, y):
    """Of eight rows that are filled up to sixteen the scale is what a plate of eight makes of sixteen."""
    mean = x @ slopes()
    with pyro.poutine.scale(scale=0.5), pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


def as_one_event(x, y):
    pyro.sample("y", dist.Normal(x @ slopes(), 0.3).to_event(1), obs=y)


def in_columns(x, y):
    mean = torch.outer(x[:, 0], slopes())
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(mean, 0.3).to_event(1), obs=torch.stack([y, -y], 1))


def under_a_mask_and_a_scale(x, y):
    mean = x @ slopes()
    with pyro.plate("rows", len(x)), pyro.poutine.mask(mask=x[:, 0] > 0):
        with pyro.poutine.scale(scale=x[:, 1].exp()):
            pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


def as_factors(x, y):
    mean = x @ slopes()
    with pyro.plate("rows", len(x)):
        pyro.factor("y", dist.Normal(mean, 0.3).log_prob(y))


def with_other_data(x, y):
    """Sixty values that the program closes over stand beside the rows."""
    weights = slopes()
    pyro.sample("earlier", dist.Normal(weights[0], 2.0).expand([N]).to_event(1), obs=Y)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ weights, 0.3), obs=y)


def in_classes(x, y):
    """A class for each row, which is summed out."""
    weights = slopes()
    with pyro.plate("rows", len(x)):
        which = pyro.sample("which", dist.Bernoulli(torch.tensor(0.3).double()))
        pyro.sample("y", dist.Normal(x @ weights + which, 0.3), obs=y)


def jointly(x, y):
    """Rows with a common error, weighed by the program."""
    weights = row_weights(len(y)).to(y)
    residual = (y - x @ slopes()) * weights
    matrix = 0.09 * torch.eye(len(y), dtype=y.dtype) + 0.5 * torch.outer(weights, weights)
    law = dist.MultivariateNormal(torch.zeros_like(y), matrix)
    # what the filled rows add, independent ones of value zero
    pyro.factor("fill", (1 - weights).sum() * 0.5 * math.log(2 * math.pi * 0.09))
    pyro.sample("y", law, obs=residual)


def by_their_mean(x, y):
    mean = x @ slopes() + y.mean()
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


def with_a_value_each(x, y):
    mean = x @ slopes()
    with pyro.plate("rows", len(x)):
        error = pyro.sample("error", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
        pyro.sample("y", dist.Normal(mean + error, 0.3), obs=y)


def by_their_number(x, y):
    mean = x @ slopes() / len(y)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


def closed_over(x, y):
    mean = X[:12] @ slopes()
    with pyro.plate("rows", 12):
        pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


def jointly_unweighed(x, y):
    matrix = 0.09 * torch.eye(len(y), dtype=y.dtype) + 0.5
    pyro.sample("y", dist.MultivariateNormal(x @ slopes(), matrix), obs=y)


FILLED = [
    in_a_plate,
    at_half_its_weight,
    as_one_event,
    in_columns,
    under_a_mask_and_a_scale,
    as_factors,
    with_other_data,
    in_classes,
    jointly,
]
REFUSED = [by_their_mean, with_a_value_each, by_their_number, closed_over, jointly_unweighed]
NAMES = [program.__name__ for program in FILLED]


def starts(density: Density) -> torch.Tensor:
    return density.sample_box(3, seed=2)


def slope_and_value(density: Density, z: torch.Tensor) -> torch.Tensor:
    gradient, value = torch.func.grad_and_value(density.log_joint)(z)
    return torch.cat([gradient.double(), value.reshape(1)])


def assert_same_density(density: Density, tolerance: float) -> None:
    z = starts(density)
    for capacity in (1, 16, 64):
        filled = padded(density, capacity, z)
        for point in z:
            expected = slope_and_value(density, point)
            found = slope_and_value(filled, point)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("program", FILLED, ids=NAMES)
@pytest.mark.parametrize("num", [1, 8, 16])
def test_the_density_is_that_of_the_rows(program, num):
    assert_same_density(Density(program, (X[:num], Y[:num])), 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_the_density_of_every_likelihood_is_that_of_the_rows(name):
    model = linear(name, CASES[name].inferred())
    problem = pb.inference.fitting.problem.prepare(model, *data(name, 40), points="held")
    assert_same_density(problem.density, 1e-4 if problem.density.dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("program", FILLED, ids=NAMES)
def test_what_stands_in_filled_rows_changes_no_bit(program):
    density = Density(program, (X[:13], Y[:13]))
    z = starts(density)
    filled = padded(density, 16, z)
    expected = [slope_and_value(filled, point) for point in z]
    filled.args = tuple(torch.cat([values[:13], values[:3] + 0.25]) for values in filled.args)
    for point, value in zip(z, expected, strict=True):
        assert torch.equal(slope_and_value(filled, point), value)


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_a_program_of_rows_that_are_not_apart_is_refused(program):
    nuts = pb.NUTS(num_chains=1, num_warmup=5, capacity=16, compile=False)
    with pytest.raises(pb.Refused, match="'capacity' fills up rows.*leave 'capacity' out"):
        nuts.fit(program, X[:12], Y[:12], num_draws=5)


def test_a_program_without_rows_is_refused():
    nuts = pb.NUTS(num_chains=1, num_warmup=5, capacity=16, compile=False)
    with pytest.raises(pb.Refused, match="takes none as its arguments"):
        nuts.fit(lambda x, y: in_a_plate(X, Y), num_draws=5)


@pytest.mark.parametrize("capacity", [0, -1, 1.5])
def test_a_capacity_is_a_number_of_rows(capacity):
    for method in (pb.NUTS, pb.SMC):
        with pytest.raises((TypeError, ValueError), match="'capacity'"):
            method(capacity=capacity)


def test_pyros_engine_has_none():
    with pytest.raises(ValueError, match="'capacity' is of compiled steps"):
        pb.NUTS(engine="pyro", capacity=16)


NUTS = pb.NUTS(num_chains=2, num_warmup=100, compile=False, capacity=16)


SMC = pb.SMC(num_particles=80, compile=False, capacity=16)


@pytest.mark.parametrize("method", [NUTS, SMC], ids=["NUTS", "SMC"])
def test_draws_are_the_same_in_every_capacity_that_comes_to_as_many_rows(method):
    draws = [
        dataclasses.replace(method, capacity=capacity)
        .fit(in_a_plate, X[:13], Y[:13], num_draws=20)
        .draws["slopes"]
        for capacity in (16, 4)
    ]
    assert torch.equal(*draws)


@pytest.mark.slow
def test_draws_are_those_of_the_posterior():
    posterior = NUTS.fit(in_a_plate, X[:13], Y[:13], num_draws=1000)
    precision = torch.eye(2) + X[:13].T @ X[:13] / 0.09
    mean = torch.linalg.solve(precision, X[:13].T @ Y[:13] / 0.09)
    assert_mean_within(posterior.draws["slopes"], mean)


def test_whatever_is_said_of_the_data_has_their_rows():
    net = pb.networks.mlp(2, (4,), 1, seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
    nuts = dataclasses.replace(NUTS, num_warmup=20)
    fitted = nuts.fit(model, X[:13].float(), Y[:13, None].float(), num_draws=10)
    assert fitted.meta["num_data"] == 13 and fitted.meta["settings"]["capacity"] == 16
    assert fitted.predict(X[:5].float()).f.shape[2] == 5
    tree = fitted.to_datatree(X[:13].float(), Y[:13, None].float())
    assert tree["log_likelihood"].to_dataset().sizes["obs"] == 13
    program = nuts.fit(in_a_plate, X[:13], Y[:13], num_draws=10)
    tree = program.to_datatree(X[:13], Y[:13])
    for group in ("log_likelihood", "posterior_predictive", "observed_data"):
        assert 13 in tree[group].to_dataset().sizes.values()
        assert 16 not in tree[group].to_dataset().sizes.values()


def identity(density: Density, z: torch.Tensor) -> str:
    gradient, why = batched_gradient(density.log_joint, z)
    assert not why
    graph = private_trace.trace(gradient, [z], DECOMPOSITIONS)
    return identity_of(graph, [z], {})


@pytest.mark.parametrize("num_first", [1, 30])
def test_tables_of_every_size_are_one_graph(num_first):
    net = pb.networks.mlp(2, (4,), 1, seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
    graphs = {"program": set(), "net": set(), "without": set()}
    for num in (num_first, 31, 32, 33, 47, 60):
        density = Density(in_a_plate, (X[:num], Y[:num]))
        z = starts(density)
        graphs["program"].add(identity(padded(density, 60, z), z))
        graphs["without"].add(identity(density, z))
        rows = X[:num].float(), Y[:num, None].float()
        problem = pb.inference.fitting.problem.prepare(model, *rows, points="held")
        z = starts(problem.density)
        graphs["net"].add(identity(padded(problem.density, 60, z), z))
    assert {name: len(found) for name, found in graphs.items()} == {
        "program": 1,
        "net": 1,
        "without": 6,
    }


@pytest.mark.slow
def test_a_growing_table_is_compiled_once():
    nuts = pb.NUTS(num_chains=1, num_warmup=10, max_tree_depth=3, compile=True, capacity=60)
    codes = []
    for num in (30, 44, 60):
        posterior = nuts.fit(in_columns, X[:num], Y[:num], num_draws=10)
        assert posterior.meta["tier"]["tier"] == "compiled"
        codes.append(len(RIGHT))
    assert codes == codes[:1] * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_five_folds_are_compiled_once():
    method = pb.NUTS(
        num_chains=1,
        num_warmup=5,
        max_tree_depth=1,
        compile=True,
        capacity=50,
    )
    codes = []
    for fold in range(5):
        chosen = torch.arange(N - 1) % 5 != fold
        estimator = pb.BNNRegressor(method=method, random_state=0)
        estimator.fit(X[: N - 1][chosen].numpy(), Y[: N - 1][chosen].numpy())
        assert estimator.posterior_.meta["tier"]["tier"] == "compiled"
        codes.append(len(RIGHT))
    assert codes == codes[:1] * 5
