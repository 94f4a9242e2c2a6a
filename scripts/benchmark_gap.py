"""Between the data: every method fitted without the middle of a feature, and scored inside and outside of it.

    python scripts/benchmark_gap.py --data-root DIR                 # goes on where the results file ends
    python scripts/benchmark_gap.py --data gap --methods nuts svi-lrt
    python scripts/benchmark_gap.py --table-only

Split k of a set leaves out the rows whose k-th feature lies in the middle third (of features with few values: those
between the two values next to it), and a tenth of the rest; features whose values leave no such gap are passed over.
The first are scored as "inside", the tenth as "outside". ``gap`` is one input with a known function and noise. Methods
and how their hyper-parameters are chosen are those of benchmark_uci.py.

'In-Between' Uncertainty in Bayesian Neural Networks (Foong et al., 2019), https://arxiv.org/abs/1906.11537
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gap.jsonl"
DATASETS = ("gap", "yacht", "energy", "boston", "concrete")
#: share of the rows that a gap takes, at least and at most, and that must be left on either side of it
LEAST, MOST, SIDE = 0.15, 0.55, 0.15
OUTSIDE = 0.1
LEVEL = 0.9


def gaps(x) -> list[tuple[int, float, float]]:
    """Features (of x, (N, feature)) with a gap: its column and the values of its two ends, which stay."""
    import torch

    found = []
    for column, values in enumerate(x.T):
        low, high = torch.quantile(values.double(), torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
        inside = (values > low) & (values < high)
        shares = [float(part.double().mean()) for part in (inside, values <= low, values >= high)]
        if LEAST <= shares[0] <= MOST and min(shares[1:]) >= SIDE:
            found.append((column, float(low), float(high)))
    return found


def load(name: str, split: int, root: str | Path | None = None):
    """The train part, and the test parts ``inside`` and ``outside`` of the gap.

    Raises:
        ValueError: a split beyond the features with a gap.
    """
    import torch

    import pyrobnn as pb
    from pyrobnn.studies.uci import DATASETS as folders

    if name == "gap":
        train = pb.data.gap(seed=split)
        new = torch.Generator().manual_seed(1000 + split)
        x = (6 * torch.rand(1200, 1, generator=new, dtype=torch.float64) - 3).to(train.x.dtype)
        truth = train.true_function(x)
        y = truth + train.true_noise.mean() * torch.randn(truth.shape, generator=new, dtype=truth.dtype)
        every = pb.data.Dataset(x, y, name, "regression")
        inside = (x[:, 0].abs() < 1).nonzero()[:, 0]
        outside = (x[:, 0].abs() > 1).nonzero()[:, 0]
        return train, {"inside": every.subset(inside), "outside": every.subset(outside)}
    full = pb.data.diabetes() if name == "diabetes" else pb.data.uci_all(folders.get(name, name), root)
    found = gaps(full.x)
    if split >= len(found):
        raise ValueError(f"{name} has {len(found)} features with a gap: there is no split {split}")
    column, low, high = found[split]
    within = (full.x[:, column] > low) & (full.x[:, column] < high)
    order = torch.randperm(full.num_data, generator=torch.Generator().manual_seed(split))
    outer = order[~within[order]]
    num_outside = round(OUTSIDE * len(outer))
    return full.subset(outer[num_outside:]), {
        "inside": full.subset(within.nonzero()[:, 0]),
        "outside": full.subset(outer[:num_outside]),
    }


def run_task(task: Mapping[str, Any], root: str | Path | None = None) -> dict[str, Any]:
    """Fit by the method's rule to the rows outside of the gap, score both parts."""
    import torch

    from pyrobnn.studies.uci import RULES, LinearFloor, fits, mixture_scores

    torch.set_num_threads(1)
    train, tests = load(task["dataset"], task["split"], root)
    seed = task["split"]

    def work() -> dict[str, Any]:
        details: dict[str, Any] = {"chosen": {}, "diagnosis": {}}
        if task["method"] == fits.FLOOR:
            floor = LinearFloor.fit(train)
        else:
            posterior, chosen, _ = RULES[task["method"]].fit(train, seed)
            details["chosen"] = chosen.describe()
        found = {}
        for part, test in tests.items():
            if task["method"] == fits.FLOOR:
                mean, scale = (value[None] for value in floor.predict(test.x))
            else:
                prediction = posterior.predict(test.x)
                mean, scale = (v.flatten(0, 1)[..., 0] for v in (prediction.loc, prediction.scale))
                if part == "inside":
                    details["diagnosis"] = fits.diagnosis(posterior, prediction.f)
            values = mixture_scores(mean, scale, test.y[:, 0], level=LEVEL)
            # the sd of the predictive, in units of the training targets': how far the band opens
            spread = (mean.double().var(0, correction=0) + scale.double().square().mean(0)).sqrt().mean()
            values["sd"] = float(spread / train.y.std())
            found |= {f"{part} {name}": value for name, value in values.items()}
        return {"scores": found, **details}

    facts = {"seed": seed, "num_train": train.num_data, "code": code_of(task["method"])}
    return fits.measured(task, work, facts)


def rule_of(method: str) -> str:
    """What marks a record of today's rule of a method."""
    from pyrobnn.studies.uci import fits

    return fits.rule_id(method)


def code_of(method: str) -> str:
    """Eight letters that change with any line that a method's scores depend on."""
    import sweeps

    from pyrobnn.studies.uci import fits

    return sweeps.with_own(fits.code_of(method), gaps, load, run_task)


def methods() -> list[str]:
    """In the order of the table."""
    from pyrobnn.studies.uci import RULES, fits

    return [fits.FLOOR, *RULES]


def table(records: list[dict]) -> str:
    """Means over the splits of a set, by data and method."""
    from statistics import fmean

    import sweeps

    lines = [
        "| data | method | gaps | 90 % interval holds: outside | inside | log density: outside | inside "
        "| sd inside / outside | worst log density inside | R-hat of f |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rules = {method: rule_of(method) for method in methods()}
    have: set[tuple[str, str]] = set()
    names = [*DATASETS, *sorted({r["dataset"] for r in records} - {*DATASETS})]
    for data in names:
        for method in methods():
            rows = [
                r for r in records
                if (r["dataset"], r["method"], r["rule"]) == (data, method, rules[method])
            ]  # fmt: skip
            if not rows:
                continue
            mean = {name: fmean(row["scores"][name] for row in rows) for name in rows[0]["scores"]}
            opens = fmean(row["scores"]["inside sd"] / row["scores"]["outside sd"] for row in rows)
            rhats = [row["diagnosis"]["rhat_f_max"] for row in rows if row["diagnosis"]]
            cells = [
                *(f"{100 * mean[f'{part} coverage']:.0f} %" for part in ("outside", "inside")),
                *(f"{mean[f'{part} log_density']:.2f}" for part in ("outside", "inside")),
                f"{opens:.2f}",
                f"{min(row['scores']['inside log_density'] for row in rows):.2f}",
                f"{max(rhats):.2f}" if rhats else "",
            ]
            mark = sweeps.mark(rows, code_of(method))
            lines.append(f"| {data} | {method}{mark} | {len(rows)} | {' | '.join(cells)} |")
            have.add((data, method))
    return "\n".join([*lines, *sweeps.told(lines), *sweeps.not_run(names, methods(), have)])


def main(argv: list[str] | None = None) -> int:
    """Run what is pending, then print the table."""
    import sweeps
    from benchmark_uci import refuse

    from pyrobnn.studies.uci import fits, read_records

    parser = sweeps.parser(__doc__, RESULTS, DATASETS, methods(), num_splits=2, folders=True)
    parser.add_argument("--data-root", help="directory of the UCI sets (default: the variable PYROBNN_DATA)")
    options = parser.parse_args(argv)
    if not options.table_only:
        try:
            for name, split in itertools.product(options.data, options.splits):
                load(name, split, options.data_root)
        except ValueError as error:
            return refuse(error)
    tasks = [
        {"dataset": data, "split": split, "method": method, "rule": rule_of(method)}
        for split in options.splits
        for data in options.data
        for method in options.methods
    ]
    failures = sweeps.sweep(options, functools.partial(run_task, root=options.data_root), fits.key, tasks)
    print(
        table(
            read_records(
                options.results, ("dataset", "split", "method", "rule", "code", "scores", "diagnosis")
            )
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
