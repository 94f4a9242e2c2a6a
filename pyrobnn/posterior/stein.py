"""Stein's identities at a posterior's draws: what gradients of the log density tell of draws without any reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyrobnn.core.seeding import generator
from pyrobnn.density.density import Density
from pyrobnn.density.gradient import batched_gradient
from pyrobnn.model import BNN, check_data

if TYPE_CHECKING:
    from pyrobnn.posterior import Posterior

#: draws of all chains together whose gradient is taken
NUM_DRAWS = 200
_FEWEST = 40
#: directions along which the score of each site is kept, and single weights, those farthest from zero
NUM_DIRECTIONS, NUM_SINGLE = 4, 4
#: products of data, weights and draws that all gradients together may take
_MAX_WORK = 1e12
#: products of data, weights and draws of one call
_CHUNK = 2**28


def stein_statistics(posterior: Posterior, x: Tensor | None, y: Tensor | None) -> xr.Dataset | None:
    r"""Virial and score of at most 200 thinned draws, by site, in unconstrained space.

    .. math:: E[-(z - a) \cdot \nabla \log p(z)] = d, \qquad E[\nabla \log p(z)] = 0

    hold for draws z of p and no others: the first says that they spread as p does (a is the mean of their chain), the
    second that they lie where p does.

    Args:
        posterior: of a BNN or a plain program.
        x, y: the data that it was fitted to; None for a program that was given none.

    Returns:
        Dataset with ``virial`` (chain, draw, site), ``score`` (chain, draw, site, direction), the gradient along random
        signs times the draws' sd and then along the single scalars whose mean gradient is largest in its sd (zero where
        a site has fewer), and ``size`` (site,), the unconstrained scalars of each; None where the draws are
        not of this density (a linearised net, layers in training mode), too few, or the gradients too dear.

    References:
        Measuring sample quality with Stein's method (Gorham & Mackey, 2015) https://arxiv.org/abs/1506.03039
    """
    density = posterior_density(posterior, x, y)
    if density is None:
        return None
    work = density.dim * max(len(y) if y is not None and y.dim() else 1, 1)
    few = posterior.thin(max(1, int(min(NUM_DRAWS, _MAX_WORK // work)) // posterior.num_chains))
    if few.num_chains * few.num_draws < _FEWEST:
        return None
    z = density.unconstrain(few.draws)
    mean = density.unconstrain(posterior.thin(1000).draws).double().mean(1, keepdim=True)
    gradient, _ = batched_gradient(density.log_joint, z[0, :2])
    flat = z.reshape(-1, density.dim)
    parts = [gradient(part)[0] for part in flat.split(max(1, _CHUNK // work))]
    g = torch.cat(parts).detach().double().reshape(z.shape)
    pull = -(z.double() - mean) * g
    signs = torch.randint(0, 2, (NUM_DIRECTIONS, density.dim), generator=generator(0)) * 2.0 - 1.0
    directions = signs.to(g) * z.double().std((0, 1))
    sites = [site for site in density.sites if site.kind == "latent"]
    columns = [slice(site.start, site.stop) for site in sites]
    score = [
        torch.cat([torch.einsum("csd,kd->csk", g[..., c], directions[:, c]), _single(g[..., c])], -1)
        for c in columns
    ]
    dims = ("chain", "draw", "site")
    return xr.Dataset(
        {
            "virial": (dims, torch.stack([pull[..., c].sum(-1) for c in columns], -1).cpu().numpy()),
            "score": ((*dims, "direction"), torch.stack(score, 2).cpu().numpy()),
            "size": ("site", np.array([site.size for site in sites])),
        },
        coords={"site": [site.name for site in sites]},
    )


def posterior_density(posterior: Posterior, x: Tensor | None, y: Tensor | None) -> Density | None:
    """The density that the draws are of; None for a linearised net, or one of layers in training mode."""
    model = posterior.model
    if posterior.network is not None or (isinstance(model, BNN) and model.stochastic_layers()):
        return None
    if isinstance(model, BNN):
        x, y = check_data(model, x, y, next(iter(posterior.draws.values())).device)
    fixed = {name: posterior.draws[name][0, 0] for name in posterior.meta.get("point_sites", ())}
    return Density(model, (x, y), points="held", values=fixed)


def _single(g: Tensor) -> Tensor:
    """The columns of gradients (chain, draw, scalar) whose mean is farthest from zero in its sd; zeros if too few."""
    sd = g.std((0, 1))
    size = torch.where(sd > 0.0, g.mean((0, 1)).abs() / sd, torch.zeros_like(sd))
    farthest = g[..., size.topk(min(NUM_SINGLE, len(size))).indices]
    return torch.nn.functional.pad(farthest, (0, NUM_SINGLE - farthest.shape[-1]))
