"""What float32 holds: full float32 on a GPU, and runs whose steps need float64.

Positions in float64 from the start would make restarting in float64 needless, but a leapfrog then takes 1.3 to
2.4 times as long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyrobnn.model import Density
from pyrobnn.model.gradient import at_each

_MAX_ROUNDING = 0.1  # nats, sd of the difference of densities of float32 and float64
_MIN_STEP = 8.0  # units of the last place in a step
_NUM_POINTS = 32  # at which the densities of float32 and float64 are compared
_AT_ONCE = 8  # of them in one run of the program, which for a long loop takes seconds


@contextlib.contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Convolutions and matrix products in full float32 where ``device`` is a GPU, and the caller's flags afterwards.

    By default cuDNN rounds the inputs of a convolution to TF32, ten bits of mantissa, which a sampler or a curvature
    takes for the posterior. Torch's older flags (``allow_tf32``) and its newer ones (``fp32_precision``, from 2.9) have
    to agree: inductor reads both, and where they contradict each other torch refuses to be asked.
    """
    if device.type != "cuda":
        yield
        return
    # WORKAROUND(torch<=2.13): it does not declare all of these flags
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    mkldnn: Any = torch.backends.mkldnn
    places = (matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul)
    with contextlib.ExitStack() as restored:  # the last first
        for place in places:
            restored.callback(setattr, place, "fp32_precision", place.fp32_precision)
        with contextlib.suppress(
            RuntimeError
        ):  # the caller mixes both kinds of flags, or uses the newer alone
            restored.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
        with contextlib.suppress(RuntimeError):
            restored.callback(
                torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
            )
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
        for place in places:
            place.fp32_precision = "ieee"
        yield


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Subnormal numbers are zero inside: weights on which only the prior acts come to them, and products slow down."""
    before = float(torch.tensor(1e-40) * 1.0) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


class PrecisionLoss(Exception):
    """Ends a run whose chains float32 cannot hold, after ``total_steps``; ``z`` (chain, dim), where another begins."""

    def __init__(self, reason: str, z: Tensor, total_steps: int) -> None:
        super().__init__(reason)
        self.z = z
        self.total_steps = total_steps


def inspector(density: Density) -> Callable[[Tensor, Tensor], str] | None:
    """What says why float32 cannot hold draws and steps of a program; None where it cannot be told."""
    if density.dtype != torch.float32:
        return None
    exact = density.double().log_joint
    try:
        exact(density.sample_box(1, seed=0)[0].double())
    except (RuntimeError, TypeError, ValueError):  # a program that cannot be run in float64
        return None
    return lambda z, steps: float64_reason(density.log_joint, exact, z, steps)


def float64_reason(
    log_joint: Callable[[Tensor], Tensor],
    exact: Callable[[Tensor], Tensor],
    z: Tensor,
    steps: Tensor,
) -> str:
    """Why float32 cannot hold draws z (point, dim) of a chain and its steps (dim,), in words; empty if it can."""
    resolution = torch.finfo(z.dtype).eps * z.abs().mean(0)
    if bool((steps < _MIN_STEP * resolution).any()):
        worst = int((steps / resolution).argmin())
        return (
            f"steps of {float(steps[worst]):.1g} at positions near {float(z[:, worst].mean()):.7g}"
        )
    points = z[:: max(1, len(z) // _NUM_POINTS)][:_NUM_POINTS]
    rounded = at_each(log_joint, points, at_once=_AT_ONCE)
    noise = rounded - at_each(exact, points.double(), at_once=_AT_ONCE)
    noise = noise[noise.isfinite()]
    if len(noise) > 2 and float(noise.std()) > _MAX_ROUNDING:
        return f"the log density was rounded by {float(noise.std()):.2g} nats"
    return ""
