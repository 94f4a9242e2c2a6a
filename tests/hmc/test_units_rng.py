"""The counter-based generator: uniform, independent along every argument, and the same numbers for ever."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import SIGMAS
from scipy import stats

from pyrobnn.inference.fitting import rng

#: one failure rate for the project: that of one two-sided check at SIGMAS
LEVEL = 2 * stats.norm.sf(SIGMAS)
SIZE = 2**17
NUMBERS = torch.arange(SIZE)
ARGUMENTS = ("seed", "chain", "transition", "index")


def keys(argument: str, values: torch.Tensor) -> torch.Tensor:
    """Keys in which one argument runs and the others stay."""
    parts = {name: torch.tensor(3) for name in ARGUMENTS} | {argument: values}
    return rng.stream(rng.key(*(parts[name] for name in ARGUMENTS[:3])), parts["index"])


def draws(argument: str, values: torch.Tensor = NUMBERS) -> dict[str, torch.Tensor]:
    found = keys(argument, values)
    first, second, sign = rng.chances(found)
    return {
        "first": first,
        "second": second,
        "sign": sign,
        "normal": rng.normal(found, 1, torch.float64)[..., 0],
    }


LAWS = {"first": "uniform", "second": "uniform", "normal": "norm"}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_the_marginal_is_exact_whichever_argument_runs(argument):
    found = draws(argument)
    for name, law in LAWS.items():
        assert stats.kstest(found[name].numpy(), law).pvalue > LEVEL, name
    assert stats.binomtest(int((found["sign"] > 0).sum()), SIZE).pvalue > LEVEL
    assert bool((found["first"] >= 0).all() and (found["first"] < 1).all())


def _assert_uncorrelated(a: torch.Tensor, b: torch.Tensor) -> None:
    a = a - a.mean()
    b = b - b.mean()
    z = float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()) * math.sqrt(len(a))
    assert abs(z) < SIGMAS + 1  # several pairs to a test


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_independent_whichever_argument_runs(argument, lag):
    found = draws(argument)
    for name in ("first", "second", "sign", "normal"):
        values = found[name]
        _assert_uncorrelated(values[:-lag], values[lag:])
        _assert_uncorrelated(
            (values[:-lag] - values.mean()).square(), (values[lag:] - values.mean()).abs()
        )


@pytest.mark.parametrize("pair", list(itertools.combinations(ARGUMENTS, 2)), ids="-".join)
def test_two_arguments_are_not_interchangeable(pair):
    """(1, 2) and (2, 1) are other numbers, uncorrelated with each other."""
    first, second = (draws(argument, NUMBERS + 100)["normal"] for argument in pair)
    assert not bool((first == second).any())
    _assert_uncorrelated(first, second)


def test_what_one_key_gives_is_independent_of_each_other():
    found = draws("index")
    for a, b in itertools.combinations(("first", "second", "sign"), 2):
        _assert_uncorrelated(found[a], found[b])
    table = torch.stack([(found["first"] * 8).long() * 8 + (found["second"] * 8).long()]).flatten()
    assert stats.chisquare(torch.bincount(table, minlength=64).numpy()).pvalue > LEVEL
    normals = rng.normal(keys("chain", NUMBERS[:4096]), 32, torch.float64)
    correlation = torch.corrcoef(normals.T)
    off = correlation[~torch.eye(32, dtype=torch.bool)] * math.sqrt(len(normals))
    assert float(off.abs().max()) < SIGMAS + 1


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_change_of_one_bit_changes_half_of_the_bits(argument):
    base = keys(argument, NUMBERS[:2000])
    for bit in (0, 7, 30):
        changed = base ^ keys(argument, NUMBERS[:2000] ^ (1 << bit))
        flips = torch.stack([(changed >> place) & 1 for place in range(64)]).double()
        # every bit of the key, over 2000 keys: half, within its own error
        z = (flips.mean(1) - 0.5) * 2 * math.sqrt(flips.shape[1])
        assert float(z.abs().max()) < SIGMAS + 1


def test_a_million_keys_are_all_different():
    chain = torch.arange(8)[:, None, None]
    transition = torch.arange(400)[None, :, None]
    found = rng.stream(rng.key(torch.tensor(0), chain, transition), torch.arange(320))
    assert len(found.unique()) == found.numel() == 8 * 400 * 320


def test_normals_have_normal_tails():
    z = rng.normal(keys("transition", torch.arange(2**15)), 64, torch.float64).flatten()
    for bound in (1.0, 2.0, 3.0, 4.0):
        expected = 2 * stats.norm.sf(bound)
        assert stats.binomtest(int((z.abs() > bound).sum()), len(z), expected).pvalue > LEVEL
    assert float(z.abs().max()) < 6.8


def test_the_numbers_are_those_of_every_machine():
    """Golden values: a change of them would break every seed of every user."""
    found = rng.key(torch.tensor(0), torch.tensor(1), torch.tensor(2))
    assert [int(found), int(rng.stream(found, torch.tensor(3)))] == [
        6768782832058643234,
        3846420020073568285,
    ]
    first, second, sign = rng.chances(found)
    assert [float(first), float(second), float(sign)] == [
        0.8390180487185717,
        0.27618914330378175,
        1.0,
    ]
    normals = [-1.3762476627291695, -0.23857094009835636, 1.7234568280282576]
    expected = torch.tensor(normals, dtype=torch.float64)
    torch.testing.assert_close(rng.normal(found, 3, torch.float64), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(
        rng.normal(found, 3, torch.float32), expected.float(), rtol=1e-5, atol=1e-6
    )


def _split_mix(bits: int) -> int:
    """SplitMix64's mixer in Python's unbounded integers."""
    mask = (1 << 64) - 1
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    return bits ^ (bits >> 31)


@pytest.mark.parametrize("parts", [(0,), (7, 3), (2**31 - 1, 63, 10**6), (0, 0, 2**31 - 1)])
def test_the_key_is_split_mix_of_its_parts(parts):
    expected = 0
    for part in parts:
        expected = _split_mix(((expected ^ part) + 0x9E3779B97F4A7C15) % 2**64)
    assert int(rng.key(*map(torch.tensor, parts))) % 2**64 == expected


def test_the_order_of_evaluation_does_not_matter():
    whole = rng.normal(rng.key(torch.tensor(5), torch.arange(6)), 10, torch.float32)
    for chain in reversed(range(6)):
        alone = rng.normal(rng.key(torch.tensor(5), torch.tensor(chain)), 10, torch.float32)
        assert torch.equal(alone, whole[chain])
    shorter = rng.normal(rng.key(torch.tensor(5), torch.arange(6)), 4, torch.float32)
    assert torch.equal(shorter, whole[:, :4])


def test_no_generator_is_asked_and_none_is_moved():
    before = torch.random.get_rng_state()
    draws("chain", NUMBERS[:10])
    assert torch.equal(torch.random.get_rng_state(), before)


def noise(seed: int = 0) -> rng.Noise:
    return rng.Noise(torch.tensor(seed))


@pytest.mark.parametrize("odd", [0, 1])
def test_the_normals_of_an_evaluation_are_independent_standard_normals(odd):
    size = SIZE - odd
    source = noise()
    first, second = (source.normal(torch.empty(size, dtype=torch.float64)) for _ in range(2))
    next_step = noise(1).normal(first)
    # odd and even functions of the two: a sine and a cosine of one angle have a radius in common
    sine = first[size // 2 + odd :]
    cosine = first[: size // 2]
    pairs = [(first, second), (first, next_step), (first[:-1], first[1:]), (sine, cosine)]
    for one in (first, second, next_step):
        assert stats.kstest(one.numpy(), "norm").pvalue > LEVEL
        assert (
            stats.binomtest(int((one.abs() > 3).sum()), size, 2 * stats.norm.sf(3)).pvalue > LEVEL
        )
        for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs(float(one.pow(power).mean()) - moment) < SIGMAS * math.sqrt(variance / size)
    for one, other in pairs:
        _assert_uncorrelated(one, other)
        _assert_uncorrelated(one.square(), other.square())
        _assert_uncorrelated(one.square(), other)


def test_steps_calls_signs_and_particles_have_numbers_of_their_own():
    like = torch.empty(50, 20)
    steps = torch.stack([noise(step).normal(like).flatten() for step in range(200)])
    correlation = torch.corrcoef(steps)[~torch.eye(200, dtype=torch.bool)]
    assert float(correlation.abs().max()) * math.sqrt(like.numel()) < SIGMAS + 1
    particles = torch.func.vmap(lambda key: rng.Noise(key).normal(like))(noise().split(3))
    alone = torch.stack([rng.Noise(key).normal(like) for key in noise().split(3)])
    assert torch.equal(particles, alone)
    signs = noise().sign(torch.empty(SIZE, dtype=torch.float64))
    assert bool((signs.abs() == 1).all())
    assert stats.binomtest(int((signs > 0).sum()), SIZE).pvalue > LEVEL
    assert not bool((noise().normal(like) == noise(2**40).normal(like)).any())


def test_the_numbers_of_an_evaluation_are_those_of_every_machine():
    """Golden values."""
    source = noise(7)
    expected = torch.tensor(
        [1.2138544409415155, -0.5226611361240041, -0.9366094479577751], dtype=torch.float64
    )
    torch.testing.assert_close(source.normal(expected), expected, rtol=1e-14, atol=0)
    assert source.sign(torch.empty(2)).tolist() == [-1.0, 1.0]
    torch.testing.assert_close(
        noise(7).normal(expected.float()), expected.float(), rtol=1e-5, atol=1e-6
    )
