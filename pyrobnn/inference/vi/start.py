"""Where a guide begins: at the mode that a search finds, at the net's own weights, or where the user says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.initial import start_values
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.optim.free_noise import FreeNoise
from pyrobnn.inference.point_methods import MAP

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun
    from pyrobnn.inference.svi import SVI
    from pyrobnn.posterior import Posterior

#: of a fit's steps, those of the search for the mode: two thousand by default, as of MAP
_SEARCH_SHARE = 0.2
#: L-BFGS evaluations after a step of the search
_POLISH_SHARE = 0.1

Kind = Literal["mode", "net", "median", "prior", "init"]


@dataclass(frozen=True, eq=False)
class Start:
    """Where a fit of a guide begins.

    Attributes: ``point`` (dim,), unconstrained: the means of the guide, then the point parameters; ``kind``, what that
        is; ``path``, of the search that led there, as :class:`pyrobnn.MAP` records it; ``seconds`` of the search.
    """

    point: Tensor
    kind: Kind
    path: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def begins_at_mode(config: SVI, problem: Problem, run: FitRun) -> bool:
    """Whether a search looks for the start: of our own guides of a net, unless the user says where to start.

    What a forward KL makes of a start is not what a bound does, whose local optima differ in the function.
    """
    options = config.options
    is_ours = isinstance(options.family, str) and config.kl_direction == "reverse"
    return problem.is_bnn and is_ours and run.init is None and options.init_loc == "mode"


def start_of(config: SVI, problem: Problem, run: FitRun) -> Start:
    """Where the guide of a fit begins.

    Raises:
        KeyboardInterrupt: Ctrl-C during the search, when there is nothing to return yet.
    """
    if begins_at_mode(config, problem, run):
        start = _at_mode(config, problem, run)
        if start is not None:
            return start
    if config.options.init_loc == "prior" and run.init is None:
        return Start(problem.density.sample_prior(1, run.seed)[0], "prior")
    return own_start(problem, run.init, run.seed)


def own_start(problem: Problem, init: Posterior | nn.Module | None = None, seed: int = 0) -> Start:
    """The start at ``init``, or at the net's own weights; of a program at the medians of its prior."""
    point = problem.density.initial(start_values(problem.model, init), seed)
    if init is not None:
        return Start(point, "init")
    return Start(point, "net" if problem.is_bnn else "median")


def search_of(config: SVI) -> MAP:
    """The search for the mode at which a guide is to begin."""
    num_steps = max(1, round(_SEARCH_SHARE * config.num_steps))
    return MAP(
        num_steps=min(MAP.num_steps, num_steps),
        lr=config.lr,
        batch_size=config.batch_size,
        polish_steps=min(MAP.polish_steps, round(_POLISH_SHARE * num_steps)),
        compile=config.compile,
    )


def _at_mode(config: SVI, problem: Problem, run: FitRun) -> Start | None:
    """The start at the mode; None where there is none: the density grows without bound, and the fit itself does not."""
    begun = time.perf_counter()
    try:
        # random numbers of its own: the fit's are those of a fit that is given this start
        with seeded(run.seed, problem.device):
            result = search_of(config).mode(problem, replace(run, callbacks=()))
    except FloatingPointError:
        return None
    if result.interrupted:
        raise KeyboardInterrupt(
            "the search was interrupted by Ctrl-C while SVI looked for its start: there is nothing to return yet"
        )
    noise = FreeNoise.of(problem)
    if noise is not None and bool(noise.collapsed(result.params[None]).any()):
        return None
    recorded = ("noise_held", "path_gain")
    path: dict[str, Any] = {name: result.path[name] for name in recorded if name in result.path}
    return Start(result.params, "mode", path, time.perf_counter() - begun)


def starts_of(config: SVI, problem: Problem, ys: Tensor, run: FitRun) -> Tensor:
    """Where the guides begin given each of several targets (set, N, …), (set, dim)."""
    if begins_at_mode(config, problem, run):
        return search_of(config).points_each(problem, ys, run)[:, 0]
    point = start_of(config, problem, run).point
    return torch.stack([point] * len(ys))
