"""SVI against MCMC on clusters of noisy data: whether NUTS converges, and how far the uncertainty opens in a gap.

    python scripts/svi_against_mcmc/run.py chains    # NUTS on all eight cases until it has converged
    python scripts/svi_against_mcmc/run.py gaps    # NUTS and mean-field SVI on fresh draws of the clusters
    python scripts/svi_against_mcmc/run.py study --depth 13 --seconds 3000    # draws for notebook 03

A case is one of four sets of 400 points with one of two models of the noise; the net is 1-50-1, tanh. Records are
appended to ``records.jsonl`` as they are made, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyrobnn as pb

sys.path.insert(0, str(Path(__file__).parents[1]))

from records import append_record, read_records  # noqa: E402
from svi_against_mcmc.judged_fits import Settings, judged  # noqa: E402
from svi_against_mcmc.study_cases import DATA, NOISES, fresh  # noqa: E402

RESULTS = Path(__file__).with_name("records.jsonl")
DRAWS = Path(__file__).with_name("four_clusters.nc")
#: records, each made when it is asked for
Records = Iterator[dict[str, Any]]
#: entries by which a record is known
Key = Mapping[str, str | int | float]
#: whether there is a record with these entries
Known = Callable[[Key], bool]


def chains(
    name: str, noise: str, settings: Settings, seeds: Sequence[int], known: Known
) -> Records:
    """NUTS on the study's own points, with its verdict."""
    key = {"part": "chains", "data": name, "noise": noise} | _scales_of(settings)
    if not known(key):
        yield key | judged(
            settings.nuts,
            name,
            pb.data.study(name),
            noise,
            settings,
            seed=1,
        )


def gaps(name: str, noise: str, settings: Settings, seeds: Sequence[int], known: Known) -> Records:
    """NUTS and SVI on fresh draws of the data."""
    schedule = pb.inference.vi.kl_schedules.Linear(warmup=0.1, full=0.5)
    methods = {
        "nuts": settings.nuts,
        "svi": pb.SVI(num_steps=5000, kl_weight=schedule),
    }
    for seed, (label, method) in itertools.product(seeds, methods.items()):
        key = {
            "part": "gaps",
            "data": name,
            "noise": noise,
            "seed": seed,
            "method": label,
            **_scales_of(settings),
        }
        if not known(key):
            yield key | judged(
                method,
                name,
                fresh(name, seed),
                noise,
                settings,
                seed=seed,
            )


def study(name: str, noise: str, settings: Settings, seeds: Sequence[int], known: Known) -> Records:
    """NUTS on the study's four clusters with noise from a second output; 50 draws of each chain are kept."""
    if (name, noise) == ("four_clusters", "heteroskedastic"):
        key = {"part": "study", "data": name, "noise": noise}
        yield key | judged(
            settings.nuts,
            name,
            pb.data.study(name),
            noise,
            settings,
            seed=1,
            draws=DRAWS,
        )


def _scales_of(settings: Settings) -> dict[str, float]:
    """The prior's scales, as records name them."""
    return {"scale": settings.prior[0], "bias_scale": settings.prior[1]}


PARTS = {function.__name__: function for function in (chains, gaps, study)}


def main() -> None:
    """Run the parts that are asked for; print and append their records."""
    options = parse()
    nuts = pb.NUTS(
        num_warmup=options.warmup,
        max_tree_depth=options.depth,
        target_accept=options.accept,
        until="converged",
        max_seconds=options.seconds,
    )
    settings = Settings(tuple(options.prior), nuts, options.keep)
    done = read_records(options.results)

    def known(key: Key) -> bool:
        return any(key.items() <= record.items() for record in done)

    warnings.simplefilter("ignore")
    for kind, name, noise in itertools.product(options.parts, options.data, options.noise):
        for record in PARTS[kind](name, noise, settings, options.seeds, known):
            print(
                *(f"{key}={value}" for key, value in record.items()),
                sep="  ",
                flush=True,
            )
            append_record(options.results, record)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="+",
        choices=PARTS,
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=DATA,
        choices=DATA,
    )
    parser.add_argument(
        "--noise",
        nargs="+",
        default=NOISES,
        choices=NOISES,
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=range(10),
        help="of the fresh data",
    )
    parser.add_argument(
        "--prior",
        type=float,
        nargs=2,
        default=(3.0, 1.0),  # s of N(0, s² / fan-in), and the scale of the biases
        metavar=("S", "BIAS"),
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        help="the most that a run of NUTS takes",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=12,
        help="of NUTS' trees, at most",
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=200,
        help="transitions, at first",
    )
    parser.add_argument(
        "--accept",
        type=float,
        default=0.9,
        help="acceptance rate that NUTS aims at",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="for NUTS' checkpoints: a run goes on after a kill",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
