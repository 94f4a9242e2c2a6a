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
        limits = [text for text, bound in bounds.items() if math.isfinite(bound)]
        wanted = " and ".join(limits) or "finite"
        raise ValueError(f"'{name}' must be {wanted}, got {value:g}")
    return value


def check_choice(name: str, value: Any, options: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``options``; else a ValueError lists them."""
    if not isinstance(value, str) or value not in options:  # an array is equal to each in parts
        raise ValueError(f"'{name}' must be one of {', '.join(map(repr, options))}, got {value!r}")
    return value


def check_optional(
    check: Callable[..., Any],
    name: str,
    value: Any,
    *wanted: Any,
    **bounds: Any,
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
        # the tensors on it have an index, and a device without is equal to none
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return device


def check_finite(name: str, value: Tensor, offset: int = 0) -> None:
    """Raise a ValueError naming the first row of ``value`` that holds NaN or infinity, counted from ``offset``."""
    if not value.is_floating_point():
        return
    finite = torch.isfinite(value)
    if not bool(finite.all()):
        row = 0
        if value.dim():
            bad_rows = (~finite.reshape(len(value), -1)).any(1).nonzero()
            row = offset + int(bad_rows[0])
        count = int((~finite).sum())
        raise ValueError(
            f"'{name}' holds {count} NaN or infinite values (first in row {row}): drop them"
        )


def check_cast(name: str, value: Tensor, cast: Tensor) -> None:
    """ValueError where float32 keeps less than half of a column's distinct values (row, …): 1e8 plus noise, say."""
    if value.dtype == cast.dtype or cast.dtype != torch.float32:
        return
    stride = max(1, len(value) // 1000)
    before = _sorted_columns(value[::stride])
    after = _sorted_columns(cast[::stride])
    # sin(2 pi day / 7) and the like: equal in all but float64's last digits
    rounding = 1e-11 * before.abs().amax(0)
    distinct = (before.diff(dim=0) > rounding).sum(0) + 1
    distinct_after = (after.diff(dim=0) > rounding).sum(0) + 1
    damaged = (2 * distinct_after < distinct).nonzero()
    if len(damaged):
        column = int(damaged[0])
        raise ValueError(
            f"column {column} of '{name}' lies around {before[len(before) // 2, column]:.9g}: the net's float32 keeps "
            f"{distinct_after[column]} of {distinct[column]} distinct values; give the model a standardizer fitted on "
            "these data, subtract the median, or use net.double()"
        )


def _sorted_columns(values: Tensor) -> Tensor:
    """Columns (row, column) of values (row, …), each sorted, in float64."""
    return values.reshape(len(values), -1).double().sort(0).values


def as_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor over ``value`` (tensor, NumPy array, DataFrame, Series or nested list), without its gradient.

    Raises:
        TypeError: not numbers: text, categories, dates, complex numbers, ragged lists; says what to do.
    """
    if isinstance(value, Tensor):
        return _dense_real(name, value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return torch.stack([as_tensor(name, item) for item in value])
    try:
        array = _as_array(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"'{name}' must be a tensor or a numeric array: {error}") from error
    if array.dtype.kind not in "biuf":
        columns = _columns_without_numbers(value)
        where = f" in the columns {', '.join(columns)}" if columns else ""
        raise TypeError(
            f"'{name}' must be a tensor or a numeric array, but holds{where} {_contents(name, value, array)}"
        )
    if array.dtype.kind == "f" and array.itemsize > 8:
        array = array.astype(np.float64)
    # torch takes neither foreign byte orders nor negative strides, and warns of arrays that cannot be written to
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))


def _dense_real(name: str, value: Tensor) -> Tensor:
    if value.layout != torch.strided or value.is_complex():
        raise TypeError(
            f"'{name}' must be a dense real tensor, got {value.layout} of {value.dtype}"
        )
    return value.detach()


def _as_array(value: Any) -> np.ndarray:
    array = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    # columns of different types: NumPy finds the one that holds them all
    return np.array(array.tolist()) if array.dtype.kind == "O" else array


def _columns_without_numbers(value: Any) -> list[str]:
    """The names of such columns of a DataFrame; none of anything else."""
    if getattr(value, "ndim", 0) != 2 or not hasattr(value, "dtypes"):
        return []
    types = value.dtypes.items()
    return [str(column) for column, dtype in types if getattr(dtype, "kind", "O") not in "biuf"]


def _contents(name: str, value: Any, array: np.ndarray) -> str:
    """What is there instead of numbers, and how to make numbers of it."""
    items = np.asarray(value, dtype=object).reshape(-1)
    text = next((item for item in items if isinstance(item, str)), None)
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
    distribution_function = torch.special.gammaincc(counts + 1, mean)  # Poisson's
    return int((distribution_function < 0.98).sum())


class NotEnoughMemory(Refused, MemoryError):
    """More memory than the device has free; the message has the bytes and what to change."""


def require(
    needed: int,
    device: torch.device,
    subject: str,
    remedies: str,
) -> None:
    """NotEnoughMemory where ``subject`` needs more bytes than are free; ``remedies`` says what to do instead."""
    free = free_bytes(device)
    if needed > free:
        raise NotEnoughMemory(f"{subject} needs {needed:,} bytes but {free:,} are free: {remedies}")


def free_bytes(device: torch.device) -> int:
    """Bytes free on ``device``; without limit where the system does not tell, so that nothing is refused on a guess."""
    if device.type == "cuda":
        # the driver counts as taken what torch's allocator keeps for later
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    with contextlib.suppress(AttributeError, ValueError, OSError):
        table = Path("/proc/meminfo")
        if table.exists():
            lines = table.read_text(encoding="utf-8").splitlines()
            fields = dict(line.split(":", 1) for line in lines)
            return int(fields["MemAvailable"].split()[0]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize
