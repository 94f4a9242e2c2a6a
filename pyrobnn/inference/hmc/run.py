"""The host side of the HMC machine: warm-up and sampling phases, looking at the chains every few dozen steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrobnn.compile import CudaGraph, compiled, first_line
from pyrobnn.inference.fitting import rng
from pyrobnn.inference.fitting.floats import PrecisionLoss
from pyrobnn.inference.hmc import checkpoint, metric
from pyrobnn.inference.hmc.adaptation import FROZEN, OWN, POOLED, dual_averaging, first_step_size, whitening
from pyrobnn.inference.hmc.checkpoint import DrawFile
from pyrobnn.inference.hmc.machine import STATS, Buffers, Machine, Scalars, State, Vectors
from pyrobnn.inference.hmc.signals import DelayedInterrupt, TimeSpent, limited
from pyrobnn.inference.hmc.warmup import (
    Phase,
    acceptance_off_target,
    extend_phase,
    in_transient,
    kept_in_warmup,
    not_stationary,
    planned,
    truncate,
)

_SLOT = Scalars._fields.index("slot")
_TRANSITION = Scalars._fields.index("transition")
_LP = Scalars._fields.index("lp_prop")
_PROPOSAL = Vectors._fields.index("q_prop")


class Draws(NamedTuple):
    """What a run returns: unconstrained draws (chain, draw, dim), statistics (chain, draw, 7), the warm-up's history.

    ``z`` is None where the draws went to a file; ``interrupted``: Ctrl-C came before all of them; ``mode``: how the
    step was compiled, or what was done to it in vain; ``unfinished``: why the warm-up was not finished after
    ``num_warmup`` transitions; ``float64_reason``: why the positions are in float64.
    """

    z: Tensor | None
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

    @property
    def positions(self) -> Tensor:
        """``z`` of a run that kept its draws in memory."""
        if self.z is None:
            raise ValueError("the draws went to a file: read them there")
        return self.z


class Progress(NamedTuple):
    """What the host sees before the first step and between steps."""

    phase: str
    draws: int  # of the slowest chain in this phase
    wanted: int  # of the whole warm-up, which may have become longer, or of the sampling
    step_size: float
    tree_depth: float
    divergences: int
    steps: int
    unfinished: str  # why the warm-up was not finished when it was last judged
    positions: Callable[[], Tensor]  # unconstrained (chain, draw, dim): the draws, or where the chains are


def named_stats(stats: Tensor) -> dict[str, Tensor]:
    """Statistics (chain, draw, 7) by name, each (chain, draw) in its own dtype."""
    whole = {"tree_depth": torch.int64, "n_steps": torch.int64, "diverging": torch.bool}
    return {name: stats[..., i].to(whole.get(name, torch.float64)) for i, name in enumerate(STATS)}


def progress(run: Run, warming: bool, count: int, wanted: int) -> Progress:
    """What the host sees of a run whose slowest chain has ``count`` of ``wanted`` draws in this phase."""
    slots = run.state.scalars[_SLOT].long().clamp(max=run.machine.num_slots)
    rows = run.buffers.stats
    latest = rows[torch.arange(len(slots), device=slots.device), (slots - 1).clamp(min=0)]
    column = STATS.index("diverging")
    valid = torch.arange(rows.shape[1], device=slots.device) < slots.unsqueeze(-1)
    diverging = int((rows[..., column] * valid).sum()) + int(run.written_stats[..., column].sum())
    return Progress(
        "warm-up" if warming else "sampling",
        min(count, wanted) + (sum(each.length for each in run.plan[: run.phase]) if warming else 0),
        sum(each.length for each in run.plan) if warming else wanted,
        float(run.state.dual[0].median().exp()),
        float(latest[:, STATS.index("tree_depth")].mean()),
        0 if warming else diverging,
        run.total_steps,
        run.unfinished,
        partial(run.positions, min(count, wanted)),
    )


class Replayed:
    """The compiled step captured with copies of its arguments, which stay; RuntimeError if it cannot be."""

    def __init__(
        self, step: Callable[..., Any], state: State, metric: Tensor, keys: Tensor, buffers: Buffers
    ) -> None:
        self._static = tuple(tensor.clone() for tensor in (*state, metric, keys))
        num, kept = len(state), [buffer.clone() for buffer in buffers]
        try:
            self._graph = CudaGraph(step, *self._static[:num], *buffers, *self._static[num:])
        finally:  # the calls before the capture never happened
            for mine, old in zip(buffers, kept, strict=True):
                mine.copy_(old)

    def __call__(self, count: int, state: State, metric: Tensor, keys: Tensor) -> State:
        """The state after so many steps, in memory that the next call writes into."""
        for mine, value in zip(self._static, (*state, metric, keys), strict=True):
            if mine is not value:
                mine.copy_(value)
        for _ in range(count):
            self._graph.replay()
        return State(*self._static[: len(state)])


class Run:
    """A resumable run of the machine.

    Args:
        machine: sizes and gradient; ``machine.num_slots`` holds the longest phase worth keeping.
        num_warmup: transitions of the warm-up, on average over chains.
        most: transitions up to which the warm-up goes on where it is not finished; None ends it as planned.
        names: of the site of a coordinate, of a plain program; None for a net.
        inspect: says why draws (point, dim) and the steps along them (dim,) need float64; empty if they do not.
        step_size: the first one; None finds it.
        every: steps between looks.
        chains_per_call: of the compiled step, a divisor of the machine's; None for all of them.
        file: where the draws go, block by block, instead of staying in the machine's buffers.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        seed: int,
        num_warmup: int,
        most: int | None = None,
        names: Callable[[int], str] | None = None,
        inspect: Callable[[Tensor, Tensor], str] | None = None,
        mass_matrix: str = "diag",
        step_size: float | None = None,
        compile: bool = True,
        every: int = 16,
        chains_per_call: int | None = None,
        file: DrawFile | None = None,
    ) -> None:
        self.machine, self.form, self.every = machine, mass_matrix, every
        self.chains_per_call = chains_per_call or machine.num_chains
        self.keys = rng.key(
            torch.tensor(seed, device=machine.device), torch.arange(machine.num_chains, device=machine.device)
        )
        self.plan = planned(num_warmup)
        self.most, self.names, self.inspect = most, names, inspect
        self.unfinished = ""  # why the warm-up was not finished when it was last judged
        self.first_step, self.compile = step_size, compile
        self.buffers = machine.buffers()
        self.phase = self.steps = self.total_steps = 0
        self.ready = 0  # draws that every chain had at the last look
        longest = max(num_warmup, most or 0)
        self.kept = min(machine.num_slots, kept_in_warmup(longest, machine.num_chains, machine.dim))
        self.file = file
        # draws that are in the file already, by chain, and their statistics
        self.written = torch.zeros(machine.num_chains, dtype=torch.float64, device=machine.device)
        self.written_stats = torch.zeros(machine.num_chains, 0, len(STATS), dtype=torch.float64)
        self.history: list[list[float]] = []
        self._advance: Callable[[int], State] | None = None
        self.compile_seconds, self.mode = 0.0, "eager"
        self._interrupts = DelayedInterrupt()

    # -- beginning, saving, resuming ---------------------------------------------------------------------------------

    def begin(self, z: Tensor, scale: Tensor | None = None) -> None:
        """Start at unconstrained positions (chain, dim), optionally with a first whitening scale (dim,)."""
        scale = z.new_ones(self.machine.dim) if scale is None else scale
        self.scale = metric.scaled(scale, self.form)
        q = metric.whiten(z, self.scale)
        g, lp = self._gradient(q)
        zero = torch.zeros(len(z), dtype=torch.float64, device=z.device)
        step = self.first_step or self._find_step(q, g, lp, zero, 0.1, each=self._mode() == OWN)
        dual = dual_averaging(step, len(z), z.device, self._mode())
        self.state = self.machine.start(q, g, lp, dual, self.keys, zero)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs."""
        counters = torch.tensor([self.phase, self.steps, self.total_steps])
        plan = torch.tensor(self.plan, dtype=torch.int64).reshape(-1, 3)
        history = torch.tensor(self.history, dtype=torch.float64).reshape(-1, 3)
        return {
            **self.state._asdict(),
            **self.buffers._asdict(),
            "scale": self.scale,
            "counters": counters,
            "plan": plan,
            "unfinished": torch.tensor(list(self.unfinished.encode()), dtype=torch.uint8),
            "history": history,
            "written": self.written,
            "written_stats": self.written_stats,
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what :meth:`tensors` gave, on any device; ValueError where the density is another."""
        device = self.machine.device
        self.state = State(*(tensors[name].to(device) for name in State._fields))
        for mine, name in zip(self.buffers, Buffers._fields, strict=True):
            mine.copy_(tensors[name])
        self.scale = tensors["scale"].to(device)
        self.written, self.written_stats = tensors["written"].to(device), tensors["written_stats"]
        self.phase, self.steps, self.total_steps = (int(count) for count in tensors["counters"])
        self.history = tensors["history"].tolist()
        self.plan = [Phase(length, bool(mass), bool(own)) for length, mass, own in tensors["plan"].tolist()]
        self.unfinished = bytes(tensors["unfinished"].tolist()).decode()
        checkpoint.check_density(self.state.scalars[_LP], self._gradient(self.state.vectors[_PROPOSAL])[1])

    # -- running -----------------------------------------------------------------------------------------------------

    def sample(
        self,
        num_draws: int,
        *,
        look: Callable[[Progress], bool] | None = None,
        enough: Callable[[Draws], bool] | None = None,
        save: tuple[str | Path, str, float] | None = None,
        compile_until: float | None = None,
    ) -> Draws:
        """Run the remaining phases and return the draws.

        Args:
            look: called now and then with a :class:`Progress`; True stops the run at the draws that every chain has,
                and in the warm-up begins them.
            enough: called with the draws so far at growing lengths; True stops.
            save: checkpoint path, fingerprint, and seconds between writes; Ctrl-C writes it at once.
            compile_until: time of the monotonic clock at which a compile is given up.

        Raises:
            KeyboardInterrupt: Ctrl-C before every chain had a draw; later it ends the run with the draws it has.
        """
        self.prepare(compile_until)
        try:
            with self._interrupts:
                return self._sample(num_draws, look, enough, save)
        except KeyboardInterrupt:
            if self._interrupts.cut:  # a second one
                raise
            if save is not None:
                self._save(*save[:2])
            if self.ready == 0:
                raise
            return self._finish(self.ready, num_draws)._replace(interrupted=True)

    def _sample(
        self, num_draws: int, look: Callable[[Progress], bool] | None, enough: Callable[[Draws], bool] | None,
        save: tuple[str | Path, str, float] | None,
    ) -> Draws:  # fmt: skip
        written, next_check = time.monotonic(), 100
        if look is not None:
            look(progress(self, self.phase < len(self.plan), self.ready, num_draws))
        while True:
            warming = self.phase < len(self.plan)
            wanted = self.plan[self.phase][0] if warming else num_draws
            with self._interrupts.changing():
                self.advance(self.every)
                if self.file is not None and not warming:
                    if int(self.state.scalars[_SLOT].max()) > self.machine.num_slots - self.every:
                        self._write_out(self.file, num_draws)
            slots = self.state.scalars[_SLOT] + self.written
            # a warm-up phase ends when the chains have so many transitions on average: none waits for another
            count = int(slots.mean() if warming else slots.min())
            self.ready = 0 if warming else min(count, num_draws)
            stop = look is not None and look(progress(self, warming, count, wanted))
            if warming and stop and (plan := truncate(self.plan, self.phase, count)):
                self.plan, self.most = plan, None
                with self._interrupts.changing():
                    self._next_phase()
                self.unfinished = "; ".join(filter(None, ["its time was spent", self.unfinished]))
            elif count >= wanted and warming:
                with self._interrupts.changing():
                    self._next_phase()
            elif not warming:
                if count >= next_check and enough is not None and count < wanted:
                    next_check = int(count * 1.25) + 1
                    stop = stop or enough(self._finish(count, num_draws))
                if count >= wanted or (stop and count > 0):
                    return self._finish(min(count, num_draws), num_draws)
            if save is not None and time.monotonic() - written > save[2]:
                self._save(*save[:2])
                written = time.monotonic()

    def _save(self, path: str | Path, fingerprint: str) -> None:
        if self.file is not None:
            self.file.flush()
        checkpoint.write(path, fingerprint, self.tensors())

    def advance(self, num: int) -> None:
        """Take ``num`` leapfrogs with every chain, without looking."""
        if self._advance is None:
            raise RuntimeError("the step is not compiled yet: call prepare() first")
        self.state = self._advance(num)
        self.steps += num
        self.total_steps += num

    def prepare(self, until: float | None = None) -> None:
        """Compile the step, where that is done in time; on CUDA capture it. A second call does nothing."""
        if self._advance is not None:
            return
        kept = [buffer.clone() for buffer in self.buffers] if any(self.tensors()["counters"]) else None
        starts = range(0, self.machine.num_chains, self.chains_per_call)
        parts = [slice(start, start + self.chains_per_call) for start in starts]
        machine = replace(
            self.machine, num_chains=self.chains_per_call, pooled_chains=self.machine.num_chains
        )
        example = (*(tensor.clone() for tensor in self._rows(parts[0])), *self._fixed(parts[0]))
        begun = time.perf_counter()
        try:
            with limited(until):
                step = compiled(machine.step, *example, enabled=self.compile, name="the model", clone=False)
        except TimeSpent:
            step = compiled(machine.step, *example, enabled=False, clone=False)
            step.seconds = time.perf_counter() - begun
        for mine, old in zip(self.buffers, kept or (), strict=False):
            mine.copy_(old)
        self.compile_seconds, self.mode = step.seconds, step.mode
        if self.machine.device.type == "cuda" and step.mode == "inductor" and self._capture(step):
            return

        def advance(num: int) -> State:
            states, own = [self._rows(part) for part in parts], self._mode() == OWN
            if not own:  # one step size for all: it goes from call to call
                states = [state._replace(dual=states[0].dual) for state in states]
            calls = [(*state, *self._fixed(part)) for state, part in zip(states, parts, strict=True)]
            for arguments in calls:
                step(*arguments)
            with torch.no_grad():
                for _ in range(num - 1):
                    for arguments in calls:
                        step.unchecked(*arguments)
            return states[0] if len(states) == 1 else State(*(torch.cat(rows, 1) for rows in zip(*states)))

        self._advance = advance

    def _mode(self) -> float:
        """How the step size adapts in this phase."""
        if self.phase == len(self.plan):
            return FROZEN
        return OWN if self.plan[self.phase].own_step else POOLED

    def _rows(self, part: slice) -> State:
        """The state of some chains, to be written into."""
        return State(*(tensor[:, part].contiguous() for tensor in self.state))

    def _fixed(self, part: slice) -> tuple[Tensor, ...]:
        """What the step of some chains is given beside their state."""
        return *(buffer[part] for buffer in self.buffers), self.scale, self.keys[part]

    def _capture(self, step: Callable[..., Any]) -> bool:
        """Advance by replays of a CUDA graph; False where the step cannot be captured, and ``mode`` says why."""
        try:
            replayed = Replayed(step, self.state, self.scale, self.keys, self.buffers)
        except RuntimeError as error:
            self.mode = f"captured in a CUDA graph ({first_line(error)})"
            return False
        self._advance = lambda num: replayed(num, self.state, self.scale, self.keys)
        return True

    def _next_phase(self) -> None:
        """End a warm-up phase: perhaps a new mass matrix, then every chain restarts its transition at its last draw."""
        new_mass = self.plan[self.phase].mass
        self._judge()
        self.phase, self.steps = self.phase + 1, 0
        state = self.state
        vectors, lp = Vectors(*state.vectors), state.scalars[_LP]
        q, g = vectors.q_prop, vectors.g_prop
        transition = state.scalars[_TRANSITION] + 1
        if new_mass:
            counts = state.scalars[_SLOT].clamp(max=self.kept)
            z = metric.unwhiten(q, self.scale)
            window = metric.unwhiten(self.buffers.draws[:, : self.kept], self.scale)
            self.scale = self._new_metric(window, counts)
            q = metric.whiten(z, self.scale)
            g, lp = self._gradient(q)
        step = state.dual[1].exp() if self._mode() == OWN else float(state.dual[1].median().exp())
        first = new_mass and not any(each.mass for each in self.plan[: self.phase - 1])
        if first:  # later windows change the whitened scale little
            step = self._find_step(q, g, lp, transition, step, each=self._mode() == OWN)
        self.history.append(
            [float(self.phase), float(torch.as_tensor(step).median()), float(self.total_steps)]
        )
        # a new average: the old one belongs to another scale, or to single chains
        dual = dual_averaging(step, self.machine.num_chains, self.machine.device, self._mode())
        self.state = self.machine.start(q, g, lp, dual, self.keys, transition)

    def _judge(self) -> None:
        """At the end of the last window and of the last search for a step size: whether to go on."""
        if any(each.mass for each in self.plan[self.phase + 1 :]):
            return
        counts = self.state.scalars[_SLOT].clamp(max=self.kept).long()
        stats = self.buffers.stats[:, : self.kept]
        window = metric.unwhiten(self.buffers.draws[:, : self.kept], self.scale)
        if self.inspect is not None:
            best = int(self.state.scalars[_LP].argmax())
            steps = self.state.dual[1].median().exp() * metric.standard_deviations(self.scale)
            if reason := self.inspect(window[best, : int(counts[best])], steps):
                raise PrecisionLoss(reason, metric.unwhiten(self.state.vectors[_PROPOSAL], self.scale))
        if self.plan[self.phase].mass:
            reason = self.unfinished = not_stationary(window, stats, counts, self.names)
        else:
            reason = acceptance_off_target(stats, counts, self.machine.target_accept)
            self.unfinished = reason or self.unfinished
        if reason and self.most is not None:
            self.plan = extend_phase(self.plan, self.phase, self.most)

    def _write_out(self, file: DrawFile, num_draws: int) -> None:
        """Move the block of draws to the file; every chain begins an empty block."""
        if self.written_stats.shape[1] < num_draws:
            self.written_stats = self.written_stats.new_zeros(self.machine.num_chains, num_draws, len(STATS))
        slots = self.state.scalars[_SLOT]
        for chain in range(self.machine.num_chains):
            start = int(self.written[chain])
            num = min(int(slots[chain]), num_draws - start)
            if num > 0:
                file.write(chain, start, metric.unwhiten(self.buffers.draws[chain, :num], self.scale))
                self.written_stats[chain, start : start + num] = self.buffers.stats[chain, :num].cpu()
        self.written = self.written + slots
        scalars = self.state.scalars.clone()
        scalars[_SLOT] = 0.0
        self.state = self.state._replace(scalars=scalars)

    def positions(self, count: int) -> Tensor:
        """Unconstrained draws (chain, draw, dim) in memory, ``count`` at most; before the first, where chains are."""
        slots = 0 if self.phase < len(self.plan) else min(count, int(self.state.scalars[_SLOT].min()))
        kept = self.buffers.draws[:, :slots] if slots else self.state.vectors[_PROPOSAL].unsqueeze(1)
        return metric.unwhiten(kept.clone(), self.scale)

    def _finish(self, count: int, num_draws: int) -> Draws:
        """The first ``count`` draws of every chain."""
        if self.file is not None:
            self._write_out(self.file, num_draws)
        history = torch.tensor(self.history, dtype=torch.float64).reshape(-1, 3)
        return Draws(
            metric.unwhiten(self.buffers.draws[:, :count], self.scale) if self.file is None else None,
            (self.buffers.stats if self.file is None else self.written_stats)[:, :count],
            self.compile_seconds,
            self.total_steps * self.machine.num_chains,
            self.scale,
            {"warmup_step_size": history[:, 1], "warmup_steps": history[:, 2]},
            mode=self.mode,
            unfinished=self.unfinished,
            num_warmup=sum(each.length for each in self.plan),
        )

    # -- whitening ---------------------------------------------------------------------------------------------------

    def _new_metric(self, window: Tensor, counts: Tensor) -> Tensor:
        """The metric of a window of draws (chain, slot, dim), perhaps with their gradients, which cost one each."""
        if self.form not in ("auto", "low_rank"):
            return whitening(window, counts, self.scale, self.form == "dense")
        scale = whitening(window, counts, self.scale[0, 0], False)
        if in_transient(self.buffers.stats[:, : self.kept], counts.long(), self.machine.dim):
            return metric.scaled(scale, self.form)  # directions of where a chain is late would keep it there
        g = metric.gradients(self.machine.gradient, window, counts)
        self.total_steps += g.shape[1]
        if self.form == "auto" and not metric.low_rank_helps(window, g, counts, scale):
            return metric.scaled(scale, self.form)
        return metric.low_rank(window, g, counts, scale)

    def _gradient(self, q: Tensor) -> tuple[Tensor, Tensor]:
        g, lp = self.machine.gradient(metric.unwhiten(q, self.scale))
        return metric.pulled(g, self.scale), lp

    def _find_step(
        self, q: Tensor, g: Tensor, lp: Tensor, transition: Tensor, guess: Tensor | float, each: bool
    ) -> Tensor | float:
        keys = ~rng.stream(self.keys, transition.long())  # other momenta than the transition's
        r = rng.normal(keys, q.shape[1], q.dtype)
        return first_step_size(self._gradient, q, g, lp, r, guess, self.machine.target_accept, each=each)
