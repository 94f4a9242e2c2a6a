"""The law of pickling: models, methods, posteriors and predictions go through pickle, joblib and deepcopy unchanged."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import subprocess
import sys

import joblib
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import toy_net
from test_contract import METHODS, MODELS, REPRESENTATIVES, X, Y, fit, one_of_each_kind
from torch import nn

import pyrobnn as pb
from pyrobnn.model import Density

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode"
)


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


def by_joblib(value):
    file = io.BytesIO()
    joblib.dump(value, file)
    file.seek(0)
    return joblib.load(file)


COPIES = {"pickle": by_pickle, "joblib": by_joblib, "deepcopy": copy.deepcopy}
#: the methods that one process is given: one of each kind, or all
SETS_OF_METHODS = pytest.mark.parametrize(
    "names",
    [sorted(REPRESENTATIVES), pytest.param([*METHODS], marks=pytest.mark.slow)],
    ids=["one of each kind", "all"],
)
#: copies that are made from what pickle asks for
LIKE_PICKLE = ("joblib", "deepcopy")
#: other guides than the contract's: a flow, and Pyro's own
GUIDES = {
    "flow": "flow",
    "AutoNormal": pyro.infer.autoguide.AutoNormal,
    "AutoMultivariateNormal": pyro.infer.autoguide.AutoMultivariateNormal,
}
PRIORS = {
    "fan-in": pb.priors.FanInNormal(),
    "mixture": pb.priors.ScaleMixture(),
    "layerwise": pb.priors.LayerwiseNormalPrior(method="radford"),
    "lambda": pb.priors.LambdaPrior(
        lambda name, module, param: dist.Normal(0.0, 1.0 + param.dim())
    ),
    "hidden": pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, hide=["0.bias"]),
    "type": pb.priors.IIDPrior(
        dist.Normal(0.0, 1.0), expose_all=False, expose_module_types=(nn.Linear,)
    ),
}


def assert_same(again: pb.Posterior, posterior: pb.Posterior) -> None:
    """Equal to the last bit: draws, statistics, provenance, predictions, q and its guide."""
    for name in ("draws", "sample_stats", "history"):
        torch.testing.assert_close(getattr(again, name), getattr(posterior, name), rtol=0, atol=0)
    assert again.meta == posterior.meta and again.log_evidence == posterior.log_evidence
    mine = again.predict(X)
    other = posterior.predict(X)
    for name in ("f", "mean", "var", "aleatoric_var", "epistemic_var"):
        assert torch.equal(getattr(mine, name), getattr(other, name)), name
    assert (again.guide is None) == (posterior.guide is None)
    if posterior.guide is not None:
        assert torch.equal(again.log_q(), posterior.log_q())
        torch.testing.assert_close(sampled(again), sampled(posterior), rtol=0, atol=0)


def sampled(posterior: pb.Posterior) -> dict[str, torch.Tensor]:
    with seeded(0):
        return pyro.infer.Predictive(posterior.model, guide=posterior.guide, num_samples=3)(X)


@pytest.mark.parametrize(
    "way", ["pickle", *(pytest.param(way, marks=pytest.mark.slow) for way in LIKE_PICKLE)]
)
@pytest.mark.parametrize("name", one_of_each_kind())
def test_a_copy_of_a_posterior_is_the_same_in_all_but_its_model(name, way):
    posterior = fit(name, "inferred")
    again = COPIES[way](posterior)
    assert again.model is not posterior.model
    assert_same(again, posterior)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("guide", GUIDES)
def test_posteriors_of_other_guides(guide, way):
    method, posterior = guided(guide)
    assert COPIES[way](method) == method
    assert_same(COPIES[way](posterior), posterior)


@functools.cache
def guided(guide: str) -> tuple[pb.SVI, pb.Posterior]:
    method = pb.SVI(guide=GUIDES[guide], num_steps=5, compile=False)
    model, y = MODELS["inferred"]()
    return method, method.fit(model, X, y, num_draws=6)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_copy_of_a_method_is_equal(name, way):
    assert COPIES[way](METHODS[name]) == METHODS[name]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("prior", PRIORS)
def test_models_whatever_their_prior(prior, way):
    model = pb.BNN(
        toy_net(), PRIORS[prior], pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    )
    once = COPIES[way](model)
    expected = Density(model.pyro_model, (X, Y))
    z = expected.sample_prior(1, seed=0)[0]
    for again in (once, COPIES[way](once)):  # a copy can be copied
        density = Density(again.pyro_model, (X, Y))
        assert [site.name for site in density.sites] == [site.name for site in expected.sites]
        assert torch.equal(density.log_joint(z), expected.log_joint(z))
        assert torch.equal(density.sample_prior(1, seed=0)[0], z)


@pytest.mark.parametrize("kind", MODELS)
def test_models_whatever_their_likelihood(kind):
    model, y = MODELS[kind]()
    again = by_pickle(model)
    assert repr(again.likelihood) == repr(model.likelihood)
    fits = [pb.MLE(num_steps=5, compile=False).fit(one, X, y) for one in (again, model)]
    torch.testing.assert_close(fits[0].draws, fits[1].draws, rtol=0, atol=0)
    torch.testing.assert_close(
        by_pickle(fits[0].predict(X)).f, fits[1].predict(X).f, rtol=0, atol=0
    )


def test_the_prior_of_a_copy_builds_the_same_model():
    model = pb.BNN(toy_net(), PRIORS["hidden"], pb.likelihoods.HomoskedasticGaussian(0.2))
    again = pb.BNN(toy_net(), by_pickle(model).prior, pb.likelihoods.HomoskedasticGaussian(0.2))
    assert again.priors.keys() == model.priors.keys() and "net.0.bias" not in again.priors
    assert copy.copy(model).prior is model.prior


@pytest.mark.slow
def test_a_model_of_an_earlier_release_goes_through():
    model = pb.BNN(toy_net(), pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
    state = model.__getstate__()
    state["eval_net"] = state.pop("_pattern_net")  # as 0.3.0 has it
    earlier = object.__new__(pb.BNN)
    earlier.__setstate__(pickle.loads(pickle.dumps(state)))
    assert torch.equal(earlier.forward({}, X), model.forward({}, X))


@SETS_OF_METHODS
def test_another_process_predicts_the_same(names, tmp_path):
    file = tmp_path / "posteriors.pkl"
    posteriors = [fit(name, "inferred") for name in names]
    file.write_bytes(pickle.dumps((X, posteriors)))
    code = (
        "import pickle, sys, torch; from pathlib import Path; path = Path(sys.argv[1]); "
        "x, posteriors = pickle.loads(path.read_bytes()); "
        "path.write_bytes(pickle.dumps([posterior.predict(x).mean for posterior in posteriors]))"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=300)
    for name, posterior, mean in zip(
        names, posteriors, pickle.loads(file.read_bytes()), strict=True
    ):
        torch.testing.assert_close(mean, posterior.predict(X).mean, msg=name)


@SETS_OF_METHODS
def test_another_process_loads_what_was_saved(names, tmp_path):
    """With the least imported: what a method's module registers must be found."""
    models = {}
    for name in names:
        posterior = fit(name, "inferred")
        posterior.save(tmp_path / f"{name}.nc")
        models[name] = posterior.model
    file = tmp_path / "models.pkl"
    file.write_bytes(pickle.dumps((X, models)))
    code = (
        "import pickle, sys, warnings; from pathlib import Path; path = Path(sys.argv[1]); "
        "x, models = pickle.loads(path.read_bytes()); warnings.simplefilter('error', UserWarning); "
        "import pyrobnn as pb; "
        "found = {name: pb.Posterior.load(path.parent / f'{name}.nc', model) for name, model in models.items()}; "
        "told = {n: (p.predict(x), p.guide is None or p.log_q()) for n, p in found.items()}; "
        "path.write_bytes(pickle.dumps({n: (p.mean, p.var, q) for n, (p, q) in told.items()}))"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=300)
    for name, (mean, var, q) in pickle.loads(file.read_bytes()).items():
        posterior = fit(name, "inferred")
        prediction = fit(name, "inferred").predict(X)
        assert (q is True) == (posterior.guide is None), name
        # Laplace factorises its blocks again: equal to rounding
        torch.testing.assert_close(
            (mean, var), (prediction.mean, prediction.var), rtol=1e-4, atol=1e-6, msg=name
        )
        if posterior.guide is not None:
            torch.testing.assert_close(q, posterior.log_q(), rtol=1e-4, atol=1e-4, msg=name)


def program(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(slope * x[:, 0], 1.0), obs=y)


def code_without_a_name():
    """What fits of a lambda, of local functions and of a local net are made of, by kind."""

    class Local(nn.Linear):
        pass

    def local(x, y):
        return program(x, y)

    bnn = pb.BNN(
        Local(X.shape[1], 1),
        pb.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        pb.likelihoods.HomoskedasticGaussian(0.2),
    )
    kinds = {
        "lambda": lambda x, y: program(x, y),
        "local": local,
        "partial": functools.partial(local),
        "net": bnn,
    }
    return {
        kind: pb.Posterior(model, {"slope": torch.zeros(1, 3)}) for kind, model in kinds.items()
    }


@pytest.mark.parametrize("kind", ["lambda", "local", "partial", "net"])
def test_code_that_has_no_name_is_copied_and_handed_to_workers(kind):
    with seeded(0):
        posterior = code_without_a_name()[kind]
    for again in (copy.deepcopy(posterior), copy.copy(posterior), by_pickle_by_value(posterior)):
        torch.testing.assert_close(again.draws, posterior.draws, rtol=0, atol=0)


def by_pickle_by_value(value):
    """As joblib hands things to its workers."""
    return pickle.loads(pytest.importorskip("cloudpickle").dumps(value))


def test_code_that_has_a_name_or_pickles_itself_goes_through():
    draws = {"slope": torch.zeros(1, 3)}
    traced = torch.fx.symbolic_trace(toy_net())  # of a class made on the spot
    models = (
        program,
        functools.partial(program, y=Y),
        pb.BNN(traced, pb.priors.FanInNormal(), pb.likelihoods.Bernoulli()),
    )
    for model in models:
        torch.testing.assert_close(
            by_pickle(pb.Posterior(model, draws)).draws, draws, rtol=0, atol=0
        )
