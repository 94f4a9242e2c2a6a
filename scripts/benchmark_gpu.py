"""All that needs a GPU, in one command: the tests, then NUTS, SVI, Laplace, prediction and a study beside the CPU.

    make gpu                                        # within 20 minutes; goes on where it was cut
    make gpu ARGS="--only nuts svi --budget 5"      # these parts, in five minutes
    python scripts/benchmark_gpu.py --device cpu --small     # the same code at tiny sizes, where there is no GPU

Each part runs in a process of its own and writes a row per measurement to the record, which is replaced as a whole each
time: after a cut it holds what was measured. A part that is finished is not run again but with ``--again``; one that
was cut goes on with what it lacks, unless the code has another commit by then. What is left out for want of time is
said, here and in the record. Ends with 3 where there is no CUDA, with 1 where something failed or was left out or the
target is missed. ``make`` itself ends with 2 in each of these cases.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import gpu_parts  # noqa: E402

RESULTS = HERE / "results" / "gpu.json"
#: of the time, which what a part leaves over goes to the next
SHARES = {"tests": 8, "nuts": 5, "svi": 1.5, "laplace": 2, "predict": 1, "study": 2.5}
TARGET, TARGET_CHAINS = 100, 1024
NO_CUDA = 3


def main(argv: list[str] | None = None) -> int:
    """Run the parts; 0, 1 or NO_CUDA."""
    options = parse(argv)
    if options.part:
        return work(options.part, json.loads(options.task), options.pipe)
    import torch

    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        print(
            f"make gpu needs a CUDA device and a torch built for it: torch {torch.__version__} finds none here",
            file=sys.stderr,
        )
        return NO_CUDA
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the part's process ends too
    record = begun(options)
    stop, wanted = time.time() + 60 * options.budget, options.only or list(SHARES)
    for number, name in enumerate(wanted):
        part = record["parts"].get(name)
        if part and part["status"] == "finished" and not options.again:
            print(f"{name}: finished earlier, of commit {part['commit']}; --again runs it again")
            continue
        left = max(0.0, stop - time.time())
        share = left * SHARES[name] / sum(SHARES[other] for other in wanted[number:])
        run_part(record, name, share, options)
    record["targets"] = judge(record)
    write(options.results, record)
    print(summary(record))
    failed = any(part["status"] != "finished" or problems(part) for part in record["parts"].values())
    return int(failed or any(target["met"] is False for target in record["targets"]))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SHARES), metavar="PART", help=", ".join(SHARES))
    parser.add_argument("--again", action="store_true", help="measure anew what is finished")
    parser.add_argument("--budget", type=float, default=20.0, help="minutes in all [20]")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.add_argument("--small", action="store_true", help="tiny sizes: whether it runs, not how fast")
    parser.add_argument(
        "--mnist", default="", help="folder of torchvision's MNIST; else scikit-learn's digits"
    )
    parser.add_argument("--numpyro-python", default=sys.executable, help="a Python that has NumPyro")
    parser.add_argument(
        "--results", type=Path, help=f"the record [{RESULTS.name}; of a rehearsal, a temporary file]"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.budget > 0:
        parser.error(f"--budget must be positive minutes, got {options.budget:g}")
    if options.results is None:
        real = options.device.startswith("cuda") and not options.small
        options.results = RESULTS if real else Path(tempfile.gettempdir()) / "pyrobnn-gpu-rehearsal.json"
    return options


# -- the process of a part -------------------------------------------------------------------------------------------


def work(part: str, task: dict[str, Any], pipe: int) -> int:
    """Measure one part; each row goes to the pipe."""
    given = gpu_parts.Task(**{**task, "done": frozenset(task["done"])})
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(pipe, "w") as rows:

        def tell(row: dict[str, Any]) -> None:
            rows.write(json.dumps(row) + "\n")
            rows.flush()

        if part == "tests":
            gpu_parts.tests(given, tell)
        else:
            for row in gpu_parts.MEASURES[part](given):
                tell(row)
    return 0


def _end_with(parent: int) -> None:
    """A runner that is killed takes its part along: nobody would read the rows."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def run_part(record: dict[str, Any], name: str, seconds: float, options: argparse.Namespace) -> None:
    """Run a part for so many seconds at most; its rows are in the record as they come."""
    old = record["parts"].get(name, {})
    goes_on = not options.again and old.get("commit") == record["commit"]
    rows = [row for row in old.get("rows", []) if sound(row)] if goes_on else []
    part = {"status": "running", "commit": record["commit"], "when": now(), "seconds": 0.0, "rows": rows}
    record["parts"][name] = part
    if seconds < 1:
        part |= {"status": "left out", "why": "no time was left of the budget"}
    write(options.results, record)
    if part["status"] == "left out":
        return
    print(f"{name}: {seconds / 60:.1f} minutes at most", flush=True)
    begun_at, stop = time.perf_counter(), time.time() + seconds
    task = gpu_parts.Task(
        options.device,
        options.small,
        frozenset(row["key"] for row in rows),
        stop,
        options.mnist,
        options.numpyro_python,
    )
    with worker(name, task) as (process, pipe):
        for row in lines(pipe, stop):
            rows.append(row)
            part["seconds"] = round(time.perf_counter() - begun_at, 1)
            write(options.results, record)
            print("  " + shown(row), flush=True)
        over = time.time() >= stop and process.poll() is None
        status = None if over else process.wait()
    if over:
        part |= {
            "status": "cut",
            "why": f"its {seconds / 60:.1f} minutes were over; run it again and it goes on",
        }
    elif status or any("error" in row for row in rows):
        part |= {
            "status": "failed",
            "why": f"its process ended with status {status}" if status else "see its rows",
        }
    elif problems(part):
        part |= {"status": "cut", "why": "not all had time; run it again and it goes on"}
    else:
        part["status"] = "finished"
    part["seconds"] = round(time.perf_counter() - begun_at, 1)
    write(options.results, record)


@contextlib.contextmanager
def worker(name: str, task: gpu_parts.Task) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process of a part and the end of its pipe; it and what it started are gone afterwards."""
    reading, writing = os.pipe()
    sent = json.dumps({**asdict(task), "done": sorted(task.done)})
    command = [sys.executable, __file__, "--part", name, "--task", sent, "--pipe", str(writing)]
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command,
        pass_fds=[writing],
        start_new_session=True,
        cwd=HERE.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    os.close(writing)
    try:
        yield process, reading
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(reading)


def lines(pipe: int, stop: float) -> Iterator[dict[str, Any]]:
    """Rows from the pipe until its other end closes or the time is over."""
    rest = b""
    while (left := stop - time.time()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            return
        if not (read := os.read(pipe, 2**16)):
            return
        *whole, rest = (rest + read).split(b"\n")
        yield from map(json.loads, whole)


# -- the record ------------------------------------------------------------------------------------------------------


def begun(options: argparse.Namespace) -> dict[str, Any]:
    """The record that is there, if it is of this device and of these sizes, with today's facts; else a new one."""
    facts = machine(options.device) | {"small": options.small, "commit": commit(), "started": now()}
    old: dict[str, Any] = {}
    if options.results.exists():
        try:
            old = json.loads(options.results.read_text(encoding="utf-8"))
        except ValueError:
            print(f"{options.results} is no record of this script: it is written anew")
    parts = old.get("parts", {})
    if parts and (old.get("device"), old.get("small")) != (facts["device"], facts["small"]):
        print(f"the record is of {old.get('device')}, this is {facts['device']}: it is written anew")
        parts = {}
    return {**facts, "parts": parts, "targets": []}


def machine(device: str) -> dict[str, Any]:
    """What was measured on, and with what."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "cpu_cores": os.cpu_count(),
    }
    if torch.device(device).type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found |= {
            "device": about.name,
            "memory_gb": round(about.total_memory / 2**30, 1),
            "capability": f"{about.major}.{about.minor}",
        }
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("pyrobnn", "torch", "triton", "pyro-ppl", "numpyro", "jax"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return found | {"versions": versions}


def commit() -> str:
    """The commit of the code, with a + where files other than results are changed; "unknown" outside of a checkout."""
    git = ["git", "-C", str(HERE.parent)]
    changes = ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!scripts/results"]
    try:
        head, changed = (
            subprocess.run([*git, *rest], capture_output=True, text=True, check=True).stdout.strip()
            for rest in (["rev-parse", "--short=12", "HEAD"], changes)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def now() -> str:
    """The time, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write(path: Path, record: dict[str, Any]) -> None:
    """Replace the record as a whole: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def sound(row: dict[str, Any]) -> bool:
    """Whether a row is a measurement, or a test that did not fail, and need not be made again."""
    return not ({"error", "left_out"} & row.keys())


def problems(part: dict[str, Any]) -> list[str]:
    """What failed or was left out, in words."""
    return [f"{row['key']}: {row.get('error') or row['left_out']}" for row in part["rows"] if not sound(row)]


def judge(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The target of 1,024 chains against NumPyro at its best number; ``met`` is None where one is not measured."""
    rows = record["parts"].get("nuts", {}).get("rows", [])
    ours = [r for r in rows if r.get("chains") == TARGET_CHAINS and r["key"].split()[0].startswith("cuda")]
    theirs = [r for r in rows if r["key"].startswith("numpyro")]
    rates = [[r["gradients_per_s"] for r in each if "gradients_per_s" in r] for each in (ours, theirs)]
    ratio = max(rates[0]) / max(rates[1]) if all(rates) else None
    claim = f"{TARGET_CHAINS:,} chains of 1-50-1: ≥ {TARGET} × the gradients per second of NumPyro on the CPU"
    return [{"claim": claim, "ratio": ratio, "met": None if ratio is None else ratio >= TARGET}]


def shown(row: dict[str, Any]) -> str:
    """A row in one line."""
    parts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {str(v)[-200:]}" for k, v in row.items()]
    return "  ".join(parts)


def summary(record: dict[str, Any]) -> str:
    """How each part ended, what failed or was left out, and whether the target is met."""
    text = []
    for name in SHARES:
        part = record["parts"].get(name)
        if part is None:
            text.append(f"{name}: not run")
            continue
        why = f" ({part['why']})" if "why" in part else ""
        text.append(f"{name}: {part['status']}{why}, {len(part['rows'])} rows, {part['seconds']:.0f} s")
        text += [f"  {problem}" for problem in problems(part)]
    word = {True: "met", False: "MISSED", None: "not measured"}
    for target in record["targets"]:
        ratio = "" if target["ratio"] is None else f": {target['ratio']:.0f} ×"
        text.append(f"target {word[target['met']]}{ratio}: {target['claim']}")
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
