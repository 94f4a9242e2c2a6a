"""The parameters of a likelihood itself, such as a noise's scale: fixed, learned or inferred."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyro
import torch
import torch.distributions.constraints as constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_number, check_type
from pyrobnn.core.private_pyro import given
from pyrobnn.model.weight_priors import move

SITE = "likelihood."

Params = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Learned:
    """A point parameter of a likelihood and where it starts; made by :func:`learned`."""

    init: Tensor

    def __repr__(self) -> str:
        return f"learned(init={self.init.tolist()})"


#: a parameter of a likelihood: a number or tensor is fixed, "learned" or :func:`learned` a point parameter, a
#: distribution its prior
Parameter = float | Tensor | str | Learned | TorchDistributionMixin


def learned(init: float | Tensor = 1.0) -> Learned:
    """A parameter of a likelihood that MLE, MAP and SVI optimise from ``init`` on; ``"learned"`` starts at one.

    Args:
        init: where it starts, positive, of shape () or (out,): a noise in the units of ``y``, and in standard units
            where the model has a standardizer, as a fixed one.

    Raises:
        ValueError: a start that is not positive, or has another shape.

    Caveat: a search whose noise starts far below the residuals fits the function to single points first.

    Example:
        >>> from pyrobnn.likelihoods import HomoskedasticGaussian
        >>> HomoskedasticGaussian(learned(init=0.01))
        HomoskedasticGaussian(learned scale)
    """
    return Learned(_positive_number("init", init))


def point(name: str, init: Tensor, support: constraints.Constraint = constraints.real) -> Tensor:
    """A point parameter of a BNN: the value it is given, else an ordinary ``pyro.param``."""
    value = given(name)
    if value is None:
        return pyro.param(name, init, constraint=support)
    return value.reshape(init.shape)


class OwnParameters:
    """The positive parameters of a likelihood itself, one or one per output: fixed, learned or inferred.

    Attributes: ``fixed``, name → value, in float64; ``points``, site → (initial value, constraint) of learned ones;
    ``priors``, site → prior of inferred ones; ``unsized``, the sites of those that are ``"learned"``, one per output as
    soon as the number of outputs is known.
    """

    #: pickles of earlier versions have none
    unsized: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.fixed: dict[str, Tensor] = {}
        self.points: dict[str, tuple[Tensor, constraints.Constraint]] = {}
        self.priors: dict[str, TorchDistributionMixin] = {}

    def declare(self, name: str, value: Parameter) -> None:
        """Add a parameter, or say anew how it comes about: fixed, learned or inferred by its ``value``.

        Raises:
            ValueError: a value that is not positive, or a prior whose support is not.
        """
        site = SITE + name
        self.fixed.pop(name, None)
        self.points.pop(site, None)
        self.priors.pop(site, None)
        self.unsized = self.unsized - {site}
        if isinstance(value, torch.distributions.Distribution):
            self.priors[site] = _positive_prior(name, value)
        elif isinstance(value, torch.nn.Parameter):
            raise TypeError(f"{name!r} cannot be an nn.Parameter: use 'learned'")
        elif isinstance(value, str):
            if value != "learned":
                raise ValueError(
                    f"{name!r} must be a number, 'learned' or a distribution, got {value!r}"
                )
            self.points[site] = (torch.tensor(1.0), constraints.positive)
            self.unsized = self.unsized | {site}
        elif isinstance(value, Learned):
            self.points[site] = (value.init, constraints.positive)
        else:
            self.fixed[name] = _positive_number(name, value)

    def for_outputs(self, num: int) -> None:
        """Give what is ``"learned"`` one value for each of so many outputs; of a single one it is a scalar."""
        for site in self.unsized & self.points.keys():
            start, support = self.points[site]
            if num > 1 and not start.dim():
                self.points[site] = (start.expand(num).clone(), support)

    def value(self, name: str, f: Tensor, params: Params) -> Tensor:
        """A declared parameter for every datum and output, to be broadcast against (\\*batch, N, out).

        It is fixed, inferred or learned. A batch of draws stands in front, so that the ``shape`` of one value alone
        tells one for all outputs, (), from one for each, (out,).
        """
        site = SITE + name
        if name in self.fixed:
            value = self.fixed[name].to(f)
            shape = value.shape
        elif site in self.priors:
            value = params[site]
            shape = self.priors[site].event_shape
        else:
            value = params[site]
            shape = self.points[site][0].shape
        # one for all outputs or one per output
        per_output = value if len(shape) else value.unsqueeze(-1)
        # (*batch, 1 or out) -> (*batch, 1, …)
        return per_output.unsqueeze(-2)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter."""
        shapes = {name: value.shape for name, value in self.fixed.items()}
        for site, (start, _) in self.points.items():
            shapes[site.removeprefix(SITE)] = start.shape
        for site, prior in self.priors.items():
            shapes[site.removeprefix(SITE)] = prior.event_shape
        return shapes

    def check_outputs(self, out: int) -> None:
        """ValueError where a parameter has neither one value nor one for each of ``out`` columns or pairs."""
        for name, shape in self.shapes.items():
            if tuple(shape) not in ((), (1,), (out,), (out, out)):
                raise ValueError(
                    f"{name!r} has shape {tuple(shape)}: one value, or one per column of y, {out}"
                )

    @property
    def kinds(self) -> dict[str, str]:
        """How each parameter comes about: ``"fixed"``, ``"learned"`` or ``"inferred"``."""
        kinds = dict.fromkeys(self.fixed, "fixed")
        kinds |= dict.fromkeys(self.points, "learned")
        kinds |= dict.fromkeys(self.priors, "inferred")
        return {name.removeprefix(SITE): kind for name, kind in kinds.items()}

    def like(self, weight: Tensor) -> OwnParameters:
        """A copy with its numbers on the device of ``weight``, those that are not fixed in its dtype too."""
        moved = OwnParameters()
        moved.unsized = self.unsized
        moved.fixed = {site: value.to(weight.device) for site, value in self.fixed.items()}
        moved.points = {
            site: (value.to(weight), support) for site, (value, support) in self.points.items()
        }
        moved.priors = {site: move(site, prior, weight) for site, prior in self.priors.items()}
        return moved

    def sample(self) -> dict[str, Tensor]:
        """The Pyro statements of the parameters, by site."""
        inferred = {site: pyro.sample(site, prior) for site, prior in self.priors.items()}
        return inferred | {site: point(site, *learned) for site, learned in self.points.items()}


def _positive_prior(name: str, prior: TorchDistributionMixin) -> TorchDistributionMixin:
    """The prior of a positive parameter, as one event."""
    check_type(name, prior, TorchDistributionMixin, "a distribution of pyro.distributions")
    if not getattr(prior.support, "lower_bound", -1) >= 0 or len(prior.shape()) > 1:
        raise ValueError(
            f"the prior of {name!r} must live on positive numbers and have shape () or (out,), got {prior} of "
            f"shape {tuple(prior.shape())}: use HalfNormal or LogNormal"
        )
    return prior.to_event(len(prior.batch_shape))


def _positive_number(name: str, value: float | Tensor) -> Tensor:
    """A fixed positive parameter in float64: 0.7 must stay 0.7 for a float64 network."""
    if not isinstance(value, Tensor):
        value = torch.tensor(check_number(name, value, above=0), dtype=torch.float64)
    if value.dim() > 1 or not bool((value.isfinite() & (value > 0)).all()):
        raise ValueError(f"{name!r} must be positive with shape () or (out,), got {value}")
    return value.detach().double().clone()
