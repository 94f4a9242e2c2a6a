"""The groups of a plain program's tree: every observed site under its own name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import xarray as xr
from torch import Tensor

from pyrobnn.core import groups as group
from pyrobnn.core.seeding import seeded
from pyrobnn.model import Density, derived
from pyrobnn.model.gradient import at_each
from pyrobnn.model.nodes import Node
from pyrobnn.posterior.approximation import DRAWS_AT_ONCE, PosteriorLike
from pyrobnn.posterior.arrays import Dims, few_draws, sample_dataset, site_dataset, to_numpy
from pyrobnn.posterior.invariance import moved_functions, posterior_density
from pyrobnn.posterior.one_step import joint_events, one_step

#: seconds that replicates may take, as a share of the fit's, and whatever the fit took
_SHARE_OF_FIT = 0.25
_LEAST_SECONDS = 1.0


def program_groups(
    posterior: PosteriorLike,
    x: Tensor | None,
    y: Tensor | None,
    num_prior_draws: int,
    seed: int,
) -> dict[str, xr.Dataset]:
    """What the program says of its data, before and after them; arguments as of ``to_datatree``."""
    density = cast(Density, posterior_density(posterior, x, y))
    axes = density.derived.axes
    num_values = sum(density.derived.replicated.values())
    thinned = few_draws(posterior, max(num_values, 1))
    nodes = _nodes_at(density, thinned.draws, (0, 0))
    values = {name: node["value"] for name, node in nodes.items() if "value" in node}
    data = _data(density, thinned.draws, values)
    # judging is to cost no more than fitting
    seconds = max(_LEAST_SECONDS, _SHARE_OF_FIT * posterior.meta.get("timings", {}).get("fit", 0.0))
    replicates = derived.replicates(density, thinned.draws, seed, seconds)
    groups = _densities(thinned, density, values)
    events = {name: count for name, count in joint_events(nodes).items() if name in data}
    groups[group.OBSERVED_DATA] = site_dataset(data, axes, sample_dims=[])
    for name, count in events.items():
        groups[group.OBSERVED_DATA][group.variable(name)].attrs[group.EVENTS] = count
    groups[group.ONE_STEP] = one_step(posterior, density, events)
    groups[group.POSTERIOR_PREDICTIVE] = site_dataset(_of_sites(replicates, data), axes)
    if num_prior_draws:
        prior_draws, prior_data = derived.prior(density, num_prior_draws, seed, 0.5 * seconds)
        groups[group.PRIOR] = site_dataset(prior_draws, axes)
        groups[group.PRIOR_PREDICTIVE] = site_dataset(_of_sites(prior_data, data), axes)
    if isinstance(x, Tensor) and x.dim():
        groups[group.CONSTANT_DATA] = _program_inputs(x, data, axes)
    moved = moved_functions(posterior, x, y, None)
    if moved is not None:
        groups[group.MOVED] = moved
    return {name: dataset for name, dataset in groups.items() if dataset.data_vars}


def _densities(
    posterior: PosteriorLike,
    density: Density,
    values: Mapping[str, Tensor],
) -> dict[str, xr.Dataset]:
    """The groups of the log prior and of each datum's log likelihood; ``values`` are those of all sites in a run."""
    log_prior, terms = log_densities_by_site(posterior, density)
    axes = _axes_of_terms(terms, values, density.derived.axes)
    return {
        group.LOG_PRIOR: sample_dataset(log_prior=(log_prior,)),
        group.LOG_LIKELIHOOD: site_dataset(terms, axes),
    }


def _of_sites(values: Mapping[str, Tensor], sites: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of these sites alone, in the order of the values."""
    return {name: value for name, value in values.items() if name in sites}


def _values_at(
    density: Density, draws: Mapping[str, Tensor], index: tuple[int, int]
) -> dict[str, Tensor]:
    """The values of all sites in a run of the program at the draw ``index`` (chain, draw)."""
    nodes = _nodes_at(density, draws, index)
    return {name: node["value"] for name, node in nodes.items() if "value" in node}


def _nodes_at(
    density: Density, draws: Mapping[str, Tensor], index: tuple[int, int]
) -> Mapping[str, Node]:
    """The nodes of a run of the program at the draw ``index`` (chain, draw)."""
    with seeded(0, density.device):
        return density.run({name: value[index] for name, value in draws.items()})


def _data(
    density: Density, draws: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The observed sites that hold data, of the ``values`` of all sites at the first draw."""
    at_last_draw = _values_at(density, draws, (-1, -1))
    sites = density.derived.replicated
    return {name: values[name] for name in sites if _is_data(values[name], at_last_draw[name])}


def _is_data(value: Tensor, at_last_draw: Tensor) -> bool:
    """Whether an observed site has the same value at two draws, for half of its scalars or more.

    Residuals that a program computes from latent values are not data; gaps that those fill may stay.
    """
    same = (value == at_last_draw) | (value.isnan() & at_last_draw.isnan())
    return 2 * int(same.sum()) >= value.numel()


def _axes_of_terms(terms: Mapping[str, Tensor], values: Mapping[str, Tensor], axes: Dims) -> Dims:
    """The names of the axes of each datum's terms (chain, draw, …), where those are the first axes of its site."""
    names = {}
    for site, term in terms.items():
        shape = values[site].shape[: term.dim() - 2]
        if site in axes and term.shape[2:] == shape:
            names[site] = axes[site][: len(shape)]
    return names


def _program_inputs(x: Tensor, data: Mapping[str, Tensor], axes: Dims) -> xr.Dataset:
    """Inputs whose rows have the name of the observed sites' one first axis, if it is as long; else ``"obs"``."""
    names = set()
    for site, value in data.items():
        if value.dim():
            names.add((axes[site][0] if site in axes else None, len(value)))
    name, length = names.pop() if len(names) == 1 else (None, None)
    dims = (name if name and length == len(x) else "obs", "feature")
    return xr.Dataset({"x": (dims, to_numpy(x.reshape(len(x), -1)))})


def log_densities_by_site(
    posterior: PosteriorLike, density: Density
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log prior (chain, draw) with the factors of no datum, and each datum's terms, site → (chain, draw, \\*axes)."""
    z = density.unconstrain(posterior.draws)

    def densities(point: Tensor) -> dict[str, Tensor]:
        # no site has the name ""
        return {"": density.log_base(point), **density.data_terms(point)}

    terms = at_each(
        densities,
        z.reshape(-1, density.dim),
        at_once=DRAWS_AT_ONCE,
    )
    base = terms.pop("").reshape(z.shape[:-1])
    by_site = {}
    for name, value in terms.items():
        by_site[name] = value.reshape(*z.shape[:-1], *(value.shape[1:] or (1,)))
    return base, by_site
