"""Programs that write into tensors which their sites, or the user, still need: a density reads them at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from pyro.distributions import MaskedDistribution
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Distribution, Independent

from pyrobnn.core.checks import Refused
from pyrobnn.core.private_pyro import mask_of
from pyrobnn.model.compile.trees import Tree, leaves_of
from pyrobnn.model.nodes import Message, is_subsample


class _Met(NamedTuple):
    """A tensor of a site as it was when the site was met, and what it is of the site, in words."""

    site: str
    words: str
    tensor: Tensor
    before: Tensor


class Overwritten(Messenger):
    """Inside, the tensors of every site of a program, and its data, are kept as they are.

    Args:
        args: the data of the program.
    """

    def __init__(self, args: tuple[Tree, ...]) -> None:
        super().__init__()
        self._data = [leaf for leaf in leaves_of(args) if isinstance(leaf, Tensor)]
        self._data_before = [leaf.clone() for leaf in self._data]
        self._met: list[_Met] = []

    def _pyro_post_sample(self, msg: Message) -> None:
        if not is_subsample(msg):
            for words, tensor in _tensors(msg):
                self._met.append(_Met(msg["name"], words, tensor, tensor.clone()))

    def refuse(self) -> None:
        """Refuse a program that has written into its data, which get their values back, or into a tensor of a site.

        Raises:
            Refused: naming the site, with the remedy.
        """
        has_written = False
        for leaf, before in zip(self._data, self._data_before, strict=True):
            if not is_same(leaf, before):
                leaf.copy_(before)
                has_written = True
        if has_written:
            raise Refused(
                "the program writes into its data in place (x[…] = …, y += …), so it is another program at every run: "
                "begin it with x = x.clone(), or make new tensors (torch.where, x + …)"
            )
        for site, words, tensor, before in self._met:
            if not is_same(tensor, before):
                raise Refused(
                    f"the program changes {words} of the site {site!r} in place after the site was met (|=, +=, "
                    "[…] = …), and a density reads it at the end of the run, changed: make a new tensor there, as "
                    "marked = marked | …, or give the site a copy, marked.clone()"
                )


def _tensors(msg: Message) -> Iterator[tuple[str, Tensor]]:
    """The tensors that the log density of a site is computed from, each with what it is."""
    fn = msg["fn"]
    masks = [msg["mask"]]
    while isinstance(fn, Independent | MaskedDistribution):
        if isinstance(fn, MaskedDistribution):
            masks.append(mask_of(fn))
        fn = fn.base_dist
    for mask in masks:
        if isinstance(mask, Tensor):
            yield "the mask", mask
    if isinstance(msg["value"], Tensor):
        yield "the value", msg["value"]
    if isinstance(fn, Distribution):
        for name, value in vars(fn).items():
            if isinstance(value, Tensor):
                yield f"{name.strip('_')!r}", value


def is_same(tensor: Tensor, before: Tensor) -> bool:
    """Whether both have the same values, NaN among them."""
    return tensor.shape == before.shape and torch.equal(tensor.nan_to_num(), before.nan_to_num())
