"""The sites of a Pyro trace: their kinds, and the plates of their axes.

*Observed* (to Pyro): data, factors and deterministic values. *Datum*: data, and a factor inside a plate. *Replicated*:
a datum with a distribution to draw from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyrobnn.core.groups import SAMPLE_DIMS, variable
from pyrobnn.core.private_pyro import DETERMINISTIC, draws_rows
from pyrobnn.model.compile.trees import Tree
from pyrobnn.model.distribution_kinds import elementwise, is_improper

Node = Mapping[str, Any]
#: in ``node["infer"]`` of the factor that takes the place of data whose discrete sites are summed out
SUMMED_DATA = "_summed_data"
#: a node whose site is being run, which a handler may change
Message = MutableMapping[str, Any]


def is_observed(node: Node) -> bool:
    """Whether Pyro records the site as observed: data, ``pyro.factor`` and ``pyro.deterministic``."""
    return node["type"] == "sample" and node["is_observed"] and not is_subsample(node)


def is_latent(node: Node) -> bool:
    """Whether the site is to be inferred."""
    return node["type"] == "sample" and not node["is_observed"] and not is_subsample(node)


def is_datum(node: Node) -> bool:
    """Whether the site holds data.

    A factor does inside a plate, one term per index (how a censored datum is written); outside it belongs to all data
    or to none.
    """
    if not is_observed(node) or is_deterministic(node):
        return False
    if node["infer"].get(SUMMED_DATA, False):
        return True
    return not isinstance(node["fn"], dist.Unit) or bool(node["cond_indep_stack"])


def is_replicated(node: Node) -> bool:
    """Whether it holds data and has a distribution to draw others from."""
    return is_datum(node) and not isinstance(node["fn"], dist.Unit)


def is_deterministic(node: Node) -> bool:
    """Whether the site is a ``pyro.deterministic``, which Pyro records as an observed site of density one."""
    return is_observed(node) and bool(node["infer"].get(DETERMINISTIC, False))


def is_subsample(node: Node) -> bool:
    """Whether it is the choice of rows of a ``pyro.plate``."""
    return draws_rows(node.get("fn"))


def device_of(nodes: Mapping[str, Node], data: Iterable[Tree]) -> torch.device:
    """Where a program computes: where anything that it names or of its ``data`` lies, unless all of it lies on the CPU.

    Not where its first site is: ``dist.Normal(0.0, 1.0)`` is drawn on the CPU wherever the data are.
    """
    values = [node["value"] for node in nodes.values() if node["type"] in ("sample", "param")]
    devices = [value.device for value in (*values, *data) if isinstance(value, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def is_masked(node: Node) -> bool:
    """Whether a mask may take away some of its log probability."""
    if node["mask"] is not None and node["mask"] is not True:
        return True
    masking = (dist.MaskedDistribution, dist.NanMaskedNormal)
    return isinstance(elementwise(node["fn"]), masking)


@dataclass(frozen=True)
class Derived:
    """What one run of a program shows beside its density.

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
            {n["name"]: n["value"].numel() for n in sampled if is_replicated(n)},
            axes(nodes),
            any(is_improper(n["fn"]) for n in sampled if is_latent(n)),
        )


def axes(nodes: Mapping[str, Node]) -> dict[str, list[str | None]]:
    """The plate of every axis of each site, site → (axis,), None for an axis that belongs to no plate.

    Sites without any are omitted. A plate that is named as the sample dimensions or a site are, or that has two sizes
    in one program, names no axis.
    """
    unclear = _unclear_names(nodes)
    axes_by_site = {}
    for node in nodes.values():
        if node["type"] != "sample" or is_subsample(node) or not isinstance(node["value"], Tensor):
            continue
        names = _axes_of(node, unclear)
        if any(names):
            axes_by_site[node["name"]] = names
    return axes_by_site


def _unclear_names(nodes: Mapping[str, Node]) -> set[str]:
    """The names that an axis may not have: of the sample dimensions, of sites, and of plates of two sizes."""
    sizes: dict[str, set[int]] = {}
    for node in nodes.values():
        for plate in node.get("cond_indep_stack", ()):
            sizes.setdefault(plate.name, set()).add(plate.size)
    of_two_sizes = {name for name, counts in sizes.items() if len(counts) > 1}
    sites = {name for name, node in nodes.items() if not is_subsample(node)}
    return {*SAMPLE_DIMS} | sites | of_two_sizes


def _axes_of(node: Node, unclear: Collection[str]) -> list[str | None]:
    """The plate of every axis of a site's value, None for one of no plate or of a plate whose name is unclear."""
    shape = node["value"].shape
    events = node["fn"].event_dim
    # pyro.deterministic calls all axes of its value one event, unless its arguments say otherwise
    if is_deterministic(node) and events >= len(shape):
        events = 0
    names: list[str | None] = [None] * len(shape)
    for plate in node["cond_indep_stack"]:
        if plate.dim is None:
            continue
        axis = len(shape) - events + plate.dim
        if 0 <= axis < len(shape) and shape[axis] == plate.size:
            names[axis] = None if plate.name in unclear else variable(plate.name)
    return names
