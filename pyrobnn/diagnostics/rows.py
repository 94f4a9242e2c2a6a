"""The order of rows: by an input whose ties the rows have no part in, and as they stand where that says anything."""

from __future__ import annotations

import numpy as np
from scipy import stats

#: a covariate that every table has, and its rank correlation with the outcomes above which it is one of them
ORDER, _SORTED = "the order of the rows", 0.9
#: share of their size by which numbers computed for two rows alike may differ
_ROUNDING = 1e-6


def order_of(y: np.ndarray | None, covariates: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The order of the rows, unless they were sorted by their outcomes (row, …), of which errors are a part.

    Nor where they were sorted by a covariate: what the order shows is then what that shows.
    """
    if y is None:
        return {}
    first = y.reshape(len(y), -1)[:, 0]
    if np.ptp(first) == 0.0 or any(_sorted_by(each) for each in (first, *covariates.values())):
        return {}
    return {ORDER: np.arange(len(y), dtype=np.float64)}


def _sorted_by(values: np.ndarray) -> bool:
    """Whether rows stand nearly as if they had been sorted by values (row,), of which many may be the same."""
    if np.ptp(values) == 0.0:
        return False
    order = np.arange(len(values))
    found, most = (abs(float(stats.spearmanr(order, each).statistic)) for each in (values, np.sort(values)))
    return found > _SORTED * most


def in_order(values: np.ndarray) -> np.ndarray:
    """Indices of values (point,) in their order; among ties in one that the rows have no part in."""
    return np.lexsort((np.random.default_rng(0).permutation(len(values)), values))


def merged(values: np.ndarray) -> np.ndarray:
    """Computed values (point,), those that differ by rounding alone made the same: it depends on the place of a row."""
    order = np.argsort(values)
    ascending = values[order]
    new = np.diff(ascending, prepend=-np.inf) > _ROUNDING * np.median(np.abs(values))
    found = np.empty_like(values)
    found[order] = ascending[new][np.cumsum(new) - 1]
    return found
