"""Files of a run: YAML (JSON is YAML too), in which a name stands once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from pyrobnn.inference.method import METHODS

#: method and options of each name
Listed = dict[str, tuple[str, dict[str, Any]]]


def read_config(path: str | Path) -> tuple[dict[str, Any], Listed]:
    """The options of the study, and under each name of its ``methods`` the method and its options.

    Args:
        path: of the file. Paths in it are from the folder that the command runs in, as on the command line.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not YAML, a name that stands twice, or another shape.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no file {str(path)!r}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8") from error
    try:
        _check_once(yaml.compose(text, Loader=yaml.SafeLoader), path)
        content = get_loader("yaml")(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {_kind(content)}: it must map options to values, such as 'data: diabetes', and 'methods' "
            "to what is run"
        )
    content = {str(name).replace("-", "_"): value for name, value in content.items()}
    return content, _methods(content.pop("methods", None), str(path))


def write_config(plain: Mapping[str, Any]) -> str:
    """The text of a file that asks for this run."""
    return yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True)


def _check_once(node: yaml.Node | None, path: str | Path) -> None:
    """Refuse a name that stands twice in one map: YAML would take the last in silence."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            if name.value in seen:
                line = name.start_mark.line + 1
                raise ValueError(
                    f"{path}: {name.value!r} stands twice, again in line {line}: rename one of them"
                )
            seen.add(name.value)
            _check_once(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_once(value, path)


def _methods(written: Any, path: str) -> Listed:
    """Name → method and options, of a list of words as on the command line, or of a map."""
    if written is None:
        return {}
    if isinstance(written, str):
        written = written.split()
    if isinstance(written, list) and all(isinstance(each, str) for each in written):
        words = [each.partition("=") for each in written]
        if twice := next((label for label, _, _ in words if [w[0] for w in words].count(label) > 1), None):
            raise ValueError(f"{path}: two methods are called {twice!r}: give each a name of its own")
        return {label: (name or label, {}) for label, _, name in words}
    if not isinstance(written, dict):
        raise ValueError(
            f"{path}: 'methods' must be names, [svi, nuts], or a map, {{nuts-long: {{method: nuts, num_draws: 4000}}}}"
            f", got a {_kind(written)}"
        )
    return {str(label): _method(str(label), options, path) for label, options in written.items()}


def _method(label: str, options: Any, path: str) -> tuple[str, dict[str, Any]]:
    if options is None or isinstance(options, str):
        options = {"method": options or label}
    if not isinstance(options, dict):
        raise ValueError(
            f"{path}: {label!r} must map options to values, such as {{num_draws: 500}}, got a {_kind(options)}"
        )
    options = {str(name).replace("-", "_"): value for name, value in options.items()}
    name = options.pop("method", label)
    if name not in METHODS:
        raise ValueError(f"{path}: {label!r} must say 'method', one of {', '.join(METHODS)}, got {name!r}")
    return name, options


def _kind(value: Any) -> str:
    return {"list": "list", "dict": "map", "str": "text", "NoneType": "file without content"}.get(
        type(value).__name__, "single value"
    )
