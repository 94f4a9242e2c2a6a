"""Speed and scores beside those of an earlier commit, and NUTS beside its peers.

    python scripts/speed/run.py                   # beside the commit of the newest record; adds a record
    python scripts/speed/run.py --check           # the same, adds none; exit code 1 if something is worse
    python scripts/speed/run.py --against v0.2.0  # beside any commit
    python scripts/speed/run.py --peers           # NUTS beside NumPyro and Pyro

Both codes run here and now, in turn, on the same seeds: a time of another day or machine is never compared. Each
repeat is a process of its own; times are CPU seconds over those of a fixed computation in NumPy, timed in turn.
Beside its peers NUTS has the same model, data, warm-up and number of draws; repeats of ours and NumPyro's alternate,
wall time, no compile in it. A gradient is one of the leapfrogs that belong to a trajectory; ESS are of whole fits.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from records import append_record, read_records  # noqa: E402
from speed.claim_tables import table  # noqa: E402
from speed.numbers_of_speed import NUMBERS, worse  # noqa: E402
from speed.peers import beside_peers  # noqa: E402
from speed.torch_models import CASES  # noqa: E402
from speed.two_codes import measure_again_if_worse, unpack  # noqa: E402

RESULTS = HERE / "records.jsonl"
PEERS = HERE / "nuts.jsonl"
#: fewest repeats; and the chance that any number is called worse though none has changed
FEWEST = 3
FALSE_ALARMS = 0.01


def main(argv: list[str] | None = None) -> int:
    """Measure; record or check."""
    options = parse(argv)
    return measure_peers(options) if options.peers else measure_commits(options)


def measure_peers(options: argparse.Namespace) -> int:
    """NUTS beside its peers: a record of each model and number of chains."""
    for name, chains in itertools.product(options.cases, options.chains):
        row = beside_peers(name, chains, options.repeats)
        append_record(options.results or PEERS, row)
        print("  ".join(f"{key} {shown(number)}" for key, number in row.items()), flush=True)
    return 0


def measure_commits(options: argparse.Namespace) -> int:
    """This code beside another: 1 where --check finds something worse, 2 where there is no other code."""
    results = options.results or RESULTS
    history = read_records(results)
    against = options.against or (history[-1]["commit"] if history else None)
    if against is None:
        print(f"{results} has no record yet: name a commit by --against")
        return 2
    with TemporaryDirectory() as folder:
        try:
            unpack(against, Path(folder))
        except subprocess.CalledProcessError as error:
            print(f"git does not give the code of {against}: {error.stderr.decode().strip()}")
            return 2
        record = measure_again_if_worse(against, options.repeats, Path(folder))
    print(table([record]))
    if not options.check:
        append_record(results, record)
        return 0
    losses = worse(record, FALSE_ALARMS / len(NUMBERS))
    for line in losses:
        print(line)
    print(f"{len(NUMBERS) - len(losses)} of {len(NUMBERS)} numbers are no worse than at {against}")
    return 1 if losses else 0


def shown(number: str | float | None) -> str:
    """A float to four digits, anything else as it is."""
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--check",
        action="store_true",
        help="compare, add no record; 1 where something is worse",
    )
    add(
        "--against",
        metavar="COMMIT",
        help="what to compare with; the commit of the newest record",
    )
    add(
        "--repeats",
        type=int,
        default=5,
        help=f"processes of each code, at least {FEWEST}",
    )
    add(
        "--peers",
        action="store_true",
        help="a gradient of NUTS and its ESS, beside NumPyro's and Pyro's",
    )
    add(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        help="of --peers",
    )
    add(
        "--chains",
        nargs="+",
        type=int,
        default=[4, 16, 64],
        help="of --peers",
    )
    add(
        "--results",
        type=Path,
        help="the file of the records",
    )
    options = parser.parse_args(argv)
    if options.repeats < FEWEST:
        parser.error(f"--repeats must be {FEWEST} or more, got {options.repeats}")
    return options


if __name__ == "__main__":
    sys.exit(main())
