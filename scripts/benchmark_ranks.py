"""Eight chains in one process and in two that torchrun starts: what sharing them out gains, and what gathering costs.

    python scripts/benchmark_ranks.py                # a record for each number of processes, then the table
    python scripts/benchmark_ranks.py --table-only

NUTS on a 1-50-1 tanh net and 240 rows. Times are CPU seconds of a process, which say what it takes where every process
has a core of its own and little of what else the machine does. Each process makes a fit of two draws first: what that
takes a second time, tracing and starting, is a column of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "ranks.jsonl"
CHAINS, WARMUP, DRAWS = 8, 200, 300
PROCESSES = (1, 2)
HEAD = (
    "processes",
    "chains of each",
    "gradients of all chains",
    "CPU s of the busiest process",
    "a fit of two draws, CPU s",
    "gradients per CPU s of the busiest process / of one process",
    "MB that a process gathers",
    "CPU s of gathering",
)


def work(out: str) -> None:
    """What each process does; rank 0 writes what all of them took."""
    import torch
    import torch.distributed as dist

    import pyrobnn as pb

    torch.set_num_threads(1)
    data = pb.data.gap(seed=0)
    net = pb.networks.mlp(1, (50,), activation="tanh", seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.2))
    with pb.distributed.process_group() as rank:
        ranks = dist.get_world_size() if dist.is_initialized() else 1

        def fit(num_warmup: int, num_draws: int) -> tuple[Any, float]:
            method = pb.NUTS(num_chains=CHAINS // ranks, num_warmup=num_warmup)
            started = time.process_time()
            found = method.fit(model, data.x, data.y, num_draws=num_draws, seed=rank)
            return found, time.process_time() - started

        fit(20, 2)
        short = fit(20, 2)[1]
        own, spent = fit(WARMUP, DRAWS)
        started = time.process_time()
        every = pb.distributed.gather(own, seed=0) if ranks > 1 else own
        gathering = time.process_time() - started
        size = sum(value.nbytes for value in [*every.draws.values(), *every.sample_stats.values()])
        steps = float(own.sample_stats["n_steps"].double().sum())
        mine = {"cpu_seconds": spent, "short": short, "gathering": gathering, "steps": steps}
        told: list[Any] = [mine] * ranks
        if ranks > 1:
            dist.all_gather_object(told, mine)
    if rank == 0:
        moved = size * (ranks - 1) / ranks
        Path(out).write_text(json.dumps({"each": told, "gathered_bytes": moved}), encoding="utf-8")


def record(processes: int) -> dict[str, Any]:
    """Of a run with so many processes."""
    from pyrobnn.studies.uci import fits

    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "told.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(launcher if processes > 1 else []), __file__, "--one", out]
        paths = os.pathsep.join(sys.path)
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
        found = json.loads(Path(out).read_text(encoding="utf-8"))

    def told() -> Mapping[str, Any]:
        return {"scores": {}, **found}

    kept = fits.measured({"processes": processes}, told, {"chains": CHAINS, "draws": DRAWS})
    busiest = max(each["cpu_seconds"] for each in found["each"])
    return {**kept, "cpu_seconds": round(busiest, 3), "seed": 0}


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each number of processes, by the last record of it."""
    last = {record["processes"]: record for record in records}
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    rates = {
        processes: sum(each["steps"] for each in found["each"]) / found["cpu_seconds"]
        for processes, found in last.items()
    }
    for processes, found in sorted(last.items()):
        cells = [
            processes,
            found["chains"] // processes,
            f"{sum(each['steps'] for each in found['each']):,.0f}",
            f"{found['cpu_seconds']:.1f}",
            f"{max(each['short'] for each in found['each']):.1f}",
            f"{rates[processes] / rates[1]:.2f}" if 1 in rates else "",
            f"{found['gathered_bytes'] / 1e6:.1f}",
            f"{max(each['gathering'] for each in found['each']):.3f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the results file")
    parser.add_argument("--table-only", action="store_true", help="print what there is, fit nothing")
    parser.add_argument("--one", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        work(options.one)
        return 0
    from pyrobnn.studies.uci import append_record, read_records

    for processes in () if options.table_only else PROCESSES:
        append_record(options.results, record(processes))
    print(table(read_records(options.results, ("processes", "each", "chains", "cpu_seconds"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
