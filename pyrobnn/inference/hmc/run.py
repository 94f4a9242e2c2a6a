"""The host side of the HMC machine: warm-up and sampling phases, looking at the chains every few dozen leapfrogs."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrobnn.inference.fitting import rng
from pyrobnn.inference.fitting.floats import PrecisionLoss
from pyrobnn.inference.hmc import checkpoint
from pyrobnn.inference.hmc.machine import Machine, Scalars, State, Vectors
from pyrobnn.inference.hmc.metric import pulled, standard_deviations, unwhiten, whiten, whitening
from pyrobnn.inference.hmc.step_size import FROZEN, OWN, POOLED, dual_averaging, first_step_size
from pyrobnn.inference.hmc.windows import (
    MIN_WINDOW,
    STATS,
    Phase,
    acceptance_off_target,
    extend_phase,
    kept_in_warmup,
    not_stationary,
    planned,
)
from pyrobnn.model.compile import CudaGraph, compiled, first_line
from pyrobnn.model.compile.interrupts import TimeSpent, limited

_SLOT = Scalars._fields.index("slot")
_TRANSITION = Scalars._fields.index("transition")
_LP = Scalars._fields.index("lp_prop")
_PROPOSAL = Vectors._fields.index("q_prop")


class Draws(NamedTuple):
    """What a run returns: unconstrained draws (chain, draw, dim), statistics (chain, draw, 7), the warm-up's history.

    ``scale``: the metric's A; ``interrupted``: Ctrl-C came before all of them; ``mode``: how the step was compiled, or
    what failed; ``unfinished``: why the warm-up was not finished; ``float64_reason``: why positions are in float64.
    """

    z: Tensor
    stats: Tensor
    compile_seconds: float
    num_gradients: int
    scale: Tensor
    history: dict[str, Tensor]
    interrupted: bool = False
    mode: str = "inductor"
    unfinished: str = ""
    num_warmup: int = 0
    float64_reason: str = ""


class Progress(NamedTuple):
    """What the host sees before the first step and between steps."""

    phase: str
    draws: int  # of the slowest chain in this phase
    latest: int  # transitions of this phase of the warm-up, on average
    wanted: int  # of the whole warm-up, which may have become longer, or of the sampling
    step_size: float
    tree_depth: float
    divergences: int
    steps: int
    unfinished: str  # why the warm-up was not finished when it was last judged
    # unconstrained (chain, draw, dim): the draws, or where the chains are
    positions: Callable[[], Tensor]


def named_stats(stats: Tensor) -> dict[str, Tensor]:
    """Statistics (chain, draw, 7) by name, each (chain, draw) in its own dtype."""
    whole = {
        "tree_depth": torch.int64,
        "n_steps": torch.int64,
        "diverging": torch.bool,
    }
    return {name: stats[..., i].to(whole.get(name, torch.float64)) for i, name in enumerate(STATS)}


class DelayedInterrupt:
    """Within :meth:`changing` a Ctrl-C takes effect at the end, a second one at once; then ``cut`` stays."""

    def __init__(self) -> None:
        self.cut = self._waiting = False
        self._before: Any = None

    def __enter__(self) -> DelayedInterrupt:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.cut and not self._waiting:
            self._waiting = True
        else:
            self._before(number, frame)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """A change of the state."""
        self.cut = True
        yield
        self.cut = False
        if self._waiting:
            self._waiting = False
            self._before(signal.SIGINT, None)


class Run:
    """A resumable run of the machine.

    Args:
        machine: sizes and gradient; ``machine.num_slots`` holds the longest phase worth keeping.
        num_warmup: transitions of the warm-up, on average over chains.
        max_warmup: transitions up to which the warm-up goes on where it is not finished; None ends it as planned.
        names: of the site of a coordinate, of a plain program; None for a net.
        inspect: says why draws (point, dim) and the steps along them (dim,) need float64; empty if they do not.
        mass_matrix: ``"diag"`` or ``"dense"``.
        step_size: the first one; None finds it.
        look_every: steps between looks.
        compile_within: seconds after which a compile is given up for the uncompiled step.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        seed: int,
        num_warmup: int,
        max_warmup: int | None = None,
        names: Callable[[int], str] | None = None,
        inspect: Callable[[Tensor, Tensor], str] | None = None,
        mass_matrix: str = "diag",
        step_size: float | None = None,
        compile: bool = True,
        look_every: int = 16,
        compile_within: float | None = None,
    ) -> None:
        self.machine = machine
        self.dense = mass_matrix == "dense"
        self.look_every = look_every
        chains = torch.arange(machine.num_chains, device=machine.device)
        self.keys = rng.key(torch.tensor(seed, device=machine.device), chains)
        self.plan = planned(num_warmup)
        self.max_warmup = max_warmup
        self.names = names
        self.inspect = inspect
        self.unfinished = ""  # why the warm-up was not finished when it was last judged
        self.first_step = step_size
        self.compile = compile
        self.compile_within = compile_within
        self.buffers = machine.buffers()
        # the last slot takes what is to be forgotten
        self.draws, self.stats = machine.records(machine.num_slots + 1)
        self.phase = 0
        self.total_steps = 0
        self._unstored = 0  # steps since draws were stored
        self.ready = 0  # draws that every chain had at the last look
        self.num_window = min(
            machine.num_slots,
            kept_in_warmup(max(num_warmup, max_warmup or 0), machine.num_chains, machine.dim),
        )
        self.history: list[list[float]] = []
        self._advance: Callable[[int], State] | None = None
        self.compile_seconds = 0.0
        self.mode = "eager"
        self._interrupts = DelayedInterrupt()
        self._next_check = 100

    def begin(self, z: Tensor, scale: Tensor | None = None) -> None:
        """Start at unconstrained positions (chain, dim), optionally with a first whitening scale (dim,)."""
        scale = z.new_ones(self.machine.dim) if scale is None else scale
        self.scale = torch.diag(scale) if self.dense else scale
        q = whiten(z, self.scale)
        g, lp = self._gradient(q)
        zero = torch.zeros(
            len(z),
            dtype=torch.float64,
            device=z.device,
        )
        step = self.first_step or self._find_step(q, g, lp, zero, 0.1)
        self.state = self.machine.start(q, g, lp, self._dual(step), self.keys, zero)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs."""
        return {
            **self.state._asdict(),
            **self.buffers._asdict(),
            **self._stored(),
            "scale": self.scale,
            "counters": torch.tensor([self.phase, self.total_steps]),
            "plan": torch.tensor(self.plan, dtype=torch.int64).reshape(-1, 3),
            "unfinished": torch.tensor(list(self.unfinished.encode()), dtype=torch.uint8),
            "history": torch.tensor(self.history, dtype=torch.float64).reshape(-1, 2),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what :meth:`tensors` gave, on any device; ValueError where the density is another."""
        device = self.machine.device
        self.state = State(*(tensors[name].to(device) for name in State._fields))
        for name, buffer in {**self.buffers._asdict(), **self._stored()}.items():
            buffer.copy_(tensors[name])
        self.scale = tensors["scale"].to(device)
        self.phase, self.total_steps = tensors["counters"].tolist()
        self.history = tensors["history"].tolist()
        phases = tensors["plan"].tolist()
        self.plan = [Phase(length, bool(mass), bool(own_step)) for length, mass, own_step in phases]
        self.unfinished = bytes(tensors["unfinished"].tolist()).decode()
        checkpoint.check_density(
            self.state.scalars[_LP], self._gradient(self.state.vectors[_PROPOSAL])[1]
        )

    def sample(
        self,
        num_draws: int,
        *,
        look: Callable[[Progress], bool] | None = None,
        enough: Callable[[Draws], bool] | None = None,
        save: tuple[str | Path, str, float] | None = None,
    ) -> Draws:
        """Run the remaining phases and return the draws.

        Args:
            look: called now and then with a :class:`Progress`; True stops the run at the draws that every chain has,
                and in the warm-up begins them.
            enough: called with the draws so far at growing lengths; True stops.
            save: checkpoint path, fingerprint, and seconds between writes; Ctrl-C writes it at once.

        Raises:
            KeyboardInterrupt: Ctrl-C before every chain had a draw; later it ends the run with the draws it has.
        """
        self.prepare()
        saved = time.monotonic()
        try:
            with self._interrupts:
                if look is not None:
                    look(self._progress(self.ready, num_draws))
                while not self._finished(num_draws, look, enough):
                    if save is not None and time.monotonic() - saved > save[2]:
                        checkpoint.write(*save[:2], self.tensors())
                        saved = time.monotonic()
                return self._draws(self.ready)
        except KeyboardInterrupt:
            if self._interrupts.cut:  # a second one
                raise
            if save is not None:
                checkpoint.write(*save[:2], self.tensors())
            if self.ready == 0:
                raise
            return self._draws(self.ready)._replace(interrupted=True)

    def _finished(
        self,
        num_draws: int,
        look: Callable[[Progress], bool] | None,
        enough: Callable[[Draws], bool] | None,
    ) -> bool:
        """Take some steps, look at the chains, and perhaps go on to the next phase; whether the draws are there."""
        with self._interrupts.changing():
            self.advance(self.look_every)
        slots = self.state.scalars[_SLOT]
        if self.phase == len(self.plan):
            self.ready = min(int(slots.min()), num_draws)
            stop = look is not None and look(self._progress(self.ready, num_draws))
            if enough is not None and self._next_check <= self.ready < num_draws:
                self._next_check = int(self.ready * 1.25) + 1
                stop = stop or enough(self._draws(self.ready))
            return self.ready == num_draws or (stop and self.ready > 0)
        # a warm-up phase ends when the chains have so many transitions on average: none waits for another
        count = int(slots.mean())
        stop = look is not None and look(self._progress(count, num_draws))
        if stop:  # the draws begin after what there is of this phase
            phase = self.plan[self.phase]
            mass = phase.mass and count >= MIN_WINDOW
            self.plan = [*self.plan[: self.phase], phase._replace(length=count, mass=mass)]
            self.max_warmup = None
        if count >= self.plan[self.phase].length:
            with self._interrupts.changing():
                self._next_phase()
        if stop:
            self.unfinished = "; ".join(filter(None, ["its time was spent", self.unfinished]))
        return False

    def advance(self, num: int) -> None:
        """Take ``num`` leapfrogs, fewer than ``machine.num_latest``, with every chain, without looking."""
        if self._advance is None:
            raise RuntimeError("the step is not compiled yet: call prepare() first")
        if self._unstored + num >= self.machine.num_latest:
            self._stored()
        self.state = self._advance(num)
        self.total_steps += num
        self._unstored += num

    def _stored(self) -> dict[str, Tensor]:
        """The ``draws`` and ``stats`` of this phase, after the latest are copied from where the step leaves them."""
        if self._unstored:
            end = self.machine.num_slots
            size = self.machine.num_latest
            chain = torch.arange(len(self.keys), device=self.keys.device).unsqueeze(-1)
            # a step ends one transition at most
            new = torch.arange(
                1,
                self._unstored + 1,
                device=chain.device,
            )
            number = self.state.scalars[_SLOT].long().unsqueeze(-1) - new
            # one index each: for two, torch starts threads
            rows = (chain * size + number % size).flatten()
            slot = torch.where(number < 0, end, number.clamp(max=end))
            places = (chain * (end + 1) + slot).flatten()
            for record, latest in (
                (self.draws, self.buffers.latest_draws),
                (self.stats, self.buffers.latest_stats),
            ):
                new_rows = latest.flatten(0, 1).index_select(0, rows)
                record.flatten(0, 1).index_copy_(0, places, new_rows)
            self._unstored = 0
        return {"draws": self.draws, "stats": self.stats}

    def prepare(self) -> None:
        """Compile the step; on CUDA capture it. A second call does nothing."""
        if self._advance is not None:
            return
        contents = [buffer.clone() for buffer in self.buffers] if self.total_steps else []
        example = (*(tensor.clone() for tensor in self.state), *self.buffers, self.scale, self.keys)
        begun = time.perf_counter()
        try:
            with limited(self.compile_within):
                step = compiled(
                    self.machine.step,
                    *example,
                    enabled=self.compile,
                    name="the model",
                    clone=False,
                )
        except TimeSpent:
            step = compiled(
                self.machine.step,
                *example,
                enabled=False,
                clone=False,
            )
            step.seconds = time.perf_counter() - begun
        for buffer, content in zip(self.buffers, contents, strict=False):
            buffer.copy_(content)
        self.compile_seconds = step.seconds
        self.mode = step.mode
        if self.machine.device.type == "cuda" and step.mode == "inductor" and self._capture(step):
            return

        def advance(num: int) -> State:
            state = State(*(tensor.contiguous() for tensor in self.state))  # written into
            arguments = (*state, *self.buffers, self.scale, self.keys)
            step(*arguments)
            with torch.no_grad():
                for _ in range(num - 1):
                    step.unchecked(*arguments)
            return state

        self._advance = advance

    def _mode(self) -> float:
        """How the step size adapts in this phase."""
        if self.phase == len(self.plan):
            return FROZEN
        return OWN if self.plan[self.phase].own_step else POOLED

    def _dual(self, step: Tensor | float) -> Tensor:
        """The adaptation of the step size as it begins in this phase."""
        return dual_averaging(
            step, len(self.keys), self.keys.device, self._mode(), self.machine.target_accept
        )

    def _capture(self, step: Callable[..., Any]) -> bool:
        """Advance by replays of a CUDA graph; False where the step cannot be captured, and ``mode`` says why."""
        num = len(self.state)
        contents = [buffer.clone() for buffer in self.buffers]
        static = tuple(tensor.clone() for tensor in (*self.state, self.scale, self.keys))
        try:
            graph = CudaGraph(step, *static[:num], *self.buffers, *static[num:])
        except RuntimeError as error:
            self.mode = f"captured in a CUDA graph ({first_line(error)})"
            return False
        finally:  # the calls before the capture never happened
            for buffer, content in zip(self.buffers, contents, strict=True):
                buffer.copy_(content)

        def advance(count: int) -> State:
            for buffer, value in zip(
                static,
                (*self.state, self.scale, self.keys),
                strict=True,
            ):
                if buffer is not value:
                    buffer.copy_(value)
            for _ in range(count):
                graph.replay()
            return State(*static[:num])

        self._advance = advance
        return True

    def _next_phase(self) -> None:
        """End a warm-up phase: perhaps a new mass matrix, then every chain restarts its transition at its last draw."""
        new_mass = self.plan[self.phase].mass
        self._judge()
        self.phase += 1
        state = self.state
        vectors = Vectors(*state.vectors)
        lp = state.scalars[_LP]
        q = vectors.q_prop
        g = vectors.g_prop
        transition = state.scalars[_TRANSITION] + 1
        if new_mass:
            z = unwhiten(q, self.scale)
            self.scale = whitening(*self._window(), self.scale)
            q = whiten(z, self.scale)
            g, lp = self._gradient(q)
        step = state.dual[1].exp() if self._mode() == OWN else float(state.dual[1].median().exp())
        # later windows change the whitened scale little
        if new_mass and not any(phase.mass for phase in self.plan[: self.phase - 1]):
            step = self._find_step(q, g, lp, transition, step)
        self.history.append([float(torch.as_tensor(step).median()), float(self.total_steps)])
        # a new average: the old one belongs to another scale, or to single chains
        self.state = self.machine.start(q, g, lp, self._dual(step), self.keys, transition)

    def _window(self) -> tuple[Tensor, Tensor]:
        """The draws of this phase (chain, slot, dim) that are kept, and how many each chain has."""
        counts = self.state.scalars[_SLOT].clamp(max=self.num_window).long()
        return unwhiten(self._stored()["draws"][:, : self.num_window], self.scale), counts

    def _judge(self) -> None:
        """At the end of the last window and of the last search for a step size: whether to go on."""
        if any(phase.mass for phase in self.plan[self.phase + 1 :]):
            return
        window, counts = self._window()
        stats = self.stats[:, : self.num_window]
        if self.inspect is not None and bool(counts.all()):
            best = int(self.state.scalars[_LP].argmax())
            steps = self.state.dual[1].median().exp() * standard_deviations(self.scale)
            reason = self.inspect(window[best, : int(counts[best])], steps)
            if reason:
                raise PrecisionLoss(reason, unwhiten(self.state.vectors[_PROPOSAL], self.scale))
        if self.plan[self.phase].mass:
            reason = not_stationary(window, stats, counts, self.names)
            self.unfinished = reason
        else:
            reason = acceptance_off_target(stats, counts, self.machine.target_accept)
            self.unfinished = reason or self.unfinished
        if reason and self.max_warmup is not None:
            self.plan = extend_phase(self.plan, self.phase, self.max_warmup)

    def _gradient(self, q: Tensor) -> tuple[Tensor, Tensor]:
        g, lp = self.machine.gradient(unwhiten(q, self.scale))
        return pulled(g, self.scale), lp

    def _find_step(
        self,
        q: Tensor,
        g: Tensor,
        lp: Tensor,
        transition: Tensor,
        guess: Tensor | float,
    ) -> Tensor | float:
        keys = ~rng.stream(self.keys, transition.long())  # other momenta than the transition's
        r = rng.normal(keys, q.shape[1], q.dtype)
        target = self.machine.target_accept
        by_chain = self._mode() == OWN
        return first_step_size(
            self._gradient,
            q,
            g,
            lp,
            r,
            guess,
            target,
            by_chain=by_chain,
        )

    def _progress(self, count: int, num_draws: int) -> Progress:
        """What the host sees where the slowest chain, or in the warm-up the mean one, has ``count`` draws."""
        warming = self.phase < len(self.plan)
        lengths = [phase.length for phase in self.plan]
        slots = self.state.scalars[_SLOT].long().clamp(max=self.machine.num_slots)
        rows = self._stored()["stats"]
        latest = rows[torch.arange(len(slots), device=slots.device), (slots - 1).clamp(min=0)]
        valid = torch.arange(rows.shape[1], device=slots.device) < slots.unsqueeze(-1)
        done = min(count, lengths[self.phase]) + sum(lengths[: self.phase]) if warming else count
        return Progress(
            "warm-up" if warming else "sampling",
            done,
            count,
            sum(lengths) if warming else num_draws,
            float(self.state.dual[0].median().exp()),
            float(latest[:, STATS.index("tree_depth")].mean()),
            0 if warming else int((rows[..., STATS.index("diverging")] * valid).sum()),
            self.total_steps,
            self.unfinished,
            partial(self._positions, 0 if warming else count),
        )

    def _positions(self, count: int) -> Tensor:
        """The first ``count`` unconstrained draws (chain, draw, dim); before the first, where the chains are."""
        if count:
            positions = self._stored()["draws"][:, :count]
        else:
            positions = self.state.vectors[_PROPOSAL].unsqueeze(1)
        return unwhiten(positions.clone(), self.scale)

    def _draws(self, count: int) -> Draws:
        """The first ``count`` draws of every chain."""
        steps, total = torch.tensor(self.history, dtype=torch.float64).reshape(-1, 2).unbind(1)
        # a draw at a time: the rounding of a product depends on its shape, and so on how many draws there are
        stored = self._stored()
        draws = stored["draws"][:, :count]
        z = torch.stack([unwhiten(q, self.scale) for q in draws.unbind(1)], 1)
        return Draws(
            z,
            stored["stats"][:, :count],
            self.compile_seconds,
            self.total_steps * self.machine.num_chains,
            self.scale,
            {
                "warmup_step_size": steps,
                "warmup_steps": total,
                "warmup_metric": self.scale.detach().cpu().flatten(),
            },
            mode=self.mode,
            unfinished=self.unfinished,
            num_warmup=sum(phase.length for phase in self.plan),
        )
