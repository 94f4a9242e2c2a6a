"""Argument checks: one function per concept, so that the same mistake always gets the same message."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from math import inf
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    _Values = ArrayLike | Tensor

#: the floating types that torch computes in; the others store
_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_Value = TypeVar("_Value")
_Options = ParamSpec("_Options")
_Checked = TypeVar("_Checked")


class Refused(ValueError):
    """This method cannot do what was asked of it; the message names the remedy.

    Raised before any compute for a request that is legal in itself: a program, a net or a size of data that the
    method was not made for, or more memory than there is. ``pyrobnn compare`` says it and goes on.
    """


def check_type(
    name: str,
    value: _Value,
    wanted: Any,  # a type, or several: mypy has no word for ``Mapping | None``
    words: str,
) -> _Value:
    """Return ``value`` if it is a ``wanted``, a type or several; else a TypeError that says so in ``words``."""
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted in (Integral, Real)):
        raise TypeError(f"'{name}' must be {words}, got {_described(value)}")
    return value


def _described(value: object) -> str:
    """A wrong argument in words; of a class where one of its objects is wanted, how that is made."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself: write {value.__name__}(…)"
    return f"{reprlib.repr(value)} of type {type(value).__name__}"


def check_count(name: str, value: int | Integral, minimum: int = 1) -> int:
    """Return ``value`` if it is an integer of at least ``minimum``."""
    check_type(name, value, Integral, "an integer")
    if value < minimum:
        raise ValueError(
            f"'{name}' must be at least {minimum}, got {value}: pass {name}={minimum} or more"
        )
    return int(value)


def check_number(
    name: str,
    value: float,
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


def check_choice(name: str, value: str, options: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``options``; else a ValueError lists them."""
    if not isinstance(value, str) or value not in options:  # an array is equal to each in parts
        raise ValueError(f"'{name}' must be one of {', '.join(map(repr, options))}, got {value!r}")
    return value


def check_optional(
    check: Callable[Concatenate[str, _Value, _Options], _Checked],
    name: str,
    value: _Value | None,
    *options: _Options.args,
    **bounds: _Options.kwargs,
) -> None:
    """Check an option by ``check(name, value, …)``, unless it is None."""
    if value is not None:
        check(name, value, *options, **bounds)


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


def as_tensor(name: str, value: _Values) -> Tensor:
    """Return a tensor over ``value`` (tensor, NumPy array, DataFrame, Series or nested list), without its gradient.

    Raises:
        TypeError: not numbers: text, categories, dates, complex numbers, ragged lists; says what to do.
        ValueError: a masked array with masked values.
    """
    if isinstance(value, Tensor):
        return _dense_real(name, value)
    if isinstance(value, np.ma.MaskedArray) and bool(np.ma.getmaskarray(value).any()):
        count = int(np.ma.getmaskarray(value).sum())
        raise ValueError(
            f"'{name}' is a masked array with {count} masked values, which are none: drop those rows, or impute them "
            f"({name}.filled(…))"
        )
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return torch.stack([as_tensor(name, item) for item in value])
    try:
        array = _as_array(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"'{name}' must be a tensor or a numeric array: {error}") from error
    if array.ndim == 0 and array.dtype.kind == "O":
        raise TypeError(f"'{name}' must be a tensor or a numeric array, got {type(value).__name__}")
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"'{name}' must be a tensor or a numeric array, but holds{_contents(name, value, array)}"
        )
    if array.dtype.kind == "f" and array.itemsize > 8:
        array = array.astype(np.float64)
    # WORKAROUND(torch<=2.13): it takes neither foreign byte orders nor negative strides, and warns of read-only arrays
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))


def _dense_real(name: str, value: Tensor) -> Tensor:
    if value.layout != torch.strided or value.is_complex():
        raise TypeError(
            f"'{name}' must be a dense real tensor, got {value.layout} of {value.dtype}"
        )
    if value.is_floating_point() and value.dtype not in _COMPUTED:
        raise TypeError(
            f"'{name}' is of {value.dtype}, in which torch does not compute: pass {name}.float()"
        )
    return value.detach()


def _as_array(value: _Values) -> np.ndarray:
    array = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    # columns of different types: NumPy finds the one that holds them all
    return np.array(array.tolist()) if array.dtype.kind == "O" else array


def _columns_without_numbers(value: _Values) -> list[str]:
    """The names of such columns of a DataFrame; none of anything else."""
    if getattr(value, "ndim", 0) != 2 or not hasattr(value, "dtypes"):
        return []
    types = value.dtypes.items()
    return [str(column) for column, dtype in types if getattr(dtype, "kind", "O") not in "biuf"]


def _contents(name: str, value: _Values, array: np.ndarray) -> str:
    """What is there instead of numbers, in which columns, and how to make numbers of it."""
    columns = _columns_without_numbers(value)
    where = f" in the columns {', '.join(columns)}" if columns else ""
    items = np.asarray(value, dtype=object).reshape(-1)
    text = next((item for item in items if isinstance(item, str)), None)
    if text is None:
        return f"{where} {array.dtype}: make real numbers of it, and drop or impute what is missing"
    if name == "y":
        return (
            f"{where} text such as {text!r}: make integers of the labels, "
            "classes, y = numpy.unique(y, return_inverse=True)"
        )
    return f"{where} text such as {text!r}: make columns of numbers, pandas.get_dummies(x, dtype=float)"
