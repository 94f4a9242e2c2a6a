"""Large data and large nets: memory, its prediction, and throughput against plain PyTorch training of the same net.

    python scripts/benchmark_scale.py                         # both problems, every method, each in its own process
    python scripts/benchmark_scale.py --problems rows --methods svi
    python scripts/benchmark_scale.py --table-only

``rows``: 1,000,000 × 90 synthetic rows, a 90-50-1 net. ``images``: a ResNet-18 of 11 million weights on synthetic
images. A run takes a few dozen steps: enough for memory and throughput, far too few for a posterior.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PROBLEMS = ("rows", "images")
METHODS = ("svi", "swag", "sghmc", "laplace")
NUM_STEPS = {"rows": 200, "images": 24}
BATCH = {"rows": 1000, "images": 16}


def main(argv: list[str] | None = None) -> int:
    """Run each pair in a fresh process, then print the table."""
    options = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    if options.one:
        print(json.dumps(measure(*options.one, threads=options.threads)))
        return 0
    from pyrobnn.studies.uci import append_record, read_records

    failures = 0
    if not options.table_only:
        for problem in options.problems:
            for method in options.methods:
                record = in_own_process(problem, method, options.threads)
                if record is None:
                    failures += 1
                    continue
                Path(options.results).parent.mkdir(parents=True, exist_ok=True)
                append_record(options.results, record)
                print(f"{problem} {method}: {json.dumps(record)}", flush=True)
    print(table(read_records(options.results)))
    return 1 if failures else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", default=HERE / "results" / "scale.jsonl")
    parser.add_argument("--table-only", action="store_true", help="print what there is, run nothing")
    parser.add_argument("--one", nargs=2, metavar=("PROBLEM", "METHOD"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def in_own_process(problem: str, method: str, threads: int) -> dict | None:
    """A peak of memory belongs to a process: every measurement has its own."""
    command = [sys.executable, __file__, "--threads", str(threads), "--one", problem, method]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{problem} {method} failed with status {done.returncode}", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def measure(problem: str, method: str, threads: int) -> dict:
    """Fit once: bytes above what the process held before, and CPU time of a step beside that of plain training."""
    import torch

    torch.set_num_threads(threads)
    model, x, y = rows() if problem == "rows" else images()
    loader = batches(x, y, BATCH[problem])
    configured, num_draws, steps = configure(method, problem)
    import pyrobnn as pb

    data = (x, y) if method == "laplace" else (loader,)
    predicted = model.preflight(configured, *data, num_draws=num_draws)
    before = resident()
    started, cpu = time.perf_counter(), time.process_time()
    clock = Clock()
    init = None
    if method == "laplace":  # the curvature around a trained net: its last layer becomes Bayesian
        init = pb.MAP(num_steps=steps).fit(model, loader, seed=0)
    posterior = configured.fit(model, *data, num_draws=num_draws, seed=0, init=init, callbacks=(clock,))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    used = peak() - before
    per_step = clock.per_step() if method != "laplace" else None
    plain = plain_seconds(model, loader, steps=min(steps, 50 if problem == "rows" else 8))
    return {
        "problem": problem,
        "method": method,
        "num_weights": model.num_weights,
        "num_data": len(x),
        "batch_size": BATCH[problem],
        "num_steps": steps,
        "num_draws": num_draws,
        "data_mb": round((x.nbytes + y.nbytes) / 2**20),
        "peak_mb": round(used / 2**20),
        "predicted_mb": round(predicted.peak / 2**20),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "step_ms": None if per_step is None else round(1e3 * per_step, 3),
        "plain_step_ms": round(1e3 * plain, 3),
        "settings": posterior.meta["settings"],
        "threads": threads,
        "versions": posterior.meta["versions"],
    }


def rows():
    """A million rows of 90 features; the first few carry the signal."""
    import pyro.distributions as dist
    import torch

    import pyrobnn as pb

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1_000_000, 90, generator=generator)
    y = (x[:, 0] * x[:, 1]).tanh_().add_(x[:, 2].sin())
    y = (y + 0.3 * torch.randn(len(x), generator=generator)).unsqueeze(1)
    net = pb.networks.mlp(90, (50,), activation="relu", seed=0)
    likelihood = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    return pb.BNN(net, pb.priors.FanInNormal(), likelihood), x, y


def images(num_data: int = 512, size: int = 16):
    """Synthetic images of ten classes and a ResNet-18."""
    import torch

    import pyrobnn as pb

    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (num_data,), generator=generator)
    prototypes = torch.randn(10, 3, size, size, generator=generator)
    x = prototypes[y] + 0.5 * torch.randn(num_data, 3, size, size, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = resnet18(10)
    return pb.BNN(net, pb.priors.FanInNormal(2.0**0.5), pb.likelihoods.Categorical()), x, y


def resnet18(num_classes: int):
    """ResNet-18 for small images, with group norm: batch norm couples the data, so it has no posterior.

    Reference: Deep Residual Learning for Image Recognition (He et al., 2016).
    """
    from torch import nn

    class Block(nn.Module):
        def __init__(self, before: int, after: int, stride: int):
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(before, after, 3, stride, 1, bias=False),
                nn.GroupNorm(8, after),
                nn.ReLU(),
                nn.Conv2d(after, after, 3, 1, 1, bias=False),
                nn.GroupNorm(8, after),
            )
            same = before == after and stride == 1
            self.skip = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

        def forward(self, x):
            return (self.main(x) + self.skip(x)).relu()

    layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(8, 64), nn.ReLU()]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(before, width, stride), Block(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes))


def batches(x, y, size: int):
    """A loader that slices whole batches out of tensors."""
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

    data = TensorDataset(x, y)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    return DataLoader(data, sampler=BatchSampler(order, size, drop_last=True), batch_size=None)


def configure(method: str, problem: str):
    """The method, its draws and its gradient steps."""
    import pyrobnn as pb

    steps = NUM_STEPS[problem]
    if method == "svi":
        return pb.SVI(num_steps=steps, log_every=max(1, steps // 8)), 10, steps
    if method == "swag":
        swag = pb.SWAG(
            num_steps=steps,
            init_steps=0,
            lr=1e-3,
            rank=5,
            collect_every=max(1, steps // 8),
            burn_in=0.25,
        )
        return swag, 10, steps
    if method == "sghmc":
        sampler = pb.SGHMC(
            num_chains=1,
            num_warmup=steps // 2,
            thinning=max(1, steps // 10),
            step_size=1e-5,
        )
        return sampler, 5, steps
    structure = "full" if problem == "rows" else "kron"
    laplace = pb.Laplace(
        subset="last_layer",
        structure=structure,
        importance=False,
        tune="marginal_likelihood",
    )
    return laplace, 10, steps


def plain_seconds(model, loader, steps: int) -> float:
    """CPU seconds of a step of ordinary training of the same net on the same batches: Adam, eager PyTorch."""
    import copy

    import torch

    net = copy.deepcopy(model.net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss = (
        torch.nn.functional.mse_loss
        if model.likelihood.task == "gaussian"
        else torch.nn.functional.cross_entropy
    )
    found, feed = [], iter(loader)
    for _ in range(steps):
        begun = time.process_time()
        x, y = next(feed)
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
        found.append(time.process_time() - begun)
    return sorted(found)[len(found) // 2]


class Clock:
    """A callback that notes the CPU time: other work on the machine does not disturb it as it does the wall clock."""

    def __init__(self):
        self.marks: list[tuple[int, float]] = []

    def __call__(self, step, metrics) -> None:
        self.marks.append((step, time.process_time()))

    def per_step(self) -> float | None:
        """Median CPU seconds of a step between marks; compilation lies before the first."""
        pairs = zip(self.marks, self.marks[1:])
        found = sorted((after - before) / (end - start) for (start, before), (end, after) in pairs)
        return found[len(found) // 2] if found else None


def resident() -> int:
    """Bytes in memory now; the peak is set back to it (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def peak() -> int:
    """Most bytes in memory since."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}: this measurement needs Linux")


def table(records: list[dict]) -> str:
    """One row per problem and method, the latest record of each."""
    latest = {(record["problem"], record["method"]): record for record in records}
    lines = [
        "| problem | method | weights | data (MB) | peak (MB) | predicted (MB) | step (ms) | plain step (ms) | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (problem, method), r in sorted(latest.items()):
        step = "" if r["step_ms"] is None else f"{r['step_ms']:.2f}"
        ratio = "" if r["step_ms"] is None else f"{r['step_ms'] / r['plain_step_ms']:.2f}"
        lines.append(
            f"| {problem} | {method} | {r['num_weights']:,} | {r['data_mb']} | {r['peak_mb']} | {r['predicted_mb']} "
            f"| {step} | {r['plain_step_ms']:.2f} | {ratio} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
