"""Impossible parameters: where the support of a parameter is left, a density is zero, as in Stan.

A program runs without argument validation, which stops at the first value and reads it; a program that is traced for
many points at once has none. Instead, every distribution that is made while a program runs carries the mask of its
own ``arg_constraints``: outside, its log density is −∞ and its gradient zero; inside, nothing changes by one bit.
That holds for sites and for distributions that the program evaluates itself, as in ``pyro.factor``.

Words: :func:`possible` is the mask, over a distribution's batch, of where all parameters are in their supports; a
*shielded* tensor or distribution gets no gradient where it is false; a *plain* class is that without a guard.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, SupportsIndex, TypeVar

import pyro.distributions as dist
import torch
from pyro.distributions.constraints import ordered_vector
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform
from torch.distributions.utils import lazy_property

from pyrobnn.core.private_pyro import mask_of
from pyrobnn.core.private_torch import (
    ROUNDING,
    depends,
    distributions_born,
    factor_of,
    is_batched,
)
from pyrobnn.core.private_trace import Tracer

_Shape = torch.Size | Sequence[int]
_LogProb = Callable[[Any, Tensor], Tensor]
_T = TypeVar("_T")
Kind = Any  # type[Distribution], which mypy does not take to be hashable
#: distributions that leave out what their mask says, and so may have impossible parameters there
_SELECTING = (dist.MaskedDistribution, dist.MaskedMixture)


class ImpossibleParameter(RuntimeError):
    """A distribution was asked for draws, and has none."""


class Impossible(NamedTuple):
    """A parameter outside of its support: of which site (empty: of none) and distribution, and what it must be."""

    site: str
    distribution: str
    parameter: str
    required: str

    def __str__(self) -> str:
        owner = f"the {self.distribution} that the program evaluates"
        if self.site:
            owner = f"the site {self.site!r}"
        return f"{self.parameter!r} of {owner} must be {self.required}"


# -- what a program evaluates itself -----------------------------------------------------------------------------------


class _Recording(threading.local):
    """The distributions that this thread has asked for a log density, while :func:`recorded_evaluations` is open."""

    distributions: list[Any] | None = None


_RECORDING = _Recording()


@contextlib.contextmanager
def _recorded(fn: Distribution) -> Iterator[None]:
    """Record ``fn``, and not the distributions that it asks inside."""
    distributions = _RECORDING.distributions
    _RECORDING.distributions = None
    if distributions is not None:
        distributions.append(fn)
    try:
        yield
    finally:
        _RECORDING.distributions = distributions


@contextlib.contextmanager
def recorded_evaluations() -> Iterator[list[Any]]:
    """Inside, the guarded distributions whose log density is asked for."""
    outer_distributions = _RECORDING.distributions
    distributions: list[Any] = []
    _RECORDING.distributions = distributions
    try:
        yield distributions
    finally:
        _RECORDING.distributions = outer_distributions


# -- distributions that know when they are impossible ------------------------------------------------------------------


class _Guarded(Distribution):
    """What the class of a distribution gets in front when it is made while a program runs."""

    def log_prob(self, value: Tensor) -> Tensor:
        with _recorded(self):
            return log_prob(self, value, _plain_class(type(self)).log_prob)

    def sample(self, *args: _Shape, **kwargs: _Shape) -> Tensor:
        with _explained(self):
            return _plain_class(type(self)).sample(self, *args, **kwargs)

    def rsample(self, *args: _Shape, **kwargs: _Shape) -> Tensor:
        with _explained(self):
            return _plain_class(type(self)).rsample(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return _new, (_plain_class(type(self)),), dict(self.__dict__)


@functools.cache
def _guarded_class(kind: Kind) -> Kind:
    """The class ``kind`` with :class:`_Guarded` in front, under the same name."""
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind)(kind.__name__, (_Guarded, kind), names)


def _plain_class(kind: Kind) -> Kind:
    """The class that a guarded one was made from."""
    return kind.__bases__[1] if issubclass(kind, _Guarded) else kind


def _new(kind: Kind) -> Any:
    """An empty distribution of the guarded class, which a pickle fills.

    Pickles name this function, so it keeps its name.
    """
    return object.__new__(_guarded_class(kind))


def _guard(fn: Distribution) -> None:
    """Guard a distribution that has just been made; remember which parameters it was made from."""
    kind: Kind = type(fn)
    if not issubclass(kind, _Guarded):
        fn.__class__ = _guarded_class(kind)
    fn.__dict__["_given"] = _computed_from(fn)


def is_guarded(fn: Distribution) -> bool:
    """Whether it was made while a program ran."""
    return isinstance(fn, _Guarded)


def kind_of(fn: Distribution) -> Kind:
    """The class of a distribution as the program knows it."""
    return _plain_class(type(fn))


def guarded() -> contextlib.AbstractContextManager[None]:
    """Inside, distributions that this thread makes have a density of zero where a parameter is impossible."""
    return distributions_born(_guard)


def unguarded() -> contextlib.AbstractContextManager[None]:
    """Inside, distributions that this thread makes are as their class has them."""
    return distributions_born(_unguarded)


@contextlib.contextmanager
def _explained(fn: Distribution) -> Iterator[None]:
    """An error of drawing, told as the parameter that is impossible."""
    try:
        yield
    except ImpossibleParameter:
        raise
    except (RuntimeError, ValueError) as error:
        places = impossible(fn)
        if not places:
            raise
        raise ImpossibleParameter(f"{places[0]}, and there is nothing to draw from") from error


#: whether the program runs at one point, whose values can be read
_READS_VALUES: ContextVar[bool] = ContextVar("_READS_VALUES", default=False)


@contextlib.contextmanager
def values_read() -> Iterator[None]:
    """Inside, in this thread, a program runs at one point and is not traced: what is possible is evaluated as it is.

    The numbers are the same, and the gradient takes half of the time.
    """
    token = _READS_VALUES.set(True)
    try:
        yield
    finally:
        _READS_VALUES.reset(token)


# -- the mask and the log density --------------------------------------------------------------------------------------


def log_prob(fn: Distribution, value: Tensor, evaluate: _LogProb) -> Tensor:
    """``evaluate(fn, value)``, −∞ with a gradient of zero where a parameter of ``fn`` is impossible."""
    is_possible = possible(fn)
    if is_possible is None or _is_seen_to_hold(is_possible):
        return evaluate(fn, value)
    if _varies(fn):
        # where() alone keeps the value clean, but the gradient of what it drops is zero times infinity
        value = _shield(value, is_possible, len(fn.event_shape))
        fn = _shielded(fn, is_possible)
    return torch.where(is_possible, evaluate(fn, value), -torch.inf)


def _is_seen_to_hold(is_possible: Tensor) -> bool:
    """Whether nothing is impossible, where values can be read."""
    return _READS_VALUES.get() and not is_batched(is_possible) and bool(is_possible.all())


def possible(fn: Distribution) -> Tensor | None:
    """Where all parameters of ``fn`` lie in their supports, to broadcast with its batch shape; None: all must."""
    masks = [mask for _, _, mask in _checked_parameters(fn)]
    for inner in _inner_distributions(fn):
        mask = possible(inner)
        if mask is not None:
            masks.append(mask.expand(inner.batch_shape))
    if not masks:
        return None
    return functools.reduce(
        torch.logical_and, (_as_batch_mask(mask, fn.batch_shape) for mask in masks)
    )


def _varies(fn: Distribution) -> bool:
    """Whether the parameters that may be impossible are not the same at every point."""
    if any(depends(getattr(fn, name)) for name, _, _ in _checked_parameters(fn)):
        return True
    return any(map(_varies, _inner_distributions(fn)))


def impossible(fn: Distribution, site: str = "") -> list[Impossible]:
    """The parameters of ``fn`` that lie outside of their supports; none for a tensor without values."""
    places = []
    for name, constraint, mask in _checked_parameters(fn):
        if not bool(mask.all()):
            places.append(Impossible(site, type(fn).__name__, name, words(constraint)))
    if places:  # what is inside may hold the same parameter by another name
        return places
    for inner in _inner_distributions(fn):
        places += impossible(inner, site)
    for inner, selected in _selected_distributions(fn):
        inside = possible(inner)
        if inside is not None and bool((selected & ~inside).any()):
            places += impossible(inner, site)
    return places


class BoundedParameter(NamedTuple):
    """A parameter of a site's distribution that has a bound, and the constraint that it must meet."""

    site: str
    parameter: str
    constraint: Constraint


def bounded_parameter(
    nodes: Mapping[str, Mapping[str, Any]], value: Tensor
) -> BoundedParameter | None:
    """The first parameter with a fixed lower bound that is the value itself, at any site; None where there is none."""
    # a program hands the sampled tensor on as it is: what was computed of it lies elsewhere
    address = value.data_ptr()
    for name, node in nodes.items():
        fn = node.get("fn")
        while isinstance(fn, torch.distributions.Independent):
            fn = fn.base_dist
        if node["type"] != "sample" or not isinstance(fn, Distribution):
            continue
        supports = _parameter_supports(fn)
        for parameter in _given_parameters(fn):
            tensor = getattr(fn, parameter, None)
            constraint = supports[parameter]
            if not isinstance(tensor, Tensor) or not hasattr(constraint, "lower_bound"):
                continue
            # a bound that is a parameter too, as a Uniform's, is another at every draw
            if isinstance(constraint.lower_bound, Tensor):
                continue
            if tensor.data_ptr() == address:
                return BoundedParameter(name, parameter, constraint)
    return None


def words(constraint: Constraint) -> str:
    """What the constraint asks for, as it reads after "must be"."""
    if isinstance(constraint, constraints.independent):
        return words(constraint.base_constraint)
    lower = _bound(constraint, "lower_bound")
    upper = _bound(constraint, "upper_bound")
    if isinstance(constraint, constraints.greater_than):
        return "positive" if lower == "0" else f"greater than {lower}"
    if isinstance(constraint, type(constraints.nonnegative_integer)):
        return f"a whole number of {lower} or more"
    if lower is not None and upper is not None:
        return f"between {lower} and {upper}"
    if lower is not None:
        return f"{lower} or more"
    if upper is not None:
        return f"less than {upper}"
    name = type(constraint).__name__.strip("_")
    return _WORDS.get(name.lower(), f"in {name}")


_WORDS = {
    "simplex": "probabilities with sum one",
    "positivedefinite": "symmetric and positive definite",
    "lowercholesky": "lower triangular with a positive diagonal",
    "lowertriangular": "lower triangular",
    "orderedvector": "increasing",
}


def _bound(constraint: Constraint, name: str) -> str | None:
    """A bound of the constraint itself, not of its class, in words; None without one."""
    if name not in vars(constraint):
        return None
    bound = vars(constraint)[name]
    if isinstance(bound, Tensor):
        return f"{float(bound.detach()):g}" if bound.numel() == 1 else "the other bound"
    return f"{bound:g}"


def _checked_parameters(fn: Distribution) -> list[tuple[str, Constraint, Tensor]]:
    """The given parameters of ``fn`` itself that may leave their supports: name, constraint, where they have not."""
    if isinstance(fn, _SELECTING):
        return []
    supports = _parameter_supports(fn)
    checks = []
    for name in _given_parameters(fn):
        if _is_free(supports[name]):
            continue
        value = getattr(fn, name, None)
        if isinstance(value, Tensor):
            mask = _where_met(fn, supports[name], value)
            if mask is not None:
                checks.append((name, supports[name], mask))
    return checks


def _given_parameters(fn: Distribution) -> tuple[str, ...]:
    """The parameters that a distribution was made from, not those that it computes when they are asked for."""
    remembered: tuple[str, ...] = fn.__dict__.get("_given", ())
    return remembered or _computed_from(fn)


def _computed_from(fn: Distribution) -> tuple[str, ...]:
    """The parameters that the distribution holds now: asked when it is made, before lazy ones are computed."""
    required = _required_arguments(_plain_class(type(fn)))
    names = []
    for name in _parameter_supports(fn):
        is_lazy = isinstance(getattr(type(fn), name, None), lazy_property)
        if name in fn.__dict__ or name in required or not is_lazy:
            names.append(name)
    return tuple(names)


def _parameter_supports(fn: Distribution) -> Mapping[str, Constraint]:
    """The support of each parameter of a distribution, none of one that does not say it."""
    try:
        supports: Mapping[str, Constraint] = fn.arg_constraints
    except NotImplementedError:
        return {}
    return supports


@functools.cache
def _constructor_arguments(kind: Kind) -> frozenset[str]:
    """What the constructor of a class takes."""
    return frozenset(inspect.signature(kind).parameters) - {"validate_args"}


@functools.cache
def _required_arguments(kind: Kind) -> frozenset[str]:
    """What the constructor of a class does not do without."""
    options = inspect.signature(kind).parameters.items()
    return frozenset(name for name, option in options if option.default is option.empty)


def _inner_distributions(fn: Distribution) -> list[Any]:
    """The distributions that ``fn`` was given; those that it makes of its parameters hold the same ones again."""
    if (
        isinstance(fn, _SELECTING)
        or _constructor_arguments(_plain_class(type(fn))) <= _parameter_supports(fn).keys()
    ):
        return []
    return [member for member in fn.__dict__.values() if isinstance(member, Distribution)]


def _selected_distributions(fn: Distribution) -> list[tuple[Any, Tensor]]:
    """The distributions of one that selects, each with the mask of where it counts."""
    if isinstance(fn, dist.MaskedMixture):
        mask: Tensor = vars(fn)["mask"]
        return [(fn.component0, ~mask), (fn.component1, mask)]
    if isinstance(fn, dist.MaskedDistribution):
        return [(fn.base_dist, torch.as_tensor(mask_of(fn)))]
    return []


def _as_batch_mask(mask: Tensor, batch_shape: torch.Size) -> Tensor:
    """A mask with further axes, of events or components, as one that broadcasts with the batch."""
    extra = mask.dim() - len(batch_shape)
    if extra > 0:
        mask = mask.flatten(-extra).all(-1)
    sizes = zip(
        reversed(mask.shape),
        reversed(batch_shape),
        strict=False,
    )
    fits = all(size in (1, batch_size) for size, batch_size in sizes)
    return mask if fits else mask.all()


def _is_free(constraint: Constraint) -> bool:
    """Whether every number meets it, or it says nothing that can be checked."""
    while isinstance(constraint, constraints.independent):
        constraint = constraint.base_constraint
    return constraint is constraints.real or constraints.is_dependent(constraint)


def _where_met(fn: Distribution, constraint: Constraint, value: Tensor) -> Tensor | None:
    """Where ``value`` meets the constraint, up to rounding; None where that cannot be said without reading values."""
    if isinstance(constraint, constraints.independent):
        mask = _where_met(fn, constraint.base_constraint, value)
        if mask is None:
            return None
        count = min(constraint.reinterpreted_batch_ndims, mask.dim())
        return mask.flatten(-count).all(-1) if count else mask
    if constraint is constraints.positive_definite:
        return _is_symmetric(value) & _has_factor(fn, value)
    rule = _RULES.get(type(constraint))
    if rule is not None:
        return rule(constraint, value)
    try:
        return constraint.check(value)
    except RuntimeError:  # a constraint of the user's own, whose Python depends on values
        return None


class _BoundedConstraint(Protocol):
    """A constraint between bounds, which a constraint from below alone lacks one of."""

    lower_bound: float | Tensor
    upper_bound: float | Tensor


def _rounding_of(bound: float | Tensor) -> float | Tensor:
    """What rounding may add to a bound."""
    size = bound.abs() if isinstance(bound, Tensor) else abs(bound)
    return ROUNDING * (size + 1)


def _is_at_least(constraint: _BoundedConstraint, value: Tensor) -> Tensor:
    return value >= constraint.lower_bound - _rounding_of(constraint.lower_bound)


def _is_between(constraint: _BoundedConstraint, value: Tensor) -> Tensor:
    highest = constraint.upper_bound + _rounding_of(constraint.upper_bound)
    return _is_at_least(constraint, value) & (value <= highest)


def _is_in_half_open(constraint: _BoundedConstraint, value: Tensor) -> Tensor:
    return _is_at_least(constraint, value) & (value < constraint.upper_bound)


def _is_whole(constraint: _BoundedConstraint, value: Tensor) -> Tensor:
    return _is_at_least(constraint, value) & ((value - value.round()).abs() <= _rounding_of(value))


def _is_simplex(constraint: Constraint, value: Tensor) -> Tensor:
    # each of the probabilities is rounded, and so is each sum of them
    error = max(ROUNDING, 4 * value.shape[-1] * torch.finfo(value.dtype).eps)
    return (value >= -ROUNDING).all(-1) & ((value.sum(-1) - 1).abs() <= error)


def _is_increasing(constraint: Constraint, value: Tensor) -> Tensor:
    return (value[..., 1:] >= value[..., :-1]).all(-1)  # two may be the same by rounding


_RULES: dict[type, Callable[[Any, Tensor], Tensor]] = {
    constraints.greater_than_eq: _is_at_least,
    constraints.interval: _is_between,
    constraints.half_open_interval: _is_in_half_open,
    type(constraints.nonnegative_integer): _is_whole,
    type(constraints.simplex): _is_simplex,
    type(ordered_vector): _is_increasing,
}


def _is_symmetric(matrix: Tensor) -> Tensor:
    """Symmetric to half of the digits, measured by the largest element."""
    tolerance = torch.finfo(matrix.dtype).eps ** 0.5 * matrix.abs().amax((-2, -1))
    return (matrix - matrix.mT).abs().amax((-2, -1)) <= tolerance


def _has_factor(fn: Distribution, matrix: Tensor) -> Tensor:
    """Whether the matrix has a Cholesky factor: the one that ``fn`` has computed says it, where there is one."""
    factor = factor_of(fn)
    if factor is None:
        return torch.linalg.cholesky_ex(matrix).info == 0
    return (factor.diagonal(dim1=-2, dim2=-1) > 0).all(-1)


# -- gradients ---------------------------------------------------------------------------------------------------------


class _Context(Protocol):
    """What the forward pass hands to the derivatives."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def save_for_forward(self, *tensors: Tensor) -> None: ...


class _Masked(torch.autograd.Function):
    """The identity, with a gradient of zero where a mask is false, whatever comes back.

    What is computed forwards stays as it is: in a trace, an operation in the way of every parameter halves the speed of
    a program.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, is_possible: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: _Context, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        (is_possible,) = ctx.saved_tensors
        return torch.where(is_possible, gradients[0], 0.0), None

    @staticmethod
    def jvp(ctx: _Context, *tangents: Tensor) -> Tensor:
        (is_possible,) = ctx.saved_tensors
        return torch.where(is_possible, tangents[0], 0.0)


def _shield(value: _T, is_possible: Tensor, events: int) -> _T:
    """``value`` itself, of which nothing impossible gets a gradient; ``is_possible`` lacks its last ``events`` axes."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    is_possible = is_possible.reshape(is_possible.shape + (1,) * events)
    shape = torch.broadcast_shapes(value.shape, is_possible.shape)
    expanded = value.expand(shape)
    is_possible = is_possible.expand(shape)
    if Tracer.active() is not None:
        return _Masked.apply(expanded, is_possible)
    # the same derivatives; the Python of `_Masked`, run at every call and not once, takes far longer
    shielded: Any = torch.where(is_possible, expanded, expanded.detach())
    return shielded


def _unguarded(fn: Distribution) -> None:
    """The innermost hook counts: inside, new distributions are left as they are."""


def _can_be_made_anew(fn: Distribution, kind: Kind, names: Sequence[str]) -> bool:
    """Whether ``fn`` comes out the same, to the bit and at little cost: no factor, and no probabilities normalised."""
    supports = _parameter_supports(fn)
    if factor_of(fn) is not None or constraints.simplex in supports.values() or not names:
        return False
    return _required_arguments(kind) <= {*names} <= _constructor_arguments(kind) <= supports.keys()


def _shielded(fn: Distribution, is_possible: Tensor) -> Any:
    """The distribution as its class is without a guard, with :func:`_shield` around all that it computes from."""
    if isinstance(fn, _SELECTING):
        return fn
    kind = _plain_class(type(fn))
    names = _given_parameters(fn)
    # made anew, what it computes of its parameters at once is computed of shielded ones
    if _can_be_made_anew(fn, kind, names):
        parameters = {
            name: _shielded_member(getattr(fn, name), is_possible, fn.batch_shape, {})
            for name in names
        }
        # not where the class computes one parametrisation of another, and takes only one of them
        with unguarded(), contextlib.suppress(ValueError, TypeError):
            return kind(**parameters)
    twin: Any = object.__new__(kind)
    transforms: dict[int, Transform] = {}
    for name, member in fn.__dict__.items():
        twin.__dict__[name] = _shielded_member(member, is_possible, fn.batch_shape, transforms)
    return twin


def _shielded_member(
    member: Any,
    is_possible: Tensor,
    batch_shape: torch.Size,
    transforms: dict[int, Transform],
) -> Any:
    """A tensor, distribution or transform that a distribution holds, or a list of them.

    ``transforms`` are those that are done, by the ``id`` of the original: a transform and its inverse hold each other.
    """
    if isinstance(member, Tensor):
        if member.shape[: len(batch_shape)] == batch_shape:
            return _shield(member, is_possible, member.dim() - len(batch_shape))
        return _shield(member, is_possible.all(), member.dim())  # all points of the batch share it
    if isinstance(member, Distribution):
        extra = len(member.batch_shape) - len(batch_shape)
        if extra < 0:
            return _shielded(member, is_possible.all())
        return _shielded(member, is_possible.reshape(is_possible.shape + (1,) * extra))
    if isinstance(member, Transform) and not isinstance(member, torch.nn.Module):
        return _shielded_transform(member, is_possible, batch_shape, transforms)
    if type(member) in (list, tuple):
        elements = [
            _shielded_member(element, is_possible, batch_shape, transforms) for element in member
        ]
        return type(member)(elements)
    return member


def _shielded_transform(
    transform: Transform,
    is_possible: Tensor,
    batch_shape: torch.Size,
    transforms: dict[int, Transform],
) -> Transform:
    """A copy of the transform, of shielded members; the same copy for the same transform."""
    if id(transform) not in transforms:
        twin = copy.copy(transform)
        transforms[id(transform)] = twin
        for name, member in vars(transform).items():
            twin.__dict__[name] = _shielded_member(member, is_possible, batch_shape, transforms)
    return transforms[id(transform)]
