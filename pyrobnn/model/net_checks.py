"""What a net must be to become a BNN: a module with numbers for weights that can be copied and changes nothing."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pyrobnn.core.checks import Refused
from pyrobnn.core.private_trace import is_compiled
from pyrobnn.model.fused import WrittenOut
from pyrobnn.model.output_shape import as_returned
from pyrobnn.model.overwritten import is_same

_Tensors = dict[str, Tensor]


def takes_words(net: nn.Module) -> bool:
    """Whether the net looks inputs up by whole numbers."""
    return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in net.modules())


def refuse_unfit(net: nn.Module) -> None:
    """Refuse a net whose calls go through a wrapper of torch's, or whose weights are no real numbers.

    Raises:
        ValueError: naming the remedy.
    """
    _refuse_wrapped(net)
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ValueError(
                f"{name!r} of 'net' has no shape yet, as in a lazy layer (nn.LazyLinear): call net(x[:2]) once before "
                "building the BNN"
            )
    for name, param in net.named_parameters():
        if param.is_meta:
            raise ValueError(
                "the parameters of 'net' are on the device 'meta' and have no values: call "
                "net.to_empty(device='cpu') and initialise it, or load its state, before building the BNN"
            )
        if param.is_complex():
            raise ValueError(
                f"the parameter {name!r} of 'net' is complex, and priors and flat vectors here are of real numbers: "
                "keep its real and imaginary parts in one real parameter of shape (…, 2), and take "
                "torch.view_as_complex of it in forward"
            )
        if param.dtype == torch.float16:
            raise ValueError(
                f"the parameter {name!r} of 'net' is float16, in which small gradients vanish and log densities "
                "overflow: net.float(), with torch.autocast in its forward where that is faster, or net.bfloat16()"
            )
        if not param.is_floating_point():
            raise ValueError(
                f"the parameter {name!r} of 'net' holds {str(param.dtype).removeprefix('torch.')} values, which have "
                "no density: make it a buffer, net.register_buffer(name, tensor)"
            )
    _refuse_several_types(net)


def _refuse_wrapped(net: nn.Module) -> None:
    if isinstance(net, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(
            f"'net' is wrapped in {type(net).__name__}: pass the net inside, net.module; "
            "pyrobnn.distributed shares a fit between machines"
        )
    for name, module in net.named_modules():
        where = f"{name!r} of 'net'" if name else "'net'"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} is a module of TorchScript (torch.jit.script, trace or load), whose calls take no other "
                "weights: pass the nn.Module that it was made from, with net.load_state_dict(scripted.state_dict())"
            )
        if is_compiled(module):
            raise ValueError(
                f"{where} is compiled (torch.compile), and a fit compiles by itself: pass the module that was given "
                "to torch.compile; both have the same weights"
            )


def _refuse_several_types(net: nn.Module) -> None:
    """Refuse trained parameters of several floating types: a flat vector has one, and the net would get that."""
    types: dict[torch.dtype, str] = {}
    for name, param in net.named_parameters():
        if param.requires_grad:
            types.setdefault(param.dtype, name)
    if len(types) > 1:
        listed = " and ".join(
            f"{str(dtype).removeprefix('torch.')} ({name!r})" for dtype, name in types.items()
        )
        raise ValueError(
            f"the parameters of 'net' are of several types, {listed}, and one vector holds them all: net.float() or "
            "net.double() gives them one"
        )


def copied(net: nn.Module) -> nn.Module:
    """A deep copy of ``net``, in which tensors that forward left in its modules' attributes have no gradient.

    Raises:
        TypeError: a module holds what Python cannot copy.
    """
    detached: dict[int, Tensor] = {}
    for module in net.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                detached[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(net, dict(detached))
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"'net' cannot be copied, and a BNN works with a copy ({reason}): keep in its attributes what "
            "copy.deepcopy takes, and of what forward computes h.detach()"
        ) from error


@torch.no_grad()
def tried(net: nn.Module, rows: Tensor) -> object:
    """What ``net`` returns for the ``rows`` (N, …), as its forward gives it; the net and the rows stay as they are.

    Raises:
        Refused: the call changed the rows, or a parameter or buffer of the net.
    """
    inputs = rows.clone()
    before: _Tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    after = {name: tensor.clone() for name, tensor in before.items()}
    with as_returned(), WrittenOut():
        f = torch.func.functional_call(net, after, (inputs,))
    if not is_same(inputs, rows):
        raise Refused(
            "the forward of the net writes into its inputs, which are your data: begin it with x = x.clone(), or "
            "compute without writing in place"
        )
    changed = [repr(name) for name in before if not is_same(after[name], before[name])]
    if changed:
        raise Refused(
            f"the forward of the net changes {', '.join(changed[:3])} in place, in evaluation mode too, so it is "
            "another function after every call: write there in training mode alone (if self.training); where the first "
            "call on data sets them, call net(x) before building the BNN"
        )
    return f
