"""Handlers under which a program runs: where values and point parameters come from, which rows, many points, float64.

A program is written for one point. Run or traced for many, it needs Cholesky factors that do not raise and layers
that are not fused (:mod:`pyrobnn.model.fused`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.params.param_store import StateDict
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import SubsampleMessenger
from torch import Tensor, nn
from torch.distributions import biject_to, transform_to

from pyrobnn.core.checks import Refused
from pyrobnn.core.private import replaced
from pyrobnn.core.private_torch import set_parameter
from pyrobnn.core.threads import Shared, process_state
from pyrobnn.model.compile.trees import mapped
from pyrobnn.model.distribution_kinds import is_improper
from pyrobnn.model.filled import Filled
from pyrobnn.model.fused import WrittenOut
from pyrobnn.model.nodes import Message
from pyrobnn.model.torch_calls import Call, CallHandler, Handlers

T = TypeVar("T")
#: a value of a site, or what makes it of the site's distribution
Value = Tensor | Callable[[TorchDistributionMixin], Tensor]
RADIUS = 2.0  # of the box in unconstrained space that holds starts, as in Stan
#: in the names that ``pyro.module`` gives to parameters
OF_A_MODULE = "$$$"

_CHOLESKY = {torch.linalg.cholesky, torch.cholesky, Tensor.cholesky}


class Supply(Messenger):
    """Gives every site its value; point parameters never reach Pyro's global store.

    They begin at the values of the program, whatever another model, or this one when it was traced, has left in the
    store under the same name. Only where a plain program states no initial value, ``pyro.param("scale")``, the value is
    read from the store, as Pyro does (``stored``: what it holds, see :func:`own_store`). A value may be a function of
    the site's distribution, for a support that depends on other sites. A latent site with an improper prior cannot be
    drawn: without a value it gets one uniform in the box of starts, of the dtype and on the device of ``like`` (of the
    site's ``infer``, if it has one).
    """

    def __init__(
        self,
        values: Mapping[str, Value],
        points: Mapping[str, Tensor],
        *,
        stored: StateDict | None = None,
        like: Tensor | None = None,
    ):
        super().__init__()
        self.values = values
        self.points = points
        self.stored = stored
        self.like = torch.empty(0) if like is None else like
        # the initial values that this run has stated
        self.initial: dict[str, Tensor] = {}
        # the latest site that holds data
        self.latest_observed = ""

    def _pyro_supplied(self, msg: Message) -> None:
        """Answers ``private_pyro.given``, which asks whether this library runs the program."""
        msg["value"] = True
        msg["done"] = True

    def _pyro_sample(self, msg: Message) -> None:
        if msg["is_observed"]:
            self.latest_observed = msg["name"]
            return
        missing = msg["mask"]
        if _is_beside(msg["name"], self.latest_observed) and isinstance(missing, Tensor):
            if not msg["fn"].support.is_discrete:
                msg["fn"] = Filled(msg["fn"], missing)
                msg["mask"] = None
        if msg["name"] in self.values:
            value = self.values[msg["name"]]
            msg["value"] = value(msg["fn"]) if callable(value) else value
            msg["done"] = True
        elif not msg["done"] and is_improper(msg["fn"]):
            transform = biject_to(msg["fn"].support)
            shape = transform.inverse_shape(msg["fn"].batch_shape + msg["fn"].event_shape)
            like = msg["infer"].get("like", self.like)
            msg["value"] = transform(like.new_empty(shape).uniform_(-RADIUS, RADIUS))
            msg["done"] = True

    def _pyro_param(self, msg: Message) -> None:
        name = msg["name"]
        if name in self.values:
            value = self.values[name]
        elif name in self.points:
            value = self.points[name]
        else:
            value = self._initial(msg)
        msg["value"] = readable_by_plates(value, msg)
        msg["done"] = True

    def _initial(self, msg: Message) -> Tensor:
        """Where a point parameter begins: where the program says, else where Pyro's store has it."""
        name = msg["name"]
        init = msg["args"][1] if len(msg["args"]) > 1 else msg["kwargs"].get("init_tensor")
        if name in self.initial:
            return self.initial[name]
        if init is not None:
            value = init() if callable(init) else init
        # in a store of its own, of which a PyroModule puts its parameters there
        elif name in pyro.get_param_store():
            value = pyro.get_param_store()[name]
        elif self.stored is not None and name in self.stored["params"]:
            value = transform_to(self.stored["constraints"][name])(self.stored["params"][name])
        else:
            raise ValueError(f"the parameter {name!r} has no initial value: pass one to pyro.param")
        self.initial[name] = value.detach()
        return self.initial[name]


def readable_by_plates(value: Value, message: Message) -> Value:
    """The value of a ``pyro.param`` so that a plate which takes some rows may take its, as by ``event_dim=``."""
    if not isinstance(value, Tensor) or message["kwargs"].get("event_dim") is None:
        return value
    # WORKAROUND(pyro-ppl<=1.9.2): the plate notes on the parameter behind a value which rows it took
    readable = value.view_as(value)
    readable._pyro_unconstrained_param = torch.empty(0)  # type: ignore[attr-defined]
    return readable


def _is_beside(name: str, observed: str) -> bool:
    """Whether a latent site is that of the missing values which ``obs_mask=`` makes beside that of the data."""
    site = name.removesuffix("_unobserved")
    return site != name and observed == f"{site}_observed"


@contextlib.contextmanager
def own_store() -> Iterator[StateDict]:
    """Inside, Pyro's parameter store is empty, and afterwards as it was; yields what it holds otherwise.

    The store belongs to the process: one thread at a time.
    """
    with process_state():
        store = pyro.get_param_store()
        # WORKAROUND(pyro-ppl<=1.9.2): reading its state, it takes these links from the user's parameters
        links = [(value, vars(value).get("unconstrained")) for _, value in store.named_parameters()]
        stored = store.get_state()
        try:
            with store.scope():
                yield stored
        finally:
            for value, link in links:
                if link is not None:
                    vars(value)["unconstrained"] = link


@contextlib.contextmanager
def all_rows(sizes: dict[str, int], counts: dict[str, int] | None = None) -> Iterator[None]:
    """Plates that would draw a subsample take all their rows.

    Their names and sizes are added to ``sizes``, and how many rows each would draw to ``counts``.
    """

    def with_all_rows(plate: Plate) -> Plate:
        if plate.subsample is None and plate.is_subsampled:
            sizes[plate.name] = int(plate.size)
            if counts is not None:
                counts[plate.name] = int(plate.subsample_size)
            return plate._replace(subsample_size=None)
        return plate

    with _changed_plates(with_all_rows):
        yield


@contextlib.contextmanager
def some_rows(rows: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Iterator[None]:
    """The plates named in ``rows`` take the rows of these numbers (B,), of ``sizes`` altogether; Pyro scales them.

    A plate of as many rows as are given, ``pyro.plate("rows", len(x))``, is that of a batch of the data. A plate whose
    rows the program chooses itself stays as it is.

    Raises:
        Refused: a plate that draws another number of rows.
    """

    of_batch = _ParamsOfRows(rows, sizes)

    def with_these_rows(plate: Plate) -> Plate:
        if plate.name not in rows or plate.subsample is not None:
            return plate
        numbers = rows[plate.name]
        size = sizes[plate.name]
        if plate.size == size:
            if plate.is_subsampled and plate.subsample_size != len(numbers):
                raise Refused(
                    f"the plate {plate.name!r} draws {plate.subsample_size:,} of {size:,} rows where the program of "
                    f"the model draws {len(numbers):,}: give both the same subsample_size"
                )
            return plate._replace(subsample_size=None, subsample=numbers)
        if plate.size == len(numbers):
            of_batch.plates.add(plate.name)
            batch = torch.arange(len(numbers), device=numbers.device)
            return plate._replace(
                size=size,
                subsample_size=None,
                subsample=batch,
            )
        return plate

    with _changed_plates(with_these_rows), of_batch:
        yield


class _ParamsOfRows(Messenger):
    """Takes the values of the rows of a batch of a ``pyro.param(…, event_dim=)`` in a plate of their number.

    Such a plate, of ``plates``, does not know which rows they are: its own numbers are those of the data in the batch.
    """

    def __init__(self, rows: Mapping[str, Tensor], sizes: Mapping[str, int]):
        super().__init__()
        self.rows = rows
        self.sizes = sizes
        self.plates: set[str] = set()

    def _pyro_post_param(self, msg: Message) -> None:
        events = msg["kwargs"].get("event_dim")
        for frame in msg["cond_indep_stack"]:
            if events is None or frame.dim is None or frame.name not in self.plates:
                continue
            axis = frame.dim - events
            value = msg["value"]
            if value.dim() >= -axis and value.shape[axis] == self.sizes[frame.name]:
                rows_of_it = value.index_select(axis, self.rows[frame.name])
                msg["value"] = readable_by_plates(rows_of_it, msg)


def refuse_unfollowed(params: Iterable[str], followed: Collection[str], whose: str) -> None:
    """Refuse a net that was registered, and whose parameters would stay as they are.

    Args:
        params: the names of all parameters of a run.
        followed: what :func:`followed_modules` yielded.
        whose: the model or the guide.
    """
    for name in params:
        net, divider, _ = name.partition(OF_A_MODULE)
        if divider and net not in followed:
            raise Refused(
                f"the {whose} registers {net!r} by pyro.module, whose parameters this fit cannot follow under another "
                "name of that function: write it out, pyro.module(…), or make the net part of a PyroModule"
            )


class Plate(NamedTuple):
    """What a program asks for by ``pyro.plate``: a name, all rows, how many of them, and which."""

    name: str
    size: Any
    subsample_size: Any
    subsample: Any

    @property
    def is_subsampled(self) -> bool:
        """Whether it asks for some of the rows."""
        return self.subsample_size is not None and bool(self.subsample_size < self.size)


@contextlib.contextmanager
def _changed_plates(change: Callable[[Plate], Plate]) -> Iterator[None]:
    """Every plate that is made inside is what ``change`` makes of it."""
    # WORKAROUND(pyro-ppl<=1.9.2): no handler can change how many rows a plate takes
    plate_class: Any = SubsampleMessenger
    original_init = plate_class.__init__

    def init_of_changed(
        self: SubsampleMessenger,
        name: str,
        size: Any = None,
        subsample_size: int | None = None,
        subsample: Tensor | None = None,
        *arguments: bool | str | None,
        **options: bool | str | None,
    ) -> None:
        original_init(
            self,
            *change(Plate(name, size, subsample_size, subsample)),
            *arguments,
            **options,
        )

    with process_state(), replaced(plate_class, "__init__", init_of_changed):
        yield


@contextlib.contextmanager
def followed_modules(known: Collection[str]) -> Iterator[set[str]]:
    """Nets that the program registers by ``pyro.module`` compute with the values that a run gives their parameters.

    Pyro's own statement asks for these values and leaves the net as it is: in its store they are the net's own tensors.
    Afterwards the nets are as they were. Yields the names under which nets were registered. ``known`` are names of
    parameters that are fitted: under ``torch.func`` a parameter does not say itself whether it has a gradient.
    """
    before: list[tuple[nn.Module, str, Tensor]] = []
    names: set[str] = set()

    def module(
        name: str,
        nn_module: nn.Module,
        update_module_params: bool = False,
    ) -> nn.Module:
        names.add(name)
        values: dict[int, Tensor] = {}
        for parameter_name, parameter in nn_module.named_parameters():
            full_name = name + OF_A_MODULE + parameter_name
            if parameter.requires_grad or full_name in known:
                values[id(parameter)] = pyro.param(full_name, parameter)
        for submodule in nn_module.modules():
            for leaf, parameter in [*submodule.named_parameters(recurse=False)]:
                if id(parameter) in values:
                    before.append((submodule, leaf, parameter))
                    set_parameter(submodule, leaf, values[id(parameter)])
        return nn_module

    with process_state(), replaced(pyro, "module", module):
        try:
            yield names
        finally:
            for submodule, leaf, parameter in reversed(before):
                set_parameter(submodule, leaf, parameter)


@contextlib.contextmanager
def at_many_points() -> Iterator[None]:
    """The handler under which a program that is written for one point is run, or traced, for many."""
    with Handlers(many_points()):
        yield


def many_points() -> list[CallHandler]:
    """The handlers that :func:`at_many_points` puts together, the outermost first."""
    return [_CholeskyFactors(), _BinomialNumbers(), WrittenOut()]


class _CholeskyFactors(CallHandler):
    """Cholesky factors that are NaN where the matrix is not positive definite, instead of an error.

    A covariance whose smallest eigenvalue is below the resolution of its dtype has no factor in it, at one point among
    the many that are evaluated together: a sampler has to see that the density of this one is not finite.
    """

    functions = _CHOLESKY

    def answer(self, call: Call) -> Any:
        if "out" in call.options:
            return call.result()
        factor, info = torch.linalg.cholesky_ex(*call.args, **call.options)
        return torch.where((info == 0)[..., None, None], factor, torch.nan)


class _BinomialNumbers(CallHandler):
    """Binomial numbers of many points whose count is one: torch makes its output as large as the count, and warns."""

    functions = frozenset({torch.binomial})

    def answer(self, call: Call) -> Any:
        # WORKAROUND(torch<=2.13): vmap of torch.binomial with one count for all points
        if len(call.args) < 2:
            return call.result()
        count, probability, *others = call.args
        counts = count + torch.zeros_like(probability)
        return torch.binomial(
            counts,
            probability,
            *others,
            **call.options,
        )


class _Widen(CallHandler):
    """Every float32 tensor that goes into an operation is made float64 first, and none is asked for."""

    def answer(self, call: Call) -> Any:
        if call.function is Tensor.double:
            return call.result()
        return call.function(*mapped(wide, call.args), **mapped(wide, call.options))


def wide(value: T) -> T | Tensor | torch.dtype:
    """A float32 tensor, or the type float32 itself, as float64; anything else as it is."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def _float64_by_default() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


#: torch's default belongs to the process: of threads that overlap one would leave it float64 for good
_WIDE_DEFAULT = Shared(_float64_by_default)


#: whether this thread is inside of :func:`in_float64`
_IS_WIDE = ContextVar("_IS_WIDE", default=False)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Tensors that are made, and operations on those there are, have float64 inside; entered again it does nothing."""
    if _IS_WIDE.get():
        yield
        return
    token = _IS_WIDE.set(True)
    try:
        with _WIDE_DEFAULT, _Widen():
            yield
    finally:
        _IS_WIDE.reset(token)
