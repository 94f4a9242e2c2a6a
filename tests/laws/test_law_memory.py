"""The law of memory: draws that do not fit are refused in words before the first step."""

from __future__ import annotations

import dataclasses

import pytest
from models import toy_model
from test_contract import METHODS, ONE_DRAW, X, Y, num_draws

import pyrobnn as pb
from pyrobnn.core.memory import NotEnoughMemory

MANY = 10**12  # no machine holds as many draws of 25 weights


def _stepped(*_):
    pytest.fail("it has taken a step")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in {*ONE_DRAW, "NUTS-pyro"}])
def test_draws_that_do_not_fit_are_refused_before_the_first_step(name):
    method = METHODS[name]
    asked = {"num_draws": MANY}
    if name == "DeepEnsemble":
        method = dataclasses.replace(method, num_members=MANY)
        asked = {}
    with pytest.raises(
        NotEnoughMemory,
        match=r"draws × \d+ parameters needs .* bytes but .* are free: lower num_draws",
    ):
        method.fit(toy_model(), X, Y, callbacks=[_stepped], **asked)


@pytest.mark.parametrize("name", ["SVI", "SGLD", "SWAG", "MCDropout", "Laplace-kron"])
def test_the_last_draw_that_fits_is_drawn(name, monkeypatch):
    """Two copies of 6 draws of 25 weights in float32, of every chain."""
    chains = getattr(METHODS[name], "num_chains", 1)
    free = 2 * 6 * chains * 25 * 4
    monkeypatch.setattr("pyrobnn.core.memory.free_bytes", lambda device: free)
    posterior = METHODS[name].fit(toy_model(), X, Y, **num_draws(name))
    assert posterior.num_draws == 6
    with pytest.raises(pb.Refused, match="of 7 draws|14 draws"):
        METHODS[name].fit(toy_model(), X, Y, num_draws=7)
