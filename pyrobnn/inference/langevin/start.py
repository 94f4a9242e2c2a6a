"""Starts of the stochastic-gradient chains of a BNN, near modes that come closer to the data than a linear fit does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.optim.descent import polish
from pyrobnn.inference.optim.minimize import minimize
from pyrobnn.inference.optim.training import Optimizer, Training
from pyrobnn.likelihoods import SCALE
from pyrobnn.model import NET


@dataclass(frozen=True, eq=False)
class LinearFit:
    """A least squares fit, its rows ``x``, ``y``, and ``squares`` (out,), the mean squared leave-one-out residual."""

    x: Tensor
    y: Tensor
    squares: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, problem: Problem) -> LinearFit | None:
        """None where there is nothing to compare: no regression, a loader's data, or less than two rows an input."""
        if problem.loader is not None or not problem.bnn.likelihood.targets.normal:
            return None
        index = torch.linspace(0, problem.num_rows - 1, min(2000, problem.num_rows)).long().to(problem.device)
        x, y = problem.x[index], problem.y[index].double()
        design = torch.cat([x.flatten(1).double(), y.new_ones(len(x), 1)], 1)
        if 2 * design.shape[1] > len(design):
            return None
        hat = design @ torch.linalg.pinv(design)
        one_minus_leverage = (1 - hat.diagonal()).clamp_min(1e-3)
        return cls(x, y, ((hat @ y - y) / one_minus_leverage[:, None]).square().mean(0))

    @torch.no_grad()
    def nets(self, problem: Problem, z: Tensor) -> Tensor:
        """Outputs (point, row, out) of the nets at z (point, dim)."""
        constrain, forward = problem.density.constrain, problem.bnn.forward
        return torch.stack([forward(constrain(one), self.x)[:, : self.y.shape[1]] for one in z]).double()

    def at_least_as_good(self, outputs: Tensor) -> Tensor:
        """Whether outputs' mean squared residuals (…, row, out) are the linear fit's."""
        # float32 nets cannot come closer to a line without noise
        rounding = torch.finfo(torch.float32).eps * self.y.var(0)
        return ((outputs - self.y).square().mean(-2) <= self.squares + rounding).all(-1)


def find_modes(config: Any, problem: Problem) -> Tensor:
    """Starting points (num_chains, dim) near modes: nets initialised anew, each trained by Adam for ``init_steps``.

    Where inputs are all but collinear no number of Adam's steps does. A chain that Adam leaves further from the data
    than a line goes back to its initial net, which L-BFGS then trains on all data in memory, in a third as many steps.
    """
    density = problem.density
    seeds = torch.randint(2**31, (config.num_chains,)).tolist()
    start = torch.stack(
        [density.initial(problem.bnn.reinitialized(seed).initial_values(), seed) for seed in seeds]
    )
    weights = torch.zeros(density.dim, dtype=torch.bool, device=start.device)
    for site in density.sites:
        weights[site.start : site.stop] = site.name.startswith(NET)
    modes = _by_adam(config, problem, start, weights)
    if (line := LinearFit.of(problem)) is not None:
        behind = ~line.at_least_as_good(line.nets(problem, modes))
        for chain in behind.nonzero().flatten().tolist():
            modes[chain] = _by_lbfgs(config, problem, start[chain], weights, line)
    return modes


def _by_adam(config: Any, problem: Problem, start: Tensor, weights: Tensor) -> Tensor:
    """All chains (chain, dim) trained together; for two thirds of the steps the likelihood's own parameters stay."""
    density, num_steps = problem.density, config.init_steps
    switch = num_steps - num_steps // 3

    def loss(theta: Tensor, still: Tensor, free: Tensor, *batch: Tensor) -> Tensor:
        return -density.log_joint(torch.where(weights | free, theta, still), *batch) / problem.num_rows

    def losses(thetas: Tensor, *batch: Tensor) -> Tensor:
        return torch.func.vmap(loss, in_dims=(0, 0, *(None for _ in batch)))(thetas, start, *batch)

    def factor(step: int) -> float:
        begun, length = (0, switch) if step < switch else (switch, num_steps - switch)
        return 0.5 * (1.0 + math.cos(math.pi * (step - begun) / length))

    free = torch.arange(num_steps + 1, device=start.device) >= switch
    result = minimize(
        losses, start, ((now, *batch) for now, batch in zip(free, problem.batches(config.batch_size))),
        Training(num_steps, 0.01, Optimizer(schedule=factor), config.compile),
        name=f"the start of {type(config).__name__}",
    )  # fmt: skip
    if result.stopped == "interrupt":  # before the first draw
        raise KeyboardInterrupt
    return result.params


def _by_lbfgs(config: Any, problem: Problem, start: Tensor, weights: Tensor, line: LinearFit) -> Tensor:
    """One chain trained from ``start`` (dim,), with a noise no larger than what the line leaves over."""
    density = problem.density
    values = density.constrain(start)
    if (scale := values.get(SCALE)) is not None:
        left = line.squares.sqrt().to(scale)
        values[SCALE] = torch.minimum(scale, left if scale.dim() else left.min())
    held = density.unconstrain(values)

    def of_weights(part: Tensor, *, jacobian: bool) -> Tensor:
        return density.log_joint(held.masked_scatter(weights, part), jacobian=jacobian)

    part, _ = polish(of_weights, held[weights], math.ceil(config.init_steps / 3), jacobian=True)
    return held.masked_scatter(weights, part)
