"""Laplace against laplace-torch: fit, tuned prior precision, closed-form prediction; seconds and peak memory.

    python scripts/benchmark_laplace.py [--cases small large classes] [--structures full kron diag last_layer]
        [--reference-python PATH]  [--agreement]  [--out FILE.json]

Every measurement runs in a process of its own, with the same network and weights, so that peak memory is its own.
laplace-torch runs in ``--reference-python``, by default this one; cases where it is not installed are left out.
``--agreement`` measures no time, only the mean predictive variance at one fixed prior precision, 1, which both
libraries must agree on; it joins what the record has of the case.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

CASES = {
    "small": {"widths": (13, 50, 50, 1), "num_data": 455, "num_test": 51},
    "large": {"widths": (13, 50, 50, 1), "num_data": 7373, "num_test": 820},
    "classes": {"widths": (784, 64, 10), "num_data": 6000, "num_test": 500},
}
Clock = Callable[[], float]
STRUCTURES = ("full", "kron", "diag", "last_layer")
#: seconds of the wall, or of this process's CPU (for a busy machine: run it with OMP_NUM_THREADS=1)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LIBRARIES = ("pyrobnn", "laplace-torch")


def problem(case: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A trained network, its data and test inputs; the same for both libraries."""
    setup = CASES[case]
    widths, num_data = setup["widths"], setup["num_data"]
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in zip(widths[:-1], widths[1:]):
        layers += [nn.Linear(before, after), nn.Tanh()]
    net = nn.Sequential(*layers[:-1])
    x = torch.randn(num_data + setup["num_test"], widths[0])
    signal = torch.tanh(x @ torch.randn(widths[0], widths[-1]) / widths[0] ** 0.5)
    noisy = signal + 0.3 * torch.randn_like(signal)
    y = noisy.argmax(1) if widths[-1] > 1 else noisy
    loss = nn.CrossEntropyLoss() if widths[-1] > 1 else nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=1 / num_data)
    for _ in range(150):
        optimizer.zero_grad()
        loss(net(x[:num_data]), y[:num_data]).backward()
        optimizer.step()
    return net, x[:num_data], y[:num_data], x[num_data:]


def measure_pyrobnn(case: str, structure: str, clock: Clock, agreement: bool) -> dict[str, float]:
    import pyro.distributions as dist

    import pyrobnn as pb
    from pyrobnn.inference.laplace import Laplace

    net, x, y, x_test = problem(case)
    classes = not y.is_floating_point()
    likelihood = pb.likelihoods.Categorical() if classes else pb.likelihoods.HomoskedasticGaussian(0.3)
    model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), likelihood)
    options = {
        "structure": "full" if structure == "last_layer" else structure,
        "subset": "last_layer" if structure == "last_layer" else "all",
        "predictive": "linearized",
        "importance": False,
    }
    base = peak()
    seconds = {}
    started = clock()
    posterior = Laplace(**options).fit(model, x, y, init=net, num_draws=1)
    seconds["fit"] = clock() - started

    def mean_variance():
        return float(posterior.network.output_moments(x_test)[1].diagonal(dim1=1, dim2=2).mean())

    if agreement:
        return {"fixed_variance": mean_variance()}
    started = clock()
    posterior = Laplace(**options, tune="marginal_likelihood").fit(model, x, y, init=net, num_draws=1)
    seconds["fit_and_tune"] = clock() - started

    def predict():
        return posterior.network.probs(x_test) if classes else posterior.network.output_moments(x_test)

    seconds["predict"] = best_of(predict, clock)
    factor = posterior.meta["tuned"]["prior_precision_factor"]["all"]
    return seconds | {
        "memory_mb": peak() - base,
        "prior_precision": factor,
        "mean_variance": mean_variance(),
    }


def measure_laplace_torch(case: str, structure: str, clock: Clock, agreement: bool) -> dict[str, float]:
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    net, x, y, x_test = problem(case)
    classes = not y.is_floating_point()
    loader = DataLoader(TensorDataset(x, y), batch_size=min(len(x), 500))
    base = peak()
    seconds = {}
    started = clock()
    fitted = Laplace(
        net,
        "classification" if classes else "regression",
        subset_of_weights="last_layer" if structure == "last_layer" else "all",
        hessian_structure="full" if structure == "last_layer" else structure,
        **({} if classes else {"sigma_noise": 0.3}),
    )
    fitted.fit(loader)
    seconds["fit"] = clock() - started

    def mean_variance():
        _, cov = fitted._glm_predictive_distribution(x_test)
        return float(cov.reshape(len(x_test), cov.shape[1], -1).diagonal(dim1=1, dim2=2).mean())

    if agreement:
        return {"fixed_variance": mean_variance()}
    fitted.optimize_prior_precision(method="marglik", pred_type="glm")
    seconds["fit_and_tune"] = clock() - started
    options = {"link_approx": "probit"} if classes else {}
    seconds["predict"] = best_of(lambda: fitted(x_test, pred_type="glm", **options), clock)
    return seconds | {
        "memory_mb": peak() - base,
        "prior_precision": float(fitted.prior_precision.mean()),
        "mean_variance": mean_variance(),
    }


def best_of(call: Callable[[], object], clock: Clock, budget: float = 1.0) -> float:
    """Seconds of the fastest call among those that fit into the budget, at least one."""
    fastest, total = float("inf"), 0.0
    while total < budget:
        started = clock()
        call()
        seconds = clock() - started
        fastest, total = min(fastest, seconds), total + seconds
    return fastest


def peak() -> float:
    """Largest resident size so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_one(
    python: str, library: str, case: str, structure: str, args: argparse.Namespace
) -> dict[str, float] | None:
    """One measurement in a process of its own; None where it fails or takes too long."""
    command = [python, __file__, "--one", library, case, structure, "--clock", args.clock]
    command += ["--agreement"] * args.agreement
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"timeout": args.timeout}
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{library} {case} {structure}: {reason}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def row(case: str, structure: str, ours: dict | None, theirs: dict | None) -> str:
    """One line of the table: seconds of both and their ratio."""
    cells = [f"{case:8s} {structure:11s}"]
    for name in (
        "fit",
        "fit_and_tune",
        "predict",
        "memory_mb",
        "prior_precision",
        "mean_variance",
        "fixed_variance",
    ):
        pair = [None if one is None else one.get(name) for one in (ours, theirs)]
        texts = ["-" if value is None else f"{value:.3g}" for value in pair]
        ratio = f" ({pair[1] / pair[0]:.1f}x)" if None not in pair and pair[0] else ""
        cells.append(f"{name} {texts[0]} | {texts[1]}{ratio}")
    return "   ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--structures", nargs="+", choices=STRUCTURES, default=list(STRUCTURES))
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--reference-python", default=sys.executable)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one measurement")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument(
        "--agreement", action="store_true", help="no times: the variance at one prior precision"
    )
    parser.add_argument("--out", type=Path, help="JSON file that the measurements join")
    parser.add_argument("--one", nargs=3, metavar=("LIBRARY", "CASE", "STRUCTURE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        library, case, structure = args.one
        warnings.simplefilter("ignore")
        measure = measure_pyrobnn if library == "pyrobnn" else measure_laplace_torch
        print(json.dumps(measure(case, structure, CLOCKS[args.clock], args.agreement)))
        return
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out and args.out.exists() else {}
    print("seconds and MB: pyrobnn | laplace-torch (their time / ours)")
    for case in args.cases:
        for structure in args.structures:
            if case == "classes" and structure == "full":
                continue  # 50,890 weights: 20 GB, refused by both
            pythons = {"pyrobnn": sys.executable, "laplace-torch": args.reference_python}
            both = {
                library: run_one(pythons[library], library, case, structure, args)
                for library in args.libraries
            }
            if args.agreement:
                before = results.get(f"{case}/{structure}", {})
                both = {
                    library: (before.get(library) or {}) | (found or {}) for library, found in both.items()
                }
                both = before | both
            results[f"{case}/{structure}"] = both
            print(row(case, structure, both.get("pyrobnn"), both.get("laplace-torch")), flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
