"""A random part of the records made again, and what of them differs."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from records import Record, append_record, within_budget
from uci.scored_tasks import run_task

#: nats a point, and share of the RMSE, by which a record made again may differ: rounding differs between machines
MOST_NATS = 0.05
MOST_RMSE = 0.05


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
