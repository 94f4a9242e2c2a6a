"""Two tables beside the published numbers of bde's ``BdeRegressor``: airfoil noise, and the hours of a bicycle hire.

    python scripts/tables/run.py --data DIR                              # one rule for both tables
    python scripts/tables/run.py --boosting diamonds.csv:price data.txt  # BNNRegressor() beside CatBoost
    python scripts/tables/run.py --small airfoil.csv:target data.txt     # BNNRegressor() beside CatBoost and XGBoost

DIR holds ``airfoil.csv`` (its last column is the target) and ``bike_sharing_hour.csv`` (``hour.csv`` of UCI). Protocol
of the published comparison: one split (a fifth is the test part), y standardised on the train part, errors and
negative log likelihoods in these units, the likelihood that of a normal with the predictive's mean and sd. Each run is
one line of the results file; what is there is not run again.
The rule is ``Rule``'s; its defaults come from held-out parts of airfoil's train part (three splits).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from pandas import DataFrame
    from torch import Tensor

    from pyrobnn.posterior import Posterior
    from pyrobnn.posterior.prediction import Prediction

HERE = Path(__file__).parent
#: table → its file, its target, and the columns that are not features
TABLES = {
    "airfoil": ("airfoil.csv", "target", ()),
    "bike": ("bike_sharing_hour.csv", "cnt", ("instant", "dteday", "casual", "registered")),
}
FORMS = {
    "crps": ".4g",
    "rmse": ".4g",
    "coverage_90": ".1%",
    "cpu": ".0f",
}
SMALL = {
    "rmse": ".3f",
    "nll": ".2f",
    "nll_mixture": ".2f",
    "coverage_90": ".1%",
    "cpu_seconds": ".0f",
}


class Rule(NamedTuple):
    """What is fitted: the features, the net, its prior, the training of the members, the chains that start at them."""

    waves: int = 8
    hidden: tuple[int, ...] = (32, 32, 32, 32)
    activation: str = "silu"
    prior_scale: float = 1.1
    noise: float = 0.1
    members: int = 6
    steps: int = 3000
    batch: int = 128
    lr: float = 0.01
    friction: float = 0.0003
    share: float = 0.5
    warmup: int = 5000
    thinning: int = 75
    draws: int = 200

    def fit(self, x: Tensor, y: Tensor, seed: int) -> Posterior:
        """The posterior of features x (N, feature) and standardised y (N, 1), float32."""
        import pyro.distributions as dist
        from torch import nn

        import pyrobnn as pb
        from pyrobnn.estimators.features import Heads, Layer
        from pyrobnn.model.architectures import ACTIVATIONS

        class Chains(pb.SGHMC):
            share = self.share

        prior = pb.priors.IIDPrior(dist.Normal(0.0, self.prior_scale))
        widths = [x.shape[1], *self.hidden]
        act = ACTIVATIONS[self.activation]
        layers: list[nn.Module] = []
        for num_inputs, num_outputs in zip(widths, self.hidden):
            layers += [Layer(num_inputs, num_outputs), act()]
        layers.append(Layer(widths[-1], 2))
        mean = nn.Sequential(*layers, Heads(self.noise, True))
        mean_and_noise = nn.Sequential(*layers, Heads(self.noise, False))
        members = pb.DeepEnsemble(
            num_members=self.members,
            num_steps=self.steps,
            lr=self.lr,
            batch_size=self.batch,
        )
        known = pb.BNN(mean, prior, pb.likelihoods.HomoskedasticGaussian(self.noise))
        starts = members.fit(known, x, y, seed=seed)
        # the momentum lasts for thousands of steps: the chains have a long way from where the members were trained
        steps: dict[str, Any] = {
            "num_warmup": self.warmup,
            "thinning": self.thinning,
            "friction": self.friction,
        }
        chains = Chains(
            num_chains=self.members,
            preconditioner="rmsprop",
            **steps,
        )
        model = pb.BNN(mean_and_noise, prior, pb.likelihoods.HeteroskedasticGaussian())
        return chains.fit(
            model,
            x,
            y,
            num_draws=self.draws,
            init=starts,
            seed=seed,
        )


def lift(x: np.ndarray, x_test: np.ndarray, waves: int) -> tuple[np.ndarray, np.ndarray]:
    """Features without skew, and ``waves`` sines and cosines of each, (n, feature · (1 + 2 waves)).

    Random Fourier features (Tancik et al., 2020) of frequency N(0, 1), and before them Box and Cox's power where a
    feature is positive, Yeo and Johnson's elsewhere. All are shrunk together: the function is as large under the prior.
    """
    import numpy as np
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PowerTransformer, StandardScaler

    least = x.min(0)
    positive = x.min(0) > 0
    power = make_column_transformer(
        (PowerTransformer("box-cox"), np.flatnonzero(positive)),
        (make_pipeline(StandardScaler(), PowerTransformer()), np.flatnonzero(~positive)),
    ).fit(x)
    frequency = np.random.default_rng(0).normal(size=(x.shape[1], waves))

    def raised(rows: np.ndarray) -> np.ndarray:
        # a new row outside of the logarithm's domain counts as the least that was seen
        plain = power.transform(np.where(positive & (rows <= 0), least, rows))
        angle = (plain[:, :, None] * frequency).reshape(len(plain), -1)
        return np.concatenate([plain, np.sin(angle), np.cos(angle)], 1)

    lifted = raised(x), raised(x_test)
    shrink = math.sqrt(x.shape[1] / lifted[0].var(0).sum())
    return shrink * lifted[0], shrink * lifted[1]


def split(
    spec: str, dropped: tuple[str, ...] = (), standard: bool = False
) -> tuple[str, DataFrame, DataFrame, np.ndarray, np.ndarray]:
    """Name, x, x_test, y, y_test of ``FILE:TARGET`` (else the last column) without ``dropped``; a fifth is held out."""
    import pandas as pd
    from sklearn.model_selection import train_test_split

    file, _, target = spec.partition(":")
    text: dict[str, Any] = {} if file.endswith("csv") else {"sep": r"\s+", "header": None}
    frame = pd.read_csv(file, **text).dropna().rename(columns=str).filter(regex="^(?!Unnamed)")
    name = Path(file).stem if file.endswith("csv") else Path(file).parent.name
    y = frame.pop(target or frame.columns[-1]).to_numpy(float)
    x, x_test, y, y_test = train_test_split(
        frame.drop(columns=[*dropped]),
        y,
        test_size=0.2,
        random_state=0,
    )
    mean, sd = (y.mean(), y.std()) if standard else (0.0, 1.0)
    return name, x, x_test, (y - mean) / sd, (y_test - mean) / sd


def ours(
    rule: Rule,
    x: DataFrame,
    x_test: DataFrame,
    y: np.ndarray,
    y_test: np.ndarray,
    seed: int,
) -> dict[str, Any]:
    """One fit and how good it is: scores, seconds, and whether its chains agree on the function."""
    import torch

    wall = time.perf_counter()
    cpu = time.process_time()
    lifted, lifted_test = lift(x.to_numpy(dtype=float), x_test.to_numpy(dtype=float), rule.waves)
    features = torch.tensor(lifted, dtype=torch.float32)
    features_test = torch.tensor(lifted_test, dtype=torch.float32)
    targets = torch.tensor(y, dtype=torch.float32)[:, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = rule.fit(features, targets, seed)
    spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    record: dict[str, Any] = scores(posterior.predict(features_test), y_test) | spent
    record |= agreement(posterior, features_test[:200])
    record["warnings"] = [str(warning.message) for warning in caught]
    return record


def agreement(posterior: Posterior, x: Tensor) -> dict[str, float]:
    """R-hat and ESS of the function at each of the rows: the median and the worst."""
    import numpy as np
    from arviz_stats.base import array_stats

    f = np.moveaxis(np.asarray(posterior.predict(x).f[..., 0].double()), -1, 0)
    rhat = [
        float(
            array_stats.rhat(
                values,
                chain_axis=0,
                draw_axis=1,
            )
        )
        for values in f
    ]
    ess = [
        float(
            array_stats.ess(
                values,
                chain_axis=0,
                draw_axis=1,
            )
        )
        for values in f
    ]
    return {
        "rhat": float(np.median(rhat)),
        "rhat_max": max(rhat),
        "ess": float(np.median(ess)),
        "ess_min": min(ess),
    }


def scores(prediction: Prediction | SimpleNamespace, y: np.ndarray) -> dict[str, float]:
    """Of the predictive's mean and of a normal of its mean and sd; of the mixture itself the log likelihood too."""
    import numpy as np
    import torch

    mean = prediction.mean[:, 0].double().numpy()
    sd = prediction.var[:, 0].double().sqrt().numpy()
    z = (y - mean) / sd
    return {
        "rmse": float(np.sqrt(np.mean((y - mean) ** 2))),
        "nll": float(np.mean(0.5 * z**2 + np.log(sd)) + 0.5 * math.log(2 * math.pi)),
        "coverage_90": float(np.mean(np.abs(z) < 1.6448536)),
        "nll_mixture": -float(
            prediction.log_prob(torch.tensor(y, dtype=torch.float32)[:, None]).mean()
        ),
    }


def small(spec: str, max_seconds: float | None) -> list[dict[str, Any]]:
    """``BNNRegressor()`` on ``FILE:TARGET``, y in standard units; without a limit also CatBoost and XGBoost."""
    import numpy as np
    import torch
    from xgboost import XGBRegressor

    from pyrobnn import BNNRegressor

    name, x, x_test, y, y_test = split(spec, standard=True)
    rows_of_models = []
    models = [
        BNNRegressor(random_state=0, max_seconds=max_seconds),
        catboost(x),
        XGBRegressor(n_jobs=1),
    ]
    for model in models[: 1 if max_seconds else 3]:
        wall = time.perf_counter()
        cpu = time.process_time()
        model.fit(x, y)
        row = {
            "table": name,
            "method": type(model).__name__,
            "rows": len(x),
            "max_seconds": max_seconds,
        }
        row |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        if isinstance(model, BNNRegressor):
            row |= {"reason": model.method_reason_}
            row |= scores(
                model.posterior_.predict(torch.tensor(x_test.to_numpy(), dtype=torch.float32)),
                y_test,
            )
        elif isinstance(model, XGBRegressor):
            row |= {"rmse": float(np.sqrt(np.mean((y_test - model.predict(x_test)) ** 2)))}
        else:
            mean, var = torch.tensor(model.predict(x_test)).unsqueeze(-1).unbind(1)
            normal = torch.distributions.Normal(mean, var.sqrt())
            row |= scores(
                SimpleNamespace(
                    mean=mean,
                    var=var,
                    log_prob=normal.log_prob,
                ),
                y_test,
            )
        rows_of_models.append(row)
    return rows_of_models


def catboost(x: DataFrame) -> Any:
    """CatBoost with a normal's mean and variance, at its defaults."""
    from catboost import CatBoostRegressor

    options = {
        "loss_function": "RMSEWithUncertainty",
        "random_seed": 0,
        "thread_count": 1,
        "verbose": 0,
    }
    options |= {
        "cat_features": list(x.select_dtypes(exclude="number")),
        "allow_writing_files": False,
    }
    return CatBoostRegressor(**options)


def small_table(records: list[dict]) -> str:
    """Markdown: a row a table, method and time limit."""
    lines = [
        "| table | method | RMSE | NLL | NLL of the mixture | mean ± 1.64 sd covers | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(
        records, key=lambda row: (row["table"], row["method"], row["max_seconds"] or 0)
    ):
        limit = row["max_seconds"] and f", {row['max_seconds']:.0f} s: took {row['seconds']:.0f}"
        cells = []
        for key, form in SMALL.items():
            cells.append(format(row[key], form) if key in row else "")
        lines.append(f"| {row['table']} | {row['method']}{limit or ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def boosting(spec: str) -> list[dict[str, Any]]:
    """``BNNRegressor()`` and CatBoost on 2,000 held-out rows; the CRPS is twice the mean pinball loss at 40 levels."""
    import numpy as np
    from scipy.stats import norm

    from pyrobnn.estimators import BNNRegressor

    name, x, x_test, y, y_test = split(spec)
    levels = np.array([0.05, 0.95, *(np.arange(40) + 0.5) / 40])
    x_test = x_test[:2000]
    y_test = y_test[:2000]
    rows_of_models = []
    for model in (BNNRegressor(random_state=0), catboost(x)):
        cpu = time.process_time()
        model.fit(x, y)
        cpu = time.process_time() - cpu
        mean = model.predict(x_test)
        if not isinstance(model, BNNRegressor):
            mean, var = mean.T
            quantiles = norm(mean[:, None], np.sqrt(var)[:, None]).ppf(levels)
        else:
            quantiles = model.predict_quantiles(x_test, tuple(levels))
        row = {
            "table": name,
            "method": type(model).__name__,
            "rows": len(x),
            "cpu": cpu,
        }
        row |= pinball_scores(y_test, mean, quantiles, levels)
        rows_of_models.append(row | {"reason": getattr(model, "method_reason_", "")})
    return rows_of_models


def pinball_scores(
    y: np.ndarray,
    mean: np.ndarray,
    quantiles: np.ndarray,
    levels: np.ndarray,
) -> dict[str, float]:
    """CRPS by quantiles (row, level) but the first two, which are the ends of the 90 % interval; RMSE of the mean."""
    import numpy as np

    error = y[:, None] - quantiles
    crps = 2 * np.maximum(levels * error, (levels - 1) * error)[:, 2:].mean()
    covered = (error[:, 0] >= 0) & (error[:, 1] <= 0)
    rmse = np.sqrt(np.mean((y - mean) ** 2))
    return {
        "crps": crps,
        "rmse": rmse,
        "coverage_90": covered.mean(),
    }


def beside_boosting(records: list[dict]) -> str:
    """Markdown: a row a table, BNNRegressor() first and CatBoost second."""
    lines = [
        "| table | rows | CRPS | ratio | RMSE | 90 % covers | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for ours, cat in zip(records[::2], records[1::2]):
        cells = [f"{ours[key]:{form}}, {cat[key]:{form}}" for key, form in FORMS.items()]
        cells.insert(1, f"{ours['crps'] / cat['crps']:.2f}")
        lines.append(f"| {ours['table']} | {ours['rows']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def over_seeds(records: list[dict]) -> dict[str, Any]:
    """Means over runs that differ by their seed and threads; the worst of what says whether the chains agree."""
    means = ("rmse", "nll", "nll_mixture", "coverage_90", "rhat", "seconds", "cpu_seconds")
    folds = dict.fromkeys(means, fmean) | {"rhat_max": max, "ess_min": min}
    row = dict(records[-1])
    for key, fold in folds.items():
        row[key] = fold([record[key] for record in records])
    if len(records) > 1:
        row["method"] += f", mean of {len(records)} seeds"
    return row


def table(records: list[dict]) -> str:
    """Markdown: the published rows, then ours, of each the rule that was run last."""
    published = json.loads((HERE / "published.json").read_text(encoding="utf-8"))["rows"]
    lines = [
        "| table | method | RMSE | NLL (mixture) | 90 % covers | R-hat of f, median (max) | least ESS | s (CPU s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    measured = [record for record in records if record["part"] == "test"]
    for name in TABLES:
        lines += [line_of(row) for row in published if row["table"] == name]
        of_table = [record for record in measured if record["table"] == name]
        latest = {record["method"]: record["rule"] for record in of_table}
        for method, rule in latest.items():
            key = {"method": method, "rule": rule}
            runs = [record for record in of_table if key.items() <= record.items()]
            lines.append(line_of(over_seeds(runs)))
    return "\n".join(lines)


def line_of(row: dict) -> str:
    """Markdown of one row; a published one, which has no part, has fewer numbers and is in italics."""
    nll = f"{row['nll']:.4f}" if "nll" in row else ""
    cells = " |  | "
    cpu = "on 10 cores"
    method = f"*{row['method']}*"
    if "part" in row:
        cells = f"{row['coverage_90']:.1%} | {row['rhat']:.2f} ({row['rhat_max']:.2f}) | {row['ess_min']:.0f}"
        nll = f"{nll} ({row['nll_mixture']:.4f})"
        cpu = f"({row['cpu_seconds']:.0f})"
        method = row["method"]
    return f"| {row['table']} | {method} | {row['rmse']:.4f} | {nll} | {cells} | {row['seconds']:.0f} {cpu} |"


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of the two files",
    )
    parser.add_argument(
        "--boosting",
        nargs="*",
        metavar="FILE:TARGET",
        default=[],
    )
    parser.add_argument(
        "--small",
        nargs="*",
        metavar="FILE:TARGET",
        default=[],
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        help="of each fit of --small",
    )
    parser.add_argument(
        "--tables",
        nargs="+",
        choices=TABLES,
        default=list(TABLES),
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0],
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    sys.path.insert(0, str(HERE.parent))
    from records import append_record, read_records

    results = HERE / "records.jsonl"
    for spec in options.boosting:
        for row in boosting(spec):
            append_record(HERE / "boosting.jsonl", row)
    for spec in options.small:
        for row in small(spec, options.max_seconds):
            append_record(HERE / "small.jsonl", row)
    if options.data:
        for name, seed in itertools.product(options.tables, options.seeds):
            run_rule(results, name, seed, options)
    print(table(read_records(results)))


def run_rule(
    results: Path,
    name: str,
    seed: int,
    options: argparse.Namespace,
) -> None:
    """Fit a table by the rule and append the record, unless the file has it."""
    from records import append_record, read_records

    rule = Rule()
    fields = ",".join(f"{field}={value}" for field, value in rule._asdict().items())
    key = {
        "table": name,
        "method": "pyrobnn",
        "part": "test",
        "seed": seed,
        "threads": options.threads,
        "rule": fields.replace(" ", ""),
    }
    if not any(key.items() <= record.items() for record in read_records(results)):
        file, target, dropped = TABLES[name]
        data = split(
            f"{options.data / file}:{target}",
            dropped,
            standard=True,
        )
        append_record(results, key | ours(rule, *data[1:], seed))


if __name__ == "__main__":
    sys.exit(main())
