"""Kronecker Laplace of nets as they are: exact blocks where a layer is no product, and the same predictions by both."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers import seeded
from models import normal_prior
from torch import nn

import pyrobnn as pb
from pyrobnn.inference.curvature.jacobian import NetworkJacobian

#: the module, whose name in the package is that of its function
GGN = sys.modules["pyrobnn.inference.curvature.ggn"]
pytestmark = pytest.mark.filterwarnings("ignore:.*not a mode", "ignore:.*several likelihoods")


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        up = self.up(torch.tanh(self.norm(self.down(x))))
        return self.out(torch.cat([up, x], 1)).mean((2, 3))


class Twice(nn.Module):
    """One linear layer is called twice."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))


class Tied(nn.Module):
    """Words in and words out have the same weights."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.words(x).mean(1))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(2, 4)
        self.body = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(self.before(x)).mean(1))


class Words(nn.Module):
    def __init__(self, padding_idx: int | None = None):
        super().__init__()
        self.words = nn.Embedding(6, 3, padding_idx=padding_idx)
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.words(x).mean(1))))


class TimeFirst(nn.Module):
    """Its layers are given (time, row, feature)."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x.transpose(0, 1)))).mean(0))


def depthwise():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Tanh(),
        nn.Conv2d(4, 3, 1),
        nn.Flatten(),
        nn.Linear(12, 2),
    )


def dilated_and_grouped():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, dilation=2, padding="same"),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1, bias=False),
        nn.InstanceNorm2d(6, affine=True),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(54, 2),
    )


def of_one_dimension():
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, padding=1),
        nn.BatchNorm1d(3),
        nn.Tanh(),
        nn.ConvTranspose1d(3, 2, 3, stride=2, dilation=2, padding=1, output_padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(2),
    )


def transposed_with_much_padding():
    return nn.Sequential(
        nn.ConvTranspose1d(2, 2, 3, dilation=2, output_padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(2),
    )


def batch_norm():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.PReLU(4), nn.Linear(4, 2))


def layer_norm():
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, padding=1),
        nn.LayerNorm((3, 5)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(15, 4),
        nn.RMSNorm(4),
        nn.Linear(4, 2),
    )


def numbers(*shape: int):
    return lambda n: torch.randn(
        n,
        *shape,
        generator=torch.Generator().manual_seed(3),
        dtype=torch.float64,
    )


def tokens(n: int) -> torch.Tensor:
    return torch.arange(3 * n).reshape(n, 3) % 5


#: net, inputs, and the modules whose weights have no Kronecker factors
NETS = {
    "U-Net": (UNet, numbers(1, 6, 6), {"norm", "up.bias"}),
    "depthwise": (depthwise, numbers(1, 6, 6), {"2"}),
    "dilated, grouped": (dilated_and_grouped, numbers(1, 6, 6), {"2", "3"}),
    "one dimension": (of_one_dimension, numbers(2, 5), {"1", "3.bias"}),
    "output padding": (transposed_with_much_padding, numbers(2, 5), {"0"}),
    "called twice": (Twice, numbers(3), {"body"}),
    "tied": (Tied, tokens, {"words"}),
    "LSTM": (Recurrent, numbers(3, 2), {"body"}),
    "attention": (Attention, numbers(3, 2), {"body.self_attn", "body.norm1", "body.norm2"}),
    "embedding": (Words, tokens, {"words"}),
    "padding row": (lambda: Words(0), tokens, {"words"}),
    "batch norm, PReLU": (batch_norm, numbers(3), {"1", "2"}),
    "layer norm": (layer_norm, numbers(2, 5), {"1", "5"}),
    "time first": (TimeFirst, numbers(3, 2), {"body", "norm"}),
}


def net_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, inputs, _ = NETS[name]
    x = inputs(9)
    with seeded(0):
        net = make().double()
        net(x)
        for parameter in net.parameters():  # scales of one and shifts of zero hide mistakes
            parameter.data += 0.3 * torch.randn_like(parameter)
        for module in net.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight.data[module.padding_idx] = 0.0
    return net.eval(), x


def fitted(name: str, num_rows: int = 9, **options) -> pb.Posterior:
    net, x = net_of(name)
    model = pb.BNN(net, normal_prior(0.5), pb.likelihoods.HomoskedasticGaussian(0.5))
    x = x[:num_rows]
    y = net(x).detach() + 0.1
    method = pb.Laplace(structure="kron", compile=False, **options)
    return method.fit(model, x, y, init=net, num_draws=4)


def true_rows(net: nn.Module, x: torch.Tensor, jacobian: NetworkJacobian) -> torch.Tensor:
    """The Jacobian (N, width, p) by autograd through the net itself, row by row."""
    names = [site.name.removeprefix("net.") for site in jacobian.sites]
    parameters = [net.get_parameter(name) for name in names]
    rows = []
    for point in x:
        for output in net(point[None])[0]:
            slopes = torch.autograd.grad(output, parameters, retain_graph=True)
            pieces = []
            for site, slope in zip(jacobian.sites, slopes, strict=True):
                # a padding row has no coordinates
                free = slope if site.size == slope.numel() else slope[1:]
                pieces.append(free.reshape(-1))
            rows.append(torch.cat(pieces))
    return torch.stack(rows).unflatten(0, (len(x), -1))


def matrix_of(block) -> torch.Tensor:
    """Λ (p, p) from δᵀΛδ of unit vectors and their sums."""
    size = len(block.index)
    identity = torch.eye(size, dtype=torch.float64)
    squares = block.quad(identity)
    sums = block.quad(identity[:, None] + identity)
    return (sums - squares[:, None] - squares) / 2


@pytest.mark.parametrize("few", [1024, 5])
@pytest.mark.parametrize("name", NETS)
def test_weights_without_a_product_have_the_exact_blocks(name, few, monkeypatch):
    monkeypatch.setattr(GGN, "_FEW", few)
    posterior = fitted(name)
    net, x = net_of(name)
    jacobian = posterior.network.jacobian
    rows = true_rows(net, x, jacobian).flatten(0, 1) / 0.5
    place = {int(number): k for k, number in enumerate(jacobian.index)}
    exact_sites = set()
    for block in posterior.approximation.blocks:
        if block.kind == "kron":
            continue
        at = torch.tensor([place[int(number)] for number in block.index])
        exact_sites |= {s.name for s in jacobian.sites if s.start <= int(block.index[0]) < s.stop}
        expected = rows[:, at].T @ rows[:, at] + torch.eye(len(at)) / 0.5**2
        if block.kind == "diag":
            expected = expected.diagonal().diag()
        elif block.kind == "rows":
            num, size = block.prec_tril.shape[:2]
            mask = torch.block_diag(*torch.ones(num, size, size))
            expected = expected * mask
        else:
            assert block.kind == "dense" and len(at) <= few
        torch.testing.assert_close(matrix_of(block), expected, rtol=1e-9, atol=1e-9)
    owners = {site.removeprefix("net.").rpartition(".")[0] for site in exact_sites}
    assert owners - {"up", "3", "body.self_attn.out_proj"} <= NETS[name][2]
    covered = torch.cat([block.index for block in posterior.approximation.blocks])
    assert torch.equal(covered.sort()[0], jacobian.index)


@pytest.mark.parametrize("name", ["depthwise", "LSTM", "embedding", "batch norm, PReLU"])
def test_what_has_a_product_has_it_as_a_net_of_its_own(name):
    """A product depends on its own layer alone: the same with the others held."""
    whole = fitted(name)
    heads = tuple(n for n in whole.bnn.priors if n.startswith(("net.head", "net.6", "net.3")))
    alone = fitted(name, subset=heads)
    assert [block.kind for block in alone.approximation.blocks] == ["kron"]
    expected = matrix_of(alone.approximation.blocks[0])
    (block,) = (
        block
        for block in whole.approximation.blocks
        if torch.equal(block.index, alone.approximation.blocks[0].index)
    )
    torch.testing.assert_close(matrix_of(block), expected)


@pytest.mark.parametrize("kind", [1, 2])
def test_a_transposed_convolution_is_exact_for_one_datum_at_one_position(kind):
    with seeded(0):
        layer = (nn.ConvTranspose1d, nn.ConvTranspose2d)[kind - 1](2, 3, 2, stride=2)
        net = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(3 * 2**kind, 1)).double()
    x = numbers(2, *[1] * kind)(1)
    model = pb.BNN(net, normal_prior(0.5), pb.likelihoods.HomoskedasticGaussian(0.5))
    method = pb.Laplace(structure="kron", compile=False)
    posterior = method.fit(model, x, net(x).detach(), init=net, num_draws=2)
    rows = true_rows(net, x, posterior.network.jacobian)[0] / 0.5
    assert sorted(b.kind for b in posterior.approximation.blocks) == ["dense", "kron", "kron"]
    for block in posterior.approximation.blocks:
        at = block.index  # all sites vary
        expected = rows[:, at].T @ rows[:, at] + torch.eye(len(at)) / 0.5**2
        torch.testing.assert_close(matrix_of(block), expected)


@pytest.mark.parametrize("few", [5, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NETS)
def test_predictions_and_evidence_are_of_those_blocks(name, few, monkeypatch, tmp_path):
    monkeypatch.setattr(GGN, "_FEW", few)
    posterior = fitted(name, tune="marginal_likelihood" if few == 5 else None)
    net, x = net_of(name)
    jacobian = posterior.network.jacobian
    rows = true_rows(net, x[:4], jacobian)
    place = {int(number): k for k, number in enumerate(jacobian.index)}
    expected = torch.zeros(4, rows.shape[1], rows.shape[1], dtype=torch.float64)
    log_det = 0.0
    for block in posterior.approximation.blocks:
        at = torch.tensor([place[int(number)] for number in block.index])
        precision = matrix_of(block)
        log_det += float(torch.linalg.slogdet(precision)[1])
        expected += rows[:, :, at] @ torch.linalg.solve(precision, rows[:, :, at].mT)
        torch.testing.assert_close(
            float(block.log_det()), float(torch.linalg.slogdet(precision)[1])
        )
        # a draw is a linear image of the noise whose square is the covariance
        size = len(block.index)
        image = block.sample(torch.eye(size, dtype=torch.float64))
        torch.testing.assert_close(image.T @ image, torch.linalg.inv(precision))
        root = block.root(torch.eye(size, dtype=torch.float64))
        torch.testing.assert_close(root @ root.T, torch.linalg.inv(precision))
    torch.testing.assert_close(posterior.approximation.distribution.log_det().item(), log_det)
    mean, cov = posterior.network.output_moments(x[:4])
    torch.testing.assert_close(cov, expected)
    torch.testing.assert_close(mean, net(x[:4]).detach())
    # and after a save
    path = posterior.save(tmp_path / "kron.nc")
    again = pb.Posterior.load(path, posterior.model)
    if again.approximation is not None:
        torch.testing.assert_close(again.network.output_moments(x[:4])[1], cov)
    torch.testing.assert_close(again.predict(x[:4]).mean, posterior.predict(x[:4]).mean)


def test_the_form_says_which_weights_have_no_factors():
    form = fitted("LSTM").meta["curvature"]
    assert form["structure"] == "kron"
    assert {name.split(".")[1] for name in form["without_factors"]} == {"body"}
    assert "without_factors" not in fitted("U-Net").meta["curvature"]
