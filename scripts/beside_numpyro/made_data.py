"""Data of each program, drawn from its model by known values: name → (x, y), in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray
Data = tuple[Array | None, Array]
SEED = 7


def horseshoe(rng: np.random.Generator) -> Data:
    """100 rows of 20 columns, of which three count."""
    x = rng.normal(size=(100, 20))
    weight = np.zeros(20)
    weight[:3] = 2.0, -1.5, 0.7
    return x, x @ weight + 0.8 * rng.normal(size=100)


def hidden_markov(rng: np.random.Generator) -> Data:
    """60 values of two states, which stay with probability .9 and .8."""
    stay = np.array([0.9, 0.8])
    state = 0
    states = []
    for _ in range(60):
        states.append(state)
        if rng.random() > stay[state]:
            state = 1 - state
    return None, np.array([-1.0, 1.5])[states] + 0.7 * rng.normal(size=60)


def capture_recapture(rng: np.random.Generator) -> Data:
    """Whether each of 150 animals, marked at one of six times, was seen then and at later ones of seven."""
    survival = np.array([0.8, 0.7, 0.6, 0.8, 0.5, 0.7])
    seen = np.zeros((150, 7))
    for animal in seen:
        first = rng.integers(6)
        animal[first] = 1.0
        alive = True
        for time in range(first + 1, 7):
            alive = alive and rng.random() < survival[time - 1]
            animal[time] = float(alive and rng.random() < 0.6)
    return None, seen


def graded_response(rng: np.random.Generator) -> Data:
    """Answers of 100 persons to eight items, in four grades."""
    ability = rng.normal(size=(100, 1))
    slope = rng.lognormal(0.2, 0.3, size=8)
    first = rng.normal(-1.5, 0.4, size=(8, 1))
    cuts = first + np.array([0.0, 1.2, 2.4])
    latent = slope * ability + rng.logistic(size=(100, 8))
    return None, (latent[..., None] > cuts).sum(-1)


def poisson_process(rng: np.random.Generator) -> Data:
    """Counts at 40 times by a rate that rises and falls."""
    x = np.linspace(-2.0, 2.0, 40)
    return x, rng.poisson(np.exp(1.0 + np.sin(2.0 * x))).astype(float)


def zero_inflated(rng: np.random.Generator) -> Data:
    """200 counts; both the rate and the share of structural zeros depend on a column."""
    x = rng.normal(size=200)
    is_zero = rng.random(200) < 1 / (1 + np.exp(1.0 - 0.8 * x))
    return x, np.where(is_zero, 0.0, rng.poisson(np.exp(0.6 + 0.5 * x)))


def autoregression(rng: np.random.Generator) -> Data:
    """100 values of an AR(1), of which 15 are missing."""
    y = np.zeros(100)
    for t in range(1, 100):
        y[t] = 0.5 + 0.7 * y[t - 1] + 0.6 * rng.normal()
    y[rng.choice(np.arange(2, 98), 15, replace=False)] = np.nan
    return None, y


def two_regressions(rng: np.random.Generator) -> Data:
    """150 rows on one of two lines."""
    x = rng.uniform(-2.0, 2.0, size=150)
    first = rng.random(150) < 0.35
    return x, np.where(first, 0.5 - 1.2 * x, -0.3 + 0.9 * x) + 0.4 * rng.normal(size=150)


def stochastic_volatility(rng: np.random.Generator) -> Data:
    """100 returns whose log variance is an AR(1)."""
    log_variance = np.zeros(100)
    for t in range(1, 100):
        log_variance[t] = -0.5 + 0.9 * (log_variance[t - 1] + 0.5) + 0.4 * rng.normal()
    return None, np.exp(log_variance / 2) * rng.normal(size=100)


MAKERS: dict[str, Callable[[np.random.Generator], Data]] = {
    maker.__name__: maker
    for maker in (
        horseshoe,
        hidden_markov,
        capture_recapture,
        graded_response,
        poisson_process,
        zero_inflated,
        autoregression,
        two_regressions,
        stochastic_volatility,
    )
}


def made(name: str) -> Data:
    """The data of one program, always the same; floats of 32 bits."""
    x, y = MAKERS[name](np.random.default_rng(SEED))
    single = None if x is None else x.astype(np.float32)
    return single, y if y.dtype.kind == "i" else y.astype(np.float32)
