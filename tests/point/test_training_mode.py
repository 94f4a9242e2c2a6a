"""Nets in training mode: batch statistics and dropout in a training, one function afterwards; batches of members."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from helpers import seeded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.inference import training_mode
from pyrobnn.inference.batch_norm import refreshed_statistics
from pyrobnn.inference.fitting.batches import MemberRows, even_rows

pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :1].sin() + 0.5 * X[:, 1:2]
FEW = {"num_steps": 30, "compile": False}
METHODS = {
    "mle": pb.MLE(batch_size=30, **FEW),
    "map": pb.MAP(batch_size=30, **FEW),
    "whole": pb.MAP(**FEW),
    "ensemble": pb.DeepEnsemble(num_members=2, batch_size=30, **FEW),
    "svi": pb.SVI(batch_size=30, **FEW),
    "low rank": pb.SVI(guide="low_rank", **FEW),
    "sghmc": pb.SGHMC(
        num_chains=2, num_warmup=20, init_steps=10, thinning=1, batch_size=30, compile=False
    ),
    "sgld": pb.SGLD(num_chains=2, num_warmup=20, init_steps=10, thinning=1, compile=False),
}


def small_net(*layers: nn.Module) -> nn.Module:
    with seeded(1):
        return nn.Sequential(nn.Linear(3, 8), *layers, nn.Tanh(), nn.Linear(8, 1))


def model(net: nn.Module, scale: float | str = 0.2) -> pb.BNN:
    return pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(scale))


def fitted(name: str, net: nn.Module, scale: float | str = 0.2, **options) -> pb.Posterior:
    num_draws = {"svi": 4, "low rank": 4, "sghmc": 4, "sgld": 4}.get(name)
    return METHODS[name].fit(model(net, scale), X, Y, num_draws=num_draws, **options)


@pytest.mark.parametrize("name", METHODS)
def test_every_draw_has_the_running_statistics_of_the_training_data(name):
    net = small_net(nn.BatchNorm1d(8), nn.Dropout(0.2))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    posterior = fitted(name, net)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    codes = {finding["code"] for finding in posterior.meta["findings"]}
    assert {"batch_statistics", "dropout_noise"} <= codes
    draws = {key: value.flatten(0, 1) for key, value in posterior.draws.items()}
    for index in range(len(draws["net.0.weight"])):
        hidden = nn.functional.linear(X, draws["net.0.weight"][index], draws["net.0.bias"][index])
        torch.testing.assert_close(draws["net.1.running_mean"][index], hidden.mean(0))
        torch.testing.assert_close(draws["net.1.running_var"][index], hidden.var(0))
    # one function: a row alone is what it is beside others
    together = posterior.predict(X[:5]).mean
    alone = torch.cat([posterior.predict(X[row : row + 1]).mean for row in range(5)])
    torch.testing.assert_close(alone, together)
    again = fitted(name, net)
    torch.testing.assert_close(again.predict(X).mean, posterior.predict(X).mean, rtol=0, atol=0)


@pytest.fixture
def rows_are_dear(monkeypatch):
    """No rows are taken beyond what a training allows."""
    monkeypatch.setattr(training_mode, "_FEWEST_ROWS", 20)
    monkeypatch.setattr(training_mode, "_FEW_NUMBERS", 0)


def test_statistics_of_many_draws_are_those_of_an_even_selection_of_rows(
    rows_are_dear, monkeypatch
):
    """Beside those of all rows at the mean of the draws, which take off what the selection is off by there."""
    monkeypatch.setattr(training_mode, "_MANY_ROWS", 200)
    draws = fitted("svi", small_net(nn.BatchNorm1d(8))).draws
    weights = draws["net.0.weight"][0]
    biases = draws["net.0.bias"][0]
    rows = X[even_rows(len(X), 22)]

    def hidden(x, weight, bias):
        return nn.functional.linear(x, weight, bias)

    whole, selected = (hidden(x, weights.mean(0), biases.mean(0)) for x in (X, rows))
    ratio = (whole.var(0) / selected.var(0)).clamp_max(1)
    excess = (whole.var(0) - selected.var(0)).clamp_min(0)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        of_few = hidden(rows, weight, bias)
        mean = of_few.mean(0) + whole.mean(0) - selected.mean(0)
        variance = of_few.var(0) * ratio + excess
        torch.testing.assert_close(draws["net.1.running_mean"][0, index], mean)
        torch.testing.assert_close(draws["net.1.running_var"][0, index], variance)


@pytest.mark.parametrize("name", ["map", "whole"])
def test_statistics_of_a_point_after_a_short_training_are_those_of_an_even_selection(
    name, rows_are_dear
):
    method = replace(METHODS[name], num_steps=5)
    draws = method.fit(model(small_net(nn.BatchNorm1d(8))), X, Y).draws
    seen = 5 * (method.batch_size or len(X))
    rows = X[even_rows(len(X), max(20, round(0.2 * seen)))]
    assert len(rows) < len(X) or name == "whole"
    hidden = nn.functional.linear(rows, draws["net.0.weight"][0, 0], draws["net.0.bias"][0, 0])
    torch.testing.assert_close(draws["net.1.running_mean"][0, 0], hidden.mean(0))


def with_two_norms() -> nn.Module:
    with seeded(3):
        first = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU()]
        return nn.Sequential(*first, nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def refreshed_by_hand(
    net: nn.Module, draws, index: int, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What a pass over rows in training mode leaves in the buffers of the net with the weights of a draw."""
    net = copy.deepcopy(net).train()
    names = dict(net.named_parameters())
    net.load_state_dict({name: draws[f"net.{name}"][0, index] for name in names}, strict=False)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.reset_running_stats()
            layer.momentum = None
    with torch.no_grad():
        net(x)
    return {f"net.{name}": value for name, value in net.named_buffers()}


@pytest.mark.parametrize("streamed", [False, True], ids=["memory", "loader"])
def test_few_rows_beside_the_mean_of_the_draws_are_close_to_a_pass_over_all(
    streamed, rows_are_dear
):
    net = with_two_norms()
    x = torch.randn(900, 3, generator=torch.Generator().manual_seed(2))
    y = x[:, :1].sin() + 0.5 * x[:, 1:2]
    method = pb.SWAG(num_steps=60, collect_every=2, batch_size=None if streamed else 30, lr=1e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=30)
    data = (loader,) if streamed else (x, y)
    draws = method.fit(model(net), *data, num_draws=6, init=net).draws
    rows = x[even_rows(len(x), 30)]
    errors = {"given": 0.0, "few alone": 0.0}
    for index in range(6):
        whole = refreshed_by_hand(net, draws, index, x)
        few = refreshed_by_hand(net, draws, index, rows)
        for name in ("net.1.running_mean", "net.1.running_var", "net.4.running_mean"):
            errors["given"] += float((draws[name][0, index] - whole[name]).square().sum())
            errors["few alone"] += float((few[name] - whole[name]).square().sum())
    assert errors["given"] < 0.1 * errors["few alone"]
    assert all(bool((draws[f"net.{layer}.running_var"] > 0).all()) for layer in (1, 4))


def test_a_feature_that_few_rows_do_not_move_has_a_variance():
    norms = {"net.1.running_mean", "net.1.running_var"}
    net = small_net(nn.BatchNorm1d(8))
    bnn = model(net)
    draws = {
        f"net.{name}": torch.stack([value.detach(), 1.1 * value.detach()])[None]
        for name, value in net.named_parameters()
    }
    statistics = refreshed_statistics(bnn, draws, [X], [X[:1].repeat(4, 1)])
    assert statistics.keys() == norms
    whole = refreshed_statistics(bnn, draws, [X])
    torch.testing.assert_close(
        statistics["net.1.running_var"][0].mean(0),
        whole["net.1.running_var"][0].mean(0),
        rtol=0.05,
        atol=0,
    )


def test_dropout_is_noise_of_the_training_from_the_seed():
    quiet = fitted("map", small_net(nn.Dropout(0.3)).eval(), seed=3)
    assert "dropout_noise" not in {finding["code"] for finding in quiet.meta["findings"]}
    ends = [fitted("map", small_net(nn.Dropout(0.3)), seed=seed) for seed in (3, 3, 4)]
    weights = [end.draws["net.0.weight"] for end in ends]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], quiet.draws["net.0.weight"])


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.Dropout(0.3)])
@pytest.mark.parametrize("name", ["map", "ensemble", "svi"])
def test_nets_in_evaluation_mode_stay_as_they_are(name, layer):
    posterior = fitted(name, small_net(layer).eval())
    assert not {"net.1.running_mean"} & posterior.draws.keys()
    assert not {"batch_statistics", "dropout_noise"} & {
        f["code"] for f in posterior.meta["findings"]
    }


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.Dropout(0.3)])
@pytest.mark.parametrize("name", ["whole", "ensemble", "svi"])
def test_free_noise_in_training_mode(name, layer):
    posterior = fitted(name, small_net(layer), "learned")
    assert bool(torch.isfinite(posterior.predict(X).mean).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map", "ensemble"])
def test_compiled_is_eager_with_batch_statistics(name):
    net = small_net(nn.BatchNorm1d(8))
    method = METHODS[name]
    fits = [
        replace(method, num_steps=5, compile=compile).fit(model(net), X, Y)
        for compile in (True, False)
    ]
    torch.testing.assert_close(
        fits[0].predict(X).mean, fits[1].predict(X).mean, rtol=1e-3, atol=1e-4
    )


def test_compiled_dropout_draws_other_units_at_every_step():
    net = small_net(nn.Dropout(0.5))
    method = pb.MLE(num_steps=40, lr=1e-12, compile=True)
    losses = method.fit(model(net), X, Y).history["loss"]
    assert len(set(losses.tolist())) > 30


def test_snapshots_have_statistics_and_chains_in_training_mode_are_not_updated():
    seen = []
    method = pb.SGHMC(num_chains=2, num_warmup=20, init_steps=5, thinning=1, compile=False)

    def look(step, metrics):
        seen.append("net.1.running_mean" in metrics["snapshot"]().draws)

    posterior = method.fit(
        model(small_net(nn.BatchNorm1d(8))), X, Y, num_draws=10, callbacks=[look]
    )
    assert seen and seen[-1]
    with pytest.raises(Refused, match="in training mode, so the density of a row depends"):
        posterior.update(X[:3], Y[:3])
    with pytest.raises(Refused, match=r"call net.eval\(\)"):
        pb.NUTS().fit(model(small_net(nn.BatchNorm1d(8))), X, Y)


def test_members_have_batches_of_their_own_by_their_own_seed():
    rows = [next(MemberRows(90, 30, torch.device("cpu"), seeds)) for seeds in ([7, 8], [7], [8])]
    assert torch.equal(rows[0][0], rows[1][0]) and torch.equal(rows[0][1], rows[2][0])
    assert not torch.equal(rows[0][0], rows[0][1])
    epoch = MemberRows(90, 30, torch.device("cpu"), [7])
    seen = torch.cat([next(epoch)[0] for _ in range(3)])
    assert seen.sort().values.tolist() == list(range(90))


def test_a_member_with_full_batches_is_the_member_that_it_was():
    method = pb.DeepEnsemble(num_members=3, num_steps=20, compile=False)
    plain = method.fit(model(small_net()), X, Y)
    from dataclasses import replace

    whole = replace(method, batch_size=90).fit(model(small_net()), X, Y)
    for name, draws in plain.draws.items():
        assert torch.equal(draws, whole.draws[name])


def test_members_from_one_start_differ_by_their_batches():
    net = small_net()
    method = pb.DeepEnsemble(num_members=2, num_steps=5, batch_size=30, compile=False)
    posterior = method.fit(model(net), X, Y, seed=1)
    again = method.fit(model(net), X, Y, seed=1)
    assert torch.equal(posterior.draws["net.0.weight"], again.draws["net.0.weight"])
    # by hand: one member, its start and its batches
    from pyrobnn.inference.fitting.problem import prepare

    problem = prepare(model(net), X, Y, points="free")
    member = 1
    seed = 1 * 2 + member
    theta = problem.density.initial(problem.bnn.reinitialized(seed).initial_values(), seed)
    walk = MemberRows(90, 30, torch.device("cpu"), [2**40 + seed])
    average = torch.zeros_like(theta)
    square = torch.zeros_like(theta)
    slope = torch.func.grad(
        lambda z, x, y: -problem.density.log_joint(z, x, y, jacobian=False) / 90
    )
    for step in range(5):
        rows = next(walk)[0]
        gradient = slope(theta, X[rows], Y[rows])
        average = 0.9 * average + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient.square()
        rate = 0.01 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 5)))
        move = (average / (1 - 0.9 ** (step + 1))) / (
            (square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
        )
        theta = theta - rate * move
    expected = problem.density.constrain(theta)["net.0.weight"]
    torch.testing.assert_close(
        posterior.draws["net.0.weight"][0, member], expected, rtol=1e-4, atol=1e-5
    )


class Block(nn.Module):
    """A residual block of two convolutions with batch norm."""

    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)

    def forward(self, x):
        hidden = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(x + self.second_norm(self.second(hidden)))


def test_an_ensemble_of_resnets_from_scratch(tmp_path):
    generator = torch.Generator().manual_seed(4)
    y = torch.arange(80) % 2
    x = 0.5 * torch.randn(80, 1, 6, 6, generator=generator)
    x[y == 1, :, :3] += 1.0
    with seeded(0):
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            Block(4),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 2),
        )
    bnn = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.Categorical())
    method = pb.DeepEnsemble(num_members=2, num_steps=60, lr=0.02, batch_size=20, compile=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = method.fit(bnn, x[:60], y[:60])
    assert any("depends on the other rows of the batch" in str(w.message) for w in caught)
    accuracy = (posterior.predict(x[60:]).probs.argmax(1) == y[60:]).float().mean()
    assert accuracy > 0.9
    path = posterior.save(tmp_path / "ensemble.nc")
    loaded = pb.Posterior.load(path, bnn)
    torch.testing.assert_close(loaded.predict(x).probs, posterior.predict(x).probs)
    assert pickle.loads(pickle.dumps(posterior)).predict(x).probs.shape == (80, 2)
    verdict = posterior.diagnose()
    assert verdict.draws in ("pass", "warn", "fail", "not checked")
