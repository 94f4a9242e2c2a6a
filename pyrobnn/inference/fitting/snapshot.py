"""What a fit has reached while it runs, as a posterior that predicts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import Problem, make_posterior
from pyrobnn.posterior import Posterior


def snapshot(
    problem: Problem, method: Any, draws: Mapping[str, Tensor], *, seed: int, **rest: Any
) -> Posterior:
    """A posterior of what there is on the way, which says nothing: its fit will, at its end.

    Args:
        problem: what is fitted.
        method: the configuration.
        draws: site → (chain, draw, …), as many as there are.
        seed: of the fit.
        rest: as of :func:`pyrobnn.inference.fitting.problem.make_posterior`.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_posterior(problem, method, draws, seed=seed, timings={}, importance=False, **rest)
