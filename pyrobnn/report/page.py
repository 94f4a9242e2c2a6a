"""`write_report`: one self-contained HTML page from DataTrees alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import xarray as xr
import yaml
from jinja2 import Environment
from markupsafe import Markup

from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.evidence import Evidence, gather
from pyrobnn.diagnostics.judge import judge_all
from pyrobnn.diagnostics.rates import said_rates
from pyrobnn.diagnostics.scores import LEVELS
from pyrobnn.diagnostics.verdict import QUESTIONS
from pyrobnn.groups import HELD_OUT, POSTERIOR
from pyrobnn.report.baselines import baselines
from pyrobnn.report.blocks import output_labels
from pyrobnn.report.comparison import (
    COLUMNS,
    Column,
    Row,
    baseline_rows,
    best_labels,
    compare_rows,
    of_output,
)
from pyrobnn.report.conclusion import conclude, recommended
from pyrobnn.report.facts import config, facts
from pyrobnn.report.headline import headline
from pyrobnn.report.numbers import significant, with_error
from pyrobnn.report.ranking import Ranking, rankings
from pyrobnn.report.sections import Section, build_sections
from pyrobnn.signs import typeset

# what the page merges into one column; summary.json keeps the keys apart
MERGED = {
    "coverage": tuple(f"coverage_{100 * level:.0f}" for level in LEVELS),
    "seconds": ("compile_seconds", "fit_seconds", "predict_seconds"),
}
COVERAGE = Column("coverage", "coverage", f"of {' / '.join(f'{100 * level:.0f}' for level in LEVELS)} %")
SECONDS = Column("seconds", "seconds", "compile / fit / predict")
SHOWN = tuple(
    {MERGED["coverage"][0]: COVERAGE, MERGED["seconds"][0]: SECONDS}.get(column.key, column)
    for column in COLUMNS
    if column.key not in (*MERGED["coverage"][1:], *MERGED["seconds"][1:])
)
#: attributes that a saved run is rebuilt from; what they say stands in the others
REBUILDS = ("format", "format_version", "meta", "family", "study", "config")
DECIMALS = {"ess": 0, "rhat": 3, "khat": 2, "r2": 2}


def write_report(
    trees: Mapping[str, xr.DataTree | Evidence],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    verdicts: Mapping[str, Verdict] | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Path:
    """Write one HTML page that says which method to trust, on what evidence, and what to do next.

    The page refers to nothing outside itself, reads on a phone, in print, light and dark, and escapes every
    string that comes from the trees. It needs no group but ``posterior``: what a tree lacks is left out.

    Args:
        trees: label → DataTree (or its `Evidence`); the labels name the methods throughout the page.
        path: where to write; missing parent folders are made.
        title: heading of the page; None for "Can these posteriors be believed?".
        verdicts: label → verdict where `pyrobnn.diagnose` has run already; None to run it here, with the
            first NUTS run as the reference of the others.
        left_out: methods that were asked for and gave no tree → the reason, for the reader to see.

    Returns:
        The path written to.

    Raises:
        TypeError: if a tree is no DataTree.
        ValueError: if there is no tree, or ``verdicts`` lacks a label.

    Caveat:
        The recommendation orders methods by verdict, then by held-out log density; close calls are said to
        be close, but it cannot know what a wrong prediction costs you.

    Example:
        >>> import numpy as np, tempfile, xarray as xr
        >>> draws = np.random.default_rng(0).normal(size=(4, 100))
        >>> tree = xr.DataTree.from_dict({"posterior": xr.Dataset({"w": (("chain", "draw"), draws)})})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_report({"mine": tree}, f"{folder}/report.html").name
        'report.html'
    """
    trees = gather(trees)
    verdicts = judge_all(trees) if verdicts is None else check_verdicts(trees, verdicts)
    rows = compare_rows(trees, verdicts)
    baseline = baselines(trees.values())
    floor = baseline_rows(baseline)
    best = recommended(rows, verdicts)
    columns = _known(rows)
    folder = files("pyrobnn.report")
    pages = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters["typeset"] = typeset
    template = pages.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    html = template.render(
        title=title or "Can these posteriors be believed?",
        subtitle=_subtitle(trees),
        facts=facts(trees),
        headline="" if best is None else headline(best, trees[best], verdicts[best], [*rows, *floor]),
        conclusion=conclude(trees, rows, verdicts),
        tone="warn" if best is None else verdicts[best].status,
        css=Markup(folder.joinpath("page.css").read_text(encoding="utf-8")),
        verdicts=[_verdict_row(label, verdicts[label]) for label in trees],
        left_out=dict(left_out or {}),
        columns=columns,
        rows=_cells([*rows, *floor], columns),
        num_methods=len(rows),
        table_note=_table_note(trees, columns),
        each_output=_each_output(trees, rows, floor),
        rankings=[_ranking(each, baseline) for each in rankings(trees, baseline).values()],
        lost=[sentence for row in rows for sentence in row.lost],
        sections=[_marked(section) for section in build_sections(trees)],
        config=_yaml(config(trees)),
        runs=[_run(label, evidence) for label, evidence in trees.items()],
        footer=_footer(trees),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    return path


def check_verdicts(trees: Mapping[str, Evidence], verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """The caller's verdicts, once each tree has one.

    Raises:
        ValueError: if a label has none.
    """
    missing = [label for label in trees if label not in verdicts]
    if missing:
        raise ValueError(
            f"'verdicts' has none for {missing}; give one for every tree, or None to have them diagnosed here."
        )
    return {label: verdicts[label] for label in trees}


def _subtitle(trees: Mapping[str, Evidence]) -> str:
    found = [f"{len(trees)} method{'s' if len(trees) > 1 else ''}"]
    dates = sorted(
        str(each.tree.attrs["created_at"])[:10] for each in trees.values() if "created_at" in each.tree.attrs
    )
    return " · ".join([*found, *dates[-1:]])


def _verdict_row(label: str, verdict: Verdict) -> dict[str, object]:
    deciding = [*verdict.failed, *verdict.warned][:2]
    if deciding:
        evidence = " ".join(check.evidence.rstrip(".") + "." for check in deciding)
    else:
        evidence = (
            f"{verdict.praise[0].upper()}{verdict.praise[1:]}."
            if verdict.passed
            else "No check could be made."
        )
    order = {"fail": 0, "warn": 1, "pass": 2, "info": 3}
    counts = [
        (len(verdict.failed), "failed"),
        (len(verdict.warned), "warned"),
        (len(verdict.passed), "passed"),
    ]
    return {
        "label": label,
        "method": "" if verdict.method.lower() in ("unknown", label.lower()) else verdict.method,
        "status": verdict.status,
        "lines": [(question, *verdict.line(question)) for question in QUESTIONS],
        "evidence": evidence,
        "action": verdict.action,
        "checks": sorted(verdict.checks, key=lambda check: order[check.status]),
        "rates": {check.name: said_rates(check.name) for check in verdict.checks},
        "counts": ", ".join(f"{count} {word}" for count, word in counts if count) or "nothing to judge",
    }


def _cells(rows: list[Row], columns: list[Column]) -> list[dict[str, object]]:
    best = {column.key: best_labels(rows, column) for column in columns}
    return [
        {
            "label": row.label,
            "cells": [_cell(row, column, row.label in best[column.key]) for column in columns],
        }
        for row in rows
    ]


def _known(rows: list[Row]) -> list[Column]:
    """The columns that any row has a number for; none where it is seconds alone, which stand with the settings."""
    known = [
        column
        for column in SHOWN
        if any(key in (*row.values, *row.not_finite) for row in rows for key in parts(column))
    ]
    return known if known != [SECONDS] else []


def _each_output(trees: Mapping[str, Evidence], rows: list[Row], floor: list[Row]) -> list[dict[str, object]]:
    """The table of each output where there are several: what has a unit is shown in the output's own."""
    tables: list[dict[str, object]] = []
    for output, name in enumerate(output_labels(trees)):
        ours = [of_output(row, output) for row in rows]
        if columns := _known(ours):
            cells = _cells([*ours, *(of_output(row, output) for row in floor)], columns)
            tables.append({"name": name, "columns": columns, "rows": cells})
    return tables


def parts(column: Column) -> tuple[str, ...]:
    """The keys that a shown column holds: several for coverage and for seconds."""
    return MERGED.get(column.key, (column.key,))


def _cell(row: Row, column: Column, best: bool) -> dict[str, object]:
    if column.key in MERGED:
        texts = [format_number(row.values.get(key), key) or _none(row, key) for key in MERGED[column.key]]
        return {
            "text": " / ".join(texts) if any(text != "–" for text in texts) else "",
            "se": "",
            "best": False,
        }
    value, error = row.values.get(column.key), row.errors.get(column.key)
    if column.key == "log_prob" and value is not None and error is not None:
        text, said = with_error(value, error)
        return {"text": text, "se": said, "best": best}
    missing = _none(row, column.key) if column.key in row.not_finite else ""
    return {"text": format_number(value, column.key) or missing, "se": "", "best": best}


def _none(row: Row, key: str) -> str:
    return "not finite" if key in row.not_finite else "–"


def format_number(value: float | None, key: str) -> str:
    """A number as the table shows it: percent for shares, three significant digits else; empty where missing."""
    if value is None:
        return ""
    if key.startswith("coverage"):
        return f"{100 * value:.0f}"
    if key == "accuracy":
        return f"{100 * value:.1f} %"
    if key == "gap_ratio":
        return f"× {value:.1f}"
    if key in DECIMALS:
        return f"{round(value, DECIMALS[key]) + 0.0:.{DECIMALS[key]}f}".replace("-", "−")
    if key.endswith("_seconds"):
        if value < 0.01:
            return "<0.01"
        return f"{value:.2g}" if value < 10 else f"{value:.0f}"
    return significant(value)


def _table_note(trees: Mapping[str, Evidence], columns: list[Column]) -> str:
    keys = {column.key for column in columns}
    notes = ["– : does not apply, or is not in the tree."]
    if any(evidence.values(HELD_OUT, "y") is not None for evidence in trees.values()):
        notes = [
            "On held-out data. Bold: within two standard errors of the best of its column, by paired differences; "
            + notes[0]
        ]
    if "r2" in keys:
        notes.append(
            "R²: share of the squared error of predicting the training mean that is gone. The linear model is least "
            "squares with its residual sd."
        )
    if "rhat" in keys or "khat" in keys:
        notes.append(
            "R-hat and ESS judge chains, k-hat judges approximations; independent draws have no R-hat."
        )
    if "predictive_distance" in keys:
        notes.append(
            "Distance: mean 1-Wasserstein distance of the predictive from that of NUTS, in the outcome's units."
        )
    return " ".join(notes)


def _ranking(ranking: Ranking, floor: Mapping[str, Evidence]) -> dict[str, object]:
    rows = []
    for row in ranking.rows:
        elpd, se = with_error(row.elpd, row.se)
        below, below_se = ("0", "") if row is ranking.rows[0] else with_error(-row.below, row.below_se)
        weight = "–" if row.weight is None else f"{row.weight:.2f}"
        rows.append(
            {
                "label": row.label,
                "cells": ((elpd, se), (below, below_se), (weight, "")),
                "close": row.close,
                "floor": row.label in floor,
            }
        )
    return {"title": ranking.title, "num_data": ranking.num_data, "rows": rows, "refused": ranking.refused}


def _marked(section: Section) -> Section:
    """A section whose SVG, made and escaped by this package, is the only markup let through."""
    blocks = (replace(block, svgs=tuple(Markup(svg) for svg in block.svgs)) for block in section.blocks)
    return replace(section, blocks=tuple(blocks))


def _yaml(content: dict[str, Any] | None) -> str:
    return "" if content is None else yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _run(label: str, evidence: Evidence) -> dict[str, object]:
    tree = evidence.tree
    sizes = tree[POSTERIOR].sizes if POSTERIOR in tree.children else {}
    brief = [f"{sizes.get('chain', 1)} × {sizes.get('draw', 1)} draws"]
    if "seed" in tree.attrs:
        brief.append(f"seed {tree.attrs['seed']}")
    facts = []
    for name in sorted(map(str, tree.attrs), key=lambda n: (n not in ("method", "settings", "seed"), n)):
        value = _shown(evidence.json(name) if _is_json(tree.attrs[name]) else tree.attrs[name])
        if value and name not in REBUILDS:
            facts.append((name.replace("_", " "), value))
    facts.append(("groups", ", ".join(sorted(tree.children))))
    return {"label": label, "brief": ", ".join(brief), "facts": facts}


def _is_json(value: object) -> bool:
    if not isinstance(value, str) or value[:1] not in "{[":
        return False
    try:
        json.loads(value)
    except ValueError:
        return False
    return bool(value)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_shown(item) for item in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _footer(trees: Mapping[str, Evidence]) -> str:
    versions: dict[str, str] = {}
    for evidence in trees.values():
        found = evidence.json("versions")
        versions |= found if isinstance(found, dict) else {}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "Written by pyrobnn from stored draws" + (f" ({named})." if named else ".")
