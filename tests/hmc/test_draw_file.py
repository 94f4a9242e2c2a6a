"""Draws of NUTS that go to disk: the same draws, less memory, and every way in which the file can be unusable."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.nuts import NUTS, needed_bytes

# more draws than a block holds, so that the blocks' seams are inside
MANY = 150


def program(x, y):
    """Sites with bijections that change the values (positive) and the shape (simplex)."""
    pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("shares", dist.Dirichlet(torch.full((3,), 4.0)))
    pyro.sample("scale", dist.HalfNormal(1.0))


def same(one, other):
    assert set(one.draws) == set(other.draws)
    for name, value in one.draws.items():
        assert torch.equal(value, other.draws[name]), name
    for name, value in one.sample_stats.items():
        assert torch.equal(value, other.sample_stats[name]), name


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"compile": False, "trajectory": 3}]
)
def test_draws_on_disk_are_the_draws_in_memory(tmp_path, options):
    config = NUTS(num_chains=3, num_warmup=60, **options)
    kept = config.fit(program, num_draws=MANY)
    streamed = config.fit(program, num_draws=MANY, stream_to=tmp_path / "draws")
    # the simplex is mapped in blocks of other lengths, which may change its last bit
    torch.testing.assert_close(streamed.draws.pop("shares"), kept.draws.pop("shares"), rtol=1e-6, atol=1e-6)
    same(streamed, kept)
    assert streamed.meta["num_gradients"] == kept.meta["num_gradients"]


@pytest.mark.slow
def test_a_dense_mass_matrix_changes_no_more_than_the_last_bits(tmp_path):
    config = NUTS(num_chains=2, num_warmup=40, mass_matrix="dense", trajectory=3, compile=False)
    kept = config.fit(program, num_draws=80)
    streamed = config.fit(program, num_draws=80, stream_to=tmp_path / "draws")
    for name, value in kept.draws.items():  # the product with the whitening matrix is of other sizes
        torch.testing.assert_close(streamed.draws[name], value, rtol=1e-5, atol=1e-5)
    assert torch.equal(streamed.sample_stats["lp"], kept.sample_stats["lp"])


def test_a_network_with_draws_on_disk_predicts_saves_and_is_diagnosed(tmp_path):
    with seeded():
        x = torch.randn(20, 2)
        net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(0.3))
    config = NUTS(num_chains=2, num_warmup=0, step_size=0.02, trajectory=3, compile=False)
    kept = config.fit(model, x, x[:, 0], num_draws=90)
    streamed = config.fit(model, x, x[:, 0], num_draws=90, stream_to=tmp_path / "draws")
    assert torch.equal(streamed.predict(x).mean, kept.predict(x).mean)
    streamed.save(tmp_path / "posterior.nc")
    same(pb.Posterior.load(tmp_path / "posterior.nc", model), kept)
    assert "posterior" in streamed.to_datatree(x, x[:, 0])


@pytest.mark.filterwarnings("ignore:the warm-up was not finished")  # nor is it meant to be
def test_a_stopped_run_has_the_draws_that_every_chain_has(tmp_path):
    config = NUTS(num_chains=3, num_warmup=30, trajectory=3, compile=False)
    streamed = config.fit(program, num_draws=2000, until_ess=100, stream_to=tmp_path / "draws")
    assert 100 <= streamed.num_draws < 2000
    assert streamed.draws["z"].shape[:2] == streamed.sample_stats["lp"].shape == (3, streamed.num_draws)
    # every row was written: a row of the untouched file would be zero
    assert (streamed.draws["shares"].sum(-1) > 0.99).all()
    assert (streamed.sample_stats["n_steps"] > 0).all()


def test_progress_counts_what_is_on_disk(tmp_path):
    seen = []
    config = NUTS(num_chains=2, num_warmup=10, trajectory=2, compile=False)
    config.fit(program, num_draws=200, stream_to=tmp_path / "draws", callbacks=[lambda _, m: seen.append(m)])
    draws = [metrics["draws"] for metrics in seen if metrics["phase"] == "sampling"]
    assert draws == sorted(draws) and draws[-1] >= 190


def test_memory_holds_a_block_only():
    config = NUTS(num_chains=4, num_warmup=100)
    size = prepare(program, points="held").density.dim, torch.float32
    few, many = (needed_bytes(*size, config, num, 100, True) for num in (1000, 10_000))
    per_draw = 4 * 8 * 7  # of four chains, seven statistics in float64: no positions
    assert many - few == 9000 * per_draw
    kept = needed_bytes(*size, config, 10_000, 100, False)
    assert many < kept / 1.5


def test_a_refused_run_is_told_of_the_file(monkeypatch):
    config = NUTS(num_chains=4, num_warmup=10, max_tree_depth=3, mass_matrix="diag", compile=False)
    dim = prepare(program, points="held").density.dim
    streamed = needed_bytes(dim, torch.float32, config, 5000, 10, True)
    for place in ("nuts", "fitting.sizes"):
        monkeypatch.setattr(f"pyrobnn.inference.{place}.free_bytes", lambda device: streamed)
    with pytest.raises(
        ValueError, match=r"needs [\d,]+ bytes .* or write the draws to disk with fit\(stream_to"
    ):
        config.fit(program, num_draws=5000)
    for place in ("nuts", "fitting.sizes"):
        monkeypatch.setattr(f"pyrobnn.inference.{place}.free_bytes", lambda device: streamed - 1)
    with pytest.raises(ValueError, match="are free: lower num_draws or num_chains$"):
        config.fit(program, num_draws=5000)


def test_files_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    config = NUTS(num_chains=2, num_warmup=0, step_size=0.1, max_tree_depth=3, compile=False)
    foreign = tmp_path / "notes.txt"
    foreign.write_text("something dear")
    with pytest.raises(ValueError, match="no file of draws"):
        config.fit(program, num_draws=5, stream_to=foreign)
    assert foreign.read_text() == "something dear"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    with pytest.raises(ValueError, match="need 408 bytes on disk but 100 are free.*'stream_to'"):
        config.fit(program, num_draws=5, stream_to=tmp_path / "draws")
    with pytest.raises(ValueError, match="'stream_to' need engine='compiled'"):
        NUTS(engine="pyro").fit(program, num_draws=5, stream_to=tmp_path / "draws")


@pytest.mark.filterwarnings("ignore:.*maximum tree depth")
def test_a_new_run_leaves_the_earlier_posterior_alone(tmp_path):
    config = NUTS(num_chains=2, num_warmup=0, step_size=0.1, max_tree_depth=3, compile=False)
    first = config.fit(program, num_draws=5, stream_to=tmp_path / "draws")
    before = first.draws["z"].clone()
    second = config.fit(program, num_draws=5, seed=1, stream_to=tmp_path / "draws")
    assert torch.equal(first.draws["z"], before) and not torch.equal(second.draws["z"], before)


RUN = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {tests!r} + '/hmc']
from test_draw_file import streamed_run
streamed_run(Path({folder!r}))
"""


def streamed_run(folder, draws="draws"):
    config = NUTS(num_chains=3, num_warmup=20, trajectory=4, checkpoint_every=0.0, compile=False)
    return config.fit(program, num_draws=MANY, checkpoint=folder / "run.ckpt", stream_to=folder / draws)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*diverged")
def test_a_killed_run_resumes_to_the_same_draws_on_disk(tmp_path):
    code = RUN.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 240
    draws = tmp_path / "draws"
    # until a block of draws is on disk: more than the head is other than zero
    while time.monotonic() < deadline and process.poll() is None:
        if draws.exists() and any(draws.read_bytes()[128:]):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(ValueError, match="does not exist"):
        streamed_run(tmp_path, draws="elsewhere")
    resumed = streamed_run(tmp_path)
    (tmp_path / "whole").mkdir()
    same(resumed, streamed_run(tmp_path / "whole"))
    content = bytearray(draws.read_bytes())
    content[40] ^= 1
    draws.write_bytes(content)
    with pytest.raises(ValueError, match="draws of another run"):
        streamed_run(tmp_path)
