"""`write_report` and `write_summary`: one self-contained HTML page, and the same as JSON, from DataTrees alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import xarray as xr
import yaml
from jinja2 import Environment

from pyrobnn.core.groups import HELD_OUT, POSTERIOR
from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.check_table import said_rates
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.scores import LEVELS
from pyrobnn.report.figures import build_sections, output_labels
from pyrobnn.report.results import COLUMNS, Column, Results, Row, best_labels, of_output
from pyrobnn.report.sentences import conclude, config, facts, headline, recommended, significant, with_error
from pyrobnn.wording import typeset

# columns of the page that merge several keys of summary.json
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
#: attributes that a saved run is rebuilt from
REBUILDS = ("format", "format_version", "meta", "family", "study", "config")
DECIMALS = {"ess": 0, "rhat": 3, "khat": 2, "r2": 2}
#: column → what stands below the table that has it
NOTES = {
    "r2": "R²: share of the squared error of predicting the training mean that is gone.",
    "rhat": "R-hat and ESS judge chains; independent draws have none.",
    "khat": "k-hat judges approximations.",
    "predictive_distance": "Distance: mean 1-Wasserstein distance of the predictive from that of {reference}, in the "
    "outcome's units.",
}


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
            first NUTS run as the reference of the others.

    Returns:
        The path written to.

    Raises:
        TypeError: if a tree is no DataTree.
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
    folder = files("pyrobnn.report")
    pages = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters["typeset"] = typeset
    template = pages.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    best = recommended(results.rows, results.verdicts)
    everything = [*results.rows, *results.floor]
    written = config(results.trees)
    html = template.render(
        title=title or "Can these posteriors be believed?",
        subtitle=_subtitle(results.trees),
        facts=facts(results.trees),
        headline=""
        if best is None
        else headline(best, results.trees[best], results.verdicts[best], everything),
        conclusion=conclude(results.rows, results.verdicts),
        tone="warn" if best is None else results.verdicts[best].status,
        css=folder.joinpath("page.css").read_text(encoding="utf-8"),
        verdicts=results.verdicts,
        deciding={label: _deciding(verdict) for label, verdict in results.verdicts.items()},
        said_rates=said_rates,
        left_out=results.left_out,
        tables=_tables(results),
        num_methods=len(results.rows),
        table_note=_table_note(results),
        rankings=results.rankings.values(),
        baselines=results.baselines,
        with_error=with_error,
        lost=[sentence for row in results.rows for sentence in row.lost],
        sections=build_sections(results.trees),
        config="" if written is None else yaml.safe_dump(written, sort_keys=False, allow_unicode=True),
        runs=[_run(label, evidence) for label, evidence in results.trees.items()],
        footer=_footer(results.trees),
    )
    return _write(path, html)


def write_summary(
    trees: Mapping[str, xr.DataTree | Evidence] | Results,
    verdicts: Mapping[str, Verdict] | None,
    path: str | os.PathLike[str],
) -> Path:
    """Write the comparison table and the verdicts as strict JSON (no NaN, no infinity).

    Keys: ``facts`` (data, inputs, target, net, prior, likelihood, run, command, seed, in words), ``config`` (what
    ``pyrobnn compare --config`` makes the same numbers from; null for other trees), ``recommended`` (null where
    the runs are of different data), ``conclusion`` (two sentences), ``reference``, ``not_finite`` (how many numbers of
    the table are null because they came out NaN or infinite), ``left_out`` (method → why it has no draws), ``methods``:
    label → ``status``, ``draws`` and ``model`` (the answers to both questions), ``findings`` (what the fit reports:
    codes and numbers), ``scores`` (the table's numbers, ``rmse[0]`` … of each output where there are several; a missing
    key does not apply), ``standard_errors`` over the held-out data, ``lost`` (what could not be computed, and why), and
    ``verdict`` with every check; ``baselines``: label → ``scores`` and ``standard_errors`` of the mean and of a linear
    model; and ``rankings``: ``held_out`` and ``leave_one_out`` → log predictive densities, paired differences from the
    best, stacking weights.

    Args:
        trees: label → DataTree, or its `Evidence`; or their `Results`.
        verdicts: label → verdict; None to diagnose here.
        path: where to write; missing parent folders are made.

    Returns:
        The path written to.

    Raises:
        TypeError: if a tree is no DataTree.
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
        "config": config(results.trees),
        "recommended": recommended(results.rows, results.verdicts),
        "conclusion": " ".join(filter(None, conclude(results.rows, results.verdicts))),
        "reference": results.reference,
        "not_finite": sum(len(row.not_finite) for row in results.rows),
        "left_out": results.left_out,
        "methods": methods,
        "baselines": {r.label: {"scores": r.values, "standard_errors": r.errors} for r in results.floor},
        "rankings": {name: ranking.to_dict() for name, ranking in results.rankings.items()},
    }
    return _write(path, json.dumps(content, ensure_ascii=False, allow_nan=False, indent=2) + "\n")


def _write(path: str | os.PathLike[str], text: str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _subtitle(trees: Mapping[str, Evidence]) -> str:
    dates = sorted(each.text("created_at")[:10] for each in trees.values() if each.text("created_at"))
    return " · ".join([f"{len(trees)} method{'s' if len(trees) > 1 else ''}", *dates[-1:]])


def _deciding(verdict: Verdict) -> str:
    """The deciding evidence of a verdict, in a sentence or two."""
    deciding = [*verdict.failed, *verdict.warned][:2]
    if deciding:
        return " ".join(check.evidence.rstrip(".") + "." for check in deciding)
    return f"All {len(verdict.passed)} checks passed." if verdict.passed else "No check could be made."


def _tables(results: Results) -> list[dict[str, object]]:
    """The comparison, and that of each output, in its own unit, where there are several."""
    found = []
    names = output_labels(results.trees)
    for output, name in [(None, ""), *(enumerate(names) if len(names) > 1 else ())]:
        ours, floor = results.rows, results.floor
        if output is not None:
            ours, floor = [of_output(row, output) for row in ours], [of_output(row, output) for row in floor]
        columns = [column for column in SHOWN if any(_has(row, column) for row in ours)]
        if not columns or columns == [SECONDS]:  # seconds alone stand with the settings
            continue
        best = {column.key: best_labels([*ours, *floor], column) for column in columns}
        cells = [
            (row.label, [(*cell(row, column), row.label in best[column.key]) for column in columns])
            for row in (*ours, *floor)
        ]
        found.append({"name": name, "columns": columns, "rows": cells})
    return found


def _has(row: Row, column: Column) -> bool:
    return any(key in row.values or key in row.not_finite for key in MERGED.get(column.key, (column.key,)))


def cell(row: Row, column: Column) -> tuple[str, str]:
    """Text of a cell of the table, and the standard error behind it."""
    keys = MERGED.get(column.key, (column.key,))
    texts = [
        "not finite" if key in row.not_finite else format_number(row.values.get(key), key) or "–"
        for key in keys
    ]
    if column.key == "log_prob" and "log_prob" in row.errors and "log_prob" in row.values:
        return with_error(row.values["log_prob"], row.errors["log_prob"])
    return " / ".join(texts) if any(text != "–" for text in texts) else "", ""


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
        return "<0.01" if value < 0.01 else f"{value:.2g}" if value < 10 else f"{value:.0f}"
    return significant(value)


def _table_note(results: Results) -> str:
    notes = []
    if any(evidence.values(HELD_OUT, "y") is not None for evidence in results.trees.values()):
        notes.append(
            "On held-out data. Bold: within two standard errors of the best of its column, by pairs."
        )
    notes.append("– : does not apply, or is not in the tree.")
    known = {key for row in results.rows for key in row.values}
    notes += [text.format(reference=results.reference) for key, text in NOTES.items() if key in known]
    return " ".join(notes)


def _run(label: str, evidence: Evidence) -> dict[str, object]:
    """The settings of a run, and how many draws it has in brief."""
    attrs = evidence.tree.attrs
    sizes = evidence.tree[POSTERIOR].sizes if POSTERIOR in evidence.tree.children else {}
    seed = f", seed {attrs['seed']}" if "seed" in attrs else ""
    names = sorted(map(str, attrs), key=lambda name: (name not in ("method", "settings", "seed"), name))
    shown = {
        name.replace("_", " "): _shown(evidence.json(name) if str(attrs[name])[:1] in "{[" else attrs[name])
        for name in names
        if name not in REBUILDS
    }
    facts = {name: words for name, words in shown.items() if words}
    return {
        "label": label,
        "brief": f"{sizes.get('chain', 1)} × {sizes.get('draw', 1)} draws{seed}",
        "facts": facts | {"groups": ", ".join(sorted(evidence.tree.children))},
    }


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_shown(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _footer(trees: Mapping[str, Evidence]) -> str:
    versions: dict[str, str] = {}
    for evidence in trees.values():
        found = evidence.json("versions")
        versions |= found if isinstance(found, dict) else {}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "Written by pyrobnn from stored draws" + (f" ({named})." if named else ".")
