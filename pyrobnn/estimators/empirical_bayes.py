"""Noise and prior widths by the evidence, of classifiers by left-out rows too, with a new search for each mode.

Reference: A Practical Bayesian Framework for Backpropagation Networks (MacKay, 1992).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import pyro
import torch
from sklearn.linear_model import BayesianRidge
from torch import Tensor

from pyrobnn.core.findings import warn
from pyrobnn.estimators.wide import gain, log_density, quiet
from pyrobnn.inference.curvature.gaussian import BlockGaussian
from pyrobnn.inference.curvature.jacobian import NetworkJacobian, Root
from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.curvature.precision import expected_derivatives, symmetric_root, tuned_model
from pyrobnn.inference.curvature.prior import prior_precision
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.laplace import Laplace
from pyrobnn.likelihoods import SCALE, HomoskedasticGaussian, StudentT
from pyrobnn.model import BNN, NET
from pyrobnn.posterior import Posterior

#: rows that widths and noise are found of, evenly spaced: several fits of so many take minutes
MAX_TRIED_ROWS = 20_000

#: log evidence, noise (out,), factor on the prior's precision, weights by site
Climb = tuple[float, Tensor, float, dict[str, Tensor]]


def empirical_bayes(
    method: Any, model: BNN, x: Tensor, y: Tensor
) -> Callable[..., tuple[Posterior, str]] | None:
    """How noise or widths are better found than together with the weights; None where they are not.

    Noise maximised with the weights comes out right from ten rows per weight on (at 2, 4 and 8, 90 % intervals held 73,
    82 and 88 %), unless a line leaves nothing: then it goes to zero.
    """
    likelihood = model.likelihood
    if not isinstance(method, Laplace):
        return None
    if likelihood.targets.kind == "label":
        return select_prior_width if method.tune is not None else None
    free = (
        type(likelihood) in (HomoskedasticGaussian, StudentT)
        and likelihood.own.kinds["scale"] != "fixed"
    )
    few = free and len(x) < 10 * model.num_weights
    return (
        fit_by_evidence
        if few or (free and torch.le(*linear_residual_scale(model, *subset(x, y))).any())
        else None
    )


def subset(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """At most MAX_TRIED_ROWS of them, evenly spaced."""
    keep = (
        torch.linspace(0, len(x) - 1, min(len(x), MAX_TRIED_ROWS), dtype=torch.float64)
        .round()
        .long()
    )
    return x[keep], y[keep]


def fit_by_evidence(
    method: Laplace, model: BNN, x: Tensor, y: Tensor, options: dict[str, Any]
) -> tuple[Posterior, str]:
    """The fit whose noise and prior have the largest evidence, and that noise in words.

    Weights and noise that are maximised together fit the noise where rows are few. Where a Gram matrix takes at most
    2^27 operations, two nets climb the evidence; with more rows each fit has known noise. Both begin with a Bayesian
    linear regression's, and with half of it under a prior four times as wide (under a narrow one a wave's mode is a
    constant). Fits go on with the noise that residuals ask for and in turn with the tuned prior, as the evidence rises.
    """
    rows = subset(x, y)
    declared = model.likelihood.own.priors.get(SCALE)
    weights = model.num_weights
    linear, least = linear_residual_scale(model, *rows)

    def climb(net: BNN, share: float) -> Climb:
        return _climb(net, *rows, share * linear, least, share**4, bool(method.tune))

    def attempt(
        scale: Tensor, factor: float, init: Any = None
    ) -> tuple[float, Tensor, float, Posterior]:
        """Log evidence of that noise and factor on the prior's precision, these two, and the posterior."""
        scale = torch.maximum(scale, least)
        posterior = method.fit(
            _declared(model, scale, factor if method.tune else None), *rows, **options, init=init
        )
        if method.tune:
            posterior.meta["tuned"]["prior_precision_factor"]["all"] *= (
                factor  # of the declared prior's
            )
        evidence = -math.inf if posterior.log_evidence is None else posterior.log_evidence
        evidence += 0.0 if declared is None else float(declared.log_prob(scale).sum())
        return evidence, scale, factor, posterior

    with quiet():
        few = len(x) <= max((2**27 / weights) ** 0.5, 2**27 / weights**2)
        few &= model.initial_values().keys() <= model.priors.keys()  # every weight has a prior
        found = [climb(model, share) for share in (1.0, 0.5) if few]
        if few:
            found.append(climb(model.reinitialized(1), 1.0 if found[0][0] >= found[1][0] else 0.5))
        if found := [each for each in found if each[0] > -math.inf]:
            _, scale, factor, values = max(found, key=itemgetter(0))
            tries = [attempt(scale, factor, init=_moved(model, values).net)]
        else:
            tries = [
                attempt(share * linear, share**4)
                for share in ((1.0, 0.5) if method.tune else (1.0,))
            ]
        # powers of the ratio that the residuals ask for, at first 2, as small steps end early; 0: the tuned prior too
        steps = [] if found else [2, 1, 0] if method.tune else [2, 1]
        while steps and len(tries) < 12:
            evidence, scale, factor, posterior = max(tries, key=itemgetter(0))
            if not steps[0]:
                factor = posterior.meta["tuned"]["prior_precision_factor"]["all"]
            tries.append(
                attempt(scale * _residual_ratio(posterior, *rows) ** (steps[0] or 1), factor)
            )
            if tries[-1][0] < evidence + 1:
                del steps[0]
            elif not steps[0]:
                steps = [1, 0]
    _, best, _, posterior = max(tries, key=itemgetter(0))
    of = f", of {len(rows[0]):,} of {len(x):,} rows" if len(rows[0]) < len(x) else ""
    if of:
        posterior = replace(method, tune=None).fit(posterior.bnn, x, y, **options)
    else:
        warn(posterior.meta["warnings"])
    shares = ", ".join(f"{each:.2g}" for each in best / linear)
    num = len(found or tries)
    return (
        posterior,
        f"noise {shares} times a linear model's, the best of {num} by the evidence{of}",
    )


@pyro.validation_enabled(False)
def _climb(
    model: BNN, x: Tensor, y: Tensor, scale: Tensor, least: Tensor, factor: float, tune: bool
) -> Climb:
    r"""Log evidence, noise (out,), factor on the prior's precision and weights: the best of a climb from there.

    At each mode follow MacKay's updates, by at most 1.7: of the noise by :func:`_squared_ratio`, of the prior's
    precision by γ / |θ|², θ in units of the prior. One that gains nothing ends it: more lead to sharper, worse modes.
    """
    problem = prepare(_declared(model, scale, None), x, y, points="free")
    if (trunk := problem.held_trunk("free")) is not None:
        problem = problem.at_head(trunk)
    x = problem.x
    y = problem.y
    declared = model.likelihood.own.priors.get(SCALE)
    theta = problem.density.initial(problem.bnn.initial_values())
    damping = 0.1
    jacobian = NetworkJacobian(problem.bnn, problem.density, theta, {}, list(problem.bnn.priors))
    jacobian.prefer_products(x)
    best: Climb = (-math.inf, scale, factor, {})
    while True:
        jacobian.model = _declared(problem.bnn, scale, factor if tune else None)
        mode, damping = _mode(jacobian, theta, x, y, damping)
        if mode is None:
            return best
        half_log_det = (
            mode.white.cholesky(1.0).diagonal().log().sum()
            + (mode.prec / (2 * math.pi)).log().sum() / 2
        )
        evidence = -mode.energy - float(half_log_det)
        evidence += 0.0 if declared is None else float(declared.log_prob(scale).sum())
        before = best[0]
        best = max(best, (evidence, scale, factor, mode.params), key=itemgetter(0))
        if not evidence > before + 0.1:  # nats
            return best
        theta = mode.theta
        used = mode.white.leverages().reshape(len(y), -1).sum(0)
        ratio = _squared_ratio(jacobian.model.likelihood, y, mode.f, {}, used)
        scale = torch.maximum(scale * ratio.clamp(1 / 1.7, 1.7).sqrt().to(scale), least)
        factor *= min(max(float(used.sum() / (theta.square() * mode.prec).sum()), 1 / 1.7), 1.7)


def _mode(
    jacobian: NetworkJacobian, theta: Tensor, x: Tensor, y: Tensor, damping: float
) -> tuple[Any, float]:
    """Where Gauss-Newton steps, damped by Nielsen's rule, gain little, None if they go on; and the last damping."""
    here = _Expansion(jacobian, theta, x, y)
    for _ in range(300):
        step = here.white.solve(here.slope, 1 + damping)
        there = _Expansion(jacobian, here.theta - (here.prec.rsqrt() * step).to(theta), x, y)
        gained = here.energy - there.energy
        hoped = float(step @ (here.slope + damping * step)) / 2
        damping *= max(1 / 3, 1 - (2 * gained / hoped - 1) ** 3) if gained >= 0 else 4
        here = there if gained >= 0 else here
        if (
            0 <= gained < 0.05 or damping > 1e12
        ):  # nats, of which a whole step may gain .01 a weight
            if float(here.slope @ here.white.solve(here.slope, 1.0)) < 0.02 * len(theta):
                return here, damping
    return None, damping


class _Expansion:
    """Minus the log joint, ``energy``, around θ: ``slope`` (p,) and ``white``, its Jacobian, in units of the prior."""

    def __init__(self, jacobian: NetworkJacobian, theta: Tensor, x: Tensor, y: Tensor):
        density = jacobian.density
        likelihood = jacobian.model.likelihood
        priors = jacobian.model.priors
        z = theta.clone().requires_grad_()
        prior = torch.stack(
            [priors[name].log_prob(v).sum() for name, v in density.constrain(z).items()]
        ).sum()
        self.theta, self.params = jacobian.mode, jacobian.params = theta, density.constrain(theta)
        self.prec = prior_precision(jacobian).prec
        root = likelihood.curvature_root(y, y, {})  # of each output by itself, whatever f is
        self.f, self.white = _whitened(jacobian, x, lambda _: root, self.prec)
        fit = likelihood.log_prob(f := self.f.clone().requires_grad_(), y, {}).sum()
        error = (torch.autograd.grad(fit, f)[0] / root.diagonal(dim1=1, dim2=2)).flatten().double()
        # a uniform log density does not depend on z
        pull = (torch.autograd.grad(prior + 0 * z.sum(), z)[0] * self.prec.rsqrt()).double()
        self.slope = -self.white.transposed_times(error) - pull
        self.energy = -(fit + prior).item()


class _Whitened:
    """A Jacobian J (m, p) in units of likelihood and prior, as the products that its layers are.

    Of each layer ``parts`` has what is pulled back to its output (m, rows), its input in units of the prior
    (m, columns), and where its matrix lies among the p coordinates (rows, columns).
    """

    def __init__(self, parts: list[tuple[Tensor, Tensor, Tensor]], size: int):
        self.parts = parts
        self.size = size
        self.tall = (
            len(parts[0][0]) > size
        )  # then there is one part, of one row: its input is the Jacobian
        products = [a.T @ a if self.tall else (grad @ grad.T) * (a @ a.T) for grad, a, _ in parts]
        self.gram = torch.stack(products).sum(0)

    def times(self, v: Tensor) -> Tensor:
        """(m,) of ``v`` (p,)."""
        return torch.stack(
            [((inputs @ v[at].T) * grad).sum(1) for grad, inputs, at in self.parts]
        ).sum(0)

    def transposed_times(self, u: Tensor) -> Tensor:
        """(p,) of ``u`` (m,)."""
        found = u.new_zeros(self.size)
        for grad, inputs, at in self.parts:
            found[at] = (grad * u.unsqueeze(1)).T @ inputs
        return found

    def cholesky(self, shift: float) -> Tensor:
        """Of J Jᵀ, or Jᵀ J where that is smaller, and ``shift``; not a number where rounding exceeds that."""
        factor, failed = torch.linalg.cholesky_ex(
            self.gram + shift * torch.eye(len(self.gram)).to(self.gram)
        )
        return factor * math.nan if failed else factor

    def solve(self, v: Tensor, shift: float) -> Tensor:
        """(JᵀJ + shift)⁻¹ v, (p,)."""
        inside = torch.cholesky_solve(
            (v if self.tall else self.times(v)).unsqueeze(1), self.cholesky(shift)
        ).squeeze(1)
        return inside if self.tall else (v - self.transposed_times(inside)) / shift

    def leverages(self) -> Tensor:
        """The diagonal of J (JᵀJ + 1)⁻¹ Jᵀ, (m,)."""
        factor = self.cholesky(1.0)
        if self.tall:
            return (
                torch.linalg.solve_triangular(factor, self.parts[0][1].T, upper=False)
                .square()
                .sum(0)
            )
        return 1 - torch.cholesky_inverse(factor).diagonal()


def _whitened(
    jacobian: NetworkJacobian, x: Tensor, root: Root, prec: Tensor
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


def _declared(model: BNN, scale: Tensor, factor: float | None) -> BNN:
    """The model with known noise (out,), and a factor on its prior's precision."""
    known = (
        copy.copy(model) if factor is None else tuned_model(model, model.priors, {"all": factor})
    )
    scale = scale.to(model.device)
    known.likelihood = model.likelihood.like(scale)
    known.likelihood.own.declare(SCALE.rpartition(".")[2], scale if len(scale) > 1 else scale[0])
    known.priors = {name: prior for name, prior in known.priors.items() if name.startswith(NET)}
    return known


def _residual_ratio(posterior: Posterior, x: Tensor, y: Tensor) -> Tensor:
    """The factor on the noise of each output (out,) that its residuals ask for."""
    likelihood, y, f, cov, root, own = _at_rows(posterior, x, y)
    return (
        _squared_ratio(likelihood, y, f, own, _leverage(cov, root).sum(0))
        .clamp_min(1e-8)
        .sqrt()
        .cpu()
    )


def _squared_ratio(
    likelihood: Any, y: Tensor, f: Tensor, own: dict[str, Tensor], used: Tensor
) -> Tensor:
    r"""The square of the factor on the noise (out,) that residuals at f (N, out) ask for.

    .. math:: \frac{1}{N - \gamma} \sum_n (y_n - f_n) \, \frac{\partial \log p(y_n \mid f_n)}{\partial f_n}

    which is :math:`\sum_n r_n^2 / (\sigma^2 (N - \gamma))` where y is normal. The effective number of parameters γ,
    ``used`` (out,), is the sum over rows of the variance of f times the Fisher information.
    """
    slope = torch.func.grad(lambda f: likelihood.log_prob(f, y, own).sum())(f)
    return ((y - f) * slope).sum(0) / (len(y) - used).clamp_min(0.1 * len(y))


def _at_rows(
    posterior: Posterior, x: Tensor, y: Tensor
) -> tuple[Any, Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Likelihood, targets, mean (N, out) and covariance of f, the curvature's root and the likelihood's parameters."""
    model = posterior.bnn
    own = posterior.bnn.likelihood.own
    x, y = _standard(model, x, y)
    # a net of float32 may have data of float64
    x = x.to(next(model.net.parameters()))
    y = y.to(model.device)
    values = {name: posterior.draws[name].mean((0, 1)) for name in (*own.priors, *own.points)}
    f, cov = (part.detach() for part in cast(Linearized, posterior.network).output_moments(x))
    if y.is_floating_point():
        f = f.to(y)
        cov = cov.to(y)
    return model.likelihood, y, f, cov, model.likelihood.curvature_root(f, y, values), values


def _leverage(cov: Tensor, root: Tensor) -> Tensor:
    """Of each row and output, (N, out)."""
    return cov.diagonal(dim1=1, dim2=2) * root.square().sum(-1)


def left_out(posterior: Posterior, x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    r"""Log density (N,) of each row left out of a linearised fit, and of a linear regression.

    .. math:: y_n - f_{-n} = \frac{y_n - f_n}{1 - h_n}, \quad v_{-n} = \frac{v_n}{1 - h_n}, \quad
        h_n = \frac{v_n}{\sigma^2}
    """
    likelihood, targets, f, cov, root, own = _at_rows(posterior, x, y)
    kept = 1 - _leverage(cov, root).clamp_max(0.99)
    ours = (
        likelihood.log_prob(targets - (targets - f) / kept.sqrt(), targets, own)
        + kept.log().sum(-1) / 2
    )
    inputs = _standard(posterior.bnn, x, y)[0].cpu().numpy()
    outputs = targets[:, 0].cpu().numpy()
    line = BayesianRidge().fit(inputs, outputs)
    mean, scale = line.predict(inputs, return_std=True)
    rest = 1 - np.minimum(line.alpha_ * scale**2 - 1 + 1 / len(y), 0.99)
    return ours.cpu().numpy(), log_density((outputs - mean) / rest, 1 / (rest * line.alpha_))


def left_out_labels(posterior: Posterior, x: Tensor, y: Tensor) -> np.ndarray:
    r"""Log density (N,) of each label under a linearised fit without its row, by 256 draws of f.

    .. math:: V_{-n} = V_n (I - \Lambda_n V_n)^{-1}, \quad f_{-n} = f_n - V_{-n} \nabla_f \log p(y_n \mid f_n)

    with covariance V and, of the likelihood, curvature :math:`\Lambda`, both at f; of a variational fit in the mean.
    """
    size = max(1, 2**16 // (1 + int(y.max())))
    found = list[Tensor]()
    for part in zip(x.split(size), y.split(size)):
        likelihood, labels, f, cov, _, own = _at_rows(posterior, *part)
        f = f.double()
        cov = cov.double()
        spread = cov * (posterior.meta["settings"]["curvature"] == "variational")
        slope, curvature = expected_derivatives(likelihood, f, spread, labels, own)
        cov = torch.linalg.solve(torch.eye(f.shape[1]).to(f) - curvature @ cov, cov, left=False)
        noise = torch.randn(256, 1, f.shape[1], 1, generator=torch.Generator().manual_seed(0)).to(f)
        draws = f + (
            symmetric_root((cov + cov.mT) / 2) @ noise - cov @ slope.unsqueeze(-1)
        ).squeeze(-1)
        found.append(likelihood.log_prob(draws, labels, own).logsumexp(0) - math.log(len(draws)))
    return torch.cat(found).cpu().numpy()


def linear_residual_scale(model: BNN, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Noise (out,) of a Bayesian linear regression of each target, in the model's units, and the least to resolve."""
    x, y = _standard(model, x, y)
    line = BayesianRidge(alpha_2=1e-12)  # the default prior of the noise hides an exact line
    found = [line.fit(x.flatten(1).numpy(), column.numpy()).alpha_ ** -0.5 for column in y.T]
    least = 1e-4 * y.std(0).clamp_min(1e-12)
    return torch.maximum(torch.tensor(found, dtype=y.dtype), least), least


def _standard(model: BNN, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    units = model.standardizer
    return (x, y) if units is None else (units.transform_x(x), units.transform_y(y))


class Width(NamedTuple):
    """What a factor on the precision of each layer's prior gives: log evidence, log densities of left-out rows (N,)."""

    evidence: float
    left_out: np.ndarray
    factors: dict[str, float]
    posterior: Posterior


def select_prior_width(
    method: Laplace, model: BNN, x: Tensor, y: Tensor, options: dict[str, Any]
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
    common = {name: value for name, value in options.items() if name != "num_draws"}
    nearest = method.structure == "full" and len(layers) == 1 and not model.likelihood.own.kinds
    nearest &= model.num_weights <= 1000  # beyond, it takes minutes
    still = replace(method, tune=None, curvature="variational" if nearest else "ggn")
    search = method.search
    # from a mode under another prior; on all of the data L-BFGS follows it, and stays in the valley where it starts
    steps = 1 if search.batch_size is None else max(1, search.num_steps // 10)
    warm = replace(still, map=replace(search, num_steps=steps))
    rows = subset(x, y)
    tries = list[Width]()

    def attempt(factors: dict[str, float], start: Width | None) -> None:
        fit, around = (still, model) if start is None else (warm, _at_mode(model, start.posterior))
        posterior = fit.fit(
            tuned_model(around, model.priors, factors), *rows, num_draws=1, **common
        )
        tries.append(
            Width(
                cast(float, posterior.log_evidence),
                left_out_labels(posterior, *rows),
                factors,
                posterior,
            )
        )

    def narrower() -> Width:
        best = (
            max(tries, key=lambda each: each.evidence),
            max(tries, key=lambda each: each.left_out.mean()),
        )
        return max(best, key=lambda each: each.factors[layers[0]])

    with quiet():
        for ladder in ([3.0**-k for k in range(7)], [3.0**k for k in range(1, 7)]):
            before = tries[0] if tries else None  # at a narrow prior's mode a net may be constant
            for factor in ladder:
                attempt(dict.fromkeys(layers, factor), before)
                before = before and tries[-1]
                if not any(narrower() is each for each in tries[-2:]):
                    break
        best = narrower()
        tuning = replace(still, curvature="ggn", tune="per_layer")
        for _ in range(6):
            here = tuned_model(_at_mode(model, best.posterior), model.priors, best.factors)
            found = tuning.fit(here, *rows, init=here.net, num_draws=1, **common).meta["tuned"]
            suited = found["prior_precision_factor"]
            attempt(
                {name: best.factors[name] * suited.get(name, suited.get("all")) for name in layers},
                best,
            )
            if (
                tries[-1].evidence < best.evidence + 0.5
                or not gain(tries[-1].left_out, best.left_out)[0]
            ):  # nats
                break
            best = tries[-1]
    final = tuned_model(_at_mode(model, best.posterior), model.priors, best.factors)
    of = ""
    if len(rows[0]) == len(x):
        options = options | {"init": final.net}  # the mode, as it is
    else:
        of = f", of {len(rows[0]):,} of {len(x):,} rows"
    posterior = still.fit(final, x, y, **options)
    meta = posterior.meta | {"tuned": {"prior_precision_factor": best.factors, "noise_factor": 1.0}}
    widths = ", ".join(f"{factor**-0.5:.2g} ({name})" for name, factor in best.factors.items())
    words = f"its prior's scales times {widths}, the best of {len(tries)} for the evidence and left-out rows{of}"
    if min(best.factors.values()) >= 81:
        words += (
            ": the inputs say so little about the target that its prediction is nearly constant"
        )
    return replace(posterior, meta=meta), words


def _at_mode(model: BNN, posterior: Posterior) -> BNN:
    """The model with its net where the posterior's mode is, so that a search starts there."""
    approximation = cast(BlockGaussian, posterior.approximation)
    held = {
        name: value[0, 0] for name, value in posterior.draws.items()
    }  # of weights without a prior
    return _moved(model, held | approximation.layout.constrain(approximation.centre))


def _moved(model: BNN, values: Mapping[str, Tensor]) -> BNN:
    """The model with its net at these weights, by site."""
    moved = copy.copy(model)
    moved.net = copy.deepcopy(model.net)
    weights = {
        name.removeprefix(NET): value for name, value in values.items() if name.startswith(NET)
    }
    moved.net.load_state_dict(weights, strict=False)  # which has buffers too
    return moved
