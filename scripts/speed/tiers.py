"""The forecast that decides whether a step is compiled, beside what either tier takes: all methods × six sizes.

A cell is a new process with an empty folder of compiled code. What is measured is CPU seconds of the process and of the
compilers that it calls, so that other programs on the machine count for little. A callback looks at the clock: a call
of the step is timed from the first look to the last. Runs that are long are cut, and their totals extrapolated.

    python scripts/speed/tiers.py measure     # half an hour; appends to tiers.jsonl
    python scripts/speed/tiers.py constants   # the fit beside which forecast.py sets its constants
    python scripts/speed/tiers.py table       # forecast beside truth
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyro.distributions as dist
import torch
from scipy.optimize import nnls
from torch import Tensor

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import Metrics
from pyrobnn.inference.method import Method
from pyrobnn.model.compile.forecast import Forecast, Work

RECORDS = Path(__file__).with_suffix(".jsonl")
#: a measured cell, a line of the file
Record: TypeAlias = dict[str, Any]
#: rows, inputs, hidden units
SIZES: list[tuple[int, int, tuple[int, ...]]] = [
    (30, 1, ()),
    (100, 2, ()),
    (50, 1, (20,)),
    (500, 8, (50,)),
    (1000, 13, (50, 50)),
    (5000, 8, (200,)),
]
METHODS = (
    "map",
    "mle",
    "ensemble",
    "swag",
    "svi",
    "svi short",
    "sghmc",
    "smc",
    "nuts",
    "nuts short",
)
#: CPU seconds after the first look after which a run is cut
CUT = {"compiled": 20.0, "trace": 4.0}
TIERS = ("compiled", "trace")


def cpu_seconds() -> float:
    """Of this process and of those it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def method_of(name: str, compile: bool) -> Method:
    methods: dict[str, Method] = {
        "map": pb.MAP(compile=compile),
        "mle": pb.MLE(compile=compile),
        "ensemble": pb.DeepEnsemble(compile=compile),
        "swag": pb.SWAG(compile=compile),
        "svi": pb.SVI(compile=compile),
        "svi short": pb.SVI(num_steps=1000, compile=compile),
        "sghmc": pb.SGHMC(compile=compile),
        "smc": pb.SMC(compile=compile),
        "nuts": pb.NUTS(compile=compile),
        "nuts short": pb.NUTS(num_warmup=50, compile=compile),
    }
    return methods[name]


class Clock:
    """A callback that notes the CPU seconds at every look, and stops a run once it has taken as many as it may."""

    def __init__(self, most_seconds: float) -> None:
        self.most_seconds = most_seconds
        self.steps: list[int] = []
        self.seconds: list[float] = []

    def __call__(self, step: int, _: Metrics) -> bool:
        self.steps.append(step)
        self.seconds.append(cpu_seconds())
        return self.is_over

    @property
    def looking(self) -> float:
        """Seconds from the first look to the last."""
        return self.seconds[-1] - self.seconds[0]

    @property
    def is_over(self) -> bool:
        return self.looking > self.most_seconds


def problem(size: int) -> tuple[pb.BNN, Tensor, Tensor]:
    """A net with its data, of one of the sizes."""
    rows, inputs, hidden = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(rows, 1, generator=generator)
    torch.manual_seed(0)
    net = pb.networks.mlp(inputs, hidden, 1) if hidden else torch.nn.Linear(inputs, 1)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    return pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(0.1)), x, y


def measure_cell(name: str, size: int, tier: str) -> Record:
    """What a fit takes in a tier; in this process."""
    model, x, y = problem(size)
    clock = Clock(CUT[tier])
    draws = {"num_draws": 50} if name == "nuts short" else {}
    begun = cpu_seconds()
    meta = {}
    cut = False
    try:
        posterior = method_of(name, tier == "compiled").fit(model, x, y, callbacks=[clock], **draws)
        meta = posterior.meta["tier"]
    except ValueError as error:
        if "callback stopped" not in str(error):
            raise
        cut = True
    ended = cpu_seconds()
    return {
        "method": name,
        "size": size,
        "tier": tier,
        "first_step": clock.steps[0],
        "steps": clock.steps[-1],
        "cut": cut or clock.is_over,
        "until_first": round(clock.seconds[0] - begun, 3),
        "looking": round(clock.looking, 3),
        "total": round(ended - begun, 3),
        "meta": meta,
    }


def measure(cells: list[str]) -> None:
    """Every cell, or those of these names such as ``svi/2``, that the records lack."""
    known = {(row["method"], row["size"], row["tier"]) for row in records()}
    for method, size, tier in itertools.product(METHODS, range(len(SIZES)), TIERS):
        is_wanted = not cells or f"{method}/{size}" in cells
        if not is_wanted or (method, size, tier) in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
            output = subprocess.run(
                [sys.executable, __file__, "cell", method, str(size), tier],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        if output.returncode:
            print(method, size, tier, output.stderr[-500:])
            continue
        line = output.stdout.splitlines()[-1]
        print(line, flush=True)
        with RECORDS.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def records() -> list[Record]:
    if not RECORDS.exists():
        return []
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def pairs() -> list[tuple[Record, Record]]:
    """The compiled and the traced cell of every method and size that have both."""
    by_cell = {(row["method"], row["size"], row["tier"]): row for row in records()}
    complete = []
    for method, size in itertools.product(METHODS, range(len(SIZES))):
        compiled, traced = [by_cell.get((method, size, tier)) for tier in TIERS]
        if compiled and traced and traced["meta"]:
            complete.append((compiled, traced))
    return complete


def seconds_a_call(row: Record) -> float:
    return row["looking"] / max(row["steps"] - row["first_step"], 1)


def seconds_of(row: Record, calls: int) -> float:
    """The whole run; one that was cut is extrapolated to so many calls."""
    if not row["cut"]:
        return row["total"]
    return row["until_first"] + seconds_a_call(row) * (calls - row["first_step"])


def constants() -> None:
    """Non-negative least squares of relative errors."""
    features: dict[str, list[list[float]]] = {"compile": [], "compiled": [], "trace": []}
    targets: dict[str, list[float]] = {"compile": [], "compiled": [], "trace": []}
    for compiled, traced in pairs():
        meta = traced["meta"]
        work = [meta["nodes"], meta["elements"], meta["products"]]
        compile_seconds = compiled["until_first"] - traced["until_first"]
        compile_seconds += traced["first_step"] * seconds_a_call(traced)
        features["compile"].append([1, meta["nodes"]])
        targets["compile"].append(compile_seconds)
        features["compiled"].append([1, *work])
        targets["compiled"].append(seconds_a_call(compiled))
        features["trace"].append([0, *work])
        targets["trace"].append(seconds_a_call(traced))
    for name in features:
        rows = np.array(features[name], float)
        seconds = np.array(targets[name])
        solution, _ = nnls(rows / seconds[:, None], np.ones(len(seconds)))
        errors = rows @ solution / seconds
        print(name, [f"{cost:.2g}" for cost in solution], "forecast / truth", errors.round(2))


def table() -> None:
    """Forecast beside truth, in CPU seconds; last the time of the tier that was chosen, of the better one."""
    print("| method | rows-inputs-hidden | calls | compiled | traced | chosen | × the better |")
    print("|---|---|---|---|---|---|---|")
    for compiled, traced in pairs():
        meta = traced["meta"]
        work = Work(meta["nodes"], meta["elements"], meta["products"])
        chosen = Forecast(work, meta["calls"]).tier
        calls = meta["calls"]
        truth = {"compiled": seconds_of(compiled, calls), "trace": seconds_of(traced, calls)}
        rows, inputs, hidden = SIZES[traced["size"]]
        label = "-".join(map(str, (rows, inputs, *hidden)))
        ratio = truth[chosen] / min(truth.values())
        cells = [traced["method"], label, f"{calls:,}", f"{truth['compiled']:.1f}"]
        cells += [f"{truth['trace']:.1f}", chosen, f"{ratio:.2f}"]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "constants", "table", "cell"])
    parser.add_argument("which", nargs="*")
    arguments = parser.parse_args()
    if arguments.what == "cell":
        name, size, tier = arguments.which
        print(json.dumps(measure_cell(name, int(size), tier)))
    elif arguments.what == "measure":
        measure(arguments.which)
    elif arguments.what == "constants":
        constants()
    else:
        table()


if __name__ == "__main__":
    main()
