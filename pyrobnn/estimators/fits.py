"""What an estimator asks of the fits that it tries, and what its search ends with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pyrobnn.inference.method import Method
    from pyrobnn.posterior import Posterior


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
