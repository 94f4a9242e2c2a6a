"""Bayesian optimisation and active learning by a posterior that is updated row by row, beside Gaussian processes.

    python scripts/learning/run.py                     # goes on where the records end, seed by seed

Needs BoTorch (``pip install 'pyrobnn[botorch]'``) and, for the tables, ``PYROBNN_DATA``, the directory of the UCI sets.

- ``optimise``: the lowest value of Hartmann-6 and Ackley-10 (on [-5, 10]) by 10 Sobol points and 50 steps of a row;
- ``active``: the rows of a table whose targets are asked for, ten at a time, from 20 to 100, judged on 100 others;
- ``step``: CPU seconds of one new row on a 1-50-1 net of 100, before and after the update is compiled.

The net has a layer of 50 units, tanh for a table, sine for a function. SMC fits it to the first rows: of a table with
that prior and noise which have most evidence there; of a function, which has no noise, with a tenth of the sd of y, and
again at 20 points. ``posterior.update`` learns the other rows. Optimisers search alike, for the log of expected
improvement or (Thompson) where a function drawn from the posterior is lowest.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

import pyrobnn as pb

sys.path.insert(0, str(Path(__file__).parents[1]))

from records import Record, Sweep, measured, read_records  # noqa: E402
from uci.rules import uci  # noqa: E402

RESULTS = Path(__file__).with_name("records.jsonl")
SMC = pb.SMC(num_particles=128)
FUNCTIONS = {
    "Hartmann-6": (0.0, 1.0, -3.32237),
    "Ackley-10": (-5.0, 10.0, 0.0),
}  # bounds and lowest value
OPTIMISERS = ("BNN", "BNN, Thompson", "GP", "GP, SAAS", "random")
LEARNERS = ("BNN, EPIG", "BNN, random", "GP, variance", "GP, random")
FIRST = 10
LAST = 60
START = 20
BATCH = 10
END = 100
SINE = type("Sine", (torch.nn.Module,), {"forward": lambda self, z: z.sin()})
PRIORS = [(scale, noise) for scale in (1.0, 2.0, 4.0) for noise in (0.1, dist.HalfNormal(0.5))]


def net(
    num_inputs: int, scale: float, noise: Any, units: pb.data.Standardizer, activation: Any = "tanh"
) -> pb.BNN:
    """The net of all parts."""
    prior = pb.priors.FanInNormal(scale, 2.0 if activation is SINE else 1.0)  # of a sine, any phase
    mlp = pb.networks.mlp(num_inputs, (50,), activation=activation, seed=0)
    return pb.BNN(mlp, prior, pb.likelihoods.HomoskedasticGaussian(noise), standardizer=units)


def most_evidence(x: Tensor, y: Tensor, units: pb.data.Standardizer, seed: int) -> pb.Posterior:
    """The posterior of the prior that has most evidence."""
    fits = (
        SMC.fit(net(x.shape[1], scale, noise, units), x, y, seed=seed) for scale, noise in PRIORS
    )
    return max(fits, key=lambda one: one.log_evidence or -math.inf)


def units_of(x: Tensor, y: Tensor) -> pb.data.Standardizer:
    """Standard units of the inputs ``x`` and the targets ``y``, which need not be of the same rows."""
    whole = pb.data.Standardizer.fit(pb.data.Dataset(x, torch.zeros(len(x), 1), "x", "regression"))
    part = pb.data.Standardizer.fit(pb.data.Dataset(x[: len(y)], y, "y", "regression"))
    return pb.data.Standardizer(whole.x_mean, whole.x_scale, part.y_mean, part.y_scale)


def gaussian_process(x: Tensor, y: Tensor, saas: bool = False) -> Any:
    """BoTorch's default model, fitted, or its four MAP fits of sparse axes (SAAS; Eriksson & Jankowiak 2021)."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.map_saas import EnsembleMapSaasSingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    model = (EnsembleMapSaasSingleTaskGP if saas else SingleTaskGP)(x.double(), y.double())
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model.eval()


def climb(score: Callable[[Tensor], Tensor], candidates: Tensor) -> Tensor:
    """The best candidate (1, dim) by a score, after 40 steps of Adam from the best five, within the unit cube."""
    with torch.no_grad():
        z = candidates[score(candidates).topk(5).indices]
    z.requires_grad_()
    adam = torch.optim.Adam([z], lr=0.02)
    for _ in range(40):
        adam.zero_grad()
        (-score(z).sum()).backward()
        adam.step()
        z.data.clamp_(0.0, 1.0)
    with torch.no_grad():
        return z[score(z).argmax()][None].clone()


def optimise(problem: str, method: str, seed: int) -> dict[str, Any]:
    """Regret after each evaluation."""
    from botorch.acquisition import (
        GenericMCObjective,
        LogExpectedImprovement,
        qLogExpectedImprovement,
    )
    from botorch.sampling.index_sampler import IndexSampler
    from botorch.test_functions import Ackley, Hartmann

    from pyrobnn.botorch import BNNModel

    low, high, lowest = FUNCTIONS[problem]
    dim = int(problem.rpartition("-")[2])
    function = (
        Hartmann(dim) if problem.startswith("Hartmann") else Ackley(dim, bounds=[(low, high)] * dim)
    )

    def value(x: Tensor) -> Tensor:
        return function(low + (high - low) * x.double()).float()[:, None]

    g = torch.Generator().manual_seed(seed)
    x = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed).draw(FIRST)
    y = value(x)
    posterior = None
    cube = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(1024)
    draws = IndexSampler(torch.Size([128]))
    lower = GenericMCObjective(lambda values, X=None: -values[..., 0])
    for num in range(FIRST, LAST):
        near = (x[y.argmin()] + 0.1 * torch.randn(512, dim, generator=g)).clamp(0.0, 1.0)
        candidates = torch.cat([torch.rand(1024, dim, generator=g), near])
        best = float(y.min())
        if method == "random":
            new = candidates[:1]
        elif method.startswith("GP"):
            improvement = LogExpectedImprovement(
                gaussian_process(x, y, method != "GP"), best, maximize=False
            )
            new = climb(lambda z, ei=improvement: ei(z.double()[:, None]), candidates)
        else:
            fresh = (
                net(dim, 1.0, 0.1, units_of(cube, y), SINE) if num in (FIRST, 2 * FIRST) else None
            )
            posterior = (
                SMC.fit(fresh, x, y, seed=seed)
                if fresh
                else posterior.update(x[-1:], y[-1:], seed=seed)
            )
            if method == "BNN, Thompson":
                drawn = pb.acquire.function(posterior, int(torch.randint(128, (), generator=g)))
                new = climb(lambda z, f=drawn: -f(z)[:, 0], candidates)
            else:
                gain = qLogExpectedImprovement(
                    BNNModel(posterior), -best, sampler=draws, objective=lower
                )
                new = climb(lambda z, ei=gain: ei(z.double()[:, None]), candidates)
        x = torch.cat([x, new])
        y = torch.cat([y, value(new)])
    return {"regret": [round(float(one) - lowest, 4) for one in y[:, 0].cummin(0).values]}


def by_variance(model: Any, x: Tensor, num: int) -> Tensor:
    """Rows (num,) of the largest variance of a Gaussian process, each given those before."""
    cov = model.posterior(x.double()).mvn.covariance_matrix.detach().clone()
    rows = list[int]()
    for _ in range(num):
        variance = cov.diagonal().clone()
        variance[rows] = -1.0
        rows.append(row := int(variance.argmax()))
        cov = cov - torch.outer(cov[row], cov[row]) / (
            cov[row, row] + float(model.likelihood.noise)
        )
    return torch.tensor(rows)


def active(problem: str, method: str, seed: int) -> dict[str, Any]:
    """RMSE and log density on 100 rows, in units of their sd, at each number of rows known."""
    data = uci(problem, seed)[0]
    g = torch.Generator().manual_seed(seed)
    test, pool = torch.randperm(len(data.x), generator=g).split([100, len(data.x) - 100])
    known = pool[:START]
    free = pool[START:]
    scale = float(data.y[test].std())
    units = units_of(data.x[pool], data.y[known])
    posterior = None
    found: dict[str, Any] = {"rows": [], "rmse": [], "log_density": []}
    while True:
        x = data.x[known]
        y = data.y[known]
        if method.startswith("BNN"):
            more = x[-BATCH:], y[-BATCH:]
            posterior = (
                posterior.update(*more, seed=seed)
                if posterior
                else most_evidence(x, y, units, seed)
            )
            p = posterior.predict(data.x[test])
            mean = p.mean
            log_p = p.log_prob(data.y[test])
        else:
            z = units.transform_x(data.x)
            model = gaussian_process(z[known], y)
            p = model.posterior(z[test].double(), observation_noise=True)
            mean = p.mean.detach()
            log_p = (
                dist.Normal(mean, p.variance.detach().sqrt()).log_prob(data.y[test].double()).sum(1)
            )
        found["rows"].append(len(known))
        found["rmse"].append(round(float((mean - data.y[test]).square().mean().sqrt()) / scale, 4))
        found["log_density"].append(round(float(log_p.double().mean()) + math.log(scale), 4))
        if len(known) >= END:
            return found
        shuffled = free[torch.randperm(len(free), generator=g)]
        candidates = shuffled[:200]
        targets = shuffled[:100]
        if method == "BNN, EPIG":
            here = posterior.predict(data.x[candidates])
            there = posterior.predict(data.x[targets])
            epig = partial(pb.acquire.epig, here, there, num_draws=64)
            rows = pb.acquire.batch(lambda given, score=epig: score(given=given), BATCH)
        elif method == "GP, variance":
            rows = by_variance(model, z[candidates], BATCH)
        else:
            rows = torch.arange(BATCH)
        known = torch.cat([known, candidates[rows]])
        free = free[~torch.isin(free, known)]


def step(problem: str, method: str, seed: int) -> dict[str, Any]:
    """CPU seconds of 20 updates by one row each, in turn; the last ten are compiled."""
    data = pb.data.sinusoid(120, seed=seed)
    noise = dist.HalfNormal(0.5) if method == "NUTS" else 0.3
    fitter = pb.NUTS(num_warmup=300) if method == "NUTS" else pb.Laplace()
    x = data.x[:100]
    y = data.y[:100]
    posterior = fitter.fit(net(1, 2.0, noise, units_of(x, y)), x, y, num_draws=300, seed=seed)
    taken: dict[str, Any] = {"seconds_of_steps": [], "gradients": []}
    for row in range(100, 120):
        started = time.process_time()
        posterior = posterior.update(data.x[row : row + 1], data.y[row : row + 1], seed=row)
        taken["seconds_of_steps"].append(round(time.process_time() - started, 3))
        taken["gradients"].append(posterior.meta["gradients"])
    return taken


PARTS: dict[str, Callable[[str, str, int], dict[str, Any]]] = {
    each.__name__: each for each in (optimise, active, step)
}


def tasks(parts: list[str], seeds: list[int]) -> list[Record]:
    """All of a seed before any of the next; steps of the first alone."""
    cells = {
        "step": [("1-50-1", "Laplace"), ("1-50-1", "NUTS")],
        "optimise": [(problem, method) for problem in FUNCTIONS for method in OPTIMISERS],
        "active": [
            (problem, method) for problem in ("concrete", "energy", "yacht") for method in LEARNERS
        ],
    }
    of_seeds = [
        (seed, part) for seed in seeds for part in parts if part != "step" or seed == seeds[0]
    ]
    names = "part", "problem", "method", "seed"
    return [
        dict(zip(names, (part, *cell, seed))) for seed, part in of_seeds for cell in cells[part]
    ]


def numbers(row: Record) -> dict[str, float]:
    """What the tables show of a record."""
    if row["part"] == "optimise":
        return {f"regret after {num}": row["regret"][num - 1] for num in (30, 60)} | {
            "CPU s": row["cpu_seconds"]
        }
    if row["part"] == "active":
        at = {num: row["rows"].index(num) for num in (60, END)}
        scores = {
            f"{name}, {num} rows": row[name][at[num]]
            for name in ("rmse", "log_density")
            for num in at
        }
        return scores | {"CPU s": row["cpu_seconds"]}
    first = sum(row["seconds_of_steps"][:10])
    last = row["seconds_of_steps"][10:]
    steps = {"first ten, CPU s": first, "then median": median(last), "largest": max(last)}
    return steps | {"gradients": median(row["gradients"])}


def table(records: list[dict[str, Any]]) -> str:
    """A table of each part: means over seeds, with standard errors."""
    lines = list[str]()
    for part in PARTS:
        rows = [row for row in records if row["part"] == part]
        cells: dict[tuple[str, str], list[dict[str, float]]] = {}
        for row in sorted(rows, key=lambda row: row["problem"]):
            cells.setdefault((row["problem"], row["method"]), []).append(numbers(row))
        for index, (key, found) in enumerate(cells.items()):
            if not index:
                lines += [
                    "",
                    f"| {part} | | seeds | {' | '.join(found[0])} |",
                    "|---" * (3 + len(found[0])) + "|",
                ]
            means = []
            for name in found[0]:
                values = [float(one[name]) for one in found]
                error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
                means.append(f"{fmean(values):.2f}{error}")
            lines.append(f"| {' | '.join([*key, str(len(found)), *means])} |")
    return "\n".join(lines[1:])


def main() -> None:
    """Run what is not in the records yet; print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, 11)))  # pilots had 0
    options = parser.parse_args()
    torch.set_num_threads(1)
    sweep = Sweep(RESULTS, lambda row: (row["part"], row["problem"], row["method"], row["seed"]))
    todo = tasks(options.parts, options.seeds)
    for task, found in sweep.run(
        lambda one: measured(one, partial(PARTS[one["part"]], *list(one.values())[1:])), todo
    ):
        outcome = (
            f"failed: {found}"
            if isinstance(found, Exception)
            else f"{found['cpu_seconds']:.0f} CPU s"
        )
        print(*task.values(), outcome, sep="  ", flush=True)
    print(table(read_records(RESULTS)))


if __name__ == "__main__":
    main()
