"""Noise that depends on the input, beside the published columns that have it too.

    python scripts/benchmark_heads.py --data-root DIR               # goes on where the results file ends
    python scripts/benchmark_heads.py --data kin8nm --splits 0
    python scripts/benchmark_heads.py --table-only

The standard UCI splits and the net of benchmark_uci.py with a second output for the noise. MAP and the ensemble have
that script's settings, with nothing to choose: no noise is given, and the prior is N(0, 1/fan-in).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
import sweeps  # noqa: E402
from benchmark_uci import refuse  # noqa: E402

from pyrobnn.data import Dataset, Standardizer  # noqa: E402
from pyrobnn.likelihoods import HeteroskedasticGaussian  # noqa: E402
from pyrobnn.model import BNN  # noqa: E402
from pyrobnn.networks import mlp  # noqa: E402
from pyrobnn.priors import FanInNormal  # noqa: E402
from pyrobnn.studies.uci import RULES, fits, read_published, read_records  # noqa: E402
from pyrobnn.studies.uci.rules import Candidate, Rule  # noqa: E402
from pyrobnn.studies.uci.tables import markdown  # noqa: E402

RESULTS = HERE / "results" / "heads.jsonl"
NEEDS = ("dataset", "split", "method", "rule", "scores")
DATASETS = ("kin8nm", "naval", "power", "protein")

#: what a record says of the noise
OF_INPUT = "of the input"


class TwoHeads(Candidate):
    """A net that returns the mean and the standard deviation of the noise."""

    def describe(self) -> dict[str, Any]:
        """As plain values for a record."""
        return {**super().describe(), "noise": OF_INPUT}

    def model(self, train: Dataset, seed: int) -> BNN:
        """One hidden layer of ReLU units on ``train`` in standard units, two outputs."""
        net = mlp(train.x.shape[1], (self.num_hidden,), 2, activation="relu", seed=seed)
        return BNN(
            net,
            FanInNormal(self.prior_scale),
            HeteroskedasticGaussian(),
            standardizer=Standardizer.fit(train),
        )


@dataclass(frozen=True)
class HeadsRule(Rule):
    """A rule whose candidates have two heads."""

    def candidates(self) -> Iterator[Candidate]:
        """The one there is."""
        yield TwoHeads(self.method, self.prior_scales[0], self.noises[0], num_hidden=self.num_hidden)

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return {**super().describe(), "noises": [OF_INPUT]}


METHODS = {
    name: HeadsRule(RULES[name].method, prior_scales=(1.0,), noises=("learned",))
    for name in ("map", "ensemble")
}


def tables(records: Sequence[Mapping[str, Any]], marks: Mapping[tuple[str, str], str] | None = None) -> str:
    """Log density and RMSE of today's settings beside the published columns of this kind; ``marks`` as for markdown."""
    today = [r for r in records if r["rule"] == fits.rule_id(r["method"], METHODS)]
    published = read_published(HERE / "published_uci.json")
    alike = [column for column in published["columns"] if column["noise"] == "heteroskedastic"]
    have = {(record["dataset"], record["method"]) for record in today}
    names = [*DATASETS, *sorted({name for name, _ in have} - {*DATASETS})]
    shown = [
        markdown(today, metric, list(METHODS), names, {**published, "columns": alike}, marks)
        for metric in ("log_density", "rmse")
    ]
    return "\n".join(["\n\n".join(shown), *sweeps.not_run(names, list(METHODS), have)])


def main(argv: list[str] | None = None) -> int:
    """Run what is pending, then print the tables."""
    parser = sweeps.parser(__doc__, RESULTS, DATASETS, list(METHODS), num_splits=1, folders=True)
    parser.add_argument("--data-root", help="directory of the UCI sets (default: the variable PYROBNN_DATA)")
    options = parser.parse_args(argv)
    try:
        tasks = [] if options.table_only else fits.tasks(
            options.data, options.methods, options.splits, METHODS, root=options.data_root
        )  # fmt: skip
    except ValueError as error:
        return refuse(error)
    run = functools.partial(fits.run_task, root=options.data_root, rules=METHODS)
    failures = sweeps.sweep(options, run, fits.key, tasks)
    print(tables(read_records(options.results, NEEDS)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
