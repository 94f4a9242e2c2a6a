"""Which path each idiom of a Pyro program takes: all chains at once and compiled, or why not.

    python scripts/idioms/run.py [NAME …] [--record FILE]

writes a line for each program: its name, whether the gradient of all chains is one call (``batched``), what became of
its compilation (``mode``), and why not.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import torch  # noqa: E402
from programs import IDIOMS  # noqa: E402
from records import append_record  # noqa: E402

from pyrobnn.inference.fitting.problem import prepare  # noqa: E402
from pyrobnn.model.compile import compiled  # noqa: E402
from pyrobnn.model.gradient import batched_gradient  # noqa: E402

NUM_CHAINS = 3


def path_of(name: str, enabled: bool | str = True) -> dict[str, str | bool]:
    """The row of one program."""
    program, x, y = IDIOMS[name]
    row: dict[str, str | bool] = {"idiom": name, "batched": False, "mode": "refused", "why": ""}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            density = prepare(program, x, y, points="held").density
            z = density.sample_prior(NUM_CHAINS, seed=0)
            gradient, why = batched_gradient(density.log_joint, z)
            expected = gradient(z)
            row |= {"batched": not why, "why": why}
            call = compiled(gradient, z, enabled=enabled, name="the program")
            row["mode"] = call.mode
            agree = all(
                torch.allclose(value, expected_value, rtol=1e-3, atol=1e-3, equal_nan=True)
                for value, expected_value in zip(call(z), expected, strict=True)
            )
            row["agrees"] = agree
        except (RuntimeError, ValueError, TypeError) as error:
            row["why"] = str(error).partition("\n")[0]
    if row["mode"] != "inductor" and not row["why"]:
        row["why"] = " | ".join(str(w.message).partition("\n")[0] for w in caught)[:300]
    return row


def main() -> None:
    """Print the table, and write it where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="idioms whose names contain one of these; default all"
    )
    parser.add_argument("--record", help="file of JSON lines that the rows go to")
    parser.add_argument("--traced", action="store_true", help="trace alone, without machine code")
    options = parser.parse_args()
    for name in IDIOMS:
        if options.names and not any(word in name for word in options.names):
            continue
        row = path_of(name, "trace" if options.traced else True)
        batched = "batched" if row["batched"] else "one by one"
        print(f"{name:58} {batched:10} {row['mode']:9} {row['why']}", flush=True)
        if options.record:
            append_record(options.record, row)


if __name__ == "__main__":
    main()
