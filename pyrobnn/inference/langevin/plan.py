"""The plan of stochastic-gradient chains: starts, and for every step its size, its noise and whether it is kept."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyrobnn.density import Density
from pyrobnn.inference.fitting.initial import start_values
from pyrobnn.posterior import Posterior

#: memory of the preconditioner: each warm-up step weighs 1 − RMSPROP
RMSPROP = 0.99


class Plan(NamedTuple):
    """Per step: ε, how much the preconditioner forgets, temperature; and the steps after which a draw is kept."""

    controls: Tensor
    keep: Tensor


def lay_out(config: Any, num_draws: int, num_data: int) -> Plan:
    """The plan of a :class:`pyrobnn.SGLD` or :class:`pyrobnn.SGHMC` for so many draws per chain of so many data."""
    warmup, thinning = config.num_warmup, config.thinning
    temperatures = [config.temperature] * warmup
    if config.schedule == "cyclical":
        per_cycle = math.ceil(num_draws / config.num_cycles)
        sampling = per_cycle * thinning
        length = math.ceil(sampling / (1.0 - config.exploration))
        position = torch.arange(config.num_cycles * length, dtype=torch.float64) % length
        shape = 0.5 * (torch.cos(math.pi * position / length) + 1.0)
        sizes = torch.cat([torch.ones(warmup, dtype=torch.float64), shape])
        temperatures += ([0.0] * (length - sampling) + [config.temperature] * sampling) * config.num_cycles
        ends = torch.arange(1, per_cycle + 1) * thinning + length - sampling - 1
        keep = (ends + length * torch.arange(config.num_cycles)[:, None]).reshape(-1)[:num_draws] + warmup
    else:
        total = warmup + num_draws * thinning
        t = torch.arange(total, dtype=torch.float64)
        power = config.decay if config.schedule == "polynomial" else 0.0
        sizes = (1.0 + t / config.decay_steps) ** -power
        temperatures += [config.temperature] * (total - warmup)
        keep = warmup + thinning * torch.arange(1, num_draws + 1) - 1
    num_steps = int(keep[-1]) + 1
    forget = torch.zeros(len(sizes), dtype=torch.float64)
    if config.preconditioner is not None:
        forget[:warmup] = 1.0 - RMSPROP
        forget[0] = 1.0
    # without a step size the first column holds the schedule alone, and ε is chosen as the chains go
    size = 1.0 if config.step_size is None else config.step_size / num_data
    controls = torch.stack([size * sizes, forget, torch.tensor(temperatures, dtype=torch.float64)], 1)
    return Plan(controls[:num_steps], keep)


def start_chains(model: Any, density: Density, init: Posterior | nn.Module | None, num_chains: int) -> Tensor:
    """Starting points (num_chains, dim), from torch's present random state.

    Draws of an earlier posterior, different ones where it has enough, and of each of its chains in turn; the parameters
    of a net, for all chains alike; or draws from the prior. Sites that ``init`` lacks come from the prior.

    Raises:
        TypeError, ValueError: ``init`` is something else, or of another model.
    """
    points = density.sample_prior(num_chains, seed=int(torch.randint(2**31, ())))
    if init is None:
        return points
    if isinstance(init, Posterior):
        stacked = init.stacked()
        # from every chain of an earlier run in turn: its chains, or islands of particles, were found apart
        chains = init.num_chains if init.meta.get("kind") == "chains" else 1
        size = len(next(iter(stacked.values()))) // chains
        rows = torch.randperm(max(size, num_chains))[:num_chains] % size
        pick = torch.arange(num_chains) % chains * size + rows
        values = {name: value[pick.to(value.device)] for name, value in stacked.items()}
    else:
        one = start_values(model, init)
        values = {name: value.expand(num_chains, *value.shape) for name, value in one.items()}
    given = {site.name: values[site.name] for site in density.sites if site.name in values}
    return density.unconstrain(density.constrain(points) | given)
