"""The kinds of distributions that the rest of a program's reading asks for."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from torch.distributions import Distribution

from pyrobnn.model.guards import kind_of


def elementwise(fn: Distribution) -> Any:
    """The distribution of one element, of a distribution of independent ones."""
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    return fn


def is_improper(fn: Distribution) -> bool:
    """Whether the distribution is a constant density, which has no draws."""
    while isinstance(fn, (torch.distributions.Independent, dist.MaskedDistribution)):
        fn = fn.base_dist
    return isinstance(fn, dist.ImproperUniform)


def is_normal(fn: Distribution) -> bool:
    """Whether it is ``dist.Normal``, and no distribution derived from it."""
    return kind_of(fn) is dist.Normal
