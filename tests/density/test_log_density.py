"""Any torch function as a density: its exact moments, its constant by SMC, where it starts, and who refuses it."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, assert_var_within
from test_contract import METHODS
from torch.distributions import constraints

import pyrobnn as pb

PRECISION = torch.tensor([[2.0, 0.8], [0.8, 1.0]], dtype=torch.float64)
COUNTS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
INIT = {"at": torch.zeros(2, dtype=torch.float64), "rate": 1.0, "share": torch.full((3,), 1 / 3)}
SUPPORT = {"rate": constraints.positive, "share": constraints.simplex}
QUICK = pb.NUTS(num_warmup=120, compile=False)


def _density(values):
    away = values["at"] - 3.0
    quadratic = -away @ PRECISION @ away / 2
    gamma = 3 * values["rate"].log() - 2 * values["rate"]
    return quadratic + gamma + ((COUNTS - 1) * values["share"].log()).sum()


@pytest.mark.slow
def test_moments_are_exact_on_the_reals_the_positive_and_the_simplex(tmp_path):
    posterior = pb.sample(_density, INIT, support=SUPPORT, method=QUICK, num_draws=250)
    assert {value.dtype for value in posterior.draws.values()} == {torch.float64}
    assert posterior.draws["share"].shape == (4, 250, 3)
    cov = torch.linalg.inv(PRECISION)
    assert_mean_within(posterior.draws["at"], [3.0, 3.0])
    assert_var_within(posterior.draws["at"], cov.diagonal(), mean=[3.0, 3.0])
    assert_mean_within(posterior.draws["rate"], 2.0)
    assert_var_within(posterior.draws["rate"], 1.0, mean=2.0)
    assert_mean_within(posterior.draws["share"], COUNTS / 6)
    assert pb.diagnose(posterior.to_datatree()).draws == "pass"
    path = posterior.save(tmp_path / "draws.nc")
    read = pb.Posterior.load(path, pb.LogDensity(_density, INIT, support=SUPPORT))
    assert all(torch.equal(read.draws[name], value) for name, value in posterior.draws.items())


def test_a_mode_and_the_gaussian_around_it():
    mode = pb.sample(_density, INIT, support=SUPPORT, method=pb.MAP(num_steps=300, compile=False))
    torch.testing.assert_close(
        mode.draws["at"][0, 0], torch.tensor([3.0, 3.0], dtype=torch.float64)
    )
    assert float(mode.draws["rate"]) == pytest.approx(1.5, rel=1e-3)
    laplace = pb.Laplace(curvature="hessian", num_steps=300, compile=False)
    posterior = pb.sample(_density, INIT, support=SUPPORT, method=laplace)
    assert_mean_within(posterior.draws["at"], [3.0, 3.0])


SMC = pb.SMC(num_particles=800, compile=False)


@pytest.mark.parametrize(
    ("method", "num_draws"),
    [(SMC, None), pytest.param(QUICK, 300, marks=pytest.mark.slow)],
    ids=["SMC", "NUTS"],
)
def test_smc_finds_the_constant_from_a_reference(method, num_draws):
    def density(values):
        return -(values["z"] ** 2).sum() / 2

    reference = {"z": dist.Normal(torch.zeros(2), 3.0)}
    posterior = pb.sample(
        density, {"z": torch.zeros(2)}, support=reference, method=method, num_draws=num_draws
    )
    assert_mean_within(posterior.draws["z"], 0.0, min_ess=200)
    assert_var_within(posterior.draws["z"], 1.0, mean=0.0, min_ess=200)
    if method is SMC:
        exact = math.log(2 * math.pi)
        assert abs(posterior.log_evidence - exact) < 5 * posterior.meta["log_evidence_error"]
        with pytest.raises(pb.Refused, match="a distribution as its support"):
            pb.sample(density, {"z": torch.zeros(2)}, method=method)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(transitions diverged|warm-up was not)")  # at the edge
def test_chains_start_apart_around_init_where_the_density_is_finite():
    def narrow(values):  # nothing but NaN further than 0.3 from 5
        return (0.09 - (values["z"] - 5.0) ** 2).log()

    program = pb.LogDensity(narrow, {"z": 5.0})
    starts = program.starts(6, seed=1).draws["z"]
    assert len(starts.unique()) == 6 and bool(((starts - 5).abs() < 0.3).all())
    wide = (
        pb.LogDensity(lambda values: -(values["z"] ** 2), {"z": 5.0}).starts(99, seed=1).draws["z"]
    )
    assert 3.0 <= float(wide.min()) < 4.0 and 6.0 < float(wide.max()) <= 7.0
    draws = pb.sample(
        narrow, {"z": 5.0}, method=pb.NUTS(num_chains=2, num_warmup=50, compile=False), num_draws=50
    )
    assert bool(((draws.draws["z"] - 5).abs() < 0.3).all())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_that_need_more_than_a_density_refuse(name):
    method = METHODS[name]
    if isinstance(method, (pb.NUTS, pb.SMC, pb.SVI, pb.Laplace, pb.MAP)):
        return
    for given in (method, name):  # an instance, and a word
        with pytest.raises(pb.Refused, match="use NUTS, SMC, SVI, Laplace"):
            pb.sample(lambda values: -(values["z"] ** 2), {"z": 0.0}, method=given)


@pytest.mark.parametrize(
    ("init", "support", "said"),
    [
        ({}, {}, "needs a tensor by name"),
        ({"log_density": 0.0}, {}, "not among them"),
        ({"z": 0.0}, {"q": constraints.positive}, "no other names"),
        ({"z": -1.0}, {"z": constraints.positive}, "outside of its support"),
        ({"z": torch.zeros(2)}, {}, "one finite number"),
        ({"z": math.inf}, {}, "outside of its support|one finite number"),
        ({"z": torch.zeros(())}, {"z": dist.Normal(torch.zeros(2), 1.0)}, "make them the same"),
    ],
)
def test_a_wrong_start_is_an_error(init, support, said):
    with pytest.raises(ValueError, match=said):
        pb.sample(lambda values: -(values["z"] ** 2), init, support=support, method=QUICK)
