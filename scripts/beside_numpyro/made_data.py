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


def gaussian_process(rng: np.random.Generator) -> Data:
    """50 noisy values of a smooth function."""
    x = np.sort(rng.uniform(-2.0, 2.0, size=50))
    cov = 0.8**2 * np.exp(-0.5 * (x[:, None] - x) ** 2 / 0.9**2) + 1e-8 * np.eye(50)
    return x, np.linalg.cholesky(cov) @ rng.normal(size=50) + 0.25 * rng.normal(size=50)


def dawid_skene(rng: np.random.Generator) -> Data:
    """Labels of 100 items of three classes by five annotators, of whom the last errs often."""
    kinds = rng.choice(3, size=100, p=[0.5, 0.3, 0.2])
    right = np.array([0.9, 0.8, 0.75, 0.7, 0.5])
    is_right = rng.random((100, 5)) < right
    wrong = (kinds[:, None] + rng.integers(1, 3, size=(100, 5))) % 3
    return None, np.where(is_right, kinds[:, None], wrong)


def item_response(rng: np.random.Generator) -> Data:
    """Answers of 100 persons to fifteen items."""
    ability = rng.normal(size=(100, 1))
    difficulty = rng.normal(size=15)
    slope = rng.lognormal(0.0, 0.4, size=15)
    chance = 1 / (1 + np.exp(-slope * (ability - difficulty)))
    return None, (rng.random((100, 15)) < chance).astype(float)


def gaussian_mixture(rng: np.random.Generator) -> Data:
    """200 values of three normals."""
    component = rng.choice(3, size=200, p=[0.3, 0.45, 0.25])
    means = np.array([-2.5, 0.0, 2.8])[component]
    return None, means + np.array([0.5, 0.7, 0.4])[component] * rng.normal(size=200)


def areal_counts(rng: np.random.Generator) -> Data:
    """Neighbours of the 36 cells of a grid, and a count of each cell."""
    rows, columns = np.divmod(np.arange(36), 6)
    distance = abs(rows[:, None] - rows) + abs(columns[:, None] - columns)
    neighbours = (distance == 1).astype(float)
    precision = (np.diag(neighbours.sum(1)) - 0.85 * neighbours) / 0.7**2
    effect = np.linalg.solve(np.linalg.cholesky(precision).T, rng.normal(size=36))
    return neighbours, rng.poisson(np.exp(1.5 + effect)).astype(float)


def seasonal_series(rng: np.random.Generator) -> Data:
    """96 months."""
    month = np.arange(96.0)
    angle = 2 * np.pi * month / 12
    level = 1.0 + np.cumsum(0.1 * rng.normal(size=96))
    season = 0.9 * np.sin(angle) - 0.5 * np.cos(angle) + 0.3 * np.sin(2 * angle)
    return month, level + season + 0.4 * rng.normal(size=96)


def overdispersed_counts(rng: np.random.Generator) -> Data:
    """200 counts in twelve groups of unequal size; the second column has the group."""
    groups = rng.choice(12, size=200, p=rng.dirichlet(np.full(12, 5.0)))
    values = rng.normal(size=200)
    rate = np.exp(rng.normal(1.0, 0.6, size=12)[groups] + 0.5 * values)
    return np.stack([values, groups], -1), rng.poisson(rng.gamma(3.0, rate / 3.0)).astype(float)


def wide_logistic(rng: np.random.Generator) -> Data:
    """300 rows of forty columns, correlated by a common factor."""
    x = 0.5 * rng.normal(size=(300, 1)) + rng.normal(size=(300, 40))
    logits = -0.4 + x @ rng.normal(0.0, 0.4, size=40)
    return x, (rng.random(300) < 1 / (1 + np.exp(-logits))).astype(float)


def censored_survival(rng: np.random.Generator) -> Data:
    """150 times, of which those behind the end of the study are cut there; the third column says which ended."""
    inputs = rng.normal(size=(150, 2))
    times = np.exp(1.0 + inputs @ np.array([0.6, -0.3])) * rng.weibull(1.5, size=150)
    end = rng.uniform(1.0, 6.0, size=150)
    return np.c_[inputs, times <= end], np.minimum(times, end)


def ordinal_regression(rng: np.random.Generator) -> Data:
    """200 grades of five."""
    x = rng.normal(size=(200, 3))
    latent = x @ np.array([1.2, -0.7, 0.0]) + rng.logistic(size=200)
    return x, (latent[:, None] > np.array([-2.0, -0.6, 0.5, 1.8])).sum(-1)


def eight_schools(rng: np.random.Generator) -> Data:
    """Standard errors and effects of Rubin (1981), as they were published."""
    errors = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    return errors, np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])


def missing_inputs(rng: np.random.Generator) -> Data:
    """120 rows of three columns; 25 values of the first are missing."""
    x = rng.normal(size=(120, 3))
    x[:, 0] = 0.5 + 0.8 * x[:, 0]
    y = x @ np.array([1.0, -0.5, 0.3]) + 0.5 * rng.normal(size=120)
    x[rng.choice(120, 25, replace=False), 0] = np.nan
    return x, y


def change_point(rng: np.random.Generator) -> Data:
    """100 yearly counts whose rate falls after 40."""
    return None, rng.poisson(np.where(np.arange(100) < 40, 3.0, 1.2)).astype(float)


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
        gaussian_process,
        dawid_skene,
        item_response,
        gaussian_mixture,
        areal_counts,
        seasonal_series,
        overdispersed_counts,
        wide_logistic,
        censored_survival,
        ordinal_regression,
        eight_schools,
        missing_inputs,
        change_point,
    )
}


def made(name: str) -> Data:
    """The data of one program, always the same; floats of 32 bits."""
    x, y = MAKERS[name](np.random.default_rng(SEED))
    single = None if x is None else x.astype(np.float32)
    return single, y if y.dtype.kind == "i" else y.astype(np.float32)
