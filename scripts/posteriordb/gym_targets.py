"""Data of the targets of inference-gym, and the second and fourth moments of their coordinates."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: our sites that the wheel has moments of, and its names of them
SITES = {
    "item_response": {
        "mean": "MEAN_STUDENT_ABILITY",
        "ability": "CENTERED_STUDENT_ABILITY",
        "difficulty": "QUESTION_DIFFICULTY",
    },
    "stochastic_volatility": {
        "mean": "MEAN_LOG_VOLATILITY",
        "scale": "WHITE_NOISE_SHOCK_SCALE",
        "persistence": "PERSISTENCE_OF_VOLATILITY",
        "log_variance": "LOG_VOLATILITY",
    },
}


@dataclass(frozen=True)
class Target:
    """Inputs and outcomes of a program, either of which may be none, and E[z²] and E[z⁴] of each coordinate z."""

    x: np.ndarray | None
    y: np.ndarray | None
    square: np.ndarray
    fourth: np.ndarray


def target(wheel: Path, program: str) -> Target:
    """The target of a program, by the data and moments of inference-gym's unpacked wheel."""
    folder = wheel / "inference_gym"
    if program == "banana":
        return Target(None, None, np.array([100.0, 19.0]), np.array([30_000.0, 4971.0]))
    if program == "brownian":
        return _brownian(folder)
    return _item_response(folder) if program == "item_response" else _stochastic_volatility(folder)


def _brownian(folder: Path) -> Target:
    name = "brownian_motion_missing_middle_observations"
    path = _variables(folder / "internal" / "datasets" / name)["OBSERVED_LOC"]
    x = np.flatnonzero(np.isfinite(path))
    y = path[np.isfinite(path)]
    return Target(x, y, *brownian_moments(x, y))


def _item_response(folder: Path) -> Target:
    name = "synthetic_item_response_theory"
    data = _variables(folder / "internal" / "datasets" / name)
    x, y = np.zeros((2, 400, 100))
    x[data["STUDENT_IDS"], data["QUESTION_IDS"]] = 1.0
    y[data["STUDENT_IDS"], data["QUESTION_IDS"]] = data["CORRECT"]
    return Target(x, y, *_moments_of_sites(folder, name, "item_response"))


def _stochastic_volatility(folder: Path) -> Target:
    prices = _variables(folder / "internal" / "datasets" / "sp500_closing_prices")["CLOSING_PRICES"]
    returns = np.diff(prices)
    truth = _moments_of_sites(folder, "stochastic_volatility_sp500", "stochastic_volatility")
    return Target(None, returns - returns.mean(), *truth)


def _variables(module: Path) -> dict[str, np.ndarray]:
    """What a module of the wheel defines."""
    return runpy.run_path(f"{module}.py")


def _moments_of_sites(folder: Path, name: str, program: str) -> tuple[np.ndarray, np.ndarray]:
    """E[z²] and E[z⁴] by the means and sds that the wheel has, as of normals."""
    truth = _variables(folder / "targets" / "ground_truth" / name)
    sites = SITES[program].values()
    mean = np.hstack([truth[f"IDENTITY_{site}_MEAN"].ravel() for site in sites])
    sd = np.hstack([truth[f"IDENTITY_{site}_STANDARD_DEVIATION"].ravel() for site in sites])
    return of_normal(mean, sd**2)


def of_normal(mean: np.ndarray, var: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E[z²] and E[z⁴] of a normal."""
    return mean**2 + var, mean**4 + 6 * mean**2 * var + 3 * var**2


def brownian_moments(x: np.ndarray, y: np.ndarray) -> Iterator[np.ndarray]:
    """Exact E[z²] and E[z⁴] of each coordinate: the path is a normal given the scales, which a grid sums over."""
    k = np.minimum.outer(np.arange(1.0, 31), np.arange(1.0, 31))
    w, vectors = np.linalg.eigh(k[np.ix_(x, x)])
    z = vectors.T @ y
    a = k[:, x] @ vectors
    step = np.exp(np.linspace(-12, 3, 301))[:, None, None]
    noise = np.exp(np.linspace(-24, 4, 561))[:, None]
    var = step * w + noise
    log_p = (
        -0.5 * (np.log(var) + z**2 / var).sum(-1)
        - (np.log(step) ** 2 + np.log(noise) ** 2)[..., 0] / 32
    )
    p = np.exp(log_p - log_p.max())
    path = of_normal(step * (z / var @ a.T), step * k.diagonal() - step**2 * (1 / var @ (a**2).T))
    for power, of_path in enumerate(path, 1):
        scales = [(p / p.sum() * scale[..., 0] ** power).sum() for scale in (step, noise)]
        yield np.array([*scales, *np.einsum("ab,abi->i", p / p.sum(), of_path)])
