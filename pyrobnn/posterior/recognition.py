"""By what a file knows its model again: the buffers of its net, and what its first draw predicts at made-up inputs.

The model is code and is not in the file. A net with the same names and shapes and another activation, other batch-norm
statistics, other units or another likelihood would take the draws, and predict something else without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from pyrobnn.core.positions import evenly_spaced
from pyrobnn.model import BNN
from pyrobnn.model.bnn import NET
from pyrobnn.posterior.prediction import Prediction
from pyrobnn.posterior.ranges import InputRange, made_up_inputs

#: made-up inputs, and numbers that are kept of what is predicted at them
_NUM_INPUTS = 2
_NUM_NUMBERS = 64
#: difference, relative to the largest number, that another device or version of torch may make, as TF32 does; of short
#: types in units of their rounding
_TOLERANCE = 3e-3
_ROUNDINGS = 8
#: step of a sequence that fills the unit interval evenly, the fractional part of the golden ratio
_GOLDEN = 0.6180339887498949


class Recognised(Protocol):
    """What of a posterior is asked here."""

    @property
    def bnn(self) -> BNN: ...
    @property
    def meta(self) -> dict[str, Any]: ...
    @property
    def draws(self) -> dict[str, Tensor]: ...
    def inputs(self, x: Tensor) -> Tensor: ...


def stored_buffers(posterior: Recognised) -> dict[str, Tensor]:
    """The buffers that a state dictionary of the net has, by site; without those that draws have of their own."""
    return {
        NET + name: buffer
        for name, buffer in posterior.bnn.persistent_buffers().items()
        if NET + name not in posterior.draws and not buffer.is_complex()
    }


@torch.no_grad()
def first_predictions(posterior: Recognised) -> dict[str, list[float]]:
    """What the net, the likelihood and the units make of the first draw at made-up inputs.

    ``probs`` of classes, ``mean`` and ``sd`` of numbers; empty where the net takes no made-up inputs, or where a
    number is not finite.
    """
    bnn = posterior.bnn
    try:
        inputs = posterior.inputs(_made_up(posterior))
        first = {site: value[:1, :1] for site, value in posterior.draws.items()}
        f = bnn.forward({site: value[0, 0] for site, value in first.items()}, inputs)
    # inputs that no row of the data resembles may be refused by any layer
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError):
        return {}
    y_mean, y_scale = bnn.units or (0.0, 1.0)
    prediction = Prediction(
        f[None, None],
        bnn.likelihood,
        first,
        y_mean=y_mean,
        y_scale=y_scale,
    )
    if bnn.likelihood.targets.classes:
        values = {"probs": prediction.probs}
    else:
        values = {"mean": prediction.mean, "sd": prediction.aleatoric_var.sqrt()}
    if not all(bool(value.isfinite().all()) for value in values.values()):
        return {}
    return {name: _few(value) for name, value in values.items()}


def check_predictions(
    name: str, posterior: Recognised, expected: Mapping[str, list[float]]
) -> None:
    """ValueError where the posterior of the file ``name`` predicts otherwise than when it was written."""
    if not expected:
        return
    predicted = first_predictions(posterior)
    tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(posterior.bnn.dtype).eps)
    # beside the sd a mean that is nearly zero is nothing but rounding
    sd = expected.get("sd", [])
    if predicted.keys() == expected.keys() and all(
        _are_close(predicted[key], numbers, tolerance * _largest([*numbers, *sd]))
        for key, numbers in expected.items()
    ):
        return
    raise ValueError(
        f"{name} was fitted with another model: its sites have the same names and shapes, but at made-up inputs its "
        f"first draw predicted {_summary(expected)}, and with this model {_summary(predicted)}. Build net, likelihood "
        "and units as they were fitted"
    )


def _made_up(posterior: Recognised) -> Tensor:
    """Inputs between the ends of the training data that are the same wherever they are made."""
    bnn = posterior.bnn
    shape = (_NUM_INPUTS, *posterior.meta["input_shape"])
    count = torch.Size(shape).numel()
    shares = (_GOLDEN * torch.arange(1, count + 1, dtype=torch.float64)).frac().reshape(shape)
    state = posterior.meta.get("input_range")
    input_range = None if state is None else InputRange.from_state(state)
    return bnn.comparable(made_up_inputs(bnn, input_range, shares))


def _few(value: Tensor) -> list[float]:
    """Evenly spaced numbers of a tensor."""
    flat = value.detach().cpu().double().flatten()
    return flat[evenly_spaced(len(flat), min(_NUM_NUMBERS, len(flat)))].tolist()


def _largest(numbers: list[float]) -> float:
    """The largest size among some numbers."""
    return max(abs(number) for number in numbers)


def _are_close(predicted: list[float], expected: list[float], tolerance: float) -> bool:
    """Whether two lists of numbers differ by no more than so much."""
    if len(predicted) != len(expected):
        return False
    left = torch.tensor(predicted, dtype=torch.float64)
    right = torch.tensor(expected, dtype=torch.float64)
    return bool((left - right).abs().max() <= tolerance)


def _summary(values: Mapping[str, list[float]]) -> str:
    """The first numbers of each prediction, for a message."""
    words = [f"{name} {', '.join(f'{v:.3g}' for v in few[:2])}" for name, few in values.items()]
    return " and ".join(words) if words else "nothing finite"
