"""The nets, priors, likelihoods and data of the reference posteriors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch

from pyrobnn import likelihoods, networks, priors
from pyrobnn.data import Dataset, Standardizer, breast_cancer, diabetes, digits, gap, polynomial
from pyrobnn.data.bundled import bundled
from pyrobnn.model import BNN


@dataclass(frozen=True)
class Problem:
    """A net with its prior and likelihood, and the data that it learns from.

    Args:
        source: of all rows, in their own units.
        num_data: rows that the net learns from, evenly spread over those of the source; of the others at most 100 are
            held out.
        hidden: width of each hidden layer, of tanh units.
        num_outputs: width of the net's output.
        likelihood: a fresh one.
        prior_scale: of :class:`pyrobnn.priors.FanInNormal`; biases have scale 1.
        standard_y: whether targets are standardised, as inputs are, by the rows that the net learns from.
    """

    source: Callable[[], Dataset]
    num_data: int
    hidden: tuple[int, ...]
    likelihood: Callable[[], likelihoods.Likelihood]
    num_outputs: int = 1
    prior_scale: float = 1.0
    standard_y: bool = True

    @property
    def about(self) -> str:
        """What net on what data, in a few words."""
        widths = " and ".join(map(str, self.hidden))
        return f"{widths} tanh units on {self.source().name}, {self.likelihood()!r}"

    def data(self) -> tuple[Dataset, Dataset]:
        """What the net learns from and what is held out, in standard units."""
        rows = self.source()
        chosen = _spread(rows.num_data, self.num_data)
        others = torch.tensor(sorted(set(range(rows.num_data)) - set(chosen.tolist())))
        train, rest = rows.subset(chosen), rows.subset(others)
        held_out = rest.subset(_spread(rest.num_data, min(100, rest.num_data)))
        units = Standardizer.fit(train)
        if not self.standard_y:
            units = Standardizer(
                units.x_mean, units.x_scale, torch.zeros_like(units.y_mean), torch.ones_like(units.y_scale)
            )
        return units.transform(train), units.transform(held_out)

    def model(self) -> BNN:
        """The net's program in standard units, its initial weights always the same."""
        net = networks.mlp(self.data()[0].x.shape[1], self.hidden, self.num_outputs, activation="tanh", seed=0)
        return BNN(net, priors.FanInNormal(self.prior_scale), self.likelihood())


def _spread(length: int, count: int) -> torch.Tensor:
    return torch.linspace(0, length - 1, count, dtype=torch.float64).round().long()


def _moons() -> Dataset:
    from sklearn import datasets

    x, y = datasets.make_moons(400, noise=0.25, random_state=0)
    return Dataset(
        torch.tensor(x, dtype=torch.float32),
        torch.tensor(y, dtype=torch.int64),
        "moons",
        "classification",
        ("x1", "x2"),
        "moon",
        ("upper", "lower"),
    )


def _small_digits() -> Dataset:
    """Digits 0 to 4, their 8 × 8 pixels averaged to 4 × 4."""
    every = digits()
    few = every.subset(torch.nonzero(every.y < 5)[:, 0])
    pixels = torch.nn.functional.avg_pool2d(few.x, 2).flatten(1)
    return Dataset(pixels, few.y, "digits", "classification", (), "digit", tuple("01234"))


def _inferred() -> likelihoods.Likelihood:
    return likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))


def _fixed() -> likelihoods.Likelihood:
    return likelihoods.HomoskedasticGaussian(0.4)


def _varying() -> likelihoods.Likelihood:
    return likelihoods.HeteroskedasticGaussian(0.05)


def _gap() -> Dataset:
    return gap(480)


def problems() -> dict[str, Problem]:
    """The problems by name."""
    on_gap: dict[str, Any] = {"prior_scale": 2.0, "standard_y": False}
    return {
        "gap_1": Problem(_gap, 60, (1,), _inferred, **on_gap),
        "gap_5": Problem(_gap, 240, (5,), _fixed, **on_gap),
        "gap_50": Problem(_gap, 60, (50,), _inferred, **on_gap),
        "gap_3x50": Problem(_gap, 40, (50, 50, 50), _fixed, prior_scale=1.5, standard_y=False),
        "polynomial_hetero_10": Problem(lambda: polynomial(300, noise="heteroskedastic"), 100, (10,), _varying, 2),
        "diabetes_10": Problem(diabetes, 60, (10,), _inferred),
        "diabetes_hetero_5": Problem(diabetes, 60, (5,), _varying, 2),
        "iris_5": Problem(lambda: bundled("iris", "class"), 100, (5,), likelihoods.Categorical, 3),
        "wine_10": Problem(lambda: bundled("wine", "class"), 60, (10,), likelihoods.Categorical, 3),
        "breast_cancer_5": Problem(breast_cancer, 60, (5,), likelihoods.Bernoulli),
        "moons_2x10": Problem(_moons, 60, (10, 10), likelihoods.Bernoulli, prior_scale=2.0),
        "digits_10": Problem(_small_digits, 60, (10,), likelihoods.Categorical, 5),
    }
