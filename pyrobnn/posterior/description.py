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
    return {
        "net": f"{_net(model.net)}, {model.num_weights:,} weights",
        "prior": _called(model.prior),
        "likelihood": "; ".join([repr(model.likelihood), *_noise(model)])
        + ("" if model.standardizer is None or model.likelihood.targets.classes else " (in standard units)"),
    }


def _net(net: nn.Module) -> str:
    """Widths and activations of a chain of linear layers; the names of other layers in their order."""
    parts = [part for part in net.modules() if not list(part.children())]
    layers = [part for part in parts if isinstance(part, nn.Linear)]
    others = dict.fromkeys(type(part).__name__ for part in parts if not isinstance(part, nn.Linear))
    has_weights = [part for part in parts if next(part.parameters(recurse=False), None) is not None]
    if layers and len(layers) == len(has_weights):
        widths = [layers[0].in_features, *(layer.out_features for layer in layers)]
        return ", ".join(["-".join(map(str, widths)), *others])
    return f"{type(net).__name__} of {', '.join(dict.fromkeys(type(part).__name__ for part in parts))}"


def _noise(model: BNN) -> list[str]:
    return [
        f"{name.removeprefix('likelihood.')} ~ {_called(d)}"
        for name, d in model.likelihood.own.priors.items()
    ]


def _called(thing: Any) -> str:
    """A prior or distribution as one would write it: its name and its numbers."""
    inner = getattr(thing, "base_dist", None)
    if isinstance(inner, torch.distributions.Distribution) and type(thing).__name__ in (
        "Independent",
        "ExpandedDistribution",
    ):
        return _called(inner)
    if isinstance(thing, torch.distributions.Distribution):
        names = [name for name in thing.arg_constraints if hasattr(thing, name) and name != "logits"]
        values = {name: getattr(thing, name) for name in names}
    else:
        values = {name.lstrip("_"): value for name, value in vars(thing).items()}
    shown = {name: text for name, value in values.items() if (text := _value(value))}
    return f"{type(thing).__name__}({', '.join(f'{name}={text}' for name, text in shown.items())})"


def _value(value: Any) -> str:
    if isinstance(value, torch.distributions.Distribution):
        return _called(value)
    if isinstance(value, torch.Tensor):
        flat = value.detach().flatten()
        return f"{float(flat[0]):.4g}" if flat.numel() and bool((flat == flat[0]).all()) else ""
    return f"{value:.4g}" if isinstance(value, float | int) else value if isinstance(value, str) else ""
