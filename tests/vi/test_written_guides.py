"""Hand-written guides: fitted, drawn from and given back to Pyro; and what is no guide of the model, by name."""

from __future__ import annotations

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import diabetes_linear, diabetes_model, joined, toy, toy_model
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGaussian,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalMessenger,
    AutoStructured,
)
from pyro.nn import PyroModule, PyroParam

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.posterior.approximation import log_importance

POSITIVE = dist.constraints.positive


def program(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(slope * x, scale), obs=y)


def data(num=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, num)
    return x, 2 * x + 0.3 * torch.randn(num, generator=generator)


def written(x, y):
    loc = pyro.param("guide.loc", torch.tensor(0.0))
    width = pyro.param("guide.width", lambda: torch.tensor(0.1), constraint=POSITIVE)
    pyro.sample("slope", dist.Normal(loc, width))
    log_loc = pyro.param("log_loc", torch.tensor(-1.0))
    log_width = pyro.param("log_width", torch.tensor(0.1), constraint=POSITIVE)
    pyro.sample("scale", dist.LogNormal(log_loc, log_width))


def gamma(x, y):
    loc = pyro.param("loc", torch.tensor(0.0))
    pyro.sample("slope", dist.Normal(loc, 0.1))
    rate = pyro.param("rate", torch.tensor(4.0), constraint=POSITIVE)
    pyro.sample("scale", dist.Gamma(2.0, rate))


def with_default(x, y=None):
    return written(x, y)


class Written(PyroModule):
    def __init__(self):
        super().__init__()
        self.loc = torch.nn.Parameter(torch.tensor(0.0))
        self.width = PyroParam(torch.tensor(0.1), constraint=POSITIVE)
        self.log_loc = torch.nn.Parameter(torch.tensor(-1.0))
        self.log_width = PyroParam(torch.tensor(0.1), constraint=POSITIVE)

    def forward(self, x, y):
        pyro.sample("slope", dist.Normal(self.loc, self.width))
        pyro.sample("scale", dist.LogNormal(self.log_loc, self.log_width))


def fitted(guide, model=program, compile=False, num_steps=10, **options):
    x, y = data()
    method = pb.SVI(guide=guide, num_steps=num_steps, lr=0.05, compile=compile)
    return method.fit(model, x, y, num_draws=200, **options)


@functools.cache
def converged(name):
    return fitted(GUIDES[name], num_steps=400)


@pytest.fixture(scope="module")
def exact():
    """Mean and sd of the slope, by quadrature over both sites."""
    x, y = data()
    slope, scale = torch.meshgrid(
        torch.linspace(1.5, 2.5, 400, dtype=torch.float64),
        torch.linspace(0.15, 0.6, 400, dtype=torch.float64),
        indexing="ij",
    )
    log_p = dist.Normal(0.0, 1.0).log_prob(slope) + dist.HalfNormal(1.0).log_prob(scale)
    log_p = log_p + dist.Normal(slope[..., None] * x, scale[..., None]).log_prob(y).sum(-1)
    weights = (log_p - log_p.max()).exp()
    weights = weights / weights.sum()
    mean = (weights * slope).sum()
    return float(mean), float((weights * (slope - mean).square()).sum().sqrt())


GUIDES = {
    "function": written,
    "PyroModule": Written(),
    "AutoNormal instance": AutoNormal(program),
}


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_of_ones_own_is_fitted(name, exact):
    posterior = converged(name)
    mean, sd = exact
    slope = posterior.draws["slope"]
    assert slope.shape == (1, 200) and bool((posterior.draws["scale"] > 0).all())
    # the mean field of a nearly independent posterior; 200 draws
    assert abs(float(slope.mean()) - mean) < 5 * sd / 200**0.5 + 0.02
    assert 0.8 * sd < float(slope.std()) < 1.25 * sd
    assert posterior.log_evidence is not None and posterior.meta["elbo_error"] < 1
    # the densities are those of the draws: the mean of log p - log q is the ELBO
    stats = posterior.sample_stats
    gap = stats["log_p"] - stats["log_q"]
    error = float(gap.std()) / 200**0.5
    assert abs(float(gap.mean()) - posterior.log_evidence) < 5 * error + 0.1


@pytest.mark.parametrize("guide", [with_default, functools.partial(written), Written().forward])
def test_other_ways_to_hand_it_over(guide):
    # a bound method is a function: what it reads of its module is no parameter of the guide
    if guide is not with_default and not isinstance(guide, functools.partial):
        with pytest.raises(ValueError, match="has no parameters to fit"):
            fitted(guide)
        return
    torch.testing.assert_close(fitted(guide).draws, fitted(written).draws, rtol=0, atol=0)


def test_draws_that_are_not_normal():
    posterior = fitted(gamma)
    density = pb.Density(program, data())
    stats = log_importance(density, posterior.approximation, posterior.draws)
    torch.testing.assert_close(stats["log_q"], posterior.sample_stats["log_q"])
    assert len(posterior.draws["scale"].unique()) == 200


@pytest.mark.parametrize("name", ["function", "PyroModule"])
def test_the_fitted_guide_runs_in_pyro(name):
    x, y = data()
    posterior = converged(name)
    store = dict(pyro.get_param_store().items())
    with seeded(0):
        drawn = Predictive(program, guide=posterior.guide, num_samples=300)(x, None)
        loss = Trace_ELBO(num_particles=200, vectorize_particles=False).loss(
            program, posterior.guide, x, y
        )
    slope = posterior.draws["slope"]
    assert abs(float(drawn["slope"].mean() - slope.mean())) < 0.03
    assert drawn["y"].shape == (300, 40)
    assert -loss == pytest.approx(posterior.log_evidence, abs=0.5)
    with seeded(1):
        nodes = pyro.poutine.trace(posterior.guide).get_trace(x, y).nodes
    values = {site: nodes[site]["value"][None, None] for site in ("slope", "scale")}
    total = nodes["slope"]["fn"].log_prob(nodes["slope"]["value"])
    total = total + nodes["scale"]["fn"].log_prob(nodes["scale"]["value"])
    torch.testing.assert_close(posterior.log_q(values)[0, 0].float(), total.detach())
    assert dict(pyro.get_param_store().items()) == store


def test_what_the_user_has_stays_as_it_is_and_is_where_the_fit_begins():
    guide = Written()
    guide.loc.data.fill_(7.0)
    posterior = fitted(guide, num_steps=1)
    assert float(posterior.draws["slope"].mean()) == pytest.approx(7.0, abs=0.2)
    assert guide.loc.item() == 7.0 and guide.loc.requires_grad
    auto = AutoNormal(program)
    bound = auto.model
    x, y = data()
    with pyro.get_param_store().scope(), seeded(0):
        auto(x, y)
        before = {name: value.clone() for name, value in auto.named_parameters()}
        fitted(auto, num_steps=50)
        assert auto.model is bound
        after = dict(auto.named_parameters())
        assert all(torch.equal(before[name], after[name]) for name in before)
        auto(x, y)


@pytest.mark.slow
def test_compiled_equals_eager():
    draws = [fitted(written, compile=flag, num_steps=30).draws for flag in (True, False)]
    torch.testing.assert_close(draws[0], draws[1], rtol=1e-3, atol=1e-4)


def normals(x, y):
    loc = pyro.param("loc", torch.zeros(2))
    width = pyro.param("width", torch.full((2,), 0.1), constraint=POSITIVE)
    slope = pyro.sample("slope", dist.Normal(loc[0], width[0]))
    pyro.sample("scale", dist.LogNormal(loc[1] + 0.1 * slope, width[1]))


def test_sites_of_a_guide_may_depend_on_each_other():
    posterior = fitted(normals, num_steps=50)
    density = pb.Density(program, data())
    stats = log_importance(density, posterior.approximation, posterior.draws)
    torch.testing.assert_close(stats["log_q"], posterior.sample_stats["log_q"])


@pytest.mark.parametrize("auto", [AutoDiagonalNormal, AutoMultivariateNormal])
@pytest.mark.parametrize("bound", ["model", "function"])
def test_an_autoguide_of_a_net_may_be_bound_to_the_model_or_to_its_function(auto, bound):
    x, y = toy()
    model = toy_model()
    guide = auto(model if bound == "model" else model.pyro_model)
    posterior = pb.SVI(guide=guide, num_steps=20, compile=False).fit(model, x, y, num_draws=7)
    assert posterior.draws["net.0.weight"].shape == (1, 7, 8, 1)
    assert posterior.predict(x).mean.shape == y.shape
    torch.testing.assert_close(posterior.log_q(), posterior.sample_stats["log_q"])
    # the same as by its class, but for the start
    assert posterior.meta["settings"]["guide"] == auto.__name__


def test_a_list_of_guides_as_an_instance():
    guide = AutoGuideList(program)
    guide.append(AutoNormal(pyro.poutine.block(program, expose=["slope"])))
    guide.append(AutoDiagonalNormal(pyro.poutine.block(program, expose=["scale"])))
    posterior = fitted(guide, num_steps=30)
    assert posterior.draws["scale"].shape == (1, 200)


def looped(x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    for place in pyro.plate("places", 2):
        pyro.sample(f"level{place}", dist.Normal(mean, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def unlooped(x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    for place in range(2):
        pyro.sample(f"level{place}", dist.Normal(mean, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def list_with(function):
    def make(model):
        guide = AutoGuideList(model)
        guide.append(AutoNormal(pyro.poutine.block(model, expose=["mean"])))
        guide.append(function)
        return guide

    return make


def own_levels(x, y):
    locs = pyro.param("locs", torch.zeros(2))
    return {
        f"level{place}": pyro.sample(f"level{place}", dist.Normal(locs[place], 1.0))
        for place in pyro.plate("own", 2)
    }


LISTS = {
    "loop": (looped, AutoNormal, r"range\(…\)"),
    "loop of a list": (looped, list_with(own_levels), r"range\(…\)"),
    "own parameters": (unlooped, list_with(own_levels), "one function guide"),
}


@pytest.mark.parametrize("name", LISTS)
def test_automatic_guides_that_pyro_cannot_run_are_refused_in_a_sentence_before_the_first_step(
    name,
):
    program, guide, words = LISTS[name]
    with pytest.raises(Refused, match=words) as refusal:
        pb.SVI(guide=guide, num_steps=10**9).fit(program, None, torch.zeros(5))
    assert "\n" not in str(refusal.value)


def of_linear_net(x, y):
    weight = pyro.param("weight", torch.zeros(1, 10, dtype=torch.float64))
    bias = pyro.param("bias", torch.zeros(1, dtype=torch.float64))
    width = pyro.param("width", torch.full((11,), 0.1, dtype=torch.float64), constraint=POSITIVE)
    pyro.sample("net.weight", dist.Normal(weight, width[:10]).to_event(2))
    pyro.sample("net.bias", dist.Normal(bias, width[10:]).to_event(1))


@pytest.mark.slow
def test_a_guide_of_a_linear_net_ends_at_the_optimum_of_mean_field():
    truth = diabetes_linear()
    method = pb.SVI(guide=of_linear_net, num_steps=3000, lr=0.02, compile=False)
    posterior = method.fit(diabetes_model(), truth["x"], truth["y"], num_draws=2000)
    draws = joined(posterior.draws)[0]
    exact_sd = truth["precision"].diagonal().rsqrt()
    assert bool(((draws.mean(0) - truth["mean"]).abs() < 0.25 * exact_sd).all())
    assert bool(((draws.std(0) / exact_sd - 1).abs() < 0.2).all())


# -- what is no guide of the model -----------------------------------------------------------------------------------


def lacks(x, y):
    pyro.sample("slope", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))


def too_many(x, y):
    written(x, y)
    pyro.sample("offset", dist.Normal(0.0, 1.0))


def misspelt(x, y):
    loc = pyro.param("loc", torch.tensor(0.0))
    pyro.sample("slpoe", dist.Normal(loc, 1.0))
    pyro.sample("scale", dist.Gamma(2.0, 2.0))


def auxiliary(x, y):
    written(x, y)
    pyro.sample("hidden", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})


def at_a_point(x, y):
    pyro.sample("slope", dist.Delta(pyro.param("loc", torch.tensor(0.0))))
    pyro.sample("scale", dist.Gamma(2.0, 2.0))


def wrong_shape(x, y):
    pyro.sample("slope", dist.Normal(pyro.param("loc", torch.zeros(2)), 1.0).to_event(1))
    pyro.sample("scale", dist.Gamma(2.0, 2.0))


def without_gradient(x, y):
    pyro.sample("slope", dist.Poisson(pyro.param("loc", torch.tensor(1.0))))
    pyro.sample("scale", dist.Gamma(2.0, 2.0))


NET = torch.nn.Linear(1, 1)


register = pyro.module


def with_a_net(x, y):
    net = register("encoder", NET)
    written(net(x[:1]), y)


def with_a_net_and_a_default(x, y=None):
    with_a_net(x, y)


@pytest.mark.parametrize(
    ("guide", "words"),
    [
        (lacks, "lacks 'scale', which the model samples: its sites must be 'slope', 'scale'"),
        (too_many, "samples 'offset', which the model does not"),
        (misspelt, "lacks 'slope', which the model samples and samples 'slpoe'"),
        (auxiliary, "'hidden' beside the model's sites"),
        (at_a_point, "'slope' at a point"),
        (wrong_shape, r"'slope' of shape \(2,\), the model of shape \(\)"),
        (without_gradient, "'slope' from Poisson, through which there is no gradient"),
        (with_a_net, "'encoder' by pyro.module"),
        (with_a_net_and_a_default, "'encoder' by pyro.module"),
        (AutoNormal(pyro.poutine.block(program, hide=["scale"])), "lacks 'scale'"),
        (AutoStructured, "AutoStructured draws 'slope_aux', 'scale_aux' beside the model's sites"),
        (AutoGaussian, "AutoGaussianDense draws '_AutoGaussianDense_latent' beside"),
    ],
)
def test_what_is_no_guide_of_the_model_is_refused_by_name_before_any_step(guide, words):
    seen = []
    with pytest.raises(Refused, match=words):
        fitted(guide, callbacks=[lambda step, metrics: seen.append(step)])
    assert not seen


@pytest.mark.parametrize(
    "guide", [AutoNormalMessenger, AutoNormalMessenger(program)], ids=["class", "instance"]
)
def test_a_guide_by_messenger_is_the_normals_that_it_says(guide):
    messenger = fitted(guide, num_steps=400)
    normals = fitted(AutoNormal, num_steps=400)
    assert messenger.log_evidence == pytest.approx(normals.log_evidence, abs=0.2)
    for site, draws in normals.draws.items():
        assert messenger.draws[site].mean() == pytest.approx(
            float(draws.mean()), abs=0.5 * float(draws.std())
        )
    assert torch.isfinite(messenger.log_q()).all()


def shares(x, y):
    scale = pyro.param("log_loc", torch.tensor(1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(slope * x, scale.exp()), obs=y)


def test_a_parameter_of_guide_and_model_is_refused():
    with pytest.raises(Refused, match="'log_loc' is in the guide and in the model"):
        fitted(written, shares)


class Amortised(PyroModule):
    """Moments of the global sites as a net's function of the data, summed over rows."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
        )

    def forward(self, x, y=None):
        code = self.encoder(torch.stack([x.flatten(), y.flatten()], -1)).mean(0)
        pyro.sample("slope", dist.Normal(code[0], code[1].exp()))
        pyro.sample("scale", dist.LogNormal(code[2], code[3].exp()))


def test_a_net_may_give_the_moments_of_a_guide():
    with seeded(0):
        guide = Amortised()
    before = [value.clone() for value in guide.parameters()]
    amortised = fitted(guide, num_steps=800)
    normals = fitted(AutoNormal, num_steps=800)
    assert amortised.log_evidence == pytest.approx(normals.log_evidence, abs=0.3)
    assert all(map(torch.equal, before, guide.parameters()))


@pytest.mark.parametrize("guide", [lambda model: 3, lambda model: None, lambda x, y: None])
def test_a_function_that_is_no_guide_and_makes_none_is_named(guide):
    with pytest.raises((TypeError, Refused), match="AutoGuide|lacks 'slope', 'scale'"):
        fitted(guide)


def levels(x, y):
    for i in pyro.plate("groups", 3):
        level = pyro.sample(f"level_{i}", dist.Normal(0.0, 1.0))
        pyro.sample(f"y_{i}", dist.Normal(level, 1.0), obs=y[i])


def levels_guide(x, y):
    """It loops over a plate, and reads the data."""
    for i in pyro.plate("groups", 3):
        start = y[i] if y[i] > 0 else torch.tensor(0.0)
        loc = pyro.param(f"loc_{i}", start)
        scale = pyro.param(f"scale_{i}", torch.tensor(0.7), constraint=dist.constraints.positive)
        pyro.sample(f"level_{i}", dist.Normal(loc, scale))


def branching_levels_guide(x, y):
    """It reads what it has drawn."""
    scale = pyro.param("scale", torch.tensor(0.7), constraint=dist.constraints.positive)
    loc = pyro.param("loc", torch.zeros(3))
    first = pyro.sample("level_0", dist.Normal(loc[0], scale))
    for i in (1, 2):
        moved = loc[i] if first > 0 else loc[i] + 0.1
        pyro.sample(f"level_{i}", dist.Normal(moved, scale))


def test_a_guide_may_read_the_data_as_a_program_may_and_is_traced():
    y = torch.tensor([1.0, -2.0, 0.4])
    posterior = pb.SVI(guide=levels_guide, num_steps=800, lr=0.02, compile=False).fit(
        levels, None, y, num_draws=4000
    )
    assert posterior.meta["tier"]["tier"] == "trace"
    for i, value in enumerate(y):
        draws = posterior.draws[f"level_{i}"][0]
        # of 4,000 draws, and of the noise of the steps
        assert float(draws.mean()) == pytest.approx(float(value) / 2, abs=0.1)
        assert float(draws.std()) == pytest.approx(0.5**0.5, rel=0.1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_guide_reads_of_its_own_draws_is_read_at_every_step():
    y = torch.tensor([1.0, -2.0, 0.4])
    posterior = pb.SVI(guide=branching_levels_guide, num_steps=10, compile=False).fit(
        levels, None, y, num_draws=5
    )
    assert posterior.meta["tier"]["tier"] == "eager"
