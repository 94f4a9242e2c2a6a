"""Pyro's own HMC and NUTS, driven by our density: the reference for the compiled machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from pyro.infer import HMC, MCMC, NUTS
from torch import Tensor

from pyrobnn.core.seeding import seeded
from pyrobnn.inference.hmc.machine import STATS


def sample(
    log_density: Callable[[Tensor], Tensor],
    z: Tensor,
    *,
    num_draws: int,
    num_warmup: int,
    seed: int,
    config: Any,
    progress: bool = False,
) -> tuple[Tensor, Tensor, int, bool]:
    """Run one chain after the other from ``z`` (chain, dim).

    Returns:
        Unconstrained draws (chain, draw, dim), statistics (chain, draw, 7) in the order of the machine's, the number
        of gradients, and whether Ctrl-C ended it: then the chains that are whole, or what the first one has. The tree
        depth is what the leapfrogs imply; the energy that of the transition's start.
    """
    draws: list[Tensor] = []
    stats: list[Tensor] = []
    total, interrupted = 0, False
    for chain, start in enumerate(z):
        potential = _Potential(log_density, start.dtype)
        options: dict[str, Any] = {
            "potential_fn": potential,
            "step_size": config.step_size or 1.0,
            "full_mass": config.mass_matrix == "dense",
            "target_accept_prob": config.target_accept,
        }
        if config.trajectory:
            kernel = HMC(num_steps=config.trajectory, trajectory_length=None, **options)
        else:
            kernel = NUTS(max_tree_depth=config.max_tree_depth, **options)
        record = _Transitions(kernel, potential)
        with seeded(seed * 1_000_003 + chain, z.device):
            mcmc = MCMC(
                kernel,
                num_samples=num_draws,
                warmup_steps=num_warmup,
                initial_params={"z": start.double()},  # Pyro mixes the dtypes of energies and positions
                hook_fn=record,
                disable_progbar=not progress,
            )
            try:
                mcmc.run()
            except KeyboardInterrupt:
                if not draws and not record.num_kept:
                    raise
                interrupted = True
        total += potential.calls
        if interrupted and draws:
            break
        draws.append(torch.stack(record.positions[: record.num_kept]).to(start.dtype))
        rows = record.rows[: record.num_kept]
        stats.append(torch.tensor(rows, dtype=torch.float64, device=z.device))
        for index in record.divergences:
            if index < record.num_kept:
                stats[-1][index, STATS.index("diverging")] = 1.0
        if interrupted:
            break
    return torch.stack(draws), torch.stack(stats), total, interrupted


class _Potential:
    """The potential energy as Pyro's kernels call it, counting the calls."""

    def __init__(self, log_density: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        self._log_density, self._dtype, self.calls = log_density, dtype, 0

    def __call__(self, params: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return -self._log_density(params["z"].to(self._dtype))


class _Transitions:
    """Collects every kept draw and its statistics through Pyro's hook and the kernel's own energy function."""

    def __init__(self, kernel: HMC, potential: _Potential) -> None:
        self.positions: list[Tensor] = []
        self.rows: list[list[float]] = []
        self.divergences: list[int] = []
        self._potential, self._before = potential, 0
        self._accept, self._energy, self._lp = 0.0, math.nan, math.nan
        kinetic = kernel._kinetic_energy
        self._fresh = True

        def recording(r: dict) -> Tensor:
            energy = kinetic(r)
            if self._fresh:  # the first call of a transition is for its starting momenta
                self._energy, self._fresh = float(energy) - self._lp, False
            return energy

        kernel._kinetic_energy = recording  # type: ignore[method-assign]  # Pyro has no hook for energies

    @property
    def num_kept(self) -> int:
        """Draws that are whole: an interrupt may come between a position and its statistics."""
        return min(len(self.positions), len(self.rows))

    def __call__(self, kernel: HMC, params: dict[str, Tensor], stage: str, index: int) -> None:
        steps, self._before = self._potential.calls - self._before, self._potential.calls
        _, potential, _ = kernel._fetch_from_cache()
        self._lp = -float(potential)
        energy, self._fresh = self._energy, True
        if stage.startswith("Warmup"):
            self._accept = 0.0
            return
        count = len(self.rows) + 1  # the kernel keeps a running mean over the kept draws
        rate = count * kernel._mean_accept_prob - self._accept
        self._accept = count * kernel._mean_accept_prob
        depth = math.floor(math.log2(steps + 1)) if steps else 0
        self.divergences = kernel._divergences
        self.positions.append(params["z"].detach().clone())
        self.rows.append([self._lp, energy, 0.0, depth, steps, float(rate), float(kernel.step_size)])
