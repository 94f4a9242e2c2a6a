"""Predictives of the values of one joint event, each from those before it: independent where the model is right.

Where an observed site is one event (a Gaussian process by its marginal likelihood, a state-space model, an areal model)
its values depend on each other given the parameters, so that they cannot be judged as independent rows. In a Gaussian
event each value has an exact predictive given those before it, and the probability transforms are independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyro.distributions as dist
import torch
import xarray as xr
from torch import Tensor
from torch.distributions import Distribution

from pyrobnn.core import groups as group
from pyrobnn.model import Density
from pyrobnn.model.distribution_kinds import elementwise
from pyrobnn.model.nodes import Node, is_masked, is_replicated
from pyrobnn.posterior.approximation import PosteriorLike
from pyrobnn.posterior.arrays import to_numpy

#: draws whose predictives are averaged
NUM_DRAWS = 100
#: most values of an event that has a covariance factor, and of one whose precision is found by differentiation
MOST_VALUES = 2000
MOST_DIFFERENTIATED = 400
#: share by which the gradient of a Gaussian event may differ from a linear one, by rounding
_CHANGE = 1e-4


class Steps(NamedTuple):
    """Each value of an event given those before it, at one draw: mean, sd and standardised residual, (value,) each."""

    mean: Tensor
    sd: Tensor
    z: Tensor


def joint_events(nodes: Mapping[str, Node]) -> dict[str, int]:
    """The number of events of each site whose data are events of several values that depend on each other."""
    events = {}
    for name, node in nodes.items():
        if not is_replicated(node):
            continue
        law = elementwise(node["fn"])
        if law.event_shape.numel() <= 1:
            continue
        events[name] = node["value"].numel() // law.event_shape.numel()
        if isinstance(node["fn"], torch.distributions.Independent):
            events[name] = node["fn"].batch_shape.numel()
    return events


@torch.no_grad()
def one_step(
    posterior: PosteriorLike,
    density: Density,
    sites: Mapping[str, int],
) -> xr.Dataset:
    """The PIT of every value of the joint events of these sites, given those before it, and its predictive mean.

    Averaged over at most 100 draws. A site whose event is not Gaussian, is masked, or has too many values is left out.
    """
    dataset = xr.Dataset()
    if not sites:
        return dataset
    density = density.double()
    thinned = posterior.thin(max(1, NUM_DRAWS // posterior.num_chains))
    z = density.unconstrain(thinned.draws).reshape(-1, density.dim)
    nodes = density.trace(density.constrain(z[0]))
    gaussian = [
        name
        for name in sites
        if name in nodes and is_replicated(nodes[name]) and _is_gaussian(nodes[name])
    ]
    if not gaussian:
        return dataset
    for name, average in _averages(density, z, gaussian).items():
        mean, pit = to_numpy(average)
        site = group.variable(name)
        dataset[site] = ((f"{site}_step",), pit)
        dataset[f"{site}_mean"] = ((f"{site}_step",), mean)
    return dataset


def _averages(density: Density, z: Tensor, sites: Sequence[str]) -> dict[str, Tensor]:
    """Predictive mean and PIT of every value, site → (2, value), averaged over points (draw, dim)."""
    totals: dict[str, Tensor] = {}
    for point in z:
        nodes = density.trace(density.constrain(point))
        for name in sites:
            steps = _steps(nodes[name]["fn"], nodes[name]["value"])
            terms = torch.stack([steps.mean, torch.special.ndtr(steps.z)])
            totals[name] = totals.get(name, torch.zeros_like(terms)) + terms
    return {name: total / len(z) for name, total in totals.items()}


def _is_gaussian(node: Node) -> bool:
    """Whether the event of a site is Gaussian, and small enough: its precision is the same at another value."""
    law = elementwise(node["fn"])
    num_values = node["value"].numel()
    if is_masked(node) or not node["value"].is_floating_point():
        return False
    if isinstance(law, dist.MultivariateNormal):
        return num_values <= MOST_VALUES
    if num_values > MOST_DIFFERENTIATED:
        return False
    try:
        quadratic = _quadratic(node["fn"], node["value"])
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    if not quadratic.change <= _CHANGE:
        return False
    return int(torch.linalg.cholesky_ex(quadratic.precision).info) == 0


class Quadratic(NamedTuple):
    """A log density around a value: gradient (value,), precision (value, value), and how far from quadratic it is.

    ``change`` is the largest difference of a gradient elsewhere from the linear one, as a share of the latter.
    """

    gradient: Tensor
    precision: Tensor
    change: float


@torch.enable_grad()
def _quadratic(fn: Distribution, value: Tensor) -> Quadratic:
    """The log density of an event around its value by gradients at values beside it, all at once.

    A Gaussian's gradient is linear, so that differences of any length are exact.
    """
    num_values = value.numel()
    flat = value.reshape(-1)
    step = flat.std().clamp_min(1e-3)
    along_axes = step * torch.eye(num_values).to(flat)
    elsewhere = step * torch.cos(torch.arange(num_values)).to(flat)
    offsets = torch.cat([torch.zeros_like(flat)[None], along_axes, elsewhere[None]])
    gradients = _gradients(fn, flat + offsets, value.shape)
    gradient = gradients[0]
    precision = -(gradients[1:-1] - gradient) / step
    expected = gradient - precision @ elsewhere
    change = float((gradients[-1] - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
    return Quadratic(gradient.detach(), (0.5 * (precision + precision.T)).detach(), change)


def _gradients(fn: Distribution, values: Tensor, shape: torch.Size) -> Tensor:
    """Gradients of the log density of an event of this shape at values (point, value)."""
    values = values.detach().requires_grad_()
    log_density = fn.log_prob(values.view(len(values), *shape)).sum()
    (gradients,) = torch.autograd.grad(log_density, values)
    return gradients


def _steps(fn: Distribution, value: Tensor) -> Steps:
    r"""Each value given those before it: with the factor L of the covariance, :math:`L z = y - m`.

    .. math:: y_i \mid y_{<i} \sim N(y_i - L_{ii} z_i, L_{ii}^2)
    """
    law = elementwise(fn)
    if isinstance(law, dist.MultivariateNormal):
        factor = law.scale_tril
        deviation = (value - law.loc)[..., None]
    else:
        quadratic = _quadratic(fn, value)
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(quadratic.precision))
        factor = torch.linalg.cholesky(covariance)
        deviation = -(covariance @ quadratic.gradient)[:, None]
    z = torch.linalg.solve_triangular(
        factor,
        deviation,
        upper=False,
    )[..., 0]
    sd = factor.diagonal(dim1=-2, dim2=-1).expand_as(z)
    mean = value.reshape(z.shape) - sd * z
    return Steps(mean.reshape(-1), sd.reshape(-1), z.reshape(-1))
