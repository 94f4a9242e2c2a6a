"""NUTS at its defaults: the first draws are on trial, and where too many diverge the warm-up goes on."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrobnn as pb
from pyrobnn.core.chains import divergences_by_chance
from pyrobnn.inference.hmc.trial import HIGHEST_TARGET, Raise, raised_target

STARTS = {"x": torch.zeros(()), "y": torch.zeros(())}


def banana(values):
    """x ~ N(0, 2²), y | x ~ N((x² − 4) / 2, 1): E y = 0, Var y = 1 + Var(x²) / 4 = 9."""
    x = values["x"]
    return -(x**2) / 8 - (values["y"] - (x**2 - 4) / 2) ** 2 / 2


def test_the_target_rises_with_what_diverged_and_not_by_chance():
    assert raised_target(0.8, 1, 400) == 0.8
    assert raised_target(0.8, 2, 400) == pytest.approx(0.9)
    # less than what a finished run may have
    assert raised_target(0.8, divergences_by_chance(8000), 8000) > 0.8
    assert raised_target(0.8, 40, 400) == pytest.approx(0.95)
    assert raised_target(0.975, 40, 400) == HIGHEST_TARGET
    # a target of the user's beyond that stays
    assert raised_target(0.999, 40, 400) == 0.999


def test_a_raise_that_did_not_help_is_the_last_one():
    before = [Raise(40, 400, 0.95)]
    assert raised_target(0.95, 30, 400, before) == 0.95
    assert raised_target(0.95, 10, 400, before) > 0.95
    # too few to compare
    assert raised_target(0.95, 3, 60, [Raise(3, 60, 0.95)]) > 0.95


@pytest.mark.slow
def test_a_banana_at_the_defaults_has_its_moments_without_divergences():
    posterior = pb.sample(banana, STARTS, num_draws=4000, seed=2)
    diverging = posterior.sample_stats["diverging"]
    assert int(diverging.sum()) <= divergences_by_chance(diverging.numel())
    adapted = posterior.meta["adapted"]
    assert adapted[-1]["target_accept"] > 0.8
    assert adapted[0]["divergences"] > divergences_by_chance(adapted[0]["transitions"])
    assert posterior.meta["num_warmup"] > 200
    # the squares of a slow banana: about 600 effective draws
    assert float(posterior.draws["x"].std()) == pytest.approx(2.0, rel=0.15)
    assert float(posterior.draws["y"].std()) == pytest.approx(3.0, rel=0.25)


def test_a_healthy_run_is_the_one_without_a_trial():
    def easy(x, y):
        pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    posterior = pb.NUTS(compile=False).fit(easy, num_draws=120, seed=0)
    assert "adapted" not in posterior.meta and posterior.meta["num_warmup"] == 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_given_warm_up_is_kept_to():
    method = pb.NUTS(num_warmup=60, num_chains=2, compile=False)
    posterior = pb.sample(banana, STARTS, method=method, num_draws=400)
    assert posterior.sample_stats["diverging"].any()
    assert posterior.meta["num_warmup"] == 60 and "adapted" not in posterior.meta


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_stopped_after_a_trial_goes_on_to_the_same_draws(tmp_path):
    """The raises and the next trial are in the checkpoint."""
    program = pb.LogDensity(banana, STARTS)
    nuts = pb.NUTS(checkpoint_every=0.0, compile=False)
    options = {"num_draws": 120, "seed": 2, "init": program.starts(4, 2)}
    whole = nuts.fit(program, **options)
    assert whole.meta["adapted"]
    path = tmp_path / "run.ckpt"

    def stop(step, metrics):
        return metrics["phase"] == "sampling" and metrics["draws"] >= 40

    nuts.fit(program, checkpoint=path, callbacks=[stop], **options)
    resumed = nuts.fit(program, checkpoint=path, **options)
    assert resumed.meta["adapted"] == whole.meta["adapted"]
    for site, draws in whole.draws.items():
        assert torch.equal(resumed.draws[site], draws)
