"""Effective draws per gradient of each mass matrix of NUTS, on nets, a hierarchical program and reference posteriors.

    python scripts/benchmark_metric.py --results scripts/results/metric.jsonl --posteriors FOLDER --boston FILE

Effective draws are those of the slowest function value of a net and of the slowest site value of a program; gradients
are those of the draws, without the warm-up, whose own are a column of the record. Both are counts: they do not depend
on the machine. Reference posteriors (see benchmark_posteriordb.py) run in float64 and are judged as there, so that a
mass matrix that is fast and wrong is seen. What the results file already has is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from benchmark_nuts import CASES, data, torch_program

from pyrobnn.gradient import batched_gradient
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.hmc.hooks import slowest_ess
from pyrobnn.inference.hmc.machine import STATS, Machine
from pyrobnn.inference.hmc.metric import form_of
from pyrobnn.inference.hmc.run import Run
from pyrobnn.inference.hmc.starts import starts
from pyrobnn.inference.nuts import DEFAULT_WARMUP, MOST_WARMUP

NUM_CHAINS = 4


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


#: programs that no choice in the sampler was made on
PROGRAMS = [logistic, intercepts, autoregression, horseshoe]


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


def problem(name, options):
    """What is fitted, and the reference's scalars where there are any."""
    reference = None
    if name == "boston":
        model, x, y = boston(options.boston)
    elif name in (own := {program.__name__: program for program in PROGRAMS}):
        model, (x, y) = own[name], made_up(own[name])
    elif name in CASES:
        model, (x, y) = torch_program(CASES[name]), (torch.from_numpy(part) for part in data(CASES[name]))
    else:
        import benchmark_posteriordb

        torch.set_default_dtype(torch.float64)
        posterior = json.loads((options.posteriors / f"{name}.json").read_text(encoding="utf-8"))
        model, x, y = benchmark_posteriordb.problem(name, posterior["data"])
        reference = posterior["parameters"]
    return prepare(model, x, y, points="held"), reference


def sampled(name, mass_matrix, options, num_draws):
    """One row per seed; the step is compiled once."""
    torch.set_default_dtype(torch.float32)
    held, reference = problem(name, options)
    torch.set_default_dtype(held.density.dtype)
    advance = None
    for seed in options.missing(name, mass_matrix):
        z, _ = starts(held, None, seed, NUM_CHAINS, not held.is_bnn)
        gradient, batched = batched_gradient(held.density.log_joint, z)
        if advance is None:
            slots = max(num_draws, MOST_WARMUP)
            machine = Machine(gradient, NUM_CHAINS, held.density.dim, slots, z.dtype, z.device)
            run = Run.__new__(Run)
        run.__init__(
            machine,
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
        yield row(name, mass_matrix, seed, held, reference, drawn)


def row(name, mass_matrix, seed, held, reference, drawn):
    """What a run gives: effective draws, gradients of its draws and of its warm-up, and how it was judged."""
    stats = {key: drawn.stats[..., i] for i, key in enumerate(STATS)}
    gradients = float(stats["n_steps"].sum())
    ess = slowest_ess(held, drawn.positions)
    record = {
        "case": name,
        "mass_matrix": mass_matrix,
        "seed": seed,
        "draws": drawn.stats.shape[1],
        "ess": round(ess, 1),
        "gradients": gradients,
        "ess per 1000 gradients": round(1000 * ess / gradients, 4),
        "warmup gradients": drawn.num_gradients - gradients,
        "acceptance": round(float(stats["acceptance_rate"].mean()), 3),
        "divergences": int(stats["diverging"].sum()),
        "unfinished": drawn.unfinished,
    }
    if reference is not None:
        from benchmark_posteriordb import judged, scalars

        rhat, bulk, (errors, where) = judged(scalars(held.density.constrain(drawn.positions)), reference)
        right = rhat <= 1.05 and bulk >= 100 and errors <= 4
        record |= {"right": bool(right), "rhat": round(rhat, 3), "errors": round(errors, 2), "where": where}
    return record


def main():
    """Print the rows; write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", help="some of them alone")
    parser.add_argument("--posteriors", type=Path, help="folder of reference posteriors: every one is a case")
    parser.add_argument("--boston", type=Path, help="the table of boston, which is then a case")
    parser.add_argument("--mass-matrices", nargs="+", default=["diag", "low_rank", "auto"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=500, help="of each chain")
    parser.add_argument("--results", type=Path, help="append the rows here, one JSON object a line")
    options = parser.parse_args()
    from pyrobnn.studies.uci import append_record, read_records

    known = options.results is not None and options.results.exists()
    done = (
        {(r["case"], r["mass_matrix"], r["seed"]) for r in read_records(options.results)} if known else set()
    )
    options.missing = lambda *which: [n for n in range(options.seeds) if (*which, n) not in done]
    posteriors = sorted(options.posteriors.glob("*.json")) if options.posteriors else []
    cases = [*CASES, *(program.__name__ for program in PROGRAMS), *(["boston"] if options.boston else [])]
    cases += [path.stem for path in posteriors]
    warnings.simplefilter("ignore")
    for name, mass_matrix in itertools.product(options.cases or cases, options.mass_matrices):
        for record in sampled(name, mass_matrix, options, options.draws):
            print(*(f"{key}={value}" for key, value in record.items()), sep="  ", flush=True)
            if options.results:
                append_record(options.results, record)


if __name__ == "__main__":
    main()
