"""A program run in float64, although it and its data were written in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyrobnn.compile.trees import mapped
from pyrobnn.density import Density


class _Widen(TorchFunctionMode):
    """Every float32 tensor that goes into an operation is made float64 first, and none is asked for."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.double:
            return func(*args)
        return func(*mapped(_wide, args), **mapped(_wide, dict(kwargs or {})))


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Tensors that are made, and operations on those there are, have float64 inside."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(default)


def log_joint_float64(density: Density) -> Callable[[Tensor], Tensor]:
    """The log joint of flat float64 vectors (dim,), with every operation of the program in float64.

    The data keep the values they have: what was lost when they were made float32 stays lost.
    """
    args = mapped(_wide, density.args)

    def log_joint(z: Tensor) -> Tensor:
        with float64():
            return density.log_joint(z, *args)

    return log_joint
