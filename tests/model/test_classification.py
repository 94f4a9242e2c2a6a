"""Digits from end to end: every method's class probabilities, their scores, and inputs of unseen classes."""

from __future__ import annotations

import functools

import pyro.distributions as dist
import pytest
import torch
from sklearn.metrics import roc_auc_score

import pyrobnn as pb
from pyrobnn.data import digits, train_test_split
from pyrobnn.data.dataset import Standardizer

METHODS = {
    "MAP": pb.MAP(num_steps=1000, batch_size=64),
    "SVI": pb.SVI(num_steps=3000, batch_size=128),
    "Laplace-last-layer": pb.Laplace(subset="last_layer"),
    "Laplace-kron": pb.Laplace(structure="kron"),
    "SWAG": pb.SWAG(num_steps=4000),
    "MCDropout": pb.MCDropout(p=0.05, num_steps=2000, batch_size=64),
    "DeepEnsemble": pb.DeepEnsemble(num_steps=1000, batch_size=64),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weights did not move"
)  # of pixels that are always dark
POST_HOC = {"Laplace-last-layer", "Laplace-kron", "SWAG"}


def classifier(kind, seed=0, classes=10):
    if kind == "mlp":
        flat = torch.nn.Flatten()
        net = torch.nn.Sequential(
            flat, pb.networks.mlp(64, (50,), classes, activation="relu", seed=seed)
        )
    else:
        net = pb.networks.small_cnn(classes, seed=seed)
    return pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.Categorical())


@functools.cache
def split(seed=0):
    return train_test_split(digits(), 0.25, seed=seed)


@functools.cache
def start(kind, seed=0):
    train, _ = split(seed)
    return METHODS["MAP"].fit(classifier(kind, seed), train.x, train.y, seed=seed)


def scores(prediction, y):
    probs = prediction.probs
    return {
        "accuracy": pb.metrics.accuracy(probs, y),
        "nll": pb.metrics.nll(probs, y),
        "ece": pb.metrics.ece(probs, y),
        "brier": pb.metrics.brier(probs, y),
    }


@pytest.mark.slow
def test_a_mode_and_swag_classify_digits():
    train, test = split()
    model = classifier("mlp")
    mode = pb.MAP(num_steps=250, batch_size=64, compile=False).fit(model, train.x, train.y)
    few = pb.SWAG(rank=5, num_steps=200, collect_every=20, lr=0.1, compile=False)
    posterior = few.fit(model, train.x, train.y, init=mode, num_draws=30)
    for fitted in (mode, posterior):
        prediction = fitted.predict(test.x)
        assert scores(prediction, test.y)["accuracy"] > 0.94
        torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(len(test.x)))
        # one softmax: the probabilities are those of the logits, averaged over the draws
        expected = prediction.f.softmax(-1).flatten(0, 1).mean(0)
        torch.testing.assert_close(prediction.probs, expected)
        torch.testing.assert_close(
            prediction.entropy,
            prediction.aleatoric_entropy + prediction.epistemic_entropy,
            atol=1e-5,
            rtol=1e-4,
        )
        assert -float(prediction.log_prob(test.y).mean()) == pytest.approx(
            scores(prediction, test.y)["nll"], rel=1e-4
        )
    assert float(mode.predict(test.x).epistemic_entropy.max()) < 1e-5


def test_training_and_test_inputs_are_treated_alike():
    train, test = split()
    units = Standardizer.fit(train)
    model = classifier("mlp")
    told = pb.BNN(model.net, model.prior, model.likelihood, standardizer=units)
    quick = pb.MAP(num_steps=100, batch_size=64, compile=False)
    by_model = quick.fit(told, train.x, train.y).predict(test.x).probs
    by_hand = (
        quick.fit(model, units.transform_x(train.x), train.y)
        .predict(units.transform_x(test.x))
        .probs
    )
    torch.testing.assert_close(by_model, by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_on_digits(kind, name):
    train, test = split()
    model = classifier(kind)
    mode = start(kind)
    options = {"init": mode} if name in POST_HOC else {}
    if name not in ("MAP", "DeepEnsemble"):
        options["num_draws"] = 100
    posterior = METHODS[name].fit(model, train.x, train.y, **options)
    reached = scores(posterior.predict(test.x), test.y)
    at_mode = scores(mode.predict(test.x), test.y)
    assert reached["accuracy"] > (0.93 if kind == "mlp" else 0.95), reached
    if not name.startswith("Laplace"):  # which is under-confident under a prior this wide
        assert reached["nll"] < at_mode["nll"] + 0.1, (reached, at_mode)
        assert reached["ece"] < 0.1
    assert reached["brier"] < (0.2 if name.startswith("Laplace") else 0.08), reached


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SVI", "SWAG", "MCDropout", "DeepEnsemble", "Laplace-kron"])
def test_unseen_digits_raise_the_epistemic_entropy(name):
    train, test = split()
    seen = train.y < 5
    model = classifier("mlp", classes=5)
    options = {} if name == "DeepEnsemble" else {"num_draws": 100}
    posterior = METHODS[name].fit(model, train.x[seen], train.y[seen], **options)
    prediction = posterior.predict(test.x)
    auroc = roc_auc_score(test.y >= 5, prediction.epistemic_entropy)
    assert auroc > 0.85, auroc


@pytest.mark.slow
def test_swag_improves_on_its_start_over_five_seeds():
    rows = []
    for seed in range(5):
        train, test = split(seed)
        mode = start("mlp", seed)
        posterior = pb.SWAG(lr=0.15, num_steps=4000).fit(
            classifier("mlp", seed), train.x, train.y, init=mode, num_draws=100, seed=seed
        )
        before, after = (scores(fit.predict(test.x), test.y) for fit in (mode, posterior))
        rows.append([after["nll"] - before["nll"], after["accuracy"] - before["accuracy"]])
    nll, accuracy = torch.tensor(rows).T
    assert bool((nll < 0).all()), nll
    assert float(accuracy.mean()) > -0.003, accuracy
