"""The law of cost: a fit by mini-batches takes little more than a plain loop of as many steps, in operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import seeded
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pyrobnn as pb
from pyrobnn.inference.optim.training import RateTrial
from pyrobnn.model import Density

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NUM_ROWS = 256
BATCH_SIZE = 64
NUM_STEPS = 40
STEPS = {"num_steps": NUM_STEPS, "batch_size": BATCH_SIZE, "compile": False}


class Shortcut(nn.Module):
    """Two convolutions with batch norm, beside the input (He et al., 2016)."""

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def residual_net() -> nn.Sequential:
    """Trained from scratch with the statistics of batches."""
    with seeded(0):
        body = [nn.Conv2d(1, 6, 3, padding=1), Shortcut(6), nn.AdaptiveAvgPool2d(2)]
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(24, 3))


def plain_net() -> nn.Sequential:
    with seeded(0):
        body = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*body, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(24, 3))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_ROWS, 1, 8, 8, generator=generator)
    return x, (20 * x.mean((1, 2, 3))).round().clamp(-1, 1).long() + 1


def operations(work: Callable[[], Any]) -> int:
    """Floating-point operations of the products and convolutions of ``work``, backward ones too."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def of_loop(net: nn.Module) -> int:
    """Those of a plain loop of as many steps."""
    net = copy.deepcopy(net).train()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    x, y = images()

    def loop() -> None:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[:BATCH_SIZE]), y[:BATCH_SIZE]).backward()
            optimizer.step()

    return operations(loop)


def of_fit(method: Any, net: nn.Module, **options: Any) -> int:
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.Categorical())
    return operations(lambda: method.fit(model, *images(), **options))


@pytest.mark.parametrize(
    ("method", "make"),
    [
        (pb.MAP(lr=1e-3, **STEPS), plain_net),
        (pb.MAP(lr=1e-3, **STEPS), residual_net),
        (pb.MLE(lr=1e-3, **STEPS), plain_net),
        (pb.DeepEnsemble(num_members=1, lr=1e-3, **STEPS), residual_net),
    ],
    ids=["MAP", "MAP, batch norm", "MLE", "DeepEnsemble, batch norm"],
)
def test_a_search_by_mini_batches_costs_at_most_half_more_than_a_plain_loop(method, make):
    net = make()
    assert of_fit(method, net) <= 1.5 * of_loop(net)


def test_dropout_costs_at_most_half_more_than_a_plain_loop():
    net = plain_net()
    method = pb.MCDropout(p=0.1, lr=1e-3, **STEPS)
    assert of_fit(method, net, num_draws=5) <= 1.5 * of_loop(net)


@pytest.mark.slow
def test_swag_finds_its_rate_by_the_gradients_of_its_trial():
    net = residual_net()
    trained = copy.deepcopy(net)
    with_rate = pb.SWAG(collect_every=2, **STEPS)
    given = pb.SWAG(collect_every=2, lr=1e-3, **STEPS)
    costs = [of_fit(method, net, init=trained, num_draws=4) for method in (with_rate, given)]
    assert costs[1] <= 1.6 * of_loop(net)
    trial = RateTrial.affordable(NUM_STEPS)
    gradients = 3 * trial.num_batches + 3 * trial.num_products
    assert costs[0] - costs[1] <= gradients / NUM_STEPS * of_loop(net)


@pytest.mark.parametrize(
    "method",
    [
        pb.SWAG(collect_every=2, lr=1e-3, **STEPS),
        pb.MCDropout(p=0.1, lr=1e-3, **STEPS),
    ],
    ids=["SWAG", "MC dropout"],
)
def test_batch_statistics_of_many_draws_cost_a_part_of_the_training(method, monkeypatch):
    """Each draw had a pass over all rows: together more than the training."""
    monkeypatch.setattr("pyrobnn.inference.training_mode._FEW_NUMBERS", 0)
    monkeypatch.setattr("pyrobnn.inference.training_mode._FEWEST_ROWS", 8)
    monkeypatch.setattr("pyrobnn.inference.method.collapsed", lambda *given: [])
    net = residual_net()
    costs = [
        of_fit(method, net, init=copy.deepcopy(net), num_draws=num_draws) for num_draws in (1, 60)
    ]
    assert costs[1] - costs[0] <= 0.15 * of_loop(net)


def test_the_trial_of_a_rate_takes_a_quarter_of_the_steps_it_is_for():
    for num_steps in (200, 400, 1024):
        trial = RateTrial.affordable(num_steps)
        gradients = 3 * trial.num_batches + 2.5 * trial.num_products
        assert 0.15 * num_steps <= gradients <= 0.3 * num_steps
    assert RateTrial.affordable(10**6) == RateTrial.affordable(None)


def test_a_look_at_what_is_left_is_had_where_the_search_pays_for_it():
    net = plain_net()
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.Categorical())
    x, y = images()
    short = pb.MAP(**STEPS).fit(model, x, y)
    assert "gain_left" not in short.meta
    assert "fall_left" in short.meta
    long = pb.MAP(**STEPS).fit(model, x[:40], y[:40])
    assert "gain_left" in long.meta


def test_a_density_runs_a_net_at_a_few_rows_when_it_is_made():
    rows: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows.append(len(x))
            return super().forward(x)

    scale = pb.likelihoods.HomoskedasticGaussian("learned")
    with seeded(0):
        model = pb.BNN(Counted(2, 1), pb.priors.FanInNormal(), scale)
        x, y = torch.randn(5000, 2), torch.randn(5000, 1)
    rows.clear()
    density = Density(model.pyro_model, (x, y))
    assert max(rows) <= 10
    value = density.log_joint(torch.zeros(density.dim))
    assert rows[-1] == 5000  # its value is of all of them
    few = Density(model.pyro_model, (x[:10], y[:10])).log_joint(torch.zeros(density.dim))
    assert abs(float(value)) > 100 * abs(float(few))


def test_laplace_by_mini_batches_follows_its_search_by_no_more_passes_than_that_had(monkeypatch):
    """Where passes are dear: of few rows and weights it goes to the very mode."""
    monkeypatch.setattr("pyrobnn.inference.laplace._CHEAP_PASS", 0)
    net = plain_net()
    x, y = images()
    loop = of_loop(net)
    method = pb.Laplace(subset="last_layer", map=pb.MAP(lr=1e-3, **STEPS), compile=False)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.Categorical())
    assert operations(lambda: method.fit(model, x, y, num_draws=5)) <= 3.5 * loop
