"""Columns of many categories: each level's effect is pooled with the others', and one that is new has their width.

A net with an input for every level learns the rare ones by heart, and says nothing of one that it has not seen. Here a
column is one input, the effect of the row's level, whose posterior under a random effect is known in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from sklearn.linear_model import BayesianRidge

from pyrobnn.posterior import Posterior
from pyrobnn.posterior.prediction import Prediction, mixed

#: values of each effect that a prediction is averaged over
NUM_NODES = 16
#: in turn the other inputs' part and each column's effects are fitted, so often
_SWEEPS = 5
#: hidden units at random that stand for what is not linear in the other inputs
_RANDOM_UNITS = 100
#: standard deviations of the effects that are tried, in standard deviations of the noise
_RATIOS = np.concatenate([np.linspace(0.0, 1.0, 21), np.geomspace(1.1, 30.0, 20)])


class Effects(NamedTuple):
    """Mean and variance (level + 1,) of the effects of a column's levels on one target; of a new level at the end."""

    mean: np.ndarray
    var: np.ndarray


@dataclass(frozen=True, eq=False)
class Levels:
    r"""Effects of the levels of a table's columns on its targets, as inputs of a net.

    .. math:: y_n = g(x_n) + u_{l(n)} + \varepsilon_n, \quad u_l \sim N(\mu, \tau^2), \quad
        \varepsilon_n \sim N(0, \sigma^2)

    with g linear in the inputs and in tanh units of random weights. The net learns y from x and *one draw* of the
    effects' posterior: under this model (x, draw, y) are distributed as (x, u, y), so that the net learns the
    dependence on u itself and the noise :math:`\sigma`, although y was used for the draw; a mean of the level's targets
    would tell the net what its rows are. A prediction averages over the posterior, which for a new level is
    :math:`N(\mu, \tau^2)`.

    Attributes: ``laws``, the effects of each pooled column on each target, in the order of the net's inputs; ``places``
        of their columns among the encoded inputs; ``targets``, names of several, else ""; ``seed``.

    Reference: Regularized target encoding outperforms traditional methods in supervised machine learning with high
    cardinality features (Pargent et al., 2022); Multiple Imputation for Nonresponse in Surveys (Rubin, 1987).
    """

    laws: tuple[Effects, ...]
    places: tuple[int, ...]
    targets: tuple[str, ...]
    seed: int

    @classmethod
    def fit(
        cls,
        sizes: Mapping[int, int],
        x: np.ndarray,
        targets: Mapping[str, np.ndarray],
        seed: int,
    ) -> Levels:
        """Of encoded inputs x (N, input) and what the effects are on, name → numbers (N,).

        ``sizes``: of the pooled columns, place among the inputs → number of levels.
        """
        codes = x[:, list(sizes)].astype(np.int64)
        features = _features(np.delete(x, list(sizes), axis=1), seed)
        laws: list[Effects] = []
        for target in targets.values():
            scale = float(target.std()) or 1.0
            standard = (target - target.mean()) / scale
            laws += _effects(features, codes, standard, list(sizes.values()))
        names = list(targets) if len(targets) > 1 else [""]
        return cls(
            tuple(laws),
            tuple(sizes) * len(targets),
            tuple(np.repeat(names, len(sizes)).tolist()),
            seed,
        )

    def names(self, inputs: Sequence[str]) -> list[str]:
        """Names of the net's inputs, of those of the encoded ones."""
        names = [name for place, name in enumerate(inputs) if place not in self.places]
        for place, target in zip(self.places, self.targets):
            names.append(f"effect of {inputs[place]} {target}".rstrip())
        return names

    def described(
        self,
        inputs: Sequence[str],
        categories: Mapping[int, Sequence[str]],
    ) -> dict[str, dict[str, Any]]:
        """What JSON can say of the effects: input of the net → mean and sd of each category, and of a new one.

        Args:
            inputs: names of the encoded inputs.
            categories: of the pooled columns, by their places among these.
        """
        names = self.names(inputs)[-len(self.laws) :]
        effects = {}
        for name, law, place in zip(names, self.laws, self.places, strict=True):
            moments = np.stack([law.mean, np.sqrt(law.var)], axis=1).tolist()
            of_categories = dict(zip(categories[place], moments))
            effects[name] = {"categories": of_categories, "new": moments[-1]}
        return effects

    def drawn(self, x: np.ndarray) -> np.ndarray:
        """Inputs of a net's training: encoded ones (N, input), with one draw of each level's effect."""
        rng = np.random.default_rng(self.seed)
        normals = []
        for law, place in zip(self.laws, self.places):
            normals.append(rng.standard_normal(len(law.mean))[x[:, place].astype(np.int64)])
        return self._inputs(x, np.stack(normals, axis=1))

    def likely(self, x: np.ndarray) -> np.ndarray:
        """Inputs of a net with the mean of each effect, of encoded ones (n, input)."""
        return self._inputs(x, np.zeros((len(x), len(self.laws))))

    def nodes(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Inputs of a net's predictions, for each of :data:`NUM_NODES` equally likely values of the effects.

        Each level meets the quantiles of a normal in an order of its own.
        """
        quantiles = stats.norm.ppf((np.arange(NUM_NODES) + 0.5) / NUM_NODES)
        quantiles /= quantiles.std()
        normals = np.empty((NUM_NODES, len(x), len(self.laws)))
        for number, place in enumerate(self.places):
            codes, rows = np.unique(x[:, place].astype(np.int64), return_inverse=True)
            orders = [
                np.random.default_rng([self.seed, number, code]).permutation(quantiles)
                for code in codes
            ]
            normals[:, :, number] = np.stack(orders, axis=1)[:, rows]
        for node in normals:
            yield self._inputs(x, node)

    def _inputs(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """Inputs of a net, effects at so many standard deviations (n, effect) in place of the codes of levels."""
        columns = [np.delete(x, self.places, axis=1)]
        for law, place, deviations in zip(self.laws, self.places, normals.T):
            # new levels, which have numbers of their own, have the law of the last one
            level = np.minimum(x[:, place].astype(np.int64), len(law.mean) - 1)
            effect = law.mean[level] + np.sqrt(law.var[level]) * deviations
            columns.append(effect[:, None])
        return np.concatenate(columns, axis=1)

    def predict(self, posterior: Posterior, x: np.ndarray) -> Prediction:
        """The prediction at encoded inputs (n, input), averaged over the effects.

        Where there are many draws each value of the effects has its own share of them.
        """
        many = posterior.num_draws >= 4 * NUM_NODES
        predictions = []
        for node, inputs in enumerate(self.nodes(x)):
            share = _every(posterior, node, NUM_NODES) if many else posterior
            predictions.append(share.predict(torch.from_numpy(inputs)))
        return mixed(predictions)


def _every(posterior: Posterior, start: int, step: int) -> Posterior:
    """The posterior with every ``step``-th draw of each chain."""
    draws = {name: value[:, start::step] for name, value in posterior.draws.items()}
    return replace(posterior, draws=draws, sample_stats={})


def _features(x: np.ndarray, seed: int) -> np.ndarray:
    """Inputs (N, input) in standard units, and tanh units of random weights, (N, feature)."""
    scale = x.std(axis=0)
    standard = (x - x.mean(axis=0)) / np.where(scale > 0.0, scale, 1.0)
    num_rows, num_inputs = x.shape
    units = min(_RANDOM_UNITS, num_rows // 5) if num_inputs else 0
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(num_inputs, units)) * np.sqrt(2.0 / max(1, num_inputs))
    return np.concatenate([standard, np.tanh(standard @ weights + rng.normal(size=units))], axis=1)


def _effects(
    features: np.ndarray,
    codes: np.ndarray,
    target: np.ndarray,
    sizes: Sequence[int],
) -> list[Effects]:
    """Effects of the levels of each column, whose codes are (N, column), on one target (N,)."""
    effects = [Effects(np.zeros(size + 1), np.zeros(size + 1)) for size in sizes]
    for _ in range(_SWEEPS):
        by_column = [effect.mean[code] for effect, code in zip(effects, codes.T)]
        without = target - sum(by_column)
        left = without.copy()
        used = 0.0
        if features.shape[1]:
            regression = BayesianRidge().fit(features, without)
            left = without - regression.predict(features)
            used = features.shape[1] - regression.lambda_ * float(np.trace(regression.sigma_))
        for number, size in enumerate(sizes):
            code = codes[:, number]
            residual = left + effects[number].mean[code]
            effects[number] = _one_way(residual, code, size, used)
            left = residual - effects[number].mean[code]
    return effects


class _FitOfRatio(NamedTuple):
    """The restricted log likelihood of a ratio of sds, up to a constant, and the effects given it."""

    log_likelihood: float
    effects: Effects


class _GroupedRows(NamedTuple):
    """What residuals say of their levels: rows and mean of each (level,), the squares within, degrees of freedom."""

    counts: np.ndarray
    means: np.ndarray
    within: float
    freedom: float

    def at_ratio(self, ratio: float) -> _FitOfRatio:
        """The fit where the sd of the effects is so many times the noise's."""
        shrink = 1.0 / (1.0 + self.counts * ratio**2)
        precision = self.counts * shrink
        total = precision.sum()
        centre = float(precision @ self.means / total)
        between = float(precision @ np.square(self.means - centre))
        noise = (self.within + between) / self.freedom
        log_likelihood = 0.5 * (np.log(shrink).sum() - np.log(total) - self.freedom * np.log(noise))
        mean = centre + (1.0 - shrink) * (self.means - centre)
        var = noise * (ratio**2 * shrink + np.square(shrink) / total)
        new = noise * (ratio**2 + 1.0 / total)
        return _FitOfRatio(log_likelihood, Effects(np.append(mean, centre), np.append(var, new)))


def _one_way(
    residual: np.ndarray,
    codes: np.ndarray,
    size: int,
    used: float,
) -> Effects:
    """Effects of so many levels in residuals (N,), averaged over the ratio of their sd to the noise's.

    ``used`` are the degrees of freedom that the other inputs took.

    By the restricted likelihood of each ratio, under a half-Cauchy prior.

    Reference: Prior distributions for variance parameters in hierarchical models (Gelman, 2006).
    """
    counts = np.bincount(codes, minlength=size).astype(np.float64)
    means = np.bincount(codes, residual, minlength=size) / np.maximum(counts, 1.0)
    rows = _GroupedRows(
        counts,
        means,
        within=float(np.square(residual - means[codes]).sum()),
        freedom=max(1.0, len(residual) - 1 - used),
    )
    fits = [rows.at_ratio(ratio) for ratio in _RATIOS]
    log_weights = np.array([fit.log_likelihood for fit in fits])
    log_weights += np.log(np.gradient(_RATIOS) / (1.0 + _RATIOS**2))
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = weights @ np.stack([fit.effects.mean for fit in fits])
    square = weights @ np.stack([fit.effects.var + fit.effects.mean**2 for fit in fits])
    return Effects(mean, np.maximum(square - mean**2, 0.0))
