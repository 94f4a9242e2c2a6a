"""Warnings of a variational fit about its ELBO: not a number, or better on the way than at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

#: windows of the run whose mean ELBO is looked at, and the fewest steps of one
_WINDOWS, _SHORTEST = 20, 20
#: standard errors by which the end must lie below, and what doesn't matter (nats)
_SIGMAS, _TOLERATED_FALL = 5.0, 1.0


def elbo_notes(track: Tensor, value: float, error: float, draws: Mapping[str, Tensor]) -> list[str]:
    """Sentences for the user; none where the fit ended at its best.

    Args:
        track: the noisy ELBO of every step, (step,).
        value, error: that of the fitted guide, with its standard error.
        draws: site → (chain, draw, \\*shape).
    """
    notes = []
    if broken := [name for name, drawn in draws.items() if not bool(torch.isfinite(drawn).all())]:
        notes.append(
            f"draws of {', '.join(broken)} are not finite: use a smaller lr or init_scale, or fewer steps"
        )
    if not (math.isfinite(value) and math.isfinite(error)):
        notes.append(
            f"the ELBO is {value} (standard error {error}), so log_evidence says nothing: some draws of the guide "
            "have no finite density; use a smaller lr, clip_norm, or a simpler guide"
        )
        return notes
    best, spread = _reached(track)
    if value + _SIGMAS * error < best - spread - _TOLERATED_FALL:
        notes.append(
            f"the ELBO ends at {value:.1f} +/- {error:.2g}, below the {best:.1f} that it surely had on the way: "
            "not converged; use a smaller lr, more steps, or lr_schedule='hold_cosine'"
        )
    return notes


def _reached(track: Tensor) -> tuple[float, float]:
    """The best mean of a window of steps, less its error, and the spread of single steps in it.

    -inf for a run too short to have windows. A last iterate is one step: it may lie a spread below the mean.
    """
    width = max(_SHORTEST, len(track) // _WINDOWS)
    windows = track[: len(track) - len(track) % width].double().reshape(-1, width)
    if not len(windows):
        return -math.inf, 0.0
    means, spreads = windows.mean(1), windows.std(1)
    best = (means - _SIGMAS * spreads / math.sqrt(width)).argmax()
    return float(means[best] - _SIGMAS * spreads[best] / math.sqrt(width)), float(spreads[best])
