"""A rehearsal passes the exact posterior and condemns an overconfident one."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.method import FitRun
from pyrobnn.studies.rehearsal import _coverage


def line(slope=2.5, num=15, likelihood=None):
    """A line whose slope lies in the tail of its prior."""
    g = torch.Generator().manual_seed(1)
    x = 2 * torch.rand(num, 1, generator=g) - 1
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    with seeded():
        net = torch.nn.Linear(1, 1)
    model = pb.BNN(net, prior, likelihood or pb.likelihoods.HomoskedasticGaussian(0.5))
    return model, x, slope * x + 0.5 * torch.randn(num, 1, generator=g)


@dataclasses.dataclass(frozen=True)
class Shrunk(pb.inference.method.Method):
    """The exact posterior of a line with noise 0.5 and prior scale 1, its spread times ``factor``."""

    factor: float = 1.0
    kind = "independent"
    claim = "exact"

    def _fit(self, problem, run):
        x = torch.cat([torch.ones_like(problem.x), problem.x], 1).double()
        cov = torch.linalg.inv(x.T @ x / 0.25 + torch.eye(2))
        mean = cov @ x.T @ problem.y.double()[:, 0] / 0.25
        z = torch.randn(
            run.num_draws, 2, generator=torch.Generator().manual_seed(run.seed)
        ).double()
        w = (mean + self.factor * z @ torch.linalg.cholesky(cov).T).float()
        draws = {"net.weight": w[None, :, 1, None, None], "net.bias": w[None, :, :1]}
        return pb.inference.fitting.problem.make_posterior(
            problem, self, draws, seed=run.seed, timings={}
        )


@pytest.mark.slow
def test_the_exact_posterior_is_passed_and_a_shrunken_one_condemned():
    model, x, y = line()
    exact = pb.rehearse(Shrunk(), model, x, y, num_worlds=60, num_draws=300)
    assert exact.ok, str(exact)
    narrow = pb.rehearse(
        Shrunk(0.3), model, x, y, num_worlds=60, num_draws=300, worlds=Shrunk().fit(model, x, y)
    )
    assert {
        row.verdict for row in narrow.coverage if row.quantity == "function" and row.level == 0.9
    } == {"too narrow"}
    assert json.loads(json.dumps(narrow.to_dict()))["ok"] is False
    assert "too narrow" in str(narrow)


def test_a_program_is_refused_before_any_fit():
    with pytest.raises(TypeError, match="'model' must be a pyrobnn.BNN"):
        pb.rehearse(pb.Laplace(), lambda x, y: None, torch.zeros(3, 1), torch.zeros(3))


@pytest.mark.parametrize(
    "regions", [{}, {"a": torch.zeros(2)}, {"a": torch.zeros(0, 1)}, {"a": np.zeros((2, 3))}]
)
def test_regions_are_points_and_looked_at_before_any_fit(regions, monkeypatch):
    monkeypatch.setattr(pb.Laplace, "fit", None)
    model = pb.BNN(
        pb.networks.mlp(1, (), seed=0),
        pb.priors.FanInNormal(),
        pb.likelihoods.HomoskedasticGaussian(0.3),
    )
    with pytest.raises(ValueError, match=r"'regions' must map names to points"):
        pb.rehearse(pb.Laplace(), model, torch.zeros(3, 1), torch.zeros(3), regions=regions)


def test_a_point_has_no_interval_of_the_function():
    model, x, y = line()
    found = pb.rehearse(
        pb.MLE(num_steps=20, compile=False),
        model,
        x,
        y,
        num_worlds=5,
        regions={"mine": x[:3]},
        worlds=Shrunk().fit(model, x, y),
    )
    assert [row.share for row in found.coverage[:2]] == [0.0, 0.0] and {
        row.region for row in found.coverage
    } == {"mine"}


@pytest.mark.slow
def test_all_worlds_are_fitted_in_one_search():
    model, x, y = line()
    ys = torch.stack([y, 2 * y, y + 1])
    problem = prepare(model, x, y, points="free")
    run = FitRun(300)
    search = pb.MAP(num_steps=60, polish_steps=0, compile=False)
    for found, own in zip(search.fit_each(problem, ys, run), ys, strict=True):
        alone = search.fit(model, x, own)
        torch.testing.assert_close(
            found.draws["net.weight"], alone.draws["net.weight"], rtol=1e-4, atol=1e-5
        )
    members = pb.DeepEnsemble(num_members=2, num_steps=5, compile=False).fit_each(problem, ys, run)
    assert [each.num_draws for each in members] == [2, 2, 2]
    x_all = torch.cat([x, torch.ones_like(x)], 1).double()
    precision = x_all.T @ x_all / 0.25 + torch.eye(2)
    svi = pb.SVI(num_steps=400, lr=0.05, compile=False)
    for found, own in zip(svi.fit_each(problem, ys, run), ys, strict=True):
        state = found.approximation.state()[1]
        mean = torch.linalg.solve(precision, x_all.T @ own.double()[:, 0] / 0.25)
        sd = precision.diagonal().rsqrt()
        loc = found.approximation.layout.constrain(state["loc"])
        loc = torch.stack([loc["net.weight"].squeeze(), loc["net.bias"].squeeze()]).double()
        assert ((loc - mean).abs() < 0.2 * sd).all()
    assert found.num_draws == 300


def test_labels_are_rehearsed():
    model, x, y = line(likelihood=pb.likelihoods.Bernoulli())
    labels = (y > 0).float()
    svi = pb.SVI(num_steps=20, compile=False)
    worlds = svi.fit(model, x, labels)
    found = pb.rehearse(svi, model, x, labels, num_worlds=3, num_draws=50, worlds=worlds)
    assert len(found.coverage) == 12 and found.worlds == "SVI"


def test_false_alarms_of_right_intervals_are_rare():
    g = torch.Generator().manual_seed(0)
    dependent = (
        torch.rand(2000, 100, 1, 1, generator=g).expand(-1, -1, 4, 1) < 0.9
    )  # the points of a world hold alike
    alarms = sum(_coverage("f", "gap", 0.9, held).verdict != "ok" for held in dependent)
    assert alarms / 2000 < 0.05 / 6  # six intervals of 90 % in a rehearsal


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mean_field_is_condemned_and_nuts_passed_in_the_gap():
    data = pb.data.gap(60)
    prior = pb.priors.FanInNormal(2.0)
    likelihood = pb.likelihoods.HomoskedasticGaussian(0.4)
    model = pb.BNN(pb.networks.mlp(1, (5,), seed=0), prior, likelihood)
    nuts = pb.NUTS(num_chains=2, num_warmup=300)
    worlds = pb.NUTS(num_warmup=400).fit(model, data.x, data.y, num_draws=300, seed=5)
    found = pb.rehearse(nuts, model, data.x, data.y, num_worlds=20, num_draws=300, worlds=worlds)
    assert found.ok, str(found)
    found = pb.rehearse(pb.SVI(num_steps=3000), model, data.x, data.y, num_worlds=20, num_draws=400)
    assert found.worlds == "NUTS" and not found.ok, str(found)


def healthy(seed, bias=True):
    """A linear model of which Laplace is exact, its data, and the posterior; without a bias mean field is exact too."""
    g = torch.Generator().manual_seed(seed)
    num = int(torch.randint(8, 60, (), generator=g))
    dim = int(torch.randint(1, 4, (), generator=g)) if bias else 1
    noise = 0.2 + 0.8 * float(torch.rand((), generator=g))
    scale = 0.5 + 2.0 * float(torch.rand((), generator=g))
    x = torch.randn(num, dim, generator=g)
    y = scale * x @ torch.randn(dim, 1, generator=g) + noise * torch.randn(num, 1, generator=g)
    with seeded(seed):
        net = torch.nn.Linear(dim, 1, bias=bias)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, scale))
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(noise))
    return (
        model,
        x,
        y,
        pb.Laplace(num_steps=200, compile=False).fit(model, x, y, num_draws=2000, seed=seed),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_of_forty_healthy_cases_two_at_most_are_condemned():
    methods = {
        "Laplace": pb.Laplace(map=pb.MAP(num_steps=400, lr=0.05, compile=False)),
        "SVI": pb.SVI(num_steps=600, lr=0.03, compile=False),
        "NUTS": pb.NUTS(num_chains=2, num_warmup=100, max_tree_depth=4, compile=False),
    }
    alarms = {}
    for case in range(40):
        name = (
            "NUTS" if case % 10 == 9 else "SVI" if case % 5 == 3 else "Laplace"
        )  # NUTS takes longest
        model, x, y, exact = healthy(case, bias=name != "SVI")
        draws = 200 if name == "NUTS" else 500
        found = pb.rehearse(
            methods[name], model, x, y, num_worlds=25, num_draws=draws, worlds=exact, seed=case
        )
        if not found.ok:
            alarms[case, name] = str(found)
    assert len(alarms) <= 2, alarms


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_search_that_stops_short_of_the_modes_condemns_no_laplace():
    model, x, y, exact = healthy(0)
    short = pb.Laplace(
        num_steps=40, compile=False
    )  # L-BFGS ends at the mode in the method's own fit
    found = pb.rehearse(short, model, x, y, num_worlds=20, num_draws=300, worlds=exact)
    assert found.ok, str(found)


def test_workers_find_what_one_process_finds():
    model, x, y = line()
    arguments = {"num_worlds": 6, "num_draws": 50, "seed": 3}
    here = pb.rehearse(Shrunk(), model, x, y, **arguments)
    with ThreadPoolExecutor(2) as workers:
        there = pb.rehearse(Shrunk(), model, x, y, workers=workers, **arguments)
    assert there.coverage == here.coverage
