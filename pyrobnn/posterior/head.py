"""A net of which only the end varies: what comes before it, its trunk, is computed once for all draws."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pyrobnn.model import BNN, NET
from pyrobnn.posterior.prediction import CHUNK_SCALARS, widest_layer


class _Reached(Exception):
    """The trunk has been computed: its features are the argument."""


@dataclass(frozen=True, eq=False)
class Split:
    """The net ``whole``: a trunk of parameters ``params``, none where ``path`` is empty, and a head from there on."""

    whole: BNN
    params: Mapping[str, Tensor]
    path: str = ""

    @property
    def head(self) -> BNN:
        """The model as a function of the features, of the same sites: those of the trunk change nothing."""
        if not self.path:
            return self.whole
        return self.whole.with_nets(lambda net: _from(net, self.path.split(".")))

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """What the trunk makes of inputs (N, …) in the units of the program."""
        if not self.path:
            return x
        size = max(1, CHUNK_SCALARS // widest_layer(self.whole, x))
        return torch.cat([self._features(part) for part in x.split(size)])

    def _features(self, x: Tensor) -> Tensor:
        def stop(module: nn.Module, inputs: tuple[Tensor]) -> None:
            raise _Reached(*inputs)

        with self.whole.eval_net.get_submodule(self.path).register_forward_pre_hook(stop):
            try:
                self.whole.forward(self.params, x)
            except _Reached as reached:
                return reached.args[0]
        raise RuntimeError(f"the net does not reach its layer {self.path!r}")


def split(model: BNN, names: Sequence[str], params: Mapping[str, Tensor], x: Tensor) -> Split:
    """The model split before the first module with a parameter that varies, where it can be shown that it can be.

    Whether it can is tried, from the deepest module that holds all of them outwards: anything that is not so simple (a
    parameter that is also used before, say) makes the output differ from that of the whole net when the varying
    parameters are moved, and then there is no trunk.
    """
    whole = Split(model, params)
    moved = {n: v + 0.1 if n in set(names) else v for n, v in params.items()}
    with torch.no_grad():
        expected = model.forward(moved, x[:2])
        for path in _paths(
            model.eval_net, [name.removeprefix(NET) for name in names if name.startswith(NET)]
        ):
            found = replace(whole, path=path)
            try:
                given = found.head.forward(moved, features := found.features(x[:2]))
            except (
                RuntimeError,
                TypeError,
            ):  # a module that is not reached, or takes more than features
                continue
            if given.shape == expected.shape and torch.allclose(given, expected):
                return (
                    whole
                    if features.shape == x[:2].shape and torch.equal(features, x[:2])
                    else found
                )
    return whole


def _paths(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Where a head of the parameters ``names`` may begin, the innermost module first."""
    owners = {name.partition(".")[0] for name in names}
    children = dict(module.named_children())
    first = next((name for name in children if name in owners), None)
    if (
        first is None
        or not owners <= children.keys()
        or (len(owners) > 1 and type(module) is not nn.Sequential)
    ):
        return []
    inside = [name.removeprefix(f"{first}.") for name in names if name.startswith(f"{first}.")]
    return [*(f"{first}.{path}" for path in _paths(children[first], inside)), first]


def _from(net: nn.Module, path: Sequence[str]) -> nn.Module:
    """The net with all of its parameters, run from the module at ``path`` on."""
    cut = copy.copy(net)
    cut.forward = _tail(net, path).forward
    return cut


def _tail(module: nn.Module, path: Sequence[str]) -> nn.Module:
    if not path:
        return module
    children = list(module.named_children())
    (first, *rest) = path
    start = [name for name, _ in children].index(first)
    kept = children[start:] if type(module) is nn.Sequential else children[start : start + 1]
    named = ((name, _tail(child, rest) if name == first else child) for name, child in kept)
    return nn.Sequential(OrderedDict(named))
