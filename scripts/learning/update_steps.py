"""Part ``step``: what one new row costs, before and after the update is compiled."""

from __future__ import annotations

import time
from typing import Any

import pyro.distributions as dist
from learning.fitted_nets import net, units_of

import pyrobnn as pb


def step(problem: str, method: str, seed: int) -> dict[str, Any]:
    """CPU seconds of 20 updates by one row each, in turn; the last ten are compiled."""
    data = pb.data.sinusoid(120, seed=seed)
    noise = dist.HalfNormal(0.5) if method == "NUTS" else 0.3
    fitter = pb.NUTS(num_warmup=300) if method == "NUTS" else pb.Laplace()
    x = data.x[:100]
    y = data.y[:100]
    posterior = fitter.fit(
        net(1, 2.0, noise, units_of(x, y)),
        x,
        y,
        num_draws=300,
        seed=seed,
    )
    taken: dict[str, Any] = {"seconds_of_steps": [], "gradients": []}
    for row in range(100, 120):
        started = time.process_time()
        posterior = posterior.update(
            data.x[row : row + 1],
            data.y[row : row + 1],
            seed=row,
        )
        taken["seconds_of_steps"].append(round(time.process_time() - started, 3))
        taken["gradients"].append(posterior.meta["gradients"])
    return taken
