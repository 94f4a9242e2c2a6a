"""BoTorch's fully Bayesian Gaussian processes by NUTS: their density, one code for all sizes, BoTorch's own numbers."""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch
from helpers import assert_same_mean, seeded
from torch.distributions import Gamma, HalfCauchy, LogNormal, MultivariateNormal, Normal

import pyrobnn as pb
from pyrobnn.core import private_trace
from pyrobnn.model import Density
from pyrobnn.model.compile.inductor import DECOMPOSITIONS
from pyrobnn.model.compile.right_code import identity_of
from pyrobnn.model.gradient import batched_gradient
from pyrobnn.model.padding import padded

# its import moves NumPy's random state
pytest.importorskip("botorch.models.fully_bayesian")
pytestmark = pytest.mark.filterwarnings("ignore")

N = 12
DIM = 3
with seeded(0):
    X = torch.rand(60, DIM, dtype=torch.float64)
    Y = torch.sin(5 * X[:, 0]) + 0.05 * torch.randn(60, dtype=torch.float64)
    Y = (Y - Y.mean()) / Y.std()
VARIANCES = torch.linspace(0.01, 0.2, 60, dtype=torch.float64)[:, None]


def density(sparse: bool, noisy: bool, num: int = N) -> Density:
    from pyrobnn.bridges.botorch_fully_bayesian import gaussian_process

    program = functools.partial(gaussian_process, sparse=sparse, noisy=noisy)
    x = X[:num] if noisy else torch.cat([X, VARIANCES], 1)[:num]
    return Density(program, (x, Y[:num]))


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def expected_log_joint(z: torch.Tensor, sparse: bool, noisy: bool) -> torch.Tensor:
    """The law as BoTorch states it, through torch's own distributions and derivatives."""
    model = density(sparse, noisy)
    values = model.constrain(z)
    total = Normal(0.0, 1.0).log_prob(values["mean"]) + model.log_jacobian(z)
    variance = VARIANCES[:N, 0]
    outputscale = 1.0
    if noisy:
        total = total + Gamma(number(0.9), number(10.0)).log_prob(values["noise"])
        variance = (1e-4 + values["noise"]).expand(N)
    if sparse:
        outputscale = values["outputscale"]
        total = total + Gamma(number(2.0), number(0.15)).log_prob(outputscale)
        total = total + HalfCauchy(number(0.1)).log_prob(values["tausq"])
        total = total + HalfCauchy(number(1.0)).log_prob(values["local_inv_length_sq"]).sum()
        lengths = (values["tausq"] * values["local_inv_length_sq"]).rsqrt()
    else:
        # the prior is one of the length scales, and the site is their inverse square
        lengths = values["inv_length_sq"].rsqrt()
        law = LogNormal(math.sqrt(2) + 0.5 * math.log(DIM), math.sqrt(3.0))
        total = total + (law.log_prob(lengths) + (lengths**3 / 2).log()).sum()
    scaled = X[:N] / lengths
    distance = ((scaled[:, None] - scaled).square().sum(-1) + 1e-30).sqrt()
    root = math.sqrt(5) * distance
    kernel = outputscale * (1 + root + root**2 / 3) * (-root).exp()
    mean = values["mean"].expand(N)
    return total + MultivariateNormal(mean, kernel + torch.diag(variance)).log_prob(Y[:N])


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("noisy", [True, False])
def test_the_density_and_its_gradient_are_those_of_botorch(sparse, noisy):
    model = density(sparse, noisy)
    points = model.sample_box(4, seed=1)
    filled = padded(model, 16, points)
    for z in points:
        slope, value = torch.func.grad_and_value(expected_log_joint)(z, sparse, noisy)
        for each in (model, filled):
            found_slope, found = torch.func.grad_and_value(each.log_joint)(z)
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(found_slope, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sparse", [True, False])
def test_tables_of_10_to_60_rows_are_two_graphs(sparse):
    from pyrobnn.bridges.botorch_fully_bayesian import _capacity

    graphs = []
    for num in (10, 16, 17, 30, 33, 60):
        model = density(sparse, True, num)
        z = model.sample_box(1, seed=0)
        gradient, why = batched_gradient(padded(model, _capacity(num), z).log_joint, z)
        assert not why
        graph = private_trace.trace(gradient, [z], DECOMPOSITIONS)
        graphs.append(identity_of(graph, [z], {}))
    assert len({*graphs[:2]}) == 1 and len({*graphs[2:]}) == 1


def test_the_signature_is_botorchs():
    from botorch.fit import fit_fully_bayesian_model_nuts as theirs

    from pyrobnn.botorch import fit_fully_bayesian_model_nuts as ours

    def options(function):
        parameters = inspect.signature(function).parameters.values()
        return [(parameter.name, parameter.default) for parameter in parameters]

    assert options(ours) == options(theirs)


def model_of(num: int, sparse: bool = True, **options):
    from botorch.models.fully_bayesian import (
        FullyBayesianSingleTaskGP,
        SaasFullyBayesianSingleTaskGP,
    )

    kind = SaasFullyBayesianSingleTaskGP if sparse else FullyBayesianSingleTaskGP
    with seeded():
        return kind(X[:num], Y[:num, None], **options)


def test_what_is_not_sampled_is_refused():
    pytest.importorskip("jax")
    from pyrobnn.botorch import fit_fully_bayesian_model_nuts

    with pytest.raises(pb.Refused, match="warps its inputs"):
        fit_fully_bayesian_model_nuts(model_of(N, use_input_warping=True))
    other = model_of(N)
    other.pyro_model = type("OtherPriors", (type(other.pyro_model),), {})()
    with pytest.raises(pb.Refused, match="the priors of a OtherPriors are not sampled here"):
        fit_fully_bayesian_model_nuts(other)
    with pytest.raises(TypeError, match="a fully Bayesian GP of BoTorch"):
        fit_fully_bayesian_model_nuts(torch.nn.Identity())


def functions(fit, model, seeds: range) -> torch.Tensor:
    """Means of the process at rows that it has not seen, of the draws of several runs, (run, draw, row)."""
    means = []
    for seed in seeds:
        fit(model, warmup_steps=200, num_samples=200, thinning=1, disable_progbar=True, seed=seed)
        means.append(model.posterior(X[40:45]).mean[..., 0].detach())
    return torch.stack(means)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sparse", "options"),
    [(True, {}), (True, {"train_Yvar": VARIANCES[:N]}), (False, {})],
    ids=["saas", "saas-known-noise", "matern"],
)
def test_predictions_are_those_of_botorchs_own_run(sparse, options):
    pytest.importorskip("numpyro")
    from botorch.fit import fit_fully_bayesian_model_nuts as theirs

    from pyrobnn.botorch import fit_fully_bayesian_model_nuts as ours

    model = model_of(N, sparse, **options)
    with seeded():
        draws, expected = (functions(fit, model, range(3)) for fit in (ours, theirs))
    assert_same_mean(draws, expected)
    assert_same_mean(draws**2, expected**2)
    assert model.num_mcmc_samples == 200
