"""All that needs a GPU, in one command: the tests marked ``cuda``, then every method on both devices.

    make gpu                                                  # within 20 minutes; goes on where it was cut
    make gpu ARGS="--only nuts-1024 svi --budget 300"
    python scripts/gpu/run.py --device cpu --small            # a rehearsal at tiny sizes, where there is no GPU

Each measurement is one line of the records, appended as soon as it is made; a failure is a line with its error. Ends
with 3 where there is no CUDA, with 1 where something failed or the target is missed. ``make`` itself then ends with 2.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

from gpu.device_cases import CASES  # noqa: E402
from records import append_record, commit, read_records, versions  # noqa: E402

RESULTS = HERE / "records.jsonl"
#: NUTS by 1,024 chains: gradients a second on the GPU over those on the CPU, at least
TARGET = 100
NO_CUDA = 3


def main(argv: list[str] | None = None) -> int:
    """Run what has no record of this commit; 0, 1 or NO_CUDA."""
    options = parse(argv)
    import torch

    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        print(
            f"make gpu needs a CUDA device: torch {torch.__version__} finds none here",
            file=sys.stderr,
        )
        return NO_CUDA
    stop = time.time() + options.budget
    failed = 0
    if "tests" in options.only and options.device.startswith("cuda"):
        command = [sys.executable, "-m", "pytest", "-m", "cuda", str(HERE.parents[1] / "tests")]
        failed += subprocess.run(command, check=False).returncode != 0
    for name, device in pending(options):
        if time.time() > stop:
            print(f"{name} on {device}: not run, the time is spent", flush=True)
            continue
        row = measure(name, device, options.small)
        failed += "error" in row
        append_record(options.results, row)
        print(row, flush=True)
    if not options.small:
        failed += misses_target(options.results, options.device)
    return 1 if failed else 0


def pending(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Cases and devices that have no record of this commit and size: those of the device first, then the CPU's."""
    done = {
        (r["name"], r["device"])
        for r in read_records(options.results)
        if r["commit"] == commit() and r["small"] == options.small
    }
    devices = dict.fromkeys((options.device, "cpu"))
    return [
        (name, device)
        for device, name in itertools.product(devices, options.only)
        if name in CASES and (name, device) not in done
    ]


def misses_target(results: Path, device: str) -> bool:
    """Print how much faster many chains are on the device than on the CPU, where both are known; whether too little."""
    rates = {}
    for row in read_records(results):
        if row["name"] == "nuts-1024" and "per_second" in row:
            rates[row["device"]] = row["per_second"]
    if device not in rates or "cpu" not in rates:
        return False
    factor = rates[device] / rates["cpu"]
    print(f"1,024 chains of NUTS: {factor:.0f} times the CPU (target: {TARGET})")
    return factor < TARGET


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["tests", *CASES]
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="PART",
        help=", ".join(names),
    )
    add(
        "--budget",
        type=float,
        default=1200.0,
        help="seconds",
    )
    add(
        "--device",
        default="cuda",
        help="cuda, or cpu for a rehearsal",
    )
    add(
        "--small",
        action="store_true",
        help="tiny sizes: whether it runs, not how fast",
    )
    add(
        "--results",
        type=Path,
        help="the file of the records (of a rehearsal, a temporary one)",
    )
    options = parser.parse_args(argv)
    if options.results is None:
        options.results = RESULTS
        if options.small or not options.device.startswith("cuda"):
            options.results = Path(tempfile.gettempdir()) / "pyrobnn-gpu-rehearsal.jsonl"
    return options


def measure(name: str, device: str, small: bool) -> dict[str, Any]:
    """One row: what a case gave on a device, or its error."""
    started = time.perf_counter()
    row = {
        "name": name,
        "device": device,
        "small": small,
        "commit": commit(),
        "versions": versions(),
    }
    try:
        with warnings.catch_warnings(action="ignore"):
            row |= CASES[name](device, small)
    except Exception:
        row["error"] = traceback.format_exc()[-2000:]
    return row | {"seconds": round(time.perf_counter() - started, 2)}


if __name__ == "__main__":
    sys.exit(main())
