"""The one interface of likelihoods that methods, prediction, trees and diagnostics ask."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import pyro
import torch
import torch.distributions.constraints as constraints
from pyro.distributions.torch_distribution import TorchDistribution, TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import Refused, as_tensor, check_finite
from pyrobnn.core.seeding import generator
from pyrobnn.model.likelihoods.parameters import SITE, OwnParameters, Params

SCALE = f"{SITE}scale"
DATA = f"{SITE}data"

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Targets:
    """What the targets of a likelihood are, and what the network returns for each.

    Attributes:
        kind: ``"number"``, ``"count"`` (a whole number), ``"binary"`` (0 or 1), all (N, out); ``"label"``, one of
            several classes, (N,); or ``"labels"``, one of several classes for each position, (N, position).
        heads: network outputs per target column.
        normal: whether y given f is normal with the moments of ``loc_scale``.
        linear_mean: whether the mean of y is the first outputs of the network, one per column.
        censoring: y is (N, 2), the value and 1 where it was seen or 0 where it lies beyond (``"right"``: above,
            ``"left"``: below).
        exposure: the column of x that holds the exposure of each row, see :class:`pyrobnn.networks.Exposed`.
        measured: the units in which the program may measure y: ``"affine"``, of any origin and scale; ``"scale"``, of
            any scale; None where y has no units.
    """

    kind: Literal["number", "count", "binary", "label", "labels"] = "number"
    heads: int = 1
    normal: bool = False
    linear_mean: bool = False
    censoring: str | None = None
    exposure: int | None = None
    measured: Literal["affine", "scale"] | None = None

    @property
    def classes(self) -> bool:
        """Whether y is predicted by probabilities and entropies, not by a mean and a variance."""
        return self.kind in ("binary", "label", "labels")

    def read(self, y: Any) -> Tensor:
        """``y`` as a tensor; censored values also from a structured array or DataFrame, one column truth values."""
        names = getattr(getattr(y, "dtype", None), "names", None) or list(getattr(y, "columns", ()))
        if self.censoring is None or len(names) != 2:
            return torch.atleast_1d(as_tensor("y", y))
        columns = [as_tensor("y", np.asarray(y[name])) for name in names]
        columns.sort(key=lambda column: column.dtype == torch.bool)
        return torch.stack([column.double() for column in columns], 1)

    @staticmethod
    def columns(y: Tensor) -> Tensor:
        """``y`` with the positions of images and sequences (N, …) as columns, (N, column)."""
        return y.flatten(1) if y.dim() > 2 else y

    def values(self, y: Tensor) -> Tensor:
        """The columns of ``y`` that are predicted."""
        return y if self.censoring is None else y[..., :1]

    def observed(self, y: Tensor) -> Tensor:
        """Targets of predicted values of which all were observed."""
        return y if self.censoring is None else torch.cat([y, torch.ones_like(y)], -1)

    def as_observed(self, drawn: Tensor, y: Tensor) -> Tensor:
        """Draws (…, N, out) of new values as they would have been seen where ``y`` was: cut off at its limits."""
        if self.censoring is None:
            return drawn
        limit = y[:, :1].to(drawn)
        event = y[:, 1:].to(drawn.device)
        cut_off = torch.minimum if self.censoring == "right" else torch.maximum
        cut = cut_off(drawn, limit)
        return torch.where(event == 1, drawn, cut)

    def units(self, mean: Tensor, scale: Tensor) -> Pair | None:
        """Mean and scale of y, of those given, by which the program measures it; None where y has no units."""
        if self.measured is None:
            return None
        mean = self.values(mean)
        scale = self.values(scale)
        return (mean if self.measured == "affine" else torch.zeros_like(mean)), scale

    def in_units(
        self,
        y: Tensor,
        mean: Tensor | float,
        scale: Tensor | float,
    ) -> Tensor:
        """Targets in the units that :meth:`units` gave."""
        return torch.cat([(self.values(y) - mean) / scale, y[..., self.values(y).shape[-1] :]], -1)

    def log_volume(self, y: Tensor, scale: Tensor | float) -> Tensor:
        """What the log density of a row loses where ``y`` is ``scale`` times what the program measures, (N,).

        A censored row loses nothing: its probability has no unit.
        """
        sizes = torch.as_tensor(
            scale,
            dtype=torch.float64,
            device=y.device,
        )
        lost = sizes.log().expand(self.values(y).shape).sum(-1)
        return lost if self.censoring is None else lost * y[..., 1]


class Likelihood:
    r"""Interface of all likelihoods; shapes: ``f`` (\*batch, N, width), ``y`` (N, out) or (N,) for class labels.

    ``params`` maps the sites of the likelihood's own parameters (``"likelihood.scale"``) to draws of shape (\*batch,
    \*site_shape). A new likelihood is a subclass: what it must say is ``task``, ``targets``, :meth:`distribution` and,
    for numbers, :meth:`cdf`; :meth:`fisher_root` gives it the Gauss-Newton Laplace approximation.

    Attributes: ``task``, the name that trees carry; ``targets``, what y is; ``valid``, the constraint that values of y
    meet and its words; ``own``, the likelihood's own parameters.
    """

    task: ClassVar[str]
    targets: Targets = Targets()
    valid: ClassVar[tuple[constraints.Constraint, str]] = (constraints.real, "real numbers")

    def __init__(self) -> None:
        self.own = OwnParameters()

    def width(self, num: int) -> int:
        """How many values per point the network returns for ``num`` numbers or classes."""
        return self.targets.heads * num

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """``y`` in canonical shape and dtype for a network of output ``width``: numbers (N, out), or labels (N,).

        Raises:
            ValueError: wrong shape, NaN, values out of range.
            TypeError: wrong dtype.
        """
        name = type(self).__name__
        out = 1 if y.dim() == 1 else y.shape[-1]
        heads = self.targets.heads
        if y.dim() > 2:
            raise ValueError(
                f"'y' has shape {tuple(y.shape)} but {name} expects (N, outputs): flatten"
            )
        if width != heads * out:
            raise ValueError(
                f"the net returns {width} values per point but {name} expects {heads * out} ({heads} for each column "
                f"of 'y', {tuple(y.shape)}): give the net {heads * out} outputs or y {width // heads} columns"
            )
        self.own.check_outputs(out)
        if y.dtype == torch.bool and not self.targets.classes:
            raise TypeError(f"'y' has dtype {y.dtype} but {name} expects real numbers")
        check_finite("y", y)
        support, words = self.valid
        outside = y[~support.check(y.double())]
        if len(outside):
            raise ValueError(f"'y' must hold {words} for {name}, got {float(outside[0]):g}")
        return y.reshape(len(y), -1).to(dtype)

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        """Distribution of one datum given the network output, batch shape (\\*batch, N)."""
        raise NotImplementedError

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log density of every datum in nats, shape (\\*batch, N)."""
        return self.distribution(f, params).log_prob(y)

    def mean_variance(self, f: Tensor, params: Params) -> Pair:
        """Mean and variance of a number given the network output, both (\\*batch, N, out); infinite where they are."""
        law = self.distribution(f, params)
        return law.mean, law.variance

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        """P(Y < y) and P(Y ≤ y), both (\\*batch, N, out) and float64: equal where y is observed on a continuous scale.

        Raises:
            Refused: it is not known.
        """
        raise Refused(
            f"the distribution function of {type(self).__name__} is unknown: judge it by log_prob"
        )

    def loc_scale(self, f: Tensor, params: Params) -> Pair:
        """Mean and noise standard deviation, both (\\*batch, N, out), where y is normal."""
        raise NotImplementedError

    def probs(self, f: Tensor, params: Params | None = None) -> Tensor:
        """Probabilities (\\*batch, N, class) where y is a label; of 1, (\\*batch, N, out), where it is binary."""
        raise NotImplementedError

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r"""A square root of the expected Fisher information of one datum in the network output.

        .. math:: S_n S_n^\top = H_n = E_{y \sim p(\cdot \mid f_n)}\left[ -\partial_f^2 \log p(y \mid f_n) \right]

        Args:
            f: network outputs (N, width).
            params: the likelihood's own parameters, without batch dimensions.

        Returns:
            (N, width, k): column k is one vector to be pulled back through the network.

        Raises:
            Refused: it is not known.
        """
        raise Refused(
            f"the Gauss-Newton matrix of {type(self).__name__} is unknown: use curvature='hessian'"
        )

    @property
    def scale_is_free(self) -> bool:
        """Whether the noise has a scale that a search finds along with the function."""
        return SCALE in self.own.points or SCALE in self.own.priors

    def with_known_scale(self, f: Tensor, params: Params, level: Tensor) -> Tensor:
        """``f`` whose gradient fits the location as if the scale of the noise were ``level`` (out,), where positive.

        For likelihoods whose ``scale_is_free``; the scale itself goes on to follow the residuals.
        """
        return reweighted(f, self.own.value("scale", f, params), level)

    def curvature_root(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """As :meth:`fisher_root`; of a censored row, which tells less, the observed information at ``y``."""
        return self.fisher_root(f, params)

    def like(self, weight: Tensor) -> Likelihood:
        """A copy with the numbers of its own parameters in the dtype and on the device of ``weight``."""
        moved = copy.copy(self)
        moved.own = self.own.like(weight)
        return moved

    def observe(
        self,
        f: Tensor,
        y: Tensor | None,
        params: Params,
        num_data: float | None = None,
    ) -> Tensor:
        """The Pyro statement of the data: sampled, or observed at ``y``; scaled to ``num_data`` for a mini-batch."""
        # weighted batches make it a fraction, which Pyro's plate takes
        size: Any = len(f) if num_data is None else num_data
        with pyro.plate(
            f"{DATA}_plate",
            size=size,
            subsample=f,
        ):
            return pyro.sample(
                DATA,
                self.distribution(f, params),
                obs=y,
            )

    def __repr__(self) -> str:
        parts = [f"{kind} {name}" for name, kind in self.own.kinds.items()]
        options = vars(self) | {
            "exposure": self.targets.exposure,
            "censoring": self.targets.censoring,
        }
        parts += [f"{name}={v}" for name, v in options.items() if isinstance(v, int | float | str)]
        return f"{type(self).__name__}({', '.join(parts)})"


class _Drawn(Protocol):
    """A likelihood that defines its log density and its draws itself."""

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor: ...

    def draw(self, f: Tensor, params: Params) -> Tensor: ...


class Sampled(TorchDistribution):
    """The law of a datum as Pyro takes it, of a likelihood that defines ``log_prob`` and ``draw`` itself.

    Args:
        likelihood, f, params: as of :meth:`Likelihood.distribution`.
        columns: of y.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.independent(constraints.real, 1)

    def __init__(
        self,
        likelihood: _Drawn,
        f: Tensor,
        params: Params,
        columns: int,
    ):
        self.likelihood = likelihood
        self.f = f
        self.params = params
        self.columns = columns
        super().__init__(
            f.shape[:-1],
            torch.Size([columns]),
            validate_args=False,
        )

    def expand(self, batch_shape: Sequence[int], _instance: Sampled | None = None) -> Sampled:
        return Sampled(
            self.likelihood,
            self.f.expand(*batch_shape, self.f.shape[-1]),
            self.params,
            self.columns,
        )

    def log_prob(self, value: Tensor) -> Tensor:
        return self.likelihood.log_prob(self.f, value, self.params)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.likelihood.draw(self.f.expand(*sample_shape, *self.f.shape), self.params)


class HeldScale(Likelihood):
    r"""A likelihood under which the function is fitted as if the scale of the noise were known.

    While ``level`` (out,) is positive, the gradient in the location is :math:`\sigma^2 / \text{level}^2` times its own:
    that of a normal density with the scale ``level``. The scale follows the residuals, and no value changes.

    Args:
        likelihood: one whose ``scale_is_free``.

    Reference: On the Pitfalls of Heteroscedastic Uncertainty Estimation (Seitzer et al., 2022).
    """

    def __init__(self, likelihood: Likelihood):
        self.likelihood = likelihood
        self.own = likelihood.own
        self.targets = likelihood.targets
        self.level: Tensor | None = None

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        if self.level is not None:
            f = self.likelihood.with_known_scale(f, params, self.level)
        return self.likelihood.distribution(f, params)


def reweighted(loc: Tensor, scale: Tensor, level: Tensor) -> Tensor:
    """A location (…, N, out) with its gradient times (scale / level)², where the level (out,) is positive."""
    held = (scale.detach() / level).square()
    weight = torch.where(level > 0, held, torch.ones_like(held))
    # its value is that of both ends, its gradient the weight
    return torch.lerp(loc.detach(), loc, weight.expand_as(loc))


def identified(likelihood: Likelihood, f: Tensor) -> Tensor:
    """What of ``f`` the data can tell: of logits of classes all but their mean, which leaves probabilities alone."""
    return f - f.mean(-1, keepdim=True) if likelihood.task == "categorical" else f


def log_predictive(
    likelihood: Likelihood,
    f: Tensor,
    cov: Tensor,
    y: Tensor,
    params: Mapping[str, Tensor],
) -> Tensor:
    """Log density of ``y`` where the network output is normal, (N,).

    In closed form for normal y, with the noise at the mean of f; of classes by the probit approximation of MacKay
    (1992), which drops the correlations of logits; otherwise by draws of f.

    Args:
        f: means (N, width). cov: covariances (N, width, width). y: targets as :meth:`Likelihood.target` gives them.
    """
    if likelihood.targets.normal:
        loc, scale = likelihood.loc_scale(f, params)
        var = cov.diagonal(dim1=1, dim2=2).double()[:, : loc.shape[1]]
        total = (var + scale.double().square()).sqrt()
        return torch.distributions.Normal(loc.double(), total).log_prob(y.double()).sum(-1)
    if likelihood.task in ("categorical", "bernoulli"):
        var = cov.diagonal(dim1=1, dim2=2).double()
        shrunk = f / (1 + math.pi / 8 * var).sqrt().to(f)
        return likelihood.log_prob(shrunk, y, params).double()
    drawn = _normal_draws(f.double(), cov.double())
    wide = {name: value.double() for name, value in params.items()}
    return torch.logsumexp(likelihood.log_prob(drawn, y, wide), 0) - math.log(len(drawn))


def _normal_draws(mean: Tensor, cov: Tensor) -> Tensor:
    """512 draws (draw, N, width), in antithetic pairs, of normals with means (N, width)."""
    # the covariance is singular where fewer data than outputs tell
    values, vectors = torch.linalg.eigh(cov)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    noise = torch.randn(
        256,
        1,
        mean.shape[1],
        1,
        generator=generator(0),
        dtype=mean.dtype,
    )
    noise = noise.to(mean.device)
    noise = torch.cat([noise, -noise])
    return mean + (root @ noise).squeeze(-1)
