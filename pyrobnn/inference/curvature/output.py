"""Curvature of the likelihood in the network's output: the small matrix in the middle of the Gauss-Newton sandwich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pyrobnn.inference.curvature.jacobian import Root
from pyrobnn.likelihoods import Likelihood


@dataclass(frozen=True, eq=False)
class DataRoot:
    """The square root at data: those of a chunk of rows by :meth:`rows`.

    Args:
        likelihood, params: as of :func:`output_root`.
        y: targets (N, …), of which the curvature of a censored row depends on its limit.
    """

    likelihood: Likelihood
    params: Mapping[str, Tensor]
    y: Tensor

    def __call__(self, f: Tensor) -> Tensor:
        """(N, width, k) at outputs (N, width) of these rows."""
        return self.likelihood.curvature_root(f, self.y, self.params)

    def rows(self, start: int, stop: int) -> DataRoot:
        """That of some of the rows."""
        return DataRoot(self.likelihood, self.params, self.y[start:stop])


def with_roots(pieces: Iterable[Tensor], root: Root) -> Iterator[tuple[Tensor, Root]]:
    """Pieces of the inputs, in their order, each with the root of its rows."""
    start = 0
    for piece in pieces:
        stop = start + len(piece)
        yield piece, root.rows(start, stop) if isinstance(root, DataRoot) else root
        start = stop


def output_root(likelihood: Likelihood, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """A square root (N, width, k) of the expected Fisher information of each datum: ``likelihood.fisher_root``.

    Reference: New insights and perspectives on the natural gradient method (Martens, 2020).

    Example:
        >>> import torch
        >>> from pyrobnn.likelihoods import Bernoulli
        >>> output_root(Bernoulli(), torch.zeros(1, 1), {})
        tensor([[[0.5000]]])
    """
    return likelihood.fisher_root(f, params)
