"""Simulation-based calibration: a method is right on average if prior draws rank uniformly among posterior draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from pyrobnn.inference.fitting.problem import make_posterior, prepare
from pyrobnn.inference.hmc.metric import form_of
from pyrobnn.inference.hmc.run import Run
from pyrobnn.inference.method import Method
from pyrobnn.inference.nuts import NUTS
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.datatree import log_densities, prior_posterior

_MIN_PER_BIN = 5
_MAX_BINS = 20
_NUM_SIMULATED = 2000


@dataclass(frozen=True, eq=False)
class Uniformity:
    """How uniform the ranks of one quantity are.

    Args:
        p_value: Of the χ² test over `num_bins` bins of equal width.
        num_bins: Bins of the test, with at least five expected ranks in each.
        grid: Evaluation points in (0, 1].
        difference: ECDF of the ranks minus its expectation, at `grid`.
        low, high: Simultaneous 95 % band of the difference.
        outside: Whether the difference leaves the band anywhere.
    """

    p_value: float
    num_bins: int
    grid: np.ndarray
    difference: np.ndarray
    low: np.ndarray
    high: np.ndarray
    outside: bool


def replicate(
    model: BNN,
    method: Method,
    x: Tensor,
    probe_x: Tensor,
    *,
    num_draws: int,
    num_ranked: int = 99,
    seed: int = 0,
) -> dict[str, int]:
    r"""One replication: θ* from the prior, y from the likelihood, a fit, and the rank of θ* among its draws.

    .. math:: \theta^* \sim p(\theta), \quad y \sim p(y \mid \theta^*), \quad
        r_g = \sum_{l=1}^{L} 1[g(\theta_l) < g(\theta^*)], \quad \theta_l \sim q(\theta \mid y)

    Weights are not identified, so the quantities g are the function at each probe (and output), the noise where it is
    inferred, and the log joint density, which sees errors in the overall scale that no single quantity shows.

    Args:
        model: Its net, prior and likelihood define the simulation; parameters hidden from the prior stay as they are.
        method: A method with ``fit``.
        x: Inputs (N, feature) at which y is simulated.
        probe_x: Inputs (probe, feature) at which the function is ranked.
        num_draws: Draws per chain.
        num_ranked: L, the evenly spaced draws of all chains that ranks are taken among; draw so many that these are
            nearly independent.
        seed: Of the simulation and of the fit.

    Returns:
        Quantity → rank in 0 … L. Ties are broken at random.

    Raises:
        ValueError: If the method returns fewer than `num_ranked` draws.

    References:
        Validating Bayesian inference algorithms with simulation-based calibration (Talts et al., 2018)
        https://arxiv.org/abs/1804.06788
    """
    truth, y = simulate(model, x, seed)
    posterior = method.fit(
        model,
        x,
        y,
        num_draws=num_draws,
        seed=seed + 2,
    )
    return rank(truth, posterior, x, y, probe_x, num_ranked, seed)


def simulate(model: BNN, x: Tensor, seed: int) -> tuple[Posterior, Tensor]:
    """Parameters drawn from the prior, as a posterior of one draw, and targets (N, out) drawn from the likelihood."""
    truth = prior_posterior(model, 1, seed)
    return truth, model.likelihood.targets.observed(truth.predict(x).sample(seed=seed + 1)[0, 0])


def rank(
    truth: Posterior,
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    probe_x: Tensor,
    num_ranked: int,
    seed: int,
) -> dict[str, int]:
    """Ranks of the truth among the draws of a posterior; arguments and result as of :func:`replicate`."""
    total = posterior.num_chains * posterior.num_draws
    if total < num_ranked:
        raise ValueError(
            f"the posterior has {total} draws, fewer than num_ranked={num_ranked}: raise num_draws."
        )
    true_quantities = ranked_quantities(truth, x, y, probe_x)
    quantities = ranked_quantities(posterior, x, y, probe_x)
    keep = np.linspace(0, total - 1, num_ranked).round().astype(int)
    rng = np.random.default_rng(seed)
    ranks = {}
    for name, value in true_quantities.items():
        draws = quantities[name].ravel()[keep]
        truth_value = float(value.ravel()[0])
        ranks[name] = int(
            (draws < truth_value).sum() + rng.integers(0, (draws == truth_value).sum() + 1)
        )
    return ranks


def ranked_quantities(
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    probe_x: Tensor,
) -> dict[str, np.ndarray]:
    """The ranked quantities of a posterior, name → (chain, draw)."""
    # the raw output: a heteroskedastic net's noise is ranked with its mean
    f = posterior.standard_function(probe_x).detach().double().cpu().numpy()
    quantities = {
        f"f{probe}.{output}": f[:, :, probe, output] for probe, output in np.ndindex(*f.shape[2:])
    }
    for name in posterior.bnn.likelihood.own.priors:
        site = posterior.draws[name].detach().double().cpu().numpy()
        columns = site.reshape(*site.shape[:2], -1)
        quantities |= {f"{name}.{index}": columns[:, :, index] for index in range(columns.shape[2])}
    log_prior, log_likelihood = log_densities(posterior, x, y)
    log_joint = log_prior.double() + log_likelihood.double().sum(-1)
    quantities["log_joint"] = log_joint.detach().cpu().numpy()
    return quantities


def uniformity(ranks: np.ndarray, num_ranked: int, *, seed: int = 0) -> Uniformity:
    """χ² test and ECDF-difference band of the ranks of one quantity over replications.

    The simultaneous band is the pointwise binomial one at the level that 95 % of simulated uniform samples stay inside.

    Args:
        ranks: (replication,), integers in 0 … `num_ranked`.
        num_ranked: L.
        seed: Of the simulation of the band.

    Returns:
        The test and the band.

    Raises:
        ValueError: If there are fewer than ten ranks, or one is outside 0 … L.

    References:
        Graphical test for discrete uniformity and its applications (Säilynoja, Bürkner & Vehtari, 2022)
        https://doi.org/10.1007/s11222-022-10090-6

    Example:
        >>> import numpy as np
        >>> even = uniformity(np.repeat(np.arange(100), 2), 99)
        >>> even.p_value > 0.9, even.outside
        (True, False)
        >>> uniformity(np.repeat(np.arange(40, 60), 10), 99).outside
        True
    """
    ranks = np.asarray(ranks)
    if ranks.size < 2 * _MIN_PER_BIN or ranks.min() < 0 or ranks.max() > num_ranked:
        raise ValueError(
            f"expected at least {2 * _MIN_PER_BIN} ranks in 0 … {num_ranked}, got {ranks.size}."
        )
    p_value, num_bins = _chi_square(ranks, num_ranked)
    places = np.linspace(0, num_ranked, min(num_ranked + 1, 50))
    points = np.unique(np.round(places).astype(int))[:-1]
    grid = (points + 1) / (num_ranked + 1)
    tails = _tail_probabilities(ranks.size, grid)
    simulated = np.random.default_rng(seed).integers(
        0,
        num_ranked + 1,
        size=(_NUM_SIMULATED, ranks.size),
    )
    tail_level = np.quantile([_least_tail(sample, points, tails) for sample in simulated], 0.05)
    low = stats.binom.ppf(tail_level / 2, ranks.size, grid) / ranks.size - grid
    high = stats.binom.ppf(1 - tail_level / 2, ranks.size, grid) / ranks.size - grid
    difference = (ranks[:, None] <= points).mean(axis=0) - grid
    outside = bool(_least_tail(ranks, points, tails) < tail_level)
    return Uniformity(p_value, num_bins, grid, difference, low, high, outside)


def _chi_square(ranks: np.ndarray, num_ranked: int) -> tuple[float, int]:
    """The p-value of the χ² test of uniform ranks in 0 … ``num_ranked``, and the number of its bins."""
    num_bins = max(2, min(_MAX_BINS, ranks.size // _MIN_PER_BIN, num_ranked + 1))
    edges = np.round(np.linspace(0, num_ranked + 1, num_bins + 1)).astype(int)
    counts = np.histogram(ranks, bins=edges - 0.5)[0]
    expected = ranks.size * np.diff(edges) / (num_ranked + 1)
    return float(stats.chisquare(counts, expected).pvalue), num_bins


def _tail_probabilities(num_ranks: int, grid: np.ndarray) -> np.ndarray:
    """Two-sided binomial tail probability of every count 0 … ``num_ranks`` (row) at every grid point (column)."""
    counts = np.arange(num_ranks + 1)[:, None]
    lower = stats.binom.cdf(counts, num_ranks, grid)
    upper = stats.binom.sf(counts - 1, num_ranks, grid)
    return 2.0 * np.minimum(lower, upper)


def _least_tail(ranks: np.ndarray, points: np.ndarray, tails: np.ndarray) -> float:
    """Smallest tail probability of the ECDF over the grid."""
    # how many ranks do not exceed each grid point: the row of its tail probability
    counts = np.searchsorted(
        np.sort(ranks),
        points,
        side="right",
    )
    return float(tails[counts, np.arange(points.size)].min())


def fit_batch(
    method: NUTS,
    model: BNN,
    x: Tensor,
    ys: Sequence[Tensor],
    *,
    num_draws: int,
    seed: int = 0,
) -> list[Posterior]:
    """Posteriors by NUTS of one model given each of several sets of targets: their chains are chains of one machine.

    Step size and mass matrix are adapted over the chains of all data sets together, then frozen.

    Args:
        method: NUTS with ``num_chains`` per data set and ``num_warmup``; chains start from the prior.
        model: a BNN.
        x: inputs (N, …) of all data sets.
        ys: targets, each (N, out) or (N,).
        num_draws: draws per chain.
        seed: of starts and of all randomness.
    """
    problems = [prepare(model, x, y, points="held") for y in ys]
    density = problems[0].density
    chains = method.num_chains * len(problems)
    warmup = method.num_warmup or 0
    inputs = torch.stack([problem.x for problem in problems])
    inputs = inputs.repeat_interleave(method.num_chains, 0)
    targets = torch.stack([problem.y for problem in problems])
    targets = targets.repeat_interleave(method.num_chains, 0)
    # each chain has the data of its own set
    batched = torch.func.vmap(torch.func.grad_and_value(density.log_joint))
    form = form_of(method.mass_matrix, is_bnn=True, dim=density.dim)
    with torch.no_grad():
        start = density.sample_prior(chains, seed)
        machine = method.machine(
            lambda z: batched(z, inputs, targets), start, max(num_draws, warmup)
        )
        run = Run(
            machine=machine,
            seed=seed,
            num_warmup=warmup,
            mass_matrix=form,
            compile=method.compile,
        )
        begun = run.begin(start)
        drawn = run.sample(begun, run.prepare(begun), num_draws)
        z = drawn.z.reshape(len(problems), method.num_chains, num_draws, -1)
    return [
        make_posterior(
            problem,
            method,
            density.constrain(draws),
            seed=seed,
            timings={},
        )
        for problem, draws in zip(problems, z, strict=True)
    ]
