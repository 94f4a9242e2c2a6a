"""Calls of torch's functions, as a handler sees them that may answer in their place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.answer(Call(func, args, kwargs or {}))

    def answer(self, call: Call) -> Any:
        """The result of a call."""
        raise NotImplementedError
