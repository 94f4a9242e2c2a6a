"""Curvature of the log likelihood: generalized Gauss-Newton and exact Hessian; full, Kronecker-factored, diagonal."""

from __future__ import annotations

from pyrobnn.inference.curvature.ggn import DiagCurvature, FullCurvature, KronCurvature, ggn
from pyrobnn.inference.curvature.hessian import hessian, hessian_diagonal
from pyrobnn.inference.curvature.output import output_root

__all__ = [
    "DiagCurvature",
    "FullCurvature",
    "KronCurvature",
    "ggn",
    "hessian",
    "hessian_diagonal",
    "output_root",
]
