"""The groups of a plain program's tree, and the names of dimensions and coordinates of every tree."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from arviz_base import dict_to_dataset
from torch import Tensor

from pyrobnn.core import groups as group
from pyrobnn.density import derived
from pyrobnn.density.density import Density
from pyrobnn.density.gradient import at_each

Dims = Mapping[str, Sequence[str | None]]
Coords = Mapping[str, Sequence[Any]]

#: groups whose variables are sites or data of the fit: those that ``dims`` names
_NAMED = {
    group.POSTERIOR,
    group.LOG_LIKELIHOOD,
    group.POSTERIOR_PREDICTIVE,
    group.OBSERVED_DATA,
    group.CONSTANT_DATA,
    group.PRIOR,
    group.PRIOR_PREDICTIVE,
}


def program_groups(
    posterior: Any, x: Any, y: Any, max_pairs: int, num_prior_draws: int, seed: int
) -> dict[str, xr.Dataset]:
    """What the program says of its data, before and after them: every observed site under its own name.

    Args:
        posterior: of a plain program.
        x, y: the program's arguments.
        max_pairs: draws × data above which draws are thinned in the groups that hold a value for each datum.
        num_prior_draws: draws of the groups prior and prior_predictive.
        seed: of replicates and prior draws.
    """
    density = density_of(posterior, x, y)
    axes = density.derived.axes
    num_data = max(sum(density.derived.replicated.values()), 1)
    few = posterior.thin(max(1, max_pairs // (num_data * posterior.num_chains)))
    log_prior, terms = log_densities_by_site(few, density)
    before, replicated = derived.prior(density, num_prior_draws, seed) if num_prior_draws else ({}, {})
    data = _data(density, few.draws)

    def of_data(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in values.items() if name in data}

    groups = {
        group.LOG_PRIOR: xr.Dataset({"log_prior": (group.SAMPLE_DIMS, to_numpy(log_prior))}),
        group.LOG_LIKELIHOOD: draws_dataset(terms, _of_batches(density, terms)),
        group.OBSERVED_DATA: draws_dataset(data, axes, sample_dims=[]),
        group.POSTERIOR_PREDICTIVE: draws_dataset(
            of_data(derived.replicates(density, few.draws, seed)), axes
        ),
        group.PRIOR: draws_dataset(before, axes),
        group.PRIOR_PREDICTIVE: draws_dataset(of_data(replicated), axes),
    }
    if isinstance(x, Tensor) and x.dim():
        rows = {(axes.get(name, [None])[0], len(value)) for name, value in data.items() if value.dim()}
        row, length = next(iter(rows)) if len(rows) == 1 else (None, None)
        dims = (row if row and length == len(x) else "obs", "feature")
        groups[group.CONSTANT_DATA] = xr.Dataset({"x": (dims, to_numpy(x.reshape(len(x), -1)))})
    return {name: data for name, data in groups.items() if data.data_vars}


def _data(density: Density, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The data of the sites that replicates are drawn of, where most of them are the same whatever the draw."""
    # residuals that a program computes from latent values are no data; gaps that those fill may stay
    first, last = (
        density.trace({name: value[at] for name, value in draws.items()}) for at in ((0, 0), (-1, -1))
    )
    found = {name: (first[name]["value"], last[name]["value"]) for name in density.derived.replicated}
    fixed = {name: (one == other) | (one.isnan() & other.isnan()) for name, (one, other) in found.items()}
    return {name: one for name, (one, _) in found.items() if 2 * int(fixed[name].sum()) >= one.numel()}


def density_of(posterior: Any, x: Any, y: Any) -> Density:
    """The density of a posterior's program given its data, with point parameters at their fitted values."""
    fixed = {name: posterior.draws[name][0, 0] for name in posterior.meta.get("point_sites", ())}
    return Density(posterior.model, (x, y), points="held", values=fixed)


def log_densities_by_site(posterior: Any, density: Density) -> tuple[Tensor, dict[str, Tensor]]:
    """Log prior (chain, draw) with the factors of no datum, and each datum's terms, site → (chain, draw, \\*axes).

    Axes are those of the site where all its data count, else one.
    """
    z = density.unconstrain(posterior.draws)
    flat = z.reshape(-1, density.dim).split(64)
    parts = [
        at_each(lambda one: {"": density.log_base(one), **density.data_terms(one)}, part) for part in flat
    ]
    terms = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    prior, shapes = terms.pop(""), _batch_shapes(density)  # no site has this name
    for name, value in terms.items():
        own = shapes[name] if shapes[name].numel() == value[0].numel() else [-1]
        terms[name] = value.reshape(*z.shape[:-1], *own)
    return prior.reshape(z.shape[:-1]), terms


def draws_dataset(
    values: Mapping[str, Tensor], dims: Dims, sample_dims: Sequence[str] = group.SAMPLE_DIMS
) -> xr.Dataset:
    """A dataset of (\\*sample_dims, \\*shape), its other dimensions named by ``dims``, else ``<site>_dim_0``."""
    known: dict[Hashable, Sequence[Hashable]] = {
        name: [*sample_dims, *dims[name]] for name in values if name in dims
    }
    arrays = {name: to_numpy(value) for name, value in values.items()}
    # an interrupted run may have more chains than draws
    return dict_to_dataset(arrays, dims=known, sample_dims=[*sample_dims], check_conventions=False)


def relabelled(groups: Mapping[str, xr.Dataset], coords: Coords, dims: Dims) -> dict[str, xr.Dataset]:
    """The groups with the user's names of dimensions, by variable, and values of coordinates, by dimension.

    Raises:
        ValueError: a variable or dimension that no group has, more names than a variable has dimensions, coordinates
            of another length.
    """
    renamed = {name: _renamed(data, dims) if name in _NAMED else data for name, data in groups.items()}
    variables = {str(name) for part in _NAMED if part in groups for name in groups[part].data_vars}
    sizes = {str(dim): size for data in renamed.values() for dim, size in data.sizes.items()}
    for what, given, known in (("dims", dims, variables), ("coords", coords, set(sizes))):
        if unknown := sorted(set(given) - known):
            raise ValueError(f"'{what}' names {unknown}, which the tree has not: it has {sorted(known)}")
    for dim, values in coords.items():
        if len(values) != sizes[dim]:
            raise ValueError(f"'coords' gives {len(values)} values of {dim!r}, which has {sizes[dim]}")
    return {
        name: data.assign_coords({dim: list(v) for dim, v in coords.items() if dim in data.dims})
        for name, data in renamed.items()
    }


def _renamed(data: xr.Dataset, dims: Dims) -> xr.Dataset:
    found = {}
    for name, array in data.data_vars.items():
        own = [str(dim) for dim in array.dims if dim not in group.SAMPLE_DIMS]
        given = dims.get(str(name), [])
        if len(given) > len(own):
            raise ValueError(f"'dims' gives {list(given)} for {name!r}, whose dimensions are {own}")
        names = {old: new for old, new in zip(own, given, strict=False) if new is not None and new != old}
        found[name] = array.drop_vars([old for old in names if old in array.coords]).rename(names)
    return xr.Dataset(found, attrs=data.attrs)


def _batch_shapes(density: Density) -> dict[str, torch.Size]:
    nodes = density.trace(density.constrain(density.sample_box(1, seed=0)[0]))
    shapes = {}
    for name in density.observed:
        value, fn = nodes[name]["value"], nodes[name]["fn"]
        batch = value.shape[: value.dim() - fn.event_dim]
        shapes[name] = torch.broadcast_shapes(batch, fn.batch_shape)
    return shapes


def _of_batches(density: Density, terms: Mapping[str, Tensor]) -> dict[str, list[str | None]]:
    """Plates of the axes of each site's terms: those of its values without the axes of one datum."""
    axes = density.derived.axes
    shapes = _batch_shapes(density)
    return {
        name: axes[name][: value.dim() - 2]
        for name, value in terms.items()
        if name in axes and value.shape[2:] == shapes[name]
    }


def to_numpy(value: Tensor) -> np.ndarray:
    return value.detach().cpu().numpy()
