"""A Pyro program as a pure function: its log joint density over one flat, unconstrained vector.

The program's handlers run in Python only when the function is called, and once where it is traced (``compile``).
Every latent site takes a slice of the vector through the bijection of its support, so that the density includes the
log-Jacobian; point parameters (``pyro.param``) take slices too when they are free, without prior and without Jacobian.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import pyro
import torch
from torch import Tensor
from torch.distributions import Distribution, biject_to, constraints
from torch.distributions.transforms import Transform, identity_transform

from pyrobnn.core.checks import Refused, check_type
from pyrobnn.core.private_pyro import is_param_statement
from pyrobnn.core.private_torch import is_batched
from pyrobnn.core.private_trace import Tracer
from pyrobnn.core.seeding import seeded, used_devices
from pyrobnn.model import enumeration, guards
from pyrobnn.model.compile import repeats
from pyrobnn.model.compile.trees import Tree, leaves_of, mapped
from pyrobnn.model.constants import Constants, Habits, Noting, OwnTensors
from pyrobnn.model.distribution_kinds import elementwise
from pyrobnn.model.gradient import as_one_of_several, at_each
from pyrobnn.model.handlers import (
    RADIUS,
    Supply,
    Value,
    all_rows,
    followed_modules,
    in_float64,
    many_points,
    own_store,
    refuse_unfollowed,
    some_rows,
    wide,
)
from pyrobnn.model.log_terms import (
    datum_terms,
    is_plain_normal,
    log_prob_of_normals,
    log_prob_sum,
    log_prob_total,
    without_validation,
)
from pyrobnn.model.nodes import (
    Derived,
    Node,
    device_of,
    is_datum,
    is_deterministic,
    is_latent,
    is_masked,
    is_observed,
    is_replicated,
    is_subsample,
)
from pyrobnn.model.overwritten import Overwritten
from pyrobnn.model.padding import Padding
from pyrobnn.model.positive_definite import FromCholesky
from pyrobnn.model.torch_calls import CallHandler, Handlers

Program = Callable[..., Any]
#: draws from the prior that may be impossible one after the other
MOST_TRIES = 100
#: rows of a net's data that show its sites
_FEW = 8
P = ParamSpec("P")
T = TypeVar("T")


def _in_its_floats(
    method: Callable[Concatenate[Density, P], T],
) -> Callable[Concatenate[Density, P], T]:
    """A method of :class:`Density` that computes in the floating type of that density."""

    @functools.wraps(method)
    def computed(self: Density, *args: P.args, **options: P.kwargs) -> T:
        with self.floats():
            return method(self, *args, **options)

    return computed


@dataclass(frozen=True)
class Site:
    """One latent site or point parameter and its slice of the flat vector."""

    name: str
    shape: torch.Size
    unconstrained_shape: torch.Size
    transform: Transform
    start: int
    kind: Literal["latent", "point"]

    @property
    def size(self) -> int:
        """Number of unconstrained scalars."""
        return math.prod(self.unconstrained_shape)

    @property
    def stop(self) -> int:
        """One past the last index in the flat vector."""
        return self.start + self.size


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of plates: ``numbers``, those (B,) of each plate by its name, of ``sizes`` (N) altogether.

    ``axes``: site → the plates of its axes, each with the place of its axis, counted from the end, of the site in
    unconstrained space.
    """

    numbers: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    axes: Mapping[str, Mapping[str, int]]

    def factor(self, site: str) -> float:
        """What a sum over these rows of a site is multiplied by to stand for all of them."""
        counts = [
            (self.sizes[plate], len(self.numbers[plate])) for plate in self.axes.get(site, ())
        ]
        return math.prod(size / count for size, count in counts)


class Density:
    r"""Log joint density of a Pyro program over a flat unconstrained vector.

    .. math:: \log p(y, T(z)) + \log \left| \det \frac{\partial T}{\partial z} \right|, \qquad z \in R^D

    Args:
        program: a Pyro program; called with ``args``.
        args: its arguments, usually (x, y); tensors or None.
        points: ``"free"`` puts ``pyro.param`` sites into the vector after the latent ones (for optimisation);
            ``"held"`` keeps them at their values.
        values: values of held or initial point parameters, by name; missing ones come from the program, and those for
            which the program states no value, ``pyro.param("scale")``, from Pyro's parameter store.
        double: compute in float64, whatever type the program's own tensors have. A plain program whose sites are of
            several types is computed so in any case: one vector holds them all.
        noisy: the program with the noise of its training, such as dropout: what :meth:`subsampled` runs.

    Attributes: ``sites`` (tuple of :class:`Site`), ``dim``, ``dtype``, ``own_dtypes`` (of the sites and point
    parameters as the program has them, by name), ``device``, ``observed`` (names; ``observes``:
    whether there is one, or a factor), ``states`` (the discrete latent sites, which are summed out, and
    how many values each has), ``masked`` (names of the latent sites that a mask touches), ``dependent`` (names
    of those whose support depends on other sites, as that of ``Uniform(0, 1 - a)``), ``plate_sizes`` (of the plates
    that draw a subsample, by name), ``plate_counts`` (how many rows each draws), ``local`` (the latent sites that have
    a value for every row of such a plate, with its name), ``derived`` (what it says beside its density),
    ``initial_points`` and ``constraints`` (of the point parameters, by name).

    A program whose plate draws a subsample (``pyro.plate("rows", N, subsample_size=B)``) is evaluated with all rows of
    that plate, so that every density here is exact; :meth:`subsampled` is the noisy one that the program describes, and
    :meth:`at_rows` that at rows which are given.

    Raises:
        ValueError: a program without any site to infer.
        Refused: a program that subsamples and cannot be run with all rows; a discrete latent site that cannot be summed
            out.

    Example:
        >>> import pyro.distributions as dist
        >>> def program(x, y):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     scale = pyro.sample("scale", dist.HalfNormal(1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(slope * x, scale), obs=y)
        >>> density = Density(program, (torch.ones(3), torch.zeros(3)))
        >>> density.dim
        2
        >>> round(density.log_joint(torch.zeros(2)).item(), 3)
        -4.402
    """

    # of pickles of earlier versions too
    states: Mapping[str, int] = MappingProxyType({})
    #: whether runs sum out the discrete sites, or draw them
    sums_out = False
    #: of its own rows, where some are filled in
    padding: Padding | None = None
    local: Mapping[str, str] = MappingProxyType({})
    #: the rows at which the program is run; None: all rows, or those that it draws
    rows: Rows | None = None
    #: `log_terms` in fewer operations, where the program repeats many
    _merged: repeats.Function | None = None

    def __init__(
        self,
        program: Program,
        args: tuple[Any, ...] = (),
        *,
        points: Literal["free", "held"] = "free",
        values: Mapping[str, Tensor] | None = None,
        double: bool = False,
        noisy: Program | None = None,
    ):
        self.program = check_type("program", program, Callable, "a Pyro program")
        self.args: tuple[Any, ...] = check_type(
            "args", args, tuple, "the tuple of its arguments, (x, y)"
        )
        self.points = points
        self._held: dict[str, Tensor] = dict(values or {})
        self.plate_sizes: dict[str, int] = {}
        self.plate_counts: dict[str, int] = {}
        self._all_rows = True
        self._noisy = noisy
        self.habits = Habits()
        self.device = device_of({}, leaves_of(args))
        # the first run finds no sites yet, so `_check_latent_sites` lets it pass
        self.sites: tuple[Site, ...] = ()
        self.in_double = False
        nodes, self.own_dtypes = self._run_in_one_type(double)
        self.device = device_of(nodes, leaves_of(args))
        self.states = {
            name: enumeration.num_states(node)
            for name, node in nodes.items()
            if enumeration.is_discrete(node)
        }
        self.nesting = enumeration.plate_nesting(nodes.values())
        self.sites = self._laid_out(nodes)
        self.local = _local_sites(nodes, self.plate_sizes)
        # a program may draw its initial values, pyro.param("w", lambda: torch.randn(3))
        if self.owner is None:
            self._held = self.initial_points | self._held
        self.dim = sum(site.size for site in self.sites)
        self._by_name = {site.name: site for site in self.sites}
        self.dtype = _common_dtype(nodes, self._by_name)
        self.derived = Derived.of(nodes)
        self.observes = _observes(nodes)
        self.observed = _data_sites(nodes)
        self.masked = tuple(name for name in self._latent_names() if is_masked(nodes[name]))
        if self.states:
            self.derived = self._without_discrete(nodes)
            self.sums_out = True
        # `_find_dependent` evaluates, so it comes last, and starts from none
        self.dependent: tuple[str, ...] = ()
        self.dependent = self._find_dependent(nodes)

    def _run_in_one_type(self, double: bool) -> tuple[Mapping[str, Node], dict[str, torch.dtype]]:
        """The nodes of a first run, and the types of its sites and point parameters as the program has them.

        The run is in float64 where that is asked for, and where the sites of a plain program are of several types.
        """
        if double:
            self._compute_in_float64()
        nodes = self._first_run()
        dtypes = {name: node["value"].dtype for name, node in nodes.items() if _is_value(node)}
        if self.owner is None and len(set(dtypes.values())) > 1:
            self._compute_in_float64()
            nodes = self._first_run()
        return nodes, dtypes

    def _laid_out(self, nodes: Mapping[str, Node]) -> tuple[Site, ...]:
        """The sites of a run and their places in the vector; ValueError where there is nothing to infer."""
        with self.floats():
            self._check_nodes(nodes)
            sites = self._layout(nodes)
        if not any(site.size for site in sites):
            if self.states:
                raise ValueError(
                    "the program has discrete latent sites alone: pyro.infer.infer_discrete draws them exactly"
                )
            raise ValueError(
                "the program has no latent site to infer: add a pyro.sample without obs="
            )
        return sites

    def _latent_names(self) -> list[str]:
        """The latent sites of the vector, in its order."""
        return [site.name for site in self.sites if site.kind == "latent"]

    def _check_nodes(self, nodes: Mapping[str, Node]) -> None:
        """Refuse sites that no density here can hold; in a plain program also those of half precision."""
        for node in nodes.values():
            _check_node(node, nodes, self.plate_sizes)
            if self.owner is None:
                _check_precision(node)

    def _layout(self, nodes: Mapping[str, Node]) -> tuple[Site, ...]:
        """The latent sites in the order of the program, then the point parameters that are free."""
        params = {name: node for name, node in nodes.items() if node["type"] == "param"}
        self.initial_points = {
            name: node["value"].detach().to(self.device) for name, node in params.items()
        }
        self.constraints = {
            n: node["kwargs"].get("constraint", constraints.real) for n, node in params.items()
        }
        sites: list[Site] = []
        start = 0
        for name, support in self._supports(nodes).items():
            transform = bijection(name, support)
            shape = nodes[name]["value"].shape
            unconstrained_shape = torch.Size(transform.inverse_shape(shape))
            kind: Literal["latent", "point"] = "point" if name in params else "latent"
            site = Site(name, shape, unconstrained_shape, transform, start, kind)
            sites.append(site)
            start = site.stop
        return tuple(sites)

    def _supports(self, nodes: Mapping[str, Node]) -> dict[str, constraints.Constraint]:
        """The supports of the latent sites and of the point parameters that are free."""
        supports = {
            name: node["fn"].support
            for name, node in nodes.items()
            if is_latent(node) and name not in self.states
        }
        if self.points == "free":
            frozen = getattr(self.owner, "frozen", ())
            for name, support in self.constraints.items():
                if name not in frozen:
                    supports[name] = support
        return supports

    def _without_discrete(self, nodes: Mapping[str, Node]) -> Derived:
        """What does not depend on a discrete site; Refused where summing them out is too large, or cannot be done."""
        values = {name: nodes[name]["value"] for name in self._latent_names()}
        names = ", ".join(map(repr, self.states))
        try:
            with enumeration.TableLimit(self.states), torch.no_grad():
                enumerated = self._enumerated(values)
                enumeration.summed(enumerated, self.states)
        except Refused:
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError, NotImplementedError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Refused(
                f"the program cannot be run with all values of its discrete latent sites {names} at once ({reason}): "
                "index by pyro.ops.indexing.Vindex, let no Python depend on their values, loop over them by "
                "pyro.markov, or sum them out by hand"
            ) from error
        deterministic = {
            name: size
            for name, size in self.derived.deterministic.items()
            if _count(enumerated.nodes[name]["value"]) == size
        }
        return dataclasses.replace(self.derived, deterministic=deterministic)

    def _compute_in_float64(self) -> None:
        """From here on everything is computed in float64, and its own data are of it."""
        self.in_double = True
        self.args = mapped(wide, self.args)
        self._held = mapped(wide, self._held)

    def _first_run(self) -> Mapping[str, Node]:
        """The nodes of a run at values that the program draws itself; sizes of plates that subsample are noted."""
        with seeded(0, *used_devices()), torch.no_grad():
            with all_rows(self.plate_sizes, self.plate_counts), Noting() as noting:
                nodes = self._drawn() if self.owner is not None else self._watched_run()
        if self.owner is None:
            self.habits = noting.habits
        return nodes

    def _watched_run(self) -> Mapping[str, Node]:
        """The nodes of a run of a plain program, refused where it writes into its data or into tensors of its sites."""
        overwritten = Overwritten(self.args)
        watched = copy.copy(self)
        # nearest to the program, for no handler outside of it is asked
        watched.program = overwritten(self.program)
        try:
            return watched._drawn()
        finally:
            overwritten.refuse()

    def floats(self) -> contextlib.AbstractContextManager[None]:
        """The context in which this density computes: everything in float64, or the program's own types."""
        return in_float64() if self.in_double else contextlib.nullcontext()

    def double(self) -> Density:
        """This density computed in float64, its vectors float64: for draws that float32 cannot hold."""
        if self.in_double:
            return self
        density = Density(
            self.program,
            self.args,
            points=self.points,
            values=self._held,
            double=True,
            noisy=self._noisy,
        )
        density.own_dtypes = self.own_dtypes
        density._all_rows = self._all_rows
        return density

    def __getstate__(self) -> dict[str, Any]:
        """Of a net without its data: a pickle of a posterior has the layout of the sites, and no row."""
        return self.__dict__ | {"_merged": None} | ({} if self.owner is None else {"args": ()})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Pickles of 0.3.0 know no habits: their programs are nets, which have none."""
        self.__dict__ |= {"habits": Habits()} | state

    def __copy__(self) -> Density:
        copied = object.__new__(type(self))
        # what is copied is changed: its program, data or rows
        copied.__dict__ |= self.__dict__ | {"_merged": None}
        return copied

    def holding(self, values: Mapping[str, Tensor]) -> Density:
        """This density with its point parameters held at ``values``."""
        density = Density(
            self.program,
            self.args,
            points="held",
            values=values,
            double=self.in_double,
        )
        density.own_dtypes = self.own_dtypes
        density._merged = self._merged_holding(density)
        return density

    @_in_its_floats
    def _merged_holding(self, held: Density) -> repeats.Function | None:
        """The terms of a density ``held``, this one with its points at values, in fewer operations where these are."""
        merged = self._merged
        if merged is None or not self.initial_points:
            return merged
        if self.points == "held":
            return None
        # the points come last
        pieces = []
        for site in self.sites:
            if site.kind == "point":
                value = held._held[site.name].detach().to(self.device, self.dtype)
                pieces.append(site.transform.inv(value).reshape(-1))
        points = torch.cat(pieces)
        return lambda z: merged(torch.cat([z, points.to(z)]))

    def as_fine_as(self, draws: Mapping[str, Tensor]) -> Density:
        """This density, or in float64 where ``draws`` of its sites are finer than the program has them."""
        for site in self.sites:
            if site.name not in draws:
                continue
            dtype = draws[site.name].dtype
            program_dtype = self.own_dtypes[site.name]
            if dtype != program_dtype and torch.promote_types(dtype, program_dtype) == dtype:
                return self.double()
        return self

    @functools.cached_property
    def owner(self) -> Any:
        """The model that holds the program's point parameters itself, as a BNN does; None for a plain program."""
        program = self.program.func if isinstance(self.program, functools.partial) else self.program
        model = getattr(program, "__self__", program)
        return model if getattr(model, "holds_points", False) else None

    @property
    def stochastic(self) -> str | None:
        """Name of the plate that draws a subsample, the first if there are several; None if there is none.

        Of a net that is trained with dropout ``"dropout"``.
        """
        return next(iter(self.plate_sizes), None if self._noisy is None else "dropout")

    def subsampled(self) -> Density:
        """The density as a training has it: another random subsample at every call, scaled to all rows by Pyro.

        Unbiased, value and gradient. Of a net that is trained with dropout with other units dropped at every call.
        Itself where nothing is drawn.
        """
        if self.stochastic is None or self.rows is not None:
            return self
        noisy = copy.copy(self)
        noisy._all_rows = False
        return noisy if self._noisy is None else running(noisy, self._noisy)

    def at_rows(
        self,
        numbers: Mapping[str, Tensor],
        sizes: Mapping[str, int],
        args: tuple[Tree, ...] = (),
    ) -> Density:
        """The density at the rows of these ``numbers`` (B,) of each plate, of ``sizes`` altogether, scaled to all.

        Its vectors have the sites that belong to no plate, and these rows of the others. Over subsets that take every
        row equally often it is unbiased, value and gradient. ``args``: the data of these rows, where the program is
        given them and does not take them itself.

        Raises:
            Refused: a plate draws another number of rows.
            RuntimeError: the program cannot be run at these rows, as of a plate of a size that is written out.
        """
        some = copy.copy(self)
        some.args = args or self.args
        some._all_rows = False
        if self.rows is not None:
            some.rows = dataclasses.replace(self.rows, numbers=numbers)
            return some
        some.rows = Rows(numbers, sizes, {})
        with seeded(0, *used_devices()), torch.no_grad():
            nodes = some._drawn()
        with some.floats():
            some.sites = _with_whole_points(some._layout(nodes), self._by_name)
        some.initial_points = self.initial_points
        some.dim = sum(site.size for site in some.sites)
        some._by_name = {site.name: site for site in some.sites}
        row_axes = {site.name: _row_axes(site, nodes[site.name], sizes) for site in some.sites}
        some.rows = Rows(numbers, sizes, row_axes)
        return some

    def with_programs(self, change: Callable[[Program], Program]) -> Density:
        """The density with another program, and another of its training's noise, of the same sites and data."""
        changed = running(self, change(self.program))
        if self._noisy is not None:
            changed._noisy = change(self._noisy)
        return changed

    # -- flat vector ↔ sites ---------------------------------------------------------------------------------------

    @_in_its_floats
    def constrain(self, z: Tensor) -> dict[str, Tensor]:
        """Site values (\\*batch, \\*shape) of flat vectors (\\*batch, dim)."""
        if self.dependent:
            return at_each(
                lambda point: self._values_and_transforms(point)[0],
                z,
                batch=z.shape[:-1],
            )
        return {site.name: site.transform(u) for site, u in self.parts(z)}

    @_in_its_floats
    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Flat vectors (\\*batch, dim) of site values (\\*batch, \\*shape); ValueError of a missing or wrong one."""
        tensors = {}
        batch = torch.Size()
        for site in self.sites:
            if site.name not in values:
                raise ValueError(f"the site {site.name!r} is missing; given: {', '.join(values)}")
            value = torch.as_tensor(values[site.name], device=self.device).to(self.dtype)
            batch = value.shape[: value.dim() - len(site.shape)]
            if value.shape[len(batch) :] != site.shape:
                raise ValueError(
                    f"the site {site.name!r} has shape {tuple(value.shape)}, not {site.shape}"
                )
            tensors[site.name] = value
        inverse: dict[str, Tensor] = {}
        if self.dependent:
            inverse |= at_each(
                self._inverse_of_dependent,
                tensors,
                batch=batch,
            )
        for site in self.sites:
            if site.name not in inverse:
                inverse[site.name] = site.transform.inv(tensors[site.name])
        return torch.cat([inverse[s.name].reshape(*batch, s.size) for s in self.sites], -1)

    @_in_its_floats
    def log_jacobian(self, z: Tensor, only: Site | None = None) -> Tensor:
        """log ``|det dT/dz|`` of the latent sites (point parameters have none), or of one; shape (\\*batch,)."""
        if self.dependent and z.dim() > 1:
            return at_each(
                lambda point: self.log_jacobian(point, only),
                z,
                batch=z.shape[:-1],
            )
        transforms = self._values_and_transforms(z)[1] if self.dependent else {}
        total = z.new_zeros(z.shape[:-1])
        for site, u in self.parts(z):
            transform = transforms.get(site.name, site.transform)
            if site.kind == "latent" and only in (None, site) and not is_identity(transform):
                term = transform.log_abs_det_jacobian(u, transform(u))
                term = term.reshape(z.shape[:-1] + (-1,)).sum(-1)
                total = total + (term if self.rows is None else term * self.rows.factor(site.name))
        return total

    def site_of(self, index: int) -> str:
        """Name of the site that holds coordinate ``index`` of the flat vector."""
        return next(site.name for site in self.sites if site.start <= index < site.stop)

    def site(self, name: str) -> Site:
        """The site of that name, latent or free point parameter."""
        return self._by_name[name]

    def parts(self, z: Tensor) -> list[tuple[Site, Tensor]]:
        """Each site with its part of flat vectors, (\\*batch, \\*unconstrained_shape)."""
        # one split, whose gradient is one concatenation: that of a slice is a whole vector for every site
        slices = z.split([site.size for site in self.sites], -1)
        return [
            (site, u.reshape(z.shape[:-1] + site.unconstrained_shape))
            for site, u in zip(self.sites, slices)
        ]

    # -- supports that depend on other sites: known, and the bijection with them, only while the program runs --------

    @_in_its_floats
    def _find_dependent(self, nodes: Mapping[str, Node]) -> tuple[str, ...]:
        """The latent sites whose support differs between the run of ``nodes`` and one with other values."""
        latent = self._latent_names()
        bounded = [name for name in latent if _bounds(nodes[name]["fn"].support)]
        if not bounded:
            return ()
        values = self.constrain(self.sample_box(1, seed=1)[0])
        new_nodes = self._own_nodes({name: values[name] for name in latent}, self._few_rows())
        dependent = []
        for name in bounded:
            bounds = _bounds(nodes[name]["fn"].support)
            new_bounds = _bounds(new_nodes[name]["fn"].support)
            if not all(map(torch.equal, bounds, new_bounds)):
                dependent.append(name)
        return tuple(dependent)

    @_in_its_floats
    def _values_and_transforms(self, z: Tensor) -> tuple[dict[str, Tensor], dict[str, Transform]]:
        """Site values of one vector (dim,), and the bijections of the dependent sites there."""
        unconstrained = {site.name: (site, u) for site, u in self.parts(z)}
        transforms = {}

        def follow(name: str, fn: Distribution) -> Tensor:
            transforms[name] = bijection(name, fn.support)
            return transforms[name](unconstrained[name][1])

        values: dict[str, Any] = {
            name: site.transform(u) for name, (site, u) in unconstrained.items()
        }
        nodes = self._own_nodes(
            values | {name: functools.partial(follow, name) for name in self.dependent}
        )
        return values | {name: nodes[name]["value"] for name in self.dependent}, transforms

    @_in_its_floats
    def _inverse_of_dependent(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The unconstrained values of the dependent sites."""
        nodes = self._own_nodes(values)
        return {
            name: bijection(name, nodes[name]["fn"].support).inv(values[name])
            for name in self.dependent
        }

    # -- densities of one vector (dim,); batch them with torch.func.vmap -------------------------------------------

    @_in_its_floats
    def log_joint(self, z: Tensor, *args: Tree, jacobian: bool = True) -> Tensor:
        """Log joint density at ``z`` (dim,), accumulated in float64, in nats; a scalar.

        Args:
            z: flat vector.
            args: arguments of the program instead of the stored ones (a mini-batch).
            jacobian: include the log-Jacobian of the bijections (leave it out for a mode in constrained space).
        """
        if self._merged is not None and not args:
            terms = self.log_terms(z)
            return terms.sum() if jacobian else terms[:2].sum()
        log_prior, log_likelihood = self.log_parts(z, *args)
        total = log_prior + log_likelihood
        return total + self.log_jacobian(z).double() if jacobian else total

    @property
    def is_merged(self) -> bool:
        """Whether the log joint of the program's own data is computed in fewer operations than the program has."""
        return self._merged is not None

    @_in_its_floats
    def in_fewer_operations(self, points: Tensor | None = None) -> Density:
        """The density whose log joint and parts take fewer operations where the program repeats many; else itself.

        It is compared with the program at ``points`` (point, dim); without them at a prior draw and two starts.
        """
        if self.owner is not None or self.is_merged:
            return self
        if points is None:
            points = torch.cat([self.sample_prior(1, seed=0), self.sample_box(2, seed=0)])
        terms = self.log_terms
        merged = repeats.in_fewer_operations(terms, points)
        if merged is terms:
            return self
        density = copy.copy(self)
        density._merged = merged
        return density

    def merged_as(self, other: Density) -> Density | None:
        """This density in the fewer operations of another of the same program, data and type; None of another one."""
        if self.program is not other.program or len(self.args) != len(other.args):
            return None
        same_data = all(mine is theirs for mine, theirs in zip(self.args, other.args, strict=True))
        same_points = self.points == other.points and (
            self.points == "free" or not self.initial_points
        )
        if not (same_data and same_points and self.in_double == other.in_double):
            return None
        density = copy.copy(self)
        density._merged = other._merged
        return density

    @_in_its_floats
    def merged(self, function: repeats.Function, points: Tensor) -> repeats.Function:
        """A function that runs this program, as of points like these (point, …), in fewer operations where that has."""
        if not self.is_merged:
            return function
        merged = repeats.in_fewer_operations(function, points)

        def in_floats(point: Tensor) -> Tensor:
            with self.floats():
                return merged(point)

        return in_floats

    @_in_its_floats
    def log_terms(self, z: Tensor) -> Tensor:
        """At ``z`` (dim,): log prior, log likelihood and log-Jacobian, (3,), float64."""
        if self._merged is not None:
            return self._merged(z)
        log_prior, log_likelihood = self._log_parts(self.constrain(z), (), z)
        return torch.stack([log_prior, log_likelihood, self.log_jacobian(z).double()])

    @_in_its_floats
    def log_parts(self, z: Tensor, *args: Tree) -> tuple[Tensor, Tensor]:
        """Log prior and log likelihood (scaled to the whole data set) in constrained space, float64 scalars."""
        if self._merged is not None and not args:
            log_prior, log_likelihood, _ = self.log_terms(z).unbind()
            return log_prior, log_likelihood
        return self._log_parts(self.constrain(z), args, z)

    @_in_its_floats
    def log_parts_at(self, values: Mapping[str, Value], *args: Tree) -> tuple[Tensor, Tensor]:
        """As :meth:`log_parts` at constrained values of the sites, site → (\\*shape)."""
        return self._log_parts(values, args)

    def _log_parts(
        self,
        values: Mapping[str, Value],
        args: tuple[Tree, ...],
        z: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`log_parts_at`, of values that are those of the vector ``z`` (dim,) where that is given."""
        if self.is_traced_alone(values.values()):
            # what raises is told by the plain run: it branches on the values of its sites
            tensors = {name: torch.as_tensor(value) for name, value in values.items()}
            with contextlib.suppress(RuntimeError):
                return as_one_of_several(lambda one: self.log_parts_at(one, *args), tensors)
        like = torch.as_tensor(values[self.sites[0].name])
        # entered once for all that is inside
        with without_validation():
            nodes = self.trace(values, args)
            likelihood = [node for node in nodes.values() if is_observed(node)]
            with self._own_tensors(like):
                log_prior = self._log_prior_of(nodes, values, z)
                return log_prior, log_prob_total(likelihood, like.device)

    def _log_prior_of(
        self,
        nodes: Mapping[str, Node],
        values: Mapping[str, Value],
        z: Tensor | None,
    ) -> Tensor:
        """The log prior of a run at these values; normal sites whose values lie side by side in ``z`` are one."""
        latent = {name: node for name, node in nodes.items() if is_latent(node)}
        device = torch.as_tensor(values[self.sites[0].name]).device
        if z is None:
            return log_prob_total(latent.values(), device)
        log_priors = []
        for run in self._normal_runs(nodes, values):
            run_nodes = [latent.pop(site.name) for site in run]
            log_priors.append(log_prob_of_normals(run_nodes, z[run[0].start : run[-1].stop]))
        return sum(log_priors, log_prob_total(latent.values(), device))

    def _normal_runs(
        self,
        nodes: Mapping[str, Node],
        values: Mapping[str, Value],
    ) -> list[list[Site]]:
        """Sites, of two or more next to each other, whose values are normal and lie in the vector as they are."""

        def is_in_run(site: Site) -> bool:
            node = nodes.get(site.name)
            if node is None or not is_latent(node) or not is_identity(site.transform):
                return False
            is_given = node["value"] is values[site.name]
            return is_given and node["value"].dtype == self.dtype and is_plain_normal(node)

        runs = [list(run) for joins, run in itertools.groupby(self.sites, is_in_run) if joins]
        return [run for run in runs if len(run) > 1]

    def is_traced_alone(self, values: Iterable[Value]) -> bool:
        """Whether a trace is under way, at one point, of a program whose Python reads its data."""
        if not self.habits.reads or Tracer.active() is None:
            return False
        return all(isinstance(value, Tensor) and not is_batched(value) for value in values)

    @_in_its_floats
    def log_prior(self, z: Tensor, names: Sequence[str]) -> Tensor:
        """Log prior of some latent sites with their log-Jacobian (unconstrained space), a float64 scalar."""
        nodes = self.trace(self.constrain(z))
        jacobians = (self.log_jacobian(z, self.site(name)).double() for name in names)
        with self._own_tensors(z):
            return sum(jacobians, log_prob_total([nodes[name] for name in names], z.device))

    @_in_its_floats
    def data_terms(self, z: Tensor, *args: Tree) -> dict[str, Tensor]:
        """What each datum contributes to the log joint at ``z`` (dim,), site → (\\*axes), or (data,) under a mask.

        Not scaled to the rows that a plate leaves out; with the weight that ``poutine.scale`` gives a datum; without
        the data that are masked.
        """
        nodes = self.trace(self.constrain(z), args)
        with self._own_tensors(z):
            return {name: datum_terms(node) for name, node in nodes.items() if is_datum(node)}

    def log_likelihood(self, z: Tensor, *args: Tree) -> Tensor:
        """As :meth:`data_terms`, of all observed sites together, (data,)."""
        terms_by_site = [terms.reshape(-1) for terms in self.data_terms(z, *args).values()]
        return torch.cat(terms_by_site) if terms_by_site else z.new_zeros(0)

    @_in_its_floats
    def log_base(self, z: Tensor) -> Tensor:
        """Log prior at ``z`` (dim,) with the factors that belong to no datum, constrained space, a float64 scalar."""
        nodes = self.trace(self.constrain(z)).values()
        sampled = [node for node in nodes if node["type"] == "sample" and not is_subsample(node)]
        with self._own_tensors(z):
            return log_prob_total([node for node in sampled if not is_datum(node)], z.device)

    # -- starting points -------------------------------------------------------------------------------------------

    @_in_its_floats
    def sample_prior(self, num: int, seed: int) -> Tensor:
        """Draws from the prior as flat vectors (num, dim); point parameters at their initial values.

        Values whose prior is improper are uniform on (-2, 2) in unconstrained space. Draws at which a parameter of
        another site is impossible are drawn again.
        """
        draws = []
        with seeded(seed, self.device):
            for _ in range(num):
                nodes = self._drawn()
                values = {s.name: nodes[s.name]["value"].detach() for s in self.sites}
                draws.append(self.unconstrain(values))
        return torch.stack(draws)

    @_in_its_floats
    def sample_box(self, num: int, seed: int, radius: float = RADIUS) -> Tensor:
        """Flat vectors (num, dim) uniform on (-radius, radius): starts where draws from a vague prior are far off."""
        with seeded(seed, self.device):
            z = torch.rand(
                num,
                self.dim,
                dtype=self.dtype,
                device=self.device,
            )
        return (2.0 * z - 1.0) * radius

    @_in_its_floats
    def initial(self, values: Mapping[str, Tensor] | None = None, seed: int = 0) -> Tensor:
        """A start for optimisation (dim,): ``values`` where given, points at their own, the rest at prior medians.

        Where the medians of a program together make a parameter impossible, a draw from the prior takes their place.
        """
        fixed = {name: value for name, value in (values or {}).items() if name in self._by_name}
        missing = [site for site in self.sites if site.name not in fixed]
        if not missing:
            return self.unconstrain(fixed)
        start = self.unconstrain(fixed | self._prior_medians(missing, seed))
        if self.impossible(start):
            draw = self.constrain(self.sample_prior(1, seed)[0])
            start = self.unconstrain(draw | fixed)
        return start

    def _prior_medians(self, sites: Sequence[Site], seed: int) -> dict[str, Tensor]:
        """Medians of 25 draws from the prior, of these sites alone: others may be large."""
        draws: dict[str, list[Tensor]] = {site.name: [] for site in sites}
        with seeded(seed, self.device), torch.no_grad():
            for _ in range(25):
                nodes = self._drawn()
                for site in sites:
                    value = nodes[site.name]["value"].to(self.dtype)
                    draws[site.name].append(site.transform.inv(value))
        return {
            site.name: site.transform(torch.stack(draws[site.name]).median(0).values)
            for site in sites
        }

    # -- running the program ---------------------------------------------------------------------------------------
    #
    # Which run is which; all go through `_traced`, which sets the context:
    #
    # `_first_run`   at setup: what sites there are
    # `_drawn`       latent sites drawn from the prior, again where that is impossible
    # `run`          as the program is written, at given values; discrete sites without a value are drawn
    # `_enumerated`  at all values of the discrete sites, an axis for each
    # `trace`        the densities: `run`, or `_enumerated` with the discrete sites summed out
    # `_own_nodes`   the laws of the program's own sites: `run`, or `_enumerated` as it is

    @_in_its_floats
    def trace(self, values: Mapping[str, Value], args: tuple[Tree, ...] = ()) -> Mapping[str, Node]:
        """The nodes by name of one run of the program, with sites and point parameters at ``values``.

        With ``args`` or its own data; with all rows of a plate that draws a subsample, unless :meth:`subsampled`. What
        depends on a discrete site is one factor, in which that site is summed out (:func:`enumeration.summed`).
        """
        if not self.sums_out:
            return self.run(values, args)
        enumerated = self._enumerated(values, args)
        with self._own_tensors(torch.as_tensor(values[self.sites[0].name])):
            return enumeration.summed(enumerated, self.states)

    @_in_its_floats
    def run(self, values: Mapping[str, Value], args: tuple[Tree, ...] = ()) -> Mapping[str, Node]:
        """As :meth:`trace` of the program as it is written: discrete sites without values are drawn from their laws."""
        nodes = self._traced(self.program, values, args).nodes
        self._check_latent_sites(nodes)
        return nodes

    @_in_its_floats
    def draw_discrete(self, z: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
        """The discrete sites given all else at ``z`` (dim,), by torch's present random state; site → (\\*shape), int64.

        Drawn together from their joint law, whose logs are divided by ``temperature``; 0: its most probable values.
        """
        enumerated = self._enumerated(self.constrain(z))
        return enumeration.drawn(enumerated, self.states, temperature)

    @_in_its_floats
    def _enumerated(
        self, values: Mapping[str, Value], args: tuple[Tree, ...] = ()
    ) -> pyro.poutine.Trace:
        """One run at all values of the discrete sites, each along an axis of its own."""
        program = enumeration.enumerating(self.program, self.nesting)
        trace = self._traced(program, values, args)
        self._check_latent_sites(trace.nodes)
        return trace

    def _traced(
        self,
        program: Program,
        values: Mapping[str, Value],
        args: tuple[Tree, ...],
    ) -> pyro.poutine.Trace:
        """The trace of one run of a program with the sites of this one."""
        none = contextlib.nullcontext()
        # other data have no filled rows
        padding = None if args else self.padding
        # plain numbers are made there
        device = none if self.device.type == "cpu" else self.device
        floating = (
            v for v in leaves_of(self.args) if isinstance(v, Tensor) and v.is_floating_point()
        )
        # a BNN states all of its point parameters and needs no store
        store = own_store() if self.owner is None else none
        with store as stored:
            supply = Supply(
                values,
                self._held,
                stored=stored,
                like=next(floating, None),
            )
            handlers = Handlers([*self._idioms(values, args), *many_points()])
            known = values.keys() | self._held.keys()
            modules: contextlib.AbstractContextManager[set[str] | None] = none
            if self.owner is None:
                modules = followed_modules(known)
            with (
                without_validation(),
                pyro.poutine.block(),
                supply,
                self.plates(),
                modules as followed,
                device,
                handlers,
                none if padding is None else padding.told(),
            ):
                trace = pyro.poutine.trace(program).get_trace(*(args or self.args))
            if followed is not None:
                statements = [n for n in trace.param_nodes if is_param_statement(trace.nodes[n])]
                refuse_unfollowed(statements, followed, "model")
            if padding is not None:
                padding.weigh(trace.nodes)
            return trace

    def plates(self) -> contextlib.AbstractContextManager[None]:
        """The context in which the plates of a program, or of its guide, take the rows of this density."""
        if self.rows is not None:
            return some_rows(self.rows.numbers, self.rows.sizes)
        if self._all_rows and self.plate_sizes:
            return all_rows({})
        return contextlib.nullcontext()

    def _own_tensors(self, point: Tensor) -> contextlib.AbstractContextManager[Any]:
        """The context in which tensors that are made belong to the point, where the program writes into any."""
        return OwnTensors(point) if self.habits.writes else contextlib.nullcontext()

    def _idioms(self, values: Mapping[str, Value], args: tuple[Tree, ...]) -> list[CallHandler]:
        """The handlers of what a plain program's Python may do with its own data and tensors, the outermost first."""
        handlers: list[CallHandler] = []
        point = next((value for value in values.values() if isinstance(value, Tensor)), None)
        if point is None:
            return handlers
        if self.habits.writes:
            handlers.append(OwnTensors(point))
        return handlers + self.readers(point, args)

    def readers(self, point: Tensor, args: tuple[Tree, ...] = ()) -> list[CallHandler]:
        """The handlers of Python that reads the program's data, the program's own or a guide's.

        Args:
            point: what is of one point, as a value of a site or a parameter of a guide.
            args: arguments in the place of the data.
        """
        # data that are arguments of a compiled function, and subsamples, are no constants
        whole = self.rows is None and (self._all_rows or not self.plate_sizes)
        if self.owner is None and not args and whole and is_batched(point):
            return [Constants()]
        return []

    def _check_latent_sites(self, nodes: Mapping[str, Node]) -> None:
        """Refuse a run whose latent sites are not those of the first."""
        first_latent = {site.name for site in self.sites if site.kind == "latent"}
        if not first_latent:
            return
        latent = {
            name for name, node in nodes.items() if is_latent(node) and name not in self.states
        }
        # replicates make latent again what holds data
        changed = (first_latent ^ latent) - {*self.derived.replicated}
        if changed:
            names = ", ".join(map(repr, sorted(changed)))
            raise Refused(
                f"the latent sites {names} are in some runs of the program only, so that they have no common density: "
                "sample always, and choose by torch.where"
            )

    def impossible(self, z: Tensor) -> list[guards.Impossible]:
        """The parameters of distributions that lie outside of their supports at ``z`` (dim,)."""
        with torch.no_grad(), guards.recorded_evaluations() as evaluated:
            nodes = self._own_nodes(self.constrain(z))
        with torch.no_grad():
            return _impossible(nodes, evaluated)

    def impossible_at_a_draw(self) -> list[guards.Impossible]:
        """As :meth:`impossible` in a run whose latent sites are drawn from the prior, by torch's present random state.

        Raises:
            ImpossibleParameter: a latent site has no draws there.
        """
        with torch.no_grad(), guards.recorded_evaluations() as evaluated:
            nodes = self.run({}, self._few_rows())
        with torch.no_grad():
            return _impossible(nodes, evaluated)

    def _own_nodes(
        self,
        values: Mapping[str, Value],
        args: tuple[Tree, ...] = (),
    ) -> Mapping[str, Node]:
        """The nodes of a run with the distributions of the program's own sites, at all values of its discrete ones."""
        return self._enumerated(values, args).nodes if self.sums_out else self.run(values, args)

    def _few_rows(self) -> tuple[Tree, ...]:
        """The first of a net's own rows, which show its sites as all do; nothing of a program, which needs its data."""
        if self.owner is None:
            return ()
        return mapped(lambda rows: rows[:_FEW] if isinstance(rows, Tensor) else rows, self.args)

    @_in_its_floats
    def _drawn(self) -> Mapping[str, Node]:
        """The nodes of a run whose latent sites are drawn, again where that makes parameters impossible."""
        refusal: guards.ImpossibleParameter | None = None
        for _ in range(MOST_TRIES):
            try:
                with guards.recorded_evaluations() as evaluated:
                    nodes = self.run({}, self._few_rows())
            except guards.ImpossibleParameter as error:
                refusal = error
                continue
            with torch.no_grad():
                if not _impossible(nodes, evaluated):
                    return nodes
            refusal = None
        if refusal is not None:
            raise refusal
        return nodes


def _count(value: Any) -> int:
    """The number of scalars of a site's value."""
    return torch.as_tensor(value).numel()


def _common_dtype(nodes: Mapping[str, Node], names: Iterable[str]) -> torch.dtype:
    """The floating type that holds the values of all of the sites."""
    return functools.reduce(torch.promote_types, [nodes[name]["value"].dtype for name in names])


def _data_sites(nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """The names of the sites that hold data."""
    return tuple(name for name, node in nodes.items() if is_datum(node))


def _observes(nodes: Mapping[str, Node]) -> bool:
    """Whether a site holds data or is a factor."""
    observed = [node for node in nodes.values() if is_observed(node)]
    return any(not is_deterministic(node) for node in observed)


def _is_value(node: Node) -> bool:
    """Whether the node is a latent site or a point parameter, of real numbers."""
    if (not is_latent(node) and node["type"] != "param") or enumeration.is_discrete(node):
        return False
    return isinstance(node["value"], Tensor) and node["value"].is_floating_point()


def _impossible(
    nodes: Mapping[str, Node], evaluated: Sequence[Distribution]
) -> list[guards.Impossible]:
    """Why the density of a run is zero: parameters of its sites, and of distributions that it evaluates itself."""
    sampled = [
        node for node in nodes.values() if node["type"] == "sample" and not is_subsample(node)
    ]
    places: list[guards.Impossible] = []
    for node in sampled:
        places += guards.impossible(node["fn"], node["name"])
    for fn in evaluated:
        places += guards.impossible(fn)
    # a mask, or torch.where, may leave out what is impossible
    if not places or all(bool(log_prob_sum(node).isfinite()) for node in sampled):
        return []
    return list(dict.fromkeys(places))


def _check_node(node: Node, nodes: Mapping[str, Node], subsampled: Mapping[str, int]) -> None:
    """Refuse rows that would never be seen, data that do not count once, and latent sites without a place."""
    for plate in node.get("cond_indep_stack", ()):
        if plate.size != plate.full_size and plate.name not in nodes:
            raise Refused(
                f"the plate {plate.name!r} was made outside of the program, so its subsample was drawn once "
                "and the other rows would never be seen: make it inside the program"
            )
    if is_replicated(node):
        _check_observed(node)
    if is_latent(node):
        _check_latent(node, subsampled)


def _check_latent(node: Node, subsampled: Mapping[str, int]) -> None:
    """Refuse a latent site that is no tensor, or one of those of the rows of a loop over a subsample."""
    if not isinstance(node["value"], Tensor):
        raise Refused(f"the latent site {node['name']!r} has no tensor as its value")
    if enumeration.is_discrete(node):
        return
    for plate in node.get("cond_indep_stack", ()):
        if plate.size != plate.full_size:
            raise Refused(
                f"the latent site {node['name']!r} has values for {plate.size:,} of the {plate.full_size:,} rows of "
                f"the plate {plate.name!r}, the same in every run, and a posterior of these rows would stand for "
                "all: pass the data of all rows, and batch_size=… to SVI"
            )
        if plate.name in subsampled and not plate.vectorized:
            raise Refused(
                f"the latent site {node['name']!r} is of one row of a loop over the plate {plate.name!r}, which draws "
                f"a subsample: write 'with pyro.plate({plate.name!r}, …) as rows', one site for all rows"
            )


def _local_sites(nodes: Mapping[str, Node], subsampled: Mapping[str, int]) -> dict[str, str]:
    """The continuous latent sites in plates that draw a subsample, each with the name of the first such plate."""
    plates = {}
    for name, node in nodes.items():
        if not is_latent(node) or enumeration.is_discrete(node):
            continue
        names = [frame.name for frame in node["cond_indep_stack"] if frame.name in subsampled]
        if names:
            plates[name] = names[0]
    return plates


def _with_whole_points(sites: Iterable[Site], whole: Mapping[str, Site]) -> tuple[Site, ...]:
    """The sites of some rows, the point parameters among them those of all: a plate takes of them what it needs."""
    placed: list[Site] = []
    start = 0
    for site in sites:
        layout = whole[site.name] if site.kind == "point" else site
        placed.append(dataclasses.replace(layout, start=start))
        start = placed[-1].stop
    return tuple(placed)


def _row_axes(site: Site, node: Node, plates: Collection[str]) -> dict[str, int]:
    """The axes of a latent site in unconstrained space that belong to these plates, counted from the end."""
    if site.kind == "point":
        return {}
    events = node["fn"].event_dim + len(site.unconstrained_shape) - len(site.shape)
    frames = [frame for frame in node["cond_indep_stack"] if frame.vectorized]
    return {frame.name: frame.dim - events for frame in frames if frame.name in plates}


def _check_precision(node: Node) -> None:
    """Refuse a site whose value or distribution is of half precision, which resolves a log density to whole nats."""
    if not is_latent(node) and not is_replicated(node):
        return
    law = elementwise(node["fn"])
    parameters = [getattr(law, name, None) for name in getattr(law, "arg_constraints", ())]
    tensors = [leaf for leaf in (node["value"], *parameters) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(
                f"the site {node['name']!r} is computed in {kind}, too coarse for a log density: pass data of float32, "
                "x.float() and y.float(), and give priors parameters of float32"
            )


def _check_observed(node: Node) -> None:
    """Refuse an observed site that holds no tensor, counts an element twice or has values outside of its support."""
    name = node["name"]
    value = node["value"]
    shape = node["fn"].shape()
    if not isinstance(value, Tensor):
        raise TypeError(
            f"the observed site {name!r} holds a {type(value).__name__}: pass a tensor, torch.as_tensor(…)"
        )
    try:
        count = math.prod(torch.broadcast_shapes(shape, value.shape))
    except RuntimeError:
        count = 0
    if value.numel() > 1 and count != value.numel():
        raise ValueError(
            f"the values of {name!r} have shape {tuple(value.shape)} and their distribution {tuple(shape)}: make the "
            f"two the same, {_remedy_of_shapes(node)}, so that each value counts once"
        )
    # a distribution that does not say its support
    with contextlib.suppress(NotImplementedError, AttributeError):
        if is_masked(node) or not bool(value.isfinite().all()):
            return
        support = node["fn"].support
        if not _bounds(support) and not bool(support.check(value).all()):
            raise ValueError(
                f"values of {name!r} lie outside of the support of their distribution, {support}"
            )


def _remedy_of_shapes(node: Node) -> str:
    """How the values of an observed site and its distribution become of one shape: the plate moved, or y squeezed."""
    for frame in node["cond_indep_stack"]:
        if frame.vectorized and node["value"].ndim < -frame.dim:
            return (
                f"as by a dim of the plate {frame.name!r} that the values have (it counts {frame.size:,} rows "
                f"along dimension {frame.dim})"
            )
    return "as by y.squeeze(-1)"


def is_identity(transform: Transform) -> bool:
    """Whether the site lies on the reals as it is."""
    return getattr(transform, "base_transform", transform) == identity_transform


def bijection(name: str, support: constraints.Constraint | None) -> Transform:
    """From the real line to the support of a site; that of a mixture is the support of its components."""
    inner: Any = support
    events = 0
    while isinstance(inner, constraints.independent):
        events = events + inner.reinterpreted_batch_ndims
        inner = inner.base_constraint
    if isinstance(inner, constraints.MixtureSameFamilyConstraint):
        support = constraints.independent(inner.base_constraint, events)
    if isinstance(inner, type(constraints.positive_definite)):
        return FromCholesky()
    try:
        return biject_to(support)
    except NotImplementedError as error:
        raise ValueError(
            f"torch knows no bijection from the real line to the support of the site {name!r}, {support}: give it "
            "a prior on the reals, the positive numbers, an interval, a simplex, positive definite matrices or "
            "Cholesky factors (LKJCholesky)"
        ) from error


def _bounds(support: constraints.Constraint) -> list[Tensor]:
    """The tensors, if any, that bound a support."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return [value for value in vars(support).values() if isinstance(value, Tensor)]


def running(density: Density, program: Program) -> Density:
    """A density with the data and sites of another, whose program this is."""
    renewed = copy.copy(density)
    renewed.program = program
    renewed.__dict__.pop("owner", None)  # computed from the program
    return renewed
