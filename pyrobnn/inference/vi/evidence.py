"""The ELBO of a fitted approximation on the whole data, and log p and log q of its draws."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyrobnn.density import Density
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.vi.elbo import Elbo
from pyrobnn.posterior.approximation import Approximation

#: the ELBO is averaged until its standard error is this small (nats), within a budget of likelihood evaluations
_ELBO_ERROR, _MAX_ELBO_DRAWS, _ELBO_BUDGET = 0.02, 4096, 2**31


def draws_per_block(num_weights: int) -> int:
    """Draws that are held and evaluated at once: 64, fewer of a large net (2^26 numbers)."""
    return max(1, min(64, 2**26 // num_weights))


@torch.no_grad()
def evaluate_elbo(
    problem: Problem, layout: Density, approximation: Approximation, elbo: Elbo, theta: Tensor
) -> tuple[float, float]:
    """The ELBO of weight one on the whole data, and its standard error, in nats.

    The KL is taken in closed form where it is exact, else at the same draws as the likelihood.
    """
    num_data = problem.num_rows
    budget = _ELBO_BUDGET // max(num_data * layout.dim, 1)
    most = max(16, min(_MAX_ELBO_DRAWS, budget))
    exact = elbo.exact_kl
    terms: list[Tensor] = []
    # an exact one depends on no draw
    kl = (
        float(elbo.parts(theta, torch.zeros((), dtype=torch.int64, device=theta.device))[1]) if exact else 0.0
    )
    while sum(map(len, terms)) < most:
        z = layout.unconstrain(approximation.sample(draws_per_block(layout.dim)))
        value = log_likelihoods(problem, layout, z)
        if not exact:
            value = value + _log_priors(layout, z) - approximation.log_prob(layout.constrain(z)).double()
        terms.append(value)
        sample = torch.cat(terms)
        if len(sample) >= 256 and float(sample.std()) / math.sqrt(len(sample)) < _ELBO_ERROR:
            break
    sample = torch.cat(terms)
    return float(sample.mean()) - kl, float(sample.std()) / math.sqrt(len(sample))


def log_likelihoods(problem: Problem, layout: Density, z: Tensor) -> Tensor:
    """Log likelihood of the whole data set at each flat vector, (draws,), streamed where the data are.

    With the masks, scales and factors of a program, as in its log joint.
    """
    # one block holds about 2^24 outputs of the widest layer
    per_draw = max(1, len(problem.x) * 64 if isinstance(problem.x, Tensor) and problem.x.dim() else 1)
    block = max(1, min(len(z), 2**24 // per_draw))

    def one(vector: Tensor, *batch: Tensor) -> Tensor:
        if not batch:
            return layout.log_parts(vector)[1]
        # log_parts would scale every batch to the whole data set
        return layout.log_likelihood(vector, *batch).sum(dtype=torch.float64)

    def total(*batch: Tensor) -> Tensor:
        run = torch.func.vmap(lambda vector: one(vector, *batch))
        return torch.cat([run(part) for part in z.split(block)])

    if problem.loader is None:
        return total()
    value, seen = torch.zeros(len(z), dtype=torch.float64, device=problem.device), 0
    for x, y in problem.one_pass():
        value, seen = value + total(x, y), seen + len(x)
    # a pass need not show all N data, nor each of them once
    return value * (problem.num_rows / seen)


def _log_priors(layout: Density, z: Tensor) -> Tensor:
    return torch.func.vmap(lambda vector: layout.log_parts(vector)[0])(z)


@torch.no_grad()
def importance_stats(
    problem: Problem, layout: Density, approximation: Approximation, draws: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """log p and log q of the draws in constrained space, both (1, draw)."""
    z = layout.unconstrain({site.name: draws[site.name] for site in layout.sites})
    log_p = log_likelihoods(problem, layout, z[0]) + torch.cat(
        [_log_priors(layout, part) for part in z[0].split(draws_per_block(layout.dim))]
    )
    return {"log_p": log_p[None], "log_q": approximation.log_prob(draws).double()}
