r"""The points of five published studies of Bayesian neural networks, number for number.

Each study seeded torch's CPU generator and drew its points in float32; the recipes here do the same with a generator
of their own, in the same order, so that a figure or a score of the study can be met. For fresh draws of the same
functions see :mod:`pyrobnn.data.synthetic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from pyrobnn.checks import check_choice
from pyrobnn.data.dataset import Dataset

__all__ = ["STUDIES", "study"]

Truth = Callable[[Tensor], Tensor]
#: sd of the noise, widths and left ends of the clusters
FOUR = ((0.01, 0.25, 0.05, 0.01), (2.1, 1.2, 1.4, 2.0), (-4.1, -1.2, 0.5, 4.0))
TWO = ((0.2, 0.05), (0.3, 1.2), (-1.0, 0.5))


def study(name: str) -> Dataset:
    r"""The points of a published study.

    ==================================  =====  ====  ======================================================
    name                                seed   N     recipe, ε standard normal
    ==================================  =====  ====  ======================================================
    ``uncertainty``                     42     100   x even on [−1, 1]; y = ½x² + ¼x³ + 0.2 ε
    ``uncertainty_heteroskedastic``     42     100   the same with (0.1 + 0.4 x) ε, a signed factor
    ``laplace``                         42     150   x = 10 u, then y = sin x + 0.3 ε
    ``four_clusters``                   906    400   four clusters; y = cos x + τ ε
    ``four_cubic_clusters``             906    400   the same x, y = x³/350 + τ ε
    ``two_clusters``                    906    400   two clusters; y = cos x + τ ε
    ``two_cubic_clusters``              906    400   the same x, y = x³/350 + τ ε
    ``variational``                     0      92    x even on [−½, ½]; y = 10 sin 2πx + 2 ε
    ``swag``                            1355   500   x even on [−5, 5]; y = 3 sin x + (0.7 + 2 sin 0.2x) ε
    ==================================  =====  ====  ======================================================

    Two things are not told by the studies and are our choice: the seed of ``variational``, and that the clusters'
    inputs are all drawn, cluster after cluster, before their noise.

    Args:
        name: one of the table.

    Returns:
        :class:`Dataset` with float32 x, y, true_f and true_noise (N, 1), in the order of the study.

    Raises:
        ValueError: another name.

    Example:
        >>> study("laplace").x.shape
        torch.Size([150, 1])
    """
    check_choice("name", name, tuple(STUDIES))
    return STUDIES[name](name)


def _even(
    seed: int, low: float, high: float, num_data: int, f: Truth, factor: Truth
) -> Callable[[str], Dataset]:
    def make(name: str) -> Dataset:
        x = torch.linspace(low, high, num_data)
        return _observed(name, x, f, factor(x), Generator().manual_seed(seed))

    return make


def _sine_of_uniform(name: str) -> Dataset:
    generator = Generator().manual_seed(42)
    x = torch.rand(150, generator=generator) * 10
    return _observed(name, x, torch.sin, torch.full_like(x, 0.3), generator)


def _clusters(f: Truth, shape: tuple[tuple[float, ...], ...]) -> Callable[[str], Dataset]:
    def make(name: str) -> Dataset:
        generator, each = Generator().manual_seed(906), 400 // len(shape[0])
        sds, widths, lefts = (torch.tensor(part).repeat_interleave(each) for part in shape)
        x = torch.cat([torch.rand(each, generator=generator) for _ in shape[0]]) * widths + lefts
        return _observed(name, x, f, sds, generator)

    return make


def _observed(name: str, x: Tensor, f: Truth, factor: Tensor, generator: Generator) -> Dataset:
    y = f(x) + factor * torch.randn(len(x), generator=generator)
    x, y, truth, factor = (column.unsqueeze(-1) for column in (x, y, f(x), factor))
    return Dataset(
        x=x,
        y=y,
        name=name,
        task="regression",
        feature_names=("x",),
        true_f=truth,
        true_noise=factor.abs(),
        true_function=f,
    )


def _cubic(x: Tensor) -> Tensor:
    return x**3 / 350


def _polynomial(x: Tensor) -> Tensor:
    return 0.5 * x**2 + 0.25 * x**3


STUDIES: dict[str, Callable[[str], Dataset]] = {
    "uncertainty": _even(42, -1, 1, 100, _polynomial, lambda x: torch.full_like(x, 0.2)),
    "uncertainty_heteroskedastic": _even(42, -1, 1, 100, _polynomial, lambda x: 0.1 + 0.4 * x),
    "laplace": _sine_of_uniform,
    "four_clusters": _clusters(torch.cos, FOUR),
    "four_cubic_clusters": _clusters(_cubic, FOUR),
    "two_clusters": _clusters(torch.cos, TWO),
    "two_cubic_clusters": _clusters(_cubic, TWO),
    "variational": _even(
        0, -0.5, 0.5, 92, lambda x: 10 * torch.sin(2 * math.pi * x), lambda x: torch.full_like(x, 2.0)
    ),
    "swag": _even(1355, -5, 5, 500, lambda x: 3 * torch.sin(x), lambda x: 0.7 + 2 * torch.sin(0.2 * x)),
}
