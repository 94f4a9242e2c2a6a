"""Prediction against formulas: the law of total variance, the mixture density, entropies."""

from __future__ import annotations

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from models import toy, toy_model, toy_net
from scipy import stats

import pyrobnn as pb
from pyrobnn.likelihoods import (
    SCALE,
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
)
from pyrobnn.posterior import datatree
from pyrobnn.posterior.prediction import Prediction

GENERATOR = torch.Generator().manual_seed(0)
F = torch.randn(2, 5, 3, 2, generator=GENERATOR, dtype=torch.float64)
SIGMA = torch.rand(2, 5, generator=GENERATOR, dtype=torch.float64) + 0.5
Y = torch.randn(3, 2, generator=GENERATOR, dtype=torch.float64)


def mixture_parts(f, sigma, y):
    """By hand, one draw after the other."""
    means = []
    variances = []
    densities = []
    for chain in range(2):
        for draw in range(5):
            means.append(f[chain, draw])
            variances.append(sigma[chain, draw] ** 2)
            densities.append(stats.norm.pdf(y, f[chain, draw], sigma[chain, draw]).prod(-1))
    return torch.stack(means), torch.stack(variances), torch.tensor(sum(densities) / 10)


@pytest.mark.parametrize("kind", ["inferred", "per_output", "heteroskedastic"])
def test_law_of_total_variance_and_mixture_density(kind):
    if kind == "heteroskedastic":
        likelihood = HeteroskedasticGaussian(0.01)
        f = torch.cat([F, F.flip(0)], -1)
        loc = F
        sigma = torch.nn.functional.softplus(F.flip(0)) + 0.01
        params = {}
    else:
        shape = (2,) if kind == "per_output" else ()
        likelihood = HomoskedasticGaussian(dist.HalfNormal(torch.ones(shape)))
        draws = SIGMA if kind == "inferred" else torch.stack([SIGMA, 2 * SIGMA], -1)
        f = F
        loc = F
        params = {SCALE: draws}
        sigma = (
            draws[..., None, None].expand(F.shape)
            if kind == "inferred"
            else draws[:, :, None].expand(F.shape)
        )
    p = Prediction(f, likelihood, params)
    means, variances, density = mixture_parts(loc, sigma, Y)
    torch.testing.assert_close(p.mean, means.mean(0))
    torch.testing.assert_close(p.aleatoric_var, variances.mean(0))
    torch.testing.assert_close(p.epistemic_var, means.var(0, correction=0))
    torch.testing.assert_close(p.var, (means**2 + variances).mean(0) - means.mean(0) ** 2)
    torch.testing.assert_close(p.log_prob(Y).exp(), density)


def test_quantiles_invert_the_mixture():
    p = Prediction(F, HomoskedasticGaussian(dist.HalfNormal(1.0)), {SCALE: SIGMA})
    q = p.quantile(torch.tensor([0.05, 0.5, 0.95]))
    assert q.shape == (3, 3, 2)
    cdf = torch.special.ndtr((q[:, None, None] - F) / SIGMA[..., None, None]).mean((1, 2))
    torch.testing.assert_close(cdf[:, 0, 0], torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
    single = Prediction(F[:1, :1], HomoskedasticGaussian(0.5), {})
    torch.testing.assert_close(single.quantile(0.975), single.mean + 0.5 * stats.norm.ppf(0.975))
    with pytest.raises(ValueError, match="'q' must lie"):
        p.quantile(1.0)


def rows(*shape: int, uniform: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return (torch.rand if uniform else torch.randn)(
        *shape, generator=generator, dtype=torch.float64
    )


MIXTURES = {
    "smooth": (rows(9, 300), 0.3 + 0.1 * rows(9, 300, uniform=True)),
    "one draw": (rows(9, 1), 0.1 + rows(9, 1, uniform=True)),
    "noise alone": (rows(9, 1).expand(9, 50), torch.full((9, 50), 0.5).double()),
    "far apart": (
        torch.where(torch.arange(301) % 3 == 0, -1000.0, 10.0) + rows(9, 301),
        0.1 + 0 * rows(9, 301),
    ),
    "tiny noise": (rows(9, 301), torch.full((9, 301), 1e-6).double()),
    "wild noise": (rows(9, 301), (3 * rows(9, 301)).exp()),
    "heavy tails": (rows(9, 500) / rows(9, 500, uniform=True), torch.full((9, 500), 0.3).double()),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_quantiles_equal_a_bisection_of_every_mixture(name):
    loc, scale = MIXTURES[name]
    raw = scale - 1e-12 + (-torch.expm1(1e-12 - scale)).log()  # of which it is the softplus
    p = Prediction(torch.stack([loc.T, raw.T], -1)[None], HeteroskedasticGaussian(1e-12), {})
    sd = (scale.square().mean(1) + loc.var(1, correction=0)).sqrt()
    # 0.31: on no flat stretch between these components, where any point would do
    for q in (1e-6, 0.024, 0.31, 0.9764, 1 - 1e-6):
        low = (loc - 9 * scale).amin(1)
        high = (loc + 9 * scale).amax(1)
        for _ in range(100):
            middle = (low + high) / 2
            z = (middle[:, None] - loc) / scale
            # the smaller tail keeps its digits
            tail = torch.special.erfc((-z if q < 0.5 else z) / math.sqrt(2)).mean(1) / 2
            below = tail < q if q < 0.5 else tail > 1 - q
            low = torch.where(below, middle, low)
            high = torch.where(below, high, middle)
        error = ((p.quantile(q)[:, 0] - low) / sd).abs()
        assert float(error.max()) < 1e-6, q


def test_quantiles_between_two_groups_end_and_keep_their_order():
    loc = (
        torch.tensor([-10.0, 10.0]).repeat_interleave(50)[None, :, None, None].expand(1, 100, 4, 2)
    )
    q = Prediction(loc, HomoskedasticGaussian(0.01), {}).quantile(torch.tensor([0.49, 0.5, 0.51]))
    assert q.shape == (3, 4, 2) and q.dtype == torch.float32
    assert bool(
        (q[0] < -9.9).all() and (q[2] > 9.9).all() and (q[1] >= q[0]).all() and (q[1] <= q[2]).all()
    )


def test_one_draw_has_no_epistemic_uncertainty():
    p = Prediction(F[:1, :1], HomoskedasticGaussian(0.5), {})
    assert torch.equal(p.epistemic_var, torch.zeros(3, 2, dtype=torch.float64))
    classes = Prediction(F[:1, :1], Categorical(), {})
    assert float(classes.epistemic_entropy.max()) < 1e-12


def test_entropies_add_up():
    p = Prediction(F, Categorical(), {})
    probs = F.softmax(-1).flatten(0, 1)
    total = -(probs.mean(0) * probs.mean(0).log()).sum(-1)
    torch.testing.assert_close(p.entropy, total)
    torch.testing.assert_close(p.aleatoric_entropy, -(probs * probs.log()).sum(-1).mean(0))
    torch.testing.assert_close(p.epistemic_entropy, total - p.aleatoric_entropy)
    labels = torch.tensor([0, 1, 1])
    torch.testing.assert_close(p.log_prob(labels), probs.mean(0)[torch.arange(3), labels].log())
    two = Prediction(F[..., :1], Bernoulli(), {})
    three = Prediction(torch.cat([torch.zeros_like(F[..., :1]), F[..., :1]], -1), Categorical(), {})
    torch.testing.assert_close(two.epistemic_entropy, three.epistemic_entropy)
    torch.testing.assert_close(
        two.log_prob(torch.tensor([0, 1, 1])), three.log_prob(torch.tensor([0, 1, 1]))
    )


def test_saturated_classes_have_zero_entropy_not_nan():
    f = torch.tensor([[[[1e4, -1e4]]]])
    p = Prediction(f, Categorical(), {})
    assert float(p.entropy) == 0.0 and float(p.epistemic_entropy) == 0.0


def test_samples_have_the_predictive_moments():
    p = Prediction(F.repeat(1, 20_000, 1, 1), HomoskedasticGaussian(0.5), {})
    y = p.sample(seed=3).flatten(0, 1)
    error = (y.mean(0) - p.mean).abs() / (p.var / len(y)).sqrt()
    assert float(error.max()) < 5
    assert torch.equal(p.sample(seed=3), p.sample(seed=3))


def test_far_out_mixture_density_does_not_underflow():
    p = Prediction(torch.zeros(1, 3, 1, 1), HomoskedasticGaussian(0.01), {})
    assert p.log_prob(torch.full((1, 1), 100.0)).item() == pytest.approx(
        stats.norm.logpdf(100, 0, 0.01), rel=1e-6
    )


def test_chunked_equals_whole(monkeypatch):
    x, _ = toy(31)
    model = toy_model()
    generator = torch.Generator().manual_seed(1)
    draws = {
        n: torch.randn(2, 7, *v.shape, generator=generator)
        for n, v in model.initial_values().items()
    }
    posterior = pb.Posterior(model, draws)
    whole = posterior.function(x)
    assert whole.shape == (2, 7, 31, 1)
    for chunk in (1, 100, 900):
        monkeypatch.setattr("pyrobnn.posterior.posterior.CHUNK_SCALARS", chunk)
        torch.testing.assert_close(posterior.function(x), whole)
    by_hand = torch.stack([model.forward({n: v[1, 3] for n, v in draws.items()}, x)])
    torch.testing.assert_close(whole[1, 3], by_hand[0])
    assert posterior.predict(x, num_draws=3).f.shape == (2, 3, 31, 1)


def test_questions_of_the_other_task_are_refused():
    with pytest.raises(AttributeError, match="use probs"):
        _ = Prediction(F, Categorical(), {}).mean
    with pytest.raises(AttributeError, match="use mean"):
        _ = Prediction(F, HomoskedasticGaussian(1.0), {}).probs
    with pytest.raises(ValueError, match="'y' has 2 rows"):
        Prediction(F, HomoskedasticGaussian(1.0), {}).log_prob(Y[:2])


def test_bad_inputs_to_predict():
    model = toy_model()
    draws = {n: v[None, None] for n, v in model.initial_values().items()}
    posterior = pb.Posterior(model, draws)
    with pytest.raises(ValueError, match="'x' is empty"):
        posterior.predict(torch.zeros(0, 1))
    with pytest.raises(ValueError, match="NaN"):
        posterior.predict(torch.full((2, 1), math.nan))
    with pytest.raises(TypeError, match="a program predicts by"):
        pb.Posterior(lambda x, y: None, draws).predict(torch.zeros(2, 1))


def test_priors_of_two_outputs_by_net():
    model = pb.BNN(toy_net(out=4), pb.priors.FanInNormal(), HeteroskedasticGaussian())
    draws = {n: v[None, None] for n, v in model.initial_values().items()}
    p = pb.Posterior(model, draws).predict(toy()[0])
    assert p.mean.shape == p.var.shape == (40, 2)


@pytest.mark.usefixtures("few_rounds")
def test_one_draw_of_one_point_is_what_the_net_says(monkeypatch):
    """No search and no batching: the floor of a prediction by a point estimate."""
    from scipy.optimize import elementwise

    x = torch.linspace(-1, 1, 20)[:, None]
    units = pb.data.Standardizer.fit(pb.data.Dataset(x, 3 * x + 1, "line", "regression"))
    for likelihood in (
        pb.likelihoods.HomoskedasticGaussian("learned"),
        pb.likelihoods.HeteroskedasticGaussian(),
    ):
        width = likelihood.width(1)
        net = pb.networks.mlp(1, (5,), width, seed=0)
        model = pb.BNN(net, pb.priors.FanInNormal(), likelihood, standardizer=units)
        posterior = pb.MAP(num_steps=20, compile=False).fit(model, x, 3 * x + 1)
        levels = torch.tensor([0.1, 0.5, 0.99])
        many = posterior.predict(x.repeat(2, 1))
        doubled = pb.Prediction(
            many.standard_f.expand(1, 2, *many.standard_f.shape[2:]),
            posterior.bnn.likelihood,
            {name: value.expand(1, 2, *value.shape[2:]) for name, value in many.params.items()},
            y_mean=units.y_mean,
            y_scale=units.y_scale,
        )
        # of two draws that are alike: by the search
        searched = doubled.quantile(levels)
        with monkeypatch.context() as patch:
            patch.setattr(elementwise, "find_root", None)
            for row in (0, 7):
                one = posterior.predict(x[row : row + 1])
                torch.testing.assert_close(one.mean[0], many.mean[row])
                torch.testing.assert_close(one.quantile(levels)[:, 0], searched[:, row])


def test_a_tree_takes_one_prediction_of_the_training_rows_for_all_that_rests_on_it(monkeypatch):
    x = torch.linspace(-1.0, 1.0, 30)[:, None]
    y = x.square()
    model = pb.BNN(toy_net(), pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
    posterior = datatree.prior_posterior(model, 40, 0)
    predict = pb.Posterior.predict
    sizes = []

    def counted(posterior, x, **options):
        sizes.append(len(x))
        return predict(posterior, x, **options)

    monkeypatch.setattr(pb.Posterior, "predict", counted)
    shared = posterior.to_datatree(x, y)
    assert sizes.count(30) == 1
    # in parts the densities are computed anew, and are the same
    sizes.clear()
    monkeypatch.setattr(datatree, "_PAIRS_AT_ONCE", 400)
    in_parts = posterior.to_datatree(x, y)
    assert sizes.count(30) == 1 and sizes.count(10) == 3
    density, density_in_parts = (tree["log_likelihood"]["y"] for tree in (shared, in_parts))
    np.testing.assert_allclose(density, density_in_parts, rtol=1e-5)
    np.testing.assert_array_equal(
        shared["posterior_predictive"]["y"], in_parts["posterior_predictive"]["y"]
    )
