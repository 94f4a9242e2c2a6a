"""The law of guides: replayed by Pyro, a model draws what the posterior predicts, point parameters and all."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, seeded
from models import normal_prior, toy, toy_net
from pyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal, AutoNormal
from test_contract import FEW, METHODS, MODELS, NO_POINTS, WITH_Q, num_draws, one_of_each_kind

import pyrobnn as pb
from pyrobnn.likelihoods import DATA

#: what fits this short say of themselves, as they should
POINT = "the weights use up"
SAMPLER = ".*(a sampler does not fit point parameters|of the draws|transitions diverged)"
SHORT = {
    pb.SVI: "the ELBO ends|.*(did not converge|the weights use up)",
    pb.Laplace: "the centre is not a mode|.*(did not converge|the weights use up)",
    **dict.fromkeys((pb.MLE, pb.MAP, pb.DeepEnsemble, pb.SWA, pb.MCDropout), POINT),
    **dict.fromkeys((pb.NUTS, pb.SGLD, pb.SGHMC, pb.SMC), SAMPLER),
    pb.SWAG: ".*(of the draws|the weights use up)",
}

X, Y = toy()
GUIDED = {name: METHODS[name] for name in METHODS if name in WITH_Q}
GUIDED |= {
    "Laplace-tuned": pb.Laplace(tune="per_layer", num_steps=20, compile=False),
    "SVI-full-rank": pb.SVI(guide="full_rank", num_steps=20, compile=False),
    "SVI-far": pb.SVI(
        num_steps=100, lr=0.1, compile=False
    ),  # far enough for the points to leave their start
    "SVI-flow": pb.SVI(guide="flow", num_steps=20, compile=False),
    "SVI-AutoNormal": pb.SVI(guide=AutoNormal, num_steps=20, compile=False),
    "SVI-AutoIAFNormal": pb.SVI(guide=AutoIAFNormal, num_steps=20, compile=False),
}
#: one of each way to write a guide; those of the others differ in their numbers alone, and run with the slow tests
DIFFERENT = ("Laplace", "SVI", "SVI-flow", "SWAG")


def _bnn(scale=0.2, hide: str | None = None, **options) -> pb.BNN:
    prior = normal_prior()
    if hide:
        prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, hide=[hide])
    return pb.BNN(toy_net(), prior, pb.likelihoods.HomoskedasticGaussian(scale), **options)


def _standardized() -> pb.BNN:
    return _bnn(
        "learned",
        standardizer=pb.data.Standardizer.fit(pb.data.Dataset(X, 30 + 9 * Y, "far", "regression")),
    )


LAW_MODELS = MODELS | {
    "learned": lambda: (_bnn("learned"), Y),
    "hidden": lambda: (_bnn("learned", hide="2.bias"), 5 + Y),
    "standardizer": lambda: (_standardized(), 30 + 9 * Y),
}
WITH_POINTS = ("learned", "hidden", "standardizer")


@functools.cache
def fit(name: str, kind: str, draws: int = 6) -> pb.Posterior:
    model, y = LAW_MODELS[kind]()
    return _short_fit(
        (METHODS | GUIDED)[name], model, X, y, **({"num_draws": draws} if num_draws(name) else {})
    )


def _short_fit(method, model, *data, **options) -> pb.Posterior:
    with warnings.catch_warnings():
        if said := SHORT.get(type(method)):
            warnings.filterwarnings("ignore", said)
        return method.fit(model, *data, seed=3, **options)


def _standard(model: pb.BNN) -> torch.Tensor:
    return model.standard_inputs(X)


def _expected(posterior: pb.Posterior, values) -> dist.Distribution:
    """What the data are distributed as at one set of values of every site, by the library's pure functions."""
    model = posterior.model
    return model.likelihood.distribution(model.forward(values, _standard(model)), values)


def _same_distribution(actual, expected) -> None:
    probe = expected.sample()
    torch.testing.assert_close(
        actual.log_prob(probe), expected.log_prob(probe), rtol=1e-4, atol=1e-4
    )


def _kinds(name: str) -> list[str]:
    return [kind for kind in LAW_MODELS if name not in NO_POINTS or kind not in WITH_POINTS]


def _pairs():
    """Every guide × every model; every model and every kind of guide once in the fast run."""
    for name in GUIDED:
        for kind in _kinds(name):
            marks = (
                []
                if name == "SVI" or (kind == "hidden" and name in DIFFERENT)
                else [pytest.mark.slow]
            )
            yield pytest.param(name, kind, marks=marks)


@pytest.mark.covering(3)
@pytest.mark.parametrize(("name", "kind"), list(_pairs()))
def test_a_model_replayed_against_the_guide_is_the_fitted_one(name, kind, tmp_path):
    posterior = fit(name, kind)
    model = posterior.model
    x = _standard(posterior.model)
    points = {site: posterior.draws[site][0, 0] for site in posterior.meta["point_sites"]}
    assert bool(points) == (kind in WITH_POINTS)
    posteriors = [posterior]
    if not callable(
        getattr(GUIDED[name], "guide", None)
    ):  # Pyro's own guides are code and are not saved
        posteriors.append(pb.Posterior.load(posterior.save(tmp_path / "p.nc"), model))
    before = dict(pyro.get_param_store().items())
    with seeded(1):
        for guide in (each.guide for each in posteriors):
            for args in ((), (x,), (x, model.standard_targets(LAW_MODELS[kind]()[1]))):
                trace = pyro.poutine.trace(guide).get_trace(*args)
                values = {site: trace.nodes[site]["value"] for site in posterior.draws}
                for site, value in points.items():
                    assert torch.equal(values[site], value)
                for given in (
                    pyro.poutine.condition(model, values),  # as Predictive does
                    pyro.poutine.replay(model, trace),  # as an ELBO does
                ):
                    data = pyro.poutine.trace(given).get_trace(x).nodes[DATA]
                    _same_distribution(data["fn"], _expected(posterior, values))
    assert dict(pyro.get_param_store().items()) == before == {}


@pytest.mark.parametrize(
    "name",
    [name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.slow) for name in GUIDED],
)
def test_the_density_of_a_guide_is_that_of_its_trace(name):
    posterior = fit(name, "inferred")
    with seeded(2):
        trace = pyro.poutine.trace(posterior.guide).get_trace(X)
    values = {site: trace.nodes[site]["value"][None, None] for site in posterior.draws}
    total = float(trace.log_prob_sum())
    assert float(posterior.log_q(values)) == pytest.approx(total, rel=1e-4, abs=5e-3)


@pytest.mark.parametrize("name", one_of_each_kind())
def test_a_model_given_stacked_draws_is_the_fitted_one(name):
    posterior = fit(name, "inferred" if name in NO_POINTS else "hidden")
    if name == "MCDropout":
        pytest.skip(
            "its draws are the trained weights; the masks are the network's, not sites of the program"
        )
    model = posterior.model
    stacked = posterior.stacked()
    for i in (0, -1):
        values = {site: value[i] for site, value in stacked.items()}
        with seeded(0):
            trace = pyro.poutine.trace(pyro.poutine.condition(model, values)).get_trace(
                _standard(model)
            )
            _same_distribution(trace.nodes[DATA]["fn"], _expected(posterior, values))


def _predictive(posterior: pb.Posterior, num_samples: int, **draws) -> torch.Tensor:
    """Data drawn by Pyro, in the units of the data, (sample, point, output); classes as indicators."""
    model = posterior.model
    draws = draws or {"guide": posterior.guide, "num_samples": num_samples}
    with seeded(5), pyro.get_param_store().scope():
        y = pyro.infer.Predictive(model, **draws)(_standard(model))[DATA]
    if y.dtype == torch.long:
        return torch.nn.functional.one_hot(y, 3).double()
    return (y if model.standardizer is None else model.standardizer.inverse_mean(y)).double()


def _drawn(posterior: pb.Posterior) -> torch.Tensor:
    y = posterior.predict(X).sample(seed=6).flatten(0, 1)
    return torch.nn.functional.one_hot(y, 3).double() if y.dtype == torch.long else y.double()


def _assert_predictives_agree(posterior: pb.Posterior) -> None:
    if posterior.network is not None and "predictive" in posterior.meta["settings"]:
        # Pyro runs the net itself at the draws; a linearised posterior predicts with the net's linear part
        posterior = dataclasses.replace(posterior, network=None, moments=None)
    ours = _drawn(posterior)[:, ::8]
    _assert_moments_agree(_predictive(posterior, len(ours))[:, ::8], ours)


def _assert_moments_agree(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    assert_mean_within((theirs - ours)[None], 0.0, name="mean")
    squares = [(y - y.mean(0)).square() for y in (theirs, ours)]
    assert_mean_within((squares[0] - squares[1])[None], 0.0, name="variance")


FAST = [
    pytest.param("SVI-far", "hidden", marks=pytest.mark.slow),
    ("SWAG", "learned"),
    ("SVI-low-rank", "classes"),
]


@pytest.mark.parametrize(("name", "kind"), FAST)
def test_predictive_and_predict_agree(name, kind):
    _assert_predictives_agree(fit(name, kind, 800))


@pytest.mark.slow
@pytest.mark.covering(3)
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in GUIDED for kind in _kinds(name)]
)
def test_predictive_and_predict_agree_everywhere(name, kind):
    _assert_predictives_agree(fit(name, kind, 1000))


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["mean_field", AutoMultivariateNormal])
def test_a_plain_program_reads_its_point_parameters_from_the_store(guide):
    x = X[:, 0]
    y = 3 * X[:, 0] + 5 + 0.3 * (Y[:, 0] - torch.sin(X[:, 0]))

    def program(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
        shift = pyro.param("shift", torch.tensor(0.0))
        noise = pyro.param("noise", lambda: torch.tensor(1.0), constraint=dist.constraints.positive)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(slope * x + shift, noise), obs=y)

    method = pb.SVI(guide=guide, num_steps=300, lr=0.05, compile=False)
    posterior = _short_fit(method, program, x, y, num_draws=800)
    assert not list(pyro.get_param_store())
    points = {name: posterior.draws[name][0, 0] for name in ("shift", "noise")}
    with seeded(0), pyro.get_param_store().scope():
        drawn = pyro.infer.Predictive(program, guide=posterior.guide, num_samples=800)(x)["y"]
        stored = {name: value.detach() for name, value in pyro.get_param_store().items()}
    torch.testing.assert_close(stored, points)
    mean = posterior.draws["slope"][0, :, None] * x + points["shift"]
    with seeded(1):
        ours = mean + points["noise"] * torch.randn(mean.shape)
    _assert_moments_agree(drawn[:, ::10], ours[:, ::10])
    with pyro.get_param_store().scope():
        pyro.param("noise", torch.tensor(3.0), constraint=dist.constraints.positive)
        with pytest.raises(ValueError, match=r"store holds 3.0 as 'noise'.*scope\(\)"):
            posterior.guide(x)


def line(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(slope * x + shift, noise), obs=y)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(pb.Laplace(num_steps=200, compile=False), marks=pytest.mark.slow),
        pytest.param(
            pb.Laplace(num_steps=200, structure="diag", compile=False), marks=pytest.mark.slow
        ),
        pb.SVI(num_steps=200, lr=0.05, compile=False),
        pytest.param(
            pb.SVI(guide="full_rank", num_steps=200, lr=0.05, compile=False),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["Laplace", "Laplace-diag", "SVI", "SVI-full-rank"],
)
def test_the_guide_of_a_program_takes_what_pyro_puts_around_it(method):
    """Plates of Pyro's vectorised handlers, and every ELBO of Pyro's: they are one number, of many draws."""
    x, y = X[:, 0], Y[:, 0]
    posterior = _short_fit(method, line, x, y, num_draws=600)
    with seeded(0):
        for parallel in (False, True):
            predictive = pyro.infer.Predictive(
                line,
                guide=posterior.guide,
                num_samples=600,
                parallel=parallel,
                return_sites=["y", "slope"],
            )
            drawn = predictive(x)
            assert drawn["y"].shape == (600, len(x))
            slope = drawn["slope"].reshape(600, 1)
            _assert_moments_agree(slope, posterior.draws["slope"].reshape(600, 1))
        elbos = [
            pyro.infer.Trace_ELBO(200),
            pyro.infer.Trace_ELBO(200, vectorize_particles=True, max_plate_nesting=1),
            pyro.infer.TraceGraph_ELBO(200),
            pyro.infer.TraceEnum_ELBO(200, max_plate_nesting=1, strict_enumeration_warning=False),
        ]
        losses = [elbo.loss(line, posterior.guide, x, y) for elbo in elbos]
        # one that needs gradients through every draw of the guide
        pyro.infer.TraceMeanField_ELBO().differentiable_loss(line, posterior.guide, x, y)
    assert losses == pytest.approx([losses[0]] * len(losses), abs=0.5)


@pytest.mark.parametrize("name", one_of_each_kind())
def test_weights_in_a_batch_are_refused_by_name(name):
    """Layers of torch take one set of weights; Pyro's parallel prediction would hand them many."""
    posterior = fit(name, "inferred")
    predictive = pyro.infer.Predictive(
        posterior.model, posterior_samples=posterior.stacked(), parallel=True
    )
    expected = pytest.raises(ValueError, match=r"net\.\S+ has shape .* takes one set of weights")
    with seeded(0), expected:
        predictive(_standard(posterior.model))


@pytest.mark.slow
def test_batch_statistics_come_with_the_draws_and_not_with_a_guide():
    with seeded(0):
        net = torch.nn.Sequential(
            torch.nn.Linear(1, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
        )
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian("learned"))
    method = pb.SWAG(rank=3, num_steps=60, batch_size=10, compile=False)
    posterior = _short_fit(method, model, X, Y, num_draws=800)
    with pytest.raises(pb.Refused, match="training mode.*stacked"):
        posterior.guide(X)
    theirs = _predictive(posterior, 0, posterior_samples=posterior.stacked())
    assert_mean_within((theirs - _drawn(posterior))[None, :, ::8], 0.0)
    values = {site: value[7] for site, value in posterior.stacked().items()}
    with seeded(0):
        f = pyro.poutine.condition(model, values)(X[:3])
    torch.testing.assert_close(f, posterior.function(X[:3])[0, 7])


@pytest.mark.slow
def test_a_guide_in_eval_mode_agrees_for_batch_norm():
    with seeded(0):
        net = torch.nn.Sequential(
            torch.nn.Linear(1, 6),
            torch.nn.BatchNorm1d(6),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(6, 1),
        )
        net(X)  # statistics of the data
    model = pb.BNN(net.eval(), normal_prior(), pb.likelihoods.HomoskedasticGaussian("learned"))
    for name in ("SVI", "SWAG"):
        posterior = GUIDED[name].fit(model, X, Y, num_draws=800)
        _assert_predictives_agree(posterior)


def _foreign_store() -> None:
    """What tracing another model leaves in Pyro's store."""
    pyro.param("net.2.bias", torch.tensor([-50.0]))
    pyro.param("likelihood.scale", torch.tensor([77.0, 7.0]), constraint=dist.constraints.positive)


@pytest.mark.parametrize("name", one_of_each_kind(fast=FEW))
def test_what_another_model_left_in_the_store_is_not_this_ones(name):
    kind = "inferred" if name in NO_POINTS else "hidden"
    expected = fit(name, kind)
    model, y = LAW_MODELS[kind]()
    with pyro.get_param_store().scope():
        _foreign_store()
        draws = {"num_draws": 6} if num_draws(name) else {}
        posterior = _short_fit(METHODS[name], model, X, y, **draws)
    for site, value in expected.draws.items():
        assert torch.equal(posterior.draws[site], value), site


def test_the_guide_of_a_streamed_fit_leaves_the_store_alone():
    model, y = LAW_MODELS["hidden"]()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), 8)
    posterior = _short_fit(METHODS["SVI"], model, loader, num_draws=6)
    with seeded(1):
        trace = pyro.poutine.trace(posterior.guide).get_trace(X)
    assert torch.equal(trace.nodes["net.2.bias"]["value"], posterior.draws["net.2.bias"][0, 0])
    assert not list(pyro.get_param_store())
