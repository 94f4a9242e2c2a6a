"""Where functions are compared: inputs among the data, in the gaps between them, and outside."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrobnn.core.matrices import power_iteration
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import generator

#: inputs of a region, and by how much the box of the data is widened
_IN_REGION = 16
_BEYOND = 1.25


def probes(x: Tensor) -> tuple[Tensor, list[str]]:
    """Inputs where functions are compared: ten train points, five gaps between neighbours, and four points outside.

    Args:
        x: training inputs (N, …).

    Returns:
        Probe inputs (probe, …) and the kind of each, ``"train"``, ``"between"`` or ``"outside"``. Images and other
        structured inputs have train probes only.
    """
    order = _along_spread(x)
    train = x[order[_evenly(len(x), 10)]]
    if x.dim() != 2 or not x.is_floating_point() or len(x) < 3:
        return train, ["train"] * len(train)
    ordered = x[order]
    gaps = (ordered[1:] - ordered[:-1]).norm(dim=1)
    # in one dimension the widest gaps; in many, midpoints of neighbours along the spread, which are as far apart as any
    widest = gaps.topk(min(5, len(gaps))).indices.sort().values
    between = (ordered[widest] + ordered[widest + 1]) / 2
    center = x.mean(0)
    far = torch.stack([ordered[0], ordered[-1]])
    reach = torch.tensor([1.25, 1.5], dtype=x.dtype)
    outside = (center + reach[:, None, None] * (far - center)).reshape(-1, x.shape[1])
    kinds = ["train"] * len(train) + ["between"] * len(between) + ["outside"] * len(outside)
    return torch.cat([train, between, outside]), kinds


def probes_by_region(x: Tensor) -> tuple[Tensor, list[str]]:
    """Inputs where an approximation is compared with the posterior: among the data, and off them.

    Args:
        x: training inputs (N, …).

    Returns:
        Probe inputs (probe, …) and the region of each: ``"data"``, rows of x; ``"permuted"``, rows whose columns are
        drawn each by itself, off the ridge on which correlated inputs lie; ``"beyond"``, places in the box of the data
        widened by a quarter. Images and other structured inputs have rows only.
    """
    rows = x[_evenly(len(x), _IN_REGION)]
    if x.dim() != 2 or not x.is_floating_point() or len(x) < 3:
        return rows, ["data"] * len(rows)
    random = generator(1)
    low = x.min(0).values
    high = x.max(0).values
    if x.shape[1] == 1:
        share = torch.linspace(0.0, 1.0, _IN_REGION)[:, None]
    else:
        share = torch.rand(_IN_REGION, x.shape[1], generator=random)
    beyond = (low + high) / 2 + _BEYOND * (share.to(x) - 0.5) * (high - low)
    regions = [rows, beyond]
    kinds = ["data"] * len(rows) + ["beyond"] * len(beyond)
    if x.shape[1] > 1:
        columns = [
            column[torch.randint(len(x), (_IN_REGION,), generator=random).to(x.device)]
            for column in x.T
        ]
        regions.append(torch.stack(columns, 1))
        kinds += ["permuted"] * _IN_REGION
    return torch.cat(regions), kinds


def _evenly(length: int, count: int) -> Tensor:
    """At most ``count`` positions, evenly spread."""
    return evenly_spaced(length, min(count, length)).unique()


def _along_spread(x: Tensor) -> Tensor:
    """Order of the points along their first principal axis."""
    flat = x.reshape(len(x), -1).double()
    if flat.shape[1] == 1:
        return flat[:, 0].argsort()
    centered = flat - flat.mean(0)
    scale = centered.std(0, correction=0)
    centered = centered / torch.where(scale > 0, scale, torch.ones_like(scale))
    start = torch.randn(
        flat.shape[1],
        dtype=flat.dtype,
        generator=generator(0),
    )
    *_, direction = power_iteration(lambda unit: centered.T @ (centered @ unit), start, 20)
    return (centered @ direction).argsort()
