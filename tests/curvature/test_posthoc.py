"""A trained net: `posthoc` is never worse than it, leaves it alone, and is what it says."""

from __future__ import annotations

import copy
import importlib

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.inference.curvature.last_layer import LastLayer, NetRows

module = importlib.import_module("pyrobnn.inference.posthoc")


def blobs(num: int, seed: int, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (num,), generator=make)
    return 1.2 * torch.eye(3)[y] + torch.randn(num, width, generator=make), y


def trained(x, y, *layers: nn.Module, steps: int = 150) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(x.shape[1], 20), nn.Tanh(), *layers, nn.Linear(20, 3))
        optimizer = torch.optim.Adam(net.parameters(), 0.03)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net


def test_a_net_that_is_too_sure_is_tempered_and_left_as_it_is():
    (x, y) = blobs(60, 0)
    held = blobs(200, 1)
    (new, labels) = blobs(1000, 2)
    net = trained(x, y, nn.BatchNorm1d(20), nn.Dropout(0.1))
    before = copy.deepcopy(net.state_dict())
    posterior = pb.posthoc(net, DataLoader(TensorDataset(x, y), 16, shuffle=True), held_out=held)
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    plain = (
        torch.distributions.Categorical(logits=copy.deepcopy(net).eval()(new))
        .log_prob(labels)
        .mean()
    )
    scores = posterior.meta["held_out_log_density"]
    chosen = posterior.meta["chosen"]
    assert chosen != "net"
    assert scores[chosen][0] > scores["net"][0] + 0.1
    assert posterior.predict(new).log_prob(labels).mean() > plain + 0.1


def test_without_left_out_rows_it_never_narrows():
    x, y = blobs(80, 0)
    posterior = pb.posthoc(trained(x, y, steps=5), x, y)  # far from sure enough
    assert posterior.meta["judged_by"] == "leave_one_out"
    assert posterior.meta["held_out_log_density"]["temperature"][0] == pytest.approx(
        posterior.meta["held_out_log_density"]["net"][0], abs=1e-3
    )


def one_output() -> nn.Module:
    with torch.random.fork_rng():
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def test_targets_of_zero_and_one_belong_to_a_logit_of_whatever_type():
    x, y = blobs(60, 0)
    net = one_output()
    y = y > 0
    for labels in (y, y.long(), y.float(), y.float()[:, None]):
        assert isinstance(pb.posthoc(net, x, labels).model.likelihood, pb.likelihoods.Bernoulli)


@pytest.mark.parametrize(
    ("labels", "fix"),
    [
        (lambda y: y[:, None], r"y.squeeze\(-1\)"),
        (lambda y: y.float(), r"y.long\(\)"),
        (lambda y: nn.functional.one_hot(y), r"y.argmax\(-1\)"),
        (lambda y: nn.functional.one_hot(y).float(), r"y.argmax\(-1\)"),
    ],
)
def test_labels_in_another_form_are_no_numbers_with_noise(labels, fix):
    x, y = blobs(60, 0)
    with pytest.raises((TypeError, ValueError), match=fix):
        pb.posthoc(trained(x, y, steps=1), x, labels(y))


def test_several_targets_of_zero_and_one_have_a_logit_each():
    x, y = blobs(60, 0)
    found = pb.posthoc(trained(x, y, steps=1), x, (x[:, :3] > 0).float())
    assert isinstance(found.model.likelihood, pb.likelihoods.Bernoulli)


class InADict(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x):
        return {"logits": self.net(x)}


def test_residuals_alone_are_no_noise():
    x, _ = blobs(60, 0)
    scaled = nn.Sequential(one_output(), nn.Softplus())
    with pytest.raises(pb.Refused, match="does not end in a linear layer"):
        pb.posthoc(scaled, x, x[:, :1])
    assert (
        pb.posthoc(scaled, x[:30], x[:30, :1], held_out=(x[30:], x[30:, :1])).meta["judged_by"]
        == "held_out"
    )
    noise = pb.likelihoods.HomoskedasticGaussian(0.5)
    assert pb.posthoc(scaled, x, x[:, :1], likelihood=noise).meta["judged_by"] == "training"


def test_numbers_have_their_noise_and_width_tuned_together(tmp_path):
    make = torch.Generator().manual_seed(0)
    x = torch.randn(230, 8, generator=make)
    y = x[:, :1] + torch.randn(230, 1, generator=make)
    held = (x[30:], y[30:])
    x = x[:30]
    y = y[:30]
    with torch.random.fork_rng():
        net = nn.Linear(8, 1)
    with torch.no_grad():
        solution = torch.linalg.lstsq(nn.functional.pad(x, (0, 1), value=1.0), y).solution[:, 0]
        net.weight.copy_(solution[None, :-1])
        net.bias.copy_(solution[-1:])
    posterior = pb.posthoc(net, x, y, held_out=held)
    assert posterior.meta["chosen"] in ("noise", "last_layer")
    judged = posterior.meta["held_out_log_density"][posterior.meta["chosen"]]
    assert float(posterior.predict(held[0]).log_prob(held[1]).mean()) == pytest.approx(
        judged[0], abs=0.01
    )
    again = pb.Posterior.load(posterior.save(tmp_path / "net.nc"), posterior.model)
    torch.testing.assert_close(again.predict(x).f, posterior.predict(x).f)


@pytest.mark.filterwarnings("ignore:the centre is not a mode")
@pytest.mark.parametrize("bias", [True, False])
def test_the_last_layer_is_that_of_laplace(bias):
    x, y = blobs(40, 0)
    with torch.random.fork_rng():
        net = nn.Sequential(nn.Tanh(), nn.Linear(3, 3, bias=bias)).double()
    x = x.double()
    model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 0.5)), pb.likelihoods.Categorical())
    laplace = pb.Laplace(structure="kron", compile=False).fit(model, x, y, init=net, num_draws=2)
    features = torch.tanh(x)
    rows = NetRows(net(x).detach(), y, features, seen=False)
    last = LastLayer(net[1], model.likelihood, rows)
    cov = laplace.network.output_moments(x)[1]
    basis = last.out_basis
    ours = basis @ (last.variance(rows, 4.0).unsqueeze(-1) * basis.T)
    torch.testing.assert_close(ours, cov)
    posterior = last.posterior(net, "1", model.likelihood, 4.0, torch.ones(3), x, seed=0)
    torch.testing.assert_close(posterior.log_q(laplace.draws), laplace.log_q())
    torch.testing.assert_close(
        posterior.predict(x).f.var(1)[0], cov.diagonal(dim1=1, dim2=2), rtol=0.3, atol=0.05
    )


def test_what_cannot_be_is_said():
    x, y = blobs(40, 0)
    net = trained(x, y, steps=1)
    with pytest.raises(ValueError, match="leave the Softmax out"):
        pb.posthoc(nn.Sequential(net, nn.Softmax(-1)), x, y)
    with pytest.raises(TypeError, match="'net' must be a trained"):
        pb.posthoc(pb.MAP(), x, y)
    with pytest.raises(TypeError, match="held_out="):
        pb.posthoc(net, x, y, held_out=x)
    for rows in ((x.log(), y), (x, y + 1), (x[:0], y[:0])):
        with pytest.raises(ValueError, match=r"held_out=\(x, y\): "):
            pb.posthoc(net, x, y, held_out=rows)
    with pytest.raises(ValueError, match="returns a dict"):
        pb.posthoc(InADict(net), x, y)
    lost = copy.deepcopy(net)
    nn.init.constant_(lost[0].weight, torch.nan)
    with pytest.raises(ValueError, match=r"'net\(x\)' holds 120 NaN"):
        pb.posthoc(lost, x, y)
    with pytest.raises(ValueError, match="pass x\\[:, None\\]"):
        pb.posthoc(net, x[:, 0], y)
    with pytest.raises(TypeError, match=r"pb.posthoc\(net, x, y\) makes"):
        pb.MAP().fit(net, x, y)
    with pytest.raises(TypeError, match=r"pb.MAP\(\).fit\(model, x, y\)"):
        pb.MAP.fit(net, x, y)


def sure(
    num: int, wrong: int, scale: float = 60.0, depth: float = 0.0
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Three clusters far apart, a net that is right and very sure of all of them, and some labels that are wrong."""
    make = torch.Generator().manual_seed(0)
    truth = torch.arange(num) % 3
    x = 4 * torch.eye(3)[truth] + 0.3 * torch.randn(num, 3, generator=make)
    with torch.random.fork_rng():
        layers = [nn.Linear(3, 3, bias=False) for _ in range(1 + (depth > 0))]
    with torch.no_grad():
        for layer, size in zip(layers, (scale, depth)):
            layer.weight.copy_(size * torch.eye(3))
    net = layers[0] if len(layers) == 1 else nn.Sequential(layers[0], nn.ReLU(), layers[1])
    y = truth.clone()
    y[:wrong] = (y[:wrong] + 1) % 3
    return net, x, y


@pytest.mark.parametrize("depth", [0.0, 1e2, 1e10])
@pytest.mark.parametrize(("num", "wrong"), [(20, 1), (200, 1), (200, 2), (2000, 1)])
def test_a_wrong_label_among_sure_ones_takes_the_temperature(num, wrong, depth):
    """One row makes both the mean and the error of the difference, so that a plain error keeps the net."""
    net, x, y = sure(num, wrong, depth=depth)
    posterior = pb.posthoc(net, x, y)
    scores = posterior.meta["held_out_log_density"]
    assert posterior.meta["chosen"] == "temperature"
    assert all(torch.tensor(score).isfinite().all() for score in scores.values())
    wide = posterior.predict(x).probs
    assert (wide.argmax(-1) == x.argmax(-1)).all() and wide.max(-1).values.mean() > 0.6
    assert pb.posthoc(net, x, x.argmax(-1)).meta["chosen"] == "net"


def test_one_outlier_widens_a_noise_that_finds_it_impossible_and_no_other():
    make = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1, generator=make)
    y = x + 0.1 * torch.randn(200, 1, generator=make)
    with torch.random.fork_rng():
        net = nn.Linear(1, 1)
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.bias.zero_()
    noise = pb.likelihoods.HomoskedasticGaussian(0.1)
    far = y.index_fill(0, torch.tensor([0]), 10.0)
    assert pb.posthoc(net, x, y, likelihood=noise).meta["chosen"] == "net"
    assert pb.posthoc(net, x, far, likelihood=noise).meta["chosen"] != "net"


def test_a_net_that_is_right_is_changed_no_more_often_than_by_a_plain_error(monkeypatch):
    """Labels drawn from the net's own probabilities: what is unlikely is seen as often as it says."""
    changed = {"bounded": 0, "plain": 0}
    for seed in range(20):
        make = torch.Generator().manual_seed(seed)
        x = torch.randn(100, 3, generator=make)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net = nn.Linear(3, 3)
            with torch.no_grad():
                net.weight.mul_(6.0)
            y = torch.distributions.Categorical(logits=net(x).detach()).sample()
        for name, error in (("bounded", module._bounded_error), ("plain", module._error)):
            with monkeypatch.context() as patch:
                patch.setattr(module, "_bounded_error", error)
                changed[name] += (
                    pb.posthoc(net, x[:20], y[:20], held_out=(x[20:], y[20:])).meta["chosen"]
                    != "net"
                )
    assert changed["bounded"] <= changed["plain"] + 1 and changed["plain"] < 10, changed
