"""Curvature against autograd: rows, output blocks, structures, exact Hessians, Gaussian blocks."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoLaplaceApproximation
from torch import nn

import pyrobnn as pb
from pyrobnn.inference.curvature import ggn, hessian, hessian_diagonal, jacobian
from pyrobnn.inference.curvature.gaussian import DenseBlock, DiagBlock, KronBlock, LowRankBlock
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.prior import prior_precision
from pyrobnn.inference.optim.descent import polish
from pyrobnn.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
)
from pyrobnn.model import Density


class Tokens(nn.Module):
    """An embedding of a sequence, a linear layer at every position, a mean."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.each = nn.Linear(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.each(self.embed(x))).mean(1))


class Reused(nn.Module):
    """A weight that is also used outside its layer's call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.layer(x)) @ self.layer.weight


def mlp():
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)
    )


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 2, (2, 1), dilation=2, bias=False),
        nn.Flatten(),
        nn.Linear(6, 2),
    )


def sequence():
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, padding="same"), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2)
    )


def numbers(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NETS = {
    "mlp": (mlp, lambda n: numbers(n, 3)),
    "cnn": (cnn, lambda n: numbers(n, 2, 5, 5)),
    "sequence": (sequence, lambda n: numbers(n, 2, 5)),
    "tokens": (Tokens, lambda n: torch.arange(3 * n).reshape(n, 3) % 5),
}


def model_of(make, likelihood=None, prior=None) -> pb.BNN:
    with seeded(0):
        net = make().double()
    return pb.BNN(net, prior or normal_prior(), likelihood or HomoskedasticGaussian(1.0))


def jacobian_of(model, x) -> NetworkJacobian:
    density = Density(model.sample_parameters, (), points="held")
    names = [site.name for site in density.sites if site.name.startswith("net.")]
    around = NetworkJacobian(model, density, density.unconstrain(model.initial_values()), {}, names)
    around.prefer_products(x)
    return around


def reference_rows(around, x) -> torch.Tensor:
    return torch.func.jacrev(lambda z: around.output(z, x))(around.mode[around.index]).detach()


@pytest.mark.parametrize("name", NETS)
def test_layer_products_are_the_jacobian(name):
    make, inputs = NETS[name]
    x = inputs(6)
    around = jacobian_of(model_of(make), x)
    assert bool(around.layers) == (name != "tokens")  # of an embedding the rows are torch.func's
    f, rows = around.rows(x)
    torch.testing.assert_close(rows, reference_rows(around, x))
    torch.testing.assert_close(f, around.output(around.mode[around.index], x))
    around.layers = []  # and so are the rows by torch.func
    torch.testing.assert_close(around.rows(x)[1], rows)


def test_rows_of_prelu_where_points_are_as_many_as_outputs():
    """Torch's own reverse derivative of it takes the points for the outputs there."""
    x = numbers(2, 3)
    model = model_of(lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)))
    rows = jacobian_of(model, x).rows(x)[1]
    net = model.net
    for row, point in zip(rows, x):
        for slope, output in zip(row, net(point[None])[0]):
            slopes = torch.autograd.grad(output, list(net.parameters()), retain_graph=True)
            torch.testing.assert_close(slope, torch.cat([value.reshape(-1) for value in slopes]))


def test_some_parameters_only():
    x = numbers(4, 3)
    prior = pb.priors.IIDPrior(
        dist.Normal(0.0, 1.0), expose_all=False, expose=["0.bias", "2.weight"]
    )
    around = jacobian_of(model_of(mlp, prior=prior), x)
    assert around.size == 4 + 20
    torch.testing.assert_close(around.rows(x)[1], reference_rows(around, x))


@pytest.mark.parametrize("end", [(), (nn.Tanh(),), (nn.ReLU(inplace=True),)], ids=str)
def test_the_rows_of_one_layer_that_is_the_output_or_not(end):
    x = numbers(4, 3)
    prior = pb.priors.IIDPrior(
        dist.Normal(0.0, 1.0), expose_all=False, expose=["2.weight", "2.bias"]
    )

    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), *end)

    around = jacobian_of(model_of(make, prior=prior), x)
    assert len(around.layers) == 1
    torch.testing.assert_close(around.rows(x)[1], reference_rows(around, x))


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


@pytest.mark.parametrize(
    "make, match",
    [
        (Reused, "also used elsewhere"),
        (lambda: nn.Sequential(nn.PReLU(3)), r"0 \(PReLU\)"),
        (
            lambda: nn.Sequential(shared := nn.Linear(3, 3), nn.Tanh(), shared),
            "also used elsewhere",
        ),
        (Twice, "called 2 times"),
    ],
)
def test_a_layer_without_factors_is_named_and_the_rows_are_right(make, match):
    x = numbers(4, 3)
    around = jacobian_of(model_of(make), x)
    torch.testing.assert_close(around.rows(x)[1], reference_rows(around, x))
    ones = torch.ones(around.size, dtype=torch.float64)
    with pytest.raises(ValueError, match=match):
        ggn(around, x, identity, "kron", ones)


def identity(f, rows):
    return torch.eye(f.shape[1]).to(f).expand(len(f), -1, -1)


def expected_hessian(likelihood, f, params):
    """E_y[−∂² log p(y | f)] by exact sums over y, or Gauss-Hermite quadrature (exact for these polynomials in y)."""
    if isinstance(likelihood, Categorical):
        cases = [(likelihood.probs(f)[k], torch.tensor([k])) for k in range(len(f))]
    elif isinstance(likelihood, Bernoulli):
        cases = [
            (likelihood.probs(f)[0], torch.ones(1, 1)),
            (1 - likelihood.probs(f)[0], torch.zeros(1, 1)),
        ]
    else:
        nodes, weights = np.polynomial.hermite_e.hermegauss(5)
        loc, scale = likelihood.loc_scale(f[None], params)
        cases = [
            (w1 * w2 / (2 * np.pi), loc + scale * torch.tensor([[n1, n2]]))
            for n1, w1 in zip(nodes, weights)
            for n2, w2 in zip(nodes, weights)
        ]
    total = 0
    for weight, y in cases:
        y = y if isinstance(likelihood, Categorical) else y.double()
        second = torch.autograd.functional.hessian(
            lambda g, y=y: -likelihood.log_prob(g[None], y, params).sum(), f
        )
        total = total + weight * second
    return total


@pytest.mark.parametrize(
    "likelihood, width, params",
    [
        (HomoskedasticGaussian(torch.tensor([0.5, 2.0])), 2, {}),
        (HomoskedasticGaussian("learned"), 2, {"likelihood.scale": torch.tensor(0.3).double()}),
        (HeteroskedasticGaussian(), 4, {}),
        (Categorical(), 3, {}),
        (Bernoulli(), 1, {}),
    ],
    ids=repr,
)
def test_the_fisher_root_squares_to_the_expected_hessian(likelihood, width, params):
    f = numbers(width)
    root = likelihood.fisher_root(f[None], params)[0]
    torch.testing.assert_close(root @ root.T, expected_hessian(likelihood, f, params))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("num_data", [3, 60])  # fewer rows than weights, and more
def test_full_and_diagonal_ggn(name, num_data):
    make, inputs = NETS[name]
    x = inputs(num_data)
    around = jacobian_of(model_of(make), x)
    prior = torch.linspace(0.5, 2.0, around.size, dtype=torch.float64)
    rows = reference_rows(around, x).flatten(0, 1)
    wanted = rows.T @ rows
    tau = torch.tensor([1.7]).double()
    c = 0.6
    block = ggn(around, x, identity, "full", prior).blocks(tau, c)[0]
    precision = torch.diag(1.7 * prior) + 0.6 * wanted
    torch.testing.assert_close(block.quad(torch.eye(around.size).double()), precision.diagonal())
    torch.testing.assert_close(block.log_det(), precision.logdet())
    root = block.root(rows[:4])
    torch.testing.assert_close(root @ root.T, rows[:4] @ precision.inverse() @ rows[:4].T)
    diagonal = ggn(around, x, identity, "diag", prior).blocks(tau, c)[0]
    torch.testing.assert_close(diagonal.prec, precision.diagonal())


@pytest.mark.parametrize(
    "name, names", [("mlp", ["4.weight", "4.bias"]), ("mlp", ["2.weight"]), ("cnn", ["0.weight"])]
)
def test_full_ggn_of_one_layer_sums_the_columns_first(name, names):
    make, inputs = NETS[name]
    x = inputs(80)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, expose=names)
    around = jacobian_of(model_of(make, prior=prior), x)
    assert len(around.layers) == 1
    scales = torch.linspace(0.5, 2.0, around.size, dtype=torch.float64)
    rows = reference_rows(around, x).flatten(0, 1) * scales.rsqrt()
    torch.testing.assert_close(ggn(around, x, identity, "full", scales).matrix, rows.T @ rows)


def test_both_sides_of_the_full_ggn_agree_by_layer():
    x = numbers(20, 3)
    around = jacobian_of(model_of(mlp), x)
    prior = torch.ones(around.size, dtype=torch.float64)
    gram = ggn(around, x, identity, "full", prior)
    gram_rows = gram.whitened_rows
    assert gram_rows is not None
    tau = torch.tensor([0.5, 1.0, 3.0]).double()
    c = torch.tensor(2.0).double()
    precision = 2.0 * gram_rows.T @ gram_rows + torch.diag(tau[gram.group])
    torch.testing.assert_close(gram.log_det(tau, c), precision.logdet())
    block = gram.blocks(tau, 2.0)[0]
    torch.testing.assert_close(block.quad(torch.eye(around.size).double()), precision.diagonal())
    torch.testing.assert_close(block.log_det(), precision.logdet())


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_chunked_is_unchunked(structure, monkeypatch):
    x = NETS["cnn"][1](7)
    around = jacobian_of(model_of(cnn), x)
    prior = torch.ones(around.size, dtype=torch.float64)
    tau = torch.ones(1, dtype=torch.float64)

    def log_det():
        return ggn(around, x, identity, structure, prior).log_det(tau, torch.ones(()))

    whole = log_det()
    monkeypatch.setattr(jacobian, "CHUNK_SCALARS", 1000)
    torch.testing.assert_close(log_det(), whole)


def dense(blocks, size):
    """The precision of blocks over coordinates 0 … size − 1, by its quadratic form."""
    total = torch.zeros(size, size, dtype=torch.float64)
    for block in blocks:
        eye = torch.eye(len(block.index), dtype=torch.float64)
        pairs = (
            block.quad(eye[:, None] + eye[None]) - block.quad(eye)[:, None] - block.quad(eye)[None]
        )
        total[block.index[:, None], block.index] = pairs / 2
    return total


def layer_blocks_only(matrix, around):
    kept = torch.zeros_like(matrix)
    for layer in around.layers:
        place = around.positions(layer).reshape(-1)
        kept[place[:, None], place] = matrix[place[:, None], place]
    return kept


@pytest.mark.parametrize(
    "prior", [normal_prior(2.0), pb.priors.FanInNormal()], ids=["iid", "fan-in"]
)
def test_kronecker_is_exact_for_one_datum(prior):
    x = numbers(1, 3)
    around = jacobian_of(model_of(mlp, prior=prior), x)
    prec = prior_precision(around).prec
    rows = reference_rows(around, x).flatten(0, 1)
    blocks = ggn(around, x, identity, "kron", prec).blocks(torch.ones(1, dtype=torch.float64), 1.0)
    wanted = layer_blocks_only(rows.T @ rows + torch.diag(prec), around)
    torch.testing.assert_close(dense(blocks, around.size), wanted)


def test_kronecker_of_many_data_is_the_product_of_sums():
    x = numbers(30, 3)
    around = jacobian_of(model_of(mlp), x)
    ones = torch.ones(around.size, dtype=torch.float64)
    blocks = ggn(around, x, identity, "kron", ones).blocks(torch.ones(1, dtype=torch.float64), 1.0)
    found = dense(blocks, around.size)
    rows = reference_rows(around, x).flatten(0, 1)
    exact = layer_blocks_only(rows.T @ rows, around) + torch.eye(around.size)
    # the first layer: inputs are the data, the backpropagated vectors from autograd on the bias
    bias = reference_rows(around, x)[:, :, 12:16].flatten(0, 1)
    design = torch.cat([x, torch.ones(30, 1)], 1)
    kron = torch.kron(bias.T @ bias, design.T @ design / 30)
    place = around.positions(around.layers[0]).reshape(-1)
    torch.testing.assert_close(found[place[:, None], place], kron + torch.eye(16))
    # its trace differs from the exact one only by the correlation of |a|² and |g|²; the matrix by a known error
    error = (found - exact).norm() / exact.norm()
    assert 0.01 < error < 0.5


def blocks_to_check():
    size = 6
    root = numbers(size, size)
    precision = root @ root.T + torch.eye(size)
    index = torch.arange(size)
    yield DenseBlock(index, torch.linalg.cholesky(precision))
    basis = torch.linalg.qr(numbers(size, 2)).Q
    yield LowRankBlock(index, numbers(size).abs() + 0.5, basis, torch.tensor([3.0, 0.5]).double())
    yield DiagBlock(index, numbers(size).abs() + 0.5)
    out = torch.linalg.qr(numbers(2, 2)).Q
    inside = torch.linalg.qr(numbers(3, 3)).Q
    yield KronBlock(index, out, inside, numbers(2, 3).abs() + 0.5, numbers(3).abs() + 0.5)


@pytest.mark.parametrize("block", list(blocks_to_check()), ids=lambda block: block.kind)
def test_blocks_agree_with_their_dense_precision(block):
    precision = dense([block], 6)
    torch.testing.assert_close(block.log_det(), precision.logdet())
    rows = numbers(4, 6, seed=3)
    root = block.root(rows)
    torch.testing.assert_close(root @ root.T, rows @ precision.inverse() @ rows.T)
    # sample is linear in the noise: its matrix squares to the covariance
    matrix = block.sample(torch.eye(6).double())
    torch.testing.assert_close(matrix.T @ matrix, precision.inverse())


def program(x, y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    weight = pyro.sample(
        "weight", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1)
    )
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.StudentT(5.0, x @ weight, scale), obs=y)


def test_hessian_is_autograds_and_pyros():
    x = numbers(30, 2)
    y = numbers(30, seed=2)
    density = Density(program, (x, y))
    z = numbers(3, seed=4) * 0.3
    exact = -torch.autograd.functional.hessian(density.log_joint, z)
    torch.testing.assert_close(hessian(density, z), exact)
    torch.testing.assert_close(hessian_diagonal(density, z), exact.diagonal())
    part = torch.tensor([0, 2])
    torch.testing.assert_close(hessian(density, z, part), exact[part[:, None], part])

    mode, _ = polish(density.log_joint, z, 100, jacobian=True)
    values = density.constrain(mode)
    with seeded(0):
        guide = AutoLaplaceApproximation(
            program, init_loc_fn=lambda site: values[site["name"]].clone()
        )
        SVI(program, guide, pyro.optim.SGD({"lr": 0.0}), Trace_ELBO()).step(x, y)
        normal = guide.laplace_approximation(x, y).get_posterior()
    pyro.clear_param_store()
    torch.testing.assert_close(
        normal.precision_matrix, hessian(density, mode), rtol=1e-6, atol=1e-8
    )
