"""Noise with heavy tails, which outliers do not spoil."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroParam
from torch import Tensor

from pyrobnn.likelihoods.numbers import Real, by_scipy


class StudentT(Real):
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

    def __init__(
        self,
        df: float | Tensor | str | PyroParam | TorchDistributionMixin = 4.0,
        scale: float | Tensor | str | PyroParam | TorchDistributionMixin = "learned",
    ):
        super().__init__()
        self.declare("df", dist.Gamma(2.0, 0.1) if isinstance(df, str) and df == "inferred" else df)
        self.declare("scale", scale)

    def _parts(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        df, scale = (self.own(name, f, params).expand(f.shape) for name in ("df", "scale"))
        return df, scale

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        df, scale = self._parts(f, params)
        return dist.StudentT(df, f, scale).to_event(1)

    def mean_variance(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The location, which is the mean where ν > 1, and the variance, infinite where ν ≤ 2."""
        df, scale = self._parts(f, params)
        return f, torch.where(df > 2, scale.square() * df / (df - 2).clamp_min(1e-30), torch.inf)

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        df, scale = self._parts(f.double(), params)
        below = by_scipy("stdtr", df, (y - f) / scale)
        return below, below

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \mathrm{diag}\left(\frac{\nu + 1}{(\nu + 3) \sigma^2}\right)`."""
        df, scale = self._parts(f, params)
        return torch.diag_embed(((df + 1) / (df + 3)).sqrt() / scale)

    def __repr__(self) -> str:
        return f"StudentT({self.noise['df']} df, {self.noise['scale']} scale)"
