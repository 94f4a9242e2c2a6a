"""What ``method="auto"`` chooses by the log density of rows that are left out, beside that of a linear model."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

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
from pyrobnn.estimators.members import TabularEnsemble
from pyrobnn.estimators.wide import Data, Rule
from pyrobnn.inference.fitting.batches import MAX_WHOLE_ROWS

#: rows, at most, of which rules are tried
MAX_SEARCH_ROWS = 25_000


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
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(data[0])))
    order = order[:MAX_SEARCH_ROWS]
    held_out, training = order.tensor_split([min(len(order) // 5, 2000)])
    targets = units.transform_y(data[1])[:, 0].numpy()[held_out]
    error = targets - _linear_prediction(data, units, training, held_out)
    method = _short_training(len(training), len(data[0]) <= MAX_WHOLE_ROWS, seconds)
    trials = _Trials(method, data, units, held_out, training, targets, seconds, seed, device)
    best = _best_normal(trials, float(np.std(error)))
    for likelihood in responses(data[1].numpy()):
        trials.attempt(best._replace(likelihood=likelihood))
    top = trials.best()
    gained, words = gain(top.log_densities, log_density(error, np.mean(error**2)))
    if not gained:
        return None, words
    # normal noise that varies is what the ensemble learns anyway, after the mean
    return best if isinstance(top.rule.likelihood, lk.HeteroskedasticGaussian) else top.rule, words


def _linear_prediction(
    data: Data,
    units: Standardizer,
    training: Tensor,
    held_out: Tensor,
) -> np.ndarray:
    """Of held-out rows by a Bayesian linear regression of the training rows, in standard units."""
    x = units.transform_x(data[0]).numpy()
    y = units.transform_y(data[1])[:, 0].numpy()
    return cast(np.ndarray, BayesianRidge().fit(x[training], y[training]).predict(x[held_out]))


def _short_training(num: int, whole: bool, seconds: float | None) -> TabularEnsemble:
    """Two members for the trials of so many rows, for longer where there is time: fewer steps favour fast learners."""
    effort = 1 if seconds is None else np.clip(seconds / 60, 0.125, 4 / 3)
    return TabularEnsemble(
        num_members=2,
        num_steps=int(1200 * effort),
        batch_size=min(128 if whole else 256, num),
        compile=False,
    )


class _Trial(NamedTuple):
    """A rule, and the log densities (N,) of held-out rows under its short fit."""

    rule: Rule
    log_densities: np.ndarray

    def score(self) -> float:
        return float(self.log_densities.mean())


@dataclass(eq=False)
class _Trials:
    """Short fits of rules to ``training`` rows, which predict held-out rows, ``targets`` in standard units."""

    method: TabularEnsemble
    data: Data
    units: Standardizer
    held_out: Tensor
    training: Tensor
    targets: np.ndarray
    seconds: float | None
    seed: int
    device: torch.device | str | None
    trials: list[_Trial] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    def best(self) -> _Trial:
        return max(self.trials, key=_Trial.score)

    @quiet()
    def attempt(self, rule: Rule) -> None:
        """Try a rule, unless a quarter of the seconds has passed."""
        seconds = self.seconds
        if self.trials and seconds is not None and time.perf_counter() - self.begun > seconds / 4:
            return
        x = self.data[0][self.training]
        y = self.data[1][self.training]
        normal = rule.likelihood is None
        model = rule.model(x, y, self.units, mean_only=normal)
        method = self.method
        if not normal:
            method = replace(method, num_steps=min(method.num_steps, 400))
        posterior = method.fit(
            model,
            x,
            y,
            seed=self.seed,
            device=self.device,
        )
        prediction = posterior.predict(self.data[0][self.held_out])
        mean = self.units.transform_y(prediction.mean)[:, 0].double().cpu().numpy()
        error = self.targets - mean
        if normal:
            log_densities = log_density(error, np.mean(error**2))
        else:
            log_prob = prediction.log_prob(self.data[1][self.held_out]).double().cpu().numpy()
            log_densities = log_prob + math.log(float(self.units.y_scale[0]))
        rule = rule._replace(left_out_sd=float(np.sqrt(np.mean(error**2))))
        self.trials.append(_Trial(rule, log_densities))


def _best_normal(trials: _Trials, linear_noise: float) -> Rule:
    """The best rule of normal noise: shares of ``linear_noise``, the linear model's, then fast waves, then none."""
    num_rows, num_features = trials.data[0].shape
    waves = max(1, min(8, 256 // num_features))
    for share in (0.1, 0.3, 1.0) if num_rows <= MAX_WHOLE_ROWS else (1.0,):
        trials.attempt(Rule(waves, share * linear_noise, linear_noise))
    for change in ({"fastest": 16.0}, {"waves": 0}):
        trials.attempt(trials.best().rule._replace(**change))
    return trials.best().rule


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
    folds = KFold(
        min(10, len(y)),
        shuffle=True,
        random_state=0,
    )
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
