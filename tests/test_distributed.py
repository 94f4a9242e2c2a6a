"""Chains on two gloo ranks end as one posterior."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, seeded

from pyrobnn.inference import distributed
from pyrobnn.inference.map import MAP
from pyrobnn.inference.sgmcmc import SGHMC
from pyrobnn.likelihoods import HomoskedasticGaussian
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.priors import IIDPrior

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys
import torch
sys.path.insert(0, sys.argv[2])
from test_distributed import METHOD, problem
from pyrobnn.inference import distributed

torch.set_num_threads(1)
with distributed.process_group() as rank:
    posterior = distributed.fit_on_ranks(METHOD, *problem(), num_draws=400, seed=5)
    posterior.save(f"{sys.argv[1]}/rank{rank}.nc")
"""
METHOD = SGHMC(num_chains=2, num_warmup=200, thinning=10, step_size=0.05, compile=False)


def problem():
    with seeded(1):
        x = torch.randn(20, 1, dtype=torch.float64)
        net = torch.nn.Linear(1, 1, bias=False).double()
        y = 2 * x + 0.5 * torch.randn(20, 1, dtype=torch.float64)
    return BNN(net, IIDPrior(dist.Normal(0.0, 1.0)), HomoskedasticGaussian(0.5)), x, y


@pytest.mark.slow
def test_two_ranks_make_one_posterior(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(program), str(tmp_path), str(ROOT / "tests")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    model, x, y = problem()
    one, two = (Posterior.load(tmp_path / f"rank{rank}.nc", model) for rank in (0, 1))
    weight = one.draws["net.weight"]
    assert weight.shape == (4, 400, 1, 1)
    assert torch.equal(weight, two.draws["net.weight"])  # every rank has them all
    assert not torch.equal(weight[0], weight[2])  # and ran its own
    assert one.sample_stats["lp"].shape == (4, 400)
    assert one.meta["num_ranks"] == 2 and one.meta["seed"] == 5
    precision = 1 + float((x * x).sum()) / 0.25
    assert_mean_within(weight[..., 0, 0], float((x * y).sum()) / 0.25 / precision)


def test_without_torchrun_it_is_a_plain_fit():
    model, x, y = problem()
    with distributed.process_group() as rank:
        found = distributed.fit_on_ranks(METHOD, model, x, y, num_draws=5, seed=3)
    plain = METHOD.fit(model, x, y, num_draws=5, seed=3)
    assert rank == 0 and torch.equal(found.draws["net.weight"], plain.draws["net.weight"])


def test_a_method_without_chains_is_refused():
    model, x, y = problem()
    with pytest.raises(TypeError, match="no chains"):
        distributed.fit_on_ranks(MAP(compile=False), model, x, y)


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, "nccl")])
def test_every_rank_has_a_gpu_of_its_own_or_none_has(gpus, backend, monkeypatch):
    entered, started = [], []

    @contextlib.contextmanager
    def current(device):
        entered.append(device)
        yield

    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.distributed, "init_process_group", started.append)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    with distributed.process_group() as rank:
        assert rank == 1 and started == [backend]
        assert entered == (["cuda:1"] if backend == "nccl" else [])
