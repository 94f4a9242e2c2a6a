"""Names of a package that import their module when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(
    package: str, names: Mapping[str, str], rest: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__`` for names that cost too much to import with it.

    Args:
        package: its ``__name__``.
        names: name → the module that it is, or that defines it.
        rest: a module whose public names are the package's too. The package then has no list of its own:
            its ``__all__`` are these and ``names``.

    Returns:
        Both functions; a name that was asked for once is an attribute of the package from then on.
    """

    def rest_names() -> list[str]:
        return list(import_module(rest).__all__) if rest is not None else []

    def get(name: str) -> Any:
        value: Any
        if name in names:
            module = import_module(names[name])
            value = module if names[name] == f"{package}.{name}" else getattr(module, name)
        elif rest is not None and name == "__all__":
            value = sorted({*names, *rest_names()})
        elif rest is not None and not name.startswith("__") and name in rest_names():
            value = getattr(import_module(rest), name)
        else:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package]
            )
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names, *rest_names()})

    return get, listed
