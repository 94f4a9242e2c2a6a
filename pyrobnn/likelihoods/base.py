"""What every likelihood answers: the one interface that methods, prediction, trees and diagnostics ask."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import pyro
import torch
import torch.distributions.constraints as constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroParam
from torch import Tensor

from pyrobnn.core.checks import Refused, check_number
from pyrobnn.density.point import point
from pyrobnn.priors import move

SITE = "likelihood."
SCALE = f"{SITE}scale"
DATA = f"{SITE}data"


class Likelihood(torch.nn.Module):
    r"""Interface of all likelihoods; shapes: ``f`` (\*batch, N, width), ``y`` (N, out) or (N,) for class labels.

    ``params`` maps the sites of the likelihood's own parameters (``"likelihood.scale"``) to draws of shape (\*batch,
    \*site_shape); it may be empty where the likelihood has none. A new likelihood is a subclass: what it must say is
    ``task``, :meth:`width_error`, :meth:`target`, :meth:`distribution` and, for numbers, :meth:`mean_variance` and
    :meth:`cdf`; :meth:`fisher_root` gives it the Gauss-Newton Laplace approximation.
    """

    #: the name that trees carry
    task: ClassVar[str]
    #: whether y is a class label: it is predicted by probabilities and entropies, a number by a mean and a variance
    classes: ClassVar[bool] = False
    #: whether y is one whole number per datum, (N,)
    labels: ClassVar[bool] = False
    #: whether a number is a whole one
    discrete: ClassVar[bool] = False
    #: whether y given f is normal, with the moments of ``loc_scale``: what has a closed form only then asks this
    normal: ClassVar[bool] = False
    #: whether the mean of y is the first outputs of the network, one per column
    linear_mean: ClassVar[bool] = False
    #: y is (N, 2), the value and 1 where it was seen or 0 where it lies beyond ("right": above, "left": below)
    censoring: str | None = None
    #: network outputs per target column
    heads: int = 1
    #: the column of x that holds the exposure of each row, see :class:`pyrobnn.networks.Exposed`
    exposure: int | None = None
    #: priors of inferred parameters and (initial value, constraint) of learned ones, by site name
    priors: Mapping[str, TorchDistributionMixin] = {}
    points: Mapping[str, tuple[Tensor, constraints.Constraint]] = {}

    # -- data -------------------------------------------------------------------------------------------------------

    def width(self, num: int) -> int:
        """How many values per point the network returns for ``num`` numbers or classes."""
        return self.heads * num

    def width_error(self, width: int, y: Tensor) -> str | None:
        """What is wrong with a network of output ``width`` for targets ``y``; None if nothing is."""
        raise NotImplementedError

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """``y`` in canonical shape and dtype for a network of output ``width``.

        Raises:
            ValueError: wrong shape, NaN, values out of range.
            TypeError: wrong dtype.
        """
        raise NotImplementedError

    def units(self, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and scale of y, of those given, in which the program may measure it; None where y has no units."""
        return None

    # -- law of a datum ---------------------------------------------------------------------------------------------

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        """Distribution of one datum given the network output, batch shape (\\*batch, N)."""
        raise NotImplementedError

    def log_prob(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Log density of every datum in nats, shape (\\*batch, N)."""
        return self.distribution(f, params).log_prob(y)

    def draw(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """One datum for each output (\\*batch, N, width), of a likelihood whose distribution is a :class:`Response`."""
        raise NotImplementedError

    def mean_variance(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance of a number given the network output, both (\\*batch, N, out); infinite where they are."""
        raise NotImplementedError

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """P(Y < y) and P(Y ≤ y), both (\\*batch, N, out) and float64: equal where y is observed on a continuous scale.

        Between the two lies what the datum does not tell: the probability integral transform is uniform on it.
        """
        raise Refused(
            f"the distribution function of {type(self).__name__} is not known: judge it by log_prob"
        )

    def loc_scale(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and noise standard deviation, both (\\*batch, N, out), where y is ``normal``."""
        raise NotImplementedError

    def probs(self, f: Tensor, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Probabilities of the labels, where y is one of ``classes``."""
        raise NotImplementedError

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
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
            f"the Gauss-Newton matrix of {type(self).__name__} is not known: use curvature='hessian'"
        )

    def curvature_root(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """A square root (N, width, k) of the curvature that the Gauss-Newton matrix takes: the Fisher information.

        Where that depends on what was observed (a censored row tells less), it is the observed one at ``y``.
        """
        return self.fisher_root(f, params)

    # -- own parameters ---------------------------------------------------------------------------------------------

    def declare(self, name: str, value: float | Tensor | str | PyroParam | TorchDistributionMixin) -> None:
        """A positive parameter of the likelihood, one or one per output: fixed, learned or inferred by its ``value``.

        Raises:
            ValueError: a value that is not positive, or a prior whose support is not.
        """
        site = SITE + name
        if isinstance(value, torch.distributions.Distribution):
            if not getattr(value.support, "lower_bound", -1) >= 0:
                raise ValueError(
                    f"the prior of {name!r} must live on positive numbers, got {value}: use HalfNormal or LogNormal"
                )
            if len(value.batch_shape) + len(value.event_shape) > 1:
                raise ValueError(
                    f"the prior of {name!r} must have shape () or (out,), got {tuple(value.shape())}"
                )
            self.priors = dict(self.priors) | {site: value.to_event(len(value.batch_shape))}
        elif isinstance(value, (str, torch.nn.Parameter, PyroParam)):
            if isinstance(value, str) and value != "learned":
                raise ValueError(
                    f"{name!r} must be a number, 'learned', a parameter or a distribution, got {value!r}"
                )
            init: Any = torch.tensor(1.0) if isinstance(value, str) else getattr(value, "init_value", value)
            init = torch.as_tensor(init() if callable(init) else init).detach().clone()
            self.points = dict(self.points) | {site: (_positive(name, init), constraints.positive)}
        else:
            if not isinstance(value, Tensor):
                check_number(name, value, above=0)
            # kept in float64: 0.7 must stay 0.7 for a float64 network
            fixed = torch.as_tensor(value, dtype=torch.float64).detach().clone()
            self.register_buffer(f"fixed_{name}", _positive(name, fixed))

    def own(self, name: str, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """A declared parameter for every datum and output, to be broadcast against (\\*batch, N, out)."""
        site = SITE + name
        fixed = getattr(self, f"fixed_{name}", None)
        value = params[site] if fixed is None else fixed.to(f)
        if site in self.priors:
            per_output = bool(self.priors[site].event_shape)
        else:
            per_output = (self.points[site][0] if fixed is None else fixed).dim() > 0
        if not per_output:  # (*batch,) -> (*batch, 1)
            value = value.unsqueeze(-1)
        return value.unsqueeze(-2)

    @property
    def noise(self) -> dict[str, str]:
        """How each own parameter comes about: fixed, learned or inferred; by input where heads of the net give it."""
        fixed = [name.removeprefix("fixed_") for name in self._buffers if name.startswith("fixed_")]
        found = dict.fromkeys(fixed, "fixed")
        found |= {site.removeprefix(SITE): "learned" for site in self.points}
        found |= {site.removeprefix(SITE): "inferred" for site in self.priors}
        return found | ({"scale": "by input"} if self.heads > 1 else {})

    def like(self, weight: Tensor) -> Likelihood:
        """A copy with the numbers of its own parameters in the dtype and on the device of ``weight``."""
        own: dict[int, Any] = {id(self.priors): {}, id(self.points): {}}  # copied below
        moved = copy.deepcopy(self, own).to(weight.device)
        moved.priors = {name: move(name, prior, weight) for name, prior in self.priors.items()}
        moved.points = {name: (value.to(weight), support) for name, (value, support) in self.points.items()}
        return moved

    # -- statements of the program ----------------------------------------------------------------------------------

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


def _positive(name: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        value = value.to(torch.get_default_dtype())
    if value.dim() > 1 or not bool(torch.isfinite(value).all() and (value > 0).all()):
        raise ValueError(f"{name!r} must be positive with shape () or (out,), got {value}")
    return value
