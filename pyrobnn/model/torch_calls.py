"""Calls of torch's functions, as a handler sees them that may answer in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch.overrides import TorchFunctionMode


class Call(NamedTuple):
    """One call of a torch function."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def result(self) -> Any:
        """What the function itself returns."""
        return self.function(*self.args, **self.options)


class CallHandler(TorchFunctionMode):
    """Inside, every call of a torch function returns what :meth:`answer` says.

    A handler is off while it answers: the calls that it makes itself go to the handlers around it.

    Attributes: ``functions``, those that it answers for, others return what they do without it; None for all.
    """

    functions: Collection[Any] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.functions is not None and func not in self.functions:
            return func(*args, **(kwargs or {}))
        return self.answer(Call(func, args, kwargs or {}))

    def answer(self, call: Call) -> Any:
        """The result of a call."""
        raise NotImplementedError


class Handlers(CallHandler):
    """Several handlers as one, the outermost first: a call that none of them answers for passes by them in one step.

    Args:
        handlers: all of which say for which functions they answer.
    """

    def __init__(self, handlers: Sequence[CallHandler]) -> None:
        super().__init__()
        self.handlers = handlers
        self.functions = frozenset[Any]().union(*(handler.functions or () for handler in handlers))

    def answer(self, call: Call) -> Any:
        with contextlib.ExitStack() as nested:
            for handler in self.handlers:
                nested.enter_context(handler)
            return call.result()
