"""Handlers under which a density runs its program: where the values of its sites come from, and which rows it sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from unittest import mock

import pyro
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import SubsampleMessenger
from torch import Tensor


class Supply(Messenger):
    """Gives every site its value; point parameters never reach Pyro's global store.

    Those of a plain program are read from it (``stored``). A BNN has its own, whatever another model, or this one when
    it was traced, has left there under the same name.
    """

    def __init__(self, values: Mapping[str, Tensor], held: Mapping[str, Tensor], *, stored: bool = True):
        super().__init__()
        self.values, self.held, self.stored = values, held, stored

    def _pyro_sample(self, msg) -> None:
        if msg["name"] in self.values and not msg["is_observed"]:
            msg["value"], msg["done"] = self.values[msg["name"]], True

    def _pyro_param(self, msg) -> None:
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


@contextlib.contextmanager
def all_rows(found: dict[str, int]) -> Iterator[None]:
    """Plates that would draw a subsample take all their rows; their names and sizes are added to ``found``."""
    subsample = SubsampleMessenger._subsample

    def whole(name, size=None, subsample_size=None, given=None, *rest):
        if given is None and subsample_size is not None and subsample_size < size:
            found[name] = int(size)
            subsample_size = None
        return subsample(name, size, subsample_size, given, *rest)

    with mock.patch.object(SubsampleMessenger, "_subsample", staticmethod(whole)):
        yield
