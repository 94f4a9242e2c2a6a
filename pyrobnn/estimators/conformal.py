"""Conformal prediction from the draws of a posterior: sets that hold a new outcome as often as they say.

Where the model is wrong, its own intervals hold too few outcomes, or too many. A conformal set asks of each candidate
outcome only whether it fits the model at least as well as a share α of the rows does; if rows and new points are
exchangeable, it holds the outcome with probability 1 − α, whatever the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.chains import MIN_DRAWS, ess
from pyrobnn.core.checks import Refused, as_tensor, check_number
from pyrobnn.diagnostics.importance import good_k, pareto_smooth
from pyrobnn.likelihoods import Likelihood
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.datatree import log_densities
from pyrobnn.wording.findings import warn

__all__ = ["ConformalInterval", "ConformalSet", "conformal_interval", "conformal_set"]

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

    def terms(self, y: Tensor) -> list[Tensor]:
        """Log of what outcomes conform by under each draw: of numbers both tails, else log p; (S, point) each."""
        if self.likelihood.task != "gaussian":
            return [self.log_prob(y)]
        loc, scale = self.likelihood.loc_scale(self.f, self.params)
        z = ((y - loc) / scale)[..., 0] * math.sqrt(0.5)
        # a tail that underflows, beyond 38 standard deviations, is as far out as any: log_ndtr takes five times as long
        return [torch.special.erfc(-z).log() - math.log(2), torch.special.erfc(z).log() - math.log(2)]


@dataclass(frozen=True, eq=False)
class Ranking:
    r"""The rank of a candidate's conformity among that of the rows.

    Conformity of row i, with the candidate (x, y) for a further row, is

    .. math:: \sigma_i = \min_k \sum_s w_s \, a_{sik}, \qquad w_s \propto b_s \, p(y \mid x, \theta_s)^t

    Args:
        rows: log a of the rows, one (S, N) for each k, see :meth:`Outputs.terms`.
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
    posterior: Posterior, train: Rows | None, calibration: Rows | None, alpha: float
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
            found.append(_add_one_in(posterior, train, alpha))
        elif calibration is None:
            raise Refused(
                f"{why}: pass calibration=(x, y), rows that the fit has not seen, or use draws of a posterior "
                "(NUTS, SVI, Laplace)"
            )
    if calibration is not None:
        rows = _of_rows(posterior, "calibration", calibration)
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


def _add_one_in(posterior: Posterior, rows: Rows, alpha: float) -> Ranking:
    terms_of_rows = _of_rows(posterior, "train", rows)
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


def _of_rows(posterior: Posterior, name: str, rows: Rows) -> list[Tensor]:
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
    found = [Outputs.of(posterior, x[part]).terms(y[part]) for part in blocks(len(y), size)]
    return [torch.cat(columns, 1) for columns in zip(*found)]


def blocks(count: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` that cover ``count``."""
    return (slice(start, start + size) for start in range(0, count, size))


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
        lower, upper: its ends (point,), in the units of y: infinite where nothing can be left out.
    """

    lower: Tensor
    upper: Tensor

    @property
    def width(self) -> Tensor:
        """Of the intervals (point,)."""
        return self.upper - self.lower

    def contains(self, y: Tensor) -> Tensor:
        """Whether the interval of each point holds its outcome y (point,) or (point, 1); (point,)."""
        y = as_tensor("y", y).reshape(-1).to(self.lower)
        if len(y) != len(self.lower):
            raise ValueError(f"'y' has {len(y)} outcomes but there are {len(self.lower)} sets")
        return (self.lower <= y) & (y <= self.upper)


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
) -> ConformalInterval:
    r"""Sets that hold a new outcome with probability 1 − α, whether or not the model is right.

    A candidate y belongs to the set at x where its rank among the N + 1 conformities of rows and candidate is above
    α (N + 1). With ``train`` (conformal Bayes) the conformities are those of the posterior to which the candidate has
    been added, by importance weights on the draws, so that no row is spent:

    .. math:: \sigma_i(y) = \sum_s w_s(y) \, a_i(\theta_s), \qquad w_s(y) \propto p(y \mid x, \theta_s)

    With ``calibration`` (split conformal) the posterior stays as it is, and the rows are held out. An outcome conforms
    by its smaller tail probability, so that intervals follow the noise of the model.

    Args:
        posterior: of a BNN with one Gaussian output.
        x: inputs (point, …) in the units of the data.
        train: (x, y), the rows of the fit. Draws of an approximation are weighted by p/q as well where Pareto's k-hat
            allows it; the notes say where not.
        calibration: (x, y), rows that the fit has not seen; beside ``train`` they are used where the weights cannot be
            trusted.
        alpha: share of the outcomes that the sets may miss, in (0, 1).
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
    likelihood = posterior.bnn.likelihood
    if likelihood.task in ("categorical", "bernoulli"):
        raise ValueError("the outcomes are classes: use pyrobnn.conformal_set")
    if likelihood.task != "gaussian":
        raise Refused(f"conformal intervals are made for Gaussian likelihoods, got {likelihood!r}")
    x = as_tensor("x", x)
    if (width := posterior.standard_function(x[:1]).shape[-1] // likelihood.targets.heads) != 1:
        raise Refused(f"conformal intervals are of one output, got {width}: fit a model for each")
    ways = rankings(posterior, train, calibration, alpha)
    return _first_trusted(ways, lambda way, notes: _interval(posterior, x, way, notes))


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
    x = as_tensor("x", x)
    if posterior.bnn.likelihood.task == "bernoulli" and posterior.standard_function(x[:1]).shape[-1] != 1:
        raise Refused("conformal sets are of one label at a time: fit a model for each output")
    ways = rankings(posterior, train, calibration, alpha)
    return _first_trusted(ways, lambda way, notes: _sets(posterior, x, way, notes))


def _first_trusted(ways: Sequence[Ranking], make: Callable[[Ranking, tuple[str, ...]], R]) -> R:
    """The result of the first way whose weights can be trusted, else of the last; its notes become warnings."""
    before: tuple[str, ...] = ()
    for way in ways:
        result = make(way, (*before, *way.notes))
        if result.trusted:
            break
        before = tuple(f"the calibration rows are used, for {note}" for note in result.notes)
    warn(result.notes, stacklevel=3)
    return result


def _interval(posterior: Posterior, x: Tensor, way: Ranking, notes: tuple[str, ...]) -> ConformalInterval:
    found, trust = [], []
    for part in blocks(len(x), max(1, CHUNK_SCALARS // (2 * len(way.rows[0])))):
        outputs = Outputs.of(posterior, x[part])
        found.append(_ends(way, outputs))
        if way.kind == "add-one-in":
            trust.append(_trust_at_ends(way, outputs, found[-1]))
    lower, upper = torch.cat(found, 1).cpu()
    units = posterior.bnn.standardizer
    if units is not None:
        lower, upper = (
            units.inverse_mean(end[:, None].to(units.y_mean.device))[:, 0] for end in (lower, upper)
        )
    return ConformalInterval(*_judged(way, trust, notes), lower, upper)


def _ends(way: Ranking, outputs: Outputs) -> Tensor:
    """Lower and upper ends (2, point) in the units of the program: outwards until outside, then by bisection."""
    loc, scale = (v[..., 0] for v in outputs.likelihood.loc_scale(outputs.f, outputs.params))
    low, centre, high = loc.quantile(torch.tensor([0.25, 0.5, 0.75]).to(loc), dim=0)
    # of the middle half of the draws: a few that have gone astray must not set the step
    spread = ((high - low).square() + scale.quantile(0.5, dim=0).square()).sqrt()
    count = len(centre)
    point = torch.arange(count, device=loc.device).repeat(2)
    step = torch.cat([-spread, spread])

    def outcome(t: Tensor, at: Tensor) -> Tensor:
        return centre[point[at]] + step[at] * t

    def inside(t: Tensor, at: Tensor) -> Tensor:
        held = []
        for part in blocks(len(at), way.at_once):
            here, y = outputs.at(point[at[part]]), outcome(t[part], at[part])[:, None]
            held.append(way.inside(here.log_prob(y), here.terms(y)))
        return torch.cat(held)

    every = torch.arange(2 * count, device=loc.device)
    inner, outer, wide = torch.zeros_like(step), torch.full_like(step, 4.0), every
    for _ in range(20 if way.most_below else 0):
        wide = wide[inside(outer[wide], wide)]
        if not len(wide):
            break
        inner[wide], outer[wide] = outer[wide], 2 * outer[wide]
    for _ in range(18 if len(wide) < 2 * count else 0):
        middle = (inner + outer) / 2
        held = inside(middle, every)
        inner, outer = torch.where(held, middle, inner), torch.where(held, outer, middle)
    ends = outcome(outer, every)
    ends[wide] = torch.inf * step[wide].sign()
    return ends.reshape(2, count)


def _trust_at_ends(way: Ranking, outputs: Outputs, ends: Tensor) -> tuple[Tensor, Tensor]:
    """k-hat and effective draws (point,) at that end of each interval where the draws are worth less."""
    ends = torch.where(ends.isfinite(), ends, outputs.f[..., 0].median(0).values)
    khat, effective = [], []
    for part in blocks(ends.shape[1], way.at_once):
        at = outputs.at(torch.arange(ends.shape[1], device=ends.device)[part])
        both = [way.log_weights(at.log_prob(end[part, None])) for end in ends]
        lower, upper = (way.effective(each) for each in both)
        khat.append(way.khat(torch.where(upper < lower, both[1], both[0])))
        effective.append(torch.minimum(lower, upper).cpu())
    return torch.cat(khat), torch.cat(effective)


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
