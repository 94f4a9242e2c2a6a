"""Any torch net: recurrent layers and attention at many points, nets that draw, decide, or look at their batch."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers import seeded
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import pyrobnn as pb
from pyrobnn.core import private_trace
from pyrobnn.inference.curvature.jacobian import jvp
from pyrobnn.model import Density
from pyrobnn.model.fused import WrittenOut

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged|not a mode|have not|left the mode|LSTM with)"
)


class Recurrent(nn.Module):
    """The last output of a recurrent layer of six units over (B, time, 2), and its last states."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(2, 6, **options)
        size = (options.get("proj_size") or 6) * (1 + options.get("bidirectional", False))
        self.head = nn.Linear(size, 1)

    def forward(self, x):
        first = self.layer.batch_first
        out, state = self.layer(x if first else x.transpose(0, 1))
        states = sum(each.sum((0, 2)) for each in (state if isinstance(state, tuple) else (state,)))
        return self.head(out[:, -1] if first else out[-1]) + 0.01 * states[:, None]


class Attention(nn.Module):
    """Causal or plain attention over (B, time, 2), by torch's module, its encoder layer, or its function."""

    def __init__(self, by):
        super().__init__()
        self.by = by
        self.embed = nn.Linear(2, 8)
        self.head = nn.Linear(8, 1)
        if by == "module":
            self.layer = nn.MultiheadAttention(8, 2, batch_first=True)
        elif by == "encoder":
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        h = self.embed(x)
        if self.by == "module":
            h = self.layer(h, h, h, need_weights=False)[0]
        elif self.by == "encoder":
            h = self.layer(h)
        else:
            h = nn.functional.scaled_dot_product_attention(h, h.tanh(), h, is_causal=True)
        return self.head(h.mean(1))


NETS = {
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "lstm-two-both-ways": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm-projected": lambda: Recurrent(nn.LSTM, proj_size=3, num_layers=2, batch_first=True),
    "gru": lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.5, batch_first=True),
    "gru-both-ways": lambda: Recurrent(nn.GRU, bidirectional=True, bias=False),
    "rnn": lambda: Recurrent(nn.RNN),
    "rnn-relu": lambda: Recurrent(nn.RNN, nonlinearity="relu", batch_first=True),
    "weight-norm": lambda: nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(12, 1))
    ),
    "weight-norm-of-all": lambda: nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(12, 1), dim=None)
    ),
    "attention": lambda: Attention("module"),
    "encoder": lambda: Attention("encoder"),
    "attention-function": lambda: Attention("function"),
}


def model_and_data(name, rows=12):
    with seeded(0):
        net = NETS[name]().eval()
        x = torch.randn(rows, 6, 2)
        y = x[..., 0].sum(1, keepdim=True) / 2 + 0.1 * torch.randn(rows, 1)
    return (
        pb.BNN(
            net, prior=pb.priors.FanInNormal(), likelihood=pb.likelihoods.HomoskedasticGaussian(0.1)
        ),
        x,
        y,
    )


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", NETS)
def test_a_written_out_layer_is_torchs_at_many_points_and_has_its_derivatives(name):
    model, x, _ = model_and_data(name)
    weights = dict(model.net.named_parameters())
    with seeded(1):
        several = {
            key: value.detach() + 0.1 * torch.randn(3, *value.shape)
            for key, value in weights.items()
        }
        step = torch.randn_like(next(iter(weights.values())))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule")
        with torch.no_grad():
            found = torch.func.vmap(lambda params: model.forward(params, x))(several)
        for index in range(3):
            net = copy.deepcopy(model.net)
            net.load_state_dict({key: value[index] for key, value in several.items()})
            torch.testing.assert_close(found[index], net(x), rtol=1e-4, atol=1e-5)

        key, value = next(iter(weights.items()))
        value = value.detach()

        def of_first(value):
            return model.forward(weights | {key: value}, x).sum()

        slope = torch.func.grad(of_first)(value)
        gradient = torch.autograd.grad(model.net(x).sum(), next(model.net.parameters()))[0]
        torch.testing.assert_close(slope, gradient, rtol=1e-4, atol=1e-5)
        second = torch.func.jacrev(torch.func.grad(of_first))
        _, along = jvp(of_first, value, step)
        torch.testing.assert_close(along, (slope * step).sum(), rtol=1e-3, atol=1e-5)
        assert torch.func.vmap(second)(torch.stack([value, value])).isfinite().all()


@pytest.mark.parametrize(
    "kind", [nn.LSTM, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (nn.GRU, nn.RNN))]
)
def test_the_graph_of_a_recurrent_net_does_not_grow_with_time(kind, monkeypatch):
    interpreted = lambda fn, *example, **_: type("Kept", (), {"unchecked": staticmethod(fn)})  # noqa: E731
    monkeypatch.setattr("pyrobnn.model.compile.scan.compiled", interpreted)
    monkeypatch.setattr("pyrobnn.model.compile.scan._TURNS", {})

    def nodes(time):
        with seeded(0):
            net = Recurrent(kind, batch_first=True)
        model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
        density = Density(model.pyro_model, (torch.ones(3, time, 2), torch.ones(3, 1)))
        slope = torch.func.vmap(torch.func.grad(density.log_joint))
        return len(private_trace.trace(slope, [torch.zeros(2, density.dim)]).graph.nodes)

    assert nodes(24) == nodes(84)  # multiples of any number of steps in one turn


def test_dropout_between_layers_of_a_recurrent_net_is_torchs():
    with seeded(0), torch.no_grad():
        net = Recurrent(nn.LSTM, num_layers=3, dropout=0.5, batch_first=True).train()
        x = torch.randn(400, 4, 2)
        with WrittenOut():
            ours = net(x)
        assert not torch.equal(ours, net.eval()(x))
        torch.testing.assert_close(ours.std(), net.train()(x).std(), rtol=0.2, atol=0.0)


def test_a_packed_sequence_is_left_to_torch():
    with seeded(0):
        layer = nn.GRU(2, 6, batch_first=True)
        x = torch.randn(3, 4, 2)
        lengths = torch.tensor([4, 2, 1])
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    with WrittenOut():
        ours = layer(packed)[0].data
    torch.testing.assert_close(ours, layer(packed)[0].data)


SEARCH = pb.MAP(num_steps=30, polish_steps=0, compile=False)
FITTED = {
    "map": pb.MAP(num_steps=30, polish_steps=10, compile=False),
    "svi": pb.SVI(num_steps=30, compile=False),
    "nuts": pb.NUTS(num_chains=2, num_warmup=10, max_tree_depth=3, compile=False),
    "laplace": pb.Laplace(map=SEARCH),
    "hessian": pb.Laplace(map=SEARCH, curvature="hessian", structure="diag", predictive="draws"),
}
#: derivatives are the same in all; those of second order are in Laplace alone
FAST = {"lstm": ("svi", "hessian"), "encoder": ("map",)}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if method in FAST[name] else [pytest.mark.slow])
        for name in FAST
        for method in FITTED
    ],
)
def test_nets_with_recurrence_and_attention_are_fitted_and_predicted(name, method):
    method = FITTED[method]
    model, x, y = model_and_data(name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        posterior = method.fit(model, x, y, num_draws=1 if method.kind == "point" else 4, seed=0)
        p = posterior.predict(x)
    assert not [each for each in told if "batching rule" in str(each.message)]
    assert p.mean.shape == (12, 1) and p.mean.isfinite().all() and (p.epistemic_var >= 0).all()


class Reversed(torch.autograd.Function):
    """tanh, with a backward pass alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h):
        return h.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, slope):
        (output,) = ctx.saved_tensors
        return slope * (1 - output * output)


class OneWay(nn.Module):
    """A net with an operation that torch cannot differentiate forwards."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(Reversed.apply(self.layer(x)))


class Deciding(nn.Module):
    """A net whose Python asks for a value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        h = self.layer(x).tanh()
        return self.head(h if self.layer.weight.sum() > 0 else -h)


class Centred(nn.Module):
    """A net that takes the mean of its batch off."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.layer((x - x.mean(0)) / x.std(0)).tanh())


def flat(net_class):
    with seeded(0):
        model = pb.BNN(
            net_class(),
            prior=pb.priors.FanInNormal(),
            likelihood=pb.likelihoods.HomoskedasticGaussian(0.1),
        )
        return model, torch.randn(12, 2), torch.randn(12, 1)


SHORT = pb.MAP(num_steps=30, polish_steps=0, compile=False)


def test_where_a_net_has_no_forward_derivative_a_linearised_prediction_takes_the_reverse_one_twice():
    model, x, y = flat(OneWay)
    posterior = pb.Laplace(map=SHORT).fit(model, x, y, seed=0)
    with torch.no_grad():
        draws = posterior.thin(3).standard_function(x)[0]
    assert draws.shape == (3, 12, 1)
    centre = {name: value[0] for name, value in posterior.stacked().items()}
    moved, far = (
        {name: v + step * (v != 0) for name, v in centre.items()} for step in (1e-3, 2e-3)
    )
    first, second, third = (posterior.network(each, x) for each in (centre, moved, far))
    torch.testing.assert_close(third - second, second - first, rtol=1e-2, atol=1e-5)  # it is linear


def test_a_net_whose_python_asks_for_values_is_fitted_point_by_point_or_refused_in_words():
    model, x, y = flat(Deciding)
    sampler = pb.NUTS(num_chains=2, num_warmup=10, max_tree_depth=3, compile=False)
    with pytest.warns(UserWarning, match="one after the other, much slower"):
        posterior = sampler.fit(model, x, y, num_draws=4, seed=0)
    assert posterior.predict(x).mean.shape == (12, 1)
    assert SHORT.fit(model, x, y, seed=0).predict(x).mean.shape == (12, 1)
    for method in (pb.SVI(num_steps=5), pb.Laplace(map=SHORT), pb.DeepEnsemble(), pb.SGLD()):
        with pytest.raises(
            pb.Refused, match=r"\(if, while, assert, float\(\) or \.item\(\) of one\)"
        ):
            method.fit(model, x, y, seed=0)


@pytest.mark.parametrize("method", [SHORT, pb.SVI(num_steps=30, compile=False)], ids=["MAP", "SVI"])
def test_a_net_whose_rows_depend_on_each_other_is_told_so(method):
    model, x, y = flat(Centred)
    with pytest.warns(UserWarning, match="depends on the other rows"):
        posterior = method.fit(model, x, y, seed=0)
    assert any("depends on the other rows" in each for each in posterior.meta["warnings"])


class Dropped(nn.Module):
    """Dropout by a function, which no layer shows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(nn.functional.dropout(self.layer(x).tanh(), 0.3, self.training))


class Noisy(Dropped):
    """Noise in every mode."""

    def forward(self, x):
        return super().forward(x) + 0.1 * torch.randn(len(x), 1)


def recurrent_with_dropout():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2)), Recurrent(nn.LSTM, num_layers=2, dropout=0.5, batch_first=True)
    )


@pytest.mark.parametrize("net", [Dropped, recurrent_with_dropout])
def test_a_net_that_draws_while_it_is_trained_is_refused_until_it_is_in_evaluation_mode(net):
    model, x, y = flat(net)
    for method in (SHORT, pb.NUTS(), pb.SVI()):
        with pytest.raises(
            pb.Refused, match="in training mode, where it draws random numbers.*call net.eval"
        ):
            method.fit(model, x, y, seed=0)
    model, x, y = flat(lambda: net().eval())
    assert SHORT.fit(model, x, y, seed=0).predict(x).mean.shape == (12, 1)


class Running(nn.Module):
    """Statistics of its own, which evaluation mode does not use."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * (x.mean() + 1)
        return self.layer(x - self.mean)


def normalised():
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)), nn.Tanh(), nn.Linear(3, 1)
    )


@pytest.mark.parametrize("net", [Running, normalised])
def test_what_is_fitted_is_the_function_that_predicts(net):
    model, x, y = flat(net)
    with pytest.raises(pb.Refused, match="another function than in evaluation mode.*call net.eval"):
        SHORT.fit(model, x, y, seed=0)
    model, x, y = flat(lambda: net().eval())
    assert SHORT.fit(model, x, y, seed=0).predict(x).mean.shape == (12, 1)


class Padded(nn.Module):
    """An encoder of words that leaves out what is padded: torch would do so by nested tensors, without gradients."""

    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(7, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, **options)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(self.words(x), src_key_padding_mask=x == 0).mean(1))


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(SHORT, marks=pytest.mark.slow),
        pb.SVI(num_steps=5, compile=False),
        pytest.param(
            pb.Laplace(subset="last_layer", map=SHORT, compile=False), marks=pytest.mark.slow
        ),
    ],
    ids=["MAP", "SVI", "Laplace"],
)
def test_an_encoder_with_a_padding_mask_is_one_function_in_both_modes(mode, method):
    with seeded():
        net = Padded()
        plain = Padded(enable_nested_tensor=False)
        x = torch.randint(1, 7, (12, 6))
    x[::2, 4:] = 0
    y = (x == 3).sum(1, keepdim=True).float()
    plain.load_state_dict(net.state_dict())
    noise = pb.likelihoods.HomoskedasticGaussian(0.3)
    means = []
    for each in (net.train(mode == "training"), plain.eval()):
        posterior = method.fit(pb.BNN(each, pb.priors.FanInNormal(), noise), x, y, seed=0)
        means.append(posterior.predict(x).mean)
    assert torch.equal(*means)
    assert net.encoder.use_nested_tensor


@pytest.mark.slow
def test_methods_that_train_with_dropout_take_a_net_that_draws():
    model, x, y = flat(Dropped)
    posterior = pb.SWA(num_steps=20, compile=False).fit(model, x, y, seed=0)
    assert torch.equal(posterior.predict(x).mean, posterior.predict(x).mean)


def test_a_net_that_draws_in_evaluation_mode_too_is_refused_by_every_method():
    for method in (SHORT, pb.NUTS(), pb.SWA()):
        model, x, y = flat(lambda: Noisy().eval())
        with pytest.raises(pb.Refused, match="in evaluation mode too"):
            method.fit(model, x, y, seed=0)


class Cut(nn.Module):
    """A net of (B, 3) that cuts its first layer off, or whose slope is too steep, or is right and has jumps."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first = nn.Linear(3, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        h = self.first(x)
        ways = {
            "detach": lambda: h.tanh().detach(),
            "steep": lambda: h.tanh() + 0.1 * (h - h.detach()),
            "jumps": lambda: h.sign() + h.round() + h.relu(),
            "float32": lambda: h.float().tanh(),
        }
        if self.way == "no_grad":
            with torch.no_grad():
                return self.last(self.first(x).tanh())
        return self.last(ways[self.way]().to(x))


@pytest.mark.parametrize("way", ["detach", "no_grad", "steep", "jumps", "float32"])
def test_a_gradient_that_is_not_the_derivative_is_found(way):
    with seeded(1):
        x = torch.randn(30, 3)
        net = Cut(way)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.5))
    with warnings.catch_warnings(record=True, action="always") as caught:
        posterior = pb.MAP(num_steps=2, polish_steps=0, compile=False).fit(model, x, x[:, :1])
    codes = [each["code"] for each in posterior.meta["findings"]]
    assert ("wrong_gradient" in codes) == (way in ("detach", "no_grad", "steep"))
    assert any("not its derivative" in str(each.message) for each in caught) == (
        "wrong_gradient" in codes
    )
