from __future__ import annotations

import pytest
import torch

from pyrobnn.inference.vi import kl_schedules


def test_the_five_weightings_are_their_papers():
    m = 6
    schedules = {
        "one": kl_schedules.Constant(1.0),
        "zero": kl_schedules.Constant(0.0),
        "graves": kl_schedules.Graves(),
        "blundell": kl_schedules.Blundell(),
        "weights": kl_schedules.PerWeight(),
    }
    per_batch = {name: each.factors(m, m, 10) / m for name, each in schedules.items()}
    blundell = torch.tensor(
        [2 ** (m - i) / (2**m - 1) for i in range(1, m + 1)], dtype=torch.float64
    )
    torch.testing.assert_close(per_batch["blundell"], blundell)
    torch.testing.assert_close(per_batch["graves"], torch.full((m,), 1 / m, dtype=torch.float64))
    sums = {name: round(float(value.sum()), 12) for name, value in per_batch.items()}
    assert sums == {"one": 1.0, "zero": 0.0, "graves": 1.0, "blundell": 1.0, "weights": 0.1}


def test_blundell_survives_many_batches():
    weights = kl_schedules.Blundell().factors(5000, 5000, 10) / 5000
    assert torch.isfinite(weights).all() and float(weights.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kl_schedules.Constant(-0.1), "beta"),
        (lambda: kl_schedules.Linear(0.7, 0.7), "at most 1"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
