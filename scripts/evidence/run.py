"""Log evidence by tempered SMC, beside exact values, beside Laplace's and the bound of SVI; tanh ranked against ReLU.

    python scripts/evidence/run.py                    # goes on where the results file ends
    python scripts/evidence/run.py --cases linear "one tanh unit" --seeds 0

Exact are a linear model with known noise (a normal) and a net of one unit without biases (a sum over a grid of its two
weights). Of 1-10-1 nets nothing exact is known: there the seeds of SMC say how well they agree, and which of tanh and
ReLU each way prefers is what a comparison of models by evidence would conclude. All are float64, at the methods'
defaults; seconds are CPU seconds of one thread, compiling included.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from pathlib import Path
from statistics import fmean, stdev

import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyrobnn as pb

sys.path.insert(0, str(Path(__file__).parents[1]))

from records import append_record, read_records  # noqa: E402

RESULTS = Path(__file__).with_name("records.jsonl")
NOISE = 0.3
WAYS = {
    "SMC": pb.SMC(),
    "Laplace": pb.Laplace(),
    "SVI": pb.SVI(),
}
#: the data on which tanh is ranked against ReLU
DATA = ("gap", "step", "kink", "line", "wave", "bump")


def data_of(name: str) -> tuple[Tensor, Tensor]:
    """Forty points of a curve with noise of sd 0.3."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    if name == "gap":
        x = torch.cat([x[:20] - 0.5, x[20:] + 0.5])
    f = {
        "gap": torch.sin(2 * x),
        "step": 1.5 * torch.tanh(4 * x),
        "kink": 1.5 * x.abs() - 1.5,
        "line": x,
        "wave": torch.sin(3 * x),
        "bump": 2 * torch.exp(-2 * x**2) - 0.5,
    }[name]
    return x, f + NOISE * torch.randn(
        x.shape,
        generator=generator,
        dtype=torch.float64,
    )


def linear() -> tuple[pb.BNN, Tensor, Tensor, float]:
    """Five inputs and a bias with N(0, 1) priors: y is jointly normal."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(
        60,
        5,
        generator=generator,
        dtype=torch.float64,
    )
    y = x.sum(1, keepdim=True) / 2 + NOISE * torch.randn(
        60,
        1,
        generator=generator,
        dtype=torch.float64,
    )
    design = torch.cat([x, torch.ones(60, 1, dtype=torch.float64)], 1)
    cov = design @ design.T + NOISE**2 * torch.eye(60, dtype=torch.float64)
    exact = dist.MultivariateNormal(torch.zeros(60, dtype=torch.float64), cov).log_prob(y[:, 0])
    return bnn(nn.Linear(5, 1), 1.0), x, y, float(exact)


def one_unit() -> tuple[pb.BNN, Tensor, Tensor, float]:
    """y = v tanh(w x), with two modes that mirror each other: summed over a grid."""
    x, y = data_of("step")
    grid = torch.linspace(
        -14,
        14,
        1401,
        dtype=torch.float64,
    )
    w, v = torch.meshgrid(grid, grid, indexing="ij")
    prior = dist.Normal(0.0, 2.0)
    log_joint = prior.log_prob(w) + prior.log_prob(v)
    for point, target in zip(x[:, 0], y[:, 0], strict=True):
        log_joint = log_joint + dist.Normal(v * torch.tanh(w * point), NOISE).log_prob(target)
    exact = float(log_joint.logsumexp((0, 1))) + 2 * math.log(float(grid[1] - grid[0]))
    layers = (nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False))
    return bnn(nn.Sequential(*layers), 2.0), x, y, exact


def bnn(net: nn.Module, scale: float) -> pb.BNN:
    """A net with N(0, scale²) weights and known noise, in float64."""
    prior = pb.priors.IIDPrior(dist.Normal(0.0, scale))
    return pb.BNN(net.double(), prior, pb.likelihoods.HomoskedasticGaussian(NOISE))


def case(name: str) -> tuple[pb.BNN, Tensor, Tensor, float | None]:
    """The model, its data and its log evidence, None where that is not known."""
    torch.manual_seed(0)
    if name == "linear":
        return linear()
    if name == "one tanh unit":
        return one_unit()
    activation, _, data = name.partition(" on ")
    return (
        bnn(
            pb.networks.mlp(
                1,
                (10,),
                activation=activation,
                seed=0,
            ),
            1.0,
        ),
        *data_of(data),
        None,
    )


CASES = ["linear", "one tanh unit"]
for _data in DATA:
    CASES += [f"tanh on {_data}", f"relu on {_data}"]


def table(records: list[dict]) -> str:
    """Each case, by each way: the mean over seeds, and the sd where there are several."""
    lines = [
        "| model | exact | SMC, mean of seeds (sd; its own error) | Laplace | SVI, a lower bound | CPU s of SMC |",
        "|---|---|---|---|---|---|",
    ]
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        values.setdefault((record["case"], record["way"]), []).append(record["log_evidence"])
    for name in CASES:
        runs = [r for r in records if (r["case"], r["way"]) == (name, "SMC")]
        if not runs:
            continue
        exact = runs[0]["exact"]
        cells = [
            "" if exact is None else f"{exact:.2f}",
            smc_cell(runs),
            mean_of(values.get((name, "Laplace"))),
            mean_of(values.get((name, "SVI"))),
            f"{fmean(run['cpu_seconds'] for run in runs):.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "tanh over ReLU, nats:",
        "",
        "| data | SMC | Laplace | SVI |",
        "|---|---|---|---|",
    ]
    for data in DATA:
        tanh = [values.get((f"tanh on {data}", way)) for way in WAYS]
        relu = [values.get((f"relu on {data}", way)) for way in WAYS]
        if all(tanh) and all(relu):
            gaps = [f"{fmean(a) - fmean(b):+.2f}" for a, b in zip(tanh, relu, strict=True)]
            lines.append(f"| {data} | {' | '.join(gaps)} |")
    return "\n".join(lines)


def smc_cell(runs: list[dict]) -> str:
    """The mean over seeds, with the sd where there are several, and the largest of SMC's own errors."""
    evidence = [run["log_evidence"] for run in runs]
    spread = f"{stdev(evidence):.2f}; " if len(runs) > 1 else ""
    return f"{fmean(evidence):.2f} ({spread}{max(run['error'] for run in runs):.2f})"


def mean_of(values: list[float] | None) -> str:
    """The mean over seeds, nothing where there are none."""
    return f"{fmean(values):.2f}" if values else ""


def main() -> None:
    """Run what is not in the results file yet; print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=CASES,
        choices=CASES,
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    done = {(r["case"], r["way"], r["seed"]) for r in read_records(options.results)}
    for name in options.cases:
        model, x, y, exact = case(name)
        for way, method in WAYS.items():
            for seed in options.seeds if way == "SMC" else options.seeds[:1]:
                if (name, way, seed) in done:
                    continue
                begun = time.process_time()
                posterior = method.fit(model, x, y, seed=seed)
                record = {
                    "case": name,
                    "way": way,
                    "seed": seed,
                    "exact": exact,
                    "log_evidence": posterior.log_evidence,
                    "error": posterior.meta.get("log_evidence_error"),
                    "told": posterior.meta["warnings"],
                    "cpu_seconds": round(time.process_time() - begun, 1),
                }
                print(
                    *(f"{key}={value}" for key, value in record.items()),
                    sep="  ",
                    flush=True,
                )
                append_record(options.results, record)
    print(table(read_records(options.results)))


if __name__ == "__main__":
    main()
