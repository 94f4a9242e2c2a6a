"""An ensemble on a table whose members share a step, with the gradient of a normal written out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from pyrobnn import likelihoods as lk
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.initial import start_chains
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.method import FitRun
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.training import Training
from pyrobnn.inference.point_methods import DeepEnsemble
from pyrobnn.model import Density


@dataclass(frozen=True)
class TabularEnsemble(DeepEnsemble):
    """An ensemble that may go on from the members of another."""

    uses: ClassVar[tuple[str, ...]] = ("init",)
    prior_sd: ClassVar[float] = 1.1  # of a weight

    def _start(self, problem: Problem, run: FitRun) -> Tensor:
        if run.init is None:
            return super()._start(problem, run)
        with seeded(run.seed, problem.device):
            return start_chains(problem.model, problem.density, run.init, self.num_members)

    def _search(
        self,
        problem: Problem,
        start: Tensor,
        run: FitRun,
        *_: Any,
        **__: Any,
    ) -> Result:
        """Of a normal the same log joint, but for a constant, and its gradient in half of autograd's operations."""
        noise = problem.bnn.likelihood
        if (
            type(noise) is not lk.HomoskedasticGaussian
            and type(noise) is not lk.HeteroskedasticGaussian
        ):
            return super()._search(problem, start, run)
        head = cast(nn.Sequential, problem.bnn.net)[-1]
        shrink = 1 / (self.prior_sd**2 * problem.num_rows)
        gradient = _MemberGradient(problem.density, noise, head, shrink)
        batches = problem.batches(self.batch_size)
        training = Training.of(replace(self, compile=False), "cosine")
        return minimize(
            gradient,
            start,
            batches,
            training,
            slopes=True,
            progress=run.progress,
            name="the ensemble",
        )


class _MemberGradient:
    """Minus the log joint of each member, per row, and its gradient by the chain rule written out.

    A fit takes a half to a third of the CPU seconds that it takes by automatic differentiation, at the same numbers.
    ``head`` makes location and scale of the last layer's outputs; ``shrink`` is the prior's precision, per row.
    """

    def __init__(
        self,
        density: Density,
        noise: lk.HomoskedasticGaussian | lk.HeteroskedasticGaussian,
        head: nn.Module,
        shrink: float,
    ):
        self.density = density
        self.noise = noise
        self.head = head
        self.shrink = shrink

    def __call__(self, thetas: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (member, P) at weights (member, P), and losses (1, member)."""
        # of each layer weight and bias
        values = [value for _, value in self.density.parts(thetas)]
        weights = values[::2]
        inputs, sums = self._forward(weights, values[1::2], x)
        mean, scale = self.noise.loc_scale(self.head(sums[-1]), {})
        error = (y - mean) / scale
        square = error.square()
        loss = thetas.square().sum(1) * (self.shrink / 2)
        loss += (square / 2 + scale.log()).mean((1, 2))
        slope = self._slope(error, scale)
        gradients = self._backward(slope, weights, inputs, sums)
        return gradients.add_(thetas, alpha=self.shrink), loss[None].double()

    def _forward(
        self,
        weights: list[Tensor],
        biases: list[Tensor],
        x: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The inputs of each layer and its sums before the activation, (member, row, unit)."""
        inputs = [x.expand(len(weights[0]), *x.shape)]
        sums = []
        for weight, bias in zip(weights, biases):
            sums.append(torch.baddbmm(bias[:, None], inputs[-1], weight.mT))
            inputs.append(nn.functional.silu(sums[-1]))
        return inputs, sums

    def _slope(self, error: Tensor, scale: Tensor) -> Tensor:
        """The gradient at the last layer's two outputs, (member, row, 2); known noise has none of its own."""
        if isinstance(self.noise, lk.HomoskedasticGaussian):
            raw = torch.zeros_like(error)
        else:
            # minus the derivative of softplus, 1 − exp(min_scale − scale), times 1 − error²
            raw = (1 - error.square()) * torch.expm1(self.noise.min_scale - scale)
        return torch.cat([error, raw], -1) / (scale * -error.shape[-2])

    def _backward(
        self,
        slope: Tensor,
        weights: list[Tensor],
        inputs: list[Tensor],
        sums: list[Tensor],
    ) -> Tensor:
        """Gradients (member, P) of all weights and biases, from the last layer to the first."""
        gradients = list[Tensor]()
        for layer in reversed(range(len(weights))):
            gradients[:0] = [torch.bmm(slope.mT, inputs[layer]).flatten(1), slope.sum(1)]
            if layer:
                pulled = slope @ weights[layer]
                slope = torch.ops.aten.silu_backward(pulled, sums[layer - 1])
        return torch.cat(gradients, 1)
