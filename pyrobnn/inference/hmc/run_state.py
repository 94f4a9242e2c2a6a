"""The chains of a run between two steps: a frozen state that a step takes and returns, and that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyrobnn.inference.hmc.leapfrog import Place
from pyrobnn.inference.hmc.machine import Buffers, Scalars, State, Vectors
from pyrobnn.inference.hmc.step_size import FROZEN, OWN, POOLED, Adaptation
from pyrobnn.inference.hmc.trial import FIRST_TRIAL, Raise
from pyrobnn.inference.hmc.windows import Phase


def adaptation_mode(plan: Sequence[Phase], phase: int) -> float:
    """How the step size adapts in the phase of this number of a plan."""
    if phase == len(plan):
        return FROZEN
    return OWN if plan[phase].own_step else POOLED


@dataclass(frozen=True, eq=False)
class Chains:
    """Everything that a resumed run needs, and the host's counts.

    Steps write into the tensors of ``state``, ``buffers``, ``draws`` and ``stats``, which the states of a run share.
    ``ready``, ``next_check``, ``max_warmup`` and ``cut_short`` are not saved: a resumed run counts and asks anew.
    Whoever reads ``draws`` or ``stats`` asks for them of :meth:`stored` chains.

    Attributes:
        draws: whitened (chain, slot, dim), those of the present phase; the last slot takes what is to be forgotten.
        stats: their statistics (chain, slot, len(STATS)).
        scale: the metric's A.
        plan: phases of the warm-up; after the last one the chains are sampled.
        max_warmup: transitions up to which the warm-up may still go on; None ends it as planned.
        phase: the present one.
        total_steps: leapfrogs of each chain.
        num_unstored: steps whose draws, at most one in each, are still where the step leaves them.
        unfinished: why the warm-up was not finished when it was last judged.
        history: the step size at the end of each phase, and the steps by then.
        ready: draws that every chain had at the last look.
        next_check: draws from which the next test for convergence is made.
        next_trial: draws at which it is judged next whether too many diverge.
        raises: the trials that failed, each of which raised the target of the acceptance rate.
        cut_short: somebody has asked for the present phase of the warm-up to be the last one.
    """

    state: State
    buffers: Buffers
    draws: Tensor
    stats: Tensor
    scale: Tensor
    plan: Sequence[Phase]
    max_warmup: int | None = None
    phase: int = 0
    total_steps: int = 0
    num_unstored: int = 0
    unfinished: str = ""
    history: tuple[tuple[float, float], ...] = ()
    ready: int = 0
    next_check: int = 100
    next_trial: int = FIRST_TRIAL
    raises: tuple[Raise, ...] = ()
    cut_short: bool = False

    @property
    def warming_up(self) -> bool:
        """Whether there is a phase of the warm-up that has not ended."""
        return self.phase < len(self.plan)

    @property
    def mode(self) -> float:
        """How the step size adapts in this phase."""
        return adaptation_mode(self.plan, self.phase)

    @property
    def scalars(self) -> Scalars:
        """The numbers of the chains, each (chain,)."""
        return Scalars(*self.state.scalars)

    @property
    def place(self) -> Place:
        """Where the chains are: their proposals."""
        vectors = Vectors(*self.state.vectors)
        return Place(vectors.q_prop, vectors.g_prop, self.scalars.lp_prop)

    @property
    def target(self) -> float:
        """The acceptance rate that is aimed at."""
        return float(self.adaptation.target[0])

    @property
    def adaptation(self) -> Adaptation:
        """How far dual averaging has come."""
        return Adaptation(*self.state.dual)

    def counted(self, num_draws: int) -> Chains:
        """The state that knows how many draws, of ``num_draws``, every chain has by now."""
        if self.warming_up:
            return self
        return replace(self, ready=min(int(self.scalars.slot.min()), num_draws))

    def has_room(self, num_steps: int) -> bool:
        """Whether so many steps more leave their draws without overwriting some that are not stored."""
        return self.num_unstored + num_steps < self.buffers.latest_draws.shape[1]

    def stored(self) -> Chains:
        """The chains with all of their draws in ``draws`` and ``stats``, copied from where the step leaves them."""
        if not self.num_unstored:
            return self
        size = self.buffers.latest_draws.shape[1]
        last_slot = self.draws.shape[1] - 1
        device = self.draws.device
        chain = torch.arange(len(self.draws), device=device).unsqueeze(-1)
        number = self.scalars.slot.long().unsqueeze(-1) - torch.arange(
            1,
            self.num_unstored + 1,
            device=device,
        )
        # one index each: for two, torch starts threads
        rows = (chain * size + number % size).flatten()
        slot = torch.where(number < 0, last_slot, number.clamp(max=last_slot))
        places = (chain * (last_slot + 1) + slot).flatten()
        for record, latest in (
            (self.draws, self.buffers.latest_draws),
            (self.stats, self.buffers.latest_stats),
        ):
            new_rows = latest.flatten(0, 1).index_select(0, rows)
            record.flatten(0, 1).index_copy_(0, places, new_rows)
        return replace(self, num_unstored=0)

    def tensors(self) -> dict[str, Tensor]:
        """The state as named tensors, for a checkpoint."""
        stored = self.stored()
        return {
            **self.state._asdict(),
            **self.buffers._asdict(),
            "draws": stored.draws,
            "stats": stored.stats,
            "scale": self.scale,
            "counters": torch.tensor([self.phase, self.total_steps, self.next_trial]),
            "plan": torch.tensor(list(self.plan), dtype=torch.int64).reshape(-1, 3),
            "unfinished": torch.tensor(list(self.unfinished.encode()), dtype=torch.uint8),
            "history": torch.tensor(self.history, dtype=torch.float64).reshape(-1, 2),
            "raises": torch.tensor(self.raises, dtype=torch.float64).reshape(-1, 3),
        }

    @classmethod
    def restored(
        cls,
        tensors: Mapping[str, Tensor],
        max_warmup: int | None,
        device: torch.device,
    ) -> Chains:
        """The state that :meth:`tensors` gave, on any device."""
        moved = {name: value.to(device) for name, value in tensors.items()}
        phases = tensors["plan"].tolist()
        # a checkpoint of a version without trials has neither
        phase, total_steps, *next_trial = tensors["counters"].tolist()
        raises = [
            Raise(int(divergences), int(transitions), target)
            for divergences, transitions, target in tensors.get(
                "raises", torch.empty(0, 3)
            ).tolist()
        ]
        return cls(
            state=State(*(moved[name] for name in State._fields)),
            buffers=Buffers(*(moved[name] for name in Buffers._fields)),
            draws=moved["draws"],
            stats=moved["stats"],
            scale=moved["scale"],
            plan=[Phase(length, bool(mass), bool(own_step)) for length, mass, own_step in phases],
            max_warmup=max_warmup,
            phase=phase,
            total_steps=total_steps,
            next_trial=next_trial[0] if next_trial else FIRST_TRIAL,
            raises=tuple(raises),
            unfinished=bytes(tensors["unfinished"].tolist()).decode(),
            history=tuple((size, steps) for size, steps in tensors["history"].tolist()),
        )
