"""What a program says beside its density: deterministic values, replicates of its data, and the names of its axes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyrobnn.core.seeding import seeded
from pyrobnn.density.gradient import at_each
from pyrobnn.density.nodes import Node, is_datum, is_deterministic, is_observed, is_subsample
from pyrobnn.density.supply import is_improper

if TYPE_CHECKING:
    from pyrobnn.density.density import Density

#: scalars of deterministic values or replicates that are computed in one call, and draws
_CHUNK_SCALARS, _CHUNK_DRAWS = 2**20, 500
_SAMPLE_DIMS = ("chain", "draw")

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Derived:
    """What one run of a program shows of it.

    Attributes: ``deterministic``, its deterministic sites, and ``replicated``, its sites that hold data and have a
    distribution to draw others from, both name → scalars of one value; ``axes``, see :func:`axes`; ``improper``,
    whether a latent site has no prior that can be drawn from.
    """

    deterministic: Mapping[str, int]
    replicated: Mapping[str, int]
    axes: Mapping[str, list[str | None]]
    improper: bool

    @classmethod
    def of(cls, nodes: Mapping[str, Node]) -> Derived:
        """Of the nodes of one run."""
        sampled = [n for n in nodes.values() if n["type"] == "sample" and not is_subsample(n)]
        return cls(
            {n["name"]: n["value"].numel() for n in sampled if is_deterministic(n)},
            {n["name"]: n["value"].numel() for n in sampled if _is_replicated(n)},
            axes(nodes),
            any(is_improper(n["fn"]) for n in sampled if not is_observed(n)),
        )


def axes(nodes: Mapping[str, Node]) -> dict[str, list[str | None]]:
    """The plate of every axis of each site, site → (axis,), None for an axis that belongs to no plate.

    Sites without any are left out. A plate that is named as the sample dimensions are, or that has two sizes in one
    program, names no axis.
    """
    sizes: dict[str, set[int]] = {}
    for node in nodes.values():
        for plate in node.get("cond_indep_stack", ()):
            sizes.setdefault(plate.name, set()).add(plate.size)
    unclear = {name for name, found in sizes.items() if len(found) > 1} | set(_SAMPLE_DIMS) | set(nodes)
    unclear -= {name for name, node in nodes.items() if is_subsample(node)} - set(_SAMPLE_DIMS)
    found = {}
    for node in nodes.values():
        if node["type"] != "sample" or is_subsample(node) or not isinstance(node["value"], Tensor):
            continue
        dims = node["value"].dim()
        # pyro.deterministic calls all axes of its value one event, unless it is told otherwise
        events = node["fn"].event_dim if not is_deterministic(node) or node["fn"].event_dim < dims else 0
        named: list[str | None] = [None] * dims
        for plate in node["cond_indep_stack"]:
            axis = None if plate.dim is None else dims - events + plate.dim
            if axis is not None and 0 <= axis < dims and node["value"].shape[axis] == plate.size:
                named[axis] = plate.name if plate.name not in unclear else None
        if any(named):
            found[node["name"]] = named
    return found


def deterministic(density: Density, draws: Mapping[str, Tensor]) -> Values:
    """The values of the program's ``pyro.deterministic`` sites at draws (chain, draw, \\*shape), likewise shaped.

    Raises:
        RuntimeError: their shape differs from draw to draw, or the program cannot be run.
    """

    def one(values: Values) -> Values:
        nodes = density.trace(values)
        return {name: nodes[name]["value"] for name in found}

    found = density.derived.deterministic
    return _at_each(density.pure(one), _latent(density, draws), sum(found.values())) if found else {}


def replicates(density: Density, draws: Mapping[str, Tensor], seed: int) -> Values:
    """Replicates of the program's data at draws (chain, draw, \\*shape): observed site → (chain, draw, \\*shape).

    One for each draw, from the observed sites' own distributions, one after another as the program has them. A factor
    says no distribution and has none.
    """
    forgetful = _forgetting(density)

    def one(values: Values) -> Values:
        nodes = forgetful.trace(values)
        return {name: nodes[name]["value"] for name in found}

    found = density.derived.replicated
    with seeded(seed, density.device):
        return _at_each(density.pure(one), _latent(density, draws), sum(found.values())) if found else {}


@torch.no_grad()
def prior(density: Density, num_draws: int, seed: int) -> tuple[Values, Values]:
    """Draws of the latent and deterministic sites from the prior, and of the data; both site → (1, draw, \\*shape).

    Both are empty where a prior is improper: it has no draws.
    """
    if density.derived.improper:
        return {}, {}
    forgetful = _forgetting(density)
    names = [site.name for site in density.sites if site.kind == "latent"] + [*density.derived.deterministic]
    with seeded(seed, density.device):
        runs = [forgetful.trace({}) for _ in range(num_draws)]

    def stacked(names: Iterable[str]) -> Values:
        return {name: torch.stack([nodes[name]["value"] for nodes in runs])[None] for name in names}

    return stacked(names), stacked(density.derived.replicated)


class _Forget(Messenger):
    """Makes latent again what holds data: the site draws from its distribution."""

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        if _is_replicated(msg):
            msg["is_observed"], msg["value"], msg["done"] = False, None, False


def _is_replicated(node: Node) -> bool:
    return is_datum(node) and not isinstance(node["fn"], dist.Unit)


def _forgetting(density: Density) -> Density:
    forgetful = copy.copy(density)
    program = density.program

    @functools.wraps(program)
    def run(*args: Any) -> Any:
        with _Forget():
            return program(*args)

    forgetful.program = run
    return forgetful


def _latent(density: Density, draws: Mapping[str, Tensor]) -> Values:
    names = {site.name for site in density.sites} | set(density.initial_points)
    return {name: value.to(density.device) for name, value in draws.items() if name in names}


@torch.no_grad()
def _at_each(one: Callable[[Values], Values], draws: Values, numel: int) -> Values:
    """``one`` at every draw, in batches."""
    chains, num = next(iter(draws.values())).shape[:2]
    flat = {name: value.flatten(0, 1) for name, value in draws.items()}
    size = max(1, min(_CHUNK_DRAWS, _CHUNK_SCALARS // max(numel, 1)))
    parts = [
        at_each(one, {name: value[start : start + size] for name, value in flat.items()})
        for start in range(0, chains * num, size)
    ]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: value.detach().reshape(chains, num, *value.shape[1:]) for name, value in joined.items()}
