"""A Pyro program as a pure function: its log joint density over one flat, unconstrained vector.

The program's handlers run in Python only when the function is called, and once where it is traced (``compile``).
Every latent site takes a slice of the vector through the bijection of its support, so that the density includes the
log-Jacobian; point parameters (``pyro.param``) take slices too when they are free, without prior and without Jacobian.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import pyro
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import Transform, identity_transform

from pyrobnn.core.checks import Refused, check_type
from pyrobnn.core.seeding import seeded, used_devices
from pyrobnn.model import guards
from pyrobnn.model.compile.trees import leaves_of, mapped
from pyrobnn.model.gradient import at_each
from pyrobnn.model.handlers import (
    RADIUS,
    Supply,
    all_rows,
    at_many_points,
    in_float64,
    own_store,
    wide,
)
from pyrobnn.model.nodes import (
    Derived,
    Node,
    datum_terms,
    device_of,
    elementwise,
    is_datum,
    is_deterministic,
    is_latent,
    is_masked,
    is_observed,
    is_replicated,
    is_subsample,
    log_prob_sum,
    without_validation,
)

Program = Callable[..., Any]
#: draws from the prior that may be impossible one after the other
MOST_TRIES = 100
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

    Attributes: ``sites`` (tuple of :class:`Site`), ``dim``, ``dtype``, ``own_dtypes`` (of the sites and point
    parameters as the program has them, by name), ``device``, ``observed`` (names; ``observes``:
    whether there is one, or a factor), ``masked`` (names of the latent sites that a mask touches), ``dependent`` (names
    of those whose support depends on other sites, as that of ``Uniform(0, 1 - a)``), ``plate_sizes`` (of the plates
    that draw a subsample, by name), ``derived`` (what it says beside its density), ``initial_points`` and
    ``constraints`` (of the point parameters, by name).

    A program whose plate draws a subsample (``pyro.plate("rows", N, subsample_size=B)``) is evaluated with all rows of
    that plate, so that every density here is exact; :meth:`subsampled` is the noisy one that the program describes.

    Raises:
        ValueError: a discrete latent site, or a program without any site to infer.
        Refused: a program that subsamples and cannot be run with all rows, or has latent sites for every row.

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

    def __init__(
        self,
        program: Program,
        args: tuple[Any, ...] = (),
        *,
        points: Literal["free", "held"] = "free",
        values: Mapping[str, Tensor] | None = None,
        double: bool = False,
    ):
        self.program = check_type("program", program, Callable, "a Pyro program")
        self.args = check_type("args", args, tuple, "the tuple of its arguments, (x, y)")
        self.points = points
        self._held: dict[str, Tensor] = dict(values or {})
        self.plate_sizes: dict[str, int] = {}
        self._all_rows = True
        self.device = device_of({}, leaves_of(args))
        self.sites: tuple[Site, ...] = ()
        self.in_double = False
        if double:
            self._compute_in_float64()
        nodes = self._first_run()
        self.own_dtypes = {n: node["value"].dtype for n, node in nodes.items() if _is_value(node)}
        if self.owner is None and len(set(self.own_dtypes.values())) > 1:
            self._compute_in_float64()
            nodes = self._first_run()
        self.device = device_of(nodes, leaves_of(args))
        with self.floats():
            for node in nodes.values():
                _check_node(node, nodes, self.plate_sizes)
                if self.owner is None:
                    _check_precision(node)
            self.sites = self._layout(nodes)
        if (
            self.owner is None
        ):  # a program may draw its initial values, pyro.param("w", lambda: torch.randn(3))
            self._held = self.initial_points | self._held
        self.dim = sum(site.size for site in self.sites)
        if not self.dim:
            raise ValueError(
                "the program has no latent site to infer: add a pyro.sample without obs="
            )
        self.dtype = functools.reduce(
            torch.promote_types, (nodes[s.name]["value"].dtype for s in self.sites)
        )
        self.derived = Derived.of(nodes)
        self.observes = any(
            is_observed(node) and not is_deterministic(node) for node in nodes.values()
        )
        self.observed = tuple(n for n, node in nodes.items() if is_datum(node))
        self.masked = tuple(
            s.name for s in self.sites if s.kind == "latent" and is_masked(nodes[s.name])
        )
        self._by_name = {site.name: site for site in self.sites}
        self.dependent: tuple[str, ...] = ()
        self.dependent = self._find_dependent(nodes)

    def _compute_in_float64(self) -> None:
        self.in_double = True
        self.args = mapped(wide, self.args)
        self._held = mapped(wide, self._held)

    def _first_run(self) -> Mapping[str, Node]:
        """The nodes of a run at values that the program draws itself; sizes of plates that subsample are noted."""
        with seeded(0, *used_devices()), torch.no_grad(), all_rows(self.plate_sizes):
            return self._drawn()

    def floats(self) -> contextlib.AbstractContextManager[None]:
        """The context in which this density computes: everything in float64, or the program's own types."""
        return in_float64() if self.in_double else contextlib.nullcontext()

    def double(self) -> Density:
        """This density computed in float64, its vectors float64: for draws that float32 cannot hold."""
        if self.in_double:
            return self
        found = Density(self.program, self.args, points=self.points, values=self._held, double=True)
        found.own_dtypes = self.own_dtypes
        found._all_rows = self._all_rows
        return found

    def holding(self, values: Mapping[str, Tensor]) -> Density:
        """This density with its point parameters held at ``values``."""
        found = Density(
            self.program, self.args, points="held", values=values, double=self.in_double
        )
        found.own_dtypes = self.own_dtypes
        return found

    def as_fine_as(self, draws: Mapping[str, Tensor]) -> Density:
        """This density, or in float64 where ``draws`` of its sites are finer than the program has them."""
        known = [
            (draws[site.name].dtype, self.own_dtypes[site.name])
            for site in self.sites
            if site.name in draws
        ]
        finer = any(
            dtype != own and torch.promote_types(dtype, own) == dtype for dtype, own in known
        )
        return self.double() if finer else self

    @functools.cached_property
    def owner(self) -> Any:
        """The model that holds the program's point parameters itself, as a BNN does; None for a plain program."""
        program = self.program.func if isinstance(self.program, functools.partial) else self.program
        found = getattr(program, "__self__", program)
        return found if getattr(found, "holds_points", False) else None

    @property
    def stochastic(self) -> str | None:
        """Name of the plate that draws a subsample, the first if there are several; None if there is none."""
        return next(iter(self.plate_sizes), None)

    def subsampled(self) -> Density:
        """The density as the program has it: another random subsample at every call, scaled to all rows by Pyro.

        Unbiased, value and gradient. Itself where no plate draws a subsample.
        """
        if self.stochastic is None:
            return self
        noisy = copy.copy(self)
        noisy._all_rows = False
        return noisy

    # -- flat vector ↔ sites ---------------------------------------------------------------------------------------

    @_in_its_floats
    def constrain(self, z: Tensor) -> dict[str, Tensor]:
        """Site values (\\*batch, \\*shape) of flat vectors (\\*batch, dim)."""
        if self.dependent:
            return at_each(lambda one: self._at(one)[0], z, batch=z.shape[:-1])
        return {site.name: site.transform(u) for site, u in self.parts(z)}

    @_in_its_floats
    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Flat vectors (\\*batch, dim) of site values (\\*batch, \\*shape); ValueError of a missing or wrong one."""
        given = {}
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
            given[site.name] = value
        inverse = at_each(self._inverse_of_dependent, given, batch=batch) if self.dependent else {}
        inverse |= {
            s.name: s.transform.inv(given[s.name]) for s in self.sites if s.name not in inverse
        }
        return torch.cat([inverse[s.name].reshape(*batch, s.size) for s in self.sites], -1)

    @_in_its_floats
    def log_jacobian(self, z: Tensor, only: Site | None = None) -> Tensor:
        """log ``|det dT/dz|`` of the latent sites (point parameters have none), or of one; shape (\\*batch,)."""
        if self.dependent and z.dim() > 1:
            return at_each(lambda one: self.log_jacobian(one, only), z, batch=z.shape[:-1])
        transforms = self._at(z)[1] if self.dependent else {}
        total = z.new_zeros(z.shape[:-1])
        for site, u in self.parts(z):
            transform = transforms.get(site.name, site.transform)
            if site.kind == "latent" and only in (None, site) and not is_identity(transform):
                term = transform.log_abs_det_jacobian(u, transform(u))
                total = total + term.reshape(z.shape[:-1] + (-1,)).sum(-1)
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
        parts = z.split([site.size for site in self.sites], -1)
        return [
            (s, part.reshape(z.shape[:-1] + s.unconstrained_shape))
            for s, part in zip(self.sites, parts)
        ]

    # -- supports that depend on other sites: known, and the bijection with them, only while the program runs --------

    @_in_its_floats
    def _find_dependent(self, nodes: Mapping[str, Node]) -> tuple[str, ...]:
        """The latent sites whose support differs between the run of ``nodes`` and one with other values."""
        latent = [site.name for site in self.sites if site.kind == "latent"]
        bounded = {
            name: bounds for name in latent if (bounds := _bounds(nodes[name]["fn"].support))
        }
        if not bounded:
            return ()
        other = self.constrain(self.sample_box(1, seed=1)[0])
        again = self.trace({name: other[name] for name in latent})
        now = {name: _bounds(again[name]["fn"].support) for name in bounded}
        return tuple(
            name for name, known in bounded.items() if not all(map(torch.equal, known, now[name]))
        )

    @_in_its_floats
    def _at(self, z: Tensor) -> tuple[dict[str, Tensor], dict[str, Transform]]:
        """Site values of one vector (dim,), and the bijections of the dependent sites there."""
        parts = {site.name: (site, u) for site, u in self.parts(z)}
        found = {}

        def follow(name: str, fn: Any) -> Tensor:
            found[name] = bijection(name, fn.support)
            return found[name](parts[name][1])

        values: dict[str, Any] = {name: site.transform(u) for name, (site, u) in parts.items()}
        nodes = self.trace(
            values | {name: functools.partial(follow, name) for name in self.dependent}
        )
        return values | {name: nodes[name]["value"] for name in self.dependent}, found

    @_in_its_floats
    def _inverse_of_dependent(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        nodes = self.trace(values)
        return {
            name: bijection(name, nodes[name]["fn"].support).inv(values[name])
            for name in self.dependent
        }

    # -- densities of one vector (dim,); batch them with torch.func.vmap -------------------------------------------

    @_in_its_floats
    def log_joint(self, z: Tensor, *args: Any, jacobian: bool = True) -> Tensor:
        """Log joint density at ``z`` (dim,), accumulated in float64, in nats; a scalar.

        Args:
            z: flat vector.
            args: arguments of the program instead of the stored ones (a mini-batch).
            jacobian: include the log-Jacobian of the bijections (leave it out for a mode in constrained space).
        """
        log_prior, log_likelihood = self.log_parts(z, *args)
        total = log_prior + log_likelihood
        return total + self.log_jacobian(z).double() if jacobian else total

    @_in_its_floats
    def log_parts(self, z: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """Log prior and log likelihood (scaled to the whole data set) in constrained space, float64 scalars."""
        nodes = self.trace(self.constrain(z), args).values()
        prior, likelihood = (
            [n for n in nodes if belongs(n)] for belongs in (is_latent, is_observed)
        )
        return _total(z, prior), _total(z, likelihood)

    @_in_its_floats
    def log_prior(self, z: Tensor, names: Sequence[str]) -> Tensor:
        """Log prior of some latent sites with their log-Jacobian (unconstrained space), a float64 scalar."""
        nodes = self.trace(self.constrain(z))
        jacobians = (self.log_jacobian(z, self.site(name)).double() for name in names)
        return sum(jacobians, _total(z, [nodes[name] for name in names]))

    @_in_its_floats
    def data_terms(self, z: Tensor, *args: Any) -> dict[str, Tensor]:
        """What each datum contributes to the log joint at ``z`` (dim,), site → (\\*axes), or (data,) under a mask.

        Not scaled to the rows that a plate leaves out; with the weight that ``poutine.scale`` gives a datum; without
        the data that are masked.
        """
        nodes = self.trace(self.constrain(z), args)
        return {name: datum_terms(node) for name, node in nodes.items() if is_datum(node)}

    def log_likelihood(self, z: Tensor, *args: Any) -> Tensor:
        """As :meth:`data_terms`, of all observed sites together, (data,)."""
        parts = [terms.reshape(-1) for terms in self.data_terms(z, *args).values()]
        return torch.cat(parts) if parts else z.new_zeros(0)

    @_in_its_floats
    def log_base(self, z: Tensor) -> Tensor:
        """Log prior at ``z`` (dim,) with the factors that belong to no datum, constrained space, a float64 scalar."""
        nodes = self.trace(self.constrain(z)).values()
        return _total(
            z,
            [n for n in nodes if n["type"] == "sample" and not is_subsample(n) and not is_datum(n)],
        )

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
                draws.append(
                    self.unconstrain({s.name: nodes[s.name]["value"].detach() for s in self.sites})
                )
        return torch.stack(draws)

    @_in_its_floats
    def sample_box(self, num: int, seed: int, radius: float = RADIUS) -> Tensor:
        """Flat vectors (num, dim) uniform on (-radius, radius): starts where draws from a vague prior are far off."""
        with seeded(seed, self.device):
            z = torch.rand(num, self.dim, dtype=self.dtype, device=self.device)
        return (2.0 * z - 1.0) * radius

    @_in_its_floats
    def initial(self, values: Mapping[str, Tensor] | None = None, seed: int = 0) -> Tensor:
        """A start for optimisation (dim,): ``values`` where given, points at their own, the rest at prior medians.

        Where the medians of a program together make a parameter impossible, a draw from the prior takes their place.
        """
        given = {name: value for name, value in (values or {}).items() if name in self._by_name}
        missing = [site for site in self.sites if site.name not in given]
        draws: dict[str, list[Tensor]] = {site.name: [] for site in missing}
        with seeded(seed, self.device), torch.no_grad():
            for _ in range(25 if missing else 0):
                nodes = self._drawn()
                for site in missing:  # of these alone: others may be large
                    draws[site.name].append(
                        site.transform.inv(nodes[site.name]["value"].to(self.dtype))
                    )
        medians = {
            s.name: s.transform(torch.stack(draws[s.name]).median(0).values) for s in missing
        }
        start = self.unconstrain(given | medians)
        if missing and self.impossible(start):
            drawn = self.constrain(self.sample_prior(1, seed)[0])
            start = self.unconstrain(drawn | given)
        return start

    # -- running the program ---------------------------------------------------------------------------------------

    @_in_its_floats
    def trace(
        self, values: Mapping[str, Tensor | Callable[[Any], Tensor]], args: tuple[Any, ...] = ()
    ) -> Mapping[str, Node]:
        """The nodes by name of one run of the program, with sites and point parameters at ``values``.

        With ``args`` or its own data; with all rows of a plate that draws a subsample, unless :meth:`subsampled`.
        """
        none = contextlib.nullcontext()
        rows = all_rows({}) if self._all_rows and self.plate_sizes else none
        there = none if self.device.type == "cpu" else self.device  # plain numbers are made there
        given = (v for v in leaves_of(self.args) if isinstance(v, Tensor) and v.is_floating_point())
        # a BNN states all of its point parameters and needs no store
        store = own_store() if self.owner is None else none
        with store as stored:
            supply = Supply(values, self._held, stored=stored, like=next(given, None))
            with without_validation(), pyro.poutine.block(), supply, rows, there, at_many_points():
                nodes = pyro.poutine.trace(self.program).get_trace(*(args or self.args)).nodes
        before = {s.name for s in self.sites if s.kind == "latent"}
        now = {n for n in nodes if is_latent(nodes[n])}
        # replicates make latent again what holds data
        if before and (changed := (before ^ now) - {*self.derived.replicated}):
            what = f"the latent sites {', '.join(map(repr, sorted(changed)))} are in some runs of the program only"
            raise Refused(
                f"{what}, so that they have no common density: sample always, and choose by torch.where"
            )
        return nodes

    def impossible(self, z: Tensor) -> list[guards.Impossible]:
        """The parameters of distributions that lie outside of their supports at ``z`` (dim,)."""
        with torch.no_grad(), guards.evaluations() as evaluated:
            nodes = self.trace(self.constrain(z))
        with torch.no_grad():
            return _impossible(nodes, evaluated)

    @_in_its_floats
    def _drawn(self) -> Mapping[str, Node]:
        """The nodes of a run whose latent sites are drawn, again where that makes parameters impossible."""
        last: guards.ImpossibleParameter | None = None
        for _ in range(MOST_TRIES):
            try:
                with guards.evaluations() as evaluated:
                    nodes = self.trace({})
            except guards.ImpossibleParameter as error:
                last = error
                continue
            with torch.no_grad():
                if not _impossible(nodes, evaluated):
                    return nodes
            last = None
        if last is not None:
            raise last
        return nodes

    def _layout(self, nodes: Mapping[str, Node]) -> tuple[Site, ...]:
        """The latent sites in the order of the program, then the point parameters that are free."""
        params = {name: node for name, node in nodes.items() if node["type"] == "param"}
        self.initial_points = {
            name: node["value"].detach().to(self.device) for name, node in params.items()
        }
        self.constraints = {
            n: node["kwargs"].get("constraint", constraints.real) for n, node in params.items()
        }
        supports = {name: node["fn"].support for name, node in nodes.items() if is_latent(node)}
        if self.points == "free":
            frozen = getattr(self.owner, "frozen", ())
            supports |= {
                name: support for name, support in self.constraints.items() if name not in frozen
            }
        sites: list[Site] = []
        for name, support in supports.items():
            transform = bijection(name, support)
            shape = nodes[name]["value"].shape
            kind: Literal["latent", "point"] = "point" if name in params else "latent"
            start = sites[-1].stop if sites else 0
            sites.append(
                Site(
                    name, shape, torch.Size(transform.inverse_shape(shape)), transform, start, kind
                )
            )
        return tuple(sites)


def _is_value(node: Node) -> bool:
    """Whether the node is a latent site or a point parameter, of real numbers."""
    if not is_latent(node) and node["type"] != "param":
        return False
    return isinstance(node["value"], Tensor) and node["value"].is_floating_point()


def _impossible(nodes: Mapping[str, Node], evaluated: Sequence[Any]) -> list[guards.Impossible]:
    """Why the density of a run is zero: parameters of its sites, and of distributions that it evaluates itself."""
    sampled = [
        node for node in nodes.values() if node["type"] == "sample" and not is_subsample(node)
    ]
    places = [place for node in sampled for place in guards.impossible(node["fn"], node["name"])]
    places += [place for fn in evaluated for place in guards.impossible(fn)]
    # a mask, or torch.where, may leave out what is impossible
    if not places or all(bool(log_prob_sum(node).isfinite()) for node in sampled):
        return []
    return list(dict.fromkeys(places))


def _check_node(node: Node, nodes: Mapping[str, Node], subsampled: Mapping[str, int]) -> None:
    """Refuse rows that would never be seen, data that do not count once, and latent sites without a place."""
    plates = node.get("cond_indep_stack", ())
    if outside := [p.name for p in plates if p.size != p.full_size and p.name not in nodes]:
        raise Refused(
            f"the plate {outside[0]!r} was made outside of the program, so its subsample was drawn once "
            "and the other rows would never be seen: make it inside the program"
        )
    if is_replicated(node):
        _check_observed(node)
    if not is_latent(node):
        return
    if not isinstance(node["value"], Tensor) or node["fn"].support.is_discrete:
        raise Refused(
            f"the latent site {node['name']!r} is discrete: sum it out, it has no gradient"
        )
    if drawn := [p.name for p in plates if p.name in subsampled]:
        raise Refused(
            f"the latent site {node['name']!r} has a value for every row of the plate {drawn[0]!r}, which draws a "
            "subsample: take out subsample_size, and fit all rows at once"
        )


def _check_precision(node: Node) -> None:
    """Refuse a site whose value or distribution is of half precision, which resolves a log density to whole nats."""
    if not is_latent(node) and not is_replicated(node):
        return
    law = elementwise(node["fn"])
    parts = [
        node["value"],
        *(getattr(law, name, None) for name in getattr(law, "arg_constraints", ())),
    ]
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point() and part.dtype.itemsize < 4:
            kind = str(part.dtype).removeprefix("torch.")
            raise TypeError(
                f"the site {node['name']!r} is computed in {kind}, too coarse for a log density: pass data of float32, "
                "x.float() and y.float(), and give priors parameters of float32"
            )


def _check_observed(node: Node) -> None:
    """Whether an observed site holds a tensor of which every element counts once."""
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
        what = f"the values of {name!r} have shape {tuple(value.shape)} and their distribution {tuple(shape)}"
        raise ValueError(
            f"{what}: make the two the same, as by y.squeeze(-1), so that each value counts once"
        )
    with contextlib.suppress(
        NotImplementedError, AttributeError
    ):  # a distribution that does not say its support
        known = (
            not is_masked(node)
            and bool(value.isfinite().all())
            and not _bounds(support := node["fn"].support)
        )
        if known and not bool(support.check(value).all()):
            raise ValueError(
                f"values of {name!r} lie outside of the support of their distribution, {support}"
            )


def _total(z: Tensor, nodes: Sequence[Node]) -> Tensor:
    return sum(map(log_prob_sum, nodes), torch.zeros((), dtype=torch.float64, device=z.device))


def is_identity(transform: Transform) -> bool:
    """Whether the site lies on the reals as it is."""
    return getattr(transform, "base_transform", transform) == identity_transform


def bijection(name: str, support: constraints.Constraint) -> Transform:
    """From the real line to the support of a site; that of a mixture is the support of its components."""
    inner: Any = support
    events = 0
    while isinstance(inner, constraints.independent):
        events = events + inner.reinterpreted_batch_ndims
        inner = inner.base_constraint
    if isinstance(inner, constraints.MixtureSameFamilyConstraint):
        support = constraints.independent(inner.base_constraint, events)
    try:
        return biject_to(support)
    except NotImplementedError as error:
        raise ValueError(
            f"torch knows no bijection from the real line to the support of the site {name!r}, {support}: give it "
            "a prior on the reals, the positive numbers, an interval, a simplex or Cholesky factors (LKJCholesky)"
        ) from error


def _bounds(support: constraints.Constraint) -> list[Tensor]:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return [value for value in vars(support).values() if isinstance(value, Tensor)]
