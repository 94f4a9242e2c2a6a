"""Layers that torch computes in one kernel, written out: such a kernel knows one point and first derivatives only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyrobnn.core.private_torch import weight_norm
from pyrobnn.core.threads import Shared
from pyrobnn.model.compile.scan import scan
from pyrobnn.model.torch_calls import Call, CallHandler

State = tuple[Tensor, ...]  # (B, hidden) each: h, and of an LSTM c
#: on h: the matrix, the bias, and of an LSTM the projection
Weights = tuple[Tensor, Tensor | None, Tensor | None]
Cell = Callable[[Tensor, State, Weights], State]


class WrittenOut(CallHandler):
    """The handler under which recurrent layers are loops over time and attention is two products and a softmax.

    The kernels of ``nn.LSTM``, ``nn.GRU``, ``nn.RNN``, ``nn.Bilinear``, ``nn.EmbeddingBag``, attention and
    ``weight_norm`` have no batching rule (``vmap`` refuses them or runs them point by point) and no forward or second
    derivatives, which linearised predictions and Hessians need. A packed sequence is left to torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.functions = _WRITTEN_OUT

    def answer(self, call: Call) -> Any:
        function = call.function
        if function in _ATTENTION:
            with _PLAIN_ATTENTION:
                return call.result()
        # a packed sequence has its weights here
        if function in _CELLS and not call.options and isinstance(call.args[3], bool):
            return _recurrent_net(_CELLS[function], *call.args)
        if function in _WEIGHT_NORM and not call.options:
            return _normalized_weight(*call.args)
        # WORKAROUND(torch<=2.13): its reverse derivative is wrong, or an error, where vmap is in vmap
        if function is torch.prelu and not call.options:
            return _prelu(*call.args)
        if function is functional.embedding_bag:
            return _embedding_bag(call)
        if function in _BILINEAR and not call.options:
            return _bilinear(*call.args)
        return call.result()


def _plain_attention() -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


#: which kernels of attention torch may take is a setting of the process
_PLAIN_ATTENTION = Shared(_plain_attention)


def _lstm(gates: Tensor, state: State, weights: Weights) -> State:
    h, c = state
    w, b, projection = weights
    i, f, g, o = (gates + functional.linear(h, w, b)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h if projection is None else functional.linear(h, projection), c


def _gru(gates: Tensor, state: State, weights: Weights) -> State:
    (h,) = state
    (w, b, _) = weights
    r, z, n = gates.chunk(3, -1)
    hidden_r, hidden_z, hidden_n = functional.linear(h, w, b).chunk(3, -1)
    n = (n + (r + hidden_r).sigmoid() * hidden_n).tanh()
    return (n + (z + hidden_z).sigmoid() * (h - n),)


def _simple(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(gates: Tensor, state: State, weights: Weights) -> State:
        (h,) = state
        (w, b, _) = weights
        return (activation(gates + functional.linear(h, w, b)),)

    return cell


_CELLS: dict[Any, Cell] = {torch.lstm: _lstm, torch.gru: _gru}
_CELLS |= {torch.rnn_tanh: _simple(torch.tanh), torch.rnn_relu: _simple(torch.relu)}
_WEIGHT_NORM = {weight_norm()}
_ATTENTION = {functional.scaled_dot_product_attention, functional.multi_head_attention_forward}
_BILINEAR = {torch.bilinear, functional.bilinear}
_BAG_ARGUMENTS = inspect.signature(functional.embedding_bag)
_WRITTEN_OUT = frozenset(
    {
        *_CELLS,
        *_ATTENTION,
        *_WEIGHT_NORM,
        *_BILINEAR,
        functional.embedding_bag,
        torch.prelu,
    }
)


def _normalized_weight(direction: Tensor, length: Tensor, dim: int) -> Tensor:
    """``weight_norm``: every slice along ``dim`` of its own length, or all of it where ``dim`` is -1."""
    axes = [axis for axis in range(direction.dim()) if axis != dim]
    return direction * (
        length
        / torch.linalg.vector_norm(
            direction,
            dim=axes,
            keepdim=dim >= 0,
        )
    )


def _bilinear(left: Tensor, right: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``bilinear`` of (…, left) and (…, right) by a weight (output, left, right)."""
    # (…, output, right)
    halves = torch.tensordot(left, weight, dims=([-1], [1]))
    product = (halves * right.unsqueeze(-2)).sum(-1)
    return product if bias is None else product + bias


def _embedding_bag(call: Call) -> Tensor:
    """``embedding_bag`` of words (bag, word), or (word,) with offsets (bag,); torch's has one derivative only."""
    bound = _BAG_ARGUMENTS.bind(*call.args, **call.options)
    bound.apply_defaults()
    given = bound.arguments
    words = given["input"]
    with_offsets = words.dim() == 1
    is_plain = given["max_norm"] is None and not given["include_last_offset"]
    # the largest of a bag of any length is left to torch
    if not is_plain or (with_offsets and given["mode"] == "max"):
        return call.result()
    is_counted = torch.ones_like(words, dtype=torch.bool)
    if given["padding_idx"] is not None:
        is_counted = words != given["padding_idx"] % len(given["weight"])
    vectors = functional.embedding(words, given["weight"])
    if given["per_sample_weights"] is not None:
        vectors = vectors * given["per_sample_weights"].unsqueeze(-1)
    if given["mode"] == "max":
        lowest = torch.finfo(vectors.dtype).min
        largest = vectors.masked_fill(~is_counted.unsqueeze(-1), lowest).amax(1)
        return torch.where(is_counted.any(1, keepdim=True), largest, 0.0)
    vectors = vectors * is_counted.unsqueeze(-1)
    counts = is_counted.to(vectors.dtype)
    if with_offsets:
        # shapes, not lengths: a trace for any number of rows has them as symbols
        place = torch.arange(words.shape[0], device=words.device).unsqueeze(1)
        bag = torch.arange(given["offsets"].shape[0], device=words.device)
        bag_of_word = (place >= given["offsets"]).sum(1, keepdim=True) - 1
        members = (bag_of_word == bag).to(vectors.dtype).T
        sums = members @ vectors
        counts = members @ counts
    else:
        sums = vectors.sum(1)
        counts = counts.sum(1)
    return sums if given["mode"] == "sum" else sums / counts.clamp(min=1.0).unsqueeze(-1)


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    """x where it is positive, elsewhere ``slope`` · x: one slope, or one for each place in the second dimension."""
    if slope.numel() > 1:
        slope = slope.reshape(-1, *(1,) * (x.dim() - 2))
    return torch.where(x > 0, x, slope * x)


@dataclass(frozen=True, eq=False)
class _Recurrence:
    """One layer of a recurrent net in one direction."""

    cell: Cell
    start: State
    #: as torch has them: on x and on h; their biases where there are any; of an LSTM the projection where there is one
    weights: Sequence[Tensor]
    has_biases: bool
    backwards: bool

    def run(self, x: Tensor) -> tuple[Tensor, State]:
        """Outputs (time, B, …) of inputs (time, B, …), and the last state."""
        biases: Sequence[Tensor | None] = (None, None)
        w_x, w_h, *biases_and_projection = self.weights
        projection = biases_and_projection
        if self.has_biases:
            biases = biases_and_projection[:2]
            projection = biases_and_projection[2:]
        b_x, b_h = biases
        recurrent = (w_h, b_h, projection[0] if projection else None)

        def scan_step(state: State, gates: Tensor) -> tuple[State, Tensor]:
            state = self.cell(gates, state, recurrent)
            return state, state[0]

        gates = functional.linear(x, w_x, b_x)
        end, outputs = scan(scan_step, self.start, gates.flip(0) if self.backwards else gates)
        return outputs.flip(0) if self.backwards else outputs, end


def _recurrent_net(
    cell: Cell,
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> State:
    """Outputs of the last layer (time, B, …), or (B, time, …), and the last state of every layer and direction."""
    directions = 1 + int(bidirectional)
    starts = (state,) if isinstance(state, Tensor) else tuple(state)
    recurrences = _recurrences(cell, starts, weights, has_biases, directions)
    ends: list[State] = []
    out = x.transpose(0, 1) if batch_first else x
    for layer in range(num_layers):
        if layer and dropout and train:
            out = functional.dropout(out, dropout)
        outputs = []
        for recurrence in recurrences[layer * directions : (layer + 1) * directions]:
            output, end = recurrence.run(out)
            outputs.append(output)
            ends.append(end)
        out = torch.cat(outputs, -1)
    out = out.transpose(0, 1) if batch_first else out
    return out, *(torch.stack(states) for states in zip(*ends, strict=True))


def _recurrences(
    cell: Cell,
    starts: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    directions: int,
) -> list[_Recurrence]:
    """Each layer in each direction, layer by layer; ``starts`` are (layer and direction, B, hidden) each."""
    count = len(starts[0])
    size = len(weights) // count
    recurrences = []
    for index in range(count):
        recurrence = _Recurrence(
            cell,
            start=tuple(state[index] for state in starts),
            weights=weights[index * size : (index + 1) * size],
            has_biases=has_biases,
            backwards=index % directions == 1,
        )
        recurrences.append(recurrence)
    return recurrences
