"""Conformal sets of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyrobnn.checks import Refused, as_tensor, check_number
from pyrobnn.conformal.conformity import CHUNK_SCALARS, Outputs, blocks
from pyrobnn.conformal.weighting import (
    Kind,
    Result,
    Rows,
    Weighting,
    doubts,
    first_trusted,
    too_few,
    weightings,
)
from pyrobnn.posterior import Posterior


@dataclass(frozen=True, eq=False)
class ConformalSet(Result):
    """The classes at each point that conform to the rows.

    Attributes:
        member: whether a class belongs to the set of a point (point, class).
        alpha, kind, notes, trusted: as of :class:`pyrobnn.conformal.ConformalInterval`.
        khat: Pareto k-hat of the weights of the least certain class of each point (point,), among those whose
            membership the weights decide; 0 where they decide none. None of a split.
        ess: effective draws there (point,). None of a split.
    """

    member: Tensor
    alpha: float
    kind: Kind
    khat: Tensor | None
    ess: Tensor | None
    notes: tuple[str, ...]
    trusted: bool

    @property
    def size(self) -> Tensor:
        """Number of classes in each set (point,)."""
        return self.member.sum(1)

    def contains(self, y: Tensor) -> Tensor:
        """Whether the set of each point holds its label y (point,); (point,)."""
        y = as_tensor("y", y).reshape(-1).long().cpu()
        if len(y) != len(self.member):
            raise ValueError(f"'y' has {len(y)} labels but there are {len(self.member)} sets")
        return self.member[torch.arange(len(y)), y]


def conformal_set(
    posterior: Posterior,
    x: Tensor,
    *,
    train: Rows | None = None,
    calibration: Rows | None = None,
    alpha: float = 0.1,
) -> ConformalSet:
    r"""Sets of classes that hold the label of a new point with probability 1 − α, whether or not the model is right.

    As :func:`pyrobnn.conformal_interval`, with the probability of the label as its conformity. A set may be empty: no
    class is as probable there as the labels of nearly all rows are.

    Args:
        posterior: of a BNN with a categorical likelihood, or a Bernoulli one of one output (classes 0 and 1).
        x: inputs (point, …) in the units of the data.
        train, calibration, alpha: as of :func:`pyrobnn.conformal_interval`.

    Returns:
        The sets, with k-hat and the effective draws of the weights behind them.

    Raises:
        Refused: several Bernoulli outputs; or ``train`` alone for a point estimate, an ensemble or dropout.
        TypeError, ValueError: naming the argument.

    Warns:
        UserWarning: each of the notes.

    Caveats: as of :func:`pyrobnn.conformal_interval`; the guarantee is on average over the classes, not for each.

    Reference: Conformal Bayesian computation (Fong & Holmes, 2021) https://arxiv.org/abs/2106.06137
    """
    alpha = check_number("alpha", alpha, above=0, below=1)
    if posterior.bnn.likelihood.task not in ("categorical", "bernoulli"):
        raise ValueError("the outcomes are numbers: use pyrobnn.conformal_interval")
    ways = weightings(posterior, train, calibration, alpha, _probability)
    return first_trusted(ways, partial(_sets, posterior, as_tensor("x", x)))


def _probability(outputs: Outputs, y: Tensor) -> Sequence[Tensor]:
    if outputs.likelihood.task == "bernoulli" and outputs.f.shape[-1] != 1:
        raise Refused("conformal sets are of one label at a time: fit a model for each output")
    return [outputs.log_prob(y)]


def _sets(posterior: Posterior, x: Tensor, way: Weighting, notes: tuple[str, ...]) -> ConformalSet:
    draws = posterior.num_chains * posterior.num_draws
    member, khat, ess = [], [], []
    for part in blocks(len(x), max(1, CHUNK_SCALARS // (max(draws, way.ranking.num_rows) * 4))):
        outputs = Outputs.of(posterior, x[part])
        log_prob = _by_class(outputs)
        flat = log_prob.flatten(1)
        member.append(way.ranking.inside(flat, [flat]).reshape(log_prob.shape[1:]).cpu())
        if way.kind == "add-one-in":
            each_khat, each_ess = _trust(way, log_prob)
            khat.append(each_khat)
            ess.append(each_ess)
    doubt = doubts(way, torch.cat(khat), torch.cat(ess)) if khat else ()
    return ConformalSet(
        torch.cat(member),
        way.ranking.alpha,
        way.kind,
        torch.cat(khat) if khat else None,
        torch.cat(ess) if ess else None,
        (*notes, *doubt, *too_few(way)),
        not (doubt or way.notes),
    )


def _by_class(outputs: Outputs) -> Tensor:
    """Log probability of each class under each draw, (S, point, class)."""
    count = outputs.f.shape[1]
    bernoulli = outputs.likelihood.task == "bernoulli"
    classes = range(2 if bernoulli else outputs.f.shape[-1])
    labels = [
        torch.full((count, 1) if bernoulli else (count,), each, device=outputs.f.device) for each in classes
    ]
    return torch.stack([outputs.log_prob(y.to(outputs.f) if bernoulli else y) for y in labels], -1)


def _trust(way: Weighting, log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """k-hat and effective draws (point,) of the class where the draws are worth least."""
    ranking = way.ranking
    # a class that no weights on the draws would make as probable as the labels of nearly all rows is out anyhow
    of_rows = ranking.rows[0].logsumexp(0) - torch.tensor(len(ranking.rows[0])).log()
    bar = of_rows.sort().values[max(ranking.most_below - 1, 0)]
    decided = log_prob.amax(0) < bar
    found, log_weights = way.trust(log_prob.flatten(1))
    found = torch.where(decided, torch.inf, found.reshape(decided.shape))
    ess, label = found.min(1)
    index = torch.arange(len(label), device=label.device) * decided.shape[1] + label
    khat = way.khat(log_weights[:, index])
    whole = way.efficiency * len(log_prob)
    none = decided.all(1).cpu()
    return torch.where(none, torch.zeros_like(khat), khat), torch.where(none, whole, ess.cpu())
