"""A row of gym.jsonl: gradients of NUTS until the second moments of a target are right."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from posteriordb.gym_programs import GYM_PROGRAMS
from posteriordb.gym_targets import SITES, Target, target

import pyrobnn as pb

#: gradients of NUTS until the error is small, after Robnik, Cohn-Gordon & Seljak (2025); draws of a chain; options
GYM = {
    "brownian": (33_462, 6000, {}),
    "banana": (111_691, 20_000, {}),
    "item_response": (71_758, 5000, {"num_chains": 4}),
    "stochastic_volatility": (1_628_519, 3000, {"num_chains": 4}),
    "banana, target_accept=0.95": (111_691, 15_000, {"target_accept": 0.95}),
}


def gym_row(wheel: Path, task: str, seed: int) -> dict[str, Any]:
    """Gradients of a chain until the median chain's worst second moment stays within 0.1 of its standard deviation."""
    program = task.partition(",")[0]
    _, num_draws, options = GYM[task]
    started = time.process_time()
    goal = target(wheel, program)
    method = pb.NUTS(**{"num_chains": 8} | options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = method.fit(
            GYM_PROGRAMS[program],
            None if goal.x is None else torch.tensor(goal.x),
            None if goal.y is None else torch.tensor(goal.y),
            num_draws=num_draws,
            seed=seed,
        )
    error, pooled = errors_of_square(coordinates(fitted.draws, program), goal)
    steps = fitted.sample_stats["n_steps"].double().mean().item()
    needed = int(np.flatnonzero(error >= 0.01)[-1]) + 1
    return {
        "task": task,
        "seed": seed,
        "gradients": round(steps * needed) if needed < num_draws else "not reached",
        "error": round(error[-1], 4),
        "all gradients": round(steps * num_draws),
        "pooled": round(pooled, 4),
        "divergences": int(fitted.sample_stats["diverging"].sum()),
        "warned": bool(fitted.meta["warnings"]),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def coordinates(draws: Mapping[str, torch.Tensor], program: str) -> np.ndarray:
    """The draws (chain, draw, coordinate) of the sites that have moments, of all sites where the wheel names none."""
    sites = SITES.get(program, draws)
    return np.concatenate([torch.atleast_3d(draws[site]).flatten(2) for site in sites], -1)


def errors_of_square(z: np.ndarray, goal: Target) -> tuple[np.ndarray, float]:
    """Squared error of E[z²], in variances of z², of the worst coordinate: the median chain's and that of all chains.

    Of draws z (chain, draw, coordinate). The median chain's is given after each draw, that of all chains at the end.
    """
    variance = goal.fourth - goal.square**2
    averages = (z**2).cumsum(1) / np.arange(1, z.shape[1] + 1)[:, None]
    of_chains = (averages - goal.square) ** 2 / variance
    of_all = (averages[:, -1].mean(0) - goal.square) ** 2 / variance
    return np.median(of_chains.max(-1), 0), of_all.max()
