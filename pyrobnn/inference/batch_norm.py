"""Batch normalisation in a posterior: batch statistics while training, statistics of its own for every draw after."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyrobnn.model import BATCH_NORM, BNN, NET


def training_norms(model: BNN) -> list[str]:
    """Names of the batch-norm layers that use the statistics of the batch (those in training mode)."""
    return [
        name
        for name, module in model.net.named_modules()
        if isinstance(module, BATCH_NORM) and (module.training or module.running_mean is None)
    ]


def with_batch_statistics(model: BNN) -> BNN:
    """The model with its training-mode batch-norm layers free of buffers: a pure function, fit for ``vmap``.

    Returns the model itself where it has no such layer.
    """
    names = training_norms(model)
    if not names:
        return model
    pure = copy.copy(model)
    pure.net = copy.deepcopy(model.net)
    for name in names:
        torch.func.replace_all_batch_norm_modules_(pure.net.get_submodule(name))
    return pure


@torch.no_grad()
def refreshed_statistics(
    model: BNN,
    draws: Mapping[str, Tensor],
    inputs: Iterable[Tensor],
    few: Iterable[Tensor] | None = None,
) -> dict[str, Tensor]:
    r"""Running statistics that belong to the weights of each draw: averages over the batches of one pass.

    Where there are ``few`` inputs, only the mean of each chain's draws, :math:`\bar\theta`, sees all of them. A draw
    sees the few, and what those differ by from all at the mean is taken off (a control variate):

    .. math:: m(\theta) = m_f(\theta) + m(\bar\theta) - m_f(\bar\theta), \qquad
        v(\theta) = v_f(\theta) \min\Big( 1, \frac{v(\bar\theta)}{v_f(\bar\theta)} \Big)
        + \max\big( 0, v(\bar\theta) - v_f(\bar\theta) \big)

    That is exact at the mean, and a variance stays positive however far away a draw is.

    Args:
        model: its training-mode batch-norm layers are refreshed.
        draws: site → (chain, draw, \*shape).
        inputs: batches of x that cover the training data; iterated once per draw, or of few inputs once per chain.
        few: batches of some of these rows, iterated once per draw.

    Returns:
        ``net.<layer>.running_mean`` and ``running_var`` → (chain, draw, features); empty without such layers.
    """
    net = copy.deepcopy(model.net).eval()
    norms = _averaging_norms(net, training_norms(model))
    if not norms:
        return {}
    weights = {
        name.removeprefix(NET): value for name, value in draws.items() if name.startswith(NET)
    }
    if few is None:
        return _statistics_of_each(net, norms, weights, inputs)
    centres = {name: value.mean(1, keepdim=True) for name, value in weights.items()}
    whole = _statistics_of_each(net, norms, centres, inputs)
    centres_few = _statistics_of_each(net, norms, centres, few)
    of_few = _statistics_of_each(net, norms, weights, few)
    return {
        name: _controlled(name, values, whole[name], centres_few[name])
        for name, values in of_few.items()
    }


def _controlled(name: str, values: Tensor, whole: Tensor, few: Tensor) -> Tensor:
    """Statistics of draws by few inputs, less the error that these have at the mean of the draws."""
    if name.endswith("running_mean"):
        return values + (whole - few)
    # a feature that does not move in the few rows has no ratio
    ratio = torch.where(few > 0, whole / few, 1.0)
    return values * ratio.clamp_max(1.0) + (whole - few).clamp_min(0.0)


def _statistics_of_each(
    net: nn.Module,
    norms: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    inputs: Iterable[Tensor],
) -> dict[str, Tensor]:
    """Site of each statistic → (chain, draw, features), by one pass over the inputs for each draw."""
    chains, count = next(iter(weights.values())).shape[:2]
    statistics: dict[str, list[Tensor]] = {}
    for place in itertools.product(range(chains), range(count)):
        params = {name: value[place] for name, value in weights.items()}
        for norm in norms.values():
            norm.reset_running_stats()
        for x in inputs:
            torch.func.functional_call(net, params, (x,))
        for name, norm in norms.items():
            mean = norm.running_mean.clone()
            variance = norm.running_var.clone()
            statistics.setdefault(f"{NET}{name}.running_mean", []).append(mean)
            statistics.setdefault(f"{NET}{name}.running_var", []).append(variance)
    return {
        name: torch.stack(values).unflatten(0, (chains, count))
        for name, values in statistics.items()
    }


def _averaging_norms(net: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """The named layers of ``net`` that have running statistics, set to take plain averages over the batches."""
    # the buffers of a layer are attributes that torch declares for no module
    norms: dict[str, Any] = {name: net.get_submodule(name) for name in names}
    norms = {name: norm for name, norm in norms.items() if norm.running_mean is not None}
    for norm in norms.values():
        norm.train()
        norm.momentum = None
    return norms
