"""What ``BNNRegressor().fit`` costs and whether its intervals hold, from a hundred rows to a million.

    python scripts/benchmark_rows.py                   # goes on where the results file ends
    python scripts/benchmark_rows.py --rows 100 10000
    python scripts/benchmark_rows.py --table-only

The task is Friedman's first (ten inputs, of which five count; noise of standard deviation 1), the settings are the
defaults. Every size has a process of its own, with one thread, so that its peak memory is its own. It is judged on
5,000 new rows: the share that 90 % intervals hold, and the error of the predictive mean against the function
without noise.

Reference: Multivariate Adaptive Regression Splines (Friedman, 1991).
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "rows.jsonl"
ROWS, NEW, SEED = (100, 10_000, 100_000, 1_000_000), 5000, 0


def run_task(task):
    """The record of a fit of so many rows."""
    import torch

    from pyrobnn.studies.uci import fits

    torch.set_num_threads(1)
    return fits.measured(task, lambda: judged(task["rows"]), {"seed": SEED})


def judged(num):
    """Fit the defaults to so many rows, and score them on new ones."""
    import time

    import numpy as np
    from sklearn.datasets import make_friedman1

    import pyrobnn as pb

    x, y = make_friedman1(num, noise=1.0, random_state=SEED)
    new, seen = make_friedman1(NEW, noise=1.0, random_state=SEED + 1)
    truth = make_friedman1(NEW, noise=0.0, random_state=SEED + 1)[1]
    wall, cpu = time.perf_counter(), time.process_time()
    model = pb.BNNRegressor(random_state=SEED).fit(x, y)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    low, high = model.predict_interval(new).T
    error = model.predict(new) - truth
    scores = {
        "coverage": float(((low <= seen) & (seen <= high)).mean()),
        "rmse of the truth": float(np.sqrt((error**2).mean())),
        "width": float(np.median(high - low)),
        "fit seconds": wall,
        "fit cpu seconds": cpu,
    }
    posterior = model.posterior_
    return {
        "scores": scores,
        "method": type(model.method_).__name__,
        "why": model.method_reason_,
        "num_weights": posterior.bnn.num_weights,
    }


def table(records):
    """A row for each number of rows; the latest record of each counts."""
    lines = [
        "| rows | method | fit, CPU s | peak memory, GB | 90 % intervals hold | error of the mean | told |",
        "|---|---|---|---|---|---|---|",
    ]
    for rows, record in sorted({record["rows"]: record for record in records}.items()):
        scores = record["scores"]
        memory = "" if record["peak_mb"] is None else f"{record['peak_mb'] / 1024:.1f}"
        lines.append(
            f"| {rows:,} | {record['method']} | {scores['fit cpu seconds']:.0f} | {memory} | "
            f"{scores['coverage']:.1%} | {scores['rmse of the truth']:.3f} | {len(record['warnings']) or 'nothing'} |"
        )
    return "\n".join(lines)


def main(argv=None):
    """Run what is pending, one size at a time, then print the table."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="how many rows are fitted")
    found.add_argument("--results", type=Path, default=RESULTS, help="the results file")
    found.add_argument("--table-only", action="store_true", help="print what there is, fit nothing")
    options = found.parse_args(argv)
    from pyrobnn.studies.uci import append_record, read_records

    records = read_records(options.results) if options.results.exists() else []
    known = {record["rows"] for record in records}
    for rows in options.rows:
        if rows in known or options.table_only:
            continue
        os.environ["OMP_NUM_THREADS"] = "1"  # before the child loads torch
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            record = pool.submit(run_task, {"rows": rows}).result()
        append_record(options.results, record)
        print(f"{rows:,} rows: {record['cpu_seconds']:.1f} CPU s", flush=True)
    print(table(read_records(options.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
