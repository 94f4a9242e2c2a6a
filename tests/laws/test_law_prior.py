"""The law of priors: every prior × every method is fitted, or refused in the library's own words before it starts."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from models import toy, toy_net
from test_contract import METHODS, NO_POINTS, num_draws
from torch.distributions import transforms

import pyrobnn as pb

# runs this short, of so few data, are told to be; the curvature of priors that are flat at the mode is raised
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

X, Y = toy(12)
ZERO = torch.tensor(0.0)
ONE = torch.tensor(1.0)


def _mixture(name: str, module: torch.nn.Module, param: torch.Tensor) -> dist.Distribution:
    """Pyro's own mixture, whose events are vectors: the rows of a weight, or a bias."""
    width = param.shape[-1]
    return dist.MixtureOfDiagNormals(torch.zeros(2, width), torch.ones(2, width), torch.zeros(2))


def _multivariate(name: str, module: torch.nn.Module, param: torch.Tensor) -> dist.Distribution:
    width = param.shape[-1]
    return dist.MultivariateNormal(torch.zeros(width), torch.eye(width))


def _iid(distribution) -> pb.priors.IIDPrior:
    return pb.priors.IIDPrior(distribution)


#: every family of ``pb.priors``
FAMILIES = {
    "DictPrior": lambda: pb.priors.DictPrior(
        {name: dist.Normal(0.0, 1.0) for name, _ in toy_net().named_parameters()}
    ),
    "FanInNormal": pb.priors.FanInNormal,
    "IIDPrior": lambda: _iid(dist.Normal(0.0, 1.0)),
    "LambdaPrior": lambda: pb.priors.LambdaPrior(
        lambda name, module, param: dist.Laplace(0.0, 1.0)
    ),
    "LayerwiseNormalPrior": pb.priors.LayerwiseNormalPrior,
    "ScaleMixture": pb.priors.ScaleMixture,
    "SitePriors": lambda: pb.priors.SitePriors(
        pb.priors.site_priors(pb.priors.FanInNormal(), toy_net())
    ),
}
#: bare distributions of Pyro: bounded, kinked, without a variance, without a formula for one, composed, of vectors
BARE = {
    "Uniform": dist.Uniform(-3.0, 3.0),
    "Laplace": dist.Laplace(0.0, 1.0),
    "Logistic": dist.Logistic(0.0, 1.0),
    "StudentT": dist.StudentT(1.5),
    "Cauchy": dist.Cauchy(0.0, 1.0),
    "SoftLaplace": dist.SoftLaplace(0.0, 1.0),
    "LogNormal": dist.LogNormal(0.0, 1.0),
    "HalfNormal": dist.HalfNormal(1.0),
    "TransformedDistribution": dist.TransformedDistribution(
        dist.Normal(ZERO, ONE),
        [transforms.TanhTransform(), transforms.AffineTransform(ZERO, 3 * ONE)],
    ),
    "MixtureSameFamily": dist.MixtureSameFamily(
        dist.Categorical(torch.tensor([0.3, 0.7])),
        dist.Normal(torch.zeros(2), torch.tensor([1.0, 0.1])),
    ),
    "MaskedMixture": dist.MaskedMixture(
        torch.tensor(True), dist.Normal(ZERO, ONE), dist.Laplace(ZERO, ONE)
    ),
    "OfAnotherWidth": dist.MultivariateNormal(torch.zeros(1), torch.eye(1)),
    "Gumbel": dist.Gumbel(0.0, 1.0),
    "Delta": dist.Delta(torch.tensor(0.3)),
    "Poisson": dist.Poisson(1.0),
    "ImproperUniform": dist.ImproperUniform(dist.constraints.real, (), ()),
}
VECTORS = {
    "MixtureOfDiagNormals": lambda: pb.priors.LambdaPrior(_mixture),
    "MultivariateNormal": lambda: pb.priors.LambdaPrior(_multivariate),
}
PRIORS = FAMILIES | VECTORS | {name: (lambda bare=bare: _iid(bare)) for name, bare in BARE.items()}
PACKAGE = str(Path(pb.__file__).parent)


def _assert_own_words(error: pytest.ExceptionInfo) -> None:
    """Raised on purpose: by a line of this package, as the error that says what to change."""
    assert isinstance(error.value, (ValueError, FloatingPointError)), repr(error.value)
    assert str(error.traceback[-1].path).startswith(PACKAGE), error.traceback[-1]
    assert len(str(error.value)) > 40


def _check(prior: str, method: str) -> None:
    try:
        noise = dist.HalfNormal(1.0) if method in NO_POINTS else "learned"
        model = pb.BNN(toy_net(), PRIORS[prior](), pb.likelihoods.HomoskedasticGaussian(noise))
        posterior = METHODS[method].fit(model, X, Y, seed=3, **num_draws(method))
    except Exception:
        _assert_own_words(pytest.ExceptionInfo.from_current())
        return
    p = posterior.predict(X)
    for value in (p.mean, p.var, p.log_prob(Y)):
        assert bool(torch.isfinite(value).all())


#: every prior once, and every method that is not dear
CHEAP = [name for name in METHODS if not name.startswith(("Laplace", "SG"))]
FAST = [
    *zip(PRIORS, itertools.cycle(CHEAP), strict=False),
    ("Cauchy", "Laplace"),
    pytest.param("SoftLaplace", "SGLD", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("prior", "method"), FAST)
def test_a_method_takes_a_prior_or_says_why_not(prior, method):
    _check(prior, method)


@pytest.mark.slow
@pytest.mark.covering(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prior", PRIORS)
def test_every_method_takes_every_prior_or_says_why_not(prior, method):
    _check(prior, method)


@pytest.mark.parametrize("method", ["MLE", "MAP", "Laplace-draws"])
def test_the_polish_ends_inside_the_support(method):
    """L-BFGS steps across the edge of a prior whose density is infinite there."""
    _check("TransformedDistribution", method)


#: a prior of every family with a selection
SELECTIVE = {
    "DictPrior": lambda **chosen: pb.priors.DictPrior(
        {name: dist.Normal(0.0, 1.0) for name, _ in toy_net().named_parameters()}, **chosen
    ),
    "FanInNormal": pb.priors.FanInNormal,
    "IIDPrior": lambda **chosen: pb.priors.IIDPrior(dist.Normal(0.0, 1.0), **chosen),
    "LambdaPrior": lambda **chosen: pb.priors.LambdaPrior(
        lambda name, module, param: dist.Laplace(0.0, 1.0), **chosen
    ),
    "LayerwiseNormalPrior": lambda **chosen: pb.priors.LayerwiseNormalPrior("radford", **chosen),
    "ScaleMixture": pb.priors.ScaleMixture,
}


@pytest.mark.parametrize("family", SELECTIVE)
def test_hide_and_expose_take_effect_or_are_refused(family):
    """TyXe's do nothing unless ``expose_all=False`` is passed beside them."""
    names = {name for name, _ in toy_net().named_parameters()}
    chosen = {
        "hide": (["2.bias"], names - {"2.bias"}),
        "expose": (["2.weight"], {"2.weight"}),
        "hide_parameters": (["bias"], {"0.weight", "2.weight"}),
        "expose_parameters": (["weight"], {"0.weight", "2.weight"}),
        "hide_module_types": ((torch.nn.Linear,), set()),
        "expose_module_types": ((torch.nn.Linear,), names),
        "hide_fn": (lambda module, name: name == "0.bias", names - {"0.bias"}),
        "expose_fn": (lambda module, name: name == "0.weight", {"0.weight"}),
    }
    for option, (value, expected) in chosen.items():
        prior = SELECTIVE[family](**{option: value})
        exposed = {name for name in names if prior.expose_fn(toy_net()[0], name)}
        assert exposed == expected, option


#: selections of which a part changes nothing, and what the error names
IDLE = {
    "hide and expose": ({"hide": ["2.bias"], "expose": ["2.weight"]}, "'hide'.*'expose'"),
    "no such name": ({"hide": ["2.bais"]}, "'2.bais'"),
    "a module without parameters": ({"hide_modules": [torch.nn.Tanh()]}, "Tanh"),
    "a container": ({"hide_modules": [torch.nn.Sequential(torch.nn.Linear(1, 1))]}, "Sequential"),
    "everything exposed": ({"expose": ["2.weight"], "expose_all": True}, "'expose'"),
    "a function beside a name": (
        {"hide": ["2.bias"], "expose_fn": lambda module, name: True},
        "'expose_fn'",
    ),
    "a function that names nothing": ({"hide_fn": lambda module, name: False}, "'hide_fn'"),
    "everything hidden": ({"hide": ["2.bias"], "hide_all": True}, "'hide'"),
    "both all": ({"expose_all": True, "hide_all": True}, "'hide_all'"),
    "no such type": ({"hide_module_types": [torch.nn.Conv2d]}, "Conv2d"),
}


@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("family", SELECTIVE)
def test_an_argument_without_effect_is_an_error(family, idle):
    chosen, named = IDLE[idle]
    with pytest.raises(ValueError, match="has no effect") as caught:
        pb.BNN(toy_net(), SELECTIVE[family](**chosen), pb.likelihoods.HomoskedasticGaussian(0.2))
    assert re.search(named, str(caught.value)) and "\n" not in str(caught.value)


def test_one_entry_needs_no_list_and_types_may_be_one():
    model = pb.BNN(
        toy_net(),
        pb.priors.IIDPrior(dist.Normal(0.0, 1.0), hide="2.bias"),
        pb.likelihoods.HomoskedasticGaussian(0.2),
    )
    assert set(model.priors) == {"net.0.weight", "net.0.bias", "net.2.weight"}
    for types in ([torch.nn.Linear], (torch.nn.Linear,), torch.nn.Linear):
        prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_module_types=types)
        assert len(pb.priors.site_priors(prior, toy_net())) == 4


def test_vectors_of_another_width_are_refused_when_the_model_is_built():
    with pytest.raises(
        ValueError, match=r"'0.bias' is a MultivariateNormal of vectors.*LambdaPrior"
    ):
        pb.BNN(toy_net(), PRIORS["OfAnotherWidth"](), pb.likelihoods.HomoskedasticGaussian(0.2))


@pytest.mark.parametrize(
    ("prior", "tune", "why"),
    [
        ("MixtureOfDiagNormals", None, "elements depend on each other: use curvature='hessian'"),
        ("Laplace", "marginal_likelihood", "'net.0.weight' is a Laplace: leave it None"),
    ],
)
def test_a_prior_that_laplace_cannot_take_is_refused_before_the_search(
    prior, tune, why, monkeypatch
):
    monkeypatch.setattr(pb.MAP, "fit", lambda *args, **options: pytest.fail("it searches"))
    model = pb.BNN(toy_net(), PRIORS[prior](), pb.likelihoods.HomoskedasticGaussian(0.2))
    with pytest.raises(pb.Refused, match=why):
        pb.Laplace(tune=tune).fit(model, X, Y)
