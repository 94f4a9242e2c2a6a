"""Nets in training mode: batch statistics and dropout while a net is trained, and what is evaluated afterwards."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyrobnn.core.findings import Finding
from pyrobnn.inference.batch_norm import (
    refreshed_statistics,
    training_norms,
    with_batch_statistics,
)
from pyrobnn.inference.fitting import batches
from pyrobnn.inference.fitting.problem import SHARE_OF_PASSES, Callback, Problem
from pyrobnn.inference.fitting.watch import MappedCallback
from pyrobnn.model import BNN
from pyrobnn.model.density import Program
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.prediction import widest_layer

#: rows that the statistics of all draws together are taken from at the most
_MANY_ROWS = 5_000_000
#: the fewest rows that a draw's statistics are taken from, as many as a usual batch has; and the numbers, in the widest
#: layer, of as many rows as are taken in any case
_FEWEST_ROWS = 32
_FEW_NUMBERS = 2**18
#: numbers in the widest layer of rows that go through the net together, beyond the CPU's cache, and the most rows
_NUMBERS_AT_ONCE = 2**21
_MOST_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class TrainingMode:
    """A net whose batch-norm layers use the statistics of a batch, or some of whose units are dropped at random.

    Attributes: ``model`` as the user made it; ``norms``, the batch-norm layers in training mode; ``dropouts``, the
        random layers in training mode.
    """

    model: BNN
    norms: Sequence[str]
    dropouts: Sequence[str]

    @classmethod
    def of(cls, model: BNN | Program) -> TrainingMode | None:
        """That of a model; None of a program, and of a net that is one function."""
        layers = model.stochastic_layers() if isinstance(model, BNN) else []
        if not isinstance(model, BNN) or not layers:
            return None
        norms = training_norms(model)
        return cls(model, norms, [layer for layer in layers if layer not in norms])

    @property
    def evaluated(self) -> BNN:
        """The model that is one function of a batch: with the batch's statistics, and nothing dropped."""
        quiet = copy.copy(self.model)
        quiet.net = copy.deepcopy(self.model.net).eval()
        for name in self.norms:
            quiet.net.get_submodule(name).train()
        return with_batch_statistics(quiet)

    @property
    def noisy(self) -> BNN | None:
        """The model whose units are dropped at random; None without dropout."""
        return with_batch_statistics(self.model) if self.dropouts else None

    def of_problem(self, problem: Problem) -> Problem:
        """The problem of :attr:`evaluated` as that of the model, and what that means noted."""
        trained = dataclasses.replace(problem, model=self.model.to(problem.device))
        if self.norms:
            trained.note(Finding("batch_statistics", {"layers": list(self.norms)}))
        if self.dropouts:
            trained.note(Finding("dropout_noise", {"layers": list(self.dropouts)}))
        return trained


def with_statistics(problem: Problem, posterior: Posterior, rows_seen: int) -> Posterior:
    """The posterior with running statistics for each of its draws, by passes over the inputs.

    They take about a tenth of the time of the training, but see what costs little in any case: where there are too many
    draws and rows for that, the mean of the draws sees the rows and each draw an even selection of them, see
    :func:`pyrobnn.inference.batch_norm.refreshed_statistics`; a single draw sees the selection alone.

    Args:
        problem: of the training.
        posterior: its draws.
        rows_seen: those of all the batches that the training has sent through the net.
    """
    model = problem.bnn
    if not training_norms(model):
        return posterior
    num_draws = posterior.num_chains * posterior.num_draws
    width = widest_layer(model, problem.x)
    allowed = min(round(SHARE_OF_PASSES * rows_seen), _MANY_ROWS)
    enough = max(_FEWEST_ROWS, _FEW_NUMBERS // width)
    of_draw = max(enough, allowed // num_draws)
    of_mean = max(enough, allowed // (2 * posterior.num_chains))
    num_few = max(enough, allowed // (2 * num_draws))
    # the mean of the draws takes nothing off where it sees no more rows than they do
    is_plain = of_draw >= problem.num_rows or (problem.stream is None and num_few >= of_mean)
    at_once = max(_FEWEST_ROWS, min(_MOST_AT_ONCE, _NUMBERS_AT_ONCE // width))
    inputs = batches.Inputs(problem, of_draw if is_plain else of_mean, at_once)
    few = None if is_plain else inputs.few(num_few)
    statistics = refreshed_statistics(model, posterior.draws, inputs, few)
    return dataclasses.replace(posterior, draws=posterior.draws | statistics)


def rows_of_training(problem: Problem, num_gradients: int, batch_size: int | None) -> int:
    """The rows of all the batches of a training."""
    stream = problem.stream
    if stream is not None:
        return num_gradients * stream.num_points // stream.num_batches
    return num_gradients * min(batch_size or problem.num_rows, problem.num_rows)


def callback_with_statistics(problem: Problem, callback: Callback, rows_seen: int) -> Callback:
    """A callback whose snapshots have running statistics."""

    def mapped(metrics: Mapping[str, Any]) -> dict[str, Any]:
        def snapshot() -> Posterior:
            return with_statistics(problem, metrics["snapshot"](), rows_seen)

        return {**metrics, "snapshot": snapshot}

    return MappedCallback(callback, mapped)
