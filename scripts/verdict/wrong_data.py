"""Data that the model does not describe: errors of another law, inputs that it is not given, rows that it has seen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from verdict.exact_cases import HELD_OUT, Case


def doubled(case: Case) -> None:
    case.x, case.x_test = (np.concatenate([x, x[:, :1]], axis=1) for x in (case.x, case.x_test))


def collinear(case: Case) -> None:
    case.x = case.x[:, :1] + 0.1 * case.rng.normal(size=(len(case.x), max(2, case.x.shape[1])))
    case.x_test = case.x_test[:, :1] + 0.1 * case.rng.normal(size=(HELD_OUT, case.x.shape[1]))
    weights = case.rng.normal(size=case.x.shape[1])
    case.y = case.x @ weights + case.noise * case.rng.normal(size=len(case.x))
    case.y_test = case.x_test @ weights + case.noise * case.rng.normal(size=HELD_OUT)


def test_is_train(case: Case) -> None:
    case.x_test = case.x[:HELD_OUT].copy()
    case.y_test = case.y[:HELD_OUT].copy()


def test_is_nearly_train(case: Case) -> None:
    test_is_train(case)
    case.x_test += 1e-4 * case.rng.normal(size=case.x_test.shape)
    case.y_test += 1e-4 * case.rng.normal(size=case.y_test.shape)


def a_fifth_is_train(case: Case) -> None:
    count = min(HELD_OUT // 5, len(case.x))
    case.x_test[:count] = case.x[:count]
    case.y_test[:count] = case.y[:count]


def changed(name: str, change: Callable[[Case], np.ndarray | float]) -> Callable[[Case], None]:
    """One part of the data, held out or not, as `change` makes it."""
    return lambda case: setattr(case, name, change(case))


def swallowed(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Case], None]:
    """A function of the first input that no line has, as large as the noise, which takes both."""

    def change(case: Case) -> None:
        for x, y in ((case.x, case.y), (case.x_test, case.y_test)):
            extra = function(x[:, 0])
            y += 2.0 * case.noise * (extra - extra.mean()) / extra.std()
        case.noise *= np.sqrt(5.0)

    return change


def renoised(draw: Callable[[Case, np.ndarray], np.ndarray]) -> Callable[[Case], None]:
    """Other errors than the model's: `draw` gives them in units of its noise."""

    def change(case: Case) -> None:
        pairs = (case.x, case.y), (case.x_test, case.y_test)
        for (x, y), error in zip(pairs, case.errors, strict=True):
            y += case.noise * (draw(case, x[:, 0]) - error)

    return change


def dependent(case: Case, x: np.ndarray) -> np.ndarray:
    """Errors of one row that carry over to the next, as in a time series."""
    error = case.rng.normal(size=len(x))
    for row in range(1, len(x)):
        error[row] = 0.7 * error[row - 1] + np.sqrt(1 - 0.7**2) * error[row]
    return error


def grouped(case: Case, x: np.ndarray) -> np.ndarray:
    """Half of the variance is that of groups of ten rows."""
    of_group = np.repeat(case.rng.normal(size=-(-len(x) // 10)), 10)[: len(x)]
    return (case.rng.normal(size=len(x)) + of_group) / np.sqrt(2.0)


def without_an_input(case: Case) -> None:
    """One more input, with an effect twice as large as the noise, that the net is not given."""
    for y in (case.y, case.y_test):
        y += 2.0 * case.noise * case.rng.normal(size=len(y))


def paired(correlation: float) -> Callable[[Case], None]:
    """A second output of the same inputs, whose errors correlate with the first one's."""

    def change(case: Case) -> None:
        weights = case.rng.normal(size=case.x.shape[1] + 1)
        pairs = []
        for x, y, errors in zip(
            (case.x, case.x_test), (case.y, case.y_test), case.errors, strict=True
        ):
            fresh = case.rng.normal(size=len(x))
            error = correlation * errors + np.sqrt(1 - correlation**2) * fresh
            second = x @ weights[:-1] + weights[-1] + case.noise * error
            pairs.append(np.stack([y, second], axis=1))
        case.y, case.y_test = pairs

    return change
