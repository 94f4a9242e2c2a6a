"""The law of positions: an image or a sequence is one datum, what its flattened columns are, under every method."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers import seeded
from models import normal_prior
from torch import nn

import pyrobnn as pb
from pyrobnn import likelihoods as lk

# runs this short are told to be too short
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SHORT = {"num_steps": 15, "compile": False}
METHODS = {
    "MAP": (pb.MAP(polish_steps=0, **SHORT), {}),
    "MLE": (pb.MLE(**SHORT), {}),
    "ensemble": (pb.DeepEnsemble(num_members=2, **SHORT), {}),
    "SVI": (pb.SVI(**SHORT), {"num_draws": 6}),
    "SWAG": (pb.SWAG(**SHORT), {"num_draws": 6}),
    "Laplace": (pb.Laplace(**SHORT), {"num_draws": 6}),
    "last layer": (pb.Laplace(subset="last_layer", **SHORT), {"num_draws": 6}),
    "Kronecker": (pb.Laplace(structure="kron", **SHORT), {"num_draws": 6}),
    "diagonal": (pb.Laplace(structure="diag", **SHORT), {"num_draws": 6}),
    "MC dropout": (pb.MCDropout(p=0.2, **SHORT), {"num_draws": 6}),
    "SGHMC": (pb.SGHMC(num_chains=1, num_warmup=5, compile=False), {"num_draws": 6}),
    "NUTS": (
        pb.NUTS(num_chains=1, num_warmup=5, max_tree_depth=3, compile=False),
        {"num_draws": 6},
    ),
}
POINTS = 12


def images() -> torch.Tensor:
    return torch.randn(POINTS, 2, 3, 4, generator=torch.Generator().manual_seed(1))


def sequences() -> torch.Tensor:
    return torch.randn(POINTS, 5, 4, generator=torch.Generator().manual_seed(2))


def conv(outputs: int) -> nn.Sequential:
    with seeded(0):
        return nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(3, outputs, 1),
        )


def tagger(outputs: int) -> nn.Sequential:
    with seeded(0):
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, outputs))


def case(name: str) -> tuple[nn.Module, lk.Likelihood, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Net, likelihood, inputs, targets, and the shape of what is predicted for a row."""
    x = images()
    if name == "denoise":
        return conv(2), lk.HomoskedasticGaussian(0.5), x, x, (2, 3, 4)
    if name == "segment":
        return conv(3), lk.DenseCategorical(3), x, (x.sum(1) > 0).long() + 1, (3, 4, 3)
    if name == "mask":
        return conv(1), lk.Bernoulli(), x, (x[:, :1] > 0).float(), (1, 3, 4)
    x = sequences()
    labels = (x.sum(-1) > 0).long() + (x[..., 0] > 1).long()
    labels[:, -1] = -100
    likelihood = lk.DenseCategorical(3, class_dim=-1, ignore_index=-100)
    return tagger(3), likelihood, x, labels, (5, 3)


def model_of(name: str) -> tuple[pb.BNN, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    net, likelihood, x, y, shape = case(name)
    return pb.BNN(net, normal_prior(0.5), likelihood), x, y, shape


@functools.cache
def fit(name: str, method: str) -> pb.Posterior:
    model, x, y, _ = model_of(name)
    config, options = METHODS[method]
    return config.fit(model, x, y, **options)


PAIRS = [("segment", method) for method in METHODS]
PAIRS += [("tokens", method) for method in ("MAP", "Laplace", "last layer", "Kronecker")]
PAIRS += [("denoise", method) for method in ("SVI", "last layer", "Kronecker")]
PAIRS += [("mask", "SWAG")]


@pytest.mark.usefixtures("few_moves")
@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_every_method_fits_predicts_and_is_judged(name, method, tmp_path):
    model, x, y, shape = model_of(name)
    posterior = fit(name, method)
    prediction = posterior.predict(x)
    predicted = prediction.probs if prediction.likelihood.targets.classes else prediction.mean
    assert prediction.shaped(predicted).shape == (POINTS, *shape)
    assert prediction.log_prob(y).shape == (POINTS,)
    assert bool(prediction.log_prob(y).isfinite().all())
    loaded = pb.Posterior.load(posterior.save(tmp_path / "posterior.nc"), model)
    assert torch.equal(loaded.predict(x).f, prediction.f)
    assert loaded.predict(x).output_shape == prediction.output_shape
    tree = posterior.to_datatree(x, y, test=(x, y), num_prior_draws=5)
    per_draw = torch.from_numpy(tree["log_likelihood"]["y"].to_numpy())
    torch.testing.assert_close(per_draw, prediction.log_prob_draws(y), rtol=1e-4, atol=1e-4)
    assert pb.diagnose(tree).model in ("pass", "warn", "fail", "not checked")
    assert pb.judge(prediction, y).model in ("pass", "warn", "fail", "not checked")


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y"),
    [
        (lk.HomoskedasticGaussian("learned"), 1, lambda x: x[:, :1]),
        (lk.HeteroskedasticGaussian(), 4, lambda x: x),
        (lk.StudentT(4.0, 0.5), 2, lambda x: x),
        (lk.Bernoulli(), 2, lambda x: (x > 0).float()),
        (lk.Poisson(), 2, lambda x: x.abs().round()),
        (lk.MixtureDensity(2), 6, lambda x: x[:, 0]),
    ],
    ids=lambda value: getattr(value, "task", None),
)
def test_an_image_is_what_its_columns_are(likelihood, outputs, y):
    x = images()
    method = pb.MAP(polish_steps=0, **SHORT)
    dense = method.fit(pb.BNN(conv(outputs), normal_prior(), likelihood), x, y(x))
    flat_net = nn.Sequential(*conv(outputs), nn.Flatten())
    flat = method.fit(pb.BNN(flat_net, normal_prior(), likelihood), x, y(x).flatten(1))
    for name, value in flat.draws.items():
        assert torch.equal(dense.draws[name], value)
    assert torch.equal(dense.predict(x).log_prob(y(x)), flat.predict(x).log_prob(y(x).flatten(1)))


@pytest.mark.parametrize("class_dim", [1, -1])
def test_the_density_of_labels_is_the_sum_over_positions_that_have_one(class_dim):
    y = torch.tensor([[0, 2, -1, 1], [1, 1, 0, -1]])
    f = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    flat = (f if class_dim == 1 else f.transpose(1, 2)).flatten(1)
    likelihood = lk.DenseCategorical(3, class_dim, ignore_index=-1)
    losses = nn.functional.cross_entropy(f, y, reduction="none", ignore_index=-1)
    torch.testing.assert_close(likelihood.log_prob(flat, y, {}), -losses.sum(1))
    torch.testing.assert_close(likelihood.distribution(flat, {}).log_prob(y), -losses.sum(1))


@pytest.mark.parametrize("class_dim", [1, -1])
def test_the_information_of_labels_is_the_curvature_of_their_density(class_dim):
    likelihood = lk.DenseCategorical(3, class_dim, ignore_index=-1)
    f = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)).double()
    y = torch.tensor([[0, 2, -1, 1], [1, 1, 0, -1]])
    root = likelihood.curvature_root(f, y, {})

    def loss(row: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return -likelihood.log_prob(row[None], labels[None], {})[0]

    for row in range(2):
        curvature = torch.func.hessian(loss)(f[row], y[row])
        torch.testing.assert_close(root[row] @ root[row].T, curvature)


def test_draws_of_labels_have_their_probabilities():
    likelihood = lk.DenseCategorical(3, -1)
    f = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    with seeded(0):
        drawn = likelihood.distribution(f.expand(20_000, 6), {}).sample()
    shares = nn.functional.one_hot(drawn.long(), 3).double().mean(0)
    torch.testing.assert_close(shares, likelihood.probs(f)[0].double(), rtol=0, atol=0.02)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_the_curvature_of_a_linear_net_is_its_hessian(structure):
    """Of logits that are linear in the weights Gauss-Newton and Hessian agree; one position makes Kronecker exact."""
    x = images() if structure == "full" else images()[..., :1, :1]
    x = x[:1] if structure == "kron" else x
    with seeded(0):
        net = nn.Conv2d(2, 3, 1, bias=structure == "full")
    y = (x.sum(1) > 0).long()
    model = pb.BNN(net.double(), normal_prior(), lk.DenseCategorical(3))
    options = {"num_draws": 2, "init": net}
    gauss = pb.Laplace(structure=structure, num_steps=100, compile=False)
    newton = pb.Laplace(curvature="hessian", num_steps=100, compile=False)
    of_gauss = gauss.fit(model, x.double(), y, **options)
    of_newton = newton.fit(model, x.double(), y, **options)
    torch.testing.assert_close(
        of_gauss.log_q(of_gauss.draws), of_newton.log_q(of_gauss.draws), rtol=1e-4, atol=1e-4
    )


def test_positions_are_counted_and_one_of_each_row_is_judged():
    posterior = fit("tokens", "MAP")
    _, x, y, _ = model_of("tokens")
    prediction = posterior.predict(x)
    points, labels = prediction.by_position(y)
    assert torch.equal(labels, y[y != -100])
    assert points.probs.shape == (POINTS * 4, 3)
    total = points.log_prob(labels).reshape(POINTS, 4).sum(1)
    torch.testing.assert_close(total, prediction.log_prob(y), rtol=1e-5, atol=1e-5)
    single, chosen = prediction.one_position(y)
    assert single.probs.shape == (POINTS, 3)
    assert bool((chosen >= 0).all())


def test_images_of_another_size_are_predicted_in_their_own_shape():
    posterior = fit("denoise", "SVI")
    prediction = posterior.predict(torch.zeros(3, 2, 6, 5))
    assert prediction.shaped(prediction.mean).shape == (3, 2, 6, 5)
    assert prediction.shaped(prediction.f).shape == (1, 6, 3, 2, 6, 5)


def test_a_unit_of_image_targets_is_theirs():
    x = images()
    y = 50 + 10 * x[:, :1]
    units = torch.full((1, 1, 1), 10.0)
    model = pb.BNN(
        conv(1),
        normal_prior(),
        lk.HomoskedasticGaussian(0.5),
        standardizer=pb.data.Standardizer(torch.zeros(1), torch.ones(1), 5 * units, units),
    )
    posterior = pb.MAP(polish_steps=0, num_steps=200, compile=False).fit(model, x, y)
    prediction = posterior.predict(x)
    assert float((prediction.shaped(prediction.mean) - y).square().mean().sqrt()) < 5.0
    assert float(prediction.mean.mean()) == pytest.approx(50.0, abs=3.0)


REFUSED = [
    (
        conv(3),
        lk.Categorical(),
        (POINTS, 3, 4),
        r"take pb.likelihoods.DenseCategorical\(num_classes=3, class_dim=1\)",
    ),
    (tagger(3), lk.Categorical(), (POINTS, 5), r"DenseCategorical\(num_classes=3, class_dim=-1\)"),
    (conv(3), lk.Categorical(), (POINTS,), "pool over the positions"),
    (tagger(3), lk.DenseCategorical(3), (POINTS, 5), r"take DenseCategorical\(3, class_dim=-1\)"),
    (conv(3), lk.DenseCategorical(3), (POINTS, 4, 3), "a label for every position"),
]


@pytest.mark.parametrize(("net", "likelihood", "shape", "said"), REFUSED)
def test_labels_of_another_layout_are_refused_with_what_to_take(net, likelihood, shape, said):
    x = images() if isinstance(net[0], nn.Conv2d) else sequences()
    y = torch.arange(math.prod(shape)).reshape(shape) % 2
    with pytest.raises(ValueError, match=said):
        pb.MAP(**SHORT).fit(pb.BNN(net, normal_prior(), likelihood), x, y)


def test_numbers_of_another_layout_are_refused():
    x = images()
    model = pb.BNN(conv(2), normal_prior(), lk.HomoskedasticGaussian(0.5))
    with pytest.raises(ValueError, match="permute y, or the output"):
        pb.MAP(**SHORT).fit(model, x, x.permute(0, 2, 3, 1))
    with pytest.raises(ValueError, match="permute y, or the output"):
        fit("denoise", "MAP").predict(x).log_prob(x.permute(0, 2, 3, 1))
    two_heads = pb.BNN(tagger(2), normal_prior(), lk.HeteroskedasticGaussian())
    with pytest.raises(ValueError, match="stand in dimension 1 of the output"):
        pb.MAP(**SHORT).fit(two_heads, sequences(), sequences()[..., 0])


@pytest.mark.parametrize(
    ("y", "error", "said"),
    [
        (torch.full((POINTS, 3, 4), 3), ValueError, "labels from 3 to 3"),
        (torch.zeros(POINTS, 3, 4), TypeError, "use y.long()"),
        (torch.full((POINTS, 3, 4), 255), ValueError, "as ignore_index"),
    ],
)
def test_labels_that_are_none_are_refused(y, error, said):
    model, x, _, _ = model_of("segment")
    with pytest.raises(error, match=said):
        pb.MAP(**SHORT).fit(model, x, y)


def test_posthoc_says_what_takes_an_image():
    net, _, x, y, _ = case("segment")
    with pytest.raises(pb.Refused, match="DenseCategorical"):
        pb.posthoc(net, x, y)


@pytest.mark.parametrize("name", ["denoise", "segment"])
def test_as_many_points_as_positions_are_not_taken_for_them(name):
    net, likelihood, x, y, shape = case(name)
    posterior = pb.MAP(polish_steps=0, **SHORT).fit(pb.BNN(net, normal_prior(), likelihood), x, y)
    size = math.prod(shape[:-1] if name == "segment" else shape)
    prediction = posterior.predict(x[:1].expand(size, -1, -1, -1))
    columns = prediction.probs if name == "segment" else prediction.f
    shaped = prediction.shaped(columns)
    axis = -2 if name == "segment" else -1
    positions = shape[:-1] if name == "segment" else shape
    assert torch.equal(shaped, columns.unflatten(axis, positions))
