"""How much memory a fit will need, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from pyrobnn.compile import is_loaded
from pyrobnn.inference.fitting.sizes import free_bytes, measure
from pyrobnn.inference.method import METHODS, check_use
from pyrobnn.model import BNN

#: bytes that loading the compiler and lowering a graph take, once per process
COMPILER = 200 * 2**20
#: bytes of Python objects and of the gaps that the allocator leaves
SMALL_OBJECTS = 16 * 2**20


@dataclass(frozen=True)
class Preflight:
    """The memory a fit is expected to take on top of what the process holds, in bytes.

    Attributes:
        method: its name.
        resident: what stays to the end, by name: draws, the method's state.
        phases: what each phase needs beside it; only the largest counts.
        available: bytes free on the device now.
    """

    method: str
    resident: dict[str, int]
    phases: dict[str, int]
    available: int

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return sum(self.resident.values()) + max(self.phases.values())

    @property
    def fits(self) -> bool:
        """Whether that is free."""
        return self.peak <= self.available

    def __str__(self) -> str:
        parts = {**self.resident, **self.phases}
        rows = "\n".join(f"  {name:<28}{size / 2**20:>12,.0f} MB" for name, size in parts.items())
        verdict = "fits" if self.fits else "does NOT fit: fewer draws, chains, or data in a batch"
        peak, free = self.peak / 2**20, self.available / 2**20
        return f"{self.method}: {peak:,.0f} MB of {free:,.0f} MB free: {verdict}\n{rows}"


def preflight(
    method: Any,
    model: BNN,
    x: Tensor | DataLoader,
    y: Tensor | None = None,
    *,
    num_draws: int | None = None,
    stream_to: str | Path | None = None,
) -> Preflight:
    """Predict the peak memory of ``method.fit(model, x, y, num_draws=num_draws)``, within a factor of about 1.5.

    The parts are counted, not guessed: copies of the flat parameter vector in the method's state and update, what
    autograd saves for the data of a step (measured on two points), the draws, and passes over all data at the end.

    Args:
        method: any of the methods, which says what it needs (``method.memory``).
        model: a BNN.
        x, y: the data as ``fit`` will get them.
        num_draws: as for ``fit``.
        stream_to: as for ``NUTS.fit``: memory then holds a block of draws only. Nothing is written.

    Returns:
        The estimate, by part; ``print`` shows it.

    Raises:
        TypeError: a plain Pyro program, or a method it does not know.

    Caveat: operators with large workspaces of their own (some convolutions) are not foreseen.

    Example:
        >>> import pyrobnn as pb, torch
        >>> net = pb.networks.mlp(1, (50,), seed=0)
        >>> model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
        >>> small = preflight(pb.MAP(), model, torch.zeros(10, 1), torch.zeros(10, 1))
        >>> large = preflight(pb.DeepEnsemble(num_members=100), model, torch.zeros(10, 1), torch.zeros(10, 1))
        >>> small.peak < large.peak, small.fits
        (True, True)
    """
    if not isinstance(model, BNN):
        raise TypeError(f"'model' must be a pyrobnn.BNN, got {model!r}: a plain program has no size to count")
    classes = tuple(each.cls for each in METHODS.values())
    if not isinstance(method, classes):
        known = ", ".join(each.__name__ for each in classes)
        raise TypeError(f"'method' must be one of {known}, got {type(method).__name__}")
    if stream_to is not None:
        check_use(method, "stream_to")
    count = method.default_draws if num_draws is None else num_draws
    sizes = measure(method, model, x, y, count, stream_to is not None)
    need = method.memory(model, sizes)
    compiling = sizes.compiled and not is_loaded()
    return Preflight(
        type(method).__name__,
        need.resident | {"compiler and objects": SMALL_OBJECTS + (COMPILER if compiling else 0)},
        need.phases | {"checking the data": sizes.data + sizes.data // 2},
        free_bytes(model.device),
    )
