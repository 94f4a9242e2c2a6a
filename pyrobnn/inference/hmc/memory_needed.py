"""The memory that a run of the HMC machine takes, asked for before it starts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pyrobnn.inference.fitting import memory
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.hmc.machine import STATS
from pyrobnn.inference.hmc.metric import form_of
from pyrobnn.inference.hmc.warmup import kept_in_warmup

if TYPE_CHECKING:
    from pyrobnn.inference.nuts import NUTS

_BLOCK = 64  # draws per chain between writes to a file


def num_slots(dim: int, config: NUTS, num_draws: int, num_warmup: int, streamed: bool) -> int:
    """Draws per chain that the machine holds: those of a warm-up window, and all draws or a block of them."""
    kept = kept_in_warmup(num_warmup, config.num_chains, dim)
    return max(_BLOCK if streamed else num_draws, kept)


def needed_bytes(
    dim: int, dtype: torch.dtype, config: NUTS, num_draws: int, num_warmup: int, streamed: bool
) -> int:
    """Bytes of a run's static buffers and of the copies on the way to the posterior."""
    chains, item = config.num_chains, dtype.itemsize
    slots = num_slots(dim, config, num_draws, num_warmup, streamed) + 1
    levels = 2 * (config.max_tree_depth + 1)
    copies = 2 if streamed else 3  # the draws, without the whitening, and by site
    rows = slots + num_draws if streamed else slots
    need = chains * (dim * item * (copies * slots + levels + 24) + rows * 8 * len(STATS))
    if config.mass_matrix == "low_rank":  # a window of draws and one of gradients, copied in float64
        need += chains * kept_in_warmup(num_warmup, chains, dim) * dim * (2 * item + 6 * 8)
    return need + (dim * dim * item * 3 if config.mass_matrix == "dense" else 0)


def check_memory(problem: Problem, config: NUTS, num_draws: int, num_warmup: int, streamed: bool) -> None:
    """Refuse a run whose buffers do not fit before it starts.

    Raises:
        NotEnoughMemory: naming the bytes and the options to change.
    """
    dim, dtype = problem.density.dim, problem.density.dtype
    form = form_of(config.mass_matrix, problem.is_bnn or config.engine == "pyro")
    config = replace(config, mass_matrix="low_rank" if form == "auto" else form)  # the most that it may need
    need = needed_bytes(dim, dtype, config, num_draws, num_warmup, streamed)
    options = ["lower num_chains" if streamed else "lower num_draws or num_chains"]
    free = memory.free_bytes(problem.device)
    if not streamed and needed_bytes(dim, dtype, config, num_draws, num_warmup, True) <= free:
        options.append("write the draws to disk with fit(stream_to=PATH)")
    if form != "diag":
        options.append("use mass_matrix='diag'")
    what = f"a run of {config.num_chains} chains × {num_draws} draws × {dim} parameters"
    memory.require(need, problem.device, what, ", or ".join(options))
