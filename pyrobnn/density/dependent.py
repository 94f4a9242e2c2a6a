"""Bijections from the real line to the supports of sites, and supports that depend on the values of other sites.

``pyro.sample("beta", dist.Uniform(0.0, 1.0 - alpha))`` has another support for every ``alpha``: its value, and the
bijection that gives it, are known only while the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import Transform

from pyrobnn.compile.trees import mapped

if TYPE_CHECKING:
    from pyrobnn.density.density import Density, Site
    from pyrobnn.density.nodes import Node


def bijection(name: str, support: constraints.Constraint) -> Transform:
    """From the real line to the support; that of a mixture is the support of its components."""
    inner: Any = support
    events = 0
    while isinstance(inner, constraints.independent):
        inner, events = inner.base_constraint, events + inner.reinterpreted_batch_ndims
    if isinstance(inner, constraints.MixtureSameFamilyConstraint):
        support = constraints.independent(inner.base_constraint, events)
    try:
        return biject_to(support)
    except NotImplementedError as error:
        raise ValueError(
            f"torch knows no bijection from the real line to the support of the site {name!r}, {support}: give it "
            "a prior on the reals, the positive numbers, an interval or a simplex"
        ) from error


def names(density: Density, nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """The latent sites whose support differs between two runs of the program with other values of the sites.

    Args:
        density: a density with its sites.
        nodes: of one run.
    """
    latent = [site.name for site in density.sites if site.kind == "latent"]
    bounded = {name: bounds for name in latent if (bounds := _bounds(nodes[name]["fn"].support))}
    if not bounded:
        return ()
    other = density.constrain_each(density.sample_box(1, seed=1)[0])
    again = density.trace({name: value for name, value in other.items() if name in latent}, ())
    return tuple(
        name
        for name, bounds in bounded.items()
        if not all(map(torch.equal, bounds, _bounds(again[name]["fn"].support)))
    )


def constrain(density: Density, z: Tensor) -> tuple[dict[str, Tensor], dict[str, Transform]]:
    """Site values of one vector (dim,), and the bijections of the dependent sites there."""
    values = density.constrain_each(z)
    found: dict[str, Transform] = {}

    def follower(site: Site) -> Callable[[Any], Tensor]:
        def follow(fn: Any) -> Tensor:
            found[site.name] = bijection(site.name, fn.support)
            return found[site.name](density._slice(site, z))

        return follow

    following = {site.name: follower(site) for site in density.sites if site.name in density.dependent}
    nodes = density.trace({**values, **following})
    return values | {name: nodes[name]["value"] for name in found}, found


def at_origin(density: Density, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values (\\*batch, \\*shape) with those of the dependent sites as their own ``transform`` would have made them."""
    latent = {site.name: values[site.name] for site in density.sites if site.name in values}
    by_name = {site.name: site for site in density.sites}

    def one(given: dict[str, Tensor]) -> dict[str, Tensor]:
        nodes = density.trace(given)
        moved = {}
        for name in density.dependent:
            u = bijection(name, nodes[name]["fn"].support).inv(given[name])
            moved[name] = by_name[name].transform(u)
        return moved

    first = density.sites[0]
    batch = latent[first.name].shape[: latent[first.name].dim() - len(first.shape)]
    return {**values, **each(one, latent, batch)}


def each(function: Callable[[Any], Any], points: Any, batch: torch.Size | None = None) -> Any:
    """A function of one point for all points of a batch.

    Args:
        function: takes and returns a tensor, or tensors by name.
        points: (\\*batch, dim), or by name (\\*batch, …).
        batch: the leading shape; of a tensor all but its last dimension.
    """
    batch = points.shape[:-1] if batch is None else batch
    if not batch:
        return function(points)
    flat = mapped(lambda part: part.reshape(-1, *part.shape[len(batch) :]), points)
    try:
        out = torch.func.vmap(function)(flat)
    except RuntimeError:  # control flow on values: one point after the other
        rows = [mapped(lambda part, i=i: part[i], flat) for i in range(batch.numel())]
        out = mapped(lambda *parts: torch.stack(parts), *map(function, rows))
    return mapped(lambda part: part.reshape(batch + part.shape[1:]), out)


def _bounds(support: constraints.Constraint) -> list[Tensor]:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return [value for value in vars(support).values() if isinstance(value, Tensor)]
