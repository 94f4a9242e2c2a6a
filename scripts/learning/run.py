"""Bayesian optimisation and active learning by a posterior that is updated row by row, beside Gaussian processes.

    python scripts/learning/run.py                     # goes on where the records end, seed by seed

Needs BoTorch (``pip install 'pyrobnn[botorch]'``) and, for the tables, ``PYROBNN_DATA``, the directory of the UCI sets.

- ``optimise``: the lowest value of Hartmann-6 and Ackley-10 (on [-5, 10]) by 10 Sobol points and 50 steps of a row;
- ``active``: the rows of a table whose targets are asked for, ten at a time, from 20 to 100, judged on 100 others;
- ``step``: CPU seconds of one new row on a 1-50-1 net of 100, before and after the update is compiled.

The net has a layer of 50 units, tanh for a table, sine for a function. SMC fits it to the first rows: of a table with
that prior and noise which have most evidence there; of a function, which has no noise, with a tenth of the sd of y, and
again at 20 points. ``posterior.update`` learns the other rows. Optimisers search alike, for the log of expected
improvement or (Thompson) where a function drawn from the posterior is lowest.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from learning.active_learning import LEARNERS, active  # noqa: E402
from learning.claim_tables import table  # noqa: E402
from learning.optimisation import FUNCTIONS, OPTIMISERS, optimise  # noqa: E402
from learning.update_steps import step  # noqa: E402
from records import Record, Sweep, measured, read_records  # noqa: E402

RESULTS = Path(__file__).with_name("records.jsonl")
PARTS: dict[str, Callable[[str, str, int], dict[str, Any]]] = {
    function.__name__: function for function in (optimise, active, step)
}


def tasks(parts: list[str], seeds: list[int]) -> list[Record]:
    """All of a seed before any of the next; steps of the first alone."""
    cells = {
        "step": [("1-50-1", "Laplace"), ("1-50-1", "NUTS")],
        "optimise": list(itertools.product(FUNCTIONS, OPTIMISERS)),
        "active": list(itertools.product(("concrete", "energy", "yacht"), LEARNERS)),
    }
    work: list[Record] = []
    for seed, name in itertools.product(seeds, parts):
        if name == "step" and seed != seeds[0]:
            continue
        for problem, method in cells[name]:
            work.append(
                {
                    "part": name,
                    "problem": problem,
                    "method": method,
                    "seed": seed,
                }
            )
    return work


def run_task(task: Record) -> Record:
    """The record of one task of :func:`tasks`."""
    function = PARTS[task["part"]]
    return measured(task, partial(function, task["problem"], task["method"], task["seed"]))


def main() -> None:
    """Run what is not in the records yet; print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=list(PARTS),
        choices=PARTS,
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=list(range(1, 11)),
    )  # pilots had 0
    options = parser.parse_args()
    torch.set_num_threads(1)
    sweep = Sweep(RESULTS, lambda row: (row["part"], row["problem"], row["method"], row["seed"]))
    todo = tasks(options.parts, options.seeds)
    for task, outcome in sweep.run(run_task, todo):
        if isinstance(outcome, Exception):
            text = f"failed: {outcome}"
        else:
            text = f"{outcome['cpu_seconds']:.0f} CPU s"
        print(*task.values(), text, sep="  ", flush=True)
    print(table(read_records(RESULTS)))


if __name__ == "__main__":
    main()
