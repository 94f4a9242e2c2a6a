"""Curvature at a mode, for the Laplace approximation: Gauss-Newton in three structures, or the exact Hessian.

To read in this order:

=============== ======================================================================================
``jacobian``    the network's rows and layer factors around the mode
``gaussian``    the posterior: Gaussian blocks, their draws and densities
``ggn``         the Gauss-Newton matrix in three structures, and the exact Hessian
``linear_head`` that of a linear last layer, from its structure
``mode``        the centre: its sites and the search for it
``forms``       which structure a matrix takes, by its cost
``prior``       the prior's precision, and its factors by the evidence or by held-out data
``precision``   curvature plus prior: the blocks at a centre
``approach``    the last steps to the mode, in the units of the Gaussian around the centre
``linearized``  predictions of the network linearised at the mode
``nearest``     the Gaussian nearest to the linear network's posterior
``last_layer``  a trained net's last layer at any width of the prior, for ``posthoc`` alone
=============== ======================================================================================

Words, the same in all files:

* ``root``: square root (N, width, k) of the curvature of the rows' log density at the net's output; its k *columns* are
  pulled back through the net. ``Block.root``, of a Gaussian, is another: that of the posterior's covariance.
* ``rows`` of the Jacobian (N, k, p): those columns pulled back, for data N and weights p. A slice named ``rows``
  selects data.
* ``out`` and ``in``: the two sides of a layer's matrix [weight, bias]; the bias belongs to ``in``, as one more input.
* *whitened*: in standard deviations of the prior (H̃).
* ``group``: the weights of one layer, which share a factor τ on the prior's precision.
* ``structure``: what correlations are kept, ``"full"``, ``"kron"`` or ``"diag"``. ``form``: the structure and how its
  matrix was had, for ``meta``.
* ``net_split``: a net as trunk and head (:class:`pyrobnn.posterior.head.Split`); only the head varies.
"""

from pyrobnn.inference.curvature.ggn import ggn, hessian, hessian_diagonal

__all__ = ["ggn", "hessian", "hessian_diagonal"]
