"""How often a verdict raises a false alarm, and how often it misses a fault: exact draws, healthy and planted faults.

    python scripts/verdict/run.py --healthy 60 --sick 6
    python scripts/page.py

Every case is a linear net with data from its own prior (1 to 20 inputs, 40 to 200 data, any noise), whose posterior is
known: its draws are exact, and so is every fault put into them. Each case has data of its own. One JSON line a case;
cases that the file has are not run again. At its end the rates of every check go to the package, for reports to say.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
import zlib
from dataclasses import replace
from pathlib import Path

import torch

import pyrobnn as pb

sys.path.insert(0, str(Path(__file__).parents[1]))

from records import append_record, read_records  # noqa: E402
from verdict.error_rates import rates  # noqa: E402
from verdict.exact_cases import make_case, tree_of  # noqa: E402
from verdict.faults import HEALTHY, SICK, Fault  # noqa: E402

RATES = Path(__file__).parents[2] / "pyrobnn" / "diagnostics" / "rates.json"
LENGTHS = {"4x200": (4, 200), "4x1000": (4, 1000)}


def run(kind: str, fault: Fault, length: str, seed: int) -> dict[str, object]:
    """One row: the verdict of one case, and every check's status and value."""
    case = make_case([seed, zlib.crc32(f"{kind} {length}".encode())], LENGTHS[length], fault.data)
    if fault.iid:
        case = replace(
            case,
            iid=True,
            shape=(1, case.shape[0] * case.shape[1]),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = tree_of(case, fault.draws(case))
        if fault.tree is not None:
            fault.tree(case, tree)
        verdict = pb.diagnose(tree)
        audit = pb.audit(tree)
    return {
        "healthy": kind in HEALTHY,
        "kind": kind,
        "length": length,
        "seed": seed,
        "status": verdict.status,
        "draws": verdict.draws,
        "model": verdict.model,
        "audit": audit.status,
        "words": len(str(verdict).split()),
        "checks": {
            check.name: [check.status, check.value] for check in (*verdict.checks, *audit.checks)
        },
    }


def main() -> None:
    """Run the cases that the records lack, then write the rates of all of them into the package."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(__file__).with_name("records.jsonl"),
    )
    parser.add_argument(
        "--rates",
        type=Path,
        default=RATES,
        help="where the package keeps what follows from them",
    )
    parser.add_argument(
        "--healthy",
        type=int,
        default=60,
        help="cases of each healthy kind and length",
    )
    parser.add_argument(
        "--sick",
        type=int,
        default=6,
        help="cases of each fault and length",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        choices=LENGTHS,
        default=list(LENGTHS),
        help="of the runs",
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    done = {(row["kind"], row["length"], row["seed"]) for row in read_records(arguments.results)}
    for seed in range(max(arguments.healthy, arguments.sick)):
        for length in arguments.lengths:
            for kinds, number in ((HEALTHY, arguments.healthy), (SICK, arguments.sick)):
                for kind, fault in kinds.items():
                    if seed < number and (kind, length, seed) not in done:
                        append_record(arguments.results, run(kind, fault, length, seed))
    rows = read_records(arguments.results)
    arguments.rates.write_text(json.dumps(rates(rows), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
