"""The models whose speed is measured: their data, as pyrobnn models or Pyro programs, and the worth of draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

    import pyrobnn as pb


@dataclass(frozen=True)
class Case:
    """A net of one hidden layer, or a linear regression with an offset of each group; the last inputs are groups then.

    A net has the prior N(0, 1/fan-in), biases N(0, 1).
    """

    inputs: int
    num_data: int
    noise: float
    hidden: int = 0
    activation: str = ""
    groups: int = 0


CASES = {
    "1-50-1": Case(1, 400, 0.3, hidden=50, activation="tanh"),
    "13-50-1": Case(13, 455, 0.3, hidden=50, activation="relu"),
    "hierarchical": Case(5, 400, 0.5, groups=20),
}


def data(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, inputs), the last column a group number where there are groups, and targets (N,); NumPy arrays."""
    import numpy as np

    generator = np.random.default_rng(0)
    x = generator.standard_normal((case.num_data, case.inputs)).astype("float32")
    y = np.sin(2 * x[:, 0]) + case.noise * generator.standard_normal(case.num_data)
    if case.groups:
        group = np.arange(case.num_data) % case.groups
        y = y + generator.standard_normal(case.groups)[group]
        x = np.column_stack([x, group]).astype("float32")
    return x, y.astype("float32")


def torch_data(case: Case) -> tuple[torch.Tensor, ...]:
    """:func:`data` as tensors."""
    import torch

    return tuple(torch.from_numpy(array) for array in data(case))


def torch_program(case: Case) -> pb.BNN | Callable:
    """The model as a pyrobnn model or a plain Pyro program."""
    import pyro
    import pyro.distributions as dist
    import torch

    import pyrobnn as pb

    if not case.groups:
        net = pb.networks.mlp(
            case.inputs,
            (case.hidden,),
            activation=case.activation,
            seed=0,
        )
        return pb.BNN(
            net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(case.noise)
        )

    def program(x, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        offset = pyro.sample(
            "offset", dist.Normal(torch.zeros(case.groups, device=x.device), 1.0).to_event(1)
        )
        slope = pyro.sample(
            "slope", dist.Normal(torch.zeros(case.inputs, device=x.device), 1.0).to_event(1)
        )
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        loc = mean + spread * offset[x[:, -1].long()] + x[:, :-1] @ slope
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(loc, scale), obs=y)

    return program


def slowest(values: np.ndarray) -> float:
    """Bulk ESS of the slowest of the values (chain, draw, value)."""
    from arviz_stats.base import array_stats

    return float(
        array_stats.ess(
            values,
            chain_axis=0,
            draw_axis=1,
            method="bulk",
        ).min()
    )
