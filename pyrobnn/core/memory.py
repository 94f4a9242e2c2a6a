"""Memory that a device has free, and the refusal of what needs more."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch

from pyrobnn.core.checks import Refused


class NotEnoughMemory(Refused, MemoryError):
    """More memory than the device has free; the message has the bytes and what to change."""


def require(
    needed: int,
    device: torch.device,
    subject: str,
    remedies: str,
) -> None:
    """NotEnoughMemory where ``subject`` needs more bytes than are free; ``remedies`` says what to do instead."""
    free = free_bytes(device)
    if needed > free:
        raise NotEnoughMemory(f"{subject} needs {needed:,} bytes but {free:,} are free: {remedies}")


def free_bytes(device: torch.device) -> int:
    """Bytes free on ``device``; without limit where the system does not tell, so that nothing is refused on a guess."""
    if device.type == "cuda":
        # the driver counts as taken what torch's allocator keeps for later
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    with contextlib.suppress(AttributeError, ValueError, OSError):
        table = Path("/proc/meminfo")
        if table.exists():
            lines = table.read_text(encoding="utf-8").splitlines()
            fields = dict(line.split(":", 1) for line in lines)
            return int(fields["MemAvailable"].split()[0]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize
