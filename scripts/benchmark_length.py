"""HMC whose warm-up finds the length of its paths: effective draws per gradient, beside those of NUTS.

    python scripts/benchmark_length.py --results scripts/results/length.jsonl

The sampler is not part of the package: it would be if it gave 1.3 times NUTS' effective draws per gradient in the
median and never less than 0.9. A path is a quarter of the slowest period of the whitened posterior, times 0.5 to 1.5:
pi / 2 times the standard deviation along the widest direction, which the windows of the warm-up tell. Both samplers
have four chains, the same starts, and the default warm-up and mass matrix. Effective draws are those of the slowest
value: of a program's sites; of a net's function at 16 rows of the data ("at the data") and at 16 inputs three times as
wide ("wide"). Beside them, those of the slowest squared deviation: paths that overshoot make means look better than
they make variances. Gradients are those of the draws; those of the warm-up are a column of the record. All are counts:
they do not depend on the machine. What the results file already has is not run again.

Reference: Focusing on Difficult Directions for Learning HMC Trajectory Lengths (Sountsov & Hoffman, 2021), which looks
for the length of the largest jump along the widest direction.
"""

from __future__ import annotations

import argparse
import itertools
import math
import warnings
from pathlib import Path
from statistics import fmean

import pyro
import pyro.distributions as dist
import torch
from arviz_stats.base import array_stats
from benchmark_mams import problem
from benchmark_metric import NUM_CHAINS, PROGRAMS, logistic
from benchmark_nuts import CASES

from pyrobnn.gradient import batched_gradient
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.hmc import metric, rng
from pyrobnn.inference.hmc.machine import STATS, Machine, Scalars
from pyrobnn.inference.hmc.metric import form_of
from pyrobnn.inference.hmc.run import Run
from pyrobnn.inference.hmc.starts import starts
from pyrobnn.inference.nuts import DEFAULT_WARMUP, MOST_WARMUP
from pyrobnn.studies.uci import append_record, read_records

FIRST = 16.0  # leapfrogs of a path, on average, before there is a window of draws
#: rows of a state that plain HMC has no other use for: leapfrogs of its paths on average, and of the present one
MEAN, LENGTH = Scalars._fields.index("weight_sub"), Scalars._fields.index("weight_tree")


class Paths(Machine):
    """Plain HMC whose paths have half to one and a half of the leapfrogs that the state asks for."""

    def length(self, mean, keys, transition):
        """Leapfrogs of the next path of each chain."""
        chance = rng.chances(rng.stream(keys, transition.long()))[0]
        return (mean * (0.5 + chance)).round().clamp(1.0, 2.0**self.max_depth)

    def _begin(self, s, dual, keys, sign):
        r, begun = super()._begin(s, dual, keys, sign)
        mean = torch.where(s.weight_sub > 0, s.weight_sub, FIRST)
        return r, begun._replace(weight_sub=mean, weight_tree=self.length(mean, keys, s.transition))

    def _extend_path(self, new, s, *rest):
        # to the machine a path of one step, made with the last of its leapfrogs
        last = (s.steps >= s.weight_tree).double()
        vectors, done, ended, diverging = super()._extend_path(new, s._replace(steps=last), *rest)
        return vectors, done._replace(steps=s.steps, accept=done.accept * s.steps), ended, diverging


class Tuned(Run):
    """A run that chooses its paths at the end of every window."""

    quarter = 0.0

    def _new_metric(self, window, counts):
        scale = super()._new_metric(window, counts)
        self.quarter = quarter_period(window, counts, scale)
        return scale

    def _next_phase(self):
        super()._next_phase()
        if self.quarter:
            scalars = self.state.scalars.clone()
            s = Scalars(*scalars)
            scalars[MEAN] = self.quarter / s.step_size
            scalars[LENGTH] = self.machine.length(scalars[MEAN], self.keys, s.transition)
            self.state = self.state._replace(scalars=scalars)


def quarter_period(z, counts, scale):
    """Length of a path in whitened units; the widest direction is found from half of the chains (chain, slot, dim).

    Its variance is that of the other half: the widest direction of few draws is mostly noise.
    """
    x, widths = metric.whiten(z.flatten(0, 1), scale).reshape(z.shape), []
    halves = slice(0, None, 2), slice(1, None, 2)
    for found, held in (halves, halves[::-1]):
        y, _ = metric.centred(x[found], counts[found])
        direction = torch.linalg.eigh(y.T @ y)[1][:, -1]
        y, freedom = metric.centred(x[held], counts[held])
        widths.append(float((y @ direction).square().sum()) / freedom)
    return math.pi / 2 * math.sqrt(max(1.0, fmean(widths)))


def centred(x, y):
    """Means of groups of four, centred, with little data on their spread: a funnel."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("groups", 12):
        offset = pyro.sample("offset", dist.Normal(mean, spread))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(offset[x], 1.0), obs=y)


def fitted(name):
    """What is fitted: a case of the other benchmarks, or one of two more programs."""
    draw = torch.Generator().manual_seed(3)
    if name == "logistic, independent inputs":
        x = torch.randn(300, 30, generator=draw)
        y = torch.bernoulli((x @ (0.5 * torch.randn(30, generator=draw))).sigmoid(), generator=draw)
        return prepare(logistic, x, y, points="held")
    if name == "groups, centred":
        group = torch.arange(48) % 12
        y = 0.5 * torch.randn(12, generator=draw)[group] + torch.randn(48, generator=draw)
        return prepare(centred, group, y, points="held")
    return problem(name)


def values(held, positions):
    """What is judged, by where it is looked at: (chain, draw, value)."""
    draws = held.density.constrain(positions)
    if not held.is_bnn:
        return {"sites": torch.cat([value.reshape(*value.shape[:2], -1) for value in draws.values()], -1)}
    wide = 3 * torch.randn(16, *held.x.shape[1:], generator=torch.Generator().manual_seed(1))
    rows = held.x[torch.linspace(0, len(held.x) - 1, 16).long()]
    function = torch.func.vmap(torch.func.vmap(held.bnn.forward, (0, None)), (0, None))
    return {
        where: function(draws, x).reshape(*positions.shape[:2], -1)
        for where, x in (("at the data", rows), ("wide", wide))
    }


def judged(held, drawn):
    """A row: effective draws, gradients, R-hat, and what else tells of a run."""
    stats = {key: drawn.stats[..., i] for i, key in enumerate(STATS)}
    gradients = float(stats["n_steps"].sum())
    row = {"ess": {}, "ess of squares": {}, "rhat": {}}
    for where, value in values(held, drawn.positions).items():
        value = value.double()
        for key, each in (("ess", value), ("ess of squares", (value - value.mean((0, 1))).square())):
            ess = array_stats.ess(each.numpy(), chain_axis=0, draw_axis=1, method="bulk")
            row[key][where] = round(float(ess.min()), 1)
        rhat = array_stats.rhat(value.numpy(), chain_axis=0, draw_axis=1)
        row["rhat"][where] = round(float(rhat.max()), 4)
    return row | {
        "gradients": gradients,
        "warmup gradients": drawn.num_gradients - gradients,
        "leapfrogs": round(float(stats["n_steps"].mean()), 1),
        "acceptance": round(float(stats["acceptance_rate"].mean()), 3),
        "divergences": int(stats["diverging"].sum()),
        "unfinished": drawn.unfinished,
    }


def sampled(name, sampler, seeds, num_draws):
    """One row per seed; the step is compiled once."""
    held = fitted(name)
    run, advance = (Run.__new__(Run) if sampler == "nuts" else Tuned.__new__(Tuned)), None
    for seed in seeds:
        z, _ = starts(held, None, seed, NUM_CHAINS, not held.is_bnn)
        gradient, batched = batched_gradient(held.density.log_joint, z)
        if advance is None:
            slots = max(num_draws, MOST_WARMUP)
            sizes = NUM_CHAINS, held.density.dim, slots, z.dtype, z.device
            machine = (
                Machine(gradient, *sizes) if sampler == "nuts" else Paths(gradient, *sizes, trajectory=1)
            )
        run.quarter = 0.0
        run.__init__(
            machine,
            seed=seed,
            num_warmup=DEFAULT_WARMUP,
            most=MOST_WARMUP,
            names=None if held.is_bnn else held.density.site_of,
            mass_matrix=form_of("auto", held.is_bnn),
            compile=batched,
        )
        with torch.no_grad():
            run.begin(z)
            run._advance = advance
            drawn = run.sample(num_draws)
            advance = run._advance
            yield {"case": name, "sampler": sampler, "seed": seed} | judged(held, drawn)


def main():
    """Print the rows; write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = [*CASES, *(program.__name__ for program in PROGRAMS)]
    cases += ["logistic, independent inputs", "groups, centred"]
    parser.add_argument("--cases", nargs="+", default=cases, help="some of them alone")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--draws", type=int, default=500, help="of each chain")
    parser.add_argument("--results", type=Path, help="append the rows here, one JSON object a line")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = read_records(options.results) if options.results and options.results.exists() else []
    done = {(row["case"], row["sampler"], row["seed"]) for row in known}
    for name, sampler in itertools.product(options.cases, ("nuts", "hmc")):
        seeds = [seed for seed in range(options.seeds) if (name, sampler, seed) not in done]
        for record in sampled(name, sampler, seeds, options.draws):
            print(*(f"{key}={value}" for key, value in record.items()), sep="  ", flush=True)
            if options.results:
                append_record(options.results, record)


if __name__ == "__main__":
    main()
