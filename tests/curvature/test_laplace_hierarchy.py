"""Hierarchies whose joint density grows without bound where a scale goes to zero: Laplace says so of a program."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.inference.curvature import precision

METHOD = pb.Laplace(map=pb.MAP(num_steps=300, compile=False), compile=False)
LEVELS = torch.zeros(6)


def groups(x, y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("groups", len(y)):
        level = pyro.sample("level", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(level, 1.0), obs=y)


def test_the_remedy_is_one_that_a_program_can_take():
    with pytest.warns(UserWarning, match="not positive definite") as warned:
        posterior = METHOD.fit(groups, None, LEVELS, seed=0, num_draws=6)
    codes = [finding["code"] for finding in posterior.meta["findings"]]
    assert "hessian_indefinite_of_program" in codes
    said = " ".join(str(warning.message) for warning in warned)
    assert "use NUTS" in said and "ggn" not in said


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_hessian_that_is_not_finite_is_named_by_its_sites(monkeypatch):
    exact = precision.hessian

    def infinite_in_scale(density, mode, index):
        matrix = exact(density, mode, index)
        place = density.site("scale").start
        matrix[place, place] = torch.inf
        return matrix

    monkeypatch.setattr(precision, "hessian", infinite_in_scale)
    with pytest.raises(Refused, match="is not finite in 'scale', where") as refused:
        METHOD.fit(groups, None, LEVELS, seed=0, num_draws=6)
    assert "network" not in str(refused.value)
