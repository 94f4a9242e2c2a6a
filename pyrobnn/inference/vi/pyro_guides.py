"""Pyro's guides, its own (``pyro.infer.autoguide``) and hand-written ones, as families of parameters and fitted."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDelta,
    AutoGuide,
    AutoLaplaceApproximation,
    AutoMessenger,
    AutoNormal,
    AutoNormalizingFlow,
)
from pyro.infer.autoguide.initialization import init_to_value
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pyrobnn.core.checks import Refused, check_type
from pyrobnn.core.private_pyro import copy_of_guide, draws_rows, flat_site, subsample_as
from pyrobnn.core.private_torch import without_fallback_warnings
from pyrobnn.core.seeding import seeded
from pyrobnn.core.threads import process_state
from pyrobnn.inference.fitting.rng import Noise
from pyrobnn.inference.vi.families import Draw, Moments, without_rows
from pyrobnn.inference.vi.row_batches import not_at_rows
from pyrobnn.inference.vi.written_guides import (
    WrittenGuide,
    check_sites,
    check_written,
    has_sites,
    rows_of,
    takes_data,
)
from pyrobnn.model import Density
from pyrobnn.model.compile.trees import leaves_of
from pyrobnn.model.density import Rows, Site
from pyrobnn.model.distribution_kinds import elementwise
from pyrobnn.model.gradient import at_each
from pyrobnn.model.handlers import Supply
from pyrobnn.model.log_terms import log_prob_sum, without_validation
from pyrobnn.model.nodes import Node, is_latent, is_subsample
from pyrobnn.model.torch_calls import Handlers
from pyrobnn.posterior.approximation import state_points

if TYPE_CHECKING:
    from pyrobnn.inference.fitting.loaders import Data

#: a Pyro AutoGuide class, or a function of the model (``functools.partial``) that returns one
GuideFactory = Callable[..., AutoGuide]
#: an AutoGuide, or a hand-written guide as a module
GuideModule = AutoGuide | WrittenGuide


#: part of an error of Pyro's automatic guides → what to do instead
_REMEDIES = {
    "sequential pyro.plate": ": loop over range(…) and not over pyro.plate(…), in the program and in the guide's own "
    "functions, or leave out 'guide' for pyrobnn's families, which take such a loop",
    "pyro.param statements": ": a function in a list of guides may not call pyro.param; write it as a PyroModule "
    "whose parameters are PyroParam, or the whole guide as one function guide(x, y)",
}


class GuideFamily:
    """Any Pyro guide as a family: its parameters as one flat vector, its statements run by ``functional_call``.

    Args:
        given: an AutoGuide class, a function of the model that returns one, an AutoGuide of this model, or a guide
            program ``guide(x, y)``: a function or a module. Modules are copied and begin where they are.
        density: the model.
        loc, init_scale: start (latent dim,) and its sd, handed to an AutoGuide class or a function that makes one,
            where it takes ``init_loc_fn`` or ``init_scale``.
        seed: of the guide's first run.

    Raises:
        TypeError: ``given`` is no guide and makes none.
        Refused: a guide without a density (AutoDelta) or that is fitted by other means (AutoLaplaceApproximation), or
            whose sites are not the model's.
    """

    def __init__(
        self,
        given: Callable[..., Any],
        density: Density,
        loc: Tensor,
        init_scale: float,
        seed: int,
    ) -> None:
        self.density = density
        self.latent = [site for site in density.sites if site.kind == "latent"]
        with seeded(seed, density.device):
            self.guide = _guide_of(given, density, loc, init_scale)
            with _own_params(), pyro.poutine.block(), rows_of(density):
                nodes = _first_nodes(self.guide, density)
        check_sites(nodes, self.latent)
        if isinstance(self.guide, WrittenGuide):
            check_written(nodes, self.latent)
        else:
            _check_determined(nodes, self.latent, self.guide)
        # only AutoNormal declares its normals site by site
        self.factorized = type(self.guide) is AutoNormal
        if isinstance(self.guide, AutoGuide):
            subsample_as(self.guide, density.plate_counts)
        self.guide.requires_grad_(False)
        self.guide.to(density.device)
        self.params = {name: value.detach() for name, value in self.guide.named_parameters()}
        self.size = sum(value.numel() for value in self.params.values())
        if not self.size:
            raise ValueError(f"{_title(self.guide)} has no parameters to fit")

    def initial(self) -> Tensor:
        phi = torch.cat([value.reshape(-1) for value in self.params.values()])
        return phi.to(self.density.dtype)

    def unflatten(self, phi: Tensor) -> dict[str, Tensor]:
        """The guide's parameters by name."""
        parts = phi.split([value.numel() for value in self.params.values()])
        named = zip(self.params.items(), parts, strict=True)
        return {name: flat.reshape(value.shape).to(value.dtype) for (name, value), flat in named}

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        nodes, log_q = _run_guide(self.guide, self.unflatten(phi), self.density, {}, noise.normal)
        values = {site.name: nodes[site.name]["value"] for site in self.latent}
        u = {site.name: site.transform.inv(values[site.name]) for site in self.latent}
        z = torch.cat([value.reshape(-1) for value in u.values()])
        for site in self.latent:
            jacobian = site.transform.log_abs_det_jacobian(u[site.name], values[site.name])
            log_q = log_q + self._factor(site) * jacobian.sum(dtype=torch.float64)
        if not self.factorized:
            return Draw(z, log_q, None, None)
        moments = self._moments(nodes)
        return Draw(z, log_q, moments, self._score(z, moments))

    def _moments(self, nodes: Mapping[str, Node]) -> Moments:
        """Those of AutoNormal: one normal for each site in unconstrained space."""
        normals = [elementwise(nodes[f"{site.name}_unconstrained"]["fn"]) for site in self.latent]
        mean = torch.cat([normal.mean.reshape(-1) for normal in normals])
        var = torch.cat([normal.variance.reshape(-1) for normal in normals])
        entropies = [
            self._factor(site) * normal.entropy().sum(dtype=torch.float64)
            for site, normal in zip(self.latent, normals, strict=True)
        ]
        return Moments(mean, var, torch.stack(entropies).sum())

    def _score(self, z: Tensor, moments: Moments) -> Tensor:
        """The gradient of log q with respect to the draw (dim,), of normals; a constant."""
        factors = [z.new_full((site.size,), self._factor(site)) for site in self.latent]
        return (torch.cat(factors) * (moments.mean - z) / moments.var).detach()

    def _factor(self, site: Site) -> float:
        """How many rows a row of the site stands for."""
        rows = self.density.rows
        return 1.0 if rows is None else rows.factor(site.name)

    def at_rows(self, whole: Density, some: Density) -> GuideFamily:
        family = copy.copy(self)
        family.density = some
        family.latent = [site for site in some.sites if site.kind == "latent"]
        return family

    def of_rows(self, whole: Density, rows: Rows) -> Tensor | None:
        sizes = set(rows.sizes.values())
        # what has a value for each row has those of a batch alone, see `check_at_rows`
        parts = [
            torch.full((value.numel(),), not sizes.isdisjoint(value.shape))
            for value in self.params.values()
        ]
        is_of_row = torch.cat(parts).to(self.density.device)
        return is_of_row if bool(is_of_row.any()) else None

    def check_at_rows(self, some: Density) -> None:
        """Refuse a guide that cannot be run at some rows, or has its parameters of others there.

        Args:
            some: the model at the last rows of each plate.
        """
        if some.rows is not None:
            gradient, shapes = self._run_at_rows(some, some.rows)
            self._check_shapes(some, shapes)
            self._check_own_rows(gradient, some.rows)

    def _run_at_rows(self, some: Density, rows: Rows) -> tuple[Tensor, dict[str, torch.Size]]:
        """The gradient, of all parameters, of a run at some rows, and the shape of what each latent site is there."""

        def total(phi: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            nodes, log_q = _run_guide(self.guide, self.unflatten(phi), some, {}, torch.randn_like)
            values = {
                site.name: nodes[site.name]["value"] for site in some.sites if site.kind == "latent"
            }
            return log_q + sum(value.sum() for value in values.values()), values

        try:
            with seeded(0, some.device):
                gradient, values = torch.func.grad(total, has_aux=True)(self.initial())
        except Refused:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if any(isinstance(module, AutoContinuous) for module in self.guide.modules()):
                without_rows(self, some)
            raise not_at_rows("guide", rows.numbers, rows.sizes, error) from error
        return gradient, {name: value.shape for name, value in values.items()}

    def _check_shapes(self, some: Density, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse a guide whose sites have other rows than the model's."""
        for name, shape in shapes.items():
            site = some.site(name)
            if tuple(shape) != tuple(site.shape):
                raise Refused(
                    f"the guide samples {name!r} of shape {tuple(shape)} where the model takes some rows, and has it "
                    f"of shape {tuple(site.shape)}: sample it in the same plate, and take its parameters by the "
                    "plate's rows, loc[rows]; a guide that draws all rows together cannot be fitted by mini-batches"
                )

    def _check_own_rows(self, gradient: Tensor, rows: Rows) -> None:
        """Refuse a guide that reads the parameters of rows before those that it was run at, the last of each plate."""
        for plate, numbers in rows.numbers.items():
            others = int(numbers.min())
            for name, slope in self.unflatten(gradient).items():
                axes = [axis for axis, size in enumerate(slope.shape) if size == rows.sizes[plate]]
                if any(bool(slope.narrow(axis, 0, others).any()) for axis in axes):
                    raise Refused(
                        f"the guide's parameter {self._name_of(name)!r} has a value for each of {rows.sizes[plate]:,} "
                        f"rows, and the guide reads those of other rows than the {len(numbers):,} of a batch: in the "
                        f"plate {plate!r} state it with event_dim=, which takes the rows of the batch, or let the "
                        "program draw its batches itself (subsample_size=) and take them by the plate's rows"
                    )

    def _name_of(self, parameter: str) -> str:
        """A parameter as the guide's own statement names it."""
        named = self.guide.names if isinstance(self.guide, WrittenGuide) else {}
        return named.get(parameter, parameter)

    def approximation(self, phi: Tensor, layout: Density) -> GuideApproximation:
        return GuideApproximation(layout, self.guide, self.unflatten(phi))


def _first_nodes(guide: GuideModule, density: Density) -> Mapping[str, Node]:
    """The nodes of a guide's first run, which builds its parameters.

    Raises:
        Refused: an automatic guide that cannot be run, such as one of a program with a loop over a plate.
    """
    try:
        return pyro.poutine.trace(guide).get_trace(*density.args).nodes
    except Refused:
        raise
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(guide, AutoGuide):
            raise
        # what follows the first line are the shapes of all sites
        reason = str(error).partition("\n")[0].rstrip(".")
        remedy = next((words for part, words in _REMEDIES.items() if part in reason), "")
        raise Refused(
            f"{_title(guide)} cannot be run with this program ({reason}){remedy}"
        ) from error


class GuideApproximation:
    """A fitted Pyro guide over the model's sites; meets :class:`pyrobnn.posterior.approximation.Approximation`."""

    def __init__(
        self,
        layout: Density,
        guide: GuideModule,
        params: Mapping[str, Tensor],
    ):
        self.layout = layout
        self.sites = [site for site in layout.sites if site.kind == "latent"]
        self._guide = guide
        self._params = {name: value.detach() for name, value in params.items()}

    @torch.no_grad()
    def sample(self, num_draws: int) -> dict[str, Tensor]:
        """Independent draws by site, (num_draws, \\*shape), from torch's present random state."""

        def draw(_: Tensor) -> dict[str, Tensor]:
            nodes, _ = _run_guide(self._guide, self._params, self.layout, {})
            return {site.name: nodes[site.name]["value"] for site in self.sites}

        each = torch.zeros(num_draws)
        try:
            with without_fallback_warnings():
                return torch.func.vmap(draw, randomness="different")(each)
        except RuntimeError:  # its Python depends on what it has drawn
            one_by_one = [draw(point) for point in each]
            return {
                site.name: torch.stack([values[site.name] for values in one_by_one])
                for site in self.sites
            }

    @torch.no_grad()
    def log_prob(self, draws: Mapping[str, Tensor]) -> Tensor:
        """log q of constrained draws (\\*batch, \\*shape); (\\*batch,).

        Raises:
            ValueError: the guide has auxiliary randomness that the draws don't determine.
        """
        site = self.sites[0]
        batch = draws[site.name].shape[: draws[site.name].dim() - len(site.shape)]

        def log_q(values: dict[str, Tensor]) -> Tensor:
            return _run_guide(self._guide, self._params, self.layout, values)[1]

        return at_each(
            log_q,
            {site.name: draws[site.name] for site in self.sites},
            batch=batch,
        )

    @torch.no_grad()
    def draw_rows(self, density: Density, shared: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The sites of other rows beside one draw of what they ``share``, by a guide program that computes them.

        None where the guide cannot: one of parameters for each row of its fit, or that is not given what it needs.
        """
        if not isinstance(self._guide, WrittenGuide):
            return None
        sizes = _sizes_of_rows(self.layout)
        if any(sizes & set(value.shape) for value in self._params.values()):
            return None
        try:
            nodes, _ = _run_guide(self._guide, self._params, density, shared)
        except Exception:  # noqa: BLE001  # whatever a guide does that is not given the outcomes
            return None
        local = [site for site in density.sites if site.name not in shared]
        drawn = {site.name: nodes[site.name]["value"] for site in local if site.name in nodes}
        return drawn if all(drawn[site.name].shape == site.shape for site in local) else None

    def guide(self, *args: Data, **kwargs: Data) -> Any:
        """The Pyro guide with its fitted parameters, and the point parameters; takes the model's arguments."""
        state_points(self.layout)
        # written into the module: a flow reads them once more when its draw's density is asked for
        with torch.no_grad():
            for name, parameter in self._guide.named_parameters():
                parameter.copy_(self._params[name])
        with pyro.settings.context(module_local_params=True):
            return self._guide(*self.layout.args)

    def state(self) -> tuple[str, dict[str, Tensor]]:
        """Name of the guide and its parameters."""
        return _title(self._guide), self._params


def _sizes_of_rows(density: Density) -> set[int]:
    """How many rows the data of a density have, and the plates that draw a subsample."""
    tensors = [leaf for leaf in leaves_of(density.args) if isinstance(leaf, Tensor) and leaf.dim()]
    return {*density.plate_sizes.values(), *map(len, tensors[-1:])}


def _check_determined(nodes: Mapping[str, Node], sites: Iterable[Site], guide: AutoGuide) -> None:
    """Refuse an AutoGuide that draws what the model's sites do not determine: its density of them is not known."""
    parts = [module for module in guide.modules() if isinstance(module, AutoContinuous)]
    determined = {site.name for site in sites} | {flat_site(part)[0] for part in parts}
    unknown = [
        name
        for name, node in nodes.items()
        if is_latent(node) and name.removesuffix("_unconstrained") not in determined
    ]
    if unknown:
        raise Refused(
            f"{_title(guide)} draws {', '.join(map(repr, unknown[:3]))} beside the model's sites, so that its density "
            "of the draws is unknown: use AutoNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal, a flow "
            "(AutoIAFNormal) or a guide program (x, y)"
        )


def _title(guide: GuideModule) -> str:
    return guide.title if isinstance(guide, WrittenGuide) else type(guide).__name__


class _Given(Messenger):
    """Supplies given draws to a guide, through the auxiliary sites that they determine."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        density: Density,
        guide: GuideModule,
    ):
        super().__init__()
        sites = [site for site in density.sites if site.name in values]
        self.values = values
        self.unconstrained = {site.name: site.transform.inv(values[site.name]) for site in sites}
        # whose sites are the model's, of which some may be drawn beside those that are given
        self.is_written = isinstance(guide, WrittenGuide)
        # a guide of several parts has a flat vector for each
        parts = [module for module in guide.modules() if isinstance(module, AutoContinuous)]
        self.flat = dict(map(flat_site, parts))

    def _pyro_sample(self, msg: dict) -> None:
        name = msg["name"]
        if not self.unconstrained or draws_rows(msg["fn"]):
            return
        if name in self.unconstrained:
            # of an AutoGuide a model site is a Delta at the image of the auxiliary draw
            if not isinstance(elementwise(msg["fn"]), dist.Delta):
                msg["value"] = self.values[name]
                msg["done"] = True
            return
        owner = name.removesuffix("_unconstrained")
        if owner in self.unconstrained:
            value = self.unconstrained[owner]
        elif name in self.flat:
            value = torch.cat([self.unconstrained[site].reshape(-1) for site in self.flat[name]])
        elif self.is_written:
            return
        else:
            raise ValueError(
                f"the guide's auxiliary site {name!r} is not determined by the draws, so log_q is unknown"
            )
        msg["value"] = value
        msg["done"] = True


class _FunctionalNoise(TorchFunctionMode):
    """``torch.empty(...).normal_()``, as distributions draw, cannot be batched by vmap: ``normal(like)`` can."""

    def __init__(self, normal: Callable[[Tensor], Tensor]):
        super().__init__()
        self.normal = normal

    def __torch_function__(
        self,
        func: Callable,
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping | None = None,
    ) -> Any:
        if func is Tensor.normal_ and len(args) == 1 and not kwargs:
            return self.normal(args[0])
        return func(*args, **(kwargs or {}))


class _Traced(torch.nn.Module):
    """The guide's run and its log density in one module: a flow reads its parameters only when asked for a density."""

    def __init__(
        self,
        guide: GuideModule,
        density: Density,
        normal: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        self.guide = guide
        self.density = density
        self.normal = normal

    def forward(self, values: Mapping[str, Tensor]) -> tuple[Mapping[str, Node], Tensor]:
        supplied = _Given(values, self.density, self.guide)
        normal = _FunctionalNoise(self.normal)
        rows = rows_of(self.density)
        parameter = next(self.guide.parameters())
        handlers = Handlers(self.density.readers(parameter))
        quiet = without_validation()
        with _own_params(), quiet, pyro.poutine.block(), supplied, rows, normal, handlers:
            nodes = pyro.poutine.trace(self.guide).get_trace(*self.density.args).nodes
            log_q = torch.zeros((), dtype=torch.float64)
            for node in nodes.values():
                if node["type"] == "sample" and not is_subsample(node):
                    log_q = log_q + log_prob_sum(node)
            return nodes, log_q


def _run_guide(
    guide: GuideModule,
    params: Mapping[str, Tensor],
    density: Density,
    values: Mapping[str, Tensor],
    normal: Callable[[Tensor], Tensor] = torch.randn_like,
) -> tuple[Mapping[str, Node], Tensor]:
    """Run the guide with these parameters, at given draws or at fresh ones: its sites and log density."""
    # WORKAROUND(pyro-ppl<=1.9.2): it ties a weak reference, which cannot be pickled, to the tensors it reads: here to
    # views that pass
    named = {f"guide.{name}": value.view_as(value) for name, value in params.items()}
    with process_state():  # the guide's module holds them meanwhile
        return torch.func.functional_call(_Traced(guide, density, normal), named, (values,))


def _guide_of(
    given: Callable[..., Any],
    density: Density,
    loc: Tensor,
    init_scale: float,
) -> GuideModule:
    """The guide that was given, or that is made for the model."""
    if isinstance(given, AutoGuide):
        _check_fittable(given)
        return copy_of_guide(given, partial(_continuous, density))
    made: Any = given
    if isinstance(made, type) and issubclass(made, AutoMessenger):
        continuous = pyro.poutine.block(density.program, hide=[*density.states])
        return WrittenGuide(made(continuous), density)
    if isinstance(given, nn.Module) or takes_data(given):
        return WrittenGuide(given, density)
    try:
        with _own_params():
            return _build(given, density, loc, init_scale)
    except Refused:
        raise
    except Exception:
        # a guide (x, y=None) may be called with one argument too
        if isinstance(given, type) or not has_sites(given, density):
            raise
        return WrittenGuide(given, density)


def _continuous(density: Density, model: Callable[..., Any]) -> Callable[..., Any]:
    """A program with its point parameters at their initial values, without its discrete sites (summed out)."""

    def program(*args: Data, **kwargs: Data) -> Any:
        # WORKAROUND(pyro-ppl<=1.9.2): its modules of local parameters refuse a pyro.param of the model
        with pyro.poutine.block(hide=[*density.states]), Supply({}, density.initial_points):
            return model(*args, **kwargs)

    return program


def _check_fittable(guide: AutoGuide) -> None:
    """Refuse a guide that has no density, or is fitted by other means."""
    if isinstance(guide, (AutoDelta, AutoLaplaceApproximation)):
        better = "MAP" if isinstance(guide, AutoDelta) else "Laplace"
        raise Refused(
            f"{type(guide).__name__} is a point during the fit, not a distribution: use {better}()"
        )


def _build(
    factory: GuideFactory,
    density: Density,
    loc: Tensor,
    init_scale: float,
) -> AutoGuide:
    made = factory.func if isinstance(factory, partial) else factory
    # flows accept an initialisation and ignore it with a warning
    flow = isinstance(made, type) and issubclass(made, AutoNormalizingFlow)
    # point parameters are not the guide's
    z = torch.cat([loc, loc.new_zeros(density.dim - len(loc))])
    known = {"init_loc_fn": init_to_value(values=density.constrain(z)), "init_scale": init_scale}
    accepted = set() if flow else set(inspect.signature(factory).parameters)
    options: dict[str, Any] = {name: value for name, value in known.items() if name in accepted}
    wanted = (
        "'mean_field', 'low_rank', 'full_rank', 'flow', a function of the model alone that makes a Pyro "
        "AutoGuide, such as AutoNormal, an AutoGuide, or a guide program (x, y) that samples the sites of the model"
    )
    try:
        guide = factory(_continuous(density, density.program), **options)
    except TypeError as error:
        raise TypeError(f"'guide' must be {wanted}: {error}") from error
    check_type("guide", guide, AutoGuide, wanted)
    _check_fittable(guide)
    return guide


@contextlib.contextmanager
def _own_params() -> Iterator[None]:
    """Parameters of a guide stay in its module: Pyro's global store is as it was afterwards."""
    with (
        process_state(),
        pyro.get_param_store().scope(),
        pyro.settings.context(module_local_params=True),
    ):
        yield
