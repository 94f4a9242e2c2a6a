r"""Synthetic regression data: y = f(x) + ε with known f and known noise, one seed per data set.

Every generator draws from its own ``torch.Generator`` in double precision: the same seed gives the same data
on every machine, and no global random state is touched. The points of five published studies are drawn as they were, in
float32 from torch's CPU generator: number for number where a study gives its seed and the order of its draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from pyrobnn.core.checks import check_choice, check_count
from pyrobnn.data.dataset import Dataset

__all__ = ["clusters", "cubic_clusters", "gap", "polynomial", "sine", "sinusoid", "sinx3", "study"]

Function = Callable[[Tensor], Tensor]
#: noise sd, width and left end of each cluster
_Clusters = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
_FOUR_CLUSTERS: _Clusters = (0.01, 0.25, 0.05, 0.01), (2.1, 1.2, 1.4, 2.0), (-4.1, -1.2, 0.5, 4.0)
_TWO_CLUSTERS: _Clusters = (0.2, 0.05), (0.3, 1.2), (-1.0, 0.5)


def polynomial(
    num_data: int = 100,
    *,
    noise: Literal["homoskedastic", "heteroskedastic"] = "homoskedastic",
    seed: int = 0,
) -> Dataset:
    r"""A cubic: :math:`y = \tfrac12 x^2 + \tfrac14 x^3 + \sigma(x)\,\epsilon,\; x \sim U(-1, 1)`.

    Args:
        num_data: number of points N.
        noise: ``"homoskedastic"``, σ = 0.2, or ``"heteroskedastic"``, σ(x) = abs(0.1 + 0.4 x).
        seed: of this data set.

    Returns:
        :class:`Dataset` with x, y, true_f and true_noise of shape (N, 1).

    Raises:
        ValueError: fewer than one point, or another noise.

    Example:
        >>> polynomial(noise="heteroskedastic", seed=1).x.shape
        torch.Size([100, 1])
    """
    check_choice("noise", noise, ("homoskedastic", "heteroskedastic"))
    scale = _constant(0.2) if noise == "homoskedastic" else lambda x: (0.1 + 0.4 * x).abs()
    return _uniform("polynomial", _polynomial, scale, -1, 1, num_data, seed)


def sinusoid(num_data: int = 150, *, seed: int = 0) -> Dataset:
    r"""A sine with constant noise: y = sin(x) + 0.3 ε, x ~ U(0, 10); arguments as in :func:`polynomial`."""
    return _uniform("sinusoid", torch.sin, _constant(0.3), 0, 10, num_data, seed)


def sine(num_data: int = 92, *, seed: int = 0) -> Dataset:
    r"""One period with noise: y = 10 sin(2πx) + 2 ε, x ~ U(−½, ½); arguments as in :func:`polynomial`."""
    return _uniform("sine", _period, _constant(2.0), -0.5, 0.5, num_data, seed)


def sinx3(num_data: int = 500, *, seed: int = 0) -> Dataset:
    r"""Noise that grows with x: y = 3 sin(x) + abs(0.7 + 2 sin(0.2 x)) ε, x ~ U(−5, 5); see :func:`polynomial`."""
    return _uniform("sinx3", _tall_sine, lambda x: _growing(x).abs(), -5, 5, num_data, seed)


def gap(num_data: int = 240, *, seed: int = 0) -> Dataset:
    r"""A sine that was not measured in the middle: y = sin(1.2 x) + 0.4 ε, x ~ U over [−3, −1] and [1, 3].

    What a method says between −1 and 1 rests on its prior and its approximation, and the truth there is known.
    Arguments as in :func:`polynomial`.

    Example:
        >>> gap().widest_gap()[0] < -0.9 and gap().widest_gap()[1] > 0.9
        True
    """
    check_count("num_data", num_data)
    generator = torch.Generator().manual_seed(seed)
    x = (
        4.0
        * torch.rand(
            num_data,
            1,
            generator=generator,
            dtype=torch.float64,
        )
        - 3.0
    )
    x = torch.where(x > -1.0, x + 2.0, x)
    return _observed("gap", _slow_sine, x, torch.full_like(x, 0.4), generator)


def clusters(num_data: int = 400, *, seed: int = 0) -> Dataset:
    r"""A cosine seen through four clusters of inputs, each with its own noise, cluster after cluster.

    .. math:: x = o_k + s_k u,\; u \sim U(0, 1), \qquad y = \cos(x) + \tau_k\,\epsilon

    The inputs cover [−4.1, −2.0], [−1.2, 0.0], [0.5, 1.9] and [4.0, 6.0], with τ of 0.01, 0.25, 0.05 and 0.01; the
    widest gap, (1.9, 4.0), is where an honest posterior is least certain. Arguments as in :func:`polynomial`.

    Example:
        >>> left, right = clusters().widest_gap()
        >>> 1.8 < left < 1.9 and 4.0 < right < 4.1
        True
    """
    return _clustered("clusters", torch.cos, num_data, seed, _FOUR_CLUSTERS)


def cubic_clusters(num_data: int = 400, *, seed: int = 0) -> Dataset:
    r"""The clusters of :func:`clusters` under another function: y = x³/350 + τ_k ε; arguments as there."""
    return _clustered("cubic_clusters", _cubic, num_data, seed, _FOUR_CLUSTERS)


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

    The studies do not give the seed of ``variational``, nor say that the clusters' inputs are all drawn, cluster after
    cluster, before their noise: these two are our choice.

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
    check_choice("name", name, tuple(studies()))
    return studies()[name](name)


def studies() -> dict[str, Callable[[str], Dataset]]:
    """The recipes of :func:`study`, by name."""
    return {
        "uncertainty": _even_recipe(42, 1, 100, _polynomial, _constant(0.2)),
        "uncertainty_heteroskedastic": _even_recipe(
            42, 1, 100, _polynomial, lambda x: 0.1 + 0.4 * x
        ),
        "laplace": _laplace_recipe,
        "four_clusters": _cluster_recipe(torch.cos, _FOUR_CLUSTERS),
        "four_cubic_clusters": _cluster_recipe(_cubic, _FOUR_CLUSTERS),
        "two_clusters": _cluster_recipe(torch.cos, _TWO_CLUSTERS),
        "two_cubic_clusters": _cluster_recipe(_cubic, _TWO_CLUSTERS),
        "variational": _even_recipe(0, 0.5, 92, _period, _constant(2.0)),
        "swag": _even_recipe(1355, 5, 500, _tall_sine, _growing),
    }


def _even_recipe(
    seed: int,
    ends: float,
    num_data: int,
    f: Function,
    factor: Function,
) -> Callable[[str], Dataset]:
    """The recipe of even inputs on [-ends, ends]."""
    x = torch.linspace(-ends, ends, num_data)[:, None]
    return lambda name: _observed(name, f, x, factor(x), torch.Generator().manual_seed(seed))


def _laplace_recipe(name: str) -> Dataset:
    """The recipe of ``laplace``: 150 uniform inputs on [0, 10] and a sine."""
    generator = torch.Generator().manual_seed(42)
    x = 10 * torch.rand(150, 1, generator=generator)
    return _observed(name, torch.sin, x, torch.full_like(x, 0.3), generator)


def _cluster_recipe(f: Function, shapes: _Clusters) -> Callable[[str], Dataset]:
    """The recipe of clusters of these shapes, whose inputs are drawn one cluster after the other."""

    def recipe(name: str) -> Dataset:
        generator = torch.Generator().manual_seed(906)
        size = 400 // len(shapes[0])
        sds, widths, lefts = (torch.tensor(values).repeat_interleave(size) for values in shapes)
        u = torch.cat([torch.rand(size, generator=generator) for _ in shapes[0]])
        x = u * widths + lefts
        return _observed(name, f, x[:, None], sds[:, None], generator)

    return recipe


def _constant(value: float) -> Function:
    return lambda x: torch.full_like(x, value)


def _polynomial(x: Tensor) -> Tensor:
    return 0.5 * x**2 + 0.25 * x**3


def _cubic(x: Tensor) -> Tensor:
    return x**3 / 350


def _period(x: Tensor) -> Tensor:
    return 10 * torch.sin(2 * math.pi * x)


def _tall_sine(x: Tensor) -> Tensor:
    return 3 * torch.sin(x)


def _slow_sine(x: Tensor) -> Tensor:
    return torch.sin(1.2 * x)


def _growing(x: Tensor) -> Tensor:
    return 0.7 + 2 * torch.sin(0.2 * x)


def _uniform(
    name: str,
    f: Function,
    noise: Function,
    low: float,
    high: float,
    num_data: int,
    seed: int,
) -> Dataset:
    check_count("num_data", num_data)
    generator = torch.Generator().manual_seed(seed)
    x = low + (high - low) * torch.rand(
        num_data,
        1,
        generator=generator,
        dtype=torch.float64,
    )
    return _observed(name, f, x, noise(x), generator)


def _clustered(
    name: str,
    f: Function,
    num_data: int,
    seed: int,
    shapes: _Clusters,
) -> Dataset:
    cluster = torch.arange(check_count("num_data", num_data)) * len(shapes[0]) // num_data
    noise, widths, lefts = (
        torch.tensor(values, dtype=torch.float64)[cluster, None] for values in shapes
    )
    generator = torch.Generator().manual_seed(seed)
    x = (
        lefts
        + widths
        * torch.rand(
            num_data,
            dtype=torch.float64,
            generator=generator,
        )[:, None]
    )
    return _observed(name, f, x, noise, generator)


def _observed(
    name: str,
    f: Function,
    x: Tensor,
    noise_factor: Tensor,
    generator: torch.Generator,
) -> Dataset:
    """y = f(x) + noise_factor · ε, drawn in the type of x, kept in float32."""
    true = f(x)
    y = true + noise_factor * torch.randn(
        x.shape,
        generator=generator,
        dtype=x.dtype,
    )
    options: dict[str, Any] = {
        "true_f": true.float(),
        "true_noise": noise_factor.abs().float(),
        "true_function": f,
    }
    return Dataset(
        x.float(),
        y.float(),
        name,
        "regression",
        ("x",),
        **options,
    )
