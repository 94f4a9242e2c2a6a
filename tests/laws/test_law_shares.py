"""The law of shares: whoever takes a DataLoader refuses one that gives every process a share of the rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import normal_prior
from test_contract import METHODS, X, Y, num_draws, one_of_each_kind
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
)

import pyrobnn as pb

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode"
)
ROWS = TensorDataset(X, Y)


class Resumable(DistributedSampler):
    """A sampler of another library, derived from torch's."""


class Wrapped(Sampler):
    """A sampler that hands on the order of another one."""

    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


class Shard(BatchSampler):
    """Every second batch of another sampler's, as Accelerate has it."""

    def __init__(self, batch_sampler, num_processes):
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes

    def __iter__(self):
        return (
            batch
            for index, batch in enumerate(self.batch_sampler)
            if index % self.num_processes == 0
        )

    def __len__(self):
        return -(-len(self.batch_sampler) // self.num_processes)


class Stream(IterableDataset):
    """Every second row of a data set that is read in order."""

    def __init__(self, world_size):
        self.world_size = world_size

    def __iter__(self):
        return (ROWS[index] for index in range(0, len(ROWS), self.world_size))

    def __len__(self):
        return -(-len(ROWS) // self.world_size)


class Dispatched(DataLoader):
    """A loader that reads on one process and hands parts of every batch to the others."""

    def __init__(self, *args, num_processes, **options):
        super().__init__(*args, **options)
        self.state = type("State", (), {"num_processes": num_processes})()


def shares(num: int, kind=DistributedSampler) -> Sampler:
    return kind(ROWS, num_replicas=num, rank=0, shuffle=True)


#: the number of processes ↦ a loader of one process's rows
LOADERS = {
    "sampler": lambda num: DataLoader(ROWS, 10, sampler=shares(num)),
    "subclass": lambda num: DataLoader(ROWS, 10, sampler=shares(num, Resumable)),
    "in a sampler": lambda num: DataLoader(ROWS, 10, sampler=Wrapped(shares(num))),
    "batch sampler": lambda num: DataLoader(
        ROWS, batch_sampler=BatchSampler(shares(num), 10, False)
    ),
    "shard of batches": lambda num: DataLoader(
        ROWS, batch_sampler=Shard(BatchSampler(range(len(X)), 10, False), num)
    ),
    "stream": lambda num: DataLoader(Stream(num), 10),
    "dispatched": lambda num: Dispatched(ROWS, 10, num_processes=num),
}


class Silent(torch.nn.Linear):
    """A net that must not be run."""

    def forward(self, x):
        raise AssertionError("the net was run before the data were refused")


def model(net=torch.nn.Linear) -> pb.BNN:
    with torch.random.fork_rng(devices=[]):
        return pb.BNN(net(1, 1), normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.2))


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("name", METHODS)
def test_a_share_of_the_rows_is_refused(name, kind):
    with pytest.raises(pb.Refused, match="one of 2 shares of the rows .*fit_on_ranks"):
        METHODS[name].fit(model(Silent), LOADERS[kind](2), **num_draws(name))


@pytest.mark.parametrize("kind", LOADERS)
def test_who_hands_a_loader_on_refuses_a_share_too(kind):
    loader = LOADERS[kind](2)
    members = METHODS["DeepEnsemble"]
    fits = [
        lambda: pb.posthoc(model(Silent).net, loader),
        lambda: pb.distributed.fit_on_ranks(members, model(Silent), loader),
    ]
    for fit in fits:
        with pytest.raises(pb.Refused, match="one of 2 shares of the rows"):
            fit()
    with (
        ThreadPoolExecutor(1) as workers,
        pytest.raises(pb.Refused, match="one of 2 shares of the rows"),
    ):
        pb.distributed.fit_on_workers(members, model(Silent), loader, workers=workers, num_jobs=2)


@pytest.mark.parametrize("kind", LOADERS)
def test_one_process_has_all_rows(kind):
    posterior = METHODS["MAP"].fit(model(), LOADERS[kind](1))
    assert posterior.meta["num_data"] == len(X) and posterior.meta["warnings"] == []


@pytest.mark.parametrize("name", one_of_each_kind(fast={"MAP"}))
def test_a_sampler_of_one_process_changes_nothing(name):
    whole = DataLoader(ROWS, len(X))
    alone = DataLoader(ROWS, len(X), sampler=DistributedSampler(ROWS, 1, 0, False))
    one, two = (
        METHODS[name].fit(model(), loader, seed=3, **num_draws(name)) for loader in (whole, alone)
    )
    for site, value in one.draws.items():
        torch.testing.assert_close(value, two.draws[site])
