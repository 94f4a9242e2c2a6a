"""The sites of a Pyro trace: their kinds and axes, and their log probability under masks and scales."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution, biject_to

from pyrobnn.core.groups import SAMPLE_DIMS, variable
from pyrobnn.core.private_pyro import DETERMINISTIC, draws_rows, mask_of
from pyrobnn.core.private_torch import values_unchecked
from pyrobnn.core.threads import process_state
from pyrobnn.model import guards

Node = Mapping[str, Any]
Mask = Tensor | bool | None


def is_observed(node: Node) -> bool:
    """Whether the site has a value of its own: data, ``pyro.factor`` and ``pyro.deterministic``."""
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
    return not isinstance(node["fn"], dist.Unit) or bool(node["cond_indep_stack"])


def is_deterministic(node: Node) -> bool:
    """Whether the site is a ``pyro.deterministic``, which Pyro records as an observed site of density one."""
    return is_observed(node) and bool(node["infer"].get(DETERMINISTIC, False))


def is_subsample(node: Node) -> bool:
    """Whether it is the choice of rows of a ``pyro.plate``."""
    return draws_rows(node.get("fn"))


def device_of(nodes: Mapping[str, Node], data: Iterable[Any]) -> torch.device:
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


def elementwise(fn: Any) -> Any:
    """The distribution of one element, of a distribution of independent ones."""
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    return fn


def is_replicated(node: Node) -> bool:
    """Whether it holds data and has a distribution to draw others from."""
    return is_datum(node) and not isinstance(node["fn"], dist.Unit)


def is_improper(fn: Any) -> bool:
    """Whether the distribution is a constant density, which has no draws."""
    while isinstance(fn, (torch.distributions.Independent, dist.MaskedDistribution)):
        fn = fn.base_dist
    return isinstance(fn, dist.ImproperUniform)


def is_normal(fn: Distribution) -> bool:
    """Whether it is ``dist.Normal``, and no distribution derived from it."""
    return guards.kind_of(fn) is dist.Normal


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
    sizes: dict[str, set[int]] = {}
    for node in nodes.values():
        for plate in node.get("cond_indep_stack", ()):
            sizes.setdefault(plate.name, set()).add(plate.size)
    sites = {name for name, node in nodes.items() if not is_subsample(node)}
    unclear = {name for name, counts in sizes.items() if len(counts) > 1} | {*SAMPLE_DIMS} | sites
    axes_by_site = {}
    for node in nodes.values():
        if node["type"] != "sample" or is_subsample(node) or not isinstance(node["value"], Tensor):
            continue
        names = _axes_of(node, unclear)
        if any(names):
            axes_by_site[node["name"]] = names
    return axes_by_site


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


@contextlib.contextmanager
def without_validation() -> Iterator[None]:
    """Argument validation calls .item(), which can't be traced: off inside, as the user left it outside.

    In its place a density is zero where a parameter is impossible (:mod:`pyrobnn.model.guards`).
    """
    with process_state(), pyro.validation_enabled(False), values_unchecked(), guards.guarded():
        yield


def log_prob_sum(node: Node) -> Tensor:
    """The site's log probability, scaled and masked: a float64 scalar, summed from elements in their own dtype."""
    fn = node["fn"]
    scale = node["scale"]
    with without_validation():
        if not is_masked(node) and not (isinstance(scale, Tensor) and scale.dim()):
            # the elements of an event are summed here, in float64, not inside the distribution
            return _unmasked(elementwise(fn), node["value"]).sum(dtype=torch.float64) * scale
        log_prob, _ = _log_prob(fn, node["value"], node["mask"])
    return (log_prob * scale).sum(dtype=torch.float64)


def datum_terms(node: Node) -> Tensor:
    """What each datum of the site contributes to the log joint density, in its batch shape; under a mask (data,).

    With the scale the program gives a datum (``poutine.scale``), but without the one by which a plate makes up for the
    rows it leaves out. A masked datum has no term, rather than one of zero, which would be a datum of density one.

    Raises:
        ValueError: which data are masked depends on a latent site.
    """
    with without_validation():
        log_prob, mask = _log_prob(node["fn"], node["value"], node["mask"])
    scale = node["scale"]
    for plate in node["cond_indep_stack"]:
        if plate.full_size != plate.size:
            scale = scale * plate.size / plate.full_size
    if isinstance(scale, Tensor) or not math.isclose(scale, 1.0, rel_tol=1e-12):
        log_prob = log_prob * scale
    log_prob = log_prob.to(node["value"].dtype) if node["value"].is_floating_point() else log_prob
    if mask is None:
        return log_prob
    try:
        rows = mask.expand(log_prob.shape).reshape(-1).nonzero()[:, 0]
    except RuntimeError as error:  # raised by vmap, for a mask that is batched
        raise ValueError(
            f"the mask of {node['name']!r} depends on a latent site, so the number of data varies from draw to draw: "
            "there is no log likelihood of each datum"
        ) from error
    return log_prob.reshape(-1)[rows]


def row_terms(node: Node, num: int) -> Tensor | None:
    """What each of ``num`` rows, the first axis of an observed site, adds to the log joint, (num,); None: has none."""
    fn = node["fn"] if is_masked(node) else elementwise(node["fn"])
    with without_validation():
        log_prob = _log_prob(fn, node["value"], node["mask"])[0] * node["scale"]
    if not log_prob.dim() or len(log_prob) != num:
        return None
    return log_prob.reshape(num, -1).sum(1, dtype=torch.float64)


def _log_prob(fn: Any, value: Tensor, mask: Mask) -> tuple[Tensor, Tensor | None]:
    """Log probabilities, zero where masked, and the mask (None: nothing is), which broadcasts to their shape.

    What is masked may be NaN or outside of the support: it reaches neither the value nor the gradient.
    """
    mask = True if mask is None else mask
    if isinstance(fn, dist.MaskedDistribution):
        return _log_prob(fn.base_dist, value, mask & mask_of(fn))
    if isinstance(fn, dist.NanMaskedNormal):  # which picks the known values by a mask of each point
        return _log_prob(dist.Normal(fn.loc, fn.scale), value, mask & value.isfinite())
    if isinstance(fn, torch.distributions.Independent):
        dims = tuple(range(-fn.reinterpreted_batch_ndims, 0))
        inner = mask.reshape(mask.shape + (1,) * len(dims)) if isinstance(mask, Tensor) else mask
        log_prob, element_mask = _log_prob(fn.base_dist, value, inner)
        if not dims:
            return log_prob, element_mask
        event_mask = None
        if element_mask is not None:
            # an event counts as soon as one of its elements does
            event_mask = element_mask.expand(log_prob.shape).any(dims)
        return log_prob.sum(dims, dtype=torch.float64), event_mask
    if mask is True:
        return _unmasked(fn, value), None
    mask = torch.as_tensor(mask, device=value.device)
    # where() alone would keep the value clean, but the gradient of what it drops is zero times NaN
    value_mask = mask.reshape(mask.shape + (1,) * fn.event_dim)
    harmless = torch.where(value_mask, value, _in_support(fn, value))
    log_prob = _unmasked(fn, harmless)
    return torch.where(mask, log_prob, torch.zeros_like(log_prob)), mask


def _unmasked(fn: Any, value: Tensor) -> Tensor:
    """``fn.log_prob(value)``, a multinomial's written out: torch overwrites some of its logits, which vmap refuses.

    So it does with truth values that are whole numbers.
    """
    if isinstance(fn, torch.distributions.Bernoulli) and not value.is_floating_point():
        value = value.to(fn.logits.dtype)
    if isinstance(fn, torch.distributions.Multinomial):
        return guards.log_prob(fn, value, _multinomial)
    return fn.log_prob(value)


def _multinomial(fn: dist.Multinomial, value: Tensor) -> Tensor:
    """The log probability of the counts."""
    logits, counts = torch.broadcast_tensors(fn.logits, value)
    # what is impossible and did not happen costs nothing
    powers = torch.where((counts == 0) & (logits == -torch.inf), 0.0, logits) * counts
    return torch.lgamma(counts.sum(-1) + 1) + (powers - torch.lgamma(counts + 1)).sum(-1)


def _in_support(fn: Any, value: Tensor) -> Tensor:
    """A value of the distribution, of the shape of ``value``: the image of zero; zero itself for a discrete one."""
    zero = torch.zeros_like(value)
    try:
        if fn.support.is_discrete:
            return zero
        transform = biject_to(fn.support)
        return transform(zero.new_zeros(transform.inverse_shape(value.shape))).detach()
    except (NotImplementedError, AttributeError):  # a distribution that does not say its support
        return zero
