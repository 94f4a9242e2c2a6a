"""What each private name of torch's compiler saves a user who fits from an empty cache.

    python scripts/speed/tricks.py               # some minutes; appends to tricks.jsonl
    python scripts/speed/tricks.py --repeats 1

Every run is a fit by NUTS of a small net in a process of its own whose compile cache is empty: once as it is, and once
without each of the tricks of ``pyrobnn/core/private.py``. Counted are the CPU seconds of the process and of the C++
compilers that it starts; the runs of a round follow each other, and medians over rounds are compared. ``python
scripts/page.py`` writes the table of ``docs/claims/speed.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from records import append_record, commit  # noqa: E402

RESULTS = HERE / "tricks.jsonl"
NUM_ROUNDS = 3


def without_context(name: str) -> Callable[[Any], None]:
    """A change of ``core.private`` by which one of its contexts does nothing."""

    def change(private: Any) -> None:
        setattr(private, name, lambda *_: contextlib.nullcontext())

    return change


def without_library(private: Any) -> None:
    """Code is called through torch's wrapper."""

    def gone(*_: Any) -> None:
        raise ImportError("left out for the comparison")

    private.Library = gone


def without_stack(private: Any) -> None:
    """Intermediate tensors are allocated at every call."""
    compile_graph = private.compile_graph

    def on_heap(graph, inputs, settings, on_stack, scalar):
        settings["aot_inductor.allow_stack_allocation"] = False
        return compile_graph(graph, inputs, settings, False, scalar)

    private.compile_graph = on_heap


def with_vectors(private: Any) -> None:
    """Code of small tensors has vectors too."""
    compile_graph = private.compile_graph
    private.compile_graph = lambda *arguments: compile_graph(*arguments[:-1], False)


#: what each trick is called in the table, and the change that takes it away
TRICKS: dict[str, Callable[[Any], None]] = {
    "one precompiled header of few headers": without_context("_few_headers_precompiled"),
    "quick look-ups of strides and types": without_context("_quick_lookups"),
    "instruction sets without a trial, scalar code": without_context("_known_instructions"),
    "scalar code of small tensors": with_vectors,
    "a collector that leaves old objects alone": without_context("_old_objects_frozen"),
    "the library without torch's wrapper": without_library,
    "intermediate tensors on the stack": without_stack,
}


def fit(left_out: str | None) -> float:
    """CPU seconds of a fit in this process, and of its compilers, without one of the tricks."""
    import pyro.distributions as dist
    import torch

    import pyrobnn as pb
    from pyrobnn.core import private

    torch.set_num_threads(1)
    if left_out is not None:
        TRICKS[left_out](private)
    data = pb.data.sinusoid(num_data=60)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    noise = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    model = pb.BNN(pb.networks.mlp(1, (20,), seed=0), prior, noise)
    before = cpu_seconds()
    method = pb.NUTS(num_chains=4, num_warmup=500, compile=True)
    method.fit(model, data.x, data.y, num_draws=500, progress=False)
    return cpu_seconds() - before


def cpu_seconds() -> float:
    """Of this process and of the children that have ended."""
    total = 0.0
    for owner in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(owner)
        total += usage.ru_utime + usage.ru_stime
    return total


def measured(left_out: str | None) -> float:
    """CPU seconds of the fit in a process whose compile cache is empty."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--fit", left_out or ""]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        output = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout
    return float(output.strip().splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    """Measure all tricks in rounds, and append the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=NUM_ROUNDS, help="rounds")
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.fit is not None:
        print(fit(options.fit or None))
        return 0
    seconds: dict[str, list[float]] = {name: [] for name in ("", *TRICKS)}
    for _ in range(options.repeats):
        for name, runs in seconds.items():
            runs.append(measured(name or None))
            print(f"{runs[-1]:6.1f} s without {name or 'nothing'}", flush=True)
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    record = {
        "cpu_seconds": seconds,
        "ratios": {name: round(medians[name] / medians[""], 3) for name in TRICKS},
        "commit": commit() or "?",
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    append_record(RESULTS, record)
    print(json.dumps(record["ratios"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
