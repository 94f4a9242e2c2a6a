"""Two tables beside the published numbers of bde's ``BdeRegressor``: airfoil noise, and the hours of a bicycle hire.

    python scripts/tables/run.py --data DIR                   # one rule for both tables, on the test part
    python scripts/tables/run.py --data DIR --validate        # on a fifth of the train part: to settle the rule

DIR holds ``airfoil.csv`` (its last column is the target) and ``bike_sharing_hour.csv`` (``hour.csv`` of UCI). Protocol
of the published comparison: one split (a fifth is the test part), y standardised on the train part, errors and
negative log likelihoods in these units, the likelihood that of a normal with the predictive's mean and sd. Each run is
one line of the results file; what is there is not run again.
The rule is ``Rule``'s; its defaults come from held-out parts of airfoil's train part (three splits).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
#: table → its file, its target, and the columns that are no features
TABLES = {
    "airfoil": ("airfoil.csv", "target", ()),
    "bike": ("bike_sharing_hour.csv", "cnt", ("instant", "dteday", "casual", "registered")),
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

    @property
    def name(self) -> str:
        """Of its settings, for the records."""
        return ",".join(f"{key}={value}" for key, value in self._asdict().items()).replace(" ", "")

    def fit(self, x: Any, y: Any, seed: int) -> Any:
        """The posterior of features x (N, feature) and standardised y (N, 1), float32."""
        import pyro.distributions as dist
        from torch import nn

        import pyrobnn as pb
        from pyrobnn.estimators.wide import Heads

        class Chains(pb.SGHMC):
            share = self.share

        prior = pb.priors.IIDPrior(dist.Normal(0.0, self.prior_scale))
        layers = wide_layers(x.shape[1], self.hidden, self.activation)
        mean, both = (nn.Sequential(*layers, Heads(self.noise, mean_only)) for mean_only in (True, False))
        members = pb.DeepEnsemble(num_members=self.members, num_steps=self.steps, lr=self.lr, batch_size=self.batch)
        known = pb.BNN(mean, prior, pb.likelihoods.HomoskedasticGaussian(self.noise))
        starts = members.fit(known, x, y, seed=seed)
        if not self.draws:
            return starts
        # the momentum lasts for thousands of steps: the chains have a long way from where the members were trained
        chains = Chains(
            num_chains=self.members,
            num_warmup=self.warmup,
            thinning=self.thinning,
            friction=self.friction,
            preconditioner="rmsprop",
        )
        model = pb.BNN(both, prior, pb.likelihoods.HeteroskedasticGaussian())
        return chains.fit(model, x, y, num_draws=self.draws, init=starts, seed=seed)


def wide_layers(num_inputs: int, hidden: tuple[int, ...], activation: str) -> list[Any]:
    """The layers of a net of mean and scale."""
    from pyrobnn.estimators.wide import Layer
    from pyrobnn.networks import ACTIVATIONS

    widths = [num_inputs, *hidden]
    layers = [part for pair in zip(widths, hidden) for part in (Layer(*pair), ACTIVATIONS[activation]())]
    return [*layers, Layer(widths[-1], 2)]


def lift(x: Any, x_test: Any, waves: int) -> tuple[Any, Any]:
    """Features without skew, and ``waves`` sines and cosines of each, (n, feature · (1 + 2 waves)).

    Random Fourier features (Tancik et al., 2020) of frequency N(0, 1), and before them Box and Cox's power where a
    feature is positive, Yeo and Johnson's elsewhere. All are shrunk together: the function is as large under the prior.
    """
    import numpy as np
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PowerTransformer, StandardScaler

    least = x.min(0)
    positive = least > 0
    power = make_column_transformer(
        (PowerTransformer("box-cox"), np.flatnonzero(positive)),
        (make_pipeline(StandardScaler(), PowerTransformer()), np.flatnonzero(~positive)),
    ).fit(x)
    frequency = np.random.default_rng(0).normal(size=(x.shape[1], waves))

    def raised(of: Any) -> Any:
        # a new row outside of the logarithm's domain counts as the least that was seen
        plain = power.transform(np.where(positive & (of <= 0), least, of))
        angle = (plain[:, :, None] * frequency).reshape(len(plain), -1)
        return np.concatenate([plain, np.sin(angle), np.cos(angle)], 1)

    lifted = raised(x), raised(x_test)
    shrink = math.sqrt(x.shape[1] / lifted[0].var(0).sum())
    return shrink * lifted[0], shrink * lifted[1]


def load(folder: Path, table: str, validate: bool) -> tuple[Any, Any, Any, Any]:
    """x, y, x_test, y_test, float64, (n, feature) in units of the file and (n,) in standard units."""
    import pandas as pd
    from sklearn.model_selection import train_test_split

    file, target, others = TABLES[table]
    frame = pd.read_csv(folder / file)
    y = frame[target].to_numpy(dtype=float)
    x = frame.drop(columns=[target, *others]).to_numpy(dtype=float)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0)
    if validate:
        x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=1)
    mean, sd = y.mean(), y.std()
    return x, (y - mean) / sd, x_test, (y_test - mean) / sd


def scores(mean: Any, sd: Any, y: Any) -> dict[str, float]:
    """RMSE, negative log likelihood of a normal, and coverage of its central 90 %; arrays (n,)."""
    import numpy as np

    z = (y - mean) / sd
    return {
        "rmse": float(np.sqrt(np.mean((y - mean) ** 2))),
        "nll": float(np.mean(0.5 * z**2 + np.log(sd)) + 0.5 * math.log(2 * math.pi)),
        "coverage_90": float(np.mean(np.abs(z) < 1.6448536)),
    }


def ours(rule: Rule, data: tuple[Any, Any, Any, Any], seed: int) -> dict[str, Any]:
    """One fit and how good it is: scores, seconds, and whether its chains agree on the function."""
    import numpy as np
    import torch

    wall, cpu = time.perf_counter(), time.process_time()
    x, x_test = (torch.tensor(part, dtype=torch.float32) for part in lift(data[0], data[2], rule.waves))
    y = torch.tensor(data[1], dtype=torch.float32)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        posterior = rule.fit(x, y[:, None], seed)
    spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    prediction = posterior.predict(x_test)
    mean, sd = prediction.mean[:, 0].double().numpy(), prediction.var[:, 0].double().sqrt().numpy()
    mixture = -float(prediction.log_prob(torch.tensor(data[3], dtype=torch.float32)[:, None]).mean())
    found = scores(mean, sd, data[3]) | {"nll_mixture": mixture} | spent
    if posterior.num_draws > 1 and posterior.num_chains > 1:
        found |= agreement(np.asarray(posterior.predict(x_test[:200]).f[..., 0].double()))
    return found | {"warnings": [str(each.message) for each in told]}


def agreement(f: Any) -> dict[str, float]:
    """R-hat and bulk ESS of the function's mean at the probes, f (chain, draw, probe)."""
    import numpy as np
    from arviz_stats.base import array_stats

    axes = {"chain_axis": 0, "draw_axis": 1}
    rhat = [float(array_stats.rhat(probe, **axes)) for probe in np.moveaxis(f, -1, 0)]
    ess = [float(array_stats.ess(probe, **axes)) for probe in np.moveaxis(f, -1, 0)]
    return {"rhat": float(np.median(rhat)), "rhat_max": max(rhat), "ess": float(np.median(ess)), "ess_min": min(ess)}


def over_seeds(records: list[dict]) -> dict[str, Any]:
    """Means over runs that differ by their seed and threads; the worst of what says whether the chains agree."""
    found = dict(records[-1])
    finished = [record for record in records if "rmse" in record]
    for key in ("rmse", "nll", "nll_mixture", "coverage_90", "rhat", "seconds", "cpu_seconds"):
        if all(key in record for record in finished or [{}]):
            found[key] = sum(record[key] for record in finished) / len(finished)
    for key, worst in (("rhat_max", max), ("ess_min", min)):
        if all(key in record for record in finished or [{}]):
            found[key] = worst(record[key] for record in finished)
    if len(finished) > 1:
        found["method"] += f", mean of {len(finished)} seeds"
    return found


def table(records: list[dict]) -> str:
    """Markdown: the published rows, then ours, of each the rule that was run last."""
    published = json.loads((HERE / "published.json").read_text(encoding="utf-8"))["rows"]
    lines = [
        "| table | method | RMSE | NLL (mixture) | 90 % covers | R-hat of f, median (max) | least ESS | s (CPU s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    measured = [record for record in records if record["part"] == "test"]
    latest = {(record["table"], record["method"]): record["rule"] for record in measured}
    for name in TABLES:
        rows = [row for row in published if row["table"] == name]
        for (of, method), rule in latest.items():
            key = {"table": of, "method": method, "rule": rule}
            if of == name:
                rows.append(over_seeds([record for record in measured if key.items() <= record.items()]))
        for row in rows:
            here = "part" in row
            if "rmse" not in row:
                lines.append(f"| {name} | {row['method']} | {row['stopped']} | | | | | |")
                continue
            nll = f"{row['nll']:.4f}" if "nll" in row else ""
            nll += f" ({row['nll_mixture']:.4f})" if "nll_mixture" in row else ""
            covers = f"{row['coverage_90']:.1%}" if here else ""
            rhat = f"{row['rhat']:.2f} ({row['rhat_max']:.2f})" if "rhat" in row else ""
            ess = f"{row['ess_min']:.0f}" if "ess_min" in row else ""
            cpu = f" ({row['cpu_seconds']:.0f})" if here else " on 10 cores"
            method = row["method"] if here else f"*{row['method']}*"
            lines.append(
                f"| {name} | {method} | {row['rmse']:.4f} | {nll} | {covers} | {rhat} | {ess} "
                f"| {row['seconds']:.0f}{cpu} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--validate", action="store_true", help="score on a fifth of the train part instead")
    parser.add_argument("--results", type=Path, default=HERE / "records.jsonl")
    for name, default in Rule._field_defaults.items():
        kind = {"nargs": "+", "type": int} if name == "hidden" else {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **kind)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    sys.path.insert(0, str(HERE.parent))
    from records import append_record, read_records

    rule = Rule(**{name: getattr(options, name) for name in Rule._fields})._replace(hidden=tuple(options.hidden))
    part = "validation" if options.validate else "test"
    for name in options.tables:
        for seed in options.seeds:
            key = {"table": name, "method": "pyrobnn", "part": part, "seed": seed, "threads": options.threads}
            key["rule"] = rule.name
            if any(key.items() <= record.items() for record in read_records(options.results)):
                continue
            found = ours(rule, load(options.data, name, options.validate), seed)
            append_record(options.results, key | found)
            print(json.dumps(key | found), flush=True)
    print(table(read_records(options.results)))


if __name__ == "__main__":
    sys.exit(main())
