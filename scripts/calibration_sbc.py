"""Simulation-based calibration of a method: are its posteriors right on average over the prior?

    python scripts/calibration_sbc.py --method nuts laplace svi --replications 200 --jobs 2 --out results/sbc

Each replication draws parameters from the prior and data from the likelihood, fits, and ranks the truth among the
draws. It appends one line to OUT/<model>-<method>.jsonl; a rerun continues where the last one stopped. NUTS fits 25
replications at once, the others run in parallel. At the end: a table of χ² p-values, and ECDF-difference plots with
simultaneous 95 % bands.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pyro.distributions as dist
import torch
from joblib import Parallel, delayed
from torch import nn
from tqdm import tqdm

import pyrobnn as pb
from pyrobnn.studies.nuts_batch import fit_batch
from pyrobnn.studies.sbc import combined, rank, replicate, replication_seed, simulate, uniformity

NUM_RANKED = 99
BATCH = 25


def linear_model():
    """Conjugate regression, known noise, three correlated features: full Laplace is exact, mean-field is not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    x = 0.4 * x + 0.9 * x[:, :1]
    net = nn.Linear(3, 1).double()
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(0.5))
    probes = torch.tensor([[1.0, 0, 0], [0, 1.0, -1.0], [-1.0, 1.0, 1.0]], dtype=torch.float64)
    return model, x, probes


def network_model():
    """A 1-10-1 tanh network with inferred noise."""
    x = torch.linspace(-2, 2, 30, dtype=torch.float64)[:, None]
    net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    noise = pb.likelihoods.HomoskedasticGaussian(dist.LogNormal(-1.5, 0.3))
    return pb.BNN(net, prior, noise), x, torch.tensor([[-1.5], [0.0], [3.0]], dtype=torch.float64)


MODELS = {"linear": linear_model, "network": network_model}

#: name → method with its configuration, and draws per chain
METHODS = {
    "nuts": (lambda: pb.NUTS(num_chains=4, num_warmup=300), 300),
    "laplace": (lambda: pb.Laplace(structure="full"), 500),
    "svi": (lambda: pb.SVI(guide="mean_field", num_steps=2000, lr=0.02), 500),
    "svi_full_rank": (lambda: pb.SVI(guide="full_rank", num_steps=3000, lr=0.02), 500),
}


def one(model_name: str, method_name: str, index: int) -> dict:
    """Replication `index`; workers share nothing but the arguments."""
    torch.set_num_threads(1)
    model, x, probes = MODELS[model_name]()
    method, num_draws = METHODS[method_name]
    seed = replication_seed(model_name, index)
    ranks = replicate(model, method(), x, probes, num_draws=num_draws, num_ranked=NUM_RANKED, seed=seed)
    return {"index": index, "ranks": ranks}


def batch(model_name: str, method_name: str, indices: list[int]) -> list[dict]:
    """Several replications of NUTS, fitted as one."""
    model, x, probes = MODELS[model_name]()
    method, num_draws = METHODS[method_name]
    seeds = [replication_seed(model_name, index) for index in indices]
    simulated = [simulate(model, x, seed) for seed in seeds]
    fits = fit_batch(method(), model, x, [y for _, y in simulated], num_draws=num_draws, seed=seeds[0])
    return [
        {"index": index, "ranks": rank(truth, fit, x, y, probes, NUM_RANKED, seed)}
        for index, seed, (truth, y), fit in zip(indices, seeds, simulated, fits, strict=True)
    ]


def results(model_name: str, method_name: str, todo: list[int], jobs: int) -> Iterator[dict]:
    """The replications, as they are finished."""
    if isinstance(METHODS[method_name][0](), pb.NUTS):
        for start in range(0, len(todo), BATCH):
            yield from batch(model_name, method_name, todo[start : start + BATCH])
        return
    tasks = (delayed(one)(model_name, method_name, index) for index in todo)
    yield from Parallel(n_jobs=jobs, return_as="generator_unordered")(tasks)


def read(path: Path) -> dict[int, dict[str, int]]:
    """Finished replications; a last line cut off by an interruption is ignored."""
    finished = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.endswith("}}"):
            record = json.loads(line)
            finished[record["index"]] = record["ranks"]
    return finished


def run(model_name: str, method_name: str, replications: int, jobs: int, out: Path) -> dict[str, np.ndarray]:
    """All replications of one method, continuing from the file; quantity → ranks."""
    path = out / f"{model_name}-{method_name}.jsonl"
    finished = read(path)
    kept = "".join(json.dumps({"index": i, "ranks": r}) + "\n" for i, r in finished.items())
    path.write_text(kept, encoding="utf-8")
    todo = [index for index in range(replications) if index not in finished]
    with path.open("a", encoding="utf-8") as file:
        found = results(model_name, method_name, todo, jobs)
        for record in tqdm(found, method_name, len(todo), unit="replication"):
            file.write(json.dumps(record) + "\n")
            file.flush()
            finished[record["index"]] = record["ranks"]
    kept = [finished[index] for index in range(replications)]
    return {name: np.array([ranks[name] for ranks in kept]) for name in kept[0]}


def report(model_name: str, method_name: str, ranks: dict[str, np.ndarray], out: Path) -> float:
    """Print the table, write the figure, and return the combined p-value."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = {name: uniformity(values, NUM_RANKED) for name, values in ranks.items()}
    figure, axes = plt.subplots(1, len(found), figsize=(2.6 * len(found), 2.4), sharey=True, squeeze=False)
    for ax, (name, result) in zip(axes[0], found.items(), strict=True):
        ax.fill_between(result.grid, result.low, result.high, color="0.85", step="mid")
        colour = "tab:red" if result.outside else "tab:blue"
        ax.step(result.grid, result.difference, where="mid", color=colour)
        ax.set_title(f"{name}  (p = {result.p_value:.2g})", fontsize=8)
    axes[0][0].set_ylabel("ECDF difference")
    figure.tight_layout()
    figure.savefig(out / f"{model_name}-{method_name}.png", dpi=150)
    plt.close(figure)
    for name, result in found.items():
        band = "outside the band" if result.outside else "inside the band"
        print(f"{model_name:8} {method_name:14} {name:20} p = {result.p_value:<9.3g} {band}")
    p_value = combined({name: result.p_value for name, result in found.items()})
    count = len(next(iter(ranks.values())))
    print(f"{model_name:8} {method_name:14} all {count} replications: p = {p_value:.3g} (Bonferroni)")
    return p_value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", nargs="+", choices=sorted(METHODS), default=["laplace", "svi"])
    parser.add_argument("--model", choices=sorted(MODELS), default="linear")
    parser.add_argument("--replications", type=int, default=200, help="at least 10")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("results/sbc"))
    options = parser.parse_args()
    if options.replications < 10:
        parser.error("--replications must be at least 10")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.method:
        ranks = run(options.model, name, options.replications, options.jobs, options.out)
        report(options.model, name, ranks, options.out)


if __name__ == "__main__":
    main()
