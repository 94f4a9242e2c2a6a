"""Small matrix products as arithmetic, which inductor fuses with what stands before and after them."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrobnn.core import private

_ATEN = torch.ops.aten
#: more multiplications are left to the library, unless a dimension is one
_FEW_MULTIPLICATIONS = 2**17
#: of so few features, the inner dimension, a product is a sum of one term each; of so few rows, one sum over features
_FEW_FEATURES = 8
#: a product of so few multiplications takes a library longer to begin than to do, and bars the stack to all the rest
_TINY = 2**15
#: as ``_FEW_FEATURES``, of the inner dimension of a tiny product
_TINY_FEATURES = 16


def materialize(tensor: Tensor) -> Tensor:
    """The same tensor, written to memory where inductor would otherwise compute it again in every loop that reads it.

    Weights that are cheap to compute, read once per datum, are the case in point. A view by ``as_strided`` would do so
    too, but reads what is not there where inductor has stored the tensor in another order than its strides.
    """
    # elsewhere the operator has not been tried: there the check of compiled code watches
    if tensor.device.type != "cpu":
        return torch.as_strided(tensor, tensor.shape, tensor.stride())
    operator = private.order_operator()
    return tensor if operator is None else operator(tensor, tensor.stride())


# a decomposition that returns NotImplemented leaves the operator as it is


def _small_bmm(left: Tensor, right: Tensor) -> Tensor:
    """A batched product with an outer or inner dimension of one, as arithmetic that fuses with its neighbours.

    Under ``vmap`` every ``Linear`` becomes a ``bmm``; with one input or one output feature the library call costs more
    than the product, and separates the loops before and after it.
    """
    _, rows, inner = left.shape
    columns = right.shape[2]
    if inner == 1:
        return left * right
    if columns == 1:
        return (left * right.transpose(1, 2)).sum(2, keepdim=True)
    if rows == 1:
        return (left.transpose(1, 2) * right).sum(1, keepdim=True)
    return NotImplemented


def _small_mm(left: Tensor, right: Tensor) -> Tensor:
    """The same without a batch, tiny products, and products of few features with the data along memory.

    Under ``vmap`` a linear predictor of one set of inputs is a product (N, features) @ (features, chains), and its
    gradient (features, N) @ (N, chains): a library would store the few chains along memory.
    """
    rows, inner = left.shape
    columns = right.shape[1]
    product = _small_bmm(left[None], right[None])
    if product is not NotImplemented:
        return product[0]
    if rows * inner * columns > _FEW_MULTIPLICATIONS:
        return NotImplemented
    tiny = rows * inner * columns <= _TINY
    if inner <= (_TINY_FEATURES if tiny else _FEW_FEATURES):
        features = materialize(left.T.contiguous())
        terms = [features[i] * right[i].unsqueeze(1) for i in range(inner)]
        return sum(terms[1:], terms[0]).T
    if rows <= _FEW_FEATURES and right.stride(0) == 1:
        return (materialize(left.contiguous()).unsqueeze(1) * right.T).sum(2)
    if tiny:
        terms_of_product = materialize(left.contiguous()).unsqueeze(2) * materialize(
            right.contiguous()
        )
        return terms_of_product.sum(1)
    return NotImplemented


def _small_addmm(
    bias: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    product = _small_mm(left, right) if alpha == beta == 1 else NotImplemented
    return product if product is NotImplemented else bias + product


DECOMPOSITIONS = {
    _ATEN.bmm.default: _small_bmm,
    _ATEN.mm.default: _small_mm,
    _ATEN.addmm.default: _small_addmm,
}
