"""What torch cannot do with a net is said in a sentence with the remedy, without a dump of shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import seeded
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.core.checks import Refused

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :1].sin()
METHODS = {
    "map": pb.MAP(num_steps=3, compile=False),
    "ensemble": pb.DeepEnsemble(num_members=2, num_steps=3, compile=False),
    "svi": pb.SVI(num_steps=3, compile=False),
}


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(1, 4, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        lengths = torch.full((len(x),), 6)
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True)
        return self.head(self.recurrent(packed)[1][-1])


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return self.head(checkpoint(self.trunk, x, use_reentrant=self.use_reentrant))


class MaxNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.vectors = nn.Embedding(7, 3, max_norm=1.0)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.vectors((x * 0 + 1).long()).mean(1))


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Mapped(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)
        self.change = change

    def forward(self, x):
        return self.head(self.change(self.trunk(x)))


NETS = {
    "packed": (Packed, "packs sequences .* padded tensor"),
    "checkpoint": (
        lambda: Checkpointed(False),
        "torch.utils.checkpoint.*: call the layers directly",
    ),
    "reentrant": (lambda: Checkpointed(True), "use_reentrant=True is one.*generate_vmap_rule"),
    "max_norm": (MaxNorm, "nn.Embedding with max_norm.*: leave max_norm out"),
    "function": (lambda: Mapped(Clipped.apply), "an autograd.Function .*: give it setup_context"),
    "numpy": (
        lambda: Mapped(lambda h: torch.from_numpy(np.tanh(h.detach().numpy()))),
        "leaves torch .*: compute with operations of torch",
    ),
    "raw numpy": (
        lambda: Mapped(lambda h: torch.from_numpy(np.tanh(h.numpy()))),
        "leaves torch .*: compute with operations of torch",
    ),
}


def bnn(net):
    return pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETS)
def test_what_torch_cannot_do_with_a_net_is_a_sentence(name, method):
    make, words = NETS[name]
    with seeded(0):
        model = bnn(make())
    with pytest.raises(Refused, match=words) as caught:
        METHODS[method].fit(model, X, Y)
    assert "Trace Shapes" not in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_of_the_nets_own_has_no_dump():
    class Fails(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled():
                raise RuntimeError("the net's own words")
            return super().forward(x)

    with seeded(0):
        model = bnn(Fails(6, 1))
    with pytest.raises(RuntimeError, match="the net's own words$"):
        METHODS["map"].fit(model, X, Y)


def test_wrapped_nets_and_nets_without_values_are_refused():
    with pytest.raises(
        ValueError, match="wrapped in DataParallel: pass the net inside, net.module"
    ):
        wrapped = nn.DataParallel.__new__(nn.DataParallel)  # it would ask for the devices
        nn.Module.__init__(wrapped)
        wrapped.module = pb.networks.mlp(6, (), seed=0)
        bnn(wrapped)
    with pytest.raises(ValueError, match="on the device 'meta' and have no values"):
        bnn(nn.Linear(6, 1, device="meta"))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = pb.networks.mlp(6, (8,), seed=0)

    def forward(self, x):
        return self.inner(x) if x.mean() > 0 else self.inner(-x)


def test_a_net_that_branches_on_the_mean_of_its_batch_is_noticed():
    for seed in range(5):
        x = torch.randn(60, 6, generator=torch.Generator().manual_seed(seed))
        with pytest.warns(UserWarning, match="depends on the other rows of its batch.*Standardise"):
            METHODS["map"].fit(bnn(Branch()), x, x[:, :1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", METHODS)
def test_a_batch_of_one_row_has_no_batch_statistics(name):
    with seeded(0):
        model = bnn(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    loader = DataLoader(TensorDataset(X[:9], Y[:9]), batch_size=8)
    with pytest.raises(Refused, match="a batch of one row.*drop_last=True") as caught:
        METHODS[name].fit(model, loader)
    assert "Trace Shapes" not in str(caught.value)
