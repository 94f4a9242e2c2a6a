"""`write_summary`: the report's verdicts and numbers for machines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import xarray as xr

from pyrobnn.diagnostics import Verdict
from pyrobnn.diagnostics.evidence import Evidence, gather
from pyrobnn.diagnostics.judge import judge_all, reference_label
from pyrobnn.report.baselines import baselines
from pyrobnn.report.comparison import baseline_rows, compare_rows
from pyrobnn.report.conclusion import conclude, recommended
from pyrobnn.report.facts import config, facts
from pyrobnn.report.page import check_verdicts
from pyrobnn.report.ranking import rankings


def write_summary(
    trees: Mapping[str, xr.DataTree | Evidence],
    verdicts: Mapping[str, Verdict] | None,
    path: str | os.PathLike[str],
    *,
    left_out: Mapping[str, str] | None = None,
) -> Path:
    """Write the comparison table and the verdicts as strict JSON (no NaN, no infinity).

    Keys: ``facts`` (data, inputs, target, net, prior, likelihood, run, command, seed, in words), ``config`` (what
    ``pyrobnn compare --config`` makes the same numbers from; null for other trees), ``recommended`` (null where
    the runs are of different data), ``conclusion`` (two sentences), ``reference``, ``not_finite`` (how many numbers of
    the table are null because they came out NaN or infinite), ``left_out`` (method → why it has no draws), ``methods``:
    label → ``status``, ``scores`` (the table's numbers, ``rmse[0]`` … of each output where there are several; a missing
    key does not apply), ``standard_errors`` over the held-out data, ``lost`` (what could not be computed, and why), and
    ``verdict`` with every check; ``baselines``: label → ``scores`` and ``standard_errors`` of the mean and of a linear
    model; and ``rankings``: ``held_out`` and ``leave_one_out`` → log predictive densities, paired differences from the
    best, stacking weights.

    Args:
        trees: label → DataTree, or its `Evidence`.
        verdicts: label → verdict; None to diagnose here.
        path: where to write; missing parent folders are made.
        left_out: methods that were asked for and gave no tree → the reason.

    Returns:
        The path written to.

    Raises:
        TypeError: if a tree is no DataTree.
        ValueError: if there is no tree, or ``verdicts`` lacks a label.
    """
    trees = gather(trees)
    verdicts = judge_all(trees) if verdicts is None else check_verdicts(trees, verdicts)
    rows = compare_rows(trees, verdicts)
    floor = baselines(trees.values())
    content = {
        "facts": facts(trees),
        "config": config(trees),
        "recommended": recommended(rows, verdicts),
        "conclusion": " ".join(sentence for sentence in conclude(trees, rows, verdicts) if sentence),
        "reference": reference_label(trees),
        "not_finite": sum(len(row.not_finite) for row in rows),
        "left_out": dict(left_out or {}),
        "methods": {
            row.label: {
                "status": verdicts[row.label].status,
                "scores": row.values | dict.fromkeys(row.not_finite),
                "standard_errors": row.errors,
                "lost": list(row.lost),
                "verdict": verdicts[row.label].to_dict(),
            }
            for row in rows
        },
        "baselines": {
            row.label: {"scores": row.values, "standard_errors": row.errors} for row in baseline_rows(floor)
        },
        "rankings": {name: ranking.to_dict() for name, ranking in rankings(trees, floor).items()},
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(content, ensure_ascii=False, allow_nan=False, indent=2) + "\n", encoding="utf-8"
    )
    return path
