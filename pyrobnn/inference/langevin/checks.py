"""Checks of a run of stochastic-gradient chains: its temperature, and its distance from the data beside a line's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyrobnn.chains import rhat
from pyrobnn.checks import Refused
from pyrobnn.density import Density
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.langevin.linear_fit import LinearFit, some_rows
from pyrobnn.inference.langevin.run import Run

#: relative deviation of a site's kinetic temperature that is warned of, beyond this many standard errors
TOLERANCE, ERRORS = 0.1, 4.0
#: draws that the comparison with the linear fit looks at
NUM_DRAWS = 100
#: R-hat above which chains of so many draws in all say that they have not mixed; draws of each, and values, looked at
RHAT, ENOUGH, EACH, VALUES = 1.05, 1000, 100, 20


def judge(
    config: Any, problem: Problem, run: Run, line: LinearFit | None, start: Tensor, notes: list[str]
) -> dict[str, Any]:
    """What the run says of itself, for ``meta``; what is wrong with it goes into ``notes``."""
    record: dict[str, Any] = {"step_size": run.step_size * problem.num_rows}
    if config.has_momentum:
        heat = kinetic_temperature(problem.density, run.heat, run.z.shape[1], notes)
        record["kinetic_temperature"] = heat
    mixing(problem, run, notes)
    if line is not None:
        chosen = config.step_size is None and config.temperature <= 1.0
        compare_with_linear(problem, line, run, start, chosen, notes)
    return record


@torch.no_grad()
def mixing(problem: Problem, run: Run, notes: list[str]) -> None:
    """Note where R-hat of the function at training inputs, or of a program's sites, says that the chains do not agree.

    Of fewer than a thousand draws nothing is said: the verdict judges those.
    """
    num_chains, num_draws = run.z.shape[:2]
    if num_chains < 2 or num_chains * num_draws < ENOUGH or run.stopped != "num_draws":
        return
    picked = torch.linspace(0, num_draws - 1, min(num_draws, EACH)).long().to(run.z.device)
    z, what = run.z[:, picked], "the function at training inputs" if problem.is_bnn else "its values"
    if problem.is_bnn:
        x = some_rows(problem)[0]
        x = x[torch.linspace(0, len(x) - 1, min(len(x), VALUES)).long().to(x.device)]
        net, density = problem.bnn, problem.density
        z = torch.stack([net.forward(density.constrain(one), x) for one in z.flatten(0, 1)])
        z = net.likelihood.identified(z)
    values = z.reshape(num_chains, len(picked), -1).double().cpu().numpy()
    values = values[..., values.std((0, 1)) > 0]
    worst = rhat(np.moveaxis(values, 2, 0)).max() if values.size else 1.0
    if worst > RHAT:
        notes.append(
            f"the chains have not mixed: R-hat of {what} is {worst:.3g} (wanted: at most 1.01), so the draws are not "
            "of the posterior yet: take a larger thinning and a longer num_warmup, or NUTS"
        )


def kinetic_temperature(density: Density, heat: Tensor, num_kept: int, notes: list[str]) -> float:
    r"""Mean of :math:`v^2 / T` over the kept steps and the coordinates, 1 in equilibrium; sites far from it are noted.

    Args:
        heat: sum of v²/T over the kept steps, (chain, dim).
        num_kept: kept steps.
        notes: where to write.
    """
    heat, worst, name, error = heat / num_kept, 0.0, "", 0.0
    for site in density.sites:
        part = heat[:, site.start : site.stop]
        # a squared standard normal has variance 2; successive kept momenta are all but independent
        off, se = float(part.mean()) - 1.0, math.sqrt(2.0 / (part.numel() * num_kept))
        if not abs(off) <= TOLERANCE + ERRORS * se and not abs(off) <= abs(worst):
            worst, name, error = off, site.name, se
    if name:
        cause = "smaller steps (step_size) or larger batches cool it" if worst > 0 else "run a longer warm-up"
        notes.append(
            f"the kinetic temperature of the draws of {name!r} is {1 + worst:.3g} +/- {error:.2g} times what it should "
            f"be, so its spread is not the posterior's: {cause}"
        )
    return float(heat.mean())


def compare_with_linear(
    problem: Problem, line: LinearFit, run: Run, start: Tensor, chosen: bool, notes: list[str]
) -> None:
    """Note where the mean of the draws is further from the training targets than a linear fit.

    It is no error: a prior of small weights keeps a net from a line that needs large ones (collinear inputs), and the
    posterior is then right. The note says how close the chains were at ``start`` (chain, dim), which tells draws that
    moved away from the data from a model that never came closer.

    Raises:
        Refused: draws of a whole run moved away, and the step size was ``chosen`` here.
    """
    draws = run.z.flatten(0, 1)
    index = torch.linspace(0, len(draws) - 1, min(NUM_DRAWS, len(draws))).long()
    squares = line.of_mean(problem, draws[index.to(problem.device)])
    if line.beaten(squares):
        return
    each = line.of_each(problem, start)
    ours, theirs = line.worst(squares)
    begun = min(line.worst(one)[0] for one in each)
    found = (
        f"the mean of the draws is further from the training targets than a linear fit from points left out "
        f"of it (root mean square {ours:.3g} against {theirs:.3g}, in the model's units), "
    )
    if not any(line.beaten(one) for one in each):
        notes.append(
            f"{found}and so was every start ({begun:.3g} at best): the chains are not at the posterior yet, or "
            "the prior keeps the net from the data; give it more init_steps and a longer warm-up, and if NUTS "
            "comes no closer either, a wider prior"
        )
        return
    moved = f"{found}where the chains started closer ({begun:.3g}): they have moved away from the data"
    if chosen and run.stopped == "num_draws":
        size = run.step_size * problem.num_rows
        raise Refused(
            f"{moved}, at the step size that was chosen for them ({size:.3g}): use NUTS, or pass a smaller one "
            f"(step_size={size / 4:.2g}); with a step size of your own you get the draws, and this as a warning"
        )
    notes.append(f"{moved}; compare with half the step_size, or with NUTS")
