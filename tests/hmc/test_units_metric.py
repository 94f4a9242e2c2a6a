"""The metric in its three forms, and the one that is found from draws and gradients."""

from __future__ import annotations

import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb
from pyrobnn.inference.hmc import metric
from pyrobnn.inference.hmc.machine import STATS, Machine
from pyrobnn.inference.hmc.run import Run

DIM, LIKE = 30, (torch.float64, torch.device("cpu"))


def precision() -> torch.Tensor:
    """Of unit variances, but for a narrow and a wide direction across all coordinates."""
    with seeded(3):
        basis = torch.linalg.qr(torch.randn(DIM, DIM, dtype=torch.float64))[0]
    values = torch.ones(DIM, dtype=torch.float64)
    values[0], values[1] = 400.0, 1 / 25
    return (basis * values) @ basis.T


def window(num_draws: int, chains: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws of the normal, gradients there, and counts."""
    with seeded(4):
        noise = torch.randn(chains, num_draws, DIM, dtype=torch.float64)
    z = torch.linalg.solve_triangular(torch.linalg.cholesky(precision()).T, noise.mT, upper=True).mT
    return z, -z @ precision(), torch.full((chains,), num_draws)


def condition(a: torch.Tensor) -> float:
    """Largest over smallest scale of the whitened normal."""
    columns = metric.unwhiten(torch.eye(DIM, dtype=torch.float64), a)  # the rows of A's transpose
    return float(torch.linalg.cond(columns @ precision() @ columns.T))


ONE = torch.ones(DIM, dtype=torch.float64)
FORMS = {
    "diag": 0.5 + torch.rand(DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "dense": torch.linalg.cholesky(torch.linalg.inv(precision())),
    "low_rank": metric.low_rank(*window(100), 2 * ONE),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_are_one_linear_map_its_inverse_and_its_transpose(form):
    a = FORMS[form]
    matrix = metric.unwhiten(torch.eye(DIM, dtype=torch.float64), a).T
    with seeded(0):
        q = torch.randn(5, DIM, dtype=torch.float64)
    torch.testing.assert_close(metric.unwhiten(q, a), q @ matrix.T)
    torch.testing.assert_close(metric.pulled(q, a), q @ matrix)
    torch.testing.assert_close(metric.whiten(metric.unwhiten(q, a), a), q)
    torch.testing.assert_close(metric.standard_deviations(a), (matrix @ matrix.T).diagonal().sqrt())


def test_a_normal_is_whitened_by_fewer_draws_than_the_covariance_needs():
    z, g, counts = window(10)  # 40 draws in 30 dimensions
    found = metric.low_rank(z, g, counts, ONE)
    assert condition(metric.scaled(ONE, "diag")) == pytest.approx(100.0**2)
    # of the directions left to the diagonal each is within a factor of two, of the others nearly exact
    assert condition(found) < 4.0
    from_draws = torch.linalg.cholesky(torch.cov(z.flatten(0, 1).T))
    assert condition(from_draws) > 10 * condition(found)


def test_slots_without_a_draw_and_what_lies_between_the_chains_are_not_read():
    z, g, _ = window(60)
    counts = torch.tensor([60, 45, 30, 60])
    found = metric.low_rank(z, g, counts, ONE)
    apart = z + 100.0 * torch.arange(4).reshape(4, 1, 1)
    for chain, count in enumerate(counts.tolist()):
        apart[chain, count:], g[chain, count:] = torch.nan, torch.nan
    torch.testing.assert_close(condition(metric.low_rank(apart, g, counts, ONE)), condition(found))


def test_gradients_that_are_not_finite_leave_the_diagonal():
    z, g, counts = window(20)
    g[0, 0, 0] = torch.inf
    assert torch.equal(metric.low_rank(z, g, counts, ONE), metric.scaled(ONE, "low_rank"))


def mode(num_draws: int, chains: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chains in modes of their own: each is the normal with its axes in another order, as of a net's hidden units."""
    z, g, counts = window(num_draws, chains)
    with seeded(5):
        orders = [torch.randperm(DIM) for _ in range(chains)]
    return *(torch.stack([x[c, :, order] for c, order in enumerate(orders)]) for x in (z, g)), counts


def test_directions_pay_where_they_serve_the_other_chains():
    for chains in (1, 3, 4):
        assert metric.low_rank_helps(*window(60, chains), ONE)
        z, g, counts = window(60, chains)
        assert not metric.low_rank_helps(z, g * torch.inf, counts, ONE)
        noise = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(chains))
        assert not metric.low_rank_helps(noise, -noise, counts, ONE)  # the diagonal is exact
    assert not metric.low_rank_helps(*mode(60), ONE)
    assert not metric.low_rank_helps(
        *window(60)[:2], torch.tensor([60, 0, 60, 0]), ONE
    )  # nothing to hold them against


@pytest.mark.parametrize(("form", "found"), [("auto", False), ("low_rank", True)])
def test_a_run_takes_directions_that_pay(form, found):
    z, g, counts = mode(40)
    machine = Machine(lambda q: (q, q.sum(-1)), 4, DIM, 40, *LIKE)
    run = Run(machine, seed=0, num_warmup=100, mass_matrix=form, compile=False)
    run.begin(z[:, 0])
    run.buffers.stats[..., STATS.index("lp")] = torch.arange(41.0, dtype=torch.float64)  # the chains move
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metric, "gradients", lambda *_: g)
        new = run._new_metric(z, counts)
        assert bool((new[0, 1:] != 0).any()) == found
        assert metric.described(new, form).startswith("low_rank" if found else "diag")


def test_a_metric_in_words():
    assert [metric.described(metric.scaled(ONE, form), "auto") for form in ("diag", "low_rank", "dense")] == [
        "diag", "diag", "dense"
    ]  # fmt: skip
    told = metric.described(metric.low_rank(*window(100), ONE), "auto")
    assert re.fullmatch(r"low_rank, with directions beside the diagonal: [1-9]\d*", told)
    assert metric.described(torch.ones(0), "dense") == "dense"  # of Pyro's sampler


def _line(x, y):
    """A regression on uncentred inputs, whose intercept and slope correlate by -0.99."""
    a = pyro.sample("a", dist.Normal(0.0, 5.0))
    b = pyro.sample("b", dist.Normal(0.0, 5.0))
    pyro.sample("y", dist.Normal(a + b * x, 1.0).to_event(1), obs=y)


@pytest.mark.slow
def test_a_correlated_program_takes_short_trees():
    x = torch.linspace(5.0, 7.0, 30)
    nuts = pb.NUTS(num_chains=4, num_warmup=60, compile=False)
    posterior = nuts.fit(_line, x, 2 + 0.5 * x, num_draws=60, seed=0)
    assert float(posterior.sample_stats["n_steps"].double().mean()) < 6  # 16 with the diagonal
    assert posterior.meta["mass_matrix"].startswith("low_rank")
    design = torch.stack([torch.ones(30), x], 1).double()
    exact = torch.linalg.inv(design.T @ design + 0.04 * torch.eye(2))  # the prior's share
    both = torch.stack([posterior.draws["a"], posterior.draws["b"]], -1).double().flatten(0, 1)
    torch.testing.assert_close(torch.cov(both.T) / exact, torch.ones(2, 2).double(), rtol=0, atol=0.5)


def test_pyro_has_no_low_rank():
    with pytest.raises(ValueError, match="mass_matrix='low_rank' needs engine='compiled'"):
        pb.NUTS(mass_matrix="low_rank", engine="pyro")


def test_a_chain_that_is_late_gives_no_directions():
    """Directions of a place that a chain should leave would keep it there; the diagonal lets it go."""
    z, g, counts = window(20)
    machine = Machine(lambda q: (-q @ precision(), -0.5 * (q @ precision() * q).sum(-1)), 4, DIM, 20, *LIKE)
    run = Run(machine, seed=0, num_warmup=100, mass_matrix="low_rank", compile=False)
    run.begin(z[:, 0])
    lp = run.buffers.stats[..., STATS.index("lp")]
    lp[:, :20] = machine.gradient(z)[1]
    assert bool((run._new_metric(z, counts)[0, 1:] != 0).any())
    lp[0] -= 1e4
    assert not bool((run._new_metric(z, counts)[0, 1:] != 0).any())
