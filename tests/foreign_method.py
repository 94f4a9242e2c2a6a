"""A method from outside the package, whole in one file: tests/laws/test_law_method.py runs everything on it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import pyro.distributions as dist
import torch

import pyrobnn as pb
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.problem import Problem, make_posterior, run_subfit
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.posterior.approximation import FAMILIES, FlatApproximation

FAMILIES["student_t"] = lambda state: dist.StudentT(
    state["df"], state["loc"], state["scale"]
).to_event(1)


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

    def _fit(self, problem: Problem, run: FitRun) -> pb.Posterior:
        started = time.perf_counter()
        model, x, y = run.given
        search = pb.MAP(num_steps=self.num_steps, polish_steps=20, compile=self.compile)
        options = {"seed": run.seed, "init": run.init, "device": problem.device}
        options |= {"callbacks": run.callbacks, "progress": run.progress}
        mode = run_subfit(lambda: search.fit(model, x, y, **options), "StudentT")
        points = {name: mode.draws[name][0, 0] for name in mode.meta["point_sites"]}
        density = pb.Density(
            problem.density.program, problem.density.args, points="held", values=points
        )
        loc = density.unconstrain(
            {site.name: mode.draws[site.name][0, 0] for site in density.sites}
        )
        curvature = -torch.func.jacrev(torch.func.grad(density.log_joint))(loc).diagonal()
        state = {
            "df": torch.tensor(self.df),
            "loc": loc,
            "scale": self.width / curvature.clamp(min=1.0).sqrt(),
        }
        q = FlatApproximation(density, "student_t", state)
        with seeded(run.seed, problem.device):
            draws = {name: value[None] for name, value in q.sample(run.num_draws).items()}
        timings = {"fit": time.perf_counter() - started}
        return make_posterior(
            problem,
            self,
            draws,
            seed=run.seed,
            timings=timings,
            approximation=q,
            point_values=points,
        )
