"""Pyro's own HMC and NUTS, driven by our density: the reference for the compiled machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from pyro.infer import HMC, MCMC, NUTS
from torch import Tensor

from pyrobnn.core.private_pyro import (
    divergent_draws,
    hear_kinetic_energy,
    mean_acceptance,
    potential_energy,
)
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.hmc.run import Draws
from pyrobnn.inference.hmc.transition_options import TransitionOptions
from pyrobnn.inference.hmc.windows import STATS

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun


def sample(
    log_density: Callable[[Tensor], Tensor],
    z: Tensor,
    dense: bool,
    num_warmup: int,
    config: TransitionOptions,
    run: FitRun,
) -> Draws:
    """Run one chain after the other from ``z`` (chain, dim); after Ctrl-C the whole ones, or what the first has."""
    finished: list[_Chain] = []
    interrupted = False
    for number, start in enumerate(z):
        chain = _Chain(log_density, start.dtype, dense, config)
        finished.append(chain)
        with seeded(run.seed * 1_000_003 + number, z.device):
            # WORKAROUND(pyro-ppl<=1.9.2): it mixes the dtypes of energies and positions, so all are float64
            mcmc = MCMC(
                chain.kernel,
                run.num_draws,
                num_warmup,
                initial_params={"z": start.double()},
                hook_fn=chain,
                disable_progbar=not run.progress,
            )
            try:
                mcmc.run()
            except KeyboardInterrupt:
                if number == 0 and not chain.rows:
                    raise
                interrupted = True
                break
    calls = sum(chain.calls for chain in finished)
    complete = finished[:-1] if interrupted and len(finished) > 1 else finished
    draws, stats = zip(*(chain.result(z.device) for chain in complete), strict=True)
    return Draws(
        torch.stack(draws).to(z.dtype),
        torch.stack(stats),
        compile_seconds=0.0,
        num_gradients=calls,
        scale=torch.ones(0),
        history={},
        interrupted=interrupted,
        num_warmup=num_warmup,
    )


class _Chain:
    """A kernel with its potential, and every kept draw with its statistics, by Pyro's hook.

    The tree depth is what the leapfrogs imply; the energy that of the transition's start, by the kernel's own function.
    """

    def __init__(
        self,
        log_density: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        dense: bool,
        config: TransitionOptions,
    ):
        self._fresh = True
        self._accept = 0.0
        self._energy = math.nan
        self._lp = math.nan

        def potential(params: dict[str, Tensor]) -> Tensor:
            self.calls += 1
            return -log_density(params["z"].to(dtype))

        def hear(kinetic: Tensor) -> None:
            if self._fresh:  # the first call of a transition is for its starting momenta
                self._energy = float(kinetic) - self._lp
                self._fresh = False

        options: dict[str, Any] = {"full_mass": dense, "target_accept_prob": config.target_accept}
        options |= {"potential_fn": potential, "step_size": config.step_size or 1.0}
        self.kernel: HMC
        if config.trajectory:
            self.kernel = HMC(
                num_steps=config.trajectory,
                trajectory_length=None,
                **options,
            )
        else:
            self.kernel = NUTS(max_tree_depth=config.max_tree_depth, **options)
        hear_kinetic_energy(self.kernel, hear)
        self.rows: list[tuple[Tensor, list[float]]] = []
        self.calls = self._before = 0

    def __call__(
        self,
        kernel: HMC,
        params: dict[str, Tensor],
        stage: str,
        index: int,
    ) -> None:
        steps = self.calls - self._before
        self._before = self.calls
        self._lp = -potential_energy(kernel)
        energy = self._energy
        self._fresh = True
        if stage.startswith("Warmup"):
            return
        count = len(self.rows) + 1  # the kernel keeps a running mean over the kept draws
        total = count * mean_acceptance(kernel)
        rate = total - self._accept
        self._accept = total
        depth = math.floor(math.log2(steps + 1)) if steps else 0
        row = [self._lp, energy, 0.0, depth, steps, float(rate), float(kernel.step_size)]
        self.rows.append((params["z"].detach().clone(), row))

    def result(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions (draw, dim) and statistics (draw, len(STATS))."""
        positions, rows = zip(*self.rows, strict=True)
        stats = torch.tensor(
            rows,
            dtype=torch.float64,
            device=device,
        )
        for index in divergent_draws(self.kernel):
            if index < len(stats):
                stats[index, STATS.index("diverging")] = 1.0
        return torch.stack(positions), stats
