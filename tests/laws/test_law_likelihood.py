"""The law of likelihoods: every response is its own density, moments, curvature and transform, in every method's hands.

A new likelihood is a file and a line in CASES.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior
from scipy import stats
from scipy.optimize import brentq
from scipy.special import expit, softmax
from test_contract import METHODS, num_draws

import pyrobnn as pb
from pyrobnn import likelihoods as lk
from pyrobnn.data import Dataset, Standardizer
from pyrobnn.studies.sbc import fit_batch, rank, simulate, uniformity

# runs this short are told to be too short
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode|the weights use up|.*left out"
)


@dataclass(frozen=True)
class Case:
    """A likelihood with fixed parameters, as SciPy has it, and the targets that it must not take.

    Args:
        law: outputs (…, width) of the network → SciPy's distribution of y.
        inferred: the same likelihood with its own parameters inferred.
        wrong: targets and what is said of them.
    """

    fixed: Callable[[], lk.Likelihood]
    law: Callable[[np.ndarray], object]
    inferred: Callable[[], lk.Likelihood]
    wrong: dict[str, object]
    width: int = 1


class Labels:
    """Labels 0 … K − 1 with given probabilities (N, K), as SciPy would have them."""

    dist = stats.bernoulli

    def __init__(self, probs: np.ndarray):
        self.probs = probs

    def logpmf(self, y: np.ndarray) -> np.ndarray:
        probs = np.broadcast_to(self.probs, (*y.shape, self.probs.shape[-1]))
        return np.log(np.take_along_axis(probs, y[..., None].astype(int), -1)[..., 0])

    @classmethod
    def ordered(cls, f: np.ndarray, cuts: np.ndarray) -> Labels:
        cumulative = np.pad(1 / (1 + np.exp(f - cuts)), [(0, 0)] * (f.ndim - 1) + [(1, 1)])
        cumulative[..., -1] = 1.0
        return cls(np.diff(cumulative))


class Mixture:
    """Normal components with given shares, means and scales (N, K), as SciPy would have them."""

    dist = stats.norm

    def __init__(self, share: np.ndarray, loc: np.ndarray, scale: np.ndarray):
        self.share = share
        self.loc = loc
        self.scale = scale

    def pdf(self, y: np.ndarray) -> np.ndarray:
        return (self.share * stats.norm.pdf(np.asarray(y)[..., None], self.loc, self.scale)).sum(-1)

    def logpdf(self, y: np.ndarray) -> np.ndarray:
        return np.log(self.pdf(y))

    def cdf(self, y: np.ndarray) -> np.ndarray:
        return (self.share * stats.norm.cdf(np.asarray(y)[..., None], self.loc, self.scale)).sum(-1)

    def ppf(self, level: float) -> np.ndarray:
        ends = stats.norm.ppf(level, self.loc, self.scale)
        rows = zip(self.share, self.loc, self.scale, ends.min(-1), ends.max(-1))
        return np.array(
            [brentq(functools.partial(self._above, level, *row[:3]), *row[3:]) for row in rows]
        )

    @staticmethod
    def _above(
        level: float, share: np.ndarray, loc: np.ndarray, scale: np.ndarray, y: float
    ) -> float:
        return float((share * stats.norm.cdf(y, loc, scale)).sum() - level)

    def mean(self) -> np.ndarray:
        return (self.share * self.loc).sum(-1)

    def var(self) -> np.ndarray:
        return (self.share * (self.scale**2 + self.loc**2)).sum(-1) - self.mean() ** 2


def prior() -> dist.Distribution:
    return dist.LogNormal(0.0, 0.5)


CASES = {
    "gaussian": Case(
        lambda: lk.HomoskedasticGaussian(0.5),
        lambda f: stats.norm(f[..., 0], 0.5),
        lambda: lk.HomoskedasticGaussian(prior()),
        {"NaN": torch.nan},
    ),
    "heteroskedastic": Case(
        lambda: lk.HeteroskedasticGaussian(1e-3),
        lambda f: stats.norm(f[..., 0], np.logaddexp(f[..., 1], 0) + 1e-3),
        lambda: lk.HeteroskedasticGaussian(),
        {"NaN": torch.nan},
        width=2,
    ),
    "bernoulli": Case(
        lambda: lk.Bernoulli(),
        lambda f: stats.bernoulli(1 / (1 + np.exp(-f[..., 0]))),
        lambda: lk.Bernoulli(),
        {"0 and 1 only": 2.0},
    ),
    "student_t": Case(
        lambda: lk.StudentT(5.0, 0.5),
        lambda f: stats.t(5.0, f[..., 0], 0.5),
        lambda: lk.StudentT("inferred", prior()),
        {"NaN": torch.nan},
    ),
    "poisson": Case(
        lambda: lk.Poisson(),
        lambda f: stats.poisson(np.exp(f[..., 0])),
        lambda: lk.Poisson(),
        {"NaN": torch.nan, "counts 0, 1, 2, … for Poisson, got -1": -1.0, "got 1.5": 1.5},
    ),
    "negative_binomial": Case(
        lambda: lk.NegativeBinomial(3.0),
        lambda f: stats.nbinom(3.0, 3.0 / (3.0 + np.exp(f[..., 0]))),
        lambda: lk.NegativeBinomial(prior()),
        {"NaN": torch.nan, "counts 0, 1, 2, … for NegativeBinomial, got -2": -2.0},
    ),
    "categorical": Case(
        lambda: lk.Categorical(),
        lambda f: Labels(np.exp(f) / np.exp(f).sum(-1, keepdims=True)),
        lambda: lk.Categorical(),
        {"labels from 0 to 3": 3, "labels from -1": -1},
        width=3,
    ),
    "ordinal": Case(
        lambda: lk.Ordinal(4, torch.tensor([-1.0, 0.2, 0.8])),
        lambda f: Labels.ordered(f, np.array([-1.0, 0.2, 0.8])),
        lambda: lk.Ordinal(4, "inferred"),
        {"labels from 0 to 4": 4, "labels from -1": -1},
    ),
    "censored_normal": Case(
        lambda: lk.CensoredNormal(0.5),
        lambda f: stats.norm(f[..., 0], 0.5),
        lambda: lk.CensoredNormal(prior()),
        {"NaN": torch.nan, "1 .observed. or 0 .censored.": torch.tensor([1.0, 2.0])},
    ),
    "left_censored_normal": Case(
        lambda: lk.CensoredNormal(0.5, "left"),
        lambda f: stats.norm(f[..., 0], 0.5),
        lambda: lk.CensoredNormal(prior(), "left"),
        {"1 .observed. or 0 .censored.": torch.tensor([1.0, -1.0])},
    ),
    "weibull": Case(
        lambda: lk.Weibull(1.7),
        lambda f: stats.weibull_min(1.7, scale=np.exp(f[..., 0])),
        lambda: lk.Weibull(prior()),
        {
            "NaN": torch.nan,
            "must be positive": torch.tensor([0.0, 1.0]),
            "got 0.5": torch.tensor([1.0, 0.5]),
        },
    ),
    "beta": Case(
        lambda: lk.Beta(7.0, low=-1.0, high=3.0),
        lambda f: stats.beta(7 * expit(f[..., 0]), 7 * expit(-f[..., 0]), -1.0, 4.0),
        lambda: lk.Beta(prior(), low=-1.0, high=3.0),
        {"NaN": torch.nan, "between -1 and 3 .* got 3": 3.0, "got -2": -2.0},
    ),
    "mixture_density": Case(
        lambda: lk.MixtureDensity(2),
        lambda f: Mixture(softmax(f[..., :2], -1), f[..., 2:4], np.logaddexp(f[..., 4:], 0) + 1e-3),
        lambda: lk.MixtureDensity(2),
        {"NaN": torch.nan},
        width=6,
    ),
}
CENSORED = ["censored_normal", "left_censored_normal", "weibull"]
NUMBERS = [name for name in CASES if not CASES[name].fixed().targets.classes]
N = 6


def outputs(name: str, dtype: torch.dtype = torch.float64, num: int = N) -> torch.Tensor:
    """Network outputs (num, width) in the range that data have."""
    draw = np.random.default_rng(1).normal(0.3, 0.7, (num, CASES[name].width))
    return torch.tensor(draw, dtype=dtype)


def samples(name: str, f: torch.Tensor, num: int, seed: int = 0) -> torch.Tensor:
    """Targets (num, N, out) from the likelihood itself."""
    with seeded(seed):
        return CASES[name].fixed().distribution(f, {}).sample((num,))


def column(name: str, y: torch.Tensor) -> torch.Tensor:
    """The values of y (…, N), without what else its columns say."""
    return y if CASES[name].fixed().targets.kind == "label" else y[..., 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_the_density_is_that_of_scipy(name, dtype):
    f = outputs(name, dtype)
    law = CASES[name].law(f.double().numpy())
    y = samples(name, f, 20)
    found = CASES[name].fixed().log_prob(f, y, {})
    assert found.dtype == dtype and found.shape == (20, N)
    log_law = getattr(law, "logpdf", None) if not hasattr(law.dist, "pmf") else law.logpmf
    expected = torch.tensor(log_law(column(name, y.double()).numpy()))
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-4, atol=2e-4 if dtype == torch.float32 else 1e-9
    )


@pytest.mark.parametrize("name", CASES)
def test_the_mass_is_one_and_the_distribution_function_is_its_sum(name):
    likelihood = CASES[name].fixed()
    f = outputs(name)
    law = CASES[name].law(f.numpy())
    if likelihood.targets.kind == "count" or likelihood.targets.classes:
        top = {"bernoulli": 2, "categorical": 3, "ordinal": 4}.get(name) or int(
            law.ppf(1 - 1e-13).max()
        )
        grid = torch.arange(top, dtype=torch.float64)[:, None, None].expand(-1, N, 1)
        grid = grid[..., 0].long() if likelihood.targets.kind == "label" else grid
        mass = likelihood.log_prob(f, grid, {}).exp().cumsum(0)
        assert float((mass[-1] - 1).abs().max()) < 1e-9
        lower, upper = likelihood.cdf(f, grid, {})
        torch.testing.assert_close(upper[..., 0], mass, rtol=0, atol=1e-9)
        torch.testing.assert_close(lower[1:, ..., 0], mass[:-1], rtol=0, atol=1e-9)
        assert float(lower[0].abs().max()) == 0.0
        return
    ends = torch.tensor(np.stack([law.ppf(1e-6), law.ppf(1 - 1e-6)]))
    grid = ends[0] + torch.linspace(0, 1, 20001, dtype=torch.float64)[:, None] * (ends[1] - ends[0])
    lower, upper = likelihood.cdf(f, grid[..., None], {})
    assert torch.equal(lower, upper) and bool((upper.diff(dim=0) >= 0).all())
    whole = likelihood.targets.observed(grid[..., None])
    inside = torch.trapezoid(likelihood.log_prob(f, whole, {}).exp(), grid, dim=0)
    torch.testing.assert_close(inside, (upper[-1] - upper[0])[..., 0], rtol=1e-5, atol=0)
    torch.testing.assert_close(inside, torch.ones(N, dtype=torch.float64) - 2e-6, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_the_curvature_is_the_mean_square_of_the_score(name):
    likelihood = CASES[name].fixed()
    f = outputs(name)
    root = likelihood.fisher_root(f, {})
    assert root.shape[:2] == f.shape
    y = samples(name, f, 20_000)
    drawn = f.expand(len(y), *f.shape).clone().requires_grad_()
    score = torch.autograd.grad(likelihood.log_prob(drawn, y, {}).sum(), drawn)[0]
    square = score.unsqueeze(-1) * score.unsqueeze(-2)
    error = (square.std(0) / len(y) ** 0.5).clamp_min(1e-9)
    assert float(((square.mean(0) - root @ root.mT).abs() / error).max()) < 5.0
    assert float((score.mean(0).abs() / (score.std(0) / len(y) ** 0.5)).max()) < 5.0


@pytest.mark.parametrize("name", [*NUMBERS, "bernoulli"])
def test_mean_and_variance_are_those_of_its_draws(name):
    f = outputs(name)
    mean, var = CASES[name].fixed().mean_variance(f, {})
    y = CASES[name].fixed().targets.values(samples(name, f, 20_000))
    for found, values in ((mean, y), (var, (y - mean).square())):
        error = values.std(0) / len(y) ** 0.5
        assert float(((values.mean(0) - found).abs() / error).max()) < 6.0
    law = CASES[name].law(f.numpy())
    torch.testing.assert_close(mean[:, 0], torch.tensor(law.mean()), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(var[:, 0], torch.tensor(law.var()), rtol=1e-6, atol=1e-9)


def prediction(name: str, num: int, num_functions: int = 1) -> pb.Prediction:
    f = outputs(name, num=num)
    shifts = (
        torch.linspace(-0.3, 0.3, num_functions, dtype=f.dtype)
        if num_functions > 1
        else torch.zeros(1).to(f)
    )
    return pb.Prediction((f + shifts[:, None, None])[None], CASES[name].fixed(), {})


@pytest.mark.parametrize("name", CASES)
def test_the_transform_of_its_own_draws_is_uniform(name):
    p = prediction(name, 2000)
    y = p.sample(seed=3)[0, 0]
    y = p.likelihood.targets.observed(y)
    pit = p.pit(y, seed=1)
    assert pit.shape == (2000, 1) and float(pit.min()) >= 0 and float(pit.max()) <= 1
    assert stats.kstest(pit[:, 0].numpy(), "uniform").pvalue > 0.01
    assert torch.equal(p.pit(y, seed=1), pit)


@pytest.mark.parametrize("name", CASES)
def test_the_judge_takes_its_draws_as_they_come_and_its_prediction(name):
    """Right outcomes never fail, and others never pass."""
    p = prediction(name, 400, num_functions=100)
    targets = p.likelihood.targets
    y = prediction(name, 400).sample(seed=9)[0, 0]
    draws = p.sample(seed=0)
    assert draws.dim() == 4 - (targets.kind == "label")
    two_chains = draws.reshape(2, -1, *draws.shape[2:])
    seen = targets.observed(y)
    for predictions in (draws, two_chains, two_chains.numpy(), p):
        assert pb.judge(predictions, seen).model in ("pass", "warn")
        off = seen.clone()
        if targets.classes:
            off = 1 - seen if targets.kind == "binary" else (seen + 1) % int(seen.max() + 1)
        elif targets.kind == "number":
            off[..., 0] = targets.values(seen)[..., 0] * 0.2 + 0.8 * targets.values(seen).mean()
        if targets.kind != "count":
            assert pb.judge(predictions, off).model != "pass"


@pytest.mark.parametrize("name", CENSORED)
def test_the_judge_is_told_at_which_side_an_outcome_was_censored(name):
    p = prediction(name, 600, num_functions=100)
    side = p.likelihood.targets.censoring
    y, limit = (prediction(name, 600).sample(seed=seed)[0, 0] for seed in (9, 10))
    cut = torch.minimum(y, limit) if side == "right" else torch.maximum(y, limit)
    seen = torch.cat([cut, (cut == y).to(cut)], -1)
    assert 100 < float(seen[:, 1].sum()) < 500
    far = seen.clone()
    far[:, 0] += 3.0
    draws = p.sample(seed=0)
    for predictions in (p, draws, draws.reshape(2, -1, *draws.shape[2:]).numpy()):
        assert pb.judge(predictions, seen, censoring=side).model in ("pass", "warn")
        assert pb.judge(predictions, far, censoring=side).model == "fail"
    other_side = "left" if side == "right" else "right"
    assert pb.judge(draws, seen, censoring=other_side).model != "pass"
    with pytest.raises(ValueError, match="'censoring' must be"):
        pb.judge(draws, seen, censoring="above")


@pytest.mark.parametrize("name", NUMBERS)
def test_quantiles_are_where_the_mixture_has_its_levels(name):
    p = prediction(name, N, num_functions=5)
    levels = torch.tensor([0.001, 0.05, 0.5, 0.9, 0.999], dtype=torch.float64)
    found = p.quantile(levels)
    laws = [CASES[name].law(f.numpy()) for f in p.standard_f[0]]
    for level, y in zip(levels, found[..., 0].double().numpy()):
        reached = np.mean([law.cdf(y) for law in laws], 0)
        if not p.likelihood.targets.kind == "count":
            np.testing.assert_allclose(reached, level, rtol=0, atol=1e-6)
            continue
        before = np.mean([law.cdf(y - 1) for law in laws], 0)
        assert (
            (y == np.round(y)).all()
            and (reached >= float(level)).all()
            and (before < float(level)).all()
        )


@pytest.mark.parametrize(
    "name", [name for name in NUMBERS if not CASES[name].fixed().targets.normal]
)
def test_a_quantile_of_many_draws_takes_few_looks_at_all_of_them(name):
    p = prediction(name, N, num_functions=600)
    cdf = p.likelihood.cdf
    looks = []

    def counted(f, y, params):
        looks.append(f.shape[:-1].numel() / (600 * N))
        return cdf(f, y, params)

    p.likelihood.cdf = counted
    levels = torch.tensor([0.05, 0.5, 0.999], dtype=torch.float64)
    found = p.quantile(levels)
    assert sum(looks) / len(levels) < 15
    reached = cdf(p.standard_f, found[:, None, None].double(), {})[1].mean((1, 2))[..., 0]
    assert bool((reached >= levels[:, None] - 1e-6).all())
    assert p.likelihood.targets.kind == "count" or bool((reached <= levels[:, None] + 1e-6).all())


@pytest.mark.parametrize("name", CASES)
def test_extreme_outputs_are_finite(name):
    likelihood = CASES[name].fixed()
    for dtype in (torch.float32, torch.float64):
        f = torch.tensor([-50.0, 50.0], dtype=dtype)[:, None].expand(2, CASES[name].width).clone()
        f.requires_grad_()
        y = (
            torch.ones(2, dtype=torch.long)
            if likelihood.targets.kind == "label"
            else torch.ones(2, 1, dtype=dtype)
        )
        y = likelihood.targets.observed(y)
        log_prob = likelihood.log_prob(f, y, {})
        gradient = torch.autograd.grad(log_prob.sum(), f)[0]
        f = f.detach()
        assert bool(torch.isfinite(log_prob).all() and torch.isfinite(gradient).all())
        if name in CENSORED:
            y[:, 1] = 0
            assert bool(torch.isfinite(likelihood.log_prob(f, y, {})).all())
            assert bool(torch.isfinite(likelihood.curvature_root(f, y, {})).all())
        for values in (*likelihood.cdf(f, y, {}), likelihood.fisher_root(f, {})):
            assert bool(torch.isfinite(values).all())
        if likelihood.targets.kind == "label":
            continue
        mean, var = likelihood.mean_variance(f, {})
        var = var.clamp_max(torch.finfo(dtype).max)  # of clustered counts, exp(100) in float32
        assert bool(torch.isfinite(mean).all() and torch.isfinite(var).all())
        with seeded(0):
            drawn = likelihood.targets.values(likelihood.distribution(f, {}).sample())
        assert bool(torch.isfinite(drawn).all()) and not (
            likelihood.targets.kind == "count" and float(drawn.min()) < 0
        )
        if dtype == torch.float64:
            assert bool(((drawn - mean).abs() < 60 * var.sqrt() + 1).all())


# -- in the hands of the methods ------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 40)[:, None]


def linear(name: str, likelihood: lk.Likelihood, **options) -> pb.BNN:
    with seeded(0):
        net = torch.nn.Linear(1, CASES[name].width).double()
    return pb.BNN(net, normal_prior(), likelihood, **options)


def data(name: str, num: int = 40, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a line."""
    x = torch.linspace(-1, 1, num, dtype=torch.float64)[:, None]
    slopes = torch.linspace(0.8, -0.4, CASES[name].width, dtype=torch.float64)
    y = samples(name, x * slopes + 0.2, 1, seed)[0]
    if name in CENSORED:  # about a third of the rows, at limits that have nothing to do with y
        limit = samples(name, 0 * x + (-0.2 if name.startswith("left") else 0.6), 1, seed + 1)[0][
            :, 0
        ]
        seen = (y[:, 0] > limit) if name.startswith("left") else (y[:, 0] < limit)
        y = torch.stack([torch.where(seen, y[:, 0], limit), seen.double()], 1)
    return x, y


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_target_is_refused_in_one_line_before_any_fit(name):
    model = linear(name, CASES[name].fixed())
    x, y = data(name)
    cases = dict(CASES[name].wrong) | {"same number of rows": None, "net returns|expects": "wide"}
    for message, value in cases.items():
        wrong = y.clone()
        if value is None:
            wrong = wrong[:-1]
        elif isinstance(value, str):
            wrong = torch.cat([wrong.reshape(len(x), -1)] * 2, 1)
        else:
            wrong[3] = value
        with pytest.raises((ValueError, TypeError), match=message) as caught:
            pb.MAP(num_steps=10**9).fit(model, x, wrong)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_counts_as_the_whole(name):
    model = linear(name, CASES[name].inferred())
    x, y = data(name)
    y = model.likelihood.target(y, CASES[name].width, torch.float64)

    def log_likelihood(x, y, **options):
        with seeded(0):
            trace = pyro.poutine.trace(model.pyro_model).get_trace(x, y, **options)
        trace.compute_log_prob()
        return trace.nodes["likelihood.data"]["log_prob_sum"]

    whole = log_likelihood(x, y)
    parts = sum(log_likelihood(x[i : i + 10], y[i : i + 10], num_data=40) for i in range(0, 40, 10))
    torch.testing.assert_close(parts / 4, whole)


@functools.cache
def fit(name: str, method: str) -> pb.Posterior:
    model = linear(name, CASES[name].inferred())
    return METHODS[method].fit(model, *data(name), seed=3, **num_draws(method))


FAST = {"MAP", "Laplace"}


@pytest.mark.covering(3)
@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=() if m in FAST else pytest.mark.slow) for m in METHODS]
)
@pytest.mark.parametrize("name", CASES)
def test_every_method_fits_it_or_refuses_in_words(name, method, tmp_path):
    try:
        posterior = fit(name, method)
    except pb.Refused as refusal:
        assert len(str(refusal)) > 40
        return
    x, y = data(name)
    p = posterior.predict(x)
    assert bool(torch.isfinite(p.log_prob(y)).all()) and p.pit(y).shape == (40, 1)
    if not p.likelihood.targets.classes:
        assert p.mean.shape == p.var.shape == p.quantile(0.5).shape == (40, 1)
        torch.testing.assert_close(p.var, p.aleatoric_var + p.epistemic_var)
    again = pb.Posterior.load(posterior.save(tmp_path / "p.nc"), posterior.model)
    torch.testing.assert_close(again.predict(x).log_prob(y), p.log_prob(y))


@pytest.mark.usefixtures("few_moves")
@pytest.mark.parametrize("name", CASES)
def test_a_tree_of_every_likelihood_is_scored_and_judged(name):
    x, y = data(name)
    posterior = fit(name, "Laplace")
    tree = posterior.to_datatree(x, y, test=(x, y))
    assert tree["log_likelihood"]["y"].shape == (1, posterior.num_draws, 40)
    assert tree["observed_data"]["y"].shape == (40,) and tree["predictions"]["log_prob"].shape == (
        40,
    )
    scores = pb.diagnostics.score(tree)
    classes = posterior.bnn.likelihood.targets.classes
    assert "log_prob" in scores and ("accuracy" in scores) == classes
    # how far a mean is from a value that was not seen, nobody knows
    assert ("rmse" in scores) == (name not in CENSORED and not classes)
    verdict = pb.diagnose(tree)
    assert "not_checked_model" not in {check.name for check in verdict.checks}
    assert tree.attrs["likelihood"] == posterior.bnn.likelihood.task


@pytest.mark.parametrize("name", NUMBERS)
def test_units_change_nothing_or_what_they_should(name):
    """Targets in units an eighth as large, where the response has units: the same draws, eight times the answer."""
    x, y = data(name, 32)
    found = []
    for factor in (1.0, 8.0):
        has_units = CASES[name].fixed().targets.units(torch.ones(1), torch.ones(1)) is not None
        here = torch.cat([factor * y[:, :1], y[:, 1:]], 1) if has_units else y
        units = Standardizer.fit(Dataset(x, here, "d", "regression"))
        model = linear(name, CASES[name].inferred(), standardizer=units)
        found.append((METHODS["MAP"].fit(model, x, here, seed=0).predict(x), here, factor))
    (p, y, _), (q, z, factor) = found
    factor = factor if has_units else 1.0
    volume = p.likelihood.targets.log_volume(y, factor)
    torch.testing.assert_close(q.standard_f, p.standard_f)
    torch.testing.assert_close(q.mean, factor * p.mean)
    torch.testing.assert_close(q.aleatoric_var, factor**2 * p.aleatoric_var)
    torch.testing.assert_close(q.quantile(0.8), factor * p.quantile(0.8), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q.sample(seed=1), factor * p.sample(seed=1))
    torch.testing.assert_close(q.log_prob(z) + volume, p.log_prob(y))
    torch.testing.assert_close(q.pit(z), p.pit(y))


LAPLACE = pb.Laplace(num_steps=300, compile=False)
NUTS = pb.NUTS(num_chains=2, num_warmup=200, max_tree_depth=4, compile=False)


# components that overlap are told apart by far more data
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name in ("heteroskedastic", "categorical", "poisson") else pytest.mark.slow,
        )
        for name in CASES
        if name != "mixture_density"
    ],
)
def test_the_expected_curvature_is_the_observed_one_where_data_are_many(name):
    x, y = data(name, 3000)
    model = linear(name, CASES[name].fixed())
    mode = pb.MAP(num_steps=150, lr=0.1, compile=False).fit(model, x, y)
    widths = [
        torch.cat([v.std(1).flatten() for v in posterior.draws.values()])
        for posterior in (
            pb.Laplace(curvature=c, predictive="draws", compile=False).fit(
                model, x, y, num_draws=500, init=mode
            )
            for c in ("ggn", "hessian")
        )
    ]
    torch.testing.assert_close(widths[0], widths[1], rtol=0.12, atol=0)


# nor is a shift of all logits, which the prior alone holds, sampled in so few draws
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("mixture_density", "categorical")]
)
def test_laplace_and_nuts_agree_where_data_are_many(name):
    """A line through 1000 data: the posterior is normal, and the expected curvature is the observed one."""
    x, y = data(name, 1000)
    model = linear(name, CASES[name].fixed())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        laplace = LAPLACE.fit(model, x, y, num_draws=2000, seed=0)
        nuts = NUTS.fit(model, x, y, num_draws=300, seed=0)
    for site in ("net.weight", "net.bias"):
        a, b = (p.draws[site].flatten(0, 1).flatten(1) for p in (laplace, nuts))
        assert float(((a.mean(0) - b.mean(0)) / b.std(0)).abs().max()) < 0.3, site
        assert (
            0.8 < float((a.std(0) / b.std(0)).min()) and float((a.std(0) / b.std(0)).max()) < 1.25
        ), site


@pytest.mark.parametrize("name", CENSORED)
def test_a_censored_row_counts_as_the_probability_of_where_it_lies(name):
    likelihood = CASES[name].fixed()
    f = outputs(name).requires_grad_()
    limit = CASES[name].law(f.detach().numpy()).ppf([[0.1], [0.5], [0.999]])
    y = torch.tensor(np.stack([limit, np.zeros_like(limit)], -1))
    law = CASES[name].law(f.detach().numpy())
    found = likelihood.log_prob(f, y, {})
    expected = law.logcdf(limit) if name.startswith("left") else law.logsf(limit)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-9)
    slope = torch.autograd.grad(found[1].sum(), f, create_graph=True)[0]
    second = torch.autograd.grad(slope.sum(), f)[0]
    torch.testing.assert_close(likelihood.curvature_root(f, y[1], {})[:, 0].square(), -second)


@pytest.mark.parametrize("name", CENSORED)
def test_the_transform_of_censored_rows_is_uniform_too(name):
    x, y = data(name, 1000)
    slopes = torch.linspace(0.8, -0.4, CASES[name].width, dtype=torch.float64)
    p = pb.Prediction((x * slopes + 0.2)[None, None], CASES[name].fixed(), {})
    assert 0.2 < 1 - float(y[:, 1].mean()) < 0.6
    assert stats.kstest(p.pit(y)[:, 0].numpy(), "uniform").pvalue > 0.01
    # replicates are cut off where the row was, so that transforms by draws are uniform as well
    drawn = p.likelihood.targets.as_observed(p.sample(per_draw=400), y)
    pit = pb.metrics.pit(drawn[0], y[:, :1])
    assert stats.kstest(pit[:, 0].numpy(), "uniform").pvalue > 0.01


def test_censored_targets_come_as_survival_libraries_have_them():
    x, y = data("weibull", 20)
    structured = np.array(
        [(bool(e), t) for t, e in y.numpy()], dtype=[("event", "?"), ("time", "<f8")]
    )
    frame = pd.DataFrame({"duration": y[:, 0].numpy(), "observed": y[:, 1].numpy().astype(bool)})
    model = linear("weibull", lk.Weibull(1.7))
    expected = METHODS["MAP"].fit(model, x, y).predict(x)
    for given in (structured, frame):
        found = METHODS["MAP"].fit(model, x, given).predict(x)
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.log_prob(given), expected.log_prob(y))


def test_two_ordered_labels_are_a_bernoulli():
    f = outputs("ordinal")
    y = torch.tensor([0, 1, 0, 1, 1, 0])
    expected = lk.Bernoulli().log_prob(f, y[:, None].double(), {})
    torch.testing.assert_close(lk.Ordinal(2).log_prob(f, y, {}), expected)


# -- what single likelihoods are for --------------------------------------------------------------------------------


@pytest.mark.slow
def test_outliers_do_not_spoil_a_line_under_heavy_tails():
    x = torch.linspace(-1, 1, 60, dtype=torch.float64)[:, None]
    with seeded(1):
        y = 2 * x + 0.1 * torch.randn_like(x)
    y[::10] += 15.0
    off = {}
    for name, noise in (
        ("t", lk.StudentT(3.0, prior())),
        ("normal", lk.HomoskedasticGaussian(prior())),
    ):
        model = pb.BNN(linear("gaussian", noise).net, normal_prior(3.0), noise)
        mean = pb.Laplace(num_steps=300, compile=False).fit(model, x, y).predict(x).mean
        off[name] = float((mean - 2 * x).abs().max())
    assert off["t"] < 0.15 and off["normal"] > 1.0


@pytest.mark.usefixtures("few_moves")
@pytest.mark.parametrize("method", ["MAP", "Laplace-kron", "MCDropout"])
def test_an_exposure_travels_with_its_rows(method):
    """Rates of one unit, learned from rows of very different exposure, in batches, standardised or not."""
    with seeded(2):
        x = torch.rand(400, 1).double() * 2 - 1
        exposure = torch.exp(3 * torch.rand(400, 1).double())
        y = torch.poisson(exposure * (0.5 + x).exp())
    x = torch.cat([x, exposure], 1)
    for units in (None, Standardizer.fit(Dataset(x, y, "d", "regression"))):
        with seeded(0):
            net = pb.networks.mlp(1, (4,) if method == "MCDropout" else (), 1).double()
        model = pb.BNN(net, normal_prior(), lk.Poisson(exposure=-1), standardizer=units)
        settings = {"num_steps": 100, "lr": 0.1} if method == "MAP" else {}
        posterior = dataclasses.replace(METHODS[method], **settings).fit(
            model, x, y, **num_draws(method)
        )
        assert set(posterior.draws) == {f"net.net.{name}" for name, _ in net.named_parameters()}
        twice = torch.cat([x[:, :1], 2 * x[:, 1:]], 1)
        torch.testing.assert_close(posterior.predict(twice).mean, 2 * posterior.predict(x).mean)
        if method == "MAP":
            rate = posterior.predict(torch.cat([x[:, :1], torch.ones_like(exposure)], 1)).mean
            torch.testing.assert_close(rate, (0.5 + x[:, :1]).exp(), rtol=0.1, atol=0)
    tree = posterior.to_datatree(x, y)
    assert bool((tree["function"]["probe_x"][:, -1] == 1).all())
    with pytest.raises(ValueError, match="exposure 0 in column -1"):
        posterior.predict(0 * x)


@pytest.mark.slow
def test_noise_that_the_net_gives_has_a_laplace_that_agrees_with_nuts():
    x = torch.linspace(-1, 1, 800, dtype=torch.float64)[:, None]
    with seeded(4):
        y = x + torch.exp(x - 1) * torch.randn_like(x)
    model = linear("heteroskedastic", lk.HeteroskedasticGaussian())
    laplace = LAPLACE.fit(model, x, y, num_draws=1000, seed=0).predict(x)
    nuts = NUTS.fit(model, x, y, num_draws=300, seed=0).predict(x)
    torch.testing.assert_close(laplace.aleatoric_var, nuts.aleatoric_var, rtol=0.05, atol=0.005)
    torch.testing.assert_close(
        laplace.epistemic_var.sqrt(), nuts.epistemic_var.sqrt(), rtol=0.25, atol=0.002
    )
    noisy = laplace.aleatoric_var.sqrt()[:, 0]
    assert float(noisy[-1] / noisy[0]) > 3.0


def cut(name: str, y: torch.Tensor) -> torch.Tensor:
    """Targets of a censored response as they are seen up to a limit that is the same for all rows."""
    limit = 1.5 if name == "weibull" else 0.0
    seen = y[:, :1] > limit if name.startswith("left") else y[:, :1] < limit
    return torch.cat([torch.where(seen, y[:, :1], limit), seen.to(y.dtype)], 1)


# the components of a mixture can be exchanged, which chains do not: its heads have no ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "mixture_density"])
def test_ranks_of_the_truth_are_uniform(name):
    """Simulation-based calibration by NUTS, 100 data sets at once: the line and the likelihood's own parameters."""
    model = linear(name, CASES[name].inferred())
    count = 100
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    truths, ys = zip(*(simulate(model, x, 3 * index) for index in range(count)))
    ys = [cut(name, y) if name in CENSORED else y for y in ys]
    method = pb.NUTS(num_chains=1, num_warmup=150, max_tree_depth=4, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits = fit_batch(method, model, x, ys, num_draws=132)
    each = [
        rank(truth, found, x, y, x[:1], 33, index)
        for index, (truth, found, y) in enumerate(zip(truths, fits, ys))
    ]
    assert {"f0.0", "log_joint"} <= set(each[0])
    found = {
        name: uniformity(np.array([ranks[name] for ranks in each]), 33).p_value for name in each[0]
    }
    assert len(found) * min(found.values()) > 0.001, (
        found
    )  # Bonferroni: the quantities are dependent


@pytest.mark.parametrize("value", [torch.tensor([0.1, 0.2]), dist.HalfNormal(torch.ones(2))])
def test_a_parameter_has_one_value_or_one_for_each_column(value):
    model = pb.BNN(
        pb.networks.mlp(1, (), 3, seed=0), normal_prior(), lk.HomoskedasticGaussian(value)
    )
    with pytest.raises(ValueError, match="one value, or one per column of y, 3"):
        pb.MAP(num_steps=1, compile=False).fit(model, torch.zeros(4, 1), torch.zeros(4, 3))
