"""Pyro's published examples for MCMC by one changed import: exact moments, or those of Pyro's own sampler."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pyro.infer
import pytest
import torch
from helpers import assert_mean_within, assert_var_within, seeded
from pyro.infer import Predictive
from pyro.infer.autoguide.initialization import init_to_median, init_to_value
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule, PyroSample
from pyro.ops.stats import effective_sample_size

import pyrobnn as pb
from pyrobnn.mcmc import HMC, MCMC, NUTS

# most runs are as short as can be
pytestmark = pytest.mark.filterwarnings("ignore:.*(warm-up was not finished|R-hat|effective draws)")
# eighteen players of 1970: hits in 45 at bats (Efron & Morris, 1975)
HITS = torch.tensor([18.0, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
AT_BATS = torch.full((18,), 45.0)
Y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12])
SIGMA = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18])


def drawn(kernel, *args, compile=False, num_samples=150, warmup_steps=60, seed=0, **options):
    """A run of ours: one that starts at once by default."""
    mcmc = MCMC(
        kernel, num_samples, warmup_steps, **{"num_chains": 4, "disable_progbar": True, **options}
    )
    mcmc.method = dataclasses.replace(mcmc.method, compile=compile)
    with seeded(seed):
        mcmc.run(*args)
    return mcmc


# -- the examples ----------------------------------------------------------------------------------------------------


def fully_pooled(at_bats, hits):
    phi = pyro.sample("phi", dist.Uniform(0, 1))
    with pyro.plate("num_players", at_bats.shape[0]):
        return pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def not_pooled(at_bats, hits):
    with pyro.plate("num_players", at_bats.shape[0]):
        phi = pyro.sample("phi", dist.Uniform(0, 1))
        return pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def partially_pooled(at_bats, hits):
    m = pyro.sample("m", dist.Uniform(0, 1))
    kappa = pyro.sample("kappa", dist.Pareto(1, 1.5))
    with pyro.plate("num_players", at_bats.shape[0]):
        phi = pyro.sample("phi", dist.Beta(m * kappa, (1 - m) * kappa))
        return pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def partially_pooled_with_logit(at_bats, hits):
    loc = pyro.sample("loc", dist.Normal(-1, 1))
    scale = pyro.sample("scale", dist.HalfCauchy(1))
    with pyro.plate("num_players", at_bats.shape[0]):
        alpha = pyro.sample("alpha", dist.Normal(loc, scale))
        return pyro.sample("obs", dist.Binomial(at_bats, logits=alpha), obs=hits)


def schools(sigma):
    eta = pyro.sample("eta", dist.Normal(torch.zeros(8), torch.ones(8)))
    mu = pyro.sample("mu", dist.Normal(torch.zeros(1), 10 * torch.ones(1)))
    tau = pyro.sample("tau", dist.HalfCauchy(scale=25 * torch.ones(1)))
    theta = mu + tau * eta
    return pyro.sample("obs", dist.Normal(theta, sigma))


def conditioned_model(model, sigma, y):
    return pyro.poutine.condition(model, data={"obs": y})(sigma)


def logistic_regression(data, labels):
    coefs = pyro.sample(
        "coefs", dist.Normal(torch.zeros(data.shape[1]), torch.ones(data.shape[1])).to_event(1)
    )
    with pyro.plate("rows", len(data)):
        return pyro.sample("obs", dist.Bernoulli(logits=data @ coefs), obs=labels)


def covertype(num):
    """Synthetic rows as those of covertype: ten numbers, four wilderness areas, forty soils, and an intercept."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(num, 10, generator=generator)
    area = torch.eye(4)[torch.randint(4, (num,), generator=generator)]
    soil = torch.eye(40)[torch.randint(40, (num,), generator=generator)]
    data = torch.cat([numbers, area, soil, torch.ones(num, 1)], 1)
    logits = data @ torch.randn(55, generator=generator)
    return data, torch.bernoulli(logits.sigmoid(), generator=generator)


class Kernel(PyroModule):
    def __init__(self):
        super().__init__()
        self.length = PyroSample(dist.LogNormal(0.0, 1.0))
        self.variance = PyroSample(dist.LogNormal(0.0, 1.0))

    def forward(self, x):
        return self.variance * (-((x[:, None] - x) ** 2) / (2 * self.length**2)).exp()


class GP(PyroModule):
    def __init__(self):
        super().__init__()
        self.kernel = Kernel()

    def forward(self, x, y):
        cov = self.kernel(x) + 0.04 * torch.eye(len(x))
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), cov), obs=y)


X1 = torch.linspace(0.0, 3.0, 12)


def contrib_gp(*_):
    kernel = gp.kernels.RBF(1)
    kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0))
    kernel.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    return gp.models.GPRegression(X1, X1.sin(), kernel, noise=torch.tensor(0.04)).model


# -- exact moments ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_baseball_not_pooled_is_eighteen_beta_distributions(capsys):
    mcmc = drawn(NUTS(not_pooled, jit_compile=True, ignore_jit_warnings=True), AT_BATS, HITS)
    draws = mcmc.get_samples(group_by_chain=True)["phi"]
    exact = dist.Beta(HITS + 1, AT_BATS - HITS + 1)
    assert_mean_within(draws, exact.mean, min_ess=300)
    assert_var_within(draws, exact.variance, mean=exact.mean, min_ess=100)
    samples = mcmc.get_samples()
    assert draws.shape == (4, 150, 18) and samples["phi"].shape == (600, 18)
    with seeded():
        assert mcmc.get_samples(num_samples=7)["phi"].shape == (7, 18)
        replicates = Predictive(not_pooled, samples)(AT_BATS, None)["obs"]
    assert replicates.shape == (600, 18)
    found = mcmc.diagnostics()
    assert found["phi"]["n_eff"].min() > 300 and found["phi"]["r_hat"].max() < 1.05
    assert (
        [*found["acceptance rate"]] == [*found["divergences"]] == [f"chain {i}" for i in range(4)]
    )
    mcmc.summary(prob=0.5)
    assert "Number of divergences: 0" in capsys.readouterr().out
    tree = mcmc.posterior.to_datatree()
    assert tree["log_likelihood"]["obs"].shape == (4, 150, 18)
    assert pb.diagnose(tree).draws in ("pass", "warn")  # a short run


@pytest.mark.slow
def test_hmc_and_a_potential_of_pyros_own_reach_the_same_beta():
    with seeded():
        start, potential, transforms, _ = initialize_model(
            fully_pooled, (AT_BATS, HITS), num_chains=4
        )
    kernel = HMC(potential_fn=potential, num_steps=3)
    seen = []
    mcmc = drawn(
        kernel,
        initial_params=start,
        transforms=transforms,
        hook_fn=lambda kernel, params, stage, i: seen.append((params["phi"], stage, i)),
    )
    exact = dist.Beta(HITS.sum() + 1, (AT_BATS - HITS).sum() + 1)
    draws = mcmc.get_samples(group_by_chain=True)["phi"]
    assert_mean_within(draws, exact.mean, min_ess=100)
    assert_var_within(draws, exact.variance, mean=exact.mean, min_ess=100)
    assert len(seen) == 600 and seen[-1][1:] == ("Sample [3]", 149)
    torch.testing.assert_close(seen[-1][0].sigmoid(), draws[3, 149])


@pytest.mark.parametrize("make", [lambda: GP(), contrib_gp])
def test_a_gp_whose_kernel_is_a_module_has_the_density_of_pyro(make):
    args = (X1, X1.sin()) if make is not contrib_gp else ()
    with pyro.get_param_store().scope(), seeded():
        model = make()
        warned = pytest.warns(UserWarning, match="holds them") if make is contrib_gp else _nothing()
        with warned:
            mcmc = drawn(NUTS(model), *args, num_samples=5, warmup_steps=5)
        for i in range(3):
            values = {name: value[i] for name, value in mcmc.get_samples().items()}
            conditioned = pyro.poutine.condition(model, values)
            trace = pyro.poutine.trace(conditioned).get_trace(*args)
            jacobian = sum(value.log() for value in values.values())
            expected = float((trace.log_prob_sum() + jacobian).detach())
            assert float(mcmc.posterior.sample_stats["lp"][0, i]) == pytest.approx(
                expected, rel=1e-4
            )


# -- options ---------------------------------------------------------------------------------------------------------


def test_signatures_are_pyros():
    for ours, theirs in ((NUTS, pyro.infer.NUTS), (HMC, pyro.infer.HMC)):
        assert inspect.signature(ours) == inspect.signature(theirs)
    for name in ("__init__", "get_samples", "summary", "run", "diagnostics"):
        ours, theirs = (inspect.signature(getattr(each, name)) for each in (MCMC, pyro.infer.MCMC))
        assert [(p.name, p.default) for p in ours.parameters.values()] == [
            (p.name, p.default) for p in theirs.parameters.values()
        ]


def normal():
    pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))


def pair():
    pyro.sample("one", dist.Normal(0.0, 1.0))
    pyro.sample("two", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def test_options_reach_the_sampler():
    def method(kernel):
        return MCMC(kernel, 100, warmup_steps=60, num_chains=2, mp_context="spawn").method

    nuts = method(
        NUTS(normal, full_mass=True, target_accept_prob=0.95, max_tree_depth=7, step_size=0.3)
    )
    assert (nuts.num_chains, nuts.num_warmup, nuts.mass_matrix) == (2, 60, "dense")
    assert (nuts.target_accept, nuts.max_tree_depth, nuts.step_size) == (0.95, 7, None)
    assert method(HMC(normal, step_size=0.1, num_steps=7)).trajectory == 7
    assert method(HMC(normal, step_size=0.1, trajectory_length=2.05)).trajectory == 20
    assert method(HMC(normal)).trajectory == 6
    assert MCMC(NUTS(normal), 100).method.num_warmup == 100


@pytest.mark.slow
def test_a_step_that_is_held_stays_and_the_warm_up_is_thrown_away():
    kernel = HMC(normal, step_size=0.4, num_steps=5, adapt_step_size=False, adapt_mass_matrix=False)
    mcmc = drawn(kernel, num_samples=200, warmup_steps=30)
    assert mcmc.posterior.sample_stats["step_size"].unique().tolist() == [pytest.approx(0.4)]
    assert mcmc.get_samples(group_by_chain=True)["z"].shape == (4, 200, 3)
    assert_var_within(mcmc.get_samples(group_by_chain=True)["z"], 1.0, min_ess=100)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (
            {"initial_params": {"z": torch.arange(12.0).reshape(4, 3)}},
            torch.arange(12.0).reshape(4, 3),
        ),
        (
            {"init_strategy": init_to_value(values={"z": torch.full((3,), 9.0)})},
            torch.full((4, 3), 9.0),
        ),
        ({"init_strategy": init_to_median}, None),
    ],
)
def test_chains_start_where_they_are_told(options, start, monkeypatch):
    seen = {}
    begin = "pyrobnn.inference.hmc.run.Run.begin"
    from pyrobnn.inference.hmc.run import Run

    original = Run.begin
    monkeypatch.setattr(
        begin, lambda self, z, *rest: (seen.update(z=z.clone()), original(self, z, *rest))[1]
    )
    params = options.pop("initial_params", None)
    mcmc = drawn(
        NUTS(normal, **options), num_samples=5, warmup_steps=5, initial_params=params, seed=3
    )
    if start is None:
        assert bool((seen["z"].abs() < 2.5).all()) and len(seen["z"].unique()) == 12
    else:
        torch.testing.assert_close(seen["z"], start)
    common = options.get("init_strategy") is not None and start is not None
    assert mcmc.posterior.meta["common_start"] is common


@pytest.mark.slow
def test_the_seed_is_torchs_and_sites_can_be_left_out():
    first, second, other = (
        drawn(NUTS(normal), num_samples=20, warmup_steps=20, seed=seed).get_samples()["z"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    few = drawn(
        NUTS(partially_pooled_with_logit),
        AT_BATS,
        HITS,
        num_samples=5,
        warmup_steps=5,
        save_params=["loc"],
    )
    assert [*few.get_samples()] == ["loc"] and "alpha" in few.posterior.draws


def enumerated():
    pyro.sample("k", dist.Categorical(torch.ones(2)), infer={"enumerate": "parallel"})


@pytest.mark.parametrize(
    ("kernel", "options", "said"),
    [
        (NUTS(normal, use_multinomial_sampling=False), {}, "slice sampling"),
        (NUTS(normal, full_mass=[("z",)]), {}, "blocks"),
        (NUTS(normal, adapt_step_size=False), {}, "step size that adapts without"),
        (HMC(normal, max_stepsize=1.0), {}, "bound on the step size"),
        (
            NUTS(normal, transforms={"z": dist.transforms.ExpTransform()}),
            {},
            "pyro.poutine.reparam",
        ),
        (NUTS(potential_fn=lambda values: values["z"] ** 2), {}, "needs initial_params"),
        (
            NUTS(normal),
            {"initial_params": {"z": torch.zeros(3)}, "num_chains": 2},
            "leading axis of 2",
        ),
        (
            NUTS(normal),
            {"initial_params": {"w": torch.zeros(3)}},
            "the latent sites, unconstrained, are",
        ),
        (
            NUTS(pair),
            {"initial_params": {"one": torch.zeros(2), "two": torch.zeros(())}},
            "'one': (1,), 'two': (1, 2)",
        ),
        (NUTS(normal), {"initial_params": {"z": torch.full((3,), torch.nan)}}, "NaN or infinite"),
        (NUTS(normal), {"save_params": ["zed"]}, "'save_params' must be one of 'z'"),
        (NUTS(enumerated), {}, "discrete latent sites alone"),
    ],
)
def test_what_is_not_there_is_refused_in_a_sentence(kernel, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        MCMC(kernel, 10, disable_progbar=True, **options).run()


def test_pyros_own_kernel_is_not_taken_for_ours():
    with pytest.raises(TypeError, match="change its import too"):
        MCMC(pyro.infer.NUTS(normal), 10)


# -- beside Pyro's sampler -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _nothing():
    yield


def _assert_agree(ours, theirs, min_ess):
    """Means and variances of every site agree within the Monte Carlo errors of both, by the variance of both."""
    for name, value in theirs.items():
        heavy = name == "kappa"  # a Pareto of index 1.5 has no variance
        mine, other = (
            (draws.log() if heavy else draws).double().reshape(*draws.shape[:2], -1)
            for draws in (ours[name], value)
        )
        for power in (1, 2):
            a, b = ((draws - other.mean((0, 1))) ** power for draws in (mine, other))
            ess_a, ess_b = (effective_sample_size(draws, 0, 1) for draws in (a, b))
            assert float(torch.minimum(ess_a, ess_b).min()) > min_ess, name
            error = (a.flatten(0, 1).var(0) / ess_a + b.flatten(0, 1).var(0) / ess_b).sqrt()
            assert bool(((a.mean((0, 1)) - b.mean((0, 1))).abs() < 5 * error).all()), (name, power)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*(transitions diverged|effective sample size|changes slowly)"
)  # the logit one is a funnel
@pytest.mark.parametrize(
    ("model", "args", "num_samples", "min_ess"),
    [
        (conditioned_model, (schools, SIGMA, Y), 800, 100),
        (logistic_regression, covertype(300), 400, 60),
        (fully_pooled, (AT_BATS, HITS), 800, 150),
        (partially_pooled, (AT_BATS, HITS), 1000, 50),
        (partially_pooled_with_logit, (AT_BATS, HITS), 1000, 20),
        (GP(), (X1, X1.sin()), 800, 150),
    ],
    ids=["eight schools", "covertype", "fully pooled", "partially pooled", "logit", "GP"],
)
def test_examples_agree_with_pyros_sampler(model, args, num_samples, min_ess):
    with seeded():
        pyros = pyro.infer.MCMC(
            pyro.infer.NUTS(model), num_samples, warmup_steps=400, disable_progbar=True
        )
        pyros.run(*args)
    ours = drawn(NUTS(model), *args, compile=True, num_samples=num_samples, warmup_steps=400)
    _assert_agree(
        ours.get_samples(group_by_chain=True), pyros.get_samples(group_by_chain=True), min_ess
    )


def test_draws_before_a_run_are_asked_for_in_vain():
    mcmc = MCMC(NUTS(lambda: pyro.sample("z", dist.Normal(0.0, 1.0))), num_samples=5)
    for ask in (mcmc.get_samples, mcmc.diagnostics, mcmc.summary, lambda: mcmc.posterior):
        with pytest.raises(AttributeError, match="call run first"):
            ask()
