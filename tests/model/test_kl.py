from __future__ import annotations

import math

import pytest
import torch

from pyrobnn import kl_schedules
from pyrobnn.studies.divergence import Mixture1D, fit_normal, kl_divergence

TWO = Mixture1D((0.4, 0.6), (-2.0, 3.0), (0.5, 1.0))


def test_the_five_weightings_are_their_papers():
    m = 6
    per_batch = {
        "one": kl_schedules.Constant(1.0).per_batch(m, 10),
        "zero": kl_schedules.Constant(0.0).per_batch(m, 10),
        "graves": kl_schedules.Graves().per_batch(m, 10),
        "blundell": kl_schedules.Blundell().per_batch(m, 10),
        "weights": kl_schedules.PerWeight().per_batch(m, 10),
    }
    blundell = torch.tensor([2 ** (m - i) / (2**m - 1) for i in range(1, m + 1)], dtype=torch.float64)
    torch.testing.assert_close(per_batch["blundell"], blundell)
    torch.testing.assert_close(per_batch["graves"], torch.full((m,), 1 / m, dtype=torch.float64))
    sums = {name: round(float(value.sum()), 12) for name, value in per_batch.items()}
    assert sums == {"one": 1.0, "zero": 0.0, "graves": 1.0, "blundell": 1.0, "weights": 0.1}


def test_blundell_survives_many_batches():
    weights = kl_schedules.Blundell().per_batch(5000, 10)
    assert torch.isfinite(weights).all() and float(weights.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kl_schedules.Constant(-0.1), "beta"),
        (lambda: kl_schedules.Linear(0.7, 0.7), "at most 1"),
        (lambda: kl_schedules.Cyclical(cycles=0), "cycles"),
        (lambda: kl_schedules.Cyclical(ramp=1.0), "ramp"),
        (lambda: Mixture1D((0.5, 0.6), (0, 1), (1, 1)), "add up"),
        (lambda: Mixture1D((1.0,), (0, 1), (1, 1)), "one entry"),
        (lambda: kl_divergence(TWO, 0.0, 1.0, "backward"), "direction"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_divergence_of_normals_is_the_closed_form():
    p = Mixture1D((1.0,), (0.3,), (0.7,))
    expected = math.log(1.5 / 0.7) + (0.7**2 + (0.3 + 1) ** 2) / (2 * 1.5**2) - 0.5
    assert float(kl_divergence(p, -1.0, 1.5, "forward")) == pytest.approx(expected, abs=1e-8)
    expected = math.log(0.7 / 1.5) + (1.5**2 + (0.3 + 1) ** 2) / (2 * 0.7**2) - 0.5
    assert float(kl_divergence(p, -1.0, 1.5, "reverse")) == pytest.approx(expected, abs=1e-8)


def test_forward_covers_and_reverse_seeks():
    mean, var = TWO.mean_var
    loc, scale, _ = fit_normal(TWO, "forward")
    assert (loc, scale) == pytest.approx((mean, math.sqrt(var)), abs=1e-4)
    left, right = (fit_normal(TWO, "reverse", start=(start, 0.5)) for start in (-2.0, 3.0))
    assert left[:2] == pytest.approx((-2.0, 0.5), abs=0.05)
    assert right[:2] == pytest.approx((3.0, 1.0), abs=0.05)
    # a well separated mode of weight w costs log(1 / w) nats
    assert left[2] == pytest.approx(math.log(1 / 0.4), abs=0.02)
    assert right[2] < left[2]
