"""Layers at many points at once by operators that torch traces for any number of rows.

Torch's own batching rules of some layers read the number of rows, which a trace would then hold fixed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from pyrobnn.model.torch_calls import Call, CallHandler

#: layers of one tensor without parameters, each row by itself: the points are more rows to them
_ROW_BY_ROW = {
    f"{kind}_pool{dims}d"
    for kind in ("max", "avg", "lp", "adaptive_avg", "adaptive_max")
    for dims in (1, 2, 3)
} | {"interpolate"}


class WithBatchingRules(CallHandler):
    """Inside, pooling, batch and group norm and embeddings are traced under ``vmap`` for any number of rows."""

    def answer(self, call: Call) -> Any:
        function = call.function
        if getattr(function, "__name__", "").lstrip("_") in _ROW_BY_ROW:
            x, *others = call.args
            return _MoreRows.apply(x, lambda rows: function(rows, *others, **call.options))
        if function in _WRITTEN_OUT:
            arguments = inspect.signature(function).bind(*call.args, **call.options)
            arguments.apply_defaults()
            written = _WRITTEN_OUT[function](**arguments.arguments)
            return call.result() if written is None else written
        return call.result()


class _VmapInfo(NamedTuple):
    """What torch says of a ``vmap``."""

    batch_size: int
    randomness: str


class _MoreRows(torch.autograd.Function):
    """A function of rows (N, …) whose points become more rows under ``vmap``."""

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Tensor, Callable[[Tensor], Tensor]], output: Tensor
    ) -> None:
        pass

    @staticmethod
    def vmap(
        info: _VmapInfo, in_dims: tuple[int, None], x: Tensor, function: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, int]:
        rows = x.movedim(in_dims[0], 0).flatten(0, 1)
        out = _MoreRows.apply(rows, function)
        return out.unflatten(0, (info.batch_size, -1)), 0


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Rows (N, channel, …) times a weight plus a bias of each channel."""
    shape = (-1, *[1] * (x.dim() - 2))
    if weight is not None:
        x = x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor | None:
    """By the stored statistics; None where those of the batch are asked for."""
    if training or running_mean is None or running_var is None:
        return None
    precision = (running_var + eps).rsqrt()
    return _affine(_affine(input, precision, -running_mean * precision), weight, bias)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    normalized = _MoreRows.apply(
        input, lambda rows: functional.group_norm(rows, num_groups, eps=eps)
    )
    return _affine(normalized, weight, bias)


def _embedding(
    input: Tensor, weight: Tensor, max_norm: float | None, **_: float | bool | None
) -> Tensor | None:
    """None where looking up changes the weights."""
    return weight[input] if max_norm is None else None


_WRITTEN_OUT: dict[Any, Callable[..., Tensor | None]] = {
    functional.batch_norm: _batch_norm,
    functional.group_norm: _group_norm,
    functional.embedding: _embedding,
}
