"""A row of sbibm.jsonl: one method at its defaults on one observation of a task of sbibm."""

from __future__ import annotations

import bz2
import time
import warnings
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from posteriordb.distance_from_reference import distance, outcome_of
from posteriordb.sbibm_programs import SBIBM
from scipy.stats import ks_2samp

import pyrobnn as pb

METHODS = {
    "NUTS": pb.NUTS(),
    "SMC": pb.SMC(),
    "SVI": pb.SVI(guide="full_rank"),
    "Laplace": pb.Laplace(curvature="hessian"),
}


@dataclass(frozen=True)
class Accuracy:
    """Draws of a task beside its reference draws.

    ``rhat`` and ``errors`` (the largest distance in Monte-Carlo errors, of the scalar ``where``) count for methods that
    claim the posterior itself; ``shift`` (of the mean, in sds), ``log_sd`` (of the ratio of sds) and ``distance`` (of
    Kolmogorov and Smirnov), each the largest over the coordinates, for approximations.
    """

    rhat: float
    errors: float
    where: str
    shift: float
    log_sd: float
    distance: float

    def is_right(self, approximate: bool) -> bool:
        """Whether the draws are those of the posterior, or near it where the method approximates."""
        if approximate:
            return self.shift <= 0.25 and self.log_sd <= np.log(1.25) and self.distance <= 0.1
        return self.rhat <= 1.05 and self.errors <= 4

    def numbers(self) -> dict[str, str | float]:
        """What the record says of it."""
        return {
            "shift": self.shift,
            "log_sd": self.log_sd,
            "distance": self.distance,
            "errors": round(self.errors, 2),
            "where": self.where,
            "rhat": round(self.rhat, 3),
        }


def sbibm_row(folder: Path, task: str, number: int, method: str) -> dict[str, Any]:
    """One fit at the defaults, judged against the 10,000 draws of an observation."""
    x, y, truth = observation(folder, task, number)
    record = {
        "task": task,
        "observation": number,
        "method": method,
    }
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitted = METHODS[method].fit(
                SBIBM[task],
                x,
                y,
                num_draws=1000,
                seed=number,
            )
        except (ValueError, RuntimeError, ArithmeticError) as error:
            return record | {"outcome": "told", "warnings": [f"refused: {error}"[:300]]}
        seconds = time.process_time() - started
        verdict = pb.diagnose(fitted.to_datatree(x, y)).draws
    accuracy = accuracy_of(fitted.draws["theta"].double().numpy(), truth)
    right = accuracy.is_right(approximate=method in ("SVI", "Laplace"))
    warned = verdict != "pass" or bool(fitted.meta["warnings"])
    return record | {
        "outcome": outcome_of(right, warned, "told"),
        "verdict": verdict,
        **accuracy.numbers(),
        "cpu_seconds": round(seconds, 1),
        "warnings": [str(text)[:200] for text in fitted.meta["warnings"]],
    }


def accuracy_of(theta: np.ndarray, truth: np.ndarray) -> Accuracy:
    """Draws (chain, draw, coordinate) beside independent draws (draw, coordinate) of the posterior."""
    reference = {f"theta[{i}]": moments(column) for i, column in enumerate(truth.T, 1)}
    off = distance({name: theta[..., i] for i, name in enumerate(reference)}, reference)
    distances = [distances_of(theta[..., i].ravel(), column) for i, column in enumerate(truth.T)]
    return Accuracy(off.rhat, off.errors, off.where, *np.max(distances, axis=0).round(3).tolist())


def observation(
    folder: Path, task: str, number: int
) -> tuple[torch.Tensor | None, torch.Tensor, np.ndarray]:
    """The design (of the logistic regression alone), the observation, and draws of the reference posterior."""
    files = folder / "sbibm" / "tasks" / task / "files"
    of_number = files / f"num_observation_{number}"
    x = None
    name = "observation.csv"
    if task == "bernoulli_glm":
        x = torch.load(files / "design_matrix.pt").double()
        name = "observation_raw.csv"
    y = np.loadtxt(
        of_number / name,
        delimiter=",",
        skiprows=1,
    )
    reference = of_number / "reference_posterior_samples.csv.bz2"
    with bz2.open(reference, "rt", encoding="utf-8") as file:
        truth = np.loadtxt(file, delimiter=",", skiprows=1)
    return x, torch.tensor(y), truth


def moments(draws: np.ndarray) -> dict[str, float]:
    """Mean and sd of independent draws, and their Monte-Carlo errors."""
    n = len(draws)
    sd = draws.std()
    fourth = ((draws - draws.mean()) ** 4).mean()
    return {
        "mean": draws.mean(),
        "sd": sd,
        "ess": n,
        "mcse_mean": sd / sqrt(n),
        "mcse_sd": sd * sqrt((fourth / sd**4 - 1) / (4 * n)),
    }


def distances_of(draws: np.ndarray, reference: np.ndarray) -> list[float]:
    """Shift of the mean in sds of the reference, logarithm of the sds' ratio, and the distance of distributions."""
    sd = reference.std()
    shift = abs(draws.mean() - reference.mean()) / sd
    log_sd = abs(np.log(draws.std() / sd))
    return [shift, log_sd, ks_2samp(draws, reference).statistic]
