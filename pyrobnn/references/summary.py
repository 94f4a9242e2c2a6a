"""Moments, quantiles and Monte-Carlo errors of draws."""

from __future__ import annotations

import numpy as np
import xarray as xr

from pyrobnn.diagnostics.ess import bulk_ess, mean_ess, tail_ess
from pyrobnn.diagnostics.rhat import rank_rhat

#: levels of the quantiles, in the middle of a hundred parts of equal weight
LEVELS = (np.arange(100) + 0.5) / 100


def summarised(draws: np.ndarray, *, iid: bool = False) -> xr.Dataset:
    """Moments of draws with their Monte-Carlo errors.

    Args:
        draws: (chain, draw, quantity).
        iid: whether they are independent, so that their number is their effective sample size.

    Returns:
        Dataset over ``quantity`` with ``mean``, ``mean_error``, ``sd``, ``sd_error``, ``ess_bulk``, ``ess_tail`` and
        ``rhat`` (NaN of a single chain), and ``quantiles`` (level, quantity).
    """
    flat = draws.reshape(-1, draws.shape[2])
    mean, sd = flat.mean(0), flat.std(0, ddof=1) if len(flat) > 1 else np.zeros(draws.shape[2])
    square = (draws - mean) ** 2
    total = np.full(draws.shape[2], float(len(flat)))
    judged = draws.shape[1] >= 4 and not iid
    ess, ess_square = (mean_ess(draws), mean_ess(square)) if judged else (total, total)
    spread = square.reshape(flat.shape).std(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        sd_error = spread / np.sqrt(ess_square) / (2.0 * sd)
    columns = {
        "mean": mean,
        "mean_error": sd / np.sqrt(ess),
        "sd": sd,
        "sd_error": np.where(sd > 0.0, sd_error, 0.0),
        "ess_bulk": bulk_ess(draws) if judged else total,
        "ess_tail": tail_ess(draws) if judged else total,
        "rhat": rank_rhat(draws) if judged and len(draws) > 1 else np.full(draws.shape[2], np.nan),
    }
    found = {name: ("quantity", value) for name, value in columns.items()}
    quantiles = ("level", "quantity"), np.quantile(flat, LEVELS, axis=0)
    return xr.Dataset(found | {"quantiles": quantiles})
