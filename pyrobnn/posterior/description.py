"""A model in words: its net, prior and likelihood, for whoever reads a tree without the code that made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pyrobnn.model import BNN


def describe_model(model: BNN | Callable[..., Any]) -> dict[str, str]:
    """Net, prior and likelihood of a BNN, each in a few words; of a plain program its name.

    Example:
        >>> import pyrobnn as pb
        >>> noise = pb.likelihoods.HomoskedasticGaussian(0.1)
        >>> describe_model(pb.BNN(pb.networks.mlp(3, (20,), seed=0), pb.priors.FanInNormal(), noise))["net"]
        '3-20-1, Tanh, 101 weights'
    """
    if not isinstance(model, BNN):
        return {"program": getattr(model, "__name__", type(model).__name__)}
    own = [f"{name.rpartition('.')[-1]} ~ {_called(d)}" for name, d in model.likelihood.own.priors.items()]
    units = "" if model.standardizer is None or model.likelihood.targets.classes else " (in standard units)"
    return {
        "net": f"{_net(model.net)}, {model.num_weights:,} weights",
        "prior": _called(model.prior),
        "likelihood": "; ".join([repr(model.likelihood), *own]) + units,
    }


def _net(net: nn.Module) -> str:
    """Widths and activations of a chain of linear layers; the names of other layers in their order."""
    parts = [part for part in net.modules() if not list(part.children())]
    names = dict.fromkeys(type(part).__name__ for part in parts)
    layers = [part for part in parts if isinstance(part, nn.Linear)]
    if not layers or len(layers) < sum(1 for part in parts if list(part.parameters(recurse=False))):
        return f"{type(net).__name__} of {', '.join(names)}"
    widths = [layers[0].in_features, *(layer.out_features for layer in layers)]
    return ", ".join(["-".join(map(str, widths)), *(name for name in names if name != "Linear")])


def _called(thing: Any) -> str:
    """A prior or distribution as one would write it: its name and its numbers."""
    while type(thing).__name__ in ("Independent", "ExpandedDistribution"):
        thing = thing.base_dist
    if isinstance(thing, torch.distributions.Distribution):
        values = {n: getattr(thing, n) for n in thing.arg_constraints if n != "logits" and hasattr(thing, n)}
    else:
        values = {name.lstrip("_"): value for name, value in vars(thing).items()}
    shown = [f"{name}={text}" for name, value in values.items() if (text := _value(value))]
    return f"{type(thing).__name__}({', '.join(shown)})"


def _value(value: Any) -> str:
    if isinstance(value, torch.distributions.Distribution):
        return _called(value)
    if isinstance(value, torch.Tensor) and value.numel() and bool((value == value.flatten()[0]).all()):
        value = float(value.flatten()[0])
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else ""
