"""Speed and scores by commit: a few numbers that show within minutes whether a change made something worse.

    python scripts/speed/run.py             # measure and add a record
    python scripts/speed/run.py --check     # measure and compare with the records: exit code 1 if worse
    python scripts/speed/run.py --check --budget 300    # with as many repeats as fit, three at least
    python scripts/speed/run.py --accept "nuts gradient=checks its input"   # slower, and meant to be
    python scripts/speed/nuts.py            # NUTS beside NumPyro and Pyro

Times are CPU seconds over those of a fixed computation in NumPy, timed in turn with them, so that they depend little on
the machine and not at all on what else it does. Each repeat is a process of its own with its own seed; the spread of
the repeats is the noise. A time is compared with records of the same machine only, a score with all.
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
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, stdev
from typing import Any, Literal

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from records import append_record, commit, peak_mb, read_records, versions  # noqa: E402

RESULTS = HERE / "records.jsonl"
#: repeats that a standard error needs; chance of a false alarm, over all numbers and records
FEWEST, FALSE_ALARMS = 3, 0.01
#: timings of one repeat, each in turn with the reference
TURNS = 4

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Number:
    """A number: its label, whether its changes are factors or differences, and which way is worse."""

    label: str
    kind: Literal["factor", "difference"]
    worse: Literal["higher", "lower"]
    #: a time depends on the machine, a score does not
    of_machine: bool

    def scaled(self, values: Sequence[float]) -> list[float]:
        """The repeats on the scale on which changes are differences, and higher is worse."""
        sign = 1.0 if self.worse == "higher" else -1.0
        return [sign * (math.log(value) if self.kind == "factor" else value) for value in values]


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
    history = read_records(options.results)
    if options.accept:
        return accept(options, history)
    own = [record.get("repeat_seconds", 60.0) for record in history if record["machine"] == machine()]
    repeats = options.repeats if not own else int(min(options.repeats, options.budget // own[-1]))
    if options.check and not own:
        print("no record of this machine: its times are not checked, its scores are")
    if repeats < FEWEST:
        print(f"nothing is measured: the noise needs {FEWEST} repeats of about {own[-1]:.0f} s")
        return 2
    now = measure(range(repeats))
    if options.check:
        return check(now, history, lambda: measure(range(repeats, 2 * repeats)))
    append_record(options.results, now)
    print(table([*history, now]))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--check", action="store_true", help="compare, add no record; 1 where something is worse")
    add("--repeats", type=int, default=5, help=f"processes, at least {FEWEST}")
    add("--budget", type=float, default=math.inf, help="seconds: the repeats that fit into them")
    add("--accept", metavar="NUMBER=WHY", help="the next checks start at the last record")
    add("--results", type=Path, default=RESULTS, help="the file of the records")
    add("--one", type=int, metavar="SEED", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.repeats < FEWEST:
        parser.error(f"--repeats must be {FEWEST} or more, got {options.repeats}")
    return options


def check(now: dict[str, Any], history: Sequence[Record], again: Callable[[], Record]) -> int:
    """0 where nothing is worse, 1 where something is; an alarm is measured once more first."""
    if worse(now, history):
        more = again()
        now["values"] = {name: [*values, *more["values"][name]] for name, values in now["values"].items()}
    found = worse(now, history)
    print("\n".join(found))
    held = {name: comparable(name, now, history) for name in NUMBERS}
    checked = sum(map(bool, held.values()))
    commits = len({record["commit"] for records in held.values() for record in records})
    print(f"{checked - len(found)} of {checked} numbers are no worse than in {commits} recorded commits")
    return 1 if found else 0 if checked else 2


def accept(options: argparse.Namespace, history: list[dict[str, Any]]) -> int:
    """Write into the last record why a number may be what it is there: earlier records no longer count."""
    name, _, why = options.accept.partition("=")
    if name not in NUMBERS or not why or not history:
        print(f"--accept NUMBER=WHY, with a record to accept, and NUMBER one of {', '.join(NUMBERS)}")
        return 2
    history[-1]["accepted"] = {**history[-1].get("accepted", {}), name: why}
    text = "".join(json.dumps(record, allow_nan=False, sort_keys=True) + "\n" for record in history)
    Path(options.results).write_text(text, encoding="utf-8")
    return 0


def centre(values: Sequence[float]) -> tuple[float, float]:
    """The median of the repeats and its standard error (that of a mean times √(π/2), as for normal repeats)."""
    return median(values), math.sqrt(math.pi / 2) * stdev(values) / math.sqrt(len(values))


def comparable(name: str, now: Record, history: Sequence[Record]) -> list[Record]:
    """Earlier records that hold the number, of this machine where it is a time, none from before it was accepted."""
    found: list[Record] = []
    for record in history:
        if name in record.get("accepted", {}):
            found.clear()
        same = record["machine"] == now["machine"] or not NUMBERS[name].of_machine
        if same and len(record["values"].get(name, ())) >= FEWEST:
            found.append(record)
    return found


def worse(now: Record, history: Sequence[Record]) -> list[str]:
    """Numbers worse than in an earlier record, by Welch's t-test of two medians with Bonferroni's correction."""
    from scipy.stats import t

    pairs = [(name, record) for name in NUMBERS for record in comparable(name, now, history)]
    found: dict[str, str] = {}
    for name, record in pairs:
        number = NUMBERS[name]
        (old, old_error), (new, new_error) = (centre(number.scaled(each["values"][name])) for each in (record, now))
        error = math.hypot(old_error, new_error)
        if not new > old:
            continue
        counts = len(record["values"][name]) - 1, len(now["values"][name]) - 1
        parts = old_error**4 / counts[0] + new_error**4 / counts[1]
        freedom = error**4 / parts if parts > 0 else math.inf
        if error == 0 or (new - old) / error > t.isf(FALSE_ALARMS / len(pairs), freedom):
            before, after = median(record["values"][name]), median(now["values"][name])
            found[name] = f"{number.label}: {before:.3g} at {record['commit']}, {after:.3g} now"
    return list(found.values())


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(seeds: Sequence[int]) -> dict[str, Any]:
    """A record: every number's repeats, each repeat in a process of its own."""
    values: dict[str, list[float]] = {name: [] for name in NUMBERS}
    before = sum(os.times()[2:4])
    for seed in seeds:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, "--one", str(seed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found = json.loads(done.stdout.splitlines()[-1])
        print("  ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
        for name, value in found.items():
            values[name].append(value)
    return {
        "repeat_seconds": round((sum(os.times()[2:4]) - before) / len(seeds), 1),
        "peak_mb": peak_mb(children=True),
        "commit": commit() or "?",
        "versions": versions(),
        "machine": machine(),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "values": values,
    }


def machine() -> str:
    """The processor and how many of it: what a time depends on."""
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if "model name" in line), name)
    return f"{name}, {os.cpu_count()} cores"


def repeat(seed: int) -> dict[str, float]:
    """Every number once."""
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

    def gradients() -> None:
        for _ in range(200):
            hidden = np.tanh(x @ first)
            error = hidden @ second - y
            back = error @ second.swapaxes(1, 2) * (1 - hidden**2)
            hidden.swapaxes(1, 2) @ error, x.T @ back

    return clocked(gradients)


def in_turn(seconds: Callable[[], float]) -> float:
    """Median of what is timed over the reference before and after it; the first turn, a warm-up, is dropped."""
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


def difference(short: Callable[[], object], long: Callable[[], object]) -> Callable[[], float]:
    """CPU seconds by which one call takes longer than another: what both share cancels."""
    first, second = clocked(short), clocked(long)
    return lambda: max(second() - first(), 1e-9)


def nuts(seed: int) -> dict[str, float]:
    """Thirty thousand gradients of one chain each, and what the draws of a short run are worth."""
    from nuts import CASES, slowest, torch_data, torch_program

    import pyrobnn as pb

    case = CASES["1-50-1"]
    program, (x, y) = torch_program(case), torch_data(case)
    method = pb.NUTS(num_chains=4, num_warmup=100)
    fits = [partial(method.fit, program, x, y, num_draws=draws, seed=seed) for draws in (10, 60)]
    short, long = (fit() for fit in fits)
    gradients = long.meta["num_gradients"] - short.meta["num_gradients"]
    cost = in_turn(difference(*fits))
    values = long.predict(x[:: len(x) // 16]).f[..., 0].numpy()
    return {"nuts gradient": cost * 30_000 / gradients, "nuts ess": 1000 * slowest(values) / long.meta["num_gradients"]}


def svi(seed: int) -> dict[str, float]:
    """A thousand steps of the compiled loop."""
    import pyro.distributions as dist
    import torch
    from nuts import CASES, torch_data

    import pyrobnn as pb

    x, y = torch_data(CASES["1-50-1"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(0.1))
    methods = [pb.SVI(num_steps=steps, estimator="weights") for steps in (1000, 11_000)]
    short, long = (lambda method=method: method.fit(model, x, y[:, None], num_draws=1, seed=seed) for method in methods)
    return {"svi step": in_turn(difference(short, long)) / 10}


def laplace_and_predict(seed: int) -> dict[str, float]:
    """A full Laplace fit at a given mode, and prediction by its draws."""
    import torch
    from torch import nn

    import pyrobnn as pb

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(13, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
        x = torch.randn(506, 13)
        y = torch.tanh(x @ torch.randn(13, 1) / 13**0.5) + 0.3 * torch.randn(506, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=1 / 455)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[:455]), y[:455]).backward()
            optimizer.step()
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
    method = pb.Laplace(map=pb.MAP(num_steps=1, polish_steps=0, compile=False))
    posterior = method.fit(model, x[:455], y[:455], init=net, num_draws=400, seed=seed)
    fit = clocked(lambda: method.fit(model, x[:455], y[:455], init=net, num_draws=1, seed=seed))
    return {"laplace fit": in_turn(fit), "predict": in_turn(clocked(lambda: posterior.predict(x[455:])))}


def scores(seed: int) -> dict[str, float]:
    """Mean log density of new rows of the gap data; short fits with the default options otherwise."""
    import torch
    from uci.rules import held_out_scores

    import pyrobnn as pb

    train, generator = pb.data.gap(seed=seed), torch.Generator().manual_seed(1000 + seed)
    x = (6 * torch.rand(1200, 1, generator=generator, dtype=torch.float64) - 3).to(train.x.dtype)
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    every = pb.data.Dataset(x, train.true_function(x) + train.true_noise.mean() * noise, "gap", "regression")
    test = every.subset((x[:, 0].abs() > 1).nonzero()[:, 0])
    found = {}
    for name, method in {
        "laplace": pb.Laplace(map=pb.MAP(num_steps=300, compile=False)),
        "svi": pb.SVI(num_steps=600, lr=0.02, compile=False),
    }.items():
        net = pb.networks.mlp(1, (50,), activation="tanh", seed=seed)
        model = pb.BNN(net, pb.priors.FanInNormal(2.0), pb.likelihoods.HomoskedasticGaussian(0.2))
        prediction = method.fit(model, train.x, train.y, seed=seed).predict(test.x)
        found[f"{name} score"] = held_out_scores(prediction, test)["log_density"]
    return found


def table(history: Sequence[Record]) -> str:
    """A row a record, the newest first: the median of each number ± its standard error."""
    lines = [f"| commit | {' | '.join(number.label for number in NUMBERS.values())} |"]
    lines += ["|---" * (1 + len(NUMBERS)) + "|"]
    for record in reversed(history):
        cells = [record["values"].get(name, []) for name in NUMBERS]
        shown = ("{:.3g} ± {:.1g}".format(*centre(cell)) if len(cell) >= FEWEST else "" for cell in cells)
        lines.append(f"| {record['commit']} | {' | '.join(shown)} |")
    for record in reversed(history):
        for name, why in record.get("accepted", {}).items():
            lines += ["", f"Accepted at {record['commit']}: {NUMBERS[name].label}; {why}."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
