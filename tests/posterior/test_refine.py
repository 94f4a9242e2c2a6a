"""Approximations brought to the posterior by short chains."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.posterior.arrival import arrival, effective_draws, nested_rhat
from pyrobnn.posterior.invariance import posterior_density
from pyrobnn.posterior.short_chains import (
    HamiltonianPath,
    ShortChains,
    starts_elsewhere,
    traced_gradient,
)

Y = torch.tensor([0.5, 1.5, 1.0, 0.2])


def line(x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.sample(
        "y",
        dist.Normal(mean, 1.0).expand([len(y)]).to_event(1),
        obs=y,
    )


def small_net():
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1.5, 1.5, 16)[:, None]
    y = 0.8 * x + 0.3 * torch.randn(16, 1, generator=generator)
    net = pb.networks.mlp(1, (4,), 1, seed=0)
    noise = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    return pb.BNN(net, pb.priors.FanInNormal(1.0), noise), x, y


@pytest.fixture(scope="module")
def refined_net():
    model, x, y = small_net()
    rough = pb.DeepEnsemble(
        num_members=5,
        num_steps=200,
        compile=False,
    ).fit(model, x, y)
    return rough, rough.refine(60.0), x, y


@pytest.mark.parametrize("method", ["map", "laplace"])
def test_a_program_arrives_at_its_exact_posterior(method):
    methods = {
        "map": pb.MAP(num_steps=30, compile=False),
        "laplace": pb.Laplace(
            curvature="hessian",
            num_steps=30,
            compile=False,
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rough = methods[method].fit(line, None, Y)
    refined = rough.refine()
    facts = refined.meta["refine"]
    assert facts["arrived"] and facts["start"] == rough.meta["method"]
    mean = refined.draws["mean"].double()
    sd = (1.0 / (1 + len(Y))) ** 0.5
    error = sd / facts["ess"] ** 0.5
    assert abs(float(mean.mean()) - float(Y.sum()) / (1 + len(Y))) < 5 * error
    assert abs(float(mean.std()) / sd - 1.0) < 5 / (2 * facts["ess"]) ** 0.5


def test_a_refined_ensemble_has_all_that_chains_have(refined_net):
    _, refined, _, _ = refined_net
    assert refined.meta["kind"] == "chains" and not refined.meta["iid"]
    assert refined.meta["refine"]["arrived"]
    shape = refined.num_chains, refined.num_draws
    names = {"lp", "energy", "acceptance_rate", "diverging", "n_steps", "step_size"}
    assert set(refined.sample_stats) == names
    assert all(values.shape == shape for values in refined.sample_stats.values())
    verdict = refined.diagnose()
    assert verdict.draws == "pass", verdict


@pytest.mark.parametrize(("width", "diverges"), [(1.0, False), (1e-3, True)])
def test_a_path_diverges_where_a_finer_step_has_not_helped(width, diverges):
    """Of a normal the longest steps are unstable once the step is near twice its sd: that says nothing of the draws."""

    def gradient(z):
        return -z / width**2, -0.5 * (z / width).square().sum(-1)

    random = torch.Generator().manual_seed(0)
    z = width * torch.randn(400, 3, generator=random, dtype=torch.float64)
    chains = ShortChains.begin(gradient, z, random)
    chains = replace(chains, step=1.9, scale=torch.ones_like(z[0]))
    momentum = torch.randn(z.shape, generator=random, dtype=torch.float64)
    begin = HamiltonianPath(z, momentum, *gradient(z))
    longest = begin.after(gradient, 1.2 * chains.step * chains.scale, 8)
    assert bool((longest.energy - begin.energy > 1000.0).all())
    visits = [chains.transition(gradient, random).visits[-1] for _ in range(10)]
    assert bool(torch.stack([visit.diverging for visit in visits]).any()) == diverges


def test_a_net_of_one_layer_arrives_at_its_exact_posterior():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 2, generator=generator)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(20, 1, generator=generator)
    with torch.random.fork_rng():
        net = torch.nn.Linear(2, 1)
    likelihood = pb.likelihoods.HomoskedasticGaussian(0.5)
    model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), likelihood)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rough = pb.MAP(num_steps=20, compile=False).fit(model, x, y)
    refined = rough.refine(60.0)
    design = torch.cat([x, torch.ones(20, 1)], 1).double()
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(3))
    mean = covariance @ design.T @ y.double()[:, 0] / 0.25
    weights = torch.cat([refined.draws["net.weight"][..., 0, :], refined.draws["net.bias"]], -1)
    ess = refined.meta["refine"]["ess"]
    sd = covariance.diagonal().sqrt()
    weights = weights.double().flatten(0, 1)
    assert bool(((weights.mean(0) - mean).abs() < 5 * sd / ess**0.5).all())
    assert bool(((weights.std(0) / sd - 1.0).abs() < 5 / (2 * ess) ** 0.5).all())


def test_a_run_that_arrives_repeats_bit_for_bit(refined_net):
    rough, refined, _, _ = refined_net
    again = rough.refine(60.0)
    for name, draws in refined.draws.items():
        assert torch.equal(again.draws[name], draws), name


def test_chains_that_the_clock_stops_say_so_and_never_pass(refined_net):
    rough, _, x, y = refined_net
    with pytest.warns(UserWarning, match="have not arrived"):
        cut = rough.refine(1e-3)
    assert not cut.meta["refine"]["arrived"]
    assert [finding["code"] for finding in cut.meta["findings"]] == ["not_refined"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cut.diagnose(x, y).draws != "pass"


def test_it_says_what_it_lacks():
    model, x, y = small_net()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        streamed = pb.MAP(num_steps=20, compile=False).fit(model, loader)
        dropped = pb.MCDropout(p=0.1, num_steps=20, compile=False).fit(model, x, y)
    with pytest.raises(Refused, match=r"refine\(x=x, y=y\)"):
        streamed.refine()
    with pytest.raises(Refused, match="units left out"):
        dropped.refine()
    with pytest.raises(ValueError, match="'seconds'"):
        dropped.refine(0)


def test_the_rows_of_an_approximation_stay_out_of_its_file(tmp_path):
    model, x, y = small_net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = pb.SVI(num_steps=20, compile=False).fit(
            model,
            x,
            y,
            num_draws=10,
        )
    assert torch.equal(posterior.rows.y, y)
    loaded = pb.Posterior.load(posterior.save(tmp_path / "svi.nc"), model)
    assert loaded.rows is None


class Branching(torch.nn.Linear):
    """A layer whose Python depends on the values of its weights."""

    def forward(self, x):
        return super().forward(x) if float(self.weight.detach().sum()) < 1e9 else x


def test_a_net_that_runs_one_draw_at_a_time_has_starts_elsewhere():
    x = torch.linspace(-1.0, 1.0, 20)[:, None]
    starts = []
    with seeded(0):
        layers = (Branching(1, 1), torch.nn.Linear(1, 1))
    for layer in layers:
        noise = pb.likelihoods.HomoskedasticGaussian(0.3)
        model = pb.BNN(torch.nn.Sequential(layer), pb.priors.FanInNormal(), noise)
        point = pb.MAP(num_steps=5, compile=False).fit(model, x, x)
        starts.append(starts_elsewhere(posterior_density(point, x, x), 2, 0))
    torch.testing.assert_close(*starts)


def test_nested_rhat_sees_groups_that_remember_their_start():
    rng = np.random.default_rng(0)
    forgot = rng.normal(size=(3, 8, 16 * 16))
    assert nested_rhat(forgot, 16).max() < 1.02
    remembers = forgot + np.repeat(rng.normal(size=16), 16)
    assert nested_rhat(remembers, 16).min() > 1.2
    assert arrival(forgot, 16).is_converged and not arrival(remembers, 16).is_converged


def test_chains_that_stand_still_have_not_arrived():
    rng = np.random.default_rng(0)
    still = np.repeat(rng.normal(size=(3, 1, 256)), 8, 1) + 0.1 * rng.normal(size=(3, 8, 256))
    assert nested_rhat(still, 16).max() < 1.1 and not arrival(still, 16).is_converged
    assert effective_draws(still) < 300 < 1000 < effective_draws(rng.normal(size=(3, 8, 256)))


def test_what_drifts_has_not_arrived():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 8, 16 * 16))
    growing = values * np.linspace(0.7, 1.3, 8)[:, None]
    rising = values + np.linspace(-0.4, 0.4, 8)[:, None]
    assert not arrival(growing, 16).is_converged
    assert not arrival(rising, 16).is_converged
    assert not arrival(np.full((1, 8, 256), np.nan), 16).is_converged


def test_what_a_gradient_takes_is_forecast_from_its_operations_where_these_are_known():
    """An interpreted loop is one operation of its graph, whatever it repeats, and Python that branches has no graph."""

    def repeated(times):
        def log_density(z):
            for _ in range(times):
                z = torch.sin(z)
            return -z.square().sum()

        return log_density

    def branching(z):
        return -z.square().sum() if z.sum() > 0.0 else z.sum()

    def looped(z):
        return -pb.scan(lambda sum, each: (sum + z[0] * each, sum), z[1], torch.ones(500))[0]

    z = torch.ones(4, 3)
    seconds = [traced_gradient(repeated(times), z).seconds for times in (1, 10, 100)]
    assert 0.0 < seconds[0] < seconds[1] < seconds[2] < 0.01
    assert traced_gradient(branching, z).seconds == np.inf
    assert traced_gradient(looped, z).seconds == np.inf
