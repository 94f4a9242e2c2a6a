"""Moments, quantiles and Monte-Carlo errors of draws."""

from __future__ import annotations

import numpy as np
import xarray as xr

from pyrobnn.chains import MIN_DRAWS, ess, rhat

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
    columns = np.moveaxis(draws, 2, 0)
    judged = draws.shape[1] >= MIN_DRAWS and not iid
    worth = ess(columns, "mean") if judged else total
    worth_square = ess(np.moveaxis(square, 2, 0), "mean") if judged else total
    spread = square.reshape(flat.shape).std(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        sd_error = spread / np.sqrt(worth_square) / (2.0 * sd)
    found = {
        "mean": mean,
        "mean_error": sd / np.sqrt(worth),
        "sd": sd,
        "sd_error": np.where(sd > 0.0, sd_error, 0.0),
        "ess_bulk": ess(columns) if judged else total,
        "ess_tail": ess(columns, "tail") if judged else total,
        "rhat": rhat(columns) if judged and len(draws) > 1 else np.full(draws.shape[2], np.nan),
    }
    quantiles = ("level", "quantity"), np.quantile(flat, LEVELS, axis=0)
    return xr.Dataset({name: ("quantity", value) for name, value in found.items()} | {"quantiles": quantiles})
