"""How well an outcome conforms to what the draws predict, its rank among the rows, and whether the weights hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.chains import MIN_DRAWS, ess
from pyrobnn.core.checks import Refused, as_tensor
from pyrobnn.diagnostics.importance import good_k, pareto_smooth
from pyrobnn.likelihoods import Likelihood
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.datatree import log_densities

Rows = tuple[Tensor, Tensor]
Kind = Literal["add-one-in", "split"]
#: scalars of the largest intermediate, about 32 MiB of float64
CHUNK_SCALARS = 4_194_304


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
        own = {**likelihood.own.priors, **likelihood.own.points}
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


Terms = Callable[[Outputs, Tensor], Sequence[Tensor]]


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
        kind: ``"add-one-in"``, whose weights add the candidate to the training rows, or ``"split"``.
        num_chains: of the draws, which are joined here.
        efficiency: effective draws per draw of the chains.
        notes: what is known of the weights already, in sentences.
    """

    rows: Sequence[Tensor]
    base: Tensor | None
    power: float
    alpha: float
    kind: Kind = "add-one-in"
    num_chains: int = 1
    efficiency: float = 1.0
    notes: tuple[str, ...] = ()

    @cached_property
    def _scaled(self) -> list[tuple[Tensor, Tensor]]:
        peaks = [each.amax(0).nan_to_num(neginf=0.0) for each in self.rows]
        return [((each - peak).exp(), peak) for each, peak in zip(self.rows, peaks)]

    @property
    def most_below(self) -> int:
        """The largest rank that is left out, ⌊α (N + 1)⌋; 0 where the rows are too few to leave out anything."""
        return math.floor(self.alpha * (self.rows[0].shape[1] + 1) + 1e-9)

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
        rows = torch.stack([(weights @ scaled).log() + peak for scaled, peak in self._scaled]).amin(0)
        candidate = torch.stack([(log_weights + each).logsumexp(0) for each in own]).amin(0)
        # copies of a row conform alike, up to rounding
        return (rows <= candidate[:, None] + 1e-9).sum(1) + 1 > self.most_below

    def effective(self, log_weights: Tensor) -> Tensor:
        """Effective draws (candidate,) under normalised log weights (S, candidate)."""
        return self.efficiency / (2 * log_weights).exp().sum(0)

    def khat(self, log_weights: Tensor) -> Tensor:
        """Pareto k-hat of log weights (S, candidate); (candidate,)."""
        chains = log_weights.T.reshape(log_weights.shape[1], self.num_chains, -1).cpu().numpy()
        parts = blocks(len(chains), self.at_once)
        return torch.from_numpy(
            np.concatenate([pareto_smooth(chains[part], self.efficiency)[1] for part in parts])
        )

    def doubts(self, khat: Tensor | None, effective: Tensor | None) -> tuple[str, ...]:
        """What makes the weights of add-one-in unfit to be trusted, in a sentence; nothing where they are fit."""
        if khat is None or effective is None:
            return ()
        draws = len(self.rows[0])
        limit = good_k(draws)
        # as in leave-one-out: k-hat of a tail of M draws has standard error (1 + k)/√M, and there are many points
        tail = min(0.2 * draws, 3.0 * (draws / self.efficiency) ** 0.5)
        certain = limit + (1.0 + limit) * NormalDist().inv_cdf(1 - 0.002 / len(khat)) / tail**0.5
        bad = ((khat > certain) | (effective < 25)).nonzero()[:, 0].tolist()
        if not bad:
            return ()
        listed = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
        return (
            f"at {len(bad)} of {len(khat)} points ({listed}) the importance weights that add the new row cannot be "
            f"trusted (Pareto k-hat up to {float(khat.max()):.2f}, limit {limit:.2f}; effective draws down to "
            f"{float(effective.min()):.0f}): take more draws, or pass calibration=(x, y)",
        )

    def too_few(self) -> tuple[str, ...]:
        """A sentence where the rows are so few that nothing can be left out."""
        if self.most_below:
            return ()
        fewest = math.ceil(1 / self.alpha - 1e-9) - 1
        return (
            f"{self.rows[0].shape[1]} rows cannot tell an outcome that is missed with probability {self.alpha:g}: the "
            f"sets hold everything; {fewest} rows are the fewest",
        )


def rankings(
    posterior: Posterior, train: Rows | None, calibration: Rows | None, alpha: float, terms: Terms
) -> list[Ranking]:
    """The ways to rank candidates that the rows allow, the one to be tried first in front.

    Raises:
        TypeError, ValueError: rows of no use, or none at all.
        Refused: draws that are of no posterior, and no calibration rows.
    """
    if train is None and calibration is None:
        raise ValueError(
            "a conformal set needs rows: pass train=(x, y), those of the fit, or calibration=(x, y), which it has "
            "not seen"
        )
    found = []
    if train is not None:
        why = _no_posterior(posterior)
        if why is None:
            found.append(_add_one_in(posterior, train, alpha, terms))
        elif calibration is None:
            raise Refused(
                f"{why}: pass calibration=(x, y), rows that the fit has not seen, or use draws of a posterior "
                "(NUTS, SVI, Laplace)"
            )
    if calibration is not None:
        rows = _of_rows(posterior, "calibration", calibration, terms)
        found.append(Ranking(rows, None, 0.0, alpha, kind="split"))
    return found


def _no_posterior(posterior: Posterior) -> str | None:
    meta, size = posterior.meta, posterior.num_chains * posterior.num_draws
    method = meta.get("method", "this method")
    if meta.get("kind") == "point" or size == 1:
        return f"{method} gives one draw, which no importance weight can move when a row is added"
    if meta.get("claim") == "none":
        return f"the draws of {method} are of no posterior, to which importance weights could add a row"
    if size < 25:  # no tail to look at
        return f"{size} draws are too few for the importance weights that add a row (25 at least)"
    return None


def _add_one_in(posterior: Posterior, rows: Rows, alpha: float, terms: Terms) -> Ranking:
    terms_of_rows = _of_rows(posterior, "train", rows, terms)
    count = terms_of_rows[0].shape[1]
    fitted = posterior.meta.get("num_data", count)
    if fitted != count:
        raise ValueError(
            f"'train' has {count} rows but the posterior was fitted to {fitted}: pass the rows of the fit, or "
            "calibration=(x, y) for rows it has not seen"
        )
    temperature = float(posterior.meta.get("temperature") or 1.0)
    base, notes = _correction(posterior, rows, temperature)
    efficiency = 1.0
    if posterior.meta.get("kind") == "chains" and posterior.num_draws >= MIN_DRAWS:
        columns = terms_of_rows[0][:, :: -(-count // 200)].T  # 200 rows tell it
        found = ess(columns.reshape(len(columns), posterior.num_chains, -1).cpu().numpy(), "mean")
        found = found[np.isfinite(found)]
        efficiency = float(found.mean()) / len(terms_of_rows[0]) if found.size else 1.0
    power = 1.0 / temperature
    return Ranking(
        terms_of_rows, base, power, alpha, num_chains=posterior.num_chains, efficiency=efficiency, notes=notes
    )


def _correction(
    posterior: Posterior, rows: Rows, temperature: float
) -> tuple[Tensor | None, tuple[str, ...]]:
    """Log weights (S,) that make draws of an approximation draws of the posterior, or why there are none."""
    if posterior.meta.get("claim") == "exact":
        return None, ()
    why = "nothing tells how far off they are"
    if posterior.approximation is not None and temperature == 1.0:
        log_prior, log_likelihood = log_densities(posterior, *rows)
        log_ratio = (log_prior + log_likelihood.sum(-1) - posterior.log_q()).double().cpu().numpy()
        log_weights, k = pareto_smooth(log_ratio) if np.isfinite(log_ratio).all() else (log_ratio, math.inf)
        if float(k) <= good_k(log_ratio.size):
            device = next(iter(posterior.draws.values())).device
            return torch.from_numpy(log_weights).flatten().to(device), ()
        why = f"importance weights p/q cannot correct them (Pareto k-hat {float(k):.2f})"
    method = posterior.meta.get("method", "an approximation")
    return None, (
        f"the draws are of {method}'s approximation, and {why}: the sets hold as close to what is asked for as the "
        "approximation is close to the posterior; calibration rows guarantee it",
    )


def _of_rows(posterior: Posterior, name: str, rows: Rows, terms: Terms) -> list[Tensor]:
    """The terms of the rows, one (S, N) each.

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
    y = model.likelihood.target(y, width, torch.float64)
    size = max(1, CHUNK_SCALARS // (posterior.num_chains * posterior.num_draws))
    found = [terms(Outputs.of(posterior, x[part]), y[part]) for part in blocks(len(y), size)]
    return [torch.cat(columns, 1) for columns in zip(*found)]


def blocks(count: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` that cover ``count``."""
    return (slice(start, start + size) for start in range(0, count, size))
