"""A program that repeats its operations is run in fewer, with the same values and gradients."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.indexing import Vindex
from torch import Tensor
from torch.func import grad_and_value, vmap

import pyrobnn as pb
from pyrobnn.core import private_trace
from pyrobnn.model import Density
from pyrobnn.model.compile.forecast import Work
from pyrobnn.model.compile.repeats import in_fewer_operations


def series(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(length, generator=generator).cumsum(0)


def hidden_markov(x, y):
    with pyro.plate("states", 3):
        moves = pyro.sample("moves", dist.Dirichlet(torch.ones(3)))
        means = pyro.sample("means", dist.Normal(torch.tensor([-2.0, 0.0, 2.0]), 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    state = 0
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(f"state_{t}", dist.Categorical(Vindex(moves)[state]))
        pyro.sample(f"y_{t}", dist.Normal(Vindex(means)[state], noise), obs=y[t])


def autoregression(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    for t in range(1, len(y)):
        pyro.sample(f"y_{t}", dist.Normal(slope * y[t - 1], scale), obs=y[t])


def many_sites(x, y):
    level = pyro.sample("level", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    for t in range(len(y)):
        effect = pyro.sample(f"effect_{t}", dist.Normal(level, scale))
        shape = pyro.sample(f"shape_{t}", dist.Gamma(2.0 + t, 1.0))
        pyro.sample(f"y_{t}", dist.StudentT(1.0 + shape, effect, 1.0), obs=y[t])


def coin(x, y):
    """A plate that is a loop, as in Pyro's first tutorial; the density of a coin writes into a new tensor."""
    share = pyro.sample("share", dist.Beta(10.0, 10.0))
    for t in pyro.plate("tosses", len(y)):
        pyro.sample(f"y_{t}", dist.Bernoulli(share), obs=(y[t] > 0).float())


def walk(x, y):
    """What waits for its neighbour: there is nothing to put together but the data's densities."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    rate = pyro.sample("rate", dist.Uniform(0.0, 1.0))
    state = torch.zeros(())
    for t in range(len(y)):
        state = rate * state + (1 - rate) * torch.tanh(y[t])
        pyro.sample(f"y_{t}", dist.Normal(state, scale), obs=y[t])


def local_level(x, y):
    """A latent site for each time: each is the mean of the next and of its datum."""
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    level = pyro.sample("level_0", dist.Normal(0.0, 1.0))
    pyro.sample("y_0", dist.Normal(level, noise), obs=y[0])
    for t in range(1, len(y)):
        level = pyro.sample(f"level_{t}", dist.Normal(level, spread))
        pyro.sample(f"y_{t}", dist.Normal(level, noise), obs=y[t])


#: of the operations of value and gradient, those that are left of thirty repetitions, at most
LEFT = {
    hidden_markov: 0.45,
    autoregression: 0.2,
    many_sites: 0.45,
    walk: 0.7,
    coin: 0.2,
    local_level: 0.09,
}


def gradients_of(function, z: Tensor) -> tuple[Tensor, Tensor]:
    slopes, values = vmap(grad_and_value(function))(z)
    return slopes, values


@pytest.mark.parametrize("program", LEFT)
def test_values_and_gradients_are_the_programs(program):
    density = Density(program, (None, series(16)), double=True)
    merged = density.in_fewer_operations(density.sample_box(3, seed=0)).log_joint
    elsewhere = density.sample_box(5, seed=1)
    expected = gradients_of(density.log_joint, elsewhere)
    torch.testing.assert_close(gradients_of(merged, elsewhere), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(hidden_markov, marks=pytest.mark.slow),
        autoregression,
        pytest.param(many_sites, marks=pytest.mark.slow),
        walk,
        coin,
        local_level,
    ],
)
def test_a_long_program_has_few_operations(program):
    density = Density(program, (None, series(30)))
    z = density.sample_box(2, seed=0)
    merged = density.in_fewer_operations(z).log_joint

    def num_operations(function) -> int:
        return Work.of(private_trace.trace(vmap(grad_and_value(function)), [z])).nodes

    before = num_operations(density.log_joint)
    assert num_operations(merged) < LEFT[program] * before


def test_a_hidden_markov_model_has_the_density_of_the_forward_algorithm():
    y = series(30)
    density = Density(hidden_markov, (None, y), double=True)
    z = density.sample_box(2, seed=3)
    merged = density.in_fewer_operations(z).log_joint
    for point in z:
        values = density.constrain(point)
        emissions = dist.Normal(values["means"], values["noise"]).log_prob(y.double()[:, None])
        alpha = values["moves"][0].log() + emissions[0]
        for emission in emissions[1:]:
            alpha = (alpha[:, None] + values["moves"].log()).logsumexp(0) + emission
        prior = dist.Dirichlet(torch.ones(3).double()).log_prob(values["moves"]).sum()
        prior = (
            prior
            + dist.Normal(torch.tensor([-2.0, 0.0, 2.0]).double(), 1.0)
            .log_prob(values["means"])
            .sum()
        )
        prior = prior + dist.HalfNormal(torch.tensor(1.0).double()).log_prob(values["noise"])
        joint = float(prior + alpha.logsumexp(0) + density.log_jacobian(point))
        assert float(merged(point)) == pytest.approx(joint, abs=1e-6)


def test_a_short_function_is_itself():
    def square(z: Tensor) -> Tensor:
        return z.square().sum()

    assert in_fewer_operations(square, torch.ones(2, 3)) is square


class _Straight(torch.autograd.Function):
    """A step whose derivative is said to be one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value):
        return (value > 0).to(value.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, slope):
        return slope


def _of_two(value: Tensor) -> Tensor:
    both = torch.stack([value, value])
    both[0].mul_(value)
    return both.sum()


def sum_of(term, length: int = 120):
    return lambda z: sum(term(z[t % 3] * (t + 1.0)) for t in range(length))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(sum_of(_Straight.apply), id="a derivative of its own"),
        pytest.param(sum_of(lambda u: u * torch.rand(())), id="random numbers"),
        pytest.param(sum_of(lambda u: _of_two(u)), id="written into a part"),
        pytest.param(sum_of(lambda u: u if float(u) > 0 else 2 * u), id="looks at values"),
        pytest.param(
            lambda z: (
                pb.scan(lambda c, x: (c + x * z[0], None), z[1], torch.ones(500))[0]
                + sum_of(torch.sin)(z)
            ),
            id="a loop of its own",
        ),
    ],
)
def test_what_cannot_be_put_together_stays_as_it_is(function):
    z = torch.tensor([[0.3, -0.2, 0.5], [1.0, 2.0, -3.0]])
    state = torch.get_rng_state()
    assert in_fewer_operations(function, z) is function
    assert torch.equal(torch.get_rng_state(), state)


def test_a_new_tensor_that_is_written_into_is_one_of_its_own():
    function = sum_of(lambda u: u.clone().add_(u.sin()) * torch.empty(()).fill_(2.0))
    z = torch.tensor([[0.3, -0.2, 0.5], [1.0, 2.0, -3.0]], dtype=torch.float64)
    merged = in_fewer_operations(function, z)
    assert merged is not function
    torch.testing.assert_close(gradients_of(merged, 2 * z), gradients_of(function, 2 * z))


def test_a_cut_gradient_stays_cut():
    function = sum_of(lambda u: u * u.detach())
    z = torch.tensor([[0.3, -0.2, 0.5], [1.0, 2.0, -3.0]], dtype=torch.float64)
    merged = in_fewer_operations(function, z)
    assert merged is not function
    torch.testing.assert_close(gradients_of(merged, 2 * z), gradients_of(function, 2 * z))


def two_states(x, y):
    """Far apart under the prior, so that there is one mode."""
    with pyro.plate("states", 2):
        moves = pyro.sample("moves", dist.Dirichlet(torch.ones(2)))
        means = pyro.sample("means", dist.Normal(torch.tensor([-2.0, 2.0]), 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    state = 0
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(f"state_{t}", dist.Categorical(Vindex(moves)[state]))
        pyro.sample(f"y_{t}", dist.Normal(Vindex(means)[state], noise), obs=y[t])


@pytest.mark.slow
def test_nuts_of_sixty_steps_of_a_markov_chain_is_right():
    generator = torch.Generator().manual_seed(0)
    states = [0]
    for _ in range(59):
        stays = torch.rand((), generator=generator) < 0.9
        states.append(states[-1] if bool(stays) else 1 - states[-1])
    y = 4.0 * torch.tensor(states) - 2.0 + 0.5 * torch.randn(60, generator=generator)
    posterior = pb.NUTS(num_chains=2, num_warmup=300).fit(two_states, None, y, num_draws=300)
    noise = posterior.draws["noise"]
    assert 0.35 < float(noise.median()) < 0.65 and math.isfinite(float(noise.std()))
    means = posterior.draws["means"].mean((0, 1))
    torch.testing.assert_close(means, torch.tensor([-2.0, 2.0]), atol=0.4, rtol=0)
