"""Rows that count for nothing, so that a data set with one row more has the compiled graph of the one before."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyrobnn.density.density import Density
from pyrobnn.inference.fitting.batches import scaled_program
from pyrobnn.inference.fitting.floats import log_joint_float64
from pyrobnn.inference.fitting.problem import Problem

_MOST = 2**20  # values of x: beyond, the copy and the work on it cost more than a compile now and then


def bucket(num: int) -> int:
    """Rows that ``num`` are filled up to: the next multiple, beyond it, of 8 or of a sixteenth to a thirty-second."""
    step = max(8, 2 ** (num.bit_length() - 5))
    return num - num % step + step


class _Counted(Messenger):
    """Multiplies the log likelihood of every row by its weight (row,)."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = weights

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        if msg["is_observed"] and msg["cond_indep_stack"]:
            msg["scale"] = msg["scale"] * self.weights


def padded_density(problem: Problem, z: Tensor) -> Density:
    """The density of a net over more rows than there are, copies of the last one with weight zero.

    Its graph is that of every number of rows with the same :func:`bucket`. It is the density itself where the data are
    large or come from a loader, of a program, whose rows are not ours to add to, and where the log joints of the two
    differ at the first points of ``z`` (chain, dim) by more than rounding in float64, as for a net that looks at all
    rows at once.
    """
    density = problem.density
    if not problem.is_bnn or problem.loader is not None or problem.x.numel() > _MOST:
        return density
    num, rows = problem.num_rows, bucket(problem.num_rows)
    weights = (torch.arange(rows, device=problem.device) < num).to(density.dtype)
    whole = scaled_program(problem.bnn, rows, None)

    def program(*args: Any) -> Any:
        with _Counted(weights):
            return whole(*args)

    padded = copy.copy(density)
    padded.program, padded.owner = program, density.owner
    padded.args = tuple(
        torch.cat([part, part[-1:].expand(rows - num, *part.shape[1:])]) for part in density.args
    )
    more, exact = log_joint_float64(padded), log_joint_float64(density)
    try:
        same = all(torch.allclose(more(point), exact(point), rtol=1e-10) for point in z[:2].double())
    except (RuntimeError, ValueError, IndexError):  # of layers and plates that know the number of rows
        same = False
    return padded if same else density
