"""How often `pb.judge` fails right predictions and passes planted faults, beside the best test; regressors of packages.

    python scripts/judge/run.py                               # right predictions and faults
    python scripts/judge/run.py --tables airfoil.csv kin.csv  # five regressors; the last column is the target

A line of records a fault, form and number of rows, or a regressor on a table; what is there is not run again. The best
test is the likelihood ratio of the fault itself, at the judge's own rate of warnings: it knows what to look for.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mapie.regression
import numpy as np
import sklearn.gaussian_process as gp
import torch
from scipy import stats
from scipy.special import log_softmax
from sklearn import ensemble, linear_model, preprocessing
from sklearn.datasets import load_diabetes

import pyrobnn as pb

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from records import append_record, read_records  # noqa: E402

SIZES = (100, 500, 5000)
RATE = 2e-2
HEALTHY = {100: 120, 500: 120, 5000: 18}
SICK = {100: 24, 500: 24, 5000: 6}
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
#: fault → scale of the predicted sd, shift of the mean in sds
WIDTHS = {
    "right": (1.0, 0.0),
    "sd × 0.7": (0.7, 0.0),
    "sd × 1.4": (1.4, 0.0),
    "biased by 0.5 sd": (1.0, 0.5),
}
SHAPES = (
    "noise grows with x, sd constant",
    "mean 1 sd off in a quarter of x",
    "skewed errors as normal",
)
COPIED = "half of the rows copied from training"
LINE = "Bayesian ridge"
PROCESS = "Gaussian process"
BOOSTING = "gradient boosting, quantiles"
TREES = "random forest, its trees as draws"
INTERVALS = "random forest, MAPIE's intervals"
#: fault of classes → power of the probabilities, log odds of the first class
CLASSES = {
    "right": (1.0, 0.0),
    "temperature 0.9": (1 / 0.9, 0.0),
    "temperature 0.5": (2.0, 0.0),
    "temperature 2": (0.5, 0.0),
    "odds of one class doubled": (1.0, np.log(2.0)),
}


def regression(fault: str, n: int, rng: np.random.Generator) -> dict[str, Any]:
    """Outcomes and what is said of them, with the log likelihood ratio of truth over prediction as a function of y."""
    x, x_train = rng.normal(size=(2, n, 3))
    clipped = np.clip(x[:, 0], -2.5, 2.5)
    sd = np.exp(0.6 * clipped) if fault == SHAPES[0] else np.ones(n)
    f = truth_at(x)
    f_train = truth_at(x_train)
    scale, shift = WIDTHS.get(fault, (1.0, 0.0))
    predicted_sd = np.full(n, scale * np.sqrt((sd**2).mean()))
    predicted_mean = f + shift + (1.0 * (x[:, 1] > 0.674) if fault == SHAPES[1] else 0.0)
    skewed = stats.gamma(
        2.0,
        loc=-np.sqrt(2.0),
        scale=np.sqrt(0.5),
    )
    law = skewed if fault == SHAPES[2] else stats.norm
    y = f + sd * law.rvs(size=n, random_state=rng)
    y_train = f_train + rng.normal(size=n)
    if fault == COPIED:
        half = slice(0, n // 2)
        x_train[half] = x[half]
        y_train[half] = y[half]

    def ratio(y: np.ndarray) -> np.ndarray:
        truth = np.maximum(law.logpdf((y - f) / sd), -50.0) - np.log(sd)
        return (truth - stats.norm.logpdf(y, predicted_mean, predicted_sd)).sum(-1)

    null = predicted_mean + predicted_sd * rng.normal(size=(100, n))
    alternative = f + sd * law.rvs(size=(100, n), random_state=rng)
    forms = forms_of(predicted_mean, predicted_sd, rng)
    best = 1.0 if fault == COPIED else power(ratio(null), ratio(alternative))
    return {
        "forms": forms,
        "y": y,
        "known": {"x": x, "x_train": x_train, "y_train": y_train},
        "power": best,
    }


def truth_at(x: np.ndarray) -> np.ndarray:
    """The mean of the outcomes."""
    return np.sin(x[:, 0]) + x @ [1.0, 0.5, 0.0]


def forms_of(mean: np.ndarray, sd: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """Normal predictions in each form that the judge takes."""
    return {
        "normal": torch.distributions.Normal(torch.tensor(mean), torch.tensor(sd)),
        "quantiles": {level: mean + sd * stats.norm.ppf(level) for level in LEVELS},
        "draws": mean + sd * rng.normal(size=(200, len(mean))),
    }


def classes(fault: str, n: int, rng: np.random.Generator) -> dict[str, Any]:
    """Labels of two or of ten classes, and their probabilities."""
    count = int(rng.choice([2, 10]))
    x = rng.normal(size=(n, count))
    logs = log_softmax(2.0 * x, axis=1)
    sharper, odds = CLASSES[fault]
    predicted_logs = log_softmax(sharper * logs + odds * (np.arange(count) == 0), axis=1)
    of_prediction = (predicted_logs + rng.gumbel(size=(100, n, count))).argmax(-1)
    of_truth = (logs + rng.gumbel(size=(100, n, count))).argmax(-1)
    ratios = logs - predicted_logs
    null = ratios[np.arange(n), of_prediction].sum(1)
    alternative = ratios[np.arange(n), of_truth].sum(1)
    return {
        "forms": {f"{count} classes": np.exp(predicted_logs)},
        "y": of_truth[0],
        "known": {"x": x[:, :5]},
        "power": power(null, alternative),
    }


def power(null: np.ndarray, alternative: np.ndarray) -> float:
    """Power of the likelihood ratio at the rate `RATE`, its distributions taken for normal."""
    if null.std() == 0.0:
        return RATE
    critical = null.mean() + stats.norm.isf(RATE) * null.std()
    return float(stats.norm.sf((critical - alternative.mean()) / alternative.std()))


def study(path: Path) -> None:
    """Every fault at every size."""
    done = {(row["kind"], row["fault"], row["n"]) for row in read_records(path) if "n" in row}
    faults = {"regression": (*WIDTHS, *SHAPES, COPIED), "classes": tuple(CLASSES)}
    for n, kind in itertools.product(SIZES, faults):
        for fault in faults[kind]:
            if (kind, fault, n) in done:
                continue
            for form, cases in judged(kind, fault, n).items():
                row = {
                    "kind": kind,
                    "fault": fault,
                    "n": n,
                    "form": form,
                } | counted(cases)
                append_record(path, row | {"power": float(np.mean([power for _, power in cases]))})
                print(row, flush=True)


def judged(kind: str, fault: str, n: int) -> dict[str, list[tuple[pb.Verdict, float]]]:
    """By form of the predictions, the verdict of each seed and the power of the best test."""
    verdicts: dict[str, list[tuple[pb.Verdict, float]]] = {}
    make = classes if kind == "classes" else regression
    for seed in range((HEALTHY if fault == "right" else SICK)[n]):
        case = make(fault, n, np.random.default_rng([n, seed, *fault.encode()]))
        form, predictions = list(case["forms"].items())[seed % len(case["forms"])]
        verdict = pb.judge(predictions, case["y"], **case["known"])
        verdicts.setdefault(form, []).append((verdict, case["power"]))
    return verdicts


def counted(cases: list[tuple[pb.Verdict, float]]) -> dict[str, dict[str, int]]:
    """How often each check spoke, and how many verdicts passed, warned and failed."""
    checks: Counter[str] = Counter()
    for verdict, _ in cases:
        checks.update(names_of_speaking(verdict))
    statuses = Counter(verdict.model for verdict, _ in cases)
    return {"found_by": dict(checks), "counts": dict(statuses)}


def names_of_speaking(verdict: pb.Verdict) -> list[str]:
    """The checks that failed, then those that warned."""
    return [check.name for check in (*verdict.failed, *verdict.warned)]


def predicted(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    new: np.ndarray,
) -> Any:
    """Predictions of a regressor, as its package gives them."""
    if name == BOOSTING:
        models = [
            ensemble.GradientBoostingRegressor(
                loss="quantile",
                alpha=level,
                random_state=0,
            )
            for level in LEVELS
        ]
        quantiles = np.sort([model.fit(x, y).predict(new) for model in models], axis=0)
        return dict(zip(LEVELS, quantiles, strict=True))
    if name == TREES:
        forest = ensemble.RandomForestRegressor(200, random_state=0).fit(x, y)
        return np.stack([tree.predict(new) for tree in forest.estimators_])
    if name == INTERVALS:
        forest = ensemble.RandomForestRegressor(100, random_state=0)
        split = mapie.regression.SplitConformalRegressor(
            forest,
            0.9,
            prefit=False,
        )
        cut = len(y) * 2 // 3
        fitted = split.fit(x[:cut], y[:cut]).conformalize(x[cut:], y[cut:])
        intervals = fitted.predict_interval(new)[1]
        return {0.05: intervals[:, 0, 0], 0.95: intervals[:, 1, 0]}
    kernel = gp.kernels.ConstantKernel(1.0) * gp.kernels.RBF(2.0) + gp.kernels.WhiteKernel(0.1)
    process = gp.GaussianProcessRegressor(kernel, normalize_y=True)
    model = linear_model.BayesianRidge() if name == LINE else process
    mean, sd = model.fit(x, y).predict(new, return_std=True)
    return stats.norm(mean, sd)


def regressors(path: Path, files: list[Path]) -> None:
    """Every regressor on a third of every table, standardised; of large tables the first 1,200 rows of a shuffle."""
    done = {(row["table"], row["regressor"]) for row in read_records(path) if "table" in row}
    tables = {"diabetes": np.column_stack(load_diabetes(return_X_y=True))}
    for file in files:
        options: dict[str, Any] = {"delimiter": ",", "skiprows": 1} if file.suffix == ".csv" else {}
        tables[file.stem if options else file.parent.name] = np.loadtxt(file, **options)
    packages = (BOOSTING, PROCESS, LINE, TREES, INTERVALS)
    for name, regressor in itertools.product(tables, packages):
        if (name, regressor) in done:
            continue
        rows = np.random.default_rng(0).permutation(tables[name])[:1200]
        x = preprocessing.scale(rows[:, :-1])
        y = rows[:, -1]
        cut = len(rows) * 2 // 3
        predictions = predicted(regressor, x[:cut], y[:cut], x[cut:])
        verdict = pb.judge(
            predictions,
            y[cut:],
            x=x[cut:],
            x_train=x[:cut],
            y_train=y[:cut],
        )
        ratio = next(check.value for check in verdict.checks if check.name == "baseline")
        row = {
            "table": name,
            "regressor": regressor,
            "model": verdict.model,
            "rows": len(y) - cut,
            "ratio": ratio,
            "seen": names_of_speaking(verdict),
        }
        append_record(path, row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Whether pb.judge is right.")
    parser.add_argument(
        "--out",
        type=Path,
        default=HERE / "records.jsonl",
    )
    parser.add_argument(
        "--tables",
        type=Path,
        nargs="+",
    )
    options = parser.parse_args()
    if options.tables:
        regressors(options.out, options.tables)
    else:
        study(options.out)
