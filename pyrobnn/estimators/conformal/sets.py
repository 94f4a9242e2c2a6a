"""Conformal sets: intervals of numbers, and sets of classes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, as_tensor, check_choice, check_number
from pyrobnn.estimators.conformal.conformity import (
    CHUNK_SCALARS,
    Kind,
    Outputs,
    Ranking,
    Rows,
    blocks,
    rankings,
)
from pyrobnn.posterior import Posterior

Conformity = Literal["central", "density"]
#: candidates at each point, denser towards the median
_GRID_POINTS = 25


@dataclass(frozen=True, eq=False)
class _Result:
    alpha: float
    kind: Kind
    khat: Tensor | None
    ess: Tensor | None
    notes: tuple[str, ...]
    trusted: bool


@dataclass(frozen=True, eq=False)
class ConformalInterval(_Result):
    """The outcomes at each point that conform to the rows.

    Attributes:
        alpha: share of the outcomes that the sets may miss.
        kind: ``"add-one-in"`` or ``"split"``.
        khat: Pareto k-hat of the weights at the less certain end (point,); None of a split.
        ess: effective draws there (point,); None of a split.
        notes: caveats of this result, in sentences.
        trusted: whether the weights can be trusted at every point.
        pieces: the set itself, one tensor (piece, 2) for each point, in the units of y.
    """

    pieces: tuple[Tensor, ...]

    @property
    def lower(self) -> Tensor:
        """Lower ends of the smallest intervals that hold the sets (point,): −∞ where unbounded, NaN where empty."""
        return torch.stack([_hull(each)[0] for each in self.pieces])

    @property
    def upper(self) -> Tensor:
        """Upper ends (point,)."""
        return torch.stack([_hull(each)[1] for each in self.pieces])

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


@dataclass(frozen=True, eq=False)
class ConformalSet(_Result):
    """The classes at each point that conform to the rows.

    Attributes:
        alpha, kind, notes, trusted: as of :class:`pyrobnn.estimators.conformal.ConformalInterval`.
        khat: Pareto k-hat of the weights of the least certain class of each point (point,), among those whose
            membership the weights decide; 0 where they decide none. None of a split.
        ess: effective draws there (point,). None of a split.
        member: whether a class belongs to the set of a point (point, class).
    """

    member: Tensor

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


R = TypeVar("R", bound=_Result)


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
    ways = rankings(posterior, train, calibration, alpha, terms)
    return _first_trusted(ways, partial(_intervals, posterior, as_tensor("x", x), terms))


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
    ways = rankings(posterior, train, calibration, alpha, _probability)
    return _first_trusted(ways, partial(_sets, posterior, as_tensor("x", x)))


def _first_trusted(ways: Sequence[Ranking], make: Callable[[Ranking, tuple[str, ...]], R]) -> R:
    """The result of the first way whose weights can be trusted, else of the last; its notes become warnings."""
    before: tuple[str, ...] = ()
    for way in ways:
        result = make(way, (*before, *way.notes))
        if result.trusted:
            break
        before = tuple(f"the calibration rows are used, for {note}" for note in result.notes)
    for note in result.notes:
        warnings.warn(note, UserWarning, stacklevel=3)
    return result


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


def _probability(outputs: Outputs, y: Tensor) -> Sequence[Tensor]:
    if outputs.likelihood.task == "bernoulli" and outputs.f.shape[-1] != 1:
        raise Refused("conformal sets are of one label at a time: fit a model for each output")
    return [outputs.log_prob(y)]


def _intervals(
    posterior: Posterior,
    x: Tensor,
    terms: Callable[[Outputs, Tensor], Sequence[Tensor]],
    way: Ranking,
    notes: tuple[str, ...],
) -> ConformalInterval:
    pieces: list[Tensor] = []
    trust = []
    for part in blocks(len(x), max(1, CHUNK_SCALARS // (2 * len(way.rows[0])))):
        search = _Search(way, terms, Outputs.of(posterior, x[part]))
        found = search.pieces()
        pieces += found
        if way.kind == "add-one-in":
            trust.append(search.trust(found))
    units = posterior.bnn.standardizer
    if units is not None:
        mean, scale = (float(v.reshape(-1)[0]) for v in (units.y_mean, units.y_scale))
        pieces = [mean + scale * each for each in pieces]
    if empty := sum(not len(each) for each in pieces):
        notes += (
            f"at {empty} of {len(x)} points no outcome conforms, for the model expects more noise there than nearly "
            "everywhere: conformity='central' gives intervals that follow the noise",
        )
    return ConformalInterval(*_judged(way, trust, notes), tuple(pieces))


def _sets(posterior: Posterior, x: Tensor, way: Ranking, notes: tuple[str, ...]) -> ConformalSet:
    member, trust = [], []
    for part in blocks(len(x), max(1, CHUNK_SCALARS // (max(way.rows[0].shape) * 4))):
        log_prob = _by_class(Outputs.of(posterior, x[part]))
        flat = log_prob.flatten(1)
        member.append(way.inside(flat, [flat]).reshape(log_prob.shape[1:]).cpu())
        if way.kind == "add-one-in":
            trust.append(_trust(way, log_prob))
    return ConformalSet(*_judged(way, trust, notes), torch.cat(member))


def _judged(
    way: Ranking, trust: Sequence[tuple[Tensor, Tensor]], notes: tuple[str, ...]
) -> tuple[float, Kind, Tensor | None, Tensor | None, tuple[str, ...], bool]:
    """What an interval and a set share, in the order of their fields."""
    khat, effective = (torch.cat(each) for each in zip(*trust)) if trust else (None, None)
    doubts = way.doubts(khat, effective)
    return way.alpha, way.kind, khat, effective, (*notes, *doubts, *way.too_few()), not (doubts or way.notes)


def _by_class(outputs: Outputs) -> Tensor:
    """Log probability of each class under each draw, (S, point, class)."""
    count = outputs.f.shape[1]
    bernoulli = outputs.likelihood.task == "bernoulli"
    classes = range(2 if bernoulli else outputs.f.shape[-1])
    labels = [
        torch.full((count, 1) if bernoulli else (count,), each, device=outputs.f.device) for each in classes
    ]
    return torch.stack([outputs.log_prob(y.to(outputs.f) if bernoulli else y) for y in labels], -1)


def _trust(way: Ranking, log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """k-hat and effective draws (point,) of the class where the draws are worth least."""
    # a class that no weights on the draws would make as probable as the labels of nearly all rows is out anyhow
    of_rows = way.rows[0].logsumexp(0) - torch.tensor(len(way.rows[0])).log()
    bar = of_rows.sort().values[max(way.most_below - 1, 0)]
    decided = log_prob.amax(0) < bar
    log_weights = way.log_weights(log_prob.flatten(1))
    effective = way.effective(log_weights).reshape(decided.shape).masked_fill(decided, torch.inf)
    least, label = effective.min(1)
    index = torch.arange(len(label), device=label.device) * decided.shape[1] + label
    khat, none = way.khat(log_weights[:, index]), decided.all(1).cpu()
    whole = way.efficiency * len(log_prob)
    return khat.masked_fill(none, 0.0), least.cpu().masked_fill(none, whole)


class _Search:
    """The set at each of some points: a grid, wide enough that its ends lie outside, and a bisection for each edge."""

    def __init__(
        self, ranking: Ranking, terms: Callable[[Outputs, Tensor], Sequence[Tensor]], outputs: Outputs
    ):
        self.ranking, self.terms, self.outputs = ranking, terms, outputs
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
        for part in blocks(len(point), self.ranking.at_once):
            at, y = self.outputs.at(point[part]), self.outcome(point[part], t[part])
            found.append(self.ranking.inside(at.log_prob(y), self.terms(at, y)))
        return torch.cat(found)

    def pieces(self) -> list[Tensor]:
        """The set of each point, (piece, 2), in the units of the program."""
        count, device = len(self.centre), self.centre.device
        reach = self._reach()
        u = torch.linspace(-1, 1, _GRID_POINTS, dtype=torch.float64, device=device)
        t = reach[:, None] * u * u.abs()
        every = torch.arange(count, device=device)
        member = self.inside(every.repeat_interleave(_GRID_POINTS), t.flatten()).reshape(count, _GRID_POINTS)
        point, cell = (member[:, 1:] != member[:, :-1]).nonzero(as_tuple=True)
        enters = member[point, cell + 1]
        inner = torch.where(enters, t[point, cell + 1], t[point, cell])
        outer = torch.where(enters, t[point, cell], t[point, cell + 1])
        for _ in range(11 if len(point) else 0):
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
        reach = torch.full_like(self.centre, 4.0)
        wide = torch.arange(len(reach), device=reach.device)
        for _ in range(20 if self.ranking.most_below else 0):
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
        khat, effective = [], []
        for part in blocks(len(ends), self.ranking.at_once):
            at = self.outputs.at(every[part])
            both = [self.ranking.log_weights(at.log_prob(ends[part, side, None])) for side in (0, 1)]
            lower, upper = (self.ranking.effective(each) for each in both)
            khat.append(self.ranking.khat(torch.where(upper < lower, both[1], both[0])))
            effective.append(torch.minimum(lower, upper).cpu())
        return torch.cat(khat), torch.cat(effective)


def _hull(pieces: Tensor) -> Tensor:
    return torch.stack([pieces[0, 0], pieces[-1, 1]]) if len(pieces) else torch.full((2,), torch.nan).double()
