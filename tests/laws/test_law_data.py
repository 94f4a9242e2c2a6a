"""The law of the data source: tensors, loaders, samplers and mini-batches of the same data give the same posterior.

The model is linear, so the answer is known; the last two points differ from the rest, so that a batch of another size
whose points weigh more than the others', or an N that is not that of the points seen, moves the answer by several
posterior standard deviations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, seeded
from test_contract import METHODS, ONE_DRAW
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import pyrobnn as pb
from pyrobnn.inference.fitting.loaders import survey
from pyrobnn.inference.fitting.problem import prepare

# runs this short are told to be too short, as they should
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode"
)

NUM_DATA = 34
BATCH = 8
X = torch.stack([torch.ones(NUM_DATA), (-1.0) ** torch.arange(NUM_DATA)], 1).double()
Y = torch.tensor([0.0] * 32 + [10.0, 4.0], dtype=torch.float64)[:, None]
PRECISION = X.T @ X + torch.eye(2, dtype=torch.float64)
MEAN = torch.linalg.solve(PRECISION, X.T @ Y)[:, 0]
#: rows that no source may show to a method
FOREIGN = (
    torch.full((300, 2), 5.0, dtype=torch.float64),
    torch.full((300, 1), -9.0, dtype=torch.float64),
)
DROPPED = 0.1

# long enough to be judged; eager, as there are hundreds
LONG = {
    "MLE": {"num_steps": 250, "lr": 0.1},
    "MAP": {"num_steps": 250, "lr": 0.1},
    "DeepEnsemble": {"num_steps": 250, "lr": 0.1},
    "SVI": {"num_steps": 500, "lr": 0.05},
    "SVI-low-rank": {"num_steps": 1000, "lr": 0.02, "guide": pb.Guide("low_rank", rank=1)},
    "NUTS": {"num_warmup": 200, "max_tree_depth": 5},
    "SGLD": {"num_chains": 16, "num_warmup": 100, "thinning": 4, "step_size": 0.1},
    "SGHMC": {
        "num_chains": 16,
        "num_warmup": 100,
        "thinning": 4,
        "step_size": 0.1,
        "friction": 0.3,
    },
    "SWA": {"num_steps": 500, "lr": None},
    "SWAG": {"num_steps": 500},
    "SMC": {"num_particles": 800, "max_leapfrogs": 4, "max_moves": 6, "ess": 0.7},
    "MCDropout": {"p": DROPPED, "num_steps": 800, "lr": 0.1},
}
WITH_BATCH_SIZE = {name for name, method in METHODS.items() if hasattr(method, "batch_size")}
SOURCES = ("tensors", "shuffled", "short", "sampler", "batch_sampler", "mini", "one")
CHAINS = {"NUTS", "SGLD", "SGHMC", "SMC"}


def linear(noise=1.0) -> pb.BNN:
    with seeded(0):
        net = torch.nn.Linear(2, 1, bias=False).double()
    return pb.BNN(
        net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(noise)
    )


def loader(source: str) -> DataLoader:
    data = TensorDataset(X, Y)
    more = TensorDataset(torch.cat([X, FOREIGN[0]]), torch.cat([Y, FOREIGN[1]]))
    subset = SubsetRandomSampler(range(NUM_DATA))
    return {
        "shuffled": lambda: DataLoader(data, BATCH, shuffle=True),
        "short": lambda: DataLoader(data, BATCH),
        "sampler": lambda: DataLoader(more, BATCH, sampler=subset),
        "batch_sampler": lambda: DataLoader(more, batch_sampler=BatchSampler(subset, BATCH, False)),
        "one": lambda: DataLoader(data, NUM_DATA),
    }[source]()


def fit(name: str, source: str) -> pb.Posterior:
    options = dict(LONG.get(name, {}))
    if source == "mini":
        options["batch_size"] = BATCH
    method = dataclasses.replace(METHODS[name], **options)
    arguments = (X, Y) if source in ("tensors", "mini") else (loader(source),)
    draws = {} if name in ONE_DRAW or name == "DeepEnsemble" else {"num_draws": 200}
    with seeded(1):
        return method.fit(linear(), *arguments, seed=2, **draws)


@functools.cache
def exact_mode(name: str) -> torch.Tensor:
    prior = 0.0 if name == "MLE" else 1.0
    # dropping an input with probability p adds its square, times p / (1 - p), to the precision
    dropout = X.square().sum(0) * DROPPED / (1 - DROPPED) if name == "MCDropout" else torch.zeros(2)
    return torch.linalg.solve(X.T @ X + torch.diag(prior + dropout), X.T @ Y)[:, 0]


def check(name: str, posterior: pb.Posterior) -> None:
    """The answer is the exact one: chains within Monte Carlo error, optimised ones within a fifth of a sd."""
    draws = posterior.draws["net.weight"].flatten(2)
    sd = torch.linalg.inv(PRECISION).diagonal().sqrt()
    assert posterior.meta["num_data"] == NUM_DATA
    if name in CHAINS:
        assert_mean_within(draws, MEAN, min_ess=100)
        ratio = draws.flatten(0, 1).std(0) / sd
        assert bool(((ratio > 0.7) & (ratio < 1.4)).all()), ratio
        return
    if name == "NUTS-pyro":  # a chain too short to be judged: the same data, or not
        return
    if name == "MCDropout":
        # a weight's draws are zero, or the trained weight over 1 - p
        draws = draws.sum(1, keepdim=True) / (draws != 0).sum(1, keepdim=True) * (1 - DROPPED)
    # means of 200 independent draws are off by sd / 14
    limit = 0.2 if draws.shape[1] == 1 else 0.2 + 5 / 200**0.5
    off = (draws.mean((0, 1)) - exact_mode(name)).abs() / sd
    assert float(off.max()) < limit, off


def cases():
    for name, source in itertools.product(METHODS, SOURCES):
        if source == "mini" and name not in WITH_BATCH_SIZE:
            continue
        marks = (
            [] if (name, source) in {("MAP", "short"), ("MAP", "sampler")} else [pytest.mark.slow]
        )
        yield pytest.param(name, source, marks=marks)


@pytest.mark.covering(3)
@pytest.mark.parametrize(("name", "source"), list(cases()))
def test_the_source_does_not_matter(name, source):
    check(name, fit(name, source))


@pytest.mark.parametrize("source", SOURCES)
def test_the_batches_of_an_epoch_average_to_the_whole(source):
    arguments = (X, Y) if source in ("tensors", "mini") else (loader(source),)
    problem = prepare(linear(dist.HalfNormal(1.0)), *arguments, points="free", stream=True)
    z = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64)
    with seeded(0):
        # an epoch in memory shows no more than whole batches of a permutation: in the mean over many
        many, size = (
            (1000, BATCH)
            if source == "mini"
            else (1 if problem.epoch is None else problem.epoch.num_batches, None)
        )
        batches = list(itertools.islice(problem.batches(size), many))
    values = torch.stack([problem.density.log_joint(z, *batch) for batch in batches])
    whole = prepare(linear(dist.HalfNormal(1.0)), X, Y, points="free").density.log_joint(z)
    error = 5 * float(values.std()) / many**0.5 if source == "mini" else 1e-9 * abs(float(whole))
    assert abs(float(values.mean() - whole)) < error


@pytest.mark.parametrize("name", ["NUTS", "NUTS-pyro"])
def test_gathered_batches_are_the_data_to_the_last_bit(name):
    whole = METHODS[name].fit(linear(), X, Y, num_draws=6, seed=3)
    parts = METHODS[name].fit(linear(), loader("short"), num_draws=6, seed=3)
    torch.testing.assert_close(parts.draws, whole.draws, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "num_data", "num_batches", "note"),
    [
        ({"batch_size": 8}, 34, 5, None),
        ({"batch_size": 8, "shuffle": True, "drop_last": True}, 34, 4, None),
        (
            {"batch_size": 8, "drop_last": True},
            32,
            4,
            "draws 34 times from 34 points and contains 32",
        ),
        ({"batch_size": 8, "sampler": SubsetRandomSampler(range(20))}, 20, 3, None),
        ({"batch_size": 8, "sampler": [3, 4, 5]}, 3, 1, None),
        (
            {"batch_size": 8, "sampler": RandomSampler(Y, num_samples=10)},
            10,
            2,
            "draws 10 times from 34 points",
        ),
        (
            {"batch_size": 8, "sampler": RandomSampler(Y, replacement=True, num_samples=100)},
            34,
            13,
            "draws 100 times from 34 points and contains 100",
        ),
        (
            {"batch_size": 8, "sampler": WeightedRandomSampler(torch.rand(34) + 0.1, 34)},
            34,
            5,
            "each counts as often as it is drawn",
        ),
        ({"batch_sampler": [[0, 1, 2], [3], [4, 5]]}, 6, 3, None),
        ({"batch_size": None, "sampler": [[0, 1, 2], [3, 4]]}, 5, 2, None),
    ],
)
def test_an_epoch_says_what_it_shows(options, num_data, num_batches, note):
    with seeded(0):
        epoch = survey(DataLoader(TensorDataset(X, Y), **options))
    assert (epoch.num_data, epoch.num_batches) == (num_data, num_batches)
    assert [note in str(found) for found in epoch.notes] == ([] if note is None else [True])


def test_a_note_on_the_data_is_warned_of_and_kept():
    fixed = DataLoader(TensorDataset(X, Y), BATCH, drop_last=True)
    with pytest.warns(UserWarning, match="from 34 points and contains 32"):
        posterior = METHODS["MAP"].fit(linear(), fixed)
    assert "drop_last=False" in posterior.meta["warnings"][0] and posterior.meta["num_data"] == 32
    with pytest.warns(UserWarning, match="from 34 points and contains 32"), seeded(0):
        METHODS["NUTS"].fit(
            linear(), DataLoader(TensorDataset(X, Y), BATCH, True, drop_last=True), num_draws=2
        )


class Once:
    """A sampler that has nothing more to give after its first epoch."""

    def __init__(self):
        self.rows = list(range(NUM_DATA))

    def __len__(self):
        return NUM_DATA

    def __iter__(self):
        while self.rows:
            yield self.rows.pop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 50, "drop_last": True},
            "holds 34 points and its sampler draws 34, fewer than a batch",
        ),
        ({"batch_size": 8, "sampler": []}, "gives no batch: .* draws 0"),
        ({"batch_sampler": iter([[0], [1]])}, "can be walked only once"),
        ({"batch_sampler": BatchSampler(iter(range(3)), 2, False)}, "can be walked only once"),
        ({"batch_size": 2, "sampler": Once()}, "gave its batches once and then none|no batch"),
        ({"batch_sampler": ([row] for row in range(3))}, "can be walked only once"),
    ],
)
@pytest.mark.parametrize("name", ["MAP", "SGHMC", "SWAG"])
def test_a_loader_that_cannot_be_walked_again_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        METHODS[name].fit(linear(), DataLoader(TensorDataset(X, Y), **options))


@pytest.mark.parametrize("name", sorted(WITH_BATCH_SIZE))
def test_a_batch_size_that_is_not_the_methods_to_choose_is_refused(name):
    method = dataclasses.replace(METHODS[name], batch_size=BATCH)
    with pytest.raises(ValueError, match="the DataLoader sets the size of batches"):
        method.fit(linear(), loader("short"))

    def program(x, y):
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(weight, 1.0), obs=y)

    if method.local_rows:  # takes rows of a program's plates
        return
    with pytest.raises(
        (pb.Refused, TypeError), match="'batch_size' needs a BNN|must be a pyrobnn.BNN"
    ):
        method.fit(program, X[:, 0], Y[:, 0])
