"""Dropout as masks on the input columns of weight layers: where they sit, and weights under them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyrobnn.core.checks import Refused
from pyrobnn.model import BNN, NET

Conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Weighted = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
#: dropout layers whose units are single elements, and those whose units are channels
ELEMENTS = (nn.Dropout,)
CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
Dropout = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d
#: points on which the masks are compared with the dropout layers they stand for
NUM_PROBES = 8


@dataclass(frozen=True)
class Mask:
    """One place where units are dropped.

    Attributes: ``layer`` (name of the weight layer whose inputs are dropped), ``source`` (name of the dropout layer, or
    None where it was inserted), ``occasion`` (which call of that layer), ``units`` (dropped independently), ``repeats``
    (consecutive input columns that share a unit), ``p`` (probability that a unit is dropped).
    """

    layer: str
    source: str | None
    occasion: int
    units: int
    repeats: int
    p: float

    @property
    def weight(self) -> str:
        """Name of the masked weight in the net (the net itself may be the layer)."""
        return f"{self.layer}.weight" if self.layer else "weight"

    @property
    def site(self) -> str:
        """Site of the masked weight."""
        return NET + self.weight


def inserted_masks(model: BNN, x: Tensor, p: float) -> list[Mask]:
    """Dropout of probability ``p`` on the inputs of every linear and convolution layer with more than one.

    Dropping a layer's only input would cut the network in two: the function would be constant with probability ``p``.

    Args:
        model: its net.
        x: a few inputs (N, …).
        p: probability that an input is dropped.

    Raises:
        ValueError: the net has no such layer, or a grouped convolution.
    """
    net = copy.deepcopy(model.net).eval()
    layers = {name: module for name, module, _ in _calls(net, x) if isinstance(module, (nn.Linear, *Conv))}
    columns = {name: _columns(name, module) for name, module in layers.items()}
    masks = [Mask(name, None, 0, count, 1, p) for name, count in columns.items() if count > 1]
    if not masks:
        raise Refused(
            "the net has no linear or convolution layer with two or more inputs, so there is nothing to drop"
        )
    return masks


def layer_masks(model: BNN, x: Tensor) -> list[Mask]:
    """The net's own dropout layers, each as a mask on the weight layer that runs next.

    Args:
        model: its net; its dropout layers count in either mode.
        x: a few inputs (N, …), on which the equivalence is verified.

    Raises:
        ValueError: no dropout layer, or one that is not a mask on the inputs of the next weight layer.
    """
    net = copy.deepcopy(model.net).eval()
    masks: list[Mask] = []
    waiting: list[tuple[str, Dropout, Tensor, int]] = []
    occasions: dict[str, int] = {}
    for name, module, value in _calls(net, x):
        if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            raise Refused(
                f"the layer {name!r} is an alpha dropout, whose units do not become zero: use nn.Dropout"
            )
        if isinstance(module, (*ELEMENTS, *CHANNELS)):
            occasion = occasions.get(name, 0)
            occasions[name] = occasion + 1
            if module.p > 0:
                waiting.append((name, module, value, occasion))
        elif isinstance(module, (nn.Linear, *Conv)):
            masks += [_mask(entry, name, module) for entry in waiting]
            waiting = []
    if waiting:
        raise Refused(
            f"no linear or convolution layer follows the dropout layer {waiting[0][0]!r}: outputs cannot be dropped"
        )
    if not masks:
        raise Refused(
            "the net has no dropout layer (nn.Dropout with p > 0): add some, or pass p=0.05 to insert dropout before "
            "every weight layer"
        )
    for mask in masks:
        if mask.source is not None:
            _verify(net, mask, mask.source, x[:NUM_PROBES])
    return masks


def masked_weights(
    values: Mapping[str, Tensor], masks: Sequence[Mask], probabilities: Sequence[float], num_draws: int
) -> dict[str, Tensor]:
    r"""Draws of the masked weights, from torch's present random state.

    .. math:: W_{s} = M \operatorname{diag}(b_s / (1 - p)), \qquad b_{sj} \sim \mathrm{Bernoulli}(1 - p)

    Args:
        values: site → weight (out, in, …).
        masks: which weights, how many units.
        probabilities: p of every mask.
        num_draws: one mask each, shared by all inputs.

    Returns:
        site → (num_draws, out, in, …).
    """
    drawn: dict[str, Tensor] = {}
    for mask, p in zip(masks, probabilities):
        weight = drawn.get(mask.site, values[mask.site].expand(num_draws, *values[mask.site].shape))
        kept = torch.rand(num_draws, mask.units, dtype=weight.dtype, device=weight.device) >= p
        drawn[mask.site] = weight * _as_columns(kept / (1.0 - p), mask, weight[0])
    return drawn


def drop_inputs(
    net: nn.Module, masks: Sequence[Mask], keep: Callable[[nn.Module, int, Tensor, int], Tensor]
) -> None:
    """Make ``net`` drop inputs of its weight layers, afresh for every datum; in place.

    Args:
        net: in evaluation mode.
        masks: where.
        keep: (layer, number of the mask, input, units) → scaled mask (N, units).
    """
    for number, mask in enumerate(masks):

        def hook(
            module: nn.Module, args: tuple[Tensor, ...], number: int = number, mask: Mask = mask
        ) -> tuple[Tensor]:
            x = args[0]
            scaled = keep(module, number, x, mask.units).repeat_interleave(mask.repeats, 1)
            if isinstance(module, nn.Linear):  # features come last
                return (x * scaled.reshape(len(x), *(1,) * (x.dim() - 2), -1),)
            return (x * scaled.reshape(*scaled.shape, *(1,) * (x.dim() - 2)),)

        net.get_submodule(mask.layer).register_forward_pre_hook(hook)


def _calls(net: nn.Module, x: Tensor) -> list[tuple[str, nn.Module, Tensor]]:
    """The leaf modules in the order in which they run, with what they were given."""
    calls: list[tuple[str, nn.Module, Tensor]] = []
    with contextlib.ExitStack() as stack, torch.no_grad():
        for name, module in net.named_modules():
            if not list(module.children()):

                def record(
                    module: nn.Module, args: tuple[Tensor, ...], _out: Tensor, name: str = name
                ) -> None:
                    calls.append((name, module, args[0]))

                stack.callback(module.register_forward_hook(record).remove)
        net(x[:NUM_PROBES])
    return calls


def _mask(entry: tuple[str, Dropout, Tensor, int], layer: str, module: Weighted) -> Mask:
    source, dropout, value, occasion = entry
    columns = _columns(layer, module)
    channels = isinstance(dropout, CHANNELS)
    units = value.shape[1] if channels else value[0].numel()
    if (channels and columns % units) or (not channels and columns != units):
        advice = (
            "use nn.Dropout2d, which drops channels"
            if isinstance(module, Conv)
            else "move it next to a linear layer"
        )
        raise Refused(
            f"the dropout layer {source!r} drops {units} units of each datum, but the next weight layer {layer!r} has "
            f"{columns} input columns, so no mask of its weights does the same: {advice}"
        )
    return Mask(layer, source, occasion, units, columns // units, float(dropout.p))


def _columns(name: str, module: Weighted) -> int:
    if isinstance(module, nn.Linear):
        return module.in_features
    if module.groups != 1:
        raise Refused(f"the convolution {name!r} has groups={module.groups}: dropout masks need groups=1")
    return module.in_channels


def _as_columns(scaled: Tensor, mask: Mask, weight: Tensor) -> Tensor:
    """(draw, units) → (draw, 1, in, 1, …), to multiply weights (out, in, …)."""
    columns = scaled.repeat_interleave(mask.repeats, 1)
    return columns.reshape(len(columns), 1, -1, *(1,) * (weight.dim() - 2)).to(weight.dtype)


@torch.no_grad()
def _verify(net: nn.Module, mask: Mask, source: str, x: Tensor) -> None:
    """Dropping units where the dropout layer is = masking the weights of the layer after it.

    It holds where what lies between (ReLU, pooling, flattening) commutes with the scaling of a unit.
    """
    scaled = 2.0 * (torch.arange(mask.units, device=x.device) % 2).to(net.get_parameter(mask.weight))
    seen = [0]

    def drop(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        seen[0] += 1
        if seen[0] - 1 != mask.occasion:
            return None
        if isinstance(module, ELEMENTS):
            return out * scaled.reshape(out.shape[1:])
        return out * scaled.reshape(1, -1, *(1,) * (out.dim() - 2))

    handle = net.get_submodule(source).register_forward_hook(drop)
    try:
        expected = net(x)
    finally:
        handle.remove()
    weight = net.get_parameter(mask.weight)
    masked = {mask.weight: weight * _as_columns(scaled[None], mask, weight)[0]}
    if not torch.allclose(torch.func.functional_call(net, masked, (x,)), expected, rtol=1e-3, atol=1e-5):
        raise Refused(
            f"the dropout layer {source!r} is not a mask on the inputs of the next weight layer {mask.layer!r} "
            "(an activation such as tanh, or a shortcut, lies between): put the dropout right before the weight layer"
        )
