"""How far the chains of a run have converged, judged by every quantity that is identified.

*Rank-normalization, folding, and localization: an improved R-hat* (Vehtari et al., 2021),
https://doi.org/10.1214/20-BA1221
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core import chains
from pyrobnn.core.chains import RHAT_LIMIT
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.hmc.windows import STATS
from pyrobnn.model import BNN, NET
from pyrobnn.model.gradient import at_each
from pyrobnn.model.likelihoods.base import identified

#: effective draws that a run which waits for convergence waits for
MIN_ESS = 400.0
_VALUES = 256  # of all sites together, or of the function, that are judged
_BLOCK = 256  # draws at which a net's function is evaluated at once


class Convergence(NamedTuple):
    """How far a run has come: the worst R-hat and the smallest ESS with the names of their quantities."""

    draws: int
    rhat: float
    worst: str
    ess: float
    slowest: str

    @property
    def enough(self) -> bool:
        """Whether that is convergence."""
        return self.rhat <= RHAT_LIMIT and self.ess >= MIN_ESS


class JudgedNet(NamedTuple):
    """A net, and its data's inputs, from which those come at which its function is judged."""

    model: BNN
    x: Tensor


def judged_net(problem: Problem) -> JudgedNet | None:
    """The net of a problem; None of a plain program, of which the sites are judged."""
    return JudgedNet(problem.bnn, problem.x) if problem.is_bnn else None


def check_convergence(
    net: JudgedNet | None,
    draws: Mapping[str, Tensor],
    stats: Tensor,
) -> Convergence:
    """How far the draws of at least two chains have converged; an infinite R-hat where they cannot be judged.

    Args:
        net: of a net's posterior.
        draws: site → (chain, draw, …).
        stats: their statistics (chain, draw, len(STATS)).
    """
    num = stats.shape[1]
    quantities = _identified_quantities(net, draws, stats)
    moving = {name: values for name, values in quantities.items() if np.ptp(values) != 0}
    for name, values in moving.items():
        if not np.isfinite(values).all():
            return Convergence(num, np.inf, name, 0.0, name)
    if not moving or num < chains.MIN_DRAWS:
        return Convergence(num, np.inf, "nothing to judge by", 0.0, "nothing to judge by")
    names = list(moving)
    stacked = np.stack(list(moving.values()))
    rhat = np.nan_to_num(
        chains.rhat(stacked),
        nan=np.inf,
        posinf=np.inf,
    )
    ess = np.nan_to_num(np.minimum(chains.ess(stacked), chains.ess(stacked, "tail")), nan=0.0)
    worst = int(rhat.argmax())
    slowest = int(ess.argmin())
    return Convergence(num, float(rhat[worst]), names[worst], float(ess[slowest]), names[slowest])


def _identified_quantities(
    net: JudgedNet | None,
    draws: Mapping[str, Tensor],
    stats: Tensor,
) -> dict[str, np.ndarray]:
    """What is identified, name → (chain, draw): as the diagnosis of the finished run judges it.

    The log density and every site but the weights of a net; of a net the function at the probes, the log prior, the log
    likelihood and the norm of each layer.
    """
    lp = stats[..., STATS.index("lp")].cpu().double()
    quantities = {"the log density": lp}
    sites = dict(draws)
    if net is not None:
        quantities |= _net_quantities(net, draws)
        quantities["the log likelihood"] = lp - quantities["the log prior"]
        sites = {name: value for name, value in draws.items() if not name.startswith(NET)}
    for name, value in sites.items():
        quantities |= _columns(name, value, max(1, _VALUES // len(sites)))
    return {name: value.detach().cpu().double().numpy() for name, value in quantities.items()}


def _columns(name: str, values: Tensor, max_columns: int) -> dict[str, Tensor]:
    """At most ``max_columns`` elements of (chain, draw, …), evenly spread, by name."""
    shape = values.shape[2:]
    if not shape:
        return {name: values}
    flat = values.flatten(2)
    size = flat.shape[2]
    columns = {}
    for index in evenly_spaced(size, min(max_columns, size)).tolist():
        place = ", ".join(map(str, np.unravel_index(index, shape)))
        columns[f"{name}[{place}]"] = flat[..., index]
    return columns


def _net_quantities(net: JudgedNet, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Function values, log prior and layer norms, each (chain, draw); of a block of draws at a time."""
    from pyrobnn.posterior.datatree import probes

    x = net.model.comparable(probes(net.x.cpu())[0]).to(net.x.device)
    shape = next(iter(draws.values())).shape[:2]
    blocks: dict[str, list[Tensor]] = {}
    for start in range(0, shape.numel(), _BLOCK):
        rows = {name: value.flatten(0, 1)[start : start + _BLOCK] for name, value in draws.items()}
        for name, value in _block_quantities(net.model, x, rows).items():
            blocks.setdefault(name, []).append(value[0].double().cpu())
    return {name: torch.cat(values).reshape(shape) for name, values in blocks.items()}


def _block_quantities(
    model: BNN,
    x: Tensor,
    rows: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The quantities, each (1, draw), of draws by site (draw, …)."""
    from pyrobnn.posterior.datatree import layer_norms

    f = at_each(lambda params: model.forward(params, x), rows).unsqueeze(0)
    quantities = _columns("f", identified(model.likelihood, f), _VALUES)
    # as one chain
    chain = {name: value.unsqueeze(0) for name, value in rows.items()}
    log_priors = [prior.log_prob(chain[name]) for name, prior in model.priors.items()]
    quantities["the log prior"] = sum(log_priors)
    for layer, norm in layer_norms(chain).items():
        quantities[f"the norm of layer {layer}"] = norm
    return quantities
