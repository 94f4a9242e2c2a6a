"""A normalizing flow as a guide: affine couplings, cheap in both directions, on one flat parameter vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyrobnn.core.checks import Refused
from pyrobnn.inference.fitting.rng import Noise
from pyrobnn.inference.vi.families import Draw, raw_scale
from pyrobnn.model import Density
from pyrobnn.posterior.approximation import FAMILIES, FlatApproximation

#: a coupling multiplies by at most e^±2, so that no early step can blow up
_LOG_SCALE_BOUND = 2.0
#: an optimiser's step of the networks relative to that of locations and scales: the fit diverges at the same step
_NETWORK_STEP = 0.03


class CouplingFlow:
    r"""Affine couplings of the two halves of the vector, exchanged after each, then a shift and a scale per weight.

    .. math:: b \leftarrow b \odot e^{s(a)} + t(a), \qquad z = \mu + \sigma \odot u

    The networks s, t (one hidden layer) start at zero: the flow starts as the mean-field normal.

    Reference: `Density estimation using Real NVP (Dinh et al., 2017) <https://arxiv.org/abs/1605.08803>`_.
    """

    factorized = False

    def __init__(self, loc: Tensor, init_scale: float, seed: int, num_layers: int = 4):
        self.loc, self.init_scale, self.seed = loc, init_scale, seed
        self.dim = len(loc)
        if self.dim < 2:
            raise Refused("guide='flow' needs at least two weights to couple: use guide='mean_field'")
        self.shapes: dict[str, tuple[int, ...]] = {"loc": (self.dim,), "raw_scale": (self.dim,)}
        for k in range(num_layers):
            (given, moved), hidden = _sizes(self.dim, k), 64
            self.shapes |= {
                f"{k}.in": (hidden, given),
                f"{k}.in_bias": (hidden,),
                f"{k}.out": (2 * moved, hidden),
                f"{k}.out_bias": (2 * moved,),
            }
        self.size = sum(math.prod(shape) for shape in self.shapes.values())

    def initial(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        parts = []
        for name, shape in self.shapes.items():
            if name == "loc":
                parts.append(self.loc)
            elif name == "raw_scale":
                parts.append(raw_scale(self.loc, self.init_scale))
            elif name.endswith(".in"):
                scale = 1 / (math.sqrt(shape[1]) * _NETWORK_STEP)
                parts.append(torch.randn(shape, generator=generator).to(self.loc) * scale)
            else:
                parts.append(self.loc.new_zeros(shape))
        return torch.cat([part.reshape(-1) for part in parts])

    def state(self, phi: Tensor) -> dict[str, Tensor]:
        """The named tensors of a flat parameter vector."""
        parts = phi.split([math.prod(shape) for shape in self.shapes.values()])
        return {
            name: part.reshape(shape) * (1.0 if name in ("loc", "raw_scale") else _NETWORK_STEP)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        z, log_q = _push(self.state(phi), noise.normal(self.loc))
        # no score: along the path alone the gradient of a flow has heavy tails, and the fit diverges
        return Draw(z, log_q, None, None)

    def approximation(self, phi: Tensor, layout: Density) -> FlatApproximation:
        return FlatApproximation(layout, "flow", self.state(phi))


class FlowDistribution(TorchDistribution):
    """The distribution of a coupling flow's output; event shape (dim,)."""

    arg_constraints = {}
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, state: Mapping[str, Tensor]):
        self.flow = dict(state)
        super().__init__(torch.Size(), self.flow["loc"].shape, validate_args=False)

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> FlowDistribution:
        """Itself: there is one flow."""
        if torch.Size(batch_shape):
            raise NotImplementedError("a fitted flow has no batch of parameters")
        return self

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws (\\*sample_shape, dim)."""
        loc = self.flow["loc"]
        return _push(self.flow, torch.randn(*sample_shape, *loc.shape, dtype=loc.dtype, device=loc.device))[0]

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density (\\*batch,) of values (\\*batch, dim)."""
        scale = F.softplus(self.flow["raw_scale"])
        u = (value - self.flow["loc"]) / scale
        total = -scale.log().sum()
        for k in reversed(range(_num_layers(self.flow))):
            moved, given = u.split(list(_sizes(u.shape[-1], k))[::-1], -1)
            log_scale, shift = _coupling(self.flow, k, given)
            u = torch.cat([given, (moved - shift) * (-log_scale).exp()], -1)
            total = total - log_scale.sum(-1)
        return total - 0.5 * (u.square() + math.log(2 * math.pi)).sum(-1)


FAMILIES["flow"] = FlowDistribution


def _push(state: Mapping[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
    """z and log q(z) of standard normal noise, (\\*batch, dim) and (\\*batch,)."""
    scale = F.softplus(state["raw_scale"])
    log_q = -0.5 * (noise.square() + math.log(2 * math.pi)).sum(-1) - scale.log().sum()
    u = noise
    for k in range(_num_layers(state)):
        given, moved = u.split(list(_sizes(u.shape[-1], k)), -1)
        log_scale, shift = _coupling(state, k, given)
        # exchanged, so that the next layer moves what this one left
        u = torch.cat([moved * log_scale.exp() + shift, given], -1)
        log_q = log_q - log_scale.sum(-1)
    return state["loc"] + scale * u, log_q.double()


def _coupling(state: Mapping[str, Tensor], k: int, given: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(F.linear(given, state[f"{k}.in"], state[f"{k}.in_bias"]))
    raw, shift = F.linear(h, state[f"{k}.out"], state[f"{k}.out_bias"]).chunk(2, -1)
    return _LOG_SCALE_BOUND * torch.tanh(raw / _LOG_SCALE_BOUND), shift


def _sizes(dim: int, k: int) -> tuple[int, int]:
    """Sizes of the given and the moved half in layer k: the exchange alternates them when dim is odd."""
    half = dim // 2
    return (half, dim - half) if k % 2 == 0 else (dim - half, half)


def _num_layers(state: Mapping[str, Tensor]) -> int:
    return sum(name.endswith(".in") for name in state)
