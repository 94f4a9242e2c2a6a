"""The law of unusual nets: under every method one is fitted and predicts as torch runs it, or is refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pyro.distributions as dist
import pytest
import torch
from global_state import GlobalState
from helpers import covering, seeded
from models import normal_prior
from test_law_dense import METHODS
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.model import Density
from pyrobnn.model.fused import WrittenOut
from pyrobnn.posterior.short_chains import seconds_per_leapfrog

# runs this short are told to be too short
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ROWS = 10
NOISE = 0.5


class OneNumber(nn.Module):
    """A line through the origin: its parameter has no dimension."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.slope * x.sum(1, keepdim=True)


class Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.vectors = nn.EmbeddingBag(7, 3, **options)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.vectors(x))


class OffsetBags(Bags):
    def forward(self, x):
        return self.head(self.vectors(x.reshape(-1), torch.arange(x.shape[0]) * x.shape[1]))


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Bilinear(2, 1, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.product(x[:, :2], x[:, 2:]).tanh())


class Remembers(nn.Module):
    """Keeps what it computed last, as hooks and debuggers do."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)
        self.last = None

    def forward(self, x):
        self.last = self.trunk(x).tanh()
        return self.head(self.last)


class Shared(nn.Module):
    """Two layers in the middle have one weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(*sizes) for sizes in ((3, 4), (4, 4), (4, 4))))
        self.layers[2].weight = self.layers[1].weight
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class HyperNetwork(nn.Module):
    """Its weights are the outputs of another net, which has a code as its input."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randn(2))
        self.weights = nn.Linear(2, 4)

    def forward(self, x):
        weights = self.weights(self.code)
        return functional.linear(x, weights[:3].reshape(1, 3), weights[3:])


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.ParameterList([torch.randn(3, 3) / 2 for _ in range(2)])
        self.last = nn.ParameterDict({"weight": torch.randn(3, 1), "bias": torch.zeros(1)})

    def forward(self, x):
        for weight in self.hidden:
            x = (x @ weight).tanh()
        return x @ self.last["weight"] + self.last["bias"]


def run_once(net: nn.Module) -> nn.Module:
    """A net that the user has called: what it keeps of that has a gradient."""
    net(torch.ones(2, 3))
    return net


def with_layer(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)).eval()


def words() -> torch.Tensor:
    return torch.arange(4 * ROWS).reshape(ROWS, 4) % 7


def numbers() -> torch.Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "one number": (OneNumber, numbers),
    "mean of a bag": (Bags, words),
    "largest of a bag": (lambda: Bags(mode="max"), words),
    "bags by offsets": (lambda: OffsetBags(mode="sum"), words),
    "bilinear": (Bilinear, numbers),
    "remembers": (lambda: run_once(Remembers()), numbers),
    "shared": (Shared, numbers),
    "hypernetwork": (HyperNetwork, numbers),
    "lists": (Lists, numbers),
    "weight norm by hooks": (lambda: with_layer(nn.utils.weight_norm), numbers),
    "spectral norm by hooks": (lambda: with_layer(nn.utils.spectral_norm), numbers),
    "spectral norm": (lambda: with_layer(parametrizations.spectral_norm), numbers),
}


def model_and_data(name: str) -> tuple[pb.BNN, torch.Tensor, torch.Tensor]:
    make, inputs = NETS[name]
    with seeded(0):
        net = make()
        y = torch.randn(ROWS, 1)
    return pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(NOISE)), inputs(), y


def by_torch(name: str, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What a net made anew returns with these parameters."""
    with seeded(0):
        net = NETS[name][0]().eval()
    with torch.no_grad():
        return torch.func.functional_call(net, params, (x,))


@pytest.mark.parametrize("name", NETS)
def test_the_density_is_what_torch_says(name):
    model, x, y = model_and_data(name)
    density = Density(model.pyro_model, (x, y))
    for z in density.sample_prior(3, seed=1):
        params = {site.removeprefix("net."): v for site, v in density.constrain(z).items()}
        log_prior = sum(dist.Normal(0.0, 1.0).log_prob(value).sum() for value in params.values())
        log_likelihood = dist.Normal(by_torch(name, params, x), NOISE).log_prob(y).sum()
        torch.testing.assert_close(
            density.log_joint(z).float(), log_prior + log_likelihood, rtol=1e-4, atol=1e-3
        )


def fitted(method: str, model: pb.BNN, x: torch.Tensor, y: torch.Tensor) -> pb.Posterior:
    config, options = METHODS[method]
    return config.fit(model, x, y, seed=0, **options)


CASES = {f"{method}-{name}": (method, name) for method in METHODS for name in NETS}
FAST = covering(CASES, 1)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(*case, id=key, marks=[] if key in FAST else [pytest.mark.slow])
        for key, case in CASES.items()
    ],
)
def test_predictions_are_those_of_torch_at_the_draws_and_nothing_else_changes(
    method, name, tmp_path
):
    model, x, y = model_and_data(name)
    before = copy.deepcopy({**model.net.state_dict()})
    try:
        posterior = fitted(method, model, x, y)
    except Refused as refusal:  # a method that has no use for such a net says what to do
        assert len(str(refusal)) > 40
        return
    assert all(torch.equal(value, before[key]) for key, value in model.net.state_dict().items())
    f = posterior.predict(x).standard_f
    posterior.save(tmp_path / "posterior.nc")
    loaded = pb.Posterior.load(tmp_path / "posterior.nc", model)
    torch.testing.assert_close(loaded.predict(x).standard_f, f)
    if posterior.network is not None or "dropout_p" in posterior.meta:
        return  # another function than the net at the draws
    known = by_name(model)
    for chain in range(posterior.num_chains):
        for draw in range(0, posterior.num_draws, 4):
            params = {
                site.removeprefix("net."): value[chain, draw]
                for site, value in posterior.draws.items()
                if site.removeprefix("net.") in known
            }
            torch.testing.assert_close(
                f[chain, draw], by_torch(name, params, x), rtol=1e-4, atol=1e-4
            )


def by_name(model: pb.BNN) -> set[str]:
    return {name for name, _ in model.net.named_parameters()}


def test_a_parameter_without_dimensions_is_diagnosed_and_exported(tmp_path):
    model, x, y = model_and_data("one number")
    posterior = fitted("MAP", model, x, y)
    # its verdict is in the file
    posterior.export(tmp_path / "model.pt2")
    exported = torch.export.load(str(tmp_path / "model.pt2")).module()
    torch.testing.assert_close(exported(x)["mean"], posterior.predict(x).mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0, -2])
def test_bags_written_out_are_torchs(mode, padding):
    weight = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    bags = words()
    bags[1] = 0
    bags[2] = 5
    calls = [(bags, None, None)]
    calls.append((bags.reshape(-1), torch.tensor([0, 2, 2, 30]), None))
    if mode == "sum":
        calls.append((bags, None, torch.linspace(0, 1, bags.numel()).reshape(bags.shape)))
    for indices, offsets, shares in calls:

        def bag(weight, indices=indices, offsets=offsets, shares=shares):
            return functional.embedding_bag(
                indices, weight, offsets, mode=mode, per_sample_weights=shares, padding_idx=padding
            )

        with WrittenOut():
            torch.testing.assert_close(bag(weight), bag(weight.clone()))
            ours = bag(weight)
        torch.testing.assert_close(ours, bag(weight))
        if offsets is None:
            with WrittenOut():
                curvature = torch.func.hessian(lambda w: bag(w).square().sum())(weight)
            assert bool(curvature.isfinite().all())


def test_a_bilinear_layer_written_out_is_torchs():
    with seeded(0):
        layer = nn.Bilinear(3, 4, 5)
        left = torch.randn(2, 6, 3)
        right = torch.randn(2, 6, 4)
    with WrittenOut():
        ours = layer(left, right)
    torch.testing.assert_close(ours, layer(left, right))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.trunk(x)
        return self.head(hidden.tanh() if hidden.mean() > 0 else hidden.relu())


def test_a_net_that_branches_is_stored_and_costs_its_diagnosis_what_runs_one_by_one_cost(tmp_path):
    with seeded(0):
        net = Branches()
        y = torch.randn(ROWS, 1)
        plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    models = [
        pb.BNN(each, normal_prior(), pb.likelihoods.HomoskedasticGaussian(NOISE))
        for each in (net, plain)
    ]
    one_by_one, together = (
        seconds_per_leapfrog(Density(model.pyro_model, (numbers(), y)), ROWS, 100)
        for model in models
    )
    assert one_by_one > 50 * together
    posterior = fitted("SWAG", models[0], numbers(), y)
    assert posterior.diagnose().status in ("pass", "warn", "fail")


class Overwrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        x[:, 0] *= 2.0
        return self.head(x)


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.head(x - self.mean)


class InitialisedByData(nn.Module):
    """Sets a parameter by the first data that it sees, as ActNorm does."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(3, 1)
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x):
        if not self.is_ready:
            self.shift.data.copy_(-x.mean(0))
            self.is_ready.fill_(True)
        return self.head(x + self.shift)


class Types(nn.Module):
    def __init__(self, **parameters):
        super().__init__()
        self.head = nn.Linear(3, 1)
        for name, tensor in parameters.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))

    def forward(self, x):
        return self.head(x)


class Graph(nn.Module):
    """A graph convolution over all rows."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.register_buffer("adjacency", torch.eye(ROWS))

    def forward(self, x):
        return self.head(self.adjacency @ x)


class OneHot(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(28, 1)

    def forward(self, x):
        return self.head(functional.one_hot(x, 7).float().flatten(1))


class Force(nn.Module):
    """Minus the gradient of an energy, by autograd."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = self.head(x).square().sum()
            return -torch.autograd.grad(energy, x, create_graph=True)[0][:, :1]


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.rows = (row for row in range(3))

    def forward(self, x):
        return self.head(x)


def bfloat16() -> torch.Tensor:
    return torch.ones(2, dtype=torch.bfloat16)


def compiled(net: nn.Module) -> nn.Module:
    state = GlobalState()
    compiled_net = torch.compile(net, backend="eager")
    state.restore()  # torch's compiler switches the validation of distributions off
    return compiled_net


UNFIT = {
    "scripted": (lambda: torch.jit.script(nn.Linear(3, 1)), numbers, "TorchScript.*nn.Module"),
    "compiled": (
        lambda: compiled(nn.Linear(3, 1)),
        numbers,
        "pass the module that was given",
    ),
    "compiled inside": (
        lambda: nn.Sequential(compiled(nn.Linear(3, 1))),
        numbers,
        "'0' of 'net' is compiled",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(1)), numbers, r"'0.weight'.*call net\(x\[:2\]\)"),
    "complex": (
        lambda: Types(phase=torch.ones(2, dtype=torch.cfloat)),
        numbers,
        "'phase' of 'net' is complex.*view_as_complex",
    ),
    "whole": (lambda: Types(steps=torch.arange(3)), numbers, "'steps' .* int64.*register_buffer"),
    "types": (lambda: Types(scale=bfloat16()), numbers, r"several types, .*net\.float\(\)"),
    "holds": (Holds, numbers, "'net' cannot be copied.*generator"),
    "overwrites": (Overwrites, numbers, "writes into its inputs.*x.clone"),
    "running mean": (
        RunningMean,
        numbers,
        "changes 'mean' in place, in evaluation mode.*self.training",
    ),
    "by data": (InitialisedByData, numbers, r"changes 'shift', 'is_ready'.*call net\(x\) before"),
    "graph": (Graph, numbers, "all 10 rows together.*Pyro program"),
    "one hot": (OneHot, words, r"whole numbers.*x = x.long\(\)"),
    "force": (Force, numbers, "gradient by autograd.*torch.func.grad"),
}


@pytest.mark.parametrize("net", UNFIT)
@pytest.mark.parametrize("method", METHODS)
def test_a_net_that_cannot_be_fitted_is_refused_with_the_remedy_and_nothing_is_changed(net, method):
    make, inputs, message = UNFIT[net]
    with seeded(0):
        unfit = make().eval()
    lazy = any(nn.parameter.is_lazy(param) for param in unfit.parameters())
    before = {} if lazy else copy.deepcopy(dict(unfit.state_dict()))
    x = inputs()
    with pytest.raises((ValueError, TypeError), match=message):
        model = pb.BNN(unfit, normal_prior(), pb.likelihoods.HomoskedasticGaussian(NOISE))
        fitted(method, model, x, torch.ones(ROWS, 1))
    assert torch.equal(x, inputs())
    for key, value in before.items():
        assert torch.equal(value, unfit.state_dict()[key])
