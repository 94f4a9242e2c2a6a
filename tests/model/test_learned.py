"""Learned parameters of likelihoods: where they start."""

from __future__ import annotations

import pytest
import torch
from models import normal_prior, toy, toy_net

import pyrobnn as pb
from pyrobnn.likelihoods import (
    Beta,
    HomoskedasticGaussian,
    NegativeBinomial,
    Ordinal,
    StudentT,
    Weibull,
    learned,
)


def start_of(likelihood, dtype=torch.float32, y=None):
    """Where a search of no length leaves the likelihood's own parameters."""
    x, default_y = toy(dtype=dtype)
    y = default_y if y is None else y
    model = pb.BNN(toy_net().to(dtype), normal_prior(), likelihood)
    still = pb.MAP(num_steps=1, lr=1e-12, polish_steps=0, compile=False)
    return still.fit(model, x, y).draws


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_learned_noise_starts_where_it_is_told(dtype):
    scale = start_of(HomoskedasticGaussian(learned(init=0.01)), dtype)["likelihood.scale"]
    torch.testing.assert_close(scale, torch.full((1, 1), 0.01, dtype=dtype))
    for one in ("learned", learned()):
        scale = start_of(HomoskedasticGaussian(one), dtype)["likelihood.scale"]
        torch.testing.assert_close(scale, torch.ones(1, 1, dtype=dtype))


def test_its_start_is_in_the_units_of_the_program():
    x, y = toy()
    units = pb.data.Standardizer(
        x_mean=torch.zeros(1),
        x_scale=torch.ones(1),
        y_mean=torch.zeros(1),
        y_scale=torch.full((1,), 10.0),
    )
    model = pb.BNN(
        toy_net(), normal_prior(), HomoskedasticGaussian(learned(init=0.5)), standardizer=units
    )
    still = pb.MAP(num_steps=1, lr=1e-12, polish_steps=0, compile=False)
    prediction = still.fit(model, x, y).predict(x[:1])
    # as of a fixed one: 0.5 standard units are 5
    torch.testing.assert_close(prediction.aleatoric_var.sqrt(), torch.full((1, 1), 5.0))


@pytest.mark.parametrize(
    ("likelihood", "site", "y"),
    [
        (StudentT(scale=learned(init=0.3)), "scale", None),
        (StudentT(df=learned(init=7.0)), "df", None),
        (Beta(learned(init=0.3), low=-3.0, high=3.0), "precision", None),
        (NegativeBinomial(learned(init=0.3)), "concentration", torch.arange(40.0)[:, None]),
        (Weibull(learned(init=0.3)), "shape", torch.ones(40, 2)),
        (Ordinal(4, learned(init=0.3)), "gaps", torch.arange(40) % 4),
        (Ordinal(4, learned(init=torch.tensor([0.3, 0.3]))), "gaps", torch.arange(40) % 4),
    ],
)
def test_other_likelihoods_take_it_too(likelihood, site, y):
    value = start_of(likelihood, y=y)[f"likelihood.{site}"]
    expected = 7.0 if site == "df" else 0.3
    torch.testing.assert_close(value, torch.full_like(value, expected))


def test_a_start_per_output_and_the_search_that_leaves_it():
    x, y = toy(out=2)
    model = pb.BNN(
        toy_net(out=2), normal_prior(), HomoskedasticGaussian(learned(torch.tensor([0.01, 3.0])))
    )
    draws = pb.MAP(num_steps=300, polish_steps=0, compile=False).fit(model, x, y).draws
    scale = draws["likelihood.scale"][0, 0]
    assert scale.shape == (2,) and 0.05 < float(scale[0]) < 1 and 0.05 < float(scale[1]) < 1


@pytest.mark.parametrize("init", [0.0, -1.0, float("nan"), torch.ones(2, 2), "small"])
def test_a_start_that_cannot_be_is_refused(init):
    with pytest.raises((ValueError, TypeError), match="'init'"):
        learned(init=init)


def test_a_start_of_another_shape_is_refused():
    x, y = toy(out=2)
    model = pb.BNN(toy_net(out=2), normal_prior(), HomoskedasticGaussian(learned(torch.ones(3))))
    with pytest.raises(ValueError, match=r"'scale' has shape \(3,\)"):
        pb.MAP(num_steps=1, compile=False).fit(model, x, y)
    with pytest.raises(ValueError, match="cut-points"):
        Ordinal(4, learned(torch.ones(3)))
