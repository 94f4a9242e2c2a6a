"""Latent values of single data: an effect of each row, or of groups of a few rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pyrobnn.diagnostics.evidence import WEIGHTS, Evidence, flattened, spread, statistic

#: data for one value of a site from which on a datum moves its own prediction little
_FEW_ROWS = 10
#: draws and values that show whether values vary on their own
_NUM_DRAWS = 400
_NUM_VALUES = 200


class OwnLatents(NamedTuple):
    """How many values a site has, and how many data there are."""

    num_values: int
    num_data: int


@statistic
def own_latents(evidence: Evidence, num_data: int) -> OwnLatents | None:
    """The largest site that has a value for every ten data or fewer; None where none has.

    Such a value is drawn to its data. In-sample errors are then small and lie on the same side of the predicted mean as
    the data do, of a right model too. Weights of a net, which all data share, do not count, nor what is computed from
    fewer values.
    """
    most = 0
    for name, draws in evidence.sites.items():
        values = flattened(draws, 2)
        size = values.shape[2]
        is_computed = name in evidence.computed or name.startswith(WEIGHTS)
        if is_computed or size <= max(most, num_data / _FEW_ROWS):
            continue
        if _vary_on_their_own(values.reshape(-1, size)):
            most = size
    return OwnLatents(most, num_data) if most else None


def _vary_on_their_own(values: np.ndarray) -> bool:
    """Whether draws (draw, value) move in about as many directions as there are values; so too of a single draw."""
    num_draws, size = values.shape
    sample = values[spread(num_draws, _NUM_DRAWS)][:, spread(size, _NUM_VALUES)].astype(np.float64)
    deviations = sample - sample.mean(axis=0)
    deviations = deviations[:, np.ptp(sample, axis=0) > 0.0]
    if num_draws < 2:
        return True
    if not deviations.size:
        return False
    directions = deviations / np.linalg.norm(deviations, axis=0)
    rank = int(np.linalg.matrix_rank(directions, rtol=1e-3))
    return 2 * rank > min(len(sample) - 1, sample.shape[1])
