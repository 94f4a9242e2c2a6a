"""How hard code is to read, in numbers that no layout can hide: what one file has, and what all files have together."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
#: tokens that nobody reads as code: comments, line ends and indents
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
#: names of locals and parameters that say nothing of what they hold
VAGUE = set(
    "found each told held own kept seen given rest part one few more most some other others both all every left said "
    "asked last first second here there these those what which much many little thing stuff tmp temp obj val res ret "
    "foo bar".split()
)
CONSTRUCTORS = ("__init__", "__post_init__", "__setstate__")


@dataclass(frozen=True)
class FunctionMeasures:
    """A function with what stands in it: its tokens, its branches, and the names that it assigns."""

    name: str
    line: int
    num_tokens: int
    complexity: int
    num_locals: int


@dataclass
class FileMeasures:
    """A file's tokens and code lines, its functions, its names, and how often it has what is hard to read."""

    num_tokens: int
    num_lines: int
    counts: Counter[str] = field(default_factory=Counter)
    functions: list[FunctionMeasures] = field(default_factory=list)
    num_names: int = 0
    num_vague: int = 0
    num_loose: int = 0
    num_public: int = 0
    most_changed: int = 0


def measure(text: str) -> FileMeasures:
    """The measures of a file's text."""
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    tokens_of_lines = _tokens_of_lines(text, tree)
    file = FileMeasures(
        num_tokens=sum(tokens_of_lines.values()),
        num_lines=len(tokens_of_lines),
        num_public=len(_public_names(tree)),
    )
    for node in ast.walk(tree):
        file.counts["packed assignments"] += _is_packed(node)
        file.counts["assignments inside expressions"] += isinstance(node, ast.NamedExpr)
        file.counts["nested conditional expressions"] += _is_nested_condition(node, parents)
        file.counts["nested comprehensions"] += _is_nested_comprehension(node)
        if isinstance(node, ast.ClassDef):
            file.most_changed = max(file.most_changed, len(_attributes_changed(node)))
        if isinstance(node, Function):
            names = _locals_of(node) | {argument.arg for argument in _arguments(node)}
            file.num_names += len(names)
            file.num_vague += len(names & VAGUE)
            file.num_loose += sum(_is_loose(argument.annotation) for argument in _arguments(node))
            file.functions.append(_measure_function(node, tokens_of_lines))
    return file


def together(files: Iterable[FileMeasures]) -> dict[str, float]:
    """The measures of a whole, by the names of the caps."""
    files = list(files)
    functions = [function for file in files for function in file.functions]
    counts: Counter[str] = Counter()
    for file in files:
        counts += file.counts
    num_tokens = sum(file.num_tokens for file in files)
    num_vague = sum(file.num_vague for file in files)
    num_names = sum(file.num_names for file in files)
    return {
        "tokens per code line": round(num_tokens / sum(file.num_lines for file in files), 1),
        "packed assignments": counts["packed assignments"],
        "assignments inside expressions": counts["assignments inside expressions"],
        "nested conditional expressions": counts["nested conditional expressions"],
        "nested comprehensions": counts["nested comprehensions"],
        "names that are no noun, per 100": round(100 * num_vague / max(num_names, 1), 1),
        "functions above 330 tokens": sum(f.num_tokens > 330 for f in functions),
        "functions above complexity 10": sum(f.complexity > 10 for f in functions),
        "functions above 15 locals": sum(f.num_locals > 15 for f in functions),
        "parameters annotated Any": sum(file.num_loose for file in files),
        "modules above 12 public names": sum(file.num_public > 12 for file in files),
        "attributes changed outside __init__, most in a class": max(f.most_changed for f in files),
    }


# -- tokens ----------------------------------------------------------------------------------------------------------


def _tokens_of_lines(text: str, tree: ast.Module) -> Counter[int]:
    """How many tokens of code start in each line, without those of docstrings and imports."""
    skipped = _lines_of_docstrings_and_imports(tree)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = (token.start[0] for token in tokens if token.type not in LAYOUT)
    return Counter(line for line in lines if line not in skipped)


def _lines_of_docstrings_and_imports(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines |= _lines_of(node)
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            lines |= _lines_of(node.body[0])
    return lines


def _lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


# -- functions -------------------------------------------------------------------------------------------------------


def _measure_function(function: Function, tokens_of_lines: Counter[int]) -> FunctionMeasures:
    return FunctionMeasures(
        function.name,
        function.lineno,
        num_tokens=sum(tokens_of_lines[line] for line in _lines_of(function)),
        complexity=1 + sum(map(_branches, _nodes_in(function))),
        num_locals=len(_locals_of(function)),
    )


def _nodes_in(function: Function) -> Iterator[ast.AST]:
    """What stands in a function, in its lambdas too, but not what stands in functions and classes inside of it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def _branches(node: ast.AST) -> int:
    """How many ways a node adds to those through its function, in statements and in expressions."""
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    branching = ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.Assert
    return int(isinstance(node, branching | ast.match_case))


def _locals_of(function: Function) -> set[str]:
    """The names that a function assigns, those of its loops and comprehensions too."""
    names = (node for node in _nodes_in(function) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _arguments(function: Function) -> list[ast.arg]:
    signature = function.args
    variadic = [argument for argument in (signature.vararg, signature.kwarg) if argument]
    return [*signature.posonlyargs, *signature.args, *signature.kwonlyargs, *variadic]


def _is_loose(annotation: ast.expr | None) -> bool:
    """Whether ``Any`` or ``object`` stands anywhere in a type."""
    nodes = ast.walk(annotation) if annotation else ()
    return any(isinstance(node, ast.Name) and node.id in ("Any", "object") for node in nodes)


# -- statements and expressions --------------------------------------------------------------------------------------


def _is_packed(node: ast.AST) -> bool:
    """Whether a statement makes several assignments, ``a, b = f(), g()`` or ``a = b = f()``, and is no swap."""
    if not isinstance(node, ast.Assign):
        return False
    if len(node.targets) > 1:
        return not isinstance(node.value, ast.Constant)
    target = node.targets[0]
    pair = ast.Tuple | ast.List
    if not isinstance(target, pair) or not isinstance(node.value, pair):
        return False
    return set(map(ast.unparse, target.elts)) != set(map(ast.unparse, node.value.elts))


def _is_nested_condition(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a conditional expression stands in another or in a comprehension, but not in a lambda of it."""
    if not isinstance(node, ast.IfExp):
        return False
    enclosing = ast.IfExp | Comprehension
    outer = parents[node]
    while isinstance(outer, ast.expr | ast.comprehension | ast.keyword):
        if isinstance(outer, enclosing | ast.Lambda):
            break
        outer = parents[outer]
    return isinstance(outer, enclosing)


def _is_nested_comprehension(node: ast.AST) -> bool:
    """Whether a comprehension has several loops, or another comprehension inside."""
    if not isinstance(node, Comprehension):
        return False
    inside = [other for other in ast.walk(node) if isinstance(other, Comprehension)]
    return len(inside) > 1 or len(node.generators) > 1


# -- modules and classes ---------------------------------------------------------------------------------------------


def _public_names(tree: ast.Module) -> list[str]:
    """Functions, classes and constants of a module without a leading underscore; a name assigned again counts again."""
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = [inner for target in targets for inner in ast.walk(target)]
            names += {name.id for name in stored if isinstance(name, ast.Name)}
    return [name for name in names if not name.startswith("_")]


def _attributes_changed(owner: ast.ClassDef) -> set[str]:
    """The attributes of ``self`` that a class sets, or changes by key or below, once its objects are made."""
    changed: set[str] = set()
    for method in owner.body:
        if isinstance(method, Function) and method.name not in CONSTRUCTORS:
            for node in ast.walk(method):
                changed |= _attribute_changed(node)
    return changed


def _attribute_changed(node: ast.AST) -> set[str]:
    """The attribute that a node sets (``self.a = …``, ``self.a[k].b = …``) or replaces by ``setattr``, if any."""
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
        path: ast.expr = node
        name = ""
        while isinstance(path, ast.Attribute | ast.Subscript):
            name = path.attr if isinstance(path, ast.Attribute) else name
            path = path.value
        return {name} if ast.unparse(path) == "self" else set()
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        if function == "self.__dict__.update":
            return {"__dict__"}
        setter = function in ("setattr", "object.__setattr__")
        if setter and node.args and ast.unparse(node.args[0]) == "self":
            return {f"setattr at line {node.lineno}"}
    return set()
