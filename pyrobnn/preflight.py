"""How much memory a fit will need, before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyrobnn.compile import is_loaded
from pyrobnn.inference.curvature.mode import precision_bytes
from pyrobnn.inference.fitting.batches import survey
from pyrobnn.inference.fitting.memory import free_bytes
from pyrobnn.inference.hmc.checks import needed_bytes
from pyrobnn.inference.nuts import DEFAULT_WARMUP
from pyrobnn.inference.vi.evidence import draws_together
from pyrobnn.model import BNN

#: bytes that loading the compiler and lowering a graph take, once per process
COMPILER = 200 * 2**20
#: bytes of everything small: Python objects, the allocator's slack
SLACK = 16 * 2**20


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


@dataclass(frozen=True)
class _Sizes:
    """What the estimates are made of, in bytes unless said."""

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
        method: any of the methods.
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
        >>> import pyro.distributions as dist, pyrobnn as pb
        >>> net = pb.networks.mlp(1, (50,), seed=0)
        >>> model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
        >>> small = preflight(pb.MAP(), model, torch.zeros(10, 1), torch.zeros(10, 1))
        >>> large = preflight(pb.DeepEnsemble(num_members=100), model, torch.zeros(10, 1), torch.zeros(10, 1))
        >>> small.peak < large.peak, small.fits
        (True, True)
    """
    if not isinstance(model, BNN):
        raise TypeError(f"'model' must be a pyrobnn.BNN, got {model!r}: a plain program has no size to count")
    known = next((name for name in (c.__name__ for c in type(method).__mro__) if name in _ESTIMATES), None)
    if known is None:
        raise TypeError(
            f"'method' must be one of {', '.join(sorted(_ESTIMATES))}, got {type(method).__name__}"
        )
    if stream_to is not None and known != "NUTS":
        raise ValueError(f"'stream_to' is an option of NUTS, not of {known}: leave it out")
    default = {"NUTS": 1000, "SVI": 1000, "Laplace": 1000, "SGHMC": 500, "SGLD": 500}.get(known, 100)
    sizes = _sizes(method, model, x, y, default if num_draws is None else num_draws, stream_to is not None)
    resident, phases = _ESTIMATES[known](method, model, sizes)
    resident["compiler and objects"] = SLACK + (
        COMPILER if getattr(method, "compile", False) and not is_loaded() else 0
    )
    phases["checking the data"] = sizes.data + sizes.data // 2
    return Preflight(known, resident, phases, free_bytes(model.device))


def _sizes(method: Any, model: BNN, x: Any, y: Any, num_draws: int, to_file: bool) -> _Sizes:
    gathered = hasattr(method, "curvature") or hasattr(method, "max_tree_depth")
    streamed = isinstance(x, DataLoader) and not gathered
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
    batch = min(batch, num_data)
    item = torch.finfo(model.dtype).bits // 8
    latent = sum(site.event_shape.numel() for site in model.priors.values())
    weights = max(model.num_weights, latent)
    inputs = model.cast_inputs(model.standard_inputs(first[:2].to(model.device)))
    datum = _saved_by_autograd(model, inputs)
    rows = num_data * model.forward({}, inputs).shape[-1]
    compiled = bool(getattr(method, "compile", False))
    return _Sizes(
        weights * item, weights, batch, datum, data, num_data, rows, num_draws, streamed, to_file, compiled
    )


def _saved_by_autograd(model: BNN, x: Tensor) -> int:
    """Bytes one datum adds to what a forward pass keeps for the backward pass."""
    if x.is_floating_point():
        x = x.to(model.dtype)

    def kept(points: Tensor) -> int:
        seen: dict[int, int] = {}

        def pack(value: Tensor) -> Tensor:
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            alive.append(value)
            return value

        alive: list[Tensor] = []
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            params = {name: value.detach().requires_grad_() for name, value in model.initial_values().items()}
            model.forward(params, points)
        return sum(seen.values())

    return max(kept(x) - kept(x[:1]), x[:1].nbytes) if len(x) > 1 else kept(x)


# Each estimate: (resident, phases). Copies of the flat vector are counted in the code of the method; compiling a step
# works on copies of its arguments.


def _point(method: Any, model: BNN, s: _Sizes) -> tuple[dict[str, int], dict[str, int]]:
    members = getattr(method, "num_members", 1)
    resident = {"draws": 2 * members * s.flat, "optimiser (5 copies)": 5 * members * s.flat}
    copies = 9 if s.compiled else 4
    return resident, {"a step": members * (copies * s.flat + 2 * s.batch * s.datum)}


def _svi(method: Any, model: BNN, s: _Sizes) -> tuple[dict[str, int], dict[str, int]]:
    factor = {"mean_field": 2, "low_rank": 2 + method.rank}.get(method.guide, 4)
    if method.guide == "full_rank":
        factor = 1 + s.weights
    guide = factor * s.flat
    resident = {"optimiser (5 copies)": 5 * guide, "draws": 2 * s.num_draws * s.flat}
    # run eagerly, every operation of the update and of the KL has a result of its own
    copies = 7 * guide + 4 * s.flat if s.compiled else 6 * guide + 12 * s.flat
    step = copies + method.num_particles * 2 * s.batch * s.datum
    together = draws_together(s.weights)  # sites and flat vectors
    return resident, {"a step": step, "the final ELBO": 2 * together * s.flat + _pass(s, together)}


def _swag(method: Any, model: BNN, s: _Sizes) -> tuple[dict[str, int], dict[str, int]]:
    wide = 8 * s.weights
    rank = 0 if getattr(method, "diagonal", True) else min(method.rank, _collected(method, s))
    resident = {
        "optimiser (5 copies)": 5 * s.flat,
        "moments": (3 + rank) * wide,
        "draws": 2 * s.num_draws * s.flat,
    }
    gaussian = 2 * rank * wide + 2 * s.num_draws * wide + 4 * wide + _pass(s, s.num_draws)
    step = (9 if s.compiled else 4) * s.flat + 2 * s.batch * s.datum
    return resident, {"a step": step, "the Gaussian": gaussian}


def _collected(method: Any, s: _Sizes) -> int:
    every = method.collect_every or max(1, s.num_data // s.batch)
    return max(2, int(method.num_steps * (1 - method.burn_in)) // every)


def _sgmcmc(method: Any, model: BNN, s: _Sizes) -> tuple[dict[str, int], dict[str, int]]:
    chains = method.num_chains
    resident = {"chains (4 copies)": 4 * chains * s.flat, "draws": 2 * s.num_draws * chains * s.flat}
    together = min(32, s.num_draws * chains)
    step = chains * ((9 if s.compiled else 6) * s.flat + 2 * s.batch * s.datum)
    at_end = 0 if s.streamed else 2 * together * s.flat + together * s.num_data * s.datum
    return resident, {"a step": step, "log joint of the draws": at_end}


def _nuts(method: Any, model: BNN, s: _Sizes) -> tuple[dict[str, int], dict[str, int]]:
    num_warmup = DEFAULT_WARMUP if method.num_warmup is None else method.num_warmup
    need = needed_bytes(s.weights, model.dtype, method, s.num_draws, num_warmup, s.to_file)
    step = method.num_chains * (14 * s.flat + 2 * s.num_data * s.datum)
    return {"chains and draws": need}, {"a step": step}


def _dropout(method: Any, model: BNN, s: _Sizes) -> tuple[dict[str, int], dict[str, int]]:
    resident, phases = _point(method, model, s)
    return {**resident, "draws": 2 * s.num_draws * s.flat}, {"a step": 2 * phases["a step"]}


def _laplace(method: Any, model: BNN, s: _Sizes) -> tuple[dict[str, int], dict[str, int]]:
    size, last = s.weights, 0
    shapes = [tuple(value.shape) for value in model.initial_values().values()]
    if method.subset != "all":
        last = next(i for i in range(len(shapes) - 1, -1, -1) if len(shapes[i]) > 1)
        size = sum(torch.Size(shape).numel() for shape in shapes[last:])
    if method.structure == "full":
        curvature = precision_bytes(size, s.rows if method.curvature == "ggn" else 0, s.flat // s.weights)
    elif method.structure == "kron":
        curvature = 4 * 8 * sum(shape[0] ** 2 + torch.Size(shape[1:]).numel() ** 2 for shape in shapes[last:])
    else:
        curvature = 4 * 8 * size
    search = dataclasses.replace(s, num_draws=1)
    resident, phases = _point(method.map or method, model, search)
    resident["draws"] = 2 * s.num_draws * s.flat
    return resident, {**phases, "curvature": curvature + _pass(s, 1)}


def _pass(s: _Sizes, draws: int) -> int:
    """A forward pass of the data that are evaluated at once, for as many draws as are evaluated together."""
    num_data = s.batch if s.streamed else s.num_data
    return max(1, min(draws, 2**24 // (64 * num_data))) * num_data * s.datum


Estimate = Callable[[Any, BNN, _Sizes], tuple[dict[str, int], dict[str, int]]]
_ESTIMATES: dict[str, Estimate] = {
    "MLE": _point,
    "MAP": _point,
    "DeepEnsemble": _point,
    "SVI": _svi,
    "SWA": _swag,
    "SWAG": _swag,
    "SGLD": _sgmcmc,
    "SGHMC": _sgmcmc,
    "NUTS": _nuts,
    "MCDropout": _dropout,
    "Laplace": _laplace,
}
