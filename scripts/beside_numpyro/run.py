"""Programs of a Pyro gallery at the defaults of pyrobnn, beside NumPyro's NUTS on the same models.

    python scripts/beside_numpyro/run.py               # goes on where the records end
    python scripts/beside_numpyro/run.py --programs two_regressions --methods NumPyro NUTS

Every fit is made in a process of its own, which has compiled nothing yet, and then once more by another seed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from beside_numpyro.claim_tables import RECORDS, text  # noqa: E402
from beside_numpyro.fits import METHODS, fitted_row  # noqa: E402
from beside_numpyro.made_data import MAKERS  # noqa: E402
from records import Sweep  # noqa: E402


def main() -> None:
    """Run what is not in the records yet; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="+", default=list(MAKERS), choices=MAKERS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    options = parser.parse_args()
    tasks = [
        {"program": program, "method": method}
        for program, method in itertools.product(options.programs, options.methods)
    ]
    fresh = ProcessPoolExecutor(
        max_workers=1,
        max_tasks_per_child=1,
        mp_context=multiprocessing.get_context("spawn"),
    )
    with fresh:
        sweep = Sweep(RECORDS, lambda row: (row["program"], row["method"]), fresh)
        for task, outcome in sweep.run(fitted_row, tasks):
            failed = f"failed: {outcome}" if isinstance(outcome, Exception) else ""
            print(*task.values(), failed, sep="  ", flush=True)
    print(text())


if __name__ == "__main__":
    main()
