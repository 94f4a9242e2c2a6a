"""Checkpoints of a fit: its loops, written atomically, checked when read, with no code in them.

A fit is a sequence of loops, its :class:`Stage`. What leads from one to the next depends on the seed and on the loops
before alone, so a fit that is begun again comes to the same loops in the same order; each takes from the file where it
was, and those that had ended end at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from pyrobnn.core.seeding import random_state, seeded, set_random_state
from pyrobnn.inference.fitting.interruption import DelayedInterrupt
from pyrobnn.inference.fitting.problem import Problem, settings
from pyrobnn.inference.fitting.shares import Ranks, SharedLoader

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun, Method

#: what JSON holds
_Plain: TypeAlias = "None | bool | int | float | str | Sequence[_Plain] | Mapping[str, _Plain]"
#: what a checkpoint holds
Saved: TypeAlias = (
    "None | bool | int | float | str | Tensor | Sequence[Saved] | Mapping[str, Saved]"
)
#: the fields of a dataclass by name, as a checkpoint holds them
Fields: TypeAlias = dict[str, Any]
_MAGIC = b"pyrobnn checkpoint 5\n"
#: seconds between checkpoints
EVERY = 60.0
#: share of the time that writing checkpoints may take
_SHARE = 0.05
#: options of methods that no draw depends on
_IRRELEVANT = ("checkpoint_every", "until", "max_seconds")


class _Dataclass(Protocol):
    """An instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class Stateful(Protocol):
    """What a checkpoint holds: ``state()`` gives tensors and plain values, nested, and ``restore`` takes them back."""

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


# -- files -------------------------------------------------------------------------------------------------------------


def fingerprint(options: Mapping[str, _Plain], tensors: Mapping[str, Tensor]) -> str:
    """A digest of what a run depends on: its options (JSON-able) and its tensors, such as the data."""
    digest = hashlib.sha256(
        json.dumps(
            dict(options),
            sort_keys=True,
            default=repr,
        ).encode()
    )
    for name, value in sorted(tensors.items()):
        # cloned, as an axis of one may have any stride
        array = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        if array.numel():
            digest.update(array.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_fingerprint(config: Method, problem: Problem, run: FitRun) -> str:
    """Fingerprint of what the draws depend on and every device holds alike: neither starts nor density."""
    inputs = {"x": problem.x, "y": problem.y} if problem.stream is None else {}
    if isinstance(run.init, torch.nn.Module):
        inputs |= {f"init {name}": value for name, value in run.init.named_parameters()}
    elif run.init is not None:
        inputs |= {f"init {name}": draws[:, [0, -1]] for name, draws in run.init.draws.items()}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    sites = [(site.name, tuple(site.shape)) for site in problem.density.sites]
    plan = {
        **settings(config),
        "num_draws": run.num_draws,
        "seed": run.seed,
        "sites": sites,
    }
    for name in _IRRELEVANT:
        plan.pop(name, None)
    if problem.stream is not None:
        # the first batch of a loader that shuffles is another in every process
        plan["epoch"] = [problem.stream.num_data, problem.stream.num_points]
    return fingerprint(_without_addresses(plan), tensors)


def _without_addresses(plan: _Plain) -> Any:
    """The options without the addresses by which functions are written, other ones in every process."""
    if isinstance(plan, Mapping):
        return {name: _without_addresses(value) for name, value in plan.items()}
    if isinstance(plan, (list, tuple)):
        return [_without_addresses(value) for value in plan]
    return re.sub(r" at 0x[0-9a-f]+", "", plan) if isinstance(plan, str) else plan


def write(path: str | Path, run_digest: str, state: Saved) -> None:
    """Write a state for the run with this fingerprint; a reader sees the old file or the new one, never a part."""
    path = Path(path)
    body = io.BytesIO()
    torch.save(_on_cpu(state), body)
    content = body.getvalue()
    head = f"{run_digest} {hashlib.sha256(content).hexdigest()}\n"
    unfinished = path.with_name(path.name + ".part")
    with open(unfinished, "wb") as file:
        file.write(_MAGIC + head.encode() + content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read(path: str | Path, run_digest: str) -> Any:
    """The state of a checkpoint, None without a file; ValueError where it is damaged or of another run."""
    path = Path(path)
    if not path.exists():
        return None
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        raise ValueError(
            f"{path} is not a pyrobnn checkpoint: choose another path or delete the file"
        )
    head, _, body = content[len(_MAGIC) :].partition(b"\n")
    owner, _, digest = head.decode(errors="replace").partition(" ")
    if digest != hashlib.sha256(body).hexdigest():
        raise ValueError(
            f"the checkpoint {path} is damaged (its checksum does not match): delete it to start again"
        )
    if owner != run_digest:
        raise ValueError(
            f"the checkpoint {path} belongs to a run with another model, data, seed or settings: resume with the "
            "same ones, or choose another path"
        )
    return torch.load(io.BytesIO(body), weights_only=True)


def _on_cpu(state: Saved) -> Saved:
    """The state with its tensors on the CPU, each in memory of its own size; TypeError of what a file cannot hold."""
    if isinstance(state, Tensor):
        value = state.detach().cpu()
        # torch writes the whole memory that a view looks into
        is_whole = value.untyped_storage().nbytes() == value.nbytes
        return value if is_whole else value.clone()
    if isinstance(state, Mapping):
        return {name: _on_cpu(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_on_cpu(value) for value in state]
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise TypeError(
        f"a checkpoint holds tensors and numbers, got a {type(state).__name__}: an optimizer whose state_dict has "
        "anything else cannot be resumed"
    )


def moved(state: Saved, device: torch.device) -> Any:
    """The state with its tensors on a device."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, Mapping):
        return {name: moved(value, device) for name, value in state.items()}
    if isinstance(state, list):
        return [moved(value, device) for value in state]
    return state


def fields_of(instance: _Dataclass) -> Fields:
    """The fields of a dataclass by name, as they are."""
    return {entry.name: getattr(instance, entry.name) for entry in dataclasses.fields(instance)}


# -- loops -------------------------------------------------------------------------------------------------------------


class Stage:
    """One loop of a fit; this one is not saved."""

    #: the file, where there is one
    path: str | Path | None = None

    def resume(self, loop: Stateful) -> None:
        """Bring the loop to where the checkpoint has it; leave it as it is where that has nothing of it."""

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """The context of a change of the loop's state: Ctrl-C and SIGTERM wait for its end."""
        return _AT_ONCE

    def keep(self) -> None:
        """Between two changes: write a checkpoint if it is time, and give way to a SIGTERM that has come."""

    def once(self, compute: Callable[[], float]) -> float:
        """A number that is computed between two loops."""
        return compute()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The loop has ended."""


_AT_ONCE = contextlib.nullcontext()


class _SavedStage(Stage):
    """A loop that is saved with what it draws from: its ``companions``, and torch's random state."""

    def __init__(self, stages: _SavedStages, number: int, companions: Sequence[Stateful]) -> None:
        self.path = stages.path
        self._stages = stages
        self._number = number
        self._companions = companions
        self._loop: Stateful | None = None
        # since it was resumed: what had ended is in the file with what came after it
        self._changed = False
        self._interrupts = DelayedInterrupt()
        self._termination = _Termination()

    def resume(self, loop: Stateful) -> None:
        self._loop = loop
        saved = self._stages.saved(self._number)
        if saved is None:
            return
        if "failed" in saved:
            raise FloatingPointError(saved["failed"])
        loop.restore(moved(saved["loop"], self._stages.device))
        for companion, state in zip(self._companions, saved["companions"], strict=True):
            companion.restore(state)
        set_random_state(saved["random"], self._stages.device)

    def changing(self) -> contextlib.AbstractContextManager[None]:
        self._changed = True
        return self._interrupts.changing()

    def keep(self) -> None:
        if self._stages.ends(self._termination):
            self._write()
            self._stages.wait()
            self._termination.deliver()
        elif self._stages.due():
            self._write()

    def once(self, compute: Callable[[], float]) -> float:
        number = _Number()
        self.resume(number)
        if number.value is None:
            number.value = compute()
            self._stages.put(self._number, self._state())
        return number.value

    def __enter__(self) -> Stage:
        self._interrupts.__enter__()
        self._termination.__enter__()
        self._stages.listen(self._termination)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._interrupts.__exit__(kind, error, traceback)
        whole = self._loop is not None and not self._interrupts.changing_now
        if isinstance(error, FloatingPointError):
            # the fit may have another way to go on
            self._stages.put(self._number, {"failed": str(error)})
        elif whole and self._changed:
            self._write()
        self._termination.__exit__(kind, error, traceback)
        if self._termination.came and kind is None:
            self._termination.deliver()

    def _state(self) -> dict[str, Any]:
        loop: Any = self._loop
        return {
            "loop": loop.state(),
            "companions": [companion.state() for companion in self._companions],
            "random": random_state(self._stages.device),
        }

    def _write(self) -> None:
        self._stages.put(self._number, self._state())
        self._stages.write()


class _Number:
    """A number that was computed once."""

    value: float | None = None

    def state(self) -> float | None:
        return self.value

    def restore(self, state: float) -> None:
        self.value = state


class _Termination:
    """SIGTERM, by which a machine asks a process to end: it waits until the state is whole."""

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None
        self._replaced = False

    def __enter__(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and (callable(before) or before is signal.SIG_DFL):
            self._before = before
            self._replaced = True
            signal.signal(signal.SIGTERM, self._handle)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._replaced:
            self._replaced = False
            signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.came:  # a second one takes effect at once
            self.deliver()
        self.came = True

    def deliver(self) -> None:
        """Let it do what it does without this."""
        self.__exit__(None, None, None)
        self.came = False
        signal.raise_signal(signal.SIGTERM)


class _Identity(NamedTuple):
    """What a checkpoint is known by: a fingerprint, and the log density at one point (1,), which the prior shapes."""

    digest: str
    density_level: Tensor


@dataclass(eq=False)
class Stages:
    """The loops of a fit that has no checkpoint."""

    def begin(self, *companions: Stateful) -> Stage:
        """The next loop of the fit, which draws from these ``companions``: batches, moments."""
        return Stage()


@dataclass(eq=False)
class _SavedStages(Stages):
    """The loops of a fit, in the order in which they begin, as the checkpoint at ``path`` has them.

    Attributes: ``identity`` gives what the file is known by.
    """

    path: str | Path
    device: torch.device
    identity: Callable[[], _Identity]
    _states: list[dict[str, Any]] = field(default_factory=list)
    _number: int = -1
    _last_written: float = 0.0
    _every: float = 0.0
    _known: _Identity | None = None

    def begin(self, *companions: Stateful) -> Stage:
        if self._number < 0:
            self._read()
        self._number += 1
        return _SavedStage(self, self._number, companions)

    def _read(self) -> None:
        self._known = self.identity()
        saved = self._found(self._known)
        if saved is not None:
            self._states = saved["stages"]
        self._last_written = time.monotonic()
        self._every = EVERY

    def _found(self, known: _Identity) -> Any:
        """What the file has; None without one, ValueError of another fit's."""
        saved = read(self.path, known.digest)
        if saved is not None:
            check_density(saved["density_level"], known.density_level)
        return saved

    def listen(self, termination: _Termination) -> None:
        """A loop begins, which this would end."""

    def ends(self, termination: _Termination) -> bool:
        """Whether the process is to end now."""
        return termination.came

    def wait(self) -> None:
        """Before it ends: until the file is written."""

    def saved(self, number: int) -> dict[str, Any] | None:
        """What the file has of the loop of this number; None of one that had not begun."""
        return self._states[number] if number < len(self._states) else None

    def put(self, number: int, state: dict[str, Any]) -> None:
        """The loop of this number is here; those after it have not begun."""
        self._states = [*self._states[:number], state]

    def due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() - self._last_written >= self._every

    def write(self) -> None:
        """Write all loops."""
        if self._known is None:
            return
        begun = time.monotonic()
        state: dict[str, Saved] = {
            "stages": self._states,
            "density_level": self._known.density_level,
        }
        write(self.path, self._known.digest, state)
        self._last_written = time.monotonic()
        self._every = max(EVERY, (self._last_written - begun) / _SHARE)


@dataclass(eq=False)
class _RankStages(_SavedStages):
    """The loops of a fit on several ranks, which are alike on all: rank 0 writes the file and reads it for all.

    Where one rank is asked to end, all do so after the same step.
    """

    ranks: Ranks = field(kw_only=True)

    def _found(self, known: _Identity) -> Any:
        saved: Any = None
        if self.ranks.rank == 0:
            try:
                saved = super()._found(known)
            except ValueError as error:  # it is raised on every rank
                saved = error
        return self.ranks.from_first(saved)

    def listen(self, termination: _Termination) -> None:
        self.ranks.asked_to_end = lambda: termination.came

    def ends(self, termination: _Termination) -> bool:
        return self.ranks.ending

    def wait(self) -> None:
        self.ranks.wait()

    def write(self) -> None:
        if self.ranks.rank == 0:
            super().write()


def stages_of(config: Method, problem: Problem, run: FitRun) -> Stages:
    """The loops of a fit, saved where it has a checkpoint."""
    if run.checkpoint is None:
        return Stages()

    def identity() -> _Identity:
        return _Identity(run_fingerprint(config, problem, run), _density_level(problem))

    if isinstance(problem.loader, SharedLoader):
        return _RankStages(
            run.checkpoint,
            problem.device,
            identity,
            ranks=problem.loader.ranks,
        )
    return _SavedStages(run.checkpoint, problem.device, identity)


@torch.no_grad()
def _density_level(problem: Problem) -> Tensor:
    """The log density at one point (1,): of a stream, whose first batch may be another, that of the prior."""
    z = problem.density.initial(seed=0)
    with seeded(0, problem.device):
        prior, likelihood = problem.density.log_parts(z)
    return (prior if problem.stream is not None else prior + likelihood).reshape(1)


def check_density(before: Tensor, now: Tensor) -> None:
    """ValueError where the log density (chain,) is off by 1e-4: more than rounding, less than another prior."""
    off = (now.double().cpu() - before.double().cpu()).abs()
    if not bool((off <= 1e-4 * before.cpu().abs().clamp(min=100.0)).all()):
        raise ValueError(
            "the checkpoint belongs to another model: where its chains are, the log density differs by "
            f"{float(off.max()):.3g} nats. Resume with the model that it was written with, or choose another path"
        )
