"""Linear nets with data from their own prior, exact draws of their posteriors, and the library's trees of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyro.distributions as dist
import torch

import pyrobnn as pb
from pyrobnn.posterior import Posterior

HELD_OUT = 100


@dataclass
class Case:
    """Data of a line with Gaussian noise, and exact draws (chain, draw, weight) of the net's posterior.

    Of several outputs ``y`` is (N, output), and draws are (chain, draw, output, weight).
    """

    rng: np.random.Generator
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    noise: float
    shape: tuple[int, int]
    prior: float = 1.0
    iid: bool = False
    errors: tuple[np.ndarray, ...] = ()

    def exact(
        self, *, count: float = 1.0, prior: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean (weight,) or (weight, output) and covariance of the posterior, of data counted `count` times."""
        design = np.concatenate([self.x, np.ones((len(self.x), 1))], axis=1)
        precision = count * design.T @ design / self.noise**2
        covariance = np.linalg.inv(precision + np.eye(design.shape[1]) / (prior or self.prior) ** 2)
        return count * covariance @ design.T @ self.y / self.noise**2, covariance

    @property
    def sd(self) -> np.ndarray:
        return np.sqrt(np.diag(self.exact()[1]))

    def draws(
        self,
        *,
        correlation: float = 0.0,
        count: float = 1.0,
        prior: float | None = None,
    ) -> np.ndarray:
        """Stationary chains of it, with `correlation` from draw to draw."""
        mean, covariance = self.exact(count=count, prior=prior)
        normal = self.rng.normal(size=(*self.shape, *mean.T.shape))
        for draw in range(1, self.shape[1] if correlation else 0):
            normal[:, draw] = (
                correlation * normal[:, draw - 1] + np.sqrt(1 - correlation**2) * normal[:, draw]
            )
        return mean.T + normal @ np.linalg.cholesky(covariance).T


def make_case(
    seed: list[int], shape: tuple[int, int], change: Callable[[Case], None] | None = None
) -> Case:
    """A problem from the model's own prior; `change` may spoil the data before anything is inferred."""
    rng = np.random.default_rng(seed)
    inputs = int(rng.integers(1, 21))
    num = int(rng.integers(40, 201))
    noise = float(np.exp(rng.uniform(np.log(0.1), np.log(2.0))))
    weights = rng.normal(size=inputs + 1)
    x = rng.normal(size=(num, inputs))
    x_test = rng.normal(size=(HELD_OUT, inputs))
    errors = rng.normal(size=num)
    errors_test = rng.normal(size=HELD_OUT)
    y = x @ weights[:-1] + weights[-1] + noise * errors
    y_test = x_test @ weights[:-1] + weights[-1] + noise * errors_test
    case = Case(
        rng,
        x,
        y,
        x_test,
        y_test,
        noise,
        shape,
        errors=(errors, errors_test),
    )
    if change is not None:
        change(case)
    return case


def tree_of(case: Case, draws: np.ndarray):
    """The DataTree that the library makes of the draws, as of NUTS chains or of a fitted normal."""
    if draws.ndim == 3:
        draws = draws[:, :, None]
    net = torch.nn.Linear(case.x.shape[1], draws.shape[2])
    prior = pb.priors.IIDPrior(dist.Normal(0.0, case.prior))
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(case.noise))
    values = torch.tensor(draws, dtype=torch.float32)
    x = torch.tensor(case.x, dtype=torch.float32)
    y = torch.tensor(case.y.reshape(len(case.y), -1), dtype=torch.float32)
    x_test = torch.tensor(case.x_test, dtype=torch.float32)
    y_test = torch.tensor(case.y_test.reshape(HELD_OUT, -1), dtype=torch.float32)
    meta = {
        "method": "NUTS",
        "kind": "chains",
        "claim": "exact",
        "likelihood": "gaussian",
        "iid": case.iid,
    }
    sample_stats = {"lp": torch.zeros(draws.shape[:2])}
    if case.iid:
        meta |= {
            "method": "SVI",
            "kind": "independent",
            "claim": "approximate",
            "log_evidence_kind": "elbo",
        }
        sample_stats = {name: torch.tensor(value) for name, value in densities(case, draws).items()}
    sites = {"net.weight": values[..., :-1], "net.bias": values[..., -1]}
    posterior = Posterior(model, sites, sample_stats, meta=meta)
    return posterior.to_datatree(
        x,
        y,
        test=(x_test, y_test),
    )


def densities(case: Case, draws: np.ndarray) -> dict[str, np.ndarray]:
    """log p of the exact posterior, and log q of the normal that fits the draws."""
    flat = draws.reshape(-1, draws.shape[-1])
    fitted = flat.mean(0), np.atleast_2d(np.cov(flat.T))
    pairs = {"log_p": case.exact(), "log_q": fitted}
    log_densities = {}
    for name, (mean, covariance) in pairs.items():
        scaled = np.linalg.solve(np.linalg.cholesky(covariance), (flat - mean).T)
        log_det = np.linalg.slogdet(covariance)[1]
        log_densities[name] = (-0.5 * ((scaled**2).sum(0) + log_det)).reshape(draws.shape[:2])
    return log_densities
