"""What programs do with tensors that autograd or a batch of points refuses: writes in recursions, bad matrices."""

from __future__ import annotations

import random

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import pyrobnn as pb
from pyrobnn.density.density import Density
from pyrobnn.density.writes import OwnTensors, WatchWrites


def test_a_matrix_without_a_cholesky_factor_ends_no_run():
    """A kernel matrix is singular in float32 at some points: one such start refused the whole fit."""
    x = torch.linspace(0.0, 1.0, 12)

    def program(x, y):
        length = pyro.sample("length", dist.LogNormal(0.0, 3.0))
        cov = torch.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), cov), obs=y)

    density = Density(program, (x, torch.sin(9.0 * x)))
    z = torch.tensor([[-2.0], [7.0]])
    with pytest.raises(ValueError):
        pyro.poutine.trace(pyro.poutine.condition(program, {"length": z[1, 0].exp()})).get_trace(
            *density.args
        )
    value = torch.func.vmap(density.log_joint)(z)
    assert value[0].isfinite() and not value[1].isfinite()
    posterior = pb.NUTS(num_chains=2, num_warmup=40, compile=False).fit(program, *density.args, num_draws=5)
    assert posterior.sample_stats["lp"].isfinite().all()


def moves(random, size):
    """A few dozen things that a program does with a tensor, its rows and views of it, chosen by chance."""

    def run(s):
        h = s * torch.linspace(0.5, 1.0, size, dtype=s.dtype)
        m = torch.zeros(size, 2, dtype=s.dtype)
        held, total = [h[0]], torch.zeros((), dtype=s.dtype)
        for choice, i, j in plan:
            if choice == 0:
                h[i] = torch.sin(h[j]) + s
            elif choice == 1:
                h[i] += h[j] * s
            elif choice == 2:
                held.append(h[i])
            elif choice == 3:
                held[j % len(held)].mul_(0.5)
            elif choice == 4:
                total = total + held[j % len(held)] ** 2
            elif choice == 5:
                m[i] = s * m[j] + h[i]
            elif choice == 6:
                m[i][0] = h[j] * 0.1
            elif choice == 7:
                total += torch.tanh(h).sum()
            elif choice == 8:
                h[-1] = 0.25
            elif choice == 9:
                h[i : i + 2] = h[j] * 0.5
            elif choice == 10:
                m[i] = h[:2]
            elif choice == 11:
                h.view(-1)[i].add_(held[j % len(held)] * 0.1)
            elif choice == 12:
                total = total + dist.Normal(h[i], 1.0 + s**2).log_prob(h[j])
            else:
                h[i] = held[j % len(held)]
        return total + torch.sin(h).sum() + (m * m).sum()

    usual = random.random() < 0.5  # half of them use tensors by rows alone, as most programs do
    plan = [
        (random.randrange(7 if usual and k < 20 else 14), random.randrange(size - 1), random.randrange(size))
        for k in range(25)
    ]
    return run


@pytest.mark.parametrize("seed", range(40))
def test_writes_reads_and_views_are_those_of_torch(seed):
    run = moves(random.Random(seed), 4)
    points = torch.tensor([0.3, -0.7], dtype=torch.float64)
    with WatchWrites() as watch:
        run(points[0].clone())
    assert watch.found

    @torch.func.functionalize
    def handled(s):
        with OwnTensors(s):
            return run(s * 1.0)

    gradient, value = torch.func.vmap(torch.func.grad_and_value(handled))(points)
    step = 1e-6
    for k, point in enumerate(points):
        torch.testing.assert_close(value[k], run(point.clone()))
        slope = (run(point + step) - run(point - step)) / (2 * step)
        torch.testing.assert_close(gradient[k], slope, rtol=1e-5, atol=1e-6)


def test_a_program_that_counts_its_missing_data_is_traced():
    """It ran uncompiled: a trace has no values, so that it cannot know how many rows a mask leaves."""

    def program(x, y):
        missing = torch.isnan(x)
        with pyro.plate("missing", int(missing.sum())):
            guess = pyro.sample("guess", dist.Normal(0.0, 1.0))
        whole = x.clone()
        whole[missing] = guess
        with pyro.plate("seen", len(x[~missing])):
            pyro.sample("x", dist.Normal(0.5, 1.0), obs=x[~missing])
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(whole, 0.5), obs=y)

    density = Density(program, (torch.tensor([0.1, torch.nan, -1.0, torch.nan]), torch.ones(4)))
    slope = torch.func.vmap(torch.func.grad_and_value(density.log_joint))
    z, other = density.sample_box(3, seed=0), density.sample_box(3, seed=1)
    for found, expected in zip(make_fx(slope)(z)(other), slope(other), strict=True):
        torch.testing.assert_close(found, expected)


def test_data_that_are_arguments_of_a_trace_are_no_constants_of_it():
    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        pyro.factor("count", slope * (x > 0).sum() + (x[:2] * slope).sum())

    x, y, z = torch.tensor([1.0, -1.0, 2.0]), torch.zeros(3), torch.tensor([[0.3], [0.4]])
    density = Density(program, (x, y))
    slope = torch.func.vmap(torch.func.grad_and_value(density.log_joint), in_dims=(0, None, None))
    for found, expected in zip(make_fx(slope)(z, x, y)(z, -x, y), slope(z, -x, y), strict=True):
        torch.testing.assert_close(found, expected)
