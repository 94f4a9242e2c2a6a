"""The centre of a Laplace approximation: its sites, its mode, and a check that the precision fits in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyrobnn.core.checks import Refused
from pyrobnn.density.density import Density, Site
from pyrobnn.inference.curvature.head import Split, split
from pyrobnn.inference.curvature.hessian import gradient
from pyrobnn.inference.curvature.jacobian import NetworkJacobian, hooked
from pyrobnn.inference.fitting.batches import forward_in_parts, in_parts
from pyrobnn.inference.fitting.initial import start_values
from pyrobnn.inference.fitting.problem import Callback, Problem, run_subfit
from pyrobnn.inference.fitting.sizes import require
from pyrobnn.inference.fitting.watch import MappedCallback
from pyrobnn.inference.optim.descent import descend, polish
from pyrobnn.inference.point_methods import MAP
from pyrobnn.model import BNN, NET
from pyrobnn.posterior import Posterior
from pyrobnn.wording.findings import Finding, of_meta

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
            raise Refused(f"the last layer, {layer!r}, has no prior: name the sites with subset=(…)")
        return tuple(chosen)
    if unknown := [name for name in subset if name not in latent] or not subset:
        raise ValueError(
            f"'subset' names {unknown if subset else 'nothing'}, the model has: {', '.join(latent)}"
        )
    return tuple(name for name in latent if name in subset)


@torch.no_grad()
def _last_layer(problem: Problem) -> str:
    """Site prefix of the module with parameters of its own that is called last."""
    called: list[str] = []
    net = problem.bnn.eval_net
    handles = [
        module.register_forward_hook(lambda _m, _i, _o, name=name: called.append(name))
        for name, module in net.named_modules()
        if name and any(True for _ in module.parameters(recurse=False))
    ]
    with hooked(handles):
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
    if method.curvature == "ggn":
        rows = problem.num_rows * problem.bnn.forward({}, problem.x[:1]).shape[1]
    require(
        precision_bytes(size, rows, torch.finfo(problem.density.dtype).bits // 8),
        problem.device,
        f"the full precision of {size} parameters",
        "use structure='kron' or 'diag', subset='last_layer', or a tuple of sites",
    )


def precision_bytes(size: int, rows: int, item: int) -> int:
    """Bytes of a full precision of ``size`` parameters; for GGN from ``rows`` data × outputs, else ``rows`` = 0."""
    if 0 < rows < size:  # the rows, their basis, and the Gram matrix
        return 2 * rows * size * item + 3 * rows * rows * 8
    return 4 * size * size * 8  # the matrix, its factor, and two to work in, in float64


def in_standard_units(model: BNN) -> BNN:
    """The model as it sees a problem's data, which are in standard units already."""
    model = copy.copy(model)
    model.standardizer = None
    return model


def find_centre(
    search: MAP,
    problem: Problem,
    source: tuple[Any, Any, Any],
    names: tuple[str, ...],
    *,
    init: Posterior | nn.Module | None,
    seed: int,
    num_steps: int = POLISH_STEPS,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
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
    values = start_values(problem.model, init)
    moving = torch.ones(density.dim, dtype=torch.bool, device=problem.device)
    notes: Sequence[Finding | str] = ()
    if init is None:
        model, x, y = source
        told = [MappedCallback(callback, partial(_in_units, problem)) for callback in callbacks]
        fit = partial(search.fit, seed=seed, device=problem.device, callbacks=told, progress=progress)
        mode = run_subfit(lambda: fit(model, x, y), "Laplace")
        values, notes = {name: value[0, 0] for name, value in mode.draws.items()}, of_meta(mode.meta)
    elif problem.is_bnn:
        for site in density.sites:
            given = site.name in values and (site.kind == "point" or site.name.startswith(NET))
            moving[site.start : site.stop] = not given
    known = all(site.name in values for site in density.sites)
    theta = density.unconstrain(values) if known else density.initial(values, seed)
    if init is None and problem.is_bnn and _is_at_mode(search, mode, problem, theta):
        moving[:] = False
    theta = _polished(problem, theta, moving, num_steps)
    constrained = density.constrain(theta)
    points = {site.name: constrained[site.name].detach() for site in density.sites if site.kind == "point"}
    parts = None
    if problem.is_bnn:
        values = problem.bnn.initial_values() | points | constrained
        params = {name: value.detach() for name, value in values.items() if name.startswith(NET)}
        parts = split(problem.bnn, names, params, problem.x)
        problem = parts.of_features(problem)
    centre = _centre_at(problem, theta, points, names)
    return replace(centre, notes=notes, split=parts)


def _in_units(problem: Problem, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Snapshots in the units of the problem: the search may be given data in standard ones."""
    found = metrics["snapshot"]
    return {**metrics, "snapshot": lambda: replace(found(), model=problem.model)}


def _is_at_mode(search: MAP, mode: Posterior, problem: Problem, theta: Tensor) -> bool:
    """Whether MAP has polished on all of the data, and its constrained space is the unconstrained one."""
    names = [site.name for site in problem.density.sites if site.kind == "latent"]
    # from mini-batches, its own or a loader's, MAP knows no gradient on all of the data
    polished = search.polish_steps > 0 and "gradient_norm" in mode.meta
    return polished and set(names) <= _net_sites(problem) and not bool(problem.density.log_jacobian(theta))


def _centre_at(problem: Problem, theta: Tensor, points: dict[str, Tensor], names: tuple[str, ...]) -> Centre:
    """The centre for the flat vector of a problem whose latent sites come first."""
    held = Density(problem.density.program, problem.density.args, points="held", values=points)
    mode = theta[: held.dim].detach()
    slope = gradient(held, mode) if not problem.is_bnn else -in_parts(held, problem.x, problem.y)(mode)[0]
    if not bool(slope.isfinite().all()):
        site = held.site_of(int((~slope.isfinite()).nonzero()[0]))
        raise FloatingPointError(
            f"the gradient of the log joint is not finite at the centre, in {site!r}: train anew, "
            "or use a larger noise"
        )
    return Centre(problem, held, mode, points, names, slope)


def _polished(problem: Problem, theta: Tensor, moving: Tensor, num_steps: int) -> Tensor:
    """``theta`` at the mode of the unconstrained density in the moving coordinates."""
    if not bool(moving.any()):
        return theta
    density = problem.density
    if problem.is_bnn and problem.num_rows > MANY and bool(moving.all()):
        return descend(in_parts(density, problem.x, problem.y), theta, num_steps)[0]
    index = moving.nonzero().squeeze(1)
    sites = [site for site in density.sites if bool(moving[site.start])]
    log_joint = (
        _noise_density(problem, theta, sites)
        if all(site.name not in _net_sites(problem) for site in sites) and problem.is_bnn
        else density.log_joint
    )

    def of_moving(part: Tensor, *, jacobian: bool) -> Tensor:
        return log_joint(theta.to(part).index_copy(0, index, part), jacobian=jacobian)

    # the few coordinates of the noise are worth float64
    start = theta[index] if log_joint == density.log_joint else theta[index].double()
    part, _ = polish(of_moving, start, num_steps, jacobian=True)
    return theta.index_copy(0, index, part.to(theta))


def _net_sites(problem: Problem) -> set[str]:
    return {site.name for site in problem.density.sites if site.name.startswith(NET)}


def _noise_density(problem: Problem, theta: Tensor, sites: Sequence[Site]) -> Callable[..., Tensor]:
    """Log joint up to a constant while only the likelihood's own parameters move: the network runs once."""
    density, model = problem.density, problem.bnn
    f = forward_in_parts(model, density.constrain(theta), problem.x).double()
    y = problem.y.double() if problem.y.is_floating_point() else problem.y

    def log_joint(z: Tensor, *, jacobian: bool) -> Tensor:
        values = density.constrain(z)
        with pyro.validation_enabled(False):
            total = model.likelihood.log_prob(f, y, values).sum()
            for site in sites:
                if site.kind == "latent":
                    total = total + model.priors[site.name].log_prob(values[site.name]).sum()
                    total = total + density.log_jacobian(z, site)
        return total

    return log_joint
