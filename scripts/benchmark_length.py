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

import itertools
import math
from statistics import fmean

import torch
from arviz_stats.base import array_stats
from benchmark_nuts import CASES
from sampler_cases import (
    CENTRED,
    INDEPENDENT,
    PROGRAMS,
    Records,
    parser,
    problem,
    runs,
    slowest,
    told,
    values,
)

from pyrobnn.inference.hmc import metric, rng
from pyrobnn.inference.hmc.machine import STATS, Machine, Scalars
from pyrobnn.inference.hmc.run import Run

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


def judged(held, drawn):
    """A row: effective draws, R-hat, gradients, and what else tells of a run."""
    row = {"ess": {}, "ess of squares": {}, "rhat": {}}
    for where, value in values(held, drawn.positions).items():
        value = value.double()
        row["ess"][where] = round(slowest(value), 1)
        row["ess of squares"][where] = round(slowest((value - value.mean((0, 1))).square()), 1)
        rhat = array_stats.rhat(value.numpy(), chain_axis=0, draw_axis=1)
        row["rhat"][where] = round(float(rhat.max()), 4)
    leapfrogs = float(drawn.stats[..., STATS.index("n_steps")].mean())
    return row | told(drawn) | {"leapfrogs": round(leapfrogs, 1)}


#: how each sampler differs from the defaults of `runs`
SAMPLERS = {"nuts": {}, "hmc": {"machine": Paths, "kind": Tuned, "trajectory": 1}}


def main():
    """Print the rows; write what is asked for."""
    options = parser(__doc__, [*CASES, *PROGRAMS, INDEPENDENT, CENTRED], seeds=2).parse_args()
    records = Records(options.results)
    for name, sampler in itertools.product(options.cases, SAMPLERS):
        held, _ = problem(name)
        seeds = records.missing(options.seeds, case=name, sampler=sampler)
        for seed, drawn in runs(held, seeds, options.draws, **SAMPLERS[sampler]):
            records.add({"case": name, "sampler": sampler, "seed": seed} | judged(held, drawn))


if __name__ == "__main__":
    main()
