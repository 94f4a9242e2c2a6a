r"""The paths of a search that finds the noise along with the function.

Where the scale of the noise is free, a search may take the function for noise: the scale grows to the spread of the
targets before the function is learned, and then a nearly flat function is a mode (Seitzer et al., 2022). So such a
search follows several paths: the plain one, and continuations that fit the function as if the noise were known to be
small for their first steps, and free it then. A continuation has a larger rate besides: at a small one it stays in the
first basin, whose mode may be tens of nats below others. The best end is kept.

Members of an ensemble, which are compared by their evidence, are to lie in broad modes, which a log joint does not
know. So half of the continuations of such a search are smoothed: their weights are shaken by a share of their prior's
spread, and come to rest where that changes the function little. Where the data determine the weights too well for
that, the others find the better ends.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.batches import Batches, of_rows, same
from pyrobnn.inference.fitting.checkpoints import Stages
from pyrobnn.inference.fitting.problem import Callback, Problem
from pyrobnn.inference.fitting.program import check_batched, why_impossible
from pyrobnn.inference.optim.free_noise import HELD_SHARE, LEVELS, FreeNoise, held_first
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.path_ends import (
    Ends,
    Refinement,
    Slope,
    alone,
    best_ends,
    members_of,
    polished,
    together,
    without_collapsed,
)
from pyrobnn.inference.optim.training import Training

#: factors of the learning rate of a continuation beside the plain path, in the order of their use
_RATE_FACTORS = (5.0, 10.0, 3.0)
#: the same where some paths are smoothed: a large rate leaves narrow modes
_BROAD_RATE_FACTORS = (5.0, 30.0, 10.0)
#: shares of the prior's spread by which smoothed continuations shake the weights, in the order of their use
_SMOOTHINGS = (0.1, 0.05)
#: factor of their rate, and share of the steps for which they do
_SMOOTHED_RATE_FACTOR = 10.0
_SMOOTHED_SHARE = 0.7
#: rate that no factor leads beyond
_LARGEST_RATE = 0.3
#: of the plain path's steps, those of a continuation that runs after it
SECOND_SHARE = 0.4
#: numbers (rows times parameters times paths) up to which a step of all paths together costs about as much as of one
_MAX_TOGETHER = 300_000
#: paths of a search for one point where they are followed together
MAX_PATHS = 24
#: parameters of all ends together up to which their evidence, whose cost grows with the square of an end's parameters,
#: is small beside the search; and ends that are compared in any case
_MAX_COMPARED_PARAMETERS = 4000
_MIN_COMPARED = 8


def num_together(
    problem: Problem,
    batch_size: int | None,
    num_members: int,
    max_paths: int,
) -> int:
    """Paths of each member that one step can follow at little more than the cost of one.

    One where there is no room, or where the net runs for a single point only.
    """
    try:
        check_batched(problem.density, "the search")
    except Refused:
        return 1
    rows = len(problem.x) if batch_size is None else min(batch_size, len(problem.x))
    room = _MAX_TOGETHER // max(1, rows * problem.density.dim * num_members)
    return max(1, min(room, max_paths))


def relative_cost(numbers: int) -> float:
    """Of a step on so many numbers (rows times parameters), in steps on a few: those cost what their operations do."""
    return max(1.0, numbers / _MAX_TOGETHER)


@dataclass(frozen=True, eq=False)
class Paths:
    """Where the paths of a search start, and how.

    Attributes: ``starts`` (member, path, dim); ``relative_levels`` (member, path), the scale at which the noise is held
        first, of the targets' standard deviation, zero of a plain path; ``rates`` (member, path), factors of the
        learning rate, one of a plain path; ``smoothings`` (member, path), shares of the prior's spread by which the
        weights are shaken first, zero of a path that is not smoothed.
    """

    starts: Tensor
    relative_levels: Tensor
    rates: Tensor
    smoothings: Tensor


def planned(
    start: Tensor,
    num_paths: int,
    other_starts: Callable[[int], Tensor] | None,
    *,
    smoothed: bool = False,
) -> Paths:
    """Paths from ``start`` (member, dim): plain, then continuations, and then both from other starts.

    Args:
        start: where each member starts.
        num_paths: largest number of each member.
        other_starts: from a number to as many further starts (number, dim); None where there are none.
        smoothed: whether every second continuation is.
    """
    num_members, dim = start.shape
    num_own = min(num_paths, 1 + len(LEVELS))
    num_others = num_paths - num_own if other_starts is not None else 0
    num_paths = num_own + num_others
    relative_levels = torch.zeros(num_members, num_paths)
    rates = torch.ones(num_members, num_paths)
    smoothings = torch.zeros(num_members, num_paths)
    factors = _BROAD_RATE_FACTORS if smoothed else _RATE_FACTORS
    for member in range(num_members):
        for path in range(1, num_paths):
            if path == num_own:  # the first from another start is plain
                continue
            turn = member + ((path - 1) // 2 if smoothed else path - 1)
            relative_levels[member, path] = LEVELS[turn % len(LEVELS)]
            rates[member, path] = factors[turn % len(factors)]
            if smoothed and path % 2 == 0:
                rates[member, path] = _SMOOTHED_RATE_FACTOR
                smoothings[member, path] = _SMOOTHINGS[turn // len(LEVELS) % len(_SMOOTHINGS)]
    starts = start[:, None].repeat(1, num_paths, 1)
    if other_starts is not None and num_others:
        starts[:, num_own:] = other_starts(num_members * num_others).reshape(
            num_members, num_others, dim
        )
    return Paths(starts, relative_levels, rates, smoothings)


@dataclass(frozen=True, eq=False)
class Search:
    """A search for the largest value of a log density whose noise is free, along several paths.

    Attributes: ``problem`` and its ``noise``; ``target``, (density, theta, \\*batch) → what is maximised, in nats;
        ``worths`` of ends, by which they are compared, in nats; ``training``; ``batches``, a function that gives
        endless batches of the data, with ``own_rows`` (rows (member, batch_size), x, y) of all; ``num_paths`` of each
        member that are followed together, or one: then a continuation follows the plain path; ``refinement``, that
        brings ends to where they can be compared, None where they are; ``other_starts``, as of :func:`planned`;
        ``weight_spreads`` (dim,), as of :func:`pyrobnn.inference.optim.occam.weight_spreads`, where paths that are
        followed together are smoothed, else None;
        ``own_rows``: each member has batches of its own; ``stages``, the loops of the fit; ``callbacks``, ``snapshot``,
        ``progress`` and ``name``, as of :func:`pyrobnn.inference.optim.minimize.minimize`. Where a loss is not finite
        the error names the parameter that is impossible and its site.
    """

    problem: Problem
    noise: FreeNoise
    target: Callable[..., Tensor]
    worths: Callable[[Sequence[Result]], Tensor]
    training: Training
    batches: Callable[[], Batches[tuple[Tensor, ...]]]
    num_paths: int
    refinement: Refinement | None = None
    other_starts: Callable[[int], Tensor] | None = None
    weight_spreads: Tensor | None = None
    own_rows: bool = False
    stages: Stages = field(default_factory=Stages)
    callbacks: Sequence[Callback] = ()
    snapshot: Callable[[Tensor], Any] | None = None
    progress: bool = False
    name: str = "the search"

    def best(self, start: Tensor) -> Result:
        """The best end for each member of ``start``, (dim,) or (member, dim), as one run."""
        ends = self._ends(start)
        # two long paths end close enough to their modes, and evaluations on all data would cost as much as the second
        comparable = self.num_paths == 1 or len(ends.runs) == 1 or ends.runs[0].interrupted
        if self.refinement is None or comparable:
            return self._chosen(ends, start.dim() == 1)
        slope = self._slope(ends, self.refinement)
        refined = ends.refined(
            slope,
            self.refinement.num_steps,
            self.problem,
            self.refinement.valley_rounds if start.dim() == 1 else 0,
        )
        if start.dim() > 1:
            return self._chosen(refined, False)
        num_compared = max(_MIN_COMPARED, _MAX_COMPARED_PARAMETERS // start.numel())
        end = self._chosen(refined.highest(num_compared), True)
        if not self.refinement.polish_steps:
            return end
        return polished(end, alone(slope, len(ends.runs)), self.refinement.polish_steps)

    def _chosen(self, ends: Ends, single: bool) -> Result:
        """The best of each member's ends as one run; of a ``single`` member with parameters (dim,)."""
        worths = self._worths_of(ends)
        numbers = best_ends(worths)
        plain = worths[:, :1].nan_to_num(nan=-math.inf).expand_as(worths).flatten()
        chosen = [ends.runs[end] for end in numbers]
        record = {
            "noise_held": [float(ends.relative_levels.flatten()[end]) for end in numbers],
            "path_gain": [float(worths.flatten()[end] - plain[end]) for end in numbers],
        }
        if single:
            return replace(chosen[0], path={name: values[0] for name, values in record.items()})
        return replace(together(chosen), path=record)

    def _slope(self, ends: Ends, refinement: Refinement) -> Slope:
        """Gradients and values of the loss on all data at the ends together, by the code of the search's own step."""
        step = ends.runs[0].slope
        if step is None:  # its gradients are clipped
            return refinement.slope(torch.stack([run.params for run in ends.runs]))
        free = torch.zeros(len(ends.runs), len(self.noise.spread)).to(self.noise.spread)
        batch = (free, *next(self.batches()))
        if self.weight_spreads is not None:
            batch = (torch.zeros_like(torch.stack([run.params for run in ends.runs])), *batch)

        def slope(points: Tensor) -> tuple[Tensor, Tensor]:
            gradients, losses = step(points, batch)
            return self.problem.num_rows * gradients, self.problem.num_rows * losses

        return slope

    def _worths_of(self, ends: Ends) -> Tensor:
        """The worths (member, path) of the ends; none of a continuation whose noise is on its way to zero."""
        return without_collapsed(
            self.worths(ends.runs), ends.runs, ends.relative_levels, self.noise
        )

    def _ends(self, start: Tensor) -> Ends:
        """The ends of all paths: together where there is room, else one after the other."""
        if self.num_paths > 1:
            # another path may diverge where the plain one does not
            with contextlib.suppress(FloatingPointError):
                return self._all_at_once(start)
        return self._in_turn(start)

    def _all_at_once(self, start: Tensor) -> Ends:
        paths = planned(
            start.reshape(-1, start.shape[-1]),
            self.num_paths,
            self.other_starts,
            smoothed=self.weight_spreads is not None,
        )
        num_paths = paths.relative_levels.shape[1]
        values_of = torch.func.vmap(
            partial(self.target, self.problem.density), randomness="different"
        )

        def best_of_paths(thetas: Tensor) -> Tensor:
            rows = thetas.unflatten(0, (-1, num_paths))
            # a snapshot takes nothing from the search's random numbers
            with seeded(0, thetas.device):
                values = values_of(thetas).nan_to_num(nan=-math.inf)
            numbers = values.reshape(-1, num_paths).argmax(1)
            best = rows[torch.arange(len(rows)), numbers]
            return best[0] if start.dim() == 1 else best

        shown = None if self.snapshot is None else _composed(self.snapshot, best_of_paths)
        lr = self.training.lr
        rates = (lr * paths.rates.flatten()).clamp(max=max(lr, _LARGEST_RATE)) / lr
        training = self.training
        if self.refinement is not None and start.dim() == 1:
            num_steps = math.ceil(self.refinement.share_before * training.num_steps)
            training = replace(training, num_steps=num_steps)
        result = self._run(
            paths.starts.flatten(0, 1),
            paths.relative_levels.flatten(),
            training,
            shown,
            num_paths,
            rates,
            paths.smoothings.flatten(),
        )
        return Ends(members_of(result), paths.relative_levels)

    def _in_turn(self, start: Tensor) -> Ends:
        """The plain path, and then a continuation of fewer steps."""
        num_members = 1 if start.dim() == 1 else len(start)
        plain = self._run(start, torch.zeros(num_members), self.training, self.snapshot, 1)
        relative_levels = torch.tensor(
            [LEVELS[member % len(LEVELS)] for member in range(num_members)]
        )
        if plain.stopped != "num_steps":
            return Ends(members_of(plain), torch.zeros(num_members, 1))
        lr = self.training.lr
        training = replace(
            self.training,
            num_steps=max(1, round(SECOND_SHARE * self.training.num_steps)),
            lr=min(_RATE_FACTORS[0] * lr, max(lr, _LARGEST_RATE)),
        )
        quiet = replace(
            self,
            callbacks=(),
            name=f"{self.name}, noise held first",
        )
        try:
            continuation = quiet._run(start, relative_levels, training, None, 1)
        except FloatingPointError:
            return Ends(members_of(plain), torch.zeros(num_members, 1))
        except KeyboardInterrupt:
            continuation = replace(plain, stopped="interrupt")  # handled as any other end below
        if continuation.interrupted:
            return Ends(
                members_of(replace(plain, stopped="interrupt")), torch.zeros(num_members, 1)
            )
        ends: list[Result] = []
        for pair in zip(
            members_of(plain),
            members_of(continuation),
            strict=True,
        ):
            # the steps of these runs took fewer points than there are ends
            ends += [replace(end, slope=None) for end in pair]
        return Ends(ends, torch.stack([torch.zeros(num_members), relative_levels], 1))

    def _run(
        self,
        starts: Tensor,
        relative_levels: Tensor,
        training: Training,
        snapshot: Callable[[Tensor], Any] | None,
        num_paths: int,
        rates: Tensor | None = None,
        smoothings: Tensor | None = None,
    ) -> Result:
        """One run from ``starts``, (dim,) or (end, dim), with the noise held at ``relative_levels`` (end,) first.

        Where ``rates`` (end,) are given, each end's rate is so many times the usual one. By ``smoothings`` (end,) the
        weights are shaken first where the search has their spreads.
        """

        def loss(theta: Tensor, level: Tensor, *batch: Tensor) -> Tensor:
            with self.noise.at(level) as density:
                return -self.target(density, theta, *of_rows(batch)) / self.problem.num_rows

        def losses(thetas: Tensor, levels: Tensor, *batch: Tensor) -> Tensor:
            in_dims = (0, 0, 0, None, None) if self.own_rows else (0, 0, *(None for _ in batch))
            return torch.func.vmap(
                loss,
                in_dims=in_dims,
                randomness="different",
            )(thetas, levels, *batch)

        def shaken_losses(thetas: Tensor, shifts: Tensor, *batch: Tensor) -> Tensor:
            return losses(thetas + shifts, *batch)

        levels = torch.outer(relative_levels.to(self.noise.spread), self.noise.spread)
        if starts.dim() == 1:
            levels = levels[0]
        objective: Callable[..., Tensor] = loss if starts.dim() == 1 else losses
        leading = held_first(levels, round(HELD_SHARE * training.num_steps))
        if smoothings is not None and self.weight_spreads is not None:
            objective = shaken_losses
            scales = torch.outer(smoothings.to(starts), self.weight_spreads.to(starts))
            leading = _shaken_first(scales, round(_SMOOTHED_SHARE * training.num_steps), leading)
        if self.refinement is not None and num_paths > 1:
            training = replace(training, num_later=self.refinement.num_steps)
        batches = self._batches_of(starts)
        return minimize(
            objective,
            starts,
            batches,
            training,
            leading=leading,
            stage=self.stages.begin(batches),
            callbacks=self.callbacks,
            snapshot=snapshot,
            progress=self.progress,
            name=self.name,
            explain=self._why_impossible,
            num_paths=num_paths,
            rates=rates,
        )

    def _batches_of(self, starts: Tensor) -> Batches[tuple[Tensor, ...]]:
        """Batches for these starts (end, dim): all paths of a member see the same."""
        if not self.own_rows:
            return self.batches()

        def of_paths(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            rows, *data = batch
            return (rows.repeat_interleave(len(starts) // len(rows), 0), *data)

        return self.batches().mapped(of_paths)

    def _why_impossible(self, thetas: Tensor) -> str:
        """Which parameter is impossible at one of ``thetas``, (dim,) or (end, dim), and what to do."""
        density = self.problem.density
        return why_impossible(density, thetas.reshape(-1, density.dim))


def search_each(
    problem: Problem,
    start: Tensor,
    ys: Tensor,
    target: Callable[..., Tensor],
    worths: Callable[[Problem, Sequence[Result]], Tensor],
    training: Training,
    name: str,
) -> Tensor | None:
    """The best ends (set, member, dim) given each of several targets, of all paths of all sets in one run.

    Every set is compared by its targets alone, at the ends of the run.

    Args:
        problem: whose targets are replaced.
        start: where the members of every set start, (member, dim).
        ys: targets (set, N, …).
        target: as of :class:`Search`.
        worths: of the ends of a problem, (end,) in nats.
        training: of the run.
        name: of the search, for messages.

    Returns:
        None where the noise of a set is not free.
    """
    problems = [_given(problem, y) for y in ys]
    noises = [noise for noise in map(FreeNoise.of, problems) if noise is not None]
    if len(noises) < len(problems):
        return None
    num_points = len(ys) * len(start)
    num_paths = max(2, num_together(problem, None, num_points, 1 + len(LEVELS)))
    paths = planned(start, num_paths, None)
    relative_levels = paths.relative_levels.flatten().to(start)
    levels = torch.cat([torch.outer(relative_levels, noise.spread) for noise in noises])
    shared = noises[0]

    def loss(
        theta: Tensor,
        level: Tensor,
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        with shared.at(level) as density:
            return -target(density, theta, x, y) / problem.num_rows

    batch = (problem.x, ys.repeat_interleave(len(relative_levels), 0))
    result = minimize(
        torch.func.vmap(
            loss,
            in_dims=(0, 0, None, 0),
            randomness="different",
        ),
        paths.starts.flatten(0, 1).repeat(len(ys), 1),
        same(batch),
        training,
        leading=held_first(levels, round(HELD_SHARE * training.num_steps)),
        name=name,
        explain=lambda thetas: why_impossible(problem.density, thetas),
    )
    ends = members_of(result)
    best = []
    for number, (of_set, noise) in enumerate(zip(problems, noises, strict=True)):
        set_ends = ends[number * len(relative_levels) : (number + 1) * len(relative_levels)]
        values = without_collapsed(worths(of_set, set_ends), set_ends, paths.relative_levels, noise)
        best.append(torch.stack([set_ends[end].params for end in best_ends(values)]))
    return torch.stack(best)


def _given(problem: Problem, y: Tensor) -> Problem:
    """The problem with other targets."""
    density = copy.copy(problem.density)
    density.args = (problem.x, y)
    return replace(problem, y=y, density=density)


def _composed(
    outer: Callable[[Tensor], Any], inner: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Any]:
    return lambda thetas: outer(inner(thetas))


def _shaken_first(
    scales: Tensor,
    num_shaken: int,
    leading: Callable[[int], tuple[Tensor, ...]],
) -> Callable[[int], tuple[Tensor, ...]]:
    """Before what leads: shifts of the weights, of these standard deviations in the first steps, then zero."""
    still = torch.zeros_like(scales)

    def arguments(step: int) -> tuple[Tensor, ...]:
        shifts = scales * torch.randn_like(scales) if step < num_shaken else still
        return (shifts, *leading(step))

    return arguments
