"""Conformal intervals for regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from pyrobnn.checks import Refused, as_tensor, check_choice, check_number
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

Conformity = Literal["central", "density"]
#: standard deviations around the median that are searched first, and how often that is doubled
_REACH, _MOST_DOUBLINGS = 4.0, 20
#: candidates at each point, denser towards the median, and halvings of the cell in which an end lies
_GRID, _HALVINGS = 25, 11


@dataclass(frozen=True, eq=False)
class ConformalInterval(Result):
    """The outcomes at each point that conform to the rows.

    Attributes:
        lower, upper: ends of the smallest interval that holds the set (point,), in the units of y: infinite where
            nothing bounds it, NaN where the set is empty.
        pieces: the set itself, one tensor (piece, 2) for each point.
        alpha: share of the outcomes that the sets may miss.
        kind: ``"add-one-in"`` or ``"split"``.
        khat: Pareto k-hat of the weights at the less certain end (point,); None of a split.
        ess: effective draws there (point,); None of a split.
        notes: what is to be known, in sentences.
        trusted: whether the weights can be trusted at every point.
    """

    lower: Tensor
    upper: Tensor
    pieces: tuple[Tensor, ...]
    alpha: float
    kind: Kind
    khat: Tensor | None
    ess: Tensor | None
    notes: tuple[str, ...]
    trusted: bool

    @property
    def width(self) -> Tensor:
        """Total length of the pieces (point,)."""
        return torch.stack([(each[:, 1] - each[:, 0]).sum() for each in self.pieces])

    def contains(self, y: Tensor) -> Tensor:
        """Whether the set of each point holds its outcome y (point,) or (point, 1); (point,)."""
        y = as_tensor("y", y).reshape(-1)
        if len(y) != len(self.pieces):
            raise ValueError(f"'y' has {len(y)} values but there are {len(self.pieces)} sets")
        return torch.stack(
            [((each[:, 0] <= v) & (v <= each[:, 1])).any() for v, each in zip(y.double().cpu(), self.pieces)]
        )


def conformal_interval(
    posterior: Posterior,
    x: Tensor,
    *,
    train: Rows | None = None,
    calibration: Rows | None = None,
    alpha: float = 0.1,
    conformity: Conformity = "central",
) -> ConformalInterval:
    r"""Sets that hold a new outcome with probability 1 − α, whether or not the model is right.

    A candidate y belongs to the set at x where its rank among the N + 1 conformities of rows and candidate is above
    α (N + 1). With ``train`` (conformal Bayes) the conformities are those of the posterior to which the candidate has
    been added, by importance weights on the draws, so that no row is spent:

    .. math:: \sigma_i(y) = \sum_s w_s(y) \, a_i(\theta_s), \qquad w_s(y) \propto p(y \mid x, \theta_s)

    With ``calibration`` (split conformal) the posterior stays as it is, and the rows are held out.

    Args:
        posterior: of a BNN with one Gaussian output.
        x: inputs (point, …) in the units of the data.
        train: (x, y), the rows of the fit. Draws of an approximation are weighted by p/q as well where Pareto's k-hat
            allows it; the notes say where not.
        calibration: (x, y), rows that the fit has not seen; beside ``train`` they are used where the weights cannot be
            trusted.
        alpha: share of the outcomes that the sets may miss, in (0, 1).
        conformity: ``"central"``: the smaller tail probability of the outcome, for intervals that follow the noise of
            the model; ``"density"``: its density, for the shortest sets on average, which may fall apart and are empty
            where the model expects more noise than nearly everywhere.

    Returns:
        The sets, with k-hat and the effective draws of the weights behind them.

    Raises:
        Refused: several outputs, other likelihoods than Gaussian; or ``train`` alone for a point estimate, an ensemble
            or dropout, whose draws no weight can add a row to.
        TypeError, ValueError: naming the argument.

    Warns:
        UserWarning: each of the notes.

    Caveats: the guarantee is on average over rows and new points alike, not at each x; both must be exchangeable (no
    drift, no copies between calibration and training). With ``train`` it holds up to the Monte Carlo error of draws of
    the posterior itself; what else was taken from the rows (a prior's width tuned on them, the mode that a Laplace
    posterior is linearised at) is not made anew for the candidate. Cost: O(S · N) for each of some 50 candidates at a
    point.

    References:
        Conformal Bayesian computation (Fong & Holmes, 2021) https://arxiv.org/abs/2106.06137
        Distribution-free predictive inference for regression (Lei et al., 2018) https://arxiv.org/abs/1604.04173
    """
    alpha = check_number("alpha", alpha, above=0, below=1)
    check_choice("conformity", conformity, ("central", "density"))
    _check_response(posterior)
    terms = _tails if conformity == "central" else _density
    ways = weightings(posterior, train, calibration, alpha, terms)
    x = as_tensor("x", x)
    return first_trusted(ways, partial(_intervals, posterior, x, conformity))


def _tails(outputs: Outputs, y: Tensor) -> Sequence[Tensor]:
    _check_one(y)
    return outputs.tails(y)


def _density(outputs: Outputs, y: Tensor) -> Sequence[Tensor]:
    _check_one(y)
    return [outputs.log_prob(y)]


def _check_one(y: Tensor) -> None:
    if y.shape[1] != 1:
        raise Refused(f"conformal intervals are of one output, got {y.shape[1]}: fit a model for each")


def _check_response(posterior: Posterior) -> None:
    likelihood = posterior.bnn.likelihood
    if likelihood.task in ("categorical", "bernoulli"):
        raise ValueError("the outcomes are classes: use pyrobnn.conformal_set")
    if likelihood.task != "gaussian":
        raise Refused(f"conformal intervals are made for Gaussian likelihoods, got {likelihood!r}")


def _intervals(
    posterior: Posterior, x: Tensor, conformity: Conformity, way: Weighting, notes: tuple[str, ...]
) -> ConformalInterval:
    draws = posterior.num_chains * posterior.num_draws
    pieces: list[Tensor] = []
    khat, ess = [], []
    for part in blocks(len(x), max(1, CHUNK_SCALARS // (2 * draws))):
        outputs = Outputs.of(posterior, x[part])
        search = _Search(way, conformity, outputs)
        found = search.pieces()
        pieces += found
        if way.kind == "add-one-in":
            each_khat, each_ess = search.trust(found)
            khat.append(each_khat)
            ess.append(each_ess)
    units = posterior.bnn.standardizer
    if units is not None:
        mean, scale = (float(v.reshape(-1)[0]) for v in (units.y_mean, units.y_scale))
        pieces = [mean + scale * each for each in pieces]
    lower, upper = (
        torch.stack(
            [fold(each[:, side]) if len(each) else torch.tensor(torch.nan).double() for each in pieces]
        )
        for side, fold in ((0, torch.amin), (1, torch.amax))
    )
    doubt = doubts(way, torch.cat(khat), torch.cat(ess)) if khat else ()
    notes = (*notes, *doubt, *too_few(way), *_empty(lower))
    return ConformalInterval(
        lower,
        upper,
        tuple(pieces),
        way.ranking.alpha,
        way.kind,
        torch.cat(khat) if khat else None,
        torch.cat(ess) if ess else None,
        notes,
        not (doubt or way.notes),
    )


def _empty(lower: Tensor) -> tuple[str, ...]:
    count = int(lower.isnan().sum())
    if not count:
        return ()
    return (
        f"at {count} of {len(lower)} points no outcome conforms, for the model expects more noise there than nearly "
        "everywhere: conformity='central' gives intervals that follow the noise",
    )


class _Search:
    """The set at each of some points: a grid, wide enough that its ends lie outside, and a bisection for each edge."""

    def __init__(self, way: Weighting, conformity: Conformity, outputs: Outputs):
        self.way, self.outputs = way, outputs
        self.terms = _tails if conformity == "central" else _density
        loc, scale = (v[..., 0] for v in outputs.likelihood.loc_scale(outputs.f, outputs.params))
        low, self.centre, high = loc.quantile(torch.tensor([0.25, 0.5, 0.75]).to(loc), dim=0)
        # of the middle half of the draws: a few that have gone astray must not set the grid
        self.spread = ((high - low).square() + scale.quantile(0.5, dim=0).square()).sqrt()

    def outcome(self, point: Tensor, t: Tensor) -> Tensor:
        """Outcomes (candidate, 1), t spreads from the median."""
        return (self.centre[point] + self.spread[point] * t)[:, None]

    def inside(self, point: Tensor, t: Tensor) -> Tensor:
        """Whether each candidate belongs to the set of its point."""
        found = []
        for part in blocks(len(point), self.way.ranking.at_once):
            at, y = self.outputs.at(point[part]), self.outcome(point[part], t[part])
            found.append(self.way.ranking.inside(at.log_prob(y), self.terms(at, y)))
        return torch.cat(found)

    def pieces(self) -> list[Tensor]:
        """The set of each point, (piece, 2), in the units of the program."""
        count, device = len(self.centre), self.centre.device
        reach = self._reach()
        u = torch.linspace(-1, 1, _GRID, dtype=torch.float64, device=device)
        t = reach[:, None] * u * u.abs()
        every = torch.arange(count, device=device)
        member = self.inside(every.repeat_interleave(_GRID), t.flatten()).reshape(count, _GRID)
        point, cell = (member[:, 1:] != member[:, :-1]).nonzero(as_tuple=True)
        enters = member[point, cell + 1]
        inner = torch.where(enters, t[point, cell + 1], t[point, cell])
        outer = torch.where(enters, t[point, cell], t[point, cell + 1])
        for _ in range(_HALVINGS if len(point) else 0):
            middle = (inner + outer) / 2
            held = self.inside(point, middle)
            inner, outer = torch.where(held, middle, inner), torch.where(held, outer, middle)
        edges: list[list[float]] = [[-torch.inf] if each else [] for each in member[:, 0].tolist()]
        ends = self.outcome(point, outer)[:, 0]
        for number, end in zip(point.tolist(), ends.tolist()):
            edges[number].append(end)
        for number, each in enumerate(member[:, -1].tolist()):
            edges[number] += [torch.inf] if each else []
        return [torch.tensor(each, dtype=torch.float64).reshape(-1, 2) for each in edges]

    def _reach(self) -> Tensor:
        """Spreads from the median to where both ends lie outside; as far as it goes where nothing does."""
        reach = torch.full_like(self.centre, _REACH)
        wide = torch.arange(len(reach), device=reach.device)
        for _ in range(_MOST_DOUBLINGS if self.way.ranking.most_below else 0):
            held = self.inside(wide, reach[wide]) | self.inside(wide, -reach[wide])
            wide = wide[held]
            if not len(wide):
                break
            reach[wide] *= 2
        return reach

    def trust(self, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """k-hat and effective draws (point,) at that end of each set where the draws are worth less."""
        ends = torch.stack([_hull(each) for each in pieces]).to(self.centre)
        ends = torch.where(ends.isfinite(), ends, self.centre[:, None])
        every = torch.arange(len(ends), device=ends.device)
        khat, ess = [], []
        for part in blocks(len(ends), self.way.ranking.at_once):
            both = [
                self.way.trust(self.outputs.at(every[part]).log_prob(ends[part, side, None]))
                for side in (0, 1)
            ]
            worse = both[1][0] < both[0][0]
            ess.append(torch.where(worse, both[1][0], both[0][0]).cpu())
            khat.append(self.way.khat(torch.where(worse, both[1][1], both[0][1])))
        return torch.cat(khat), torch.cat(ess)


def _hull(pieces: Tensor) -> Tensor:
    return torch.stack([pieces[0, 0], pieces[-1, 1]]) if len(pieces) else torch.full((2,), torch.nan).double()
