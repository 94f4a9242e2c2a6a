"""NUTS at its defaults on programs that nobody wrote with it in mind: flat and vague priors, scales far from one."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, assert_var_within, seeded
from pyro.distributions import constraints

import pyrobnn as pb
from pyrobnn.density import Density
from pyrobnn.inference.hmc import run

QUICK = {"compile": False}


def _flat_regression(x, y):
    beta = pyro.sample("beta", dist.ImproperUniform(constraints.real, (), (2,)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


def _line():
    x = torch.stack([torch.ones(30), torch.linspace(-2.0, 3.0, 30)], 1)
    return x, x @ torch.tensor([3.0, -2.0]) + torch.linspace(-1.0, 1.0, 30).sin()


def test_a_flat_prior_has_the_posterior_of_least_squares():
    x, y = _line()
    posterior = pb.NUTS(**QUICK).fit(_flat_regression, x, y, num_draws=300)
    cov = torch.linalg.inv(x.double().T @ x.double())
    mean = cov @ x.double().T @ y.double()
    assert_mean_within(posterior.draws["beta"], mean)
    assert_var_within(posterior.draws["beta"], cov.diagonal(), mean=mean)
    assert posterior.meta["warnings"] == []


@pytest.mark.parametrize("method", [pb.MAP(compile=False), pb.Laplace(compile=False, curvature="hessian")])
def test_a_flat_prior_leaves_other_methods_the_likelihood(method):
    x, y = _line()
    posterior = method.fit(_flat_regression, x, y)
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    mode = posterior.draws["beta"].mean((0, 1))
    torch.testing.assert_close(mode, best, atol=0.1, rtol=0.1)


def test_flat_priors_on_supports_of_their_own():
    def program(x, y):
        sigma = pyro.sample("sigma", dist.ImproperUniform(constraints.positive, (), ()))
        rate = pyro.sample("rate", dist.ImproperUniform(constraints.unit_interval, (2,), ()).to_event(1))
        pyro.sample("a", dist.Normal(0.0, sigma).expand([6]).to_event(1), obs=torch.ones(6))
        pyro.sample("b", dist.Binomial(10.0, rate).to_event(1), obs=torch.tensor([3.0, 9.0]))

    posterior = pb.NUTS(**QUICK).fit(program, num_draws=300)
    # sigma^-2 is Gamma((6 - 1) / 2, 6 / 2) where sigma is flat; a rate is Beta(k + 1, 10 - k + 1)
    assert_mean_within(posterior.draws["sigma"] ** -2.0, 2.5 / 3.0, min_ess=300)
    assert_mean_within(posterior.draws["rate"], [4 / 12, 10 / 12], min_ess=300)


@pytest.mark.filterwarnings("ignore:.*(maximum tree depth|diverged)")
def test_programs_start_in_a_box_and_nets_at_their_prior(monkeypatch):
    seen = {}
    begin = run.Run.begin
    monkeypatch.setattr(
        "pyrobnn.inference.hmc.run.Run.begin",
        lambda self, z, *rest: (seen.update(z=z), begin(self, z, *rest))[1],
    )

    def vague(x, y):
        pyro.sample("z", dist.Normal(0.0, 1e6).expand([50]).to_event(1))

    options = {"num_warmup": 0, "step_size": 0.1, "max_tree_depth": 1, **QUICK}
    pb.NUTS(**options).fit(vague, num_draws=1)
    assert 1.5 < float(seen["z"].abs().max()) <= 2.0
    pb.NUTS(init="prior", **options).fit(vague, num_draws=1)
    assert float(seen["z"].abs().max()) > 1e5
    with seeded():
        linear = torch.nn.Linear(50, 1)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 100.0))
    net = pb.BNN(linear, prior, pb.likelihoods.HomoskedasticGaussian(1.0))
    pb.NUTS(**options).fit(net, torch.zeros(2, 50), torch.zeros(2, 1), num_draws=1)
    assert float(seen["z"].abs().max()) > 100.0


def test_a_start_on_a_plateau_is_drawn_again():
    def program(x, y):
        z = pyro.sample("z", dist.ImproperUniform(constraints.real, (), ()))
        # beyond one the density has underflowed to a constant
        pyro.factor("hill", torch.where(z.abs() < 1.0, -50.0 * z**2, torch.full_like(z, -50.0)))

    posterior = pb.NUTS(num_chains=16, num_warmup=0, step_size=0.05, **QUICK).fit(program, num_draws=20)
    assert (posterior.draws["z"].abs() < 1.0).all()


def _triangle(x, y):
    first = pyro.sample("first", dist.Uniform(0.0, 1.0))
    second = pyro.sample("second", dist.Uniform(0.0, 1.0 - first))
    pyro.factor("flat", torch.log1p(-first))
    pyro.sample("count", dist.Binomial(12.0, first + 0.0 * second), obs=torch.tensor(4.0))
    pyro.sample("other", dist.Binomial(12.0, second), obs=torch.tensor(3.0))


def test_a_support_may_depend_on_another_site():
    density = Density(_triangle, (None, None))
    assert density.dependent == ("second",)
    z = torch.tensor([[[0.3, -0.8], [1.2, 0.4]], [[-2.0, 2.0], [0.0, 3.0]]])
    values = density.constrain(z)
    assert (values["first"] + values["second"] < 1).all()
    torch.testing.assert_close(density.unconstrain(values), z)
    # d(first, second) / dz, by autograd, and the density of the program in the triangle
    one = z[0, 1]
    slopes = torch.func.jacrev(lambda u: torch.stack(list(density.constrain(u).values())))(one)
    torch.testing.assert_close(density.log_jacobian(one), slopes.logdet())
    torch.testing.assert_close(density.log_jacobian(z)[0, 1], slopes.logdet())
    first, second = (values[name][0, 1] for name in ("first", "second"))
    counts = dist.Binomial(12.0, first).log_prob(torch.tensor(4.0))
    counts += dist.Binomial(12.0, second).log_prob(torch.tensor(3.0))
    torch.testing.assert_close(density.log_joint(one).float(), counts + slopes.logdet())


def test_a_dependent_support_has_its_exact_posterior():
    grid = torch.linspace(0.0, 1.0, 801, dtype=torch.float64)[1:-1]
    a, b = torch.meshgrid(grid, grid, indexing="ij")
    weight = torch.where(a + b < 1, a**4 * (1 - a) ** 8 * b**3 * (1 - b) ** 9, 0.0)
    weight = weight / weight.sum()
    posterior = pb.NUTS(**QUICK).fit(_triangle, num_draws=300)
    assert_mean_within(posterior.draws["first"], (weight * a).sum())
    assert_mean_within(posterior.draws["second"], (weight * b).sum())


def test_methods_that_need_one_support_refuse_several():
    for method in (pb.SVI(compile=False, num_steps=5), pb.Laplace(compile=False, curvature="hessian")):
        with pytest.raises(pb.Refused, match="support of 'second' depends"):
            method.fit(_triangle)
