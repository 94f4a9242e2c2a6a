"""Numbers of which some are only known to lie beyond a limit: censored responses and survival times."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_choice, check_finite
from pyrobnn.likelihoods.base import Likelihood, Parameter, Sampled, Targets


class _Censored(Likelihood):
    """One output; y is (N, 2): the value, and 1 where it was observed or 0 where it is the limit of censoring."""

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        name = type(self).__name__
        if y.dim() != 2 or y.shape[1] != 2:
            raise ValueError(
                f"'y' has shape {tuple(y.shape)} but {name} expects (N, 2): the value, and 1 where it was observed or "
                "0 where it was censored there; torch.stack([time, event], 1)"
            )
        check_finite("y", y)
        event = y[:, 1]
        wrong = event[(event != 0) & (event != 1)]
        if len(wrong):
            raise ValueError(
                f"the second column of 'y' must be 1 (observed) or 0 (censored) for {name}, got {wrong[0]:g}"
            )
        return torch.cat([super().target(y[:, :1], width, dtype), event[:, None].to(dtype)], 1)

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return Sampled(self, f, params, 2)

    def log_prob(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        density, beyond = self._logs(f, y[..., :1], params)
        return torch.where(y[..., 1] == 1, density[..., 0], beyond[..., 0])

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """P(Y ≤ y) twice where y was observed (or has no second column); else from there to the end where Y lies."""
        below = self._below(f.double(), y[..., :1], params)
        if y.shape[-1] == 1:
            return below, below
        known = y[..., 1:] == 1
        if self.targets.censoring == "right":
            return below, torch.where(known, below, 1.0)
        return torch.where(known, below, 0.0), below

    def _logs(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log density at y, and log probability of the side where a censored Y lies."""
        raise NotImplementedError

    def _below(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """P(Y ≤ y)."""
        raise NotImplementedError


class CensoredNormal(_Censored):
    r"""Gaussian noise of which what lies beyond a limit is not seen: the tobit model, :math:`y \sim N(f(x), \sigma^2)`.

    Targets are (N, 2): the value, and 1 where it was observed or 0 where all that is known is that it lies beyond. A
    structured array or DataFrame of a number and a truth value is taken too, as of scikit-survival and lifelines.

    Args:
        scale: σ, as of :class:`HomoskedasticGaussian`.
        censoring: ``"right"``: unseen values lie above what is given; ``"left"``: below.

    Predictions are of the value itself, seen or not. A standardizer takes limits for values; it sets units, no more.

    Reference: Estimation of relationships for limited dependent variables (Tobin, 1958).

    Example:
        >>> CensoredNormal(0.5, censoring="left")
        CensoredNormal(fixed scale, left)
    """

    task = "censored_normal"

    def __init__(self, scale: Parameter, censoring: str = "right"):
        super().__init__()
        side = check_choice("censoring", censoring, ("right", "left"))
        self.targets = Targets(linear_mean=True, censoring=side, measured="affine")
        self.own.declare("scale", scale)

    def _logs(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        scale = self.own.value("scale", f, params)
        z = (y - f) / scale
        return -0.5 * z.square() - scale.log() - 0.5 * math.log(2 * math.pi), log_ndtr(self._out(z))

    def _below(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        return torch.special.ndtr((y - f) / self.own.value("scale", f, params))

    def _out(self, z: Tensor) -> Tensor:
        return -z if self.targets.censoring == "right" else z

    def draw(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        return self.targets.observed(f + self.own.value("scale", f, params) * torch.randn_like(f))

    def mean_variance(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return f, self.own.value("scale", f, params).square().expand(f.shape)

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r"""Of a value that is seen, :math:`H = 1/\sigma^2`."""
        return (1 / self.own.value("scale", f, params)).expand(f.shape).unsqueeze(-1)

    def curvature_root(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r"""Of a censored row the observed information :math:`h (h - z) / \sigma^2`, with the hazard h at its limit."""
        scale = self.own.value("scale", f, params)
        z = -self._out((y[:, :1] - f) / scale)
        hazard = (-0.5 * z.square() - 0.5 * math.log(2 * math.pi) - log_ndtr(-z)).exp()
        share = (hazard * (hazard - z)).clamp(0.0, 1.0)
        return (torch.where(y[:, 1:] == 1, 1.0, share).sqrt() / scale).unsqueeze(-1)

    def _options(self) -> list[str]:
        return [str(self.targets.censoring)]


class Weibull(_Censored):
    r"""Times until an event, right-censored where it had not happened: :math:`P(T > t) = e^{-(t / \lambda(x))^k}`.

    The net returns :math:`\log \lambda`: an input multiplies time (accelerated failure) and, k being one, the hazard.

    Targets are (N, 2): the time, and 1 where the event was observed or 0 where the row was censored then; or a
    structured array or DataFrame, as of :class:`CensoredNormal`.

    Args:
        shape: k; above one the hazard grows with time. A number is fixed; ``"learned"`` is a point parameter; a
            distribution on positive numbers is a prior, and k is inferred as the site ``likelihood.shape``.

    Predictions are of the time itself; ``mean`` and ``var`` are those of uncensored times. A standardizer divides times
    by their scale and takes no mean from them.

    Example:
        >>> import pyro.distributions as dist
        >>> Weibull(dist.LogNormal(0.0, 0.5))
        Weibull(inferred shape)
    """

    task = "weibull"
    targets = Targets(censoring="right", measured="scale")

    def __init__(self, shape: Parameter = "learned"):
        super().__init__()
        self.own.declare("shape", shape)

    def _value_error(self, y: Tensor) -> str | None:
        wrong = y[y <= 0]
        return f"times in 'y' must be positive for Weibull, got {wrong[0]:g}" if len(wrong) else None

    def _logs(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        shape = self.own.value("shape", f, params)
        u = shape * (y.log() - f)
        return shape.log() + u - y.log() - u.exp(), -u.exp()

    def _below(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        return -torch.expm1(-(self.own.value("shape", f, params) * (y.clamp_min(0).log() - f)).exp())

    def draw(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        event = torch.empty_like(f).exponential_()
        return self.targets.observed((f + event.log() / self.own.value("shape", f, params)).exp())

    def mean_variance(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        shape = self.own.value("shape", f, params)
        first, second = (torch.lgamma(1 + k / shape).exp() for k in (1, 2))
        return f.exp() * first, (2 * f).exp() * (second - first.square())

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r"""Of a time that is seen, :math:`H = k^2`."""
        return self.own.value("shape", f, params).expand(f.shape).unsqueeze(-1)

    def curvature_root(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r"""The observed information :math:`k^2 (t / \lambda)^k`, of events and censored rows alike.

        Its mean is the expected one whatever cut the rows short; that of events alone, :math:`k^2`, would be too large,
        for they are the rows of short times.
        """
        shape = self.own.value("shape", f, params)
        return (shape * (shape * (y[:, :1].log() - f) / 2).exp()).unsqueeze(-1)


def log_ndtr(z: Tensor) -> Tensor:
    """Log of the normal distribution function; torch's own has no batching rule."""
    low, high = z.clamp_max(-1.0), z.clamp_min(-1.0)
    lower = (torch.special.erfcx(-low * math.sqrt(0.5)) / 2).log() - 0.5 * low.square()
    return torch.where(z < -1.0, lower, (torch.special.erfc(-high * math.sqrt(0.5)) / 2).log())
