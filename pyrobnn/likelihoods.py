"""What a network's output says about the data: the likelihoods, on top of :mod:`tyxe.likelihoods`.

TyXe supplies the vocabulary (the classes, the ``likelihood.data`` site inside its plate); the arithmetic is pure here:
every method takes the network output ``f`` and the likelihood's own parameters as arguments, so that the same lines
serve one draw inside a Pyro program and a batch of posterior draws, and the noise is always *the posterior's* noise.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
import torch.distributions.constraints as constraints
import torch.nn.functional as F
import tyxe.likelihoods
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroParam
from torch import Tensor

from pyrobnn.checks import check_finite, check_number
from pyrobnn.priors import move
from pyrobnn.sites.point import point

SCALE = "likelihood.scale"
DATA = "likelihood.data"


class Likelihood(torch.nn.Module):
    """Interface of all likelihoods; shapes: ``f`` (\\*batch, N, width), ``y`` (N, out) or (N,) for class labels.

    ``params`` maps ``"likelihood.scale"`` to draws of shape (\\*batch, \\*site_shape); it may be empty where the
    likelihood has no parameter of its own.
    """

    task: ClassVar[str]
    #: network outputs per target column
    heads: ClassVar[int] = 1
    #: priors of inferred parameters and (initial value, constraint) of learned ones, by site name
    priors: Mapping[str, TorchDistributionMixin] = {}
    points: Mapping[str, tuple[Tensor, constraints.Constraint]] = {}

    def width_error(self, width: int, y: Tensor) -> str | None:
        """What is wrong with a network of output ``width`` for targets ``y``; None if nothing is."""
        raise NotImplementedError

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """``y`` in canonical shape and dtype for a network of output ``width``.

        Raises:
            ValueError: wrong shape, NaN, labels out of range.
            TypeError: wrong dtype.
        """
        raise NotImplementedError

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        """Distribution of one datum given the network output, batch shape (\\*batch, N)."""
        raise NotImplementedError

    def log_prob(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Log density of every datum in nats, shape (\\*batch, N)."""
        return self.distribution(f, params).log_prob(y)

    def loc_scale(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and noise standard deviation, both (\\*batch, N, out); of the task ``"gaussian"`` alone."""
        raise NotImplementedError

    def probs(self, f: Tensor) -> Tensor:
        """Probabilities of the labels; of the tasks ``"categorical"`` and ``"bernoulli"`` alone."""
        raise NotImplementedError

    def like(self, weight: Tensor) -> Likelihood:
        """A copy with the numbers of its own parameters in the dtype and on the device of ``weight``."""
        own: dict[int, Any] = {id(self.priors): {}, id(self.points): {}}  # copied below
        moved = copy.deepcopy(self, own).to(weight.device)
        moved.priors = {name: move(name, prior, weight) for name, prior in self.priors.items()}
        moved.points = {name: (value.to(weight), support) for name, (value, support) in self.points.items()}
        return moved

    def sample_parameters(self) -> dict[str, Tensor]:
        """The Pyro statements of the likelihood's own parameters, by site."""
        inferred = {name: pyro.sample(name, prior) for name, prior in self.priors.items()}
        learned = {name: point(name, init, support) for name, (init, support) in self.points.items()}
        return inferred | learned

    def observe(
        self, f: Tensor, y: Tensor | None, params: Mapping[str, Tensor], num_data: float | None = None
    ) -> Tensor:
        """The Pyro statement of the data: sampled, or observed at ``y``; scaled to ``num_data`` for a mini-batch."""
        # weighted batches make it a fraction, which Pyro's plate takes
        size: Any = len(f) if num_data is None else num_data
        with pyro.plate(f"{DATA}_plate", size=size, subsample=f):
            return pyro.sample(DATA, self.distribution(f, params), obs=y)

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """TyXe's reading of a likelihood, both statements at once: the data given the network output."""
        return self.observe(f, y, self.sample_parameters())


class _Gaussian(Likelihood):
    task = "gaussian"

    def width_error(self, width: int, y: Tensor) -> str | None:
        out = 1 if y.dim() == 1 else y.shape[-1]
        if y.dim() > 2:
            return f"'y' has shape {tuple(y.shape)} but a Gaussian likelihood expects (N, outputs): flatten the outputs"
        if width == self.heads * out:
            return None
        heads = "a mean and a scale for each output, " if self.heads == 2 else ""
        return (
            f"the net returns {width} values per point but {type(self).__name__} expects {self.heads * out} "
            f"({heads}'y' has shape {tuple(y.shape)}): give the net {self.heads * out} outputs "
            f"or y {width // self.heads} columns"
        )

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if error := self.width_error(width, y):
            raise ValueError(error)
        if y.is_complex() or y.dtype == torch.bool:
            raise TypeError(f"'y' has dtype {y.dtype} but a Gaussian likelihood expects real numbers")
        check_finite("y", y)
        return y.reshape(len(y), -1).to(dtype)

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return dist.Normal(*self.loc_scale(f, params)).to_event(1)


class HomoskedasticGaussian(_Gaussian, tyxe.likelihoods.Gaussian):
    r"""Gaussian noise of one standard deviation everywhere (or one per output): :math:`y \sim N(f(x), \sigma^2)`.

    Args:
        scale: the noise standard deviation in the units of ``y``. A number or tensor is *fixed*; ``"learned"``, an
            ``nn.Parameter`` or ``PyroParam`` is a *point parameter*, optimised by MLE, MAP and SVI; a distribution on
            the positive reals is a *prior*, and the noise is *inferred* as the site ``likelihood.scale``.
            Shape () or (out,).

    Raises:
        ValueError: a scale that is not positive, or a prior whose support is not.

    Caveat: a learned scale is a point estimate and hides the uncertainty about the noise; prefer a prior.

    Example:
        >>> import pyro.distributions as dist
        >>> HomoskedasticGaussian(0.3)
        HomoskedasticGaussian(fixed scale)
        >>> HomoskedasticGaussian(dist.HalfNormal(1.0))
        HomoskedasticGaussian(inferred scale)
    """

    fixed_scale: Tensor

    def __init__(self, scale: float | Tensor | str | PyroParam | TorchDistributionMixin):
        super().__init__(dataset_size=None, event_dim=1, name="likelihood")
        self.priors, self.points = {}, {}
        if isinstance(scale, torch.distributions.Distribution):
            if not getattr(scale.support, "lower_bound", -1) >= 0:
                raise ValueError(
                    f"the prior of 'scale' must live on positive numbers, got {scale}: use HalfNormal or LogNormal"
                )
            if len(scale.batch_shape) + len(scale.event_shape) > 1:
                raise ValueError(
                    f"the prior of 'scale' must have shape () or (out,), got {tuple(scale.shape())}"
                )
            self.priors = {SCALE: scale.to_event(len(scale.batch_shape))}
        elif isinstance(scale, (str, torch.nn.Parameter, PyroParam)):
            if isinstance(scale, str) and scale != "learned":
                raise ValueError(
                    f"'scale' must be a number, 'learned', a parameter or a distribution, got {scale!r}"
                )
            value: Any = torch.tensor(1.0) if isinstance(scale, str) else getattr(scale, "init_value", scale)
            value = torch.as_tensor(value() if callable(value) else value).detach().clone()
            self.points = {SCALE: (_positive_scale(value), constraints.positive)}
        else:
            if not isinstance(scale, Tensor):
                check_number("scale", scale, above=0)
            # kept in float64: 0.7 must stay 0.7 for a float64 network
            self.register_buffer(
                "fixed_scale", _positive_scale(torch.as_tensor(scale, dtype=torch.float64).detach().clone())
            )

    def loc_scale(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and noise standard deviation, both (\\*batch, N, out)."""
        scale = params[SCALE] if self.priors or self.points else self.fixed_scale.to(f)
        if not self._per_output:  # (*batch,) -> (*batch, 1)
            scale = scale.unsqueeze(-1)
        return f, scale.unsqueeze(-2).expand(f.shape)

    @property
    def _per_output(self) -> bool:
        """Whether the scale's own shape is (out,) rather than ()."""
        if self.priors:
            return bool(self.priors[SCALE].event_shape)
        return (self.points[SCALE][0] if self.points else self.fixed_scale).dim() > 0

    def __repr__(self) -> str:
        kind = "inferred" if self.priors else "learned" if self.points else "fixed"
        return f"HomoskedasticGaussian({kind} scale)"


class HeteroskedasticGaussian(_Gaussian, tyxe.likelihoods.HeteroskedasticGaussian):
    r"""Gaussian noise that depends on the input: :math:`y \sim N(\mu(x), \sigma(x)^2)`, both from the network.

    The network returns (N, 2·out): means first, then :math:`\rho` with
    :math:`\sigma = \mathrm{softplus}(\rho) + \sigma_{\min}`.

    Args:
        min_scale: the smallest noise standard deviation, in the units of ``y``; keeps the likelihood bounded.

    Caveat: with few data the scale head can explain signal as noise; compare with a homoskedastic model by LOO.

    Reference: Estimating the mean and variance of the target probability distribution (Nix & Weigend, 1994).

    Example:
        >>> HeteroskedasticGaussian(min_scale=0.01)
        HeteroskedasticGaussian(min_scale=0.01)
    """

    heads = 2

    def __init__(self, min_scale: float = 1e-3):
        super().__init__(dataset_size=None, event_dim=1, name="likelihood")
        self.min_scale = check_number("min_scale", min_scale, above=0)

    def loc_scale(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and noise standard deviation, both (\\*batch, N, out)."""
        loc, raw = f.chunk(2, dim=-1)
        return loc, F.softplus(raw) + self.min_scale

    def __repr__(self) -> str:
        return f"HeteroskedasticGaussian(min_scale={self.min_scale:g})"


class Categorical(Likelihood, tyxe.likelihoods.Categorical):
    r"""Class labels: :math:`y \sim \mathrm{Categorical}(\mathrm{softmax}(f(x)))`; the network returns logits.

    The network's output is (N, classes).

    Labels are integers 0 … classes − 1 of shape (N,).

    Example:
        >>> Categorical()
        Categorical()
    """

    task = "categorical"

    def __init__(self) -> None:
        super().__init__(dataset_size=None, event_dim=0, name="likelihood")

    def width_error(self, width: int, y: Tensor) -> str | None:
        if y.dim() != 1:
            fix = "use y.squeeze(-1)" if y.shape[-1] == 1 else "use y.argmax(-1)"
            return f"'y' has shape {tuple(y.shape)} but Categorical expects ({len(y)},): {fix}"
        if width < 2:
            return f"the net returns {width} value per point but Categorical expects a logit per class: use Bernoulli()"
        return None

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if error := self.width_error(width, y):
            raise ValueError(error)
        if y.is_floating_point() or y.is_complex():
            raise TypeError(f"'y' has dtype {y.dtype} but Categorical expects integer labels: use y.long()")
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= width:
            raise ValueError(
                f"'y' holds labels from {low} to {high} but the net returns {width} classes: "
                f"labels must lie in 0 … {width - 1}; relabel y or give the net {max(high + 1, 2)} outputs"
            )
        return y.long()

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return dist.Categorical(logits=f)

    def probs(self, f: Tensor) -> Tensor:
        """Class probabilities (\\*batch, N, classes)."""
        return f.softmax(-1)

    def __repr__(self) -> str:
        return "Categorical()"


class Bernoulli(Likelihood, tyxe.likelihoods.Bernoulli):
    r"""Binary labels: :math:`y \sim \mathrm{Bernoulli}(\mathrm{sigmoid}(f(x)))`; one logit per output, (N, out).

    Labels are 0 or 1 of shape (N, out), or (N,) for one output.

    Example:
        >>> Bernoulli()
        Bernoulli()
    """

    task = "bernoulli"

    def __init__(self) -> None:
        super().__init__(dataset_size=None, event_dim=1, name="likelihood")

    def width_error(self, width: int, y: Tensor) -> str | None:
        out = 1 if y.dim() == 1 else y.shape[-1]
        if width == out and y.dim() <= 2:
            return None
        return (
            f"the net returns {width} values per point but Bernoulli expects one logit per label, "
            f"'y' has shape {tuple(y.shape)}: give the net {out} outputs"
        )

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if error := self.width_error(width, y):
            raise ValueError(error)
        check_finite("y", y)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError(
                f"'y' must hold 0 and 1 only for Bernoulli, got values from {y.min():g} to {y.max():g}"
            )
        return y.reshape(len(y), -1).to(dtype)

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return dist.Bernoulli(logits=f).to_event(1)

    def probs(self, f: Tensor) -> Tensor:
        """Probability of label 1, (\\*batch, N, out)."""
        return f.sigmoid()

    def __repr__(self) -> str:
        return "Bernoulli()"


def _positive_scale(scale: Tensor) -> Tensor:
    if not scale.is_floating_point():
        scale = scale.to(torch.get_default_dtype())
    if scale.dim() > 1 or not bool(torch.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError(f"'scale' must be positive with shape () or (out,), got {scale}")
    return scale
