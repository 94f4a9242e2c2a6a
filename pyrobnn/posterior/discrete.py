"""The discrete latent sites of a program, drawn after a fit that has summed them out."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrobnn.core.checks import check_number
from pyrobnn.core.seeding import seeded
from pyrobnn.model import BNN
from pyrobnn.model.gradient import at_each
from pyrobnn.posterior.approximation import PosteriorLike
from pyrobnn.posterior.invariance import posterior_density

#: draws that are made at once, and the pairs of states times values over all of them
_DRAWS_AT_ONCE = 500
_ENTRIES_AT_ONCE = 2**22


@torch.no_grad()
def infer_discrete(
    posterior: PosteriorLike,
    x: Tensor | None,
    y: Tensor | None,
    temperature: float,
    seed: int,
) -> dict[str, Tensor]:
    """Arguments and result as of :meth:`pyrobnn.Posterior.infer_discrete`."""
    temperature = check_number(
        "temperature",
        temperature,
        minimum=0.0,
    )
    density = None if isinstance(posterior.model, BNN) else posterior_density(posterior, x, y)
    if density is None or not density.states:
        raise ValueError(
            "the model has no discrete latent sites: 'infer_discrete' draws those of a program, which its fit sums out"
        )
    z = density.unconstrain(posterior.draws)

    def run(point: Tensor) -> dict[str, Tensor]:
        return density.draw_discrete(point, temperature)

    with seeded(seed, density.device):
        # one draw shows how many values there are
        num_values = sum(value.numel() for value in run(z[0, 0]).values())
        entries = max(num_values, 1) * max(density.states.values()) ** 2
        values = at_each(
            run,
            z.reshape(-1, density.dim),
            at_once=max(1, min(_DRAWS_AT_ONCE, _ENTRIES_AT_ONCE // entries)),
        )
    return {name: value.reshape(*z.shape[:2], *value.shape[1:]) for name, value in values.items()}
