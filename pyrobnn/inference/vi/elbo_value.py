"""The value of the ELBO on all data after a training, its error, and the importance weights of draws.

``elbo`` has the objective of a step, a function of flat parameters; here are numbers of a fitted guide, for which
``held_density`` is the model's with the point parameters held.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import generator, kept
from pyrobnn.inference.fitting.batches import row_parts
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.fitting.watch import Watch
from pyrobnn.inference.vi.elbo import Elbo
from pyrobnn.model.density import Density
from pyrobnn.model.gradient import at_each
from pyrobnn.posterior.approximation import Approximation
from pyrobnn.posterior.prediction import widest_layer

#: the ELBO is averaged until its standard error is this small (nats), within a number of draws
_ELBO_ERROR = 0.02
_MAX_ELBO_DRAWS = 4096


def draws_per_block(num_weights: int) -> int:
    """Draws evaluated at once: 256 of a small net (2^22 numbers), where calls cost most, else 64 (2^26 numbers)."""
    return max(1, min(256, 2**22 // num_weights), min(64, 2**26 // num_weights))


@dataclass(frozen=True)
class Work:
    """What a training has done: ``num_rows`` that it sent through the net, ``batch_size`` of them at once.

    ``progress``: whether to show a bar for what follows it.
    """

    num_rows: int
    batch_size: int
    progress: bool = False

    @property
    def allowed_rows(self) -> int:
        """Rows that take a tenth of its time: a gradient costs three passes of the net."""
        return 3 * self.num_rows // 10

    def passes(self, num_rows: int) -> int:
        """Passes over data of so many rows that take a tenth of its time."""
        return self.allowed_rows // max(num_rows, 1)


@torch.no_grad()
def evaluate_elbo(
    problem: Problem,
    held_density: Density,
    approximation: Approximation,
    elbo: Elbo,
    theta: Tensor,
    work: Work | None = None,
) -> tuple[float, float]:
    """The ELBO of weight one on the whole data, and its standard error, in nats.

    The KL is taken in closed form where it is exact, else at the same draws as the likelihood. Where 64 draws of all
    rows are much, they take no more than a tenth of the training's ``work``: fewer draws, and where not even 16 passes
    over the data are left, draws that see some of the rows each.
    """
    is_much = 64 * problem.num_rows * held_density.dim > 2**31
    if work is not None and problem.is_bnn and is_much and work.passes(problem.num_rows) < 64:
        with _bar(work) as watch:
            return _evaluate_within(problem, held_density, approximation, elbo, theta, work, watch)
    max_draws = max(16, min(_MAX_ELBO_DRAWS, 2**31 // max(problem.num_rows * held_density.dim, 1)))
    values = torch.empty(
        0,
        dtype=torch.float64,
        device=theta.device,
    )
    kl = _exact_kl(problem, elbo, theta)
    while len(values) < max_draws:
        num_draws = min(draws_per_block(held_density.dim), max(64, max_draws - len(values)))
        z = held_density.unconstrain(approximation.sample(num_draws))
        parts = log_parts(problem, held_density, z)
        block_values = parts.log_likelihood
        if not elbo.exact_kl:
            log_q = approximation.log_prob(held_density.constrain(z)).double()
            block_values = block_values + parts.log_prior - log_q
        values = torch.cat([values, block_values])
        error = float(values.std()) / math.sqrt(len(values))
        if len(values) >= 256 and error < _ELBO_ERROR:
            break
    return float(values.mean()) - kl, error


def _bar(work: Work) -> AbstractContextManager[Watch]:
    """The bar over what follows a training, in percent."""
    return Watch(
        100,
        "SVI: its ELBO on all data",
        (),
        work.progress,
        finished="evaluated",
        metrics=(),
    )


def _exact_kl(problem: Problem, elbo: Elbo, theta: Tensor) -> float:
    """The KL where it depends on no draw, else 0; of a net by two rows, for the likelihood is not asked for."""
    if not elbo.exact_kl:
        return 0.0
    no_key = torch.zeros(
        (),
        dtype=torch.int64,
        device=theta.device,
    )
    data = (problem.x[:2], problem.y[:2]) if problem.is_bnn else ()
    return float(elbo.parts(theta, no_key, *data).kl)


def _evaluate_within(
    problem: Problem,
    held_density: Density,
    approximation: Approximation,
    elbo: Elbo,
    theta: Tensor,
    work: Work,
    watch: Watch,
) -> tuple[float, float]:
    r"""As :func:`evaluate_elbo`, within a tenth of the training's work.

    Two draws at each of B batches: with the variance w of two draws at one batch, v of the batches' means, and the
    share s of all rows that was seen, the squared error is :math:`w / 2B + (1 - s)\, v / B`.
    """
    num_pairs = max(8, work.allowed_rows // (2 * work.batch_size))
    pairs = []
    num_seen = 0
    for x, y in itertools.islice(_some_batches(problem, work.batch_size), num_pairs):
        z = held_density.unconstrain(approximation.sample(2))
        values = _scaled_likelihood(problem, held_density, z, x, y)
        if not elbo.exact_kl:
            log_prior = at_each(lambda draw: held_density.log_parts(draw, x[:2], y[:2])[0], z)  # noqa: B023
            log_q = approximation.log_prob(held_density.constrain(z)).double()
            values = values + log_prior - log_q
        pairs.append(values)
        num_seen += len(x)
        if watch.active:
            watch.tell(min(99, 100 * len(pairs) // num_pairs), {})
    if watch.active:
        watch.tell(100, {})
    terms = torch.stack(pairs)
    variance_of_draws = float(terms.var(1).mean()) / (2 * len(terms))
    variance_of_rows = float(terms.mean(1).var()) / len(terms) if len(terms) > 1 else math.nan
    unseen = max(0.0, 1.0 - num_seen / problem.num_rows)
    error = math.sqrt(variance_of_draws + unseen * variance_of_rows)
    return float(terms.mean()) - _exact_kl(problem, elbo, theta), error


def _some_batches(problem: Problem, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Batches of one epoch after another; rows in memory in the same order at every call, to compare guides by."""
    if problem.loader is not None:
        yield from problem.batches()
        return
    random = generator(0)
    while True:
        order = torch.randperm(problem.num_rows, generator=random).to(problem.device)
        for rows in order.split(size):
            if len(rows) == size or size > problem.num_rows:
                yield problem.x[rows], problem.y[rows]


def _scaled_likelihood(
    problem: Problem,
    held_density: Density,
    z: Tensor,
    x: Tensor,
    y: Tensor,
) -> Tensor:
    """Log likelihood (draws,) of a batch, scaled to all rows; draw by draw, as in a step of the training."""

    def log_likelihood_at(draw: Tensor) -> Tensor:
        return held_density.log_likelihood(draw, x, y).sum(dtype=torch.float64)

    return at_each(log_likelihood_at, z, at_once=1) * (problem.num_rows / len(x))


class LogParts(NamedTuple):
    """What the log joint is the sum of, of the whole data; each (draws,), float64."""

    log_prior: Tensor
    log_likelihood: Tensor


def log_parts(problem: Problem, held_density: Density, z: Tensor) -> LogParts:
    """Log prior and log likelihood, (draws,), of the whole data, streamed; masks and factors as in the log joint.

    In blocks of draws, and of a net whose layers are wide in blocks of rows too.
    """
    # one block holds about 2^24 outputs of the widest layer
    has_rows = isinstance(problem.x, Tensor) and problem.x.dim() > 0
    per_row = 64
    if problem.is_bnn:
        per_row = max(64, widest_layer(problem.bnn, problem.x[:2]))
    per_draw = max(1, len(problem.x) * per_row) if has_rows else 1
    block = max(1, min(draws_per_block(held_density.dim), 2**24 // per_draw))
    if problem.loader is None and problem.is_bnn and per_draw > 2**24:
        return _log_parts_by_rows(problem, held_density, z, max(1, 2**22 // per_row))
    log_prior, log_likelihood = at_each(held_density.log_parts, z, at_once=block)
    if problem.loader is None:
        return LogParts(log_prior, log_likelihood)

    def log_likelihood_of(x: Tensor, y: Tensor) -> Tensor:
        # log_parts would scale every batch to the whole data set
        def log_likelihood_at(draw: Tensor) -> Tensor:
            return held_density.log_likelihood(draw, x, y).sum(dtype=torch.float64)

        return at_each(log_likelihood_at, z, at_once=block)

    total = torch.zeros(
        len(z),
        dtype=torch.float64,
        device=problem.device,
    )
    num_rows = 0
    for x, y in problem.one_pass():
        total = total + log_likelihood_of(x, y)
        num_rows = num_rows + len(x)
    # a pass need not show all N data, nor each of them once
    return LogParts(log_prior, total * (problem.num_rows / num_rows))


def _log_parts_of_rows(
    held_density: Density,
    x: Tensor,
    y: Tensor,
    draw: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log prior and log likelihood of one draw on some rows."""
    return held_density.log_parts(draw, x, y)


def _log_parts_by_rows(
    problem: Problem,
    held_density: Density,
    z: Tensor,
    size: int,
) -> LogParts:
    """Log prior and log likelihood (draws,), a draw and ``size`` rows at a time."""
    log_prior = z.new_zeros(len(z), dtype=torch.float64)
    log_likelihood = torch.zeros_like(log_prior)
    for x, y in zip(
        row_parts(problem.x, size),
        row_parts(problem.y, size),
        strict=True,
    ):
        parts_of_rows = partial(_log_parts_of_rows, held_density, x, y)
        log_prior, scaled = at_each(parts_of_rows, z, at_once=1)
        # the program scales the likelihood of its rows to all of them
        log_likelihood = log_likelihood + scaled * (len(x) / len(problem.x))
    return LogParts(log_prior, log_likelihood)


@torch.no_grad()
def importance_stats(
    problem: Problem,
    held_density: Density,
    approximation: Approximation,
    draws: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """log p and log q of the draws in constrained space, both (1, draw)."""
    z = held_density.unconstrain({site.name: draws[site.name] for site in held_density.sites})
    with kept(problem.device):  # a loader draws its order
        parts = log_parts(problem, held_density, z[0])
    return {
        "log_p": (parts.log_prior + parts.log_likelihood)[None],
        "log_q": approximation.log_prob(draws).double(),
    }


def elbo_findings(value: float, error: float, track: Tensor | None) -> list[Finding]:
    """A finding where the ELBO is not a number, or lies below what the fit had on the way.

    ``track`` is the noisy ELBO of every step, None of a tempered fit, whose end is not its best. What the fit surely
    had is the best mean of a twentieth of the steps less five standard errors. The last iterate is one step: it may lie
    the spread of single steps below, and a nat does not matter.
    """
    values = {"elbo": value, "error": error}
    if not (math.isfinite(value) and math.isfinite(error)):
        return [Finding("elbo_not_finite", values)]
    if track is None or len(track) < 20:
        return []
    width = max(20, len(track) // 20)
    windows = track[: len(track) - len(track) % width].double().reshape(-1, width)
    spreads = windows.std(1)
    reached = windows.mean(1) - 5.0 * spreads / math.sqrt(width)
    best = int(reached.argmax())
    if value + 5.0 * error < float(reached[best] - spreads[best]) - 1.0:
        return [Finding("elbo_below_best", values | {"best": float(reached[best])})]
    return []
