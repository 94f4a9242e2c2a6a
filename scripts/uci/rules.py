"""The benchmark's arithmetic: exact scores of mixtures, the linear floor, one declared rule per method, and the tables.

The sets have the layout of *Probabilistic Backpropagation* (Hernández-Lobato & Adams, 2015, arXiv:1502.05336).
A rule says what is fixed, what is inferred, and what is chosen on the train part, and how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyro.distributions as dist
import torch
from records import mean_and_error
from sklearn.linear_model import BayesianRidge
from torch import Tensor

from pyrobnn import MAP, NUTS, SGHMC, SVI, SWAG, DeepEnsemble, Laplace, MCDropout
from pyrobnn.data import Dataset, Standardizer, train_test_split
from pyrobnn.likelihoods import HomoskedasticGaussian
from pyrobnn.model import BNN
from pyrobnn.networks import mlp
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.prediction import Prediction
from pyrobnn.priors import FanInNormal

METRICS = {
    "log_density": "test log density (nats a point; higher is better)",
    "rmse": "test RMSE (units of the target)",
    "crps": "test CRPS (units of the target)",
    "coverage": "coverage of the 95 % interval",
    "cpu_seconds": "CPU seconds a split (choice of hyper-parameters included)",
}
FLOOR = "linear"
#: splits from which a standard error is given, and the standard errors by which a method beats the linear model
FEWEST = 3
CLEARLY = 5.0

Record = Mapping[str, Any]
#: data set → method → split → value
Values = dict[str, dict[str, dict[int, float]]]

#: components at most for the CRPS, whose cost is the square of their number
MAX_CRPS_COMPONENTS = 256


def mixture_scores(
    loc: Tensor,
    scale: Tensor,
    y: Tensor,
    *,
    mean: Tensor | None = None,
    level: float = 0.95,
) -> dict[str, float]:
    r"""RMSE, mean log density, mean CRPS and coverage of equal-weight mixtures of normals.

    Of components ``loc, scale`` (draw, point) at targets ``y`` (point,); ``mean`` (point,) where it is known better.

    Example:
        >>> scores = mixture_scores(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([0.0, 3.0]))
        >>> round(scores["log_density"], 4), scores["coverage"]  # -log(2 pi) / 2 - 9 / 4
        (-3.1689, 0.5)
    """
    if loc.shape != scale.shape or loc.dim() != 2 or y.shape != loc.shape[1:]:
        raise ValueError(
            f"'loc' {tuple(loc.shape)} and 'scale' {tuple(scale.shape)} must be (draw, point) and "
            f"'y' {tuple(y.shape)} (point,)"
        )
    if not 0 < level < 1:
        raise ValueError(f"'level' must lie in (0, 1), got {level}")
    loc = loc.double()
    scale = scale.double()
    y = y.double()
    centre = loc.mean(0) if mean is None else mean.double()
    standard = (y - loc) / scale
    per_draw = -0.5 * standard.square() - scale.log() - 0.5 * math.log(2 * math.pi)
    below = torch.special.ndtr(standard).mean(0)
    tail = (1 - level) / 2
    return {
        "rmse": float((y - centre).square().mean().sqrt()),
        "log_density": float((torch.logsumexp(per_draw, 0) - math.log(len(loc))).mean()),
        "crps": float(mixture_crps(loc, scale, y).mean()),
        "coverage": float(((below > tail) & (below < 1 - tail)).double().mean()),
    }


def mixture_crps(loc: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    r"""Continuous ranked probability score of equal-weight mixtures of normals, in closed form; (point,).

    .. math:: \frac1S\sum_s A(y - \mu_s, \sigma_s^2) - \frac1{2S^2}\sum_{st} A(\mu_s - \mu_t, \sigma_s^2 + \sigma_t^2),
        \quad A(m, v) = E|N(m, v)|

    More than 256 components are thinned evenly.

    Reference: Grimit et al. (2006).

    Example:
        >>> crps = mixture_crps(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
        >>> round(crps.item(), 4)  # (sqrt(2) - 1) / sqrt(pi)
        0.2337
    """
    if len(loc) > MAX_CRPS_COMPONENTS:
        keep = torch.linspace(0, len(loc) - 1, MAX_CRPS_COMPONENTS).round().long()
        loc = loc[keep]
        scale = scale[keep]
    crps = _mean_abs(y - loc, scale.square()).mean(0)
    pairs = torch.zeros_like(crps)
    # row by row: S² pairs of N points would not fit
    for its_loc, its_scale in zip(loc, scale):
        pairs += _mean_abs(its_loc - loc, its_scale.square() + scale.square()).mean(0)
    return crps - pairs / (2 * len(loc))


def _mean_abs(m: Tensor, v: Tensor) -> Tensor:
    """E|N(m, v)|."""
    sd = v.sqrt()
    z = m / sd
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return m * (2 * torch.special.ndtr(z) - 1) + 2 * sd * density


@dataclass(frozen=True, eq=False)
class LinearFloor:
    r"""Bayesian linear regression whose prior precision and noise maximise the evidence, on standardised data.

    .. math:: w \sim N(0, \lambda^{-1} I), \quad y \sim N(x^\top w, \alpha^{-1}), \quad
        (\hat\lambda, \hat\alpha) = \arg\max p(y \mid \lambda, \alpha)

    Reference: Bayesian Interpolation (MacKay, 1992).
    """

    ridge: BayesianRidge
    standardizer: Standardizer

    @classmethod
    def fit(cls, train: Dataset) -> LinearFloor:
        """Maximise the evidence on the standardised rows; one output."""
        units = Standardizer.fit(train)
        flat = {
            "alpha_1": 0.0,
            "alpha_2": 0.0,
            "lambda_1": 0.0,
            "lambda_2": 0.0,
        }
        ridge = BayesianRidge(
            max_iter=500,
            tol=1e-12,
            fit_intercept=False,
            **flat,
        )
        x = units.transform_x(train.x).double()
        y = units.transform_y(train.y)[:, 0].double()
        return cls(ridge.fit(x.numpy(), y.numpy()), units)

    @property
    def noise(self) -> float:
        """The standard deviation of the noise, in standard units."""
        return float(self.ridge.alpha_) ** -0.5

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of y (point,) at inputs (point, feature), in original units."""
        units = self.standardizer
        mean, sd = self.ridge.predict(units.transform_x(x).double().numpy(), return_std=True)
        mean = torch.as_tensor(mean) * units.y_scale + units.y_mean
        return mean, torch.as_tensor(sd) * units.y_scale


def published() -> dict[str, Any]:
    """The published numbers, with their sources."""
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def values_of(records: Sequence[Record], metric: str) -> Values:
    """One metric of every record; of repeated work the last counts."""
    values_of_sets: Values = {}
    for record in records:
        value = record["scores"].get(metric, record.get(metric))
        splits = values_of_sets.setdefault(record["dataset"], {}).setdefault(record["method"], {})
        splits[record["split"]] = float(value)
    return values_of_sets


def overlaps(records: Sequence[Record]) -> dict[str, float]:
    """Test rows over training rows, by data set."""
    return {
        record["dataset"]: record.get("num_test", 0) / record.get("num_train", 1)
        for record in records
    }


def markdown(
    records: Sequence[Record],
    metric: str,
    methods: Sequence[str],
    table: Record,
) -> str:
    """A row per method and a column per data set, mean ± standard error [splits]; published rows below."""
    values = values_of(records, metric)
    shares = overlaps(records)
    names = sorted(values)
    lines = [f"| {METRICS[metric]} [splits] | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for method in methods:
        texts = []
        for name in names:
            splits = values[name].get(method)
            texts.append(_text(list(splits.values()), shares[name]) if splits else "")
        if any(texts):
            lines.append(f"| {method} | {' | '.join(texts)} |")
    for column in table["columns"]:
        published_values = [column.get(metric, {}).get(name) for name in names]
        if any(published_values):
            texts = [_published_text(pair) for pair in published_values]
            lines.append(f"| {_label_of(column)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _label_of(column: Record) -> str:
    """The label of a published method, with what sets its protocol apart from ours."""
    facts = [column["label"]]
    if column["spread"] != "se":
        facts.append("± sd")
    if column["splits"] != "standard":
        facts.append("own splits")
    if column["noise"] != "homoskedastic":
        facts.append("heteroskedastic")
    return f"*{', '.join(facts)}*"


def _published_text(pair: Sequence[float | None] | None) -> str:
    """A published value and its spread, either of which may be missing."""
    if pair is None:
        return ""
    value, spread = pair[:2]
    return f"{value:g}" if spread is None else f"{value:g} ± {spread:g}"


def _text(values: Sequence[float], overlap: float) -> str:
    mean, error = mean_and_error(values, overlap)
    if 0 < abs(mean) < 0.01:
        digits = 1 - math.floor(math.log10(abs(mean)))
    else:
        digits = 3 if abs(mean) < 100 else 0
    spread = f" ± {error:.{digits}f}" if math.isfinite(error) else ""
    return f"{mean:.{digits}f}{spread} [{len(values)}]"


def beats_floor(records: Sequence[Record]) -> dict[tuple[str, str], tuple[float, bool]]:
    """Standard errors by which each method is better than the linear model, paired over splits, and whether enough.

    The smaller of the gains in log density and in RMSE counts; cells of fewer than three splits are not judged.
    """
    shares = overlaps(records)
    margins = {}
    density = values_of(records, "log_density")
    rmse = values_of(records, "rmse")
    for name, methods in density.items():
        for method in methods:
            if method == FLOOR or FLOOR not in methods:
                continue
            gains = [
                _gain(density[name][method], density[name][FLOOR], 1.0, shares[name]),
                _gain(rmse[name][method], rmse[name][FLOOR], -1.0, shares[name]),
            ]
            if math.isfinite(min(gains)) or not any(map(math.isnan, gains)):
                margins[name, method] = min(gains), min(gains) > CLEARLY
    return margins


def _gain(
    method: Mapping[int, float],
    floor: Mapping[int, float],
    sign: float,
    overlap: float,
) -> float:
    """The mean gain over the splits that both have, in its standard errors; ``sign`` is 1 where more is better."""
    shared = sorted(method.keys() & floor.keys())
    mean, error = mean_and_error([sign * (method[k] - floor[k]) for k in shared], overlap)
    return mean / error if error else math.copysign(math.inf, mean)


def best_published(records: Sequence[Record], table: Record) -> dict[str, tuple[str, float, float]]:
    """By data set: our best method, its log density, and the best published one of one noise on the same splits."""
    density = values_of(records, "log_density")
    comparable = [
        column["log_density"]
        for column in table["columns"]
        if (column["noise"], column["splits"]) == ("homoskedastic", "standard")
        and column["id"] != FLOOR
    ]
    comparisons = {}
    for name, methods in density.items():
        peers = [values[name][0] for values in comparable if name in values]
        means = {
            method: mean_and_error(list(splits.values()))[0]
            for method, splits in methods.items()
            if len(splits) >= FEWEST and method != FLOOR
        }
        if peers and means:
            best = max(means, key=means.__getitem__)
            comparisons[name] = best, means[best], max(peers)
    return comparisons


def claims(records: Sequence[Record], table: Record) -> list[str]:
    """What should hold, and whether it does."""
    floor = beats_floor(records)
    clear = sum(enough for _, enough in floor.values())
    lines = [
        f"{clear} of {len(floor)} cells beat the linear model by more than {CLEARLY:g} standard errors"
    ]
    for name, (best, ours, theirs) in sorted(best_published(records, table).items()):
        met = "met    " if ours >= theirs else "NOT MET"
        lines.append(f"{met} {name}: {best} {ours:.3f}, best published {theirs:.3f}")
    for column in table["columns"]:
        lines.append(f"{column['label']}: {column['citation']} {column['url']}")
    return lines


# -- rules ------------------------------------------------------------------------------------------------------------


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

    method: Any
    prior_scale: float
    noise: Noise
    init: Any = None
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


def _plain(noise: Noise) -> Any:
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

    method: Any
    prior_scales: tuple[float, ...]
    noises: tuple[Noise, ...]
    choose: Literal["evidence", "validation"] | None = None
    variants: tuple[Mapping[str, Any], ...] = field(default=({},))
    validate_with: Any = None
    num_draws: int | None = None
    init: Any = None
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
        if isinstance(best.noise, OfLinear):  # never above a linear model's own
            shares = {c.noise.share for c in candidates if isinstance(c.noise, OfLinear)}
            share = _beyond(best.noise.share, shares)
            if share and share < best.noise.share:
                return dataclasses.replace(best, noise=OfLinear(share))
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


def _beyond(value: Any, tried: Collection[Any]) -> float | None:
    """The next number of a geometric series at whose end ``value`` lies, to three digits; None inside of it."""
    if len(tried) < 2 or not all(isinstance(v, int | float) and v > 0 for v in tried):
        return None
    ordered = sorted(tried)
    if value == ordered[0]:
        return float(f"{value**2 / ordered[1]:.3g}")
    return float(f"{value**2 / ordered[-2]:.3g}") if value == ordered[-1] else None


def held_out_scores(prediction: Prediction, data: Dataset) -> dict[str, float]:
    """RMSE, log density, CRPS and coverage in original units."""
    loc = prediction.loc.flatten(0, 1)[..., 0]
    scale = prediction.scale.flatten(0, 1)[..., 0]
    return mixture_scores(
        loc,
        scale,
        data.y[:, 0],
        mean=prediction.mean[:, 0],
    )


def _rules() -> dict[str, Rule]:
    # a batch of this size is all the data, handed to the compiled step as an argument: one compilation then serves
    # every split of a data set
    whole = 10**6
    search = MAP(num_steps=1000, batch_size=whole)
    # members are not polished: the noise is that of a search which is not either
    unpolished = MAP(
        num_steps=1000,
        batch_size=whole,
        polish_steps=0,
    )
    noises = tuple(OfLinear(share) for share in (0.03, 0.06, 0.12, 0.25, 0.35, 0.5, 0.7, 1.0))
    validated: dict[str, Any] = {
        "prior_scales": (1.0,),
        "noises": noises,
        "choose": "validation",
        "validate_with": search,
    }
    # faster rates and wider starts end in optima that call the signal noise: their ELBO is hundreds of nats lower
    svi = SVI(
        num_steps=10_000,
        lr=0.003,
        init_scale=0.01,
        estimator="weights",
    )
    lrt = dataclasses.replace(svi, estimator="local_reparameterization")
    # a draw from the prior can be so steep that the larger steps of SGHMC are unstable. NUTS does not start
    # at modes: where they interpolate the data, with next to no noise, it stays (yacht)
    modes = DeepEnsemble(
        num_members=4,
        num_steps=1000,
        batch_size=whole,
    )
    inferred: dict[str, Any] = {"prior_scales": (1.0, 2.0), "noises": ("inferred",)}
    return {
        "map": Rule(search, **validated),
        "ensemble": Rule(
            DeepEnsemble(num_steps=1000, batch_size=whole),
            **validated | {"validate_with": unpolished},
        ),
        "svi-rt": Rule(
            svi,
            **inferred,
            choose="evidence",
            num_draws=400,
        ),
        "svi-lrt": Rule(
            lrt,
            **inferred,
            choose="evidence",
            num_draws=400,
        ),
        "laplace": Rule(
            Laplace(
                map=search,
                tune="marginal_likelihood",
                predictive="linearized",
            ),
            prior_scales=(1.0,),
            noises=noises,
            choose="evidence",
            num_draws=400,
        ),
        # an iterate an epoch would be few of many rows. It starts at the mode of the search that chose its noise: at
        # another search's the noise is not what the net leaves
        "swag": Rule(
            SWAG(num_steps=2000, collect_every=20),
            **validated,
            num_draws=100,
            init=search,
        ),
        "mc-dropout": Rule(
            MCDropout(
                p=0.01,
                num_steps=1500,
                batch_size=whole,
            ),
            prior_scales=(1.0,),
            noises=("learned",),
            choose="validation",
            variants=tuple({"p": p} for p in (0.005, 0.02, 0.05)),
            num_draws=400,
        ),
        "sghmc": Rule(
            SGHMC(
                num_chains=4,
                num_warmup=3000,
                thinning=20,
                friction=0.02,
            ),
            prior_scales=(1.0,),
            noises=("inferred",),
            choose="validation",
            variants=({"step_size": 3e-5}, {"step_size": 3e-4}, {"step_size": 3e-3}),
            num_draws=100,
            init=modes,
        ),
        "nuts": Rule(
            NUTS(
                num_chains=4,
                num_warmup=300,
                max_tree_depth=9,
            ),
            **inferred,
            choose="evidence",
            validate_with=lrt,
            num_draws=100,
        ),
    }


#: the rule of every method, by its name in the tables
RULES: dict[str, Rule] = _rules()


def uci(name: str, split: int, root: str | Path | None = None) -> tuple[Dataset, Dataset]:
    """The train part and the test part of one standard split of a set, in original units."""
    folder = _folder(name, root)
    table = np.loadtxt(folder / "data.txt", ndmin=2)
    features, (target,), train_rows, test_rows = (
        np.loadtxt(folder / f"index_{file}.txt", ndmin=1).astype(int)
        for file in ("features", "target", f"train_{split}", f"test_{split}")
    )
    names = tuple(f"feature_{column}" for column in features)
    x = _tensor(table[:, features])
    y = _tensor(table[:, [target]])
    full = Dataset(x, y, folder.name, "regression", names, f"column_{target}")
    return full.subset(train_rows), full.subset(test_rows)


def uci_splits(name: str, root: str | Path | None = None) -> int:
    """How many standard splits a set has."""
    files = _folder(name, root).glob("index_test_*.txt")
    return sum(file.stem.rpartition("_")[2].isdigit() for file in files)


def uci_num_hidden(name: str, root: str | Path | None = None) -> int:
    """How many hidden units the benchmark gives a set: what its ``n_hidden.txt`` says, else 50."""
    path = _folder(name, root) / "n_hidden.txt"
    return int(float(path.read_text(encoding="utf-8"))) if path.is_file() else 50


def _folder(name: str, root: str | Path | None) -> Path:
    root = root or os.environ.get("PYROBNN_DATA")
    if not root:
        raise ValueError(f"no directory for UCI set {name!r}: pass 'root' or set PYROBNN_DATA")
    folders = {path.parent.name: path.parent for path in Path(root).glob("**/data.txt")}
    if name not in folders:
        names = ", ".join(sorted(folders)) or "none"
        raise ValueError(f"there is no UCI set {name!r} in {str(root)!r}: found {names}")
    return folders[name]


def _tensor(values: np.ndarray) -> Tensor:
    """In float32, or in float64 where float32 would merge distinct values of a column."""
    narrow = values.astype(np.float32)
    merged = any(
        len(np.unique(rounded)) < len(np.unique(column))
        for column, rounded in zip(values.T, narrow.T)
    )
    return torch.tensor(values if merged else narrow)
