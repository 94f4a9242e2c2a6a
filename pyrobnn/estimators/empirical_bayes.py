"""Noise and prior widths found by the evidence: the weights averaged out, and the mode sought anew for each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from sklearn.linear_model import BayesianRidge
from torch import Tensor

from pyrobnn.estimators.prior_width import MAX_TRIED_ROWS, select_prior_width
from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.point_methods import MAP
from pyrobnn.likelihoods import SCALE, HeteroskedasticGaussian, HomoskedasticGaussian, StudentT
from pyrobnn.likelihoods.base import Sampled, Targets
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.wording.findings import Finding, as_json, warn

Fit = Callable[[Laplace, BNN, Tensor, Tensor, dict[str, Any]], tuple[Posterior, str]]


def empirical_bayes(method: Any, model: BNN, num_data: int) -> Fit | None:
    """How noise or widths are better found than together with the weights; None where they are not.

    From ten rows per weight on, noise that is maximised with the weights comes out right (on a weak signal, 90 %
    intervals held 73, 82 and 88 % at 2, 4 and 8).

    Warns:
        UserWarning: rows are few, and the likelihood is none whose noise is known to be found so.
    """
    likelihood = model.likelihood
    if not isinstance(method, Laplace):
        return None
    if likelihood.targets.kind == "label":
        return select_prior_width if method.tune is not None else None
    free = likelihood.own.priors or likelihood.own.points or likelihood.targets.heads > 1
    if not free or num_data >= 10 * model.num_weights:
        return None
    if type(likelihood) is HeteroskedasticGaussian:
        return fit_noise_em
    if type(likelihood) in (HomoskedasticGaussian, StudentT) and likelihood.own.kinds["scale"] != "fixed":
        return fit_by_evidence
    warnings.warn(
        f"{num_data:,} rows are few for {model.num_weights:,} weights, and the noise of {type(likelihood).__name__} is "
        "maximised with them: it may come out too small, and the intervals too narrow. Use a smaller net, or "
        "predict_interval(X, conformal=(X, y)) with rows held out",
        UserWarning,
        stacklevel=4,
    )
    return None


@dataclass(frozen=True, eq=False)
class _Try:
    """A fit, and the noise (out,) of its model."""

    posterior: Posterior
    scale: Tensor
    evidence: float


def fit_by_evidence(
    method: Laplace, model: BNN, x: Tensor, y: Tensor, options: dict[str, Any]
) -> tuple[Posterior, str]:
    """The fit whose noise has the largest evidence, and that noise in words.

    Weights and noise that are maximised together fit the noise where there are few rows per weight. So each fit is
    followed by one, from the start, under the noise of each output that its residuals ask for, for as long as the
    evidence rises; the first has what a Bayesian linear regression leaves. Of more than 20,000 rows so many are tried,
    evenly spaced, and the last fit is of all.

    Args:
        method: with a ``log_evidence``.
        model: with one noise per output.
        x, y: (N, feature) and (N, out), in the units of the data.
        options: of ``method.fit``.

    Reference: A Practical Bayesian Framework for Backpropagation Networks (MacKay, 1992).
    """
    keep = torch.linspace(0, len(x) - 1, min(len(x), MAX_TRIED_ROWS), dtype=torch.float64).round().long()
    rows = x[keep], y[keep]
    likelihood = model.likelihood
    scale = linear = linear_residual_scale(model, *rows)
    tries: list[_Try] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # those of the one that is kept follow below
        power = 2  # over-relaxed at first: steps become small before the evidence is highest
        while power and len(tries) < 12:
            posterior = method.fit(_under(model, scale), *rows, **options)
            evidence = -math.inf if posterior.log_evidence is None else posterior.log_evidence
            if SCALE in likelihood.own.priors:
                evidence += float(likelihood.own.priors[SCALE].log_prob(scale).sum())
            if tries and evidence < max(each.evidence for each in tries) + 1:
                power //= 2
            tries.append(_Try(posterior, scale, evidence))
            best = max(tries, key=lambda each: each.evidence)
            scale = best.scale * _residual_ratio(best.posterior, *rows) ** power
    posterior = best.posterior
    if len(keep) < len(x):
        posterior = replace(method, tune=None).fit(posterior.bnn, x, y, **options)
    else:
        warn(posterior.meta["warnings"], stacklevel=4)
    of = "" if len(keep) == len(x) else f", of {len(keep):,} of {len(x):,} rows"
    shares = ", ".join(f"{each:.2g}" for each in best.scale / linear)
    return (
        posterior,
        f"noise {shares} of what a linear model leaves, the best of {len(tries)} by the evidence{of}",
    )


def _under(model: BNN, scale: Tensor) -> BNN:
    """The model with known noise (out,)."""
    scale = scale if len(scale) > 1 else scale[0]
    likelihood = model.likelihood.like(scale)
    likelihood.own.declare(SCALE.rpartition(".")[2], scale)
    return BNN(model.net, model.prior, likelihood, standardizer=model.standardizer)


def _residual_ratio(posterior: Posterior, x: Tensor, y: Tensor) -> Tensor:
    r"""The factor on the noise of each output (out,) that its residuals ask for.

    .. math:: \frac{1}{N - \gamma} \sum_n (y_n - f_n) \, \frac{\partial \log p(y_n \mid f_n)}{\partial f_n}

    is its square, which is :math:`\sum_n r_n^2 / (\sigma^2 (N - \gamma))` where y is normal; γ is the sum over rows of
    the variance of f times the Fisher information, the effective number of parameters.
    """
    model, likelihood = posterior.bnn, posterior.bnn.likelihood
    x, y = (part.to(model.device) for part in _inside(model, x, y))
    known = (*likelihood.own.priors, *likelihood.own.points)
    own = {name: value.mean((0, 1)) for name, value in posterior.draws.items() if name in known}
    f, cov = (part.detach().to(y) for part in cast(Linearized, posterior.network).output_moments(x))
    slope = torch.func.grad(lambda f: likelihood.log_prob(f, y, own).sum())(f)
    information = likelihood.curvature_root(f, y, own).square().sum(-1)
    effective_parameters = (cov.diagonal(dim1=1, dim2=2) * information).sum(0)
    left = (len(y) - effective_parameters).clamp_min(0.1 * len(y))
    return (((y - f) * slope).sum(0) / left).clamp_min(1e-8).sqrt().cpu()


def linear_residual_scale(model: BNN, x: Tensor, y: Tensor) -> Tensor:
    """Standard deviation (out,) of what a Bayesian linear regression leaves of each target, in the model's units."""
    x, y = _inside(model, x, y)
    inputs = x.flatten(1).numpy()
    found = [BayesianRidge().fit(inputs, column.numpy()).alpha_ ** -0.5 for column in y.T]
    return torch.tensor(found, dtype=y.dtype).clamp_min(1e-4 * y.std(0).clamp_min(1e-12))


def _inside(model: BNN, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    units = model.standardizer
    return (x, y) if units is None else (units.transform_x(x), units.transform_y(y))


class Averaged(HeteroskedasticGaussian):
    r"""The mean under a noise that is held, and the noise under squared errors that are held.

    .. math:: -\frac{(y - f)^2}{2 s^2} - \log\sigma - \frac{q}{2 \sigma^2} - \tfrac12 \log 2\pi

    y is (N, 3·out): the targets, s and q. With :math:`s = \sigma` and :math:`q = ((y - f)^2 + v) e^{2w}` of the round
    before, v the variance of the mean and w that of :math:`\log\sigma`, it is the Gaussian log density averaged over
    both: residuals of a mean that follows the data are not taken for the noise.
    """

    targets = Targets(heads=2, linear_mean=True)

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return y.to(dtype)

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return Sampled(self, f, params, 3 * (f.shape[-1] // 2))

    def log_prob(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        y, held, square = y.chunk(3, -1)
        loc, scale = self.loc_scale(f, params)
        misfit = ((y - loc) / held).square() + square / scale.square()
        return -(scale.log() + 0.5 * misfit + 0.5 * math.log(2 * math.pi)).sum(-1)


def fit_noise_em(
    method: Laplace, model: BNN, x: Tensor, y: Tensor, options: dict[str, Any]
) -> tuple[Posterior, str]:
    """The fit of a net that gives its noise, at the mode of the log density averaged over the Gaussian around it.

    A search for the mode and Laplace's approximation around it take turns: each search knows how uncertain the Gaussian
    before it left the mean and the noise of each row, and has the prior's width that suited it, where this is tuned.
    The first starts with the noise that a linear model leaves, so that it goes down from there.

    Args:
        method: Laplace, linearised, and tuned where the priors are normal.
        model: with a :class:`pyrobnn.likelihoods.HeteroskedasticGaussian`.
        x, y: (N, feature) and (N, out), in the units of the data.
        options: of ``method.fit``.

    Reference: Bayesian Interpolation (MacKay, 1992), whose noise is the residuals' over N − γ: the fixed point of these
    rounds where the model is linear; Variational Heteroscedastic Gaussian Process Regression (Lázaro-Gredilla &
    Titsias, 2011).
    """
    likelihood = cast(HeteroskedasticGaussian, model.likelihood)
    start = linear_residual_scale(model, x, y)
    x_in, y_in = _inside(model, x, y)
    common = {name: value for name, value in options.items() if name != "num_draws"}
    search = method.map or MAP(num_steps=method.num_steps, compile=method.compile)
    rounds, factor = BNN(model.net, model.prior, Averaged(likelihood.min_scale)), 1.0
    priors = rounds.priors
    held = torch.cat([start.expand_as(y), start.square().expand_as(y)], 1)
    log_scale, moved, count = start.log().expand_as(y), math.inf, 0
    # until log σ moves by less than .05 on average
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what holds of the last fit follows below
        while count < 3 or (moved >= 0.05 and count < 8):
            fresh = BNN(model.net, model.prior, Averaged(likelihood.min_scale))
            fresh.priors = priors
            data = x_in, torch.cat([y_in, held], 1)
            mode = search.fit(fresh, *data, **common)
            found = method.fit(fresh, *data, init=mode, num_draws=1, **common)
            priors, count = found.bnn.priors, count + 1
            if method.tune is not None:
                factor *= found.meta["tuned"]["prior_precision_factor"]["all"]
            square, var, scale, log_var = moments(found, x_in, y_in)
            raised = (square + var) * (2 * log_var).clamp_max(2.0).exp()
            held = torch.cat([scale, raised], 1)
            moved, log_scale = float((scale.log() - log_scale).abs().mean()), scale.log()
        final = BNN(model.net, model.prior, likelihood, standardizer=model.standardizer)
        final.priors = priors
        # the mode is that of the averaged density: what a fit finds wrong with it as a mode of the other says nothing
        posterior = replace(method, tune=None).fit(final, x, y, init=mode, **options)
    notes = [Finding("noise_still_moving", {"moved": moved, "rounds": count})] if moved >= 0.05 else []
    warn(notes, stacklevel=4)
    meta = posterior.meta | {"warnings": [str(note) for note in notes], "findings": as_json(notes)}
    if method.tune is not None:
        meta["tuned"] = {"prior_precision_factor": {"all": factor}, "noise_factor": 1.0}
    words = f"mean and noise found in {count} rounds, each with the other's uncertainty averaged out"
    return replace(posterior, meta=meta), words


def moments(posterior: Posterior, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Squared residuals, the variance of the mean, σ and the variance of its logarithm, each (N, out)."""
    device = posterior.bnn.device
    # as the method that is chosen makes it
    f, cov = (part.to(y) for part in cast(Linearized, posterior.network).output_moments(x.to(device)))
    loc, scale = posterior.bnn.likelihood.loc_scale(f, {})
    var, raw_var = cov.diagonal(dim1=1, dim2=2).chunk(2, -1)
    log_var = raw_var * (f.chunk(2, -1)[1].sigmoid() / scale).square()
    return (y - loc).square(), var, scale, log_var
