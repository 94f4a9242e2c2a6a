"""NUTS and bad luck: bad starts, NaN, divergences, killed runs, impossible requests."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import toy, toy_model

from pyrobnn.core.chains import divergences_by_chance
from pyrobnn.diagnostics import diagnose
from pyrobnn.diagnostics.check_table import TABLE
from pyrobnn.inference.fitting.interruption import DelayedInterrupt
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.hmc.chain_convergence import judged_net
from pyrobnn.inference.hmc.machine import STATS
from pyrobnn.inference.hmc.run import Draws
from pyrobnn.inference.hmc.run_findings import MIN_BFMI, run_findings
from pyrobnn.inference.nuts import NUTS

QUICK = {"num_chains": 3, "num_warmup": 30, "compile": False}


def simple(x, y):
    pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))


@pytest.mark.filterwarnings("ignore:the warm-up was not finished")
def test_bad_starts_are_drawn_again():
    def program(x, y):
        top = pyro.sample("top", dist.HalfNormal(1.0))
        pyro.sample("y", dist.Uniform(0.0, top), obs=y)

    # half of the prior has no density at the data, and the edge makes divergences
    with pytest.warns(UserWarning, match="diverged"):
        posterior = NUTS(num_chains=16, num_warmup=5, compile=False).fit(
            program, None, torch.tensor(0.6), num_draws=5
        )
    assert (posterior.draws["top"] > 0.6).all()


def test_no_start_at_all_names_the_site():
    def program(x, y):
        top = pyro.sample("top", dist.HalfNormal(1.0))
        pyro.sample("height", dist.Uniform(0.0, top), obs=y)

    with pytest.raises(ValueError, match="no start with a finite density.*-inf.*'height'"):
        NUTS(**QUICK).fit(program, None, torch.tensor(-1.0), num_draws=5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the warm-up was not finished")
def test_nan_gradients_are_divergences():
    def program(x, y):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.factor("cliff", torch.where(z > 0.5, torch.log(-z.abs()), torch.zeros(2)).sum())

    with pytest.warns(UserWarning, match="diverged"):
        posterior = NUTS(num_chains=8, num_warmup=30, compile=False).fit(program, num_draws=60)
    assert posterior.sample_stats["diverging"].any()
    assert posterior.draws["z"].isfinite().all() and (posterior.draws["z"] <= 0.5).all()
    assert posterior.sample_stats["lp"].isfinite().all()
    # no chain is poisoned by its bad leaves: all go on moving
    assert (posterior.draws["z"][:, 30:].std(1) > 0.05).all()


def test_all_diverging_is_said():
    config = NUTS(num_chains=2, num_warmup=0, step_size=1e4, compile=False)
    with pytest.warns(UserWarning, match="transitions diverged"):
        posterior = config.fit(simple, num_draws=30)
    assert "worthless" in posterior.meta["warnings"][0]
    assert posterior.sample_stats["diverging"].all()
    verdict = diagnose(posterior.to_datatree())
    assert verdict.status == "fail"


def fine_stats(num_draws=50):
    """Statistics (2, num_draws, 7) with nothing to be said about."""
    stats = torch.zeros(2, num_draws, len(STATS))
    stats[..., STATS.index("lp")] = torch.arange(float(num_draws))
    stats[..., STATS.index("acceptance_rate")] = 0.8
    return stats


def codes(stats, draws=None, problem=None, **result):
    """The codes that a run of these statistics reports, with the numbers of the last."""
    problem = problem or prepare(
        lambda x, y: pyro.sample("z", dist.Normal(0.0, 1.0)), points="held"
    )
    run = Draws(None, stats, 0.0, 0, torch.ones(0), {})._replace(**result)
    found = run_findings(judged_net(problem), draws or {}, run, NUTS(), judged=False)
    return [each.code for each in found], dict(found[-1].values) if found else {}


def test_divergences_are_reported_from_as_many_on_as_right_draws_do_not_have():
    stats = fine_stats(80)
    assert codes(stats)[0] == []
    by_chance = divergences_by_chance(160)
    stats[1, :by_chance, STATS.index("diverging")] = 1.0
    assert codes(stats)[0] == []
    stats[0, 7, STATS.index("diverging")] = 1.0
    assert codes(stats) == (
        ["diverged"],
        {"count": by_chance + 1, "total": 160, "target_accept": 0.8},
    )


def test_chains_that_stand_still_are_reported():
    stats = fine_stats()
    stats[1, :, STATS.index("lp")] = 7.0
    assert codes(stats) == (["stuck_chains"], {"stuck": [1], "num_chains": 2})


def test_chains_that_agree_in_the_mean_alone_or_miss_a_neck_are_reported():
    """R-hat of halves was all that a fit looked at: groups of four, centred, had an sd 10 % too large in silence."""
    stats = fine_stats(600)
    with seeded():
        z = torch.randn(2, 600)
        slow = torch.randn(2, 600)
        stats[..., :2] = torch.randn(2, 600, 2)
    assert codes(stats, {"z": z})[0] == []
    found, values = codes(stats, {"z": z * torch.tensor([[1.0], [4.0]])})
    assert found == ["chains_disagree"] and values["quantity"] == "z" and values["rhat"] > 1.05
    stats[1, :, STATS.index("energy")] = slow[1].cumsum(0)
    found, values = codes(stats, {"z": z})
    assert (
        found == ["slow_energy"]
        and values["chain"] == 1
        and values["bfmi"] < MIN_BFMI == next(row.limits[0] for row in TABLE if row.code == "bfmi")
    )


def test_chains_of_a_net_at_different_log_densities_are_reported():
    problem = prepare(toy_model(), *toy(), points="held")
    stats = fine_stats(200)
    lp = STATS.index("lp")
    with seeded():
        stats[..., lp] = 12.0 * torch.randn(2, 200)
    assert codes(stats, problem=problem)[0] == []
    stats[1, :, lp] += 100.0
    found, values = codes(stats, problem=problem)
    assert found == ["log_density_gap"] and (values["low"], values["high"]) == (0, 1)
    assert values["gap"] == pytest.approx(100.0, abs=5.0)
    # who rose to the others' level within the first half has arrived
    stats[1, 100:, lp] -= 100.0
    assert codes(stats, problem=problem)[0] == []


def test_an_unfinished_warmup_is_reported_of_a_program_whose_draws_agree():
    stats = fine_stats(600)
    with seeded():
        z = torch.randn(2, 600)
        stats[..., :2] = torch.randn(2, 600, 2)
    late = {"unfinished": "the acceptance rate was 0.50, aimed at 0.8", "num_warmup": 1000}
    found, values = codes(stats, {"z": z}, **late)
    assert found == ["warmup_unfinished"] and values == {
        "num_warmup": 1000,
        "reason": late["unfinished"],
    }


def test_a_given_warmup_is_kept_to_and_says_that_it_was_not_finished():
    config = NUTS(num_chains=2, num_warmup=40, max_tree_depth=1, compile=False)
    with pytest.warns(UserWarning) as caught:
        posterior = config.fit(toy_model(), *toy(), num_draws=5)
    told = "the warm-up was not finished after 40 transitions: the log density was still rising"
    assert posterior.meta["num_warmup"] == 40
    assert any(str(each.message).startswith(told) for each in caught)
    assert any(note.startswith(told) for note in posterior.meta["warnings"])


def test_saturation_is_reported_from_a_tenth_on():
    stats = fine_stats()
    stats[0, :10, STATS.index("tree_depth")] = 10
    assert codes(stats)[0] == []
    stats[0, :11, STATS.index("tree_depth")] = 10
    assert codes(stats) == (["tree_depth"], {"share": pytest.approx(0.11), "max_tree_depth": 10})


def test_saturated_trees_are_said():
    config = NUTS(num_chains=2, num_warmup=0, step_size=0.01, max_tree_depth=2, compile=False)
    with pytest.warns(
        UserWarning, match="100% of the draws reached the maximum tree depth 2.*max_tree_depth"
    ):
        posterior = config.fit(simple, num_draws=5)
    assert (posterior.sample_stats["n_steps"] == 3).all()


def test_control_flow_on_values_falls_back_to_the_same_draws():
    def branching(x, y):
        z = pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        if z.sum() > 1e6:
            pyro.factor("never", torch.tensor(1.0))

    options = {"num_chains": 2, "num_warmup": 5}
    with pytest.warns(
        UserWarning, match="one after the other.*: the program's Python depends on"
    ) as seen:
        slow = NUTS(**options).fit(branching, num_draws=5)
    assert len(seen) == 1
    plain = NUTS(compile=False, **options).fit(simple, num_draws=5)
    torch.testing.assert_close(slow.draws["z"], plain.draws["z"], atol=1e-4, rtol=1e-4)


def test_the_note_of_slow_chains_names_what_keeps_them_from_being_batched():
    def program(x, y):
        z = pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        pyro.factor("positive", -z[z > 0].sum())

    with pytest.warns(
        UserWarning, match="one after the other.*: torch cannot run one of its.*dynamic shape"
    ):
        NUTS(num_chains=2, num_warmup=5, compile=False).fit(program, num_draws=5)


def test_subsampling_programs_are_refused():
    def program(x, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 40, subsample_size=10) as index:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y[index])

    with pytest.raises(ValueError, match="'rows' subsamples"):
        NUTS(**QUICK).fit(program, None, torch.zeros(40), num_draws=5)


def test_too_much_memory_is_refused_before_the_start():
    with pytest.raises(ValueError, match=r"needs [\d,]+ bytes .* lower num_draws"):
        NUTS(**QUICK).fit(simple, num_draws=10**11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_chains": 0}, "'num_chains' must be at least 1"),
        ({"num_warmup": -1}, "'num_warmup' must be at least 0"),
        ({"step_size": 0.0}, "'step_size' must be > 0"),
        ({"target_accept": 1.0}, "'target_accept'"),
        ({"mass_matrix": "full"}, "'mass_matrix' must be one of 'auto', 'diag', 'dense'"),
        ({"engine": "stan"}, "'engine' must be one of"),
        ({"trajectory": 0}, "'trajectory' must be at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        NUTS(**options)


def test_bad_arguments_of_fit():
    with pytest.raises(ValueError, match="'num_draws' must be at least 1"):
        NUTS(**QUICK).fit(simple, num_draws=0)
    with pytest.raises(ValueError, match="engine='compiled'"):
        NUTS(engine="pyro").fit(simple, callbacks=[print])


@pytest.mark.slow
def test_callbacks_see_the_run_and_may_stop_it():
    seen = []

    def stop(step, metrics):
        seen.append(metrics)
        return metrics["phase"] == "sampling" and metrics["draws"] >= 40

    posterior = NUTS(**QUICK).fit(simple, num_draws=5000, callbacks=[stop])
    assert posterior.num_draws < 200
    assert {"step_size", "tree_depth", "divergences", "draws"} <= set(seen[0])


RUN = """
import sys, torch, pyro, pyro.distributions as dist
sys.path[:0] = [{tests!r}, {tests!r} + '/hmc']
from test_nuts_trouble import killed_run
killed_run({path!r})
"""


def killed_run(path, num_draws=100):
    config = NUTS(num_chains=3, num_warmup=40, checkpoint_every=0.0, compile=False)
    return config.fit(simple, num_draws=num_draws, checkpoint=path)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_draws(tmp_path):
    path = tmp_path / "run.ckpt"
    code = RUN.format(tests=str(Path(__file__).parents[1]), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 240
    while not path.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert path.exists(), "the run never wrote a checkpoint"
    resumed = killed_run(path)
    whole = killed_run(tmp_path / "other.ckpt")
    assert torch.equal(resumed.draws["z"], whole.draws["z"])
    for name, value in whole.sample_stats.items():
        assert torch.equal(resumed.sample_stats[name], value), name


def test_checkpoints_that_cannot_be_used_are_refused(tmp_path):
    path = tmp_path / "run.ckpt"
    killed_run(path, num_draws=3)
    content = path.read_bytes()
    with pytest.raises(ValueError, match="belongs to a run with another model"):
        killed_run(path, num_draws=4)
    path.write_bytes(content[:-100])
    with pytest.raises(ValueError, match="damaged"):
        killed_run(path, num_draws=3)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a pyrobnn checkpoint"):
        killed_run(path, num_draws=3)


def test_a_changed_model_does_not_go_on_with_the_chains_of_the_old_one(tmp_path):
    def program(scale):
        return lambda x, y: pyro.sample("z", dist.Normal(0.0, scale))

    config = NUTS(checkpoint_every=0.0, **QUICK)
    path = tmp_path / "run.ckpt"
    whole = config.fit(program(1.0), num_draws=20, checkpoint=path)
    again = config.fit(program(1.0), num_draws=20, checkpoint=path)
    assert torch.equal(whole.draws["z"], again.draws["z"])
    with pytest.raises(ValueError, match="belongs to another model"):
        config.fit(program(1.01), num_draws=20, checkpoint=path)


def interrupted(seen_when):
    """A callback that sends Ctrl-C once."""
    sent = []

    def callback(step, metrics):
        if not sent and seen_when(metrics):
            sent.append(step)
            signal.raise_signal(signal.SIGINT)

    return callback


def test_ctrl_c_in_the_warm_up_writes_the_checkpoint_at_once_and_later_keeps_the_draws(tmp_path):
    config = NUTS(
        num_chains=3, num_warmup=40, compile=False
    )  # a checkpoint a minute: none would be written
    whole = config.fit(simple, num_draws=60)
    path = tmp_path / "run.ckpt"
    early = interrupted(lambda seen: seen["phase"] == "warm-up" and seen["draws"] > 10)
    with pytest.raises(KeyboardInterrupt):
        config.fit(simple, num_draws=60, checkpoint=path, callbacks=[early])
    assert path.exists()
    late = interrupted(lambda seen: seen["phase"] == "sampling" and seen["draws"] > 10)
    with pytest.warns(UserWarning, match="interrupted by Ctrl-C.*goes on"):
        part = config.fit(simple, num_draws=60, checkpoint=path, callbacks=[late])
    assert part.meta["stopped"] == "interrupt" and 10 < part.num_draws < 60
    assert torch.equal(part.draws["z"], whole.draws["z"][:, : part.num_draws])
    resumed = config.fit(simple, num_draws=60, checkpoint=path)
    assert torch.equal(resumed.draws["z"], whole.draws["z"])


def test_ctrl_c_within_a_step_waits_for_its_end_and_a_second_one_does_not():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with DelayedInterrupt() as interrupts, interrupts.changing():
            signal.raise_signal(signal.SIGINT)
            done.append("step")
    assert done == ["step"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        with DelayedInterrupt() as interrupts, interrupts.changing():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("never")
    assert done == ["step"]
