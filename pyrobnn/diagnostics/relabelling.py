"""Label switching: chains that disagree until the components of each are put into one order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from pyrobnn.core.chains import rhat
from pyrobnn.core.component_names import MOST_COMPONENTS, Exchange, numbered_sites
from pyrobnn.core.groups import EXCHANGE
from pyrobnn.diagnostics.evidence import WEIGHTS, Evidence, flattened
from pyrobnn.diagnostics.evidence import labels as names_along
from pyrobnn.diagnostics.grades import Found, Limits
from pyrobnn.diagnostics.limits import RHAT_LIMITS

#: most components whose orders are all tried
_MOST_TRIED = 6
#: values (chain, draw, component, value), by the names of the sites that they are of
_Components = dict[tuple[str, ...], np.ndarray]


class Relabelled(NamedTuple):
    """The sites whose components were put into one order, and the largest R-hat of their values before and after."""

    sites: list[str]
    before: float
    after: float


def _relabelled(
    exchange: Exchange, sites: Mapping[str, np.ndarray], limit: float
) -> Relabelled | None:
    """The sites, if their chains agree once each is in the order whose means are nearest to the first chain's."""
    if exchange.num_components > _MOST_TRIED:
        return None
    own = {name: sites[name].astype(np.float64) for name in exchange.sites}
    before = _rhat_of(exchange, own)
    orders = [*itertools.permutations(range(exchange.num_components))]
    aligned = {name: values.copy() for name, values in own.items()}
    first = {name: values[0] for name, values in own.items()}
    for chain in range(1, len(next(iter(own.values())))):
        values = {name: of_site[chain] for name, of_site in own.items()}
        nearest = min(
            (exchange.applied(values, order) for order in orders),
            key=lambda moved: _squared_distance(first, moved),
        )
        for name, of_site in nearest.items():
            aligned[name][chain] = of_site
    after = _rhat_of(exchange, aligned)
    return Relabelled(exchange.sites, before, after) if after <= limit < before else None


def _rhat_of(exchange: Exchange, sites: Mapping[str, np.ndarray]) -> float:
    """The largest R-hat of any value of any exchanged site."""
    return _largest_rhat({(name,): sites[name] for name in exchange.sites})


def _squared_distance(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> float:
    """Squared distance of the means of sites (draw, …) of two chains, in their variances."""
    total = 0.0
    for name, values in first.items():
        variance = 0.5 * (values.var(axis=0) + second[name].var(axis=0))
        difference = values.mean(axis=0) - second[name].mean(axis=0)
        total += float((difference**2 / np.where(variance > 0.0, variance, 1.0)).sum())
    return total


def _known_exchanges(evidence: Evidence) -> list[Exchange]:
    """The exchanges of components that the tree of a program says leave its density as it is."""
    counts = evidence.variable(EXCHANGE, "num_components")
    if counts is None:
        return []
    exchanges = []
    for count, text in zip(counts.values, names_along(counts, "exchange") or []):
        exchange = Exchange.from_json(int(count), text)
        if all(name in evidence.sites for name in exchange.sites):
            exchanges.append(exchange)
    return exchanges


def component_order(evidence: Evidence, _: Limits) -> Found | None:
    """Whether the draws keep one order of components that the density of the program does not tell apart.

    The density is the same when components that lie apart in the draws are exchanged, so the posterior has a mode
    for each of their orders, and draws of one of them are right up to that order. What depends on no order, such as
    predictions and densities, is the posterior's.

    Reference: Dealing with label switching in mixture models (Stephens, 2000).
    """
    for exchange in _known_exchanges(evidence):
        is_switched = (
            evidence.num_chains > 1 and _rhat_of(exchange, evidence.sites) > RHAT_LIMITS[-1]
        )
        if not is_switched:
            numbers = {"sites": ", ".join(map(repr, exchange.sites))}
            return Found(
                "info", float(math.factorial(exchange.num_components)), "one_order", numbers
            )
    return None


def switched_labels(evidence: Evidence, site: str, limit: float) -> Relabelled | None:
    """The sites of a mixture's components, if their chains agree after a permutation of the components of each chain.

    They are sites with an axis of components, sites whose names differ in a number or a last letter alone (``slope_1``,
    ``slope_2``), and beside those of two components a share of the first, which is one minus it after an exchange.

    Args:
        site: whose chains disagree.
        limit: the R-hat that chains which agree may have.

    Returns:
        None where the chains still disagree, or the site is of no component.

    Reference: Dealing with label switching in mixture models (Stephens, 2000).
    """
    sites = evidence.sites
    if site not in sites or evidence.num_chains < 2:
        return None
    for exchange in _known_exchanges(evidence):
        if site in exchange.sites:
            return _relabelled(exchange, sites, limit)
    groups = _numbered(sites)
    sizes = [*sites[site].shape[2:], *(len(names) for names in groups if site in names), 2]
    for num_components in dict.fromkeys(sizes):
        if not 2 <= num_components <= MOST_COMPONENTS:
            continue
        components = _components(sites, groups, num_components)
        if components and num_components == 2:
            components |= _shares(sites, components, limit)
        names = [name for members in components for name in members]
        if site not in names:
            continue
        before = _largest_rhat(components)
        after = _largest_rhat(_aligned(components))
        if after <= limit < before:
            return Relabelled(names, before, after)
    return None


def _components(
    sites: Mapping[str, np.ndarray], groups: Sequence[tuple[str, ...]], num_components: int
) -> _Components:
    """Values (chain, draw, component, value) of all that has so many components, by the names of its sites."""
    components: _Components = {
        (name,): _by_component(values.astype(np.float64), num_components)
        for name, values in sites.items()
        if num_components in values.shape[2:]
    }
    for names in groups:
        if len(names) == num_components and not any((name,) in components for name in names):
            stacked = np.stack([sites[name].astype(np.float64) for name in names], axis=2)
            components[names] = flattened(stacked, 3)
    return components


def _numbered(sites: Mapping[str, np.ndarray]) -> list[tuple[str, ...]]:
    """The groups of sites whose names differ in a number or a last letter alone, weights of networks left out."""
    return numbered_sites(
        {name: values.shape for name, values in sites.items() if not name.startswith(WEIGHTS)}
    )


def _shares(
    sites: Mapping[str, np.ndarray],
    components: Mapping[tuple[str, ...], np.ndarray],
    limit: float,
) -> _Components:
    """Sites of one number between zero and one whose chains disagree, as the shares of two components."""
    known = {name for names in components for name in names}
    shares: _Components = {}
    for name, values in sites.items():
        share = values.astype(np.float64).reshape(*values.shape[:2], -1)
        if name in known or share.shape[2] != 1 or share.min() < 0.0 or share.max() > 1.0:
            continue
        both = np.stack([share, 1.0 - share], axis=2)
        if _largest_rhat({(name,): both}) > limit:
            shares[(name,)] = both
    return shares


def _by_component(values: np.ndarray, num_components: int) -> np.ndarray:
    """Values (chain, draw, …) as (chain, draw, component, value), the first axis of that length the components."""
    axis = 2 + values.shape[2:].index(num_components)
    return flattened(np.moveaxis(values, axis, 2), 3)


def _aligned(
    components: Mapping[tuple[str, ...], np.ndarray],
) -> _Components:
    """The components of every chain in the order that brings their means nearest to those of the first chain."""
    stacked = np.concatenate([*components.values()], axis=3)
    within = stacked.var(axis=1).mean(axis=(0, 1))
    means = stacked.mean(axis=1) / np.sqrt(np.where(within > 0.0, within, 1.0))
    aligned = {name: values.copy() for name, values in components.items()}
    for chain in range(1, len(means)):
        distance = ((means[0][:, None] - means[chain][None]) ** 2).sum(axis=-1)
        order = linear_sum_assignment(distance)[1]
        for name, values in components.items():
            aligned[name][chain] = values[chain][:, order]
    return aligned


def _largest_rhat(components: Mapping[tuple[str, ...], np.ndarray]) -> float:
    """The largest R-hat of any value of any component."""
    ratios = []
    for values in components.values():
        columns = np.moveaxis(flattened(values, 2), 2, 0)
        columns = columns[columns.std(axis=(1, 2)) > 0.0]
        if len(columns):
            ratios.append(np.nanmax(rhat(columns), initial=1.0))
    return float(max(ratios, default=1.0))
