"""Speed by commit and against the peers, section by section. `make benchmark` runs this.

    python scripts/benchmark_speed.py                          # every section; goes on where it was cut
    python scripts/benchmark_speed.py --check                  # speed and scores beside those of earlier commits
    python scripts/benchmark_speed.py --budget 1h              # what fits into it, and what it leaves out
    python scripts/benchmark_speed.py --sections nuts svi       # some
    python scripts/benchmark_speed.py --peers-python PATH       # NumPyro and laplace-torch from another environment

Each section is a script of its own with more options: benchmark_history, _nuts, _growth, _svi, _laplace, _peers. A
section that finished on this machine with this code is not run again but with ``--again``. ``peers`` makes an
environment for each library, gigabytes in all, and runs where it is named.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark_history import machine
from benchmark_uci import duration

HERE = Path(__file__).parent
COSTS = HERE / "results" / "costs.jsonl"
#: section -> script, the options that name the Python of the peers and the file of the results, and that file
SECTIONS = {
    "history": ("benchmark_history.py", None, "--results", "history.jsonl"),
    "nuts": ("benchmark_nuts.py", "--numpyro-python", "--results", "nuts.jsonl"),
    "growth": ("benchmark_growth.py", "--numpyro-python", "--results", "growth.jsonl"),
    "svi": ("benchmark_svi.py", "--numpyro-python", "--results", "svi.jsonl"),
    "laplace": ("benchmark_laplace.py", "--reference-python", "--out", "laplace.json"),
    "peers": ("benchmark_peers.py", None, "--results", "peers.jsonl"),
}
#: a section that makes environments of gigabytes runs where it is named
ON_REQUEST = ("peers",)


def main(argv: list[str] | None = None) -> int:
    """Run the sections; 1 where one failed."""
    options = parse(argv)
    if options.check:
        budget = [] if math.isinf(options.budget) else ["--budget", f"{options.budget:g}s"]
        arguments = [sys.executable, str(HERE / "benchmark_history.py"), "--check", *budget]
        return subprocess.run(arguments, check=False).returncode
    from pyrobnn.studies.uci import append_record, fits, read_records
    from pyrobnn.studies.uci.plan import plan

    facts = {"machine": machine(), "code": fits.code()}
    records = [record for record in read_records(options.costs) if record["machine"] == facts["machine"]]
    done = set() if options.again else {r["method"] for r in records if r["code"] == facts["code"]}
    tasks = [{"dataset": "section", "method": name} for name in options.sections if name not in done]
    planned = plan(tasks, records, options.budget)
    if finished := [name for name in options.sections if name in done]:
        print(f"finished before with this code (--again runs them anyhow): {', '.join(finished)}")
    print(planned.describe(1, "sections"), flush=True)
    failed, ends = 0, time.perf_counter() + options.budget
    for task in planned.tasks:
        print(f"== {task['method']}", flush=True)
        spent = timed(command(task["method"], options), ends - time.perf_counter())
        if spent["cut"]:  # a guess or another day's time was too short
            print(f"{task['method']} was cut at the budget: the next run goes on with it", flush=True)
        elif spent["returncode"]:
            failed += 1
            print(
                f"{task['method']} failed (exit code {spent['returncode']}): the next run tries it again",
                flush=True,
            )
        else:
            append_record(options.costs, {**task, **facts, **spent})
    return 1 if failed else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name in SECTIONS if name not in ON_REQUEST]
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=usual)
    parser.add_argument(
        "--check", action="store_true", help="fail where a number is worse than at earlier commits"
    )
    parser.add_argument(
        "--budget", type=duration, default=math.inf, help="such as 90m or 1h: run what fits into it"
    )
    parser.add_argument("--again", action="store_true", help="also what finished before")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--results", help="folder for the rows of each section, as JSON: the README's tables")
    parser.add_argument("--costs", type=Path, default=COSTS, help="what each section took, for the next plan")
    return parser.parse_args(argv)


def command(section: str, options: argparse.Namespace) -> list[str]:
    """Of a section's script."""
    script, peers, results, file = SECTIONS[section]
    found = [sys.executable, str(HERE / script)]
    if peers:
        found += [peers, options.peers_python]
    if options.results:
        found += [results, str(Path(options.results) / file)]
    return found


def timed(arguments: Sequence[str], limit: float = math.inf) -> Mapping[str, Any]:
    """Run a command: its exit code, seconds of the wall (the cost a plan counts), and peak memory of its processes.

    After ``limit`` seconds it and all that it started are ended, and ``cut`` is true.
    """
    started, process = time.perf_counter(), subprocess.Popen(arguments, start_new_session=True)
    cut = threading.Event()

    def end() -> None:
        cut.set()
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGTERM)

    timer = threading.Timer(max(limit, 0.0), end) if math.isfinite(limit) else None
    try:
        if timer is not None:
            timer.start()
        _, status, usage = os.wait4(process.pid, 0)
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        process.wait()
        print("\ninterrupted: what is finished is kept; the same command goes on from here")
        sys.exit(130)
    finally:
        if timer is not None:
            timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "returncode": process.returncode,
        "cut": cut.is_set(),
        "cpu_seconds": round(time.perf_counter() - started, 1),
        "peak_mb": round(usage.ru_maxrss / 1024),
    }


if __name__ == "__main__":
    sys.exit(main())
