"""Posteriors on which the studies of NUTS and its rivals are run, and the loop of their runs."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from arviz_stats.base import array_stats
from benchmark_nuts import CASES, data, torch_program

from pyrobnn.gradient import batched_gradient
from pyrobnn.inference.fitting.problem import Problem, prepare
from pyrobnn.inference.hmc.draws import Draws
from pyrobnn.inference.hmc.machine import STATS, Machine
from pyrobnn.inference.hmc.metric import form_of
from pyrobnn.inference.hmc.run import Run
from pyrobnn.inference.hmc.starts import starts
from pyrobnn.inference.nuts import DEFAULT_WARMUP, MOST_WARMUP
from pyrobnn.studies.uci import append_record, read_records

NUM_CHAINS = 4
INDEPENDENT, CENTRED = "logistic, independent inputs", "groups, centred"


def logistic(x, y):
    """Logistic regression."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(x.shape[1]), 2.5).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def intercepts(x, y):
    """Counts with an intercept per group, centred; the last column of ``x`` is the group."""
    group = x[:, -1].long()
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(x.shape[1] - 1), 1.0).to_event(1))
    with pyro.plate("groups", int(group.max()) + 1):
        offset = pyro.sample("offset", dist.Normal(mean, spread))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((offset[group] + x[:, :-1] @ slope).exp()), obs=y)


def autoregression(x, y):
    """AR(2) about a mean, conditional on the first two values."""
    mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    phi = pyro.sample("phi", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    loc = mean + phi[0] * (y[1:-1] - mean) + phi[1] * (y[:-2] - mean)
    with pyro.plate("data", len(y) - 2):
        pyro.sample("y", dist.Normal(loc, scale), obs=y[2:])


def horseshoe(x, y):
    """Linear regression with a horseshoe prior, non-centred."""
    tau = pyro.sample("tau", dist.HalfCauchy(0.1))
    local = pyro.sample("local", dist.HalfCauchy(torch.ones(x.shape[1])).to_event(1))
    raw = pyro.sample("raw", dist.Normal(torch.zeros(x.shape[1]), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ (tau * local * raw), scale), obs=y)


def groups_centred(x, y):
    """Means of groups of four, centred, with little data on their spread: a funnel."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("groups", 12):
        offset = pyro.sample("offset", dist.Normal(mean, spread))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(offset[x], 1.0), obs=y)


#: programs that no choice in the sampler was made on
PROGRAMS = {program.__name__: program for program in (logistic, intercepts, autoregression, horseshoe)}


def made_up(program):
    """Data (x, y) for one of PROGRAMS."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    if program is autoregression:
        y = [torch.tensor(5.0), torch.tensor(5.0)]
        for noise in normal(300):
            y.append(5 + 0.6 * (y[-1] - 5) + 0.3 * (y[-2] - 5) + noise)
        return None, torch.stack(y)
    x = normal(300, {logistic: 30, intercepts: 4, horseshoe: 30}[program])
    if program is logistic:  # inputs that correlate by 0.9
        x = (0.1**0.5 * x + 0.9**0.5 * normal(300, 1)).contiguous()
        return x, torch.bernoulli((x @ normal(30)).sigmoid(), generator=draw)
    if program is intercepts:
        group = torch.arange(300) % 40
        rate = (1 + 0.5 * normal(40)[group] + x @ torch.tensor([0.5, -0.5, 0.2, 0.0])).exp()
        return torch.cat([x, group.unsqueeze(-1)], 1), torch.poisson(rate, generator=draw)
    return x, x[:, :3] @ torch.tensor([2.0, -1.0, 0.5]) + normal(300)


def boston(path):
    """The 13-50-1 net of benchmark_nuts on the Boston housing table, standardised; the last column is the target."""
    import numpy as np

    table = torch.from_numpy(np.loadtxt(path)).float()
    table = (table - table.mean(0)) / table.std(0)
    return torch_program(CASES["13-50-1"]), table[:, :-1], table[:, -1]


def problem(
    name: str, posteriors: Path | None = None, boston_file: Path | None = None
) -> tuple[Problem, Any]:
    """What is fitted, and the reference's scalars where there are any (then in float64)."""
    draw = torch.Generator().manual_seed(3)
    reference, model = None, None
    if name == "boston":
        model, x, y = boston(boston_file)
    elif name == INDEPENDENT:
        model, x = logistic, torch.randn(300, 30, generator=draw)
        y = torch.bernoulli((x @ (0.5 * torch.randn(30, generator=draw))).sigmoid(), generator=draw)
    elif name == CENTRED:
        model, x = groups_centred, torch.arange(48) % 12
        y = 0.5 * torch.randn(12, generator=draw)[x] + torch.randn(48, generator=draw)
    elif name in PROGRAMS:
        model, (x, y) = PROGRAMS[name], made_up(PROGRAMS[name])
    elif name in CASES:
        model, (x, y) = torch_program(CASES[name]), (torch.from_numpy(part) for part in data(CASES[name]))
    else:
        import benchmark_posteriordb

        torch.set_default_dtype(torch.float64)
        posterior = json.loads((posteriors / f"{name}.json").read_text(encoding="utf-8"))
        model, x, y = benchmark_posteriordb.problem(name, posterior["data"])
        reference = posterior["parameters"]
    return prepare(model, x, y, points="held"), reference


def values(held: Problem, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is judged, (chain, draw, value): a program's sites; a net's function at two kinds of inputs.

    Those are 16 rows of the data, and 16 inputs three times as wide.
    """
    draws = held.density.constrain(positions)
    if not held.is_bnn:
        return {"sites": torch.cat([value.reshape(*value.shape[:2], -1) for value in draws.values()], -1)}
    wide = 3 * torch.randn(16, *held.x.shape[1:], generator=torch.Generator().manual_seed(1))
    rows = held.x[torch.linspace(0, len(held.x) - 1, 16).long()]
    function = torch.func.vmap(torch.func.vmap(held.bnn.forward, (0, None)), (0, None))
    return {where: function(draws, x).flatten(2) for where, x in (("at the data", rows), ("wide", wide))}


def slowest(value: torch.Tensor) -> float:
    """Bulk effective draws of the slowest of (chain, draw, value)."""
    return float(array_stats.ess(value.double().numpy(), chain_axis=0, draw_axis=1, method="bulk").min())


def runs(
    held: Problem,
    seeds: Sequence[int],
    num_draws: int,
    mass_matrix: str = "auto",
    machine: Callable[..., Machine] = Machine,
    kind: type[Run] = Run,
    **options: Any,
) -> Iterator[tuple[int, Draws]]:
    """A run from each seed; the step is compiled once."""
    run, advance, made = kind.__new__(kind), None, None
    for seed in seeds:
        z, _ = starts(held, None, seed, NUM_CHAINS, not held.is_bnn)
        gradient, batched = batched_gradient(held.density.log_joint, z)
        if made is None:
            slots = max(num_draws, MOST_WARMUP)
            made = machine(gradient, NUM_CHAINS, held.density.dim, slots, z.dtype, z.device, **options)
        run.__init__(
            made,
            seed=seed,
            num_warmup=DEFAULT_WARMUP,
            most=MOST_WARMUP,
            names=None if held.is_bnn else held.density.site_of,
            mass_matrix=form_of(mass_matrix, held.is_bnn),
            compile=batched,
        )
        with torch.no_grad():
            run.begin(z)
            run._advance = advance
            drawn = run.sample(num_draws)
            advance = run._advance
        yield seed, drawn


def told(drawn: Draws) -> dict[str, Any]:
    """What a run's record says of it, but for what was judged."""
    stats = {key: drawn.stats[..., i] for i, key in enumerate(STATS)}
    gradients = float(stats["n_steps"].sum())
    return {
        "gradients": gradients,
        "warmup gradients": drawn.num_gradients - gradients,
        "acceptance": round(float(stats["acceptance_rate"].mean()), 3),
        "divergences": int(stats["diverging"].sum()),
        "unfinished": drawn.unfinished,
    }


def parser(doc: str, cases: Sequence[str], seeds: int) -> argparse.ArgumentParser:
    """The options of a study of samplers."""
    warnings.simplefilter("ignore")
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--cases", nargs="+", default=cases, help="some of them alone")
    found.add_argument("--seeds", type=int, default=seeds)
    found.add_argument("--draws", type=int, default=500, help="of each chain")
    found.add_argument("--results", type=Path, help="append the rows here, one JSON object a line")
    return found


class Records:
    """The rows of a results file: which seeds it lacks, and where new ones go; None keeps none."""

    def __init__(self, path: Path | None):
        self.path = path
        self.known = read_records(path) if path is not None and path.exists() else []

    def missing(self, num_seeds: int, **row: Any) -> list[int]:
        """Seeds that no row like this one has."""
        done = {r["seed"] for r in self.known if all(r[key] == value for key, value in row.items())}
        return [seed for seed in range(num_seeds) if seed not in done]

    def add(self, row: Mapping[str, Any]) -> None:
        """Print the row, and keep it."""
        print(*(f"{key}={value}" for key, value in row.items()), sep="  ", flush=True)
        if self.path is not None:
            append_record(self.path, row)
