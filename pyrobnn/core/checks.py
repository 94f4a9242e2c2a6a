"""Argument checks: one function per concept, so that the same mistake always gets the same message."""

from __future__ import annotations

import contextlib
import math
import os
import reprlib
import sys
from collections.abc import Callable, Sequence
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor


class Refused(ValueError):
    """This method cannot do what was asked of it; the message names the remedy.

    Raised before any compute for a request that is legal in itself: a program, a net or a size of data that the
    method was not made for, or more memory than there is. ``pyrobnn compare`` says it and goes on.
    """


def check_type(name: str, value: Any, wanted: Any, words: str) -> Any:
    """Return ``value`` if it is a ``wanted``, a type or several; else a TypeError that says so in ``words``."""
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted in (Integral, Real)):
        raise TypeError(
            f"'{name}' must be {words}, got {reprlib.repr(value)} of type {type(value).__name__}"
        )
    return value


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return ``value`` if it is an integer of at least ``minimum``."""
    check_type(name, value, Integral, "an integer")
    if value < minimum:
        raise ValueError(
            f"'{name}' must be at least {minimum}, got {value}: pass {name}={minimum} or more"
        )
    return int(value)


def check_number(
    name: str,
    value: Any,
    *,
    above: float = -inf,
    minimum: float = -inf,
    maximum: float = inf,
    below: float = inf,
) -> float:
    """Return ``value`` as a float if it is finite and lies within the bounds (``above``/``below`` are exclusive)."""
    value = float(check_type(name, value, Real, "a number"))
    bounds = {
        f"> {above:g}": above,
        f">= {minimum:g}": minimum,
        f"< {below:g}": below,
        f"<= {maximum:g}": maximum,
    }
    if not (math.isfinite(value) and above < value < below and minimum <= value <= maximum):
        wanted = (
            " and ".join(text for text, bound in bounds.items() if math.isfinite(bound)) or "finite"
        )
        raise ValueError(f"'{name}' must be {wanted}, got {value:g}")
    return value


def check_choice(name: str, value: Any, options: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``options``; else a ValueError lists them."""
    if not isinstance(value, str) or value not in options:  # an array is equal to each in parts
        raise ValueError(f"'{name}' must be one of {', '.join(map(repr, options))}, got {value!r}")
    return value


def check_optional(
    check: Callable[..., Any], name: str, value: Any, *wanted: Any, **bounds: Any
) -> None:
    """``check(name, value, …)`` of an option that may be None."""
    if value is not None:
        check(name, value, *wanted, **bounds)


@overload
def check_device(device: str | torch.device) -> torch.device: ...
@overload
def check_device(device: str | torch.device | None) -> torch.device | None: ...
def check_device(device: str | torch.device | None) -> torch.device | None:
    """Return the device if this machine has it and it has float64 (mps has not), of CUDA's with its number."""
    if device is None:
        return None
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"'device' must name a torch device such as 'cpu' or 'cuda', got {device!r}"
        ) from error
    if device.type == "mps":
        raise ValueError(
            "'device' is 'mps', which has no float64 to sum densities in: use device='cpu'"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"'device' must be 'cpu' or 'cuda', got {str(device)!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(
                f"'device' is {str(device)!r} of {count} CUDA devices: use device='cpu'"
            )
        if (
            device.index is None
        ):  # the tensors on it have one, and a device without is equal to none
            device = torch.device("cuda", torch.cuda.current_device())
    return device


def check_finite(name: str, value: Tensor, first: int = 0) -> None:
    """Raise a ValueError naming the first row of ``value`` that holds NaN or infinity, counted from ``first``."""
    if not value.is_floating_point():
        return
    finite = torch.isfinite(value)
    if not bool(finite.all()):
        row = (
            first + int((~finite.reshape(len(value), -1)).any(1).nonzero()[0]) if value.dim() else 0
        )
        count = int((~finite).sum())
        raise ValueError(
            f"'{name}' holds {count} NaN or infinite values (first in row {row}): drop them"
        )


def check_cast(name: str, value: Tensor, cast: Tensor) -> None:
    """ValueError where float32 keeps less than half of a column's distinct values (row, …): 1e8 plus noise, say."""
    if value.dtype == cast.dtype or cast.dtype != torch.float32:
        return
    few = slice(None, None, max(1, len(value) // 1000))
    before, after = (
        each[few].reshape(len(each[few]), -1).double().sort(0).values for each in (value, cast)
    )
    # sin(2 pi day / 7) and the like: equal in all but float64's last digits
    rounding = 1e-11 * before.abs().amax(0)
    count, kept = ((each.diff(dim=0) > rounding).sum(0) + 1 for each in (before, after))
    if len(lost := (2 * kept < count).nonzero()):
        column = int(lost[0])
        raise ValueError(
            f"column {column} of '{name}' lies around {before[len(before) // 2, column]:.9g}: the net's float32 keeps "
            f"{kept[column]} of {count[column]} distinct values; give the model a standardizer fitted on these data, "
            "subtract the median, or use net.double()"
        )


def as_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor over ``value`` (tensor, NumPy array, DataFrame, Series or nested list), without its gradient.

    Raises:
        TypeError: not numbers: text, categories, dates, complex numbers, ragged lists; says what to do.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_complex():
            raise TypeError(
                f"'{name}' must be a dense real tensor, got {value.layout} of {value.dtype}"
            )
        return value.detach()
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return torch.stack([as_tensor(name, item) for item in value])
    try:
        array = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
        if (
            array.dtype.kind == "O"
        ):  # columns of different types: NumPy finds the one that holds them all
            array = np.array(array.tolist())
    except (TypeError, ValueError) as error:
        raise TypeError(f"'{name}' must be a tensor or a numeric array: {error}") from error
    if array.dtype.kind not in "biuf":
        types = (
            value.dtypes.items()
            if getattr(value, "ndim", 0) == 2 and hasattr(value, "dtypes")
            else ()
        )
        columns = [
            str(column) for column, dtype in types if getattr(dtype, "kind", "O") not in "biuf"
        ]
        where = f" in the columns {', '.join(columns)}" if columns else ""
        raise TypeError(
            f"'{name}' must be a tensor or a numeric array, but holds{where} {_contents(name, value, array)}"
        )
    if array.dtype.kind == "f" and array.itemsize > 8:
        array = array.astype(np.float64)
    # torch takes neither foreign byte orders nor negative strides, and warns of arrays that cannot be written to
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))


def _contents(name: str, value: Any, array: np.ndarray) -> str:
    """What is there instead of numbers, and how to make numbers of it."""
    text = next(
        (item for item in np.asarray(value, dtype=object).reshape(-1) if isinstance(item, str)),
        None,
    )
    if text is None:
        return f"{array.dtype}: make real numbers of it, and drop or impute what is missing"
    if name == "y":
        return f"text such as {text!r}: make integers of the labels, classes, y = numpy.unique(y, return_inverse=True)"
    return f"text such as {text!r}: make columns of numbers, pandas.get_dummies(x, dtype=float)"


def divergences_by_chance(num_transitions: int) -> int:
    """Divergences that a run may have whose draws are right: more of them happen to one such run in fifty.

    Of NUTS at its default target five transitions in ten thousand diverge where nothing is wrong (eight nets: 0 to 15
    of 16,000, two in the median); 26 where an sd is 6 % too small, 143 in eight schools, centred.

    >>> divergences_by_chance(100), divergences_by_chance(800), divergences_by_chance(4000)
    (1, 2, 5)
    """
    mean = torch.tensor(5e-4 * num_transitions, dtype=torch.float64)
    counts = torch.arange(10 + 2 * int(mean), dtype=torch.float64)
    return int(
        (torch.special.gammaincc(counts + 1, mean) < 0.98).sum()
    )  # Poisson's distribution function


class NotEnoughMemory(Refused, MemoryError):
    """More memory than the device has free; the message has the bytes and what to change."""


def require(needed: int, device: torch.device, what: str, remedies: str) -> None:
    """NotEnoughMemory where ``what`` needs more bytes than are free; ``remedies`` says what to do instead."""
    free = free_bytes(device)
    if needed > free:
        raise NotEnoughMemory(f"{what} needs {needed:,} bytes but {free:,} are free: {remedies}")


def free_bytes(device: torch.device) -> int:
    """Bytes free on ``device``; without limit where the system does not tell, so that nothing is refused on a guess."""
    if device.type == "cuda":
        # the driver counts as taken what torch's allocator keeps for later
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    with contextlib.suppress(AttributeError, ValueError, OSError):
        if (table := Path("/proc/meminfo")).exists():
            fields = dict(
                line.split(":", 1) for line in table.read_text(encoding="utf-8").splitlines()
            )
            return int(fields["MemAvailable"].split()[0]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize
