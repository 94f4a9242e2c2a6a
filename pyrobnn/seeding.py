"""Randomness is an argument: a seed inside, and the caller's random state untouched outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Torch's random state set to ``seed`` inside and restored afterwards, on the CPU and on ``device``."""
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        # torch.manual_seed would also reseed the devices that are not restored
        torch.default_generator.manual_seed(seed)
        for one in cuda:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(seed)
        yield


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own, started at ``seed``."""
    return torch.Generator(device).manual_seed(seed)
