"""Random numbers as a pure function of (seed, chain, transition, index): counter-based, without a generator.

The same numbers come out compiled or eager, on any device, in any order of evaluation and after any interruption:
there is no state to save. The mixer is SplitMix64's (a bijection of 64 bits with full avalanche), applied to a key
that has been through it once per argument. Products of mixed bits wrap around in two's complement, as torch's int64
kernels do; products of an index never overflow, because a C++ compiler would draw conclusions about the loop.

*Fast Splittable Pseudorandom Number Generators* (Steele, Lea & Flood, 2014), https://doi.org/10.1145/2714064.2660195
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_STEP = 0x9E3779B9
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def key(*parts: Tensor) -> Tensor:
    """An int64 key from int64 tensors that broadcast together; any change of a part changes about half of its bits."""
    mixed = torch.zeros((), dtype=torch.int64, device=parts[0].device)
    for part in parts:
        mixed = _mix((mixed ^ part) + _GOLDEN)
    return mixed


def stream(keys: Tensor, index: Tensor) -> Tensor:
    """The key of a numbered stream below each key: shape of ``keys`` and ``index`` (int64, below 2^31) together."""
    return _mix(keys + index * _STEP)


def chances(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two uniforms on [0, 1) in float64, in steps of 2^-31, and a fair sign (+1 or -1), of the shape of ``keys``."""
    bits = _mix(~keys)
    first = _shift(bits, 33).double() * 2.0**-31
    second = (_shift(bits, 2) & 0x7FFFFFFF).double() * 2.0**-31
    return first, second, ((bits & 1) * 2 - 1).double()


def normal(keys: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    r"""``num`` standard normals for each key (Box and Muller), shape (\*keys.shape, num); cut off at 6.7 sd.

    .. math:: \sqrt{-2 \log u_1} \cos(2 \pi u_2)
    """
    bits = stream(keys.unsqueeze(-1), torch.arange(1, num + 1, device=keys.device))
    radius = (_shift(bits, 32).to(dtype) + 0.5) * 2.0**-32
    angle = (bits & 0xFFFFFFFF).to(dtype) * (2.0 * math.pi * 2.0**-32)
    return (-2.0 * radius.log()).sqrt() * angle.cos()


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, places: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
