"""`write_report` and `write_summary`: one self-contained HTML page, and the same as JSON, from DataTrees alone."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import xarray as xr
from jinja2 import Environment, Template

from pyrobnn.core.groups import POSTERIOR
from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.check_table import said_rates
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.report import arviz_figures
from pyrobnn.report.figures import SECTIONS, build_sections
from pyrobnn.report.results import COLUMNS, Column, Results, Row, best_labels
from pyrobnn.report.sentences import (
    FLAGS,
    beside_reference,
    conclude,
    facts,
    headline,
    in_words,
    name_in_words,
    recommended,
    significant,
)

#: columns of summary.json that the page leaves out
_SUMMARY_ONLY = ("coverage_50", "coverage_95", "compile_seconds", "predict_seconds")
#: attributes that only rebuild a saved run, or say what the page says elsewhere: not shown
REBUILDS = ("format", "format_version", "meta", "family", "study", "config", "data_digest")
_SAID_ELSEWHERE = ("iid", "kind", "claim", "remedy", "input_shape", "label")


def write_report(
    trees: Mapping[str, xr.DataTree | Evidence] | Results,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    verdicts: Mapping[str, Verdict] | None = None,
) -> Path:
    """Write one HTML page: which method to trust, on what evidence, and what to do next.

    The page refers to nothing outside itself, reads on a phone, in print, light and dark, and escapes every
    string that comes from the trees. It needs no group but ``posterior``.

    Args:
        trees: label → DataTree (or its `Evidence`); the labels name the methods throughout the page. Or their
            `Results`, where they have been judged already.
        path: where to write; missing parent folders are made.
        title: heading of the page; None for "Can these posteriors be believed?".
        verdicts: label → verdict where `pyrobnn.diagnose` has run already; None to run it here, with the
            first run of exact chains as the reference of the others.

    Returns:
        The path written to.

    Raises:
        TypeError: if a tree is not a DataTree.
        ValueError: if there is no tree, or ``verdicts`` lacks a label.

    Caveat:
        The recommendation orders methods by verdict, then by held-out log density, and names close calls; it
        knows nothing of the cost of a wrong prediction.

    Example:
        >>> import numpy as np, tempfile, xarray as xr
        >>> draws = np.random.default_rng(0).normal(size=(4, 100))
        >>> tree = xr.DataTree.from_dict({"posterior": xr.Dataset({"w": (("chain", "draw"), draws)})})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_report({"mine": tree}, f"{folder}/report.html").name
        'report.html'
    """
    results = trees if isinstance(trees, Results) else Results.of(trees, verdicts)
    best = recommended(results.rows, results.verdicts)
    rows_and_baselines = [*results.rows, *results.floor]
    html = _template().render(
        title=title or "Can these posteriors be believed?",
        facts=facts(results.trees),
        headline=best
        and headline(best, results.trees[best], results.verdicts[best], rows_and_baselines),
        conclusion=conclude(results.rows, results.verdicts),
        tone="warn" if best is None else results.verdicts[best].status,
        css=_packaged("page.css"),
        verdicts=results.verdicts,
        deciding={
            label: _deciding_evidence(verdict) for label, verdict in results.verdicts.items()
        },
        said_rates=said_rates,
        left_out=results.left_out,
        table=_table(results),
        num_methods=len(results.rows),
        reference=results.reference,
        beside_reference=beside_reference(results),
        lost=list(itertools.chain.from_iterable(row.lost for row in results.rows)),
        sections=build_sections(results.trees),
        section_titles=SECTIONS,
        folds=arviz_figures.build_folds(results.trees),
        arviz_missing=_arviz_missing(results),
        runs=[_run(label, evidence) for label, evidence in results.trees.items()],
    )
    return _write(path, html)


def _arviz_missing(results: Results) -> str:
    """How to get ArviZ's figures of the chains; "" where they are there, or there are no chains."""
    has_chains = bool(arviz_figures.runs_of_chains(results.trees))
    return arviz_figures.MISSING if has_chains and not arviz_figures.are_installed() else ""


def _template() -> Template:
    pages = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return pages.from_string(_packaged("page.html"))


def _packaged(name: str) -> str:
    """The text of a file that the package brings."""
    return files("pyrobnn.report").joinpath(name).read_text(encoding="utf-8")


def write_summary(
    trees: Mapping[str, xr.DataTree | Evidence] | Results,
    verdicts: Mapping[str, Verdict] | None,
    path: str | os.PathLike[str],
) -> Path:
    """Write the comparison table and the verdicts as strict JSON (no NaN, no infinity).

    Keys: ``facts`` (data, inputs, target, net, prior, likelihood, run, command, seed, in words), ``recommended`` (null
    where the runs are of different data), ``conclusion`` (two sentences), ``reference``, ``not_finite`` (how many
    numbers are null because they came out NaN or infinite), ``left_out`` (method → why it has no draws), ``methods``:
    label → ``status``, ``draws`` and ``model`` (the answers to both questions), ``findings`` (what the fit reports:
    codes and numbers), ``scores`` (the table's numbers, ``rmse[0]`` … of each output where there are several; a missing
    key does not apply), ``standard_errors`` over the held-out data, ``lost`` (what could not be computed, and why), and
    ``verdict`` with every check; ``baselines``: label → ``scores`` and ``standard_errors`` of the mean and of a linear
    model.

    Args:
        trees: label → DataTree, or its `Evidence`; or their `Results`.
        verdicts: label → verdict; None to diagnose here.
        path: where to write; missing parent folders are made.

    Returns:
        The path written to.

    Raises:
        TypeError: if a tree is not a DataTree.
        ValueError: if there is no tree, or ``verdicts`` lacks a label.
    """
    results = trees if isinstance(trees, Results) else Results.of(trees, verdicts)
    methods = {}
    for row in results.rows:
        verdict = results.verdicts[row.label]
        methods[row.label] = {
            "status": verdict.status,
            "draws": verdict.draws,
            "model": verdict.model,
            "findings": results.trees[row.label].json("findings") or [],
            "scores": row.values | dict.fromkeys(row.not_finite),
            "standard_errors": row.errors,
            "lost": list(row.lost),
            "verdict": verdict.to_dict(),
        }
    content = {
        "facts": facts(results.trees),
        "recommended": recommended(results.rows, results.verdicts),
        "conclusion": " ".join(filter(None, conclude(results.rows, results.verdicts))),
        "reference": results.reference,
        "not_finite": sum(len(row.not_finite) for row in results.rows),
        "left_out": results.left_out,
        "methods": methods,
        "baselines": {
            baseline.label: {"scores": baseline.values, "standard_errors": baseline.errors}
            for baseline in results.floor
        },
    }
    return _write(
        path,
        json.dumps(
            content,
            ensure_ascii=False,
            allow_nan=False,
            indent=2,
        )
        + "\n",
    )


def _write(path: str | os.PathLike[str], text: str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _deciding_evidence(verdict: Verdict) -> str:
    """The deciding evidence of a verdict, in a sentence or two."""
    deciding = [*verdict.failed, *verdict.warned][:2]
    if deciding:
        return " ".join(check.evidence.rstrip(".") + "." for check in deciding)
    return (
        f"All {len(verdict.passed)} checks passed." if verdict.passed else "No check could be made."
    )


def _cell(row: Row, column: Column) -> tuple[str, str]:
    """Text of a cell of the table, and what stands beside it: a standard error, or the seconds of compiling."""
    value = row.values.get(column.key)
    if value is None:
        return "not finite" if column.key in row.not_finite else "", ""
    text = column.form.format(value).replace("-", "−") if column.form else significant(value)
    if column.key == "log_prob" and column.key in row.errors:
        return text, f"± {significant(row.errors[column.key], 2)}"
    if column.key == "fit_seconds" and row.values.get("compile_seconds", 0.0) > 0.0:
        return text, f"+ {significant(row.values['compile_seconds'], 2)}"
    return text, ""


def _table(results: Results) -> dict[str, object]:
    """The comparison: columns, and of each row its cells (text, standard error, whether it is near the best)."""
    rows = [*results.rows, *results.floor]
    filled = set().union(*([*row.values, *row.not_finite] for row in results.rows))
    columns = [
        column for column in COLUMNS if column.key in filled and column.key not in _SUMMARY_ONLY
    ]
    if [column.key for column in columns] == ["fit_seconds"]:
        return {}  # seconds alone stand with the settings
    best = {column.key: best_labels(rows, column) for column in columns}

    def cells(row: Row) -> list[tuple[str, str, bool]]:
        return [(*_cell(row, column), row.label in best[column.key]) for column in columns]

    return {"columns": columns, "rows": [(row.label, cells(row)) for row in rows]}


def _size_in_words(num_chains: int, num_draws: int) -> str:
    draws = "1 draw" if num_draws == 1 else f"{num_draws:,} draws"
    return draws if num_chains == 1 else f"{num_chains} chains of {draws}"


def _run(label: str, evidence: Evidence) -> dict[str, object]:
    """The settings of a run, and how many draws it has in brief."""
    sizes = evidence.tree[POSTERIOR].sizes if POSTERIOR in evidence.tree.children else {}
    attributes = {str(name): value for name, value in evidence.tree.attrs.items()}
    shown = {}
    for name in sorted(attributes):
        value = evidence.json(name)
        decoded = attributes[name] if value is None and attributes[name] != "null" else value
        words = in_words(bool(decoded) if name in FLAGS else decoded)
        if words and name not in (*REBUILDS, *_SAID_ELSEWHERE):
            shown[name_in_words(name)] = words
    return {
        "label": label,
        "brief": _size_in_words(sizes.get("chain", 1), sizes.get("draw", 1)),
        "settings": shown | {"groups": ", ".join(sorted(evidence.tree.children))},
    }
