"""The missing values that ``pyro.sample(…, obs_mask=…)`` samples beside those that are observed."""

from __future__ import annotations

from collections.abc import Sequence

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import biject_to, constraints


class Filled(TorchDistribution):
    """The law of the missing values, and beside it one for the values of observed rows, on which nothing depends.

    Pyro masks the prior of the latter, so that they have no density. Here they are standard normal in unconstrained
    space whatever the other sites are: all else has the posterior, and the mode, that it has without them.

    Args:
        law: of the values, as the program has it.
        missing: truth values in the law's batch shape.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    has_rsample = False

    def __init__(self, law: TorchDistribution, missing: Tensor):
        self.law = law
        self.missing = missing
        super().__init__(
            law.batch_shape,
            law.event_shape,
            validate_args=False,
        )

    @property
    def support(self) -> constraints.Constraint | None:
        return self.law.support

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.law.sample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        events = len(self.event_shape)
        missing = self.missing.reshape(self.missing.shape + (1,) * events)
        transform = biject_to(self.support)
        zero = transform(torch.zeros_like(transform.inv(value)))
        log_prob = self.law.log_prob(torch.where(missing, value, zero))
        # what is not observed may be on the border of the support, where its inverse is infinite
        free = transform.inv(torch.where(missing, zero, value))
        jacobian = transform.log_abs_det_jacobian(free, transform(free))
        filler = _by_batch(dist.Normal(0.0, 1.0).log_prob(free), log_prob.dim())
        filler = filler - _by_batch(jacobian, log_prob.dim())
        return torch.where(self.missing, log_prob, filler)


def _by_batch(terms: Tensor, dims: int) -> Tensor:
    """Summed over all axes after so many."""
    return terms.flatten(dims).sum(-1) if terms.dim() > dims else terms
