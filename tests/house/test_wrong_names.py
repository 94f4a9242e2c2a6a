"""Calls as a stranger writes them, in the words of other libraries: each is a sentence with the name it has here."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import toy_model, toy_net

import pyrobnn as pb
from pyrobnn.core.option_names import SYNONYMS
from pyrobnn.inference.method import METHODS

#: NumPy's, of a product with a tensor
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

with seeded(0):
    X = torch.linspace(-1.0, 1.0, 20)
    Y = 2.0 * X + 0.3 * torch.randn(20)


def line(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(slope * x, scale), obs=y)


def two_sizes(x, y):
    with pyro.plate("rows", 5):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 20):
        pyro.sample("y", dist.Normal(effect.sum() * x, 1.0), obs=y)


def one_name(x, y):
    slope = pyro.sample("a", dist.Normal(0.0, 1.0))
    shift = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(slope * x + shift, 1.0), obs=y)


def closed():
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(slope * X, 1.0).to_event(1), obs=Y)


def dict_prior(**entries):
    priors = dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), dist.Normal(0.0, 1.0))
    return pb.priors.DictPrior(priors | {name.replace("_", "."): p for name, p in entries.items()})


METHOD = pb.NUTS(num_chains=1, num_warmup=5, compile=False)
WRONG = {
    "NUTS(program)": (lambda: pb.NUTS(line), "the model goes into fit"),
    "SVI(program, guide)": (
        lambda: pb.SVI(line, line, torch.optim.Adam),
        "the model goes into fit",
    ),
    "num_samples of NUTS": (lambda: pb.NUTS(num_samples=9), "it is 'num_draws', an option of fit"),
    "num_samples of fit": (lambda: METHOD.fit(line, X, Y, num_samples=9), "it is 'num_draws'$"),
    "warmup_steps": (lambda: pb.NUTS(warmup_steps=9), "it is 'num_warmup'$"),
    "warmup_steps of fit": (
        lambda: METHOD.fit(line, X, Y, warmup_steps=9),
        r"it is 'num_warmup', an option of the method, pb.NUTS\(",
    ),
    "seed of NUTS": (lambda: pb.NUTS(seed=1), "'seed': it is one of fit"),
    "optim": (lambda: pb.SVI(optim=torch.optim.Adam), "it is 'optimizer'"),
    "a slip": (lambda: pb.NUTS(num_chain=1), "did you mean 'num_chains'"),
    "hidden_layer_sizes": (lambda: pb.BNNRegressor(hidden_layer_sizes=(3,)), "it is 'hidden'"),
    "sample": (lambda: pb.sample(line, {"z": X}, num_samples=3), "it is 'num_draws'"),
    "MCMC": (lambda: pb.mcmc.MCMC(pb.mcmc.NUTS(line), num_draws=3), "it is 'num_samples'"),
    "three data": (lambda: METHOD.fit(line, X, X, Y), "make x a tuple or a dict"),
    "no data": (lambda: METHOD.fit(line), "was run without 'x' and 'y'"),
    "no arguments": (lambda: METHOD.fit(closed), r"fit\(lambda x, y: program\(\)\)"),
    "lists": (lambda: METHOD.fit(line, X.tolist(), Y.tolist()), r"'x' holds a list .* pass torch"),
    "arrays": (lambda: METHOD.fit(line, X.numpy(), Y.numpy()), r"'x' holds a ndarray .*pass torch"),
    "a column x": (lambda: METHOD.fit(line, X[:, None], Y), r"'x' has.*pass x.squeeze\(-1\)$"),
    "a column y": (lambda: METHOD.fit(line, X, Y[:, None]), r"'y' has.*pass y.squeeze\(-1\)$"),
    "two columns": (
        lambda: METHOD.fit(line, X[:, None], Y[:, None]),
        r"pass x.squeeze\(-1\) and y.squeeze\(-1\)$",
    ),
    "few rows": (lambda: METHOD.fit(line, X[:9], Y), "'x' 9 and 'y' 20"),
    "two plates": (
        lambda: METHOD.fit(two_sizes, X, Y),
        "two plates are named 'rows', of sizes 5 and 20",
    ),
    "two sites": (lambda: METHOD.fit(one_name, X, Y), "two sites are named 'a'"),
    "kron": (lambda: pb.Laplace(structure="kron").fit(line, X, Y), "leave it out"),
    "last layer": (lambda: pb.Laplace(subset="last_layer").fit(line, X, Y), "leave it out"),
    "a prior's shape": (
        lambda: pb.BNN(
            toy_net(),
            dict_prior(**{"0_weight": dist.Normal(torch.zeros(4, 1), 1.0)}),
            pb.likelihoods.HomoskedasticGaussian(1.0),
        ),
        r"DictPrior has a Normal of shape \(4, 1\) for '0.weight', and that parameter has shape \(",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_a_sentence(name):
    call, sentence = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


def test_a_series_is_a_sentence():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(TypeError, match=r"'x' holds a Series.*x.to_numpy\(\)"):
        METHOD.fit(line, pandas.Series(X.numpy()), Y)


@pytest.mark.parametrize("verb", ["run", "get_samples"])
def test_a_verb_of_pyro_says_what_it_is_here(verb):
    with pytest.raises(AttributeError, match=r"fit\(model, x, y\)"):
        getattr(METHOD, verb)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
        METHOD.nothing  # noqa: B018


def test_a_program_that_takes_arrays_gets_them():
    def of_arrays(x, y):
        assert isinstance(x, np.ndarray)
        line(torch.as_tensor(x), torch.as_tensor(y))

    posterior = METHOD.fit(of_arrays, X.numpy(), Y.numpy(), num_draws=5)
    assert posterior.draws["slope"].shape == (1, 5)


def test_laplace_as_it_comes_fits_a_program_and_a_net():
    search = pb.MAP(num_steps=200, compile=False)
    posterior = pb.Laplace(map=search).fit(line, X, Y)
    same = pb.Laplace(map=search, curvature="hessian").fit(line, X, Y)
    assert torch.equal(posterior.draws["slope"], same.draws["slope"])
    assert posterior.meta["settings"]["curvature"] == "hessian"
    net = pb.Laplace(map=search).fit(toy_model(), X[:, None], Y[:, None])
    assert net.meta["settings"]["curvature"] == "ggn"


@pytest.mark.parametrize("name", METHODS)
def test_the_constructors_remain_what_they_are(name):
    cls = METHODS[name].cls
    method = cls()
    assert pickle.loads(pickle.dumps(method)) == method == replace(method)
    assert "args" not in inspect.signature(cls).parameters


def test_no_name_stands_for_two_things():
    names = " ".join(SYNONYMS).split()
    assert len(names) == len(set(names)) > 100
