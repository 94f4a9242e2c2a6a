"""Whether two programs are one model: their log joint densities at each other's draws, up to a constant, by site."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.checks import check_count, check_type
from pyrobnn.model import BNN, Density
from pyrobnn.model.density import Program
from pyrobnn.model.log_terms import log_prob_sum
from pyrobnn.model.nodes import Node, is_latent, is_observed

#: prior draws of each program at which the two are compared
_NUM_DRAWS = 20
#: differences that rounding explains, as a share of the log densities: they are computed in float64, of data of float32
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
    x: Any = None,
    y: Any = None,
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
    densities = []
    for name, program in (("program_a", program_a), ("program_b", program_b)):
        check_type(name, program, BNN | Callable, "a Pyro program fn(x, y)")
        called = program.pyro_model if isinstance(program, BNN) else program
        densities.append(Density(called, (x, y), points="held", double=True))
    first, second = densities
    _check_sites(first, second)
    points = [density.constrain(density.sample_prior(_NUM_DRAWS, seed)) for density in densities]
    terms = []
    for index in range(2 * _NUM_DRAWS):
        source = points[index // _NUM_DRAWS]
        values = {name: value[index % _NUM_DRAWS] for name, value in source.items()}
        terms.append((_terms(first, values), _terms(second, values)))
    return _compared(terms)


def _check_sites(first: Density, second: Density) -> None:
    """ValueError unless both have the same latent sites, of the same shapes."""
    sites = [
        {s.name: s for s in density.sites if s.kind == "latent"} for density in (first, second)
    ]
    alone = [[name for name in own if name not in other] for own, other in (sites, sites[::-1])]
    if alone[0] or alone[1]:
        words = []
        for which, names in zip(("first", "second"), alone, strict=True):
            if names:
                words.append(f"{', '.join(map(repr, names))} of the {which} program alone")
        renamed = [
            f"{b!r} may be {a!r}"
            for a in alone[0]
            for b in alone[1]
            if sites[0][a].shape == sites[1][b].shape
        ]
        hint = f" ({'; '.join(renamed[:3])}: give both one name)" if renamed else ""
        raise ValueError(
            f"the programs have different latent sites, {' and '.join(words)}{hint}; what is compared is the "
            "density of the same sites"
        )
    for name, site in sites[0].items():
        other = sites[1][name].shape
        if site.shape != other:
            raise ValueError(
                f"the site {name!r} has shape {tuple(site.shape)} in the first program and {tuple(other)} in the second"
            )


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
    if is_latent(node) and not bool(torch.as_tensor(node["fn"].support.check(node["value"])).all()):
        return -math.inf
    value = float(log_prob_sum(node))
    return -math.inf if math.isnan(value) else value


def _compared(terms: list[tuple[dict[str, float], dict[str, float]]]) -> SameModel:
    """What the terms of both programs at every point come to."""
    totals = torch.tensor([[sum(a.values()), sum(b.values())] for a, b in terms]).double()
    both = torch.isfinite(totals).all(1)
    one_alone = bool((torch.isfinite(totals).any(1) & ~both).any())
    differences = (totals[:, 0] - totals[:, 1])[both]
    constant = float(differences.median()) if len(differences) else math.nan
    spread = float((differences - constant).abs().max()) if len(differences) else math.inf
    names = [name for name in terms[0][0] if name in terms[0][1]]
    sites = {}
    for name in names:
        pairs = torch.tensor([[a[name], b[name]] for a, b in terms]).double()
        sites[name] = _spread(pairs)
    rounding = _ROUNDING * (1.0 + float(totals[both].abs().max() if len(differences) else 0.0))
    same = not one_alone and spread <= rounding
    worst = None if same or not sites else max(sites, key=lambda name: sites[name])
    difference = math.inf if one_alone else spread
    return SameModel(same, difference, constant, worst, sites)


def _spread(pairs: Tensor) -> float:
    """How far the difference of two terms (point, 2) varies; infinite where one alone is impossible."""
    finite = torch.isfinite(pairs)
    if bool((finite.any(1) & ~finite.all(1)).any()):
        return math.inf
    difference = (pairs[:, 0] - pairs[:, 1])[finite.all(1)]
    return float((difference - difference.median()).abs().max()) if len(difference) else 0.0
