"""Names of torch's ``vmap``, modules, random numbers and distributions that it does not promise, looked up when used.

The compiler's are in :mod:`pyrobnn.core.private`, Pyro's in :mod:`pyrobnn.core.private_pyro`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pyrobnn.core import private, private_trace

if TYPE_CHECKING:
    from torch._ops import OpOverload

# -- vmap --------------------------------------------------------------------------------------------------------------

_Read = TypeVar("_Read")


@contextlib.contextmanager
def without_fallback_warnings() -> Iterator[None]:
    """Inside, torch does not warn of an operation without a batching rule, in any thread: it is only slower."""
    # bool: does nothing where torch has no such name
    switch = private.find("torch._C._functorch._set_vmap_fallback_warning_enabled") or bool
    switch(False)
    try:
        yield
    finally:
        switch(True)


# -- modules ----------------------------------------------------------------------------------------------------------


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Put any tensor in the place of a parameter of the module itself, which ``setattr`` refuses."""
    module._parameters[name] = value  # type: ignore[assignment]


# -- random numbers ----------------------------------------------------------------------------------------------------


class Inseparable(RuntimeError):
    """An operation draws from the generator of the process and takes no other."""


def drawing_from(
    generator_on: Callable[[torch.device], torch.Generator],
) -> contextlib.AbstractContextManager[None] | None:
    """Inside, operations of this thread draw from other generators than the process's; None where torch cannot.

    Raises Inseparable inside, before anything is drawn by an operation that takes no generator.
    """
    mode = _generator_mode()
    return None if mode is None else mode(generator_on)


@functools.cache
def _generator_mode() -> Any:
    dispatch_mode = private.find("torch.utils._python_dispatch.TorchDispatchMode")
    if dispatch_mode is None:
        return None

    class GeneratorMode(dispatch_mode):  # type: ignore[misc, valid-type]
        def __init__(self, generator_on: Callable[[torch.device], torch.Generator]) -> None:
            super().__init__()
            self.generator_on = generator_on

        def __torch_dispatch__(
            self,
            func: OpOverload,
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            kwargs = kwargs or {}
            arguments = [*args, *kwargs.values()]
            seeded_by_user = any(isinstance(value, torch.Generator) for value in arguments)
            if torch.Tag.nondeterministic_seeded not in func.tags or seeded_by_user:
                return func(*args, **kwargs)
            devices = [value.device for value in arguments if isinstance(value, Tensor)]
            device = devices[0] if devices else torch.device(kwargs.get("device") or "cpu")
            return _with_generator(func)(
                *args,
                **kwargs,
                generator=self.generator_on(device),
            )

    return GeneratorMode


def _with_generator(func: OpOverload) -> Callable[..., Any]:
    """The overload of a random operation that takes a generator; raises Inseparable where it has none."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func
    overload = getattr(func.overloadpacket, "generator", None)
    if overload is None:
        raise Inseparable(f"{func} takes no generator")
    return overload


# -- distributions -----------------------------------------------------------------------------------------------------

#: how far outside of its support a parameter may lie by rounding, relative to its bound: what torch allows the sum of a
#: simplex
ROUNDING = 1e-6


@contextlib.contextmanager
def values_unchecked() -> Iterator[None]:
    """Distributions take any value in this thread: those expanded while validation was on carry a flag of their own.

    A torch without the method has it inside; whatever checks values there instead still checks those of such a flag.
    """
    distributions: Any = Distribution
    method = "_validate_sample"
    check = getattr(distributions, method, None)
    thread = threading.get_ident()

    def unchecked(distribution: Distribution, value: Tensor) -> None:
        if check is not None and threading.get_ident() != thread:
            check(distribution, value)

    if check is not None:
        with private.replaced(distributions, method, unchecked):
            yield
        return
    setattr(distributions, method, unchecked)
    try:
        yield
    finally:
        # an outer context may have taken it away already
        with contextlib.suppress(AttributeError):
            delattr(distributions, method)


class _BirthHooks(threading.local):
    """What this thread does with every distribution that it makes; the innermost counts."""

    hooks: tuple[Callable[[Distribution], None], ...] = ()


_birth_hooks = _BirthHooks()
_births_lock = threading.Lock()
_num_watchers = 0  # runs that are inside of `distributions_born`, of all threads
_original_init = Distribution.__init__
#: where the one distribution of torch is made that clamps its parameter before anybody can see it
_CLAMPING = "torch.distributions.continuous_bernoulli"
_original_clamp: Any = private.find(f"{_CLAMPING}.clamp_probs")


def _init_with_hook(self: Distribution, *args: Any, **options: Any) -> None:
    _original_init(self, *args, **options)
    if _birth_hooks.hooks:
        _birth_hooks.hooks[-1](self)


def _clamp_with_hook(probs: Tensor) -> Tensor:
    """Probabilities, clamped; where a hook looks at distributions, what is no probability becomes NaN, to be seen."""
    clamped = _original_clamp(probs)
    if not _birth_hooks.hooks:
        return clamped
    inside = (probs >= -ROUNDING) & (probs <= 1 + ROUNDING)
    return torch.where(inside, clamped, torch.nan)


@functools.cache  # one density makes distributions dozens of times
def _module_of_clamp() -> Any:
    return private.find(_CLAMPING)


def _make_distributions_by(init: Any, clamp: Any) -> None:
    """Replace the constructor of all distributions, and the clamp of the one that has one."""
    kind: Any = Distribution
    kind.__init__ = init
    if _original_clamp is not None:
        _module_of_clamp().clamp_probs = clamp


@contextlib.contextmanager
def distributions_born(hook: Callable[[Distribution], None]) -> Iterator[None]:
    """Inside, ``hook`` is called with every distribution that this thread makes, as soon as it has its parameters.

    That is where torch validates them. No handler and no mode sees a distribution being made, so the constructor of
    the base class is replaced, while any thread is inside; those of other threads pass through it unchanged. A
    probability that a constructor would clamp into its support is NaN inside.
    """
    global _num_watchers
    with _births_lock:
        _num_watchers += 1
        if _num_watchers == 1:
            _make_distributions_by(_init_with_hook, _clamp_with_hook)
    before = _birth_hooks.hooks
    _birth_hooks.hooks = (*before, hook)
    try:
        yield
    finally:
        _birth_hooks.hooks = before
        with _births_lock:
            _num_watchers -= 1
            if not _num_watchers:
                _make_distributions_by(_original_init, _original_clamp)


_IS_WRAPPED = "torch._C._functorch.is_functorch_wrapped_tensor"
_UNWRAPPED = "torch._C._functorch.get_unwrapped"
_AXIS = "torch._C._functorch.maybe_get_bdim"


def depends(value: Tensor) -> bool:
    """Whether a tensor has a gradient, or a value of its own at each of the points that ``vmap`` has put together."""
    names = (_IS_WRAPPED, _AXIS, _UNWRAPPED)
    is_wrapped, axis, unwrapped = private.looked_up(private.find, *names)
    if None in (is_wrapped, axis, unwrapped):
        return True
    while is_wrapped(value):
        if value.requires_grad or axis(value) >= 0:
            return True
        value = unwrapped(value)
    return value.requires_grad


def is_batched(value: Tensor) -> bool:
    """Whether ``vmap`` has put together several values in a tensor; False where torch lacks a name that tells."""
    names = (_IS_WRAPPED, _AXIS, _UNWRAPPED)
    is_wrapped, axis, unwrapped = private.looked_up(private.find, *names)
    if None in (is_wrapped, axis, unwrapped):
        return False
    while is_wrapped(value):
        if axis(value) >= 0:
            return True
        value = unwrapped(value)
    return False


def of_constant(read: Callable[..., _Read], *args: Any, **options: Any) -> _Read:
    """What a function reads of tensors that are the same at all points, outside of every transform and trace."""
    is_wrapped, unwrapped = private.looked_up(private.find, _IS_WRAPPED, _UNWRAPPED)
    (untransformed,) = private.looked_up(private.find, "torch._C._DisableFuncTorch")
    untraced = private_trace.untraced()
    if untraced is None or None in (is_wrapped, unwrapped, untransformed):
        return read(*args, **options)

    def innermost(argument: Any) -> Any:
        while isinstance(argument, Tensor) and is_wrapped(argument):
            argument = unwrapped(argument)
        return argument

    args = tuple(map(innermost, args))
    options = {name: innermost(argument) for name, argument in options.items()}
    with untransformed(), untraced, torch._C.DisableTorchFunction():
        return read(*args, **options)


def weight_norm() -> Callable[..., Tensor] | None:
    """The function of a weight by its direction and length, which no stub of torch has."""
    return private.find("torch._weight_norm")


def factor_of(fn: Distribution) -> Tensor | None:
    """The Cholesky factor that a multivariate distribution computed when it was made; None where it has none."""
    names = ("_unbroadcasted_scale_tril", "_capacitance_tril")
    return next((getattr(fn, name) for name in names if hasattr(fn, name)), None)
