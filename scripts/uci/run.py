"""The UCI regression benchmark: every method on the standard splits, beside the published numbers.

    python scripts/uci/run.py --data-root DIR --data yacht wine --methods map laplace --splits 0-4 --jobs 2
    python scripts/uci/run.py --data-root DIR --budget 3600    # what fits into an hour
    python scripts/uci/run.py --data-root DIR --check 5%       # a random part again; exit code 1 if it differs
    python scripts/uci/run.py --table-only

A data set is one of the usual names, or any folder in the same layout. Each finished fit is one line of the records:
stop the sweep at any moment, and the same command goes on where it was. Hyper-parameters follow one rule per method
(rules.py), from the train part alone; the test part is touched once, after everything is chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.chains import ess, rhat
from pyrobnn.posterior import Posterior

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from records import Sweep, append_record, measured, read_records, share, within_budget  # noqa: E402
from uci import rules  # noqa: E402
from uci.rules import FLOOR, RULES, Record  # noqa: E402

RESULTS = HERE / "records.jsonl"
#: name in the tables → folder of the set; any other folder has its own name in the tables
DATASETS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
#: nats a point, and share of the RMSE, by which a record made again may differ: rounding differs between machines
MOST_NATS = 0.05
MOST_RMSE = 0.05
NEEDS = ("dataset", "split", "method", "scores", "cpu_seconds")


def main(argv: list[str] | None = None) -> int:
    """Run the sweep, then print the tables and the claims."""
    options = parse(argv)
    work = []
    if not options.table_only:
        try:
            work = tasks(
                options.data, options.methods or [FLOOR, *RULES], options.splits, options.data_root
            )
        except ValueError as error:
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
            return 2
    records = read_records(options.results, NEEDS)
    if options.check:
        chosen = set(map(key, work))
        return check([record for record in records if key(record) in chosen], options)
    failures = sweep(work, records, options)
    show(read_records(options.results, NEEDS), [FLOOR, *RULES])
    return 1 if failures else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-root", help="directory of the UCI sets (default: the variable PYROBNN_DATA)")
    add(
        "--data",
        nargs="+",
        default=list(DATASETS),
        metavar="SET",
        help="names or folders",
    )
    add("--methods", nargs="+", help="default: all")
    add(
        "--splits",
        type=splits,
        help="such as 0-4 or 0,7 (default: all that a set has)",
    )
    add(
        "--results",
        type=Path,
        default=RESULTS,
        help="the file of the records",
    )
    add(
        "--jobs",
        type=int,
        default=1,
        help="processes on this machine",
    )
    add(
        "--budget",
        type=float,
        default=math.inf,
        help="seconds: run what fits into them",
    )
    add(
        "--check",
        type=share,
        help="such as 5%%: make a random part of the records again",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of the part that --check draws",
    )
    add(
        "--table-only",
        action="store_true",
        help="print the records, fit nothing",
    )
    return parser.parse_args(argv)


def splits(text: str) -> list[int]:
    """``"0-2,7"`` → [0, 1, 2, 7]."""
    numbers: list[int] = []
    for span in text.split(","):
        start, _, end = span.partition("-")
        end = end or start
        if not (start.isdecimal() and end.isdecimal() and int(start) <= int(end)):
            raise argparse.ArgumentTypeError(f"splits are numbers such as 0-4 or 0,7, got {text!r}")
        numbers.extend(range(int(start), int(end) + 1))
    return numbers


def key(record: Record) -> tuple[Any, ...]:
    """What makes two records the same work."""
    return record["dataset"], record["split"], record["method"]


def tasks(
    datasets: Sequence[str],
    methods: Sequence[str],
    numbers: Sequence[int] | None,
    root: str | Path | None,
) -> list[dict[str, Any]]:
    """Every method on every split of every data set, all methods of a split together."""
    for name in methods:
        if name not in (FLOOR, *RULES):
            raise ValueError(f"unknown method {name!r}: choose from {', '.join([FLOOR, *RULES])}")
    splits_of = {name: rules.uci_splits(DATASETS.get(name, name), root) for name in datasets}
    num_splits = max(splits_of.values(), default=0)
    if numbers is None:
        numbers = range(num_splits)
    for split in numbers:
        if not 0 <= split < num_splits:
            raise ValueError(f"there is no split {split}: they are 0 … {num_splits - 1}")
    work = []
    for split, dataset in itertools.product(numbers, datasets):
        if split < splits_of[dataset]:
            work += [
                {
                    "dataset": dataset,
                    "split": split,
                    "method": method,
                }
                for method in methods
            ]
    return work


def run_task(task: Record, root: str | Path | None = None) -> dict[str, Any]:
    """Fit and score one task of :func:`tasks`; the record as :func:`records.measured` makes it."""
    torch.set_num_threads(1)  # the nets are small, and parallelism is across fits
    folder = DATASETS.get(task["dataset"], task["dataset"])
    train, test = rules.uci(folder, task["split"], root)

    def work() -> dict[str, Any]:
        if task["method"] == FLOOR:
            mean, scale = rules.LinearFloor.fit(train).predict(test.x)
            return {"scores": rounded(rules.mixture_scores(mean[None], scale[None], test.y[:, 0]))}
        rule = dataclasses.replace(
            RULES[task["method"]], num_hidden=rules.uci_num_hidden(folder, root)
        )
        posterior, chosen, _ = rule.fit(train, task["split"])
        prediction = posterior.predict(test.x)
        return {
            "scores": rounded(rules.held_out_scores(prediction, test)),
            "num_hidden": rule.num_hidden,
            "chosen": rule.label(chosen),
            "diagnosis": diagnosis(posterior, prediction.f),
        }

    return measured(
        task,
        work,
        seed=task["split"],
        num_train=train.num_data,
        num_test=test.num_data,
    )


def rounded(scores: Mapping[str, float]) -> dict[str, float]:
    """Six digits are enough, and keep the records readable."""
    return {name: round(value, 6) for name, value in scores.items()}


def diagnosis(posterior: Posterior, f: Tensor) -> dict[str, float]:
    """Of chains: R-hat and ESS of the function at the test inputs."""
    if posterior.num_chains < 2 or posterior.meta.get("iid"):
        return {}
    values = f[..., 0].double().cpu().movedim(-1, 0)
    ratio = rhat(values)
    statistics = {
        "rhat_f_max": ratio.max(),
        "rhat_f_median": np.median(ratio),
        "ess_f_min": ess(values).min(),
    }
    return {
        name: round(float(value), 4) for name, value in statistics.items() if math.isfinite(value)
    }


def sweep(work: Sequence[Record], records: Sequence[Record], options: argparse.Namespace) -> int:
    """Run what has no record yet and fits into the budget; the number of failures."""
    if not work:
        return 0
    runner = Sweep(options.results, key, options.jobs)
    chosen, left_out, seconds = within_budget(
        runner.pending(work), records, options.budget * options.jobs
    )
    print(f"{len(chosen)} fits, about {seconds / options.jobs:.0f} s", flush=True)
    if left_out:
        print(f"{len(left_out)} fits do not fit into the budget")
    failures = 0
    function = functools.partial(run_task, root=options.data_root)
    try:
        for number, (task, outcome) in enumerate(runner.run(function, chosen), 1):
            name = (
                f"[{number}/{len(chosen)}] {task['dataset']} split {task['split']} {task['method']}"
            )
            if isinstance(outcome, Exception):
                failures += 1
                print(f"{name}: {type(outcome).__name__}: {outcome}", flush=True)
            else:
                scores = outcome["scores"]
                print(
                    f"{name}: log density {scores['log_density']:.3f}, RMSE {scores['rmse']:.4g}, "
                    f"{outcome['cpu_seconds']:.1f} CPU s",
                    flush=True,
                )
    except KeyboardInterrupt:
        print("\ninterrupted: what is finished is kept; the same command goes on from here")
        sys.exit(130)
    return failures


def check(records: Sequence[Record], options: argparse.Namespace) -> int:
    """Make a random part of the records again; 1 if one lies beyond the tolerance, 2 if there is none."""
    if not records:
        print(f"no record in {options.results}: nothing to check")
        return 2
    count = min(len(records), max(1, round(options.check * len(records))))
    drawn = random.Random(options.seed).sample(list(records), count)
    drawn, left_out, seconds = within_budget(drawn, records, options.budget)
    print(
        f"{len(drawn)} of {len(records)} records again, about {seconds:.0f} s; {len(left_out)} too dear",
        flush=True,
    )
    failed = 0
    for number, record in enumerate(drawn, 1):
        task = {name: record[name] for name in ("dataset", "split", "method")}
        again = run_task(task, options.data_root)
        wrong = differences(record, again)
        failed += bool(wrong)
        append_record(
            options.results.with_name("checks.jsonl"),
            {
                **task,
                "made": record.get("commit"),
                "commit": again["commit"],
                "met": not wrong,
                "before": record["scores"],
                "scores": again["scores"],
                "finished_at": again["finished_at"],
            },
        )
        exact = "the same number" if again["scores"] == record["scores"] else "within the tolerance"
        print(
            f"[{number}/{len(drawn)}] {' '.join(map(str, task.values()))}: {'; '.join(wrong) or exact}",
            flush=True,
        )
    print(f"{len(drawn) - failed} of {len(drawn)} records were met")
    if failed:
        return 1
    return 0 if drawn else 2


def differences(record: Record, again: Record) -> list[str]:
    """What of a record made again lies beyond the tolerance."""
    old = record["scores"]
    new = again["scores"]
    beyond = []
    if not abs(new["log_density"] - old["log_density"]) <= MOST_NATS:
        beyond.append(f"log density {new['log_density']:.3f} for {old['log_density']:.3f}")
    if not abs(new["rmse"] / old["rmse"] - 1) <= MOST_RMSE:
        beyond.append(f"RMSE {new['rmse']:.4g} for {old['rmse']:.4g}")
    return beyond


def show(records: Sequence[Record], methods: Sequence[str]) -> None:
    """The tables, then the claims and whether they hold."""
    if not records:
        print("no results yet")
        return
    for metric in rules.METRICS:
        print("\n" + rules.markdown(records, metric, methods, rules.published()))
    for claim in rules.claims(records, rules.published()):
        print(claim)


if __name__ == "__main__":
    sys.exit(main())
