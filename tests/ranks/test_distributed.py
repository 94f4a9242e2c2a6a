"""Chains of ranks and of workers end as one posterior, also where one of them was killed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, seeded

from pyrobnn.inference import distributed
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.nuts import NUTS
from pyrobnn.inference.point_methods import MAP, DeepEnsemble
from pyrobnn.inference.sgmcmc import SGHMC
from pyrobnn.likelihoods import HomoskedasticGaussian
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior, storage
from pyrobnn.priors import IIDPrior

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import torch
sys.path[:0] = sys.argv[2:]
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
        [*command, str(program), str(tmp_path), str(ROOT / "tests"), str(Path(__file__).parent)],
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


# -- jobs of workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "along"),
    [
        (dataclasses.replace(METHOD, num_warmup=20, init_steps=20), 0),
        pytest.param(
            DeepEnsemble(num_members=2, num_steps=5, compile=False), 1, marks=pytest.mark.slow
        ),
    ],
)
def test_a_job_has_the_draws_of_its_number_wherever_it_runs(method, along):
    model, x, y = problem()
    with ThreadPoolExecutor(2) as workers:
        found = distributed.fit_on_workers(
            method, model, x, y, workers=workers, num_jobs=3, num_draws=4, seed=5
        )
    options = {"num_draws": 4} if along == 0 else {}
    alone = [method.fit(model, x, y, seed=15 + job, **options) for job in range(3)]
    expected = torch.cat([posterior.draws["net.weight"] for posterior in alone], along)
    assert torch.equal(found.draws["net.weight"], expected)
    assert found.meta["num_ranks"] == 3 and found.meta["seed"] == 5
    assert found.predict(x).f.shape[:2] == expected.shape[:2]


#: four jobs that write a checkpoint at every look at the time
CHAINS = NUTS(num_chains=2, num_warmup=40, max_tree_depth=3, checkpoint_every=0.0, compile=False)


class Fatal:
    """A model whose process is killed in the midst of its job, once, after its checkpoint is on the disk."""

    def __init__(self, folder, job):
        self.folder = Path(folder)
        self.job = job

    def __call__(self, step, metrics):
        mark = self.folder / "killed"
        if (self.folder / f"run.{self.job}").exists() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Killed(NUTS):
    """NUTS whose third job kills its process, once."""

    folder: str = ""

    def fit(self, *args, seed=0, **options):
        callbacks = [Fatal(self.folder, 2)] if seed == 22 else []
        return super().fit(*args, seed=seed, callbacks=callbacks, **options)


def undisturbed():
    model, x, y = problem()
    parts = [CHAINS.fit(model, x, y, num_draws=60, seed=20 + job) for job in range(4)]
    return torch.cat([part.draws["net.weight"] for part in parts])


def disturbed(folder):
    options = {field.name: getattr(CHAINS, field.name) for field in dataclasses.fields(CHAINS)}
    return Killed(**options, folder=str(folder))


CLUSTER = """
import sys
sys.path[:0] = sys.argv[2:]
from distributed import Client, LocalCluster
import test_distributed as t

if __name__ == "__main__":
    with LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        posterior = t.distributed.fit_on_workers(
            t.disturbed(sys.argv[1]), *t.problem(), workers=client.get_executor(pure=False), num_jobs=4,
            num_draws=60, seed=5, checkpoint=sys.argv[1] + "/run",
        )
    posterior.save(sys.argv[1] + "/rank0.nc")
"""
RANKS = """
import sys
sys.path[:0] = sys.argv[2:]
import test_distributed as t

t.torch.set_num_threads(1)
with t.distributed.process_group() as rank:
    posterior = t.distributed.fit_on_ranks(
        t.disturbed(sys.argv[1]), *t.problem(), num_draws=60, seed=5, checkpoint=sys.argv[1] + "/run"
    )
    posterior.save(f"{sys.argv[1]}/rank{rank}.nc")
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "torchrun"])
def test_a_killed_worker_loses_nothing(engine, tmp_path):
    command = [sys.executable]
    if engine == "dask":
        pytest.importorskip(
            "distributed", reason="dask is not installed: pip install 'pyrobnn[cluster]'"
        )
    else:
        launcher = ["--standalone", "--nproc_per_node=4", "--max-restarts=1"]
        command += ["-m", "torch.distributed.run", *launcher]
    program = tmp_path / "program.py"
    program.write_text(CLUSTER if engine == "dask" else RANKS)
    done = subprocess.run(
        [*command, str(program), str(tmp_path), str(ROOT / "tests"), str(Path(__file__).parent)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    found = Posterior.load(tmp_path / "rank0.nc", problem()[0])
    assert torch.equal(found.draws["net.weight"], undisturbed())


# -- jobs that are lost -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mortal(SGHMC):
    """SGHMC whose second job diverges, or kills its process."""

    kills: bool = False

    def _fit(self, problem, run):
        if run.seed == 16 and self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.seed == 16:
            raise FloatingPointError("a chain is no longer finite")
        return super()._fit(problem, run)


SHORT = {"num_chains": 2, "num_warmup": 20, "init_steps": 20, "step_size": 0.05, "compile": False}


def lost(workers, **options):
    model, x, y = problem()
    method = Mortal(**SHORT, **options)
    with pytest.warns(UserWarning, match="1 of 3 jobs were lost"):
        found = distributed.fit_on_workers(
            method, model, x, y, workers=workers, num_jobs=3, num_draws=4, seed=5
        )
    alone = [method.fit(model, x, y, seed=seed, num_draws=4) for seed in (15, 17)]
    expected = torch.cat([posterior.draws["net.weight"] for posterior in alone])
    assert torch.equal(found.draws["net.weight"], expected)
    (finding,) = [entry for entry in found.meta["findings"] if entry["code"] == "lost_jobs"]
    assert found.meta["num_ranks"] == 2
    return finding["reasons"]


def test_a_job_that_fails_loses_its_own_chains_alone():
    with ThreadPoolExecutor(2) as workers:
        reasons = lost(workers)
    assert reasons == {"1": "FloatingPointError: a chain is no longer finite"}


@pytest.mark.slow
def test_a_process_that_dies_loses_its_own_job_alone():
    assert lost(2, kills=True) == {"1": "its process died"}


def test_wrong_arguments_and_the_loss_of_all_jobs_are_raised():
    model, x, y = problem()
    with ThreadPoolExecutor(2) as workers:
        fit = functools.partial(distributed.fit_on_workers, workers=workers, num_draws=4)
        with pytest.raises(ValueError, match="'x'"):
            fit(METHOD, model, x[:0], y[:0], num_jobs=2)
        with pytest.raises(FloatingPointError):
            fit(Mortal(**SHORT), model, x, y, num_jobs=1, seed=16)
    with pytest.raises(TypeError, match="'workers' must be an executor"):
        distributed.fit_on_workers(METHOD, model, x, y, workers="two", num_jobs=2)


# -- files of ranks that are not gathered -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "along"),
    [
        (dataclasses.replace(METHOD, num_warmup=20, init_steps=20), 0),
        (DeepEnsemble(num_members=2, num_steps=5, compile=False), 1),
    ],
)
def test_files_of_ranks_are_read_as_one_posterior(method, along, tmp_path):
    model, x, y = problem()
    options = {"num_draws": 4} if along == 0 else {}
    fits = [method.fit(model, x, y, seed=seed, **options) for seed in range(3)]
    paths = [fit.save(tmp_path / f"{number}.nc") for number, fit in enumerate(fits)]
    found = Posterior.load(paths, model, x=x, y=y)
    for site in fits[0].draws:
        expected = torch.cat([fit.draws[site] for fit in fits], along)
        assert torch.equal(found.draws[site], expected)
    assert (found.num_chains, found.num_draws) == expected.shape[:2]
    assert found.meta["num_ranks"] == 3 and found.meta["seed"] == [0, 1, 2]
    torch.testing.assert_close(
        found.predict(x).mean, torch.stack([fit.predict(x).mean for fit in fits]).mean(0)
    )
    assert torch.equal(pickle.loads(pickle.dumps(found)).draws["net.weight"], expected)
    assert torch.equal(found.thin(1).draws["net.weight"], expected[:, :1])
    saved = Posterior.load(found.save(tmp_path / "all.nc"), model)
    assert torch.equal(saved.draws["net.weight"], expected)


def test_a_site_is_read_when_it_is_asked_for_and_let_go_again(tmp_path, monkeypatch):
    model, x, y = problem()
    fit = METHOD.fit(model, x, y, num_draws=4)
    path = fit.save(tmp_path / "one.nc")
    read = []
    plain = storage._read_site

    def watched(tree, *names, first=False):
        if not first:  # by its first draw the file knows the model again
            read.append(names[1])
        return plain(tree, *names, first=first)

    monkeypatch.setattr(storage, "_read_site", watched)
    found = Posterior.load([path, path], model)
    assert read == []
    for _ in range(2):
        assert found.num_draws == 4
    assert read == ["net.weight", "net.weight"]


def test_files_that_do_not_join_are_refused(tmp_path):
    model, x, y = problem()
    chains = METHOD.fit(model, x, y, num_draws=4).save(tmp_path / "chains.nc")
    longer = METHOD.fit(model, x, y, num_draws=5).save(tmp_path / "longer.nc")
    point = MAP(num_steps=5, compile=False).fit(model, x, y).save(tmp_path / "point.nc")
    for paths, words in [
        ([chains, longer], "do not join"),
        ([chains, point], "do not join"),
        ([point, point], "single points"),
        ([], "empty list"),
    ]:
        with pytest.raises(ValueError, match=words):
            Posterior.load(paths, model)
    with pytest.raises(FileNotFoundError):
        Posterior.load([chains, tmp_path / "none.nc"], model)


# -- one process ------------------------------------------------------------------------------------------------------


def test_without_torchrun_it_is_a_plain_fit():
    model, x, y = problem()
    method = dataclasses.replace(METHOD, num_warmup=20, init_steps=20)
    with distributed.process_group() as rank:
        found = distributed.fit_on_ranks(method, model, x, y, num_draws=5, seed=3)
    plain = method.fit(model, x, y, num_draws=5, seed=3)
    assert rank == 0 and torch.equal(found.draws["net.weight"], plain.draws["net.weight"])


def test_a_method_without_chains_is_refused():
    model, x, y = problem()
    with pytest.raises(TypeError, match="no chains"):
        distributed.fit_on_ranks(Laplace(compile=False), model, x, y)


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, "nccl")])
def test_every_rank_has_a_gpu_of_its_own_or_none_has(gpus, backend, monkeypatch):
    entered = []
    started = []

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
