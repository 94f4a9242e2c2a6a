"""The package's own imports: no circles of files, and the rooms that they tie."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pyrobnn

PACKAGE = Path(pyrobnn.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
#: verbs that users find on a noun: `posterior.to_datatree`, `save`, `load`
CIRCLES = [
    {"pyrobnn.posterior.datatree", "pyrobnn.posterior.posterior", "pyrobnn.posterior.storage"}
]


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text("utf-8"))


def imports(node: ast.AST, late: bool = False, types: bool = False) -> Iterator[tuple[str, bool]]:
    """What a file imports of the package, by name too, and whether late; with ``types`` for type checkers too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not types:
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
            yield ast.unparse(child.args[0]).strip("'"), True
        if isinstance(child, ast.ImportFrom):
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield (inner if inner in MODULES else str(child.module)), late
        elif isinstance(child, ast.Import):
            yield from ((alias.name, late) for alias in child.names)
        else:
            yield from imports(
                child, late or isinstance(child, (ast.FunctionDef, ast.Lambda)), types
            )


@functools.cache
def arrows_of_files() -> dict[str, set[tuple[str, bool]]]:
    """The files from which each imports, and whether late."""
    return {
        name: {(target, late) for target, late in imports(tree_of(name)) if target in MODULES}
        for name in MODULES
    }


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Sets of files that reach each other."""
    reach: dict[str, set[str]] = {}
    for name in arrows:
        reach[name] = set()
        ahead = [name]
        while ahead:
            new = arrows[ahead.pop()] - reach[name]
            reach[name] |= new
            ahead += new
    found: list[set[str]] = []
    for name in sorted(arrows):
        circle = {name} | {other for other in reach[name] if name in reach[other]}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def test_a_planted_circle_is_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "c"}}
    assert circles(arrows) == [{"b", "c"}]


def test_no_circle_at_import():
    arrows = {
        name: {target for target, late in found if not late}
        for name, found in arrows_of_files().items()
    }
    assert len(arrows) > 100 and sum(map(len, arrows.values())) > 300
    assert circles(arrows) == []


def test_late_imports_close_no_circles_but_those_of_a_verb_on_a_noun():
    arrows = {name: {target for target, _ in found} for name, found in arrows_of_files().items()}
    assert circles(arrows) == CIRCLES


@functools.cache
def arrows_with_types() -> dict[str, set[str]]:
    """The files from which each imports, those for type checkers alone too."""
    return {
        name: {target for target, _ in imports(tree_of(name), types=True) if target in MODULES}
        for name in MODULES
    }


def test_no_circle_for_types_is_of_more_than_three_files():
    assert (
        max(
            map(len, circles({name: found - {name} for name, found in arrows_with_types().items()}))
        )
        <= 3
    )


def only_re_exports(name: str) -> bool:
    """Whether a file says no more than a docstring, imports and ``__all__``: a public name, no room."""
    statements = tree_of(name).body
    return all(
        isinstance(statement, (ast.Import, ast.ImportFrom))
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        or (
            isinstance(statement, (ast.Assign, ast.AugAssign))
            and "__all__ " in ast.unparse(statement)
        )
        for statement in statements
    )


def room_of(name: str) -> str:
    return name.partition(".")[2].partition(".")[0]


@functools.cache
def rooms() -> dict[str, set[str]]:
    """The files and folders at the top with code of their own, and those from which each imports."""
    real = {
        room_of(name) for name in arrows_with_types() if "." in name and not only_re_exports(name)
    }
    arrows: dict[str, set[str]] = {room: set() for room in real}
    for name, targets in arrows_with_types().items():
        if "." not in name or room_of(name) not in real:
            continue
        public_names = {target for target in targets if room_of(target) not in real}
        behind = set().union(
            *(arrows_with_types()[target] for target in public_names if "." in target)
        )
        arrows[room_of(name)] |= {room_of(target) for target in targets | behind} & real
    return {name: targets - {name} for name, targets in arrows.items()}


def files_of(room: str) -> dict[str, set[str]]:
    """The files of a folder, and those from which each imports."""
    arrows = arrows_with_types()
    files = {name for name in arrows if name.startswith(f"pyrobnn.{room}")}
    return {name: (arrows[name] & files) - {name} for name in files}


def floors(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Rooms by floor from the ground; what has arrows in a circle stands on none."""
    found: list[set[str]] = []
    while new := {name for name in arrows if arrows[name] <= set().union(*found)} - set().union(
        *found
    ):
        found.append(new)
    return found


def test_a_planted_arrow_that_runs_up_is_found():
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [{"c"}, {"b"}, {"a"}]
    assert floors({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == [{"c"}]
    assert dict(imports(ast.parse("def f(): import_module('pyrobnn.mcmc')"))) == {
        "pyrobnn.mcmc": True
    }


def test_one_place_makes_the_progress_bar_of_a_fit():
    makers = [
        name for name, found in arrows_of_files().items() if ("pyrobnn.callbacks", False) in found
    ]
    bars = [name for name in makers if "ProgressBar(" in MODULES[name].read_text("utf-8")]
    assert bars == ["pyrobnn.inference.fitting.watch"]
