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
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from torch import Tensor

import pyrobnn as pb

if TYPE_CHECKING:
    from botorch.sampling.index_sampler import IndexSampler

sys.path.insert(0, str(Path(__file__).parents[1]))

from records import Record, Sweep, measured, read_records  # noqa: E402
from uci.rules import uci  # noqa: E402

RESULTS = Path(__file__).with_name("records.jsonl")
SMC = pb.SMC(num_particles=128)
#: bounds and lowest value
FUNCTIONS = {"Hartmann-6": (0.0, 1.0, -3.32237), "Ackley-10": (-5.0, 10.0, 0.0)}
OPTIMISERS = ("BNN", "BNN, Thompson", "GP", "GP, SAAS", "random")
LEARNERS = ("BNN, EPIG", "BNN, random", "GP, variance", "GP, random")
FIRST = 10
LAST = 60
START = 20
BATCH = 10
END = 100
SINE = type("Sine", (torch.nn.Module,), {"forward": lambda self, z: z.sin()})
PRIORS = list(itertools.product((1.0, 2.0, 4.0), (0.1, dist.HalfNormal(0.5))))


def net(
    num_inputs: int,
    scale: float,
    noise: float | dist.HalfNormal,
    units: pb.data.Standardizer,
    activation: str | type[torch.nn.Module] = "tanh",
) -> pb.BNN:
    """The net of all parts."""
    # wider biases of a sine: any phase
    prior = pb.priors.FanInNormal(scale, 2.0 if activation is SINE else 1.0)
    mlp = pb.networks.mlp(
        num_inputs,
        (50,),
        activation=activation,
        seed=0,
    )
    return pb.BNN(
        mlp,
        prior,
        pb.likelihoods.HomoskedasticGaussian(noise),
        standardizer=units,
    )


def most_evidence(
    x: Tensor,
    y: Tensor,
    units: pb.data.Standardizer,
    seed: int,
) -> pb.Posterior:
    """The posterior of the prior that has most evidence."""
    fits = (
        SMC.fit(
            net(x.shape[1], scale, noise, units),
            x,
            y,
            seed=seed,
        )
        for scale, noise in PRIORS
    )
    return max(fits, key=lambda posterior: posterior.log_evidence or -math.inf)


def units_of(x: Tensor, y: Tensor) -> pb.data.Standardizer:
    """Standard units of the inputs ``x`` and the targets ``y``, which need not be of the same rows."""
    of_x = pb.data.Standardizer.fit(pb.data.Dataset(x, torch.zeros(len(x), 1), "x", "regression"))
    of_y = pb.data.Standardizer.fit(pb.data.Dataset(x[: len(y)], y, "y", "regression"))
    return pb.data.Standardizer(of_x.x_mean, of_x.x_scale, of_y.y_mean, of_y.y_scale)


def gaussian_process(x: Tensor, y: Tensor, saas: bool = False) -> Any:
    """BoTorch's default model, fitted, or its four MAP fits of sparse axes (SAAS; Eriksson & Jankowiak 2021)."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.map_saas import EnsembleMapSaasSingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    kind = EnsembleMapSaasSingleTaskGP if saas else SingleTaskGP
    model = kind(x.double(), y.double())
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
    from botorch.sampling.index_sampler import IndexSampler

    lowest = FUNCTIONS[problem][2]
    value = function_of(problem)
    dim = int(problem.rpartition("-")[2])
    g = torch.Generator().manual_seed(seed)
    x = torch.quasirandom.SobolEngine(
        dim,
        scramble=True,
        seed=seed,
    ).draw(FIRST)
    y = value(x)
    posterior = None
    cube = torch.quasirandom.SobolEngine(
        dim,
        scramble=True,
        seed=0,
    ).draw(1024)
    sampler = IndexSampler(torch.Size([128]))
    for num in range(FIRST, LAST):
        near = (x[y.argmin()] + 0.1 * torch.randn(512, dim, generator=g)).clamp(0.0, 1.0)
        candidates = torch.cat([torch.rand(1024, dim, generator=g), near])
        best = float(y.min())
        if method == "random":
            new = candidates[:1]
        elif method.startswith("GP"):
            model = gaussian_process(x, y, method != "GP")
            new = climb(improvement_by_process(model, best), candidates)
        else:
            if num in (FIRST, 2 * FIRST):
                posterior = SMC.fit(
                    net(dim, 1.0, 0.1, units_of(cube, y), SINE),
                    x,
                    y,
                    seed=seed,
                )
            else:
                posterior = posterior.update(x[-1:], y[-1:], seed=seed)
            if method == "BNN, Thompson":
                draw = int(torch.randint(128, (), generator=g))
                new = climb(lowness_of_draw(posterior, draw), candidates)
            else:
                new = climb(improvement_by_net(posterior, sampler, best), candidates)
        x = torch.cat([x, new])
        y = torch.cat([y, value(new)])
    return {"regret": [round(float(low) - lowest, 4) for low in y[:, 0].cummin(0).values]}


def function_of(problem: str) -> Callable[[Tensor], Tensor]:
    """The function to minimise, of points in the unit cube; (row, 1)."""
    from botorch.test_functions import Ackley, Hartmann

    low, high, _ = FUNCTIONS[problem]
    dim = int(problem.rpartition("-")[2])
    if problem.startswith("Hartmann"):
        function = Hartmann(dim)
    else:
        function = Ackley(dim, bounds=[(low, high)] * dim)

    def value(x: Tensor) -> Tensor:
        return function(low + (high - low) * x.double()).float()[:, None]

    return value


def improvement_by_process(model: Any, best: float) -> Callable[[Tensor], Tensor]:
    """Log expected improvement over ``best`` by a Gaussian process."""
    from botorch.acquisition import LogExpectedImprovement

    improvement = LogExpectedImprovement(
        model,
        best,
        maximize=False,
    )
    return lambda z: improvement(z.double()[:, None])


def improvement_by_net(
    posterior: pb.Posterior, sampler: IndexSampler, best: float
) -> Callable[[Tensor], Tensor]:
    """Log expected improvement over ``best`` by the draws of the posterior that ``sampler`` takes."""
    from botorch.acquisition import GenericMCObjective, qLogExpectedImprovement

    from pyrobnn.botorch import BNNModel

    improvement = qLogExpectedImprovement(
        BNNModel(posterior),
        -best,
        sampler=sampler,
        objective=GenericMCObjective(lambda values, X=None: -values[..., 0]),
    )
    return lambda z: improvement(z.double()[:, None])


def lowness_of_draw(posterior: pb.Posterior, draw: int) -> Callable[[Tensor], Tensor]:
    """One function of the posterior, with the other sign."""
    function = pb.acquire.function(posterior, draw)
    return lambda z: -function(z)[:, 0]


def by_variance(model: Any, x: Tensor, num: int) -> Tensor:
    """Rows (num,) of the largest variance of a Gaussian process, each given those before."""
    cov = model.posterior(x.double()).mvn.covariance_matrix.detach().clone()
    rows = list[int]()
    for _ in range(num):
        variance = cov.diagonal().clone()
        variance[rows] = -1.0
        row = int(variance.argmax())
        rows.append(row)
        total = cov[row, row] + float(model.likelihood.noise)
        cov = cov - torch.outer(cov[row], cov[row]) / total
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
    curves: dict[str, list[float]] = {"rows": [], "rmse": [], "log_density": []}
    while True:
        x = data.x[known]
        y = data.y[known]
        if method.startswith("BNN"):
            if posterior is None:
                posterior = most_evidence(x, y, units, seed)
            else:
                posterior = posterior.update(
                    x[-BATCH:],
                    y[-BATCH:],
                    seed=seed,
                )
            p = posterior.predict(data.x[test])
            mean = p.mean
            log_p = p.log_prob(data.y[test])
        else:
            z = units.transform_x(data.x)
            model = gaussian_process(z[known], y)
            p = model.posterior(z[test].double(), observation_noise=True)
            mean = p.mean.detach()
            normal = dist.Normal(mean, p.variance.detach().sqrt())
            log_p = normal.log_prob(data.y[test].double()).sum(1)
        rmse = float((mean - data.y[test]).square().mean().sqrt()) / scale
        curves["rows"].append(len(known))
        curves["rmse"].append(round(rmse, 4))
        curves["log_density"].append(round(float(log_p.double().mean()) + math.log(scale), 4))
        if len(known) >= END:
            return curves
        shuffled = free[torch.randperm(len(free), generator=g)]
        candidates = shuffled[:200]
        targets = shuffled[:100]
        if method == "BNN, EPIG":
            at_candidates = posterior.predict(data.x[candidates])
            at_targets = posterior.predict(data.x[targets])
            epig = partial(
                pb.acquire.epig,
                at_candidates,
                at_targets,
                num_draws=64,
            )
            rows = pb.acquire.batch(lambda rows, score=epig: score(given=rows), BATCH)
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
    posterior = fitter.fit(
        net(1, 2.0, noise, units_of(x, y)),
        x,
        y,
        num_draws=300,
        seed=seed,
    )
    taken: dict[str, Any] = {"seconds_of_steps": [], "gradients": []}
    for row in range(100, 120):
        started = time.process_time()
        posterior = posterior.update(
            data.x[row : row + 1],
            data.y[row : row + 1],
            seed=row,
        )
        taken["seconds_of_steps"].append(round(time.process_time() - started, 3))
        taken["gradients"].append(posterior.meta["gradients"])
    return taken


PARTS: dict[str, Callable[[str, str, int], dict[str, Any]]] = {
    function.__name__: function for function in (optimise, active, step)
}


def tasks(parts: list[str], seeds: list[int]) -> list[Record]:
    """All of a seed before any of the next; steps of the first alone."""
    cells = {
        "step": [("1-50-1", "Laplace"), ("1-50-1", "NUTS")],
        "optimise": list(itertools.product(FUNCTIONS, OPTIMISERS)),
        "active": list(itertools.product(("concrete", "energy", "yacht"), LEARNERS)),
    }
    work: list[Record] = []
    for seed, name in itertools.product(seeds, parts):
        if name == "step" and seed != seeds[0]:
            continue
        for problem, method in cells[name]:
            work.append(
                {
                    "part": name,
                    "problem": problem,
                    "method": method,
                    "seed": seed,
                }
            )
    return work


def numbers(row: Record) -> dict[str, float]:
    """What the tables show of a record."""
    if row["part"] == "optimise":
        regrets = {f"regret after {num}": row["regret"][num - 1] for num in (30, 60)}
        return regrets | {"CPU s": row["cpu_seconds"]}
    if row["part"] == "active":
        scores = {}
        for name, num in itertools.product(("rmse", "log_density"), (60, END)):
            scores[f"{name}, {num} rows"] = row[name][row["rows"].index(num)]
        return scores | {"CPU s": row["cpu_seconds"]}
    compiled = row["seconds_of_steps"][10:]
    return {
        "first ten, CPU s": sum(row["seconds_of_steps"][:10]),
        "then median": median(compiled),
        "largest": max(compiled),
        "gradients": median(row["gradients"]),
    }


def table(records: Sequence[Record]) -> str:
    """A table of each part: means over seeds, with standard errors."""
    lines = list[str]()
    for name in PARTS:
        rows = [row for row in records if row["part"] == name]
        cells: dict[tuple[str, str], list[dict[str, float]]] = {}
        for row in sorted(rows, key=lambda row: row["problem"]):
            cells.setdefault((row["problem"], row["method"]), []).append(numbers(row))
        if not cells:
            continue
        labels = list(numbers(rows[0]))
        lines += ["", f"| {name} | | seeds | {' | '.join(labels)} |"]
        lines.append("|---" * (3 + len(labels)) + "|")
        for key, runs in cells.items():
            means = []
            for label in labels:
                means.append(mean_of([float(run[label]) for run in runs]))
            lines.append(f"| {' | '.join([*key, str(len(runs)), *means])} |")
    return "\n".join(lines[1:])


def mean_of(values: list[float]) -> str:
    """The mean, with its standard error where there are several values."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{error}"


def run_task(task: Record) -> Record:
    """The record of one task of :func:`tasks`."""
    function = PARTS[task["part"]]
    return measured(task, partial(function, task["problem"], task["method"], task["seed"]))


def main() -> None:
    """Run what is not in the records yet; print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=list(PARTS),
        choices=PARTS,
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=list(range(1, 11)),
    )  # pilots had 0
    options = parser.parse_args()
    torch.set_num_threads(1)
    sweep = Sweep(RESULTS, lambda row: (row["part"], row["problem"], row["method"], row["seed"]))
    todo = tasks(options.parts, options.seeds)
    for task, outcome in sweep.run(run_task, todo):
        if isinstance(outcome, Exception):
            text = f"failed: {outcome}"
        else:
            text = f"{outcome['cpu_seconds']:.0f} CPU s"
        print(*task.values(), text, sep="  ", flush=True)
    print(table(read_records(RESULTS)))


if __name__ == "__main__":
    main()
