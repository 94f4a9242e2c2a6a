r"""Hamiltonian Monte Carlo for many chains as one finite state machine: every call is one leapfrog for every chain.

A chain's state says where in its transition it is: the leaf of the subtree being built, the subtree's depth, both ends
of the trajectory, the proposals. After each leapfrog the chain, by masks, extends the subtree, merges it into the tree,
or emits a draw and starts the next transition in the same call: no chain waits for another's tree. Trees are built
iteratively, with O(log) checkpoints for the U-turn test; points are chosen multinomially, subtrees by biased
progressive sampling.

Positions are whitened: :math:`z = A q` with :math:`A A^T` the inverse mass matrix, so that momenta are standard normal,
kinetic energy is :math:`|r|^2 / 2`, and the U-turn test reads :math:`(q_+ - q_-) \cdot r_\pm \le 0`.

*Efficiently Vectorized MCMC on Modern Accelerators* (Dance, Glaser, Orbanz & Adams, 2025),
https://arxiv.org/abs/2503.17405
*Composable Effects for Flexible and Accelerated Probabilistic Programming in NumPyro* (Phan, Pradhan & Jankowiak,
2019), https://arxiv.org/abs/1912.11554
*A Conceptual Introduction to Hamiltonian Monte Carlo* (Betancourt, 2017), https://arxiv.org/abs/1701.02434
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.inference.fitting import rng
from pyrobnn.inference.hmc.metric import pulled, unwhiten
from pyrobnn.inference.hmc.step_size import dual_average
from pyrobnn.inference.hmc.windows import STATS
from pyrobnn.model.compile import materialize
from pyrobnn.model.gradient import Gradient

MAX_ENERGY_ERROR = 1000.0
Chances = tuple[Tensor, Tensor, Tensor]  # two uniforms and a sign, per chain


class Vectors(NamedTuple):
    """Rows of ``State.vectors``, whitened, each (chain, dim).

    ``q r g`` is the end of the trajectory that moves, ``q0 r0 g0`` the other; ``q_sub g_sub`` the subtree's proposal,
    ``q_prop g_prop`` the tree's.
    """

    q: Tensor
    r: Tensor
    g: Tensor
    q0: Tensor
    r0: Tensor
    g0: Tensor
    q_sub: Tensor
    g_sub: Tensor
    q_prop: Tensor
    g_prop: Tensor


class Scalars(NamedTuple):
    """Rows of ``State.scalars``, one number per chain."""

    transition: Tensor  # transitions since the start of the run: part of the random key
    slot: Tensor  # draws of this phase: where the next one is stored
    step_size: Tensor  # latched when the transition starts
    sign: Tensor  # direction of the present subtree
    depth: Tensor  # of the present subtree
    leaf: Tensor  # next leaf of the subtree
    steps: Tensor  # leapfrogs of this transition
    accept: Tensor  # sum of acceptance probabilities
    energy0: Tensor  # at the start of the transition
    weight_tree: Tensor  # log sum of exp(energy0 - energy) over the tree
    weight_sub: Tensor
    lp_sub: Tensor
    energy_sub: Tensor
    lp_prop: Tensor
    energy_prop: Tensor


class State(NamedTuple):
    """Everything that changes from step to step, written in place.

    Vectors (len(Vectors), chain, dim); scalars (len(Scalars), chain) and the state of dual averaging (7, chain), both
    in float64.
    """

    vectors: Tensor
    scalars: Tensor
    dual: Tensor


class Buffers(NamedTuple):
    """Written in place, a row at a time.

    Checkpoints (chain, level, dim); the latest draws, whitened (chain, slot, dim), and their statistics (chain, slot,
    7), which the host stores: so one compiled step serves any number of draws.
    """

    q_check: Tensor
    r_check: Tensor
    latest_draws: Tensor
    latest_stats: Tensor


@dataclass(frozen=True)
class Machine:
    """The transition of every chain, one leapfrog at a time.

    Args:
        gradient: (chain, dim) → batched gradient (chain, dim) and log density (chain,) in float64, not whitened.
        num_slots: draws that are kept per chain and phase.
        num_latest: draws per chain that the compiled step holds until the host stores them.
        trajectory: leapfrogs of a plain HMC transition; None for NUTS.
    """

    gradient: Gradient
    num_chains: int
    dim: int
    num_slots: int
    dtype: torch.dtype
    device: torch.device
    max_depth: int = 10
    trajectory: int | None = None
    target_accept: float = 0.8
    num_latest: int = 64

    def buffers(self) -> Buffers:
        """Fresh buffers; the last checkpoint level takes what is to be forgotten."""
        levels = 1 if self.trajectory else self.max_depth + 1
        check = torch.zeros(
            self.num_chains,
            levels,
            self.dim,
            dtype=self.dtype,
            device=self.device,
        )
        return Buffers(check, check.clone(), *self.records(self.num_latest))

    def records(self, num_slots: int) -> tuple[Tensor, Tensor]:
        """Room for whitened draws (chain, slot, dim) and their statistics (chain, slot, 7)."""
        slots = self.num_chains, num_slots
        draws = torch.zeros(
            *slots,
            self.dim,
            dtype=self.dtype,
            device=self.device,
        )
        stats = torch.zeros(
            *slots,
            len(STATS),
            dtype=torch.float64,
            device=self.device,
        )
        return draws, stats

    def start(
        self,
        q: Tensor,
        g: Tensor,
        lp: Tensor,
        dual: Tensor,
        keys: Tensor,
        transition: Tensor,
    ) -> State:
        """A state at the beginning of a transition, slot 0, for whitened positions and gradients (chain, dim)."""
        zero = torch.zeros(
            self.num_chains,
            dtype=torch.float64,
            device=self.device,
        )
        begun = Scalars(*[zero] * len(Scalars._fields))._replace(transition=transition, lp_prop=lp)
        sign = rng.chances(rng.stream(keys, begun.transition.long()))[2]
        r, scalars = self._begin(begun, dual, keys, sign)
        return State(torch.stack((q, r, g, q, r, g, q, g, q, g)), torch.stack(scalars), dual)

    def step(self, *arguments: Tensor) -> tuple[()]:
        """One leapfrog for every chain, in place. Arguments: State, Buffers, whitening, chain keys."""
        state = State(*arguments[:3])
        buffers = Buffers(*arguments[3:7])
        scale, keys = arguments[7:]
        old = Vectors(*state.vectors.unbind(0))
        s = Scalars(*state.scalars.unbind(0))
        q, r, g, lp, energy = self._leapfrog(old, s, scale)
        error = energy - s.energy0
        fine = error <= MAX_ENERGY_ERROR  # false for NaN: nothing of a bad leaf is ever selected
        s = s._replace(
            steps=s.steps + 1,
            accept=s.accept + torch.where(fine, (-error).clamp(max=0.0).exp(), 0.0),
        )
        chain = torch.arange(self.num_chains, device=self.device)
        chance = rng.chances(rng.stream(rng.stream(keys, s.transition.long()), s.steps.long()))
        extend = self._extend_path if self.trajectory else self._extend_tree
        new, s, ended, diverging = extend(
            Vectors(q, r, g, *old[3:]), s, buffers, lp, energy, fine, chance
        )

        where = s.slot.long() % self.num_latest
        rate = s.accept / s.steps
        row = (s.lp_prop, s.energy_prop, diverging.double(), s.depth, s.steps, rate, s.step_size)
        buffers.latest_draws.index_put_((chain, where), new.q_prop)
        buffers.latest_stats.index_put_((chain, where), torch.stack(row, -1))

        dual = dual_average(state.dual, rate, ended, self.num_chains)
        r_new, begun = self._begin(
            s._replace(transition=s.transition + 1, slot=s.slot + 1), dual, keys, chance[2]
        )
        fresh = ended.unsqueeze(-1)
        start = (new.q_prop, r_new, new.g_prop) * 2  # a new trajectory's ends are one point
        ends = [torch.where(fresh, b, a) for a, b in zip(new[:6], start, strict=True)]
        state.vectors.copy_(torch.stack([*ends, *new[6:]]))
        scalars = [torch.where(ended, b, a) for a, b in zip(s, begun, strict=True)]
        state.scalars.copy_(torch.stack(scalars))
        state.dual.copy_(dual)
        return ()

    def _leapfrog(self, old: Vectors, s: Scalars, scale: Tensor) -> tuple[Tensor, ...]:
        """The next leaf: position, momentum and gradient (chain, dim), log density and energy (chain,)."""
        move = (s.step_size * s.sign).to(self.dtype).unsqueeze(-1)
        half = old.r + 0.5 * move * old.g
        q = materialize(old.q + move * half)
        g, lp = self.gradient(materialize(unwhiten(q, scale)))
        g = pulled(materialize(g), scale)
        r = materialize(half + 0.5 * move * g)
        return q, r, g, lp, 0.5 * (r * r).sum(-1, dtype=torch.float64) - lp

    def _extend_tree(
        self,
        new: Vectors,
        s: Scalars,
        buffers: Buffers,
        lp: Tensor,
        energy: Tensor,
        fine: Tensor,
        chance: Chances,
    ) -> tuple[Vectors, Scalars, Tensor, Tensor]:
        """Add the leaf to the subtree; merge a complete subtree into the tree; turn around or end at a U-turn."""
        q = new.q
        r = new.r
        g = new.g
        weight = torch.where(fine, s.energy0 - energy, -math.inf)
        weight_sub = torch.logaddexp(s.weight_sub, weight)
        pick = chance[0] < (weight - weight_sub).exp()
        col = pick.unsqueeze(-1)
        q_sub = torch.where(col, q, new.q_sub)
        g_sub = torch.where(col, g, new.g_sub)
        lp_sub = torch.where(pick, lp, s.lp_sub)
        energy_sub = torch.where(pick, energy, s.energy_sub)

        fine_sub = fine & ~self._turning(q, r, s, buffers)
        merge = fine_sub & (s.leaf + 1 >= torch.exp2(s.depth))
        take = merge & (chance[1] < (weight_sub - s.weight_tree).exp())
        col = take.unsqueeze(-1)
        across = (q - new.q0) * s.sign.to(self.dtype).unsqueeze(-1)
        turned = ((across * r).sum(-1) <= 0) | ((across * new.r0).sum(-1) <= 0)
        depth = s.depth + merge
        ended = ~fine_sub | (merge & (turned | (depth >= self.max_depth)))

        sign = torch.where(merge, chance[2], s.sign)
        swap = (sign != s.sign).unsqueeze(-1)
        swapped = (*new[3:6], *new[:3])
        ends = [torch.where(swap, b, a) for a, b in zip(new[:6], swapped, strict=True)]
        tree = torch.where(col, q_sub, new.q_prop), torch.where(col, g_sub, new.g_prop)
        vectors = Vectors._make([*ends, q_sub, g_sub, *tree])
        s = s._replace(
            sign=sign,
            depth=depth,
            leaf=torch.where(merge, 0.0, s.leaf + 1),
            weight_tree=torch.where(
                merge, torch.logaddexp(s.weight_tree, weight_sub), s.weight_tree
            ),
            weight_sub=torch.where(merge, -math.inf, weight_sub),
            lp_sub=lp_sub,
            energy_sub=energy_sub,
            lp_prop=torch.where(take, lp_sub, s.lp_prop),
            energy_prop=torch.where(take, energy_sub, s.energy_prop),
        )
        return vectors, s, ended, ~fine

    def _turning(
        self,
        q: Tensor,
        r: Tensor,
        s: Scalars,
        buffers: Buffers,
    ) -> Tensor:
        """Whether any complete subtree that ends at this leaf has turned.

        Leaf n, if even, is remembered at level popcount(n); an odd leaf n ends one subtree for each of its trailing
        ones, and their first leaves are at the levels popcount(n // 2) and down.
        """
        chain = torch.arange(self.num_chains, device=self.device)
        level = torch.arange(self.max_depth, device=self.device)
        leaf = s.leaf.long().unsqueeze(-1)
        ones = ((leaf >> level) & 1).sum(-1)
        trailing = (((leaf ^ (leaf + 1)) >> level) & 1).sum(-1) - 1
        where = torch.where(trailing == 0, ones, self.max_depth)
        buffers.q_check.index_put_((chain, where), q)
        buffers.r_check.index_put_((chain, where), r)
        ends = (level < ones.unsqueeze(-1)) & (level >= (ones - trailing).unsqueeze(-1))
        across = (q.unsqueeze(1) - buffers.q_check[:, :-1]) * s.sign.to(self.dtype)[:, None, None]
        late = (across * r.unsqueeze(1)).sum(-1) <= 0
        early = (across * buffers.r_check[:, :-1]).sum(-1) <= 0
        return (ends & (late | early)).any(-1)

    def _extend_path(
        self,
        new: Vectors,
        s: Scalars,
        buffers: Buffers,
        lp: Tensor,
        energy: Tensor,
        fine: Tensor,
        chance: Chances,
    ) -> tuple[Vectors, Scalars, Tensor, Tensor]:
        """Plain HMC: accept or reject the end of a path of fixed length; a bad leaf ends it early, rejected."""
        ended = ~fine | (s.steps >= (self.trajectory or math.inf))
        take = ended & fine & (chance[0] < (s.energy0 - energy).exp())
        col = take.unsqueeze(-1)
        # the acceptance rate of the end point alone: what a fixed path is tuned on
        rate = torch.where(fine, (s.energy0 - energy).clamp(max=0.0).exp(), 0.0)
        vectors = new._replace(
            q_prop=torch.where(col, new.q, new.q_prop), g_prop=torch.where(col, new.g, new.g_prop)
        )
        s = s._replace(
            accept=rate * s.steps,
            lp_prop=torch.where(take, lp, s.lp_prop),
            energy_prop=torch.where(take, energy, s.energy_prop),
        )
        return vectors, s, ended, ~fine

    def _begin(
        self,
        s: Scalars,
        dual: Tensor,
        keys: Tensor,
        sign: Tensor,
    ) -> tuple[Tensor, Scalars]:
        """Momenta (chain, dim) and scalars of a new transition."""
        r = rng.normal(rng.stream(keys, s.transition.long()), self.dim, self.dtype)
        energy = 0.5 * (r * r).sum(-1, dtype=torch.float64) - s.lp_prop
        zero = torch.zeros_like(s.slot)
        return r, s._replace(
            step_size=dual[0].exp(),
            sign=torch.ones_like(zero) if self.trajectory else sign,
            depth=zero,
            leaf=zero,
            steps=zero,
            accept=zero,
            energy0=energy,
            weight_tree=zero,
            weight_sub=zero - math.inf,
            energy_prop=energy,
        )
