"""Laplace where the data outweigh the prior by more than float64 resolves: cut or damped, and said."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_var_within, seeded
from models import normal_prior

import pyrobnn as pb

NOISE = 1e-9
OPTIONS = {
    "full": {},
    "kron": {"structure": "kron"},
    "diag": {"structure": "diag"},
    "last layer": {"subset": "last_layer"},
    "tuned": {"tune": "marginal_likelihood"},
    "per layer": {"tune": "per_layer"},
    "variational": {"curvature": "variational"},
    "held out": {"tune": "cross_validation"},
    "hessian": {"curvature": "hessian"},
    "hessian, diag": {"curvature": "hessian", "structure": "diag"},
}


def stiff(net, num_data: int, noise: float = NOISE, num_draws: int = 20, **options):
    """Laplace on inputs whose columns all come twice; the posterior, the inputs and what it warned of."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 3, generator=generator, dtype=torch.float64)
    y = x[:, :1] - 0.5 * x[:, 1:2]
    x = torch.cat([x, x], 1)
    dtype = next(net.parameters()).dtype
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(noise))
    method = pb.Laplace(num_steps=20, compile=False, **options)
    posterior = method.fit(model, x.to(dtype), y.to(dtype), num_draws=num_draws)
    return posterior, x.to(dtype), " ".join(posterior.meta["warnings"])


def linear(dtype=torch.float64) -> torch.nn.Module:
    with seeded(0):
        return torch.nn.Linear(6, 1).to(dtype)


def network(dtype=torch.float64) -> torch.nn.Module:
    with seeded(0):
        return pb.networks.mlp(6, (8,)).to(dtype)


@pytest.mark.covering(3)
@pytest.mark.filterwarnings("ignore")  # many things are wrong here, and all are in meta["warnings"]
@pytest.mark.parametrize(
    "num_data", [pytest.param(5, marks=pytest.mark.slow), 100]
)  # below and above p
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("build", [linear, pytest.param(network, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_answers_or_refuses_in_words(name, build, dtype, num_data):
    posterior, x, said = stiff(build(dtype), num_data, **OPTIONS[name])
    assert math.isfinite(posterior.meta["newton_distance"])
    if posterior.log_evidence is None:
        assert "There is no log_evidence" in said
    else:
        assert math.isfinite(posterior.log_evidence)
    for site in posterior.approximation.sites:
        draws = posterior.draws[site.name]
        assert draws.isfinite().all()
        assert (draws.std(1) > 0).all() or "the same in all draws: float32 does not resolve" in said
    assert posterior.moments(x)[1].isfinite().all()
    if not name.endswith("diag") and (build, num_data) == (
        linear,
        100,
    ):  # 7 weights, 4 of which are determined
        code = "hessian_indefinite" if "hessian" in name else "curvature_unresolved"
        found = next(each for each in posterior.meta["findings"] if each["code"] == code)
        assert "hessian" in name or found["count"] == 3


@pytest.mark.filterwarnings("ignore:the curvature of the likelihood")
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_directions_without_data_keep_the_prior(structure):
    """Exact: twice a column with weights N(0, 1) is once the column with a weight N(0, 2)."""
    posterior, x, _ = stiff(linear(), 40, num_draws=2000, structure=structure)
    difference = (
        posterior.draws["net.weight"][:, :, 0, :3] - posterior.draws["net.weight"][:, :, 0, 3:]
    )
    assert_var_within(difference, 2.0)
    design = torch.cat([x[:, :3], torch.ones(40, 1, dtype=x.dtype)], 1)
    prior = torch.tensor([0.5, 0.5, 0.5, 1.0], dtype=x.dtype)
    precision = design.T @ design / NOISE**2 + prior.diag()
    exact = (design @ precision.inverse() * design).sum(1)
    # widths of 1e-10 prior widths, from numbers of 16 digits
    torch.testing.assert_close(posterior.moments(x)[1][:, 0], exact, rtol=1e-4, atol=0)
    # y = x₁ − x₂/2, from which the mode differs by the order of the noise
    energy = 0.5 * (1 + 0.25) + precision.logdet() - prior.log().sum() + 80 * math.log(NOISE)
    exact = -0.5 * (float(energy) + 40 * math.log(2 * math.pi))
    found = (
        posterior.log_evidence + 0.5 * posterior.meta["newton_distance"] ** 2
    )  # what the mode was short of
    assert found == pytest.approx(exact, abs=0.01)


def test_directions_that_keep_the_priors_width_are_warned_of():
    with pytest.warns(
        UserWarning,
        match=r"reaches 1e\+20 times the prior precision.*: in 3 directions the posterior keeps the width of the prior",
    ):
        stiff(linear(), 40)


def test_what_overflows_is_refused():
    net = linear(torch.float32)
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(1e-19))
    x = 2 * torch.ones(3, 6)
    y = net(x).detach()  # no residuals, so that the log joint and its gradient are finite
    for structure in ("full", "kron", "diag"):
        with pytest.raises(pb.Refused, match="noise is too small"):
            pb.Laplace(structure=structure, compile=False).fit(model, x, y, init=net)
