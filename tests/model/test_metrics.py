from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pyrobnn import metrics


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
LABELS = torch.tensor([0, 1, 1])


def test_outputs_are_scored_in_units_of_their_own():
    mean = torch.zeros(2, 2)
    y = torch.tensor([[0.3, 287.0], [0.3, -287.0]])
    assert metrics.rmse(mean[:, :1], y[:, :1]) == pytest.approx(0.3)
    assert metrics.rmse(mean[:, 1], y[:, 1]) == pytest.approx(287)
    scale = torch.tensor([0.6, 574.0])
    assert metrics.rmse(mean, y, scale=scale) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="2 outputs .*units of their own: score one at a time"):
        metrics.rmse(mean, y)


def test_log_predictive_density_is_a_mean():
    assert metrics.log_predictive_density(torch.tensor([-1.0, -2.0])) == -1.5


def test_crps_equals_the_sum_over_all_pairs():
    draws = normal(30, 4, 2)
    y = normal(4, 2, seed=1)
    pairs = (draws[:, None] - draws[None]).abs().mean((0, 1))
    expected = (draws - y).abs().mean(0) - pairs / 2
    torch.testing.assert_close(metrics.crps(draws, y), expected)


def test_crps_of_many_normal_draws_is_the_closed_form():
    draws = torch.as_tensor(stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)).unsqueeze(-1)
    for y in (0.0, 1.3):
        closed = y * (2 * stats.norm.cdf(y) - 1) + 2 * stats.norm.pdf(y) - 1 / math.sqrt(math.pi)
        assert float(metrics.crps(draws, torch.tensor([y]))) == pytest.approx(closed, abs=1e-4)


def test_crps_of_one_draw_is_the_absolute_error_and_far_draws_keep_their_digits():
    assert metrics.crps(torch.tensor([[3.0]]), torch.tensor([5.0])).tolist() == [2.0]
    draws = normal(50, 3)
    y = normal(3, seed=1)
    torch.testing.assert_close(
        metrics.crps(draws + 1e6, y + 1e6), metrics.crps(draws, y), rtol=1e-6, atol=1e-8
    )


def test_pit_is_uniform_for_a_calibrated_predictive_and_not_for_a_narrow_one():
    draws = normal(19, 4000)
    y = normal(4000, seed=1)
    assert stats.kstest(metrics.pit(draws, y).numpy(), "uniform").pvalue > 1e-6
    assert stats.kstest(metrics.pit(0.5 * draws, y).numpy(), "uniform").pvalue < 1e-6


def test_pit_of_draws_that_all_tie_is_uniform_too():
    u = metrics.pit(torch.zeros(9, 4000), torch.zeros(4000))
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6


def test_scores_of_probabilities():
    assert metrics.accuracy(PROBS, LABELS) == pytest.approx(2 / 3)
    assert metrics.nll(PROBS, LABELS) == pytest.approx(-np.log([0.7, 0.1, 0.4]).mean())
    first = 0.3**2 + 0.2**2 + 0.1**2
    second = 0.1**2 + 0.9**2 + 0.8**2
    third = 0.3**2 + 0.6**2 + 0.3**2
    assert metrics.brier(PROBS, LABELS) == pytest.approx((first + second + third) / 3)


def test_ece_by_hand():
    assert metrics.ece(PROBS, LABELS, num_bins=2) == pytest.approx((0.6 + 2 * 0.25) / 3)


def test_ece_of_certain_and_right_is_zero():
    probs = torch.eye(4)
    assert metrics.ece(probs, torch.arange(4)) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.rmse(torch.zeros(3, 1), torch.zeros(3)), r"\(3, 1\).*\(3,\)"),
        (lambda: metrics.rmse(torch.zeros(0), torch.zeros(0)), "is empty"),
        (lambda: metrics.crps(torch.zeros(2, 10, 3), torch.zeros(3)), "flatten chains"),
        (lambda: metrics.nll(PROBS, torch.tensor([0, 1, 3])), "0 … 2, got 0 … 3"),
        (lambda: metrics.nll(PROBS.log(), LABELS), "not logits"),
        (lambda: metrics.accuracy(PROBS, LABELS.float()), "use y.long"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
