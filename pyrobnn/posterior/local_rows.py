"""The latent values of rows that a fit has not seen, given what all rows share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyrobnn.core.seeding import seeded
from pyrobnn.model import BNN, Density
from pyrobnn.model.compile.trees import Tree, leaves_of, mapped
from pyrobnn.model.gradient import at_each
from pyrobnn.posterior.approximation import PosteriorLike

#: scalars of all local sites that are drawn at once
_SCALARS_AT_ONCE = 2**24


class LocalDraws(NamedTuple):
    """Draws of the local sites, site → (chain, draw, \\*shape), and the law that they are from.

    ``drawn_from``: ``"guide"``, which has seen the outcomes of these rows, or ``"program"``, the law that the program
    gives any row.
    """

    values: dict[str, Tensor]
    drawn_from: Literal["guide", "program"]


@runtime_checkable
class DrawsRows(Protocol):
    """An approximation that may know a law of rows that it was not fitted to."""

    def draw_rows(self, density: Density, shared: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The sites of the rows of ``density`` beside one draw of what they share; None where it has none of them."""


@torch.no_grad()
def infer_local(
    posterior: PosteriorLike,
    x: Tree,
    y: Tree,
    seed: int,
) -> LocalDraws:
    """Arguments and result as of :meth:`pyrobnn.Posterior.infer_local`."""
    density = None if isinstance(posterior.model, BNN) else _density(posterior, (x, y))
    names = [] if density is None else _of_rows(posterior, density)
    if density is None or not names:
        raise ValueError(
            "the model has no latent site with a value for each row of x and y: 'infer_local' draws the sites of a "
            "program that stand in a plate of all rows, with pyro.plate('rows', len(x))"
        )
    known = [site.name for site in density.sites if site.name in posterior.draws]
    shared = {name: posterior.draws[name].flatten(0, 1) for name in known if name not in names}
    # one for each draw, also of a program whose rows share nothing
    numbers = torch.arange(posterior.num_chains * posterior.num_draws, device=density.device)
    first = {name: value[0] for name, value in shared.items()}
    guide = _guide_of_rows(posterior, density, first, seed)

    def run(_: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        drawn = None if guide is None else guide.draw_rows(density, values)
        if drawn is None:
            nodes = density.run(values)
            return {name: nodes[name]["value"] for name in names}
        return {name: drawn[name] for name in names}

    size = sum(density.site(name).size for name in names)
    with seeded(seed, density.device):
        flat = at_each(
            run,
            numbers,
            shared,
            at_once=max(1, min(500, _SCALARS_AT_ONCE // size)),
        )
    shape = posterior.num_chains, posterior.num_draws
    values = {name: value.reshape(*shape, *value.shape[1:]) for name, value in flat.items()}
    return LocalDraws(values, "program" if guide is None else "guide")


def sites_of_rows(posterior: PosteriorLike, x: Tree, y: Tree) -> list[str]:
    """The latent sites of a program that have a value for each row of its data; none of one with data of its own."""
    try:
        return _of_rows(posterior, _density(posterior, (x, y)))
    except (
        RuntimeError,
        ValueError,
        IndexError,
        TypeError,
    ):  # one that takes no other number of rows
        return []


def _density(posterior: PosteriorLike, args: tuple[Tree, ...]) -> Density:
    """The density of the program at other data."""
    points = {name: posterior.draws[name][0, 0] for name in posterior.meta.get("point_sites", ())}
    density = Density(
        posterior.model,
        args,
        points="held",
        values=points,
    )
    return density.as_fine_as(posterior.draws)


def _of_rows(posterior: PosteriorLike, density: Density) -> list[str]:
    """The latent sites whose shape goes with the number of rows."""
    tensors = [leaf for leaf in leaves_of(density.args) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        return []
    num_rows = len(tensors[-1])

    def one_more(value: Tree) -> Tree:
        if isinstance(value, Tensor) and value.dim() and len(value) == num_rows:
            return torch.cat([value, value[-1:]])
        return value

    longer = _density(posterior, mapped(one_more, density.args))
    return [
        site.name
        for site in density.sites
        if site.name in posterior.draws and site.shape != longer.site(site.name).shape
    ]


def _guide_of_rows(
    posterior: PosteriorLike,
    density: Density,
    shared: Mapping[str, Tensor],
    seed: int,
) -> DrawsRows | None:
    """The guide, where it draws the sites of these rows, as an amortised one does that is given their outcomes."""
    guide = posterior.approximation
    if not isinstance(guide, DrawsRows):
        return None
    with seeded(seed, density.device):
        return None if guide.draw_rows(density, shared) is None else guide
