"""Responses of the command line: counts, censored times, orders."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

import pyrobnn as pb
from pyrobnn import cli, likelihoods
from pyrobnn.studies.response import RESPONSES, check_response, likelihood_of
from pyrobnn.studies.study import load_run, make_study

FAST = ["--no-compile", "--no-progress", "--hidden", "4", "--map.num_steps", "150", "--map.lr", "0.05"]
RNG = np.random.default_rng(0)
X = np.linspace(-1, 1, 80)


def fit(frame, tmp_path, *options):
    frame.to_csv(tmp_path / "table.csv", index=False)
    words = ["fit", str(tmp_path / "table.csv"), "--method", "map", "--out", str(tmp_path / "model.nc")]
    assert cli.main([*words, *options, *FAST]) == 0
    return load_run(tmp_path / "model.nc")


def predicted(tmp_path, frame):
    frame.to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "predicted.csv"
    assert (
        cli.main(["predict", str(tmp_path / "model.nc"), str(tmp_path / "new.csv"), "--out", str(out)]) == 0
    )
    return pd.read_csv(out)


def test_a_table_of_counts_with_an_exposure(tmp_path, capsys):
    years = np.exp(2 * RNG.random(80))
    table = pd.DataFrame({"age": X, "years": years, "claims": RNG.poisson(years * np.exp(1 + X))})
    options = ("--target", "claims", "--response", "poisson", "--exposure", "years")
    posterior, settings = fit(table, tmp_path, *options)
    assert settings["exposure"] == 1 and repr(posterior.bnn.likelihood) == "Poisson(exposure=1)"
    found = predicted(tmp_path, pd.DataFrame({"age": [0.5, 0.5], "years": [1.0, 4.0]}))
    np.testing.assert_allclose(found["mean"], [np.exp(1.5), 4 * np.exp(1.5)], rtol=0.15)
    assert (found["q0.975"] % 1 == 0).all()
    capsys.readouterr()


@pytest.mark.slow
def test_a_table_of_censored_times(tmp_path, capsys):
    time = np.exp(1 + X) * RNG.weibull(2.0, 80)
    table = pd.DataFrame({"dose": X, "seen": (time < 4.0).astype(int), "time": time.clip(max=4.0)})
    posterior, settings = fit(table, tmp_path, "--target", "time", "--response", "weibull", "--event", "seen")
    assert settings["features"] == ["dose"] and settings["num_outputs"] == 1
    assert isinstance(posterior.bnn.likelihood, likelihoods.Weibull)
    found = predicted(tmp_path, pd.DataFrame({"dose": [0.0, 0.8]}))  # new rows need no column of events
    np.testing.assert_allclose(found["q0.5"], np.exp([1.0, 1.8]) * np.log(2) ** 0.5, rtol=0.3)
    capsys.readouterr()


@pytest.mark.filterwarnings("ignore:left out of the fit")  # nine rows, and three steps
@pytest.mark.parametrize("response", RESPONSES)
def test_every_response_has_a_net_and_a_likelihood_that_fit_its_data(response):
    y = torch.linspace(0.1, 0.9, 12)[:, None]
    task, more = "regression", {}
    if response == "ordinal":
        task, y = "classification", torch.arange(12) % 3
    elif response in ("poisson", "negative_binomial"):
        y = (10 * y).round()
    x = torch.stack([torch.linspace(-1, 1, 12), torch.arange(12) % 2], 1)
    if response in ("censored_normal", "weibull"):
        more = {"event": "x1"}
    data = pb.data.Dataset(x, y, "toy", task, feature_names=("x0", "x1"))
    study = make_study(data, hidden=[3], response=response, test_fraction=0.25, **more)
    assert likelihood_of(json.loads(json.dumps(study.settings))).task == study.model.likelihood.task
    fitted = pb.MAP(num_steps=3, compile=False, polish_steps=0).fit(study.model, study.train.x, study.train.y)
    assert bool(torch.isfinite(fitted.predict(study.test.x).log_prob(study.test.y)).all())


@pytest.mark.parametrize(
    ("response", "task", "options", "told"),
    [
        ("poison", "regression", {}, "'response' must be"),
        ("ordinal", "regression", {}, "--task classification"),
        ("poisson", "classification", {}, "--task regression"),
        ("poisson", "regression", {"noise": "learned"}, "leave it out where 'response' is poisson"),
        ("gaussian", "regression", {"exposure": "a"}, "option of poisson, negative_binomial"),
        ("poisson", "regression", {"event": "a"}, "option of censored_normal, weibull"),
    ],
)
def test_options_that_do_not_go_together_are_refused(response, task, options, told):
    with pytest.raises(ValueError, match=told):
        check_response(response, task, options)


def test_noise_that_varies_is_gaussian_only():
    with pytest.raises(ValueError, match="where 'response' is gaussian"):
        likelihood_of({"task": "regression", "response": "student_t", "noise": "heteroskedastic"})


@pytest.mark.parametrize(
    ("response", "y", "second", "options", "told"),
    [
        ("poisson", [1.0, 2.0, -1.0], [1, 2, 3], {}, "'deaths' must hold counts 0, 1, 2, … for Poisson, got -1"),
        ("poisson", [1.0, 2.0, 2.5], [1, 2, 3], {}, "must hold counts 0, 1, 2, … for Poisson, got 2.5"),
        ("poisson", [1.0, 2.0, 3.0], [1, 0, 3], {"exposure": "b"}, r"'exposure' 'b' must be positive, got 0 \(4 of"),
        ("poisson", [1.0, 2.0, 3.0], [1, -2, 3], {"exposure": "b"}, "must be positive, got -2"),
        ("poisson", [1.0, 2.0, 3.0], ["x", "z", "x"], {"exposure": "b"}, "'b' holds words .b=x, b=z.: write numbers$"),
        ("weibull", [1.0, 0.0, 3.0], [1, 0, 1], {"event": "b"}, ".deaths. must hold times, .* got 0"),
        ("weibull", [1.0, 2.0, 3.0], [0, 0, 0], {"event": "b"}, "'event' 'b' is 0 in every row"),
        ("weibull", [1.0, 2.0, 3.0], ["x", "z", "x"], {"event": "b"}, "write numbers, 1 .observed. and 0"),
        ("ordinal", ["low", "mid", "high"], [1, 2, 3], {}, "nothing gives the order of the classes 'high', "),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.* constant")
def test_rows_that_a_response_cannot_take_are_refused_before_any_fit(response, y, second, options, told):
    frame = pd.DataFrame({"a": np.arange(12.0) ** 2, "b": 4 * second, "deaths": 4 * y})
    task = "classification" if response == "ordinal" else "regression"
    for seed in range(3):  # whichever rows are held out
        with pytest.raises(ValueError, match=told) as refusal:
            dataset = pb.data.from_frame(frame, "deaths", task=task)
            make_study(dataset, response=response, hidden=[3], seed=seed, **options)
        assert "\n" not in str(refusal.value)
