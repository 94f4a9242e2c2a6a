"""A fitted posterior as a model of BoTorch; needs ``pip install 'pyrobnn[botorch]'``."""

from __future__ import annotations

import torch
from botorch.models.ensemble import EnsembleModel
from torch import Size, Tensor

from pyrobnn.posterior import Posterior
from pyrobnn.posterior.acquisition import values as function_values


class BNNModel(EnsembleModel):
    """The posterior of a :class:`pyrobnn.BNN` as an ensemble of functions, for BoTorch's Monte Carlo acquisition.

    Args:
        bnn_posterior: any method's; X and values are in the units of the data (give the BNN a standardizer, and no
            transforms here). Values are the mean of y, or logits, without noise.
        num_draws: at most as many of each chain, evenly spaced; memory and time grow with them.

    Caveat: functions are those of the draws there are: the better the optimiser of an acquisition function, the more
    it finds what these happen to have in common.
    """

    def __init__(self, bnn_posterior: Posterior, *, num_draws: int = 64):
        super().__init__()
        self.bnn_posterior = bnn_posterior
        self.num_draws = num_draws
        self._draws = {
            name: value.flatten(0, 1) for name, value in bnn_posterior.thin(num_draws).draws.items()
        }
        x = bnn_posterior.bnn.cast_inputs(torch.zeros(1, *bnn_posterior.meta["input_shape"]))
        self._num_outputs = self.forward(x).shape[-1]

    @property
    def batch_shape(self) -> Size:
        """Empty: one model, no batch of models."""
        return Size()

    def forward(self, X: Tensor) -> Tensor:
        """Every draw's function at X (…, n, d): (…, draw, n, out), with gradients with respect to X."""
        f = function_values(self.bnn_posterior, self._draws, X.reshape(-1, X.shape[-1]))
        return f.reshape(len(f), *X.shape[:-1], -1).movedim(0, -3).to(X)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: int) -> BNNModel:
        """The model given further rows (n, d) and (n, out) as well, by ``posterior.update``.

        Raises:
            ValueError: X with batches.
            Refused: as :meth:`pyrobnn.Posterior.update`.
        """
        if X.dim() != 2:
            raise ValueError(
                f"'X' has shape {tuple(X.shape)}: rows (n, d) are needed, a call for each batch"
            )
        return BNNModel(self.bnn_posterior.update(X, Y, **kwargs), num_draws=self.num_draws)
