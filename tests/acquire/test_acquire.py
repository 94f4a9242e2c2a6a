"""Scores of candidates against what can be computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

import pyrobnn as pb


def prediction(f, likelihood=None):
    """Draws f (draw, point) of one output with known noise."""
    return pb.Prediction(
        f[None, :, :, None], likelihood or pb.likelihoods.HomoskedasticGaussian(0.5), {}
    )


def normal_f(scales, num=256):
    z = torch.randn(
        num, len(scales), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return z * torch.tensor(scales, dtype=torch.float64)


def test_bald_of_a_normal_function_is_half_the_log_of_total_over_noise():
    scales = [0.1, 0.5, 2.0]
    exact = torch.tensor([0.5 * math.log1p((s / 0.5) ** 2) for s in scales])
    found = torch.stack([pb.acquire.bald(prediction(normal_f(scales)), seed=s) for s in range(8)])
    error = found.std(0) / 8**0.5 + 0.05  # and what 256 draws of f leave open
    assert ((found.mean(0) - exact).abs() < 4 * error).all()


def test_a_row_asked_for_already_tells_nothing_more_and_its_twin_little():
    f = normal_f([2.0, 1.5])[:, [0, 0, 1]]
    p = prediction(f)
    assert pb.acquire.bald(p, given=[0])[0] == 0
    gain = pb.acquire.bald(p, given=[0]) - pb.acquire.bald(p)[0]
    assert gain[1] < gain[2]
    assert set(pb.acquire.batch(lambda rows: pb.acquire.bald(p, given=rows), 2).tolist()) in (
        {0, 2},
        {1, 2},
    )


@pytest.mark.parametrize("likelihood", [pb.likelihoods.Bernoulli(), pb.likelihoods.Categorical()])
def test_bald_of_classes_given_nothing_is_their_mutual_information_and_agrees_with_its_estimate(
    likelihood,
):
    f = 2 * torch.randn(
        1, 200, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    p = pb.Prediction(f if likelihood.targets.kind == "label" else f[..., :1], likelihood, {})
    exact = pb.acquire.bald(p)
    assert torch.equal(exact, p.epistemic_entropy)
    sure = torch.zeros_like(
        p.standard_f[:, :, :1]
    )  # a point that tells nothing, given: the estimate of the others
    with_one = pb.Prediction(torch.cat([sure, p.standard_f], 2), likelihood, {})
    estimates = torch.stack([pb.acquire.bald(with_one, given=[0], seed=s)[1:] for s in range(8)])
    assert ((estimates.mean(0) - exact).abs() < 5 * estimates.std(0) / 8**0.5 + 1e-3).all()


def test_epig_prefers_what_bears_on_the_targets():
    z = normal_f([1.0, 3.0], 512)
    # the wide candidate has nothing to do with the target
    candidates = prediction(z)
    targets = prediction(z[:, :1])
    epig = pb.acquire.epig(candidates, targets)
    bald = pb.acquire.bald(candidates)
    assert bald.argmax() == 1 and epig.argmax() == 0
    found = torch.stack(
        [pb.acquire.epig(candidates, targets, num_draws=512, seed=10 * s)[0] for s in range(4)]
    )
    exact = -0.5 * math.log(
        1 - (1 / 1.25) ** 2
    )  # ρ of two targets of one f with variance 1 and noise 0.5
    assert abs(float(found.mean()) - exact) < 4 * float(found.std()) / 2 + 0.05


def test_improvement_of_a_batch_is_that_of_its_best():
    f = torch.tensor([[1.0, 3.0, 0.0], [3.0, 1.0, 0.0]])
    p = prediction(f)
    assert pb.acquire.expected_improvement(p, 1.0).tolist() == [1.0, 1.0, 0.0]
    assert pb.acquire.expected_improvement(p, 1.0, given=[0]).tolist() == [1.0, 2.0, 1.0]
    assert pb.acquire.expected_improvement(p, 1.0, maximize=False).tolist() == [0.0, 0.0, 1.0]


def test_a_row_that_is_named_twice_was_asked_for_once():
    p = prediction(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    for score in (pb.acquire.bald, lambda p, given: pb.acquire.epig(p, p, given=given)):
        torch.testing.assert_close(score(p, given=[2, 2]), score(p, given=[2]))


def test_thompson_takes_each_draw_at_its_best_and_no_row_twice():
    f = torch.eye(4).repeat_interleave(torch.tensor([1, 2, 3, 4]), 0)
    rows = torch.stack([pb.acquire.thompson(prediction(f), seed=s) for s in range(400)])[:, 0]
    shares = torch.bincount(rows, minlength=4) / 400
    assert (shares - torch.tensor([0.1, 0.2, 0.3, 0.4])).abs().max() < 0.1
    assert sorted(pb.acquire.thompson(prediction(f), 4).tolist()) == [0, 1, 2, 3]
    for score in (torch.ones(4, 2), torch.tensor([1.0, torch.nan, 0.0])):
        with pytest.raises(ValueError, match="a number for each candidate"):
            pb.acquire.batch(lambda rows, score=score: score, 2)
    with pytest.raises(ValueError, match="ask for fewer"):
        pb.acquire.thompson(prediction(f), 5)
    with pytest.raises(ValueError, match="there are 4 candidates: ask for fewer"):
        pb.acquire.batch(
            lambda rows: pb.acquire.expected_improvement(prediction(f), 0.5, given=rows), 5
        )


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda p: pb.acquire.thompson(p, output=3), "'output' is 3, but f has 1 columns"),
        (
            lambda p: pb.acquire.expected_improvement(p, 0.0, output=1),
            "'output' is 1, but f has 1 columns",
        ),
        (lambda p: pb.acquire.expected_improvement(p, math.nan), "'best' must be finite"),
        (
            lambda p: pb.acquire.expected_improvement(p, 0.0, given=[4]),
            "'given' has row 4, but there are 4 candidates",
        ),
        (
            lambda p: pb.acquire.bald(p, given=[-1]),
            "'given' has row -1, but there are 4 candidates",
        ),
        (
            lambda p: pb.acquire.epig(p, p, given=torch.tensor([9])),
            "'given' has row 9, but there are 4 candidates",
        ),
    ],
)
def test_a_row_or_an_output_that_is_not_there_is_refused(score, message):
    with pytest.raises(ValueError, match=message):
        score(prediction(torch.eye(4)))


def test_a_draw_as_a_function_is_what_predict_gives_and_has_a_gradient():
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    data = pb.data.Dataset(x, 5 + 3 * x, "line", "regression")
    model = pb.BNN(
        pb.networks.mlp(1, (5,), seed=0),
        pb.priors.FanInNormal(),
        pb.likelihoods.HomoskedasticGaussian(0.3),
        standardizer=pb.data.Standardizer.fit(data),
    )
    posterior = pb.SVI(num_steps=20, compile=False).fit(model, data.x, data.y, num_draws=5)
    at = data.x.clone().requires_grad_()
    f = pb.acquire.function(posterior, 3)(at)
    assert torch.allclose(f, posterior.predict(data.x).f[0, 3], rtol=1e-5)
    (slope,) = torch.autograd.grad(f.sum(), at)
    assert slope.abs().min() > 0
