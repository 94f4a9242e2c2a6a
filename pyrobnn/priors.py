"""Priors on the weights: all of :mod:`tyxe.priors`, and what it lacks.

A prior is any ``tyxe.priors.Prior``: it says for each parameter of the network which distribution it has, and through
``hide``/``expose`` which parameters are Bayesian at all. The hidden ones stay point parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution, TorchDistributionMixin
from torch import Tensor, nn
from torch.distributions import constraints
from torch.overrides import TorchFunctionMode
from tyxe import priors as tyxe_priors
from tyxe.priors import Prior

from pyrobnn.core.checks import check_number
from pyrobnn.core.seeding import seeded

__all__ = [
    "DictPrior",
    "FanInNormal",
    "IIDPrior",
    "LambdaPrior",
    "LayerwiseNormalPrior",
    "Prior",
    "ScaleMixture",
    "ScaleMixtureNormal",
    "SitePriors",
    "move",
    "site_priors",
]


class ScaleMixtureNormal(TorchDistribution):
    r"""Two zero-mean normals: :math:`p(w) = \pi N(w; 0, \sigma_1^2) + (1 - \pi) N(w; 0, \sigma_2^2)`.

    Args:
        pi: weight of the first component, in (0, 1).
        scale1, scale2: standard deviations of the components.
    """

    arg_constraints = {}
    support = constraints.real
    has_rsample = False

    def __init__(
        self,
        pi: float | Tensor,
        scale1: float | Tensor,
        scale2: float | Tensor,
        batch_shape: Sequence[int] = (),
    ):
        given = map(torch.as_tensor, (pi, scale1, scale2))
        # draws are made in the scales' dtype, and there are no normal integers
        self.pi, self.scale1, self.scale2 = (
            value if value.is_floating_point() else value.to(torch.get_default_dtype()) for value in given
        )
        super().__init__(torch.Size(batch_shape), torch.Size())

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> ScaleMixtureNormal:
        """The same distribution with another batch shape."""
        return ScaleMixtureNormal(self.pi, self.scale1, self.scale2, batch_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, elementwise; shape of ``value``."""
        wide = self.pi.log() + dist.Normal(0.0, self.scale1).log_prob(value)
        narrow = torch.log1p(-self.pi) + dist.Normal(0.0, self.scale2).log_prob(value)
        # logaddexp's second derivative is inf / inf where one component is e^88 times the other
        return torch.stack(torch.broadcast_tensors(wide, narrow)).logsumexp(0)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws of shape (\\*sample_shape, \\*batch_shape)."""
        shape = torch.Size(sample_shape) + self.batch_shape
        dtype, device = self.scale1.dtype, self.scale1.device
        wide = torch.rand(shape, dtype=dtype, device=device) < self.pi
        scale = torch.where(wide, self.scale1, self.scale2)
        return torch.randn(shape, dtype=dtype, device=device) * scale


_Names = Sequence[str]
_Modules = Sequence[nn.Module]
_Types = tuple[type[nn.Module], ...]


class _Choice(Prior):
    """TyXe's reading of hide/expose, and nothing else."""

    def prior_dist(self, name: str, module: nn.Module | None, param: Tensor | None) -> TorchDistributionMixin:
        raise NotImplementedError


class Selective(Prior):
    """A prior whose hide/expose take effect: TyXe's own do nothing unless ``expose_all=False`` is passed beside them.

    Args:
        hide_all: no parameter is Bayesian.
        expose_all: ``True`` says that all are but those that are hidden.
        hide, expose: names (``"0.weight"``) that are not, or alone are, Bayesian.
        hide_parameters, expose_parameters: the same by the last part of the name (``"bias"``).
        hide_module_types, expose_module_types, hide_modules, expose_modules: by type of module, and by module.
        hide_fn, expose_fn: functions of (module, name) that say so.

    Raises:
        ValueError: an argument without effect beside another.
    """

    def __init__(
        self,
        hide_all: bool = False,
        expose_all: bool | None = None,
        hide_modules: _Modules | None = None,
        expose_modules: _Modules | None = None,
        hide_module_types: _Types | None = None,
        expose_module_types: _Types | None = None,
        hide_parameters: _Names | None = None,
        expose_parameters: _Names | None = None,
        hide: _Names | None = None,
        expose: _Names | None = None,
        hide_fn: Callable[[nn.Module, str], bool] | None = None,
        expose_fn: Callable[[nn.Module, str], bool] | None = None,
    ):
        self.selection: dict[str, Any] = {
            name: value
            for name, value in {
                "hide_modules": hide_modules,
                "expose_modules": expose_modules,
                "hide_module_types": hide_module_types,
                "expose_module_types": expose_module_types,
                "hide_parameters": hide_parameters,
                "expose_parameters": expose_parameters,
                "hide": hide,
                "expose": expose,
            }.items()
            if value is not None
        }
        functions = {
            name: fn for name, fn in (("expose_fn", expose_fn), ("hide_fn", hide_fn)) if fn is not None
        }
        given = functions | self.selection
        exposing = [name for name in given if name.startswith("expose")]
        strongest = "hide_all=True" if hide_all else next(iter(functions), None)
        idle = [name for name in given if strongest and name != strongest]
        if expose_all and (exposing or hide_all):
            strongest, idle = "expose_all=True", exposing or ["hide_all"]
        if expose_all is False and not (given or hide_all):
            strongest, idle = "nothing that is exposed", ["expose_all"]
        if idle:
            raise ValueError(f"{idle[0]!r} has no effect beside {strongest}: leave out one of the two")
        super().__init__(hide_all=hide_all, expose_all=not self.selection, **given)

    def check_effect(self, net: nn.Module) -> None:
        """Raise ValueError where an argument changes nothing of which parameters of ``net`` are Bayesian."""
        everything = _exposed(self, net)
        for name in self.selection if len(self.selection) > 1 else ():
            rest = {other: value for other, value in self.selection.items() if other != name}
            if everything == _exposed(_Choice(expose_all=False, **rest), net):
                raise ValueError(
                    f"{name!r} has no effect beside {', '.join(map(repr, rest)) or 'nothing'}: leave it out"
                )


def _exposed(prior: Prior, net: nn.Module) -> set[str]:
    """Names of the parameters that are Bayesian."""
    return {name for name, module, _ in _parameters(net) if prior.expose_fn(module, name)}


def _parameters(net: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for module_name, module in net.named_modules():
        for param_name, param in module.named_parameters(recurse=False):
            yield f"{module_name}.{param_name}" if module_name else param_name, module, param


class IIDPrior(tyxe_priors.IIDPrior, Selective):
    """One distribution for every parameter: ``IIDPrior(dist.Normal(0.0, 1.0), hide=["2.bias"])``."""


class LayerwiseNormalPrior(tyxe_priors.LayerwiseNormalPrior, Selective):
    """Normal priors that keep the variance of a layer's input: ``LayerwiseNormalPrior("radford")``."""


class DictPrior(tyxe_priors.DictPrior, Selective):
    """A distribution for every parameter by name: ``DictPrior({"0.weight": dist.Normal(0.0, 1.0), …})``."""


class LambdaPrior(tyxe_priors.LambdaPrior, Selective):
    """A function of (name, module, parameter) that returns the distribution."""


class ScaleMixture(Selective):
    r"""Spike and slab of two normals on every weight.

    .. math:: p(w) = \pi N(w; 0, \sigma_1^2) + (1 - \pi) N(w; 0, \sigma_2^2)

    Args:
        pi: weight of the first component, in (0, 1).
        scale1, scale2: standard deviations of the wide and the narrow component.
        hide, expose: parameter names (``"0.weight"``) that are not, or alone are, Bayesian.
        hide_modules, expose_modules: the same by module.

    Raises:
        ValueError: ``pi`` outside (0, 1) or a scale that is not positive.

    Caveat: it has no closed-form KL against a normal; SVI uses Monte Carlo for it.

    Reference: `Weight Uncertainty in Neural Networks (Blundell et al., 2015) <https://arxiv.org/abs/1505.05424>`_.

    Example:
        >>> prior = ScaleMixture(pi=0.5, scale1=1.0, scale2=0.1)
        >>> prior.prior_dist("0.weight", None, None).log_prob(torch.tensor(0.0)).exp().item()  # doctest: +ELLIPSIS
        2.19...
    """

    def __init__(
        self,
        pi: float = 0.5,
        scale1: float = 1.0,
        scale2: float = math.exp(-6),
        *,
        hide: Sequence[str] | None = None,
        expose: Sequence[str] | None = None,
        hide_modules: Sequence[nn.Module] | None = None,
        expose_modules: Sequence[nn.Module] | None = None,
    ):
        super().__init__(hide=hide, expose=expose, hide_modules=hide_modules, expose_modules=expose_modules)
        check_number("pi", pi, above=0, below=1)
        check_number("scale1", scale1, above=0)
        check_number("scale2", scale2, above=0)
        self.distribution = ScaleMixtureNormal(pi, scale1, scale2)

    def prior_dist(self, name: str, module: nn.Module | None, param: Tensor | None) -> TorchDistributionMixin:
        """The prior of one parameter, to be expanded to its shape."""
        return self.distribution


class FanInNormal(Selective):
    r"""Normal weights whose scale keeps the variance of a layer's output: :math:`w \sim N(0, s^2 / n_{in})`.

    Args:
        scale: :math:`s`; 1 keeps unit variance through a linear layer, √2 through a ReLU layer.
        bias_scale: standard deviation of biases and other one-dimensional parameters.
        hide, expose: parameter names (``"0.weight"``) that are not, or alone are, Bayesian.
        hide_modules, expose_modules: the same by module.

    Raises:
        ValueError: a scale that is not positive.

    Reference: Bayesian Learning for Neural Networks (Neal, 1996), chapter 2.

    Example:
        >>> FanInNormal().prior_dist("0.weight", None, torch.zeros(50, 4)).scale.item()
        0.5
    """

    def __init__(
        self,
        scale: float = 1.0,
        bias_scale: float = 1.0,
        *,
        hide: Sequence[str] | None = None,
        expose: Sequence[str] | None = None,
        hide_modules: Sequence[nn.Module] | None = None,
        expose_modules: Sequence[nn.Module] | None = None,
    ):
        super().__init__(hide=hide, expose=expose, hide_modules=hide_modules, expose_modules=expose_modules)
        self.scale = check_number("scale", scale, above=0)
        self.bias_scale = check_number("bias_scale", bias_scale, above=0)

    def prior_dist(self, name: str, module: nn.Module | None, param: Tensor) -> TorchDistributionMixin:
        """The prior of one parameter, to be expanded to its shape."""
        if param.dim() < 2:
            return dist.Normal(0.0, self.bias_scale)
        return dist.Normal(0.0, self.scale / math.sqrt(param[0].numel()))


class SitePriors(Prior):
    """What a prior came to for one net: a distribution for every Bayesian parameter, by name.

    It stands for the prior of a model that was pickled or deep-copied: TyXe's own hold functions that cannot be.

    Args:
        sites: parameter name (``"0.weight"``) → prior, of the parameter's shape.
    """

    def __init__(self, sites: Mapping[str, TorchDistributionMixin]):
        # TyXe's own constructor makes a lambda of the choice
        self.sites = dict(sites)

    def expose_fn(self, module: nn.Module, name: str) -> bool:
        """Whether the parameter is Bayesian."""
        return name in self.sites

    def prior_dist(self, name: str, module: nn.Module | None, param: Tensor) -> TorchDistributionMixin:
        """The prior of one parameter."""
        return self.sites[name]


def site_priors(prior: Prior, net: nn.Module) -> dict[str, TorchDistributionMixin]:
    """The prior of every Bayesian parameter of ``net``, by parameter name, expanded to its shape.

    Raises:
        ValueError: ``hide``/``expose`` names something the net does not have, or nothing at all is Bayesian.
    """
    if isinstance(prior, Selective):
        _check_names(prior.selection, net)
        prior.check_effect(net)
    found = {}
    for name, module, param in _parameters(net):
        if prior.expose_fn(module, name):
            try:
                base = prior.prior_dist(name, module, param)
            except KeyError as error:
                raise ValueError(
                    f"the prior has no entry for the parameter {name!r}: add it, or hide it"
                ) from error
            if not hasattr(base, "to_event"):
                kind = f"{type(base).__module__}.{type(base).__name__}"
                raise TypeError(f"the prior of {name!r} is a {kind}: use the one of pyro.distributions")
            found[name] = _expand(name, base, param)
    if not found:
        names = ", ".join(name for name, _ in net.named_parameters())
        raise ValueError(
            f"the prior's hide/expose leaves no Bayesian parameter; the net has: {names or 'none'}"
        )
    return found


def _expand(name: str, base: TorchDistributionMixin, param: Tensor) -> TorchDistributionMixin:
    # the net may live on another device or in another dtype than the prior's own numbers
    base = move(name, base, param)
    shape = param.shape[: param.dim() - len(base.event_shape)]
    if shape + base.event_shape != param.shape:
        raise ValueError(
            f"the prior of {name!r} is a {type(base).__name__} of vectors of shape {tuple(base.event_shape)}, which do "
            f"not make up {tuple(param.shape)}: give each parameter vectors of its own width (LambdaPrior, DictPrior)"
        )
    try:
        return base.expand(shape).to_event(len(shape))
    except NotImplementedError as error:
        raise ValueError(
            f"the prior of {name!r}, a {type(base).__name__}, cannot be repeated over {tuple(shape)}: give it that "
            "batch shape, or use another family (MixtureSameFamily)"
        ) from error


def move(name: str, distribution: TorchDistributionMixin, like: Tensor) -> TorchDistributionMixin:
    """The same distribution with all its numbers in the dtype and on the device of ``like``, whatever its family.

    Args:
        name: of its site, for the error.
        distribution: itself if its numbers are there already.

    Raises:
        ValueError: it still draws elsewhere, for it keeps numbers where a copy does not find them; or it has no draws.
    """
    like = like.detach()
    with _Copies(like) as copies:
        copied = copy.deepcopy(distribution)
    moved = copied if copies.changed else distribution
    with seeded(0, like.device), torch.no_grad():
        try:
            value = moved.sample()
            density = moved.log_prob(value)
        except NotImplementedError as error:
            raise ValueError(
                f"the prior of {name!r}, a {type(moved).__name__}, has no draws or no density: every method starts or "
                "is judged by draws from it, so use a proper one (a wide Normal), or hide= the parameter"
            ) from error
        except (RuntimeError, AssertionError) as error:
            raise _immovable(name, moved, like, str(error).partition("\n")[0]) from error
    for what, found in (("draws", value), ("gives densities in", density)):
        if found.device != like.device or (found.is_floating_point() and found.dtype != like.dtype):
            raise _immovable(name, moved, like, f"it {what} {found.dtype} on {found.device}")
    return moved


def _immovable(name: str, distribution: TorchDistributionMixin, like: Tensor, why: str) -> ValueError:
    return ValueError(
        f"the prior of {name!r}, a {type(distribution).__name__}, cannot follow the net to {like.dtype} on "
        f"{like.device} ({why}): keep its numbers in tensors that are its attributes, or give it such numbers"
    )


class _Copies(TorchFunctionMode):
    """Tensors that ``copy.deepcopy`` meets inside the block come out in the dtype and on the device of ``like``."""

    def __init__(self, like: Tensor):
        super().__init__()
        self.like, self.changed = like, False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        value = args[0]
        moved = value.to(self.like) if value.is_floating_point() else value.to(self.like.device)
        self.changed |= moved is not value
        if isinstance(value, nn.Parameter):
            return nn.Parameter(moved.detach(), value.requires_grad)
        # a graph of the user's would make densities differ from those of plain numbers, and forbid later copies
        self.changed |= value.requires_grad
        return moved.detach() if value.requires_grad else moved


def _check_names(selection: Mapping[str, Any], net: nn.Module) -> None:
    """Every name, module and type given to hide/expose must match something in the net."""
    names, modules = [name for name, _ in net.named_parameters()], list(net.modules())
    suffixes = [name.rsplit(".")[-1] for name in names]
    for option, entries in selection.items():
        for entry in entries if isinstance(entries, Sequence) else (entries,):
            wrong = None
            if option.endswith("types"):
                if not any(isinstance(module, entry) for module in modules):
                    wrong = f"the type {entry.__name__}, but no module of the net has it"
            elif option.endswith("modules"):
                if not any(entry is module for module in modules):
                    wrong = f"the module {entry}, which is not part of the net"
            elif entry not in (known := suffixes if option.endswith("parameters") else names):
                what = "parameter suffix" if option.endswith("parameters") else "parameter"
                wrong = f"the {what} {entry!r}, but the net has: {', '.join(dict.fromkeys(known))}"
            if wrong:
                raise ValueError(f"the prior's hide/expose names {wrong}")
