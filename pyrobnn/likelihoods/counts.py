"""Counts: events in a time, an area or a number of trials, the exposure of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.likelihoods.base import Likelihood, Parameter, Targets, by_scipy


class _Poisson(dist.Poisson):
    """Poisson whose draws stay counts where the rate is beyond whole numbers, at which torch's turn negative."""

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return _poisson(self.rate.expand(self._extended_shape(torch.Size(sample_shape))))


class _NegativeBinomial(dist.NegativeBinomial):
    """The same for the negative binomial, a Poisson of a rate that is Gamma."""

    def sample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            return _poisson(self._gamma.sample(sample_shape))


@torch.no_grad()
def _poisson(rate: Tensor) -> Tensor:
    """Poisson draws; of rates beyond 2⁴⁰ by the normal that they are then."""
    counts = torch.poisson(rate.clamp_max(2.0**40))
    return torch.where(rate < 2.0**40, counts, (rate + rate.sqrt() * torch.randn_like(rate)).round())


class _Counts(Likelihood):
    def __init__(self, exposure: int | None = None):
        super().__init__()
        if exposure is not None and (isinstance(exposure, bool) or not isinstance(exposure, int)):
            raise TypeError(
                f"'exposure' must be the number of a column of x, got {exposure!r}: make the exposures a column, "
                "torch.cat([x, exposures[:, None]], 1), and pass exposure=-1"
            )
        self.targets = Targets("count", exposure=exposure)

    def _value_error(self, y: Tensor) -> str | None:
        wrong = y[(y < 0) | (y != y.floor())] if y.is_floating_point() else y[y < 0]
        if not len(wrong):
            return None
        return f"'y' must hold counts 0, 1, 2, … for {type(self).__name__}, got {wrong[0]:g}"

    def _options(self) -> list[str]:
        return [] if self.targets.exposure is None else [f"exposure={self.targets.exposure}"]


class Poisson(_Counts):
    r"""Counts of independent events: :math:`y \sim \mathrm{Poisson}(e(x)\, \exp f(x))`; the net returns log rates.

    Args:
        exposure: the column of ``x`` (a number; −1 is the last) that holds the exposure e of each row: the time, area
            or number of trials in which its events were counted. The net does not see this column; log e is added to
            its output, so that it learns the rate of one unit. A standardizer leaves the column as it is, and being
            part of ``x`` it travels with its rows through batches, folds and new data. None: one everywhere.

    Targets are whole numbers of shape (N, out), or (N,) for one output. Predictions are of counts; ``f`` and ``mean``
    are expected counts at the row's exposure.

    Caveat: its variance is its mean; where events come in clusters, use :class:`NegativeBinomial`.

    Example:
        >>> Poisson(exposure=-1)
        Poisson(exposure=-1)
    """

    task = "poisson"

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return _Poisson(f.exp()).to_event(1)

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        rate = f.double().exp()
        return _steps(y, *(by_scipy("pdtr", (y - below).clamp_min(0), rate) for below in (1, 0)))

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \mathrm{diag}(e^f)`."""
        return torch.diag_embed((f / 2).exp())


class NegativeBinomial(_Counts):
    r"""Counts of clustered events: mean :math:`\mu = e(x) \exp f(x)` and variance :math:`\mu + \mu^2 / r`.

    Args:
        concentration: r, the smaller the more clustered. A number is fixed; ``"learned"`` is a point parameter; a
            distribution on positive numbers is a prior, and r is inferred as the site ``likelihood.concentration``.
            Shape () or (out,).
        exposure: as of :class:`Poisson`.

    Example:
        >>> import pyro.distributions as dist
        >>> NegativeBinomial(dist.LogNormal(1.0, 1.0))
        NegativeBinomial(inferred concentration)
    """

    task = "negative_binomial"

    def __init__(self, concentration: Parameter = "learned", exposure: int | None = None):
        super().__init__(exposure)
        self.own.declare("concentration", concentration)

    def _concentration(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        return self.own.value("concentration", f, params).expand(f.shape)

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        r = self._concentration(f, params)
        return _NegativeBinomial(r, logits=f - r.log()).to_event(1)

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        r = self._concentration(f.double(), params).double()
        failing = (r.log() - f).sigmoid()  # r / (r + mu)
        return _steps(y, *(by_scipy("betainc", r, (y + 1 - below).clamp_min(1), failing) for below in (1, 0)))

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \mathrm{diag}\left(\frac{\mu r}{\mu + r}\right)`."""
        r = self._concentration(f, params)
        return torch.diag_embed((r * (f - r.log()).sigmoid()).sqrt())


def _steps(y: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """P(Y < y) and P(Y ≤ y), with what lies below the first count."""
    return torch.where(y > 0, lower, 0.0), torch.where(y >= 0, upper, 0.0)
