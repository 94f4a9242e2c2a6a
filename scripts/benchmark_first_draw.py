"""Seconds from ``fit`` to the first draw: with an empty compile cache, with a full one, and with one more row.

    python scripts/benchmark_first_draw.py                # appends to scripts/results/first_draw.jsonl

A 1-50-1 net and 400 rows; each fit is as short as it can be (one draw of each chain after ten transitions, or ten
steps), so that what it takes is tracing, compiling and starting. A process with an empty cache fits 400 rows, then
401, which are padded to the same size, and these again; a second process finds the cache that the first has filled.
CPU seconds are those of the process and of the compilers that it starts; the import of the package is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pyrobnn.studies.uci import append_record, read_records

RESULTS = Path(__file__).parent / "results" / "first_draw.jsonl"
METHODS = {
    "NUTS": "pb.NUTS(num_warmup=10)",
    "SVI": "pb.SVI(num_steps=10)",
    "MAP": "pb.MAP(num_steps=10)",
    "Laplace": "pb.Laplace(num_steps=10)",
}
ROWS = (400, 401, 401)
CHILD = """
import json, resource, time, warnings
import torch
import pyrobnn as pb
warnings.simplefilter("ignore")

def spent():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)

def fit(method, rows):
    data = pb.data.sinusoid(num_data=rows, seed=0)
    likelihood = pb.likelihoods.HomoskedasticGaussian(0.1)
    model = pb.BNN(pb.networks.mlp(1, (50,), seed=0), pb.priors.FanInNormal(), likelihood)
    clock, cpu = time.perf_counter(), spent()
    method.fit(model, data.x, data.y, num_draws=1, seed=0)
    return round(time.perf_counter() - clock, 2), round(spent() - cpu, 2)

print(json.dumps([fit({method}, rows) for rows in {rows}]))
"""


def measured(method: str) -> dict[str, list[float]]:
    """Clock and CPU seconds: the first fit, one with a row more, that again, and the first one in a new process."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            code = CHILD.replace("{method}", METHODS[method]).replace("{rows}", repr(ROWS))
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
            )
            found += json.loads(done.stdout.strip().splitlines()[-1])
    return dict(zip(("empty cache", "one more row", "the same again", "full cache"), found[:4], strict=True))


def table(records: list[dict]) -> str:
    """The latest record of each method: seconds by the clock, and CPU seconds."""
    latest = {record["method"]: record["seconds"] for record in records}
    names = list(next(iter(latest.values())))
    lines = [f"| method | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for method, seconds in latest.items():
        lines.append(
            f"| {method} | {' | '.join(f'{clock:.1f} ({cpu:.1f})' for clock, cpu in seconds.values())} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every method, one after the other; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    for method in options.methods:
        append_record(options.results, {"method": method, "seconds": measured(method)})
    print(table(read_records(options.results)))


if __name__ == "__main__":
    main()
