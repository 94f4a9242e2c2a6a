"""The fixture that guards global state and the stochastic checks can themselves fail, and samples cover."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pytest
import torch
from global_state import GlobalState
from helpers import assert_mean_within, assert_var_within, covering, seeded

CHANGES = {
    "torch's global random state": lambda: torch.rand(1),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's grad mode": lambda: torch.set_grad_enabled(False),
    "torch's deterministic mode": lambda: torch.use_deterministic_algorithms(True),
    "Pyro's settings (validation flags)": lambda: pyro.enable_validation(False),
    "Pyro's param store": lambda: pyro.param("left_behind", torch.zeros(2)),
    "NumPy's global random state": lambda: np.random.rand(),
    "Python's global random state": random.random,
    "matplotlib's rcParams": lambda: plt.rcParams.update({"lines.linewidth": 9.0}),
    "open matplotlib figures": plt.figure,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_global_state_is_seen_and_undone(name):
    state = GlobalState()
    assert state.leaks() == []
    CHANGES[name]()
    leaks = state.leaks()
    state.restore()
    assert name in leaks
    assert state.leaks() == []


def iid(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_moments_of_normal_draws_pass():
    draws = 2 + 3 * iid((4, 1000, 5))
    assert_mean_within(draws, 2.0)
    assert_var_within(draws, 9.0)
    assert_var_within(draws, 9.0, mean=2.0)


def test_a_wrong_moment_fails():
    draws = 2 + 3 * iid((4, 1000, 5))
    with pytest.raises(AssertionError, match="standard errors away"):
        assert_mean_within(draws, 2.5)
    with pytest.raises(AssertionError, match="standard errors away"):
        assert_var_within(draws, 12.0)


def test_a_short_or_correlated_run_fails_on_its_ess():
    with pytest.raises(AssertionError, match="too short"):
        assert_mean_within(iid((1, 50)), 0.0)
    walk = iid((4, 1000)).cumsum(1)
    with pytest.raises(AssertionError, match="too short"):
        assert_mean_within(walk, 0.0)


def test_chains_that_disagree_fail():
    draws = iid((4, 1000)) + torch.tensor([[-3.0], [-1.0], [1.0], [3.0]])
    with pytest.raises(AssertionError, match="too short"):
        assert_mean_within(draws, 0.0)


def test_seeded_repeats_and_restores():
    before = torch.get_rng_state()
    with seeded(3):
        first = torch.rand(4)
    with seeded(3):
        second = torch.rand(4)
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("also", [(), [(0, 0), (0, 1), (0, 2)]], ids=["alone", "beside others"])
def test_a_sample_of_a_product_covers_each_value_is_spread_and_grows_little(also):
    def grid(*lengths: int) -> dict[str, tuple[int, ...]]:
        return {"-".join(map(str, case)): case for case in itertools.product(*map(range, lengths))}

    cases = grid(25, 17)
    kept = covering(cases, 3, also)
    assert kept == covering(dict(reversed(cases.items())), 3, also)
    for place, length in enumerate((25, 17)):
        counts = Counter(values[place] for values in (*(cases[name] for name in kept), *also))
        assert (
            set(counts) == {*range(length)}
            and min(counts.values()) >= 3
            and max(counts.values()) <= 12
        )
    assert len(kept) <= 80  # of 425
    assert len(kept & covering(grid(26, 17), 3, also)) > 0.9 * len(kept)
    assert len(covering(grid(3, 2, 2), 2)) <= 8
    assert covering(grid(2, 2), 3) == {*grid(2, 2)}
