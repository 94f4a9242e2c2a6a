"""Where the limits of the checks come from: title, authors, year and address."""

from __future__ import annotations

RHAT = "Rank-normalization, folding, and localization: an improved R-hat (Vehtari et al., 2021) https://doi.org/10.1214/20-BA1221"
HMC = "A conceptual introduction to Hamiltonian Monte Carlo (Betancourt, 2017) https://arxiv.org/abs/1701.02434"
BFMI = "Diagnosing suboptimal cotangent disintegrations in HMC (Betancourt, 2016) https://arxiv.org/abs/1604.00695"
CLAIM = "What are Bayesian neural network posteriors really like? (Izmailov et al., 2021) https://arxiv.org/abs/2104.14421"
VARIATIONAL = "Yes, but did it work? Evaluating variational inference (Yao et al., 2018) https://arxiv.org/abs/1802.02538"
STEIN = "Measuring sample quality with Stein's method (Gorham & Mackey, 2015) https://arxiv.org/abs/1506.03039"
MOVES = "MCMC using Hamiltonian dynamics (Neal, 2011) https://arxiv.org/abs/1206.1901"
PIT = "Probabilistic forecasts, calibration and sharpness (Gneiting et al., 2007) https://doi.org/10.1111/j.1467-9868.2007.00587.x"
LOO_PIT = (
    "Visualization in Bayesian workflow (Gabry et al., 2019) https://doi.org/10.1111/rssa.12378"
)
LOO = "Practical Bayesian model evaluation using LOO (Vehtari, Gelman & Gabry, 2017) https://doi.org/10.1007/s11222-016-9696-4"
ECE = "On calibration of modern neural networks (Guo et al., 2017) https://arxiv.org/abs/1706.04599"
OWN = "this library's convention"
