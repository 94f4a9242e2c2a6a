"""How well an outcome conforms to what the draws predict, and its rank among the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyrobnn.checks import as_tensor
from pyrobnn.likelihoods import Likelihood
from pyrobnn.posterior import Posterior

#: scalars of the largest intermediate, about 32 MiB of float64
CHUNK_SCALARS = 2**22
#: relative difference of two conformities that is rounding: copies of a row conform alike
_TIE = 1e-9


@dataclass(frozen=True, eq=False)
class Outputs:
    """What each draw predicts at some points, in the units of the program, float64.

    Attributes:
        likelihood: of the model.
        f: network outputs (S, point, width).
        params: the likelihood's own parameters, site → (S, …).
    """

    likelihood: Likelihood
    f: Tensor
    params: Mapping[str, Tensor]

    @classmethod
    def of(cls, posterior: Posterior, x: Tensor) -> Outputs:
        """The outputs of a posterior at inputs ``x`` in the units of the data."""
        likelihood = posterior.bnn.likelihood
        own = {**likelihood.priors, **likelihood.points}
        params = {
            name: value.flatten(0, 1).double() for name, value in posterior.draws.items() if name in own
        }
        return cls(likelihood, posterior.standard_function(x).flatten(0, 1).double(), params)

    def at(self, points: Tensor) -> Outputs:
        """These outputs at chosen points (k,), which may repeat."""
        return Outputs(self.likelihood, self.f[:, points], self.params)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of outcomes y (point, …), one per point, under each draw: (S, point)."""
        return self.likelihood.log_prob(self.f, y, self.params)

    def tails(self, y: Tensor) -> list[Tensor]:
        """Log probability of less than y (point, 1), and of more, under each draw: (S, point) each."""
        loc, scale = self.likelihood.loc_scale(self.f, self.params)
        z = ((y - loc) / scale)[..., 0] * math.sqrt(0.5)
        # a tail that underflows, beyond 38 standard deviations, is as far out as any: log_ndtr takes five times as long
        return [torch.special.erfc(-z).log() - math.log(2), torch.special.erfc(z).log() - math.log(2)]


def training_rows(posterior: Posterior, name: str, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs as they came and targets in the units of the program.

    Raises:
        TypeError, ValueError: no pair of inputs and targets of the same number of rows, naming ``name``.
    """
    if not isinstance(rows, (tuple, list)) or len(rows) != 2:
        raise TypeError(f"'{name}' must be the pair (x, y), got {type(rows).__name__}")
    x, y = as_tensor(f"{name}[0]", rows[0]), as_tensor(f"{name}[1]", rows[1])
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"'{name}' must hold as many inputs as targets, and one at least: got shapes {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )
    model = posterior.bnn
    y = model.standard_targets(y.to(next(iter(posterior.draws.values())).device))
    width = posterior.standard_function(x[:1]).shape[-1]
    return x, model.likelihood.target(y, width, torch.float64)


@dataclass(frozen=True, eq=False)
class Ranking:
    r"""The rank of a candidate's conformity among that of the rows.

    Conformity of row i, with the candidate (x, y) for a further row, is

    .. math:: \sigma_i = \min_k \sum_s w_s \, a_{sik}, \qquad w_s \propto b_s \, p(y \mid x, \theta_s)^t

    Args:
        rows: log a of the rows, one (S, N) for each k: the density, or the two tails.
        base: log b (S,), the weights of the draws before the candidate is added; None for equal ones.
        power: t: 1 / temperature where the weights add the candidate to the rows, 0 where they leave it out.
        alpha: share of the outcomes that a set may miss.
    """

    rows: Sequence[Tensor]
    base: Tensor | None
    power: float
    alpha: float

    @cached_property
    def _peaks(self) -> list[Tensor]:
        return [each.amax(0).nan_to_num(neginf=0.0) for each in self.rows]

    @cached_property
    def _scaled(self) -> list[Tensor]:
        return [(each - peak).exp() for each, peak in zip(self.rows, self._peaks)]

    @property
    def num_rows(self) -> int:
        """Rows N."""
        return self.rows[0].shape[1]

    @property
    def most_below(self) -> int:
        """The largest rank that is left out, ⌊α (N + 1)⌋; 0 where the rows are too few to leave out anything."""
        return math.floor(self.alpha * (self.num_rows + 1) + 1e-9)

    @property
    def at_once(self) -> int:
        """Candidates in one block."""
        return max(1, CHUNK_SCALARS // max(self.rows[0].shape))

    def log_weights(self, log_prob: Tensor) -> Tensor:
        """Normalised log weights of the draws with each candidate added, (S, candidate), from its log density."""
        log_weights = self.power * log_prob
        if self.base is not None:
            log_weights = log_weights + self.base[:, None]
        return log_weights - log_weights.logsumexp(0)

    def inside(self, log_prob: Tensor, own: Sequence[Tensor]) -> Tensor:
        """Whether each candidate belongs to the set, (candidate,).

        Args:
            log_prob: of the candidates, (S, candidate).
            own: log a of the candidates, one (S, candidate) for each k.
        """
        log_weights = self.log_weights(log_prob)
        weights = log_weights.exp().T.contiguous()
        of_rows = [(weights @ scaled).log() + peak for scaled, peak in zip(self._scaled, self._peaks)]
        of_own = [(log_weights + each).logsumexp(0) for each in own]
        rows, candidate = _least(of_rows), _least(of_own)
        return (rows <= candidate[:, None] + _TIE).sum(1) + 1 > self.most_below


def blocks(count: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` that cover ``count``."""
    return (slice(start, start + size) for start in range(0, count, size))


def _least(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).amin(0)
