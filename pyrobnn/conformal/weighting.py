"""The weights of the draws when a row is added to the data, and whether they can be trusted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from pyrobnn.chains import MIN_DRAWS, ess
from pyrobnn.checks import Refused
from pyrobnn.conformal.conformity import Outputs, Ranking, blocks, training_rows
from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.importance import pareto_smooth
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.datatree import log_densities

#: draws below which importance weights have no tail to look at
_MIN_DRAWS = 25
#: log likelihoods from which the relative efficiency of chains is taken
_MOST_COLUMNS = 200
_LISTED = 8

Rows = tuple[Tensor, Tensor]
Terms = Callable[[Outputs, Tensor], Sequence[Tensor]]
Kind = Literal["add-one-in", "split"]


@dataclass(frozen=True, eq=False)
class Weighting:
    """How candidates are ranked, and what is known of the weights behind it.

    Attributes:
        ranking: of candidates among the rows.
        kind: ``"add-one-in"``, whose weights add the candidate to the training rows, or ``"split"``.
        num_chains: of the draws, which are joined in the ranking.
        efficiency: effective draws per draw of the chains.
        notes: what is to be known of it already, in sentences.
    """

    ranking: Ranking
    kind: Kind
    num_chains: int = 1
    efficiency: float = 1.0
    notes: tuple[str, ...] = ()

    def trust(self, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Effective draws (candidate,) and log weights (S, candidate), from the log density (S, candidate)."""
        log_weights = self.ranking.log_weights(log_prob)
        return self.efficiency / (2 * log_weights).exp().sum(0), log_weights

    def khat(self, log_weights: Tensor) -> Tensor:
        """Pareto k-hat of log weights (S, candidate); (candidate,)."""
        chains = log_weights.T.reshape(log_weights.shape[1], self.num_chains, -1)
        found = [
            pareto_smooth(chains[part].cpu().numpy(), self.efficiency)[1]
            for part in blocks(len(chains), self.ranking.at_once)
        ]
        return torch.from_numpy(np.concatenate(found))


def weightings(
    posterior: Posterior,
    train: Rows | None,
    calibration: Rows | None,
    alpha: float,
    terms: Terms,
) -> list[Weighting]:
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
    if calibration is not None:
        found = [_split(posterior, calibration, alpha, terms)]
    if train is not None:
        why = _no_posterior(posterior)
        if why is None:
            found.insert(0, _add_one_in(posterior, train, alpha, terms))
        elif not found:
            raise Refused(
                f"{why}: pass calibration=(x, y), rows that the fit has not seen, or use draws of a posterior "
                "(NUTS, SVI, Laplace)"
            )
    return found


def _no_posterior(posterior: Posterior) -> str | None:
    meta, size = posterior.meta, posterior.num_chains * posterior.num_draws
    method = meta.get("method", "this method")
    if meta.get("kind") == "point" or size == 1:
        return f"{method} gives one draw, which no importance weight can move when a row is added"
    if meta.get("claim") == "none":
        return f"the draws of {method} are of no posterior, to which importance weights could add a row"
    if size < _MIN_DRAWS:
        return f"{size} draws are too few for the importance weights that add a row ({_MIN_DRAWS} at least)"
    return None


def _split(posterior: Posterior, rows: Rows, alpha: float, terms: Terms) -> Weighting:
    x, y = training_rows(posterior, "calibration", rows)
    return Weighting(Ranking(_of_rows(posterior, x, y, terms), None, 0.0, alpha), "split")


def _add_one_in(posterior: Posterior, rows: Rows, alpha: float, terms: Terms) -> Weighting:
    x, y = training_rows(posterior, "train", rows)
    fitted = posterior.meta.get("num_data", len(y))
    if fitted != len(y):
        raise ValueError(
            f"'train' has {len(y)} rows but the posterior was fitted to {fitted}: pass the rows of the fit, or "
            "calibration=(x, y) for rows it has not seen"
        )
    temperature = float(posterior.meta.get("temperature") or 1.0)
    base, notes = _correction(posterior, rows, temperature)
    ranking = Ranking(_of_rows(posterior, x, y, terms), base, 1.0 / temperature, alpha)
    efficiency = 1.0
    if posterior.meta.get("kind") == "chains" and posterior.num_draws >= MIN_DRAWS:
        columns = ranking.rows[0][:, :: -(-ranking.num_rows // _MOST_COLUMNS)]
        each = ess(columns.T.reshape(-1, posterior.num_chains, posterior.num_draws).cpu().numpy(), "mean")
        each = each[np.isfinite(each)]
        efficiency = float(each.mean()) / len(columns) if each.size else 1.0
    return Weighting(ranking, "add-one-in", posterior.num_chains, efficiency, notes)


def _correction(
    posterior: Posterior, rows: Rows, temperature: float
) -> tuple[Tensor | None, tuple[str, ...]]:
    """Log weights (S,) that make draws of an approximation draws of the posterior, or why there are none."""
    if posterior.meta.get("claim") == "exact":
        return None, ()
    method = posterior.meta.get("method", "an approximation")
    unsaid = (
        f"the draws are of {method}'s approximation, and {{}}: the share of outcomes that the sets hold is as close to "
        "what is asked for as the approximation is to the posterior; calibration rows guarantee it"
    )
    if posterior.approximation is None or temperature != 1.0:
        return None, (unsaid.format("nothing tells how far off they are"),)
    log_prior, log_likelihood = log_densities(posterior, *rows)
    log_ratio = (log_prior + log_likelihood.sum(-1) - posterior.log_q()).double().cpu().numpy()
    if not np.isfinite(log_ratio).all():
        return None, (unsaid.format("importance weights p/q are not finite"),)
    log_weights, k = pareto_smooth(log_ratio)
    if float(k) > thresholds.good_k(log_ratio.size):
        return None, (
            unsaid.format(f"importance weights p/q cannot correct them (Pareto k-hat {float(k):.2f})"),
        )
    device = next(iter(posterior.draws.values())).device
    return torch.from_numpy(log_weights).flatten().to(device), ()


def _of_rows(posterior: Posterior, x: Tensor, y: Tensor, terms: Terms) -> list[Tensor]:
    """The terms of the rows, one (S, N) each."""
    size = max(1, 2**22 // (posterior.num_chains * posterior.num_draws))
    found = [terms(Outputs.of(posterior, x[part]), y[part]) for part in blocks(len(y), size)]
    return [torch.cat(columns, 1) for columns in zip(*found)]


class Result:
    """What an interval and a set share: the rank's settings, and the trust in its weights."""

    alpha: float
    kind: Kind
    khat: Tensor | None
    ess: Tensor | None
    notes: tuple[str, ...]
    #: whether the weights can be trusted at every point
    trusted: bool


R = TypeVar("R", bound=Result)


def first_trusted(ways: Sequence[Weighting], make: Callable[[Weighting, tuple[str, ...]], R]) -> R:
    """The result of the first way whose weights can be trusted, else of the last; its notes are warned of."""
    said: tuple[str, ...] = ()
    for number, way in enumerate(ways, start=1):
        result = make(way, (*said, *way.notes))
        if result.trusted or number == len(ways):
            break
        said = tuple(f"the calibration rows are used, for {note}" for note in result.notes)
    for note in result.notes:
        warnings.warn(note, UserWarning, stacklevel=3)
    return result


def doubts(way: Weighting, khat: Tensor, ess: Tensor) -> tuple[str, ...]:
    """What makes the weights of add-one-in unfit to be trusted, in a sentence; nothing where they are fit."""
    draws = len(way.ranking.rows[0])
    limit = thresholds.good_k(draws)
    # as in leave-one-out: k-hat of a tail of M draws has standard error (1 + k)/√M, and there are many points
    tail = min(0.2 * draws, 3.0 * (draws / way.efficiency) ** 0.5)
    certain = limit + stats.norm.isf(thresholds.PIT_WARN / len(khat)) * (1.0 + limit) / tail**0.5
    bad = ((khat > certain) | (ess < _MIN_DRAWS)).nonzero()[:, 0].tolist()
    if not bad:
        return ()
    listed = ", ".join(map(str, bad[:_LISTED])) + (", …" if len(bad) > _LISTED else "")
    return (
        f"at {len(bad)} of {len(khat)} points ({listed}) the importance weights that add the new row cannot be trusted "
        f"(Pareto k-hat up to {float(khat.max()):.2f}, limit {limit:.2f}; effective draws down to "
        f"{float(ess.min()):.0f}): an outcome there would move the posterior to where it has few draws; take more "
        "draws, or pass calibration=(x, y)",
    )


def too_few(way: Weighting) -> tuple[str, ...]:
    """A sentence where the rows are so few that nothing can be left out."""
    ranking = way.ranking
    if ranking.most_below:
        return ()
    fewest = int(np.ceil(1 / ranking.alpha - 1e-9)) - 1
    return (
        f"{ranking.num_rows} rows cannot tell an outcome that is missed with probability {ranking.alpha:g}: the sets "
        f"hold everything; {fewest} rows are the fewest",
    )
