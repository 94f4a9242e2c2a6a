"""Where stochastic-gradient chains start, and the step size they choose there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

from pyrobnn.inference.chain_steps import State, batch_log_joint, chain_batches
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.langevin import StepSize
from pyrobnn.inference.sgmcmc import SGHMC, SGLD


def normal(x=None, y=None):
    pyro.sample("z", dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1))


@pytest.mark.slow
@pytest.mark.parametrize("method", [SGLD, SGHMC])
def test_a_short_warm_up_takes_chains_of_a_subsampling_program_to_the_posterior(method):
    # steps so small that gradients far away do not heat the chain left it at 1.2, and its log joint, as noisy as they
    # are, was taken for one that fell
    with seeded(0):
        x = torch.randn(200)
        y = 1.5 * x + 0.3 * torch.randn(200)

    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 200, subsample_size=20):
            mean = slope * pyro.subsample(x, event_dim=0)
            pyro.sample("y", dist.Normal(mean, 0.3), obs=pyro.subsample(y, event_dim=0))

    precision = 1.0 + x.square().sum() / 0.09
    config = method(num_chains=1, num_warmup=200, compile=False)
    draws = config.fit(program, x, y, num_draws=20, seed=1).draws["slope"]
    assert float((draws.mean() - x @ y / 0.09 / precision).abs()) < 4 / precision.sqrt()


def test_a_curvature_that_is_not_finite_is_named():
    def kink(x=None, y=None):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1))
        pyro.factor("kink", -(z.square().sum() ** 0.75))

    problem = prepare(kink, points="held")
    chooser = StepSize(SGHMC(num_warmup=10), problem)
    state = State(0, torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2))
    with (
        seeded(0),
        pytest.raises(FloatingPointError, match="no step size can be chosen at step 1"),
    ):
        chooser.look(
            chooser.begin(state),
            state,
            torch.ones(2),
            chain_batches(problem, 2, None),
            partial(batch_log_joint, problem),
        )


def test_chains_that_diverged_on_the_way_to_a_look_go_back(monkeypatch):
    # the finite numbers are checked every 50 steps, the looks are 20 apart: the one that saw NaN chose NaN
    look = StepSize.look
    seen = []

    def too_large_at_first(self, choice, state, *args):
        choice = look(self, choice, state, *args)
        seen.append(state.step)
        return replace(choice, value=choice.value * (1e6 if len(seen) == 1 else 1.0))

    monkeypatch.setattr(StepSize, "look", too_large_at_first)
    posterior = SGLD(num_chains=8, num_warmup=200, compile=False).fit(normal, num_draws=20)
    assert seen[:3] == [0, 0, 20]
    assert float(posterior.draws["z"].square().mean()) == pytest.approx(1.0, rel=0.4)


@pytest.mark.parametrize("method", [SGLD, SGHMC])
def test_a_wall_that_no_look_has_met_does_not_throw_a_chain_out(method):
    # a fall of the log joint that 2,000 coordinates could explain was none: draws of 10¹⁴ in silence
    def program(x=None, y=None):
        z = pyro.sample("z", dist.Normal(torch.zeros(2000), 1.0).to_event(1))
        pyro.factor("wall", -2000.0 * torch.relu(z[0].abs() - 2.5).square())

    draws = method(num_chains=2, num_warmup=200).fit(program, num_draws=200, seed=1).draws["z"]
    assert float(draws[..., 0].abs().max()) < 2.7 and float(draws.std()) == pytest.approx(
        1.0, abs=0.05
    )
