"""Handlers under which a density runs its program: where the values of its sites come from, and which rows it sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import SubsampleMessenger
from torch import Tensor
from torch.distributions import biject_to

RADIUS = 2.0  # of the box in unconstrained space that holds starts, as in Stan


class Supply(Messenger):
    """Gives every site its value; point parameters never reach Pyro's global store.

    Those of a plain program are read from it (``stored``). A BNN has its own, whatever another model, or this one when
    it was traced, has left there under the same name. A value may be a function of the site's distribution, for a
    support that depends on other sites. A latent site with an improper prior cannot be drawn: without a
    value it gets one uniform in the box of starts, of the dtype and on the device of ``like``.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor | Callable[[Any], Tensor]],
        held: Mapping[str, Tensor],
        *,
        stored: bool = True,
        like: Tensor | None = None,
    ):
        super().__init__()
        self.values, self.held, self.stored = values, held, stored
        self.like = torch.empty(0) if like is None else like

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        if msg["is_observed"]:
            return
        if msg["name"] in self.values:
            value = self.values[msg["name"]]
            msg["value"], msg["done"] = value(msg["fn"]) if callable(value) else value, True
        elif not msg["done"] and is_improper(msg["fn"]):
            transform = biject_to(msg["fn"].support)
            shape = transform.inverse_shape(msg["fn"].batch_shape + msg["fn"].event_shape)
            msg["value"], msg["done"] = transform(self.like.new_empty(shape).uniform_(-RADIUS, RADIUS)), True

    def _pyro_param(self, msg: dict[str, Any]) -> None:
        name = msg["name"]
        if name in self.values:
            value = self.values[name]
        elif name in self.held:
            value = self.held[name]
        elif self.stored and name in pyro.get_param_store():
            value = pyro.get_param_store()[name].detach()
        else:
            init = msg["args"][1] if len(msg["args"]) > 1 else msg["kwargs"].get("init_tensor")
            if init is None:
                raise ValueError(f"the parameter {name!r} has no initial value: pass one to pyro.param")
            value = (init() if callable(init) else init).detach()
        msg["value"], msg["done"] = value, True


def is_improper(fn: object) -> bool:
    """Whether the distribution is a constant density, which has no draws."""
    while isinstance(fn, (torch.distributions.Independent, dist.MaskedDistribution)):
        fn = fn.base_dist
    return isinstance(fn, dist.ImproperUniform)


@contextlib.contextmanager
def all_rows(found: dict[str, int]) -> Iterator[None]:
    """Plates that would draw a subsample take all their rows; their names and sizes are added to ``found``."""
    kind: Any = SubsampleMessenger  # no handler can change how many rows a plate takes
    plate = kind.__init__

    def whole(
        self: Any, name: str, size: Any = None, subsample_size: Any = None, *rest: Any, **named: Any
    ) -> None:
        given = rest[0] if rest else named.get("subsample")
        if given is None and subsample_size is not None and subsample_size < size:
            found[name] = int(size)
            subsample_size = None
        plate(self, name, size, subsample_size, *rest, **named)

    kind.__init__ = whole
    try:
        yield
    finally:
        kind.__init__ = plate
