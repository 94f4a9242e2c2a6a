"""Effective draws per gradient of each mass matrix of NUTS, on nets, a hierarchical program and reference posteriors.

    python scripts/benchmark_metric.py --results scripts/results/metric.jsonl --posteriors FOLDER --boston FILE

Effective draws are those of the slowest function value of a net and of the slowest site value of a program; gradients
are those of the draws, without the warm-up, whose own are a column of the record. Both are counts: they do not depend
on the machine. Reference posteriors (see benchmark_posteriordb.py) run in float64 and are judged as there, so that a
mass matrix that is fast and wrong is seen. What the results file already has is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from pathlib import Path

import torch
from benchmark_nuts import CASES, data, torch_program

from pyrobnn.gradient import batched_gradient
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.hmc.hooks import slowest_ess
from pyrobnn.inference.hmc.machine import STATS, Machine
from pyrobnn.inference.hmc.run import Run
from pyrobnn.inference.hmc.starts import starts
from pyrobnn.inference.nuts import DEFAULT_WARMUP, MOST_WARMUP

NUM_CHAINS = 4


def boston(path):
    """The 13-50-1 net of benchmark_nuts on the Boston housing table, standardised; the last column is the target."""
    import numpy as np

    table = torch.from_numpy(np.loadtxt(path)).float()
    table = (table - table.mean(0)) / table.std(0)
    return torch_program(CASES["13-50-1"]), table[:, :-1], table[:, -1]


def problem(name, options):
    """What is fitted, and the reference's scalars where there are any."""
    reference = None
    if name == "boston":
        model, x, y = boston(options.boston)
    elif name in CASES:
        model, (x, y) = torch_program(CASES[name]), (torch.from_numpy(part) for part in data(CASES[name]))
    else:
        import benchmark_posteriordb

        torch.set_default_dtype(torch.float64)
        posterior = json.loads((options.posteriors / f"{name}.json").read_text())
        model, x, y = benchmark_posteriordb.problem(name, posterior["data"])
        reference = posterior["parameters"]
    return prepare(model, x, y, points="held"), reference


def sampled(name, mass_matrix, options, num_draws):
    """One row per seed; the step is compiled once."""
    torch.set_default_dtype(torch.float32)
    held, reference = problem(name, options)
    torch.set_default_dtype(held.density.dtype)
    advance = None
    for seed in options.missing(name, mass_matrix):
        z, _ = starts(held, None, seed, NUM_CHAINS, not held.is_bnn)
        gradient, batched = batched_gradient(held.density.log_joint, z)
        if advance is None:
            slots = max(num_draws, MOST_WARMUP)
            machine = Machine(gradient, NUM_CHAINS, held.density.dim, slots, z.dtype, z.device)
            run = Run.__new__(Run)
        run.__init__(
            machine,
            seed=seed,
            num_warmup=DEFAULT_WARMUP,
            most=MOST_WARMUP,
            names=None if held.is_bnn else held.density.site_of,
            mass_matrix=mass_matrix,
            compile=batched,
        )
        with torch.no_grad():
            run.begin(z)
            run._advance = advance
            drawn = run.sample(num_draws)
            advance = run._advance
        yield row(name, mass_matrix, seed, held, reference, drawn)


def row(name, mass_matrix, seed, held, reference, drawn):
    """What a run gives: effective draws, gradients of its draws and of its warm-up, and how it was judged."""
    stats = {key: drawn.stats[..., i] for i, key in enumerate(STATS)}
    gradients = float(stats["n_steps"].sum())
    ess = slowest_ess(held, drawn.positions)
    record = {
        "case": name,
        "mass_matrix": mass_matrix,
        "seed": seed,
        "draws": drawn.stats.shape[1],
        "ess": round(ess, 1),
        "gradients": gradients,
        "ess per 1000 gradients": round(1000 * ess / gradients, 4),
        "warmup gradients": drawn.num_gradients - gradients,
        "acceptance": round(float(stats["acceptance_rate"].mean()), 3),
        "divergences": int(stats["diverging"].sum()),
        "unfinished": drawn.unfinished,
    }
    if reference is not None:
        from benchmark_posteriordb import judged, scalars

        rhat, bulk, (errors, where) = judged(scalars(held.density.constrain(drawn.positions)), reference)
        right = rhat <= 1.05 and bulk >= 100 and errors <= 4
        record |= {"right": bool(right), "rhat": round(rhat, 3), "errors": round(errors, 2), "where": where}
    return record


def main():
    """Print the rows; write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", help="some of them alone")
    parser.add_argument("--posteriors", type=Path, help="folder of reference posteriors: every one is a case")
    parser.add_argument("--boston", type=Path, help="the table of boston, which is then a case")
    parser.add_argument("--mass-matrices", nargs="+", default=["diag", "low_rank", "dense"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=500, help="of each chain")
    parser.add_argument("--results", type=Path, help="append the rows here, one JSON object a line")
    options = parser.parse_args()
    from pyrobnn.studies.uci import append_record, read_records

    known = options.results is not None and options.results.exists()
    done = (
        {(r["case"], r["mass_matrix"], r["seed"]) for r in read_records(options.results)} if known else set()
    )
    options.missing = lambda *which: [n for n in range(options.seeds) if (*which, n) not in done]
    posteriors = sorted(options.posteriors.glob("*.json")) if options.posteriors else []
    cases = [*CASES, *(["boston"] if options.boston else []), *(path.stem for path in posteriors)]
    warnings.simplefilter("ignore")
    for name, mass_matrix in itertools.product(options.cases or cases, options.mass_matrices):
        for record in sampled(name, mass_matrix, options, options.draws):
            print(*(f"{key}={value}" for key, value in record.items()), sep="  ", flush=True)
            if options.results:
                append_record(options.results, record)


if __name__ == "__main__":
    main()
