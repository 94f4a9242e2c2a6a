"""The parts of a net on a table: features without skew, waves of them, layers that keep the scale, and heads."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from pyrobnn.data import Standardizer


class Lift(nn.Module):
    r"""Features without skew, and sines and cosines of each: (N, feature) to (N, lifted), all shrunk together.

    .. math:: z = \frac{(x - x_0)^\lambda - 1}{\lambda}, \qquad (z, \sin \omega z, \cos \omega z)

    with Box and Cox's λ of largest likelihood; a feature of two values stays as it is. A net of small weights is
    smooth: what is fast in a feature, or in its logarithm, it learns last.

    Args:
        x: training inputs (N, feature), in standard units.
        origin: where a feature is zero in these units, (feature,).
        waves: sines of each feature.
        fastest: the standard deviation of the last one's frequency, of the first one's.

    Reference: Fourier Features Let Networks Learn High Frequency Functions (Tancik et al., 2020).
    """

    #: of each feature: ``start``, the zero of the power; ``least``, the smallest value seen, above it; ``powers``, Box
    #: and Cox's λ; ``centre`` and ``scale``, the units of what is raised to them. Of its waves: ``rates``, the
    #: frequencies (feature, wave), for ``many``, the columns of more than two values. ``shrink`` is a factor on all
    start: Tensor
    least: Tensor
    powers: Tensor
    rates: Tensor
    many: Tensor
    centre: Tensor
    scale: Tensor
    shrink: Tensor

    def __init__(
        self,
        x: np.ndarray,
        origin: np.ndarray,
        waves: int,
        fastest: float = 1.0,
    ):
        super().__init__()
        least = x.min(0)
        continuous = np.flatnonzero([len(np.unique(column)) > 2 for column in x.T])
        # a logarithm is of values that are positive and not all far from zero; of others, of a shift
        start = np.where(
            (origin < least) & (least < origin + 1000), origin, least - 1 - 0.1 * np.ptp(x, 0)
        )
        powers = np.ones(x.shape[1])
        powers[continuous] = _likeliest_powers(np.log(x[:, continuous] - start[continuous]))
        normals = np.random.default_rng(0).normal(size=(len(continuous), waves))
        self._hold(
            start=start,
            least=least - start,
            powers=powers,
            rates=normals * np.geomspace(1, fastest, waves or 1)[:waves],
            many=continuous,
            centre=0,
            scale=1,
            shrink=1,
        )
        raised = self._raised(torch.from_numpy(x))
        self._hold(centre=raised.mean(0), scale=raised.std(0).clamp_min(1e-6))
        lifted = self(torch.from_numpy(x))
        self._hold(shrink=(x.shape[1] / lifted.var(0).sum()).sqrt())
        self.width = lifted.shape[1]

    @classmethod
    def of(
        cls,
        x: Tensor,
        units: Standardizer,
        waves: int,
        fastest: float = 1.0,
    ) -> Lift:
        """The lift for inputs x (N, feature) of the data, whose standard units are these."""
        origin = -units.x_mean / units.x_scale
        return cls(units.transform_x(x).numpy(), origin.numpy(), waves, fastest)

    def _hold(self, **values: np.ndarray | Tensor | float) -> None:
        for name, value in values.items():
            self.register_buffer(name, torch.as_tensor(value))

    def _raised(self, x: Tensor) -> Tensor:
        # below the least row that was seen the tangent goes on: a logarithm ends somewhere
        within = torch.maximum(x - self.start, self.least)
        tangent = (x - self.start - within) * within ** (self.powers - 1)
        return torch.expm1(self.powers * within.log()) / self.powers + tangent

    def forward(self, x: Tensor) -> Tensor:
        plain = (self._raised(x) - self.centre) / self.scale
        angle = (plain[..., self.many].unsqueeze(-1) * self.rates).flatten(-2)
        return self.shrink * torch.cat([plain, angle.sin(), angle.cos()], -1)


def _likeliest_powers(log: np.ndarray) -> np.ndarray:
    """Box and Cox's λ of largest likelihood, (feature,), of the logarithms (N, feature) of features.

    By a grid in a fifteenth of the time of scikit-learn's ``PowerTransformer``, which looks at one feature at a time.
    """
    # 1e-4 stands for zero
    grid = np.linspace(-2, 2, 17) + 1e-4 * (np.arange(17) == 8)
    # up to a constant
    log_likelihoods = [
        (p - 1) * log.mean(0) - np.log(np.exp(p * log).std(0) / abs(p)) for p in grid
    ]
    return grid[np.argmax(log_likelihoods, 0)]


class Layer(nn.Linear):
    """Weights start with variance 1 / inputs: torch's own have a third of that, which four layers would shrink away."""

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -math.sqrt(3) * bound, math.sqrt(3) * bound)
        nn.init.uniform_(self.bias, -bound, bound)


class Heads(nn.Module):
    """Of two outputs the mean alone, or mean and scale, ``factor`` times ``noise`` where the second output is zero."""

    def __init__(
        self,
        noise: float,
        mean_only: bool,
        factor: float = 1.0,
    ):
        super().__init__()
        self.raw = math.log(math.expm1(noise))  # the inverse of softplus
        self.mean_only = mean_only
        self.factor = factor

    def forward(self, f: Tensor) -> Tensor:
        mean, raw = f.chunk(2, -1)
        if self.mean_only:
            return mean
        raw = raw + self.raw
        if self.factor != 1:
            scale = self.factor * nn.functional.softplus(raw)
            # the inverse of softplus
            raw = scale + (-torch.expm1(-scale)).log()
        return torch.cat([mean, raw], -1)


class Offset(nn.Module):
    """Adds a constant (): the logarithm of the mean count, around which a net has its prior."""

    constant: Tensor

    def __init__(self, y: Tensor):
        super().__init__()
        self.register_buffer("constant", y.mean().log())

    def forward(self, f: Tensor) -> Tensor:
        return f + self.constant.to(f)
