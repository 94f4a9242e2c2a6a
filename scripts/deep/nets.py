"""The nets of the study: a small convolutional one, and ResNet-18."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with batch norm and a shortcut (He et al., 2016)."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(
                before,
                after,
                3,
                stride,
                1,
                bias=False,
            ),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def cnn() -> nn.Sequential:
    """Two convolutions with pooling and two linear layers, 99,550 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1568, 60),
        nn.ReLU(),
        nn.Linear(60, 10),
    )


def resnet18() -> nn.Sequential:
    """ResNet-18 for images of 3 x 32 x 32, 11,173,962 weights."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    ]
    width = 64
    for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, after, stride), Block(after, after, 1)]
        width = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


NETS: dict[str, Callable[[], nn.Sequential]] = {"cnn": cnn, "resnet18": resnet18}
