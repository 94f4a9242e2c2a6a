"""Whether a posterior can be believed: evidence, limits and next actions, from a DataTree alone.

`diagnose` runs every check that a tree allows. The statistics behind it are public as well, each a function of
DataTrees: `convergence`, `importance`, `loo` and `refit_points`, `score`, `pit` and `loo_pit`, `fidelity`.
Given a tree's `Evidence` instead, they share what they compute.

Read in this order: judge (`diagnose`, `audit`), check_table and row (which statistic, which limits), evidence (what a
tree holds; ``@statistic`` makes a function of it one of a tree, computed once), grades and verdict, wording (the
sentences). `judge`, for predictions without draws, is in predictions, on arrays read by forecasts.
"""

from __future__ import annotations

from pyrobnn.diagnostics.convergence import Convergence, convergence
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.fidelity import Fidelity, fidelity
from pyrobnn.diagnostics.importance import Importance, importance
from pyrobnn.diagnostics.judge import audit, diagnose, judge_all
from pyrobnn.diagnostics.leave_one_out import loo, loo_pit, refit_points
from pyrobnn.diagnostics.points import pit
from pyrobnn.diagnostics.prediction_metrics import expected_calibration_error
from pyrobnn.diagnostics.scores import Score, score
from pyrobnn.diagnostics.verdict import Check, Verdict

__all__ = [
    "Check",
    "Convergence",
    "Evidence",
    "Fidelity",
    "Importance",
    "Score",
    "Verdict",
    "audit",
    "convergence",
    "diagnose",
    "expected_calibration_error",
    "fidelity",
    "importance",
    "judge_all",
    "loo",
    "loo_pit",
    "pit",
    "refit_points",
    "score",
]
