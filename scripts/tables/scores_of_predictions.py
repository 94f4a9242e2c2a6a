"""How good predictions are: scores of means and sds, of quantiles, and whether chains agree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pyrobnn.posterior import Posterior


class Predictive(Protocol):
    """Means and variances (row, 1) of the outcomes, and their log densities (row,)."""

    mean: Tensor
    var: Tensor

    def log_prob(self, y: Tensor) -> Tensor:
        """Of outcomes (row, 1)."""


def scores(prediction: Predictive, y: np.ndarray) -> dict[str, float]:
    """Of the predictive's mean and of a normal of its mean and sd; of the mixture itself the log likelihood too."""
    import numpy as np
    import torch

    mean = prediction.mean[:, 0].double().numpy()
    sd = prediction.var[:, 0].double().sqrt().numpy()
    z = (y - mean) / sd
    return {
        "rmse": float(np.sqrt(np.mean((y - mean) ** 2))),
        "nll": float(np.mean(0.5 * z**2 + np.log(sd)) + 0.5 * math.log(2 * math.pi)),
        "coverage_90": float(np.mean(np.abs(z) < 1.6448536)),
        "nll_mixture": -float(
            prediction.log_prob(torch.tensor(y, dtype=torch.float32)[:, None]).mean()
        ),
    }


def pinball_scores(
    y: np.ndarray,
    mean: np.ndarray,
    quantiles: np.ndarray,
    levels: np.ndarray,
) -> dict[str, float]:
    """CRPS by quantiles (row, level) but the first two, which are the ends of the 90 % interval; RMSE of the mean."""
    import numpy as np

    error = y[:, None] - quantiles
    crps = 2 * np.maximum(levels * error, (levels - 1) * error)[:, 2:].mean()
    covered = (error[:, 0] >= 0) & (error[:, 1] <= 0)
    rmse = np.sqrt(np.mean((y - mean) ** 2))
    return {
        "crps": crps,
        "rmse": rmse,
        "coverage_90": covered.mean(),
    }


def agreement(posterior: Posterior, x: Tensor) -> dict[str, float]:
    """R-hat and ESS of the function at each of the rows: the median and the worst."""
    import numpy as np
    from arviz_stats.base import array_stats

    f = np.moveaxis(np.asarray(posterior.predict(x).f[..., 0].double()), -1, 0)
    rhat = [
        float(
            array_stats.rhat(
                values,
                chain_axis=0,
                draw_axis=1,
            )
        )
        for values in f
    ]
    ess = [
        float(
            array_stats.ess(
                values,
                chain_axis=0,
                draw_axis=1,
            )
        )
        for values in f
    ]
    return {
        "rhat": float(np.median(rhat)),
        "rhat_max": max(rhat),
        "ess": float(np.median(ess)),
        "ess_min": min(ess),
    }
