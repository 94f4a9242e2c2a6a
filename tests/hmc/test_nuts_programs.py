"""NUTS at its defaults on programs that nobody wrote with it in mind: flat and vague priors, scales far from one."""

from __future__ import annotations

import contextlib
import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, assert_var_within, seeded
from pyro.distributions import constraints

import pyrobnn as pb
from pyrobnn.diagnostics import diagnose
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.hmc import run, stepper
from pyrobnn.inference.hmc.starts import finite_starts
from pyrobnn.inference.hmc.windows import STATS, extend_phase, not_stationary, planned
from pyrobnn.model import Density, gradient
from pyrobnn.model.compile import Compiled

QUICK = {"compile": False}


def _flat_regression(x, y):
    beta = pyro.sample("beta", dist.ImproperUniform(constraints.real, (), (2,)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


def _line():
    x = torch.stack([torch.ones(30), torch.linspace(-2.0, 3.0, 30)], 1)
    return x, x @ torch.tensor([3.0, -2.0]) + torch.linspace(-1.0, 1.0, 30).sin()


@pytest.mark.slow
def test_a_flat_prior_has_the_posterior_of_least_squares():
    x, y = _line()
    posterior = pb.NUTS(**QUICK).fit(_flat_regression, x, y, num_draws=300)
    cov = torch.linalg.inv(x.double().T @ x.double())
    mean = cov @ x.double().T @ y.double()
    assert_mean_within(posterior.draws["beta"], mean)
    assert_var_within(posterior.draws["beta"], cov.diagonal(), mean=mean)
    assert posterior.meta["warnings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("method", [pb.MAP, functools.partial(pb.Laplace, curvature="hessian")])
def test_a_flat_prior_leaves_other_methods_the_likelihood(method):
    x, y = _line()
    posterior = method(num_steps=200, compile=False).fit(_flat_regression, x, y)
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    mode = posterior.draws["beta"].mean((0, 1))
    torch.testing.assert_close(mode, best, atol=0.1, rtol=0.1)


@pytest.mark.slow
def test_flat_priors_on_supports_of_their_own():
    def program(x, y):
        sigma = pyro.sample("sigma", dist.ImproperUniform(constraints.positive, (), ()))
        rate = pyro.sample(
            "rate", dist.ImproperUniform(constraints.unit_interval, (2,), ()).to_event(1)
        )
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

    posterior = pb.NUTS(num_chains=16, num_warmup=0, step_size=0.05, **QUICK).fit(
        program, num_draws=20
    )
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


@pytest.mark.slow
def test_a_dependent_support_has_its_exact_posterior():
    grid = torch.linspace(0.0, 1.0, 801, dtype=torch.float64)[1:-1]
    a, b = torch.meshgrid(grid, grid, indexing="ij")
    weight = torch.where(a + b < 1, a**4 * (1 - a) ** 8 * b**3 * (1 - b) ** 9, 0.0)
    weight = weight / weight.sum()
    posterior = pb.NUTS(**QUICK).fit(_triangle, num_draws=300)
    assert_mean_within(posterior.draws["first"], (weight * a).sum())
    assert_mean_within(posterior.draws["second"], (weight * b).sum())


def test_methods_that_need_one_support_refuse_several():
    for method in (
        pb.SVI(compile=False, num_steps=5),
        pb.Laplace(compile=False, curvature="hessian"),
    ):
        with pytest.raises(pb.Refused, match="support of 'second' depends"):
            method.fit(_triangle)


def _far_off(x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1e6))
    pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@pytest.mark.slow
def test_a_posterior_far_from_every_start():
    posterior = pb.NUTS(**QUICK).fit(_far_off, None, torch.tensor(1e4), num_draws=400)
    assert_mean_within(posterior.draws["mean"], 1e4, min_ess=300)
    assert_var_within(posterior.draws["mean"], 1.0, mean=1e4, min_ess=300)
    assert posterior.meta["warnings"] == [] and "float64" not in posterior.meta


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run went on in float64")
@pytest.mark.parametrize("warmup", [None, 100])
def test_what_float32_cannot_hold_is_sampled_in_float64(warmup):
    def program(x, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1e9))
        data = torch.full((2,), 2.0**20)  # of the program's own: float32 beside float64 positions
        pyro.sample("y", dist.Normal(mean.expand(2) @ torch.eye(2), 0.1).to_event(1), obs=data)

    posterior = pb.NUTS(num_warmup=warmup, **QUICK).fit(program, num_draws=400)
    assert "float32 was too coarse" in posterior.meta["float64"]
    # one unit of the last place of float32 is 0.125 there
    assert posterior.draws["mean"].dtype == torch.float64
    assert_mean_within(posterior.draws["mean"], 2.0**20, min_ess=300)
    assert_var_within(posterior.draws["mean"], 0.005, min_ess=300)
    assert [finding["code"] for finding in posterior.meta["findings"]] == ["float64_run"]


@pytest.mark.slow
def test_values_that_never_change_are_no_sign_of_chains_that_do_not_mix():
    def program(x, y):
        pyro.sample(
            "factor", dist.LKJCholesky(3, 2.0)
        )  # its corner is 1, and zeros stand above its diagonal

    posterior = pb.NUTS(num_chains=2, num_warmup=100, compile=False).fit(
        program, num_draws=150, seed=0
    )
    assert not any("mixed" in note for note in posterior.meta["warnings"])
    assert "R-hat" not in diagnose(posterior.to_datatree()).summary


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the warm-up was not finished")
def test_chains_that_cannot_meet_are_said():
    def program(x, y):
        z = pyro.sample("z", dist.Normal(0.0, 100.0))
        wells = torch.stack(
            [dist.Normal(-40.0, 1.0).log_prob(z), dist.Normal(40.0, 1.0).log_prob(z)]
        )
        pyro.factor("wells", wells.logsumexp(0))

    with pytest.warns(UserWarning) as seen:
        posterior = pb.NUTS(num_chains=6, num_warmup=60, **QUICK).fit(program, num_draws=100)
    assert "the chains have not mixed" in posterior.meta["warnings"][0]
    first, *others = (str(each.message) for each in seen)
    assert "R-hat of z" in first
    assert all("warm-up was not finished" in each for each in others)  # which was short


def test_a_window_says_what_speaks_against_it():
    with seeded():
        z = torch.randn(4, 60, 2)
        stats = torch.randn(4, 60, len(STATS), dtype=torch.float64)
    counts = torch.full((4,), 60)

    def names(index):
        return ("first", "second")[index]

    assert not_stationary(z, stats, counts, names) == ""
    apart = z.clone()
    apart[2, :, 1] += 3.0
    assert "R-hat of 'second'" in not_stationary(apart, stats, counts, names)
    assert (
        not_stationary(apart, stats, counts, None) == ""
    )  # a net's weights may be in several modes
    rising = stats.clone()
    rising[..., 0] += torch.linspace(0.0, 6.0, 60)
    assert "still rising" in not_stationary(z, rising, counts, None)
    still = stats.clone()
    still[3, :, 0] = -7.0
    assert "1 of 4 chains did not move" in not_stationary(z, still, counts, names)
    assert "chain 1 made 3 transitions" in not_stationary(
        z, stats, torch.tensor([60, 3, 60, 60]), names
    )


def test_a_warm_up_goes_on_up_to_its_bound():
    plan = planned(200)
    total = sum(each.length for each in plan)
    for _ in range(10):
        window = max(i for i, each in enumerate(plan) if each.mass)
        plan = extend_phase(plan, window, 1000)
    assert total < sum(each.length for each in plan) <= 1000
    assert plan[-1] == planned(200)[-1]


def test_a_start_too_steep_to_move_from_is_drawn_again():
    x = torch.stack([torch.ones(40), torch.linspace(200.0, 400.0, 40)], 1)

    def program(x, y):
        beta = pyro.sample("beta", dist.ImproperUniform(constraints.real, (), (2,)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson((x @ beta).exp()), obs=y)

    problem = prepare(program, x, torch.full((40,), 9.0), points="held")
    density = problem.density
    steep = torch.tensor([[0.5, 0.12], [0.0, 0.01]])
    tries = [torch.tensor([[0.4, 0.14], [9.0, 9.0]]), torch.tensor([[0.1, 0.02], [9.0, 9.0]])]
    assert float(density.log_joint(steep[0])) < -1e18
    torch.testing.assert_close(
        finite_starts(problem.density, steep, tries), torch.stack([tries[1][0], steep[1]])
    )
    # the best of those that are too steep is kept where there is nothing better
    hard = [
        torch.tensor([[0.4, 0.11], [9.0, 9.0]]),
        *[torch.tensor([[0.4, 0.13], [9.0, 9.0]])] * 30,
    ]
    torch.testing.assert_close(finite_starts(problem.density, steep, hard)[0], hard[0][0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*maximum tree depth")
def test_draws_worth_too_few_are_said():
    def program(x, y):
        pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    slow = {"num_warmup": 0, "step_size": 0.04, "max_tree_depth": 1, "num_chains": 2}
    with pytest.warns(UserWarning, match="(effective sample size of|have not mixed)"):
        posterior = pb.NUTS(**slow, **QUICK).fit(program, num_draws=600)
    assert any("reparameterise" in text for text in posterior.meta["warnings"])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_around_a_gradient_that_looks_at_values_is_traced_to_the_same_bits(monkeypatch):
    def looking(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        if slope > 5.0:
            pyro.factor("steep", -slope)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(slope * x, scale), obs=y)

    x = torch.linspace(-1, 1, 10)
    method = pb.NUTS(num_chains=1, num_warmup=10, compile=False)
    draws = method.fit(looking, x, 2 * x, num_draws=5).draws
    monkeypatch.setattr(
        stepper,
        "_around_gradient",
        lambda machine, example, calls: Compiled(machine.grow, "eager", 0.0),
    )
    # without the values being read, every parameter is guarded
    monkeypatch.setattr(gradient, "values_read", contextlib.nullcontext)
    eager = method.fit(looking, x, 2 * x, num_draws=5).draws
    for site, values in eager.items():
        assert torch.equal(draws[site], values)
