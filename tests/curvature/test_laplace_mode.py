"""Where Laplace is centred: the same mode whatever brings the data, or a word that it is none."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from models import diabetes_linear, normal_prior, toy, toy_net
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.inference.curvature.prior import Tuned
from pyrobnn.inference.fitting import batches
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.likelihoods import HomoskedasticGaussian

#: how the data come: batch size of a loader, and of MAP
SOURCES = {
    "shuffled loader": (50, True, None),
    "loader with a short last batch": (100, False, None),
    "loader of one batch": (1000, False, None),
    "mini-batches": (None, False, 50),
    "a mini-batch above N": (None, False, 1000),
}
NOISES = {"fixed": 0.7, "inferred": dist.LogNormal(-0.5, 0.5), "learned": "learned"}


def fitted(noise: str, source: str | None) -> pb.Posterior:
    """Linear regression, so that there is one mode to be found."""
    loader_size, shuffle, batch_size = SOURCES[source] if source else (None, False, None)
    truth = diabetes_linear()
    data = truth["x"], truth["y"]
    if loader_size:
        data = (DataLoader(TensorDataset(*data), batch_size=loader_size, shuffle=shuffle),)
    with pb.core.seeding.seeded(0):
        net = torch.nn.Linear(10, 1).double()
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(NOISES[noise]))
    search = pb.MAP(num_steps=30, lr=0.05, batch_size=batch_size, compile=False)
    return pb.Laplace(map=search).fit(model, *data, num_draws=1)


@pytest.mark.parametrize(
    ("noise", "source"),
    [
        pytest.param(
            noise,
            source,
            marks=() if noise == "fixed" or source == "mini-batches" else pytest.mark.slow,
        )
        for noise in NOISES
        for source in SOURCES
    ],
)
def test_the_same_mode_whatever_brings_the_data(noise, source):
    tensors = fitted(noise, None)
    other = fitted(noise, source)
    assert tensors.meta["newton_distance"] < 1e-3 and other.meta["newton_distance"] < 1e-3
    assert other.log_evidence == pytest.approx(tensors.log_evidence, abs=1e-3)
    if noise == "fixed":
        assert other.log_evidence == pytest.approx(
            float(diabetes_linear()["log_evidence"]), abs=1e-3
        )
    assert other.meta["num_data"] == len(diabetes_linear()["x"])


def _wiggly(*data) -> float:
    """Of a net with many modes, searched in steps of eight data."""
    with pb.core.seeding.seeded(0):
        net = pb.networks.mlp(1, (10,), 1)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.1))
    search = pb.MAP(num_steps=150, lr=0.05, batch_size=None if len(data) == 1 else 8, compile=False)
    posterior = pb.Laplace(map=search).fit(model, *data, num_draws=1)
    return posterior.log_evidence


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the centre is not a mode")
def test_a_net_of_many_modes_has_one_evidence_whatever_brings_the_data():
    x, y = toy(40)
    expected = _wiggly(x, torch.sin(3 * x) + y)
    data = TensorDataset(x, torch.sin(3 * x) + y)
    generator = torch.Generator().manual_seed(5)
    for loader in (
        DataLoader(data, batch_size=8),
        DataLoader(data, batch_size=8, shuffle=True),
        DataLoader(data, batch_size=8, shuffle=True, generator=generator),
        DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(range(40), 8, False)),
    ):
        assert _wiggly(loader) == expected


def test_cross_validation_at_its_bound_has_no_evidence(monkeypatch):
    end = Tuned(torch.tensor([1e4]).double(), at_bound=True, held_out={"factor": 1e4})
    monkeypatch.setattr("pyrobnn.inference.laplace.hold_out", lambda *args: end)
    x, y = toy(40)
    model = pb.BNN(toy_net(out=3), normal_prior(), pb.likelihoods.Categorical())
    labels = (x[:, 0] > -1).long() + (x[:, 0] > 1).long()
    method = pb.Laplace(tune="cross_validation", num_steps=50, compile=False)
    with pytest.warns(UserWarning) as caught:
        posterior = method.fit(model, x, labels, num_draws=2)
    assert posterior.log_evidence is None
    assert any(
        "ended at the edge of the factors it tries, 10000" in str(each.message) for each in caught
    )


def test_many_data_are_at_the_mode_of_the_linear_model_wherever_the_search_ends(
    tmp_path, monkeypatch
):
    with pb.core.seeding.seeded(0):
        net = torch.nn.Linear(3, 1).double()
        x = torch.randn(6000, 3, dtype=torch.float64)
        y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.3 * torch.randn(
            6000, 1
        )
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.3))
    search = pb.MAP(num_steps=150, lr=0.05, batch_size=500, compile=False)
    with monkeypatch.context() as patch:
        patch.setattr("pyrobnn.inference.laplace.POLISH_STEPS", 0)
        posterior = pb.Laplace(map=search).fit(model, x, y, num_draws=200)
    exact = pb.Laplace(num_steps=200, compile=False).fit(model, x, y, num_draws=200)
    assert posterior.meta["newton_distance"] > 1 and exact.meta["newton_distance"] < 1e-3
    assert posterior.meta["warnings"] == [] and posterior.log_evidence == pytest.approx(
        exact.log_evidence, abs=1e-3
    )
    for ours, theirs in zip(posterior.moments(x[:5]), exact.moments(x[:5])):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        posterior.approximation.loc, exact.approximation.loc, atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(
        posterior.predict(x[:5]).f, exact.predict(x[:5]).f, atol=1e-6, rtol=1e-6
    )
    loaded = pb.Posterior.load(posterior.save(tmp_path / "p.nc"), model)
    torch.testing.assert_close(loaded.moments(x[:5]), posterior.moments(x[:5]))
    torch.testing.assert_close(loaded.predict(x[:5]).f, posterior.predict(x[:5]).f)


def test_a_gradient_in_parts_is_the_gradient(monkeypatch):
    x, y = toy(40)
    with pb.core.seeding.seeded(0):
        net = pb.networks.mlp(1, (3,), 1)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(dist.HalfNormal(1.0)))
    problem = prepare(model, x, y, points="free")
    z = torch.linspace(-1, 1, problem.density.dim)
    monkeypatch.setattr(batches, "_PART", 7)
    gradient, value = batches.in_parts(problem.density, problem.x, problem.y)(z)
    expected = torch.func.grad_and_value(problem.density.log_joint)(z)
    torch.testing.assert_close(-gradient, expected[0])
    torch.testing.assert_close(-value, expected[1])
    values = problem.density.constrain(z)
    found = batches.forward_in_parts(problem.bnn, values, problem.x)
    torch.testing.assert_close(found, problem.bnn.forward(values, problem.x))
