"""Curvature of the log likelihood: generalized Gauss-Newton and exact Hessian; full, Kronecker-factored, diagonal."""

from __future__ import annotations

from pyrobnn.curvature.ggn import DiagCurvature, FullCurvature, KronCurvature, ggn
from pyrobnn.curvature.hessian import hessian, hessian_diagonal
from pyrobnn.curvature.output import output_root

__all__ = [
    "DiagCurvature",
    "FullCurvature",
    "KronCurvature",
    "ggn",
    "hessian",
    "hessian_diagonal",
    "output_root",
]
