"""What a run of stochastic-gradient chains says of itself: its temperature, and whether a linear fit does better."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pyrobnn.density import Density
from pyrobnn.inference.fitting.problem import Problem

#: relative deviation of a site's kinetic temperature that is warned of, beyond this many standard errors
TOLERANCE, ERRORS = 0.1, 4.0
#: nats per datum, at the linear fit's own noise, by which the mean of the draws may be worse than it
SLACK = 0.1
#: rows and draws that the comparison with the linear fit looks at
NUM_ROWS, NUM_DRAWS = 2000, 100


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
            f"the kinetic temperature of the draws of {name!r} is {1 + worst:.3g} ± {error:.2g} times what it should "
            f"be, so its spread is not the posterior's: {cause}"
        )
    return float(heat.mean())


@torch.no_grad()
def compare_with_linear(problem: Problem, z: Tensor, start: Tensor, notes: list[str]) -> None:
    """Note where the mean of the draws z (chain, draw, dim) is further from the training targets than a linear fit.

    It is no error: a prior of small weights keeps a net from a line that needs large ones (collinear inputs), and the
    posterior is then right. The note says how close the chains were at ``start`` (chain, dim), which tells draws that
    moved away from the data from a model that never came closer. Regression with a BNN and at least twice as many rows
    as inputs; other runs are not compared.

    The linear fit's residuals are those of points left out (by the hat matrix): on few rows it follows its own data.
    """
    if not problem.is_bnn or problem.model.likelihood.task != "gaussian":
        return
    x, y = _rows(problem)
    design = torch.cat(
        [x.flatten(1).double(), torch.ones(len(x), 1, dtype=torch.float64, device=x.device)], 1
    )
    if 2 * design.shape[1] > len(design):
        return
    y = y.double()
    hat = design @ torch.linalg.pinv(design)
    # each residual as if its point had been left out: on few rows a line follows its own training data
    left_out = (1 - hat.diagonal()).clamp_min(1e-3)
    linear = ((hat @ y - y) / left_out[:, None]).square().mean(0)
    total = torch.zeros_like(y)
    chosen = z.flatten(0, 1)
    index = torch.linspace(0, len(chosen) - 1, min(NUM_DRAWS, len(chosen))).long()
    chosen = chosen[index.to(problem.device)]
    for one in chosen:
        total += problem.model.forward(problem.density.constrain(one), x)[:, : y.shape[1]]
    ours = (total / len(chosen) - y).square().mean(0)
    if not bool((ours <= (1 + 2 * SLACK) * linear + torch.finfo(problem.density.dtype).eps * y.var(0)).all()):
        worst = int((ours / linear.clamp_min(1e-30)).argmax())
        line, begun = float(linear[worst]), _errors(problem, start, x, y)[:, worst].amin().item()
        notes.append(
            f"the mean of the draws is further from the training targets than a linear fit from points left out "
            f"of it (root mean square {float(ours[worst].sqrt()):.3g} against {line**0.5:.3g}, in the model's units), "
            + (
                f"where the chains started closer ({begun**0.5:.3g}): they have moved away from the data; compare with "
                "half the step_size, or with NUTS"
                if begun <= (1 + 2 * SLACK) * line
                else f"and so was every start ({begun**0.5:.3g} at best): the chains are not at the posterior yet, or "
                "the prior keeps the net from the data; give it more init_steps and a longer warm-up, and if NUTS "
                "comes no closer either, a wider prior"
            )
        )


def _errors(problem: Problem, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared residual of every point of z (point, dim) and output; (point, output)."""
    fits = [problem.model.forward(problem.density.constrain(one), x)[:, : y.shape[1]] for one in z]
    return (torch.stack(fits) - y).square().mean(1)


def _rows(problem: Problem) -> tuple[Tensor, Tensor]:
    """Some training data: evenly spaced rows in memory, or the first batches of a pass."""
    if problem.loader is None:
        index = torch.linspace(0, problem.num_data - 1, min(NUM_ROWS, problem.num_data)).long()
        index = index.to(problem.device)
        return problem.x[index], problem.y[index]
    pairs = list(_first(problem.one_pass()))
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _first(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    seen = 0
    for x, y in batches:
        yield x, y
        seen += len(x)
        if seen >= NUM_ROWS:
            return
