"""Label switching: chains that disagree until the components of each are put into one order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from pyrobnn.core.chains import rhat
from pyrobnn.diagnostics.evidence import WEIGHTS, Evidence, flattened

#: most components of a mixture that are relabelled
_MOST_COMPONENTS = 20
#: values (chain, draw, component, value), by the names of the sites that they are of
_Components = dict[tuple[str, ...], np.ndarray]


class Relabelled(NamedTuple):
    """The sites whose components were put into one order, and the largest R-hat of their values before and after."""

    sites: list[str]
    before: float
    after: float


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
    groups = _numbered(sites)
    sizes = [*sites[site].shape[2:], *(len(names) for names in groups if site in names), 2]
    for num_components in dict.fromkeys(sizes):
        if not 2 <= num_components <= _MOST_COMPONENTS:
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
    """The groups of sites of one shape whose names differ in one number, or in a last letter, alone."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, values in sites.items():
        stem, count = re.subn(r"\d+|(?<=_)[A-Za-z]$", "#", name)
        if count == 1 and not name.startswith(WEIGHTS):
            groups.setdefault((stem, values.shape), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


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
