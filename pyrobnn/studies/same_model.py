"""Whether two programs are one model: their log joint densities at each other's draws, up to a constant, by site."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.core.checks import check_count, check_type
from pyrobnn.model import BNN, Density
from pyrobnn.model.compile.trees import Tree
from pyrobnn.model.density import Program
from pyrobnn.model.log_terms import log_prob_sum
from pyrobnn.model.nodes import Node, is_latent, is_observed

#: prior draws of each program at which the two are compared
_NUM_DRAWS = 20
#: differences that rounding explains, as a share of the terms that differ: computed in float64, of data of float32
_ROUNDING = 1e-6


@dataclass(frozen=True)
class SameModel:
    """How far the log joint densities of two programs differ, up to a constant.

    Attributes:
        same: whether they differ by a constant alone.
        difference: by how many nats the difference varies over the points; infinite where a point is possible in one
            program alone.
        constant: the difference that they have everywhere, in nats, where they are the same; else its median.
        site: the site whose terms differ most; None where the programs are the same.
        sites: site → by how many nats the difference of its terms varies; of the sites that both programs have.
    """

    same: bool
    difference: float
    constant: float
    site: str | None
    sites: Mapping[str, float]

    def __str__(self) -> str:
        if self.same:
            return (
                f"one model: the log joint densities differ by {self.constant:.4g} nats everywhere"
            )
        where = "" if self.site is None else f", most in {self.site!r}"
        return f"two models: their log joint densities differ by up to {self.difference:.4g} nats{where}"


def same_model(
    program_a: BNN | Program,
    program_b: BNN | Program,
    x: Tree = None,
    y: Tree = None,
    *,
    seed: int = 0,
) -> SameModel:
    r"""Say whether two programs with the same sites are one model, up to a constant, and where they differ.

    .. math:: \log p_a(y, \theta) - \log p_b(y, \theta)

    is the same number at every θ exactly where both have one posterior. It is taken at draws from the prior of each, in
    float64, and so are the terms of each site.

    Args:
        program_a, program_b: two Pyro programs ``fn(x, y)`` (or BNNs) with the same latent sites.
        x, y: the data of both.
        seed: of the draws.

    Raises:
        TypeError: not a program.
        ValueError: a latent site that one of them lacks, or has in another shape: named, with what may be its new name.

    Caveat: points are prior draws; programs that differ only where neither prior has any mass are not told apart. A
    centred and a non-centred program have different sites: compare their posteriors.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def by_rate(x, y):
        ...     tau = pyro.sample("tau", dist.Gamma(2.0, 3.0))
        >>> def by_scale(x, y):  # Stan's inverse Gamma is no Gamma
        ...     tau = pyro.sample("tau", dist.InverseGamma(2.0, 3.0))
        >>> same_model(by_rate, by_rate).same, same_model(by_rate, by_scale).site
        (True, 'tau')
    """
    check_count("seed", seed, minimum=0)
    density_a = _density("program_a", program_a, (x, y))
    density_b = _density("program_b", program_b, (x, y))
    _check_sites(density_a, density_b)
    pairs = []
    for density in (density_a, density_b):
        draws = density.constrain(density.sample_prior(_NUM_DRAWS, seed))
        for index in range(_NUM_DRAWS):
            values = {name: value[index] for name, value in draws.items()}
            pairs.append(_Terms(_terms(density_a, values), _terms(density_b, values)))
    return _compared(pairs)


def _density(name: str, program: BNN | Program, data: tuple[Tree, Tree]) -> Density:
    """The density of the argument of this name, in float64."""
    check_type(name, program, BNN | Callable, "a Pyro program fn(x, y)")
    called = program.pyro_model if isinstance(program, BNN) else program
    return Density(called, data, points="held", double=True)


def _check_sites(density_a: Density, density_b: Density) -> None:
    """ValueError unless both have the same latent sites, of the same shapes."""
    shapes_a = _latent_shapes(density_a)
    shapes_b = _latent_shapes(density_b)
    if shapes_a.keys() != shapes_b.keys():
        raise ValueError(_different_sites(shapes_a, shapes_b))
    for name, shape_a in shapes_a.items():
        shape_b = shapes_b[name]
        if shape_a != shape_b:
            raise ValueError(
                f"the site {name!r} has shape {tuple(shape_a)} in the first program and {tuple(shape_b)} in the second"
            )


def _latent_shapes(density: Density) -> dict[str, torch.Size]:
    return {site.name: site.shape for site in density.sites if site.kind == "latent"}


def _different_sites(
    shapes_a: Mapping[str, torch.Size],
    shapes_b: Mapping[str, torch.Size],
) -> str:
    """Which sites either program has alone, and which of them may be one under two names."""
    only_a = [name for name in shapes_a if name not in shapes_b]
    only_b = [name for name in shapes_b if name not in shapes_a]
    words = []
    if only_a:
        words.append(f"{', '.join(map(repr, only_a))} of the first program alone")
    if only_b:
        words.append(f"{', '.join(map(repr, only_b))} of the second program alone")
    renamed = []
    for name_a, name_b in itertools.product(only_a, only_b):
        if shapes_a[name_a] == shapes_b[name_b]:
            renamed.append(f"{name_b!r} may be {name_a!r}")
    hint = f" ({'; '.join(renamed[:3])}: give both one name)" if renamed else ""
    return (
        f"the programs have different latent sites, {' and '.join(words)}{hint}; what is compared is the "
        "density of the same sites"
    )


class _Terms(NamedTuple):
    """The log density of every site of both programs at one point, site → nats."""

    a: dict[str, float]
    b: dict[str, float]

    @property
    def totals(self) -> tuple[float, float]:
        """The log joint densities of both, without the terms that both have alike.

        Large ones would hide how far the others differ.
        """
        alike = {
            name
            for name, term in self.a.items()
            if math.isfinite(term) and self.b.get(name) == term
        }
        total_a = sum(term for name, term in self.a.items() if name not in alike)
        total_b = sum(term for name, term in self.b.items() if name not in alike)
        return total_a, total_b


@torch.no_grad()
def _terms(density: Density, values: Mapping[str, Tensor]) -> dict[str, float]:
    """The log density of every site of the program at these values, in nats; −∞ outside of a support."""
    terms = {}
    with density.floats():
        nodes = density.trace(values)
        for name, node in nodes.items():
            if is_latent(node) or is_observed(node):
                terms[name] = _term(node)
    return terms


def _term(node: Node) -> float:
    """The log density of a site at its value; −∞ outside of the support, and where it is not a number."""
    if is_latent(node) and not bool(torch.as_tensor(node["fn"].support.check(node["value"])).all()):
        return -math.inf
    value = float(log_prob_sum(node))
    return -math.inf if math.isnan(value) else value


def _compared(terms: Sequence[_Terms]) -> SameModel:
    """What the terms of both programs at every point come to."""
    totals = _pairs_in_float64(at.totals for at in terms)
    sites = {}
    for name in terms[0].a:
        if name in terms[0].b:
            sites[name] = _variation(_pairs_in_float64((at.a[name], at.b[name]) for at in terms))
    is_possible = torch.isfinite(totals)
    possible = totals[is_possible.all(1)]
    is_possible_in_one = bool((is_possible.any(1) & ~is_possible.all(1)).any())
    constant = math.nan
    spread = math.inf
    rounding = _ROUNDING
    if len(possible):
        differences = possible[:, 0] - possible[:, 1]
        constant = float(differences.median())
        spread = float((differences - constant).abs().max())
        rounding = _ROUNDING * (1.0 + float(possible.abs().max()))
    if is_possible_in_one:
        spread = math.inf
    same = spread <= rounding
    worst = None if same or not sites else max(sites, key=lambda name: sites[name])
    return SameModel(same, spread, constant, worst, sites)


def _pairs_in_float64(pairs: Iterable[tuple[float, float]]) -> Tensor:
    """Pairs of numbers as (pair, 2)."""
    return torch.tensor(list(pairs), dtype=torch.float64)


def _variation(terms: Tensor) -> float:
    """How far the difference of two terms (point, 2) varies, in nats; infinite where one alone is possible."""
    is_finite = torch.isfinite(terms)
    if bool((is_finite.any(1) & ~is_finite.all(1)).any()):
        return math.inf
    finite = terms[is_finite.all(1)]
    if not len(finite):
        return 0.0
    difference = finite[:, 0] - finite[:, 1]
    return float((difference - difference.median()).abs().max())
