"""What a Laplace fit says about itself: how far from a mode it is, and what its numbers do not hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyrobnn.inference.curvature.blocks import Block
from pyrobnn.inference.curvature.precision import Precision

#: the mode counts as found when Newton's step is shorter than this many posterior standard deviations per √dimension
_NEWTON_LIMIT = 0.2
#: of the noise's variance that the last step to the mode of a linear model may take off the residuals
_NOISE_SHARE = 0.1


def record(precision: Precision, remarks: list[str], given: bool, exact: bool) -> dict[str, Any]:
    """What the fit says about itself; adds to the remarks that the centre (``given`` by the user?) is not a mode.

    Of the ``exact`` mode of the linear model only the noise is not: it is that of the residuals at the centre, whose
    sum of squares the last step lowers by its squared length, in noise variances.
    """
    gradient = precision.centre.gradient
    distance = _newton_distance(precision.blocks, gradient)
    size = sum(len(block.index) for block in precision.blocks)
    small = exact and distance**2 <= _NOISE_SHARE * len(precision.centre.problem.x)
    if not small and not distance <= _NEWTON_LIMIT * math.sqrt(size):
        remedy = "train longer, or leave out 'init': what is given is not moved"
        if not given:
            remedy = "train longer (num_steps): neither the search nor L-BFGS on all of the data reached it"
        remarks.append(
            f"the centre is not a mode: gradient norm {float(_norm(precision.blocks, gradient)):.3g}, "
            f"{distance:.3g} posterior standard deviations from it: {remedy}"
        )
    return {
        "gradient_norm": float(_norm(precision.blocks, gradient)),
        "newton_distance": distance,
        "damping": precision.damping,
        "tuned": precision.tuned,
        "log_evidence_kind": "laplace",
        "head": "" if precision.centre.split is None else precision.centre.split.path,
        "layer_products": precision.jacobian is not None and bool(precision.jacobian.layers),
    }


def report_frozen(draws: Mapping[str, Tensor], remarks: list[str]) -> None:
    """Adds to the remarks that widths are lost where they are added to the mode."""
    moved = torch.cat([(value != value[:, :1]).any(1).flatten() for value in draws.values()])
    if next(iter(draws.values())).shape[1] > 1 and not bool(moved.all()):
        dtype = str(next(iter(draws.values())).dtype).removeprefix("torch.")
        remarks.append(
            f"{int((~moved).sum())} of {len(moved)} weights are the same in all draws: {dtype} does not resolve so "
            "narrow a posterior around them. Use a larger noise, or a float64 net (net.double())"
        )


def _newton_distance(blocks: Sequence[Block], gradient: Tensor) -> float:
    parts = [block.root(gradient[block.index].unsqueeze(0)).double().square().sum() for block in blocks]
    return float(torch.stack(parts).sum().sqrt())


def _norm(blocks: Sequence[Block], gradient: Tensor) -> Tensor:
    return gradient[torch.cat([block.index for block in blocks])].double().norm()
