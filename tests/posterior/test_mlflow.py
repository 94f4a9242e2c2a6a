"""A posterior as a model of MLflow: what is loaded again predicts as it does."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import pyrobnn as pb

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def tracking(tmp_path, monkeypatch):
    """A folder of runs of this test alone."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    state = random.getstate()  # it draws the names of runs
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    yield
    mlflow.set_tracking_uri(before)
    random.setstate(state)


def fitted(likelihood, y, width):
    net = pb.networks.mlp(2, (4,), width, seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), likelihood)
    return pb.DeepEnsemble(num_members=3, num_steps=20, compile=False).fit(model, X, y)


def test_a_logged_model_predicts_with_its_signature_and_verdict():
    from pyrobnn.mlflow import log_model

    posterior = fitted(pb.likelihoods.HomoskedasticGaussian(0.3), X, 2)
    verdict = posterior.diagnose(X, X)
    with mlflow.start_run() as run:
        info = log_model(posterior, "bnn", verdict=verdict, quantiles=(0.5,), example=X[:2])
    assert info.metadata["verdict"] == {"draws": verdict.draws, "model": verdict.model}
    assert info.metadata["pyrobnn"]["method"] == "DeepEnsemble"
    tags = mlflow.get_run(run.info.run_id).data.tags
    assert tags["pyrobnn.model"] == verdict.model
    table = mlflow.pyfunc.load_model(info.model_uri).predict(X[:5].numpy())
    assert list(table) == info.signature.outputs.input_names()
    p = posterior.predict(X[:5])
    for output in (0, 1):
        np.testing.assert_allclose(table[f"mean_{output}"], p.mean[:, output], atol=1e-5)
        np.testing.assert_allclose(table[f"q0.5_{output}"], p.quantile(0.5)[:, output], atol=1e-5)
    assert not table["outside"].any()


def test_classes_have_their_probabilities_and_an_example_of_no_row():
    from pyrobnn.mlflow import log_model

    posterior = fitted(pb.likelihoods.Categorical(), (X[:, 0] > 0).long(), 2)
    with mlflow.start_run():
        info = log_model(posterior)
    loaded = mlflow.pyfunc.load_model(info.model_uri)
    np.testing.assert_array_equal(loaded.input_example, np.zeros((1, 2)))
    table = loaded.predict(X[:5].numpy())
    probs = posterior.predict(X[:5]).probs
    np.testing.assert_allclose(table[["probs_0", "probs_1"]], probs, atol=1e-5)
