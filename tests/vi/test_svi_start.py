"""A guide begins at the mode; a richer one where mean-field ends, and says so where it ends below it."""

from __future__ import annotations

import dataclasses
import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior, toy, toy_model, toy_net
from sklearn.datasets import load_iris

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.method import FitRun
from pyrobnn.inference.optim.training import Optimizer
from pyrobnn.inference.svi import Guide
from pyrobnn.inference.vi.start import own_start, search_of, start_of, starts_of

RICHER = ("low_rank", "full_rank", "flow")


def _fit(guide="full_rank", **options):
    options = {"num_steps": 20, "compile": False} | options
    fit = {name: options.pop(name) for name in ("callbacks", "progress") if name in options}
    return pb.SVI(guide=guide, **options).fit(toy_model(), *toy(), num_draws=20, **fit)


@pytest.mark.parametrize("guide", RICHER)
def test_it_begins_at_the_very_end_of_mean_field(guide):
    seen = {}

    def look(step, metrics):
        seen[step] = metrics["snapshot"]().approximation

    posterior = _fit(guide, callbacks=[look])
    plain = _fit("mean_field")
    assert posterior.meta["mean_field_steps"] == 20 and posterior.meta["num_steps"] == 40
    assert sorted(seen) == list(range(2, 41, 2))
    (_, state) = plain.approximation.state()
    (name, reached) = seen[20].state()
    assert name == "normal" and torch.equal(reached["loc"], state["loc"])
    assert torch.equal(posterior.history["elbo"][:20], plain.history["elbo"])
    begun = state["loc"]
    (name, state) = seen[26].state()
    assert (
        name == guide and 0 < float((state["loc"] - begun).abs().max()) < 0.07
    )  # six steps of the rate


def test_stopped_before_the_guide_begins_it_is_mean_field():
    posterior = _fit(callbacks=[lambda step, metrics: step >= 4])
    assert (posterior.meta["mean_field_steps"], posterior.meta["num_steps"]) == (4, 4)
    assert (
        posterior.meta["stopped"] == "callback"
        and posterior.meta["settings"]["guide"] == "full_rank"
    )
    assert posterior.approximation.state()[0] == "normal" and math.isfinite(posterior.log_evidence)
    meta = _fit(
        Guide("full_rank", mean_field_start=0.0), callbacks=[lambda step, metrics: True]
    ).meta
    assert (meta["mean_field_steps"], meta["num_steps"]) == (0, 2)


def test_a_guide_that_ends_below_its_start_says_so_and_is_not_returned():
    def spoil(step):  # the rate of the second half of both, which mean-field's average forgives
        return 1.0 if step < 55 else 30.0

    guide = Guide("full_rank", mean_field_start=0.9)
    optimizer = Optimizer("adam", spoil, average=0.0)
    with pytest.warns(UserWarning, match="the ELBO ends at .* and was at least"):
        posterior = _fit(guide, num_steps=60, lr=0.03, optimizer=optimizer)
    assert (posterior.meta["mean_field_steps"], posterior.meta["num_steps"]) == (54, 114)
    assert [each["code"] for each in posterior.meta["findings"]].count("elbo_below_best") == 1
    assert (
        posterior.log_evidence > posterior.meta["findings"][0]["elbo"]
    )  # mean-field is what it returns
    assert posterior.approximation.log_prob(posterior.draws).isfinite().all()


def test_an_interrupt_and_the_end_are_told_of_both_parts():
    ends = []

    class Press:
        def __call__(self, step, metrics):
            if step >= at:
                raise KeyboardInterrupt

        def end(self):
            ends.append(at)

    for at in (4, 26):
        with pytest.warns(UserWarning, match=f"interrupted by Ctrl-C after {at} of 40 steps"):
            posterior = _fit(callbacks=[Press()])
        assert posterior.meta["interrupted"] and posterior.meta["num_steps"] == at
    assert ends == [4, 26]


def _line():
    generator = torch.Generator().manual_seed(0)
    x = 3 + torch.rand(40, 1, generator=generator)
    y = 2 * x - 1 + 0.3 * torch.randn(40, 1, generator=generator)
    with seeded(0):
        net = torch.nn.Linear(1, 1)
    return pb.BNN(net, normal_prior(3.0), pb.likelihoods.HomoskedasticGaussian(0.3)), x, y


def _schools():
    effect = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    error = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def program(x=None, y=None):
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        spread = pyro.sample("spread", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            school = pyro.sample("school", dist.Normal(mean, spread))
            return pyro.sample("effect", dist.Normal(school, error), obs=effect)

    return (program,)


def _net(likelihood, x, y, inputs=1, hidden=10, out=1):
    with seeded(0):
        net = torch.nn.Sequential(
            torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, out)
        )
    return pb.BNN(net, normal_prior(), likelihood), x, y


def _sine(slope=0.0, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(120, 1, generator=generator) * 6 - 3
    noise = (0.2 + slope * (x + 3)) * torch.randn(120, 1, generator=generator)
    return _net(x=x, y=torch.sin(x) + noise, **options)


def _iris():
    x, y = load_iris(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0)).float()
    return _net(pb.likelihoods.Categorical(), x, torch.tensor(y), inputs=4, hidden=8, out=3)


def _counts():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 1, generator=generator) + 0.2 * torch.randn(200, 6, generator=generator)
    y = torch.poisson((0.5 + 0.15 * x.sum(1, keepdim=True)).exp(), generator=generator)
    with seeded(0):
        net = torch.nn.Linear(6, 1)
    return pb.BNN(net, normal_prior(), pb.likelihoods.Poisson()), x, y


SIX = {
    "line": _line,
    "hierarchical program": _schools,
    "homoskedastic": functools.partial(
        _sine, likelihood=pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    ),
    "heteroskedastic": functools.partial(
        _sine, 0.1, likelihood=pb.likelihoods.HeteroskedasticGaussian(), out=2
    ),
    "classes": _iris,
    "correlated counts": _counts,
}


@functools.cache
def _mean_field(name):
    model, *data = SIX[name]()
    return pb.SVI(num_steps=3000).fit(model, *data, num_draws=50)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:the (ELBO ends|[a-z_]* guide ended)", "ignore:.*(did not converge|the weights use up)"
)
@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("guide", RICHER)
def test_a_richer_guide_is_never_worse_than_mean_field(name, guide):
    model, *data = SIX[name]()
    richer = pb.SVI(guide=guide, num_steps=3000).fit(model, *data, num_draws=50)
    plain = _mean_field(name)
    error = math.hypot(richer.meta["elbo_error"], plain.meta["elbo_error"])
    assert richer.log_evidence > plain.log_evidence - 3 * error


#: a guide that stays where it begins
STILL = pb.SVI(
    num_steps=200,
    compile=False,
    optimizer=Optimizer("adam", lambda step: 1e-9, average=0.0),
)


@pytest.mark.parametrize("guide", ["mean_field", "full_rank"])
def test_a_guide_of_a_net_begins_at_the_mode_that_map_finds(guide):
    model = toy_model(pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)))
    posterior = dataclasses.replace(STILL, guide=guide).fit(model, *toy(), num_draws=20)
    search = search_of(STILL)
    assert (search.num_steps, search.lr) == (40, STILL.lr)
    mode = search.fit(model, *toy())
    values = {name: value[0, 0] for name, value in mode.draws.items()}
    begun = posterior.approximation.layout.unconstrain(values)
    loc = posterior.approximation.state()[1]["loc"].float()
    torch.testing.assert_close(loc, begun, rtol=0.0, atol=1e-5)
    unfitted = model.initial_values()["net.0.weight"]
    assert float((values["net.0.weight"] - unfitted).abs().max()) > 0.5
    assert posterior.meta["start"] == "mode" and posterior.meta["timings"]["mode"] > 0
    assert posterior.meta["noise_held"] == mode.meta["noise_held"]
    assert posterior.meta["path_gain"] == mode.meta["path_gain"]


def test_where_a_guide_begins_is_recorded_and_may_be_chosen():
    def start_of(guide="mean_field", model=None, init=None):
        method = pb.SVI(guide=guide, num_steps=20, compile=False)
        return method.fit(model or toy_model(), *toy(), num_draws=5, init=init).meta["start"]

    assert start_of() == "mode" and start_of("full_rank") == "mode"
    assert start_of(Guide(init_loc="net")) == "net"
    assert start_of(Guide(init_loc="prior")) == "prior"
    assert start_of(init=toy_net()) == "init"
    assert start_of(pyro.infer.autoguide.AutoNormal) == "net"

    def program(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(w * x[:, 0], 1.0).to_event(1), obs=y[:, 0])

    assert start_of(model=program) == "median"


@pytest.mark.parametrize("scale", ["learned", dist.HalfNormal(1.0)])
@pytest.mark.parametrize("error", [FloatingPointError("not finite"), None])
def test_without_a_mode_the_guide_begins_at_the_net(error, scale, monkeypatch):
    data = toy(20)
    model = toy_model(pb.likelihoods.HomoskedasticGaussian(scale))
    plain = pb.SVI(guide=Guide(init_loc="net"), num_steps=20, compile=False)
    problem = prepare(model, *data, points="free")

    def search(self, problem, run):
        if error is not None:
            raise error
        # the noise of a net that passes through every row vanishes
        point = own_start(problem).point.clone()
        site = problem.density.site("likelihood.scale")
        point[site.start : site.stop] = -20.0
        return dataclasses.replace(ended, params=point)

    ended = pb.MAP(num_steps=1, compile=False).mode(problem, FitRun(1))
    monkeypatch.setattr(pb.MAP, "mode", search)
    posterior = pb.SVI(num_steps=20, compile=False).fit(model, *data, num_draws=20)
    assert posterior.meta["start"] == "net"
    expected = plain.fit(model, *data, num_draws=20)
    assert torch.equal(posterior.history["elbo"], expected.history["elbo"])


def test_noise_under_a_prior_with_density_at_zero_does_not_vanish_where_a_net_passes_through_every_row():
    """A half-normal does not bound the joint density, and a guide that began there ended millions of nats too low."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(15, 3, generator=generator)
    y = x[:, :1] - x[:, 1:2] * x[:, 2:] + 0.3 * torch.randn(15, 1, generator=generator)
    y = (y - y.mean()) / y.std()
    net = pb.networks.mlp(3, (8,), 1, activation="relu", seed=0)
    noise = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    model = pb.BNN(net, pb.priors.FanInNormal(1.0), noise)
    problem = prepare(model, x, y, points="free")
    start = start_of(pb.SVI(), problem, FitRun(1))
    assert float(problem.density.constrain(start.point)["likelihood.scale"]) > 0.01


def test_ctrl_c_in_the_search_for_the_start_has_nothing_to_return(monkeypatch):
    def press(self, problem, run):
        result = mode(self, problem, run)
        return dataclasses.replace(result, stopped="interrupt")

    mode = pb.MAP.mode
    monkeypatch.setattr(pb.MAP, "mode", press)
    with pytest.raises(KeyboardInterrupt, match="SVI looked for its start"):
        _fit("mean_field")


def test_guides_of_several_targets_begin_at_the_mode_of_each():
    x, y = toy()
    problem = prepare(toy_model(), x, y, points="free")
    ys = torch.stack([y, -y])
    starts = starts_of(STILL, problem, ys, FitRun(5))
    at_net = own_start(problem).point
    assert starts.shape == (2, problem.density.dim)
    assert float((starts[0] - starts[1]).abs().max()) > 0.05
    for start, fitted in zip(starts, STILL.fit_each(problem, ys, FitRun(5)), strict=True):
        loc = fitted.approximation.state()[1]["loc"]
        torch.testing.assert_close(loc, start, rtol=0.0, atol=1e-5)
        assert float((loc - at_net).abs().max()) > 0.05
