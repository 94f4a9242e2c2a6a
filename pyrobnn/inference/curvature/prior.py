"""The prior's part of the posterior precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from pyrobnn.core.checks import Refused
from pyrobnn.core.seeding import seeded
from pyrobnn.density.density import Site
from pyrobnn.inference.curvature.jacobian import NetworkJacobian

#: interquartile range of a standard normal
_NORMAL_IQR = 1.3489795003921634


@dataclass(frozen=True, eq=False)
class PriorPrecision:
    """Diagonal prior precision at the mode.

    Attributes:
        prec: (p,), positive.
        mean: (p,) of normal priors; None where some prior isn't normal.
        raised: the most that an entry of −∂² log p had to be raised (0: none).
        raised_sites: the sites concerned.
    """

    prec: Tensor
    mean: Tensor | None
    raised: float
    raised_sites: tuple[str, ...]


def prior_precision(jacobian: NetworkJacobian) -> PriorPrecision:
    r"""Diagonal of the negative Hessian of the log prior in the network's coordinates.

    Exact for normal priors. For others :math:`-\partial^2 \log p` at the mode; where that is smaller than the precision
    of a normal of the prior's interquartile range (heavy tails, the kink of a Laplace prior), that precision replaces
    it, so that the posterior is never wider than the prior; by how much is reported.

    The elements of each prior are independent, see :func:`check_elementwise`.
    """
    prec, mean, raised, sites = [], [], 0.0, []
    constrained = jacobian.density.constrain(jacobian.mode)
    for site in jacobian.sites:
        prior = jacobian.model.priors[site.name]
        base = elementwise(prior)
        z = jacobian.mode[site.start : site.stop]
        if isinstance(base, Normal):
            prec.append(base.scale.to(z).expand(site.shape).reshape(-1) ** -2)
            mean.append(base.loc.to(z).expand(site.shape).reshape(-1))
            continue

        def log_prior(u: Tensor, site: Site = site, prior: Distribution = prior) -> Tensor:
            shaped = u.reshape(site.unconstrained_shape)
            value = site.transform(shaped)
            jac = site.transform.log_abs_det_jacobian(shaped, value)
            return prior.log_prob(value).sum() + jac.sum()

        slope = torch.func.grad(log_prior)
        # elements are independent, so the gradient of the summed gradient is the diagonal
        curved = -torch.func.grad(lambda u, slope=slope: slope(u).sum())(z)
        floor = _spread_precision(prior, site, z)
        low = ~(curved >= floor)
        if bool(low.any()):
            raised = max(raised, float((floor - curved.nan_to_num())[low].max()))
            sites.append(site.name)
        prec.append(torch.where(low, floor, curved))
    whole = torch.cat(prec).detach()
    normal = len(mean) == len(prec) and not any(not v.isfinite().all() for v in constrained.values())
    return PriorPrecision(whole, torch.cat(mean) if normal else None, raised, tuple(sites))


def check_elementwise(priors: Mapping[str, Distribution]) -> None:
    """Refuse priors (by site) whose elements depend on each other: a diagonal cannot hold them."""
    for name, prior in priors.items():
        if (base := elementwise(prior)).event_shape:
            raise Refused(
                f"the prior of {name!r} is {type(base).__name__}, whose elements depend on each other: "
                "use curvature='hessian'"
            )


def check_normal(priors: Mapping[str, Distribution]) -> None:
    """Refuse priors (by site) that are not normal: their widths cannot be tuned."""
    for name, prior in priors.items():
        if not isinstance(base := elementwise(prior), Normal):
            raise Refused(
                f"'tune' scales normal priors, and that of {name!r} is a {type(base).__name__}: leave it None"
            )


def elementwise(prior: Distribution) -> Distribution:
    """The distribution of one element."""
    while isinstance(prior, Independent):
        prior = prior.base_dist
    return prior


def with_precision(name: str, prior: Distribution, factor: float) -> TorchDistributionMixin:
    """The normal prior of a site, its precision multiplied."""
    check_normal({name: prior})
    base, shape = cast(Normal, elementwise(prior)), prior.event_shape
    return dist.Normal(base.loc, base.scale * factor**-0.5).expand(shape).to_event(len(shape))


def _spread_precision(prior: Distribution, site: Site, z: Tensor) -> Tensor:
    """1/s² of the normal with the prior's interquartile range, in unconstrained space; (site size,)."""
    with seeded(0, z.device):
        draws = site.transform.inv(prior.sample((1001,))).reshape(1001, -1).to(z)
    low, high = draws.quantile(torch.tensor([0.25, 0.75]).to(z), 0)
    # one element's quantiles are noisy; elements of one family share the median
    return ((high - low) / _NORMAL_IQR).clamp_min(1e-12) ** -2
