"""What the user is told about a run of NUTS: refusals before it starts, and the verdict on its statistics."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pyrobnn.chains import rhat
from pyrobnn.checks import Refused, divergences_by_chance
from pyrobnn.inference.fitting import memory
from pyrobnn.inference.fitting.problem import Problem, settings
from pyrobnn.inference.hmc import checkpoint as checkpoints
from pyrobnn.inference.hmc.converged import reached
from pyrobnn.inference.hmc.machine import MAX_ENERGY_ERROR, STATS
from pyrobnn.inference.hmc.metric import form_of
from pyrobnn.inference.hmc.warmup import frozen, kept_in_warmup
from pyrobnn.likelihoods.base import SCALE

if TYPE_CHECKING:
    from pyrobnn.inference.hmc.draws import Draws
    from pyrobnn.inference.nuts import NUTS
    from pyrobnn.posterior import Posterior

_RHAT = 1.05  # of a program's draws, above which a fit says so
_ENERGY = 0.3  # fraction of missing information of its chains, below which it does, as the verdict does
#: draws per chain and in all to be judged; values of a site that are
_ENOUGH, _MANY, _VALUES = 100, 1000, 1000
#: sds of one chain's log density between the means of two, which are then not draws of one posterior
_APART = 3.0
_STEEP_TRIES = 25  # starts drawn, before one that does not go is kept
_BLOCK = 64  # draws per chain between writes to a file


def num_slots(dim: int, config: NUTS, num_draws: int, num_warmup: int, streamed: bool) -> int:
    """Draws per chain that the machine holds: those of a warm-up window, and all draws or a block of them."""
    kept = kept_in_warmup(num_warmup, config.num_chains, dim)
    return max(_BLOCK if streamed else num_draws, kept)


def needed_bytes(
    dim: int, dtype: torch.dtype, config: NUTS, num_draws: int, num_warmup: int, streamed: bool
) -> int:
    """Bytes of a run's static buffers and of the copies on the way to the posterior."""
    chains, item = config.num_chains, dtype.itemsize
    slots = num_slots(dim, config, num_draws, num_warmup, streamed) + 1
    levels = 2 * (config.max_tree_depth + 1)
    copies = 2 if streamed else 3  # the draws, without the whitening, and by site
    rows = slots + num_draws if streamed else slots
    need = chains * (dim * item * (copies * slots + levels + 24) + rows * 8 * len(STATS))
    if config.mass_matrix == "low_rank":  # a window of draws and one of gradients, copied in float64
        need += chains * kept_in_warmup(num_warmup, chains, dim) * dim * (2 * item + 6 * 8)
    return need + (dim * dim * item * 3 if config.mass_matrix == "dense" else 0)


def check_memory(problem: Problem, config: NUTS, num_draws: int, num_warmup: int, streamed: bool) -> None:
    """Refuse a run whose buffers do not fit before it starts.

    Raises:
        NotEnoughMemory: naming the bytes and the options to change.
    """
    dim, dtype = problem.density.dim, problem.density.dtype
    form = form_of(config.mass_matrix, problem.is_bnn or config.engine == "pyro")
    config = replace(config, mass_matrix="low_rank" if form == "auto" else form)  # the most that it may need
    need = needed_bytes(dim, dtype, config, num_draws, num_warmup, streamed)
    options = ["lower num_chains" if streamed else "lower num_draws or num_chains"]
    free = memory.free_bytes(problem.device)
    if not streamed and needed_bytes(dim, dtype, config, num_draws, num_warmup, True) <= free:
        options.append("write the draws to disk with fit(stream_to=PATH)")
    if form != "diag":
        options.append("use mass_matrix='diag'")
    what = f"a run of {config.num_chains} chains × {num_draws} draws × {dim} parameters"
    memory.require(need, problem.device, what, ", or ".join(options))


def run_fingerprint(
    config: NUTS,
    problem: Problem,
    init: Posterior | torch.nn.Module | None,
    num_draws: int,
    seed: int,
    streamed: bool,
) -> str:
    """Fingerprint of what the draws depend on and every device holds alike.

    Not the starts, which a device draws with a generator of its own; and not the density, which rounds otherwise there:
    a resumed run asks for it anew (:func:`checkpoint.check_density`).
    """
    parts = {"x": problem.x, "y": problem.y}
    if isinstance(init, torch.nn.Module):
        parts |= {f"init {name}": value for name, value in init.named_parameters()}
    elif init is not None:
        parts |= {f"init {name}": draws[:, [0, -1]] for name, draws in init.draws.items()}
    tensors = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
    sites = [(site.name, tuple(site.shape)) for site in problem.density.sites]
    plan = {**settings(config), "num_draws": num_draws, "seed": seed, "sites": sites, "streamed": streamed}
    for name in ("checkpoint_every", "until", "min_ess", "max_seconds"):  # no draw depends on them
        del plan[name]
    return checkpoints.fingerprint(plan, tensors)


def movable(problem: Problem, z: Tensor, tries: Iterable[Tensor]) -> Tensor:
    """The starts ``z`` (chain, dim), those from which a chain cannot move replaced by others.

    A start has a finite density and a finite gradient, not zero everywhere: on a plateau (a density that has
    underflowed, say) nothing tells a chain where to go. And a log density so low that its rounding is larger than the
    energy error that ends a trajectory (a log link's mean of 1e20) lets it go nowhere: of a few such starts the best is
    kept.

    Args:
        problem: what is fitted.
        z: starts.
        tries: other starts, each (chain, dim).

    Raises:
        Refused: no start of a chain is finite, naming the site.
    """
    single = torch.func.grad_and_value(problem.density.log_joint)
    z, tries = z.clone(), iter(tries)
    deepest = -MAX_ENERGY_ERROR / torch.finfo(z.dtype).eps
    todo = list(range(len(z)))
    # by chain, the best start that is finite but does not go, with its log density
    spare: dict[int, tuple[float, Tensor]] = {}
    for attempt, draws in enumerate(itertools.chain([z], tries)):
        left = []
        for chain in todo:
            gradient, value = single(draws[chain])
            z[chain] = draws[chain]
            if not (bool(torch.isfinite(value)) and bool(torch.isfinite(gradient).all())):
                left.append(chain)
                continue
            if float(value) < deepest or not bool((gradient != 0).any()):
                left.append(chain)
                if chain not in spare or float(value) > spare[chain][0]:
                    spare[chain] = float(value), draws[chain].clone()
        # a plateau everywhere has no better start, nor has a density that is low everywhere
        if left and attempt >= _STEEP_TRIES:
            for chain in [chain for chain in left if chain in spare]:
                z[chain] = spare[chain][1]
                left.remove(chain)
        if not left:
            return z
        todo = left
    raise Refused(_why_no_start(problem, z[todo[0]], *single(z[todo[0]])))


def _why_no_start(problem: Problem, z: Tensor, gradient: Tensor, value: Tensor) -> str:
    """Which site is to blame that no start has a finite density."""
    density = problem.density
    log_prior, log_likelihood = density.log_parts(z)
    bad = (~torch.isfinite(gradient)).nonzero()
    if not bool(torch.isfinite(log_likelihood)):
        where = f"the observed site {', '.join(map(repr, density.observed))}"
    elif len(bad):
        where = f"the site {density.site_of(int(bad[0]))!r}"
    else:
        where = f"a latent site ({', '.join(repr(site.name) for site in density.sites)})"
    return (
        f"no start with a finite density in 100 draws: the log density is {float(value):g}, because of "
        f"{where}. Check its support and scale, or pass fit(init=...) with a posterior that has a finite density"
    )


def disagreement(problem: Problem, draws: Mapping[str, Tensor], result: Draws) -> list[str]:
    """What must be said of a run whose warm-up was not finished, or whose draws of a program have not mixed.

    A net's weights are not identified; its function is judged by the diagnosis, and its log density here.
    """
    notes = []
    chains, num = result.stats.shape[:2]
    if problem.is_bnn and num >= _ENOUGH and (apart := levels(result.stats, draws.get(SCALE))):
        notes.append(apart)
    if not problem.is_bnn and num >= _ENOUGH and chains > 1:
        named = {name: value.reshape(chains, num, -1)[..., :_VALUES] for name, value in draws.items()}
        counts = torch.full((chains,), num)
        if not frozen(result.stats, counts):  # some values never change, as the corner of a Cholesky factor
            varying = {
                name: value[..., (value != value[0, 0]).any(0).any(0)] for name, value in named.items()
            }
            named = {name: value for name, value in varying.items() if value.shape[-1]} or named
        found = {
            name: float(np.nan_to_num(rhat(value.double().movedim(2, 0).cpu().numpy()), nan=np.inf).max())
            for name, value in named.items()
        }
        worst = max(found, key=found.__getitem__)
        long = reached(problem, draws, result.stats) if chains * num >= _MANY else None
        if found[worst] > _RHAT:
            notes.append(_unmixed(repr(worst), found[worst]))
        elif long is not None and long.rhat > _RHAT:
            notes.append(_unmixed(long.worst, long.rhat))
        elif long is not None and long.ess < _ENOUGH:
            notes.append(
                f"the {chains * num} draws are worth {long.ess:.0f} independent ones for {long.slowest}: take more "
                "num_draws, scale the inputs, or reparameterise the model"
            )
        if long is not None and (slow := slow_energy(result.stats)):
            notes.append(slow)
    if result.unfinished:
        notes.append(
            f"the warm-up was not finished after {result.num_warmup} transitions: {result.unfinished}"
        )
    return notes


def _unmixed(what: str, rhat: float) -> str:
    return (
        f"the chains have not mixed: R-hat of {what} is {rhat:.3g} (wanted: at most 1.01), so the draws are not of the "
        "posterior yet. Run a longer num_warmup and more num_draws, scale the inputs, or reparameterise the model"
    )


def levels(stats: Tensor, noise: Tensor | None) -> str:
    """Which chain of a net has not come to where another is, by their log densities, in words; empty if none.

    Chains that have found different modes have different functions. How far their log densities are apart says whether
    they have arrived in them: scripts/benchmark_modes.py.

    Args:
        stats: statistics (chain, draw, 7).
        noise: draws of the scale of the noise (chain, draw, …), where it is inferred.
    """
    half = stats.shape[1] // 2
    lp = stats[:, half:, STATS.index("lp")].double()
    mean, spread = lp.mean(1), float(lp.var(1).mean().sqrt())
    gap = float(mean.max() - mean.min())
    if not gap > _APART * spread > 0.0:
        return ""
    low, high = int(mean.argmin()), int(mean.argmax())
    said = (
        f"the chains have not arrived at one level: the log density of chain {low} is {gap:.3g} nats below that of "
        f"chain {high}, where that of one chain varies by {spread:.2g}"
    )
    if noise is None:
        return f"{said}. Run a longer num_warmup"
    scale = noise[:, half:].double().flatten(1).mean(1)
    return (
        f"{said}, and the noise of the chains is {float(scale.min()):.2g} to {float(scale.max()):.2g}. The smaller it "
        "is the shorter are the steps, and it falls slowly: raise max_tree_depth and num_warmup, or keep the noise "
        "above what the targets are accurate to, by a number or a LogNormal prior"
    )


def slow_energy(stats: Tensor) -> str:
    """Which chain changes its energy too slowly to have been in every part of the mass, in words; empty if none.

    By Betancourt's fraction of missing information (2016), https://arxiv.org/abs/1604.00695. Where a scale is close to
    zero, as in the neck of a funnel, chains that all stay outside agree and have R-hat near one.
    """
    energy = stats[..., STATS.index("energy")].double()
    fraction = energy.diff(dim=1).square().mean(1) / energy.var(1, correction=0)
    lowest, chain = fraction.min(0)
    if not float(lowest) < _ENERGY:
        return ""
    return (
        f"the energy of chain {int(chain)} changes slowly (BFMI {float(lowest):.2f}, wanted: at least {_ENERGY}): it "
        "may have missed where the density is narrow, as near a scale of zero, or its tails. Reparameterise the model "
        "(non-centred), or draw more"
    )


def verdicts(stats: Tensor, config: NUTS) -> list[str]:
    """What must be said about the statistics (chain, draw, 7) of a run."""
    messages = []
    diverging = stats[..., STATS.index("diverging")]
    count, share = int(diverging.sum()), diverging.mean().item()
    if share == 1.0:
        messages.append(
            "every transition diverged: the draws are worthless. Check the model's scales, raise target_accept or "
            "set a smaller step_size"
        )
    elif count > divergences_by_chance(diverging.numel()):
        messages.append(
            f"{count} of {diverging.numel()} transitions diverged: the sampler could not follow the density there, and "
            f"may have left out what lies behind. Raise target_accept (now {config.target_accept:g}) or reparameterise "
            "the model"
        )
    num = torch.full((len(stats),), stats.shape[1])
    if share < 1.0 and (stuck := frozen(stats, num)):
        messages.append(
            f"{stuck}: their draws are one point each. Start elsewhere (another seed, init), or reparameterise "
            "the model"
        )
    rate = stats[..., STATS.index("acceptance_rate")].mean().item()
    if share < 1.0 and stats.shape[1] >= _ENOUGH and rate < 0.6 * config.target_accept:
        messages.append(
            f"the acceptance rate is {rate:.2f}, far below the {config.target_accept:g} aimed at: the step "
            "size does not fit the density where the chains are. Run a longer num_warmup, or reparameterise the model"
        )
    full = (stats[..., STATS.index("tree_depth")] >= config.max_tree_depth).double().mean().item()
    if config.trajectory is None and full > 0.1:
        messages.append(
            f"{full:.0%} of the draws reached the maximum tree depth {config.max_tree_depth}: trajectories are cut "
            "short and mix slowly. Raise max_tree_depth, run a longer warm-up, or "
            + (
                "(but for a net) use mass_matrix='auto'"
                if config.mass_matrix == "diag"
                else "scale the inputs"
            )
        )
    return messages
