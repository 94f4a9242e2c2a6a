r"""The divergence of a guide from the prior, KL(prior‖q), of a guide of independent normals.

.. math:: KL(p \,\|\, q) = E_p[\log p(z)] + \sum_i \Big( \log \sigma_i + \frac{(m_i - \mu_i)^2 + v_i}{2 \sigma_i^2}
    + \tfrac12 \log 2\pi \Big)

in unconstrained space, with the mean m and the variance v of every coordinate under the prior: beside a constant, it
depends on the prior through these alone. A variational bound has the other direction, KL(q‖prior).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.model.density import Density, Site, is_identity
from pyrobnn.model.distribution_kinds import elementwise
from pyrobnn.model.gradient import at_each
from pyrobnn.model.log_terms import log_prob_sum
from pyrobnn.model.nodes import Node

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
#: draws from the prior for the moments that have no closed form: an error of a fiftieth of their sd
NUM_DRAWS = 2500


class PriorMoments(NamedTuple):
    """Mean and variance of a site under the prior in unconstrained space, of its shape, and E[log p] in nats."""

    mean: Tensor
    var: Tensor
    mean_log_prob: Tensor


class FromPrior:
    """KL(prior‖q) site by site, of independent normals q: without noise.

    Args:
        density: the model.
        latent: its sites that have a prior.
        closed: names of those whose prior is a normal that depends on nothing; the moments of the others are those of
            draws from the prior, made once.

    Raises:
        Refused: a prior without a variance, one that is masked or scaled, or one without a closed form that depends
            on a learned parameter.
    """

    def __init__(
        self,
        density: Density,
        latent: Collection[Site],
        closed: Collection[str],
    ):
        self.drawn: dict[str, PriorMoments] = {}
        start = density.sample_prior(1, seed=0)[0]
        nodes = density.trace(density.constrain(start))
        for site in latent:
            _check_prior(site, nodes[site.name])
        without_form = [site for site in latent if site.name not in closed]
        if without_form:
            _refuse_learned(density, without_form, start)
            draws = density.sample_prior(NUM_DRAWS, seed=0)
            self.drawn = _moments(density, without_form, draws)

    def divergence(
        self,
        node: Node,
        mean: Tensor,
        var: Tensor,
    ) -> Tensor:
        """KL(prior‖q) of one site from the mean and the variance of its guide, a float64 scalar in nats."""
        if node["name"] in self.drawn:
            moments = self.drawn[node["name"]]
        else:
            moments = _normal_moments(node)
        distance = (moments.mean - mean).square() + moments.var
        terms = distance / (2 * var) + 0.5 * var.log() + _HALF_LOG_2PI
        return moments.mean_log_prob + terms.sum(dtype=torch.float64)


def _normal_moments(node: Node) -> PriorMoments:
    """The moments of a site whose prior is a normal, in closed form."""
    prior = elementwise(node["fn"])
    shape = node["value"].shape
    loc = prior.loc.expand(shape)
    scale = prior.scale.expand(shape)
    mean_log_prob = -(scale.log() + _HALF_LOG_2PI + 0.5).sum(dtype=torch.float64)
    return PriorMoments(loc, scale.square(), mean_log_prob)


def _moments(density: Density, sites: Collection[Site], draws: Tensor) -> dict[str, PriorMoments]:
    """The moments of the sites, from draws of the prior (draw, dim)."""
    names = [site.name for site in sites]

    def log_priors(z: Tensor) -> Tensor:
        nodes = density.trace(density.constrain(z))
        return torch.stack([_log_prior(density, nodes, z, density.site(name)) for name in names])

    log_prob = at_each(log_priors, draws).mean(0)
    moments = {}
    for site, mean_log_prob in zip(sites, log_prob, strict=True):
        values = draws[:, site.start : site.stop].reshape(-1, *site.unconstrained_shape)
        mean = values.mean(0)
        var = values.var(0, correction=0)
        if not bool(mean.isfinite().all() and var.isfinite().all() and mean_log_prob.isfinite()):
            raise Refused(_no_variance(site))
        moments[site.name] = PriorMoments(mean, var, mean_log_prob)
    return moments


def _log_prior(
    density: Density,
    nodes: Mapping[str, Node],
    z: Tensor,
    site: Site,
) -> Tensor:
    """Log prior of one site in unconstrained space."""
    return log_prob_sum(nodes[site.name]) + density.log_jacobian(z, site)


def _check_prior(site: Site, node: Node) -> None:
    """Refuse a prior that has no divergence from any normal, or that is not the prior alone."""
    unmasked = node["mask"] is None or node["mask"] is True
    unscaled = not isinstance(node["scale"], Tensor) and node["scale"] == 1
    if not (unmasked and unscaled):
        raise Refused(
            f"the prior of {site.name!r} is masked or scaled: use kl_direction='reverse', the variational bound"
        )
    if not is_identity(site.transform):
        return
    try:
        var = elementwise(node["fn"]).variance
    except NotImplementedError:
        return
    if not bool(var.isfinite().all()):
        raise Refused(_no_variance(site))


def _no_variance(site: Site) -> str:
    return (
        f"the prior of {site.name!r} has no finite variance, so that no normal is at a finite KL divergence "
        "from it: use kl_direction='reverse', the variational bound"
    )


def _refuse_learned(
    density: Density,
    sites: Collection[Site],
    z: Tensor,
) -> None:
    """Refuse priors that change with the point parameters: their moments would not follow them."""
    num_latent = sum(site.size for site in density.sites if site.kind == "latent")
    if num_latent == density.dim:
        return
    moved = z.clone()
    moved[num_latent:] += 0.5
    nodes = density.trace(density.constrain(z))
    nodes_elsewhere = density.trace(density.constrain(moved))
    for site in sites:
        log_prior = _log_prior(density, nodes, z, site)
        log_prior_elsewhere = _log_prior(density, nodes_elsewhere, moved, site)
        if not torch.equal(log_prior, log_prior_elsewhere):
            raise Refused(
                f"the prior of {site.name!r} depends on a learned parameter, and its moments have no closed form: "
                "give that parameter a prior, or use kl_direction='reverse'"
            )
