"""What a net does with random numbers and with the rows beside a row, seen by running it on a few."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from pyrobnn.checks import Refused
from pyrobnn.findings import Finding
from pyrobnn.model import BNN
from pyrobnn.seeding import kept

#: rows that are enough to see it
_FEW = 8
#: of the largest output: what a product of another number of rows, or a low precision, may change
_ROUNDING = 0.01


def refuse_random(model: BNN, x: Tensor, *, deterministic: bool) -> None:
    """Dropout and noise that no layer shows: in a function, or inside of a recurrent layer or of attention.

    Args:
        model: the model, its net in the mode that it is fitted in.
        x: inputs (N, …).
        deterministic: refuse a net that draws in that mode; otherwise only one that draws in evaluation mode too.

    Raises:
        Refused: the net draws random numbers.
    """
    if _draws(model, model.eval_net, x):
        raise Refused(
            "the net draws random numbers, in evaluation mode too, so it is another function each time it is asked: "
            "take the noise out of it; that of the targets is the likelihood's"
        )
    if deterministic and _draws(model, model.net, x):
        raise Refused(
            "the net is in training mode and draws random numbers (dropout by a function, or inside of a recurrent "
            "layer or of attention), so it has no fixed density: call net.eval() before building the BNN"
        )


@torch.no_grad()
def _draws(model: BNN, net: torch.nn.Module, x: Tensor) -> bool:
    device = model.device
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with kept(device):
        before = _states(device)
        torch.func.functional_call(net, buffers, (x[:_FEW],))
        return not all(map(torch.equal, before, _states(device)))


def _states(device: torch.device) -> list[Tensor]:
    found = [torch.get_rng_state()]
    if device.type != "cpu":
        found.append(torch.get_device_module(device).get_rng_state(device))
    return found


@torch.no_grad()
def rows_together(model: BNN, x: Tensor) -> list[Finding]:
    """Whether the output of the net for a row depends on the other rows of ``x`` (N, …), as a batch mean makes it."""
    few = x[:_FEW]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a batch of one is asked for
        alone, together = model.forward({}, few[:1]), model.forward({}, few)[:1]
    off, most = float((alone - together).abs().max()), float(together.abs().max())
    if off <= _ROUNDING * most or not math.isfinite(most):
        return []
    return [Finding("rows_together", {"change": off if math.isfinite(off) else None})]
