"""`judge`: whether predictions that anyone made fit the outcomes: the model's half of a verdict, from arrays alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr
from scipy import stats

from pyrobnn.core.checks import check_choice
from pyrobnn.core.groups import CONSTANT_DATA, HELD_OUT, OBSERVED_DATA, PREDICTIONS
from pyrobnn.core.seeding import own_stream
from pyrobnn.diagnostics.baselines import baselines
from pyrobnn.diagnostics.check_table import TABLE
from pyrobnn.diagnostics.class_calibration import temperature
from pyrobnn.diagnostics.class_labels import column_titles, in_places
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.forecasts import (
    Censoring,
    Outcomes,
    Predictions,
    array_of,
    censored,
    has_positions,
    is_prediction,
    optional_array,
    read,
    seen_rows,
    tree_of,
)
from pyrobnn.diagnostics.grades import Found, Limits, grade_tested
from pyrobnn.diagnostics.limits import MIN_DATA
from pyrobnn.diagnostics.papers import ECE, OWN
from pyrobnn.diagnostics.row import Row, made
from pyrobnn.diagnostics.scores import num_outputs, score
from pyrobnn.diagnostics.verdict import Check, Verdict


def judge(
    predictions: Predictions,
    y: Outcomes,
    *,
    x: Outcomes | None = None,
    x_train: Outcomes | None = None,
    y_train: Outcomes | None = None,
    censoring: Censoring = "right",
) -> Verdict:
    r"""Say whether predictions fit outcomes that they were not trained on, whoever made them.

    Quantile transforms u = F(y) of right predictions are uniform, whatever x; of classes, labels are drawn from the
    probabilities. Checked are uniformity, coverage by region of x and by size of the prediction, patterns of u in x
    and in the order of the rows, rows copied from training, and the CRPS (of classes the log score) beside a linear
    model's; of classes also their shares, their calibration, and the power to which probabilities should be taken,
    :math:`p^\beta`: below 1 where they are too sharp.

    Args:
        predictions: draws of y (S, N), (S, N, out), (chain, draw, N) or (chain, draw, N, out), noise included; or a
            mapping from level to quantiles (N,); or class probabilities (N, K), or (N,) of class 1; or what has ``cdf``
            or ``sample``: a distribution of torch or SciPy, a `Prediction`. Draws of labels are judged as whole
            numbers are, by their order: the checks of classes need probabilities.
        y: outcomes (N,) or (N, out); of classes 0 … K − 1, or K labels in their sorted order; or labels that columns of
            a DataFrame are named by (cat, or p_cat). Of labels for each position of a row, one position of each row is
            judged, for the others depend on it. Of censored outcomes (N, 2), as the likelihoods take them: the
            value, and 1 where it was seen or 0 where it is the limit beyond which the outcome lies.
        x: inputs (N, feature); names are taken from a DataFrame. None leaves out what depends on them.
        x_train, y_train: what the model was trained on: rows that occur again are found, and the linear model is
            fitted to it. None for a linear model cross-validated on x and y, which then warns at the most.
        censoring: of draws of censored outcomes: ``"right"``, those not seen lie above their limit, or ``"left"``,
            below. A `Prediction` knows it.

    Returns:
        A verdict of the model alone: its ``status`` is that of ``model``. Its ``draws`` say "not checked" in print
        and are never a pass, which predictions cannot show.

    Raises:
        ValueError: If lengths differ, ``censoring`` is neither side, numbers are not finite, quantiles cross or
            probabilities do not sum to one.
        TypeError: If predictions are none of these.

    Caveat:
        Right on average may be wrong where no input that is given says so. Rows are taken for independent. Each check
        warns of at most one right set of predictions in 50, and fails one in 10,000.

    References:
        Probabilistic forecasts, calibration and sharpness (Gneiting et al., 2007) https://doi.org/10.1111/j.1467-9868.2007.00587.x

    Example:
        >>> import numpy as np, torch
        >>> y = np.random.default_rng(0).normal(size=500)
        >>> judge(torch.distributions.Normal(torch.zeros(500), 1.0), y).status
        'pass'
        >>> judge({0.05: np.full(500, -1.0), 0.5: np.zeros(500), 0.95: np.ones(500)}, y).status
        'fail'
    """
    return judged(
        predictions,
        y,
        x=x,
        x_train=x_train,
        y_train=y_train,
        censoring=censoring,
    )[0]


def judged(
    predictions: Predictions,
    y: Outcomes,
    *,
    x: Outcomes | None = None,
    x_train: Outcomes | None = None,
    y_train: Outcomes | None = None,
    censoring: Censoring = "right",
    label: str = "predictions",
) -> tuple[Verdict, Evidence]:
    """The verdict, and the tree of predictions and outcomes that a report is written of."""
    check_choice("censoring", censoring, ("right", "left"))
    if has_positions(predictions):
        predictions, y = predictions.one_position(y)
    y, y_train, num_words = in_places(column_titles(predictions, y), y, y_train)
    outcomes = array_of("y", y)
    train_outcomes = optional_array("y_train", y_train)
    inputs = optional_array("x", x)
    train_inputs = optional_array("x_train", x_train)
    _check_rows("x", inputs, "y", outcomes)
    _check_rows("x_train", train_inputs, "y_train", train_outcomes)
    if inputs is not None and train_inputs is not None and train_inputs.shape[1] != inputs.shape[1]:
        raise ValueError(f"'x' has {inputs.shape[1]} columns and 'x_train' {train_inputs.shape[1]}")
    seen = None if is_prediction(predictions) else seen_rows(predictions, outcomes)
    if seen is None:
        predicted = read(predictions, outcomes, num_words)
    else:
        predicted = censored(read(predictions, outcomes[:, :1], num_words), seen, censoring)
    if "pit" in predicted:  # of censored outcomes the value, without what says whether it was seen
        width = predicted.sizes["output"]
        outcomes = outcomes[:, :width]
        train_outcomes = None if train_outcomes is None else train_outcomes[:, :width]
    if num_words is not None and "probs" not in predicted:
        raise ValueError(
            "'y' holds words or truth values, and these are predictions of numbers: give probabilities"
        )
    features = [str(column) for column in getattr(x, "columns", ())]
    tree = tree_of(predicted, outcomes, inputs, train_inputs, train_outcomes, features, label)
    evidence = Evidence(tree)
    return Verdict(label, label, _model_checks(evidence)), evidence


def _model_checks(evidence: Evidence) -> tuple[Check, ...]:
    """The checks of the model; where none of them decides anything, one more that says so."""
    # `applies` reads the posterior, which predictions lack; their statistics answer None
    rows = [made(row, evidence) for row in MODEL_ROWS]
    checks = tuple(check for check in rows if check is not None)
    if any(check.decides for check in checks):
        return checks
    numbers = {"next": f"Judge {MIN_DATA} rows or more"}
    unchecked = Check(
        "not_checked_model",
        "warn",
        "model",
        code="not_checked",
        numbers=numbers,
    )
    return (*checks, unchecked)


def _check_rows(
    name: str,
    inputs: np.ndarray | None,
    outcome_name: str,
    outcomes: np.ndarray | None,
) -> None:
    """ValueError where inputs are given without as many outcomes."""
    if inputs is None:
        return
    num_outcomes = None if outcomes is None else len(outcomes)
    if len(inputs) != num_outcomes:
        raise ValueError(
            f"{name!r} has {len(inputs)} rows and {outcome_name!r} "
            f"{'none' if num_outcomes is None else num_outcomes}"
        )


# checks of predictions alone


def _beside_linear_model(evidence: Evidence, limits: Limits) -> Found | None:
    """Whether the score is as good as a linear model's (of no inputs: the mean's), in pairs and by a share."""
    predicted = evidence.tree[PREDICTIONS].to_dataset()
    # the score of a value that was not seen is not that of its limit
    if predicted.attrs.get("censored", False):
        return None
    name = _compared_score(evidence)
    scores = score(evidence)
    if name not in scores or len(np.asarray(evidence.values(HELD_OUT, "y"))) < MIN_DATA:
        return None
    achieved = np.asarray(scores[name].points)
    baseline_label, baseline_points = _baseline_scores(evidence, predicted, name)
    if not baseline_label:
        return None
    if not evidence.predicts_classes:
        # what a finite number of right draws costs
        achieved = achieved / (1.0 + 1.0 / len(predicted["y_sample"]))
    p = _p_of_worse(
        baseline_points - achieved if evidence.predicts_classes else achieved - baseline_points
    )
    ratio = (
        float(achieved.mean() / baseline_points.mean()) if baseline_points.mean() != 0.0 else 1.0
    )
    if evidence.values(OBSERVED_DATA, "y") is None:
        # a linear model of the held-out rows themselves is no ground to fail
        limits = (limits[0], np.inf)
    numbers = {
        "which": baseline_label,
        "score": name,
        "own": float(achieved.mean()),
        "floor": float(baseline_points.mean()),
        "p": p,
    }
    status = grade_tested(p, ratio - 1.0, evidence.rates, limits)
    return Found(status, ratio, "", numbers, 1.0 + limits[0])


def _p_of_worse(gap: np.ndarray) -> float:
    """p-value of paired differences (row,) that are not above zero in the mean; 1 where they are all the same."""
    error = float(gap.std(ddof=1)) / np.sqrt(len(gap))
    return float(stats.norm.sf(gap.mean() / error)) if error > 0.0 else 1.0


def _compared_score(evidence: Evidence) -> str:
    """The score by which predictions and a baseline are compared."""
    if evidence.predicts_classes:
        return "log_prob"
    return "crps" if num_outputs(evidence) == 1 else "crps_standardized"


def _baseline_scores(
    evidence: Evidence, predicted: xr.Dataset, name: str
) -> tuple[str, np.ndarray]:
    """The best baseline's label and its score of every row; no label where a part of the rows allows none."""
    x = evidence.values(HELD_OUT, "x")
    y = np.asarray(evidence.values(HELD_OUT, "y"))
    x_train = evidence.values(CONSTANT_DATA, "x")
    y_train = evidence.values(OBSERVED_DATA, "y")
    points = np.full(len(y), np.nan)
    label = ""
    for rows, fit_x, fit_y in _splits(y, x, x_train, y_train):
        x_rows = None if x is None else x[rows]
        fold = tree_of(predicted.isel(pred_point=rows), y[rows], x_rows, fit_x, fit_y)
        trees = baselines([Evidence(fold)])
        if not trees:
            return "", points
        label, best = list(trees.items())[-1]
        points[rows] = score(best)[name].points
    return label, points


def _splits(
    y: np.ndarray,
    x: np.ndarray | None,
    x_train: np.ndarray | None,
    y_train: np.ndarray | None,
) -> Iterator[tuple[np.ndarray, np.ndarray | None, np.ndarray]]:
    """Rows to predict, and inputs and outcomes to learn from: of training, or of the other four fifths."""
    if y_train is not None:
        yield np.arange(len(y)), x_train, y_train
        return
    order = own_stream().permutation(len(y))
    for rows in np.array_split(order, 5):
        fit_rows = np.setdiff1d(order, rows)
        yield rows, None if x is None else x[fit_rows], y[fit_rows]


#: the model's rows of the table, and those of predictions alone
MODEL_ROWS = (
    *(row for row in TABLE if row.question == "model"),
    Row("temperature", "model", temperature, (0.05, 0.25), "distance of the power from 1", ECE),
    Row(
        "baseline",
        "model",
        _beside_linear_model,
        (0.02, 0.25),
        "shares of the score of a linear model",
        OWN,
    ),
)
