"""The centre of a Laplace approximation: its sites, its mode, and a check that the precision fits in memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import pyro
import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.findings import Finding, of_meta
from pyrobnn.core.memory import require
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.fitting.batches import forward_in_parts
from pyrobnn.inference.fitting.initial import start_values
from pyrobnn.inference.fitting.problem import Metrics, Problem, run_subfit, weights_of
from pyrobnn.inference.fitting.watch import MappedCallback
from pyrobnn.inference.method import FitRun
from pyrobnn.inference.optim.descent import descend, polish
from pyrobnn.inference.point_methods import MAP
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.density import Site
from pyrobnn.model.weight_priors import first_names
from pyrobnn.posterior.head import Split, split
from pyrobnn.posterior.prediction import hooked

#: L-BFGS steps from the given start to the mode of the unconstrained density
POLISH_STEPS = 200
#: rows of which autograd holds a part at a time, and beyond which a search by mini-batches is not finished by hundreds
#: of passes over all of them
MANY = 5000


@dataclass(frozen=True, eq=False)
class Centre:
    """The point of expansion.

    Attributes: ``problem``; ``density`` with point parameters held; ``mode`` (dim,); ``points``, site → value;
        ``names`` of the sites that vary; ``gradient`` of the log joint at the mode (dim,); ``notes`` of the search;
        ``net_split``, trunk and head of the net: where it has a trunk, problem and density are those of the head.
    """

    problem: Problem
    density: Density
    mode: Tensor
    points: dict[str, Tensor]
    names: tuple[str, ...]
    gradient: Tensor
    notes: Sequence[Finding | str] = ()
    net_split: Split | None = None

    @property
    def bnn(self) -> BNN:
        """The net, or its head; TypeError for a plain program."""
        return self.problem.bnn

    @property
    def values(self) -> dict[str, Tensor]:
        """Site → value at the mode, of point parameters too."""
        return self.density.constrain(self.mode) | self.points

    @property
    def held_names(self) -> list[str]:
        """The sites that do not vary, in the order of the flat vector."""
        varying = set(self.names)
        return [site.name for site in self.density.sites if site.name not in varying]

    def whole_problem(self, x: Tensor) -> Problem:
        """The problem of the whole net at its inputs ``x``, under the priors of this one."""
        return self.problem if self.net_split is None else self.problem.at_inputs(self.net_split, x)

    def moved(self, theta: Tensor, gradient: Tensor) -> Centre:
        """The centre at another point (dim,) of the problem's density, where its log joint has this gradient (dim,)."""
        points = _points_at(self.problem.density, theta)
        density = self.density
        if points:
            points = self.points | points
            density = self.problem.density.holding(points)
        return replace(
            self,
            density=density,
            mode=theta[: density.dim].detach(),  # latent sites come first
            points=points or self.points,
            gradient=_checked_gradient(density, gradient[: density.dim]),
        )

    def root(self, f: Tensor, rows: slice) -> Tensor:
        """Square root (N, width, k) of the likelihood's curvature at outputs (N, width) of these rows."""
        return self.bnn.likelihood.curvature_root(f, self.problem.y[rows], self.values)

    def jacobian(self) -> NetworkJacobian:
        """The network around the mode in the weights that vary, by products of its layers where they are right."""
        weights = [name for name in self.names if name.startswith(NET)]
        jacobian = NetworkJacobian(self.bnn, self.density, self.mode, self.points, weights)
        jacobian.prefer_products(self.problem.x)
        return jacobian


def subset_sites(latent: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Those of the latent sites that the user names, in their order in the flat vector.

    Raises:
        ValueError: an unknown site, or no name.
    """
    unknown = [name for name in names if name not in latent]
    if unknown or not names:
        raise ValueError(
            f"'subset' names {unknown if names else 'nothing'}, the model has: {', '.join(latent)}"
        )
    return tuple(name for name in latent if name in names)


def last_layer_sites(latent: Sequence[str], model: BNN, x: Tensor) -> tuple[str, ...]:
    """Those of the latent sites that belong to the layer which is called last, of a net given ``x`` (N, …).

    Raises:
        Refused: the layer has no prior, or shares a parameter with another, so that no part of the net before it is
            held.
    """
    layer = _last_layer(model, x)
    for name, first in first_names(model.net).items():
        if (NET + name).rpartition(".")[0] == layer and name != first:
            raise Refused(
                f"the last layer, {layer!r}, shares {NET + name!r} with an earlier one, as {NET + first!r}, so that "
                "features would change with it: give it a parameter of its own, or take "
                "pb.Laplace(structure='kron') of all weights, or pb.SWAG"
            )
    chosen = tuple(name for name in latent if name.rpartition(".")[0] == layer)
    if not chosen:
        raise Refused(f"the last layer, {layer!r}, has no prior: name the sites with subset=(…)")
    return chosen


@torch.no_grad()
def _last_layer(model: BNN, x: Tensor) -> str:
    """Site prefix of the module with parameters of its own that is called last."""
    called: list[str] = []
    owners = {
        name: module
        for name, module in model.eval_net.named_modules()
        if name and [*module.parameters(recurse=False)]
    }
    with hooked(owners, lambda name, *_: called.append(name)):
        model.forward({}, x)
    return NET + called[-1] if called else NET.rstrip(".")


def check_memory(density: Density, names: Sequence[str], num_outputs: int) -> None:
    """Refuse a full precision of these sites that does not fit, before any compute.

    Args:
        num_outputs: outputs of the net for all of the data; 0 for the exact Hessian.

    Raises:
        NotEnoughMemory: with the bytes and the alternatives.
    """
    size = sum(site.size for site in density.sites if site.name in set(names))
    item = torch.finfo(density.dtype).bits // 8
    if 0 < num_outputs < size:  # the rows, their basis, and the Gram matrix
        num_bytes = 2 * num_outputs * size * item + 3 * num_outputs * num_outputs * 8
    else:  # the matrix, its factor, and two to work in, in float64
        num_bytes = 4 * size * size * 8
    require(
        num_bytes,
        density.device,
        f"the full precision of {size} parameters",
        "use structure='kron' or 'diag', subset='last_layer', or a tuple of sites",
    )


def in_standard_units(model: BNN) -> BNN:
    """The model as it sees a problem's data, which are in standard units already."""
    model = copy.copy(model)
    model.standardizer = None
    return model


class EvidenceMAP(MAP):
    """MAP that keeps, of several modes, the one with the best evidence; its end is the beginning of other rounds."""

    by_evidence: ClassVar[bool] = True
    leaves_saddles: ClassVar[bool] = False

    @property
    def _title(self) -> str:
        return "MAP"

    @classmethod
    def of(cls, search: MAP) -> EvidenceMAP:
        """The search with the same options."""
        return cls(**{option.name: getattr(search, option.name) for option in fields(search)})


@dataclass(frozen=True, eq=False)
class ModeSearch:
    """How the mode is searched for.

    Attributes: ``map`` and what it is given, the ``source`` (model, x, y): as the user has them, or in the units of a
        problem; ``num_steps`` of L-BFGS on all of the data, after it or from a given start.
    """

    map: MAP
    source: tuple[Any, Any, Any]
    num_steps: int = POLISH_STEPS


@dataclass(frozen=True, eq=False)
class _Start:
    """Site ``values`` that a search has found, or that were given; its ``notes``; ``polished``: they are a mode."""

    values: dict[str, Tensor]
    notes: Sequence[Finding | str] = ()
    polished: bool = False

    def flat(self, density: Density, seed: int) -> Tensor:
        """The unconstrained vector (dim,); sites without a value are where every search begins."""
        if all(site.name in self.values for site in density.sites):
            return density.unconstrain(self.values)
        return density.initial(self.values, seed)


def find_centre(
    search: ModeSearch,
    problem: Problem,
    names: tuple[str, ...],
    run: FitRun,
) -> Centre:
    """The mode in unconstrained space, at which the sites ``names`` are to vary.

    Without ``init`` MAP finds it (in the constrained space of its own definition), and steps of L-BFGS on all of the
    data move on to the mode of the unconstrained density. Given weights stay as they are; the noise they came without
    is optimised.

    Raises:
        FloatingPointError: the log joint is not finite there.
        KeyboardInterrupt: Ctrl-C: without the mode there is nothing to return.
    """
    if run.init is None:
        start = _searched(search, problem, run)
    else:
        start = _Start(start_values(problem.model, run.init))
    density = problem.density
    theta = start.flat(density, run.seed)
    notes = start.notes
    if run.init is not None and problem.is_bnn:
        theta = _with_noise_at_mode(problem, theta, set(start.values), search.num_steps)
    elif not start.polished or bool(density.log_jacobian(theta)):
        # these steps finish the search; how far from a mode they end is measured at the centre
        notes = [note for note in notes if getattr(note, "code", "") != "search_unfinished"]
        theta = _polished(problem, theta, search.num_steps)
    return _centre_at(theta, problem, names, notes)


def _searched(search: ModeSearch, problem: Problem, run: FitRun) -> _Start:
    """The point that MAP finds; its callbacks see the units of the problem."""

    def in_units(metrics: Metrics) -> Metrics:
        # the search may be given data in standard ones
        return {**metrics, "snapshot": lambda: replace(metrics["snapshot"](), model=problem.model)}

    fit = partial(
        EvidenceMAP.of(search.map).fit,
        *search.source,
        seed=run.seed,
        device=problem.device,
        checkpoint=run.checkpoint,
        callbacks=[MappedCallback(callback, in_units) for callback in run.callbacks],
        progress=run.progress,
    )
    posterior = run_subfit(fit, "Laplace")
    # of weights alone, the constrained space in which MAP has polished on all of the data is the unconstrained one
    weights_only = all(
        site.name.startswith(NET) for site in problem.density.sites if site.kind == "latent"
    )
    at_mode = search.map.polish_steps > 0 and "gradient_norm" in posterior.meta
    return _Start(
        {name: value[0, 0] for name, value in posterior.draws.items()},
        of_meta(posterior.meta),
        at_mode and weights_only and problem.is_bnn,
    )


def _polished(problem: Problem, theta: Tensor, num_steps: int) -> Tensor:
    """The mode (dim,) of the unconstrained density, by at most so many steps on all of the data from ``theta``."""
    density = problem.density
    if problem.is_bnn and problem.num_rows > MANY:
        return descend(problem.whole_slope(density), theta, num_steps)[0]
    return polish(
        density.log_joint,
        theta,
        num_steps,
        jacobian=True,
    )[0]


def _centre_at(
    theta: Tensor,
    problem: Problem,
    names: tuple[str, ...],
    notes: Sequence[Finding | str],
) -> Centre:
    """The centre at ``theta`` (dim,), its points held; of a net whose trunk does not vary, the problem of the head."""
    density = problem.density
    constrained = density.constrain(theta)
    points = density.initial_points | _points_at(density, theta)
    net_split = None
    if problem.is_bnn:
        params = weights_of(problem.bnn.initial_values() | points | constrained)
        net_split = split(problem.bnn, names, params, problem.x)
        problem = problem.at_head(net_split)
    held_density = problem.density.holding(points)
    mode = theta[: held_density.dim].detach()  # latent sites come first
    slope = problem.whole_slope(held_density)
    gradient = _checked_gradient(held_density, -slope(mode)[0])
    return Centre(problem, held_density, mode, points, names, gradient, notes, net_split)


def _points_at(density: Density, theta: Tensor) -> dict[str, Tensor]:
    """The point parameters of a density at ``theta`` (dim,), by site."""
    names = [site.name for site in density.sites if site.kind == "point"]
    values = density.constrain(theta) if names else {}
    return {name: values[name].detach() for name in names}


def _checked_gradient(density: Density, gradient: Tensor) -> Tensor:
    """The gradient (dim,) of the log joint; FloatingPointError where it is not finite."""
    if not bool(gradient.isfinite().all()):
        site = density.site_of(int((~gradient.isfinite()).nonzero()[0]))
        raise FloatingPointError(
            f"the gradient of the log joint is not finite at the centre, in {site!r}: train anew, or use a larger noise"
        )
    return gradient.detach()


def _with_noise_at_mode(
    problem: Problem,
    theta: Tensor,
    known: set[str],
    num_steps: int,
) -> Tensor:
    """``theta`` of a given net with what it does not know, the noise, at its mode; the network runs once."""
    density = problem.density
    sites = []
    for site in density.sites:
        trained = site.kind == "point" or site.name.startswith(NET)
        if site.name not in known or not trained:
            sites.append(site)
    if not sites:
        return theta
    index = coordinates_of(sites, theta.device)
    model = problem.bnn
    f = forward_in_parts(model, density.constrain(theta), problem.x).double()
    y = problem.y.double() if problem.y.is_floating_point() else problem.y

    def log_joint(noise: Tensor, *, jacobian: bool) -> Tensor:
        z = theta.to(noise).index_copy(0, index, noise)
        values = density.constrain(z)
        with pyro.validation_enabled(False):
            total = model.likelihood.log_prob(f, y, values).sum()
            for site in sites:
                if site.kind == "latent":
                    total = total + model.priors[site.name].log_prob(values[site.name]).sum()
                    total = total + density.log_jacobian(z, site)
        return total

    # its few coordinates are worth float64
    noise, _ = polish(
        log_joint,
        theta[index].double(),
        num_steps,
        jacobian=True,
    )
    return theta.index_copy(0, index, noise.to(theta))


def coordinates_of(sites: Sequence[Site], device: torch.device) -> Tensor:
    """Where the values of the sites stand in the flat vector, (their size,)."""
    return torch.cat(
        [
            torch.arange(
                site.start,
                site.stop,
                device=device,
            )
            for site in sites
        ]
    )
