"""The density of a problem whose noise is free, which a search can hold at a scale for its first steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.model import Density
from pyrobnn.model.density import running
from pyrobnn.model.likelihoods.base import SCALE, HeldScale

#: scales at which a continuation holds the noise, of the standard deviation of the targets, in the order of their use
LEVELS = (0.1, 0.05, 0.2, 0.4)
#: share of the steps for which a continuation holds the noise
HELD_SHARE = 0.5
#: of the targets' standard deviation: a smaller noise, of a net that may pass through every row, is the way to a
#: density without bound, also under a prior that has density at zero, as a half-normal has
_COLLAPSED = 0.01


class FreeNoise:
    """The density of a problem whose noise is free, with a scale at which it can be held.

    Attributes: ``density``, of the problem, under
        :class:`pyrobnn.model.likelihoods.base.HeldScale`; ``spread`` (out,), the standard deviation of the targets.
    """

    def __init__(
        self,
        density: Density,
        likelihood: HeldScale,
        spread: Tensor,
    ):
        self.density = density
        self.spread = spread
        self._likelihood = likelihood

    @classmethod
    def of(cls, problem: Problem) -> FreeNoise | None:
        """That of a problem; None where no search can take function for noise."""
        if not problem.is_bnn or not problem.bnn.likelihood.scale_is_free:
            return None
        targets = problem.bnn.likelihood.targets.values(problem.y)
        spread = targets.double().std(0).to(problem.density.dtype)
        if not bool((spread > 0).all() & spread.isfinite().all()):
            return None
        likelihood = HeldScale(problem.bnn.likelihood)
        return cls(_under(problem.density.subsampled(), likelihood), likelihood, spread)

    def collapsed(self, points: Tensor) -> Tensor:
        """Of points (end, dim), whether the noise is on its way to zero, where the residuals do not stop it."""
        sites = [site for site in self.density.sites if site.name == SCALE]
        num_targets = len(self.density.args[1]) * len(self.spread)
        if not sites or self.density.dim < num_targets:
            return torch.zeros(
                len(points),
                dtype=torch.bool,
                device=points.device,
            )
        scale = self.density.constrain(points)[SCALE].reshape(len(points), -1)
        return (scale < _COLLAPSED * self.spread.mean()).any(1)

    @contextlib.contextmanager
    def at(self, level: Tensor) -> Iterator[Density]:
        """The density with the noise held at ``level`` (out,), and free where that is zero."""
        self._likelihood.level = level
        try:
            yield self.density
        finally:
            self._likelihood.level = None


def _under(density: Density, likelihood: HeldScale) -> Density:
    """The density of the same BNN, data and sites under another likelihood of the same parameters."""
    program: Any = density.program
    model = copy.copy(program.func.__self__)
    model.likelihood = likelihood
    return running(
        density,
        partial(
            getattr(model, program.func.__name__),
            *program.args,
            **program.keywords,
        ),
    )


def held_first(levels: Tensor, num_held: int) -> Callable[[int], tuple[Tensor, ...]]:
    """The scale at which the noise is held, by step: ``levels`` in the first ``num_held`` ones, zero in the rest."""
    free = torch.zeros_like(levels)
    return lambda step: (levels if step < num_held else free,)
