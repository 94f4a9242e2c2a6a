r"""How much the Kullback-Leibler term counts: :math:`-\frac{N}{B} \log p(b \mid \theta) + w_t \, KL(q \| p)`.

The weight scales the KL alone; the likelihood of a mini-batch is always scaled to the whole data set. A final weight
other than one therefore means a tempered posterior, :math:`p(\theta) \, p(y \mid \theta)^{1/w}`, and the fit says so.

Example:
    >>> Constant(0.5).factors(3, num_batches=1, num_weights=10).tolist()
    [0.5, 0.5, 0.5]
    >>> Linear(warmup=0.2, full=0.4).factors(10, num_batches=1, num_weights=10)[[1, 2, 4, 6]].tolist()
    [0.0, 0.0, 0.5, 1.0]
    >>> (7 / 3 * Blundell().factors(3, num_batches=3, num_weights=10)).tolist()
    [4.0, 2.0, 1.0]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrobnn.core.checks import check_number


@dataclass(frozen=True)
class KLSchedule:
    """Base of the schedules; the constant weight one."""

    def factors(
        self,
        num_steps: int,
        num_batches: int,
        num_weights: int,
    ) -> Tensor:
        """The weight of the KL at each step next to the likelihood of the whole data set, float64 (num_steps,)."""
        return torch.ones(num_steps, dtype=torch.float64)


@dataclass(frozen=True)
class Constant(KLSchedule):
    """The same weight ``beta`` throughout; 0 fits the data alone."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        check_number("beta", self.beta, minimum=0)

    def factors(
        self,
        num_steps: int,
        num_batches: int,
        num_weights: int,
    ) -> Tensor:
        return torch.full(
            (num_steps,),
            float(self.beta),
            dtype=torch.float64,
        )


@dataclass(frozen=True)
class Linear(KLSchedule):
    """Zero for the first ``warmup`` of all steps, then rising linearly to one, one for the last ``full`` of them.

    Reference: `Ladder variational autoencoders (Sønderby et al., 2016) <https://arxiv.org/abs/1602.02282>`_.
    """

    warmup: float = 0.1
    full: float = 0.5

    def __post_init__(self) -> None:
        check_number(
            "warmup",
            self.warmup,
            minimum=0,
            maximum=1,
        )
        check_number(
            "full",
            self.full,
            minimum=0,
            maximum=1,
        )
        if self.warmup + self.full > 1:
            raise ValueError(
                f"'warmup' and 'full' are fractions of the steps and add up to {self.warmup + self.full:g}: at most 1"
            )

    def factors(
        self,
        num_steps: int,
        num_batches: int,
        num_weights: int,
    ) -> Tensor:
        done = torch.arange(num_steps, dtype=torch.float64) / num_steps
        rise = max(1 - self.warmup - self.full, 1e-12)
        # rounded: the ramp ends at one exactly
        return ((done - self.warmup) / rise).clamp(0, 1).round(decimals=12)


@dataclass(frozen=True)
class Graves(KLSchedule):
    """1/M of the KL with each of the M mini-batches: next to the scaled likelihood, one.

    Reference: Practical variational inference for neural networks (Graves, 2011).
    """


@dataclass(frozen=True)
class Blundell(KLSchedule):
    r"""The first batches of an epoch carry most: :math:`\pi_i = 2^{M-i} / (2^M - 1)`, i = 1 … M; one KL an epoch.

    Caveat: the first step of an epoch pulls hard to the prior when M is large; lower ``lr`` or use 1.

    Reference: `Weight Uncertainty in Neural Networks (Blundell et al., 2015) <https://arxiv.org/abs/1505.05424>`_.
    """

    def factors(
        self,
        num_steps: int,
        num_batches: int,
        num_weights: int,
    ) -> Tensor:
        i = torch.arange(
            1,
            num_batches + 1,
            dtype=torch.float64,
        )
        # divided through by 2^M: no overflow for thousands of batches
        epoch = num_batches * (2.0**-i / -math.expm1(-num_batches * math.log(2)))
        return epoch.repeat(-(-num_steps // num_batches))[:num_steps]


@dataclass(frozen=True)
class PerWeight(KLSchedule):
    """One over the number of weights, as some tutorials have it: a strongly tempered ("cold") posterior."""

    def factors(
        self,
        num_steps: int,
        num_batches: int,
        num_weights: int,
    ) -> Tensor:
        return torch.full(
            (num_steps,),
            1.0 / num_weights,
            dtype=torch.float64,
        )
