"""A method from outside the package, whole in one file: tests/laws/test_law_method.py runs everything on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import nn

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import Callback, make_posterior, prepare, whole
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.method import Claim, Kind, Method, check_call, register
from pyrobnn.posterior.approximation import FAMILIES, FlatApproximation
from pyrobnn.seeding import seeded

FAMILIES["student_t"] = lambda state: dist.StudentT(state["df"], state["loc"], state["scale"]).to_event(1)


@register("student", quick={"num_steps": 50, "num_draws": 200})
@dataclass(frozen=True)
class StudentT(Method):
    """Independent Student t's around the mode, as wide as the diagonal of the curvature says, times ``width``."""

    df: float = 5.0
    width: float = 1.0
    num_steps: int = 500
    compile: bool = True

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "approximate"
    has_density: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    default_draws: ClassVar[int] = 400
    remedy: ClassVar[str] = "The Student t misses the posterior: lower df."

    def fit(
        self,
        model: pb.BNN | Callable[..., Any],
        x: Any = None,
        y: Any = None,
        *,
        num_draws: int | None = None,
        seed: int = 0,
        init: pb.Posterior | nn.Module | None = None,
        device: str | torch.device | None = None,
        until_ess: float | None = None,
        checkpoint: str | Path | None = None,
        stream_to: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ) -> pb.Posterior:
        num_draws = check_call(
            self, num_draws, seed, init=init, until_ess=until_ess, checkpoint=checkpoint, stream_to=stream_to
        )
        started = time.perf_counter()
        problem = prepare(model, x, y, points="free", device=device)
        search = pb.MAP(num_steps=self.num_steps, polish_steps=20, compile=self.compile)
        options = {"seed": seed, "init": init, "device": device, "callbacks": callbacks, "progress": progress}
        mode = whole(lambda: search.fit(model, x, y, **options), "StudentT")
        points = {name: mode.draws[name][0, 0] for name in mode.meta["point_sites"]}
        density = pb.Density(problem.density.program, problem.density.args, points="held", values=points)
        loc = density.unconstrain({site.name: mode.draws[site.name][0, 0] for site in density.sites})
        curvature = -torch.func.jacrev(torch.func.grad(density.log_joint))(loc).diagonal()
        state = {
            "df": torch.tensor(self.df),
            "loc": loc,
            "scale": self.width / curvature.clamp(min=1.0).sqrt(),
        }
        q = FlatApproximation(density, "student_t", state)
        with seeded(seed, problem.device):
            draws = {name: value[None] for name, value in q.sample(num_draws).items()}
        timings = {"fit": time.perf_counter() - started}
        return make_posterior(
            problem, self, draws, seed=seed, timings=timings, approximation=q, point_values=points
        )

    def memory(self, model: pb.BNN, sizes: Sizes) -> Need:
        resident, phases = sizes.optimisation()
        drawn = {"draws": 2 * sizes.num_draws * sizes.flat}
        return Need(resident | drawn, phases | {"the Hessian": 8 * sizes.weights * sizes.flat})
