"""The law of several inputs: a tuple or a dictionary is what its columns beside each other are, under every method."""

from __future__ import annotations

import functools
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior
from test_law_dense import METHODS, SHORT
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pyrobnn as pb
from pyrobnn.networks import SeveralInputs

# runs this short are told to be too short
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

POINTS = 24
NOISE = pb.likelihoods.HomoskedasticGaussian(0.5)


class Ratings(nn.Module):
    """A user's vector times what a layer makes of an item, where it is not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(6, 3)
        self.items = nn.Linear(2, 3)
        self.out = nn.Linear(3, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        assert user.dtype == torch.int64
        assert seen.dtype == torch.bool
        hidden = torch.tanh(self.users(user) * self.items(item))
        return self.out(torch.where(seen, hidden, 0.0))


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "user": torch.arange(POINTS) % 6,
        "item": torch.randn(POINTS, 2, generator=generator),
        "seen": torch.rand(POINTS, 3, generator=generator) > 0.2,
    }


def targets() -> torch.Tensor:
    return torch.randn(POINTS, 1, generator=torch.Generator().manual_seed(1))


def ratings() -> nn.Module:
    with seeded(0):
        return Ratings()


def model() -> pb.BNN:
    return pb.BNN(SeveralInputs(ratings(), inputs()), normal_prior(0.5), NOISE)


@functools.cache
def fit(method: str) -> pb.Posterior:
    config, options = METHODS[method]
    return config.fit(model(), inputs(), targets(), **options)


@pytest.mark.usefixtures("few_moves")
@pytest.mark.parametrize("method", [name for name in METHODS if name != "MC dropout"])
def test_every_method_fits_predicts_and_is_judged(method, tmp_path):
    x = inputs()
    y = targets()
    posterior = fit(method)
    prediction = posterior.predict(x)
    assert prediction.mean.shape == (POINTS, 1)
    columns = torch.cat([x["user"][:, None].float(), x["item"], x["seen"].float()], 1)
    assert torch.equal(posterior.predict(columns).f, prediction.f)
    loaded = pb.Posterior.load(posterior.save(tmp_path / "posterior.nc", rows=True), model())
    assert torch.equal(loaded.predict(x).f, prediction.f)
    tree = posterior.to_datatree(x, y, test=(x, y), num_prior_draws=5)
    assert tree["constant_data"]["x"].shape == (POINTS, 6)
    assert posterior.diagnose().model in ("pass", "warn", "fail", "not checked")
    assert pb.judge(prediction, y).model in ("pass", "warn", "fail", "not checked")


def test_inputs_of_another_width_are_answered_with_names_and_shapes():
    with pytest.raises(ValueError, match=r"\(4, 3\)") as refusal:
        fit("MAP").predict(torch.zeros(4, 3))
    assert str(refusal.value).endswith(
        "fitted to the inputs 'user' (N,), 'item' (N, 2), 'seen' (N, 3): pass them as a dictionary"
    )
    pair = torch.zeros(POINTS, 2), torch.zeros(POINTS, 3)
    with seeded(0):
        net = SeveralInputs(Apart(), pair)
    posterior = pb.MAP(polish_steps=0, **SHORT).fit(
        pb.BNN(net, normal_prior(), NOISE), pair, targets()
    )
    with pytest.raises(ValueError, match=r"inputs 0 \(N, 2\), 1 \(N, 3\): pass them as a tuple"):
        posterior.predict(torch.zeros(4, 7))


class OfOne(nn.Module):
    """A linear net of what it is given, as a tuple or a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x: Any) -> torch.Tensor:
        parts = x.values() if isinstance(x, dict) else x
        return self.linear(torch.cat([part.flatten(1) for part in parts], 1))


class Apart(OfOne):
    """The same net of two arguments."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return super().forward((a, b))


@pytest.mark.parametrize("kind", ["tuple", "dictionary", "one tuple", "one dictionary"])
def test_several_inputs_are_what_their_columns_are(kind):
    a = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(3))
    b = torch.randn(POINTS, 3, 1, generator=torch.Generator().manual_seed(4))
    x: Any = {"a": a, "b": b} if "dictionary" in kind else (a, b)
    as_one = kind.startswith("one")
    with seeded(0):
        net = OfOne() if as_one else Apart()
    several = pb.BNN(SeveralInputs(net, x, as_one=as_one), normal_prior(), NOISE)
    single = pb.BNN(net.linear, normal_prior(), NOISE)
    method = pb.MAP(polish_steps=0, **SHORT)
    of_parts = method.fit(several, x, targets())
    of_columns = method.fit(single, torch.cat([a, b[..., 0]], 1), targets())
    assert torch.equal(of_parts.draws["net.net.linear.weight"], of_columns.draws["net.weight"])
    assert torch.equal(of_parts.predict(x).f, of_columns.predict(torch.cat([a, b[..., 0]], 1)).f)


class Records(Dataset):
    """Rows as dictionaries."""

    def __len__(self) -> int:
        return POINTS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[index] for name, value in (inputs() | {"y": targets()}).items()}


class Nested(Records):
    """Rows as a dictionary of inputs and a target."""

    def __getitem__(self, index: int) -> Any:
        return {name: value[index] for name, value in inputs().items()}, targets()[index]


@pytest.mark.parametrize("dataset", [Records(), Nested()], ids=["dictionaries", "pairs"])
@pytest.mark.parametrize("method", [pb.MAP(polish_steps=0, **SHORT), pb.SVI(**SHORT)])
def test_loaders_of_dictionaries_are_streamed(dataset, method):
    loader = DataLoader(dataset, POINTS)
    tensors = TensorDataset(fit("MAP").bnn.rows(inputs()), targets())
    posterior = method.fit(model(), loader)
    assert posterior.meta["num_data"] == POINTS
    of_tensors = method.fit(model(), DataLoader(tensors, POINTS))
    assert torch.equal(posterior.predict(inputs()).f, of_tensors.predict(inputs()).f)


def test_loaders_of_several_tensors_are_gathered_and_written(tmp_path):
    pytest.importorskip("zarr")
    # in float64, as sums of rows in another order round otherwise
    x = tuple(v.double() if v.is_floating_point() else v for v in inputs().values())
    net = SeveralInputs(ratings().double(), x)
    in_order = pb.BNN(net, normal_prior(0.5), NOISE)
    method = pb.Laplace(**SHORT)
    loader = DataLoader(TensorDataset(*x, targets()), 7, shuffle=True)
    posterior = method.fit(in_order, loader, num_draws=4)
    whole = method.fit(in_order, x, targets(), num_draws=4)
    torch.testing.assert_close(posterior.predict(x).f, whole.predict(x).f)
    import zarr

    for name, source in {"rows": x, "loader": DataLoader(TensorDataset(*x), 5)}.items():
        path = posterior.predict_to(tmp_path / f"{name}.zarr", source, quantiles=())
        written = torch.from_numpy(zarr.open_group(path)["mean"][:])
        torch.testing.assert_close(written, posterior.predict(x).mean[:, 0])


def test_an_exported_file_takes_the_rows(tmp_path):
    posterior = fit("SVI")
    rows = posterior.bnn.rows(inputs())
    path = posterior.export(tmp_path / "net.pt2", quantiles=())
    outputs = torch.export.load(path).module()(rows)
    expected = posterior.predict(inputs(), num_draws=6).mean
    torch.testing.assert_close(outputs["mean"].to(expected), expected, rtol=1e-4, atol=1e-4)


def test_rows_are_added_and_removed():
    posterior = fit("Laplace")
    more = posterior.update({name: value[:3] for name, value in inputs().items()}, targets()[:3])
    assert more.meta["num_data"] == POINTS + 3
    assert posterior.remove([0]).meta["num_data"] == POINTS - 1


def test_a_trained_net_of_several_inputs_has_its_posthoc():
    x = inputs()
    posterior = pb.posthoc(SeveralInputs(ratings(), x), x, targets(), held_out=(x, targets()))
    assert posterior.predict(x).mean.shape == (POINTS, 1)


def test_functions_are_compared_where_whole_numbers_are_such():
    x = fit("SVI").bnn.rows(inputs())
    shifted = fit("SVI").bnn.comparable(1.4 * x + 0.3)
    assert torch.equal(shifted[:, 0], shifted[:, 0].round().clamp(0, 5))
    assert set(shifted[:, 3:].flatten().tolist()) <= {0.0, 1.0}
    assert torch.equal(shifted[:, 1:3], (1.4 * x + 0.3)[:, 1:3])


def changed(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return inputs() | {name: value}


@pytest.mark.parametrize(
    ("x", "error", "said"),
    [
        (
            {"user": torch.zeros(POINTS, dtype=torch.int64)},
            ValueError,
            "must have the inputs 'user'",
        ),
        (tuple(inputs().values()), ValueError, "got 3 without names"),
        (changed("item", torch.zeros(POINTS, 3)), ValueError, r"a row of it is \(2,\)"),
        (changed("item", torch.zeros(3, 2)), ValueError, "all need the same number"),
        (changed("user", torch.zeros(POINTS)), TypeError, "torch.int64 is expected"),
        (changed("user", torch.full((POINTS,), 2**24 + 1)), ValueError, "number them from 0"),
        (changed("item", torch.full((POINTS, 2), torch.nan)), ValueError, "NaN"),
    ],
)
def test_other_inputs_are_refused(x, error, said):
    with pytest.raises(error, match=said):
        pb.MAP(**SHORT).fit(model(), x, targets())


@pytest.mark.parametrize("x", [inputs(), tuple(torch.zeros(POINTS, 2) for _ in range(2))])
def test_a_net_that_is_declared_with_one_input_says_how_to_declare_several(x):
    plain = pb.BNN(ratings(), normal_prior(), NOISE)
    with pytest.raises((TypeError, ValueError), match=r"pb.networks.SeveralInputs\(net, x\)"):
        pb.MAP(**SHORT).fit(plain, x, targets())
    loader = DataLoader(Records(), 4)
    with pytest.raises(ValueError, match=r"pb.networks.SeveralInputs\(net, x\)"):
        pb.MAP(**SHORT).fit(plain, loader)


def test_units_of_inputs_are_refused_and_of_targets_taken():
    net = SeveralInputs(ratings(), inputs())
    one = torch.ones(1)
    with pytest.raises(ValueError, match="would shift whole numbers"):
        pb.BNN(net, normal_prior(), NOISE, standardizer=pb.data.Standardizer(one, one, one, one))
    units = pb.data.Standardizer(torch.zeros(1), one, 100 * one, 10 * one)
    in_units = pb.BNN(net, normal_prior(0.5), NOISE, standardizer=units)
    y = 100 + 10 * targets()
    posterior = pb.MAP(polish_steps=0, **SHORT).fit(in_units, inputs(), y)
    assert float(posterior.predict(inputs()).mean.mean()) == pytest.approx(100, abs=15)


class Heads(nn.Module):
    """A number and a label for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.number = nn.Linear(4, 1)
        self.label = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.number(hidden), self.label(hidden)


@pytest.mark.parametrize("method", ["MAP", "SVI", "NUTS"])
def test_several_tasks_are_a_program_as_the_error_says(method):
    with seeded(0):
        net = Heads()
    x = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(5))
    y = {"number": x[:, 0], "label": (x[:, 1] > 0).long()}
    config, options = METHODS[method]
    with pytest.raises(ValueError, match=r"are a Pyro program, fn\(x, y\), with a site for each"):
        config.fit(pb.BNN(net, normal_prior(), NOISE), x, x[:, :1], **options)
    weights = dict(net.named_parameters())

    def program(x: torch.Tensor, y: dict[str, torch.Tensor]) -> None:
        params = {
            name: pyro.sample(name, dist.Normal(torch.zeros_like(value), 1.0).to_event(value.dim()))
            for name, value in weights.items()
        }
        number, label = torch.func.functional_call(net, params, (x,))
        with pyro.plate("rows", len(x)):
            pyro.sample("number_y", dist.Normal(number[:, 0], 0.2), obs=y["number"])
            pyro.sample("label_y", dist.Categorical(logits=label), obs=y["label"])

    posterior = config.fit(program, x, y, **options)
    assert posterior.meta["num_data"] == POINTS
    tree = posterior.to_datatree(x, y)
    assert set(tree["log_likelihood"].data_vars) == {"number_y", "label_y"}
