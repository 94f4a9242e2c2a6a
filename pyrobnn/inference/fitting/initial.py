"""Where a fit starts: what ``init`` says, or the model's own net."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pyrobnn.core.checks import check_type
from pyrobnn.core.seeding import generator, seeded
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.density import Program
from pyrobnn.posterior import Posterior

if TYPE_CHECKING:
    from pyrobnn.inference.fitting.problem import Problem


def common_start(init: Posterior | nn.Module | None) -> bool:
    """Whether chains from ``init`` start around one point or in one mode: then they agree on what is there."""
    if init is None:
        return False
    return not isinstance(init, Posterior) or bool(
        init.meta.get("common_start", init.num_chains == 1)
    )


def start_values(model: BNN | Program, init: Posterior | nn.Module | None) -> dict[str, Tensor]:
    """Site values to start from: an earlier posterior's first draw, a trained net, or the model's own net.

    Where the prior's support leaves weights of the own net out, the values are draws from the prior, always the same.
    """
    if init is None:
        if not isinstance(model, BNN):
            return {}
        with seeded(0, model.device):
            return model.supported(model.initial_values())
    if isinstance(init, Posterior):
        return {name: value[0, 0] for name, value in init.draws.items()}
    check_type("init", init, nn.Module, "a Posterior or a torch.nn.Module")
    values = {NET + name: value.detach().clone() for name, value in init.named_parameters()}
    model_values = model.initial_values() if isinstance(model, BNN) else {}
    shapes = {name: value.shape for name, value in values.items()}
    if shapes != {name: value.shape for name, value in model_values.items()}:
        raise ValueError(
            "'init' is a net with other parameters than the model's: pass the net the BNN was built from"
        )
    return values


def starts_of(problem: Problem, seeds: Sequence[int]) -> Tensor:
    """Starts (seed, dim) for optimisation: of a BNN nets initialised anew, of a program prior medians."""
    starts: list[dict[str, Tensor]] = [{} for _ in seeds]
    if problem.is_bnn:
        starts = [problem.bnn.reinitialized(seed).initial_values() for seed in seeds]
    return torch.stack(
        [problem.density.initial(values, seed) for values, seed in zip(starts, seeds)]
    )


def fresh_starts(
    problem: Problem,
    seed: int,
    start: Tensor,
    number: int,
) -> Tensor:
    """Starts (number, dim) at nets initialised anew, a different set for each ``seed``.

    Sites that are not weights keep their values at ``start``.
    """
    net_seeds = torch.randint(
        2**31,
        (number,),
        generator=generator(seed),
    ).tolist()
    values = problem.density.constrain(start)
    shared = {name: value for name, value in values.items() if not name.startswith(NET)}
    nets = [problem.bnn.reinitialized(net_seed).initial_values() for net_seed in net_seeds]
    return torch.stack([problem.density.unconstrain(values | net | shared) for net in nets])


def start_chains(
    model: BNN | Program,
    density: Density,
    init: Posterior | nn.Module | None,
    num_chains: int,
) -> Tensor:
    """Starting points (num_chains, dim), from torch's present random state.

    Draws of an earlier posterior, different ones where it has enough, and of each of its chains in turn; the parameters
    of a net, for all chains alike; or draws from the prior. Sites that ``init`` lacks come from the prior.
    """
    points = density.sample_prior(num_chains, seed=int(torch.randint(2**31, ())))
    if init is None:
        return points
    if isinstance(init, Posterior):
        stacked = {name: value.flatten(0, 1) for name, value in init.draws.items()}
        # from every chain of an earlier run in turn: its chains, or islands of particles, were found apart
        chains = init.num_chains if init.meta.get("kind") == "chains" else 1
        size = len(next(iter(stacked.values()))) // chains
        rows = torch.randperm(max(size, num_chains))[:num_chains] % size
        pick = torch.arange(num_chains) % chains * size + rows
        values = {name: value[pick.to(value.device)] for name, value in stacked.items()}
    else:
        values = {
            name: value.expand(num_chains, *value.shape)
            for name, value in start_values(model, init).items()
        }
    init_values = {site.name: values[site.name] for site in density.sites if site.name in values}
    return density.unconstrain(density.constrain(points) | init_values)
