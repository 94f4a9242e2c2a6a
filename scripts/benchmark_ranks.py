"""Chains, and the rows of a batch, shared by processes that torchrun starts: what it gains, and what it costs to talk.

    python scripts/benchmark_ranks.py                # a record for each number of processes, then the table
    python scripts/benchmark_ranks.py --table-only

Chains: eight of NUTS on a 1-50-1 tanh net and 240 rows. Each process makes a fit of two draws first: what that takes a
second time, tracing and starting, is a column of its own. Rows: SVI on 10,000 rows of 20 inputs, in batches of 4,096,
by nets of three widths; a step is what 200 more of them take, in the median of three. Times are CPU seconds of a
process, which say what it takes where every process has a core of its own and little of what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
#: of the rows shared: data, batch, widths of the two hidden layers
ROWS, INPUTS, BATCH, WIDTHS = 10_000, 20, 4096, (50, 200, 400)
#: of two fits, and how often both are timed: what one of more steps takes beyond one of fewer is the steps'
FEW, MANY, REPEATS = 20, 220, 3
SHARED = (
    "hidden units",
    "weights",
    "processes",
    "CPU ms a step, of the busiest process",
    "of it the mean of gradients",
    "step of one process / of the busiest",
    "MB that a process sends in a step",
)
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


def steps(out: str) -> None:
    """SVI by rows, in each process; rank 0 writes what all of them took."""
    import torch
    import torch.distributed as dist

    import pyrobnn as pb

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, INPUTS, generator=generator)
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(ROWS, 1, generator=generator)
    found: list[dict[str, Any]] = []
    with pb.distributed.process_group() as rank:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        for width in WIDTHS:
            net = pb.networks.mlp(INPUTS, (width, width), seed=0)
            model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))

            def fit(num_steps: int, model: Any = model) -> float:
                method = pb.SVI(num_steps=num_steps, batch_size=BATCH)
                started = time.process_time()
                pb.distributed.fit_on_ranks(method, model, x, y, num_draws=2, seed=0)
                return time.process_time() - started

            fit(FEW), fit(MANY)  # which compile
            step = statistics.median(fit(MANY) - fit(FEW) for _ in range(REPEATS)) / (MANY - FEW)
            mine: dict[str, Any] = {"step": step, "mean": 0.0}
            guide = torch.zeros(2 * sum(value.numel() for value in net.parameters()))
            if ranks > 1:
                started = time.process_time()
                for _ in range(MANY):
                    dist.all_reduce(guide)
                mine["mean"] = (time.process_time() - started) / MANY
            told: list[Any] = [mine] * ranks
            if ranks > 1:
                dist.all_gather_object(told, mine)
            found.append({"width": width, "weights": len(guide) // 2, "each": told})
    if rank == 0:
        Path(out).write_text(json.dumps({"shared": found}), encoding="utf-8")


def work(out: str) -> None:
    """Chains in each process; rank 0 writes what all of them took."""
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


def record(processes: int, part: str) -> dict[str, Any]:
    """Of a run with so many processes, of chains or of rows."""
    from pyrobnn.studies.uci import fits

    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "told.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(launcher if processes > 1 else []), __file__, "--one", out, part]
        paths = os.pathsep.join(sys.path)
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
        found = json.loads(Path(out).read_text(encoding="utf-8"))

    def told() -> Mapping[str, Any]:
        return {"scores": {}, **found}

    if part == "rows":
        return {**fits.measured({"processes": processes}, told, {"rows": ROWS, "batch": BATCH}), "seed": 0}
    kept = fits.measured({"processes": processes}, told, {"chains": CHAINS, "draws": DRAWS})
    busiest = max(each["cpu_seconds"] for each in found["each"])
    return {**kept, "cpu_seconds": round(busiest, 3), "seed": 0}


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each number of processes, by the last record of it."""
    last = {record["processes"]: record for record in records if "each" in record}
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


def table_of_rows(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each net and number of processes, by the last record of it."""
    last = {
        (net["width"], record["processes"]): net for record in records for net in record.get("shared", ())
    }
    lines = [f"| {' | '.join(SHARED)} |", "|---" * len(SHARED) + "|"]
    for (width, processes), net in sorted(last.items()):
        step = max(each["step"] for each in net["each"])
        alone = last.get((width, 1))
        cells = [
            width,
            f"{net['weights']:,}",
            processes,
            f"{1e3 * step:.1f}",
            f"{1e3 * max(each['mean'] for each in net['each']):.2f}",
            f"{max(each['step'] for each in alone['each']) / step:.2f}" if alone else "",
            # a ring sends every share of a guide's means and scales on to the next rank, twice
            f"{2 * 4 * 2 * net['weights'] * (processes - 1) / processes / 1e6:.2f}",
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
    parser.add_argument("--only", choices=("chains", "rows"), help="one part alone")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        out, part = options.one
        (work if part == "chains" else steps)(out)
        return 0
    from pyrobnn.studies.uci import append_record, read_records

    for part in ("chains", "rows") if options.only is None else (options.only,):
        for processes in () if options.table_only else PROCESSES:
            append_record(options.results, record(processes, part))
    kept = read_records(options.results, ("processes", "cpu_seconds"))
    print(table(kept), table_of_rows(kept), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
