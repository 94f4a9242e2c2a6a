"""Batch normalisation in a posterior: batch statistics while training, statistics of its own for every draw after."""

from __future__ import annotations

import copy
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
    model: BNN, draws: Mapping[str, Tensor], inputs: Iterable[Tensor]
) -> dict[str, Tensor]:
    r"""Running statistics that belong to the weights of each draw: averages over the batches of one pass.

    Args:
        model: its training-mode batch-norm layers are refreshed.
        draws: site → (chain, draw, \*shape).
        inputs: batches of x that cover the training data; iterated once per draw.

    Returns:
        ``net.<layer>.running_mean`` and ``running_var`` → (chain, draw, features); empty without such layers.
    """
    net = copy.deepcopy(model.net).eval()
    norms = _averaging_norms(net, training_norms(model))
    if not norms:
        return {}
    sites = [name for name in draws if name.startswith(NET)]
    chains, count = draws[sites[0]].shape[:2]
    statistics: dict[str, list[Tensor]] = {}
    for index in range(chains * count):
        params = {name.removeprefix(NET): draws[name].flatten(0, 1)[index] for name in sites}
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
