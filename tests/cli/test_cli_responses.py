"""Responses of the command line: counts, heavy tails, orders."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

import pyrobnn as pb
from pyrobnn import cli
from pyrobnn.studies.saved_runs import load_run
from pyrobnn.studies.study import RESPONSES, likelihood_of, make_study

FAST = [
    "--no-compile",
    "--no-progress",
    "--hidden",
    "4",
    "--map.num_steps",
    "150",
    "--map.lr",
    "0.05",
]
RNG = np.random.default_rng(0)
X = np.linspace(-1, 1, 80)


def fit(frame, tmp_path, *options):
    frame.to_csv(tmp_path / "table.csv", index=False)
    words = [
        "fit",
        str(tmp_path / "table.csv"),
        "--method",
        "map",
        "--out",
        str(tmp_path / "model.nc"),
    ]
    assert cli.main([*words, *options, *FAST]) == 0
    return load_run(tmp_path / "model.nc")


def predicted(tmp_path, frame):
    frame.to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "predicted.csv"
    assert (
        cli.main(
            ["predict", str(tmp_path / "model.nc"), str(tmp_path / "new.csv"), "--out", str(out)]
        )
        == 0
    )
    return pd.read_csv(out)


@pytest.mark.slow
def test_a_table_of_counts(tmp_path, capsys):
    table = pd.DataFrame({"age": X, "claims": RNG.poisson(4 * np.exp(1 + X))})
    posterior, _ = fit(table, tmp_path, "--target", "claims", "--response", "poisson")
    assert repr(posterior.bnn.likelihood) == "Poisson()"
    found = predicted(tmp_path, pd.DataFrame({"age": [0.0, 0.5]}))
    np.testing.assert_allclose(found["mean"], [4 * np.exp(1.0), 4 * np.exp(1.5)], rtol=0.15)
    assert (found["q0.975"] % 1 == 0).all()
    capsys.readouterr()


def test_studies_that_earlier_versions_saved_have_their_likelihood():
    settings = {"task": "regression", "noise": "inferred", "exposure": 1}
    for response, name in (
        ("poisson", "Poisson"),
        ("weibull", "Weibull"),
        ("censored_normal", "CensoredNormal"),
    ):
        assert type(likelihood_of(settings | {"response": response})).__name__ == name
    assert likelihood_of(settings | {"response": "poisson"}).targets.exposure == 1


@pytest.mark.filterwarnings("ignore:left out of the fit")  # nine rows, and three steps
@pytest.mark.parametrize("response", RESPONSES)
def test_every_response_has_a_net_and_a_likelihood_that_fit_its_data(response):
    y = torch.linspace(0.1, 0.9, 12)[:, None]
    task = "regression"
    if response == "ordinal":
        task = "classification"
        y = torch.arange(12) % 3
    elif response in ("poisson", "negative_binomial"):
        y = (10 * y).round()
    x = torch.stack([torch.linspace(-1, 1, 12), torch.arange(12) % 2], 1)
    data = pb.data.Dataset(x, y, "toy", task, feature_names=("x0", "x1"))
    study = make_study(data, hidden=[3], response=response, test_fraction=0.25)
    assert likelihood_of(json.loads(json.dumps(study.settings))).task == study.model.likelihood.task
    fitted = pb.MAP(num_steps=3, compile=False, polish_steps=0).fit(
        study.model, study.train.x, study.train.y
    )
    assert bool(torch.isfinite(fitted.predict(study.test.x).log_prob(study.test.y)).all())


def test_noise_that_varies_is_gaussian_only():
    with pytest.raises(ValueError, match="where 'response' is gaussian"):
        likelihood_of({"task": "regression", "response": "student_t", "noise": "heteroskedastic"})


@pytest.mark.parametrize(
    ("response", "y", "told"),
    [
        ("poisson", [1.0, 2.0, -1.0], "'deaths' must hold counts 0, 1, 2, … for Poisson, got -1"),
        ("poisson", [1.0, 2.0, 2.5], "must hold counts 0, 1, 2, … for Poisson, got 2.5"),
        ("ordinal", [1.0, 2.0, 3.5], "--task classification"),
        ("poison", [1.0, 2.0, 3.0], "'response' must be"),
    ],
)
def test_rows_that_a_response_cannot_take_are_refused_before_any_fit(response, y, told):
    frame = pd.DataFrame({"a": np.arange(12.0) ** 2, "deaths": 4 * y})
    for seed in range(3):  # whichever rows are held out
        with pytest.raises(ValueError, match=told) as refusal:
            make_study(
                pb.data.from_frame(frame, "deaths", task="regression"), response=response, seed=seed
            )
        assert "\n" not in str(refusal.value)
