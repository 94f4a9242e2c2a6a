"""All that needs a GPU, in one command: the tests marked ``cuda``, then every method on both devices.

    make gpu                                                  # within 20 minutes; goes on where it was cut
    make gpu ARGS="--only nuts-1024 svi --budget 300"
    python scripts/gpu/run.py --device cpu --small            # a rehearsal at tiny sizes, where there is no GPU

Each measurement is one line of the records, appended as soon as it is made; a failure is a line with its error. Ends
with 3 where there is no CUDA, with 1 where something failed or the target is missed. ``make`` itself then ends with 2.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

from records import append_record, commit, read_records, versions  # noqa: E402

RESULTS = HERE / "records.jsonl"
#: NUTS by 1,024 chains: gradients a second on the GPU over those on the CPU, at least
TARGET = 100
NO_CUDA = 3
Result = TypeVar("Result")


def main(argv: list[str] | None = None) -> int:
    """Run what has no record of this commit; 0, 1 or NO_CUDA."""
    options = parse(argv)
    import torch

    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        print(
            f"make gpu needs a CUDA device: torch {torch.__version__} finds none here",
            file=sys.stderr,
        )
        return NO_CUDA
    stop = time.time() + options.budget
    failed = 0
    if "tests" in options.only and options.device.startswith("cuda"):
        command = [sys.executable, "-m", "pytest", "-m", "cuda", str(HERE.parents[1] / "tests")]
        failed += subprocess.run(command, check=False).returncode != 0
    for name, device in pending(options):
        if time.time() > stop:
            print(f"{name} on {device}: not run, the time is spent", flush=True)
            continue
        row = measure(name, device, options.small)
        failed += "error" in row
        append_record(options.results, row)
        print(row, flush=True)
    if not options.small:
        failed += misses_target(options.results, options.device)
    return 1 if failed else 0


def pending(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Cases and devices that have no record of this commit and size: those of the device first, then the CPU's."""
    done = {
        (r["name"], r["device"])
        for r in read_records(options.results)
        if r["commit"] == commit() and r["small"] == options.small
    }
    devices = dict.fromkeys((options.device, "cpu"))
    return [
        (name, device)
        for device, name in itertools.product(devices, options.only)
        if name in CASES and (name, device) not in done
    ]


def misses_target(results: Path, device: str) -> bool:
    """Print how much faster many chains are on the device than on the CPU, where both are known; whether too little."""
    rates = {}
    for row in read_records(results):
        if row["name"] == "nuts-1024" and "per_second" in row:
            rates[row["device"]] = row["per_second"]
    if device not in rates or "cpu" not in rates:
        return False
    factor = rates[device] / rates["cpu"]
    print(f"1,024 chains of NUTS: {factor:.0f} times the CPU (target: {TARGET})")
    return factor < TARGET


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["tests", *CASES]
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="PART",
        help=", ".join(names),
    )
    add(
        "--budget",
        type=float,
        default=1200.0,
        help="seconds",
    )
    add(
        "--device",
        default="cuda",
        help="cuda, or cpu for a rehearsal",
    )
    add(
        "--small",
        action="store_true",
        help="tiny sizes: whether it runs, not how fast",
    )
    add(
        "--results",
        type=Path,
        help="the file of the records (of a rehearsal, a temporary one)",
    )
    options = parser.parse_args(argv)
    if options.results is None:
        options.results = RESULTS
        if options.small or not options.device.startswith("cuda"):
            options.results = Path(tempfile.gettempdir()) / "pyrobnn-gpu-rehearsal.jsonl"
    return options


def measure(name: str, device: str, small: bool) -> dict[str, Any]:
    """One row: what a case gave on a device, or its error."""
    started = time.perf_counter()
    row = {
        "name": name,
        "device": device,
        "small": small,
        "commit": commit(),
        "versions": versions(),
    }
    try:
        with warnings.catch_warnings(action="ignore"):
            row |= CASES[name](device, small)
    except Exception:
        row["error"] = traceback.format_exc()[-2000:]
    return row | {"seconds": round(time.perf_counter() - started, 2)}


def timed(device: str, work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds of a call, once what it launched has ended, and what it returned."""
    import torch

    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    started = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - started, result


def problem(widths: tuple[int, ...], num_data: int) -> tuple[Any, Any, Any]:
    """A net under a fan-in prior and data for it: classes where it has several outputs."""
    import torch

    import pyrobnn as pb

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(
        num_data,
        widths[0],
        generator=generator,
    )
    classes = widths[-1] > 1
    likelihood: pb.likelihoods.Likelihood
    if classes:
        y = torch.randint(
            widths[-1],
            (num_data,),
            generator=generator,
        )
        likelihood = pb.likelihoods.Categorical()
    else:
        y = torch.sin(x[:, :1])
        likelihood = pb.likelihoods.HomoskedasticGaussian(0.3)
    net = pb.networks.mlp(
        widths[0],
        widths[1:-1],
        widths[-1],
        seed=0,
    )
    return pb.BNN(net, pb.priors.FanInNormal(), likelihood), x, y


def nuts(chains: int, device: str, small: bool) -> dict[str, Any]:
    """Gradients a second of many chains of a 1-50-1 net: by two lengths of run, without compiling."""
    import pyrobnn as pb

    model, x, y = problem((1, 4, 1) if small else (1, 50, 1), 20 if small else 400)
    num_chains, num_warmup, max_tree_depth = (2, 2, 2) if small else (chains, 10, 6)
    method = pb.NUTS(
        num_chains=num_chains,
        num_warmup=num_warmup,
        max_tree_depth=max_tree_depth,
        compile=not small,
    )
    num_draws = 400 if device.startswith("cuda") else 10
    if small:
        num_draws = 2
    short = method.fit(
        model,
        x,
        y,
        num_draws=1,
        seed=0,
        device=device,
    ).meta
    long = method.fit(
        model,
        x,
        y,
        num_draws=num_draws,
        seed=0,
        device=device,
    ).meta
    gradients = long["num_gradients"] - short["num_gradients"]
    seconds = long["timings"]["fit"] - short["timings"]["fit"]
    return {"chains": chains, "per_second": gradients / max(seconds, 1e-9)}


def search(name: str, device: str, small: bool) -> dict[str, Any]:
    """A 784-64-10 net by one of the other methods: seconds, those of compiling, and predictions a second."""
    import pyrobnn as pb

    steps = 12 if small else 2000  # SWAG takes every fourth iterate of the last three quarters
    model, x, y = problem((6, 4, 3) if small else (784, 64, 10), 40 if small else 6000)
    batches: dict[str, Any] = {"compile": False} if small else {"batch_size": 128}
    method = {
        "map": pb.MAP(
            num_steps=steps,
            polish_steps=0,
            **batches,
        ),
        "svi": pb.SVI(num_steps=steps, **batches),
        "laplace": pb.Laplace(
            structure="kron",
            predictive="linearized",
            num_steps=steps,
            compile=not small,
        ),
        "swag": pb.SWAG(num_steps=steps, **batches),
        "sghmc": pb.SGHMC(
            num_chains=2,
            num_warmup=steps,
            init_steps=steps,
            **batches,
        ),
    }[name]
    draws = None
    if name != "map":
        draws = 4 if small else 50
    took, posterior = timed(
        device,
        lambda: method.fit(
            model,
            x,
            y,
            num_draws=draws,
            seed=0,
            device=device,
        ),
    )
    new = x[:10] if small else x
    predicted, probs = timed(device, lambda: posterior.predict(new.to(device)).probs)
    where = {
        "fit_s": took,
        "predict_s": predicted,
        "where": probs.device.type,
    }
    return where | {"compile_s": posterior.meta["timings"].get("compile", 0.0)}


CASES: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    **{f"nuts-{chains}": functools.partial(nuts, chains) for chains in (4, 64, 1024)},
    **{
        name: functools.partial(search, name) for name in ("map", "svi", "laplace", "swag", "sghmc")
    },
}


if __name__ == "__main__":
    sys.exit(main())
