"""Which test runs the examples of which page: a table, made from the pages and from tests/docs/test_docs.py."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parent
ROOT = HERE.parents[1]
RUNS = "tests/docs/test_docs.py::test_the_code_of_a_page_runs"
#: what a build writes: part of the site → the test that runs its examples
WRITTEN = {
    "api/*": ("tests/docs/test_doctests.py", "every run"),
    "checks/*": ("tests/docs/test_docs.py::test_the_examples_of_the_checks_run", "every run"),
    "tutorials/*": (
        "scripts/run_notebooks.py --smoke",
        "every run, on little data; in full by `make notebooks`",
    ),
}
#: the test of a page whose examples are not Python, or are another file's
OTHERS = {
    "index": ("tests/docs/test_readme.py", "every run"),
    "gallery/index": ("tests/docs/test_gallery.py", "every run"),
    "gallery/problems": ("tests/docs/test_gallery.py", "slow"),
    "gallery/sick": ("tests/docs/test_gallery.py", "slow"),
    "stories/experiment": (
        "tests/docs/test_docs.py::test_stories_show_cells_of_notebooks_that_exist",
        "every run",
    ),
    "stories/physics": (
        "tests/docs/test_docs.py::test_stories_show_cells_of_notebooks_that_exist",
        "every run",
    ),
    "install": ("tests/docs/test_first_hour.py", "slow"),
    "tutorials": ("tests/docs/test_notebooks.py", "every run"),
    "architecture": (
        "tests/docs/test_docs.py::test_the_architecture_names_files_that_exist",
        "every run",
    ),
    "changes": (
        "tests/docs/test_packaging.py::test_citation_and_changes_name_the_version",
        "every run",
    ),
    "howto/launchers": ("tests/docs/test_launchers.py", "slow"),
    "howto/command-line": (
        "tests/docs/test_docs.py::test_commands_and_options_of_a_page_exist",
        "every run",
    ),
}


def rows() -> list[tuple[str, str, str]]:
    """Page, the test that runs it, and when."""
    code = ast.parse((ROOT / "tests" / "docs" / "test_docs.py").read_text(encoding="utf-8"))
    (slow,) = (
        ast.literal_eval(node.value)
        for node in code.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SLOW"
    )
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        page = path.relative_to(DOCS).with_suffix("").as_posix()
        if (
            page.partition("/")[0] in ("api", "checks", "claims", "tutorials", "_build", "_ext")
            and "/" in page
            or page == "paper"
        ):
            continue
        text = path.read_text(encoding="utf-8")
        if re.search(r"^```python\n", text, re.MULTILINE):
            when = "slow" if path.stem in slow else "every run"
            found.append((page, f"{RUNS}[{path.stem}]", when))
        elif page in OTHERS:
            found.append((page, *OTHERS[page]))
    return found + [(page, *test) for page, test in WRITTEN.items()]


def table() -> str:
    """The rows in Markdown, and the share of the package's lines that its tests must run."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = ["| page | its examples are run by | when |", "|---|---|---|"]
    lines += [f"| {page} | `{test}` | {when} |" for page, test, when in rows()]
    floor = parser["coverage:report"]["fail_under"]
    lines += [
        "",
        f'*Slow* is `make test ARGS="-m slow"`. `make coverage` fails where tests run less than {floor} % of lines.',
    ]
    return "\n".join(lines) + "\n"
