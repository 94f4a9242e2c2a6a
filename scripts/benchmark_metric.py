"""Effective draws per gradient of each mass matrix of NUTS, on nets, a hierarchical program and reference posteriors.

    python scripts/benchmark_metric.py --results scripts/results/metric.jsonl --posteriors FOLDER --boston FILE

Effective draws are those of the slowest function value of a net and of the slowest site value of a program; gradients
are those of the draws, without the warm-up, whose own are a column of the record. Both are counts: they do not depend
on the machine. Reference posteriors (see benchmark_posteriordb.py) run in float64 and are judged as there, so that a
mass matrix that is fast and wrong is seen. What the results file already has is not run again.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from benchmark_nuts import CASES
from sampler_cases import PROGRAMS, Records, parser, problem, runs, told

from pyrobnn.inference.hmc.hooks import slowest_ess


def row(name, mass_matrix, seed, held, reference, drawn):
    """What a run gives: effective draws, gradients of its draws and of its warm-up, and how it was judged."""
    found, ess = told(drawn), slowest_ess(held, drawn.positions)
    record = {
        "case": name,
        "mass_matrix": mass_matrix,
        "seed": seed,
        "draws": drawn.stats.shape[1],
        "ess": round(ess, 1),
        "ess per 1000 gradients": round(1000 * ess / found["gradients"], 4),
        **found,
    }
    if reference is not None:
        from benchmark_posteriordb import judged, scalars

        rhat, bulk, (errors, where) = judged(scalars(held.density.constrain(drawn.positions)), reference)
        right = rhat <= 1.05 and bulk >= 100 and errors <= 4
        record |= {"right": bool(right), "rhat": round(rhat, 3), "errors": round(errors, 2), "where": where}
    return record


def main():
    """Print the rows; write what is asked for."""
    options = parser(__doc__, None, seeds=3)
    options.add_argument(
        "--posteriors", type=Path, help="folder of reference posteriors: every one is a case"
    )
    options.add_argument("--boston", type=Path, help="the table of boston, which is then a case")
    options.add_argument("--mass-matrices", nargs="+", default=["diag", "low_rank", "auto"])
    options = options.parse_args()
    posteriors = sorted(options.posteriors.glob("*.json")) if options.posteriors else []
    cases = [*CASES, *PROGRAMS, *(["boston"] if options.boston else []), *(path.stem for path in posteriors)]
    records = Records(options.results)
    for name, mass_matrix in itertools.product(options.cases or cases, options.mass_matrices):
        torch.set_default_dtype(torch.float32)
        held, reference = problem(name, options.posteriors, options.boston)
        torch.set_default_dtype(held.density.dtype)
        seeds = records.missing(options.seeds, case=name, mass_matrix=mass_matrix)
        for seed, drawn in runs(held, seeds, options.draws, mass_matrix):
            records.add(row(name, mass_matrix, seed, held, reference, drawn))


if __name__ == "__main__":
    main()
