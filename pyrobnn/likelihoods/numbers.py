"""What the likelihoods of numbers share: the checks of their targets, and their law as Pyro takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributions.constraints as constraints
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from pyrobnn.core.checks import check_finite
from pyrobnn.likelihoods.base import Likelihood


class Response(TorchDistribution):
    """The law of a datum as Pyro takes it, of a likelihood that defines ``log_prob`` and ``draw`` itself.

    Args:
        likelihood, f, params: as of :meth:`Likelihood.distribution`.
        columns: of y.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.independent(constraints.real, 1)

    def __init__(self, likelihood: Likelihood, f: Tensor, params: Mapping[str, Tensor], columns: int):
        self.likelihood, self.f, self.params, self.columns = likelihood, f, params, columns
        super().__init__(f.shape[:-1], torch.Size([columns]), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Response:
        f = self.f.expand(*batch_shape, self.f.shape[-1])
        return Response(self.likelihood, f, self.params, self.columns)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.likelihood.log_prob(self.f, value, self.params)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.likelihood.draw(self.f.expand(*sample_shape, *self.f.shape), self.params)


class Numbers(Likelihood):
    """Likelihoods of numbers: y is (N, out), or (N,) for one output, and the network returns ``heads`` values for each.

    Attributes: ``kind``, what an error calls them; ``head_names``, of the heads where there are several.
    """

    kind: ClassVar[str] = ""
    head_names: ClassVar[str] = ""

    def width_error(self, width: int, y: Tensor) -> str | None:
        out = 1 if y.dim() == 1 else y.shape[-1]
        kind = self.kind or type(self).__name__
        if y.dim() > 2:
            return f"'y' has shape {tuple(y.shape)} but {kind} expects (N, outputs): flatten the outputs"
        if width == self.heads * out:
            return None
        heads = f"{self.head_names} for each output, " if self.heads > 1 else ""
        return (
            f"the net returns {width} values per point but {type(self).__name__} expects {self.heads * out} "
            f"({heads}'y' has shape {tuple(y.shape)}): give the net {self.heads * out} outputs "
            f"or y {width // self.heads} columns"
        )

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if error := self.width_error(width, y):
            raise ValueError(error)
        if y.is_complex() or y.dtype == torch.bool:
            raise TypeError(
                f"'y' has dtype {y.dtype} but {self.kind or type(self).__name__} expects real numbers"
            )
        check_finite("y", y)
        if error := self.value_error(y):
            raise ValueError(error)
        return y.reshape(len(y), -1).to(dtype)

    def value_error(self, y: Tensor) -> str | None:
        """What is wrong with finite values; None if nothing is."""
        return None


class Real(Numbers):
    """Numbers on the whole line, which the program may measure in any units."""

    linear_mean = True

    def units(self, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
        return mean, scale


def by_scipy(function: str, *values: Tensor) -> Tensor:
    """An elementwise function of ``scipy.special`` that torch does not have, in float64 and without gradient."""
    from scipy import special  # imported late: a fit needs none of it

    with np.errstate(all="ignore"):
        found = getattr(special, function)(*(value.detach().double().cpu().numpy() for value in values))
    return torch.from_numpy(np.asarray(found)).to(values[0].device)
