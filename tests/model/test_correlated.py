"""Noise of several outputs: correlated, or one scale of each."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch

import pyrobnn as pb
from pyrobnn.core.seeding import generator
from pyrobnn.likelihoods import CorrelatedGaussian, HomoskedasticGaussian, learned

CORRELATION = torch.tensor([[1.0, 0.84], [0.84, 1.0]], dtype=torch.float64)
SCALE = torch.tensor([0.3, 0.6], dtype=torch.float64)
FACTOR = torch.linalg.cholesky(CORRELATION)
PARAMS = {"likelihood.scale": SCALE, "likelihood.correlation": FACTOR}
COVARIANCE = SCALE.diag() @ CORRELATION @ SCALE.diag()


def two_outputs(num=80):
    """Rows whose errors correlate by .84, (N, 1) and (N, 2)."""
    random = generator(0)
    x = torch.linspace(-1.5, 1.5, num)[:, None]
    errors = torch.randn(num, 2, generator=random) @ (SCALE.diag() @ FACTOR).T.float()
    return x, torch.cat([x, -x], 1) + errors


def fitted(likelihood, method=None):
    x, y = two_outputs()
    model = pb.BNN(pb.networks.mlp(1, (4,), 2, seed=0), pb.priors.FanInNormal(), likelihood)
    return (method or pb.MAP(num_steps=300, compile=False)).fit(model, x, y)


def test_its_density_draws_and_information_are_those_of_the_normal():
    likelihood = CorrelatedGaussian(learned(init=torch.ones(2)))
    f = torch.randn(
        7,
        2,
        generator=generator(1),
        dtype=torch.float64,
    )
    y = torch.randn(
        7,
        2,
        generator=generator(2),
        dtype=torch.float64,
    )
    law = torch.distributions.MultivariateNormal(f, COVARIANCE)
    torch.testing.assert_close(likelihood.log_prob(f, y, PARAMS), law.log_prob(y))
    root = likelihood.fisher_root(f, PARAMS)
    inverse = torch.linalg.inv(COVARIANCE)
    torch.testing.assert_close(root @ root.mT, inverse.expand(7, 2, 2))
    mean, variance = likelihood.mean_variance(f, PARAMS)
    torch.testing.assert_close(mean, f)
    torch.testing.assert_close(variance, SCALE.square().expand(7, 2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = likelihood.distribution(f, PARAMS).sample((20_000,)) - f
    # 140,000 draws: an sd of 0.003 times the variance
    torch.testing.assert_close(
        torch.cov(draws.flatten(0, 1).T),
        COVARIANCE,
        rtol=0.02,
        atol=0,
    )


@pytest.mark.parametrize("scale", [learned(torch.ones(2)), dist.HalfNormal(torch.ones(2)), SCALE])
def test_the_correlation_is_found(scale):
    posterior = fitted(CorrelatedGaussian(scale))
    factor = posterior.draws["likelihood.correlation"][0, 0].double()
    # of 80 rows a correlation of .84 has the sd .03
    assert float((factor @ factor.T)[0, 1]) == pytest.approx(0.84, abs=0.1)


@pytest.mark.parametrize("scale", [1.0, torch.ones(1), "learned", dist.HalfNormal(1.0)])
def test_it_asks_for_one_scale_of_each_output(scale):
    with pytest.raises(ValueError, match="one value of each of two or more outputs"):
        CorrelatedGaussian(scale)


def test_learned_noise_is_one_of_each_output():
    posterior = fitted(HomoskedasticGaussian("learned"))
    scale = posterior.draws["likelihood.scale"][0, 0]
    assert scale.shape == (2,) and 1.5 < float(scale[1] / scale[0]) < 2.7
    one = fitted(HomoskedasticGaussian(learned(init=1.0)))  # as it is declared
    assert one.draws["likelihood.scale"].shape == (1, 1)


def test_a_file_with_one_scale_for_all_outputs_is_read(tmp_path):
    earlier = fitted(HomoskedasticGaussian(learned(init=1.0)))
    path = earlier.save(tmp_path / "map.nc")
    net = pb.networks.mlp(1, (4,), 2, seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), HomoskedasticGaussian("learned"))
    x, _ = two_outputs()
    loaded = pb.Posterior.load(path, model).predict(x)
    torch.testing.assert_close(loaded.var, earlier.predict(x).var)


@pytest.mark.slow
@pytest.mark.usefixtures("few_moves")
def test_errors_that_depend_on_each_other_are_seen_unless_the_model_has_them():
    x, y = two_outputs()
    laplace = pb.Laplace(num_steps=300, compile=False)
    checks = {}
    for name, likelihood in (
        ("independent", HomoskedasticGaussian(dist.HalfNormal(torch.ones(2)))),
        ("correlated", CorrelatedGaussian(learned(init=torch.ones(2)))),
    ):
        tree = fitted(likelihood, laplace).to_datatree(
            x,
            y,
            num_prior_draws=0,
        )
        verdict = pb.diagnose(tree)
        checks[name] = next(c for c in verdict.checks if c.name == "across_outputs")
    assert checks["independent"].status == "fail" and checks["independent"].value > 0.5
    assert checks["correlated"].status == "pass"
