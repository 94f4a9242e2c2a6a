"""Predicted memory against what a process then takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch

from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.nuts import NUTS
from pyrobnn.inference.point_methods import MAP, DeepEnsemble
from pyrobnn.inference.preflight import preflight
from pyrobnn.inference.svi import SVI
from pyrobnn.likelihoods import HomoskedasticGaussian
from pyrobnn.model import BNN
from pyrobnn.networks import mlp
from pyrobnn.priors import IIDPrior

ROOT = Path(__file__).parents[2]


def model(*hidden):
    return BNN(mlp(4, hidden, seed=0), IIDPrior(dist.Normal(0.0, 1.0)), HomoskedasticGaussian(0.1))


X, Y = torch.zeros(100, 4), torch.zeros(100, 1)


def test_memory_grows_with_what_it_should_grow_with():
    small = preflight(SVI(), model(50), X, Y, num_draws=10)
    assert preflight(SVI(), model(500, 500), X, Y, num_draws=10).peak > small.peak
    assert preflight(SVI(), model(50), X, Y, num_draws=100_000).peak > small.peak
    assert (
        preflight(SVI(num_particles=100), model(50), X, Y, num_draws=10).phases["a step"]
        > small.phases["a step"]
    )
    one, many = (preflight(DeepEnsemble(num_members=m), model(50), X, Y) for m in (1, 1000))
    assert many.phases["a step"] == 1000 * one.phases["a step"]
    few, deep = (preflight(NUTS(max_tree_depth=depth), model(50), X, Y) for depth in (4, 10))
    assert deep.peak > few.peak


def test_draws_that_go_to_a_file_take_a_block_of_memory():
    sizes = {"num_draws": 100_000}
    kept = preflight(NUTS(), model(50), X, Y, **sizes)
    streamed = preflight(NUTS(), model(50), X, Y, **sizes, stream_to="draws")
    draws = 4 * sizes["num_draws"] * model(50).num_weights * 4
    assert kept.peak > 3 * draws and streamed.peak < draws
    with pytest.raises(ValueError, match="'stream_to' is an option of NUTS, not of MAP"):
        preflight(MAP(), model(50), X, Y, stream_to="draws")


def test_saved_activations_are_counted():
    width, num_data = 4096, 10_000
    found = preflight(MAP(), model(width), torch.zeros(num_data, 4), torch.zeros(num_data, 1))
    layer = num_data * width * 4
    assert layer < found.phases["a step"] < 8 * layer


def test_a_fit_that_cannot_fit_says_so():
    found = preflight(SVI(), model(50), X, Y, num_draws=10**12)
    assert not found.fits and "does NOT fit" in str(found)


def test_what_has_no_size_is_refused():
    with pytest.raises(TypeError, match="plain program"):
        preflight(SVI(), lambda x, y: None, X, Y)
    with pytest.raises(TypeError, match="'method' must be one of"):
        preflight(object(), model(50), X, Y)


MEASURED = """
import json, sys
from pathlib import Path
import pyro.distributions as dist, torch
import pyrobnn as pb
from pyrobnn.inference.preflight import preflight

torch.set_num_threads(1)
pb.MAP(num_steps=2, compile=False).fit(  # whatever is loaded late is loaded now
    pb.BNN(pb.networks.mlp(4, (5,)), pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1)),
    torch.zeros(5, 4), torch.zeros(5, 1))
model = pb.BNN(
    pb.networks.mlp(500, (1000, 1000), seed=0), pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
x, y = torch.randn(2000, 500), torch.randn(2000, 1)
methods = {
    "map": (pb.MAP(num_steps=4, batch_size=500, compile=False), 1),
    "svi": (pb.SVI(num_steps=4, batch_size=500, compile=False), 20),
    "sghmc": (pb.SGHMC(num_chains=2, num_warmup=4, thinning=1, batch_size=500, compile=False, step_size=1e-6), 10),
}
method, num_draws = methods[sys.argv[1]]
predicted = preflight(method, model, x, y, num_draws=num_draws).peak
Path("/proc/self/clear_refs").write_text("5")
status = lambda name: next(
    1024 * int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
before = status("VmRSS")
posterior = method.fit(model, x, y, num_draws=num_draws)
print(json.dumps([predicted, status("VmHWM") - before]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map", "svi", "sghmc"])
def test_the_prediction_is_within_a_factor_of_what_is_measured(name):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peaks of memory are read from /proc, which only Linux has")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, name],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    predicted, measured = json.loads(done.stdout.splitlines()[-1])
    assert 1 / 1.5 < predicted / measured < 1.5, (predicted / 2**20, measured / 2**20)


@pytest.mark.parametrize(
    "method, phase", [(Laplace(subset="last_layer"), "curvature"), (NUTS(num_chains=2), "a step")]
)
def test_a_sampler_of_a_tenth_of_the_points_is_counted_as_a_tenth(method, phase):
    net = mlp(3, (4,), seed=0)
    model = BNN(net, IIDPrior(dist.Normal(0.0, 1.0)), HomoskedasticGaussian(0.1))
    x, y = torch.zeros(4000, 3), torch.zeros(4000, 1)
    sampler = torch.utils.data.SubsetRandomSampler(range(400))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 50, sampler=sampler)
    part, whole = preflight(method, model, loader), preflight(method, model, x[:400], y[:400])
    assert part.phases[phase] == whole.phases[phase]
    assert part.phases["checking the data"] == int(1.5 * 400 * 4 * (3 + 1))
