"""Units of the machine on their own: step-size and metric adaptation, learning rates, the coupling flow."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_mean_within, assert_var_within, seeded

from pyrobnn.inference.fitting import rng
from pyrobnn.inference.fitting.checkpoints import fingerprint
from pyrobnn.inference.hmc.leapfrog import Place
from pyrobnn.inference.hmc.machine import Machine
from pyrobnn.inference.hmc.metric import whitening
from pyrobnn.inference.hmc.step_size import (
    FROZEN,
    OWN,
    POOLED,
    first_adaptation,
    first_step_size,
    updated_adaptation,
)
from pyrobnn.inference.hmc.windows import planned
from pyrobnn.inference.optim.training import (
    SCHEDULES,
    Optimizer,
    constant_rate,
    learning_rate_factors,
)
from pyrobnn.inference.vi.families import CouplingFlow, FlowDistribution, _push

CPU = torch.device("cpu")
ALL = torch.ones(4, dtype=torch.bool)


def acceptance(log_step: torch.Tensor, best: float) -> torch.Tensor:
    """A rate that falls from one to zero as the step grows, 0.8 where the log step is ``best``."""
    return torch.sigmoid(math.log(4.0) - 2.0 * (log_step - best))


@pytest.mark.parametrize("mode", [POOLED, OWN])
@pytest.mark.parametrize("first", [1e-3, 0.1, 30.0])
def test_dual_averaging_finds_the_step_of_the_target_rate(mode, first):
    dual = first_adaptation(first, 4, CPU, mode, 0.8)
    with seeded(1):
        for _ in range(600):
            noise = 0.1 * torch.randn(4, dtype=torch.float64)
            rate = (acceptance(dual[0], -1.0) + noise).clamp(0, 1)
            dual = updated_adaptation(dual, rate, ALL, 4)
    # the average of log steps, of which the noise is that of 600 (or 2400) rates of sd 0.1 and slope 0.32
    torch.testing.assert_close(dual[1], torch.full_like(dual[1], -1.0), rtol=0, atol=0.1)


def test_own_chains_find_steps_of_their_own_and_pooled_ones_share_one():
    best = torch.tensor([-3.0, -2.0, -1.0, 0.0], dtype=torch.float64)
    for mode in (OWN, POOLED):
        dual = first_adaptation(0.1, 4, CPU, mode, 0.8)
        for _ in range(1000):
            dual = updated_adaptation(dual, acceptance(dual[0], best), ALL, 4)
        if mode == OWN:
            # what the first swings leave in an average of 1000; the chains are one apart
            torch.testing.assert_close(dual[1], best, rtol=0, atol=0.05)
        else:
            assert bool((dual[1] == dual[1, 0]).all())
            assert float(acceptance(dual[1], best).mean()) == pytest.approx(0.8, abs=0.01)


def test_nothing_moves_that_has_not_ended_or_is_frozen():
    rate = torch.full((4,), 0.1, dtype=torch.float64)
    frozen = first_adaptation(0.1, 4, CPU, FROZEN, 0.8)
    assert torch.equal(updated_adaptation(frozen, rate, ALL, 4), frozen)
    own = first_adaptation(0.1, 4, CPU, OWN, 0.8)
    ended = torch.tensor([True, False, False, False])
    moved = updated_adaptation(own, rate, ended, 4)
    assert torch.equal(moved[:, 1:], own[:, 1:]) and float(moved[0, 0]) < float(own[0, 0])
    pooled = first_adaptation(0.1, 4, CPU, POOLED, 0.8)
    assert torch.equal(updated_adaptation(pooled, rate, ~ALL, 4), pooled)


@pytest.mark.parametrize("trajectory", [None, 3])
def test_a_step_in_two_halves_is_the_step_to_the_bit_and_the_second_waits_for_an_end(trajectory):
    scale = torch.tensor([1.0, 0.5, 2.0])
    gradient = lambda z: (-z / scale**2, -0.5 * (z / scale).square().sum(-1).double())  # noqa: E731
    machine = Machine(
        gradient, 2, 3, 40, torch.float32, CPU, max_depth=4, trajectory=trajectory, num_latest=40
    )
    start = torch.tensor([[0.3, -0.2, 1.0], [1.0, 0.4, -2.0]])
    keys = rng.key(torch.tensor(5), torch.arange(2))
    dual = first_adaptation(0.4, 2, CPU, POOLED, 0.8)
    place = Place(start, *gradient(start))
    runs = []
    for _ in range(2):
        state = machine.start(place, dual, keys, torch.zeros(2, dtype=torch.float64))
        runs.append((*(part.clone() for part in state), *machine.buffers(), torch.ones(3), keys))
    whole, halves = runs
    num_skipped = 0
    for _ in range(60):
        machine.step(*whole)
        ending = machine.grow(*halves)
        if bool(ending[0].any()):
            machine.finish(*ending, *halves)
        num_skipped += not bool(ending[0].any())
        for one, other in zip(whole[:3], halves[:3], strict=True):
            assert torch.equal(one, other)
    assert num_skipped > 10
    for chain, num_draws in enumerate(whole[1][1].int().tolist()):
        assert num_draws > 5
        for one, other in zip(whole[5:7], halves[5:7], strict=True):
            assert torch.equal(one[chain, :num_draws], other[chain, :num_draws])


def test_dual_averaging_is_the_papers_recursion_for_one_chain():
    """Hoffman & Gelman (2014), equation 6, with the constants of this machine."""
    gamma = 0.2
    t0 = 10.0
    kappa = 0.75
    target = 0.8
    dual = first_adaptation(0.5, 1, CPU, OWN, target)
    error = 0.0
    log_mean = math.log(0.5)
    for t, rate in enumerate((0.1, 0.9, 0.4, 1.0, 0.7), 1):
        error = (1 - 1 / (t + t0)) * error + (target - rate) / (t + t0)
        log_step = math.log(0.5) - math.sqrt(t) / gamma * error
        log_mean = t**-kappa * log_step + (1 - t**-kappa) * log_mean
        dual = updated_adaptation(dual, torch.tensor([rate], dtype=torch.float64), ALL[:1], 1)
        assert float(dual[0]) == pytest.approx(log_step, rel=1e-12)
        assert float(dual[1]) == pytest.approx(log_mean, rel=1e-12)


@pytest.mark.parametrize("num_warmup", [*range(120), 150, 200, 500, 1000, 3000])
def test_the_windows_fill_the_warm_up(num_warmup):
    plan = planned(num_warmup)
    assert sum(each.length for each in plan) == num_warmup and all(each.length > 0 for each in plan)
    if len(plan) < 2:
        assert not any(each.mass or each.own_step for each in plan)
        return
    # a step-size phase, windows that end with a metric, a step-size phase
    assert [each.mass for each in plan] == [False] + [True] * (len(plan) - 2) + [False]
    assert [each.own_step for each in plan] == [True] + [False] * (len(plan) - 1)
    middle = [each.length for each in plan[1:-1]]
    assert all(later == 2 * earlier for earlier, later in zip(middle[:-1], middle[1:-1]))
    assert middle[-1] >= max(middle)  # the last metric comes of the most draws


COV = torch.tensor([[4.0, 1.2, 0.0], [1.2, 0.5, -0.02], [0.0, -0.02, 0.01]], dtype=torch.float64)


def gaussian(num_chains: int, num_draws: int, seed: int = 0) -> torch.Tensor:
    with seeded(seed):
        noise = torch.randn(num_chains, num_draws, 3, dtype=torch.float64)
    return noise @ torch.linalg.cholesky(COV).T


def test_whitening_makes_the_covariance_one():
    z = gaussian(4, 5000)
    counts = torch.full((4,), 5000)
    scale = whitening(z, counts, torch.ones(3, dtype=torch.float64))
    # 20000 draws: a standard deviation is known to 0.5 %
    torch.testing.assert_close(scale, COV.diagonal().sqrt(), rtol=0.03, atol=0)
    matrix = whitening(z, counts, torch.eye(3, dtype=torch.float64))
    assert torch.equal(matrix, matrix.tril())
    white = torch.linalg.solve_triangular(matrix, z.flatten(0, 1).T, upper=False)
    torch.testing.assert_close(
        torch.cov(white), torch.eye(3, dtype=torch.float64), rtol=0, atol=0.05
    )


@pytest.mark.parametrize("dense", [False, True])
def test_whitening_reads_the_valid_slots_alone(dense):
    z = gaussian(3, 60)
    counts = torch.tensor([60, 45, 30])
    old = torch.eye(3, dtype=torch.float64) if dense else torch.ones(3, dtype=torch.float64)
    spoiled = z.clone()
    for chain, count in enumerate(counts.tolist()):
        spoiled[chain, count:] = torch.nan
    assert torch.equal(whitening(spoiled, counts, old), whitening(z, counts, old))


@pytest.mark.parametrize("dense", [False, True])
def test_chains_in_different_modes_do_not_pass_for_one_wide_mode(dense):
    z = gaussian(4, 1000)
    counts = torch.full((4,), 1000)
    apart = z + 100.0 * torch.arange(4).reshape(4, 1, 1)
    old = torch.eye(3, dtype=torch.float64) if dense else torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(whitening(apart, counts, old), whitening(z, counts, old))


@pytest.mark.parametrize("dense", [False, True])
def test_a_window_that_says_nothing_keeps_what_was(dense):
    old = 3.0 * torch.eye(3) if dense else torch.full((3,), 3.0)
    assert whitening(torch.ones(2, 4, 3), torch.tensor([1, 1]), old) is old
    ran_away = torch.full((2, 4, 3), torch.inf)  # a density that is flat
    torch.testing.assert_close(whitening(ran_away, torch.tensor([4, 4]), old), old)


def test_what_a_window_leaves_of_a_condition_number_falls_with_the_next():
    """Shrunk towards the diagonal itself, it stayed where the first window left it."""
    with seeded(0):
        basis = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64))[0]
        cov = (basis * torch.logspace(0, 4, 20, dtype=torch.float64)) @ basis.T
        z = torch.randn(4, 25, 20, dtype=torch.float64) @ torch.linalg.cholesky(cov).T
    a = torch.eye(20, dtype=torch.float64)
    conditions = []
    for _ in range(3):
        a = whitening(z, torch.full((4,), 25), a)
        conditions.append(
            float(torch.linalg.cond(torch.linalg.solve(a, torch.linalg.cholesky(cov))))
        )
    assert conditions[0] < 40 and conditions[2] < 8 and conditions[1] < conditions[0]


def test_few_draws_of_many_dimensions_still_give_a_metric():
    with seeded(0):
        z = torch.randn(1, 5, 40, dtype=torch.float64)
    matrix = whitening(z, torch.tensor([5]), torch.eye(40, dtype=torch.float64))
    assert bool(torch.isfinite(matrix).all()) and bool((matrix.diagonal() > 0).all())


def test_a_large_window_is_whitened_in_parts_with_the_same_numbers(monkeypatch):
    z = gaussian(4, 500)
    counts = torch.full((4,), 500)
    old = torch.ones(3, dtype=torch.float64)
    whole = whitening(z, counts, old)
    monkeypatch.setattr("pyrobnn.inference.hmc.metric._BLOCK", 100)
    torch.testing.assert_close(whitening(z, counts, old), whole)


@pytest.mark.parametrize("width", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("guess", [1e-4, 1.0, 1e3])
def test_the_first_step_crosses_the_target(width, guess):
    """A leapfrog of a normal of any width, from any guess, ends within a factor of two of the crossing."""

    def gradient(q):
        return -q / width**2, -0.5 * (q / width).square().sum(-1)

    with seeded(0):
        q = width * torch.randn(64, 5)
        r = torch.randn(64, 5)
    g, lp = gradient(q)
    step = first_step_size(gradient, Place(q, g, lp), r, guess, 0.8)

    def rate(step):
        half = r + 0.5 * step * g
        new_g, new_lp = gradient(q + step * half)
        new = half + 0.5 * step * new_g
        error = 0.5 * new.square().sum(-1) - new_lp - 0.5 * r.square().sum(-1) + lp
        return float((-error).clamp(max=0).exp().nan_to_num().mean())

    assert (rate(step) > 0.8) != (rate(step / 2) > 0.8) or (rate(step) > 0.8) != (
        rate(2 * step) > 0.8
    )
    assert 0.1 * width < step < 10 * width


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_peaks_at_one_and_ends_near_zero(schedule):
    factors = learning_rate_factors(1000, schedule)
    assert factors.shape == (1000,) and factors.dtype == torch.float64
    assert float(factors.max()) == pytest.approx(1.0, abs=1e-4)
    assert bool((factors > 0).all()) and float(factors[-1]) < 1e-4
    peak = int(factors.argmax())
    assert bool((factors[peak:].diff() <= 0).all()) and bool(
        (factors[: peak + 1].diff() >= 0).all()
    )


def test_the_schedules_are_what_their_names_say():
    cosine = learning_rate_factors(8, "cosine")
    assert cosine.tolist() == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    )
    hold = learning_rate_factors(8, "hold_cosine")
    assert hold[:5].tolist() == [1.0] * 5
    assert hold[4:].tolist() == pytest.approx(learning_rate_factors(4, "cosine").tolist())
    assert learning_rate_factors(5, None).tolist() == [1.0] * 5
    assert learning_rate_factors(3, lambda step: 1 / (1 + step)).tolist() == pytest.approx(
        [1, 1 / 2, 1 / 3]
    )
    with pytest.raises(ValueError, match="'schedule' must be"):
        Optimizer(schedule="linear")


def test_torch_agrees_with_the_cosine():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    found = []
    for _ in range(20):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert learning_rate_factors(20, "cosine").tolist() == pytest.approx(found)


def test_the_constant_rate_of_a_quadratic_is_the_formulas():
    r"""Of ½ |θ − y|² with mini-batch noise of variance v per coordinate: 2 / (N v), below its bound of one."""
    num_data = 1000
    deviation = 0.3
    generator = torch.Generator().manual_seed(0)
    batches = iter(lambda: (deviation * torch.randn(4, generator=generator),), None)
    with seeded(0):
        rate = constant_rate(
            lambda theta, y: 0.5 * (theta - y).square().sum(),
            torch.zeros(4),
            batches,
            num_data=num_data,
        )
    # the variance is estimated from 64 gradients of 4 coordinates, an error of 9 %
    assert rate == pytest.approx(2 / (num_data * deviation**2), rel=0.45)
    with seeded(0):
        slower = constant_rate(
            lambda theta, y: 0.5 * (theta - y).square().sum(),
            torch.zeros(4),
            batches,
            num_data=num_data,
            momentum=0.9,
        )
    assert slower == pytest.approx(0.1 * 2 / (num_data * deviation**2), rel=0.45)


def flow(dim: int) -> tuple[CouplingFlow, dict[str, torch.Tensor]]:
    """A flow whose networks are not zero any more."""
    with seeded(dim):
        made = CouplingFlow(torch.randn(dim, dtype=torch.float64), 0.7, seed=1)
        phi = made.initial()
        return made, made.state(phi + 3.0 * torch.randn_like(phi))


@pytest.mark.parametrize("dim", [2, 3, 4, 7, 30])
def test_the_flow_undone_is_the_noise_it_was_made_of(dim):
    """The density by the inverse equals the density along the way, also where the halves are unequal."""
    _, state = flow(dim)
    with seeded(0):
        noise = 2.0 * torch.randn(500, dim, dtype=torch.float64)
    z, log_q = _push(state, noise)
    assert not torch.allclose(z, state["loc"] + noise)
    torch.testing.assert_close(FlowDistribution(state).log_prob(z), log_q, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("dim", [2, 3, 6])
def test_the_flows_density_has_the_determinant_of_its_jacobian(dim):
    _, state = flow(dim)
    with seeded(0):
        noise = torch.randn(dim, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda u: _push(state, u)[0])(noise)
    expected = -0.5 * (noise.square() + math.log(2 * math.pi)).sum() - jacobian.det().abs().log()
    torch.testing.assert_close(_push(state, noise)[1], expected)


def test_a_new_flow_is_the_mean_field_normal():
    loc = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    made = CouplingFlow(loc, 0.3, seed=0)
    distribution = FlowDistribution(made.state(made.initial()))
    value = torch.tensor([[1.2, -2.5, 0.0], [5.0, 1.0, -1.0]], dtype=torch.float64)
    expected = torch.distributions.Normal(loc, 0.3).log_prob(value).sum(-1)
    torch.testing.assert_close(distribution.log_prob(value), expected)
    with seeded(0):
        draws = distribution.rsample((4000,))
    assert_mean_within(draws[None], loc)
    assert_var_within(draws[None], 0.09, mean=loc)


def test_the_flow_integrates_to_one():
    """E_p[q/p] of a wider normal p, over a flow that bends."""
    _, state = flow(2)
    distribution = FlowDistribution(state)
    with seeded(1):
        centre = distribution.rsample((2000,))
    cov = 4.0 * torch.cov(centre.T)
    wide = torch.distributions.MultivariateNormal(centre.mean(0), cov)
    with seeded(2):
        z = wide.sample((20000,))
    weights = (distribution.log_prob(z) - wide.log_prob(z)).exp()
    assert_mean_within(weights[None], 1.0)


def test_a_fingerprint_reads_a_tensor_of_any_strides():
    x = torch.arange(4.0)
    columns = (x[:, None], x[:, None].as_strided((4, 1), (1, 0)), x.repeat_interleave(2)[::2, None])
    assert len({fingerprint({}, {"x": each, "one": torch.tensor(1.0)}) for each in columns}) == 1
    assert fingerprint({}, {"x": x}) != fingerprint({}, {"x": x + 1.0})
