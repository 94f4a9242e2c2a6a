"""Label switching: chains that disagree until the components of each are put into one order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from pyrobnn.core.chains import rhat
from pyrobnn.diagnostics.evidence import Evidence, flattened

#: most components of a mixture that are relabelled
_MOST_COMPONENTS = 20


class Relabelled(NamedTuple):
    """The sites whose components were put into one order, and the largest R-hat of their values before and after."""

    sites: list[str]
    before: float
    after: float


def switched_labels(evidence: Evidence, site: str, limit: float) -> Relabelled | None:
    """The sites with as many components as the site has, if their chains agree after a permutation of each chain.

    Args:
        site: whose chains disagree.
        limit: the R-hat that chains which agree may have.

    Returns:
        None where the chains still disagree, or the site has no axis of components.

    Reference: Dealing with label switching in mixture models (Stephens, 2000).
    """
    draws = evidence.sites.get(site)
    if draws is None or draws.shape[0] < 2:
        return None
    for num_components in dict.fromkeys(draws.shape[2:]):
        if not 2 <= num_components <= _MOST_COMPONENTS:
            continue
        components = {
            name: _by_component(values.astype(np.float64), num_components)
            for name, values in evidence.sites.items()
            if num_components in values.shape[2:]
        }
        aligned = _aligned(components)
        before = _largest_rhat(components)
        after = _largest_rhat(aligned)
        if after <= limit < before:
            return Relabelled(list(components), before, after)
    return None


def _by_component(values: np.ndarray, num_components: int) -> np.ndarray:
    """Values (chain, draw, …) as (chain, draw, component, value), the first axis of that length the components."""
    axis = 2 + values.shape[2:].index(num_components)
    return flattened(np.moveaxis(values, axis, 2), 3)


def _aligned(components: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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


def _largest_rhat(components: Mapping[str, np.ndarray]) -> float:
    """The largest R-hat of any value of any component."""
    ratios = []
    for values in components.values():
        columns = np.moveaxis(flattened(values, 2), 2, 0)
        columns = columns[columns.std(axis=(1, 2)) > 0.0]
        if len(columns):
            ratios.append(np.nanmax(rhat(columns), initial=1.0))
    return float(max(ratios, default=1.0))
