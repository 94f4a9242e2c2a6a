"""Scikit-learn's digits scaled up to the size of a net's images, and images of other kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import pyrobnn as pb

SIDES = {"cnn": 28, "resnet18": 32}
CHANNELS = {"cnn": 1, "resnet18": 3}


@dataclasses.dataclass(frozen=True)
class Images:
    """Images (N, channel, side, side) and labels (N,) of training and test, and images of other kinds, by name."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    others: Mapping[str, Tensor]


def images(
    net: str,
    num_train: int | None,
    seed: int,
    num_test: int | None = None,
) -> Images:
    """Two thirds and a third of scikit-learn's digits, and as many images of other kinds as there are test images."""
    side = SIDES[net]
    digits = pb.data.digits()
    x = nn.functional.interpolate(
        digits.x,
        size=(side, side),
        mode="bilinear",
    )
    x = x.expand(-1, CHANNELS[net], -1, -1).contiguous()
    train, test = pb.data.train_test_split(
        dataclasses.replace(digits, x=x),
        1 / 3,
        seed=seed,
    )
    others = {
        "turned": test.x.rot90(1, (2, 3))[:num_test].contiguous(),
        "photographs": photographs(side, CHANNELS[net], test.num_data)[:num_test],
    }
    return Images(
        train.x[:num_train],
        train.y[:num_train],
        test.x[:num_test],
        test.y[:num_test],
        others,
    )


def photographs(side: int, channels: int, count: int) -> Tensor:
    """Patches (count, channels, side, side) of scikit-learn's two photographs, with the range of the digits."""
    from sklearn.datasets import load_sample_images

    patches = []
    for image in load_sample_images().images:
        gray = torch.tensor(image).double().mean(-1) / 255
        tiles = gray.unfold(0, side, side).unfold(1, side, side).reshape(-1, side, side)
        patches.append(tiles)
    tiles = torch.cat(patches).float()
    chosen = tiles[torch.linspace(0, len(tiles) - 1, count).long()]
    return chosen[:, None].expand(-1, channels, -1, -1).contiguous()
