"""What of a net's posterior is identified, and so can be compared between runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pyrobnn.data import Dataset
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.datatree import log_densities

#: kinds beside those of the probes
NOISE, DENSITY = "noise", "density"


@dataclass(frozen=True, eq=False)
class Quantities:
    """Draws of identified quantities.

    Args:
        names: of each, as "f at probe 3, output 1".
        kinds: of each: "train", "between" and "outside" (the function at probes of that kind), "noise" (its sd) or
            "density" (log-likelihood of all data, log prior).
        draws: (chain, draw, quantity), those of the function first, probe by probe.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    draws: np.ndarray


def quantities(posterior: Posterior, data: Dataset, probe_x: Tensor, probe_kinds: list[str]) -> Quantities:
    """The function at the probes, the noise where it is inferred, the log-likelihood and the log prior."""
    prediction = posterior.predict(probe_x)
    f = prediction.f.cpu().double().numpy()
    outputs = f.shape[3]
    names = [
        f"f at probe {probe}" + (f", output {output}" if outputs > 1 else "")
        for probe in range(len(probe_x))
        for output in range(outputs)
    ]
    kinds = [kind for kind in probe_kinds for _ in range(outputs)]
    columns = [f.reshape(*f.shape[:2], -1)]
    likelihood = posterior.bnn.likelihood
    if prediction.task == "gaussian" and (likelihood.priors or likelihood.heads > 1):
        scale = prediction.scale.cpu().double().numpy()[..., 0]
        scale = scale if likelihood.heads > 1 else scale[:, :, :1]
        names += [f"noise at probe {k}" for k in range(len(probe_x))] if scale.shape[2] > 1 else ["noise"]
        columns.append(scale)
    log_prior, log_likelihood = log_densities(posterior, data.x, data.y)
    columns += [
        each.cpu().double().numpy()[..., None] for each in (log_likelihood.double().sum(-1), log_prior)
    ]
    kinds += [NOISE] * (len(names) - len(kinds)) + [DENSITY] * 2
    return Quantities((*names, "log-likelihood", "log prior"), tuple(kinds), np.concatenate(columns, 2))
