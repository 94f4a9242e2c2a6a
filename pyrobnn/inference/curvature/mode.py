"""The centre of a Laplace approximation: its sites, its mode, and a check that the precision fits in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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
from pyrobnn.inference.fitting.batches import forward_in_parts, in_parts
from pyrobnn.inference.fitting.initial import start_values
from pyrobnn.inference.fitting.problem import Problem, run_subfit
from pyrobnn.inference.fitting.watch import MappedCallback
from pyrobnn.inference.method import FitRun
from pyrobnn.inference.optim.descent import descend, polish
from pyrobnn.inference.point_methods import MAP
from pyrobnn.model import BNN, NET, Density
from pyrobnn.posterior import Posterior
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
        ``split`` of the net: where it has a trunk, problem and density are those of the head.
    """

    problem: Problem
    density: Density
    mode: Tensor
    points: dict[str, Tensor]
    names: tuple[str, ...]
    gradient: Tensor
    notes: Sequence[Finding | str] = ()
    split: Split | None = None

    @property
    def values(self) -> dict[str, Tensor]:
        """Site → value at the mode, of point parameters too."""
        return self.density.constrain(self.mode) | self.points

    def root(self, f: Tensor, rows: slice) -> Tensor:
        """Square root (N, width, k) of the likelihood's curvature at outputs (N, width) of these rows."""
        return self.problem.bnn.likelihood.curvature_root(f, self.problem.y[rows], self.values)

    def jacobian(self) -> NetworkJacobian:
        """The network around the mode in the weights that vary, by products of its layers where they are right."""
        weights = [name for name in self.names if name.startswith(NET)]
        jacobian = NetworkJacobian(self.problem.bnn, self.density, self.mode, self.points, weights)
        jacobian.prefer_products(self.problem.x)
        return jacobian


def subset_sites(problem: Problem, subset: str | tuple[str, ...]) -> tuple[str, ...]:
    """Names of the latent sites that vary, in the order of the flat vector.

    Raises:
        ValueError: an unknown site, or a last layer without prior.
    """
    latent = [site.name for site in problem.density.sites if site.kind == "latent"]
    if subset == "all":
        return tuple(latent)
    if subset == "last_layer":
        layer = _last_layer(problem)
        chosen = [name for name in latent if name.rpartition(".")[0] == layer]
        if not chosen:
            raise Refused(
                f"the last layer, {layer!r}, has no prior: name the sites with subset=(…)"
            )
        return tuple(chosen)
    unknown = [name for name in subset if name not in latent]
    if unknown or not subset:
        raise ValueError(
            f"'subset' names {unknown if subset else 'nothing'}, the model has: {', '.join(latent)}"
        )
    return tuple(name for name in latent if name in subset)


@torch.no_grad()
def _last_layer(problem: Problem) -> str:
    """Site prefix of the module with parameters of its own that is called last."""
    called: list[str] = []
    owners = {
        name: module
        for name, module in problem.bnn.eval_net.named_modules()
        if name and [*module.parameters(recurse=False)]
    }
    with hooked(owners, lambda name, *_: called.append(name)):
        problem.bnn.forward({}, problem.x[:1])
    return NET + called[-1] if called else NET.rstrip(".")


def check_memory(method: Any, problem: Problem, names: Sequence[str]) -> None:
    """Refuse a full precision that does not fit, before any compute.

    Raises:
        NotEnoughMemory: with the bytes and the alternatives.
    """
    if method.structure != "full":
        return
    size = sum(site.size for site in problem.density.sites if site.name in set(names))
    rows = 0
    if method.curvature != "hessian":
        rows = problem.num_rows * problem.bnn.forward({}, problem.x[:1]).shape[1]
    item = torch.finfo(problem.density.dtype).bits // 8
    if 0 < rows < size:  # the rows, their basis, and the Gram matrix
        num_bytes = 2 * rows * size * item + 3 * rows * rows * 8
    else:  # the matrix, its factor, and two to work in, in float64
        num_bytes = 4 * size * size * 8
    require(
        num_bytes,
        problem.device,
        f"the full precision of {size} parameters",
        "use structure='kron' or 'diag', subset='last_layer', or a tuple of sites",
    )


def in_standard_units(model: BNN) -> BNN:
    """The model as it sees a problem's data, which are in standard units already."""
    model = copy.copy(model)
    model.standardizer = None
    return model


class CentreSearch(MAP):
    """MAP that keeps, of several modes, the one with the best evidence."""

    by_evidence: ClassVar[bool] = True

    @property
    def _title(self) -> str:
        return "MAP"

    @classmethod
    def of(cls, search: MAP) -> CentreSearch:
        """The search with the same options."""
        return cls(**{option.name: getattr(search, option.name) for option in fields(search)})


def find_centre(
    search: MAP,
    problem: Problem,
    source: tuple[Any, Any, Any],
    names: tuple[str, ...],
    run: FitRun,
    num_steps: int,
) -> Centre:
    """The mode in unconstrained space.

    Without ``init`` MAP finds it (in the constrained space of its own definition), and ``num_steps`` of L-BFGS on all
    of the data move on to the mode of the unconstrained density. Given weights stay as they are; the noise they came
    without is optimised.

    Raises:
        FloatingPointError: the log joint is not finite there.
        KeyboardInterrupt: Ctrl-C: without the mode there is nothing to return.
    """
    density = problem.density
    bnn = problem.is_bnn
    values = start_values(problem.model, run.init)
    notes: Sequence[Finding | str] = ()
    polished = False
    if run.init is None:
        map_fit = _map_fit(search, problem, source, run)
        values = {name: value[0, 0] for name, value in map_fit.draws.items()}
        notes = of_meta(map_fit.meta)
        polished = search.polish_steps > 0 and _is_unconstrained_mode(problem, map_fit)
    known = all(site.name in values for site in density.sites)
    theta = density.unconstrain(values) if known else density.initial(values, run.seed)
    if bnn and run.init is not None:
        theta = _with_noise_at_mode(problem, theta, set(values), num_steps)
    elif not polished or bool(density.log_jacobian(theta)):
        # these steps finish the search; how far from a mode they end is measured at the centre
        notes = [note for note in notes if getattr(note, "code", "") != "search_unfinished"]
        if bnn and problem.num_rows > MANY:
            theta, _ = descend(in_parts(density, problem.x, problem.y), theta, num_steps)
        else:
            theta, _ = polish(
                density.log_joint,
                theta,
                num_steps,
                jacobian=True,
            )
    constrained = density.constrain(theta)
    points = dict(density.initial_points)
    for site in density.sites:
        if site.kind == "point":
            points[site.name] = constrained[site.name].detach()
    parts = None
    if bnn:
        values = problem.bnn.initial_values() | points | constrained
        params = {name: value.detach() for name, value in values.items() if name.startswith(NET)}
        parts = split(problem.bnn, names, params, problem.x)
        problem = problem.at_head(parts)
    centred = problem.density.holding(points)
    mode = theta[: centred.dim].detach()  # latent sites come first
    gradient = _checked_gradient(problem, centred, mode)
    return Centre(problem, centred, mode, points, names, gradient, notes, parts)


def _map_fit(
    search: MAP,
    problem: Problem,
    source: tuple[Any, Any, Any],
    run: FitRun,
) -> Posterior:
    """The point that MAP finds; its callbacks see the units of the problem."""
    mapped = [MappedCallback(callback, partial(_in_units, problem)) for callback in run.callbacks]
    fit = partial(
        CentreSearch.of(search).fit,
        *source,
        seed=run.seed,
        device=problem.device,
    )
    return run_subfit(lambda: fit(callbacks=mapped, progress=run.progress), "Laplace")


def _is_unconstrained_mode(problem: Problem, map_fit: Posterior) -> bool:
    """Whether MAP has polished on all of the data, in a constrained space that is the unconstrained one."""
    latent = [site.name for site in problem.density.sites if site.kind == "latent"]
    weights_only = all(name.startswith(NET) for name in latent)
    return problem.is_bnn and weights_only and "gradient_norm" in map_fit.meta


def _checked_gradient(problem: Problem, density: Density, mode: Tensor) -> Tensor:
    """The gradient (dim,) of the log joint at the mode; FloatingPointError where it is not finite."""
    if problem.is_bnn:
        gradient = -in_parts(density, problem.x, problem.y)(mode)[0]
    else:
        gradient = torch.func.grad(density.log_joint)(mode)
    if not bool(gradient.isfinite().all()):
        site = density.site_of(int((~gradient.isfinite()).nonzero()[0]))
        raise FloatingPointError(
            f"the gradient of the log joint is not finite at the centre, in {site!r}: train anew, or use a larger noise"
        )
    return gradient.detach()


def _in_units(problem: Problem, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Snapshots in the units of the problem: the search may be given data in standard ones."""
    return {**metrics, "snapshot": lambda: replace(metrics["snapshot"](), model=problem.model)}


def _with_noise_at_mode(
    problem: Problem,
    theta: Tensor,
    known: set[str],
    num_steps: int,
) -> Tensor:
    """``theta`` of a given net with what it does not know, the noise, at its mode; the network runs once."""
    density = problem.density
    model = problem.bnn
    sites = []
    for site in density.sites:
        trained = site.kind == "point" or site.name.startswith(NET)
        if site.name not in known or not trained:
            sites.append(site)
    if not sites:
        return theta
    index = torch.cat(
        [
            torch.arange(
                site.start,
                site.stop,
                device=theta.device,
            )
            for site in sites
        ]
    )
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
