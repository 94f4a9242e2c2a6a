"""Local reparameterization and flipout: noise for every datum instead of one weight draw for the whole batch.

A torch function mode sees the calls of one thread, and the weights are known by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyrobnn.inference.fitting.rng import Noise

Estimator = Literal["local_reparameterization", "flipout"]
#: functions that are linear in weight and bias, and how many trailing dimensions of the input one datum has
_RANKS = {
    F.linear: 1,
    F.conv1d: 2,
    F.conv2d: 3,
    F.conv3d: 4,
}


class LocalNoise(TorchFunctionMode):
    r"""Inside, linear and convolution layers of normal weights draw their own noise for every datum.

    .. math::
        \text{local reparameterization:} \quad & h \sim N(x * \mu_w, \; x^2 * \sigma_w^2) \\
        \text{flipout:} \quad & h = x * \mu_w + ((x \odot s) * (w - \mu_w)) \odot r, \quad s, r \in \{\pm 1\}

    Both leave the expected log likelihood as it is and lower the variance of its gradient, because the noise of
    different data is not shared. For a convolution, local reparameterization draws the noise of every output position
    independently, which is the usual approximation: there the marginals are exact, correlations within one datum not.

    ``weights`` are sampled weight tensors, each with its mean and variance.

    Caveat: a training device. A function drawn with it is not one function: it has fresh weights at every input.

    Reference: `Variational dropout and the local reparameterization trick (Kingma et al., 2015)
    <https://arxiv.org/abs/1506.02557>`_; `Flipout (Wen et al., 2018) <https://arxiv.org/abs/1803.04386>`_.
    """

    def __init__(
        self,
        weights: list[tuple[Tensor, Tensor, Tensor]],
        estimator: Estimator,
        noise: Noise,
    ):
        super().__init__()
        self.estimator = estimator
        self.noise = noise
        self._kept = weights  # identities are only unique while the tensors live
        self._moments = {id(value): (mean, var) for value, mean, var in weights}

    def __torch_function__(
        self,
        func: Callable,
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANKS:
            x, weight, bias, options = _arguments(args, kwargs)
            if id(weight) in self._moments:
                draw = self._local if self.estimator == "local_reparameterization" else self._flip
                return draw(func, x, weight, bias, options)
        return func(*args, **kwargs)

    def _mean_and_variance(self, value: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Mean and variance; a weight that isn't random has no variance."""
        return (None, None) if value is None else self._moments.get(id(value), (value, None))

    def _local(
        self,
        func: Callable,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: Mapping,
    ) -> Tensor:
        mean, var = self._moments[id(weight)]
        bias_mean, bias_var = self._mean_and_variance(bias)
        h_mean = func(x, mean, bias_mean, **options)
        h_var = func(x.square(), var, bias_var, **options)
        # zero padding or a zero input gives a variance of zero, where the root has no gradient
        scale = h_var.clamp_min(torch.finfo(h_var.dtype).tiny ** 0.5).sqrt()
        return h_mean + scale * self.noise.normal_rows(h_mean)

    def _flip(
        self,
        func: Callable,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: Mapping,
    ) -> Tensor:
        mean, _ = self._moments[id(weight)]
        bias_mean, bias_var = self._mean_and_variance(bias)
        rank = _RANKS[func]
        h_mean = func(x, mean, bias_mean, **options)
        channels_in = self._signs(x, rank)
        noise = func(
            x * channels_in,
            weight - mean,
            None,
            **options,
        ) * self._signs(h_mean, rank)
        if bias_var is None:
            return h_mean + noise
        bias_noise = self.noise.normal_rows(_one_per_channel(h_mean, rank)) * bias_var.sqrt()
        return h_mean + noise + bias_noise.reshape(bias_noise.shape + (1,) * (rank - 1))

    def _signs(self, like: Tensor, rank: int) -> Tensor:
        """Random signs per datum and channel, (\\*batch, channels, 1, …)."""
        signs = self.noise.sign(_one_per_channel(like, rank))
        return signs.reshape(signs.shape + (1,) * (rank - 1))


class WeightUses(TorchFunctionMode):
    """Inside, counts what each of the given tensors is used for, and for how many rows of a matrix at once."""

    def __init__(self, values: Iterable[Tensor]):
        super().__init__()
        self.uses: dict[int, list[tuple[Callable[..., Any], torch.Size | None]]] = {
            id(value): [] for value in values
        }

    def __torch_function__(
        self,
        func: Callable,
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # what gives no tensor, as a look at the shape, uses no values
        if isinstance(result, Tensor):
            for value in (*args, *kwargs.values()):
                if id(value) in self.uses:
                    x = args[0] if args else kwargs["input"]
                    self.uses[id(value)].append((func, x.shape if isinstance(x, Tensor) else None))
        return result

    def once_per_row(self, num_rows: int) -> bool:
        """Whether linear layers are there, and each uses its weights for one vector of each datum, and once.

        Then the outputs that local reparameterization draws have the joint distribution of those of drawn weights;
        elsewhere (positions of a convolution, words of a sentence, shared weights) their marginals alone.
        """
        has_linear = False
        for uses in self.uses.values():
            if not any(func in _RANKS for func, _ in uses):
                continue
            has_linear = True
            func, shape = uses[0]
            if len(uses) > 1 or func is not F.linear or tuple(shape or ())[:-1] != (num_rows,):
                return False
        return has_linear


def _arguments(args: tuple, kwargs: Mapping) -> tuple[Tensor, Tensor, Tensor | None, dict]:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    options = dict(zip(names, args, strict=False)) | dict(kwargs)
    return options.pop("input"), options.pop("weight"), options.pop("bias", None), options


def _one_per_channel(h: Tensor, rank: int) -> Tensor:
    """The first position of every channel: shape (\\*batch, channels)."""
    return h if rank == 1 else h.flatten(-(rank - 1))[..., 0]
