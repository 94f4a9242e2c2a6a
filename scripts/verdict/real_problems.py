"""A dozen ordinary problems, small nets with inferred noise, and the approximations that are judged on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

import pyrobnn as pb

#: approximations at their defaults, whose verdicts are judged
METHODS: dict[str, pb.inference.method.Method] = {
    "laplace": pb.Laplace(),
    "laplace_draws": pb.Laplace(predictive="draws"),
    "svi": pb.SVI(),
    "svi_full_rank": pb.SVI(guide="full_rank"),
    "swag": pb.SWAG(),
    "ensemble": pb.DeepEnsemble(),
}
#: by how much the box of the data is widened for the inputs beyond them
BEYOND = 1.25
NUM_PROBES = 20


@dataclass(frozen=True)
class Problem:
    """Rows of a function with noise, and the net that learns them.

    Args:
        function: inputs (N, inputs) → mean (N,).
        num_rows, num_inputs: size of the data.
        noise: sd of the errors.
        hidden: width of the net's only layer.
        inputs: how inputs lie: "uniform" on [-2, 2], "normal", or "gap", none in the middle.
        activation: of the units.
        seed: of the data.
    """

    function: Callable[[np.ndarray], np.ndarray]
    num_rows: int
    num_inputs: int
    noise: float
    hidden: int
    inputs: str = "uniform"
    activation: str = "tanh"
    seed: int = 0

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs (N, inputs) and targets (N, 1) in standard units."""
        rng = np.random.default_rng([self.seed, self.num_rows, self.num_inputs])
        shape = self.num_rows, self.num_inputs
        x = rng.normal(size=shape) if self.inputs == "normal" else rng.uniform(-2, 2, size=shape)
        if self.inputs == "gap":
            x = np.sign(x) * (0.8 + 0.6 * np.abs(x))
        y = self.function(x) + self.noise * rng.normal(size=self.num_rows)
        x = (x - x.mean(0)) / x.std(0)
        y = (y - y.mean()) / y.std()
        return torch.tensor(x, dtype=torch.float32), torch.tensor(y[:, None], dtype=torch.float32)

    def model(self) -> pb.BNN:
        """The net under a fan-in normal prior, its noise inferred."""
        net = pb.networks.mlp(
            self.num_inputs,
            (self.hidden,),
            1,
            activation=self.activation,
            seed=0,
        )
        noise = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
        return pb.BNN(net, pb.priors.FanInNormal(1.0), noise)

    def probes(self) -> Tensor:
        """Inputs where fits are compared with the truth: rows of the data, and the box a quarter wider."""
        x = self.data()[0]
        rng = np.random.default_rng(self.seed + 1)
        rows = x[rng.permutation(len(x))[:NUM_PROBES]]
        low = x.min(0).values
        high = x.max(0).values
        if self.num_inputs == 1:
            places = torch.linspace(-1.0, 1.0, NUM_PROBES)[:, None]
        else:
            places = torch.tensor(
                rng.uniform(
                    -1,
                    1,
                    size=(NUM_PROBES, self.num_inputs),
                ),
                dtype=x.dtype,
            )
        box = (low + high) / 2 + BEYOND * places * (high - low) / 2
        return torch.cat([rows, box])


def _sine(x: np.ndarray) -> np.ndarray:
    return np.sin(2 * x[:, 0])


def _cubic(x: np.ndarray) -> np.ndarray:
    return 0.5 * x[:, 0] ** 3


def _line(x: np.ndarray) -> np.ndarray:
    return 0.8 * x[:, 0]


def _step(x: np.ndarray) -> np.ndarray:
    return np.sign(x[:, 0] - 0.3)


def _bump(x: np.ndarray) -> np.ndarray:
    return np.exp(-2.0 * x[:, 0] ** 2)


def _product(x: np.ndarray) -> np.ndarray:
    return x[:, 0] * x[:, 1]


def _ridge(x: np.ndarray) -> np.ndarray:
    return np.tanh(x.sum(1))


def _additive(x: np.ndarray) -> np.ndarray:
    return np.sin(x[:, 0]) + 0.5 * x[:, 1] ** 2


def _sparse(x: np.ndarray) -> np.ndarray:
    return x[:, 0] - 0.5 * x[:, 3]


def _friedman(x: np.ndarray) -> np.ndarray:
    u = 0.5 + x / 4
    return 10 * np.sin(np.pi * u[:, 0] * u[:, 1]) / 5 + 4 * (u[:, 2] - 0.5) ** 2 + 2 * u[:, 3]


PROBLEMS = {
    "line_12": Problem(_line, 12, 1, 0.3, 6),
    "sine_20": Problem(_sine, 20, 1, 0.2, 10),
    "cubic_30": Problem(
        _cubic,
        30,
        1,
        0.5,
        20,
        activation="relu",
    ),
    "step_40": Problem(_step, 40, 1, 0.2, 8),
    "gap_50": Problem(_sine, 50, 1, 0.1, 10, inputs="gap"),
    "bump_80": Problem(_bump, 80, 1, 0.15, 12),
    "product_30": Problem(_product, 30, 2, 0.3, 10),
    "additive_60": Problem(
        _additive,
        60,
        2,
        0.3,
        8,
        inputs="normal",
    ),
    "ridge_100": Problem(_ridge, 100, 3, 0.3, 6, inputs="normal"),
    "friedman_150": Problem(_friedman, 150, 4, 0.4, 10),
    "sparse_200": Problem(_sparse, 200, 5, 0.8, 8, inputs="normal"),
    "sine_300": Problem(_sine, 300, 1, 0.3, 15),
}
