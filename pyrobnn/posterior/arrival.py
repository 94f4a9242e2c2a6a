r"""Whether hundreds of short chains have reached their target.

Chains are in groups, and those of a group begin at one point: once the means of the groups differ by no more than
chance, the chains have forgotten where they began, however short they are.

*Nested R-hat: assessing the convergence of Markov chain Monte Carlo when running many short chains* (Margossian et al.,
2024), https://arxiv.org/abs/2110.13017
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

#: largest change from one half of a window to the other that is no drift: of a mean (in sds), and of a log sd
_DRIFT = 0.25, 0.2
#: correlation of the end of a window with its beginning, up to which chains have forgotten where they were
_MEMORY = 0.5
#: transitions that a window of two halves has at least
_LEAST_TRANSITIONS = 4
#: B / W allowed at convergence beyond 1 / (chains of a group), which chance alone makes (Margossian et al., section 4)
_CHANCE = 0.04


class Arrival(NamedTuple):
    """How near chains are to convergence, by the worst quantity.

    Args:
        nested_rhat: R-hat of the groups.
        shift: change of the mean from one half of the window to the other, in sds.
        log_ratio: change of the log sd.
        memory: correlation over chains of the end of the window with its beginning; one if chains hardly move.
        limit: what nested R-hat stays below at convergence.
    """

    nested_rhat: float
    shift: float
    log_ratio: float
    memory: float
    limit: float

    @property
    def is_converged(self) -> bool:
        """Whether the groups agree, and nothing drifts."""
        steady = self.shift <= _DRIFT[0] and self.log_ratio <= _DRIFT[1]
        return steady and self.memory <= _MEMORY and self.nested_rhat <= self.limit


#: the arrival of chains about which nothing is known
NOWHERE = Arrival(math.inf, math.inf, math.inf, 1.0, 1.0)


def arrival(values: np.ndarray, num_groups: int) -> Arrival:
    """How far quantities (quantity, transition, chain) of chains, group by group, have come.

    `NOWHERE` where one is not finite, or of fewer than four transitions.
    """
    if values.shape[1] < _LEAST_TRANSITIONS or not np.isfinite(values).all():
        return NOWHERE
    moving = values[np.ptp(values, axis=(1, 2)) > 0.0]
    if not len(moving):
        return NOWHERE
    shift, log_ratio = _drift(moving)
    return Arrival(
        float(nested_rhat(moving, num_groups).max()),
        float(shift.max()),
        float(log_ratio.max()),
        float(_memory(moving).max()),
        math.sqrt(1.0 + num_groups / moving.shape[2] + _CHANCE),
    )


def _drift(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far the mean (sds) and the log sd of values (quantity, transition, chain) change from half to half."""
    half = values.shape[1] // 2
    early = values[:, :half].reshape(len(values), -1)
    late = values[:, -half:].reshape(len(values), -1)
    sd_early = np.maximum(early.std(axis=1), 1e-300)
    sd_late = np.maximum(late.std(axis=1), 1e-300)
    shift = np.abs(late.mean(axis=1) - early.mean(axis=1)) / sd_late
    return shift, np.abs(np.log(sd_late / sd_early))


def _memory(values: np.ndarray) -> np.ndarray:
    """The correlation over chains of values (quantity, transition, chain) at the begin with those at the end."""
    begin = values[:, 0] - values[:, 0].mean(axis=1, keepdims=True)
    end = values[:, -1] - values[:, -1].mean(axis=1, keepdims=True)
    scale = np.sqrt((begin**2).mean(axis=1) * (end**2).mean(axis=1))
    return (begin * end).mean(axis=1) / np.maximum(scale, 1e-300)


def effective_draws(values: np.ndarray) -> float:
    r"""Effective sample size of the worst of quantities (quantity, transition, chain), by the spread of chains' means.

    .. math:: C \, \sigma^2 / \operatorname{Var}(\text{mean of a chain})

    of C chains: they are too short for their autocorrelations, and many enough for this.
    """
    variance = values.var(axis=(1, 2))
    of_means = values.mean(axis=1).var(axis=1, ddof=1)
    moving = variance > 0.0
    if not moving.any() or not np.isfinite(values).all():
        return 0.0
    num_chains = values.shape[2]
    sizes = num_chains * variance[moving] / np.maximum(of_means[moving], 1e-300)
    return float(min(sizes.min(), values.shape[1] * num_chains))


def nested_rhat(values: np.ndarray, num_groups: int) -> np.ndarray:
    r"""Nested R-hat of quantities (quantity, transition, chain) of chains, group by group; (quantity,).

    .. math:: \sqrt{1 + B / W}

    B is the variance of the groups' means; W the mean over groups of the variance of their chains' means, and of the
    mean variance within their chains (Margossian et al., 2024, equations 8 to 10).
    """
    grouped = values.reshape(*values.shape[:2], num_groups, -1)
    chain_means = grouped.mean(axis=1)
    within_chains = grouped.var(axis=1, ddof=1).mean(axis=2) if values.shape[1] > 1 else 0.0
    between_chains = chain_means.var(axis=2, ddof=1) if grouped.shape[3] > 1 else 0.0
    within = np.mean(between_chains + within_chains, axis=1)
    between = chain_means.mean(axis=2).var(axis=1, ddof=1)
    return np.sqrt(1.0 + between / np.maximum(within, 1e-300))
