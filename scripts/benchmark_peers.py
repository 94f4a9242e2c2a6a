"""Peers at their newest release, each in an environment of its own, on one problem: speed and what they get right.

    python scripts/benchmark_peers.py                                # makes the environments, then fits and scores
    python scripts/benchmark_peers.py --only "NumPyro NUTS" "pyrobnn NUTS"
    python scripts/benchmark_peers.py --table-only

The problem is a 1-20-1 tanh net with known noise on two clusters of inputs with a gap between them (peer_fits.py has
each library's fit). The reference is this library's NUTS, ten times as long as in the table, whose R-hat the table
tells. A peer that cannot be installed or fails is a row that says so. Disk and time are told before anything is
installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from peer_fits import CHAINS, DRAWS, FITS, WARMUP, ours

HERE = Path(__file__).parent
RESULTS, ENVIRONMENTS = HERE / "results" / "peers.jsonl", HERE.parent / ".venv" / "peers"
NUM_DATA, NUM_TEST, HIDDEN, NOISE, LEVEL = 80, 400, 20, 0.2, 0.9
#: the inputs at which the function is judged: where data are, and in the gap between them
AT_DATA, IN_GAP = (-3.0, -1.2, 1.2, 3.0), (-0.6, -0.3, 0.0, 0.3, 0.6)
REFERENCE = "reference"
#: JAX on one thread
XLA = "--xla_cpu_multi_thread_eigen=false"
#: MB of an environment and seconds of a peer, where no record tells them
GUESS_MB, GUESS_SECONDS = 1500, 120


def problem() -> dict[str, Any]:
    """Data with a gap in [-1, 1], new data from all over the clusters, and the inputs at which functions are judged."""
    generator = np.random.default_rng(0)

    def rows(count):
        x = generator.uniform(1.0, 3.2, (count, 1)) * generator.choice([-1, 1], (count, 1))
        y = np.sin(1.5 * x[:, 0]) + 0.3 * x[:, 0] + NOISE * generator.standard_normal(count)
        return x.astype("float32"), y.astype("float32")

    (x, y), (x_new, y_new) = rows(NUM_DATA), rows(NUM_TEST)
    points = np.array([*AT_DATA, *IN_GAP], dtype="float32")[:, None]
    return {
        "x": x,
        "y": y,
        "y_new": y_new,
        "at": np.concatenate([x_new, points]),
        "noise": NOISE,
        "hidden": HIDDEN,
    }


def score(
    answer: Mapping[str, np.ndarray], data: Mapping[str, Any], reference: Mapping[str, float] | None
) -> dict:
    """Log density and coverage of new targets, sd of the function in the gap, effective draws and R-hat of it.

    Draws are a mixture of normals; a mean and a variance one normal of f, of whose width the noise is a part.
    """
    import torch
    from arviz_stats.base import array_stats

    from pyrobnn.studies.uci import mixture_scores

    if "f" in answer:
        f = np.asarray(answer["f"], dtype=float)
        loc = f.reshape(-1, f.shape[-1])
        scale = np.asarray(answer.get("noise", np.full_like(f, NOISE)), dtype=float).reshape(loc.shape)
        mean, sd = loc.mean(0), loc.std(0)
    else:
        mean, sd = np.asarray(answer["mean"], float), np.sqrt(np.asarray(answer["var"], float))
        loc, scale = mean[None], np.sqrt(sd**2 + NOISE**2)[None]
    new = len(data["y_new"])
    tensors = (torch.from_numpy(np.ascontiguousarray(part[:, :new])) for part in (loc, scale))
    found = mixture_scores(*tensors, torch.from_numpy(data["y_new"]).double(), level=LEVEL)
    gap = slice(new + len(AT_DATA), None)
    found["gap sd"] = float(sd[gap].mean())
    if "f" in answer and f.shape[0] > 1:
        points = np.moveaxis(f[..., new:], -1, 0)
        found["ess"] = float(np.min(array_stats.ess(points, chain_axis=1, draw_axis=2, method="bulk")))
        found["rhat"] = float(np.max(array_stats.rhat(points, chain_axis=1, draw_axis=2)))
    if reference is not None:
        found["gap sd / reference"] = found["gap sd"] / reference["gap sd"]
    return {name: round(value, 5) for name, value in found.items()}


# -- environments and fits -------------------------------------------------------------------------------------------


def environment(package: str, folder: Path) -> Path:
    """The Python of the package's own environment, made with its newest release, and this environment's torch.

    Raises:
        RuntimeError: pip could not install it; its last line.
    """
    place = folder / package
    python = place / "bin" / "python"
    if (place / "installed").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    # of torch's builds the one that is here: the newest one on the registry may bring gigabytes of CUDA
    pins = place / "torch.txt"
    pins.write_text(
        "".join(f"{name}=={metadata.version(name)}\n" for name in ("torch", "torchvision")), encoding="utf-8"
    )
    command = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(pins), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip could not install {package}: {last_line(done.stderr)}")
    # the registry's torchvision is built for the CUDA build of torch; laplace-torch and TyXe do without it
    if subprocess.run([str(python), "-c", "import torchvision"], capture_output=True, check=False).returncode:
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"], check=True)
    (place / "installed").touch()
    return python


def last_line(text: str) -> str:
    """What an error says, in at most 200 letters."""
    return ([line for line in text.strip().splitlines() if line.strip()] or ["no message"])[-1][:200]


def version(python: Path, package: str) -> str:
    """Of the package that is installed there."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def run(
    name: str, data: Mapping[str, Any], options: argparse.Namespace, reference: Mapping[str, float]
) -> dict:
    """The record of one row: scores and costs, or why there are none."""
    from pyrobnn.studies.uci import fits

    package = FITS[name][0]
    record: dict[str, Any] = {"name": name, "commit": fits.commit(), "code": fits.code()}
    started = time.perf_counter()
    try:
        python = Path(sys.executable) if package is None else environment(package, options.environments)
        record["version"] = fits.commit() if package is None else version(python, package)
        answer = fit(python, name, data, options.timeout)
    except (RuntimeError, subprocess.SubprocessError, OSError) as error:
        return record | {"failed": last_line(str(error))}
    for key in ("cpu", "compile", "gradients"):
        if key in answer:
            record[key] = float(answer[key])
    record["seconds"] = round(time.perf_counter() - started, 1)
    if not all(np.isfinite(answer[key]).all() for key in ("f", "mean", "var") if key in answer):
        return record | {"failed": "its function is not finite: the chains diverged"}
    return record | {"scores": score(answer, data, reference)}


def fit(python: Path, name: str, data: Mapping[str, Any], timeout: float) -> dict[str, np.ndarray]:
    """The answer of a worker in its own process.

    Raises:
        RuntimeError: it failed; the last line of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder) / "problem.npz", Path(folder) / "answer.npz"
        np.savez(given, **data)
        done = subprocess.run(
            [str(python), "-W", "ignore", str(HERE / "peer_fits.py"), name, str(given), str(answer)],
            capture_output=True, text=True, check=False, timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1", "JAX_TRACEBACK_FILTERING": "off", "XLA_FLAGS": XLA},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(last_line(done.stderr))
        return dict(np.load(answer))


def digest(data: Mapping[str, Any]) -> str:
    """Eight letters that change with the problem."""
    return hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in data.values())).hexdigest()[:8]


def reference_scores(data: Mapping[str, Any]) -> dict:
    """NUTS, ten times as long."""
    from pyrobnn.studies.uci import fits

    answer = ours("NUTS", num_chains=CHAINS, num_warmup=2 * WARMUP, draws=10 * DRAWS)(data)
    return {
        "name": REFERENCE,
        "commit": fits.commit(),
        "code": fits.code(),
        "problem": digest(data),
        "cpu": answer["cpu"],
        "scores": score(answer, data, None),
    }


def ahead(names: Sequence[str], records: Sequence[Mapping], folder: Path) -> str:
    """What the run will take, told before it starts."""
    known = {record["name"]: record["seconds"] for record in records if "seconds" in record}
    seconds = sum(known.get(name, GUESS_SECONDS) for name in names)
    missing = {
        FITS[name][0]
        for name in names
        if FITS[name][0] and not (folder / FITS[name][0] / "installed").exists()
    }
    free = shutil.disk_usage(folder if folder.exists() else folder.parent.parent).free / 1e9
    return (
        f"about {seconds / 60:.0f} min for {len(names)} fits ({len(set(names) - set(known))} of them a guess), "
        f"1,500 MB of memory; {len(missing)} environments to make in {folder}: about "
        f"{len(missing) * GUESS_MB / 1e3:.1f} GB of {free:.0f} GB that are free"
    )


# -- the table -------------------------------------------------------------------------------------------------------


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row per library and method, of the last run of each."""
    latest = {record["name"]: record for record in records}
    lines = [
        "| | version | CPU s, compile apart | compile s | gradients per s | ESS of f per s | R-hat of f "
        "| 90 % interval holds | log density | sd in the gap / reference's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in [REFERENCE, *FITS]:
        if name in latest:
            lines.append(f"| {name} | {' | '.join(_cells(latest[name]))} |")
    return "\n".join(lines)


def _cells(record: Mapping[str, Any]) -> list[str]:
    if "failed" in record:
        return [record.get("version") or "", f"failed: {record['failed']}".replace("|", "/"), *[""] * 7]
    scores, seconds = record["scores"], max(record["cpu"] - record.get("compile", 0.0), 1e-9)
    return [
        record.get("version") or record["commit"],
        f"{seconds:.1f}",
        f"{record['compile']:.1f}" if "compile" in record else "",
        f"{record['gradients'] / seconds:,.0f}" if "gradients" in record else "",
        f"{scores['ess'] / seconds:.3g}" if "ess" in scores else "",
        f"{scores['rhat']:.3f}" if "rhat" in scores else "",
        f"{100 * scores['coverage']:.0f} %",
        f"{scores['log_density']:.3f}",
        f"{scores.get('gap sd / reference', 1.0):.2f}",
    ]


def main(argv: list[str] | None = None) -> int:
    """Fit what is asked for, write a record each, print the table; 1 where a peer failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(FITS), default=list(FITS), metavar="NAME")
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS, help="folder of the peers' environments"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one fit")
    parser.add_argument("--table-only", action="store_true", help="print what there is, fit nothing")
    options = parser.parse_args(argv)
    from pyrobnn.studies.uci import append_record, read_records

    failed, records = 0, read_records(options.results)
    if not options.table_only:
        print(ahead(options.only, records, options.environments), flush=True)
        data = problem()
        held = [r for r in records if (r["name"], r.get("problem")) == (REFERENCE, digest(data))]
        if not held:
            held.append(reference_scores(data))
            append_record(options.results, held[0])
        for name in options.only:
            record = run(name, data, options, held[-1]["scores"])
            failed += "failed" in record
            append_record(options.results, record)
            print(json.dumps(record), flush=True)
    print(table(read_records(options.results)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
