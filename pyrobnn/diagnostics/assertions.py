"""What a test suite asks of predictions."""

from __future__ import annotations

from pyrobnn.diagnostics.forecasts import Outcomes, Predictions
from pyrobnn.diagnostics.predictions import judge
from pyrobnn.diagnostics.verdict import Verdict


def assert_calibrated(
    predictions: Predictions,
    y: Outcomes,
    *,
    x: Outcomes | None = None,
    x_train: Outcomes | None = None,
    y_train: Outcomes | None = None,
    strict: bool = False,
) -> Verdict:
    """Raise where `judge` fails predictions, or where there is too little to judge them by.

    Args:
        predictions, y, x, x_train, y_train: as of :func:`pyrobnn.judge`.
        strict: whether a warning raises too. Of right predictions one in eleven is warned of at 100 rows, one in
            sixty at 500; with data of a fixed seed a test is the same every time.

    Returns:
        The verdict.

    Raises:
        AssertionError: With every check that did not pass, a line each.

    Example:
        >>> import numpy as np, torch
        >>> y = np.random.default_rng(0).normal(size=200)
        >>> assert_calibrated(torch.distributions.Normal(torch.zeros(200), 1.0), y).model
        'pass'
    """
    verdict = judge(
        predictions,
        y,
        x=x,
        x_train=x_train,
        y_train=y_train,
    )
    if (
        verdict.model == "fail"
        or not verdict.checked("model")
        or (strict and verdict.model != "pass")
    ):
        raise AssertionError(
            "\n".join([verdict.summary, *map(str, (*verdict.failed, *verdict.warned))])
        )
    return verdict
