"""Rows of weight zero: the next number of rows has the graph that is compiled already, and the same density."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb
from pyrobnn.compile import compiled
from pyrobnn.compile.inductor import traced
from pyrobnn.inference.fitting.batches import bucket, padded_density
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.hmc.starts import gradient_of

ROOT = Path(__file__).parents[2]
LIKELIHOODS = {
    "gaussian": pb.likelihoods.HomoskedasticGaussian(0.3),
    "learned": pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)),
    "counts": pb.likelihoods.Poisson(),
    "classes": pb.likelihoods.Categorical(),
}


class Centred(torch.nn.Module):
    """A net whose output at a row depends on the other rows."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(x) - self.layer(x).mean(0)


def data(num, kind="gaussian", net=None):
    with seeded(1):
        x = torch.randn(num, 1)
    y = {"counts": (3 * x.abs()).round(), "classes": (x[:, 0] > 0).long()}.get(kind, x.sin())
    net = net or pb.networks.mlp(1, (4,), 2 if kind == "classes" else 1, seed=0)
    return pb.BNN(net, pb.priors.FanInNormal(), LIKELIHOODS[kind]), x, y


def problem(num, kind="gaussian", net=None):
    return prepare(*data(num, kind, net), points="held")


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_rows_of_weight_zero_change_the_density_by_no_more_than_rounding(kind):
    held = problem(21, kind)
    z = held.density.sample_prior(3, 0)
    padded = padded_density(held, z).log_joint
    assert padded.__self__ is not held.density and len(padded.__self__.args[0]) == 24
    for one, other in zip(
        *(torch.func.vmap(torch.func.grad_and_value(f))(z) for f in (padded, held.density.log_joint))
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_next_row_has_the_same_graph():
    def graph(num, compile):
        held = problem(num)
        z = held.density.sample_prior(2, 0)
        return traced(gradient_of(held, z, False, compile)[0], [z]).code

    assert graph(20, True) == graph(21, True) == graph(23, True)
    assert graph(23, True) != graph(24, True)
    assert graph(20, False) != graph(21, False)


RICH = "SVI, full rank, two particles"
METHODS = {
    "MAP": pb.MAP(num_steps=4, polish_steps=0),
    "MLE": pb.MLE(num_steps=4),
    "DeepEnsemble": pb.DeepEnsemble(num_members=2, num_steps=4),
    "SVI": pb.SVI(num_steps=4),
    RICH: pb.SVI(guide="full_rank", num_steps=4, num_particles=2),
}


@pytest.mark.filterwarnings("ignore:the search was stopped", "ignore:the full_rank guide ended")
@pytest.mark.parametrize(
    "name",
    ["MAP", "DeepEnsemble", "SVI", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MLE", RICH))],
)
def test_the_next_row_has_the_same_step_and_the_same_losses(name, monkeypatch):
    graphs = []

    def trace(fn, *example, **options):
        graphs[-1].append(traced(fn, [each.detach().clone() for each in example]).code)
        return compiled(fn, *example, enabled=False)

    def losses(num, compile):
        graphs.append([])
        model, x, y = data(num)
        method = replace(METHODS[name], compile=compile)
        return method.fit(model, x, y, seed=1).history["loss"]

    monkeypatch.setattr("pyrobnn.inference.optim.minimize.compiled", trace)
    torch.testing.assert_close(losses(21, True), losses(21, False), rtol=1e-5, atol=1e-6)
    losses(23, True)
    wide, plain, next_one = graphs
    assert wide == next_one != plain


COUNT = """
import sys, warnings
import torch
sys.path[:0] = ["tests", "tests/compile"]
from test_padding import METHODS, data
from torch._dynamo.utils import counters

warnings.simplefilter("ignore")
for name, method in METHODS.items():
    for num in (100, 101):
        method.fit(*data(num), seed=0)
    print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_the_next_row_compiles_nothing(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, timeout=900, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # full rank takes a step of mean-field before its own
    assert done.stdout.split("\n")[:-1] == ["1 1", "2 2", "3 3", "4 4", "6 6"]


def test_a_net_that_looks_at_all_rows_is_left_as_it_is():
    with seeded(0), pytest.warns(UserWarning, match="depends on the other rows"):
        held = problem(21, net=Centred())
    assert padded_density(held, held.density.sample_prior(2, 0)) is held.density


def test_buckets_hold_one_more_row_at_least_and_a_sixteenth_at_most():
    for num in (1, 7, 8, 63, 64, 100, 127, 128, 455, 1000, 10_000):
        assert num < bucket(num) <= max(num + 8, num * 17 / 16)
        assert bucket(bucket(num) - 1) == bucket(num)
