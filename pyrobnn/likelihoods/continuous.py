"""Numbers on a continuous scale: Gaussian noise, heavy tails, several modes, two bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_count, check_number
from pyrobnn.likelihoods.base import Likelihood, Parameter, Sampled, Targets, by_scipy


class _Gaussian(Likelihood):
    task = "gaussian"

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return dist.Normal(*self.loc_scale(f, params)).to_event(1)

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loc, scale = self.loc_scale(f.double(), params)
        below = torch.special.ndtr((y - loc) / scale)
        return below, below

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r"""Rows :math:`\nabla\mu/\sigma` and :math:`\sqrt2\nabla\sigma/\sigma` of any mean and scale."""

        def moments(one: Tensor) -> Tensor:
            loc, scale = self.loc_scale(one[None], params)
            return torch.cat([loc[0], scale[0]])

        slopes = torch.func.vmap(torch.func.jacrev(moments))(f)
        _, scale = self.loc_scale(f, params)
        by_mean, by_scale = slopes.transpose(1, 2).chunk(2, -1)
        return torch.cat([by_mean / scale.unsqueeze(1), 2**0.5 * by_scale / scale.unsqueeze(1)], -1)


class HomoskedasticGaussian(_Gaussian):
    r"""Gaussian noise of one standard deviation everywhere (or one per output): :math:`y \sim N(f(x), \sigma^2)`.

    Args:
        scale: the noise standard deviation in the units of ``y``. A number or tensor is *fixed*; ``"learned"``, an
            ``nn.Parameter`` or ``PyroParam`` is a *point parameter*, optimised by MLE, MAP and SVI; a distribution on
            the positive reals is a *prior*, and the noise is *inferred* as the site ``likelihood.scale``.
            Shape () or (out,).

    Raises:
        ValueError: a scale that is not positive, or a prior whose support is not.

    Caveat: a learned scale is a point estimate and hides the uncertainty about the noise; prefer a prior.

    Example:
        >>> import pyro.distributions as dist
        >>> HomoskedasticGaussian(0.3)
        HomoskedasticGaussian(fixed scale)
        >>> HomoskedasticGaussian(dist.HalfNormal(1.0))
        HomoskedasticGaussian(inferred scale)
    """

    targets = Targets(normal=True, linear_mean=True, measured="affine")

    def __init__(self, scale: Parameter):
        super().__init__()
        self.own.declare("scale", scale)

    def loc_scale(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and noise standard deviation, both (\\*batch, N, out)."""
        return f, self.own.value("scale", f, params).expand(f.shape)

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \mathrm{diag}(1/\sigma^2)`."""
        if type(self).loc_scale is not HomoskedasticGaussian.loc_scale:
            return super().fisher_root(f, params)
        return torch.diag_embed(1 / self.loc_scale(f, params)[1])


class HeteroskedasticGaussian(_Gaussian):
    r"""Gaussian noise that depends on the input: :math:`y \sim N(\mu(x), \sigma(x)^2)`, both from the network.

    The network returns (N, 2·out): means first, then :math:`\rho` with
    :math:`\sigma = \mathrm{softplus}(\rho) + \sigma_{\min}`.

    Args:
        min_scale: the smallest noise standard deviation, in the units of ``y``; keeps the likelihood bounded.

    Caveat: with few data the scale head can explain signal as noise; compare with a homoskedastic model by LOO.

    Reference: Estimating the mean and variance of the target probability distribution (Nix & Weigend, 1994).

    Example:
        >>> HeteroskedasticGaussian(min_scale=0.01)
        HeteroskedasticGaussian(min_scale=0.01)
    """

    targets = Targets(heads=2, normal=True, linear_mean=True, measured="affine")

    def __init__(self, min_scale: float = 1e-3):
        super().__init__()
        self.min_scale = check_number("min_scale", min_scale, above=0)

    def loc_scale(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and noise standard deviation, both (\\*batch, N, out)."""
        loc, raw = f.chunk(2, dim=-1)
        return loc, F.softplus(raw) + self.min_scale

    def _options(self) -> list[str]:
        return [f"min_scale={self.min_scale:g}"]


class StudentT(Likelihood):
    r"""Noise of Student's t: :math:`y \sim t_\nu(f(x), \sigma)`, of which single outliers are no surprise.

    Args:
        df: degrees of freedom ν. A number is fixed; ``"learned"`` is a point parameter; a distribution on positive
            numbers is a prior, and ν is inferred as the site ``likelihood.df``; ``"inferred"`` takes the prior
            Gamma(2, 0.1) of Juárez & Steel.
        scale: σ in the units of ``y``, as of :class:`HomoskedasticGaussian`; the noise's standard deviation is
            :math:`\sigma \sqrt{\nu / (\nu - 2)}`. Both have shape () or (out,).

    Raises:
        ValueError: an argument that is not positive, or a prior whose support is not.

    Caveat: noise of ν ≤ 2 has no variance. Where draws of ν come near 2 or below, ``aleatoric_var`` and ``var`` are
    huge or infinite, as they should: read ``quantile``.

    Reference: Model-based clustering of non-Gaussian panel data based on skew-t distributions (Juárez & Steel, 2010).

    Example:
        >>> import pyro.distributions as dist
        >>> StudentT(df=4.0, scale=dist.HalfNormal(1.0))
        StudentT(fixed df, inferred scale)
    """

    task = "student_t"
    targets = Targets(linear_mean=True, measured="affine")

    def __init__(self, df: Parameter = 4.0, scale: Parameter = "learned"):
        super().__init__()
        self.own.declare("df", dist.Gamma(2.0, 0.1) if isinstance(df, str) and df == "inferred" else df)
        self.own.declare("scale", scale)

    def _df_scale(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        df, scale = (self.own.value(name, f, params).expand(f.shape) for name in ("df", "scale"))
        return df, scale

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        df, scale = self._df_scale(f, params)
        return dist.StudentT(df, f, scale).to_event(1)

    def mean_variance(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The location, which is the mean where ν > 1, and the variance, infinite where ν ≤ 2."""
        df, scale = self._df_scale(f, params)
        return f, torch.where(df > 2, scale.square() * df / (df - 2).clamp_min(1e-30), torch.inf)

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        df, scale = self._df_scale(f.double(), params)
        below = by_scipy("stdtr", df, (y - f) / scale)
        return below, below

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \mathrm{diag}\left(\frac{\nu + 1}{(\nu + 3) \sigma^2}\right)`."""
        df, scale = self._df_scale(f, params)
        return torch.diag_embed(((df + 1) / (df + 3)).sqrt() / scale)


class MixtureDensity(Likelihood):
    r"""K normal components whose shares, means and widths are functions of the input.

    .. math:: p(y \mid x) = \sum_k \pi_k(x)\, N(y \mid \mu_k(x), \sigma_k(x)^2)

    The network returns (N, 3·out·K): the logits of π, then the means, then ρ with
    :math:`\sigma = \mathrm{softplus}(\rho) + \sigma_{\min}`, each out · K values with the components of one output
    together. Outputs are independent given the network's.

    Args:
        num_components: K.
        min_scale: the smallest σ, in the units of ``y``; keeps the likelihood bounded.

    Its Fisher information has no closed form: Laplace takes it by a Gauss-Hermite rule of 40 nodes per component.

    Caveat: components are exchangeable; means, densities and quantiles are identified, single heads are not.

    Reference: Mixture density networks (Bishop, 1994).

    Example:
        >>> MixtureDensity(3)
        MixtureDensity(3 components, min_scale=0.001)
    """

    task = "mixture_density"

    def __init__(self, num_components: int = 3, *, min_scale: float = 1e-3):
        super().__init__()
        self.num_components = check_count("num_components", num_components)
        self.min_scale = check_number("min_scale", min_scale, above=0)
        self.targets = Targets(heads=3 * self.num_components, measured="affine")

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        """Of each output a mixture over (\\*batch, N, out, K) components."""
        logits, loc, raw = f.unflatten(-1, (3, -1, self.num_components)).unbind(-3)
        components = dist.Normal(loc, F.softplus(raw) + self.min_scale)
        return dist.MixtureSameFamily(dist.Categorical(logits=logits), components).to_event(1)

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        law = self.distribution(f.double(), params).base_dist
        normal, share = law.component_distribution, law.mixture_distribution.probs
        below = (share * torch.special.ndtr((y.unsqueeze(-1) - normal.loc) / normal.scale)).sum(-1)
        return below, below

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """By quadrature, output by output: a square root of the mean square of the score."""
        law = self.distribution(f.double(), params).base_dist
        share, normal = law.mixture_distribution.logits, law.component_distribution
        slope = f.double().unflatten(-1, (3, -1, self.num_components))[..., 2, :, :].sigmoid()
        nodes, weights = (torch.tensor(v).to(share) for v in np.polynomial.hermite_e.hermegauss(40))
        y = (normal.loc.unsqueeze(-1) + normal.scale.unsqueeze(-1) * nodes).flatten(-2)  # (N, out, K·node)
        weight = (share.exp().unsqueeze(-1) * weights / math.sqrt(2 * math.pi)).flatten(-2)
        share, loc, scale, slope = (v.unsqueeze(-2) for v in (share, normal.loc, normal.scale, slope))
        part = (share + dist.Normal(loc, scale).log_prob(y.unsqueeze(-1))).softmax(-1)
        z = (y.unsqueeze(-1) - loc) / scale
        score = torch.cat([part - share.exp(), part * z / scale, part * (z.square() - 1) * slope / scale], -1)
        fisher = torch.einsum("noq,noqa,noqb->noab", weight, score, score)
        values, vectors = torch.linalg.eigh(fisher)
        root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)  # (N, out, 3K, 3K)
        num, out, width = root.shape[:3]
        whole = root.new_zeros(num, 3, out, self.num_components, out, width)
        for output in range(out):
            whole[:, :, output, :, output] = root[:, output].unflatten(1, (3, -1))
        return whole.reshape(num, out * width, out * width).to(f.dtype)

    def _options(self) -> list[str]:
        return [f"{self.num_components} components", f"min_scale={self.min_scale:g}"]


class Beta(Likelihood):
    r"""Numbers between two bounds: a beta distribution with mean :math:`\mu = \mathrm{sigmoid}(f(x))` of the way.

    .. math:: \frac{y - \mathrm{low}}{\mathrm{high} - \mathrm{low}} \sim \mathrm{Beta}(\mu \phi, (1 - \mu) \phi)

    Args:
        precision: φ; the variance is :math:`\mu (1 - \mu) / (\phi + 1)` of the squared width. A number is fixed;
            ``"learned"`` is a point parameter; a distribution on positive numbers is a prior, and φ is inferred as the
            site ``likelihood.precision``. Shape () or (out,).
        low, high: the bounds, which y does not reach.

    Reference: Beta regression for modelling rates and proportions (Ferrari & Cribari-Neto, 2004).

    Example:
        >>> Beta(10.0, low=0.0, high=100.0)
        Beta(fixed precision, 0 to 100)
    """

    task = "beta"

    def __init__(self, precision: Parameter = "learned", *, low: float = 0.0, high: float = 1.0):
        super().__init__()
        self.low = check_number("low", low)
        self.high = check_number("high", high, above=self.low)
        self.own.declare("precision", precision)

    def _value_error(self, y: Tensor) -> str | None:
        wrong = y[(y <= self.low) | (y >= self.high)]
        if not len(wrong):
            return None
        return (
            f"'y' must lie between {self.low:g} and {self.high:g} for Beta and reach neither, got {wrong[0]:g}: pass "
            "wider bounds, or bring (y - low) / (high - low) inside by (y (N - 1) + 1/2) / N"
        )

    def _share(self, y: Tensor) -> Tensor:
        return (y - self.low) / (self.high - self.low)

    def _counts(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        precision = self.own.value("precision", f, params)
        return f.sigmoid() * precision, (-f).sigmoid() * precision

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return Sampled(self, f, params, f.shape[-1])

    def log_prob(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        a, b = self._counts(f, params)
        share = self._share(y)
        norm = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(self.own.value("precision", f, params))
        each = (a - 1) * share.log() + (b - 1) * torch.log1p(-share) - norm - math.log(self.high - self.low)
        return each.sum(-1)

    def draw(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """One datum for each output, in float64 until it is known to reach neither bound."""
        eps = torch.finfo(f.dtype).eps
        share = torch.distributions.Beta(*self._counts(f.double(), params)).sample().clamp(eps, 1 - eps)
        return (self.low + (self.high - self.low) * share).to(f.dtype)

    def mean_variance(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        width, mean = self.high - self.low, f.sigmoid()
        var = mean * (-f).sigmoid() / (1 + self.own.value("precision", f, params))
        return self.low + width * mean, width**2 * var

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        below = by_scipy("betainc", *self._counts(f.double(), params), self._share(y).clamp(0.0, 1.0))
        return below, below

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \phi^2 \mu^2 (1 - \mu)^2 \left(\psi'(\mu \phi) + \psi'((1 - \mu) \phi)\right)`, per output."""
        a, b = self._counts(f.double(), params)  # ψ' of a mean near a bound is beyond float32
        slope = a * b / (a + b)
        return torch.diag_embed(slope * (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()).to(f.dtype)

    def _options(self) -> list[str]:
        return [f"{self.low:g} to {self.high:g}"]
