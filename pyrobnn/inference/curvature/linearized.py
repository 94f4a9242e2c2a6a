"""The network linearised at the mode: closed-form mean and covariance of f, and linear function draws."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from pyrobnn.inference.curvature.gaussian import Block, DiagBlock, KronBlock
from pyrobnn.inference.curvature.jacobian import (
    Factors,
    FormedRows,
    Layer,
    NetworkJacobian,
    jvp,
)


class SubsetNetwork:
    """The network where only some sites vary: the others stay at the mode.

    What precedes the sites, ``features`` of its inputs (by default these themselves), is computed once.
    """

    def __init__(
        self, jacobian: NetworkJacobian, features: Callable[[Tensor], Tensor] | None = None
    ):
        self.jacobian = jacobian
        self.model = jacobian.model
        self.features = features or (lambda x: x)

    def __call__(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Output (N, width) of one set of parameters."""
        return self.head(params, self.features(x))

    def head(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The output (N, width) as a function of the features."""
        moving = {site.name: params[site.name] for site in self.jacobian.sites}
        return self.jacobian.model.forward(self.jacobian.params | moving, x)


class Linearized(SubsetNetwork):
    r"""The network as a linear function of its parameters, under a Gaussian over them.

    .. math:: f(x, \theta) \approx f(x, \theta^*) + J(x) (\theta - \theta^*), \qquad
        f(x) \sim N\left(f(x, \theta^*) + J(x) \delta,\; J(x) \Lambda^{-1} J(x)^\top\right)

    Called with (params, x) it is a network like any other, so posterior draws become draws of this Gaussian process.

    The Gaussian over the network's coordinates are ``blocks`` around ``loc`` (dim,), :math:`\theta^* + \delta`, by
    default where the network is linearised; ``features`` as of :class:`SubsetNetwork`.

    Caveat: the Gauss-Newton posterior *is* the posterior of this linear model, which is why its predictions are usually
    better than those of the same weights through the network itself.

    Reference: Improving predictions of Bayesian neural nets via local linearization (Immer, Korzepa & Bauer, 2021).
    """

    def __init__(
        self,
        jacobian: NetworkJacobian,
        blocks: Sequence[Block],
        loc: Tensor | None = None,
        features: Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__(jacobian, features)
        self.shift = None if loc is None else (loc - jacobian.mode)[jacobian.index]
        coordinates = set(jacobian.index.tolist())
        self.blocks = [block for block in blocks if int(block.index[0]) in coordinates]
        self._block_at = {int(block.index[0]): block for block in self.blocks}

    def head(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """f(θ*) + J (θ − θ*) as a function of the features."""
        jacobian = self.jacobian
        pieces = [site.transform.inv(params[site.name]).reshape(-1) for site in jacobian.sites]
        return self._output_at(x, torch.cat(pieces) - jacobian.mode[jacobian.index])

    def _output_at(self, x: Tensor, delta: Tensor) -> Tensor:
        """f(θ*) + J δ, (N, width), for δ (p,)."""
        jacobian = self.jacobian
        f, slope = jvp(lambda z: jacobian.output(z, x), jacobian.mode[jacobian.index], delta)
        return f + slope

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the network's first head, that of the mean where there is one, (point, out)."""
        f, cov = self.output_moments(x)
        out = f.shape[1] // self.jacobian.model.likelihood.targets.heads
        return f[:, :out], cov.diagonal(dim1=1, dim2=2)[:, :out]

    def output_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (point, width) of f and its covariance over outputs (point, width, width), point by point."""
        jacobian = self.jacobian
        x = self.features(x.to(self.jacobian.mode.device))
        means = []
        covs = []
        width = jacobian.model.forward(jacobian.params, x[:1]).shape[1]
        size = self._product_scalars(x) if self._by_products else 4 * width * jacobian.size
        for chunk in jacobian.chunks(x, size):
            f, cov = self._product_moments(chunk) if self._by_products else self._row_moments(chunk)
            means.append(f if self.shift is None else self._output_at(chunk, self.shift))
            covs.append(cov.to(f))
        return torch.cat(means), torch.cat(covs)

    @property
    def _by_products(self) -> bool:
        """Whether the moments come of the layers' factors: the network has them, and each block goes with them."""
        if isinstance(self.blocks[0], KronBlock):
            return True
        return bool(self.jacobian.layers) and all(isinstance(b, DiagBlock) for b in self.blocks)

    def _product_scalars(self, x: Tensor) -> int:
        """Numbers that one point takes by the layers' factors, and by rows in the other sites."""
        jacobian = self.jacobian
        remainder = jacobian.remainder
        return jacobian.factor_scalars(x) + (0 if remainder is None else remainder.pass_scalars(x))

    def _product_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and covariances by each layer's inputs and backpropagated vectors, without forming the rows."""
        jacobian = self.jacobian
        f, factors = jacobian.factors(x)
        is_diagonal = len(self.blocks) == 1 and len(self.blocks[0].index) == jacobian.size
        terms = []
        for layer, factor in zip(jacobian.products, factors):
            if isinstance(self.blocks[0], DiagBlock) and is_diagonal:
                terms.append(self._diagonal_term(layer, factor))
            else:
                block = self._block_at[int(layer.index[0, 0])]
                terms.append(_term_of_block(block, factor))
        if jacobian.remainder is not None:
            rows = jacobian.remainder.rows(x)[1]
            places = jacobian.remainder.index
            starts = {int(site.start) for site in jacobian.remainder.sites}
            for block in self.blocks:
                if int(block.index[0]) in starts:
                    columns = rows[:, :, torch.searchsorted(places, block.index)]
                    terms.append(_term_of_block(block, FormedRows(columns.unsqueeze(2))))
        return f, functools.reduce(torch.add, terms)

    def _diagonal_term(self, layer: Layer, factor: Factors | FormedRows) -> Tensor:
        """A layer's part (point, width, width) of the covariance under one diagonal precision."""
        prec = cast(DiagBlock, self.blocks[0]).prec[self.jacobian.positions(layer)]
        if isinstance(factor, Factors):
            return _term(factor.inputs.to(prec), factor.grads.to(prec), prec)
        return _squared((factor.rows().to(prec) * prec.rsqrt()).flatten(2))

    def _row_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and covariances by the rows of the Jacobian, whitened by the posterior."""
        f, rows = self.jacobian.rows(x)
        rows = rows.flatten(0, 1)
        by_block = [block.root(self._columns(rows, block)) for block in self.blocks]
        whitened_rows = torch.cat(by_block, 1).reshape(*f.shape, -1)
        return f, whitened_rows @ whitened_rows.transpose(1, 2)

    def _columns(self, rows: Tensor, block: Block) -> Tensor:
        """The block's columns of ``rows``; zero for coordinates that the network does not depend on (the noise)."""
        index = self.jacobian.index
        place = torch.searchsorted(index, block.index).clamp_max(len(index) - 1)
        return rows[:, place] * (index[place] == block.index)


def _term_of_block(block: Block, factor: Factors | FormedRows) -> Tensor:
    """A layer's part (point, width, width) of the covariance under its block."""
    if isinstance(block, KronBlock):
        factors = cast(Factors, factor)
        prec = block.prec
        inputs = (factors.inputs.to(prec) * block.scale) @ block.in_basis
        return _term(inputs, factors.grads.to(prec) @ block.out_basis, prec)
    rows = factor.rows().flatten(2)
    return _squared(block.root(rows.flatten(0, 1)).reshape(rows.shape))


def _term(inputs: Tensor, grads: Tensor, prec: Tensor) -> Tensor:
    """The covariance of products of a layer whose weights (out, in) are independent, of precision ``prec``."""
    if inputs.shape[1] == 1:
        weight = inputs.squeeze(1).square() @ prec.reciprocal().T
        grads = grads.squeeze(2)
        return (grads * weight.unsqueeze(1)) @ grads.transpose(1, 2)
    return _squared((Factors(inputs, grads).rows() * prec.rsqrt()).flatten(2))


def _squared(rows: Tensor) -> Tensor:
    """RRᵀ of each point's rows (point, width, p)."""
    return rows @ rows.transpose(1, 2)


def mode_of_linear(jacobian: NetworkJacobian, blocks: Sequence[Block], gradient: Tensor) -> Tensor:
    r"""The mode of the model whose network is linear, by one Newton step from where it is linearised.

    .. math:: \theta^* + \Lambda^{-1} \nabla \log p(y, \theta^*)

    Exact for Gaussian noise and normal priors: however far from a mode of the network itself a search has ended, the
    linear model has its own, and it is this one whose posterior the Gauss-Newton matrix is the precision of.

    Reference: `Adapting the Linearised Laplace Model Evidence for Modern Deep Learning (Antorán et al., 2022)
    <https://arxiv.org/abs/2206.08900>`_.
    """
    mode = jacobian.mode.clone()
    coordinates = set(jacobian.index.tolist())
    for block in blocks:
        if int(block.index[0]) in coordinates:
            step = block.sample(block.root(gradient[block.index].unsqueeze(0)))
            mode[block.index] += step.squeeze(0).to(mode)
    return mode
