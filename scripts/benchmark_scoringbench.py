"""The regressor under ScoringBench's protocol, on those of its sets that a folder has; one record a fold.

    python scripts/benchmark_scoringbench.py --data DIR      # folders of UCI sets in DIR/uci, DIR/tables/*.csv

The board itself loads its sets from the network. Its folds (five, shuffled by seed 42), its caps on rows (3,000 of
train and test part together) and its native scores are repeated here from its published code: CRPS, RMSE, R², the
coverage and score of 90 % intervals. Beside the net stands a linear model with normal residuals.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold

RESULTS = Path(__file__).parent / "results" / "scoringbench.jsonl"
SEED, FOLDS, ROWS = 42, 5, 3000
#: name on the board → folder of UCI, or file of the tables
SETS = {"concrete": "concrete", "energy": "energy", "airfoil": "airfoil.csv"}
_TAIL = np.array([1e-4, 3e-4, 1e-3, 2e-3, 3.5e-3])
#: probabilities whose quantiles are scored: lines between them cost a normal's CRPS at most a thousandth of its sd
LEVELS = np.concatenate([_TAIL, np.arange(1, 200) / 200, 1 - _TAIL[::-1]])
METRICS = {
    "crps": "CRPS",
    "rmse": "RMSE",
    "r2": "R²",
    "coverage_90": "90 % interval holds",
    "interval_score_90": "its score",
}


class Quantiles:
    """What the board's container keeps of a prediction by quantiles (row, level)."""

    def __init__(self, q: np.ndarray, levels: np.ndarray, mean: np.ndarray):
        self.q, self.levels, self.mean = q, levels, mean


class Net:
    """The regressor by those quantiles, infinite inputs and gaps imputed."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> Net:
        from pyrobnn import BNNRegressor

        self.estimator_ = BNNRegressor(missing="impute", random_state=0)
        self.estimator_.fit(np.where(np.isfinite(X), X, np.nan), y)
        return self

    def predict_distribution(self, X: np.ndarray) -> Quantiles:
        X = np.where(np.isfinite(X), X, np.nan)
        quantiles = self.estimator_.predict_quantiles(X, LEVELS)
        return Quantiles(np.maximum.accumulate(quantiles, axis=1), LEVELS, self.estimator_.predict(X))


class Line:
    """A linear model with normal residuals, by the same quantiles."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> Line:
        self.line = LinearRegression().fit(X, y)
        self.scale = float(
            np.std(y - self.line.predict(X)) * (len(y) / max(1, len(y) - X.shape[1] - 1)) ** 0.5
        )
        return self

    def predict_distribution(self, X: np.ndarray) -> Quantiles:
        mean = self.line.predict(X)
        return Quantiles(norm.ppf(LEVELS, mean[:, None], self.scale), LEVELS, mean)


def crps(q: np.ndarray, levels: np.ndarray, y: np.ndarray) -> np.ndarray:
    """CRPS (row,) of a distribution linear between its quantiles, with what lies beyond as atoms at the ends."""
    low, high, a, b = q[:, :-1], q[:, 1:], levels[:-1], levels[1:]
    cut = np.clip(y[:, None], low, high)
    at = a + (b - a) * (cut - low) / np.where(high > low, high - low, 1.0)

    def area(width: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        return width * (u * u + u * v + v * v) / 3

    inside = (area(cut - low, a, at) + area(high - cut, 1 - at, 1 - b)).sum(1)
    return inside + np.maximum(q[:, 0] - y, 0) + np.maximum(y - q[:, -1], 0)


def score(found: Quantiles, y: np.ndarray) -> dict[str, float]:
    """The board's native scores of a prediction by quantiles."""
    low, high = (found.q[:, int(np.argmin(np.abs(found.levels - level)))] for level in (0.05, 0.95))
    missed = np.maximum(low - y, 0) + np.maximum(y - high, 0)
    squared = float(np.mean((found.mean - y) ** 2))
    return {
        "crps": float(crps(found.q, found.levels, y).mean()),
        "rmse": squared**0.5,
        "r2": 1 - squared / float(np.var(y)),
        "coverage_90": float(np.mean(missed == 0)),
        "interval_score_90": float(np.mean(high - low + 2 / 0.1 * missed)),
    }


def folds(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows to train on and to score on, of each fold, with the board's caps."""
    most_train, most_test = ROWS * (FOLDS - 1) // FOLDS, ROWS // FOLDS
    for fold, (train, test) in enumerate(KFold(FOLDS, shuffle=True, random_state=SEED).split(x)):
        if len(train) > most_train:
            train = np.random.default_rng(SEED * 10007 + fold).choice(train, most_train, replace=False)
        if len(test) > most_test:
            test = np.random.default_rng(SEED * 10007 + fold + 1).choice(test, most_test, replace=False)
        yield train, test


def read(name: str, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (row, feature) and outcomes (row,) of a set."""
    if SETS[name].endswith(".csv"):
        rows = np.loadtxt(data / "tables" / SETS[name], delimiter=",", skiprows=1)
        return rows[:, :-1], rows[:, -1]
    from pyrobnn.data import uci_all

    found = uci_all(SETS[name], data / "uci")
    return found.x.numpy(), found.y.numpy()[:, 0]


def run(name: str, model: str, fold: int, data: Path) -> dict[str, Any]:
    """The record of one model on one fold of one set."""
    from pyrobnn.studies.uci.provenance import commit

    x, y = read(name, data)
    train, test = list(folds(x, y))[fold]
    makers: dict[str, Callable[[], Any]] = {"pyrobnn": Net, "line": Line}
    begun, cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = makers[model]().fit(x[train], y[train])
        found = fitted.predict_distribution(x[test])
    record = {
        "dataset": name,
        "model": model,
        "fold": fold,
        "num_train": len(train),
        "scores": {key: round(value, 5) for key, value in score(found, y[test]).items()},
        "seconds": round(time.perf_counter() - begun, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "commit": commit(),
    }
    if model == "pyrobnn":
        own = fitted.estimator_
        record |= {"method": own.method_reason_, "verdict": own.verdict_.status}
        record["warnings"] = sorted({str(each.message)[:200] for each in caught})
    return record


def scoringbench(records: Sequence[dict]) -> str:
    """Mean over folds and its standard error, by set and model."""
    lines = [
        f"| | folds | {' | '.join(METRICS.values())} | CPU s a fold |",
        "|---" * (len(METRICS) + 3) + "|",
    ]
    for cell in sorted({(each["dataset"], each["model"]) for each in records}):
        rows = [each for each in records if (each["dataset"], each["model"]) == cell]
        cells = []
        for metric in METRICS:
            values = [row["scores"][metric] for row in rows]
            error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.2g}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.3f}{error}")
        cost = statistics.fmean(row["cpu_seconds"] for row in rows)
        lines.append(f"| {cell[0]}, {cell[1]} | {len(rows)} | {' | '.join(cells)} | {cost:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--folds", type=int, default=FOLDS, help="the first so many of five")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    from pyrobnn.studies.uci import append_record, read_records

    done = {(each["dataset"], each["model"], each["fold"]) for each in read_records(asked.results)}
    for fold in range(asked.folds):
        for name in asked.sets:
            for model in ("line", "pyrobnn"):
                if (name, model, fold) not in done:
                    record = run(name, model, fold, asked.data)
                    append_record(asked.results, record)
                    print(name, model, fold, record["scores"], record["cpu_seconds"], flush=True)
    print(scoringbench(read_records(asked.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
