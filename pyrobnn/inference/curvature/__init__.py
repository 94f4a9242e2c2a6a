"""Curvature of the log likelihood: generalized Gauss-Newton and exact Hessian; full, Kronecker-factored, diagonal."""

from __future__ import annotations

from pyrobnn.inference.curvature.ggn import ggn
from pyrobnn.inference.curvature.hessian import hessian, hessian_diagonal

__all__ = ["ggn", "hessian", "hessian_diagonal"]
