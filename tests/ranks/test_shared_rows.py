"""Ranks that share the rows of every batch fit what one process fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import pyrobnn as pb
from pyrobnn.inference import distributed
from pyrobnn.inference.fitting.ranks import Ranks
from pyrobnn.inference.method import METHODS
from pyrobnn.inference.optim.training import Optimizer
from pyrobnn.inference.svi import Guide

ROOT = Path(__file__).parents[2]

#: every method that can, where it needs a batch of an odd number of rows, or the whole
SHORT = {"num_steps": 40, "compile": False}
CHAINS = {"num_chains": 2, "num_warmup": 30, "init_steps": 20, "compile": False}
CASES = {
    "MLE": pb.MLE(**SHORT),
    "MAP": pb.MAP(polish_steps=0, batch_size=9, optimizer=Optimizer(clip_norm=0.1), **SHORT),
    "SVI": pb.SVI(batch_size=11, estimator="weights", **SHORT),  # whose noise is each rank's own
    "SVI, all rows": pb.SVI(
        guide=Guide("low_rank", mean_field_start=0.0), optimizer=lambda own: torch.optim.Adagrad(own), **SHORT
    ),
    "SWA": pb.SWA(**SHORT),
    "SWAG": pb.SWAG(rank=2, **SHORT),
    "SGLD": pb.SGLD(**CHAINS),
    "SGHMC": pb.SGHMC(batch_size=11, **CHAINS),
}


def problem():
    data = pb.data.sinusoid(num_data=41)
    net = pb.networks.mlp(1, (6,), seed=0).double()
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
    return model, data.x.double(), data.y.double()


def batch_normed():
    _, x, y = problem()
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
    return pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1)), x, y


def standardising():
    class Centred(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    _, x, y = problem()
    net = Centred(torch.nn.Linear(1, 1)).double()
    return pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1)), x, y


def loaded():
    model, x, y = problem()
    return model, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8), None


def own_rows():
    model, x, y = (each.numpy() if isinstance(each, torch.Tensor) else each for each in problem())
    own = slice(torch.distributed.get_rank(), None, 2)
    return model, x[own], y[own]


REFUSED = {
    "a batch of one row": (pb.MAP(batch_size=1, **SHORT), problem),
    "batch norm": (pb.SWAG(**SHORT), batch_normed),
    "rows together": (pb.SVI(**SHORT), standardising),
    "a loader": (pb.SVI(**SHORT), loaded),
    "a program": (pb.SVI(**SHORT), lambda: (lambda x, y: None, None, None)),
    "its own rows": (pb.SVI(**SHORT), own_rows),
    "no rows": (pb.NUTS(compile=False), problem),
}


def main(folder):
    """What each of two ranks does."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    told = {"refused": {}, "meta": {}}
    with distributed.process_group() as rank:
        for name, (method, given) in REFUSED.items():
            try:
                distributed.fit_on_ranks(method, *given(), seed=3, share="rows")
            except (TypeError, ValueError, pb.core.checks.Refused) as error:
                told["refused"][name] = str(error)
        for name, method in CASES.items():
            found = distributed.fit_on_ranks(method, *problem(), num_draws=10, seed=3, share="rows")
            torch.save(found.draws, f"{folder}/{rank} {name}.pt")
            told["meta"][name] = {key: found.meta.get(key) for key in ("num_ranks", "shared", "warnings")}
    told["threads"] = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    Path(folder, f"{rank}.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_ranks_fit_what_one_process_fits(name, two_ranks):
    method = CASES[name]
    options = {} if method.kind == "point" else {"num_draws": 10}
    alone = method.fit(*problem(), seed=3, **options)
    folder, told = two_ranks
    one, two = (torch.load(folder / f"{rank} {name}.pt") for rank in (0, 1))
    for site, value in alone.draws.items():
        assert torch.equal(one[site], two[site])
        torch.testing.assert_close(one[site], value, rtol=1e-9, atol=1e-12)
    meta = told[0]["meta"][name]
    assert (meta["num_ranks"], meta["shared"]) == (2, "rows")
    assert not any("ranks" in text for text in meta["warnings"])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted as Linux lists them")
def test_no_thread_of_the_group_is_left_when_it_is(two_ranks):
    for told in two_ranks[1]:
        assert not [name for name in told["threads"] if "gloo" in name], told["threads"]


def test_every_method_that_says_it_can_is_held_to_it():
    able = {each.cls.__name__ for each in METHODS.values() if each.cls.shares_rows}
    assert able == {type(method).__name__ for method in CASES.values()}


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "a batch of one row": "cannot be shared by 2 ranks",
        "batch norm": "statistics of a batch",
        "rows together": "depends on the other rows",
        "a loader": "pass tensors instead of a DataLoader",
        "a program": "pyrobnn.BNN alone",
        "its own rows": "different data",
        "no rows": "cannot share the rows",
    }.items(),
)
def test_what_cannot_be_shared_is_refused_on_every_rank(name, said, two_ranks):
    for told in two_ranks[1]:
        assert said in told["refused"].get(name, "nothing was refused")


@pytest.mark.parametrize("num", [7, 12])
def test_the_parts_of_all_ranks_are_the_batch(num):
    rows = torch.arange(num)
    parts = [Ranks(rank, 5).part(rows) for rank in range(5)]
    assert sorted(torch.cat(parts).tolist()) == rows.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


if __name__ == "__main__":
    main(sys.argv[1])
