"""What the ``meta`` of a posterior says of the method that made it, and of the packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import Distribution
from typing import Any, Protocol, cast

from torch import nn


class Recorded(Protocol):
    """A method of inference as the provenance of its posteriors knows it; a frozen dataclass of options."""

    @property
    def kind(self) -> str: ...

    @property
    def claim(self) -> str: ...

    @property
    def remedy(self) -> str: ...


def version_of(package: str) -> str:
    """The version that is installed; "unknown" of a package without its metadata, as PYTHONPATH may find one."""
    distribution = next(iter(Distribution.discover(name=package)), None)
    return "unknown" if distribution is None else distribution.version


def settings(method: Recorded) -> dict[str, Any]:
    """The configuration of a method as plain values that JSON can hold."""
    # a frozen dataclass, which the class that it derives from is not
    options = dataclasses.fields(cast(Any, method))
    return {option.name: _plain(getattr(method, option.name)) for option in options}


def _plain(value: object) -> object:
    """The value of an option, or its name where JSON has no such value."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, nn.Module):
        return type(value).__name__
    return getattr(value, "__name__", None) or repr(value)
