"""Randomness is an argument: a seed inside, and the caller's random state untouched outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import TypeVar

import numpy as np
import torch

from pyrobnn.core.checks import check_type
from pyrobnn.core.private_torch import Inseparable, drawing_from
from pyrobnn.core.threads import process_state

Result = TypeVar("Result")


@contextlib.contextmanager
def kept(*devices: torch.device | None) -> Iterator[None]:
    """Torch's random state restored afterwards, on the CPU and on ``devices`` (of one kind); one thread at a time."""
    accelerators = list(
        {device: None for device in devices if device is not None and device.type != "cpu"}
    )
    kind = accelerators[0].type if accelerators else "cuda"
    with process_state(), torch.random.fork_rng(accelerators, device_type=kind):
        yield


@contextlib.contextmanager
def seeded(seed: int, *devices: torch.device | None) -> Iterator[None]:
    """Torch's random state set to ``seed`` inside and restored afterwards, on the CPU and on ``devices``."""
    check_type("seed", seed, Integral, "an integer")
    with kept(*devices):
        # torch.manual_seed would also reseed the devices that are not restored
        torch.default_generator.manual_seed(seed)
        for device in devices:
            if device is not None and device.type != "cpu":
                module = torch.get_device_module(device)
                with module.device(device):
                    module.manual_seed(seed)
        yield


def drawn(draw: Callable[[], Result], seed: int, device: torch.device) -> Result:
    """``draw()`` with the random numbers that it has inside :func:`seeded`; other threads wait only where they must.

    ``draw`` depends on nothing else that it changes: it may be called twice.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def generator_on(place: torch.device) -> torch.Generator:
        if place not in generators:
            try:
                generators[place] = generator(seed, place)
            except RuntimeError as error:
                raise Inseparable(f"{place} has no generators beside its own") from error
        return generators[place]

    separate = drawing_from(generator_on)
    if separate is not None:
        with contextlib.suppress(Inseparable), separate:
            return draw()
    with seeded(seed, device):
        return draw()


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Torch's random state on the CPU and on a device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Torch's random state as :func:`random_state` gave it; that of another kind of device stays."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def used_devices() -> list[torch.device]:
    """Every accelerator that this process may have tensors on."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.get_device_module(kind).is_initialized():
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own, started at ``seed``."""
    return torch.Generator(device).manual_seed(check_type("seed", seed, Integral, "an integer"))


def own_stream(seed: int = 0) -> np.random.Generator:
    """Other numbers than those of ``default_rng(seed)``, which a user's data are often made of."""
    return np.random.default_rng([seed, 1])
