"""The groups of a plain program's tree: every observed site under its own name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import pyro.distributions as dist
import torch
import xarray as xr
from torch import Tensor

from pyrobnn.core import groups as group
from pyrobnn.core.seeding import seeded
from pyrobnn.model import Density, derived
from pyrobnn.model.distribution_kinds import elementwise
from pyrobnn.model.gradient import at_each
from pyrobnn.model.nodes import Node, is_datum
from pyrobnn.posterior.approximation import DRAWS_AT_ONCE, PosteriorLike
from pyrobnn.posterior.arrays import Dims, few_draws, sample_dataset, site_dataset, to_numpy
from pyrobnn.posterior.component_exchange import exchange_group
from pyrobnn.posterior.invariance import (
    moved_functions,
    posterior_density,
    sites_beside_posterior,
    stein_statistics,
)
from pyrobnn.posterior.one_step import joint_events, one_step
from pyrobnn.posterior.short_chains import evenly

#: seconds that replicates may take: a share of the fit's, and at least this many
_SHARE_OF_FIT = 0.25
_LEAST_SECONDS = 1.0
#: parameters and data of all the draws at which the log densities are computed together
_NUMBERS_AT_ONCE = 2**18


@dataclass(frozen=True, eq=False)
class _Fitted:
    """A program with the draws that judge it.

    Args:
        posterior: of few enough draws for replicates of all data.
        density: of the program and its data.
        nodes: of the program's run at the first of the draws.
        data: the observed sites that hold data, with their values.
    """

    posterior: PosteriorLike
    density: Density
    nodes: Mapping[str, Node]
    data: Mapping[str, Tensor]

    @property
    def axes(self) -> Dims:
        """The names of the axes of every site that has plates."""
        return self.density.derived.axes

    @property
    def events(self) -> dict[str, int]:
        """The number of joint events of every site with data that has such."""
        return {
            name: count for name, count in joint_events(self.nodes).items() if name in self.data
        }

    def of_data(self, values: Mapping[str, Tensor]) -> xr.Dataset:
        """Values (chain, draw, …) of the sites with data alone."""
        return site_dataset(
            {name: value for name, value in values.items() if name in self.data},
            self.axes,
        )


def program_groups(
    posterior: PosteriorLike,
    x: Tensor | None,
    y: Tensor | None,
    num_prior_draws: int,
    seed: int,
) -> dict[str, xr.Dataset]:
    """What the program says of its data, before and after them; arguments as of ``to_datatree``."""
    density = _judged_density(posterior, x, y)
    fitted = _fitted(posterior, density)
    # judging is to cost no more than fitting
    fit_seconds = posterior.meta.get("timings", {}).get("fit", 0.0)
    seconds = max(_LEAST_SECONDS, _SHARE_OF_FIT * fit_seconds)
    replicates = derived.replicates(density, fitted.posterior.draws, seed, seconds)
    groups = _densities(fitted)
    groups[group.OBSERVED_DATA] = _observed_data(fitted)
    groups[group.COUNTED] = _counted(fitted)
    groups[group.ONE_STEP] = one_step(posterior, density, fitted.events)
    groups[group.POSTERIOR_PREDICTIVE] = fitted.of_data(replicates)
    groups[group.EXCHANGE] = exchange_group(density, posterior.draws)
    if num_prior_draws:
        prior_draws, prior_data = derived.prior(density, num_prior_draws, seed, 0.5 * seconds)
        groups[group.PRIOR] = site_dataset(prior_draws, fitted.axes)
        groups[group.PRIOR_PREDICTIVE] = fitted.of_data(prior_data)
    if isinstance(x, Tensor) and x.dim():
        groups[group.CONSTANT_DATA] = _program_inputs(x, fitted.data, fitted.axes)
    moved = _moved_group(posterior, density, y)
    if moved is not None:
        groups[group.MOVED] = moved
    statistics = stein_statistics(posterior, density, y)
    if statistics is not None:
        groups[group.STEIN] = statistics
    return {name: dataset for name, dataset in groups.items() if dataset.data_vars}


def _judged_density(posterior: PosteriorLike, x: Tensor | None, y: Tensor | None) -> Density:
    """The density of a program and its data, in fewer operations where it repeats many: all that judges takes it."""
    density = cast(Density, posterior_density(posterior, x, y))
    if density.stochastic is not None:
        return density
    draws = {site.name: posterior.draws[site.name].flatten(0, 1) for site in density.sites}
    return density.in_fewer_operations(evenly(density.unconstrain(draws), 2))


def _moved_group(posterior: PosteriorLike, density: Density, y: Tensor | None) -> xr.Dataset | None:
    """The group ``MOVED``: of independent draws beside short chains that have arrived, or else of draws that moved."""
    independent = posterior.meta.get("kind") == "independent"
    if independent and posterior.num_chains * posterior.num_draws > 1:
        beside = sites_beside_posterior(posterior, density, y)
        if beside is not None:
            return beside
    return moved_functions(posterior, density, y, None)


def _fitted(posterior: PosteriorLike, density: Density) -> _Fitted:
    """The program at few of the posterior's draws."""
    num_values = sum(density.derived.replicated.values())
    thinned = few_draws(posterior, max(num_values, 1))
    nodes = _nodes_at(density, thinned.draws, (0, 0))
    return _Fitted(
        thinned,
        density,
        nodes,
        _data(density, thinned.draws, _values(nodes)),
    )


def _observed_data(fitted: _Fitted) -> xr.Dataset:
    """The data by site; a site of joint events says how many they are."""
    dataset = site_dataset(fitted.data, fitted.axes, sample_dims=[])
    for name, count in fitted.events.items():
        dataset[group.variable(name)].attrs[group.EVENTS] = count
    for name in _selected_by_outcome(fitted):
        dataset[group.variable(name)].attrs[group.SELECTED] = 1
    return dataset


def _selected_by_outcome(fitted: _Fitted) -> set[str]:
    """The sites whose rows may have been chosen by their outcome, as those that are not censored.

    A program writes censoring with two sites: where one is masked the other is not, or one of them is a probability
    that is observed as 1 throughout ("ones trick"), which selects the rows of all. A factor may take the place of the
    second site.
    """
    by_factor = _masked_beside_factor(fitted)
    if by_factor or len(fitted.data) < 2:
        return by_factor
    if any(_is_ones_trick(fitted.nodes[name]) for name in fitted.data):
        return set(fitted.data)
    masks = {name: _mask(fitted.nodes[name]) for name in fitted.data}
    selected: set[str] = set()
    for one, other in itertools.combinations(fitted.data, 2):
        if _complementary(masks[one], masks[other]):
            selected |= {one, other}
    return selected


def _masked_beside_factor(fitted: _Fitted) -> set[str]:
    """The sites of which some data are masked, in plates that a factor has terms in: those of the masked rows."""
    with_factors = {
        plate.name
        for node in fitted.nodes.values()
        if is_datum(node) and isinstance(node["fn"], dist.Unit)
        for plate in node["cond_indep_stack"]
    }
    masked = set()
    for name in fitted.data:
        node = fitted.nodes[name]
        mask = _mask(node)
        plates = {plate.name for plate in node["cond_indep_stack"]}
        if mask is not None and bool(mask.any()) and not bool(mask.all()) and plates & with_factors:
            masked.add(name)
    return masked


def _is_ones_trick(node: Node) -> bool:
    """Whether a site is several events of given probabilities that all happened."""
    of_events = isinstance(elementwise(node["fn"]), torch.distributions.Bernoulli)
    return of_events and node["value"].numel() > 1 and bool((node["value"] == 1).all())


def _mask(node: Node) -> Tensor | None:
    """The rows of a site that count, where some may not."""
    law = elementwise(node["fn"])
    if isinstance(law, dist.MaskedDistribution) and isinstance(law._mask, Tensor):
        return law._mask
    return node["mask"] if isinstance(node["mask"], Tensor) else None


def _counted(fitted: _Fitted) -> xr.Dataset:
    """Which data of a site count, where some do not."""
    counted = {}
    for name in fitted.data:
        mask = _mask(fitted.nodes[name])
        if mask is not None and not bool(mask.all()):
            counted[name] = mask.expand(fitted.nodes[name]["fn"].batch_shape).to(torch.int8)
    return site_dataset(counted, fitted.axes, sample_dims=[])


def _complementary(mask: Tensor | None, other: Tensor | None) -> bool:
    """Whether each row counts under one of two masks, some under each."""
    if mask is None or other is None or mask.shape != other.shape:
        return False
    return bool((mask != other).all()) and bool(mask.any()) and not bool(mask.all())


def _densities(fitted: _Fitted) -> dict[str, xr.Dataset]:
    """The groups of the log prior and of each datum's log likelihood."""
    log_prior, terms = log_densities_by_site(fitted.posterior, fitted.density)
    axes = _axes_of_terms(terms, _values(fitted.nodes), fitted.axes)
    return {
        group.LOG_PRIOR: sample_dataset(log_prior=(log_prior,)),
        group.LOG_LIKELIHOOD: site_dataset(terms, axes),
    }


def _values(nodes: Mapping[str, Node]) -> dict[str, Tensor]:
    """The value of every site of a run."""
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
    at_last_draw = _values(_nodes_at(density, draws, (-1, -1)))
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
    """Inputs whose rows have the name of the observed sites' one first axis, if it is as long; else ``"obs"``.

    A program may take its data as ``x`` and observe its columns: those are outcomes, and no inputs.
    """
    first_axes = set()
    outcomes: list[Tensor] = []
    for site, value in data.items():
        if value.dim():
            name = axes[site][0] if site in axes else None
            first_axes.add((name, len(value)))
            outcomes += value.reshape(len(value), -1).unbind(1)
    rows = "obs"
    if len(first_axes) == 1:
        name, length = first_axes.pop()
        if name and length == len(x):
            rows = name
    columns = [
        column
        for column in x.reshape(len(x), -1).unbind(1)
        if not any(_is_copy(column, outcome) for outcome in outcomes)
    ]
    if not columns:
        return xr.Dataset()
    return xr.Dataset({"x": ((rows, "feature"), to_numpy(torch.stack(columns, 1)))})


def _is_copy(column: Tensor, outcome: Tensor) -> bool:
    """Whether a column of inputs (N,) holds what an observed site holds, in whichever type."""
    if column.shape != outcome.shape:
        return False
    return torch.equal(column.double(), outcome.to(column.device).double())


def log_densities_by_site(
    posterior: PosteriorLike, density: Density
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log prior (chain, draw) with the factors of no datum, and each datum's terms, site → (chain, draw, \\*axes)."""
    z = density.unconstrain(posterior.draws)

    def densities(point: Tensor) -> dict[str, Tensor]:
        # no site has the name ""
        return {"": density.log_base(point), **density.data_terms(point)}

    numbers_per_draw = density.dim + sum(density.derived.replicated.values())
    # the Python of the program runs once for each batch of draws
    at_once = max(DRAWS_AT_ONCE, _NUMBERS_AT_ONCE // max(1, numbers_per_draw))
    flat = at_each(densities, z.reshape(-1, density.dim), at_once=at_once)
    base = flat.pop("").reshape(z.shape[:-1])
    terms = {}
    for name, value in flat.items():
        axes = value.shape[1:] or (1,)
        terms[name] = value.reshape(*z.shape[:-1], *axes)
    return base, terms
