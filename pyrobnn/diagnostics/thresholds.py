"""The thresholds that verdicts rest on, each with its source."""

from __future__ import annotations

from math import log10, sqrt

from scipy import stats

RHAT_PASS = 1.01
RHAT_FAIL = 1.05
#: rates at which chains that have converged may exceed the limits of R-hat (`rhat_limit`)
RHAT_FALSE_WARN = 5e-3
RHAT_FALSE_FAIL = 1e-4
RHAT_SOURCE = "Rank-normalization, folding, and localization: an improved R-hat (Vehtari et al., 2021) https://doi.org/10.1214/20-BA1221"

NESTED_RHAT_SOURCE = (
    "Nested R-hat: assessing the convergence of MCMC when running many short chains "
    "(Margossian et al., 2024) https://doi.org/10.1214/24-BA1453"
)

#: gap between the means of two groups of chains, in within-chain sd: this library's convention
MODES_FAIL = 3.0

ESS_PASS = 400.0
ESS_FAIL = 100.0
#: by which the smallest of dozens of estimates may fall short of 400 that are there, in one run of twenty: of 40
#: quantities the smaller of bulk and tail comes out as 285 in the median and 207 in 5 % (scripts/simulate_rhat.py)
ESS_ERROR = 0.5
ESS_SOURCE = RHAT_SOURCE

BFMI_PASS = 0.3
BFMI_FAIL = 0.2
BFMI_SOURCE = "Diagnosing suboptimal cotangent disintegrations in HMC (Betancourt, 2016) https://arxiv.org/abs/1604.00695"

DIVERGENCE_FAIL = 0.01
HMC_SOURCE = (
    "A conceptual introduction to Hamiltonian Monte Carlo (Betancourt, 2017) https://arxiv.org/abs/1701.02434"
)
TREE_DEPTH_WARN = 0.05
ACCEPTANCE_WARN = 0.6
ACCEPTANCE_SOURCE = "Optimizing the integrator step size for HMC (Betancourt, Byrne & Girolami, 2014) https://arxiv.org/abs/1411.6669"

STILL_WARN = 0.25
#: share of a chain's draws that may occur elsewhere, correlation of two chains' moves, and share of the held-out rows
#: that may be training rows: this library's convention
REPEATS_WARN = 0.02
COPY_CORRELATION = 0.9
LEAK_WARN = 0.02
LEAK_FAIL = 0.5

DIMENSION_SOURCE = "Maximum likelihood estimation of intrinsic dimension (Levina & Bickel, 2004) https://papers.nips.cc/paper/2577"

#: steps between the values of draws, in their sd, and nats per datum that a log-likelihood may be off: this library's
#: convention
GRID_WARN = 0.2
GRID_FAIL = 0.5
LIKELIHOOD_OFF_WARN = 0.1
LIKELIHOOD_OFF_FAIL = 0.3

#: times the gain that may be left at the end of a search: this library's convention
UNFINISHED_FAIL = 10.0

PARETO_K = 0.7
PARETO_SOURCE = (
    "Pareto smoothed importance sampling (Vehtari et al., 2024) https://jmlr.org/papers/v25/19-556.html"
)
APPROXIMATION_SOURCE = "Yes, but did it work? Evaluating variational inference (Yao et al., 2018) https://arxiv.org/abs/1802.02538"
LOO_SOURCE = "Practical Bayesian model evaluation using LOO (Vehtari, Gelman & Gabry, 2017) https://doi.org/10.1007/s11222-016-9696-4"
LOO_APPROXIMATE_SOURCE = "Bayesian leave-one-out cross-validation for large data (Magnusson et al., 2019) https://arxiv.org/abs/1904.10679"
LOO_SUBSAMPLE_FROM = 50_000
LOO_SUBSAMPLE_SIZE = 1_000

#: rates of false alarms, and the sizes below which an effect is too small to matter: this library's convention
PIT_WARN = 2e-3
PIT_FAIL = 1e-4
PIT_RATES = PIT_WARN, PIT_FAIL
PIT_DISTANCE_WARN = 0.05
PIT_DISTANCE_FAIL = 0.1
PIT_SOURCE = "Probabilistic forecasts, calibration and sharpness (Gneiting et al., 2007) https://doi.org/10.1111/j.1467-9868.2007.00587.x"
LOO_PIT_SOURCE = "Visualization in Bayesian workflow (Gabry et al., 2019) https://doi.org/10.1111/rssa.12378"
#: share of the data whose k-hat may be too large before their PIT says nothing
LOO_PIT_UNRELIABLE = 0.1
COVERAGE_SIGMAS = 3.0
COVERAGE_GAP_WARN = 0.02
COVERAGE_GAP_FAIL = 0.15
COVERAGE_SIGMAS_FAIL = 5.0
#: difference of the mean PIT between regions, and correlation of neighbouring PIT: this library's convention
PATTERN_WARN = 0.15
PATTERN_FAIL = 0.35
#: difference of the coverage of 90 % intervals between two regions: this library's convention
REGION_GAP_WARN = 0.125
REGION_GAP_FAIL = 0.25
ECE_SOURCE = "On calibration of modern neural networks (Guo et al., 2017) https://arxiv.org/abs/1706.04599"

STEIN_SOURCE = (
    "Measuring sample quality with Stein's method (Gorham & Mackey, 2015) https://arxiv.org/abs/1506.03039"
)
#: rates of false alarms; log of the variance's factor, and sd of the gradient, that matter: this library's convention
STEIN_RATE_WARN = 1e-3
STEIN_RATE_FAIL = 1e-5
STEIN_RATES = STEIN_RATE_WARN, STEIN_RATE_FAIL
VIRIAL_WARN = 0.15
VIRIAL_FAIL = 0.4
SCORE_WARN = 0.3
SCORE_FAIL = 0.6

#: shift of the log density's mean in its sd, log of the factor of its sd, standard errors: this library's convention
DENSITY_SHIFT_WARN = 0.3
DENSITY_SHIFT_FAIL = 1.0
DENSITY_SPREAD_WARN = 0.2
DENSITY_SPREAD_FAIL = 0.5
DENSITY_SIGMAS_WARN = 3.5
DENSITY_SIGMAS_FAIL = 5.0
#: share of the moved draws that may leave the range of all draws: this library's convention
RANGE_WARN = 0.05
RANGE_FAIL = 0.15
MOVES_SOURCE = "MCMC using Hamiltonian dynamics (Neal, 2011) https://arxiv.org/abs/1206.1901"

PSENSE_WARN = 0.05
#: times its noise floor that a sensitivity must reach, at which share of the train probes: this library's convention
PSENSE_FLOORS = 1.5
PSENSE_SHARE = 0.5
#: tail probability of the prior that the posterior median of the noise may have: this library's convention
NOISE_TAIL_WARN = 0.005
PSENSE_SOURCE = "Detecting and diagnosing prior and likelihood sensitivity with power-scaling (Kallioinen et al., 2024) https://doi.org/10.1007/s11222-023-10366-5"
TEMPERATURE_SOURCE = "How good is the Bayes posterior in deep neural networks really? (Wenzel et al., 2020) https://arxiv.org/abs/2002.02405"
COLLAPSE_SOURCE = "Overpruning in variational Bayesian neural networks (Trippe & Turner, 2018) https://arxiv.org/abs/1801.06230"
#: sd as a share of the prior's below which a weight is a point, and the share of a site's weights that may be:
#: this library's convention
COLLAPSED_SD = 1e-4
SITE_SHARE = 0.5
#: effective parameters below which draws are one point: this library's convention
EFFECTIVE_WARN = 0.05
WAIC_SOURCE = "Understanding predictive information criteria for Bayesian models (Gelman, Hwang & Vehtari, 2014) https://doi.org/10.1007/s11222-013-9416-2"
IN_BETWEEN_SOURCE = (
    "In-between uncertainty in Bayesian neural networks (Foong et al., 2019) https://arxiv.org/abs/1906.11537"
)
POSTERIOR_CLAIM_SOURCE = "What are Bayesian neural network posteriors really like? (Izmailov et al., 2021) https://arxiv.org/abs/2104.14421"

#: nats by which a held-out log density may fall behind the reference's whatever its error: this library's convention
ELPD_WARN = 4.0
WASSERSTEIN_PASS = 0.25
WASSERSTEIN_FAIL = 1.0
SD_RATIO_PASS = 0.8
SD_RATIO_FAIL = 0.5
AGREEMENT_PASS = 0.95
AGREEMENT_FAIL = 0.8
TOTAL_VARIATION_PASS = 0.05
TOTAL_VARIATION_FAIL = 0.2
FIDELITY_SOURCE = POSTERIOR_CLAIM_SOURCE + "; the threshold is this library's convention"


def rhat_limit(num_chains: int, num_draws: int, time: float, count: int, level: float) -> float:
    r"""The R-hat that the largest of `count` exceeds at the rate `level` although the chains have converged.

    .. math:: \hat R^2 = 1 + \frac{\tau F - 1}{n / 2}, \qquad F \sim F_{2m - 1,\ 2m (n / 2 \tau - 1)}

    for the split halves of m chains of n draws, each worth 1/τ of an independent one; both of R-hat's ranks, bulk and
    tail, count as quantities. Simulated chains agree to 0.002 at 50 draws (scripts/simulate_rhat.py).

    >>> round(rhat_limit(4, 1000, 1.0, 50, 5e-3), 3), round(rhat_limit(4, 50, 1.0, 50, 5e-3), 3)
    (1.004, 1.074)
    """
    half = max(num_draws // 2, 2)
    freedom = 2 * num_chains - 1, max(2 * num_chains * (half / time - 1.0), 1.0)
    largest = float(stats.f.isf(level / (2 * count), *freedom))
    return sqrt(max(1.0, 1.0 + (time * largest - 1.0) / half))


def good_k(num_draws: int) -> float:
    """Largest Pareto k-hat at which `num_draws` importance draws still give a reliable estimate.

    min(1 − 1/log10 S, 0.7), equation 13 of Vehtari et al. (2024).

    >>> round(good_k(4000), 2), round(good_k(200), 2)
    (0.7, 0.57)
    """
    if num_draws < 2:
        return 0.0
    return max(0.0, min(1.0 - 1.0 / log10(num_draws), PARETO_K)) if num_draws > 10 else 0.0
