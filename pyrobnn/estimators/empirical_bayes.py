"""Noise and prior widths found by the evidence: the weights averaged out, and the mode sought anew for each.

Reference: A Practical Bayesian Framework for Backpropagation Networks (MacKay, 1992).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, cast

import numpy as np
import pyro
import torch
from sklearn.linear_model import BayesianRidge
from torch import Tensor

from pyrobnn.core.findings import warn
from pyrobnn.estimators.wide import log_density, quiet
from pyrobnn.inference.curvature.gaussian import BlockGaussian
from pyrobnn.inference.curvature.ggn import resolved
from pyrobnn.inference.curvature.jacobian import NetworkJacobian, Root
from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.curvature.precision import tuned_model
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


def empirical_bayes(method: Any, model: BNN, x: Tensor, y: Tensor) -> Callable[..., tuple[Posterior, str]] | None:
    """How noise or widths are better found than together with the weights; None where they are not.

    Noise maximised with the weights comes out right from ten rows per weight on (at 2, 4 and 8, 90 % intervals held 73,
    82 and 88 %), unless a line leaves nothing: then it goes to zero.
    """
    likelihood = model.likelihood
    if not isinstance(method, Laplace):
        return None
    if likelihood.targets.kind == "label":
        return select_prior_width if method.tune is not None else None
    free = type(likelihood) in (HomoskedasticGaussian, StudentT) and likelihood.own.kinds["scale"] != "fixed"
    few = free and len(x) < 10 * model.num_weights
    return fit_by_evidence if few or (free and torch.le(*linear_residual_scale(model, *_tried(x, y))).any()) else None


def _tried(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    keep = torch.linspace(0, len(x) - 1, min(len(x), MAX_TRIED_ROWS), dtype=torch.float64).round().long()
    return x[keep], y[keep]


def fit_by_evidence(
    method: Laplace, model: BNN, x: Tensor, y: Tensor, options: dict[str, Any]
) -> tuple[Posterior, str]:
    """The fit whose noise and prior have the largest evidence, and that noise in words.

    Weights and noise that are maximised together fit the noise where rows are few. Where a Gram matrix takes at most
    2^27 operations, two nets climb the evidence. With more rows the modes that a climb finds are too sharp: there each
    fit has known noise. Both begin with the noise of a Bayesian linear regression, and with half of it under a prior
    four times as wide (under a narrow one a wave's mode is a constant, where the prior is tuned to nothing). Fits of
    known noise go on from the better one, with the noise that its residuals ask for and in turn with the prior that was
    tuned for it, for as long as the evidence rises.
    """
    rows = _tried(x, y)
    declared, weights = model.likelihood.own.priors.get(SCALE), model.num_weights
    bayesian = model.initial_values().keys() <= model.priors.keys()  # every weight has a prior
    linear, least = linear_residual_scale(model, *rows)
    tries: list[tuple[float, Tensor, float, Posterior]] = []
    found: list[Climb] = []

    def attempt(scale: Tensor, factor: float, init: Any = None) -> float:
        """The nats that noise and a factor on the prior's precision gain on the best so far."""
        scale = torch.maximum(scale, least)
        posterior = method.fit(_declared(model, scale, factor if method.tune else None), *rows, **options, init=init)
        if method.tune:
            posterior.meta["tuned"]["prior_precision_factor"]["all"] *= factor  # of the declared prior's
        evidence = -math.inf if posterior.log_evidence is None else posterior.log_evidence
        evidence += 0.0 if declared is None else float(declared.log_prob(scale).sum())
        tries.append((evidence, scale, factor, posterior))
        return evidence - max((each[0] for each in tries[:-1]), default=-math.inf)

    with quiet():
        if bayesian and len(x) <= max((2**27 / weights) ** 0.5, 2**27 / weights**2):
            climb = partial(_climb, x=rows[0], y=rows[1], least=least, tune=bool(method.tune))
            # the second net begins as the better climb of the first did
            tried = [(climb(model, scale=share * linear, factor=share**4), share) for share in (1.0, 0.5)]
            share = max(tried, key=lambda each: each[0][0])[1]
            tried.append((climb(model.reinitialized(1), scale=share * linear, factor=share**4), share))
            found = [each for each, _ in tried if each[0] > -math.inf]
        if found:
            _, scale, factor, values = max(found, key=itemgetter(0))
            attempt(scale, factor, init=_moved(model, values).net)
        else:
            attempt(linear, 1.0)
            if method.tune:
                attempt(linear / 2, 1 / 16)
        # powers of the ratio that the residuals ask for, at first 2, as small steps end early; 0: the tuned prior too
        steps = [] if found else [2, 1, 0] if method.tune else [2, 1]
        while steps and len(tries) < 12:
            _, scale, factor, posterior = max(tries, key=itemgetter(0))
            if not steps[0]:
                factor = posterior.meta["tuned"]["prior_precision_factor"]["all"]
            if attempt(scale * _residual_ratio(posterior, *rows) ** (steps[0] or 1), factor) < 1:
                del steps[0]
            elif not steps[0]:
                steps = [1, 0]
    _, best, _, posterior = max(tries, key=itemgetter(0))
    of = f", of {len(rows[0]):,} of {len(x):,} rows" if len(rows[0]) < len(x) else ""
    if of:
        posterior = replace(method, tune=None).fit(posterior.bnn, x, y, **options)
    else:
        warn(posterior.meta["warnings"])
    shares, num = ", ".join(f"{each:.2g}" for each in best / linear), len(found or tries)
    return posterior, f"noise {shares} times a linear model's, the best of {num} by the evidence{of}"


@pyro.validation_enabled(False)
def _climb(model: BNN, x: Tensor, y: Tensor, scale: Tensor, least: Tensor, factor: float, tune: bool) -> Climb:
    r"""Log evidence, noise (out,), factor on the prior's precision and weights: the best of a climb from there.

    Damped Gauss-Newton steps lead to the mode. Where one gains little, MacKay's updates follow, by at most a factor of
    1.7: of the noise by :func:`_squared_ratio`, of the prior's precision by γ / |θ|², θ in units of the prior.

    Reference: Gauss-Newton Approximation to Bayesian Learning (Foresee & Hagan, 1997).
    """
    problem = prepare(_declared(model, scale, None), x, y, points="free")
    if (trunk := problem.held_trunk("free")) is not None:
        problem = problem.at_head(trunk)
    density, x, y = problem.density, problem.x, problem.y
    theta, now = density.initial(problem.bnn.initial_values()), _declared(problem.bnn, scale, factor if tune else None)
    jacobian = NetworkJacobian(now, density, theta, {}, list(now.priors))
    jacobian.prefer_products(x)
    declared, damping, gained, stalled = model.likelihood.own.priors.get(SCALE), 0.1, math.inf, 0
    best: Climb = (-math.inf, scale, factor, {})

    def loss(z: Tensor) -> Tensor:
        values = density.constrain(z)
        prior = sum(each.log_prob(values[name]).sum() for name, each in now.priors.items())
        return -now.likelihood.log_prob(now.forward(values, x), y, {}).sum() - prior

    for _ in range(300):
        gradient, value = torch.func.grad_and_value(loss)(theta)
        jacobian.model, jacobian.mode, jacobian.params = now, theta, density.constrain(theta)
        prec = prior_precision(jacobian).prec
        f, white = _whitened(jacobian, x, lambda f: now.likelihood.curvature_root(f, y, {}), prec)  # noqa: B023
        slope = (gradient * prec.rsqrt()).double()
        if not bool(slope.isfinite().all() & white.gram.isfinite().all()):
            break
        values, vectors = white.left_spectrum()
        pull = vectors.T @ white.times(slope)
        left = float(slope @ slope - (pull.square() / (values + 1)).sum()) / 2
        if gained < 0.05 and left < 0.01 * len(theta):  # nats
            size = 0.5 * float((2 * math.pi / prec).log().sum() - values.log1p().sum())
            evidence = size - float(value) + (0.0 if declared is None else float(declared.log_prob(scale).sum()))
            stalled = 0 if evidence > best[0] + 0.1 else stalled + 1
            best = max(best, (evidence, scale, factor, jacobian.params), key=itemgetter(0))
            if stalled == 5:
                break
            used = (vectors.square() @ (values / (1 + values))).reshape(len(y), -1).sum(0)
            ratio = _squared_ratio(now.likelihood, y, f, {}, used)
            scale = torch.maximum(scale * ratio.clamp(1 / 1.7, 1.7).sqrt().to(scale), least)
            factor *= min(max(float(used.sum() / (theta.square() * prec).sum()), 1 / 1.7), 1.7)
            now, gained = _declared(problem.bnn, scale, factor if tune else None), math.inf
            continue
        gained = -1.0
        while gained < 0 and damping < 1e12:
            bent = slope - white.transposed_times(vectors @ (pull / (values + 1 + damping)))
            there = theta - prec.rsqrt() * (bent / (1 + damping)).to(theta)
            gained = float(value - loss(there))
            damping *= 4 if gained < 0 else 1 / 3
        theta = there if gained >= 0 else theta
    return best


class _Whitened:
    """A Jacobian (m, p) in units of likelihood and prior, as the products that its layers are.

    Of each layer ``parts`` has what is pulled back to its output (m, rows), its input in units of the prior
    (m, columns), and where its matrix lies among the p coordinates (rows, columns).
    """

    def __init__(self, parts: list[tuple[Tensor, Tensor, Tensor]], size: int):
        self.parts, self.size = parts, size
        grad, inputs, _ = parts[0]
        self.tall = len(grad) > size  # then there is one part, of one row: its input is the Jacobian
        products = [inputs.T @ inputs] if self.tall else [(grad @ grad.T) * (a @ a.T) for grad, a, _ in parts]
        self.gram = torch.stack(products).sum(0)

    def times(self, v: Tensor) -> Tensor:
        """(m,) of ``v`` (p,)."""
        return torch.stack([((inputs @ v[at].T) * grad).sum(1) for grad, inputs, at in self.parts]).sum(0)

    def transposed_times(self, u: Tensor) -> Tensor:
        """(p,) of ``u`` (m,)."""
        found = u.new_zeros(self.size)
        for grad, inputs, at in self.parts:
            found[at] = (grad * u.unsqueeze(1)).T @ inputs
        return found

    def left_spectrum(self) -> tuple[Tensor, Tensor]:
        """Squares of the singular values, and left singular vectors (m, r)."""
        values, vectors = torch.linalg.eigh(self.gram)
        if not self.tall:
            return values.clamp_min(0), vectors
        keep = resolved(values)
        return values[keep], self.parts[0][1] @ vectors[:, keep] * values[keep].rsqrt()


def _whitened(jacobian: NetworkJacobian, x: Tensor, root: Root, prec: Tensor) -> tuple[Tensor, _Whitened]:
    """Outputs (N, width), and the Jacobian's product with ``root``: as rows where no layer's factors serve."""
    scale, size = prec.rsqrt().double(), jacobian.size
    if jacobian.layers:
        f, factors = jacobian.factors(x, root)
        num, parts = factors[0].grads.shape[1], []
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
    known = copy.copy(model) if factor is None else tuned_model(model, model.priors, {"all": factor})
    scale = scale.to(model.device)
    known.likelihood = model.likelihood.like(scale)
    known.likelihood.own.declare(SCALE.rpartition(".")[2], scale if len(scale) > 1 else scale[0])
    known.priors = {name: prior for name, prior in known.priors.items() if name.startswith(NET)}
    return known


def _residual_ratio(posterior: Posterior, x: Tensor, y: Tensor) -> Tensor:
    """The factor on the noise of each output (out,) that its residuals ask for."""
    likelihood, y, f, cov, own = _at_rows(posterior, x, y)
    information = likelihood.curvature_root(f, y, own).square().sum(-1)
    used = (cov.diagonal(dim1=1, dim2=2) * information).sum(0)
    return _squared_ratio(likelihood, y, f, own, used).clamp_min(1e-8).sqrt().cpu()


def _squared_ratio(likelihood: Any, y: Tensor, f: Tensor, own: dict[str, Tensor], used: Tensor) -> Tensor:
    r"""The square of the factor on the noise (out,) that residuals at f (N, out) ask for.

    .. math:: \frac{1}{N - \gamma} \sum_n (y_n - f_n) \, \frac{\partial \log p(y_n \mid f_n)}{\partial f_n}

    which is :math:`\sum_n r_n^2 / (\sigma^2 (N - \gamma))` where y is normal. The effective number of parameters γ,
    ``used`` (out,), is the sum over rows of the variance of f times the Fisher information.
    """
    slope = torch.func.grad(lambda f: likelihood.log_prob(f, y, own).sum())(f)
    return ((y - f) * slope).sum(0) / (len(y) - used).clamp_min(0.1 * len(y))


def _at_rows(posterior: Posterior, x: Tensor, y: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Likelihood, targets, mean and covariance of f, and the likelihood's own parameters, in the model's units."""
    model, own = posterior.bnn, posterior.bnn.likelihood.own
    x, y = _standard(model, x, y)
    x, y = x.to(next(model.net.parameters())), y.to(model.device)  # a net of float32 may have data of float64
    values = {name: posterior.draws[name].mean((0, 1)) for name in (*own.priors, *own.points)}
    f, cov = (part.detach().to(y) for part in cast(Linearized, posterior.network).output_moments(x))
    return model.likelihood, y, f, cov, values


def left_out(posterior: Posterior, x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    r"""Log density (N,) of each row left out of a linearised fit, and of a linear regression.

    .. math:: y_n - f_{-n} = \frac{y_n - f_n}{1 - h_n}, \quad v_{-n} = \frac{v_n}{1 - h_n}, \quad
        h_n = \frac{v_n}{\sigma^2}
    """
    given = _at_rows(posterior, x, y)
    inputs, targets = (part.cpu().numpy() for part in (_standard(posterior.bnn, x, y)[0], given[1][:, 0]))
    line = BayesianRidge().fit(inputs, targets)
    mean, scale = line.predict(inputs, return_std=True)
    rest = 1 - np.minimum(line.alpha_ * scale**2 - 1 + 1 / len(y), 0.99)
    return _left_out(*given).cpu().numpy(), log_density((targets - mean) / rest, 1 / (rest * line.alpha_))


def _left_out(likelihood: Any, y: Tensor, f: Tensor, cov: Tensor, own: dict[str, Tensor]) -> Tensor:
    """Log density (N,) of rows left out."""
    information = likelihood.curvature_root(f, y, own).square().sum(-1)
    rest = 1 - (cov.diagonal(dim1=1, dim2=2) * information).clamp_max(0.99)
    return likelihood.log_prob(y - (y - f) / rest.sqrt(), y, own) + rest.log().sum(-1) / 2


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


def select_prior_width(
    method: Laplace, model: BNN, x: Tensor, y: Tensor, options: dict[str, Any]
) -> tuple[Posterior, str]:
    """The fit whose prior widths, one per layer, have the largest evidence, and those widths in words.

    Widths that are tuned once, at the mode of the declared prior, leave the mean where it was: underconfident where the
    classes separate, and following the labels where they do not: there the evidence has a second maximum, at a constant
    net. So each width has its own mode: narrower ones until the evidence has fallen twice in a row, then, from the
    best, those that suit the last mode, as long as it rises.
    """
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in model.priors if name.startswith(NET)))
    common = {name: value for name, value in options.items() if name != "num_draws"}
    still, search = replace(method, tune=None), method.search
    # from a mode under another prior; on all of the data L-BFGS follows it, and stays in the valley where it starts
    steps = 1 if search.batch_size is None else max(1, search.num_steps // 10)
    warm, rows = replace(still, map=replace(search, num_steps=steps)), _tried(x, y)
    few = len(rows[0]) == len(x)
    tries: list[tuple[float, dict[str, float], Posterior]] = []

    def attempt(factors: dict[str, float], start: Posterior | None = None) -> tuple[float, dict[str, float], Posterior]:
        fit, around = (still, model) if start is None else (warm, _at_mode(model, start))
        posterior = fit.fit(tuned_model(around, model.priors, factors), *rows, num_draws=1, **common)
        tries.append((cast(float, posterior.log_evidence), factors, posterior))
        return max(tries, key=itemgetter(0))

    with quiet():
        for factor in (1.0, 9.0, 81.0, 729.0):  # widths of 1, 1/3, 1/9, 1/27
            best = attempt(dict.fromkeys(layers, factor), tries[-1][2] if tries else None)
            if len(tries) > 2 and best[0] > max(each[0] for each in tries[-2:]):
                break
        if best is not tries[0]:
            best = attempt(dict.fromkeys(layers, 1 / 9))  # from a wider prior, whose mode has not shrunk to nothing
        tuning = replace(still, tune="per_layer")
        for _ in range(6):
            here = tuned_model(_at_mode(model, best[2]), model.priors, best[1])
            tuned = tuning.fit(here, *rows, init=here.net, num_draws=1, **common).meta["tuned"]
            found = tuned["prior_precision_factor"]
            new = {name: best[1][name] * found.get(name, found.get("all")) for name in layers}
            before, best = best, attempt(new, best[2])
            if best[0] < before[0] + 0.5:  # nats
                break
    factors = best[1]
    final = tuned_model(_at_mode(model, best[2]), model.priors, factors)
    posterior = (warm if few else still).fit(final, x, y, **options)
    meta = posterior.meta | {"tuned": {"prior_precision_factor": dict(factors), "noise_factor": 1.0}}
    widths = ", ".join(f"{factor**-0.5:.2g} ({name})" for name, factor in factors.items())
    words = f"its prior's scales times {widths}, the best of {len(tries)} by the evidence, each at its own mode"
    if not few:
        words += f", of {len(rows[0]):,} of {len(x):,} rows"
    if min(factors.values()) >= 81:
        words += ": the inputs say so little about the target that its prediction is nearly constant"
    return replace(posterior, meta=meta), words


def _at_mode(model: BNN, posterior: Posterior) -> BNN:
    """The model with its net where the posterior's mode is, so that a search starts there."""
    approximation = cast(BlockGaussian, posterior.approximation)
    held = {name: value[0, 0] for name, value in posterior.draws.items()}  # of weights without a prior
    return _moved(model, held | approximation.layout.constrain(approximation.centre))


def _moved(model: BNN, values: Mapping[str, Tensor]) -> BNN:
    """The model with its net at these weights, by site."""
    moved = copy.copy(model)
    moved.net = copy.deepcopy(model.net)
    weights = {name.removeprefix(NET): value for name, value in values.items() if name.startswith(NET)}
    moved.net.load_state_dict(weights, strict=False)  # which has buffers too
    return moved
