"""Energies in full float32: what torch may round on a GPU, and for how long it may not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Convolutions and matrix products in full float32 where ``device`` is a GPU, and the caller's flags afterwards.

    By default cuDNN rounds the inputs of a convolution to TF32, ten bits of mantissa. A sampler that accepts by the
    difference of two energies, or a curvature, takes that for the posterior.

    Inside, torch's older flags (``allow_tf32``) and its newer ones (``fp32_precision``, from torch 2.9) agree: inductor
    reads both, and where they contradict each other torch refuses to be asked.
    """
    if device.type != "cuda":
        yield
        return
    # torch does not declare all of these flags
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    mkldnn: Any = torch.backends.mkldnn
    newer = hasattr(matmul, "fp32_precision")
    places = (matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul) if newer else ()
    kept = [place.fp32_precision for place in places]
    products = convolutions = None
    with contextlib.suppress(RuntimeError):  # the caller mixes both kinds of flags, or uses the newer alone
        products = torch.get_float32_matmul_precision()
    with contextlib.suppress(RuntimeError):
        convolutions = cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            cudnn.allow_tf32 = convolutions
        for place, precision in zip(places, kept, strict=True):
            place.fp32_precision = precision
