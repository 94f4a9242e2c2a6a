"""Random numbers as a pure function of a key and an index: counter-based, without a generator.

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
    mixed = torch.zeros(
        (),
        dtype=torch.int64,
        device=parts[0].device,
    )
    for number in parts:
        mixed = _mix((mixed ^ number) + _GOLDEN)
    return mixed


def stream(keys: Tensor, index: Tensor | int) -> Tensor:
    """The key of a numbered stream below each key: shape of ``keys`` and ``index`` (int64, below 2^31) together."""
    # WORKAROUND(torch<=2.13): inductor takes arange * constant for an address, of 32 bits on a GPU, which does not
    # hold it; not through ^
    return _mix(keys + (index ^ 0) * _STEP)


def chances(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two uniforms on [0, 1) in float64, in steps of 2^-31, and a fair sign (+1 or -1), of the shape of ``keys``."""
    bits = _mix(~keys)
    from_high_bits = _shift(bits, 33).double() * 2.0**-31
    from_low_bits = (_shift(bits, 2) & 0x7FFFFFFF).double() * 2.0**-31
    return from_high_bits, from_low_bits, ((bits & 1) * 2 - 1).double()


def normal(keys: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    r"""``num`` standard normals for each key (Box and Muller), shape (\*keys.shape, num); cut off at 6.7 sd.

    .. math:: \sqrt{-2 \log u_1} \cos(2 \pi u_2)
    """
    radius, angle = _polar(
        stream(keys.unsqueeze(-1), torch.arange(1, num + 1, device=keys.device)), dtype
    )
    return radius * angle.cos()


class Noise:
    """The random numbers of one evaluation: every call has a stream of its own below the key.

    Under ``vmap`` each element has the numbers of its own key (), int64. By ``rows``, the number of the first row and
    the step to the next, :meth:`normal_rows` and :meth:`sign` give some rows the numbers that they have among all.
    """

    def __init__(self, key: Tensor, rows: tuple[int, int] = (0, 1)) -> None:
        self._key = key
        self._rows = rows
        self._calls = 0

    def normal(self, like: Tensor) -> Tensor:
        """Standard normals of the shape and type of ``like``; cut off at 6.7 sd."""
        return self._normal(like.unsqueeze(0), (0, 1)).squeeze(0)

    def normal_rows(self, like: Tensor) -> Tensor:
        """As :meth:`normal`, for ``like`` (row, …): a row's numbers are the same whatever rows come after it."""
        return self._normal(like, self._rows)

    def _normal(self, like: Tensor, rows: tuple[int, int]) -> Tensor:
        num = len(like)
        size = like[:1].numel()
        pairs = (size + 1) // 2  # sine and cosine of one angle are two, which halves the work
        numbers = _numbers(num, pairs, rows, like.device)
        bits = stream(self._next(), numbers).reshape(num, pairs)
        radius, angle = _polar(bits, like.dtype)
        return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :size].reshape(
            like.shape
        )

    def sign(self, like: Tensor) -> Tensor:
        """Fair signs, +1 or -1, of the shape and type of ``like``."""
        numbers = _numbers(len(like), like[:1].numel(), self._rows, like.device)
        bits = stream(self._next(), numbers)
        return (1 - 2 * _shift(bits, 63)).to(like.dtype).reshape(like.shape)

    def split(self, num: int) -> Tensor:
        """Keys (num,) of as many evaluations, each with its own :class:`Noise`."""
        return stream(self._next(), torch.arange(1, num + 1, device=self._key.device))

    def _next(self) -> Tensor:
        self._calls += 1
        return stream(self._key, self._calls)


def _numbers(
    num_rows: int,
    per_row: int,
    rows: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Numbers (num_rows · per_row,) from 1 on of the places in some rows."""
    begin, step = rows
    places = torch.arange(
        1,
        num_rows * per_row + 1,
        device=device,
    )
    if (begin, step) == (0, 1):
        return places
    present = torch.arange(num_rows, device=device)
    return places + ((begin + (step - 1) * present) * per_row).repeat_interleave(per_row)


def _polar(bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Radius and angle of two independent standard normals from 64 bits."""
    uniform = (_shift(bits, 32).to(dtype) + 0.5) * 2.0**-32
    return (-2.0 * uniform.log()).sqrt(), (bits & 0xFFFFFFFF).to(dtype) * (2.0 * math.pi * 2.0**-32)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, places: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
