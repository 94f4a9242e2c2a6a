"""laplace-torch, the peer."""

from __future__ import annotations

import copy
import importlib

import torch
from torch import Tensor, nn

# torchvision beside a torch of another build lacks its operators, and laplace-torch imports it
OPERATORS = """
roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward ps_roi_pool
_ps_roi_pool_backward nms qnms qroi_align deform_conv2d _deform_conv2d_backward
"""
LIBRARY = torch.library.Library("torchvision", "DEF")
for operator in OPERATORS.split():
    LIBRARY.define(f"{operator}(Tensor x) -> Tensor")
Torch = importlib.import_module("laplace").Laplace


def laplace_torch(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    weights: str = "last_layer",
) -> Torch:
    """laplace-torch's Kronecker Laplace of ``weights``, its prior precision by the marginal likelihood."""
    laplace = Torch(
        copy.deepcopy(net),
        "classification",
        subset_of_weights=weights,
        hessian_structure="kron",
    )
    laplace.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 64))
    laplace.optimize_prior_precision(method="marglik")
    return laplace
