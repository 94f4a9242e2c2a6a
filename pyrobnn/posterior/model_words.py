"""A model in a few words: its net, its prior and its likelihood."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.distributions import Distribution, Independent
from tyxe.priors import Prior

from pyrobnn.model import BNN
from pyrobnn.model.density import Program


def describe_model(model: BNN | Program) -> dict[str, str]:
    """Net, prior and likelihood of a BNN, each in a few words; of a plain program its name.

    Example:
        >>> import pyrobnn as pb
        >>> noise = pb.likelihoods.HomoskedasticGaussian(0.1)
        >>> describe_model(pb.BNN(pb.networks.mlp(3, (20,), seed=0), pb.priors.FanInNormal(), noise))["net"]
        '3-20-1, Tanh, 101 weights'
    """
    if not isinstance(model, BNN):
        return {"program": getattr(model, "__name__", type(model).__name__)}
    likelihood = [repr(model.likelihood)]
    for name, prior in model.likelihood.own.priors.items():
        likelihood.append(f"{name.rpartition('.')[-1]} ~ {_written(prior)}")
    numbers = not model.likelihood.targets.classes
    units = " (in standard units)" if model.standardizer is not None and numbers else ""
    return {
        "net": f"{_layers_in_words(model.net)}, {model.num_weights:,} weights",
        "prior": _written(model.prior),
        "likelihood": "; ".join(likelihood) + units,
    }


def _layers_in_words(net: nn.Module) -> str:
    """The widths of a net of linear layers and the names of its other modules; else its name and theirs."""
    layers = _layers(net)
    names = list(dict.fromkeys(type(layer).__name__ for layer in layers))
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if not linear:
        return f"{type(net).__name__} of {', '.join(names)}"
    special = [name for name in names if name != "Linear"]
    if linear == list(filter(_has_weights, layers)):
        widths = [linear[0].in_features, *(layer.out_features for layer in linear)]
        return ", ".join(["-".join(map(str, widths)), *special])
    return f"{type(net).__name__} of {', '.join(['Linear', *special])}"


def _layers(net: nn.Module) -> list[nn.Module]:
    """The modules that hold no others."""
    return [module for module in net.modules() if not list(module.children())]


def _has_weights(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters(recurse=False))


def _written(prior: Prior | Distribution) -> str:
    """A prior or distribution as one would write it: its name and its numbers."""
    while type(prior).__name__ in ("Independent", "ExpandedDistribution", "WithFixedRow"):
        prior = cast(Independent, prior).base_dist
    if isinstance(prior, Distribution):
        arguments = {name: getattr(prior, name, None) for name in prior.arg_constraints}
    else:
        arguments = dict(vars(prior))
    shown = {}
    for name, value in arguments.items():
        words = _argument(value)
        if words is not None:
            shown[name.lstrip("_")] = words
    written = ", ".join(f"{name}={words}" for name, words in shown.items())
    return f"{type(prior).__name__}({written})"


def _argument(value: str | float | Tensor | Distribution | None) -> str | None:
    """A text, a number or a distribution as one would write it; None of anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, Distribution):
        return _written(value)
    if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1):
        return format(float(value), ".4g")
    return None
