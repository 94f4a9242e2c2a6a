"""How far from its optimum a search ended, in nats: what a few more steps, or as many again, would gain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyrobnn.wording.findings import Finding

#: steps below which the losses show nothing
_SHORT = 20
#: share of the run whose fall is measured, and the standard errors of it that are not believed
_PART, _SIGMAS = 0.2, 3.0
#: nats by which every parameter may be off its optimum (a third of its standard error), and the least that matter
_PER_PARAMETER, _LEAST = 0.05, 1.0
#: times the limit that the losses of a run must let expect before its fit says so: they tell less than further steps
_ROUGH = 10.0


def unfinished(nats: float, num_params: int, name: str = "gain_left") -> dict[str, float]:
    """What ``meta`` keeps of it, for :func:`pyrobnn.diagnose` to judge."""
    return {name: nats, "gain_limit": max(_LEAST, _PER_PARAMETER * num_params)}


def stopped_short(meta: Mapping[str, Any]) -> list[Finding]:
    """What the user has to know of a search that ran out of steps, from what ``meta`` keeps of it."""
    if meta.get("stopped") != "num_steps":
        return []
    gain, fall, limit = meta.get("gain_left"), meta.get("fall_left"), meta.get("gain_limit", math.inf)
    steps = meta.get("num_steps", _SHORT)
    if gain is not None:
        seen = {"gain": gain, "limit": limit} if gain > limit else {}
    elif fall is not None:
        seen = {"fall": fall, "limit": limit} if fall > _ROUGH * limit else {}
    else:
        seen = {"steps": steps} if steps < _SHORT else {}
    return [Finding("search_unfinished", seen)] if seen else []


def falling(result: Any, losses: Tensor, scale: float, num_params: int) -> dict[str, float]:
    """`unfinished` of a run by its losses; nothing of one that a callback ended, which was asked for."""
    fall = still_falling(result, losses, scale)
    if fall is None or result.stopped == "callback":
        return {}
    return unfinished(fall, num_params, "fall_left")


def still_falling(result: Any, losses: Tensor, scale: float) -> float | None:
    r"""The fall of a loss over the last fifth of a run, in nats; of several members the largest.

    The run is measured by the sum of its learning-rate factors, so that a rate that goes to zero does not look like an
    optimum. Three standard errors of the noise of mini-batches are taken off.

    Args:
        result: the :class:`Result`, whose ``factors`` (step,) the rate had.
        losses: (step,) or (step, members).
        scale: nats of a unit of the loss.

    Returns:
        The fall; None of a run too short to show one.
    """
    num_steps = len(losses)
    losses = losses.double().reshape(num_steps, -1)
    if num_steps < _SHORT:
        return None
    time = result.factors[:num_steps].cumsum(0)
    late = time > (1.0 - _PART) * time[-1]
    before = (time > (1.0 - 2.0 * _PART) * time[-1]) & ~late
    if min(int(late.sum()), int(before.sum())) < 2:
        return None
    fall = losses[before].mean(0) - losses[late].mean(0)
    error = sum(losses[part].var(0) / int(part.sum()) for part in (before, late))
    return max(0.0, scale * float((fall - _SIGMAS * torch.as_tensor(error).sqrt()).max()))
