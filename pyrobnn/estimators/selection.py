"""What ``method="auto"`` chooses by the log density of rows that are left out, beside that of a linear model."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from scipy.stats import nbinom, skew
from sklearn.linear_model import BayesianRidge, PoissonRegressor
from sklearn.model_selection import KFold, cross_val_predict
from torch import Tensor

from pyrobnn import likelihoods as lk
from pyrobnn.data import Standardizer
from pyrobnn.estimators.comparison import gain, log_density, quiet
from pyrobnn.estimators.fits import RunOptions
from pyrobnn.estimators.members import TabularEnsemble
from pyrobnn.estimators.wide import SHORT_STEPS, Data, Rule, divided, share_of_steps
from pyrobnn.inference.fitting.batches import MAX_WHOLE_ROWS

#: rows, at most, of which rules are tried
MAX_SEARCH_ROWS = 25_000
#: the noise under which few rows are followed, as shares of a linear model's: a small one follows them closely
NOISE_SHARES = (0.1, 0.3, 1.0)


def search_rule(
    data: Data,
    units: Standardizer,
    seconds: float | None,
    seed: int,
    device: torch.device | str | None,
) -> tuple[Rule | None, str]:
    """The rule that predicts left-out rows best, None where none gains on a linear model; and the gain in words.

    Tried on a fifth of the rows, with short training of two members: how closely to follow the data, whether waves
    help, and for counts and skewed positive targets their likelihoods.
    """
    trials = _Trials.of(data, units, seconds, RunOptions(seed=seed, device=device))
    error = trials.linear_error()
    linear_noise = float(np.std(error))
    num_rows, num_features = data[0].shape
    waves = max(1, min(8, 256 // num_features))
    for share in NOISE_SHARES if num_rows <= MAX_WHOLE_ROWS else (1.0,):
        trials.attempt(Rule(waves, share * linear_noise, linear_noise))
    # fast waves, and none
    for change in ({"fastest": 16.0}, {"waves": 0}):
        trials.attempt(trials.best().rule._replace(**change))
    normal = trials.best().rule
    for likelihood in responses(data[1].numpy()):
        trials.attempt(normal._replace(likelihood=likelihood))
    top = trials.best()
    gained, words = gain(top.log_densities, log_density(error, np.mean(error**2)))
    if not gained:
        return None, words
    # normal noise that varies is what the ensemble learns anyway, after the mean
    varies = isinstance(top.rule.likelihood, lk.HeteroskedasticGaussian)
    return normal if varies else top.rule, words


class _Trial(NamedTuple):
    """A rule, and the log densities (N,) of new rows under its short fit."""

    rule: Rule
    log_densities: np.ndarray

    def score(self) -> float:
        return float(self.log_densities.mean())


@dataclass(frozen=True, eq=False)
class _Trials:
    """Short fits of rules to ``rows``, by how they predict new rows: errors and log densities in standard units."""

    rows: Data
    new_rows: Data
    units: Standardizer
    seconds: float | None
    run: RunOptions
    trials: list[_Trial] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(
        cls,
        data: Data,
        units: Standardizer,
        seconds: float | None,
        run: RunOptions,
    ) -> _Trials:
        """None yet, of data of which a fifth are the new rows."""
        x, y = data
        num_rows = min(len(x), MAX_SEARCH_ROWS)
        num_new = min(num_rows // 5, 2000)
        new, others = divided(len(x), num_new, run["seed"])
        training = others[: num_rows - num_new]
        return cls((x[training], y[training]), (x[new], y[new]), units, seconds, run)

    def linear_error(self) -> np.ndarray:
        """Errors (N,) of a Bayesian linear regression on the new rows."""
        x = self.units.transform_x(self.rows[0]).numpy()
        y = self.units.transform_y(self.rows[1])[:, 0].numpy()
        new_x = self.units.transform_x(self.new_rows[0]).numpy()
        return self._error(torch.from_numpy(BayesianRidge().fit(x, y).predict(new_x))[:, None])

    def _error(self, mean: Tensor) -> np.ndarray:
        """Errors (N,) of means (N, 1) at the new rows."""
        targets = self.units.transform_y(self.new_rows[1])
        return (targets - mean)[:, 0].double().numpy()

    def best(self) -> _Trial:
        return max(self.trials, key=_Trial.score)

    @quiet()
    def attempt(self, rule: Rule) -> None:
        """Try a rule, unless a quarter of the seconds has passed."""
        quarter = math.inf if self.seconds is None else self.seconds / 4
        if self.trials and time.perf_counter() - self.begun > quarter:
            return
        normal = rule.likelihood is None
        num_steps = int(1200 * share_of_steps(self.seconds))
        if not normal:
            num_steps = min(num_steps, SHORT_STEPS)
        ensemble = TabularEnsemble.of(len(self.rows[0]), 2, num_steps)
        model = rule.model(*self.rows, self.units, mean_only=normal)
        x, y = self.new_rows
        prediction = ensemble.fit(model, *self.rows, **self.run).predict(x)
        error = self._error(self.units.transform_y(prediction.mean.cpu()))
        mean_square = np.mean(error**2)
        if normal:
            log_densities = log_density(error, mean_square)
        else:
            log_prob = prediction.log_prob(y).double().cpu().numpy()
            log_densities = log_prob + math.log(float(self.units.y_scale[0]))
        rule = rule._replace(left_out_sd=float(np.sqrt(mean_square)))
        self.trials.append(_Trial(rule, log_densities))


def responses(y: np.ndarray) -> list[lk.Likelihood]:
    """Likelihoods beside a normal that suit the look of targets (N, 1)."""
    if not (y >= 0).all() or len(np.unique(y)) < 3:
        return []
    if (y == y.round()).all() and y.min() <= y.std():  # never near zero, a normal does as well
        # a Poisson is its limit: one prior for counts that are clustered and for thousands that are hardly
        return [lk.NegativeBinomial(dist.LogNormal(3.0, 3.0)), lk.HeteroskedasticGaussian()]
    return [lk.MixtureDensity(), lk.HeteroskedasticGaussian()] if skew(y[:, 0]) > 1 else []


def count_likelihood(x: np.ndarray, y: np.ndarray) -> tuple[lk.Likelihood | None, str]:
    """A negative binomial where targets (N, 1) are counts, and why; None where they are not.

    They are where rows left out of a log-linear model, its dispersion by the moments, are likelier than under a normal.
    """
    # the first of the likelihoods is the negative binomial where y looks like counts
    likelihood = next(iter(responses(y)), None)
    if not isinstance(likelihood, lk.NegativeBinomial):
        return None, ""
    folds = KFold(min(10, len(y)), shuffle=True, random_state=0)
    y = y[:, 0]
    models = BayesianRidge(), PoissonRegressor(alpha=1 / len(y))
    with quiet():
        mean, rate = (cross_val_predict(model, x, y, cv=folds) for model in models)
    error = y - mean
    square = (rate**2).sum()
    size = square / max(((y - rate) ** 2 - rate).sum(), 1e-6 * square)
    ours = nbinom.logpmf(y, size, size / (size + rate))
    normal = log_density(error, np.mean(error**2))
    gained, words = gain(ours, normal)
    if not gained:
        return None, ""
    return likelihood, f"{likelihood!r} of counts: in a log-linear model {words}"
