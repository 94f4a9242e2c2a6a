"""Where the paths of a search end: refined, compared, and the best of them kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.optim.descent import descend, descend_each, descend_in_valleys
from pyrobnn.inference.optim.free_noise import FreeNoise
from pyrobnn.inference.optim.minimize import Result
from pyrobnn.inference.optim.occam import Units, log_evidences, log_joints
from pyrobnn.model import Density
from pyrobnn.model.compile import compiled

#: L-BFGS evaluations of the ends before they are compared
REFINING_STEPS = 150
#: evaluations without a smaller loss after which the end that is kept is at its mode: the rest is rounding
_PATIENCE = 20
#: evaluations after that which say whether the search is finished
_FURTHER_STEPS = 10
#: nats by which a member of an ensemble may end below the best end of the search
_TOLERATED_GAP = 10.0
#: points → gradients and values of a loss in nats
Slope = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Refinement:
    """L-BFGS on all data, toward the modes of the log joint over the constrained sites, of ends of a search.

    Attributes: ``density``; ``num_steps``, evaluations of every end; ``polish_steps`` of the one that is kept;
        ``valley_rounds``, by which every end goes on to its very mode, in the units of its posterior, before they are
        compared: on the way there the evidence of an end may fall by ten nats. Ends that stay where they are have none;
        ``share_before``, of the steps of a search from one point, those that are taken before.
    """

    density: Density
    num_steps: int
    polish_steps: int
    valley_rounds: int = 0
    share_before: float = 1.0

    def slope(self, points: Tensor) -> Slope:
        """From points of this shape (point, dim) to gradients (point, dim) and values (point,) of the loss."""
        single = torch.func.grad_and_value(lambda z: -self.density.log_joint(z, jacobian=False))
        return compiled(
            torch.func.vmap(single),
            points,
            enabled=False,
            calls=self.num_steps,
        )


def alone(slope: Slope, number: int) -> Slope:
    """The slope of ``number`` points for one, (dim,): another trace would cost more than the others' evaluations."""

    def first(theta: Tensor) -> tuple[Tensor, Tensor]:
        gradients, values = slope(theta.expand(number, -1).contiguous())
        return gradients[0], values[0]

    return first


@dataclass(frozen=True, eq=False)
class Ends:
    """Where the paths of a search end.

    Attributes: ``runs`` of all paths, member by member; ``relative_levels`` (member, path), as of :class:`Paths`;
        ``values`` (path,) of the loss in nats, where the ends are refined.
    """

    runs: list[Result]
    relative_levels: Tensor
    values: Tensor | None = None

    def refined(
        self,
        slope: Slope,
        num_steps: int,
        problem: Problem,
        valley_rounds: int = 0,
    ) -> Ends:
        """The ends nearer to their modes, each by itself. What diverged takes the place of the first that did not.

        The rounds are in the units of the problem's posterior, which lead on where valleys are narrow.
        """
        points = torch.stack([run.params for run in self.runs])
        finite = points.isfinite().all(1)
        points[~finite] = points[int(finite.int().argmax())].clone()
        points = descend_each(slope, points, num_steps)
        units = Units.around(problem, points) if valley_rounds else None
        if units is not None:
            points = descend_in_valleys(slope, points, units.roots, valley_rounds)
        runs = [replace(run, params=point) for run, point in zip(self.runs, points, strict=True)]
        return replace(
            self,
            runs=runs,
            values=slope(points)[1].nan_to_num(nan=math.inf),
        )

    def highest(self, number: int) -> Ends:
        """Of one member's ends the plain one and those with the smallest losses; all where they are not refined."""
        if self.values is None or number >= len(self.runs):
            return self
        order = [path for path in self.values.argsort().tolist() if path > 0][: number - 1]
        paths = [0, *sorted(order)]
        return Ends([self.runs[path] for path in paths], self.relative_levels[:, paths])


def polished(end: Result, slope: Slope, num_steps: int) -> Result:
    """The end at its very mode, with the norm of the gradient there and the nats that further steps would gain."""
    params, norm = descend(slope, end.params, num_steps, _PATIENCE)
    further, _ = descend(slope, params, _FURTHER_STEPS)
    gain = max(0.0, float(slope(params)[1] - slope(further)[1]))
    return replace(
        end,
        params=params,
        path=end.path | {"gradient_norm": norm, "gain_left": gain},
    )


def best_ends(worths: Tensor) -> list[int]:
    """Which of the ends (member, path) with these worths in nats the members keep, numbered row by row.

    Each keeps its best. One that is far worse than the best of all takes the best end that nobody has, if that is not.
    """
    flat = worths.nan_to_num(nan=-math.inf).flatten()
    choices = []
    for number, row in enumerate(worths):
        choices.append(int(row.nan_to_num(nan=-math.inf).argmax()) + number * len(row))
    limit = float(flat.max()) - _TOLERATED_GAP
    spare = [
        end
        for end in flat.argsort(descending=True).tolist()
        if end not in choices and float(flat[end]) >= limit
    ]
    for member, end in enumerate(choices):
        if spare and float(flat[end]) < limit:
            choices[member] = spare.pop(0)
    return choices


def without_collapsed(
    worths: Tensor,
    ends: Sequence[Result],
    relative_levels: Tensor,
    noise: FreeNoise,
) -> Tensor:
    """Worths (end,) as (member, path); none of a continuation whose noise is on its way to zero."""
    rows = worths.cpu().reshape(relative_levels.shape)
    points = torch.stack([end.params for end in ends])
    collapsed = noise.collapsed(points).cpu().reshape(relative_levels.shape)
    return rows.masked_fill(collapsed & (relative_levels > 0), -math.inf)


def worths_of(problem: Problem, ends: Sequence[Result], *, evidence: bool) -> Tensor:
    """What ends (dim,) are worth, (end,) in nats: their evidence, or log joint; on a stream by their late losses."""
    if problem.loader is not None:
        return torch.stack([-problem.num_rows * late_loss(end) for end in ends])
    points = torch.stack([end.params for end in ends])
    return log_evidences(problem, points) if evidence else log_joints(problem, points)


def late_loss(end: Result) -> Tensor:
    """The mean loss of the last tenth of a run, ()."""
    return end.losses[-max(1, end.num_steps // 10) :].mean()


def members_of(result: Result) -> list[Result]:
    """The run of several members as a run of each."""
    if result.params.dim() == 1:
        return [result]
    members = []
    for column, params in enumerate(result.params):
        losses = result.losses[:, column]
        members.append(
            replace(
                result,
                params=params,
                losses=losses,
                grad_norm=result.grad_norm[column],
            )
        )
    return members


def together(members: Sequence[Result]) -> Result:
    """Runs of one member each as one run; the losses of a shorter one go on as they ended."""
    longest = max(members, key=lambda member: member.num_steps)
    losses = []
    for member in members:
        missing = longest.num_steps - member.num_steps
        losses.append(torch.cat([member.losses, member.losses[-1:].expand(missing)]))
    return replace(
        longest,
        params=torch.stack([member.params for member in members]),
        losses=torch.stack(losses, 1),
        grad_norm=torch.stack([member.grad_norm for member in members]),
    )
