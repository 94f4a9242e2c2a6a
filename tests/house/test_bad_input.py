"""Bad input: a ValueError or TypeError before any compute, naming the argument and the remedy."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior, toy, toy_model, toy_net
from torch import nn

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
)

X, Y = toy()


def classes(out=3):
    return pb.BNN(toy_net(out=out), normal_prior(), Categorical())


@pytest.mark.parametrize(
    "model, x, y, error, message",
    [
        (toy_model(), X * math.nan, Y, ValueError, "'x' holds 40 NaN"),
        (toy_model(), X, Y / 0, ValueError, "'y' holds 40 NaN or infinite"),
        (toy_model(), X[:0], Y[:0], ValueError, "'x' is empty"),
        (toy_model(), X, Y[:7], ValueError, r"\(40, 1\) and 'y' has shape \(7, 1\)"),
        (toy_model(), X, torch.cat([Y, Y], 1), ValueError, r"\(40, 2\)\): give the net 2 outputs"),
        (toy_model(), torch.cat([X, X], 1), Y, ValueError, r"cannot take 'x' of shape \(40, 2\)"),
        (toy_model(), None, None, TypeError, "'x' and 'y' are needed"),
        (toy_model(), [["a"]] * 40, Y, TypeError, "'x' must be a tensor or a numeric array"),
        (
            toy_model(),
            np.ma.masked_array(X.numpy(), mask=X.numpy() > 1),
            Y,
            ValueError,
            "'x' is a masked array with .* masked values",
        ),
        (
            toy_model(),
            X.to(torch.float8_e4m3fn),
            Y,
            TypeError,
            r"torch.float8_e4m3fn, in which torch does not compute: pass x.float\(\)",
        ),
        (toy_model(HeteroskedasticGaussian()), X, Y, ValueError, "2 for each column of"),
        (classes(), X, torch.full((40,), 3), ValueError, "make it 4 classes"),
        (classes(), X, torch.full((40,), -1), ValueError, "labels from -1"),
        (classes(), X, torch.zeros(40, 1, dtype=torch.long), ValueError, r"use y.squeeze\(-1\)"),
        (classes(), X, torch.zeros(40), TypeError, r"use y.long\(\)"),
        (classes(1), X, torch.zeros(40, dtype=torch.long), ValueError, "for two labels, Bernoulli"),
        (toy_model(Bernoulli()), X, torch.full((40,), 2.0), ValueError, "0 and 1 only"),
        ("model", X, Y, TypeError, "'model' must be a pyrobnn.BNN"),
        (
            lambda y: None,
            X,
            None,
            TypeError,
            r"called as fn\(x, y\).*fit\(lambda x, y: program\(x\), data\)",
        ),
        (lambda x, y, z: None, X, Y, TypeError, "called as fn.*'z'.*make x a tuple"),
    ],
)
def test_bad_data(model, x, y, error, message):
    with pytest.raises(error, match=message):
        prepare(model, x, y, points="free")


@pytest.mark.parametrize(
    ("path", "model", "message"),
    [
        (None, toy_model(), "'path' must be the path of a file, or a list"),
        (3, toy_model(), "'path' must be the path of a file, or a list"),
        ("saved", toy_net(), r"bare net, Sequential: pass pb.BNN\(net, prior, likelihood\)"),
        (["saved"], toy_net(), "bare net, Sequential"),
    ],
)
def test_a_posterior_is_loaded_from_a_path_with_its_model(path, model, message, tmp_path):
    file = tmp_path / "posterior.nc"
    pb.MAP(num_steps=3, polish_steps=0, compile=False).fit(toy_model(), X, Y).save(file)
    named = {"saved": file, "['saved']": [file]}.get(str(path), path)
    with pytest.raises(TypeError, match=message):
        pb.Posterior.load(named, model)


def test_columns_of_a_table_that_have_one_name_are_named():
    table = pd.DataFrame(np.ones((6, 3)), columns=["a", "a", "b"])
    with pytest.raises(ValueError, match="X names the column 'a' more than once: rename one"):
        pb.BNNRegressor(method=pb.MAP(num_steps=3, compile=False)).fit(table, np.arange(6.0))


@pytest.mark.parametrize("name", "xy")
def test_a_cast_that_loses_the_data_is_refused(name):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(80, 1, generator=generator, dtype=torch.float64)
    data = {"x": X.double().repeat(2, 1), "y": Y.double().repeat(2, 1)}
    with pytest.raises(
        ValueError, match=f"column 0 of '{name}'.*float32 keeps 1 of 79 .*standardizer"
    ):
        prepare(toy_model(), **data | {name: 1e8 + noise}, points="free")
    # an outlier does not hide it, nor does a standardizer that it has blown up
    outlier = torch.cat([1e9 + noise[1:], torch.zeros(1, 1).double()])
    with pytest.raises(ValueError, match=f"column 0 of '{name}'.*float32 keeps"):
        prepare(toy_model(), **data | {name: outlier}, points="free")
    whole = pb.data.Dataset(**data | {name: outlier}, name="d", task="regression")
    model = pb.BNN(
        toy_net(),
        normal_prior(),
        HomoskedasticGaussian(0.1),
        standardizer=pb.data.Standardizer.fit(whole),
    )
    with pytest.raises(ValueError, match=f"column 0 of '{name}'.*float32 keeps"):
        prepare(model, whole.x, whole.y, points="free")
    harmless = (
        noise,
        noise.exp() ** 5,
        1e10 + 0 * noise,
        (noise > 2) * 0.1,
        1e3 + noise,
        torch.sin(2 * torch.pi * torch.arange(20000, 20080)[:, None] / 7.0),
        torch.rand(80, 1, generator=generator).double() / 3,
    )
    for values in harmless:
        prepare(toy_model(), **data | {name: values}, points="free")
    prepare(toy_model(), **{key: value[:1] + 1e8 for key, value in data.items()}, points="free")


def test_whole_numbers_are_cast_alike_by_fit_and_predict():
    x = torch.arange(40)[:, None]
    posterior = pb.MAP(num_steps=2, compile=False).fit(toy_model(), x, Y)
    assert torch.equal(posterior.predict(x).mean, posterior.predict(x.float()).mean)


def test_whole_targets_are_in_the_units_of_the_standardizer():
    y = (100 * Y + 300).round()
    units = pb.data.Standardizer.fit(pb.data.Dataset(X, y, "d", "regression"))
    model = pb.BNN(toy_net(), normal_prior(), HomoskedasticGaussian(0.1), standardizer=units)
    whole = prepare(model, X, y.long(), points="free").y
    torch.testing.assert_close(whole, prepare(model, X, y, points="free").y)


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match="0 CUDA devices: use device='cpu'"):
        prepare(toy_model(), X, Y, points="free", device="cuda")
    with pytest.raises(ValueError, match="must name a torch device"):
        prepare(toy_model(), X, Y, points="free", device="gpu")


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(8)])
def test_training_mode_layers_have_no_fixed_density(layer):
    with seeded(0):
        net = nn.Sequential(nn.Linear(1, 8), layer, nn.Linear(8, 1))
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.1))
    with pytest.raises(ValueError, match=r"layers 1 .* call net.eval\(\)"):
        prepare(model, X, Y, points="held")
    prepare(pb.BNN(net.eval(), normal_prior(), HomoskedasticGaussian(0.1)), X, Y, points="held")


@pytest.mark.parametrize(
    "scale, message",
    [
        (0.0, "'scale' must be > 0"),
        (-1.0, "'scale' must be > 0"),
        (torch.tensor([0.1, -0.1]), "must be positive"),
        (dist.Normal(0.0, 1.0), "positive numbers"),
        ("inferred", "'learned'"),
    ],
)
def test_bad_noise(scale, message):
    with pytest.raises(ValueError, match=message):
        HomoskedasticGaussian(scale)


def test_a_net_that_returns_a_vector():
    class Flat(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, 0]

    with seeded(0):
        model = pb.BNN(Flat(1, 1), normal_prior(), HomoskedasticGaussian(0.1))
    with pytest.raises(ValueError, match=r"returns shape \(2,\) for 2 points"):
        prepare(model, X, Y, points="free")


def test_loaders_are_checked():
    pairs = torch.utils.data.TensorDataset(X, Y)
    triples = torch.utils.data.TensorDataset(X, Y, Y)
    with pytest.raises(TypeError, match="'y' must be left out"):
        prepare(toy_model(), torch.utils.data.DataLoader(pairs), Y, points="free")
    with pytest.raises(ValueError, match=r"batches \(x, y\)"):
        prepare(toy_model(), torch.utils.data.DataLoader(triples), points="free")
    with pytest.raises(TypeError, match="pass tensors, not a DataLoader"):
        prepare(lambda x, y: None, torch.utils.data.DataLoader(pairs), points="free")
    problem = prepare(toy_model(), torch.utils.data.DataLoader(pairs, batch_size=16), points="free")
    assert problem.num_data == 40 and torch.equal(problem.x, X)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("row, stream", [(3, False), (3, True), (37, True)])
def test_what_is_not_finite_in_a_loader_is_named_by_its_row_of_the_data_set(row, stream, shuffle):
    y = Y.clone()
    y[row] = math.nan
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X, y),
        batch_size=8,
        shuffle=shuffle,
        generator=torch.Generator(),
    )
    with pytest.raises(ValueError, match=rf"'y' holds 1 NaN .*row {row}\)"):
        list(prepare(toy_model(), loader, points="free", stream=stream).one_pass())


def test_numpy_and_single_column_targets_are_taken():
    problem = prepare(toy_model(), X.double().numpy(), Y[:, 0].double().numpy(), points="free")
    assert problem.x.dtype == torch.float32 and problem.y.shape == (40, 1)


def test_a_device_without_float64_is_refused_wherever_it_comes_from():
    with pytest.raises(ValueError, match="'mps', which has no float64.*use device='cpu'"):
        prepare(toy_model(), X, Y, points="free", device="mps")
    elsewhere = X.to("meta")  # asked for by where x is
    with pytest.raises(ValueError, match="'cpu' or 'cuda', got 'meta'"):
        prepare(toy_model(), elsewhere, Y, points="free")
    with pytest.raises(ValueError, match="got 'meta'"):
        prepare(lambda x, y: None, elsewhere, Y, points="free")


def a_program(x, y):
    pyro.sample(
        "y",
        dist.Normal(pyro.sample("a", dist.Normal(0.0, 1.0)), 1.0).expand(y.shape).to_event(2),
        obs=y,
    )


def rehearsed(**wrong):
    pb.rehearse(
        **{"method": pb.MAP(), "model": toy_model(), "x": X, "y": Y, "num_worlds": 2} | wrong
    )


def trained(**wrong):
    pb.posthoc(**{"net": toy_net(), "x_or_loader": X, "y": Y} | wrong)


def sampled(**wrong):
    pb.sample(
        **{"log_density": lambda values: -values["z"].square(), "init": {"z": torch.zeros(())}}
        | wrong
    )


TAKERS = {
    "rehearse": (rehearsed, "method model worlds regions num_worlds seed x y"),
    "sample": (sampled, "method log_density init support seed"),
    "posthoc": (
        lambda **wrong: pb.posthoc(**{"net": toy_net(), "x_or_loader": X, "y": Y} | wrong),
        "net likelihood seed",
    ),
    "fit": (
        lambda **wrong: pb.NUTS().fit(toy_model(), X, Y, **wrong),
        "init device checkpoint callbacks seed",
    ),
    "BNNRegressor": (
        lambda **wrong: pb.BNNRegressor(random_state=0, **wrong).fit(X.numpy(), Y.numpy()[:, 0]),
        "method net likelihood",
    ),
    "PyroRegressor": (
        lambda **wrong: pb.PyroRegressor(**{"program": a_program, "random_state": 0} | wrong).fit(
            X.numpy(), Y.numpy()[:, 0]
        ),
        "program method",
    ),
    "Density": (
        lambda **wrong: pb.Density(**{"program": a_program, "args": (X, Y)} | wrong),
        "program args",
    ),
    "MCMC": (
        lambda **wrong: pb.mcmc.MCMC(pb.mcmc.NUTS(a_program), num_samples=2, **wrong),
        "initial_params",
    ),
    "scan": (lambda **wrong: pb.scan(**{"carry": X[0], "xs": X} | wrong), "step"),
}


@pytest.mark.parametrize(
    "value", ["no such", 3.5, [1, "a"], object()], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("taker", TAKERS)
def test_an_argument_of_the_wrong_kind_is_named_before_any_compute(taker, value, monkeypatch):
    """The law of all functions of the package: no mistake is found out by what comes of it in the depth."""
    monkeypatch.setattr(
        pb.inference.method.Method, "_fit_head", lambda *_: pytest.fail("a fit was begun")
    )
    call, names = TAKERS[taker]
    for name in names.split():
        if (name, value) == ("checkpoint", "no such"):
            continue  # a path
        with pytest.raises((ValueError, TypeError), match=f"'{name}"):
            call(**{name: value})


def test_points_that_are_not_finite_are_refused_before_the_first_fit(monkeypatch):
    monkeypatch.setattr(
        pb.inference.method.Method, "_fit_head", lambda *_: pytest.fail("a fit was begun")
    )
    with pytest.raises(ValueError, match=r"regions\['far'\].* holds 1 NaN.*row 1"):
        rehearsed(regions={"far": torch.tensor([[0.0], [math.nan]])})
