"""The step size of stochastic-gradient chains, from the curvature and the gradient noise that they meet in warm-up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.model import Density

#: how often chains that leave the posterior are sent back, each time with half the step length
NUM_RESTARTS = 8


@dataclass(eq=False)
class State:
    """All chains at one step of the plan: position and momentum (chain, dim), mean squared gradient (dim,)."""

    step: int
    z: Tensor
    v: Tensor
    second: Tensor


class StepSize:
    r"""Chooses :math:`\varepsilon` during warm-up and keeps it afterwards.

    .. math:: \varepsilon = \min\Big( \frac{\kappa}{\lambda_{\max}}, \ \frac{0.1}{r \max_s \bar V_s} \Big)

    The first bounds the error of the discretisation: :math:`\lambda_{\max}` is the largest curvature of the log joint
    over the chains, and beyond :math:`\varepsilon \lambda_{\max} = 4` no chain is stable. The second bounds the
    temperature error of mini-batches: :math:`\bar V_s` is the mean variance of the gradient over a site's coordinates,
    which raises the temperature by :math:`r \varepsilon \bar V`. Both are taken anew ten times in warm-up, as the
    chains move; the smallest of the second half stays. Chains that are no longer finite, or whose log joint falls
    further than a posterior spreads, go back to the last look with a quarter of :math:`\kappa`.

    ``share`` is κ, ``heating`` r, ``noisy`` whether there are mini-batches, ``drop`` nats that the log joint may fall.
    """

    def __init__(self, density: Density, *, share: float, heating: float, num_warmup: int, noisy: bool, drop: float):
        self.density, self.share, self.heating, self.noisy, self.drop = density, share, heating, noisy, drop
        self.num_warmup = num_warmup
        self.looks = {num_warmup * look // 10 for look in range(10)}
        self.value = 0.0
        self.settled: list[float] = []
        self.restarts = 0
        self.best = -float("inf")
        self.spread = 0.0  # standard deviation of a mini-batch's log joint, at the last look
        self.vector: Tensor | None = None
        self.saved: State | None = None

    def look(self, state: State, metric: Tensor, batches: Iterator[Any], log_joint: Callable[..., Any]) -> None:
        """Choose ε at ``state``; ``log_joint(batch)`` gives a function of (z, rows) and the rows of every chain."""
        self.saved = State(state.step, *(value.clone() for value in (state.z, state.v, state.second)))
        root = metric.sqrt()
        late = 2 * state.step >= self.num_warmup
        bounds = [self.share / max(self._curvature(state.z, root, *log_joint(next(batches))), 1e-30)]
        if self.noisy:
            variance = self._noise(state.z, root, (log_joint(batch) for batch in batches), late)
            bounds.append(0.1 / (self.heating * max(variance, 1e-30)))
        if not all(math.isfinite(bound) for bound in bounds):
            raise FloatingPointError(
                f"no step size can be chosen at step {state.step + 1}: the curvature of the log joint there, or the "
                "variance of its gradient, is not finite; look for a density without a second derivative, start the "
                "chains elsewhere (init=), or pass a step_size, which needs neither"
            )
        self.value = min(bounds)
        if late:
            self.settled.append(self.value)
            self.value = min(self.settled)

    def restart(self) -> State | None:
        """The state to go back to, with half the step length from now on; None when that has been tried enough."""
        self.restarts += 1
        if self.restarts > NUM_RESTARTS or self.saved is None:
            return None
        self.share, self.value = self.share / 4, self.value / 4
        self.settled = [value / 4 for value in self.settled]
        saved = self.saved
        return State(saved.step, saved.z.clone(), torch.zeros_like(saved.v), saved.second.clone())

    def diverged(self, z: Tensor, lp: Tensor) -> bool:
        """Whether a chain is not finite, or further from the mode than the posterior's spread takes it."""
        if not bool(torch.isfinite(z).all() and torch.isfinite(lp).all()):
            return True
        worst, self.best = float(lp.min()), max(self.best, float(lp.min()))
        return worst < self.best - self.drop - 8.0 * self.spread

    def divergence_message(self, step: int, lp: Tensor, num_data: int) -> str:
        """Why the run ends, of chains that diverged after every restart."""
        return (
            f"by step {step} the log joint of a chain has fallen from {self.best:.4g} to {float(lp.min()):.4g}, "
            f"further than a posterior spreads, at each of {NUM_RESTARTS + 1} step sizes down to "
            f"{self.value * num_data:.3g}: the chains lost what their start had; pass a smaller step_size, larger "
            "batches, or use NUTS or SVI"
        )

    def _curvature(
        self, z: Tensor, root: Tensor, log_joint: Callable[..., Tensor], rows: Tensor, dim: int | None
    ) -> float:
        """Largest eigenvalue, over the chains, of minus the Hessian in the metric, by power iteration."""

        def product(z: Tensor, vector: Tensor, rows: Tensor) -> Tensor:
            # reverse over reverse: forward mode does not follow the float64 sums of the density
            def slope(point: Tensor) -> Tensor:
                return (torch.func.grad(log_joint)(point, rows) * vector).sum()

            return torch.func.grad(slope)(z)

        batched = torch.func.vmap(product, in_dims=(0, 0, dim), randomness="different")
        num_steps, vector = (20, torch.randn_like(z)) if self.vector is None else (8, self.vector)
        for _ in range(num_steps):
            vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(1e-30)
            vector = root * batched(z, root * vector, rows)
        size = vector.norm(dim=1)
        self.vector = torch.where(torch.isfinite(vector), vector, torch.ones_like(vector))
        return float(size.max())

    def _noise(self, z: Tensor, root: Tensor, batches: Iterator[tuple[Any, ...]], late: bool) -> float:
        """The largest mean variance of the gradient over any site; early on beyond the squared mean, the drift."""
        drawn, values = [], []
        for log_joint, rows, dim in itertools.islice(batches, 8):
            slope = torch.func.grad_and_value(log_joint)
            gradient, value = torch.func.vmap(slope, in_dims=(0, dim), randomness="different")(z, rows)
            drawn.append(root * gradient)
            values.append(value)
        self.spread = float(torch.stack(values).double().std(0).max())
        gradients = torch.stack(drawn).double()
        variance, signal = gradients.var(0), gradients.mean(0).square()
        excess = variance if late else variance - signal
        return max(float(excess[:, site.start : site.stop].mean()) for site in self.density.sites)


def chooser_for(config: Any, problem: Problem) -> StepSize:
    """The choice of a step size for a :class:`pyrobnn.SGLD` or :class:`pyrobnn.SGHMC`."""
    num_data, dim = problem.num_rows, problem.density.dim
    size = config.batch_size
    subsampled = problem.density.subsampled().stochastic is not None
    noisy = problem.loader is not None or subsampled or (size is not None and size < num_data)
    # at temperature T a chain is about T / 2 nats per coordinate away from a mode
    drop = 2.0 * dim * config.temperature + (10.0 if noisy else 1.0) * num_data
    options = {"share": config.share, "heating": config.heating, "num_warmup": config.num_warmup}
    return StepSize(problem.density, noisy=noisy, drop=drop, **options)
