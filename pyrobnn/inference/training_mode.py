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
from pyrobnn.inference.fitting.problem import Callback, Problem
from pyrobnn.inference.fitting.watch import MappedCallback
from pyrobnn.model import BNN
from pyrobnn.model.density import Program
from pyrobnn.posterior import Posterior

#: rows that a draw's statistics are taken from in any case, and of all draws together
_ENOUGH_ROWS = 2000
_MANY_ROWS = 5_000_000


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


def with_statistics(problem: Problem, posterior: Posterior) -> Posterior:
    """The posterior with running statistics for each of its draws, by a pass over the inputs for each.

    Of many draws and rows in memory a pass sees an even selection of the rows: 5,000 for a thousand draws, from which
    a mean has an error of .014 sd.
    """
    num_draws = posterior.num_chains * posterior.num_draws
    inputs = batches.Inputs(problem, max(_ENOUGH_ROWS, _MANY_ROWS // num_draws))
    statistics = refreshed_statistics(problem.bnn, posterior.draws, inputs)
    return dataclasses.replace(posterior, draws=posterior.draws | statistics)


def callback_with_statistics(problem: Problem, callback: Callback) -> Callback:
    """A callback whose snapshots have running statistics."""

    def mapped(metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {**metrics, "snapshot": lambda: with_statistics(problem, metrics["snapshot"]())}

    return MappedCallback(callback, mapped)
