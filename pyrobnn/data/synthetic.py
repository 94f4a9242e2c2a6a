r"""Synthetic regression data: y = f(x) + ε with known f and known noise, one seed per data set.

Every generator draws from its own ``torch.Generator`` in double precision: the same seed gives the same data
on every machine, and no global random state is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from pyrobnn.data.dataset import Dataset

__all__ = ["clusters", "cubic_clusters", "gap", "polynomial", "sine", "sinusoid", "sinx3"]

Function = Callable[[Tensor], Tensor]

FRACTIONS = (0.25, 0.25, 0.25, 0.25)
VERTICAL_STDS = (0.01, 0.25, 0.05, 0.01)
SPREADS = (2.1, 1.2, 1.4, 2.0)
OFFSETS = (-4.1, -1.2, 0.5, 4.0)


def polynomial(
    num_data: int = 100,
    *,
    noise: Literal["homoskedastic", "heteroskedastic"] = "homoskedastic",
    seed: int = 0,
) -> Dataset:
    r"""A cubic with constant or varying noise.

    .. math:: y = \tfrac12 x^2 + \tfrac14 x^3 + \sigma(x)\,\epsilon,\quad x \sim U(-1, 1)

    with σ = 0.2, or σ(x) = abs(0.1 + 0.4 x), which vanishes at x = −¼: the sign of a factor of the symmetric
    ε does not matter.

    Args:
        num_data: number of points N.
        noise: ``"homoskedastic"`` or ``"heteroskedastic"``.
        seed: of this data set.

    Returns:
        :class:`Dataset` with x, y, true_f and true_noise of shape (N, 1).

    Raises:
        ValueError: fewer than one point, or another noise.

    Example:
        >>> polynomial(noise="heteroskedastic", seed=1).x.shape
        torch.Size([100, 1])
    """
    noises: dict[str, Function] = {
        "homoskedastic": lambda x: torch.full_like(x, 0.2),
        "heteroskedastic": lambda x: (0.1 + 0.4 * x).abs(),
    }
    if noise not in noises:
        raise ValueError(f"unknown noise {noise!r}: choose one of {', '.join(noises)}")
    return _uniform("polynomial", lambda x: 0.5 * x**2 + 0.25 * x**3, noises[noise], -1, 1, num_data, seed)


def sinusoid(num_data: int = 150, *, seed: int = 0) -> Dataset:
    r"""A sine with constant noise: y = sin(x) + 0.3 ε, x ~ U(0, 10); arguments as in :func:`polynomial`."""
    return _uniform("sinusoid", torch.sin, lambda x: torch.full_like(x, 0.3), 0, 10, num_data, seed)


def sine(num_data: int = 92, *, seed: int = 0) -> Dataset:
    r"""One period with noise: y = 10 sin(2πx) + 2 ε, x ~ U(−½, ½); arguments as in :func:`polynomial`."""
    return _uniform(
        "sine",
        lambda x: 10 * torch.sin(2 * math.pi * x),
        lambda x: torch.full_like(x, 2.0),
        -0.5,
        0.5,
        num_data,
        seed,
    )


def sinx3(num_data: int = 500, *, seed: int = 0) -> Dataset:
    r"""Noise that grows with x: y = 3 sin(x) + (0.7 + 2 sin(0.2 x)) ε, x ~ U(−5, 5).

    The factor of ε is negative below x = −1.79; ``true_noise`` is its absolute value, which gives the same
    distribution. Arguments as in :func:`polynomial`.
    """
    return _uniform(
        "sinx3",
        lambda x: 3 * torch.sin(x),
        lambda x: (0.7 + 2 * torch.sin(0.2 * x)).abs(),
        -5,
        5,
        num_data,
        seed,
    )


def gap(num_data: int = 240, *, seed: int = 0) -> Dataset:
    r"""A sine that was not measured in the middle: y = sin(1.2 x) + 0.4 ε, x ~ U over [−3, −1] and [1, 3].

    What a method says between −1 and 1 rests on its prior and on how it carries doubt, and the truth there is known;
    elsewhere noise of one size hides a smooth function, which a small net can learn. Arguments as in
    :func:`polynomial`.

    Example:
        >>> gap().widest_gap()[0] < -0.9 and gap().widest_gap()[1] > 0.9
        True
    """
    _check_num_data(num_data)
    generator = torch.Generator().manual_seed(seed)
    x = 4.0 * torch.rand(num_data, 1, generator=generator, dtype=torch.float64) - 3.0
    x = torch.where(x > -1.0, x + 2.0, x)
    return _observed("gap", lambda x: torch.sin(1.2 * x), x, torch.full_like(x, 0.4), generator)


def clusters(
    num_data: int = 400,
    *,
    fractions: Sequence[float] = FRACTIONS,
    vertical_stds: Sequence[float] = VERTICAL_STDS,
    spreads: Sequence[float] = SPREADS,
    offsets: Sequence[float] = OFFSETS,
    seed: int = 0,
) -> Dataset:
    r"""A cosine seen through separate clusters of inputs, each with its own noise.

    .. math:: x = o_k + s_k u,\; u \sim U(0, 1), \qquad y = \cos(x) + \tau_k\,\epsilon

    for a point of cluster k. With the defaults the inputs cover [−4.1, −2.0], [−1.2, 0.0], [0.5, 1.9] and
    [4.0, 6.0]; the widest gap, (1.9, 4.0), is where an honest posterior is least certain.

    Args:
        num_data: number of points N over all clusters.
        fractions: share of the points in each cluster (K,); they sum to 1.
        vertical_stds: standard deviation τ of the noise in each cluster (K,), positive.
        spreads: width s of each cluster (K,), positive.
        offsets: left end o of each cluster (K,).
        seed: of this data set.

    Returns:
        :class:`Dataset` with x, y, true_f and true_noise of shape (N, 1), cluster after cluster.

    Raises:
        ValueError: parameters of different lengths, not positive, or fractions that do not sum to 1.

    Example:
        >>> left, right = clusters().widest_gap()
        >>> 1.8 < left < 1.9 and 4.0 < right < 4.1
        True
    """
    shape = (fractions, vertical_stds, spreads, offsets)
    return _clustered("clusters", torch.cos, shape, num_data, seed)


def cubic_clusters(
    num_data: int = 400,
    *,
    fractions: Sequence[float] = FRACTIONS,
    vertical_stds: Sequence[float] = VERTICAL_STDS,
    spreads: Sequence[float] = SPREADS,
    offsets: Sequence[float] = OFFSETS,
    seed: int = 0,
) -> Dataset:
    r"""The clusters of :func:`clusters` under another function: y = x³/350 + τ_k ε; arguments as there."""
    shape = (fractions, vertical_stds, spreads, offsets)
    return _clustered("cubic_clusters", lambda x: x**3 / 350, shape, num_data, seed)


def _uniform(
    name: str, function: Function, noise: Function, low: float, high: float, num_data: int, seed: int
) -> Dataset:
    _check_num_data(num_data)
    generator = torch.Generator().manual_seed(seed)
    x = low + (high - low) * torch.rand(num_data, 1, generator=generator, dtype=torch.float64)
    return _observed(name, function, x, noise(x), generator)


def _clustered(
    name: str, function: Function, shape: tuple[Sequence[float], ...], num_data: int, seed: int
) -> Dataset:
    _check_num_data(num_data)
    fractions, vertical_stds, spreads, offsets = (torch.tensor(list(p), dtype=torch.float64) for p in shape)
    lengths = [len(p) for p in shape]
    if len(set(lengths)) != 1 or lengths[0] == 0:
        raise ValueError(
            "'fractions', 'vertical_stds', 'spreads' and 'offsets' need one entry per cluster, "
            f"got lengths {', '.join(map(str, lengths))}"
        )
    if not math.isclose(float(fractions.sum()), 1.0, abs_tol=1e-6) or bool((fractions < 0).any()):
        raise ValueError(f"'fractions' must be at least 0 and sum to 1, got {tuple(shape[0])}")
    for label, values in (("vertical_stds", vertical_stds), ("spreads", spreads)):
        if not bool((values > 0).all()):
            raise ValueError(f"'{label}' must be positive, got {tuple(values.tolist())}")
    # cumulative rounding: the counts sum to num_data and none is off by more than one point
    ends = (fractions.cumsum(0) * num_data).round().long()
    ends[-1] = num_data
    cluster = torch.repeat_interleave(torch.arange(lengths[0]), ends.diff(prepend=torch.zeros(1).long()))
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(num_data, dtype=torch.float64, generator=generator)
    x = (offsets[cluster] + spreads[cluster] * u).unsqueeze(-1)
    return _observed(name, function, x, vertical_stds[cluster].unsqueeze(-1), generator)


def _observed(name: str, function: Function, x: Tensor, noise: Tensor, generator: torch.Generator) -> Dataset:
    f = function(x)
    y = f + noise * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return Dataset(
        x=x.float(),
        y=y.float(),
        name=name,
        task="regression",
        feature_names=("x",),
        true_f=f.float(),
        true_noise=noise.float(),
        true_function=function,
    )


def _check_num_data(num_data: int) -> None:
    if isinstance(num_data, bool) or not isinstance(num_data, int):
        raise TypeError(f"'num_data' must be an integer, got {num_data!r}")
    if num_data < 1:
        raise ValueError(f"'num_data' must be at least 1, got {num_data}")
