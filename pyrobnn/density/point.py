"""Point parameters as Pyro sees them: how a BNN reads their values, and how a guide states them."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.replay_messenger import ReplayMessenger
from pyro.poutine.runtime import Message
from torch import Tensor
from torch.distributions import constraints

from pyrobnn.compile.private import offered


def point(name: str, init: Tensor, support: constraints.Constraint = constraints.real) -> Tensor:
    """A point parameter of a BNN: the value it is given, else an ordinary ``pyro.param``."""
    value = given(name)
    return pyro.param(name, init, constraint=support) if value is None else value.reshape(init.shape)


def given(name: str) -> Tensor | None:
    """The value that draws or a guide's trace hold of ``name``, or None.

    ``pyro.infer.Predictive`` hands a program only the sites of the guide's trace, by conditioning, and an ELBO by
    replaying; both answer ``sample`` statements alone, so a ``pyro.param`` never hears of them.
    """
    message: Message[Any, Any] = {
        "type": "sample",
        "name": name,
        # a block may ask for the kind of distribution
        "fn": None,  # type: ignore[typeddict-item]
        "value": None,
        "is_observed": False,
        "infer": {},
        "stop": False,
    }
    return offered(message, (ConditionMessenger, ReplayMessenger, BlockMessenger))


def state_in_store(name: str, value: Tensor, support: constraints.Constraint) -> None:
    """The ``pyro.param`` statement of a fitted value: it enters Pyro's present store.

    Raises:
        ValueError: the store holds another value, which the program would use instead.
    """
    stored = pyro.param(name, value.clone(), constraint=support).detach()
    if stored.shape != value.shape or not torch.allclose(stored, value.to(stored), rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"Pyro's param store holds {_brief(stored)} as {name!r} where this fit has {_brief(value)}, and the "
            "program would use it: call guide and program inside 'with pyro.get_param_store().scope():'"
        )


def _brief(value: Tensor) -> str:
    return f"{value.item():.4g}" if value.numel() == 1 else f"values of shape {tuple(value.shape)}"
