"""The prior's part of the posterior precision, and its widths found by the evidence or by held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution, Normal

from pyrobnn.core.checks import Refused
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import generator, seeded
from pyrobnn.inference.curvature.forms import chosen_curvature
from pyrobnn.inference.curvature.ggn import Curvature
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.curvature.mode import (
    POLISH_STEPS,
    Centre,
    ModeSearch,
    find_centre,
    in_standard_units,
)
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.method import FitRun
from pyrobnn.model.density import Site
from pyrobnn.model.fixed_row import WithFixedRow, prior_of_element
from pyrobnn.model.likelihoods.base import log_predictive

#: bound of log τ, and the points of a grid over log (τ/c) between -_BOUND and _BOUND
_BOUND = 18.0
_NUM_RATIOS = 73
#: factors on the prior precision that held-out data choose from, in equal ratios; the middle one is 1, the prior as
#: declared
_NUM_FACTORS = 25


@dataclass(frozen=True, eq=False)
class PriorPrecision:
    """Diagonal prior precision at the mode.

    Attributes: ``prec`` (p,), positive; ``mean`` (p,) of normal priors, None where some prior isn't normal; ``raised``,
        the most that an entry of −∂² log p had to be raised (0: none), at ``raised_sites``.
    """

    prec: Tensor
    mean: Tensor | None
    raised: float
    raised_sites: tuple[str, ...]

    @property
    def notes(self) -> list[Finding]:
        """That entries had to be raised."""
        if not self.raised:
            return []
        raised = {"sites": ", ".join(self.raised_sites), "raised": self.raised}
        return [Finding("prior_raised", raised)]


def prior_precision(jacobian: NetworkJacobian) -> PriorPrecision:
    r"""Diagonal of the negative Hessian of the log prior in the network's coordinates.

    Exact for normal priors. For others :math:`-\partial^2 \log p` at the mode; where that is smaller than the precision
    of a normal of the prior's interquartile range (heavy tails, the kink of a Laplace prior), that precision replaces
    it, so that the posterior is never wider than the prior; by how much is reported.

    The elements of each prior are independent, see :func:`check_elementwise`.
    """
    prec = []
    mean = []
    raised = 0.0
    raised_sites = []
    for site in jacobian.sites:
        prior = jacobian.model.priors[site.name]
        base = prior_of_element(prior)
        z = jacobian.mode[site.start : site.stop]
        if isinstance(base, Normal):
            prec.append(base.scale.to(z).expand(site.unconstrained_shape).reshape(-1) ** -2)
            mean.append(base.loc.to(z).expand(site.unconstrained_shape).reshape(-1))
            continue
        curved = _minus_second_derivative(prior, site, z)
        floor = _spread_precision(prior, site, z)
        is_low = ~(curved >= floor)
        if bool(is_low.any()):
            raised = max(raised, float((floor - curved.nan_to_num())[is_low].max()))
            raised_sites.append(site.name)
        prec.append(torch.where(is_low, floor, curved))
    all_normal = len(mean) == len(prec)
    return PriorPrecision(
        torch.cat(prec).detach(),
        torch.cat(mean) if all_normal else None,
        raised,
        tuple(raised_sites),
    )


def _minus_second_derivative(prior: Distribution, site: Site, z: Tensor) -> Tensor:
    """−∂² log p at the unconstrained values ``z`` (p,) of a site, element by element; (p,)."""

    def log_prior(u: Tensor) -> Tensor:
        shaped = u.reshape(site.unconstrained_shape)
        value = site.transform(shaped)
        return (
            prior.log_prob(value).sum() + site.transform.log_abs_det_jacobian(shaped, value).sum()
        )

    slope = torch.func.grad(log_prior)
    # elements are independent, so the gradient of the summed gradient is the diagonal
    return -torch.func.grad(lambda u: slope(u).sum())(z)


def _spread_precision(prior: Distribution, site: Site, z: Tensor) -> Tensor:
    """1/s² of the normal with the prior's interquartile range, in unconstrained space; (p,), one for each element."""
    with seeded(0, z.device):
        draws = site.transform.inv(prior.sample((1001,))).reshape(1001, -1).to(z)
    low, high = draws.quantile(torch.tensor([0.25, 0.75]).to(z), 0)
    # each element has its own quartiles, of 1001 draws: what is noisy is the floor alone
    return ((high - low) / 1.3489795).clamp_min(1e-12) ** -2  # the range of a standard normal


def check_elementwise(priors: Mapping[str, Distribution]) -> None:
    """Refuse priors (by site) whose elements depend on each other: a diagonal cannot hold them."""
    for name, prior in priors.items():
        if prior_of_element(prior).event_shape:
            raise Refused(
                f"in the prior of {name!r} elements depend on each other: use curvature='hessian'"
            )


def check_normal(
    priors: Mapping[str, Distribution], why: str = "'tune' scales", remedy: str = "leave it None"
) -> None:
    """Refuse priors (by site) that are not normal."""
    for name, prior in priors.items():
        base = prior_of_element(prior)
        if not isinstance(base, Normal):
            raise Refused(
                f"{why} normal priors; that of {name!r} is a {type(base).__name__}: {remedy}"
            )


def with_precision(name: str, prior: Distribution, factor: float) -> TorchDistributionMixin:
    """The normal prior of a site, its precision multiplied."""
    check_normal({name: prior})
    base = cast(Normal, prior_of_element(prior))
    normal = dist.Normal(base.loc, base.scale * factor**-0.5)
    if isinstance(prior, WithFixedRow):
        other_rows = normal.expand(prior.base_dist.event_shape).to_event(2)
        return WithFixedRow(other_rows, prior.insertion.number, prior.insertion.row)
    shape = prior.event_shape
    return normal.expand(shape).to_event(len(shape))


@dataclass(frozen=True, eq=False)
class Tuned:
    """Factors on the declared model.

    Attributes: ``tau`` on the prior precision, (1,) or (layers,), float64; ``c`` on the likelihood's curvature (the
        noise variance is divided by it); ``at_bound``, whether a factor ended at the edge of the search; ``held_out``:
        what cross-validation says: the ``factor`` chosen, the ``best`` of those tried, with its ``gain`` over the
        declared prior in log predictive density per held-out point and the gain's standard ``error``, and
        ``num_points`` held out. ``log_factor_error``: the standard error of log τ by random vectors; 0 where exact.
        ``gain``: nats of evidence over widths that nobody had declared; None where tuning was asked for.
    """

    tau: Tensor
    c: float = 1.0
    at_bound: bool = False
    held_out: dict[str, Any] | None = None
    log_factor_error: float = 0.0
    gain: float | None = None

    @property
    def notes(self) -> list[Finding]:
        """That a factor ended at the edge of the search, or that nobody asked for it."""
        if self.gain is not None:
            narrowed = {"share": float(self.tau[0]) ** -0.5, "gain": self.gain}
            return [Finding("prior_narrowed", narrowed)]
        if not self.at_bound:
            return []
        if self.held_out is None:
            return [Finding("tuning_at_bound")]
        return [Finding("cross_validation_at_edge", {"factor": float(self.tau)})]


@dataclass(frozen=True, eq=False)
class _Evidence:
    """The log marginal likelihood as a function of log τ and log c, up to a constant.

    Attributes: the whitened ``curvature``; ``sizes`` and ``distances`` (layers,), the number of weights and the squared
        distance of the mode from the prior mean; ``residual``: Σ r²/σ² and the number of terms, None for fixed noise.
    """

    curvature: Curvature
    sizes: Tensor
    distances: Tensor
    residual: tuple[float, int] | None

    @classmethod
    def of(
        cls,
        curvature: Curvature,
        deviation: Tensor,
        residual: tuple[float, int] | None,
    ) -> _Evidence:
        """That of a curvature, with the arguments of :func:`maximize_evidence`."""
        num_layers = len(curvature.group_names)
        distances = torch.zeros(
            num_layers,
            dtype=torch.float64,
            device=curvature.index.device,
        )
        distances.index_add_(0, curvature.group, deviation.double())
        sizes = torch.bincount(curvature.group, minlength=num_layers).to(distances)
        return cls(curvature, sizes, distances, residual)

    def loss(self, log_tau: Tensor, log_c: Tensor) -> Tensor:
        """Minus the log evidence for log τ (1,) or (layers,) and log c (), scalar; differentiable."""
        squares, count = self.residual or (0.0, 0)
        tau = log_tau.exp()
        c = log_c.exp()
        prior = (self.sizes * log_tau - tau * self.distances).sum()
        return -0.5 * (count * log_c - c * squares + prior - self.curvature.log_det(tau, c))

    def factors(self, log_rho: float) -> tuple[Tensor, Tensor]:
        """log τ (1,) and the best log c () for a common ratio ρ = τ / c."""
        c = 1.0
        if self.residual is not None:
            squares, count = self.residual
            c = count / (squares + math.exp(log_rho) * float(self.distances.sum()))
        log_c = self.distances.new_tensor(c).log()
        return (log_c + log_rho)[None], log_c


def maximize_evidence(
    curvature: Curvature,
    deviation: Tensor,
    residual: tuple[float, int] | None,
    per_layer: bool,
) -> Tuned:
    r"""Maximise the log marginal likelihood over prior factors τ and, for learned noise, the likelihood factor c.

    .. math:: \log Z = \tfrac{n}{2} \log c - \tfrac{c}{2} \textstyle\sum r^2/\sigma^2 - \tfrac12 \sum_g \tau_g q_g
        + \tfrac12 \sum_g p_g \log \tau_g - \tfrac12 \log \det(\mathrm{diag}(\tau) + c \tilde H) + \mathrm{const}

    For one τ, the determinant depends on ρ = τ/c only, and given ρ the best c is n / (Σ r²/σ² + ρ q): one dimension is
    left whatever is tuned. The mode itself is left where it is.

    Args:
        curvature: whitened curvature at the mode.
        deviation: squared distance of the mode from the prior mean in prior standard deviations, (p,).
        residual: Σ r²/σ² at the present noise and n, the number of terms, where the noise is tuned.
        per_layer: one τ per layer, by L-BFGS from the best common factor.
    """
    evidence = _Evidence.of(curvature, deviation, residual)
    log_rho = _best_ratio(evidence)
    if per_layer and len(evidence.sizes) > 1:
        return _tuned_per_layer(evidence, *evidence.factors(log_rho))
    log_tau, log_c = evidence.factors(log_rho)
    return Tuned(log_tau.exp(), float(log_c.exp()), abs(log_rho) > _BOUND - 1e-3)


def maximize_width(curvature: Curvature, deviation: Tensor) -> Tuned:
    """As :func:`maximize_evidence` over one τ alone, the noise as it is, with the ``gain`` over τ = 1."""
    evidence = _Evidence.of(curvature, deviation, None)
    log_tau, log_c = evidence.factors(_best_ratio(evidence))
    declared = evidence.loss(torch.zeros_like(log_tau), log_c)
    gain = declared - evidence.loss(log_tau, log_c)
    return Tuned(log_tau.exp(), gain=float(gain))


def _best_ratio(evidence: _Evidence) -> float:
    """The log ρ of the highest evidence: on a grid, then between the neighbours of its best point."""
    from scipy import optimize

    def loss(log_rho: float) -> float:
        return float(evidence.loss(*evidence.factors(log_rho)))

    grid = torch.linspace(-_BOUND, _BOUND, _NUM_RATIOS).tolist()
    best = min(range(_NUM_RATIOS), key=lambda number: loss(grid[number]))
    optimum = optimize.minimize_scalar(
        loss,
        bounds=(grid[max(best - 1, 0)], grid[min(best + 1, _NUM_RATIOS - 1)]),
        method="bounded",
        options={"xatol": 1e-8},
    )
    return float(optimum.x)


def _tuned_per_layer(evidence: _Evidence, log_tau: Tensor, log_c: Tensor) -> Tuned:
    """One factor per layer, by L-BFGS from a common log τ (1,), and log c () where the noise is tuned."""
    theta = torch.cat([log_tau.expand(len(evidence.sizes)), log_c[None]]).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [theta],
        max_iter=100,
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        bounded = theta[:-1].clamp(-_BOUND, _BOUND)
        value = evidence.loss(bounded, theta[-1] if evidence.residual else log_c)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    log_tau = theta[:-1].detach()
    log_c = theta[-1].detach()
    at_bound = bool((log_tau.abs() >= _BOUND).any())
    return Tuned(log_tau.clamp(-_BOUND, _BOUND).exp(), float(log_c.exp()), at_bound)


#: (τ, x, y) → log predictive density (N,) of points
_Score = Callable[[Tensor, Tensor, Tensor], Tensor]


def hold_out(
    search: ModeSearch,
    centre: Centre,
    structure: str,
    centre_given: bool,
    seed: int,
) -> Tuned:
    """Search for a mode on four fifths of the data, and judge widths around it by the fifth that it has not seen.

    One fifth after another, until 500 rows have been judged, which tell a width to 3 %: of a few residuals that happen
    to be small, the best posterior has no width at all. A row counts with the lower of two log predictive densities,
    around the mode that has not seen it and around ``centre``: a centre that fits rows it has seen worse than one that
    has not will do no better on new ones.

    Where the user gave the centre (``centre_given``), the search starts from a freshly initialised net: the given one
    may know all of the data. Errors of another net do not justify a narrower posterior than is declared: no factor
    above 1 is tried. Otherwise the search starts where the fit did, and 25 factors from 10⁻⁴ to 10⁴ are tried.

    Args:
        search: for a mode; its data are replaced by the training part.
        centre: of the fit, with all of the data.
        structure: of the curvature.
        centre_given: whether the user gave the centre.
        seed: of the split into fifths, of a fresh net, and of each search.

    Raises:
        ValueError: too few data.
    """
    problem = centre.problem
    num_data = len(problem.x)
    shuffled = torch.randperm(num_data, generator=generator(seed)).to(problem.device)
    if num_data < 4:
        raise ValueError(f"cross-validation needs at least 4 data points, got {num_data}")
    fold_size = max(2, num_data // 5)  # a gain has an error from two points on
    num_folds = min(5, -(-500 // fold_size))
    model = in_standard_units(centre.bnn.reinitialized(seed) if centre_given else centre.bnn)
    grid = torch.logspace(
        -4,
        4,
        _NUM_FACTORS,
        dtype=torch.float64,
        device=problem.device,
    )
    if centre_given:
        grid = grid[: _NUM_FACTORS // 2 + 1]  # to the declared prior
    scores = []
    score_seen = _score(structure, centre)
    for fold in shuffled.split(fold_size)[:num_folds]:
        training = shuffled[~torch.isin(shuffled, fold)]
        source = model, problem.x[training], problem.y[training]
        fold_search = replace(
            search,
            source=source,
            num_steps=POLISH_STEPS,
        )
        score_unseen = _score(structure, _fold_centre(fold_search, centre, seed))
        lower = _lower_score(score_unseen, score_seen)
        scores.append(torch.stack([lower(tau, problem.x[fold], problem.y[fold]) for tau in grid]))
    return choose_factor(grid, torch.cat(scores, 1))


def _lower_score(score_unseen: _Score, score_seen: _Score) -> _Score:
    """The lower of the scores by two centres, point by point."""
    return lambda tau, x, y: torch.minimum(score_unseen(tau, x, y), score_seen(tau, x, y))


def _fold_centre(search: ModeSearch, centre: Centre, seed: int) -> Centre:
    """The centre of the same sites on the data of the search, which are part of those of ``centre``."""
    problem = prepare(
        *search.source,
        points="free",
        device=centre.problem.device,
    )
    return find_centre(search, problem, centre.names, FitRun(1, seed))


def choose_factor(grid: Tensor, scores: Tensor) -> Tuned:
    """The mildest factor that the best does not beat by more than the standard error of their difference.

    Mildest is what lies nearest to 1, the declared prior, by steps of the grid.

    Args:
        grid: factors (factor,), ascending, in equal ratios.
        scores: log predictive densities (factor, point) of held-out points.
    """
    declared = int((grid - 1).abs().argmin())
    num_points = scores.shape[1]
    best = int(scores.mean(1).argmax())
    # of each factor, by point: how far it is behind the best
    deficits = scores[best] - scores
    errors = deficits.std(1) / math.sqrt(num_points)
    candidates = (deficits.mean(1) <= errors).nonzero().squeeze(1).tolist()
    chosen = min(candidates, key=lambda number: abs(number - declared))
    held_out = {
        "factor": float(grid[chosen]),
        "best": float(grid[best]),
        "gain": float(deficits[declared].mean()),
        "error": float(deficits[declared].std()) / math.sqrt(num_points),
        "num_points": num_points,
    }
    return Tuned(
        grid[chosen : chosen + 1],
        # of the full grid: that of a given centre ends in its middle, the declared prior, which is no edge
        at_bound=chosen in (0, _NUM_FACTORS - 1),
        held_out=held_out,
    )


def _score(structure: str, centre: Centre) -> _Score:
    """The score of points by the linearised network, with the curvature at the centre."""
    jacobian = centre.jacobian()
    prec = prior_precision(jacobian).prec
    curvature = chosen_curvature(jacobian, centre, structure, prec).curvature

    def score(tau: Tensor, x: Tensor, y: Tensor) -> Tensor:
        f, cov = Linearized(jacobian, curvature.blocks(tau.reshape(1), 1.0)).output_moments(x)
        return log_predictive(centre.bnn.likelihood, f, cov, y, centre.values)

    return score
