"""Noise and prior widths by the evidence, of classifiers by left-out rows too, with a new search for each mode.

Reference: A Practical Bayesian Framework for Backpropagation Networks (MacKay, 1992).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import pyro
import torch
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn

from pyrobnn.core.findings import warn
from pyrobnn.core.matrices import symmetric_root
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.estimators.comparison import gain, log_density, quiet
from pyrobnn.estimators.fits import RunOptions
from pyrobnn.inference.curvature.gaussian import BlockGaussian
from pyrobnn.inference.curvature.jacobian import NetworkJacobian, Root
from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.curvature.nearest import expected_derivatives
from pyrobnn.inference.curvature.precision import tuned_model
from pyrobnn.inference.curvature.prior import prior_precision
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.method import Method
from pyrobnn.model import BNN, NET
from pyrobnn.model.likelihoods.base import SCALE, Likelihood
from pyrobnn.model.likelihoods.catalogue import HomoskedasticGaussian, StudentT
from pyrobnn.posterior import Posterior

#: rows that widths and noise are found of, evenly spaced: several fits of so many take minutes
MAX_TRIED_ROWS = 20_000
#: the most by which an update of a climb changes the variance of the noise, or the precision of the prior
MAX_UPDATE = 1.7


class Climb(NamedTuple):
    """Where a climb ended: log evidence, noise (out,), factor on the prior's precision, and weights by site."""

    evidence: float
    scale: Tensor
    factor: float
    weights: Mapping[str, Tensor]


class Attempt(NamedTuple):
    """A fit with known noise: its log evidence, that noise (out,), and the factor on the declared prior's precision."""

    evidence: float
    scale: Tensor
    factor: float
    posterior: Posterior


class Width(NamedTuple):
    """What a factor on the precision of each layer's prior gives: log evidence, log densities of left-out rows (N,)."""

    evidence: float
    left_out: np.ndarray
    factors: dict[str, float]
    posterior: Posterior


def empirical_bayes(
    method: Method, model: BNN, x: Tensor, y: Tensor
) -> Callable[..., tuple[Posterior, str]] | None:
    """How noise or widths are better found than together with the weights; None where they are not.

    Noise maximised with the weights comes out right from ten rows per weight on (at 2, 4 and 8, 90 % intervals held 73,
    82 and 88 %), unless a line leaves nothing: then it goes to zero.

    Returns: a function (method, model, x, y, options) → (posterior, words), or None.
    """
    likelihood = model.likelihood
    if not isinstance(method, Laplace):
        return None
    if likelihood.targets.kind == "label":
        return select_prior_width if method.tune is not None else None
    if type(likelihood) not in (HomoskedasticGaussian, StudentT):
        return None
    if likelihood.own.kinds["scale"] == "fixed":
        return None
    if len(x) < 10 * model.num_weights:
        return fit_by_evidence
    scale, least_noise = linear_residual_scale(model, *subset(x, y))
    return fit_by_evidence if torch.le(scale, least_noise).any() else None


def subset(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """At most MAX_TRIED_ROWS of them, evenly spaced."""
    count = min(len(x), MAX_TRIED_ROWS)
    keep = evenly_spaced(len(x), count, torch.float64)
    return x[keep], y[keep]


# -- noise by the evidence --------------------------------------------------------------------------------------------


def fit_by_evidence(
    method: Laplace,
    model: BNN,
    x: Tensor,
    y: Tensor,
    options: RunOptions,
) -> tuple[Posterior, str]:
    """The fit whose noise and prior have the largest evidence, and that noise in words.

    Weights and noise that are maximised together fit the noise where rows are few. Where a Gram matrix takes at most
    2^27 operations, two nets climb the evidence; with more rows each fit has known noise. Both begin with a Bayesian
    linear regression's, and with half of it under a prior four times as wide (under a narrow one a wave's mode is a
    constant). Fits go on with the noise that residuals ask for and in turn with the tuned prior, as the evidence rises.
    """
    rows = subset(x, y)
    linear_noise, least_noise = linear_residual_scale(model, *rows)
    search = _NoiseSearch(method, model, rows, options, linear_noise, least_noise)
    with quiet():
        climbs = search.climbs() if _can_climb(model, len(x)) else []
        if climbs:
            top = max(climbs, key=_evidence)
            tries = [search.attempt(top.scale, top.factor, _moved(model, top.weights).net)]
        else:
            # half the noise and a sixteenth of the precision: a prior four times as wide
            shares = (1.0, 0.5) if method.tune else (1.0,)
            tries = search.improved(
                [search.attempt(share * linear_noise, share**4) for share in shares]
            )
    best = max(tries, key=_evidence)
    posterior = best.posterior
    subset_words = ""
    if len(rows[0]) < len(x):
        subset_words = f", of {len(rows[0]):,} of {len(x):,} rows"
        posterior = replace(method, tune=None).fit(
            posterior.bnn,
            x,
            y,
            **options,
        )
    else:
        warn(posterior.meta["warnings"])
    ratios = ", ".join(f"{ratio:.2g}" for ratio in best.scale / linear_noise)
    num = len(climbs or tries)
    return (
        posterior,
        f"noise {ratios} times a linear model's, the best of {num} by the evidence{subset_words}",
    )


def _evidence(fit: Climb | Attempt | Width) -> float:
    return fit.evidence


def _can_climb(model: BNN, num_rows: int) -> bool:
    """Whether a Gram matrix takes at most 2^27 operations, and every weight has a prior."""
    weights = model.num_weights
    small = num_rows <= max((2**27 / weights) ** 0.5, 2**27 / weights**2)
    return small and model.initial_values().keys() <= model.priors.keys()


@dataclass(frozen=True, eq=False)
class _NoiseSearch:
    """Fits of the same rows, each with known noise.

    ``linear_noise`` is that of a linear model and ``least_noise`` the least to resolve, both (out,).
    """

    method: Laplace
    model: BNN
    rows: tuple[Tensor, Tensor]
    options: RunOptions
    linear_noise: Tensor
    least_noise: Tensor

    def climbs(self) -> list[Climb]:
        """Climbs of two nets, those that ended somewhere: of the second net from the better start of the first."""
        climbs = [self.climb(self.model, share) for share in (1.0, 0.5)]
        share = 1.0 if climbs[0].evidence >= climbs[1].evidence else 0.5
        climbs.append(self.climb(self.model.reinitialized(1), share))
        return [climb for climb in climbs if climb.evidence > -math.inf]

    def climb(self, net: BNN, share: float) -> Climb:
        tune = bool(self.method.tune)
        return _climb(net, *self.rows, share * self.linear_noise, self.least_noise, share**4, tune)

    def attempt(
        self,
        scale: Tensor,
        factor: float,
        init: nn.Module | None = None,
    ) -> Attempt:
        """The fit with that noise, and with that factor on the precision of the declared prior."""
        scale = torch.maximum(scale, self.least_noise)
        known = _with_known_noise(self.model, scale, factor if self.method.tune else None)
        posterior = self.method.fit(
            known,
            *self.rows,
            **self.options,
            init=init,
        )
        if self.method.tune:
            # of the declared prior's
            posterior.meta["tuned"]["prior_precision_factor"]["all"] *= factor
        evidence = -math.inf if posterior.log_evidence is None else posterior.log_evidence
        evidence += _log_prior(self.model, scale)
        return Attempt(evidence, scale, factor, posterior)

    def improved(self, tries: list[Attempt]) -> list[Attempt]:
        """These and others, each from the best so far, with the noise that its residuals ask for."""
        tries = list(tries)
        # stages: the noise by the squared ratio that the residuals ask for, as small steps end early; by the ratio; and
        # with the tuned prior too. One that gains under a nat ends; a gain by the prior reopens the last two
        stages = ["squared ratio", "ratio"]
        if self.method.tune:
            stages.append("prior")
        while stages and len(tries) < 12:
            best = max(tries, key=_evidence)
            stage = stages[0]
            factor = best.factor
            if stage == "prior":
                factor = best.posterior.meta["tuned"]["prior_precision_factor"]["all"]
            power = 2 if stage == "squared ratio" else 1
            ratio = _residual_ratio(best.posterior, *self.rows)
            tries.append(self.attempt(best.scale * ratio**power, factor))
            if tries[-1].evidence < best.evidence + 1:
                del stages[0]
            elif stage == "prior":
                stages = ["ratio", "prior"]
        return tries


def _log_prior(model: BNN, scale: Tensor) -> float:
    """Log density of noise (out,) under the prior that the model declares of it; zero where it has none."""
    declared = model.likelihood.own.priors.get(SCALE)
    return 0.0 if declared is None else float(declared.log_prob(scale).sum())


def _with_known_noise(model: BNN, scale: Tensor, factor: float | None) -> BNN:
    """The model with known noise (out,), and a factor on its prior's precision."""
    if factor is None:
        known = copy.copy(model)
    else:
        known = tuned_model(model, model.priors, {"all": factor})
    scale = scale.to(model.device)
    known.likelihood = model.likelihood.like(scale)
    known.likelihood.own.declare(SCALE.rpartition(".")[2], scale if len(scale) > 1 else scale[0])
    known.priors = {name: prior for name, prior in known.priors.items() if name.startswith(NET)}
    return known


def _residual_ratio(posterior: Posterior, x: Tensor, y: Tensor) -> Tensor:
    """The factor on the noise of each output (out,) that its residuals ask for."""
    fit = _at_rows(posterior, x, y)
    used = _leverage(fit.cov, fit.root).sum(0)
    squared = _squared_ratio(fit.likelihood, fit.targets, fit.f, fit.params, used)
    return squared.clamp_min(1e-8).sqrt().cpu()


def _squared_ratio(
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    params: Mapping[str, Tensor],
    used: Tensor,
) -> Tensor:
    r"""The square of the factor on the noise (out,) that residuals at f (N, out) ask for.

    .. math:: \frac{1}{N - \gamma} \sum_n (y_n - f_n) \, \frac{\partial \log p(y_n \mid f_n)}{\partial f_n}

    which is :math:`\sum_n r_n^2 / (\sigma^2 (N - \gamma))` where y is normal. The effective number of parameters γ,
    ``used`` (out,), is the sum over rows of the variance of f times the Fisher information.
    """
    slope = torch.func.grad(lambda f: likelihood.log_prob(f, y, params).sum())(f)
    return ((y - f) * slope).sum(0) / (len(y) - used).clamp_min(0.1 * len(y))


def linear_residual_scale(model: BNN, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Noise (out,) of a Bayesian linear regression of each target, in the model's units, and the least to resolve."""
    x, y = _standard(model, x, y)
    regression = BayesianRidge(alpha_2=1e-12)  # the default prior of the noise hides an exact line
    inputs = x.flatten(1).numpy()
    scales = [regression.fit(inputs, column.numpy()).alpha_ ** -0.5 for column in y.T]
    least_noise = 1e-4 * y.std(0).clamp_min(1e-12)
    return torch.maximum(torch.tensor(scales, dtype=y.dtype), least_noise), least_noise


# -- a climb of the evidence ------------------------------------------------------------------------------------------


@pyro.validation_enabled(False)
def _climb(
    model: BNN,
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    least_noise: Tensor,
    factor: float,
    tune: bool,
) -> Climb:
    r"""Log evidence, noise (out,), factor on the prior's precision and weights: the best of a climb from there.

    At each mode follow MacKay's updates, by at most 1.7: of the noise by :func:`_squared_ratio`, of the prior's
    precision by γ / |θ|², θ in units of the prior. One that gains nothing ends it: more lead to sharper, worse modes.
    """
    problem = prepare(
        _with_known_noise(model, scale, None),
        x,
        y,
        points="free",
    )
    trunk = problem.held_trunk("free")
    if trunk is not None:
        problem = problem.at_head(trunk)
    x = problem.x
    y = problem.y
    theta = problem.density.initial(problem.bnn.initial_values())
    damping = 0.1
    jacobian = NetworkJacobian(problem.bnn, problem.density, theta, {}, list(problem.bnn.priors))
    jacobian.prefer_products(x)
    best = Climb(-math.inf, scale, factor, {})
    while True:
        jacobian.model = _with_known_noise(problem.bnn, scale, factor if tune else None)
        mode, damping = _mode(jacobian, theta, x, y, damping)
        if mode is None:
            return best
        evidence = mode.log_evidence() + _log_prior(model, scale)
        before = best.evidence
        best = max(
            best,
            Climb(evidence, scale, factor, mode.params),
            key=_evidence,
        )
        if not evidence > before + 0.1:  # nats
            return best
        theta = mode.theta
        ratio, precision_ratio = _evidence_update(mode, jacobian.model.likelihood, y)
        scale = torch.maximum(scale * ratio.to(scale), least_noise)
        factor *= precision_ratio


def _evidence_update(mode: _Expansion, likelihood: Likelihood, y: Tensor) -> tuple[Tensor, float]:
    """MacKay's factors at a mode: on the noise (out,), and on the prior's precision."""
    used = mode.white.leverages().reshape(len(y), -1).sum(0)
    squared = _squared_ratio(likelihood, y, mode.f, {}, used)
    noise_ratio = squared.clamp(1 / MAX_UPDATE, MAX_UPDATE).sqrt()
    precision_ratio = float(used.sum() / (mode.theta.square() * mode.prec).sum())
    return noise_ratio, min(max(precision_ratio, 1 / MAX_UPDATE), MAX_UPDATE)


def _mode(
    jacobian: NetworkJacobian,
    theta: Tensor,
    x: Tensor,
    y: Tensor,
    damping: float,
) -> tuple[_Expansion | None, float]:
    """Where Gauss-Newton steps, damped by Nielsen's rule, gain little, None if they go on; and the last damping."""
    expansion = _Expansion(jacobian, theta, x, y)
    for _ in range(300):
        step = expansion.white.solve(expansion.slope, 1 + damping)
        moved = expansion.theta - (expansion.prec.rsqrt() * step).to(theta)
        candidate = _Expansion(jacobian, moved, x, y)
        gained = expansion.energy - candidate.energy
        hoped = float(step @ (expansion.slope + damping * step)) / 2
        if gained >= 0:
            damping *= max(1 / 3, 1 - (2 * gained / hoped - 1) ** 3)
            expansion = candidate
        else:
            damping *= 4
        # nats, of which a whole step may gain .01 a weight
        if 0 <= gained < 0.05 or damping > 1e12:
            whole_step = expansion.white.solve(expansion.slope, 1.0)
            if float(expansion.slope @ whole_step) < 0.02 * len(theta):
                return expansion, damping
    return None, damping


class _Expansion:
    """Minus the log joint, ``energy``, around θ: ``slope`` (p,) and ``white``, its Jacobian, in units of the prior."""

    def __init__(
        self,
        jacobian: NetworkJacobian,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
    ):
        density = jacobian.density
        likelihood = jacobian.model.likelihood
        priors = jacobian.model.priors
        z = theta.clone().requires_grad_()
        log_priors = [priors[name].log_prob(v).sum() for name, v in density.constrain(z).items()]
        prior = torch.stack(log_priors).sum()
        self.theta = theta
        self.params = density.constrain(theta)
        # the Jacobian is taken at these weights
        jacobian.mode = self.theta
        jacobian.params = self.params
        self.prec = prior_precision(jacobian).prec
        root = likelihood.curvature_root(y, y, {})  # of each output by itself, whatever f is
        self.f, self.white = _whitened(jacobian, x, lambda _: root, self.prec)
        f = self.f.clone().requires_grad_()
        fit = likelihood.log_prob(f, y, {}).sum()
        error = (torch.autograd.grad(fit, f)[0] / root.diagonal(dim1=1, dim2=2)).flatten().double()
        # a uniform log density does not depend on z
        pull = (torch.autograd.grad(prior + 0 * z.sum(), z)[0] * self.prec.rsqrt()).double()
        self.slope = -self.white.transposed_times(error) - pull
        self.energy = -(fit + prior).item()

    def log_evidence(self) -> float:
        """Of the data, by Laplace's approximation around θ."""
        half_log_det = (
            self.white.cholesky(1.0).diagonal().log().sum()
            + (self.prec / (2 * math.pi)).log().sum() / 2
        )
        return -self.energy - float(half_log_det)


class _Whitened:
    """A Jacobian J (m, p) in units of likelihood and prior, as the products that its layers are.

    Of each layer ``parts`` has what is pulled back to its output (m, rows), its input in units of the prior
    (m, columns), and where its matrix lies among the p coordinates (rows, columns).
    """

    def __init__(self, parts: list[tuple[Tensor, Tensor, Tensor]], size: int):
        self.parts = parts
        self.size = size
        # then there is one part, of one row: its input is the Jacobian
        self.tall = len(parts[0][0]) > size
        if self.tall:
            grams = [inputs.T @ inputs for _, inputs, _ in parts]
        else:
            grams = [(grad @ grad.T) * (inputs @ inputs.T) for grad, inputs, _ in parts]
        self.gram = torch.stack(grams).sum(0)

    def times(self, v: Tensor) -> Tensor:
        """(m,) of ``v`` (p,)."""
        products = [((inputs @ v[at].T) * grad).sum(1) for grad, inputs, at in self.parts]
        return torch.stack(products).sum(0)

    def transposed_times(self, u: Tensor) -> Tensor:
        """(p,) of ``u`` (m,)."""
        product = u.new_zeros(self.size)
        for grad, inputs, at in self.parts:
            product[at] = (grad * u.unsqueeze(1)).T @ inputs
        return product

    def cholesky(self, shift: float) -> Tensor:
        """Of J Jᵀ, or Jᵀ J where that is smaller, and ``shift``; not a number where rounding exceeds that."""
        shifted = self.gram + shift * torch.eye(len(self.gram)).to(self.gram)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        return factor * math.nan if failed else factor

    def solve(self, v: Tensor, shift: float) -> Tensor:
        """(JᵀJ + shift)⁻¹ v, (p,)."""
        projected = v if self.tall else self.times(v)
        inside = torch.cholesky_solve(projected.unsqueeze(1), self.cholesky(shift)).squeeze(1)
        return inside if self.tall else (v - self.transposed_times(inside)) / shift

    def leverages(self) -> Tensor:
        """The diagonal of J (JᵀJ + 1)⁻¹ Jᵀ, (m,)."""
        factor = self.cholesky(1.0)
        if self.tall:
            jacobian = self.parts[0][1]
            return (
                torch.linalg.solve_triangular(
                    factor,
                    jacobian.T,
                    upper=False,
                )
                .square()
                .sum(0)
            )
        return 1 - torch.cholesky_inverse(factor).diagonal()


def _whitened(
    jacobian: NetworkJacobian,
    x: Tensor,
    root: Root,
    prec: Tensor,
) -> tuple[Tensor, _Whitened]:
    """Outputs (N, width), and the Jacobian's product with ``root``: as rows where no layer's factors serve."""
    scale = prec.rsqrt().double()
    size = jacobian.size
    if jacobian.layers:
        f, factors = jacobian.factors(x, root)
        num = factors[0].grads.shape[1]
        parts = []
        for layer, factor in zip(jacobian.layers, factors):
            at = jacobian.positions(layer)
            by_column = torch.equal(scale[at], scale[at[:1]].expand_as(at))
            if factor.inputs.shape[1] > 1 or len(x) * num > size or not by_column:
                break
            inputs = (factor.inputs.squeeze(1) * scale[at[0]]).repeat_interleave(num, 0)
            parts.append((factor.grads.flatten(0, 2).double(), inputs, at))
        else:
            return f, _Whitened(parts, size)
        rows = jacobian.joined(factors)
    else:
        f, rows = jacobian.rows(x, root)
    rows = rows.flatten(0, 1).double() * scale
    at = torch.arange(size, device=rows.device).unsqueeze(0)
    return f, _Whitened([(torch.ones_like(rows[:, :1]), rows, at)], size)


# -- left-out rows ----------------------------------------------------------------------------------------------------


class _RowsFit(NamedTuple):
    """A fit at rows: likelihood, targets, mean (N, out) and covariance of f, the curvature's root there.

    ``params`` are the means of the likelihood's own parameters, by site.
    """

    likelihood: Likelihood
    targets: Tensor
    f: Tensor
    cov: Tensor
    root: Tensor
    params: dict[str, Tensor]


def _at_rows(posterior: Posterior, x: Tensor, y: Tensor) -> _RowsFit:
    model = posterior.bnn
    likelihood = model.likelihood
    x, y = _standard(model, x, y)
    # a net of float32 may have data of float64
    x = x.to(next(model.net.parameters()))
    y = y.to(model.device)
    names = (*likelihood.own.priors, *likelihood.own.points)
    params = {name: posterior.draws[name].mean((0, 1)) for name in names}
    f, cov = cast(Linearized, posterior.network).output_moments(x)
    f = f.detach()
    cov = cov.detach()
    if y.is_floating_point():
        f = f.to(y)
        cov = cov.to(y)
    return _RowsFit(likelihood, y, f, cov, likelihood.curvature_root(f, y, params), params)


def _standard(model: BNN, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    units = model.standardizer
    if units is None:
        return x, y
    return units.transform_x(x), units.transform_y(y)


def _leverage(cov: Tensor, root: Tensor) -> Tensor:
    """Of each row and output, (N, out)."""
    return cov.diagonal(dim1=1, dim2=2) * root.square().sum(-1)


def left_out(posterior: Posterior, x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    r"""Log density (N,) of each row left out of a linearised fit, and of a linear regression.

    .. math:: y_n - f_{-n} = \frac{y_n - f_n}{1 - h_n}, \quad v_{-n} = \frac{v_n}{1 - h_n}, \quad
        h_n = \frac{v_n}{\sigma^2}
    """
    likelihood, targets, f, cov, root, params = _at_rows(posterior, x, y)
    unexplained = 1 - _leverage(cov, root).clamp_max(0.99)
    without_row = targets - (targets - f) / unexplained.sqrt()
    ours = likelihood.log_prob(without_row, targets, params) + unexplained.log().sum(-1) / 2
    inputs = _standard(posterior.bnn, x, y)[0].cpu().numpy()
    return ours.cpu().numpy(), _left_out_of_line(inputs, targets[:, 0].cpu().numpy())


def _left_out_of_line(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Log density (N,) of each of the outputs (N,) left out of a Bayesian linear regression on inputs (N, feature)."""
    regression = BayesianRidge().fit(inputs, outputs)
    mean, scale = regression.predict(inputs, return_std=True)
    slack = 1 - np.minimum(regression.alpha_ * scale**2 - 1 + 1 / len(outputs), 0.99)
    return log_density((outputs - mean) / slack, 1 / (slack * regression.alpha_))


def left_out_labels(posterior: Posterior, x: Tensor, y: Tensor) -> np.ndarray:
    r"""Log density (N,) of each label under a linearised fit without its row, by 256 draws of f.

    .. math:: V_{-n} = V_n (I - \Lambda_n V_n)^{-1}, \quad f_{-n} = f_n - V_{-n} \nabla_f \log p(y_n \mid f_n)

    with covariance V and, of the likelihood, curvature :math:`\Lambda`, both at f; of a variational fit in the mean.
    """
    size = max(1, 2**16 // (1 + int(y.max())))
    variational = posterior.meta["settings"]["curvature"] == "variational"
    densities = []
    for inputs, targets in zip(x.split(size), y.split(size)):
        densities.append(_label_densities(_at_rows(posterior, inputs, targets), variational))
    return torch.cat(densities).cpu().numpy()


def _label_densities(fit: _RowsFit, variational: bool) -> Tensor:
    """Log density (N,) of each label of a fit at rows without its row."""
    f = fit.f.double()
    cov = fit.cov.double()
    slope, curvature = expected_derivatives(
        fit.likelihood, f, cov * variational, fit.targets, fit.params
    )
    identity = torch.eye(f.shape[1]).to(f)
    cov = torch.linalg.solve(
        identity - curvature @ cov,
        cov,
        left=False,
    )
    noise = torch.randn(
        256,
        1,
        f.shape[1],
        1,
        generator=torch.Generator().manual_seed(0),
    ).to(f)
    deviation = symmetric_root((cov + cov.mT) / 2) @ noise - cov @ slope.unsqueeze(-1)
    draws = f + deviation.squeeze(-1)
    mean_likelihood = fit.likelihood.log_prob(draws, fit.targets, fit.params).logsumexp(0)
    return mean_likelihood - math.log(len(draws))


# -- prior widths -----------------------------------------------------------------------------------------------------


def select_prior_width(
    method: Laplace,
    model: BNN,
    x: Tensor,
    y: Tensor,
    options: RunOptions,
) -> tuple[Posterior, str]:
    """The fit with the prior widths, one per layer, that evidence and left-out labels prefer; and these in words.

    Each width has its own mode: widths tuned at the declared prior's mode leave the mean where it was, underconfident
    where the classes separate, and following the labels where they do not. One width for all layers is tried first,
    wider and then narrower; of the evidence's best and the left-out labels' best the narrower is taken: with wide
    priors a net has learned its labels, and its features know the left-out row, too. Then each layer's width is updated
    as suits the last mode, as long as both criteria improve.

    A small linear model has the Gaussian nearest to its posterior. A net does not: where it has learned its labels its
    linearisation is overconfident, and the curvature at the mode makes up for that.
    """
    layers = list(
        dict.fromkeys(name.rpartition(".")[0] for name in model.priors if name.startswith(NET))
    )
    nearest = (
        method.structure in ("auto", "full") and len(layers) == 1 and not model.likelihood.own.kinds
    )
    nearest &= model.num_weights <= 1000  # beyond, it takes minutes
    still = replace(
        method,
        tune=None,
        curvature="variational" if nearest else "ggn",
    )
    rows = subset(x, y)
    search = _WidthSearch(model, rows, options, layers, still)
    with quiet():
        search.try_common_factors()
        best = search.tune_layers(search.narrower())
    final = search.at_mode_of(best)
    subset_words = ""
    start = None
    if len(rows[0]) == len(x):
        start = final.net  # the mode, as it is
    else:
        subset_words = f", of {len(rows[0]):,} of {len(x):,} rows"
    posterior = still.fit(final, x, y, init=start, **options)
    meta = posterior.meta | {"tuned": {"prior_precision_factor": best.factors, "noise_factor": 1.0}}
    words = _words_of_widths(best.factors, len(search.tries), subset_words)
    return replace(posterior, meta=meta), words


def _words_of_widths(factors: Mapping[str, float], num: int, subset_words: str) -> str:
    """The factors on each layer's prior, the best of ``num``; and what very narrow priors say of the inputs."""
    widths = ", ".join(f"{factor**-0.5:.2g} ({name})" for name, factor in factors.items())
    words = f"its prior's scales times {widths}, the best of {num} for the evidence and left-out rows{subset_words}"
    if min(factors.values()) >= 81:
        words += (
            ": the inputs say so little about the target that its prediction is nearly constant"
        )
    return words


class _WidthSearch:
    """Fits of the same rows, by the method ``still``, with several factors on the precision of each layer's prior."""

    def __init__(
        self,
        model: BNN,
        rows: tuple[Tensor, Tensor],
        options: RunOptions,
        layers: Sequence[str],
        still: Laplace,
    ):
        self.model = model
        self.rows = rows
        self.layers = layers
        self.still = still
        self.common = RunOptions(**options)
        self.common["num_draws"] = 1
        search = still.search
        # from a mode under another prior; on all of the data L-BFGS follows it, and stays in the valley where it starts
        steps = 1 if search.batch_size is None else max(1, search.num_steps // 10)
        self.warm = replace(still, map=replace(search, num_steps=steps))
        self.tries = list[Width]()

    def at_mode_of(self, width: Width) -> BNN:
        """The model at the mode of a fit, with its prior."""
        return tuned_model(_at_mode(self.model, width.posterior), self.model.priors, width.factors)

    def attempt(self, factors: dict[str, float], start: Width | None) -> Width:
        """The fit with these factors, from the mode of another fit if one is given."""
        if start is None:
            method = self.still
            around = self.model
        else:
            method = self.warm
            around = _at_mode(self.model, start.posterior)
        model = tuned_model(around, self.model.priors, factors)
        posterior = method.fit(
            model,
            *self.rows,
            **self.common,
        )
        evidence = cast(float, posterior.log_evidence)
        width = Width(evidence, left_out_labels(posterior, *self.rows), factors, posterior)
        self.tries.append(width)
        return width

    def narrower(self) -> Width:
        """Of the fits that evidence and left-out labels prefer the one of the narrower prior."""
        by_evidence = max(self.tries, key=_evidence)
        by_labels = max(self.tries, key=lambda width: width.left_out.mean())
        return max(
            by_evidence,
            by_labels,
            key=lambda width: width.factors[self.layers[0]],
        )

    def try_common_factors(self) -> None:
        """Factors that all layers share: from one on wider priors, then narrower ones."""
        for ladder in ([3.0**-k for k in range(7)], [3.0**k for k in range(1, 7)]):
            # at a narrow prior's mode a net may be constant
            before = self.tries[0] if self.tries else None
            for factor in ladder:
                width = self.attempt(dict.fromkeys(self.layers, factor), before)
                if before is not None:
                    before = width
                best = self.narrower()
                if not any(best is recent for recent in self.tries[-2:]):
                    break

    def tune_layers(self, best: Width) -> Width:
        """The last of at most six updates of each layer's factor that improve both criteria."""
        tuning = replace(
            self.still,
            curvature="ggn",
            tune="per_layer",
        )
        for _ in range(6):
            model = self.at_mode_of(best)
            fit = tuning.fit(
                model,
                *self.rows,
                init=model.net,
                **self.common,
            )
            suited = fit.meta["tuned"]["prior_precision_factor"]
            factors = {
                name: best.factors[name] * suited.get(name, suited.get("all"))
                for name in self.layers
            }
            width = self.attempt(factors, best)
            gained = gain(width.left_out, best.left_out)[0]
            if width.evidence < best.evidence + 0.5 or not gained:  # nats
                break
            best = width
        return best


def _at_mode(model: BNN, posterior: Posterior) -> BNN:
    """The model with its net where the posterior's mode is, so that a search starts there."""
    approximation = cast(BlockGaussian, posterior.approximation)
    # of weights without a prior
    weights = {name: value[0, 0] for name, value in posterior.draws.items()}
    return _moved(model, weights | approximation.layout.constrain(approximation.centre))


def _moved(model: BNN, values: Mapping[str, Tensor]) -> BNN:
    """The model with its net at these weights, by site."""
    moved = copy.copy(model)
    moved.net = copy.deepcopy(model.net)
    weights = {
        name.removeprefix(NET): value for name, value in values.items() if name.startswith(NET)
    }
    moved.net.load_state_dict(weights, strict=False)  # which has buffers too
    return moved
