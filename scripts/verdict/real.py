"""Verdicts on real fits: ordinary problems, approximations at their defaults, the truth a converged NUTS run.

    python scripts/verdict/real.py --folder FOLDER    # NUTS runs are kept in the folder, outside of the repository
    python scripts/verdict/real.py --refine 10    # and each fit is refined

One JSON line a fit: how far it is from the truth, what the verdict says without any reference, and the CPU seconds that
fit and judging took. What the file has is not run again.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pyrobnn as pb
from pyrobnn.core.chains import rhat

sys.path.insert(0, str(Path(__file__).parents[1]))

from records import append_record, read_records  # noqa: E402
from verdict.claim_tables import answers_by_class, distances  # noqa: E402
from verdict.real_problems import METHODS, PROBLEMS, Problem  # noqa: E402

RESULTS = Path(__file__).with_name("real.jsonl")
#: R-hat of the function of runs that count as converged
CONVERGED = 1.02


def true_function(name: str, problem: Problem, folder: Path) -> Tensor | None:
    """Draws of the function (draw, probe) by NUTS, kept in the folder; None where it has not converged."""
    path = folder / f"{name}.pt"
    if not path.exists():
        method = pb.NUTS(
            num_chains=8,
            until="converged",
            max_seconds=600,
        )
        x, y = problem.data()
        posterior = method.fit(problem.model(), x, y, seed=1)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(posterior.function(problem.probes())[..., 0], path)
    f = torch.load(path)
    converged = rhat(f.permute(2, 0, 1).double().numpy()).max() <= CONVERGED
    return f.double().flatten(0, 1) if converged else None


def distance(f: Tensor, true: Tensor) -> dict[str, Any]:
    """How far draws of the function (draw, probe) are from true ones: medians, and which class that is."""
    shift = ((f.mean(0) - true.mean(0)).abs() / true.std(0)).numpy()
    ratio = (f.std(0, correction=0) / true.std(0)).numpy()
    middle = float(np.median(ratio))
    near = np.mean((ratio > 0.67) & (ratio < 1.5))
    far = np.mean((ratio < 0.5) | (ratio > 2.0))
    typical = float(np.median(shift))
    kind = "between"
    if typical > 0.5 or not 0.67 <= middle <= 1.5 or far >= 0.25:
        kind = "wrong"
    elif typical < 0.2 and 0.85 <= middle <= 1.18 and near >= 0.9:
        kind = "right"
    return {"class": kind, "shift": round(typical, 3), "ratio": round(middle, 3)}


def fitted(
    name: str,
    method: str,
    true: Tensor,
    refine: float | None,
) -> dict[str, Any]:
    """The record of one fit."""
    problem = PROBLEMS[name]
    x, y = problem.data()
    begun = time.process_time()
    posterior = METHODS[method].fit(problem.model(), x, y)
    seconds = time.process_time() - begun
    record = {"problem": name, "method": method, "fit_seconds": round(seconds, 2)}
    record |= judged(posterior, problem, true)
    if refine is not None:
        refined = posterior.refine(refine)
        facts = refined.meta["refine"]
        names = ("seconds", "arrived", "nested_rhat", "transitions")
        record["refined"] = judged(refined, problem, true) | {key: facts[key] for key in names}
    return record


def judged(posterior: pb.Posterior, problem: Problem, true: Tensor) -> dict[str, Any]:
    """How far a posterior is from the truth, and its verdict without a reference."""
    x, y = problem.data()
    record = distance(posterior.function(problem.probes())[..., 0].double().flatten(0, 1), true)
    begun = time.process_time()
    verdict = pb.diagnose(posterior.to_datatree(x, y, num_prior_draws=0))
    record["judging_seconds"] = round(time.process_time() - begun, 2)
    record["verdict"] = verdict.shown_answer("draws")
    return record


def main() -> None:
    """Run what the records lack, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "pyrobnn_truth")
    parser.add_argument("--refine", type=float, help="seconds")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    done: set[tuple[str, str]] = {
        (row["problem"], row["method"]) for row in read_records(options.results)
    }
    for name in options.problems:
        true = true_function(name, PROBLEMS[name], options.folder)
        for method in METHODS:
            if true is not None and (name, method) not in done:
                record: Mapping[str, Any] = fitted(name, method, true, options.refine)
                append_record(options.results, record)
    records = read_records(options.results)
    print(answers_by_class(records), distances(records), sep="\n\n")
    refined = [record["refined"] for record in records if "refined" in record]
    if refined:
        print("\nrefined\n" + answers_by_class(refined))


if __name__ == "__main__":
    main()
