"""A climb of the evidence: noise, prior precision and weights in turn, by Gauss-Newton steps and MacKay's updates.

Reference: A Practical Bayesian Framework for Backpropagation Networks (MacKay, 1992).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import pyro
import torch
from torch import Tensor

from pyrobnn.inference.curvature.jacobian import Factors, FormedRows, NetworkJacobian, Root
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
        with_known_noise(model, scale, 1.0),
        x,
        y,
        points="free",
    )
    trunk = problem.held_trunk("free")
    if trunk is not None:
        problem = problem.at_head(trunk)
    theta = problem.density.initial(problem.bnn.initial_values())
    jacobian = NetworkJacobian(problem.bnn, problem.density, theta, {}, list(problem.bnn.priors))
    jacobian.prefer_products(problem.x)
    damping = 0.1
    best = Climb(-math.inf, scale, factor, {})
    while True:
        jacobian = copy.copy(jacobian)
        jacobian.model = with_known_noise(problem.bnn, scale, factor)
        start = _Expansion(jacobian, theta, problem.x, problem.y)
        mode, damping = _mode(start, damping)
        if mode is None:
            return best
        evidence = mode.log_evidence() + log_prior(model, scale)
        end = Climb(evidence, scale, factor, mode.params)
        if not evidence > best.evidence + 0.1:  # nats
            return max(best, end, key=attrgetter("evidence"))
        best = end
        theta = mode.theta
        noise_ratio, precision_ratio = mode.updates()
        scale = torch.maximum(scale * noise_ratio.to(scale), least_noise)
        if tune:
            factor *= precision_ratio


def _mode(expansion: _Expansion, damping: float) -> tuple[_Expansion | None, float]:
    """Where Gauss-Newton steps, damped by Nielsen's rule, gain little, None if they go on; and the last damping."""
    for _ in range(300):
        step = expansion.white.solve(expansion.slope, 1 + damping)
        candidate = expansion.at(
            expansion.theta - (expansion.prec.rsqrt() * step).to(expansion.theta)
        )
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
            if float(expansion.slope @ whole_step) < 0.02 * len(expansion.theta):
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
        self.theta = theta
        self.params = jacobian.density.constrain(theta)
        self.jacobian = copy.copy(jacobian)
        self.jacobian.mode = theta
        self.jacobian.params = self.params
        self.x = x
        self.y = y
        self.prec = prior_precision(self.jacobian).prec
        likelihood = jacobian.model.likelihood
        root = likelihood.curvature_root(y, y, {})  # of each output by itself, whatever f is
        self.f, self.white = _whitened(self.jacobian, x, lambda _: root, self.prec)
        f = self.f.clone().requires_grad_()
        fit = likelihood.log_prob(f, y, {}).sum()
        error = torch.autograd.grad(fit, f)[0] / root.diagonal(dim1=1, dim2=2)
        prior, pull = self._log_prior()
        self.slope = -self.white.transposed_times(error.flatten().double()) - pull
        self.energy = -(fit.item() + prior)

    def _log_prior(self) -> tuple[float, Tensor]:
        """The log density of the weights, and its gradient (p,) in units of the prior."""
        z = self.theta.clone().requires_grad_()
        values = self.jacobian.density.constrain(z)
        priors = self.jacobian.model.priors
        log_priors = [priors[name].log_prob(value).sum() for name, value in values.items()]
        # a uniform log density does not depend on z
        log_prior = torch.stack(log_priors).sum() + 0 * z.sum()
        gradient = torch.autograd.grad(log_prior, z)[0]
        return log_prior.item(), (gradient * self.prec.rsqrt()).double()

    def at(self, theta: Tensor) -> _Expansion:
        """The expansion around other weights."""
        return _Expansion(self.jacobian, theta, self.x, self.y)

    def log_evidence(self) -> float:
        """Of the data, by Laplace's approximation around θ."""
        half_log_det = (
            self.white.cholesky(1.0).diagonal().log().sum()
            + (self.prec / (2 * math.pi)).log().sum() / 2
        )
        return -self.energy - float(half_log_det)

    def updates(self) -> tuple[Tensor, float]:
        """MacKay's factors at a mode: on the noise (out,), and on the prior's precision."""
        used = self.white.leverages().reshape(len(self.y), -1).sum(0)
        squared = squared_ratio(self.jacobian.model.likelihood, self.y, self.f, {}, used)
        noise_ratio = squared.clamp(1 / MAX_UPDATE, MAX_UPDATE).sqrt()
        precision_ratio = float(used.sum() / (self.theta.square() * self.prec).sum())
        return noise_ratio, min(max(precision_ratio, 1 / MAX_UPDATE), MAX_UPDATE)


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
            return torch.linalg.solve_triangular(factor, jacobian.T, upper=False).square().sum(0)
        return 1 - torch.cholesky_inverse(factor).diagonal()


def _whitened(
    jacobian: NetworkJacobian,
    x: Tensor,
    root: Root,
    prec: Tensor,
) -> tuple[Tensor, _Whitened]:
    """Outputs (N, width), and the Jacobian's product with ``root``: as rows where no layer's factors serve."""
    scale = prec.rsqrt().double()
    if jacobian.layers:
        f, factors = jacobian.factors(x, root)
        parts = _products(jacobian, factors, scale)
        if parts:
            return f, _Whitened(parts, jacobian.size)
        rows = jacobian.joined(factors)
    else:
        f, rows = jacobian.rows(x, root)
    inputs = rows.flatten(0, 1).double() * scale
    every_weight = torch.arange(jacobian.size, device=rows.device).unsqueeze(0)
    return f, _Whitened([(torch.ones_like(inputs[:, :1]), inputs, every_weight)], jacobian.size)


def _products(
    jacobian: NetworkJacobian,
    factors: Sequence[Factors | FormedRows],
    scale: Tensor,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The ``parts`` of layers that are one product a row, under one prior for each input; none where some layer is not.

    None either where there are fewer weights than targets: then the rows are the smaller.
    """
    parts = []
    for layer, factor in zip(jacobian.layers, factors):
        at = jacobian.positions(layer)
        input_scale = scale[at[0]]
        if not isinstance(factor, Factors) or not factor.is_outer:
            return []
        num_columns = factor.num_columns
        is_tall = len(factor.inputs) * num_columns > jacobian.size
        if is_tall or not torch.equal(scale[at], input_scale.expand_as(at)):
            return []
        inputs = (factor.inputs.squeeze(1) * input_scale).repeat_interleave(num_columns, 0)
        parts.append((factor.grads.flatten(0, 2).double(), inputs, at))
    return parts


# -- noise that is known ---------------------------------------------------------------------------------------------


def log_prior(model: BNN, scale: Tensor) -> float:
    """Log density of noise (out,) under the prior that the model declares of it; zero where it has none."""
    declared = model.likelihood.own.priors.get(SCALE)
    return 0.0 if declared is None else float(declared.log_prob(scale).sum())


def with_known_noise(model: BNN, scale: Tensor, factor: float) -> BNN:
    """The model with known noise (out,), and a factor on its prior's precision."""
    # priors that are not normal have no precision, and the factor one
    known = copy.copy(model) if factor == 1 else tuned_model(model, model.priors, {"all": factor})
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
