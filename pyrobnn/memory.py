"""How much memory a device has left: what refusals and predictions are measured against."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes free on ``device``; without limit where the system does not tell, so that nothing is refused on a guess."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    table = Path("/proc/meminfo")
    if table.exists():
        fields = dict(line.split(":", 1) for line in table.read_text().splitlines())
        if "MemAvailable" in fields:
            return int(fields["MemAvailable"].split()[0]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize
