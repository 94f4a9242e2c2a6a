"""What follows a training is bounded: rows that go through the net, and the largest of its intermediates."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers import seeded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.vi import elbo_value as elbo_module
from pyrobnn.inference.vi.elbo_value import Work
from pyrobnn.inference.vi.guide_fit import build_elbo
from pyrobnn.inference.vi.start import own_start
from pyrobnn.posterior.prediction import hooked

pytestmark = pytest.mark.filterwarnings("ignore:.*optimisation stopped")


class Counted(nn.Module):
    """A net that notes the rows of each call."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.rows: list[int] = []

    def forward(self, x):
        self.rows.append(len(x))
        return self.net(x)

    def __deepcopy__(self, memo):
        copied = Counted(copy.deepcopy(self.net, memo))
        copied.rows = self.rows
        return copied


def many_rows(num_rows: int = 12_000):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 20, generator=g)
    y = x[:, :1].sin() + 0.1 * torch.randn(num_rows, 1, generator=g)
    return x, y


@pytest.mark.parametrize("streamed", [False, True], ids=["memory", "loader"])
@pytest.mark.parametrize("kl", ["closed_form", "monte_carlo"])
def test_the_elbo_takes_a_tenth_of_the_training(streamed, kl, monkeypatch):
    x, y = many_rows()
    net = Counted(pb.networks.mlp(20, (50, 50), seed=0))
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
    method = pb.SVI(num_steps=150, batch_size=None if streamed else 100, kl=kl, compile=False)
    loader = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
    before = []
    genuine = elbo_module.evaluate_elbo
    monkeypatch.setattr(
        "pyrobnn.inference.vi.guide_fit.evaluate_elbo",
        lambda *given: (before.append(sum(net.rows)), genuine(*given))[1],
    )
    data = (loader,) if streamed else (x, y)
    with seeded(0):
        posterior = method.fit(model, *data, num_draws=3)
    after = sum(net.rows) - before[0]
    assert after <= 0.1 * 3 * 150 * 100 * 1.1
    assert max(net.rows) <= 12_000
    assert math.isfinite(posterior.log_evidence)
    assert posterior.meta["elbo_error"] > 0


def test_the_error_of_a_bounded_elbo_is_the_one_stated():
    x, y = many_rows()
    model = pb.BNN(
        pb.networks.mlp(20, (50, 50), seed=0),
        pb.priors.FanInNormal(),
        pb.likelihoods.HomoskedasticGaussian(0.5),
    )

    problem = prepare(model, x, y, points="free")
    elbo, theta, *_ = build_elbo(pb.SVI(init_scale=0.01), problem, own_start(problem).point, 0)
    approximation = elbo.family.approximation(theta, problem.density)

    def evaluate(seed, work=None):
        with seeded(seed):
            return elbo_module.evaluate_elbo(
                problem, problem.density, approximation, elbo, theta, work
            )

    whole, whole_error = evaluate(0)
    # rows in one order: errors of all calls are those of one sample of rows
    value, error = evaluate(1, Work(20_000, 100))
    assert abs(value - whole) < 4 * math.hypot(error, whole_error)
    assert error > 2 * whole_error
    # of all rows what is left is the error of the draws
    _, of_two_passes = evaluate(1, Work(160_000, 100))
    assert of_two_passes < error


def test_a_convolution_is_evaluated_in_blocks_of_rows():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(270, 3, 32, 32, generator=g)
    y = torch.arange(270) % 10
    with seeded(0):
        net = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(64 * 64, 10),
        )
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.Categorical())
    problem = prepare(model, x, y, points="free")
    largest = []

    def note(_name, _inputs, output):
        largest.append(output.numel())

    elbo, theta, *_ = build_elbo(pb.SVI(init_scale=0.01), problem, own_start(problem).point, 0)
    with seeded(0):
        draws = elbo.family.approximation(theta, problem.density).sample(2)
    z = problem.density.unconstrain(draws)
    by_rows = elbo_module.log_parts(problem, problem.density, z)
    with hooked(dict(problem.bnn.eval_net.named_modules()), note), torch.no_grad():
        largest.clear()
        elbo_module.log_parts(problem, problem.density, z)
    assert max(largest) <= 2**22
    whole = [problem.density.log_parts(draw) for draw in z]
    for part in range(2):
        expected = torch.stack([values[part] for values in whole])
        torch.testing.assert_close(by_rows[part], expected, rtol=1e-5, atol=1e-2)


def test_a_bar_shows_what_follows_the_training(capfd):
    x, y = many_rows()
    model = pb.BNN(
        pb.networks.mlp(20, (50, 50), seed=0),
        pb.priors.FanInNormal(),
        pb.likelihoods.HomoskedasticGaussian(0.5),
    )
    with seeded(0):
        pb.SVI(num_steps=40, batch_size=100, compile=False).fit(
            model, x, y, num_draws=2, progress=True
        )
    assert "ELBO on all data: 100%" in capfd.readouterr().err
