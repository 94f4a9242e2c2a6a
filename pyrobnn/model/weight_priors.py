"""Priors on the weights: those of TyXe (:mod:`tyxe.priors`), and a few more; imported as ``pyrobnn.priors``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn
from torch.distributions import constraints
from tyxe import priors as tyxe_priors
from tyxe.priors import Prior

from pyrobnn.core.checks import check_number, check_optional, check_type
from pyrobnn.core.seeding import seeded
from pyrobnn.model.fixed_row import WithFixedRow, padding_row
from pyrobnn.model.torch_calls import Call, CallHandler

#: what one option of a prior names: a parameter, a module, a type of module, or a function that says so
_Entry = str | bool | nn.Module | type[nn.Module] | Callable[[nn.Module, str], bool]
_Selection = _Entry | Collection[_Entry] | None
#: what "hide" and "expose" may be followed by
_SUFFIXES = ("", "_parameters", "_module_types", "_modules", "_fn", "_all")
#: of these, those that say it of all parameters
_SUFFIXES_OF_ALL = ("_fn", "_all")


#: units that are linear, or nearly so, where they are not zero
_RECTIFIED = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
    nn.Hardswish,
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: weights of a net beyond which :class:`FanInNormal` has a floor, where it is deep or convolutional
WIDE = 10_000
#: weight layers of a deep net
_DEEP = 4
#: least standard deviation of a weight there
_WIDE_FLOOR = 1.0


class Selective(Prior):
    """A prior whose hide/expose take effect: TyXe's own do nothing unless ``expose_all=False`` is passed beside them.

    Args:
        hide, expose: names (``"0.weight"``) that are not, or alone are, Bayesian; one, or a list.
        hide_parameters, expose_parameters: the same by the last part of the name (``"bias"``).
        hide_module_types, expose_module_types, hide_modules, expose_modules: by type of module, and by module.
        hide_fn, expose_fn: functions of (module, name) that say so.
        hide_all, expose_all: no parameter is Bayesian; all are. ``expose_all=False``: the other options hold (TyXe).

    Raises:
        TypeError: another option.
        ValueError: hide and expose together; when a model is built, an entry that names no parameter.
    """

    def __init__(self, **selection: _Selection):
        for name in selection:
            if _suffix(name) not in _SUFFIXES:
                raise TypeError(
                    f"{name!r} is not an option of a prior: hide or expose, with {[*_SUFFIXES]}"
                )
        options = {
            name: value
            for name, value in selection.items()
            if value is not None and value is not False
        }
        _refuse_contradiction(list(options))
        #: option → its entries
        self.entries = {name: _as_entries(value) for name, value in options.items()}
        settings: dict[str, Any] = {"expose_all": not options}
        for name, value in options.items():
            is_whole = _suffix(name) in _SUFFIXES_OF_ALL
            settings[name] = value if is_whole else tuple(self.entries[name])
        super().__init__(**settings)

    def check_effect(self, net: nn.Module) -> None:
        """Raise ValueError where an entry names no parameter of ``net``."""
        for option, entries in self.entries.items():
            for entry in entries:
                self._check_entry(option, entry, net)

    def of_net(self, net: nn.Module) -> Prior:
        """The prior as it is for one net."""
        return self

    def has_rule_for(self, net: nn.Module) -> bool:
        """Whether widths of this prior come from a rule for such nets, and from nothing that the user has declared."""
        return False

    @staticmethod
    def _check_entry(option: str, entry: _Entry, net: nn.Module) -> None:
        suffix = _suffix(option)
        exposed = {f"expose{suffix}": entry if suffix in _SUFFIXES_OF_ALL else (entry,)}
        alone = tyxe_priors.IIDPrior(None, **{"expose_all": False, **exposed})
        if any(alone.expose_fn(module, name) for name, module, _ in _parameters(net)):
            return
        first = first_names(net).get(entry) if isinstance(entry, str) else None
        if first is not None and not suffix:
            raise ValueError(
                f"{option!r} has no effect by {entry!r}: two modules share this parameter, and it has one prior, by "
                f"its first name: say {first!r}"
            )
        fallback = type(entry).__name__ if callable(entry) else repr(entry)
        label = getattr(entry, "__name__", fallback)
        names = ", ".join(name for name, _, _ in _parameters(net))
        raise ValueError(
            f"{option!r} has no effect by {label}: it names no parameter of its own (a container of layers has "
            f"none); the net has: {names}"
        )


def _suffix(option: str) -> str:
    """What stands behind "hide" or "expose"."""
    return option.removeprefix("hide").removeprefix("expose")


def _as_entries(value: _Selection) -> list[_Entry]:
    if isinstance(value, (list, tuple, set)):
        return list(value)
    return [cast(_Entry, value)]


def _refuse_contradiction(options: Sequence[str]) -> None:
    """Refuse hide and expose together, and any option beside one that says it of all parameters."""
    whole = [name for name in options if _suffix(name) in _SUFFIXES_OF_ALL]
    if whole:
        contradicted = [*options]
        contradicted.remove(whole[0])
        _refuse_beside(whole[0], contradicted)
        return
    hides = [name for name in options if name.startswith("hide")]
    if hides:
        _refuse_beside(hides[0], [name for name in options if name not in hides])


def _refuse_beside(option: str, contradicted: Sequence[str]) -> None:
    """Refuse an option where there are some that it contradicts."""
    if contradicted:
        raise ValueError(
            f"{option!r} together with {contradicted[0]!r} has no effect: say what to hide, or what to expose"
        )


def _parameters(net: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Every parameter once, by its first name, as torch does: one that is tied has other names too."""
    modules = dict(net.named_modules())
    for name, param in net.named_parameters():
        yield name, modules[name.rpartition(".")[0]], param


def first_names(net: nn.Module) -> dict[str, str]:
    """Every name of every parameter → its first, which is that of its site; another only where modules share it."""
    first = {id(param): name for name, param in net.named_parameters()}
    names = net.named_parameters(remove_duplicate=False)
    return {name: first[id(param)] for name, param in names}


class IIDPrior(tyxe_priors.IIDPrior, Selective):
    """One distribution for every parameter: ``IIDPrior(dist.Normal(0.0, 1.0), hide=["2.bias"])``.

    hide/expose take names (``"0.weight"``), hide_modules/expose_modules modules: what is hidden, or is not among the
    exposed, stays a point parameter.
    """


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
        **selection: hide and expose, which parameters are Bayesian, as of :class:`IIDPrior`.

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
        **selection: _Selection,
    ):
        super().__init__(**selection)
        share = check_number("pi", pi, above=0, below=1)
        scales = [check_number(n, v, above=0) for n, v in (("scale1", scale1), ("scale2", scale2))]
        normals = dist.Normal(torch.zeros(2), torch.tensor(scales))
        self.distribution = dist.MixtureSameFamily(
            dist.Categorical(torch.tensor([share, 1 - share])), normals
        )

    def prior_dist(
        self,
        name: str,
        module: nn.Module | None,
        param: Tensor | None,
    ) -> TorchDistributionMixin:
        """The prior of one parameter, to be expanded to its shape."""
        return self.distribution


class FanInNormal(Selective):
    r"""Normal weights whose scale keeps the variance of a layer's output: :math:`w \sim N(0, s^2 / n_{in})`.

    Such a prior costs a function that passes r directions through a layer about :math:`r n_{in} / 2 s^2` nats at its
    mode, more the wider the layer. In wide nets that is more than the data have to give, and the mode, or an
    approximation by independent weights, is the constant function. The floor bounds the cost whatever the width.

    Args:
        scale: :math:`s`; 1 keeps unit variance through a linear layer, √2 through a ReLU layer.
        bias_scale: standard deviation of biases and other one-dimensional parameters.
        floor: least standard deviation of a weight. None: 1, about what usual weight decay amounts to, in nets of more
            than 10,000 weights that are convolutional, or have four weight layers and rectified units (ReLU and its
            kin); no floor in other nets. Nobody has declared that 1: :class:`pyrobnn.Laplace` narrows it where the
            evidence is for it.
        **selection: hide and expose, which parameters are Bayesian, as of :class:`IIDPrior`.

    Raises:
        ValueError: a scale that is not positive.

    Reference: Bayesian Learning for Neural Networks (Neal, 1996), chapter 2.

    Example:
        >>> FanInNormal().prior_dist("0.weight", None, torch.zeros(50, 4)).scale.item()
        0.5
    """

    #: a prior that an earlier version has pickled has no other
    floor: float | None = None

    def __init__(
        self,
        scale: float = 1.0,
        bias_scale: float = 1.0,
        floor: float | None = None,
        **selection: _Selection,
    ):
        super().__init__(**selection)
        self.scale = check_number("scale", scale, above=0)
        self.bias_scale = check_number("bias_scale", bias_scale, above=0)
        check_optional(
            check_number,
            "floor",
            floor,
            minimum=0,
        )
        self.floor = floor

    def of_net(self, net: nn.Module) -> Prior:
        """This prior with the floor that a net asks for, where none was given."""
        if not self.has_rule_for(net):
            return self
        floored = copy.copy(self)
        floored.floor = _WIDE_FLOOR
        return floored

    def has_rule_for(self, net: nn.Module) -> bool:
        """Whether the net asks for a floor, and none was given."""
        modules = list(net.modules())
        # convolutions are followed by rectified units, which the forward of a net may call as functions
        convolves = any(isinstance(module, _CONVOLUTIONS) for module in modules)
        rectifies = any(isinstance(module, _RECTIFIED) for module in modules)
        depth = sum(param.dim() > 1 for param in net.parameters())
        num_weights = sum(param.numel() for param in net.parameters())
        is_deep = convolves or (rectifies and depth >= _DEEP)
        return self.floor is None and is_deep and num_weights > WIDE

    def prior_dist(
        self,
        name: str,
        module: nn.Module | None,
        param: Tensor,
    ) -> TorchDistributionMixin:
        """The prior of one parameter, to be expanded to its shape."""
        if param.dim() < 2:
            return dist.Normal(0.0, self.bias_scale)
        return dist.Normal(0.0, max(self.scale / math.sqrt(param[0].numel()), self.floor or 0.0))


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

    def prior_dist(
        self,
        name: str,
        module: nn.Module | None,
        param: Tensor,
    ) -> TorchDistributionMixin:
        """The prior of one parameter."""
        return self.sites[name]


def site_priors(prior: Prior, net: nn.Module) -> dict[str, TorchDistributionMixin]:
    """The prior of every Bayesian parameter of ``net``, by parameter name, expanded to its shape.

    Raises:
        ValueError: ``hide``/``expose`` names something the net does not have, or nothing at all is Bayesian.
    """
    if isinstance(prior, Selective):
        prior.check_effect(net)
        prior = prior.of_net(net)
    sites = {}
    for name, module, param in _parameters(net):
        if not prior.expose_fn(module, name):
            continue
        try:
            base = prior.prior_dist(name, module, param)
        except KeyError as error:
            others = [other for other, first in first_names(net).items() if first == name != other]
            shared = f", which is {' and '.join(map(repr, others))} too" if others else ""
            raise ValueError(
                f"the prior has no entry for {name!r}{shared}: add it, or hide it"
            ) from error
        expected = "a distribution of pyro.distributions"
        check_type(f"prior of {name}", base, TorchDistributionMixin, expected)
        try:
            sites[name] = _site_prior(name, base, param, padding_row(net, module, param))
        except RuntimeError as error:
            raise ValueError(
                f"{type(prior).__name__} has a {type(base).__name__} of shape {tuple(base.shape())} for {name!r}, and "
                f"that parameter has shape {tuple(param.shape)}: give it one of that shape, or of shape () for all"
            ) from error
    if not sites:
        names = ", ".join(name for name, _ in net.named_parameters())
        raise ValueError(f"the prior leaves no Bayesian parameter; the net has: {names or 'none'}")
    return sites


def _site_prior(
    name: str,
    base: TorchDistributionMixin,
    param: Tensor,
    fixed_row: int | None,
) -> TorchDistributionMixin:
    """The prior of one parameter, of its shape; of an embedding whose ``fixed_row`` is padding that of the others.

    A distribution that has a shape of its own for all rows, or another support than the reals, is taken as it is.
    """
    support = getattr(base.support, "base_constraint", base.support)  # of a mixture's components
    if fixed_row is None or base.batch_shape.numel() > 1 or support is not constraints.real:
        return _expand(name, base, param)
    other_rows = torch.cat([param[:fixed_row], param[fixed_row + 1 :]]).detach()
    return WithFixedRow(
        _expand(name, base, other_rows), fixed_row, param[fixed_row].detach().clone()
    )


def _expand(name: str, base: TorchDistributionMixin, param: Tensor) -> TorchDistributionMixin:
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
    try:
        with seeded(0, like.device), torch.no_grad():
            value = moved.sample()
            kinds = {_dtype_and_device(value, like), _dtype_and_device(moved.log_prob(value), like)}
        why = "" if kinds == {(like.dtype, like.device)} else f"draws or densities are {kinds}"
    except (NotImplementedError, RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0] or "it has no draws or no density"
    if why:
        raise ValueError(
            f"the prior of {name!r}, a {type(moved).__name__}, cannot follow the net to {like.dtype} on {like.device} "
            f"({why}): use a proper one that keeps its numbers in tensors that are its attributes"
        )
    return moved


def _dtype_and_device(value: Tensor, like: Tensor) -> tuple[torch.dtype, torch.device]:
    """Dtype and device; of whole numbers the dtype of ``like``, which they do not have to follow."""
    return (value.dtype if value.is_floating_point() else like.dtype), value.device


class _Copies(CallHandler):
    """Tensors that ``copy.deepcopy`` meets inside the block come out in the dtype and on the device of ``like``."""

    functions = frozenset({Tensor.__deepcopy__})

    def __init__(self, like: Tensor):
        super().__init__()
        self.like = like
        self.changed = False

    def answer(self, call: Call) -> Any:
        value = call.args[0]
        moved = value.to(self.like) if value.is_floating_point() else value.to(self.like.device)
        # a graph of the user's would make densities differ from those of plain numbers, and forbid later copies
        has_graph = value.requires_grad and not isinstance(value, nn.Parameter)
        self.changed |= moved is not value or has_graph
        if isinstance(value, nn.Parameter):
            return nn.Parameter(moved.detach(), value.requires_grad)
        return moved.detach() if has_graph else moved
