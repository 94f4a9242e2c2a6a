"""Two tables beside the published numbers of bde's ``BdeRegressor``: airfoil noise, and the hours of a bicycle hire.

    python scripts/tables/run.py --data DIR                              # one rule for both tables
    python scripts/tables/run.py --boosting diamonds.csv:price data.txt  # BNNRegressor() beside CatBoost
    python scripts/tables/run.py --small airfoil.csv:target data.txt     # BNNRegressor() beside CatBoost and XGBoost

DIR holds ``airfoil.csv`` (its last column is the target) and ``bike_sharing_hour.csv`` (``hour.csv`` of UCI). Protocol
of the published comparison: one split (a fifth is the test part), y standardised on the train part, errors and
negative log likelihoods in these units, the likelihood that of a normal with the predictive's mean and sd. Each run is
one line of the results file; what is there is not run again.
The rule is ``Rule``'s; its defaults come from held-out parts of airfoil's train part (three splits).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tables.held_out_split import TABLES, Split, split  # noqa: E402

if TYPE_CHECKING:
    from tables.deep_rule import Rule

RESULTS = HERE / "records.jsonl"


def main() -> None:
    """Run what is missing, then print the table."""
    options = parse()
    # NumPy and torch read it when they are imported
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from records import append_record, read_records

    from tables.beside_packages import boosting, small
    from tables.claim_tables import table

    for spec in options.boosting:
        for row in boosting(spec):
            append_record(HERE / "boosting.jsonl", row)
    for spec in options.small:
        for row in small(spec, options.max_seconds):
            append_record(HERE / "small.jsonl", row)
    if options.data:
        for name, seed in itertools.product(options.tables, options.seeds):
            run_rule(name, seed, options)
    print(table(read_records(RESULTS)))


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of the two files",
    )
    parser.add_argument(
        "--boosting",
        nargs="*",
        metavar="FILE:TARGET",
        default=[],
    )
    parser.add_argument(
        "--small",
        nargs="*",
        metavar="FILE:TARGET",
        default=[],
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        help="of each fit of --small",
    )
    parser.add_argument(
        "--tables",
        nargs="+",
        choices=TABLES,
        default=list(TABLES),
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0],
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
    )
    return parser.parse_args()


def run_rule(name: str, seed: int, options: argparse.Namespace) -> None:
    """Fit a table by the rule and append the record, unless the file has it."""
    from records import append_record, read_records

    from tables.deep_rule import Rule

    rule = Rule()
    fields = ",".join(f"{field}={value}" for field, value in rule._asdict().items())
    key = {
        "table": name,
        "method": "pyrobnn",
        "part": "test",
        "seed": seed,
        "threads": options.threads,
        "rule": fields.replace(" ", ""),
    }
    if not any(key.items() <= record.items() for record in read_records(RESULTS)):
        file, target, dropped = TABLES[name]
        data = split(
            f"{options.data / file}:{target}",
            dropped,
            standard=True,
        )
        append_record(RESULTS, key | ours(rule, data, seed))


def ours(rule: Rule, data: Split, seed: int) -> dict[str, Any]:
    """One fit and how good it is: scores, seconds, and whether its chains agree on the function."""
    import torch

    from tables.deep_rule import lift
    from tables.scores_of_predictions import agreement, scores

    wall = time.perf_counter()
    cpu = time.process_time()
    lifted, lifted_test = lift(
        data.x.to_numpy(dtype=float), data.x_test.to_numpy(dtype=float), rule.waves
    )
    features = torch.tensor(lifted, dtype=torch.float32)
    features_test = torch.tensor(lifted_test, dtype=torch.float32)
    targets = torch.tensor(data.y, dtype=torch.float32)[:, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = rule.fit(features, targets, seed)
    spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return {
        **scores(posterior.predict(features_test), data.y_test),
        **spent,
        **agreement(posterior, features_test[:200]),
        "warnings": [str(warning.message) for warning in caught],
    }


if __name__ == "__main__":
    sys.exit(main())
