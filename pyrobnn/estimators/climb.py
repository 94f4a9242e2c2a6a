"""A climb of the evidence: noise, prior precision and weights in turn, by Gauss-Newton steps and MacKay's updates.

Reference: A Practical Bayesian Framework for Backpropagation Networks (MacKay, 1992).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

import pyro
import torch
from torch import Tensor

from pyrobnn.inference.curvature.jacobian import Factors, NetworkJacobian, Root
from pyrobnn.inference.curvature.precision import tuned_model
from pyrobnn.inference.curvature.prior import prior_precision
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.model import BNN, NET
from pyrobnn.model.likelihoods.base import SCALE, Likelihood

#: the most by which an update of a climb changes the variance of the noise, or the precision of the prior
MAX_UPDATE = 1.7


class Climb(NamedTuple):
    """Where a climb ended: log evidence, noise (out,), factor on the prior's precision, and weights by site."""

    evidence: float
    scale: Tensor
    factor: float
    weights: Mapping[str, Tensor]


@pyro.validation_enabled(False)
def climb(
    model: BNN,
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    least_noise: Tensor,
    factor: float,
    tune: bool,
) -> Climb:
    r"""Log evidence, noise (out,), factor on the prior's precision and weights: the best of a climb from there.

    At each mode follow MacKay's updates, by at most 1.7: of the noise by :func:`squared_ratio`, of the prior's
    precision by γ / |θ|², θ in units of the prior. One that gains nothing ends it: more lead to sharper, worse modes.
    """
    problem = prepare(
        with_known_noise(model, scale, None),
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
        jacobian = copy.copy(jacobian)
        jacobian.model = with_known_noise(problem.bnn, scale, factor if tune else None)
        mode, damping = _mode(jacobian, theta, x, y, damping)
        if mode is None:
            return best
        evidence = mode.log_evidence() + log_prior(model, scale)
        before = best.evidence
        best = max(
            best,
            Climb(evidence, scale, factor, mode.params),
            key=attrgetter("evidence"),
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
    squared = squared_ratio(likelihood, y, mode.f, {}, used)
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
        jacobian = copy.copy(jacobian)
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
        num = factors[0].num_columns
        parts = []
        for layer, factor in zip(jacobian.layers, factors):
            at = jacobian.positions(layer)
            by_column = torch.equal(scale[at], scale[at[:1]].expand_as(at))
            if not isinstance(factor, Factors) or not factor.is_outer:
                break
            if len(x) * num > size or not by_column:
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


# -- noise that is known ---------------------------------------------------------------------------------------------


def log_prior(model: BNN, scale: Tensor) -> float:
    """Log density of noise (out,) under the prior that the model declares of it; zero where it has none."""
    declared = model.likelihood.own.priors.get(SCALE)
    return 0.0 if declared is None else float(declared.log_prob(scale).sum())


def with_known_noise(model: BNN, scale: Tensor, factor: float | None) -> BNN:
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


def squared_ratio(
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
