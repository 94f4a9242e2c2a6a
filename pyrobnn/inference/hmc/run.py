"""The host side of the HMC machine: warm-up and sampling phases, looking at the chains every few dozen leapfrogs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.core.threads import threads_by_need
from pyrobnn.inference.fitting import rng
from pyrobnn.inference.fitting.checkpoints import check_density
from pyrobnn.inference.fitting.floats import PrecisionLoss
from pyrobnn.inference.fitting.interruption import DelayedInterrupt
from pyrobnn.inference.hmc.checkpoint import Saving
from pyrobnn.inference.hmc.leapfrog import Place, whitened_gradient
from pyrobnn.inference.hmc.machine import Machine
from pyrobnn.inference.hmc.metric import (
    Form,
    standard_deviations,
    unwhiten,
    whiten,
    whitening,
)
from pyrobnn.inference.hmc.run_state import Chains, adaptation_mode
from pyrobnn.inference.hmc.step_size import OWN, first_adaptation, first_step_size
from pyrobnn.inference.hmc.stepper import Stepper, prepared
from pyrobnn.inference.hmc.trial import FIRST_TRIAL, Raise, phases_after, raised_target
from pyrobnn.inference.hmc.windows import (
    MIN_WINDOW,
    STATS,
    acceptance_off_target,
    extend_phase,
    kept_in_warmup,
    not_stationary,
    planned,
)
from pyrobnn.model.compile.forecast import Compile


class Draws(NamedTuple):
    """What a run returns.

    Unconstrained draws (chain, draw, dim), statistics (chain, draw, len(STATS)), and the warm-up's history. ``scale``:
    the metric's A; ``interrupted``: Ctrl-C came before all of them; ``mode``: how the step was compiled, or what
    failed; ``unfinished``: why the warm-up was not finished; ``float64_reason``: why positions are in float64;
    ``raises``: the trials that failed.
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
    raises: tuple[Raise, ...] = ()


class Progress(NamedTuple):
    """What the host sees before the first step and between steps."""

    phase: str
    draws: int  # of the slowest chain while sampling; in the warm-up its transitions so far, on average
    latest: int  # transitions of this phase of the warm-up, on average
    wanted: int  # of the whole warm-up, which may have become longer, or of the sampling
    step_size: float
    tree_depth: float
    divergences: int
    steps: int
    unfinished: str  # why the warm-up goes on for longer than planned
    # unconstrained (chain, draw, dim): the draws, or where the chains are
    positions: Callable[[], Tensor]


def named_stats(stats: Tensor) -> dict[str, Tensor]:
    """Statistics (chain, draw, len(STATS)) by name, each (chain, draw) in its own dtype."""
    whole = {
        "tree_depth": torch.int64,
        "n_steps": torch.int64,
        "diverging": torch.bool,
    }
    return {name: stats[..., i].to(whole.get(name, torch.float64)) for i, name in enumerate(STATS)}


_Look = Callable[[Progress], bool]
_Enough = Callable[[Draws], bool]


class _Looks:
    """The looks of the host at the chains, with a pause of so many seconds between them.

    Attributes: ``wanted``, whether there are any.
    """

    def __init__(self, look: _Look | None, pause: float) -> None:
        self.wanted = look is not None
        self._look = look
        self._pause = pause
        self._next = 0.0

    @property
    def due(self) -> bool:
        """Whether it is time for the next one."""
        return self.wanted and time.monotonic() >= self._next

    def __call__(self, progress: Progress) -> bool:
        """Whether the run is to end, as the host says."""
        answer = self._look is not None and self._look(progress)
        self._next = time.monotonic() + self._pause
        return answer


class _Host(NamedTuple):
    """How many draws are wanted, and who looks at the chains on the way."""

    num_draws: int
    looks: _Looks
    enough: _Enough | None


#: leapfrogs of a transition, for the forecast: a regression takes 7, a net in a short warm-up hundreds
LEAPFROGS = 60


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A resumable run of the machine: what does not change while the chains move.

    Args:
        machine: sizes and gradient; ``machine.num_slots`` holds the longest phase worth keeping.
        num_warmup: transitions of the warm-up, on average over chains.
        max_warmup: transitions up to which the warm-up goes on where it is not finished; None ends it as planned.
        names: of the site of a coordinate, of a plain program; None for a net.
        inspect: says why draws (point, dim) and the steps along them (dim,) need float64; empty if they do not.
        mass_matrix: ``"diag"`` or ``"dense"``.
        step_size: the first one; None finds it.
        on_trial: where too many of the first draws diverge, the warm-up goes on with a higher target.
        look_every: steps between looks, fewer than ``machine.num_latest``.
        compile_within: seconds after which a compile is given up for the uncompiled step.
    """

    machine: Machine
    seed: int
    num_warmup: int
    max_warmup: int | None = None
    names: Callable[[int], str] | None = None
    inspect: Callable[[Tensor, Tensor], str] | None = None
    mass_matrix: Form = "diag"
    step_size: float | None = None
    on_trial: bool = False
    compile: Compile = "auto"
    look_every: int = 16
    compile_within: float | None = None

    @cached_property
    def keys(self) -> Tensor:
        """The random key of each chain (chain,)."""
        device = self.machine.device
        chains = torch.arange(self.machine.num_chains, device=device)
        return rng.key(torch.tensor(self.seed, device=device), chains)

    @property
    def num_window(self) -> int:
        """Draws of each chain that a window of the warm-up keeps."""
        longest = max(self.num_warmup, self.max_warmup or 0)
        num = kept_in_warmup(longest, self.machine.num_chains, self.machine.dim)
        return min(self.machine.num_slots, num)

    def begin(self, z: Tensor, scale: Tensor | None = None) -> Chains:
        """Chains at unconstrained positions (chain, dim), optionally with a first whitening scale (dim,)."""
        scale = z.new_ones(self.machine.dim) if scale is None else scale
        scale = torch.diag(scale) if self.mass_matrix == "dense" else scale
        place = self._place(whiten(z, scale), scale)
        plan = planned(self.num_warmup)
        mode = adaptation_mode(plan, 0)
        zero = torch.zeros(
            len(z),
            dtype=torch.float64,
            device=z.device,
        )
        step = self.step_size or self._first_step(place, scale, zero, 0.1, mode)
        return Chains(
            self.machine.start(
                place,
                self._dual(step, mode, self.machine.target_accept),
                self.keys,
                zero,
            ),
            self.machine.buffers(),
            *self.machine.records(self.machine.num_slots + 1),
            scale,
            plan,
            self.max_warmup,
        )

    def restore(self, tensors: Mapping[str, Tensor]) -> Chains:
        """Chains as :meth:`Chains.tensors` gave them, on any device; ValueError where the density is another."""
        chains = Chains.restored(tensors, self.max_warmup, self.machine.device)
        check_density(chains.place.lp, self._place(chains.place.q, chains.scale).lp)
        return chains

    def prepare(self, chains: Chains, say: Callable[[str], None] | None = None) -> Stepper:
        """The step, compiled where that costs less; on CUDA captured. ``say`` is told of a compile before it."""
        return prepared(
            self.machine,
            chains,
            self.keys,
            compile=self.compile,
            calls=LEAPFROGS * (self.num_warmup + self.machine.num_slots),
            within=self.compile_within,
            say=say,
        )

    def sample(
        self,
        chains: Chains,
        stepper: Stepper,
        num_draws: int,
        *,
        look: _Look | None = None,
        pause: float = 0.0,
        enough: _Enough | None = None,
        save: Saving | None = None,
    ) -> Draws:
        """Run the remaining phases and return the draws.

        Args:
            look: called now and then with a :class:`Progress`; True stops the run at the draws that every chain has,
                and in the warm-up begins them.
            pause: seconds between two looks, at least, except before the last one.
            enough: called with the draws so far at growing lengths; True stops.
            save: where checkpoints are written, now and then; Ctrl-C writes one at once.

        Raises:
            KeyboardInterrupt: Ctrl-C before every chain had a draw; later it ends the run with the draws it has.
            PrecisionLoss: the floats are too coarse for the positions.
        """
        looks = _Looks(look, pause)
        host = _Host(num_draws, looks, enough)
        interrupts = DelayedInterrupt()
        saved = time.monotonic()
        try:
            with interrupts, threads_by_need():
                if looks.wanted:
                    looks(self._progress(chains, chains.ready, num_draws))
                while True:
                    with interrupts.changing():
                        chains = self.step(chains, stepper)
                    chains = chains.counted(num_draws)
                    chains, finished = self._looked_at(chains, stepper, host)
                    if finished:
                        return self._draws(chains, stepper)
                    if save is not None and save.due(saved):
                        save.write(chains.tensors())
                        saved = time.monotonic()
        except KeyboardInterrupt:
            if interrupts.changing_now:  # a second one
                raise
            if save is not None:
                save.write(chains.tensors())
            if chains.ready == 0:
                raise
            return self._draws(chains, stepper)._replace(interrupted=True)

    def step(self, chains: Chains, stepper: Stepper) -> Chains:
        """End a phase of the warm-up that is over; then take ``look_every`` leapfrogs with every chain."""
        # it ends when the chains have so many transitions on average: none waits for another
        if chains.warming_up and _mean_count(chains) >= chains.plan[chains.phase].length:
            chains = self._next_phase(chains.stored())
        if not chains.has_room(self.look_every):
            chains = chains.stored()
        state = stepper.advance(chains, self.look_every)
        return replace(
            chains,
            state=state,
            total_steps=chains.total_steps + self.look_every,
            num_unstored=chains.num_unstored + self.look_every,
        )

    def _looked_at(
        self,
        chains: Chains,
        stepper: Stepper,
        host: _Host,
    ) -> tuple[Chains, bool]:
        """The chains after the host has looked at them, and whether there are draws enough."""
        count = _mean_count(chains) if chains.warming_up else chains.ready
        stop = False
        if host.looks.due or (host.looks.wanted and chains.ready == host.num_draws):
            chains = chains.stored()
            stop = host.looks(self._progress(chains, count, host.num_draws))
        if chains.warming_up:
            return (_cut_short(chains, count) if stop else chains), False
        if self.on_trial and not stop and chains.next_trial <= count <= host.num_draws // 2:
            chains = self._judged_trial(chains.stored())
            if chains.warming_up:
                return chains, False
        if host.enough is not None and chains.next_check <= count < host.num_draws:
            chains = replace(chains, next_check=int(count * 1.25) + 1)
            stop = stop or host.enough(self._draws(chains, stepper))
        return chains, count == host.num_draws or (stop and count > 0)

    def _next_phase(self, chains: Chains) -> Chains:
        """Perhaps a new mass matrix, then every chain restarts its transition at its last draw."""
        new_mass = chains.plan[chains.phase].mass
        chains = self._with_verdict(chains)
        chains = replace(chains, phase=chains.phase + 1)
        place = chains.place
        transition = chains.scalars.transition + 1
        if new_mass:
            z = unwhiten(place.q, chains.scale)
            scale = whitening(*self._window(chains), chains.scale)
            place = self._place(whiten(z, scale), scale)
            chains = replace(chains, scale=scale)
        log_mean = chains.adaptation.log_mean
        step = log_mean.exp() if chains.mode == OWN else float(log_mean.median().exp())
        earlier_phases = chains.plan[: chains.phase - 1]
        is_first_window = new_mass and not any(phase.mass for phase in earlier_phases)
        # later windows change the whitened scale little
        if is_first_window:
            step = self._first_step(place, chains.scale, transition, step, chains.mode)
        entry = (float(torch.as_tensor(step).median()), float(chains.total_steps))
        # a new average: the old one belongs to another scale, or to single chains
        dual = self._dual(step, chains.mode, chains.target)
        state = self.machine.start(place, dual, self.keys, transition)
        return replace(
            chains,
            state=state,
            history=(*chains.history, entry),
        )

    def _judged_trial(self, chains: Chains) -> Chains:
        """The chains, or where too many of their draws have diverged, those of a warm-up that goes on."""
        counts = chains.scalars.slot.long().clamp(max=self.machine.num_slots)
        divergences = _divergences(chains.stats, counts)
        transitions = int(counts.sum())
        target = raised_target(chains.target, divergences, transitions, chains.raises)
        if target == chains.target:
            return replace(chains, next_trial=2 * chains.next_trial)
        plan = [*chains.plan, *phases_after(_mean_count(chains))]
        step = chains.adaptation.log_step.exp()
        dual = self._dual(step, adaptation_mode(plan, len(plan) - 1), target)
        transition = chains.scalars.transition + 1
        return replace(
            chains,
            state=self.machine.start(chains.place, dual, self.keys, transition),
            plan=plan,
            phase=len(plan) - 1,
            history=(*chains.history, (float(step[0]), float(chains.total_steps))),
            ready=0,
            next_check=Chains.next_check,
            next_trial=FIRST_TRIAL,
            raises=(*chains.raises, Raise(divergences, transitions, target)),
        )

    def _with_verdict(self, chains: Chains) -> Chains:
        """The chains with why the warm-up is not finished, and its plan, which may have become longer.

        It is judged at the end of the last window, and of the last search for a step size.
        """
        unfinished = chains.unfinished
        plan = chains.plan
        if not any(phase.mass for phase in plan[chains.phase + 1 :]):
            window, counts = self._window(chains)
            self._check_precision(chains, window, counts)
            reason = self._not_finished(chains, window, counts)
            # the last window's reason stays, even where the step size after it is right
            unfinished = reason if plan[chains.phase].mass else reason or unfinished
            if reason and chains.max_warmup is not None:
                plan = extend_phase(plan, chains.phase, chains.max_warmup)
        if chains.cut_short:
            unfinished = "; ".join(filter(None, ["its time was spent", unfinished]))
        return replace(
            chains,
            plan=plan,
            unfinished=unfinished,
            cut_short=False,
        )

    def _check_precision(
        self,
        chains: Chains,
        window: Tensor,
        counts: Tensor,
    ) -> None:
        """PrecisionLoss where the floats are too coarse for the positions."""
        if self.inspect is None or not bool(counts.all()):
            return
        best = int(chains.place.lp.argmax())
        step = chains.adaptation.log_mean.median().exp()
        steps = step * standard_deviations(chains.scale)
        reason = self.inspect(window[best, : int(counts[best])], steps)
        if reason:
            raise PrecisionLoss(reason, unwhiten(chains.place.q, chains.scale), chains.total_steps)

    def _not_finished(
        self,
        chains: Chains,
        window: Tensor,
        counts: Tensor,
    ) -> str:
        """Why the warm-up cannot end with this phase, in words; or empty."""
        stats = chains.stats[:, : self.num_window]
        if chains.plan[chains.phase].mass:
            return not_stationary(window, stats, counts, self.names)
        return acceptance_off_target(stats, counts, chains.target)

    def _window(self, chains: Chains) -> tuple[Tensor, Tensor]:
        """The draws of this phase (chain, slot, dim) that are kept, and how many each chain has."""
        counts = chains.scalars.slot.clamp(max=self.num_window).long()
        return unwhiten(chains.draws[:, : self.num_window], chains.scale), counts

    def _place(self, q: Tensor, scale: Tensor) -> Place:
        """What the density is at whitened positions (chain, dim)."""
        return Place(q, *whitened_gradient(self.machine.gradient, scale)(q))

    def _dual(
        self,
        step: Tensor | float,
        mode: float,
        target: float,
    ) -> Tensor:
        """The adaptation of the step size as it begins."""
        return first_adaptation(step, self.machine.num_chains, self.machine.device, mode, target)

    def _first_step(
        self,
        place: Place,
        scale: Tensor,
        transition: Tensor,
        guess: Tensor | float,
        mode: float,
    ) -> Tensor | float:
        """The step size at ``place`` of which a leapfrog has the acceptance rate aimed at."""
        keys = ~rng.stream(self.keys, transition.long())  # other momenta than the transition's
        return first_step_size(
            whitened_gradient(self.machine.gradient, scale),
            place,
            rng.normal(keys, place.q.shape[1], place.q.dtype),
            guess,
            self.machine.target_accept,
            by_chain=mode == OWN,
        )

    def _progress(self, chains: Chains, count: int, num_draws: int) -> Progress:
        """What the host sees where the slowest chain, or in the warm-up the mean one, has ``count`` draws."""
        draws = count
        wanted = num_draws
        if chains.warming_up:
            lengths = [phase.length for phase in chains.plan]
            draws = min(count, lengths[chains.phase]) + sum(lengths[: chains.phase])
            wanted = sum(lengths)
        slots = chains.scalars.slot.long().clamp(max=self.machine.num_slots)
        latest = chains.stats[
            torch.arange(len(slots), device=slots.device), (slots - 1).clamp(min=0)
        ]
        divergences = 0 if chains.warming_up else _divergences(chains.stats, slots)
        return Progress(
            phase="warm-up" if chains.warming_up else "sampling",
            draws=draws,
            latest=count,
            wanted=wanted,
            step_size=float(chains.adaptation.log_step.median().exp()),
            tree_depth=float(latest[:, STATS.index("tree_depth")].mean()),
            divergences=divergences,
            steps=chains.total_steps,
            unfinished=_why_longer(chains),
            positions=_positions(chains, 0 if chains.warming_up else count),
        )

    def _draws(self, chains: Chains, stepper: Stepper) -> Draws:
        """The draws that every chain has."""
        chains = chains.stored()
        scale = chains.scale
        history = torch.tensor(chains.history, dtype=torch.float64).reshape(-1, 2)
        # a draw at a time: the rounding of a product depends on its shape, and so on how many draws there are
        draws = chains.draws[:, : chains.ready].unbind(1)
        return Draws(
            torch.stack([unwhiten(q, scale) for q in draws], 1),
            chains.stats[:, : chains.ready],
            stepper.seconds,
            chains.total_steps * self.machine.num_chains,
            scale,
            {
                "warmup_step_size": history[:, 0],
                "warmup_steps": history[:, 1],
                "warmup_metric": scale.detach().cpu().flatten(),
            },
            mode=stepper.mode,
            unfinished=chains.unfinished,
            num_warmup=sum(phase.length for phase in chains.plan),
            raises=chains.raises,
        )


def _cut_short(chains: Chains, count: int) -> Chains:
    """Chains whose draws begin after the ``count`` transitions that there are of this phase of the warm-up."""
    present = chains.plan[chains.phase]
    mass = present.mass and count >= MIN_WINDOW
    plan = [*chains.plan[: chains.phase], present._replace(length=count, mass=mass)]
    return replace(
        chains,
        plan=plan,
        max_warmup=None,
        cut_short=True,
    )


def _mean_count(chains: Chains) -> int:
    """Transitions of the present phase, on average over chains."""
    return int(chains.scalars.slot.mean())


def _why_longer(chains: Chains) -> str:
    """Why the warm-up has become longer than planned, in words; or empty."""
    if not chains.raises:
        return chains.unfinished
    failed = chains.raises[-1]
    return f"{failed.divergences} of {failed.transitions} transitions diverged"


def _divergences(stats: Tensor, counts: Tensor) -> int:
    """Divergent ones among the first ``counts`` (chain,) transitions of each chain."""
    valid = torch.arange(stats.shape[1], device=stats.device) < counts.unsqueeze(-1)
    return int((stats[..., STATS.index("diverging")] * valid).sum())


def _positions(chains: Chains, count: int) -> Callable[[], Tensor]:
    """The first ``count`` unconstrained draws (chain, draw, dim); before the first, where the chains are."""
    if count:
        return lambda: unwhiten(chains.draws[:, :count].clone(), chains.scale)
    # copied now: a step writes into the state
    return partial(unwhiten, chains.place.q.unsqueeze(1).clone(), chains.scale)
