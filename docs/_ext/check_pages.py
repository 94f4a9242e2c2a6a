"""One page per check of the verdict, read from the checks' own code and from the recorded study of their errors."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import check_rates

from pyrobnn.diagnostics import integrity, judge

#: checks that `EXAMINATIONS` does not list: made instead of all others where the tree holds no usable draws
INSTEAD = (integrity.hopeless,)


@dataclass
class Page:
    """What is known of the check of one name: which code makes it, of which trees, and its words.

    Args:
        name: as in a verdict, e.g. ``"bfmi"``.
        sees: first lines of the docstrings of the functions that make it.
        details: the rest of these docstrings.
        trees: the trees that it is made of, in words.
        rules: its thresholds in words. sources: papers. evidence: what it says. actions: what to do.
        statuses: what it can come to, where the code names it outright.
    """

    name: str
    sees: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    trees: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)

    def add(self, kind: str, texts: list[str]) -> None:
        """Keep each text once, in the order of the code."""
        known = getattr(self, kind)
        known += [text for text in dict.fromkeys(texts) if text.strip("….") and text not in known]


def pages() -> dict[str, Page]:
    """Every check that a verdict can hold, in the order of the verdict."""
    found: dict[str, Page] = {}
    makers = [(function, "Of every tree, instead of all other checks.") for function in INSTEAD]
    for examination in judge.EXAMINATIONS:
        of = inspect.getdoc(examination.of) or ""
        if examination.against:
            of = f"{of.rstrip('.')}, where there is a reference."
        makers.append((examination.check, of))
    for function, of in makers:
        module = sys.modules[function.__module__]
        for call, scope in _checks(Scope(module, _functions(module)[function.__name__])):
            _read(call, scope, inspect.getdoc(function) or "", of, found)
    return found


@dataclass
class Scope:
    """A function of a module, with what it was called with where that is known.

    Args:
        module: where the function stands.
        body: its definition.
        given: parameter → the argument, and the scope to read it in.
    """

    module: ModuleType
    body: ast.FunctionDef
    given: dict[str, tuple[ast.expr, Scope]] = field(default_factory=dict)

    def called(self, call: ast.Call) -> Scope | None:
        """The scope of a function of the same module that is called here; None for any other."""
        body = _functions(self.module).get(getattr(call.func, "id", ""))
        if body is None:
            return None
        names = [each.arg for each in body.args.args]
        defaults = body.args.defaults
        given = dict(zip(names[len(names) - len(defaults) :], defaults)) | dict(zip(names, call.args))
        given |= {each.arg: each.value for each in call.keywords if each.arg}
        return Scope(self.module, body, {name: (value, self) for name, value in given.items()})


@cache
def _functions(module: ModuleType) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _checks(scope: Scope) -> list[tuple[ast.Call, Scope]]:
    """The calls of `Check` in a function and in those of its module that it calls for one."""
    found = []
    for node in ast.walk(scope.body):
        if isinstance(node, ast.Call):
            if getattr(node.func, "id", "") == "Check":
                found.append((node, scope))
            elif (inner := scope.called(node)) and "Check" in ast.unparse(
                inner.body.returns or ast.Constant(0)
            ):
                found += _checks(inner)
    return found


def _read(call: ast.Call, scope: Scope, doc: str, of: str, found: dict[str, Page]) -> None:
    """Add what one call of `Check` tells to the pages of the names it may have."""
    fields = ("name", "status", "value", "threshold", "source", "evidence", "action")
    given = dict(zip(fields, call.args)) | {each.arg: each.value for each in call.keywords if each.arg}
    first, _, rest = doc.partition("\n\n")
    for name in _texts(given["name"], scope):
        page = found.setdefault(name, Page(name))
        page.add("sees", [first])
        page.add("details", [rest])
        page.add("trees", [of])
        page.add("rules", _texts(given["threshold"], scope))
        page.add("sources", _texts(given["source"], scope))
        page.add("evidence", _texts(given["evidence"], scope))
        page.add("actions", _texts(given["action"], scope) if "action" in given else [])


def _texts(node: ast.expr | None, scope: Scope) -> list[str]:
    """The texts that an expression can come to; what is computed from a tree is an ellipsis."""
    match node:
        case ast.Constant(value=value):
            return [str(value)]
        case ast.IfExp(body=one, orelse=other):
            return _texts(one, scope) + _texts(other, scope)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in _texts(left, scope) for b in _texts(right, scope)]
        case ast.BoolOp(values=values):
            return [text for value in values for text in _texts(value, scope)]
        case ast.JoinedStr(values=values):
            return ["".join(parts) for parts in product(*(_parts(part, scope) for part in values))]
        case ast.Name(id=name) if name in scope.given:
            return _texts(*scope.given[name])
        case ast.Name(id=name) if assigned := _assigned(name, scope.body):
            return [text for value in assigned for text in _texts(value, scope)]
        case ast.Call() if inner := scope.called(node):
            returned = [each.value for each in ast.walk(inner.body) if isinstance(each, ast.Return)]
            return [text for value in returned for text in _texts(value, inner)]
    value = _value(node, scope)
    return [value] if isinstance(value, str) else ["…"]


def _assigned(name: str, body: ast.FunctionDef) -> list[ast.expr]:
    """What a name is set to in a function."""
    return [
        node.value
        for node in ast.walk(body)
        if isinstance(node, ast.Assign) and [getattr(each, "id", None) for each in node.targets] == [name]
    ]


def _parts(part: ast.expr, scope: Scope) -> list[str]:
    """What a piece of an f-string can be: its value where only constants make it, words that a name was set to."""
    if not isinstance(part, ast.FormattedValue):
        return ["".join(_texts(part, scope))]
    if isinstance(part.value, ast.Name):
        texts = _texts(part.value, scope)
        if part.value.id in scope.given:
            return texts
        words = [text for text in texts if text != "None" and any(map(str.isalpha, text))]
        if words:
            return words
    value = _value(part.value, scope)
    form = "" if part.format_spec is None else ast.literal_eval(part.format_spec.values[0])  # type: ignore[attr-defined]
    return ["…" if value is None else format(value, form)]


def _value(node: ast.expr | None, scope: Scope) -> Any:
    """What an expression of the module's constants alone is; None where it needs more."""
    if node is None:
        return None
    try:
        return eval(compile(ast.Expression(node), "<check>", "eval"), dict(vars(scope.module)))
    except NameError:  # it depends on the draws
        return None


# --- Markdown


def markdown(page: Page) -> str:
    """The page of one check."""
    rules = [rule for rule in page.rules if rule]
    parts = [f"# `{page.name}`\n", *(f"{text}\n" for text in page.sees)]
    parts += [f"{_plain(text)}\n" for text in page.details if text]
    parts += ["**Made** " + "; ".join(text[0].lower() + text[1:].rstrip(".") for text in page.trees) + ".\n"]
    parts += ["## Threshold\n"]
    parts += [f"- {rule}" for rule in rules] or ["None: it informs and never decides."]
    if page.sources:
        parts += ["", "Source: " + "; ".join(_linked(text) for text in page.sources) + ".\n"]
    parts += ["", "## What it says\n", *(f"> {_plain(text)}\n" for text in page.evidence)]
    parts += ["An ellipsis stands for what is computed from the draws.\n"]
    parts += ["## What to do\n"]
    parts += [f"- {text}" for text in page.actions] or ["Nothing: it is information."]
    parts += ["", "## How often it is wrong\n", check_rates.told(page.name)]
    parts += ["## Look at it\n", "```python", *_example(page.name), "```\n"]
    return "\n".join(parts)


def _example(name: str) -> list[str]:
    return [
        "verdict = pb.diagnose(tree)",
        f'for check in verdict.checks:\n    if check.name == "{name}":',
        "        print(check.status, check.value, check.threshold)",
        "        print(check.evidence, check.action)",
    ]


def _linked(source: str) -> str:
    """The source with its address as a link."""
    if source == "numerical":
        return "arithmetic: what is not a number cannot be judged"
    title, found, address = source.partition(" https://")
    address, _, more = address.partition(";")
    return f"[{title}](https://{address})" + (f";{more}" if more else "") if found else source


def _plain(text: str) -> str:
    """Text of a docstring as Markdown: its double backticks, its one-word references."""
    return text.replace("``", "`").replace("*", "\\*")


def index(found: dict[str, Page]) -> str:
    """The list of all checks, with what the study says of each."""
    lines = ["# The checks of a verdict\n"]
    lines += [
        "A verdict is the worst of its checks; information never decides. Each check has a page: what it sees, its "
        "threshold and source, how often it is wrong, what to do. They are written from the code and from the "
        "[recorded study](../results.md) whenever these pages are built.\n",
        "```python",
        "import pyrobnn as pb\n",
        'posterior = pb.Posterior.load("nuts.nc", model)',
        "tree = posterior.to_datatree(x, y)",
        "verdict = pb.diagnose(tree)",
        "for check in (*verdict.failed, *verdict.warned):",
        "    print(check.name, check.evidence, check.action)",
        "```\n",
        "## How often they are wrong\n",
        "For each check that was measured: the share of healthy posteriors on which it speaks, and the share that "
        "it sees of the faults it is there to see; bars are 95 % intervals.\n",
        *(
            f"```{{image}} rates-{ground}.svg\n:alt: False alarms and power of each check\n:class: only-{ground}\n```\n"
            for ground in check_rates.INKS
        ),
        "## All checks\n",
        "False alarms and power with the number of cases; where nothing stands, the study has no such case.\n",
        "| check | what it sees | false alarms | power |",
        "|---|---|---|---|",
        *(
            f"| [`{page.name}`]({page.name}.md) | {' '.join(page.sees).replace('|', '∣')} | "
            f"{' | '.join(check_rates.columns(page.name))} |"
            for page in found.values()
        ),
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *found,
        "```",
        "",
    ]
    return "\n".join(lines)


def write(folder: Path) -> None:
    """Write the index and every page."""
    found = pages()
    folder.mkdir(parents=True, exist_ok=True)
    check_rates.draw(folder)
    (folder / "index.md").write_text(index(found), encoding="utf-8")
    for page in found.values():
        (folder / f"{page.name}.md").write_text(markdown(page), encoding="utf-8")
