"""What a record's numbers depend on: the code that fits and predicts, its commit, the versions of the libraries."""

from __future__ import annotations

import ast
import hashlib
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pyrobnn

PACKAGE = Path(pyrobnn.__file__).parent
#: parts of the package that no score depends on
APART = ("report", "plots", "diagnostics", "estimators", "studies", "cli.py", "preflight.py")


@cache
def code(*roots: str) -> str:
    """Eight letters that change with any line that fits or predicts.

    Args:
        roots: modules; the letters then change with their lines and those of what they import, directly or not, and
            with no others: of a subpackage that gathers the names of its modules, those that the imported names come
            from. None are all of the package that a score may depend on.

    Raises:
        ValueError: a module that the package does not have.
    """
    found = hashlib.sha256()
    for path in sorted(_reached(roots) if roots else _all(), key=Path.as_posix):
        found.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:8]


def _all() -> Iterable[Path]:
    for path in PACKAGE.rglob("*.py"):
        if not _apart(path):
            yield path


def _apart(path: Path) -> bool:
    inside = path.relative_to(PACKAGE).parts
    return inside[0] in APART and inside[:2] != ("studies", "uci")


def _reached(roots: Iterable[str]) -> set[Path]:
    """Files of the modules and of all that they import; what no score depends on and the package's top are left out."""
    seen: set[Path] = set()
    waiting = []
    for root in roots:
        if (file := _file(root)) is None:
            raise ValueError(f"{root} is no module of this package")
        waiting.append(file)
    while waiting:
        file = waiting.pop()
        if file not in seen and not _apart(file):
            seen.add(file)
            waiting += imported(file)
    return seen


@cache
def imported(file: Path) -> frozenset[Path]:
    """Files of the package that a file imports, at its top or in a function."""
    found: set[Path | None] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {_file(name.name) for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {_home(node.module, name.name) for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = file.parents[node.level - 1].relative_to(PACKAGE.parent).parts
            module = ".".join([*package, *([node.module] if node.module else [])])
            found |= {_home(module, name.name) for name in node.names}
    return frozenset(path for path in found if path is not None)


def _home(module: str, name: str) -> Path | None:
    """The file that an imported name comes from: of a subpackage's name the module it is gathered from, if it is."""
    if (own := _file(f"{module}.{name}")) is not None:
        return own
    file = _file(module)
    if file is not None and file.name == "__init__.py":
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and name in {each.asname or each.name for each in node.names}:
                return _home(
                    node.module or "", next(e.name for e in node.names if (e.asname or e.name) == name)
                )
    return file


def _file(module: str) -> Path | None:
    top, _, inside = module.partition(".")
    if top != PACKAGE.name or not inside:
        return None
    place = PACKAGE.joinpath(*inside.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def commit() -> str | None:
    """The commit of the checkout that the package is imported from."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(PACKAGE), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


@cache
def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("torch", "pyro-ppl", "tyxe", "pyrobnn")
    }
