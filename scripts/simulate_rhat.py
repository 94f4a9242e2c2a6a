"""The R-hat of chains that have converged: what simulated ones have, beside the formula that verdicts rest on.

    python scripts/simulate_rhat.py

Autoregressive chains of known correlation time; one line a length, with the median, 99 % and 99.9 % quantiles of the
rank-normalised R-hat, simulated and by the formula, and those of the smaller of bulk and tail ESS over its true value:
of one quantity, and of the one out of 40 that has the smallest.
"""

from __future__ import annotations

import arviz_stats
import numpy as np

from pyrobnn.chains import rhat as rank_rhat
from pyrobnn.diagnostics.thresholds import rhat_limit

#: chains, draws of each, correlation from draw to draw
LENGTHS = [
    (4, 50, 0.0), (4, 100, 0.0), (4, 200, 0.0), (4, 1000, 0.0), (4, 200, 1 / 3), (4, 200, 0.5), (4, 1000, 0.5),
    (4, 1000, 0.8),
    (2, 500, 0.0), (16, 50, 0.0), (32, 50, 0.0),
]  # fmt: skip
NUM_QUANTITIES, NUM_JUDGED = 2000, 40


def autoregressive(rng: np.random.Generator, shape: tuple[int, int, int], kept: float) -> np.ndarray:
    """Stationary chains (chain, draw, quantity) of sd 1 and correlation `kept` from draw to draw."""
    draws = rng.normal(size=shape)
    for draw in range(1, shape[1]):
        draws[:, draw] = kept * draws[:, draw - 1] + np.sqrt(1 - kept**2) * draws[:, draw]
    return draws


def main() -> None:
    rng = np.random.default_rng(0)
    for num_chains, num_draws, kept in LENGTHS:
        draws = autoregressive(rng, (num_chains, num_draws, NUM_QUANTITIES), kept)
        rhat, time = rank_rhat(np.moveaxis(draws, 2, 0)), (1 + kept) / (1 - kept)
        pairs = [
            f"{np.quantile(rhat, 1 - rate):.4f} {rhat_limit(num_chains, num_draws, time, 1, rate):.4f}"
            for rate in (0.5, 1e-2, 1e-3)
        ]
        axes = {"chain_axis": 0, "draw_axis": 1}
        bulk = np.asarray(arviz_stats.ess(draws, method="bulk", **axes))
        tail = np.asarray(arviz_stats.ess(draws, method="tail", prob=(0.05, 0.95), **axes))
        ratio = np.fmin(bulk, tail) * time / (num_chains * num_draws)
        effective = " ".join(f"{np.quantile(ratio, rate):.2f}" for rate in (1e-3, 1e-2, 0.5))
        smallest = ratio.reshape(-1, NUM_JUDGED).min(1)
        of_many = " ".join(f"{np.quantile(smallest, rate):.2f}" for rate in (0.05, 0.5))
        print(
            f"{num_chains:2} x {num_draws:4}, {kept}: R-hat {', '.join(pairs)}; ESS/true {effective}; "
            f"smallest of {NUM_JUDGED}, 5 % and 50 %: {of_many}"
        )


if __name__ == "__main__":
    main()
