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
        return torch.cat([self._features(piece) for piece in x.split(size)])

    def _features(self, x: Tensor) -> Tensor:
        def stop(module: nn.Module, inputs: tuple[Tensor]) -> None:
            raise _Reached(*inputs)

        with self.whole.eval_net.get_submodule(self.path).register_forward_pre_hook(stop):
            try:
                self.whole.forward(self.params, x)
            except _Reached as reached:
                if len(reached.args) != 1:
                    raise RuntimeError(f"the layer {self.path!r} takes several inputs") from None
                return reached.args[0]
        raise RuntimeError(f"the net does not reach its layer {self.path!r}")


def split(
    model: BNN,
    names: Sequence[str],
    params: Mapping[str, Tensor],
    x: Tensor,
) -> Split:
    """The model split before the first module with a parameter that varies, where it can be shown that it can be.

    Whether it can is tried, from the deepest module that holds all of them outwards: anything that is not so simple (a
    parameter that is also used before, say) makes the output differ from that of the whole net when the varying
    parameters are moved, and then there is no trunk.
    """
    unsplit = Split(model, params)
    moved = dict(params)
    for name in set(names) & params.keys():
        moved[name] = params[name] + 0.1
    inputs = x[:2]
    of_net = [name.removeprefix(NET) for name in names if name.startswith(NET)]
    with torch.no_grad():
        expected = model.forward(moved, inputs)
        for path in _paths(model.eval_net, of_net):
            candidate = replace(unsplit, path=path)
            try:
                features = candidate.features(inputs)
                output = candidate.head.forward(moved, features)
            except (RuntimeError, TypeError):
                # a module that is not reached, or takes more than features
                continue
            # layers by themselves are not under the autocast of the net's own forward
            alike = output.shape == expected.shape and output.dtype == expected.dtype
            if alike and torch.allclose(output, expected):
                unchanged = features.shape == inputs.shape and torch.equal(features, inputs)
                return unsplit if unchanged else candidate
    return unsplit


def _paths(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Where a head of the parameters ``names`` may begin, the innermost module first."""
    owners = {name.partition(".")[0] for name in names}
    children = dict(module.named_children())
    if not owners or not owners <= children.keys():
        return []
    if len(owners) > 1 and type(module) is not nn.Sequential:
        return []
    child = next(name for name in children if name in owners)
    inner = _paths(children[child], _inside(child, names))
    return [*(f"{child}.{path}" for path in inner), child]


def _inside(child: str, names: Sequence[str]) -> list[str]:
    """The names of the parameters of a child module, without its own name before them."""
    prefix = f"{child}."
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _from(net: nn.Module, path: Sequence[str]) -> nn.Module:
    """The net with all of its parameters, run from the module at ``path`` on."""
    cut = copy.copy(net)
    cut.forward = _tail(net, path).forward
    return cut


def _tail(module: nn.Module, path: Sequence[str]) -> nn.Module:
    if not path:
        return module
    children = list(module.named_children())
    start = [name for name, _ in children].index(path[0])
    name, child = children[start]
    tail = OrderedDict({name: _tail(child, path[1:])})
    if type(module) is nn.Sequential:
        tail.update(children[start + 1 :])
    return nn.Sequential(tail)
