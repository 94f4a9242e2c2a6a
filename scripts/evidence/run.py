"""Log evidence by tempered SMC, beside exact values, beside Laplace's and the bound of SVI; tanh ranked against ReLU.

    python scripts/evidence/run.py                    # goes on where the results file ends
    python scripts/evidence/run.py --cases linear "one tanh unit" --seeds 0

Exact are a linear model with known noise (a normal) and a net of one unit without biases (a sum over a grid of its two
weights). Of 1-10-1 nets nothing exact is known: there the seeds of SMC say how well they agree, and which of tanh and
ReLU each way prefers is what a comparison of models by evidence would conclude. All are float64, at the methods'
defaults; seconds are CPU seconds of one thread, compiling included.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import pyrobnn as pb

sys.path.insert(0, str(Path(__file__).parents[1]))

from evidence.claim_tables import WAYS, table  # noqa: E402
from evidence.known_cases import CASES, Case, case  # noqa: E402
from records import append_record, read_records  # noqa: E402

RESULTS = Path(__file__).with_name("records.jsonl")
METHODS = {
    "SMC": pb.SMC(),
    "Laplace": pb.Laplace(),
    "SVI": pb.SVI(),
}


def main() -> None:
    """Run what is not in the results file yet; print the tables."""
    options = parse()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    done = {(r["case"], r["way"], r["seed"]) for r in read_records(options.results)}
    for name in options.cases:
        of_name = case(name)
        for way in WAYS:
            for seed in options.seeds if way == "SMC" else options.seeds[:1]:
                if (name, way, seed) in done:
                    continue
                record = {"case": name, "way": way, "seed": seed} | measured(of_name, way, seed)
                print(
                    *(f"{key}={value}" for key, value in record.items()),
                    sep="  ",
                    flush=True,
                )
                append_record(options.results, record)
    print(table(read_records(options.results)))


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=CASES,
        choices=CASES,
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
    )
    return parser.parse_args()


def measured(of_name: Case, way: str, seed: int) -> dict[str, Any]:
    """The log evidence of a case by one way, beside the exact value, and what it cost."""
    begun = time.process_time()
    posterior = METHODS[way].fit(of_name.model, of_name.x, of_name.y, seed=seed)
    return {
        "exact": of_name.exact,
        "log_evidence": posterior.log_evidence,
        "error": posterior.meta.get("log_evidence_error"),
        "told": posterior.meta["warnings"],
        "cpu_seconds": round(time.process_time() - begun, 1),
    }


if __name__ == "__main__":
    main()
