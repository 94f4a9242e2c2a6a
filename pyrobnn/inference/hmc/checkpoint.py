"""Where a run of chains is saved, and how often."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pyrobnn.inference.fitting.checkpoints import write


@dataclass(frozen=True)
class Saving:
    """Where a run is saved, as what, and how many seconds apart."""

    path: str | Path
    fingerprint: str
    every: float

    def due(self, last_written: float) -> bool:
        """Whether it is time, where the last one was written at ``time.monotonic() == last_written``."""
        return time.monotonic() - last_written > self.every

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of the run."""
        write(self.path, self.fingerprint, tensors)
