"""Curvature at a mode, for the Laplace approximation: Gauss-Newton in three structures, or the exact Hessian."""

from pyrobnn.inference.curvature.ggn import ggn, hessian, hessian_diagonal

__all__ = ["ggn", "hessian", "hessian_diagonal"]
