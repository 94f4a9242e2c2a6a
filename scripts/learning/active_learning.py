"""Part ``active``: the rows of a table whose targets are asked for, a batch at a time."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Protocol

import pyro.distributions as dist
import torch
from learning.fitted_nets import most_evidence, units_of
from learning.gaussian_processes import by_variance, gaussian_process
from torch import Tensor
from uci.standard_splits import uci

import pyrobnn as pb

LEARNERS = ("BNN, EPIG", "BNN, random", "GP, variance", "GP, random")
START = 20
BATCH = 10
END = 100


class Learner(Protocol):
    """A model of a table's targets that learns rows and says which it would learn next."""

    def learn(self, known: Tensor) -> None:
        """Know the targets of the rows ``known``; those before the last batch it knew already."""

    def predict(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Means (row, 1) and log densities (row,) of the targets of rows."""

    def choose(self, candidates: Tensor, remaining: Tensor) -> Tensor:
        """Places (BATCH,) among the candidates; what is learned shall serve the ``remaining``."""


class NetLearner:
    """A posterior that is updated by each batch; chooses by the expected information about predictions (EPIG)."""

    def __init__(self, data: pb.data.Dataset, units: pb.data.Standardizer, seed: int) -> None:
        self.data = data
        self.units = units
        self.seed = seed
        self.posterior: pb.Posterior | None = None

    def learn(self, known: Tensor) -> None:
        x = self.data.x[known]
        y = self.data.y[known]
        if self.posterior is None:
            self.posterior = most_evidence(x, y, self.units, self.seed)
        else:
            self.posterior = self.posterior.update(
                x[-BATCH:],
                y[-BATCH:],
                seed=self.seed,
            )

    def predict(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        prediction = self.posterior.predict(self.data.x[rows])
        return prediction.mean, prediction.log_prob(self.data.y[rows])

    def choose(self, candidates: Tensor, remaining: Tensor) -> Tensor:
        epig = partial(
            pb.acquire.epig,
            self.posterior.predict(self.data.x[candidates]),
            self.posterior.predict(self.data.x[remaining]),
            num_draws=64,
        )
        return pb.acquire.batch(lambda rows: epig(given=rows), BATCH)


class ProcessLearner:
    """A Gaussian process that is fitted anew to all known rows; chooses by its variance."""

    def __init__(self, data: pb.data.Dataset, units: pb.data.Standardizer) -> None:
        self.x = units.transform_x(data.x)
        self.y = data.y

    def learn(self, known: Tensor) -> None:
        self.model = gaussian_process(self.x[known], self.y[known])

    def predict(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        posterior = self.model.posterior(self.x[rows].double(), observation_noise=True)
        mean = posterior.mean.detach()
        normal = dist.Normal(mean, posterior.variance.detach().sqrt())
        return mean, normal.log_prob(self.y[rows].double()).sum(1)

    def choose(self, candidates: Tensor, remaining: Tensor) -> Tensor:
        return by_variance(self.model, self.x[candidates], BATCH)


def active(problem: str, method: str, seed: int) -> dict[str, Any]:
    """RMSE and log density on 100 rows, in units of their sd, at each number of rows known."""
    data = uci(problem, seed)[0]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.x), generator=generator)
    test, pool = order.split([100, len(data.x) - 100])
    known = pool[:START]
    free = pool[START:]
    units = units_of(data.x[pool], data.y[known])
    learner: Learner = NetLearner(data, units, seed)
    if method.startswith("GP"):
        learner = ProcessLearner(data, units)
    curves: dict[str, list[float]] = {"rows": [], "rmse": [], "log_density": []}
    while True:
        learner.learn(known)
        curves["rows"].append(len(known))
        for name, score in _scores(*learner.predict(test), data.y[test]).items():
            curves[name].append(score)
        if len(known) >= END:
            return curves
        shuffled = free[torch.randperm(len(free), generator=generator)]
        candidates = shuffled[:200]
        places = torch.arange(BATCH)
        if not method.endswith("random"):
            places = learner.choose(candidates, shuffled[:100])
        known = torch.cat([known, candidates[places]])
        free = free[~torch.isin(free, known)]


def _scores(mean: Tensor, log_density: Tensor, y: Tensor) -> dict[str, float]:
    """RMSE and mean log density in units of the targets' sd."""
    scale = float(y.std())
    rmse = float((mean - y).square().mean().sqrt()) / scale
    return {
        "rmse": round(rmse, 4),
        "log_density": round(float(log_density.double().mean()) + math.log(scale), 4),
    }
