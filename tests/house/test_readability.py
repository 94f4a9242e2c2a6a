"""Code that reads from top to bottom: caps on what makes it hard to read; lines and files may be of any length."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from measures import FileMeasures, measure, together

ROOT = Path(__file__).parents[2]
#: the measure → the most that it may be
CAPS = {
    "tokens per code line": 9.5,
    "packed assignments": 50,
    "assignments inside expressions": 40,
    "nested conditional expressions": 20,
    "nested comprehensions": 30,
    "names that are no noun, per 100": 1.5,
    "functions above 330 tokens": 50,
    "functions above complexity 10": 65,
    "functions above 15 locals": 14,
    "parameters annotated Any": 150,
    "modules above 12 public names": 14,
    "attributes changed outside __init__, most in a class": 6,
}


@cache
def files() -> dict[Path, FileMeasures]:
    paths = [*(ROOT / "pyrobnn").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    return {path: measure(path.read_text(encoding="utf-8")) for path in paths}


def hardest(number: int = 8) -> str:
    """The functions to begin with where a cap is passed."""
    functions = [(path, function) for path, file in files().items() for function in file.functions]

    def hardness(entry):
        function = entry[1]
        shares = function.num_tokens / 330, function.complexity / 10, function.num_locals / 15
        return sum(shares)

    lines = [
        f"{path.relative_to(ROOT)}:{f.line} {f.name}: {f.num_tokens} tokens, complexity {f.complexity}, "
        f"{f.num_locals} locals"
        for path, f in sorted(functions, key=hardness, reverse=True)[:number]
    ]
    return "hardest functions:\n" + "\n".join(lines)


@pytest.mark.parametrize("name", CAPS)
def test_the_code_is_no_harder_to_read_than_its_caps(name):
    assert together(files().values())[name] <= CAPS[name], hardest()


PACKED = "a, b = f(), g()\nc = d = f()\na, b = b, a\na, b = f()\nx = y = 0\n"
NESTED = "p = a if b else (c if d else e)\nq = [u if v else w for v in x]\nr = [lambda: u if v else w for v in x]\n"
LOOPS = "s = [[v for v in u] for u in x]\nt = [v for u in x for v in u]\nw = [v for v in x if v]\n"


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("packed assignments", PACKED, 2),
        ("assignments inside expressions", "if (n := f()):\n    g(n)\n", 1),
        ("nested conditional expressions", NESTED, 2),
        ("nested comprehensions", LOOPS, 2),
        ("parameters annotated Any", "def f(a: list[Any], b: object, *c: int, **d: Any): ...", 3),
        ("functions above 330 tokens", "def f():\n" + "    g(1)\n" * 83, 1),
        ("functions above 330 tokens", "def f():\n" + "    g(1)\n" * 81, 0),
        ("functions above complexity 10", "def f():\n" + "    g() or h()\n" * 10, 1),
        ("functions above complexity 10", "def f():\n" + "    if g(): h()\n" * 9, 0),
        (
            "functions above 15 locals",
            "def f():\n" + "".join(f"    a{i} = 1\n" for i in range(16)),
            1,
        ),
        ("modules above 12 public names", "".join(f"a{i} = 1\n_b{i} = 1\n" for i in range(13)), 1),
        ("names that are no noun, per 100", "def f(x, told):\n    y = 1\n    each = 2\n", 50.0),
    ],
)
def test_a_measure_counts_what_it_names(name, text, count):
    assert together([measure(text)])[name] == count


def test_comments_docstrings_and_imports_are_no_tokens_of_code():
    text = '"""A module."""\nimport os\n\n# a comment\nx = 1\n\n\ndef f():\n    """A function."""\n    return x\n'
    file = measure(text)
    assert (file.num_tokens, file.num_lines) == (3 + 5 + 2, 3)


def test_attributes_count_where_they_change_after_the_constructor():
    text = (
        "class State:\n"
        "    def __init__(self):\n        self.made = 1\n"
        "    def step(self):\n        self.a = 1\n        self.b[0].c += 1\n        setattr(self, 'd', 1)\n"
        "        x.e = 1\n"
    )
    assert together([measure(text)])["attributes changed outside __init__, most in a class"] == 3
