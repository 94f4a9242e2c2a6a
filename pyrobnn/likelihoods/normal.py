"""Gaussian noise: of one size everywhere, or of a size that the network gives."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.distributions as dist
import torch
import torch.nn.functional as F
import tyxe.likelihoods
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroParam
from torch import Tensor

from pyrobnn.core.checks import check_number
from pyrobnn.likelihoods.numbers import Real


class _Gaussian(Real):
    task = "gaussian"
    normal = True
    kind = "a Gaussian likelihood"
    head_names = "a mean and a scale"

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return dist.Normal(*self.loc_scale(f, params)).to_event(1)

    def mean_variance(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loc, scale = self.loc_scale(f, params)
        return loc, scale.square()

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


class HomoskedasticGaussian(_Gaussian, tyxe.likelihoods.Gaussian):
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

    def __init__(self, scale: float | Tensor | str | PyroParam | TorchDistributionMixin):
        super().__init__(dataset_size=None, event_dim=1, name="likelihood")
        self.declare("scale", scale)

    def loc_scale(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and noise standard deviation, both (\\*batch, N, out)."""
        return f, self.own("scale", f, params).expand(f.shape)

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \mathrm{diag}(1/\sigma^2)`."""
        if type(self).loc_scale is not HomoskedasticGaussian.loc_scale:
            return super().fisher_root(f, params)
        return torch.diag_embed(1 / self.loc_scale(f, params)[1])

    def __repr__(self) -> str:
        return f"HomoskedasticGaussian({self.noise['scale']} scale)"


class HeteroskedasticGaussian(_Gaussian, tyxe.likelihoods.HeteroskedasticGaussian):
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

    heads = 2

    def __init__(self, min_scale: float = 1e-3):
        super().__init__(dataset_size=None, event_dim=1, name="likelihood")
        self.min_scale = check_number("min_scale", min_scale, above=0)

    def loc_scale(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and noise standard deviation, both (\\*batch, N, out)."""
        loc, raw = f.chunk(2, dim=-1)
        return loc, F.softplus(raw) + self.min_scale

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r"""For each output diag(1/σ², 2 σ'(ρ)²/σ²): mean and scale are orthogonal."""
        if type(self).loc_scale is not HeteroskedasticGaussian.loc_scale:
            return super().fisher_root(f, params)
        _, scale = self.loc_scale(f, params)
        slope = f.chunk(2, dim=-1)[1].sigmoid()  # derivative of softplus
        return torch.diag_embed(torch.cat([1 / scale, 2**0.5 * slope / scale], -1))

    def __repr__(self) -> str:
        return f"HeteroskedasticGaussian(min_scale={self.min_scale:g})"
