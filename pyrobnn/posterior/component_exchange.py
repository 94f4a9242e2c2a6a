"""Components that a program's density does not tell apart, as those of a mixture: found by exchanging them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import xarray as xr
from torch import Tensor

from pyrobnn.core.component_names import MOST_COMPONENTS, Exchange, numbered_sites
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.model import Density
from pyrobnn.model.gradient import at_each

#: draws at which an exchange that left the density of the first as it was is tried again
_NUM_DRAWS = 4
#: exchanges that are tried of one number of components, and the data of all of them; those of fewest sites come first
_MOST_TRIED = 64
_MOST_DATA = 4_000_000
#: data of the points whose log joint densities are computed together
_DATA_AT_ONCE = 2**18
#: difference of log joint densities that the rounding of float64 explains, as a share of their size
_ROUNDING = 1e-8
#: the same of a value that is taken to unconstrained space and back: of a draw that was kept in float32, and of a value
#: in float64
_INVERSE_OF_DRAW = 1e-3
_INVERSE = 1e-6
#: sds between the means of two components, which are equal where the draws hold all orders
_APART = 1.0


def exchange_group(density: Density, draws: Mapping[str, Tensor]) -> xr.Dataset:
    """What can be exchanged without a change of the density: the number of components, by the sites and their axes.

    Only where the draws (chain, draw, …) tell the components apart: where they are in every order alike, nothing
    that is read off them depends on it.
    """
    names = [site.name for site in density.sites if site.kind == "latent"]
    latent = {name: draws[name] for name in names if name in draws}
    if len(latent) < len(density.sites):
        return xr.Dataset()
    exchanges = []
    for num_components in _counts(latent):
        exchange = _first_exchange(density, latent, num_components)
        if exchange is not None:
            exchanges.append(exchange)
    if not exchanges:
        return xr.Dataset()
    counts = [exchange.num_components for exchange in exchanges]
    what = [exchange.to_json() for exchange in exchanges]
    return xr.Dataset({"num_components": (("exchange",), counts)}, coords={"exchange": what})


def _counts(draws: Mapping[str, Tensor]) -> list[int]:
    """The numbers of components that there may be: lengths of axes, and of groups of sites."""
    counts = {size for value in draws.values() for size in value.shape[2:]}
    counts |= {len(names) for names in _groups(draws)}
    return sorted(count for count in counts if 2 <= count <= MOST_COMPONENTS)


def _groups(draws: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    return numbered_sites({name: value.shape[2:] for name, value in draws.items()})


def _first_exchange(
    density: Density, draws: Mapping[str, Tensor], num_components: int
) -> Exchange | None:
    """The exchange of fewest sites that leaves the density as it is and whose components the draws tell apart."""
    candidates = [
        exchange for exchange in _candidates(draws, num_components) if _tell_apart(exchange, draws)
    ]
    if not candidates:
        return None
    flat = {name: value.flatten(0, 1).double() for name, value in draws.items()}
    count = len(next(iter(flat.values())))
    points = [int(place) for place in evenly_spaced(count, min(count, _NUM_DRAWS))]
    some = {name: value[points] for name, value in flat.items()}
    candidates = candidates[: _MOST_DATA // max(1, _num_data(density))]
    if not candidates:
        return None
    density = density.double()
    return _first_that_holds(density, _in_support(density, some), candidates)


def _num_data(density: Density) -> int:
    """The scalars of all observed sites."""
    return sum(density.derived.replicated.values())


@torch.no_grad()
def _in_support(density: Density, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values (draw, …) as float64 has them: shares that were kept in float32 sum to one up to its rounding alone."""
    exact = density.constrain(density.unconstrain(values))
    return {
        name: torch.where(_is_near(exact[name], value, _INVERSE_OF_DRAW), exact[name], torch.nan)
        for name, value in values.items()
    }


def _is_near(value: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Whether each scalar is the expected one, up to a tolerance."""
    return (value - expected).abs() <= tolerance * (1.0 + expected.abs())


def _first_that_holds(
    density: Density, values: Mapping[str, Tensor], candidates: Sequence[Exchange]
) -> Exchange | None:
    """The first exchange that leaves the density as it is at all values (draw, …)."""
    first_order = [*range(candidates[0].num_components)]
    turn = [first_order[-1], *first_order[:-1]]
    swap = [1, 0, *first_order[2:]]
    first = {name: value[:1] for name, value in values.items()}
    kept = _same_everywhere(
        density, first, [exchange.applied(first, swap) for exchange in candidates]
    )
    for candidate, is_same in zip(candidates, kept, strict=True):
        if is_same:
            moved = [candidate.applied(values, order) for order in (swap, turn)]
            if all(_same_everywhere(density, values, moved)):
                return candidate
    return None


def _same_everywhere(
    density: Density, values: Mapping[str, Tensor], moved: Sequence[Mapping[str, Tensor]]
) -> list[bool]:
    """Of each of several changes of values (draw, …), whether the log joint density is the same at every draw."""
    stacked = {
        name: torch.cat([value, *(changed[name] for changed in moved)])
        for name, value in values.items()
    }
    log_joint = _log_joints(density, stacked).reshape(1 + len(moved), -1)
    base = log_joint[0]
    # where one is not finite the comparison is false
    same = (log_joint[1:] - base).abs() <= _ROUNDING * (1.0 + base.abs())
    return same.all(1).tolist()


def _candidates(draws: Mapping[str, Tensor], num_components: int) -> list[Exchange]:
    """Exchanges of so many components, those of fewest sites first."""
    parts: list[list[Exchange | None]] = []
    for name, value in draws.items():
        axes = [axis for axis, size in enumerate(value.shape[2:]) if size == num_components]
        choices = [
            chosen
            for size in range(1, 1 + len(axes))
            for chosen in itertools.combinations(axes, size)
        ]
        if (
            num_components == 2
            and value[0, 0].numel() == 1
            and 0 <= value.min()
            and value.max() <= 1
        ):
            choices.append(())
        if choices:
            parts.append(
                [None, *(Exchange(num_components, {name: chosen}, ()) for chosen in choices)]
            )
    for names in _groups(draws):
        if len(names) == num_components:
            parts.append([None, Exchange(num_components, {}, (names,))])
    combined = [
        _joined(num_components, chosen)
        for chosen in itertools.islice(itertools.product(*parts), 8 * _MOST_TRIED)
    ]
    combined.sort(key=_size)
    return [exchange for exchange in combined if _size(exchange)][:_MOST_TRIED]


def _joined(num_components: int, parts: Sequence[Exchange | None]) -> Exchange:
    axes: dict[str, Sequence[int]] = {}
    numbered: list[Sequence[str]] = []
    for part in parts:
        if part is not None:
            axes |= part.axes
            numbered += part.numbered
    return Exchange(num_components, axes, tuple(numbered))


def _size(exchange: Exchange) -> int:
    """How much is exchanged: axes, shares and groups."""
    return sum(max(1, len(axes)) for axes in exchange.axes.values()) + len(exchange.numbered)


def _tell_apart(exchange: Exchange, draws: Mapping[str, Tensor]) -> bool:
    """Whether the means of two components lie apart in a chain, which a chain that visits all orders makes equal."""
    order = [exchange.num_components - 1, *range(exchange.num_components - 1)]
    for chain in range(len(next(iter(draws.values())))):
        values = {name: value[chain].double() for name, value in draws.items()}
        moved = exchange.applied(values, order)
        for name in exchange.sites:
            distance = (values[name].mean(0) - moved[name].mean(0)).abs()
            spread = (
                0.5 * (values[name].var(0, correction=0) + moved[name].var(0, correction=0))
            ).sqrt()
            if bool((distance > _APART * spread).any()):
                return True
    return False


@torch.no_grad()
def _log_joints(density: Density, values: Mapping[str, Tensor]) -> Tensor:
    """Log joint densities (draw,) of values (draw, …) in their own units; not a number outside of a support."""
    z = density.unconstrain(values)
    possible = torch.isfinite(z).all(1)
    log_joint = z.new_full((len(z),), torch.nan, dtype=torch.float64)
    if bool(possible.any()):
        # the Python of the program runs once for each batch of points
        log_joint[possible] = at_each(
            lambda point: density.log_joint(point, jacobian=False),
            z[possible],
            at_once=max(2, _DATA_AT_ONCE // max(1, _num_data(density))),
        ).double()
    back = density.constrain(z)
    for name, value in values.items():
        # a transform that has no inverse there gives another value
        same = _is_near(back[name], value, _INVERSE)
        log_joint[~same.reshape(len(z), -1).all(1)] = torch.nan
    return log_joint
