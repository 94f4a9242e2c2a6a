"""How many new outcomes 90 % sets hold, and how wide they are: conformal ones, and the model's own.

    python scripts/benchmark_conformal.py --data-root DIR           # goes on where the results file ends
    python scripts/benchmark_conformal.py --data synthetic --splits 0-9 --methods laplace nuts

Real sets on their standard splits, and synthetic data of which the model knows everything or has something wrong: noise
with heavy tails, or that grows with the input, under Gaussian noise of one size. One hidden layer of 10 tanh units.
A method with draws of a posterior is fitted once to all training rows: its own intervals, and the conformal ones from
the same draws and rows. Every method is fitted again to three quarters of the rows, the others calibrate it (split).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
REAL = ("yacht", "boston", "energy", "concrete")
SYNTHETIC = ("well specified", "heavy tails", "noise grows")
METHODS = ("nuts", "laplace", "svi", "map", "ensemble", "swag", "mc-dropout")
#: rows that a real set is fitted to at most, drawn at random: the cost of chains
MOST_ROWS = 300
LEVEL = 0.9


def key(record):
    """What makes two records the same work."""
    return record["data"], record["split"], record["method"]


def synthetic(name, seed, num_data=100, num_test=400):
    """Rows of a smooth function of one input; 100 to fit and 400 new ones."""
    import torch

    from pyrobnn.data import Dataset

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1000 + seed)
        x = 4 * torch.rand(num_data + num_test, 1) - 2
        noise = 0.3 * torch.randn(len(x), 1)
        if name == "heavy tails":
            noise = 0.3 * torch.distributions.StudentT(2.0).sample((len(x), 1))
        if name == "noise grows":
            noise = noise * (x + 2.1)
    y = torch.sin(2 * x) + noise
    return Dataset(x[:num_data], y[:num_data], name, "regression"), (x[num_data:], y[num_data:])


def real(name, split, root):
    """A standard split, of at most MOST_ROWS training rows."""
    import torch

    from pyrobnn.data import uci
    from pyrobnn.studies.uci import DATASETS

    train, test = uci(DATASETS[name], split, root)
    if train.num_data > MOST_ROWS:
        order = torch.randperm(train.num_data, generator=torch.Generator().manual_seed(split))
        train = train.subset(order[:MOST_ROWS])
    return train, (test.x, test.y)


def methods():
    """Method → a configuration, and draws of each chain where it has a choice."""
    import pyrobnn as pb

    search = {"num_steps": 2000, "compile": False}
    return {
        "nuts": (pb.NUTS(num_chains=4, num_warmup=200, max_tree_depth=7), 250),
        "laplace": (pb.Laplace(tune="marginal_likelihood", compile=False), 1000),
        "svi": (pb.SVI(num_steps=3000, compile=False), 1000),
        "map": (pb.MAP(**search), None),
        "ensemble": (pb.DeepEnsemble(num_members=5, **search), None),
        "swag": (pb.SWAG(compile=False), 200),
        "mc-dropout": (pb.MCDropout(p=0.05, compile=False), 200),
    }


def fit(method, train, seed):
    """A posterior of the common net in standard units."""
    import pyro.distributions as dist

    import pyrobnn as pb

    units = pb.data.Standardizer.fit(train)
    noise = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    net = pb.networks.mlp(train.x.shape[1], (10,), seed=seed)
    model = pb.BNN(net, pb.priors.FanInNormal(), noise, standardizer=units)
    configured, num_draws = methods()[method]
    options = {} if num_draws is None else {"num_draws": num_draws}
    return configured.fit(model, train.x, train.y, seed=seed, **options)


def run_task(task, root=None):
    """Coverage and width of each kind of set, in standard deviations of the training targets."""
    import torch

    import pyrobnn as pb

    torch.set_num_threads(1)
    seed, name = task["split"], task["data"]
    train, (x, y) = real(name, seed, root) if name in REAL else synthetic(name, seed)
    scale = float(train.y.std())
    found, said, started = {}, {}, time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = fit(task["method"], train, seed)
        tails = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        low, high = (each[:, 0] for each in posterior.predict(x).quantile(tails))
        held = (low <= y[:, 0]) & (y[:, 0] <= high)
        found["own"] = (held.double().mean(), (high - low).double().mean() / scale)
        kept = train.num_data * 3 // 4
        order = torch.randperm(train.num_data, generator=torch.Generator().manual_seed(seed))
        part, rest = train.subset(order[:kept]), train.subset(order[kept:])
        ways = {"split": (fit(task["method"], part, seed), {"calibration": (rest.x, rest.y)})}
        if posterior.meta["claim"] != "none" and posterior.meta["kind"] != "point":
            ways["add-one-in"] = (posterior, {"train": (train.x, train.y)})
        for way, (draws, rows) in ways.items():
            sets = pb.conformal_interval(draws, x, alpha=1 - LEVEL, **rows)
            found[way] = (sets.contains(y).double().mean(), sets.width.mean() / scale)
            if sets.khat is not None:
                said = {"khat_max": float(sets.khat.max()), "ess_min": float(sets.ess.min())}
                said["notes"] = list(sets.notes)
    return {
        **task,
        **{f"{way} {what}": round(float(v), 5) for way, pair in found.items()
           for what, v in zip(("coverage", "width"), pair) if math.isfinite(v)},
        **said,
        "num_train": train.num_data,
        "num_test": len(x),
        "cpu_seconds": round(time.process_time() - started, 1),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def table(records):
    """Mean coverage in % ± its standard error over splits, and mean width, by data and method."""
    from statistics import fmean, stdev

    ways = ("own", "add-one-in", "split")
    lines = [
        "| data | method | splits | its own: holds | width | add-one-in: holds | width | split: holds | width |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups = {}
    for record in records:
        groups.setdefault((record["data"], record["method"]), {})[record["split"]] = record
    for data in (*SYNTHETIC, *REAL):
        for method in METHODS:
            rows = list(groups.get((data, method), {}).values())
            if not rows:
                continue
            cells = []
            for way in ways:
                shares = [100 * row[f"{way} coverage"] for row in rows if f"{way} coverage" in row]
                widths = [row[f"{way} width"] for row in rows if f"{way} width" in row]
                error = f" ± {stdev(shares) / len(shares) ** 0.5:.1f}" if len(shares) > 1 else ""
                cells += (
                    [f"{fmean(shares):.1f}{error}", f"{fmean(widths):.2f}"] if shares and widths else ["", ""]
                )
            lines.append(f"| {data} | {method} | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv=None):
    """Run what is pending, then print the table."""
    from benchmark_uci import splits

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", help="directory of the UCI sets (default: the variable PYROBNN_DATA)")
    parser.add_argument(
        "--data", nargs="+", default=[*SYNTHETIC, *REAL], help="sets; 'synthetic' is all of those"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--splits", type=splits, default=list(range(20)), help="such as 0-4 (default: 0-19)")
    parser.add_argument("--results", default=HERE / "results" / "conformal.jsonl", help="the results file")
    parser.add_argument("--jobs", type=int, default=1, help="processes on this machine")
    parser.add_argument("--table-only", action="store_true", help="print what there is, fit nothing")
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    import functools

    from pyrobnn.studies.uci import Sweep, read_records

    data = [each for name in options.data for each in (SYNTHETIC if name == "synthetic" else [name])]
    for kind, given, known in (("data", data, [*SYNTHETIC, *REAL]), ("method", options.methods, METHODS)):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"unknown {kind} {unknown[0]!r}: choose from {', '.join(known)}")
    failures = 0
    if not options.table_only:
        tasks = [
            {"data": each, "split": split, "method": method}
            for split in options.splits
            for each in data
            for method in options.methods
        ]
        sweep = Sweep(options.results, key, jobs=options.jobs)
        for task, outcome in sweep.run(functools.partial(run_task, root=options.data_root), tasks):
            failures += isinstance(outcome, Exception)
            said = outcome if isinstance(outcome, Exception) else f"{outcome['cpu_seconds']} s"
            print(f"{task['data']} split {task['split']} {task['method']}: {said!s}", flush=True)
    print(table(read_records(options.results)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
