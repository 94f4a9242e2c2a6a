"""Where functions are compared: inputs among the data, in the gaps between them, and outside."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrobnn.core.matrices import power_iteration
from pyrobnn.core.seeding import generator


def probes(x: Tensor) -> tuple[Tensor, list[str]]:
    """Inputs where functions are compared: ten train points, five gaps between neighbours, and four points outside.

    Args:
        x: training inputs (N, …).

    Returns:
        Probe inputs (probe, …) and the kind of each, ``"train"``, ``"between"`` or ``"outside"``. Images and other
        structured inputs have train probes only.
    """
    order = _along_spread(x)
    train = x[order[torch.linspace(0, len(x) - 1, min(10, len(x))).round().long().unique()]]
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
