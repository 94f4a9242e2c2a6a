"""Pages of the API reference: what is public, the names of ``pyrobnn`` and of the modules that it names."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pyrobnn as pb


def public_modules() -> list[ModuleType]:
    """The modules that ``pyrobnn`` names, and those of extras that are installed, by name.

    What stands in other modules may change with any version, unless one of these names it.
    """
    modules = [value for name in pb.__all__ if inspect.ismodule(value := getattr(pb, name))]
    for extra in ("botorch", "mlflow"):
        if find_spec(extra) is not None:
            modules.append(import_module(f"pyrobnn.{extra}"))
    return sorted(modules, key=lambda module: module.__name__)


def public_names(module: ModuleType) -> list[str]:
    """``__all__``, or else the functions and classes that are defined there, those of TyXe's included."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [name for name in listed if not inspect.ismodule(getattr(module, name))]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def top_level() -> dict[str, list[str]]:
    """The names of `pb` but its modules, by what they are."""
    groups: dict[str, list[str]] = {
        "Methods": [],
        "Estimators": [],
        "Models and results": [],
        "Functions": [],
    }
    for name in pb.__all__:
        value = getattr(pb, name)
        if inspect.ismodule(value):
            continue
        if not inspect.isclass(value):
            kind = "Functions"
        elif not hasattr(value, "fit"):
            kind = "Models and results"
        else:
            kind = "Estimators" if hasattr(value, "predict") else "Methods"
        groups[kind].append(name)
    return {kind: sorted(names) for kind, names in groups.items() if names}


def _directive(path: str, value: Any) -> str:
    """What autodoc makes of a name; of what another library documents, its name alone."""
    if not callable(value):
        return f".. py:data:: {path}\n\n   A ``{type(value).__name__}``: {_listed(value)}\n"
    kind = "class" if inspect.isclass(value) else "function"
    if not value.__module__.startswith("pyrobnn"):
        return (
            f".. py:{kind}:: {path}\n\n   ``{value.__module__}.{value.__qualname__}``, passed on.\n"
        )
    return f".. auto{kind}:: {path}\n" + (_members(value) if kind == "class" else "")


def _members(value: type) -> str:
    """Methods and properties of its own, and those of private bases of the package, which have no page."""
    bases = [base for base in value.__mro__[1:] if base.__module__.startswith("pyrobnn")]
    owners = (*(base for base in reversed(bases) if base.__name__.startswith("_")), value)
    names = {name: member for owner in owners for name, member in vars(owner).items()}
    told = [
        name
        for name, member in names.items()
        if not name.startswith("_")
        and (
            inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)
        )
        and inspect.getdoc(getattr(value, name))
    ]
    return f"   :members: {', '.join(told)}\n" if told else ""


def _listed(value: Any) -> str:
    return (
        ", ".join(f"``{each}``" for each in value)
        if isinstance(value, dict | list | tuple)
        else f"``{value}``"
    )


def _title(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n"


def _first(value: Any) -> str:
    """First sentence of a docstring."""
    return (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")


def write(folder: Path) -> list[str]:
    """Write all pages; gives the documented names, in full."""
    folder.mkdir(parents=True, exist_ok=True)
    pages: dict[str, str] = {}
    places: dict[int, str] = {}
    documented: list[str] = []
    index = [
        _title("API reference"),
        "``import pyrobnn as pb``: every public name, from its docstring. What is not named here may change with any "
        "version.\n",
    ]
    index += [".. code-block:: python\n", "   import pyrobnn as pb\n", "   help(pb.NUTS)\n"]
    for kind, names in top_level().items():
        index += [_title(kind, "-"), ".. list-table::\n   :widths: 30 70\n"]
        for name in names:
            value = getattr(pb, name)
            places[id(value)] = f"pyrobnn.{name}"
            documented.append(f"pyrobnn.{name}")
            pages[name] = _title(f"pb.{name}") + "\n" + _directive(f"pyrobnn.{name}", value)
            index.append(f"   * - :doc:`pb.{name} <{name}>`\n     - {_first(value)}")
        index.append("")
    index += [_title("Modules", "-"), ".. list-table::\n   :widths: 30 70\n"]
    for module in public_modules():
        path = module.__name__
        page = path.removeprefix("pyrobnn.")
        parts = [_title(f"pb.{page}"), f".. py:module:: {path}\n", f"{inspect.getdoc(module)}\n"]
        for name in public_names(module):
            value = getattr(module, name)
            documented.append(f"{path}.{name}")
            if id(value) in places:
                parts.append(f"``{name}`` is :py:obj:`{places[id(value)]}`.\n")
            else:
                places[id(value)] = f"{path}.{name}"
                parts.append(_directive(f"{path}.{name}", value))
        pages[page] = "\n".join(parts)
        index.append(f"   * - :doc:`pb.{page} <{page}>`\n     - {_first(module)}")
    index += ["", ".. toctree::\n   :hidden:\n", *(f"   {page}" for page in pages), ""]
    pages["index"] = "\n".join(index)
    for page, text in pages.items():
        (folder / f"{page}.rst").write_text(text, encoding="utf-8")
    return documented
