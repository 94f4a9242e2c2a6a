"""SVI as a whole: exact where an exact answer exists, reproducible, told fully, and strict about its options."""

from __future__ import annotations

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, assert_var_within, seeded
from models import diabetes_linear, diabetes_model, joined, normal_prior, toy, toy_model, toy_net
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.core import private_trace
from pyrobnn.inference.fitting.rng import Noise
from pyrobnn.inference.optim.training import Optimizer
from pyrobnn.inference.svi import SVI, Guide
from pyrobnn.inference.vi import kl_schedules
from pyrobnn.inference.vi.elbo_value import elbo_findings
from pyrobnn.inference.vi.families import FullRank
from pyrobnn.model.compile import compiled
from pyrobnn.model.compile.graph_nodes import library_calls
from pyrobnn.model.compile.products import DECOMPOSITIONS

BEST_MEAN_FIELD_ELBO = -503.79427


def _fit(num_draws=100, seed=0, model=None, data=None, **options):
    options = {"num_steps": 300, "compile": False} | options
    x, y = data or toy()
    return SVI(**options).fit(model or toy_model(), x, y, num_draws=num_draws, seed=seed)


@pytest.fixture(scope="module")
def exact():
    return diabetes_linear()


@functools.cache
def _diabetes(**options):
    exact = diabetes_linear()
    return SVI(**options).fit(diabetes_model(), exact["x"], exact["y"], num_draws=4000)


def _moments(posterior):
    state = posterior.approximation.state()[1]
    return state["loc"], state.get("scale", None)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["weights", "local_reparameterization"])
def test_mean_field_is_the_known_optimum(exact, estimator):
    posterior = _diabetes(estimator=estimator)
    loc, scale = _moments(posterior)
    order = _order(posterior)
    best = exact["precision"].diagonal().rsqrt()
    assert float((scale[order] / best - 1).abs().max()) < 0.05
    sd = exact["cov"].diagonal().sqrt()
    assert float(((loc[order] - exact["mean"]) / sd).abs().max()) < 0.1
    assert abs(posterior.log_evidence - BEST_MEAN_FIELD_ELBO) < 0.1
    # the optimum itself: log evidence less the gap of the best factorised normal
    gap = 0.5 * (exact["precision"].diagonal().log().sum() - torch.logdet(exact["precision"]))
    assert float(exact["log_evidence"] - gap) == pytest.approx(BEST_MEAN_FIELD_ELBO, abs=1e-4)


def _order(posterior):
    """The flat vector is in the order of the model's sites, weight then bias."""
    assert [site.name for site in posterior.approximation.layout.sites] == [
        "net.weight",
        "net.bias",
    ]
    return torch.arange(11)


@pytest.mark.slow
def test_full_rank_is_the_exact_posterior(exact):
    posterior = _diabetes(guide="full_rank")
    draws = joined(posterior.draws)
    assert_mean_within(draws, exact["mean"])
    assert_var_within(draws, exact["cov"].diagonal(), mean=exact["mean"])
    assert abs(posterior.log_evidence - float(exact["log_evidence"])) < 0.02
    tril = posterior.approximation.state()[1]["scale_tril"]
    correlation = torch.corrcoef((tril @ tril.T).new_tensor(draws[0].T.tolist()))
    sd = exact["cov"].diagonal().sqrt()
    assert float((correlation - exact["cov"] / (sd[:, None] * sd)).abs().max()) < 5 * 2 / math.sqrt(
        4000
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "slack"),
    [
        ({"guide": "low_rank"}, 0.1),
        ({"guide": "flow"}, 1.5),
        ({"guide": AutoLowRankMultivariateNormal}, 1.5),
    ],
)
def test_richer_guides_beat_mean_field(exact, options, slack):
    posterior = _diabetes(**options)
    assert BEST_MEAN_FIELD_ELBO + 1 < posterior.log_evidence
    assert abs(posterior.log_evidence - float(exact["log_evidence"])) < slack


@pytest.mark.slow
def test_mini_batches_reach_the_same_posterior(exact):
    posterior = _diabetes(batch_size=64, estimator="local_reparameterization")
    loc, scale = _moments(posterior)
    assert abs(posterior.log_evidence - BEST_MEAN_FIELD_ELBO) < 0.15
    assert float((scale / exact["precision"].diagonal().rsqrt() - 1).abs().max()) < 0.08


@pytest.mark.slow
def test_log_q_p_and_the_elbo_belong_together(exact):
    posterior = _diabetes(estimator="local_reparameterization")
    stats = posterior.sample_stats
    assert stats["log_p"].shape == stats["log_q"].shape == (1, 4000)
    # ELBO = E_q[log p - log q]
    assert_mean_within(stats["log_p"] - stats["log_q"], posterior.log_evidence, sigmas=6.0)
    torch.testing.assert_close(
        posterior.log_q(posterior.draws), stats["log_q"], atol=1e-6, rtol=1e-6
    )
    z = joined(posterior.draws)[0]
    log_p = torch.distributions.MultivariateNormal(exact["mean"], exact["cov"]).log_prob(z)
    torch.testing.assert_close(
        stats["log_p"][0], log_p + exact["log_evidence"], atol=1e-4, rtol=1e-4
    )


@pytest.mark.slow
def test_compiled_equals_eager():
    fits = [_fit(num_steps=50, batch_size=16, compile=compile) for compile in (True, False)]
    for name in fits[0].draws:
        torch.testing.assert_close(fits[0].draws[name], fits[1].draws[name], atol=1e-3, rtol=1e-3)
    assert [fit.meta["tier"]["tier"] for fit in fits] == ["compiled", "trace"]


@pytest.mark.filterwarnings("ignore:the [a-z_]* guide ended")
@pytest.mark.parametrize("guide", ["mean_field", "low_rank", "full_rank", "flow", AutoNormal])
def test_same_seed_same_draws(guide):
    first, second, other = (_fit(guide=guide, num_steps=10, seed=seed) for seed in (3, 3, 4))
    for name in first.draws:
        assert torch.equal(first.draws[name], second.draws[name])
    assert not torch.equal(first.draws["net.0.weight"], other.draws["net.0.weight"])


def _last_layer_apart(program):
    guide = AutoGuideList(program)
    last = ["net.2.weight", "net.2.bias"]
    guide.append(AutoMultivariateNormal(pyro.poutine.block(program, expose=last)))
    guide.append(AutoLowRankMultivariateNormal(pyro.poutine.block(program, hide=last)))
    return guide


@pytest.mark.parametrize(
    "guide",
    [
        "low_rank",
        "flow",
        AutoNormal,
        AutoLowRankMultivariateNormal,
        functools.partial(AutoLowRankMultivariateNormal, rank=2),
        AutoIAFNormal,
        _last_layer_apart,
    ],
)
def test_every_guide_serves_predictive_and_log_q(guide):
    model = toy_model(pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)))
    posterior = _fit(guide=guide, num_steps=20, model=model, num_draws=30, num_particles=2)
    x, _ = toy()
    assert (
        posterior.draws["likelihood.scale"].shape == (1, 30)
        and (posterior.draws["likelihood.scale"] > 0).all()
    )
    assert (
        torch.isfinite(posterior.log_q()).all()
        and torch.isfinite(posterior.sample_stats["log_p"]).all()
    )
    with seeded(0):
        drawn = pyro.infer.Predictive(model, guide=posterior.guide, num_samples=4)(x)
    assert drawn["likelihood.data"].shape[0] == 4
    trace = pyro.poutine.trace(posterior.guide)
    with seeded(1):
        nodes = trace.get_trace(x).nodes
    # the guide's own log density of its draw is log_q of that draw
    values = {name: nodes[name]["value"][None, None] for name in model.priors}
    total = sum(n["fn"].log_prob(n["value"]).sum() for n in nodes.values() if n["type"] == "sample")
    torch.testing.assert_close(
        posterior.log_q(values)[0, 0].float(), total.float(), atol=2e-3, rtol=1e-4
    )


def test_guides_without_a_density_are_refused():
    for guide, better in ((AutoDelta, "MAP"), (AutoLaplaceApproximation, "Laplace")):
        with pytest.raises(ValueError, match=better):
            _fit(guide=guide)
    with pytest.raises(TypeError, match="AutoGuide"):
        _fit(guide=lambda program: program)


@pytest.mark.slow
def test_point_parameters_are_optimised():
    x, y = toy(200)
    noisy = pb.likelihoods.HomoskedasticGaussian("learned")
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, hide=["0.bias"])
    net = toy_net()
    model = pb.BNN(net, prior, noisy)
    before = net[0].bias.detach().clone()
    posterior = _fit(model=model, data=(x, y), num_steps=300, lr=0.05)
    assert posterior.meta["point_sites"] == ["likelihood.scale", "net.0.bias"]
    scale = posterior.draws["likelihood.scale"]
    assert (scale == scale[0, 0]).all() and 0.07 < float(scale[0, 0]) < 0.3
    assert torch.equal(net[0].bias, before) and not torch.equal(
        posterior.draws["net.0.bias"][0, 0], before
    )
    with seeded(0):
        assert "net.0.bias" not in posterior.guide(x)


def test_plain_pyro_programs():
    x = torch.linspace(0, 1, 50)
    y = 2 * x + 0.3

    def program(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(slope * x + 0.3, scale + 0.1), obs=y)

    posterior = SVI(num_steps=300, compile=False, lr=0.08).fit(program, x, y, num_draws=500)
    assert abs(float(posterior.draws["slope"].mean()) - 2) < 0.1
    batches = SVI(num_steps=300, compile=False, lr=0.08, batch_size=10)
    by_batches = batches.fit(program, x, y, num_draws=500)
    assert abs(float(by_batches.draws["slope"].mean()) - 2) < 0.1
    ratio = by_batches.draws["slope"].std() / posterior.draws["slope"].std()
    assert 0.5 < float(ratio) < 2  # ten rows counted as ten would make it 2.2


def test_loaders_are_streamed():
    x, y = toy(50)
    loader = DataLoader(TensorDataset(x, y), batch_size=20)  # a last batch of another size
    posterior = SVI(num_steps=30, compile=False).fit(toy_model(), loader, num_draws=50)
    assert posterior.meta["num_data"] == 50
    whole = _fit(data=(x, y), num_steps=30, num_draws=50)
    assert abs(posterior.log_evidence / whole.log_evidence - 1) < 0.5
    density = pb.Density(functools.partial(toy_model().pyro_model, num_data=50), (x, y))
    z = density.unconstrain({name: value[0, 0] for name, value in posterior.draws.items()})
    torch.testing.assert_close(
        posterior.sample_stats["log_p"][0, 0], density.log_joint(z), atol=1e-3, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("weight", "temperature"),
    [
        (1.0, 1.0),
        (0.0, 0.0),
        (kl_schedules.Graves(), 1.0),
        (kl_schedules.Blundell(), 1.0),
        (kl_schedules.PerWeight(), 1 / 25),
        (kl_schedules.Linear(), 1.0),
    ],
)
def test_kl_weights_and_the_temperature(weight, temperature):
    posterior = _fit(kl_weight=weight, batch_size=10, num_steps=40)
    assert posterior.meta["temperature"] == pytest.approx(temperature)
    assert posterior.history["kl_weight"].shape == (40,)
    terms = posterior.history
    torch.testing.assert_close(
        terms["loss"], terms["kl_weight"] * terms["kl"] - terms["log_likelihood"]
    )
    torch.testing.assert_close(terms["elbo"], terms["log_likelihood"] - terms["kl"])


@pytest.mark.slow
def test_tempered_posterior_is_the_tempered_one(exact):
    # KL weight w: covariance (I + design' design / (w noise²))^-1; mean field has its precision's diagonal
    posterior = SVI(kl_weight=0.1, estimator="local_reparameterization", num_steps=4000).fit(
        diabetes_model(), exact["x"], exact["y"], num_draws=10
    )
    eye = torch.eye(11, dtype=torch.float64)
    precision = (exact["precision"] - eye) / 0.1 + eye
    _, scale = _moments(posterior)
    assert posterior.meta["temperature"] == pytest.approx(0.1)
    assert float((scale * precision.diagonal().sqrt() - 1).abs().max()) < 0.05


@pytest.mark.parametrize(
    "options",
    [{}, {"estimator": "local_reparameterization", "num_particles": 2}, {"guide": AutoNormal}],
    ids=str,
)
def test_a_step_of_a_small_net_leaves_the_fused_loops_for_nothing(options, monkeypatch):
    """Neither for a generator's normals nor for a library's products: one call, and its memory can be the stack."""
    graphs = []

    def trace(fn, *example, **_):
        graphs.append(
            private_trace.trace(fn, [each.detach().clone() for each in example], DECOMPOSITIONS)
        )
        return compiled(fn, *example, enabled=False)

    monkeypatch.setattr("pyrobnn.inference.optim.minimize.compiled", trace)
    with seeded(0):
        x = torch.randn(100, 13)
    model = pb.BNN(
        pb.networks.mlp(13, (20,), 1, seed=0),
        normal_prior(),
        pb.likelihoods.HomoskedasticGaussian(0.1),
    )
    SVI(num_steps=2, batch_size=32, **options).fit(model, x, x[:, :1], num_draws=2)
    random = torch.Tag.nondeterministic_seeded
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert not [str(each) for each in called if random in getattr(each, "tags", ())]
    assert "num_particles" in options or not library_calls(graphs[0])


def test_steps_of_every_parameter_keep_a_full_rank_guide_well_conditioned():
    family = FullRank(torch.zeros(200), 0.01)
    start = family.initial()
    with seeded(
        0
    ):  # what Adam's noise does to parameters without a gradient: ten steps of 0.01 on each
        walked = start + 0.1 * torch.randn_like(start) * (torch.arange(family.size) >= 2 * 200)
        before, after = (
            family.draw(phi, Noise(torch.tensor(0))).moments.var.sqrt() for phi in (start, walked)
        )
        assert float((after / before - 1).abs().max()) < 0.05
        q = family.approximation(
            walked,
            pb.Density(lambda: pyro.sample("z", dist.Normal(torch.zeros(200), 1.0).to_event(1))),
        )
        precise = q.distribution.precision_matrix * 0.01**2
    assert float(precise.diagonal().max()) < 2


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["full_rank", "flow"])
def test_correlated_guides_end_above_mean_field_on_a_relu_net(guide):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(100, 2, generator=generator) - 2
    y = torch.sin(x[:, :1]) * x[:, 1:] + 0.1 * torch.randn(100, 1, generator=generator)
    net = pb.networks.mlp(2, (50,), 1, activation=torch.nn.ReLU, seed=0)
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.1))
    richer, simple = (
        SVI(guide=name, num_steps=2000).fit(model, x, y, num_draws=100)
        for name in (guide, "mean_field")
    )
    assert richer.log_evidence > simple.log_evidence - 5 * simple.meta["elbo_error"]
    assert not richer.meta["warnings"] and richer.log_evidence < float(richer.history["elbo"].max())


@pytest.mark.slow
def test_a_fit_that_ends_below_its_best_or_without_a_number_says_so():
    def codes(track, value, error=0.1):
        return [each.code for each in elbo_findings(value, error, torch.tensor(track))]

    with seeded(0):
        noise = torch.randn(400)
    rising = (noise + torch.linspace(-100.0, -50.0, 400)).tolist()
    assert codes(rising, -50.0) == [] and codes(rising[:10], -80.0) == []
    assert codes(rising, -60.0) == ["elbo_below_best"]
    assert codes(rising, -60.0, error=2.0) == []  # it is not known to be lower
    assert elbo_findings(-60.0, 0.1, None) == []  # nor has a tempered fit an ELBO to keep
    for value in (math.inf, math.nan):
        assert codes(rising, value) == ["elbo_not_finite"]
    with pytest.warns(UserWarning, match="has not converged"):
        # a learning rate that jumps when the fit is nearly done
        posterior = _fit(
            num_steps=600,
            lr=0.03,
            optimizer=Optimizer("adam", lambda k: 1.0 if k < 590 else 50.0, average=0.0),
        )
    assert [each["code"] for each in posterior.meta["findings"]] == ["elbo_below_best"]


@pytest.mark.slow
def test_scale_cap_holds_and_can_be_left_again():
    x, y = toy(3)  # three points: most scales want to grow to the prior's
    free, capped = (
        _fit(data=(x, y), guide=Guide(max_scale=cap), num_steps=150, lr=0.1) for cap in (None, 0.1)
    )
    scales = [posterior.approximation.state()[1]["scale"] for posterior in (free, capped)]
    assert scales[0].max() > 0.3 and 0.09 < scales[1].max() <= 0.1


def test_divergence_is_an_error():
    with pytest.raises(FloatingPointError, match="the loss of SVI is .* at step"):
        _fit(optimizer=lambda params: torch.optim.SGD(params, lr=1e6), num_steps=300)


def test_callbacks_see_the_posterior_on_its_way():
    seen = []

    def callback(step, metrics):
        seen.append((step, metrics["snapshot"]().draws["net.0.weight"].shape, metrics["elbo"]))
        return step >= 40

    x, y = toy()
    posterior = SVI(num_steps=200, compile=False).fit(toy_model(), x, y, callbacks=[callback])
    assert [entry[0] for entry in seen] == [20, 40] and seen[0][1] == (1, 100, 8, 1)
    assert posterior.meta["stopped"] == "callback" and len(posterior.history["loss"]) == 40
    silent = SVI(num_steps=40, compile=False, optimizer=Optimizer(average=0.2)).fit(
        toy_model(), x, y
    )
    watched = SVI(num_steps=40, compile=False, optimizer=Optimizer(average=0.2)).fit(
        toy_model(), x, y, callbacks=[lambda step, metrics: bool(metrics["snapshot"]() is None)]
    )
    assert torch.equal(
        silent.draws["net.0.weight"], watched.draws["net.0.weight"]
    )  # looking changes nothing


def test_starts_where_it_is_told():
    x, y = toy()
    net = toy_net()
    with seeded(7):
        for parameter in net.parameters():
            parameter.data.normal_()
    still = SVI(num_steps=1, lr=1e-9, compile=False, optimizer=Optimizer(average=0.0))
    posterior = still.fit(toy_model(), x, y, init=net)
    loc = posterior.approximation.layout.constrain(posterior.approximation.state()[1]["loc"])
    torch.testing.assert_close(loc["net.0.weight"], net[0].weight.detach())
    again = still.fit(toy_model(), x, y, init=posterior)
    loc = again.approximation.layout.constrain(again.approximation.state()[1]["loc"])
    torch.testing.assert_close(loc["net.0.weight"], posterior.draws["net.0.weight"][0, 0])
    prior = SVI(
        num_steps=1,
        lr=1e-9,
        compile=False,
        guide=Guide(init_loc="prior"),
        optimizer=Optimizer(average=0.0),
    ).fit(toy_model(), x, y)
    loc = prior.approximation.state()[1]["loc"]
    assert 0.5 < float(loc.std()) < 1.6  # standard normal prior


@pytest.mark.slow
def test_scale_mixture_prior_has_no_closed_form_and_fits():
    model = pb.BNN(
        toy_net(), pb.priors.ScaleMixture(0.5, 1.0, 0.05), pb.likelihoods.HomoskedasticGaussian(0.2)
    )
    posterior = _fit(model=model, num_steps=800, lr=0.03)
    error = (posterior.predict(toy()[0]).mean - toy()[1]).square().mean().sqrt()
    assert float(error) < 0.25
    losses = posterior.history["loss"]
    assert losses[-1] < losses[0]


def test_save_and_load_rebuild_the_approximation(tmp_path):
    for guide in ("low_rank", "flow"):
        model = toy_model()
        posterior = _fit(guide=Guide(guide, mean_field_start=0.0), num_steps=5, model=model)
        loaded = pb.Posterior.load(posterior.save(tmp_path / f"{guide}.nc"), model)
        torch.testing.assert_close(loaded.log_q(), posterior.log_q())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"guide": "meanfield"}, "'guide'"),
        ({"num_steps": 0}, "num_steps"),
        ({"lr": 0.0}, "'lr'"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_particles": 0}, "num_particles"),
        ({"kl": "exact"}, "'kl'"),
        ({"kl_weight": -1.0}, "kl_weight"),
        ({"init_scale": 0.0}, "init_scale"),
        ({"guide": Guide(max_scale=0.01)}, "max_scale"),
        ({"estimator": "local"}, "estimator"),
        ({"estimator": "flipout", "guide": "low_rank"}, "mean_field"),
    ],
)
def test_bad_options(option, message):
    with pytest.raises(ValueError, match=message):
        SVI(**option)


def test_a_full_covariance_that_cannot_fit_is_refused():
    with seeded(0):
        net = torch.nn.Linear(200_000, 1)
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(1.0))
    with pytest.raises(ValueError, match=r"[\d,]{12,} bytes.*low_rank"):
        SVI(guide="full_rank").fit(model, torch.zeros(2, 200_000), torch.zeros(2, 1))
