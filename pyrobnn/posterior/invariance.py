"""How draws are tested against their posterior without a reference: Stein's identities, and Hamiltonian moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyrobnn.core.seeding import generator
from pyrobnn.model import BNN, Density, check_data
from pyrobnn.model.compile import compiled
from pyrobnn.model.gradient import Gradient, batched_gradient, runs_at_once
from pyrobnn.posterior.approximation import PosteriorLike, density_of
from pyrobnn.posterior.chain_groups import Groups, net_quantities, site_quantities
from pyrobnn.posterior.prediction import widest_layer
from pyrobnn.posterior.probes import probes_by_region
from pyrobnn.posterior.short_chains import (
    HamiltonianPath,
    chains_per_group,
    evenly,
    seconds_per_leapfrog,
    starts_elsewhere,
)

#: of each site, random directions and single scalars (those with the strongest mean) along which the score is kept
NUM_DIRECTIONS = 4
NUM_SINGLE = 4
#: draws that are moved, trajectories of each, and leapfrog steps of one
NUM_DRAWS = 128
NUM_TRAJECTORIES = 10
NUM_STEPS = 6
#: most work of the moves, data × weights × gradients; less for chains, which other checks judge too
_MAX_WORK = 2e10
_MAX_WORK_OF_CHAINS = 4e9
#: draws × data × the widest layer (of a program: its scalars) up to which the gradient of the moves is traced
_MAX_TRACED = 4_000_000
#: groups of short chains that begin at an approximation's draws (twice as many where a leapfrog is cheap), and
#: elsewhere; the most chains of one
_NUM_GROUPS = 12
_NUM_ELSEWHERE = 4
_LARGEST_GROUP = 8
#: seconds that these chains may take, about, and the leapfrog steps below which they would show nothing
_BUDGET = 2.0
_FEWEST_LEAPFROGS = 120
#: scalars of a program's site that are judged one by one, as coefficients are read; more are judged together
_MOST_ALONE = 10
#: draws of the approximation of which the function is taken
_COMPARED = 1000


def posterior_density(
    posterior: PosteriorLike, x: Tensor | None, y: Tensor | None
) -> Density | None:
    """The density that the draws are of; None for a linearised net, or one of layers in training mode."""
    model = posterior.model
    if isinstance(model, BNN):
        if posterior.network is not None or model.stochastic_layers():
            return None
        x, y = check_data(model, x, y, next(iter(posterior.draws.values())).device)
    fixed = {name: posterior.draws[name][0, 0] for name in posterior.meta.get("point_sites", ())}
    return density_of(posterior, model, (x, y), fixed)


def stein_statistics(
    posterior: PosteriorLike, density: Density | None, y: Tensor | None
) -> xr.Dataset | None:
    r"""Virial and score of at most 200 thinned draws, by site, in unconstrained space.

    .. math:: E[-(z - a) \cdot \nabla \log p(z)] = d, \qquad E[\nabla \log p(z)] = 0

    hold for draws z of p and no others: the first says that they spread as p does (a is the mean of their chain), the
    second that they lie where p does.

    Args:
        posterior: of a BNN or a plain program.
        density: of :func:`posterior_density`.
        y: the targets that it was fitted to; None for a program that was given none.

    Returns:
        Dataset with ``virial`` (chain, draw, site), ``score`` (chain, draw, site, direction), the gradient along random
        signs times the draws' sd and then along the single scalars whose mean gradient is largest in its sd (zero where
        a site has fewer), and ``size`` (site,), the unconstrained scalars of each; None where the draws are
        not of this density (a linearised net, layers in training mode), fewer than 40, or the gradients too dear.

    References:
        Measuring sample quality with Stein's method (Gorham & Mackey, 2015) https://arxiv.org/abs/1506.03039
    """
    if density is None:
        return None
    # a program may take its data as a dictionary
    num_rows = len(y) if isinstance(y, Tensor) and y.dim() else posterior.meta.get("num_data") or 1
    work = density.dim * max(num_rows, 1)
    thinned = posterior.thin(max(1, int(min(200, 1e12 // work)) // posterior.num_chains))
    if thinned.num_chains * thinned.num_draws < 40:
        return None
    z = density.unconstrain(thinned.draws)
    mean = density.unconstrain(posterior.thin(1000).draws).double().mean(1, keepdim=True)
    g = _gradients(density, z, at_once=max(1, 2**28 // work))
    return _statistics_by_site(density, z.double(), mean, g)


def _gradients(density: Density, z: Tensor, at_once: int) -> Tensor:
    """Gradients of the log joint at points (chain, draw, dim), in float64 and in batches."""
    gradient, _ = batched_gradient(density.log_joint, z[0, :2])
    batches = z.reshape(-1, density.dim).split(at_once)
    gradients = torch.cat([gradient(batch)[0] for batch in batches])
    return gradients.detach().double().reshape(z.shape)


def _statistics_by_site(
    density: Density,
    z: Tensor,
    mean: Tensor,
    g: Tensor,
) -> xr.Dataset:
    """The dataset of :func:`stein_statistics`, of points (chain, draw, dim), their chains' means and gradients."""
    pull = -(z - mean) * g
    bits = torch.randint(0, 2, (NUM_DIRECTIONS, density.dim), generator=generator(0))
    signs = bits * 2.0 - 1.0
    directions = signs.to(g) * z.std((0, 1))
    sites = [site for site in density.sites if site.kind == "latent"]
    virials = []
    scores = []
    for site in sites:
        columns = slice(site.start, site.stop)
        virials.append(pull[..., columns].sum(-1))
        along_signs = g[..., columns] @ directions[:, columns].T
        scores.append(torch.cat([along_signs, _strongest_columns(g[..., columns])], -1))
    dims = ("chain", "draw", "site")
    return xr.Dataset(
        {
            "virial": (dims, torch.stack(virials, -1).cpu().numpy()),
            "score": ((*dims, "direction"), torch.stack(scores, 2).cpu().numpy()),
            "size": ("site", np.array([site.size for site in sites])),
        },
        coords={"site": [site.name for site in sites]},
    )


def _strongest_columns(g: Tensor) -> Tensor:
    """The columns of gradients (chain, draw, scalar) whose mean is farthest from zero in its sd; zeros if too few."""
    sd = g.std((0, 1))
    size = torch.where(sd > 0.0, g.mean((0, 1)).abs() / sd, torch.zeros_like(sd))
    farthest = g[..., size.topk(min(NUM_SINGLE, len(size))).indices]
    return torch.nn.functional.pad(farthest, (0, NUM_SINGLE - farthest.shape[-1]))


class _Plan(NamedTuple):
    """Short chains that the budget pays for.

    Args:
        num_groups: groups that begin at the approximation's draws.
        group_size: chains of every group.
        num_leapfrogs: leapfrog steps of one chain, about.
    """

    num_groups: int
    group_size: int
    num_leapfrogs: float


class _Probes(NamedTuple):
    """Inputs (probe, …) at which functions are compared, of unit exposure, and the region that each lies in."""

    x: Tensor
    regions: list[str]


def function_beside_posterior(
    posterior: PosteriorLike,
    x: Tensor,
    y: Tensor,
    probe_x: Tensor,
) -> xr.Dataset | None:
    """A net's function under the draws of an approximation, and under short chains that begin at these draws.

    The chains sample the posterior of the net itself, even where predictions are those of a linearised net. They run
    until they have arrived, and for two seconds at most by a rule of thumb that is the same on every machine
    (:class:`~pyrobnn.posterior.chain_groups.Groups`). Some of the groups begin at likely draws from the prior.

    Args:
        posterior: of a BNN, draws of any method that makes no chains.
        x, y: the data that it was fitted to.
        probe_x: inputs (probe, …) that are compared beside those of :func:`~pyrobnn.posterior.probes.probes_by_region`.

    Returns:
        Dataset with ``approximate`` (approximate_draw, region_probe, output) and ``moved`` (moved_draw, region_probe,
        output), values of the function in the units of y; ``moved_start`` (moved_draw,), which point the chain of a
        draw began at; of a linearised net ``started`` (started_draw, region_probe, output), those of the net itself at
        the draws, where the chains begin; ``region_x`` (region_probe, feature) and ``region``; ``arrived`` (),
        ``starts`` (), different points that the chains began at, ``transitions``, ``nested_rhat``, ``drift`` and
        ``memory``. None where the net is in training mode, or too few steps can be paid for.
    """
    plain = replace(posterior, network=None, moments=None)
    density = posterior_density(plain, x, y)
    if density is None:
        return None
    plan = _plan(density, len(x))
    if plan.num_leapfrogs < _FEWEST_LEAPFROGS:
        return None
    probes = _probes(cast(BNN, posterior.model), x, probe_x)
    starts = _starts_at_draws(posterior, density, plan.num_groups)
    groups = _moved_groups(density, starts, plan, probes.x)
    f_moved = _moved_posterior(plain, density, groups).function(probes.x)
    moved_start = _start_of_chains(starts, groups).repeat_interleave(f_moved.shape[1])
    num_draws = max(1, _COMPARED // posterior.num_chains)
    f = posterior.thin(num_draws).function(probes.x)
    region_x = probes.x.reshape(len(probes.x), -1)
    dataset = xr.Dataset(
        {
            "approximate": (("approximate_draw", "region_probe", "output"), _by_draw(f)),
            "moved": (("moved_draw", "region_probe", "output"), _by_draw(f_moved)),
            "moved_start": ("moved_draw", moved_start.numpy()),
            "region": ("region_probe", np.array(probes.regions)),
            "region_x": (("region_probe", "feature"), region_x.cpu().numpy()),
            "arrived": int(groups.arrived),
            "starts": len(torch.unique(starts, dim=0)),
            **_progress(groups),
        }
    )
    if posterior.network is not None:
        f_started = plain.thin(num_draws).function(probes.x)
        dataset["started"] = (("started_draw", "region_probe", "output"), _by_draw(f_started))
    return dataset


def sites_beside_posterior(
    posterior: PosteriorLike, density: Density, y: Tensor | None
) -> xr.Dataset | None:
    """A program's sites under the draws of an approximation, and under short chains that have arrived.

    As :func:`function_beside_posterior`, within two seconds that are forecast from the operations of the program's
    gradient. A prior of a program may be vague, so that no chains begin at its draws: a mode that all draws of the
    approximation miss is not found.

    Args:
        posterior: of a plain program, independent draws.
        density: of :func:`posterior_density`.
        y: the targets that it was fitted to.

    Returns:
        The dataset of :func:`function_beside_posterior`, with a probe for every scalar of the latent sites, of one
        output, and as its region its site's name, with its index where a site has few. None where the density is
        another one at every step, the gradient too dear, or the chains have not arrived: :func:`moved_functions` tests
        such draws.
    """
    if density.stochastic is not None:
        return None
    starts = _starts_at_draws(posterior, density, 2 * _NUM_GROUPS)
    num_rows = len(y) if isinstance(y, Tensor) and y.dim() else 1
    work = density.dim * num_rows * len(starts) * _LARGEST_GROUP * _FEWEST_LEAPFROGS
    if work > _MAX_WORK or not runs_at_once(density.log_joint, starts[:2]):
        return None
    groups = Groups(density, starts, 0, _LARGEST_GROUP, site_quantities(density), 0)
    affordable = _BUDGET / groups.seconds_per_leapfrog
    if affordable < _FEWEST_LEAPFROGS:
        return None
    with torch.no_grad():
        groups.run(lambda chains: chains.num_leapfrogs / affordable)
    if not groups.arrived:
        return None
    moved = _moved_posterior(posterior, density, groups)
    moved_start = _start_of_chains(starts, groups).repeat_interleave(len(groups.window))
    thinned = posterior.thin(max(1, _COMPARED // posterior.num_chains))
    dims = ("region_probe", "output")
    return xr.Dataset(
        {
            "approximate": (
                ("approximate_draw", *dims),
                _by_draw(_latent_values(density, thinned)),
            ),
            "moved": (("moved_draw", *dims), _by_draw(_latent_values(density, moved))),
            "moved_start": ("moved_draw", moved_start.numpy()),
            "region": ("region_probe", np.array(_latent_names(density))),
            "arrived": 1,
            "starts": len(torch.unique(starts, dim=0)),
            **_progress(groups),
        }
    )


def _progress(groups: Groups) -> dict[str, float]:
    """How near the chains are to convergence, and after how many transitions."""
    return {
        "nested_rhat": groups.arrival.nested_rhat,
        "drift": groups.arrival.shift,
        "memory": groups.arrival.memory,
        "transitions": len(groups.chains.visits),
    }


def _plan(density: Density, num_rows: int) -> _Plan:
    """As many chains, and steps of each, as the budget pays for."""
    size = chains_per_group(density, num_rows, _NUM_GROUPS + _NUM_ELSEWHERE)
    # many groups show more of the draws than many chains of a group
    num_groups = _NUM_GROUPS if size <= _LARGEST_GROUP else 2 * _NUM_GROUPS
    size = min(size, _LARGEST_GROUP)
    num_chains = size * (num_groups + _NUM_ELSEWHERE)
    return _Plan(num_groups, size, _BUDGET / seconds_per_leapfrog(density, num_rows, num_chains))


def _probes(model: BNN, x: Tensor, probe_x: Tensor) -> _Probes:
    """Inputs in every region of the data's ``x`` (row, …), then those of the user."""
    region_x, regions = probes_by_region(x)
    region_x = model.comparable(torch.cat([region_x, probe_x.to(region_x)]))
    return _Probes(region_x, regions + ["user"] * len(probe_x))


def _starts_at_draws(posterior: PosteriorLike, density: Density, count: int) -> Tensor:
    """Positions (group, dim) of draws that are evenly spread over all of them."""
    draws = {site.name: posterior.draws[site.name].flatten(0, 1) for site in density.sites}
    return evenly(density.unconstrain(draws), count)


def _moved_groups(
    density: Density,
    starts: Tensor,
    plan: _Plan,
    x: Tensor,
) -> Groups:
    """Groups of chains that begin at ``starts`` (group, dim) or elsewhere, after their moves; ``x`` are the probes."""
    all_starts = torch.cat([starts, starts_elsewhere(density, _NUM_ELSEWHERE, 0)])
    model = cast(BNN, density.owner)
    inputs = model.cast_inputs(model.standard_inputs(x.to(density.device)))
    quantities = net_quantities(density, inputs)
    groups = Groups(density, all_starts, _NUM_ELSEWHERE, plan.group_size, quantities, 0)
    with torch.no_grad():
        groups.run(lambda chains: chains.num_leapfrogs / plan.num_leapfrogs)
    return groups


def _moved_posterior(
    posterior: PosteriorLike,
    density: Density,
    groups: Groups,
) -> PosteriorLike:
    """The posterior with the chains' draws in place of its own; sites that the density holds fixed keep their value."""
    positions = torch.stack([visit.z for visit in groups.window], 1)
    z = positions[groups.mask() & _counted(groups)]
    moved = density.constrain(z)
    fixed = {}
    for name, value in posterior.draws.items():
        if name not in moved:
            fixed[name] = value[:1, :1].expand(*z.shape[:2], *value.shape[2:])
    return replace(posterior, draws=posterior.draws | moved | fixed)


def _start_of_chains(starts: Tensor, groups: Groups) -> Tensor:
    """Which point every chain whose draws count began at, (chain,): groups that began at one draw share a number."""
    _, number = torch.unique(starts, dim=0, return_inverse=True)
    elsewhere = len(starts) + torch.arange(int(groups.is_elsewhere.sum()))
    by_group = torch.cat([number.cpu(), elsewhere])
    return by_group.repeat_interleave(groups.size)[groups.mask() & _counted(groups)]


def _by_draw(f: Tensor) -> np.ndarray:
    """Values of a function (chain, draw, probe, output) as (draw, probe, output), in float64."""
    return f.double().flatten(0, 1).cpu().numpy()


def _counted(groups: Groups) -> Tensor:
    """The chains (chain,) whose draws count: those from the approximation's draws, or all once they have arrived."""
    if groups.arrived:
        return torch.ones_like(groups.mask())
    return ~groups.is_elsewhere.repeat_interleave(groups.size)


def moved_functions(
    posterior: PosteriorLike,
    density: Density | None,
    y: Tensor | None,
    probe_x: Tensor | None,
) -> xr.Dataset | None:
    r"""The function at the probes and the log density of 128 or 256 thinned draws, before and after they are moved.

    Each draw takes ten trajectories of six leapfrog steps, accepted or rejected by the Metropolis rule, in units of the
    draws' own standard deviations. Such moves leave the model's posterior p invariant: draws of p stay draws of p, and
    those of another distribution come nearer to it with every move. The change of the function is how far it was off,
    or less if the moves are too short for the distance: from a narrow mode some draws find the wide one around it.

    Args:
        posterior: of a BNN: chains, or draws of an approximation with its density; of a program: these alone.
        density: of :func:`posterior_density`.
        y: the targets that it was fitted to.
        probe_x: inputs (probe, …); None of a program, whose sites take the function's place, (site scalar, 1).

    Returns:
        Dataset with ``before`` and ``after`` (chain, draw, probe, output), ``density_before`` and ``density_after``
        (chain, draw), and the mean ``acceptance`` (); None where the draws are not of this density (a linearised net,
        layers in training mode), fewer than 200, or the gradients too dear.

    References:
        MCMC using Hamiltonian dynamics (Neal, 2011) https://arxiv.org/abs/1206.1901
    """
    is_chains = posterior.meta.get("kind") == "chains"
    judged = posterior.approximation is not None or (is_chains and probe_x is not None)
    if posterior.num_chains * posterior.num_draws < 200 or not judged:
        return None
    num_rows = len(y) if isinstance(y, Tensor) and y.dim() else 1
    num_draws = 0 if density is None else _draws_to_move(density, num_rows, is_chains)
    if density is None or num_draws == 0:
        return None
    moves = _moves(density, posterior.thin(max(1, num_draws // posterior.num_chains)), num_rows)
    dims = ("chain", "draw", "probe", "output")
    dataset = xr.Dataset({"acceptance": moves.acceptance})
    for when, state in (("before", moves.before), ("after", moves.after)):
        draws = state.posterior
        f = _latent_values(density, draws) if probe_x is None else draws.function(probe_x)
        dataset[when] = (dims, f.double().cpu().numpy())
        dataset[f"density_{when}"] = (dims[:2], state.log_density.cpu().numpy())
    return dataset


@dataclass(frozen=True, eq=False)
class _State:
    """Draws as a posterior, and their log densities (chain, draw) in float64."""

    posterior: PosteriorLike
    log_density: Tensor


@dataclass(frozen=True, eq=False)
class _Moves:
    """Draws before and after their Hamiltonian moves, and the share of the moves that was accepted."""

    before: _State
    after: _State
    acceptance: float


def _moves(density: Density, posterior: PosteriorLike, num_rows: int) -> _Moves:
    """Each draw of the posterior, moved; its density is of so many rows."""
    start = density.unconstrain(posterior.draws).detach()
    flat = start.reshape(-1, density.dim).contiguous()
    gradient = _gradient_of_moves(density, flat, num_rows)
    end, acceptance = _move_points(gradient, flat, flat.std(0))
    draws = posterior.draws | density.constrain(end.reshape(start.shape))

    def log_density(z: Tensor) -> Tensor:
        return gradient(z)[1].detach().double().reshape(start.shape[:2])

    before = _State(posterior, log_density(flat))
    after = _State(replace(posterior, draws=draws), log_density(end))
    return _Moves(before, after, acceptance)


def _gradient_of_moves(density: Density, z: Tensor, num_rows: int) -> Gradient:
    """Gradient and value of the log joint at points like ``z`` (draw, dim), of a density of so many rows.

    The density's Python runs once, for a trace that gives the same numbers. Where the arithmetic is large it runs at
    every call, of which it is a small part then: the trace holds all that a gradient computes at the same time.
    """
    gradient, why_not_batched = batched_gradient(
        density.in_fewer_operations(z[:2]).log_joint, z[:2]
    )
    widest = density.dim
    if density.owner is not None:
        widest = widest_layer(density.owner, density.args[0][:2])
    if why_not_batched or len(z) * num_rows * widest > _MAX_TRACED:
        return gradient
    return compiled(
        gradient,
        z,
        enabled=False,
        calls=NUM_TRAJECTORIES * NUM_STEPS,
        name="the model",
    )


def _draws_to_move(density: Density, num_rows: int, is_chains: bool) -> int:
    """How many draws are moved: 256 where a gradient is cheap, else 128; none where the moves would be too dear."""
    work = density.dim * num_rows * NUM_DRAWS * NUM_TRAJECTORIES * NUM_STEPS
    if work > (_MAX_WORK_OF_CHAINS if is_chains else _MAX_WORK):
        return 0
    return 2 * NUM_DRAWS if work < 2e8 else NUM_DRAWS


def _latent_values(density: Density, posterior: PosteriorLike) -> Tensor:
    """The scalars of all latent sites, (chain, draw, scalar, 1)."""
    draws = [posterior.draws[site.name] for site in density.sites if site.kind == "latent"]
    scalars = [values.reshape(*values.shape[:2], -1) for values in draws]
    return torch.cat(scalars, -1)[..., None]


def _latent_names(density: Density) -> list[str]:
    """What each of the scalars of :func:`_latent_values` is judged with: its site, or alone where these are few."""
    names = []
    for site in density.sites:
        if site.kind != "latent":
            continue
        if not site.shape or math.prod(site.shape) > _MOST_ALONE:
            names += [site.name] * math.prod(site.shape)
            continue
        for index in np.ndindex(*site.shape):
            names.append(f"{site.name}[{', '.join(map(str, index))}]")
    return names


def _move_points(gradient: Gradient, z: Tensor, scale: Tensor) -> tuple[Tensor, float]:
    """Points (draw, dim) after all trajectories, and the share that was accepted; its rate is kept at 0.6 to 0.95."""
    random = generator(0)
    factor = 1.6
    step = float(z.shape[1]) ** -0.25
    for _ in range(10):
        _, rate = _trajectory(gradient, z, scale * step, 2, random)
        if rate > 0.6:
            break
        step /= factor
    rates = []
    for _ in range(NUM_TRAJECTORIES):
        jitter = 0.8 + 0.4 * float(torch.rand((), generator=random))
        z, rate = _trajectory(gradient, z, scale * step * jitter, NUM_STEPS, random)
        rates.append(rate)
        if rate < 0.6:
            step *= 1.0 / factor
        elif rate > 0.95:
            step *= factor
    return z, sum(rates) / len(rates)


def _trajectory(
    gradient: Gradient,
    z: Tensor,
    step: Tensor,
    num_steps: int,
    random: torch.Generator,
) -> tuple[Tensor, float]:
    """One Hamiltonian trajectory of every point, steps per weight (dim,), and the mean acceptance rate."""
    momentum = torch.randn(z.shape, generator=random).to(z)
    begin = HamiltonianPath(z, momentum, *gradient(z))
    end = begin.after(gradient, step, num_steps)
    rate = (begin.energy - end.energy).clamp(max=0.0).exp().nan_to_num(0.0)
    accepted = torch.rand(len(z), generator=random).to(z) < rate
    return torch.where(accepted[:, None], end.z, z), float(rate.mean())
