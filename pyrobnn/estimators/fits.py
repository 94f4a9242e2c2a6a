"""What an estimator asks of the fits that it tries, on which rows and from which weights, and what it ends with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor, nn

from pyrobnn.core.positions import evenly_spaced
from pyrobnn.inference.method import Method
from pyrobnn.model import BNN, NET
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.posterior import Posterior

#: rows that noise and widths are found of, evenly spaced: several fits of so many take minutes
MAX_TRIED_ROWS = 20_000


class RunOptions(TypedDict, total=False):
    """Options of :meth:`pyrobnn.inference.method.Method.fit`, under the names that it gives them."""

    seed: int
    device: str | torch.device | None
    progress: bool
    num_draws: int | None


@dataclass(frozen=True, eq=False)
class Fit:
    """What a search ends with: a posterior, the method it is of, why that one, and the rows it has not seen."""

    posterior: Posterior
    method: Method
    reason: str
    held_out: Tensor | tuple[()] = ()

    def because(self, words: str) -> Fit:
        """The same fit with one more reason."""
        return replace(self, reason=f"{self.reason}; {words}")

    def instead_of_a_net(self, words: str = "") -> Fit:
        """The fit of a linear model, whose reason says that no net gains on it."""
        start = f"a linear model predicts these rows as well: {words}"
        return replace(self, reason=start + self.reason)


def subset(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """At most MAX_TRIED_ROWS of them, evenly spaced."""
    count = min(len(x), MAX_TRIED_ROWS)
    keep = evenly_spaced(len(x), count, torch.float64)
    return x[keep], y[keep]


def with_net(model: BNN, net: nn.Module, likelihood: Likelihood | None = None) -> BNN:
    """A model with this net, the prior and the units of another, and its likelihood unless one is given."""
    return BNN(
        net,
        model.prior,
        likelihood or model.likelihood,
        standardizer=model.standardizer,
    )


def at_weights(model: BNN, values: Mapping[str, Tensor]) -> BNN:
    """The model with its net at these weights, by site, so that a search starts there."""
    moved = copy.copy(model)
    moved.net = copy.deepcopy(model.net)
    weights = {
        name.removeprefix(NET): value for name, value in values.items() if name.startswith(NET)
    }
    moved.net.load_state_dict(weights, strict=False)  # which has buffers too
    return moved
