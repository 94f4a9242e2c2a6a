"""How a rule finds hyper-parameters on a train part: candidates on a grid, what judges them, and steps beyond it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyro.distributions as dist
from uci.linear_floor import LinearFloor
from uci.mixture_scoring import held_out_scores

from pyrobnn.data import Dataset, Standardizer, train_test_split
from pyrobnn.inference.method import Method
from pyrobnn.likelihoods import HomoskedasticGaussian
from pyrobnn.model import BNN
from pyrobnn.networks import mlp
from pyrobnn.posterior import Posterior
from pyrobnn.priors import FanInNormal


@dataclass(frozen=True)
class OfLinear:
    """A noise as a share of that of a Bayesian linear regression on the same rows, the most that a net should leave."""

    share: float

    def sd(self, train: Dataset) -> float:
        """The standard deviation, in units of the target's, to two digits."""
        return float(f"{self.share * LinearFloor.fit(train).noise:.1e}")


Noise = float | OfLinear | Literal["inferred", "learned"]
#: share of the train part that is held out where a rule chooses by validation
VALIDATION_FRACTION = 0.2


@dataclass(frozen=True)
class Candidate:
    """One setting of the hyper-parameters: the method, the prior scale s of N(0, s²/fan-in), and the noise.

    ``noise`` is a standard deviation in units of the target's, a share of a linear model's, ``"inferred"`` (under a
    HalfNormal(1) prior) or ``"learned"`` (a point estimate). ``init`` is the method whose fit this one starts at;
    ``num_hidden`` the net's hidden units.
    """

    method: Method
    prior_scale: float
    noise: Noise
    init: Method | None = None
    num_hidden: int = 50

    def model(self, train: Dataset, seed: int) -> BNN:
        """One hidden layer of ReLU units on ``train`` in standard units; net initialised by ``seed``."""
        noise = self.noise.sd(train) if isinstance(self.noise, OfLinear) else self.noise
        scale = dist.HalfNormal(1.0) if noise == "inferred" else noise
        net = mlp(
            train.x.shape[1],
            (self.num_hidden,),
            activation="relu",
            seed=seed,
        )
        return BNN(
            net,
            FanInNormal(self.prior_scale),
            HomoskedasticGaussian(scale),
            standardizer=Standardizer.fit(train),
        )

    def fit(
        self,
        train: Dataset,
        seed: int,
        num_draws: int | None,
    ) -> Posterior:
        """The posterior of this candidate on ``train``."""
        model = self.model(train, seed)
        options = {} if num_draws is None else {"num_draws": num_draws}
        if self.init is not None:
            options["init"] = self.init.fit(model, train.x, train.y, seed=seed)
        return self.method.fit(
            model,
            train.x,
            train.y,
            seed=seed,
            **options,
        )


def _plain(noise: Noise) -> float | str:
    return f"{noise.share:g} of a linear model's" if isinstance(noise, OfLinear) else noise


@dataclass(frozen=True)
class Rule:
    """How a method's hyper-parameters are found on a train part, the same for every data set and split.

    Args:
        method: the configuration.
        prior_scales, noises, variants: where the search starts; ``variants`` are changes of the method's options. From
            a best value at an end of several it goes on by their ratio for as long as that is better still: prior
            scales and numbers of a variant both ways, shares of a linear model's noise downwards.
        choose: ``"evidence"``: every candidate is fitted to the whole train part and the highest ``log_evidence`` wins;
            ``"validation"``: candidates are fitted to four fifths, the highest mean log density of the rest wins and is
            fitted anew to the whole (the next, should that diverge); None: there is only one candidate. The evidence of
            SVI is its ELBO.
        validate_with: the method whose validation or evidence chooses, where that is not the method itself.
        num_draws: draws (per chain); None for the method's own number.
        init: the method whose fit is where this one starts; None for its own start.
        num_hidden: hidden units of the net.

    """

    method: Method
    prior_scales: tuple[float, ...]
    noises: tuple[Noise, ...]
    choose: Literal["evidence", "validation"] | None = None
    variants: tuple[Mapping[str, Any], ...] = field(default=({},))
    validate_with: Method | None = None
    num_draws: int | None = None
    init: Method | None = None
    num_hidden: int = 50

    def __post_init__(self) -> None:
        if self.choose not in ("evidence", "validation", None):
            raise ValueError(
                f"'choose' must be 'evidence', 'validation' or None, got {self.choose!r}"
            )
        if self.choose is None and len(list(self.candidates())) != 1:
            raise ValueError(
                "a rule with several candidates must choose: pass choose='validation' or 'evidence'"
            )

    def candidates(self) -> Iterator[Candidate]:
        """The grid."""
        for variant, scale, noise in itertools.product(
            self.variants, self.prior_scales, self.noises
        ):
            method = dataclasses.replace(self.method, **variant)
            yield Candidate(method, scale, noise, self.init, self.num_hidden)

    def fit(self, train: Dataset, seed: int) -> tuple[Posterior, Candidate, dict[str, float]]:
        """The posterior on the whole train part, the candidate behind it, and every candidate's criterion by label."""
        candidates = list(self.candidates())
        if self.choose is None:
            return candidates[0].fit(train, seed, self.num_draws), candidates[0], {}
        if self.choose == "evidence":
            return self._by_evidence(candidates, train, seed)
        return self._by_validation(candidates, train, seed)

    def _by_evidence(
        self,
        candidates: list[Candidate],
        train: Dataset,
        seed: int,
    ) -> tuple[Posterior, Candidate, dict[str, float]]:
        fits: list[Posterior] = []

        def evidence(candidate: Candidate) -> float:
            posterior = self._judge(candidate).fit(train, seed, self.num_draws)
            fits.append(posterior)
            return -math.inf if posterior.log_evidence is None else posterior.log_evidence

        values = self._judged(candidates, evidence)
        best = _highest(values)
        posterior = fits[best]
        if self.validate_with is not None:
            posterior = candidates[best].fit(train, seed, self.num_draws)
        return posterior, candidates[best], self._table(candidates, values)

    def _by_validation(
        self,
        candidates: list[Candidate],
        train: Dataset,
        seed: int,
    ) -> tuple[Posterior, Candidate, dict[str, float]]:
        fitted, held_out = train_test_split(
            train,
            test_fraction=VALIDATION_FRACTION,
            seed=seed,
        )
        values = self._judged(
            candidates, lambda candidate: self._validate(candidate, fitted, held_out, seed)
        )
        table = self._table(candidates, values)
        ranking = sorted(
            range(len(values)),
            key=values.__getitem__,
            reverse=True,
        )
        for best in ranking[:-1]:
            try:
                return candidates[best].fit(train, seed, self.num_draws), candidates[best], table
            except FloatingPointError:  # stable on four fifths of the data, not on all: the next
                continue
        worst = candidates[ranking[-1]]
        return worst.fit(train, seed, self.num_draws), worst, table

    def _judged(
        self, candidates: list[Candidate], judge: Callable[[Candidate], float]
    ) -> list[float]:
        """The value of each candidate; those beyond the ends are appended while an end is the best."""
        values = [judge(candidate) for candidate in candidates]
        further = self.beyond(candidates, candidates[_highest(values)])
        while further is not None:
            candidates.append(further)
            values.append(judge(further))
            further = self.beyond(candidates, candidates[_highest(values)])
        return values

    def beyond(self, candidates: Sequence[Candidate], best: Candidate) -> Candidate | None:
        """The next candidate on an axis at whose end the best of these lies; None if it lies at none."""
        next_scale = _beyond(best.prior_scale, {c.prior_scale for c in candidates})
        if next_scale:
            return dataclasses.replace(best, prior_scale=next_scale)
        return self._of_less_noise(candidates, best) or self._of_next_option(candidates, best)

    def _of_less_noise(self, candidates: Sequence[Candidate], best: Candidate) -> Candidate | None:
        """The candidate with the next smaller share of a linear model's noise, where the best has the smallest."""
        if not isinstance(best.noise, OfLinear):
            return None
        shares = {c.noise.share for c in candidates if isinstance(c.noise, OfLinear)}
        share = _beyond(best.noise.share, shares)
        if share is None or share >= best.noise.share:  # never above a linear model's own
            return None
        return dataclasses.replace(best, noise=OfLinear(share))

    def _of_next_option(self, candidates: Sequence[Candidate], best: Candidate) -> Candidate | None:
        """The candidate with the next value of an option that varies, where the best has the last of several."""
        for name in self._varied():
            tried = {getattr(c.method, name) for c in candidates}
            value = _beyond(getattr(best.method, name), tried)
            if value:
                # an option may not take the value: then the end is one
                with contextlib.suppress(TypeError, ValueError):
                    method = dataclasses.replace(best.method, **{name: value})
                    return dataclasses.replace(best, method=method)
        return None

    def _varied(self) -> set[str]:
        """The options of the method that the variants change."""
        return set().union(*self.variants)

    def _validate(
        self,
        candidate: Candidate,
        fitted: Dataset,
        held_out: Dataset,
        seed: int,
    ) -> float:
        """Mean log density of the held-out rows by a fit to the others."""
        num_draws = self.num_draws if self.validate_with is None else None
        candidate = self._judge(candidate)
        try:
            with warnings.catch_warnings():
                # of candidates that may be far off; the last fit's count
                warnings.simplefilter("ignore", UserWarning)
                prediction = candidate.fit(fitted, seed, num_draws).predict(held_out.x)
        except FloatingPointError:  # a step size beyond stability: not the one to choose
            return -math.inf
        return held_out_scores(prediction, held_out)["log_density"]

    def _judge(self, candidate: Candidate) -> Candidate:
        """The candidate with the method that chooses."""
        if self.validate_with is None:
            return candidate
        return dataclasses.replace(
            candidate,
            method=self.validate_with,
            init=None,
        )

    def _table(self, candidates: list[Candidate], values: list[float]) -> dict[str, float]:
        labels = [self.label(candidate) for candidate in candidates]
        return {label: round(max(value, -1e9), 4) for label, value in zip(labels, values)}

    def label(self, candidate: Candidate) -> str:
        """What tells a candidate from the others of the grid."""
        parts = []
        if len(self.prior_scales) > 1:
            parts.append(f"prior_scale={candidate.prior_scale:g}")
        if len(self.noises) > 1:
            parts.append(f"noise={_plain(candidate.noise)}")
        for name in sorted(self._varied()):
            parts.append(f"{name}={getattr(candidate.method, name)}")
        return " ".join(parts)


def _highest(values: Sequence[float]) -> int:
    """The index of the highest value, the first where several are."""
    return max(range(len(values)), key=values.__getitem__)


def _beyond(value: float | str | None, tried: Collection[float | str | None]) -> float | None:
    """The next number of a geometric series at whose end ``value`` lies, to three digits; None inside of it."""
    if len(tried) < 2 or not all(isinstance(v, int | float) and v > 0 for v in tried):
        return None
    ordered = sorted(tried)
    if value == ordered[0]:
        return float(f"{value**2 / ordered[1]:.3g}")
    return float(f"{value**2 / ordered[-2]:.3g}") if value == ordered[-1] else None
