"""One page per check of the verdict, read from the table of checks and from the recorded study of their errors."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import check_rates

from pyrobnn.diagnostics.check_table import AUDIT, TABLE
from pyrobnn.diagnostics.row import Row

QUESTIONS = {
    "draws": "are these draws the posterior of this model?",
    "model": "does this model fit these data?",
}


def pages() -> dict[str, Row]:
    """Every check that a verdict or an audit can hold, in their order."""
    return {row.code: row for row in (*TABLE, *AUDIT)}


def markdown(row: Row) -> str:
    """The page of one check."""
    first, _, rest = (inspect.getdoc(row.statistic) or "").partition("\n\n")
    of = (inspect.getdoc(row.applies) or "").rstrip(".").removeprefix("Of ")
    of += ", where there is a reference" if row.against else ""
    limits = f"{', '.join(f'{limit:g}' for limit in row.limits)} ({row.unit})"
    parts = [f"# `{row.code}`\n", f"{first}\n", f"{_plain(rest)}\n" if rest else ""]
    parts += [f"**Question**: {QUESTIONS[row.question]}\n", f"**Applies to**: {of}.\n"]
    parts += [f"**Limits**: {limits}. Source: {_linked(row.source)}.\n"]
    parts += ["## How often it is wrong\n", check_rates.measured(row.code)]
    parts += ["## Look at it\n", "```python", *_example(row), "```\n"]
    return "\n".join(part for part in parts if part)


def _example(row: Row) -> list[str]:
    return [
        f"verdict = pb.{'audit' if row in AUDIT else 'diagnose'}(tree)",
        f'for check in verdict.checks:\n    if check.name == "{row.code}":',
        "        print(check.status, check.code, check.value, check.limit)",
        "        print(check.evidence, check.action)",
    ]


def _linked(source: str) -> str:
    """The source with its address as a link."""
    title, found, address = source.partition(" https://")
    return f"[{title}](https://{address})" if found else source


def _plain(text: str) -> str:
    """Text of a docstring as Markdown: its double backticks, its one-word references, its formulas."""
    return re.sub(
        r"^\.\. math:: (.+)$",
        r"$$\1$$",
        text.replace("``", "`").replace("*", "\\*"),
        flags=re.MULTILINE,
    )


def index(found: dict[str, Row]) -> str:
    """The list of all checks, with what the study says of each."""
    lines = ["# The checks of a verdict\n"]
    lines += [
        "A verdict answers two questions, each by the worst of its checks; checks that only inform never decide. "
        "The last checks below look for forged or damaged trees, and only `pb.audit` runs them. Pages are written "
        "from the table of checks and from the [recorded study](../claims/verdict.md) whenever they are built.\n",
        "```python",
        "import pyrobnn as pb\n",
        'posterior = pb.Posterior.load("nuts.nc", model)',
        "tree = posterior.to_datatree(x, y)",
        "verdict = pb.diagnose(tree)",
        "print(verdict.draws, verdict.model)",
        "for check in (*verdict.failed, *verdict.warned):",
        "    print(check.name, check.evidence, check.action)",
        "```\n",
        "## How often they are wrong\n",
        "For each check that was measured: the share of healthy posteriors on which it warns or fails, and the share "
        "of the faults meant for it on which it does; bars are 95 % intervals.\n",
        *(
            f"```{{image}} rates-{ground}.svg\n:alt: False alarms and power of each check\n:class: only-{ground}\n```\n"
            for ground in check_rates.INKS
        ),
        "## All checks\n",
        "False alarms and power, each with its number of cases; a cell is empty where the study has no such case.\n",
        "| check | question | what it sees | false alarms | power |",
        "|---|---|---|---|---|",
        *(
            f"| [`{name}`]({name}.md) | {row.question} | {_first(row)} | {' | '.join(check_rates.columns(name))} |"
            for name, row in found.items()
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


def _first(row: Row) -> str:
    return (
        (inspect.getdoc(row.statistic) or "").split("\n\n")[0].replace("|", "∣").replace("\n", " ")
    )


def write(folder: Path) -> None:
    """Write the index and every page."""
    found = pages()
    folder.mkdir(parents=True, exist_ok=True)
    check_rates.draw(folder)
    (folder / "index.md").write_text(index(found), encoding="utf-8")
    for name, row in found.items():
        (folder / f"{name}.md").write_text(markdown(row), encoding="utf-8")
