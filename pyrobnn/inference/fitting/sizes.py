"""Free memory, the refusal of what does not fit, and the sizes that a method's need is made of."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyrobnn.core.checks import Refused
from pyrobnn.inference.fitting.batches import survey

if TYPE_CHECKING:
    from pyrobnn.model import BNN


class NotEnoughMemory(Refused, MemoryError):
    """More memory than the device has free; the message has the bytes and what to change."""


def require(needed: int, device: torch.device, what: str, remedies: str) -> None:
    """NotEnoughMemory where ``what`` needs more bytes than are free; ``remedies`` says what to do instead."""
    free = free_bytes(device)
    if needed > free:
        raise NotEnoughMemory(f"{what} needs {needed:,} bytes but {free:,} are free: {remedies}")


def free_bytes(device: torch.device) -> int:
    """Bytes free on ``device``; without limit where the system does not tell, so that nothing is refused on a guess."""
    if device.type == "cuda":
        # the driver counts as taken what torch's allocator keeps for later
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    with contextlib.suppress(AttributeError, ValueError, OSError):
        if (table := Path("/proc/meminfo")).exists():
            fields = dict(line.split(":", 1) for line in table.read_text(encoding="utf-8").splitlines())
            return int(fields["MemAvailable"].split()[0]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize


class Need(NamedTuple):
    """Bytes that a fit takes: ``resident`` to its end, and beside it the largest of those of its phases."""

    resident: dict[str, int]
    phases: dict[str, int]


@dataclass(frozen=True)
class Sizes:
    """What an estimate of memory is made of, in bytes unless said."""

    flat: int  # one copy of all parameters
    weights: int  # their number
    batch: int  # data in a step, a number
    datum: int  # saved by autograd for one datum
    data: int  # inputs and targets the fit holds a copy of, whole
    num_data: int
    rows: int  # data × outputs, a number
    num_draws: int
    streamed: bool  # the data come from a loader
    to_file: bool  # the draws go to a file
    compiled: bool

    def one_pass(self, draws: int) -> int:
        """Bytes of a forward pass of the data and draws (``draws`` at most) that are evaluated at once."""
        num_data = self.batch if self.streamed else self.num_data
        return max(1, min(draws, 2**24 // (64 * num_data))) * num_data * self.datum

    def optimisation(self, members: int = 1) -> Need:
        """What an optimiser needs to find ``members`` points: copies of the flat vector, and the data of a step."""
        resident = {"draws": 2 * members * self.flat, "optimiser (5 copies)": 5 * members * self.flat}
        # compiling a step works on copies of its arguments
        copies = 9 if self.compiled else 4
        return Need(resident, {"a step": members * (copies * self.flat + 2 * self.batch * self.datum)})


def measure(
    method: Any, model: BNN, x: Tensor | DataLoader, y: Tensor | None, num_draws: int, to_file: bool
) -> Sizes:
    """The sizes of ``method.fit(model, x, y)``; what autograd saves for a datum is measured on two points."""
    streamed = isinstance(x, DataLoader) and not method.gathers
    if isinstance(x, DataLoader):
        with torch.random.fork_rng([]):
            num_data = survey(x).num_data  # of what a pass yields, which may be less than the data set
            first, targets = next(iter(x))
        batch = len(first)
        data = 0 if streamed else num_data * (first[:1].nbytes + targets[:1].nbytes)
    else:
        num_data, first = len(x), x[:2]
        batch = getattr(method, "batch_size", None) or num_data
        copied = model.standardizer is not None or x.dtype != model.dtype
        data = (x.nbytes + (0 if y is None else y.nbytes)) if copied else 0
    inputs = model.cast_inputs(model.standard_inputs(first[:2].to(model.device)))
    latent = sum(site.event_shape.numel() for site in model.priors.values())
    weights = max(model.num_weights, latent)
    return Sizes(
        flat=weights * (torch.finfo(model.dtype).bits // 8),
        weights=weights,
        batch=min(batch, num_data),
        datum=_saved_by_autograd(model, inputs),
        data=data,
        num_data=num_data,
        rows=num_data * model.forward({}, inputs).shape[-1],
        num_draws=num_draws,
        streamed=streamed,
        to_file=to_file,
        compiled=bool(getattr(method, "compile", False)),
    )


def _saved_by_autograd(model: BNN, x: Tensor) -> int:
    """Bytes one datum adds to what a forward pass keeps for the backward pass."""

    def kept(points: Tensor) -> int:
        seen: dict[int, Tensor] = {}  # keeps them alive, so that no address comes twice

        def pack(value: Tensor) -> Tensor:
            seen[value.untyped_storage().data_ptr()] = value
            return value

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            params = {name: value.detach().requires_grad_() for name, value in model.initial_values().items()}
            model.forward(params, points)
        return sum(value.untyped_storage().nbytes() for value in seen.values())

    return max(kept(x) - kept(x[:1]), x[:1].nbytes) if len(x) > 1 else kept(x)
