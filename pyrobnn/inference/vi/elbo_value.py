"""The ELBO of a fitted approximation on the whole data, and log p and log q of its draws."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyrobnn.density import Density
from pyrobnn.findings import Finding
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.vi.elbo import Elbo
from pyrobnn.posterior.approximation import Approximation
from pyrobnn.seeding import kept

#: the ELBO is averaged until its standard error is this small (nats), within a budget of likelihood evaluations
_ELBO_ERROR, _MAX_ELBO_DRAWS, _ELBO_BUDGET = 0.02, 4096, 2**31


def draws_per_block(num_weights: int) -> int:
    """Draws held and evaluated at once: 256 of a small net (2^22 numbers), else 64, fewer of a large one (2^26).

    Of a small net most of the time is that of a call, whatever the number of its draws.
    """
    return max(1, min(256, 2**22 // num_weights), min(64, 2**26 // num_weights))


@torch.no_grad()
def evaluate_elbo(
    problem: Problem, layout: Density, approximation: Approximation, elbo: Elbo, theta: Tensor
) -> tuple[float, float]:
    """The ELBO of weight one on the whole data, and its standard error, in nats.

    The KL is taken in closed form where it is exact, else at the same draws as the likelihood.
    """
    budget = _ELBO_BUDGET // max(problem.num_rows * layout.dim, 1)
    most = max(16, min(_MAX_ELBO_DRAWS, budget))
    exact = elbo.exact_kl
    terms, sample = list[Tensor](), torch.empty(0)
    # an exact one depends on no draw
    kl = (
        float(elbo.parts(theta, torch.zeros((), dtype=torch.int64, device=theta.device))[1]) if exact else 0.0
    )
    while len(sample) < most:
        block = min(draws_per_block(layout.dim), max(64, most - len(sample)))
        z = layout.unconstrain(approximation.sample(block))
        log_prior, value = log_parts(problem, layout, z)
        if not exact:
            value = value + log_prior - approximation.log_prob(layout.constrain(z)).double()
        terms.append(value)
        sample = torch.cat(terms)
        error = float(sample.std()) / math.sqrt(len(sample))
        if len(sample) >= 256 and error < _ELBO_ERROR:
            break
    return float(sample.mean()) - kl, error


def log_parts(problem: Problem, layout: Density, z: Tensor) -> tuple[Tensor, Tensor]:
    """Log prior and log likelihood of the whole data at each flat vector, both (draws,), streamed where the data are.

    With the masks, scales and factors of a program, as in its log joint.
    """
    # one block holds about 2^24 outputs of the widest layer
    per_draw = max(1, len(problem.x) * 64 if isinstance(problem.x, Tensor) and problem.x.dim() else 1)
    block = max(1, min(draws_per_block(layout.dim), 2**24 // per_draw))
    both = torch.func.vmap(layout.log_parts)
    if problem.loader is None:
        parts = [both(part) for part in z.split(block)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def batched(vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        # log_parts would scale every batch to the whole data set
        return layout.log_likelihood(vector, x, y).sum(dtype=torch.float64)

    log_prior = torch.cat([both(part)[0] for part in z.split(block)])
    value, seen = torch.zeros(len(z), dtype=torch.float64, device=problem.device), 0
    for x, y in problem.one_pass():
        run = torch.func.vmap(batched, in_dims=(0, None, None))
        value, seen = value + torch.cat([run(part, x, y) for part in z.split(block)]), seen + len(x)
    # a pass need not show all N data, nor each of them once
    return log_prior, value * (problem.num_rows / seen)


@torch.no_grad()
def importance_stats(
    problem: Problem, layout: Density, approximation: Approximation, draws: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """log p and log q of the draws in constrained space, both (1, draw)."""
    z = layout.unconstrain({site.name: draws[site.name] for site in layout.sites})
    with kept(problem.device):  # a loader draws its order
        log_prior, log_likelihood = log_parts(problem, layout, z[0])
    return {"log_p": (log_prior + log_likelihood)[None], "log_q": approximation.log_prob(draws).double()}


def elbo_findings(value: float, error: float, track: Tensor | None) -> list[Finding]:
    """A finding where the ELBO is no number, or lies below what the fit had on the way.

    Args:
        value, error: the ELBO of the fitted guide with its standard error, in nats.
        track: the noisy ELBO of every step (step,), None of a tempered fit, whose end is not its best. A twentieth of
            the steps is a window; what the fit surely had is the best mean of one less five standard errors. The last
            iterate is one step: it may lie the spread of single steps below, and a nat is no matter.
    """
    if not (math.isfinite(value) and math.isfinite(error)):
        return [Finding("elbo_not_finite", {"elbo": value, "error": error})]
    width = 0 if track is None else max(20, len(track) // 20)
    if track is None or len(track) < width:
        return []
    windows = track[: len(track) - len(track) % width].double().reshape(-1, width)
    spreads = windows.std(1)
    reached = windows.mean(1) - 5.0 * spreads / math.sqrt(width)
    best = int(reached.argmax())
    if value + 5.0 * error < float(reached[best] - spreads[best]) - 1.0:
        return [Finding("elbo_below_best", {"elbo": value, "error": error, "best": float(reached[best])})]
    return []
