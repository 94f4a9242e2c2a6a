"""The mini-batches of SWA and SWAG."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyrobnn.inference.base import Problem, check_data

#: data per pass when batch-norm statistics are refreshed
REFRESH_BATCH = 512


class Inputs:
    """One pass through the inputs, as often as wanted."""

    def __init__(self, problem: Problem):
        self.problem = problem

    def __iter__(self) -> Iterator[Tensor]:
        problem = self.problem
        if problem.loader is None:
            return iter(problem.x.split(REFRESH_BATCH))
        return (check_data(problem.model, x, y, problem.device)[0] for x, y in problem.loader)


def independent_batches(problem: Problem, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless mini-batches drawn independently; a loader's as they come.

    Within a reshuffled epoch the noise of the gradients cancels, and the iterates hardly move.
    """
    if batch_size is None or batch_size >= problem.num_data:
        yield from problem.batches(batch_size)
    while True:
        rows = torch.randint(problem.num_data, (batch_size,), device=problem.device)
        yield problem.x[rows], problem.y[rows]


def batching(batch_size: int | None, problem: Problem) -> tuple[int | None, int]:
    """Batch size and steps per epoch.

    Raises:
        ValueError: a batch size beside a DataLoader, which has its own.
    """
    if isinstance(problem.loader, DataLoader):
        if batch_size is not None:
            raise ValueError("'batch_size' is that of the DataLoader here: leave it out")
        return None, len(problem.loader)
    size = batch_size or max(1, min(32, problem.num_data // 4))
    return size, max(1, problem.num_data // size)
