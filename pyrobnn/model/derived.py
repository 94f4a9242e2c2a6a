"""What a program says beside its density: deterministic values, replicates of its data, and draws of its prior."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Mapping, Sequence

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import seeded
from pyrobnn.model.compile import first_line
from pyrobnn.model.density import Density
from pyrobnn.model.gradient import at_each, runs_at_once
from pyrobnn.model.nodes import Message, is_replicated

Values = dict[str, Tensor]
#: replicates that are made however long they take
FEWEST_REPLICATES = 100
_FEWEST_PRIOR_DRAWS = 25
_RUNS_AT_ONCE = 64  # of a program


def deterministic(density: Density, draws: Mapping[str, Tensor]) -> Values:
    """The values of the program's ``pyro.deterministic`` sites at draws (chain, draw, \\*shape), likewise shaped.

    RuntimeError where their shape differs from draw to draw, or the program cannot be run.
    """
    return values_at_draws(density, draws, density.derived.deterministic)


def replicates(
    density: Density,
    draws: Mapping[str, Tensor],
    seed: int,
    seconds: float | None = None,
) -> Values:
    """Replicates of the program's data at draws (chain, draw, \\*shape): observed site → (chain, draw, \\*shape).

    One for each draw, from the observed sites' own distributions, one after another as the program has them. A factor
    says no distribution and has none. Where the program runs at one draw at a time, and all would take more than so
    many ``seconds``, those of fewer draws, evenly spaced, but of 100.
    """
    if seconds is not None:
        draws = _draws_within(density, draws, seed, seconds)
    with seeded(seed, density.device):
        return values_at_draws(_without_data(density), draws, density.derived.replicated)


@torch.no_grad()
def _draws_within(
    density: Density,
    draws: Mapping[str, Tensor],
    seed: int,
    seconds: float,
) -> Mapping[str, Tensor]:
    """Draws (chain, draw, …) that replicates are made of in so many seconds, at least 100 of all chains."""
    chains, num = next(iter(draws.values())).shape[:2]
    flat = {name: value.to(density.device).flatten(0, 1) for name, value in draws.items()}
    forgetful = _without_data(density)

    def run(values: Values) -> Values:
        nodes = forgetful.run(values)
        return {name: nodes[name]["value"] for name in density.derived.replicated}

    with seeded(seed, density.device):
        if chains * num <= FEWEST_REPLICATES or runs_at_once(run, flat):
            return draws
        begin = time.perf_counter()
        run({name: value[0] for name, value in flat.items()})
        one_run = time.perf_counter() - begin
    count = max(FEWEST_REPLICATES, int(seconds / one_run)) // chains
    if count >= num:
        return draws
    keep = evenly_spaced(num, max(count, 1))
    return {name: value[:, keep] for name, value in draws.items()}


@torch.no_grad()
def prior(
    density: Density,
    num_draws: int,
    seed: int,
    seconds: float | None = None,
) -> tuple[Values, Values]:
    """Draws of the latent and deterministic sites from the prior, and of the data; both site → (1, draw, \\*shape).

    Both are empty where a prior is improper: it has no draws. Fewer where the program runs at one draw at a time, and
    all would take more than so many ``seconds``; without those at which its data cannot be drawn, with a warning.
    """
    if density.derived.improper:
        return {}, {}
    if seconds is not None:
        num_draws = _prior_draws_within(density, num_draws, seed, seconds)
    names = [site.name for site in density.sites if site.kind == "latent"]
    names += [*density.derived.deterministic, *density.derived.replicated]
    forgetful = _without_data(density)
    try:
        runs = prior_runs(forgetful, num_draws, seed, names)
    except (RuntimeError, ValueError) as error:
        runs = _possible_prior_runs(forgetful, num_draws, seed, names)
        count = len(next(iter(runs.values()))) if runs else 0
        warnings.warn(
            f"of {num_draws} draws from the prior {num_draws - count} are left out: the program's data cannot be "
            f"drawn there ({first_line(error)})",
            stacklevel=2,
        )
    if not runs:
        return {}, {}
    values = {name: value[None] for name, value in runs.items()}
    data = {name: values.pop(name) for name in density.derived.replicated}
    return values, data


def _prior_draws_within(
    density: Density,
    num_draws: int,
    seed: int,
    seconds: float,
) -> int:
    """How many draws from the prior to run the program at: all where these are batched, else as ``seconds`` allow."""
    forgetful = _without_data(density)

    def run(_: Tensor) -> Values:
        nodes = forgetful.run({})
        return {name: nodes[name]["value"] for name in density.derived.replicated}

    if not density.derived.replicated:
        return num_draws
    with seeded(seed, density.device):
        if runs_at_once(run, torch.zeros(2)):
            return num_draws
        begin = time.perf_counter()
        with contextlib.suppress(RuntimeError, ValueError):  # impossible data take no longer
            run(torch.zeros(()))
        affordable = int(seconds / (time.perf_counter() - begin))
    return min(num_draws, max(_FEWEST_PRIOR_DRAWS, affordable))


def prior_runs(
    density: Density,
    num: int,
    seed: int,
    names: Sequence[str],
) -> Values:
    """The values (num, …) of the sites ``names`` in runs of the program at draws from its prior, made in batches."""

    def run(_: Tensor) -> Values:
        nodes = density.run({})
        return {name: nodes[name]["value"] for name in names}

    with seeded(seed, density.device):
        return at_each(
            run,
            torch.zeros(num),
            at_once=_RUNS_AT_ONCE,
        )


def _possible_prior_runs(
    density: Density,
    num: int,
    seed: int,
    names: Sequence[str],
) -> Values:
    """As :func:`prior_runs`, one run after another, without those in which the program raises; empty if all do."""
    runs: list[Values] = []
    with seeded(seed, density.device):
        for _ in range(num):
            with contextlib.suppress(RuntimeError, ValueError):
                nodes = density.run({})
                runs.append({name: nodes[name]["value"] for name in names})
    if not runs:
        return {}
    return {name: torch.stack([values[name] for values in runs]) for name in names}


class _Forget(Messenger):
    """Makes latent again what holds data: the site draws from its distribution."""

    def _pyro_sample(self, msg: Message) -> None:
        if is_replicated(msg):
            msg["is_observed"] = False
            msg["value"] = None
            msg["done"] = False


def _without_data(density: Density) -> Density:
    """The density whose program draws its data, and its discrete sites."""
    # the copy keeps ``owner``, cached from the first run: the wrapped program no longer shows it
    forgetful = copy.copy(density)
    forgetful.program = _Forget()(density.program)
    forgetful.sums_out = False
    return forgetful


@torch.no_grad()
def values_at_draws(
    density: Density, draws: Mapping[str, Tensor], sites: Mapping[str, int]
) -> Values:
    """The values of ``sites`` (name → scalars of one) in a run of the program at every draw, in batches."""
    if not sites:
        return {}

    def run(values: Values) -> Values:
        nodes = density.trace(values)
        return {name: nodes[name]["value"] for name in sites}

    chains, num = next(iter(draws.values())).shape[:2]
    names = {site.name for site in density.sites} | set(density.initial_points)
    flat = {name: v.to(density.device).flatten(0, 1) for name, v in draws.items() if name in names}
    draws_at_once = max(1, min(500, 2**20 // max(sum(sites.values()), 1)))
    runs = at_each(run, flat, at_once=draws_at_once)
    return {
        name: value.detach().reshape(chains, num, *value.shape[1:]) for name, value in runs.items()
    }
