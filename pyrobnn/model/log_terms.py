"""The log probability of the sites of a Pyro trace, under their masks and scales."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution, biject_to

from pyrobnn.core.private_pyro import mask_of
from pyrobnn.core.private_torch import depends, values_unchecked
from pyrobnn.core.threads import process_state
from pyrobnn.model import guards
from pyrobnn.model.distribution_kinds import elementwise, is_normal
from pyrobnn.model.nodes import Node, is_masked

_Mask = Tensor | bool | None


class _Validation(threading.local):
    """Whether this thread is inside of :func:`without_validation`."""

    is_off = False


_VALIDATION = _Validation()


@contextlib.contextmanager
def without_validation() -> Iterator[None]:
    """Argument validation calls .item(), which can't be traced: off inside, as the user left it outside.

    In its place a density is zero where a parameter is impossible (:mod:`pyrobnn.model.guards`).
    """
    # to enter takes as long as a site does: torch forgets what it knows of all classes of distributions
    if _VALIDATION.is_off:
        yield
        return
    with process_state(), pyro.validation_enabled(False), values_unchecked(), guards.guarded():
        _VALIDATION.is_off = True
        try:
            yield
        finally:
            _VALIDATION.is_off = False


def log_prob_sum(node: Node) -> Tensor:
    """The site's log probability, scaled and masked: a float64 scalar, summed from elements in their own dtype."""
    with without_validation():
        return _log_prob_sum(node)


def log_prob_total(nodes: Iterable[Node], device: torch.device) -> Tensor:
    """The log probability of some sites together, as :func:`log_prob_sum`, on a device."""
    total = torch.zeros(
        (),
        dtype=torch.float64,
        device=device,
    )
    with without_validation():
        for node in nodes:
            total = total + _log_prob_sum(node)
    return total


def is_plain_normal(node: Node) -> bool:
    """Whether the site's values are normal, each by itself, with parameters that depend on no other site."""
    scale = node["scale"]
    if is_masked(node) or isinstance(scale, Tensor) or scale != 1.0:
        return False
    fn = elementwise(node["fn"])
    if not is_normal(fn) or fn.batch_shape != node["value"].shape:
        return False
    return not depends(fn.loc) and not depends(fn.scale)


def log_prob_of_normals(nodes: Iterable[Node], values: Tensor) -> Tensor:
    """The log probability of plain normal sites together, whose values lie one after the other in a vector.

    As the sum of :func:`log_prob_sum`, in the operations of one site.
    """
    fns = [elementwise(node["fn"]) for node in nodes]

    def in_a_row(parameters: list[Tensor]) -> Tensor:
        # a number without dimensions may lie on another device
        pieces = [
            parameter.expand(fn.batch_shape).reshape(-1).to(values.device)
            for fn, parameter in zip(fns, parameters, strict=True)
        ]
        return torch.cat(pieces)

    # a prior on weights is made once, with its arguments validated; a site of a program while that runs
    guard = guards.guarded() if any(map(guards.is_guarded, fns)) else guards.unguarded()
    with without_validation():
        with guard:
            together = dist.Normal(
                in_a_row([fn.loc for fn in fns]), in_a_row([fn.scale for fn in fns])
            )
        return together.log_prob(values).sum(dtype=torch.float64)


def _log_prob_sum(node: Node) -> Tensor:
    """As :func:`log_prob_sum`, inside :func:`without_validation`."""
    fn = node["fn"]
    scale = node["scale"]
    if not is_masked(node) and not (isinstance(scale, Tensor) and scale.dim()):
        # the elements of an event are summed here, in float64, not inside the distribution
        return _unmasked(elementwise(fn), node["value"]).sum(dtype=torch.float64) * scale
    log_prob, _ = _log_prob(fn, node["value"], node["mask"])
    return (log_prob * scale).sum(dtype=torch.float64)


def masked_log_prob(node: Node) -> Tensor:
    """The site's log probabilities in its batch shape, zero where masked, without its scale."""
    with without_validation():
        return _log_prob(node["fn"], node["value"], node["mask"])[0]


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


def _log_prob(fn: Distribution, value: Tensor, mask: _Mask) -> tuple[Tensor, Tensor | None]:
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
    value_mask = mask.reshape(mask.shape + (1,) * len(fn.event_shape))
    harmless = torch.where(value_mask, value, _in_support(fn, value))
    log_prob = _unmasked(fn, harmless)
    return torch.where(mask, log_prob, torch.zeros_like(log_prob)), mask


def _unmasked(fn: Distribution, value: Tensor) -> Tensor:
    """``fn.log_prob(value)``, a multinomial's written out: torch overwrites some of its logits, which vmap refuses.

    Whole numbers under a Bernoulli become floating first, for the same reason.
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


def _in_support(fn: Distribution, value: Tensor) -> Tensor:
    """A value of the distribution, of the shape of ``value``: the image of zero; zero itself for a discrete one."""
    zero = torch.zeros_like(value)
    try:
        support = fn.support
        if support is None or support.is_discrete:
            return zero
        transform = biject_to(support)
        return transform(zero.new_zeros(transform.inverse_shape(value.shape))).detach()
    except (NotImplementedError, AttributeError):  # a distribution that does not say its support
        return zero
