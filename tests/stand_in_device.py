"""A device that is not there: tensors that hold CPU values, claim to lie elsewhere and refuse what a GPU refuses.

CUDA code goes wrong where a tensor that was made on the CPU meets one of the device, and that shows only on a machine
with a GPU. Here the device is torch's slot for backends written in Python: autograd, ``torch.func``, modules and
Pyro see ``device(type="elsewhere", index=0)``, every operator runs on the values underneath, and one whose tensors lie
on two devices raises as CUDA does. What CUDA lets through is let through: copies, one CPU scalar in an elementwise
operator, CPU indices. The device has a random state of its own.

The traced graphs are another matter (their constants are not arguments); for those ``FakeTensorMode`` takes the same
device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"
CPU = torch.device("cpu")
_ATEN = torch.ops.aten
#: copies from one device to another
_COPIES = {_ATEN._to_copy, _ATEN.copy_, _ATEN.copy}
#: operators that take indices of the CPU, and a CPU scalar as a value
_INDEXED = {
    _ATEN.index,
    _ATEN.index_put,
    _ATEN.index_put_,
    _ATEN._index_put_impl_,
    _ATEN._unsafe_index,
}
#: operators that are not elementwise, or take more than one scalar, and that take scalars of the CPU all the same
_SCALARS = {_ATEN.where, _ATEN.masked_fill, _ATEN.masked_fill_, _ATEN.fill, _ATEN.fill_}
_CPU_RANDOM = (torch.get_rng_state, torch.set_rng_state)


class ElsewhereTensor(torch.Tensor):
    """A tensor of the device; its values lie in ``values``, on the CPU."""

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> ElsewhereTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
        )
        made.values = values
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()  # to be measured

    def __repr__(self, **_: Any) -> str:
        return f"{self.values!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    """Factories have no argument by which the device could be told: they are seen from here."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """What torch does in one piece, below the operators: lists to tensors and back, and generators."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            data = args[0] if func is torch.Tensor.new_tensor else None
            device = kwargs.pop("device", None) or (None if data is None else data.device)
            if device is not None and torch.device(device).type == NAME:
                if data is not None:
                    func = torch.tensor
                    args = args[1:]
                if not isinstance(args[0], torch.Tensor):
                    return func(*args, **kwargs, device="cpu").to(device)
                return torch.as_tensor(args[0].to(device), **kwargs)
            kwargs |= {} if device is None else {"device": device}
        if func is torch.Tensor.tolist and isinstance(args[0], ElsewhereTensor):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)


class _Module:
    """What ``torch.cuda`` is for CUDA."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(0).get_state()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def device(self, device: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 2**33, 2**33

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.state = state.clone()

    def manual_seed(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    manual_seed_all = manual_seed


_MODULE = _Module()
# when this is imported and not later: autograd counts the devices before its first backward pass. Beside a GPU not at
# all: torch would take this for the process's accelerator, and autograd find no streams of CUDA.
if not torch.cuda.is_available():
    _setup_privateuseone_for_python_backend(NAME, backend_module=_MODULE)


@contextlib.contextmanager
def stand_in_device() -> Iterator[torch.device]:
    """The device, for as long as the block lasts; an AssertionError if it leaves the device's random state changed."""
    if torch.cuda.is_available():
        pytest.skip("the stand-in is no second accelerator beside a GPU")
    module = _MODULE
    before = module.get_rng_state()
    with _Operators(), _Calls():
        yield torch.device(NAME, 0)
    same = torch.equal(before, module.state)
    module.state = before
    assert same, "the caller's random state of the device was left changed"


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors: list[torch.Tensor] = []
    _each(tensors.append, (args, *kwargs.values()))
    there = [tensor for tensor in tensors if isinstance(tensor, ElsewhereTensor)]
    device = kwargs.get("device")
    away = bool(there) if device is None else device.type == NAME
    if not there and not away:
        return func(*args, **kwargs)
    if there and len(there) < len(tensors) and func.overloadpacket not in _COPIES:
        _refuse_two_devices(func, args, kwargs)
    if func.overloadpacket is _ATEN.copy_:
        away = isinstance(args[0], ElsewhereTensor)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # the shape of the tensor itself; that of its values follows
    wrappers = {id(tensor.values): tensor for tensor in there}
    args = _each(_values, args)
    kwargs = {name: _each(_values, value) for name, value in kwargs.items()}
    if device is not None:
        kwargs["device"] = CPU
    if (
        func.overloadpacket is _ATEN._efficientzerotensor
    ):  # forward mode: its values would have no memory
        func = _ATEN.zeros.default
    with _random_state(func, kwargs) if away else contextlib.nullcontext():
        found = func(*args, **kwargs)

    def wrapped(value: torch.Tensor) -> torch.Tensor:
        return wrappers[id(value)] if id(value) in wrappers else ElsewhereTensor(value)

    return _each(wrapped, found) if away else found


def _each(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``fn`` of every tensor in the (nested) list or tuple ``value``."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    return (
        type(value)([_each(fn, item) for item in value]) if type(value) in (list, tuple) else value
    )


def _values(value: torch.Tensor) -> torch.Tensor:
    return value.values if isinstance(value, ElsewhereTensor) else value


def _refuse_two_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises as CUDA does, unless all that lies on the CPU is a scalar or an index where CUDA takes one."""
    packet = func.overloadpacket
    schema = func._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    scalars = 0
    for argument in schema:
        found: list[torch.Tensor] = []
        _each(found.append, given.get(argument.name))
        for leaf in found:
            if isinstance(leaf, ElsewhereTensor):
                continue
            written = argument.alias_info is not None and argument.alias_info.is_write
            index = packet in _INDEXED and argument.name == "indices"
            scalar = leaf.dim() == 0 and not written
            scalars += scalar and torch.Tag.pointwise in func.tags
            taken = scalar and (scalars == 1 or packet in _SCALARS or packet in _INDEXED)
            if not (index or taken):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{NAME}:0 and cpu! ({argument.name!r} of {func}, shape {tuple(leaf.shape)})"
                )


@contextlib.contextmanager
def _random_state(func: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """The random state of the device under an operator that draws; a generator of the CPU is refused."""
    if kwargs.get("generator") is not None:
        raise RuntimeError(
            f"Expected a '{NAME}' device type for generator but found 'cpu' (in {func})"
        )
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    module = _MODULE
    (get, put) = _CPU_RANDOM
    outside = get()
    put(module.state)
    try:
        yield
    finally:
        module.state = get()
        put(outside)
