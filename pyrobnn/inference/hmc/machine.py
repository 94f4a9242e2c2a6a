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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.inference.fitting import rng
from pyrobnn.inference.hmc.leapfrog import (
    Place,
    drifted,
    kinetic_energy,
    leapfrog,
    whitened_gradient,
)
from pyrobnn.inference.hmc.metric import unwhiten
from pyrobnn.inference.hmc.step_size import updated_adaptation
from pyrobnn.inference.hmc.windows import STATS
from pyrobnn.model.gradient import Gradient

MAX_ENERGY_ERROR = 1000.0
#: two uniforms and a sign, each (chain,)
_Chances = tuple[Tensor, Tensor, Tensor]


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

    Vectors (len(Vectors), chain, dim); scalars (len(Scalars), chain) and the state of dual averaging
    (len(Adaptation._fields), chain), both in float64.
    """

    vectors: Tensor
    scalars: Tensor
    dual: Tensor


class Buffers(NamedTuple):
    """Written in place, a row at a time.

    Checkpoints (chain, level, dim); the latest draws, whitened (chain, slot, dim), and their statistics (chain, slot,
    len(STATS)), which the host stores: so one compiled step serves any number of draws.
    """

    q_check: Tensor
    r_check: Tensor
    latest_draws: Tensor
    latest_stats: Tensor


class _Leaf(NamedTuple):
    """The end of every trajectory after a leapfrog."""

    place: Place
    r: Tensor  # momenta (chain, dim)
    energy: Tensor  # (chain,)
    gain: Tensor  # energy at the start of the transition less this one: the log weight of the leaf
    reliable: Tensor  # whether the weight can be relied on: nothing of a bad leaf is ever selected


class _Grown(NamedTuple):
    """What every transition is with its new leaf, and whether it has ended (chain,), or diverged."""

    vectors: Vectors
    scalars: Scalars
    ended: Tensor
    diverging: Tensor


@dataclass(frozen=True)
class Machine:
    """The transition of every chain, one leapfrog at a time.

    Args:
        gradient: (chain, dim) → batched gradient (chain, dim) and log density (chain,) in float64, not whitened.
        num_slots: draws that are kept per chain and phase.
        num_latest: draws per chain that the compiled step holds until the host stores them.
        trajectory: leapfrogs of a plain HMC transition; None for NUTS.
        traceable: whether the gradient may be traced; one that several ranks compute together may not.
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
    traceable: bool = True

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
        """Room for whitened draws (chain, slot, dim) and their statistics (chain, slot, len(STATS))."""
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
        place: Place,
        dual: Tensor,
        keys: Tensor,
        transition: Tensor,
    ) -> State:
        """A state at the beginning of the transition of this number (chain,), slot 0."""
        zero = torch.zeros(
            self.num_chains,
            dtype=torch.float64,
            device=self.device,
        )
        new = Scalars(*[zero] * len(Scalars._fields))
        new = new._replace(transition=transition, lp_prop=place.lp)
        sign = rng.chances(rng.stream(keys, new.transition.long()))[2]
        r, scalars = self._begin(new, dual, keys, sign)
        q = place.q
        g = place.g
        return State(torch.stack((q, r, g, q, r, g, q, g, q, g)), torch.stack(scalars), dual)

    def next_position(self, *arguments: Tensor) -> Tensor:
        """Where a step asks for the gradient, (chain, dim), not whitened. Arguments as of :meth:`step`."""
        vectors = Vectors(*arguments[0].unbind(0))
        scalars = Scalars(*arguments[1].unbind(0))
        move = (scalars.step_size * scalars.sign).to(self.dtype).unsqueeze(-1)
        q, _ = drifted(vectors.q, vectors.r, vectors.g, move)
        return unwhiten(q, arguments[7])

    def step(self, *arguments: Tensor) -> tuple[()]:
        """One leapfrog for every chain, in place. Arguments: State, Buffers, whitening, chain keys."""
        grown, sign = self._grown(*arguments)
        self._finished(grown, sign, *arguments)
        return ()

    def grow(self, *arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first half of a step: every transition has its new leaf, and none that ends with it begins anew.

        Arguments as of :meth:`step`. Returned is what :meth:`finish` needs, each (chain,): which transitions end, which
        diverge, and the sign of the step.
        """
        grown, sign = self._grown(*arguments)
        state = State(*arguments[:3])
        state.vectors.copy_(torch.stack(grown.vectors))
        state.scalars.copy_(torch.stack(grown.scalars))
        return grown.ended, grown.diverging, sign

    def finish(
        self,
        ended: Tensor,
        diverging: Tensor,
        sign: Tensor,
        *arguments: Tensor,
    ) -> tuple[()]:
        """The second half of a step, which changes nothing where no transition has ended.

        One that has ended gives its draw, and the next one begins.
        """
        vectors = Vectors(*arguments[0].unbind(0))
        scalars = Scalars(*arguments[1].unbind(0))
        self._finished(_Grown(vectors, scalars, ended, diverging), sign, *arguments)
        return ()

    def _grown(self, *arguments: Tensor) -> tuple[_Grown, Tensor]:
        """Every transition with its new leaf, and the sign of the step (chain,).

        It serves a turn or a new transition, never both.
        """
        state = State(*arguments[:3])
        buffers = Buffers(*arguments[3:7])
        scale, keys = arguments[7:]
        vectors = Vectors(*state.vectors.unbind(0))
        before = Scalars(*state.scalars.unbind(0))
        leaf = self._leaf(vectors, before, scale)
        scalars = before._replace(
            steps=before.steps + 1,
            accept=before.accept + _acceptance(leaf),
        )
        transition_keys = rng.stream(keys, scalars.transition.long())
        chances = rng.chances(rng.stream(transition_keys, scalars.steps.long()))
        vectors = vectors._replace(
            q=leaf.place.q,
            r=leaf.r,
            g=leaf.place.g,
        )
        extend = self._extend_path if self.trajectory else self._extend_tree
        return extend(vectors, scalars, buffers, leaf, chances), chances[2]

    def _finished(
        self,
        grown: _Grown,
        sign: Tensor,
        *arguments: Tensor,
    ) -> None:
        """Record the draws of transitions that have ended, adapt the step size, begin the next ones; in place."""
        state = State(*arguments[:3])
        keys = arguments[8]
        rate = grown.scalars.accept / grown.scalars.steps
        self._record(grown, rate, Buffers(*arguments[3:7]))
        dual = updated_adaptation(state.dual, rate, grown.ended, self.num_chains)
        after = self._after(grown, dual, keys, sign)
        state.vectors.copy_(after.vectors)
        state.scalars.copy_(after.scalars)
        state.dual.copy_(after.dual)

    def _leaf(
        self,
        vectors: Vectors,
        scalars: Scalars,
        scale: Tensor,
    ) -> _Leaf:
        """The next point of every trajectory."""
        gradient = whitened_gradient(self.gradient, scale)
        move = (scalars.step_size * scalars.sign).to(self.dtype).unsqueeze(-1)
        place, r = leapfrog(gradient, vectors.q, vectors.r, vectors.g, move)
        energy = kinetic_energy(r) - place.lp
        gain = scalars.energy0 - energy
        return _Leaf(place, r, energy, gain, gain >= -MAX_ENERGY_ERROR)  # false for NaN

    def _record(
        self,
        grown: _Grown,
        rate: Tensor,
        buffers: Buffers,
    ) -> None:
        """The proposal and the statistics of the transition, where the draw stands if this leaf has ended it."""
        scalars = grown.scalars
        chain = torch.arange(self.num_chains, device=self.device)
        slot = scalars.slot.long() % self.num_latest
        statistics = (
            scalars.lp_prop,
            scalars.energy_prop,
            grown.diverging.double(),
            scalars.depth,
            scalars.steps,
            rate,
            scalars.step_size,
        )
        buffers.latest_draws.index_put_((chain, slot), grown.vectors.q_prop)
        buffers.latest_stats.index_put_((chain, slot), torch.stack(statistics, -1))

    def _after(
        self,
        grown: _Grown,
        dual: Tensor,
        keys: Tensor,
        sign: Tensor,
    ) -> State:
        """The state after the step: a chain whose transition has ended is at the beginning of the next one."""
        present = grown.vectors
        next_scalars = grown.scalars._replace(
            transition=grown.scalars.transition + 1,
            slot=grown.scalars.slot + 1,
        )
        r, begun = self._begin(next_scalars, dual, keys, sign)
        ended = grown.ended.unsqueeze(-1)
        start = (present.q_prop, r, present.g_prop) * 2  # a new trajectory's ends are one point
        ends = _where(ended, start, present[:6])
        scalars = _where(grown.ended, begun, grown.scalars)
        return State(torch.stack([*ends, *present[6:]]), torch.stack(scalars), dual)

    def _extend_tree(
        self,
        vectors: Vectors,
        scalars: Scalars,
        buffers: Buffers,
        leaf: _Leaf,
        chances: _Chances,
    ) -> _Grown:
        """Add the leaf to the subtree; merge a complete subtree into the tree; turn around or end at a U-turn."""
        for_leaf, for_subtree, new_sign = chances
        vectors, scalars = _subtree_with(leaf, vectors, scalars, for_leaf)
        straight = leaf.reliable & ~self._turning(leaf, scalars, buffers)
        merge = straight & (scalars.leaf + 1 >= torch.exp2(scalars.depth))
        take = merge & (for_subtree < (scalars.weight_sub - scalars.weight_tree).exp())
        turned = self._tree_has_turned(vectors, scalars)
        depth = scalars.depth + merge
        ended = ~straight | (merge & (turned | (depth >= self.max_depth)))
        sign = torch.where(merge, new_sign, scalars.sign)
        vectors = _turned_around(_proposing(vectors, take), sign != scalars.sign)
        scalars = scalars._replace(
            sign=sign,
            depth=depth,
            leaf=torch.where(merge, 0.0, scalars.leaf + 1),
            weight_tree=torch.where(
                merge,
                torch.logaddexp(scalars.weight_tree, scalars.weight_sub),
                scalars.weight_tree,
            ),
            weight_sub=torch.where(merge, -math.inf, scalars.weight_sub),
            lp_prop=torch.where(take, scalars.lp_sub, scalars.lp_prop),
            energy_prop=torch.where(take, scalars.energy_sub, scalars.energy_prop),
        )
        return _Grown(vectors, scalars, ended, ~leaf.reliable)

    def _tree_has_turned(self, vectors: Vectors, scalars: Scalars) -> Tensor:
        """Whether the two ends of the whole tree (chain,) have begun to approach each other."""
        sign = scalars.sign.to(self.dtype).unsqueeze(-1)
        across = (vectors.q - vectors.q0) * sign
        return ((across * vectors.r).sum(-1) <= 0) | ((across * vectors.r0).sum(-1) <= 0)

    def _turning(
        self,
        leaf: _Leaf,
        scalars: Scalars,
        buffers: Buffers,
    ) -> Tensor:
        """Whether any complete subtree that ends at this leaf has turned.

        Leaf n, if even, is remembered at level popcount(n); an odd leaf n ends one subtree for each of its trailing
        ones, and their first leaves are at the levels popcount(n // 2) and down.
        """
        q = leaf.place.q
        r = leaf.r
        chain = torch.arange(self.num_chains, device=self.device)
        levels = torch.arange(self.max_depth, device=self.device)
        number = scalars.leaf.long().unsqueeze(-1)
        level_of_leaf = ((number >> levels) & 1).sum(-1)
        num_ended_subtrees = (((number ^ (number + 1)) >> levels) & 1).sum(-1) - 1
        # an odd leaf is stored where nothing is read
        stored_level = torch.where(num_ended_subtrees == 0, level_of_leaf, self.max_depth)
        buffers.q_check.index_put_((chain, stored_level), q)
        buffers.r_check.index_put_((chain, stored_level), r)
        lowest = (level_of_leaf - num_ended_subtrees).unsqueeze(-1)
        is_first_leaf = (levels < level_of_leaf.unsqueeze(-1)) & (levels >= lowest)
        sign = scalars.sign.to(self.dtype)[:, None, None]
        across = (q.unsqueeze(1) - buffers.q_check[:, :-1]) * sign
        late = (across * r.unsqueeze(1)).sum(-1) <= 0
        early = (across * buffers.r_check[:, :-1]).sum(-1) <= 0
        return (is_first_leaf & (late | early)).any(-1)

    def _extend_path(
        self,
        vectors: Vectors,
        scalars: Scalars,
        buffers: Buffers,
        leaf: _Leaf,
        chances: _Chances,
    ) -> _Grown:
        """Plain HMC: accept or reject the end of a path of fixed length; a bad leaf ends it early, rejected."""
        ended = ~leaf.reliable | (scalars.steps >= (self.trajectory or math.inf))
        take = ended & leaf.reliable & (chances[0] < leaf.gain.exp())
        column = take.unsqueeze(-1)
        vectors = vectors._replace(
            q_prop=torch.where(column, vectors.q, vectors.q_prop),
            g_prop=torch.where(column, vectors.g, vectors.g_prop),
        )
        scalars = scalars._replace(
            # the acceptance rate of the end point alone: what a fixed path is tuned on
            accept=_acceptance(leaf) * scalars.steps,
            lp_prop=torch.where(take, leaf.place.lp, scalars.lp_prop),
            energy_prop=torch.where(take, leaf.energy, scalars.energy_prop),
        )
        return _Grown(vectors, scalars, ended, ~leaf.reliable)

    def _begin(
        self,
        scalars: Scalars,
        dual: Tensor,
        keys: Tensor,
        sign: Tensor,
    ) -> tuple[Tensor, Scalars]:
        """Momenta (chain, dim) and scalars of a new transition."""
        r = rng.normal(rng.stream(keys, scalars.transition.long()), self.dim, self.dtype)
        energy = kinetic_energy(r) - scalars.lp_prop
        zero = torch.zeros_like(scalars.slot)
        # lp_prop stays: the transition begins at the proposal
        return r, scalars._replace(
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


def _acceptance(leaf: _Leaf) -> Tensor:
    """The probability (chain,) with which Metropolis would accept the leaf; zero of a bad one."""
    return torch.where(leaf.reliable, leaf.gain.clamp(max=0.0).exp(), 0.0)


def _where(condition: Tensor, values: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """``torch.where`` of each pair of tensors."""
    return [torch.where(condition, a, b) for a, b in zip(values, others, strict=True)]


def _subtree_with(
    leaf: _Leaf,
    vectors: Vectors,
    scalars: Scalars,
    chance: Tensor,
) -> tuple[Vectors, Scalars]:
    """The subtree with the leaf, which becomes its proposal by multinomial sampling."""
    weight = torch.where(leaf.reliable, leaf.gain, -math.inf)
    weight_sub = torch.logaddexp(scalars.weight_sub, weight)
    pick = chance < (weight - weight_sub).exp()
    column = pick.unsqueeze(-1)
    vectors = vectors._replace(
        q_sub=torch.where(column, vectors.q, vectors.q_sub),
        g_sub=torch.where(column, vectors.g, vectors.g_sub),
    )
    scalars = scalars._replace(
        weight_sub=weight_sub,
        lp_sub=torch.where(pick, leaf.place.lp, scalars.lp_sub),
        energy_sub=torch.where(pick, leaf.energy, scalars.energy_sub),
    )
    return vectors, scalars


def _proposing(vectors: Vectors, take: Tensor) -> Vectors:
    """The tree with the subtree's proposal for its own where ``take`` (chain,)."""
    column = take.unsqueeze(-1)
    return vectors._replace(
        q_prop=torch.where(column, vectors.q_sub, vectors.q_prop),
        g_prop=torch.where(column, vectors.g_sub, vectors.g_prop),
    )


def _turned_around(vectors: Vectors, swap: Tensor) -> Vectors:
    """The tree whose other end moves next where ``swap`` (chain,)."""
    other_way = (*vectors[3:6], *vectors[:3])
    ends = _where(swap.unsqueeze(-1), other_way, vectors[:6])
    return Vectors._make([*ends, *vectors[6:]])
