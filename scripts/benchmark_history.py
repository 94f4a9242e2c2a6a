"""Speed and scores by commit: a few numbers that say within minutes whether a change made something worse.

    python scripts/benchmark_history.py             # measure, add a record, draw the figure
    python scripts/benchmark_history.py --check     # measure, compare with the records: exit code 1 if worse
    python scripts/benchmark_history.py --check --budget 5m     # by as many repeats as fit, three at least
    python scripts/benchmark_history.py --accept "nuts gradient=checks its input"   # slower, and meant to be

Times are CPU seconds over those of a fixed computation in NumPy that is timed in turn with them, so that they say
little of the machine and nothing of what else it does. Each repeat is a process of its own with a seed of its own;
the spread of the repeats is the noise. An alarm is measured once more before it is told. A time is compared with
records of the same machine only, a score with all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmark_uci import duration
from regressions import FEWEST, Number, centre, changes, comparable

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "history.jsonl"
FIGURE = "history.png"
#: timings of one repeat, each in turn with the reference
TURNS = 4

NUMBERS = {
    "nuts gradient": Number("NUTS, a gradient of 1-50-1", "factor", "higher", True),
    "svi step": Number("SVI, a step of 1-50-1", "factor", "higher", True),
    "laplace fit": Number("Laplace, a fit of 13-50-50-1", "factor", "higher", True),
    "predict": Number("prediction by 400 draws", "factor", "higher", True),
    "nuts ess": Number("NUTS, effective draws per 1000 gradients", "factor", "lower", False),
    "laplace score": Number("Laplace, held-out log density", "difference", "lower", False),
    "svi score": Number("SVI, held-out log density", "difference", "lower", False),
}


def main(argv: list[str] | None = None) -> int:
    """Measure; record or check."""
    options = parse(argv)
    if options.one is not None:
        print(json.dumps(repeat(options.one)))
        return 0
    from pyrobnn.studies.uci import append_record, read_records

    history = read_records(options.results)
    if options.accept:
        return accept(options, history)
    if options.check and not any(
        comparable(each, name, {"machine": machine()}, history) for name, each in NUMBERS.items()
    ):
        print("nothing to compare with: run this without --check first")
        return 2
    repeats = planned(options, history)
    if repeats < FEWEST:
        print(f"nothing is measured: the noise is told from {FEWEST} repeats or more")
        return 2
    now = measure(range(repeats))
    if options.check:
        return check(now, history, lambda: measure(range(repeats, 2 * repeats)))
    append_record(options.results, now)
    draw([*history, now], Path(options.results).with_name(FIGURE))
    print(table([*history, now]))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare, add no record; 1 where something is worse"
    )
    parser.add_argument("--repeats", type=int, default=5, help=f"processes, at least {FEWEST}")
    parser.add_argument(
        "--budget", type=duration, default=math.inf, help="such as 5m: the repeats that fit into it"
    )
    parser.add_argument("--accept", metavar="NUMBER=WHY", help="the next checks start at the last record")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of the records")
    parser.add_argument("--one", type=int, metavar="SEED", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.repeats < FEWEST:
        parser.error(
            f"--repeats must be {FEWEST} or more: the noise is told from them, got {options.repeats}"
        )
    return options


def planned(options: argparse.Namespace, history: Sequence[dict]) -> int:
    """The repeats that fit into the budget, after what they cost by earlier records has been told."""
    from pyrobnn.studies.uci.plan import plan

    told = [record for record in history if "repeat_seconds" in record]
    own = [record for record in told if record["machine"] == machine()]
    repeat = {"dataset": "history", "method": "repeat"}
    known = [
        {**repeat, "cpu_seconds": record["repeat_seconds"], "peak_mb": record["peak_mb"]}
        for record in own or told
    ]
    found = plan([repeat] * options.repeats, known, options.budget)
    print(f"{len(found.tasks)} repeats of {len(NUMBERS)} numbers: {found.describe(1, 'repeats')}")
    if known and not own:
        print(f"timed on another machine: {known[-1]['cpu_seconds']:.0f} s a repeat on {told[-1]['machine']}")
    if options.check:
        print("where a number is worse, as many repeats again", flush=True)
    return len(found.tasks)


def check(now: dict, history: Sequence[dict], again: Callable[[], dict]) -> int:
    """0 where nothing is worse, 1 where something is."""
    held = {name: comparable(number, name, now, history) for name, number in NUMBERS.items()}
    if missing := [name for name, records in held.items() if not records]:
        print(f"not checked, for want of a record of this machine ({now['machine']}): {', '.join(missing)}")
    if differ := sorted({other for record in history for other in _versions_apart(record, now)}):
        print(f"records of other versions are among those compared with: {', '.join(differ)}")
    if changes(now, history, NUMBERS):
        more = again()
        now["values"] = {name: [*values, *more["values"][name]] for name, values in now["values"].items()}
    found = changes(now, history, NUMBERS)
    for change in found:
        print(change)
    records = len({record["commit"] for records in held.values() for record in records})
    checked = len(held) - len(missing)
    print(f"{checked - len(found)} of {checked} numbers are no worse than in {records} recorded commits")
    return 1 if found else 0


def _versions_apart(record: Mapping, now: Mapping) -> set[str]:
    return {
        f"{name} {version}"
        for name, version in record["versions"].items()
        if now["versions"].get(name) != version
    }


def accept(options: argparse.Namespace, history: list[dict]) -> int:
    """Write into the last record why a number may be what it is there: earlier records are no measure any more."""
    name, _, why = options.accept.partition("=")
    if name not in NUMBERS or not why or not history:
        print(f"--accept NUMBER=WHY, with a record to accept, and NUMBER one of {', '.join(NUMBERS)}")
        return 2
    history[-1]["accepted"] = {**history[-1].get("accepted", {}), name: why}
    text = "".join(json.dumps(record, allow_nan=False, sort_keys=True) + "\n" for record in history)
    Path(options.results).write_text(text, encoding="utf-8")
    print(f"{NUMBERS[name].label}: compared from commit {history[-1]['commit']} on")
    return 0


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(seeds: Sequence[int]) -> dict[str, Any]:
    """A record: every number's repeats, each repeat in a process of its own."""
    from pyrobnn.studies.uci import fits

    values: dict[str, list[float]] = {name: [] for name in NUMBERS}
    before = os.times()
    for seed in seeds:
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        found = json.loads(done.stdout.splitlines()[-1])
        print("  ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
        for name, value in found.items():
            values[name].append(value)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "repeat_seconds": round(spent / len(seeds), 1),
        "peak_mb": children_peak_mb(),
        "commit": fits.commit() or "?",
        "code": fits.code(),
        "versions": fits.versions(),
        "machine": machine(),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "values": values,
    }


def children_peak_mb() -> int | None:
    """The most memory that a process of this one held, in MB; None where the system does not tell it (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / unit)


def machine() -> str:
    """The processor and how many of it: what a time depends on."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip()
            for line in info.read_text(encoding="utf-8").splitlines()
            if "model name" in line
        ]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores"


def repeat(seed: int) -> dict[str, float]:
    """Every number once."""
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of fits that are short on purpose
    return {**nuts(seed), **svi(seed), **laplace_and_predict(seed), **scores(seed)}


def reference() -> Callable[[], float]:
    """CPU seconds of the fixed computation: gradients of the squared error of four 1-50-1 nets, by hand in NumPy."""
    import numpy as np

    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((400, 1)), generator.standard_normal((400, 1))
    first, second = generator.standard_normal((4, 1, 50)), generator.standard_normal((4, 50, 1))

    def run() -> float:
        started = time.process_time()
        for _ in range(200):
            hidden = np.tanh(x @ first)
            error = hidden @ second - y
            back = error @ second.swapaxes(1, 2) * (1 - hidden**2)
            hidden.swapaxes(1, 2) @ error, x.T @ back
        return time.process_time() - started

    return run


def in_turn(seconds: Callable[[], float]) -> float:
    """Median of what is timed over the reference before and after it; the first turn, which warms up, is left out."""
    other = reference()
    ratios, before = [], other()
    for _ in range(TURNS + 1):
        found, after = seconds(), other()
        ratios.append(2 * found / (before + after))
        before = after
    return median(ratios[1:])


def clocked(work: Callable[[], object]) -> Callable[[], float]:
    """CPU seconds of a call."""

    def run() -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    return run


def nuts(seed: int) -> dict[str, float]:
    """A gradient of the machine, and what the draws of a short run are worth."""
    from benchmark_nuts import CASES, TIMED_LEAPFROGS, Ours

    draws, chains = 50, 4
    args = {"num_chains": chains, "num_warmup": 100, "num_draws": draws, "seed": seed}
    ours = Ours(CASES["1-50-1"], args | {"clock": "cpu", "device": "cpu"})
    _, ess, steps = ours.fit(draws)
    cost = in_turn(lambda: TIMED_LEAPFROGS * ours.machine())
    return {"nuts gradient": cost, "nuts ess": 1000 * ess / (steps * draws * chains)}


def svi(seed: int) -> dict[str, float]:
    """A thousand steps of the compiled loop."""
    from unittest.mock import patch

    from benchmark_svi import torch_model, train_only

    import pyrobnn as pb

    model, x, y = torch_model("1-50-1, N=400, full batch")
    method = pb.SVI(num_steps=1000, log_every=1000)

    def loop() -> float:
        with patch(
            "time.perf_counter", time.process_time
        ):  # the fit's own clock, which leaves its compile out
            return train_only(method, model, x, y, seed=seed)["fit"]

    return {"svi step": in_turn(loop)}


def laplace_and_predict(seed: int) -> dict[str, float]:
    """A full Laplace fit at a given mode, and prediction by its draws."""
    from benchmark_laplace import problem

    import pyrobnn as pb

    net, x, y, x_test = problem("small")
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
    method = pb.Laplace(importance=False, map=pb.MAP(num_steps=1, polish_steps=0, compile=False))
    posterior = method.fit(model, x, y, init=net, num_draws=400, seed=seed)
    fit = in_turn(clocked(lambda: method.fit(model, x, y, init=net, num_draws=1, seed=seed)))
    return {"laplace fit": fit, "predict": in_turn(clocked(lambda: posterior.predict(x_test)))}


def scores(seed: int) -> dict[str, float]:
    """Mean log density of new rows, each data set with its seed; short fits with the default options otherwise."""
    from benchmark_gap import load

    import pyrobnn as pb
    from pyrobnn.studies.uci.rules import held_out_scores

    train, tests = load("gap", seed)
    found = {}
    for name, method in {
        "laplace": pb.Laplace(map=pb.MAP(num_steps=300, compile=False), importance=False),
        "svi": pb.SVI(num_steps=600, lr=0.02, compile=False),
    }.items():
        net = pb.networks.mlp(1, (50,), activation="tanh", seed=seed)
        model = pb.BNN(net, pb.priors.FanInNormal(2.0), pb.likelihoods.HomoskedasticGaussian(0.2))
        posterior = method.fit(model, train.x, train.y, seed=seed)
        found[f"{name} score"] = held_out_scores(posterior.predict(tests["outside"].x), tests["outside"])[
            "log_density"
        ]
    return found


# -- showing ---------------------------------------------------------------------------------------------------------


def table(history: Sequence[Mapping]) -> str:
    """A row a record, the newest first: the median of each number ± its standard error."""
    if not history:
        return "No record yet: `make benchmark` makes one."
    names = list(NUMBERS)
    lines = [
        f"| commit | {' | '.join(NUMBERS[name].label for name in names)} |",
        "|---" * (1 + len(names)) + "|",
    ]
    for record in reversed(history):
        cells = []
        for name in names:
            values = record["values"].get(name, [])
            accepted = " (accepted)" if name in record.get("accepted", {}) else ""
            cells.append(
                "{:.3g} ± {:.1g}".format(*centre(values)) + accepted if len(values) >= FEWEST else ""
            )
        lines.append(f"| {record['commit']} | {' | '.join(cells)} |")
    why = [
        f"Accepted at {record['commit']}: {NUMBERS[name].label}; {reason}."
        for record in reversed(history)
        for name, reason in record.get("accepted", {}).items()
    ]
    return "\n".join([*lines, *([""] if why else []), *why])


def draw(history: Sequence[Mapping], path: Path) -> None:
    """A panel a number: its repeats by record, and their median."""
    import matplotlib.pyplot as plt

    from pyrobnn.plots.style import EPISTEMIC, MUTED, style

    with style():
        figure, axes = plt.subplots(2, -(-len(NUMBERS) // 2), figsize=(11, 4.6), layout="constrained")
        for axis, (name, number) in zip(axes.flat, NUMBERS.items(), strict=False):
            for place, record in enumerate(history):
                values = record["values"].get(name, [])
                axis.plot([place] * len(values), values, ".", color=MUTED, markersize=4)
            points = [(i, median(r["values"][name])) for i, r in enumerate(history) if r["values"].get(name)]
            axis.plot(*zip(*points, strict=True), "o-", color=EPISTEMIC)
            axis.set_title(number.label, fontsize=8)
            axis.set_xticks(range(len(history)), [record["commit"] for record in history], rotation=45)
        for axis in axes.flat[len(NUMBERS) :]:
            axis.set_visible(False)
        figure.savefig(path, dpi=90)
        plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
