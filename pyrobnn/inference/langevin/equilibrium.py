"""Whether stochastic-gradient chains are in equilibrium: their temperature, R-hat, and distance from the data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.chains import RHAT_NOTED, rhat
from pyrobnn.density.density import Density
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.langevin.start import TOLERATED_NATS, LinearFit, some_rows
from pyrobnn.inference.langevin.walk import Run
from pyrobnn.likelihoods import averages
from pyrobnn.wording.findings import Finding

#: relative deviation of a site's kinetic temperature that is reported, beyond this many standard errors
TOLERANCE, ERRORS = 0.1, 4.0
#: draws in all from which chains are asked whether they agree
MIN_DRAWS = 1000
#: draws, evenly spread, and training inputs that are looked at
NUM_DRAWS, NUM_INPUTS = 100, 20


def judge(
    config: Any, problem: Problem, run: Run, line: LinearFit | None
) -> tuple[dict[str, Any], list[Finding]]:
    """Numbers of a finished run for ``meta``, and findings."""
    record: dict[str, Any] = {"step_size": run.step_size * problem.num_rows}
    found = disagreement(problem, run)
    if config.has_momentum:
        record["kinetic_temperature"], hot = kinetic_temperature(problem.density, run.kinetic, run.z.shape[1])
        found += hot
    if line is not None:
        found += behind_line(problem, line, run)
    return record, found


@torch.no_grad()
def disagreement(problem: Problem, run: Run) -> list[Finding]:
    """Chains that R-hat of the function at training inputs, or of a program's sites, tells apart; of enough draws."""
    num_chains, num_draws = run.z.shape[:2]
    if num_chains < 2 or num_chains * num_draws < MIN_DRAWS or run.stopped != "num_draws":
        return []
    z = run.z[:, evenly(num_draws, NUM_DRAWS).to(run.z.device)]
    shape = z.shape[:2]
    if problem.is_bnn:
        x = some_rows(problem)[0]
        x, net = x[evenly(len(x), NUM_INPUTS).to(x.device)], problem.bnn
        z = torch.stack([net.forward(problem.density.constrain(one), x) for one in z.flatten(0, 1)])
        z = averages.identified(net.likelihood, z)
    values = z.reshape(*shape, -1).movedim(2, 0).double().cpu().numpy()
    values = values[values.std((1, 2)) > 0]
    worst = float(np.nan_to_num(rhat(values), nan=np.inf).max()) if values.size else 1.0
    quantity = "the function at training inputs" if problem.is_bnn else "its values"
    return [Finding("chains_disagree", {"quantity": quantity, "rhat": worst})] if worst > RHAT_NOTED else []


def kinetic_temperature(density: Density, kinetic: Tensor, num_kept: int) -> tuple[float, list[Finding]]:
    """Mean of :math:`v^2 / T`, 1 in equilibrium, from its sum over kept steps (chain, dim); and the farthest site."""
    kinetic, found, worst = kinetic / num_kept, [], 0.0
    for site in density.sites:
        part = kinetic[:, site.start : site.stop]
        # a squared standard normal has variance 2; successive kept momenta are all but independent
        off, error = float(part.mean()) - 1.0, math.sqrt(2.0 / (part.numel() * num_kept))
        if not abs(off) <= max(TOLERANCE + ERRORS * error, worst):
            worst, values = abs(off), {"site": site.name, "temperature": 1.0 + off, "error": error}
            found = [Finding("kinetic_temperature", values)]
    return float(kinetic.mean()), found


def behind_line(problem: Problem, line: LinearFit, run: Run) -> list[Finding]:
    """A mean of the draws further from the data than a linear fit, as a prior of small weights keeps it."""
    draws = run.z.flatten(0, 1)
    mean = line.nets(problem, draws[evenly(len(draws), NUM_DRAWS).to(draws.device)]).mean(0)
    if bool(line.at_least_as_good(mean, TOLERATED_NATS)):
        return []
    squares = (mean - line.y).square().mean(0)
    output = int((squares / line.squares.clamp_min(1e-30)).argmax())
    values = {"rms": float(squares[output].sqrt()), "linear_rms": float(line.squares[output].sqrt())}
    return [Finding("behind_linear_fit", values | {"step_size": run.step_size * problem.num_rows})]


def evenly(total: int, most: int) -> Tensor:
    """At most ``most`` of ``total`` indices, evenly spread."""
    return torch.linspace(0, total - 1, min(total, most)).long()
