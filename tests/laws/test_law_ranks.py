"""The law of ranks: a fit whose rows two ranks share is that of one process with the union of their batches."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed
from helpers import seeded
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pyrobnn as pb
from pyrobnn.inference.fitting.shares import Ranks, SharedLoader

ROOT = Path(__file__).parents[2]
#: two epochs and a half of batches of 20, 20 and 13 rows
STEPS = {"num_steps": 8, "compile": False}
CHAINS = {"num_chains": 2, "num_warmup": 12, "init_steps": 6, "thinning": 2, "compile": False}


def loader(ranks: int, rank: int, num_rows: int = 53, *, shuffle: bool = True) -> DataLoader:
    with seeded(1):
        x = torch.randn(num_rows, 2)
        rows = TensorDataset(x, x[:, :1].sin() + 0.2 * torch.randn(num_rows, 1))
    sampler = DistributedSampler(rows, ranks, rank, shuffle, seed=3)
    return DataLoader(rows, 20 // ranks, sampler=sampler)


def model(scale: object = 0.2, *layers: torch.nn.Module) -> pb.BNN:
    net = pb.networks.mlp(2, (8,), seed=0)
    if layers:
        net = torch.nn.Sequential(net[0], *layers, *net[1:])
    return pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(scale))


def model_in_double() -> pb.BNN:
    net = pb.networks.mlp(2, (8,), seed=0).double()
    return pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.2))


#: what every rank computes by the same numbers, and so comes to what one process comes to
METHODS = {
    "MLE": pb.MLE(**STEPS),
    "MAP": pb.MAP(**STEPS),
    "MAP by SGD": pb.MAP(optimizer=torch.optim.SGD, optimizer_options={"lr": 0.05}, **STEPS),
    "MAP clipped": pb.MAP(optimizer=pb.Optimizer(clip_norm=0.1), **STEPS),
    "ensemble": pb.DeepEnsemble(num_members=2, **STEPS),
    "SVI": pb.SVI(**STEPS),
    "SVI by weights": pb.SVI(estimator="weights", num_particles=2, **STEPS),
    "SVI by flipout": pb.SVI(estimator="flipout", **STEPS),
    "SVI low rank": pb.SVI(guide="low_rank", **STEPS),
    "SWAG": pb.SWAG(collect_every=2, **STEPS),
    "SWAG of a rate": pb.SWAG(collect_every=2, lr=1e-3, **STEPS),
    "SGHMC": pb.SGHMC(**CHAINS),
    "SGLD": pb.SGLD(preconditioner="rmsprop", **CHAINS),
}
#: of whose leapfrogs each is one gradient by all ranks; in float64, for trees amplify rounding
NUTS = pb.NUTS(num_chains=2, num_warmup=12, max_tree_depth=4, compile=False)
HMC = pb.NUTS(num_chains=2, num_warmup=4, trajectory=4, compile=True)
FILLED = pb.NUTS(num_chains=2, num_warmup=4, capacity=64, compile=False)
#: fits with random numbers for rows, which differ from rank to rank, or with statistics of a rank's part
RANDOM = {
    "dropout": (pb.MAP(**STEPS), (torch.nn.Dropout(0.2),)),
    "dropout of SVI": (pb.SVI(**STEPS), (torch.nn.Dropout(0.2),)),
    "dropout of chains": (pb.SGHMC(**CHAINS), (torch.nn.Dropout(0.2),)),
    "batch statistics": (pb.MAP(**STEPS), (torch.nn.BatchNorm1d(8),)),
    "MC dropout": (pb.MCDropout(p=0.1, **STEPS), ()),
}


def fitted(method: pb.inference.method.Method, bnn: pb.BNN, rows: DataLoader, **options: object):
    posterior = pb.distributed.fit_on_ranks(method, bnn, rows, num_draws=6, seed=2, **options)
    draws = {name: value.clone() for name, value in posterior.draws.items()}
    return draws, posterior.meta | {"loss": posterior.history.get("loss")}


class Count:
    """A callback that notes its steps, and stops at the third."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, step, metrics):
        self.steps.append(step)
        return len(self.steps) == 3


class ThreeDraws:
    """A callback that stops once each chain has three draws."""

    def __call__(self, step, metrics):
        return metrics["phase"] == "sampling" and metrics["draws"] >= 3


class End:
    """A callback that stops before there is a draw."""

    def __call__(self, step, metrics):
        return True


class Draw:
    """A callback that draws from torch's random numbers."""

    def __call__(self, step, metrics):
        torch.rand(1)


def refusal(function) -> str:
    try:
        function()
    except (ValueError, RuntimeError, pb.Refused) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def on_rank(ranks: int, rank: int) -> dict:
    """All that this test asks of a rank."""
    share = functools.partial(loader, ranks, rank)
    found = {name: fitted(method, model(), share()) for name, method in METHODS.items()}
    found["free noise"] = fitted(pb.MAP(**STEPS), model("learned"), share())
    found["in order"] = fitted(METHODS["MAP"], model(), share(shuffle=False))
    found["SVI in order"] = fitted(METHODS["SVI"], model(), share(shuffle=False))
    found["NUTS"] = fitted(NUTS, model_in_double(), share())
    found["HMC, its step compiled"] = fitted(HMC, model_in_double(), share())
    # the last batch would have one row
    found["one more"] = fitted(METHODS["MAP"], model(), share(41))
    if ranks > 1:
        for name, (method, layers) in RANDOM.items():
            found[name] = fitted(method, model(0.2, *layers), share())
        count = Count()
        found["stopped"] = fitted(METHODS["MAP"], model(), share(), callbacks=[count])
        found["steps"] = count.steps
        other = pb.BNN(pb.networks.mlp(2, (8,), seed=rank), *_rest(model()))
        found["other nets"] = refusal(lambda: fitted(METHODS["MAP"], other, share()))
        found["other rows"] = refusal(lambda: fitted(METHODS["MAP"], model(), share(53 - rank)))
        found["no rows"] = refusal(lambda: fitted(pb.Laplace(compile=False), model(), share()))
        found["NUTS stopped"] = fitted(NUTS, model_in_double(), share(), callbacks=[ThreeDraws()])
        found["NUTS of few"] = refusal(lambda: fitted(FILLED, model(), share()))
        found["early end"] = refusal(lambda: fitted(NUTS, model(), share(), callbacks=[End()]))
        chains = METHODS["SGHMC"]
        draws = refusal(lambda: fitted(chains, model(), share(), callbacks=[Draw()]))
        found["other numbers"] = draws
    return found


def _rest(bnn: pb.BNN):
    return pb.priors.FanInNormal(), bnn.likelihood


PROGRAM = """
import sys, warnings
import torch
sys.path[:0] = sys.argv[2:]
import test_law_ranks as law
from pyrobnn.inference import distributed

torch.set_num_threads(1)
warnings.simplefilter("ignore")
with distributed.process_group() as rank:
    torch.save(getattr(law, "FUNCTION")(2, rank), f"{sys.argv[1]}/rank{rank}.pt")
"""


def on_two_ranks(function: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """A function of this file on two ranks of gloo; what it returns is in ``rank0.pt`` and ``rank1.pt``."""
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("FUNCTION", function))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return subprocess.run(
        [*command, str(program), str(folder), str(ROOT / "tests"), str(Path(__file__).parent)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    done = on_two_ranks("on_rank", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone() -> dict:
    with warnings.catch_warnings(action="ignore"):
        return on_rank(1, 0)


SAME = [*METHODS, "free noise", "in order", "SVI in order", "NUTS", "HMC, its step compiled"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_two_ranks_fit_as_one_process_does(name, ranks, alone):
    draws, meta = ranks[0][name]
    expected, expected_meta = alone[name]
    assert draws.keys() == expected.keys()
    for site, value in expected.items():
        torch.testing.assert_close(draws[site], value, rtol=2e-4, atol=2e-6)
    assert meta["num_data"] == expected_meta["num_data"]
    assert (meta["shared"], meta["num_ranks"]) == ("rows", 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SAME, *RANDOM, "one more", "stopped", "NUTS stopped"])
def test_ranks_come_to_the_same_draws_bit_for_bit(name, ranks):
    one, two = (found[name][0] for found in ranks)
    for site, value in one.items():
        assert torch.equal(value, two[site]) and bool(value.isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), [("in order", "MAP"), ("SVI in order", "SVI")])
def test_it_is_the_fit_to_a_loader_of_all_rows(name, method, alone):
    rows = loader(1, 0, shuffle=False).dataset
    with warnings.catch_warnings(action="ignore"):
        plain = METHODS[method].fit(model(), DataLoader(rows, 20), seed=2)
    torch.testing.assert_close(alone[name][1]["loss"], plain.history["loss"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_callback_is_called_on_rank_0_and_stops_all(ranks):
    assert (len(ranks[0]["steps"]), ranks[1]["steps"]) == (3, [])
    for found in ranks:
        assert found["stopped"][1]["stopped"] == "callback"
        assert found["NUTS stopped"][1]["stopped"] == "callback"
        assert found["stopped"][1]["num_steps"] == ranks[0]["steps"][-1] < STEPS["num_steps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other nets", "ValueError: the ranks begin with different nets"),
        ("other rows", "ValueError: the ranks' DataLoaders differ"),
        ("no rows", "Refused: Laplace cannot share rows over ranks"),
        (
            "NUTS of few",
            "Refused: rows are shared over ranks with engine='compiled' and without capac",
        ),
        ("early end", "ValueError: a callback stopped the run at step"),
        ("other numbers", "RuntimeError: the ranks have come to different parameters"),
    ],
)
def test_ranks_that_differ_are_refused_on_all(name, words, ranks):
    assert all(found[name].startswith(words) for found in ranks)


# -- rows --------------------------------------------------------------------------------------------------------------


def _as_rank(number: int, count: int) -> Ranks:
    ranks = Ranks()
    ranks.count = count
    ranks.rank = number
    return ranks


@pytest.mark.parametrize("num_rows", [53, 60, 41, 42, 7])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_row_is_in_one_share_of_an_epoch(num_rows, count):
    shared = [
        SharedLoader(loader(count, rank, num_rows), _as_rank(rank, count)) for rank in range(count)
    ]
    batches = [list(of_rank.share.batch_sampler) for of_rank in shared]
    assert len({len(of_rank) for of_rank in batches}) == 1
    for parts, union in zip(zip(*batches, strict=True), shared[0].union, strict=True):
        assert all(parts) and max(map(len, parts)) - min(map(len, parts)) <= 1
        assert sorted(sum(parts, [])) == sorted(union)
    assert sorted(sum(shared[0].union, [])) == list(range(num_rows))


def test_the_batches_are_the_unions_of_those_of_the_samplers():
    count = 2
    given = [list(loader(count, rank, 60).batch_sampler) for rank in range(count)]
    unions = [sorted(sum(parts, [])) for parts in zip(*given, strict=True)]
    found = [sorted(rows) for rows in SharedLoader(loader(count, 0, 60), _as_rank(0, count)).union]
    assert found == unions


def test_fewer_rows_than_ranks_are_refused():
    with pytest.raises(ValueError, match="4 ranks share"):
        SharedLoader(loader(4, 0, 3), _as_rank(0, 4))


# -- checkpoints -------------------------------------------------------------------------------------------------------

#: of which each draws at every step
SAVED = {"MAP": pb.MAP(num_steps=40, compile=False), "SGHMC": METHODS["SGHMC"]}


class EndOnce:
    """A callback that asks the process to end, once."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, step, metrics):
        if not self.mark.exists() and step > 10:
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)


def resumed(ranks: int, rank: int) -> dict:
    """Fits with a checkpoint, of which rank 0 is asked to end in the midst of one; then rank 1 waits for its end."""
    folder = Path(os.environ["LAW_FOLDER"])
    name = os.environ["LAW_METHOD"]
    options = {"checkpoint": folder / "run", "callbacks": [EndOnce(folder / "mark")]}
    found = fitted(SAVED[name], model(0.2, torch.nn.Dropout(0.2)), loader(ranks, rank), **options)
    return {"resumed": found[0]}


def undisturbed(ranks: int, rank: int) -> dict:
    name = os.environ["LAW_METHOD"]
    return {
        "undisturbed": fitted(SAVED[name], model(0.2, torch.nn.Dropout(0.2)), loader(ranks, rank))[
            0
        ]
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_ranks_that_were_asked_to_end_go_on_to_the_same_draws(name, tmp_path):
    environment = {"LAW_FOLDER": str(tmp_path), "LAW_METHOD": name}
    ended = on_two_ranks("resumed", tmp_path, **environment)
    assert ended.returncode != 0 and (tmp_path / "run").exists()
    assert not list(tmp_path.glob("rank*.pt"))
    again = on_two_ranks("resumed", tmp_path, **environment)
    assert again.returncode == 0, again.stderr[-3000:]
    found = [torch.load(tmp_path / f"rank{rank}.pt")["resumed"] for rank in (0, 1)]
    whole = on_two_ranks("undisturbed", tmp_path, **environment)
    assert whole.returncode == 0, whole.stderr[-3000:]
    expected = torch.load(tmp_path / "rank0.pt")["undisturbed"]
    for site, value in expected.items():
        assert torch.equal(found[0][site], value) and torch.equal(found[1][site], value)
