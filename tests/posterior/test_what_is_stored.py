"""What a file or a pickle holds: what varies, once; and no row of the data that nobody asked for."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch
from helpers import seeded
from torch import nn

import pyrobnn as pb
from pyrobnn.core.checks import Refused

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = torch.randn(100, 5, generator=torch.Generator().manual_seed(5))
TARGETS = ROWS[:, :1].sin() + 0.1 * ROWS[:, 1:2]
CLASSES = (ROWS[:, 0] > 0).long()


def trained(width: int = 8, out: int = 1) -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, out))


def regression(net: nn.Module) -> pb.BNN:
    return pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))


def last_layer(**options) -> pb.Posterior:
    net = trained(2000)
    method = pb.Laplace(subset="last_layer", compile=False, **options)
    return method.fit(regression(net), ROWS, TARGETS, init=net, num_draws=30)


METHODS = {
    "nuts": pb.NUTS(num_chains=2, num_warmup=10, max_tree_depth=3, compile=False),
    "sghmc": pb.SGHMC(num_warmup=10, init_steps=5, compile=False),
    "svi": pb.SVI(num_steps=10, compile=False),
    "low rank": pb.SVI(guide="low_rank", num_steps=10, compile=False),
    "laplace": pb.Laplace(num_steps=10, compile=False),
    "last layer": pb.Laplace(subset="last_layer", num_steps=10, compile=False),
    "draws": pb.Laplace(predictive="draws", num_steps=10, compile=False),
    "swag": pb.SWAG(num_steps=20, lr=1e-3, collect_every=2, compile=False),
    "map": pb.MAP(num_steps=10, compile=False),
    "ensemble": pb.DeepEnsemble(num_members=2, num_steps=10, compile=False),
}


def values_found(content: bytes) -> int:
    """How many of a hundred rows have two values side by side in the content, in float32 or float64."""
    found = 0
    for row in ROWS:
        for values in (row, row.double()):
            found += values[:2].numpy().tobytes() in content
    return found


@pytest.mark.parametrize("name", METHODS)
def test_no_row_is_in_a_file_or_a_pickle_unless_asked_for(name, tmp_path):
    num_draws = None if name in ("map", "ensemble") else 5
    posterior = METHODS[name].fit(regression(trained()), ROWS, TARGETS, num_draws=num_draws)
    assert values_found(posterior.save(tmp_path / "none.nc").read_bytes()) == 0
    assert values_found(pickle.dumps(posterior)) == 0
    if posterior.rows is not None:
        assert values_found(posterior.save(tmp_path / "rows.nc", rows=True).read_bytes()) >= 100


def test_held_weights_are_views_and_are_stored_once(tmp_path):
    posterior = last_layer()
    held = posterior.draws["net.0.weight"]
    assert held.shape == (1, 30, 2000, 5)
    assert held.stride()[:2] == (0, 0) or held.stride(1) == 0
    assert posterior.draws["net.2.weight"].std(1).min() > 0
    net_bytes = 4 * sum(value[0, 0].numel() for value in posterior.draws.values())
    moving = 4 * 30 * 2001
    path = posterior.save(tmp_path / "last.nc")
    assert path.stat().st_size < net_bytes + 2 * moving + 8 * 2001 * 100 + 2**17
    assert len(pickle.dumps(posterior.draws)) < 2 * (net_bytes + moving)
    again = pb.Posterior.load(path, posterior.model)
    assert again.draws["net.0.weight"].stride(1) == 0
    for name, value in posterior.draws.items():
        assert torch.equal(again.draws[name], value)
    torch.testing.assert_close(again.log_q(), posterior.log_q())
    torch.testing.assert_close(again.predict(ROWS).mean, posterior.predict(ROWS).mean)
    torch.testing.assert_close(again.moments(ROWS), posterior.moments(ROWS))
    thinned = posterior.thin(5)
    assert thinned.draws["net.0.weight"].shape[1] == 5
    assert thinned.draws["net.0.weight"].stride(1) == 0


def test_log_p_of_a_last_layer_is_that_of_all_of_its_sites():
    posterior = last_layer()
    density = pb.Density(posterior.model.pyro_model, (ROWS, TARGETS), points="held", values={})
    z = density.unconstrain(posterior.draws)[0]
    expected = torch.stack([density.log_joint(draw) for draw in z])
    found = posterior.sample_stats["log_p"][0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.05)


def test_large_factors_stay_out_of_a_file_and_come_back_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("pyrobnn.posterior.storage._LARGEST_FACTORS", 0)
    net = trained(30, 2)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.Categorical())
    method = pb.Laplace(subset="last_layer", tune="marginal_likelihood", compile=False)
    posterior = method.fit(model, ROWS, CLASSES, init=net, num_draws=20)
    path = posterior.save(tmp_path / "compact.nc")
    compact = pb.Posterior.load(path, model)
    assert compact.approximation is None
    assert compact.meta["factors_left_out"]
    assert torch.equal(compact.predict(ROWS).probs, posterior.predict(ROWS).probs)
    with pytest.raises(Refused, match="left out the factors"):
        compact.update(ROWS[:2], CLASSES[:2])
    whole = pb.Posterior.load(path, model, x=ROWS, y=CLASSES)
    torch.testing.assert_close(whole.log_q(), posterior.log_q(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(whole.moments(ROWS), posterior.moments(ROWS), rtol=1e-3, atol=1e-4)
    assert "factors_left_out" not in whole.meta


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path):
    posterior = METHODS["map"].fit(regression(trained()), ROWS, TARGETS)
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True
    )
    dead = int(done.stdout)
    left = tmp_path / f".model.nc.{dead}.part"
    alive = tmp_path / f".model.nc.{os.getppid()}.part"
    other = tmp_path / f".other.nc.{dead}.part"
    for each in (left, alive, other):
        each.write_bytes(b"half")
    posterior.save(tmp_path / "model.nc")
    assert not left.exists()
    assert alive.exists() and other.exists()
