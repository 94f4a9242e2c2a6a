"""Whether the gradient that autograd gives is the derivative: of a net's output, and of a log joint density.

A program cuts its graph where a value leaves torch or its tape: ``.detach()``, ``.data``, ``torch.no_grad()``,
``.item()``, ``torch.tensor([a, b])``, NumPy. Its density stays right, and every method that follows the gradient
leaves what was cut at its prior.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import seeded
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.compile.inductor import tolerable
from pyrobnn.model.compile.trees import leaves_of
from pyrobnn.model.density import Site
from pyrobnn.model.fixed_row import WithFixedRow
from pyrobnn.model.fused import WrittenOut
from pyrobnn.posterior.prediction import LARGE_LAYER, widest_layer

#: rows that are enough to see what a net does with them
FEW = 8
#: seconds of one gradient beyond which a program is not checked
_SLOWEST = 1.0
#: CPU seconds that looking at groups of sites may take, and after which no other wrong site is looked for
_SECONDS = 2.0
#: groups of sites that are tried before single sites are
_MOST_GROUPS = 16
#: bytes of data of which a copy in float64 is made
_MOST_DATA = 2**28
#: how far starts lie from zero in unconstrained space: as those of a sampler, and near
_RADII = (2.0, 0.1)


@dataclass(frozen=True)
class Accuracy:
    """How finite differences are taken.

    Args:
        dtype: of the point.
        steps: of the differences.
        wide: a step that values of fewer digits resolve too, such as a program's own float32.
        tolerance: relative error that finite differences have themselves: a smaller one says nothing against the
            gradient.
    """

    dtype: torch.dtype
    steps: tuple[float, ...]
    wide: float
    tolerance: float


DOUBLE = Accuracy(torch.float64, (1e-5, 3e-5, 1e-4), 1e-2, 1e-3)
SINGLE = Accuracy(torch.float32, (1e-2, 2e-2, 4e-2), 0.1, 0.2)


@dataclass(frozen=True)
class Slopes:
    """The slope along one direction, by autograd and by finite differences of several steps.

    Args:
        tolerance: relative error that finite differences have themselves: a smaller one says nothing against the
            gradient.
        resolution: what rounding may add to a difference.
    """

    gradient: float
    differences: tuple[float, ...]
    tolerance: float
    resolution: float = 0.0

    @property
    def error(self) -> float:
        """How far autograd is from the differences of the smallest step."""
        return abs(self.gradient - self.differences[0])

    @property
    def differ(self) -> bool:
        """Whether the two differ by more than their accuracy; false where either is not finite."""
        largest = max(abs(self.gradient), abs(self.differences[0]))
        return max(self.tolerance * largest, self.resolution) < self.error < math.inf

    @property
    def certain(self) -> bool:
        """Whether they differ, and all steps agree: at a kink, at a jump or of rounding errors they do not."""
        spread = max(self.differences) - min(self.differences)
        return self.differ and spread <= 0.1 * self.error


# -- nets --------------------------------------------------------------------------------------------------------------


def wrong_gradient(model: BNN, x: Tensor) -> list[Finding]:
    """A finding where autograd and finite differences disagree about the net, else an empty list.

    Such a net detaches weights, or has a wrong backward.
    Compared in float64 along one random direction of all weights that have a prior, at a few rows of ``x`` (N, …): two
    of a net whose layers are large, for convolutions in float64 are slow. Differences of further steps are taken where
    the first one differs.
    """
    is_large = FEW * widest_layer(model, x) > LARGE_LAYER
    output = _output_along(model, x[: 2 if is_large else FEW])

    def difference(step: float) -> float:
        with torch.no_grad():
            ahead = output(torch.tensor(step, dtype=torch.float64))
            behind = output(torch.tensor(-step, dtype=torch.float64))
        return float(ahead - behind) / (2.0 * step)

    try:
        gradient = float(torch.func.grad(output)(torch.zeros((), dtype=torch.float64)))
        slopes = Slopes(gradient, (difference(DOUBLE.steps[0]),), DOUBLE.tolerance)
        if slopes.differ:
            slopes = Slopes(gradient, tuple(map(difference, DOUBLE.steps)), DOUBLE.tolerance)
    except Exception as error:  # whatever a net may raise that does not take float64
        tolerable(error)
        return []
    if not slopes.certain:
        return []
    return [Finding("wrong_gradient", {"gradient": gradient, "slope": slopes.differences[0]})]


def _output_along(model: BNN, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """A weighted sum of the net's outputs, in float64, as a function of a step of all weights along one direction."""
    net = copy.deepcopy(model.eval_net).double()
    if rows.is_floating_point():
        rows = rows.double()
    with seeded(0, model.device):
        direction = {
            name: torch.randn_like(value)
            for name, value in net.named_parameters()
            if NET + name in model.priors
        }
    for name, way in direction.items():
        prior = model.priors[NET + name]
        if isinstance(prior, WithFixedRow):
            way[prior.insertion.number] = 0.0

    def output(step: Tensor) -> Tensor:
        # away from the initial weights: a bias of zero and inputs of zero are at the kink of a ReLU
        moved = {
            name: net.get_parameter(name).detach() + (0.1 + step) * way
            for name, way in direction.items()
        }
        with WrittenOut():
            out = torch.func.functional_call(net, moved, (rows,))
        shares = torch.linspace(
            0.5,
            1.5,
            out.numel(),
            dtype=out.dtype,
            device=out.device,
        )
        return (out * shares.view_as(out)).sum()

    return output


# -- programs ----------------------------------------------------------------------------------------------------------


def wrong_derivative(density: Density, seconds: float) -> list[Finding]:
    """A finding where autograd and finite differences disagree about a program's log joint density, else an empty list.

    It names the sites.
    Compared along random directions of single sites (of groups, where there are many), at starts of a sampler and at a
    draw from the prior; in float64, or in float32 where the program cannot be run in it.

    Args:
        seconds: what one gradient takes. Of a slow program no site is checked, or the first few.
    """
    if seconds > _SLOWEST:
        return []
    size = sum(leaf.nbytes for leaf in leaves_of(density.args) if isinstance(leaf, Tensor))
    for accuracy in (DOUBLE, SINGLE) if size <= _MOST_DATA else (SINGLE,):
        try:
            sites = _wrong_sites(density, accuracy)
        except Exception as error:
            # whatever a program may raise at a point, or of values in float64
            tolerable(error)
            continue
        break
    else:  # it could be run in neither type
        return []
    if not sites:
        return []
    slopes = next(iter(sites.values()))
    numbers = {"gradient": slopes.gradient, "slope": slopes.differences[0]}
    return [Finding("wrong_gradient", {"names": list(sites), **numbers})]


def _wrong_sites(density: Density, accuracy: Accuracy) -> dict[str, Slopes]:
    """The sites whose gradient is not the derivative, each with its slopes."""
    probe = _Probe(density, accuracy)
    begin = time.thread_time()
    points = [point for point in map(probe.at, _starts(density)) if point is not None]
    groups = _groups(density.sites, time.thread_time() - begin)
    # the time of this thread: what else the machine does changes no finding
    deadline = time.thread_time() + _SECONDS
    wrong: dict[str, Slopes] = {}
    for point in points:
        for group in groups:
            unknown = [site for site in group if site.name not in wrong]
            for site in _suspicious(point, unknown):
                if wrong and time.thread_time() > deadline:
                    return wrong
                slopes = point.confirmed(site)
                if slopes is not None:
                    wrong[site.name] = slopes
    return wrong


def _suspicious(point: _Point, group: Sequence[Site]) -> Iterator[Site]:
    """The sites of a group along which the slopes differ: most programs are right, and one step is enough to see it.

    Where they differ along the whole group, its halves are looked at.
    """
    if not group or not point.slopes(group, point.probe.accuracy.steps[:1]).differ:
        return
    if len(group) == 1:
        yield group[0]
        return
    middle = len(group) // 2
    yield from _suspicious(point, group[:middle])
    yield from _suspicious(point, group[middle:])


def _starts(density: Density) -> Iterator[Tensor]:
    """Where the gradient is checked: vectors (dim,) near the centre of a sampler's starts, and a draw of the prior."""
    for radius in _RADII:
        yield density.sample_box(1, seed=0, radius=radius)[0]
    yield density.sample_prior(1, seed=1)[0]


def _groups(sites: Sequence[Site], seconds: float) -> list[list[Site]]:
    """The sites one by one, or in so many groups as there is time for.

    Args:
        seconds: what the gradients at all starts take; so do the differences along one direction, about.
    """
    affordable = int(_SECONDS / max(2.0 * seconds, 1e-3))
    count = max(1, min(len(sites), _MOST_GROUPS, affordable))
    return [list(sites[offset::count]) for offset in range(count) if sites]


class _Probe:
    """A program's log joint density as a function of one vector, in the floating type in which it is compared."""

    def __init__(self, density: Density, accuracy: Accuracy) -> None:
        self.density = density
        self.accuracy = accuracy
        self._density = density.double() if accuracy.dtype == torch.float64 else density

    def log_joint(self, z: Tensor) -> Tensor:
        """The log joint density at ``z`` (dim,), with the same random numbers at every call; a float64 scalar."""
        with seeded(0, self.density.device):
            return self._density.log_joint(z)

    def at(self, z: Tensor) -> _Point | None:
        """The point ``z`` (dim,) with its gradient; None where either the density or the gradient is not finite."""
        z = z.to(self.accuracy.dtype)
        gradient, value = torch.func.grad_and_value(self.log_joint)(z)
        if not (bool(torch.isfinite(value)) and bool(torch.isfinite(gradient).all())):
            return None
        return _Point(self, z, gradient, float(value))


@dataclass(frozen=True, eq=False)
class _Point:
    """A vector (dim,), and the gradient that autograd gives there beside the value."""

    probe: _Probe
    z: Tensor
    gradient: Tensor
    value: float

    @functools.cached_property
    def beside(self) -> _Point | None:
        """A point near this one; None where the density or its gradient is not finite there."""
        with seeded(2, self.probe.density.device):
            return self.probe.at(self.z + 0.01 * torch.randn_like(self.z))

    def confirmed(self, site: Site) -> Slopes | None:
        """The slopes of a site, if they differ for certain here and at the point beside."""
        accuracy = self.probe.accuracy
        slopes = self.slopes([site], accuracy.steps)
        if not slopes.certain:
            return None
        if self.beside is None or not self.beside.slopes([site], accuracy.steps).certain:
            return None
        # values of fewer digits than the point has may not move over small steps
        wide = self.slopes([site], [accuracy.wide])
        return None if wide.error < 0.5 * slopes.error else slopes

    def slopes(self, sites: Sequence[Site], steps: Sequence[float]) -> Slopes:
        """The slopes along one random direction of the values of ``sites``."""
        direction = torch.zeros_like(self.z)
        with seeded(3, self.probe.density.device):
            for site in sites:
                direction[site.start : site.stop] = torch.randn_like(self.z[site.start : site.stop])
        differences = tuple(self._difference(direction, step) for step in steps)
        rounding = 16.0 * torch.finfo(self.z.dtype).eps * max(1.0, abs(self.value))
        return Slopes(
            float(self.gradient @ direction),
            differences,
            self.probe.accuracy.tolerance,
            rounding / min(steps),
        )

    @torch.no_grad()
    def _difference(self, direction: Tensor, step: float) -> float:
        ahead = self.probe.log_joint(self.z + step * direction)
        behind = self.probe.log_joint(self.z - step * direction)
        return float(ahead - behind) / (2.0 * step)
