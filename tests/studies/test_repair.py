"""pb.repair: a sick fit is fitted again, step by step, and never called cured while a check fails."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrobnn as pb
from pyrobnn.diagnostics.verdict import Check
from pyrobnn.model import Density
from pyrobnn.studies import repair as repairs
from pyrobnn.studies.repair import hierarchical_sites


def funnel(x, y):
    v = pyro.sample("v", dist.Normal(0.0, 3.0))
    pyro.sample("z", dist.Normal(torch.zeros(3), torch.exp(v / 2)).to_event(1))


def line(x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)


def two_modes(x, y):
    modes = dist.Normal(torch.tensor([-9.0, 9.0]), 0.5)
    pyro.sample("where", dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.3, 0.7])), modes))


def groups(x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(mean, 1.0))
    with pyro.plate("group", 4):
        pyro.sample("effect", dist.StudentT(4.0, mean, 1.0))
    pyro.sample("slopes", dist.Normal(torch.zeros(2), scale).to_event(1))
    pyro.sample("free", dist.Normal(0.0, 1.0))


@pytest.fixture(scope="module")
def healthy():
    return pb.NUTS(compile=False).fit(line, None, torch.ones(3), num_draws=400)


def test_of_a_healthy_fit_no_step_is_taken(healthy):
    same = pb.repair(healthy)
    record = same.meta["repair"]
    assert record["tried"] == [] and record["wrong"] == [] and record["cured_by"] is None
    assert same.draws["mean"] is healthy.draws["mean"]
    assert same.meta["warnings"] == healthy.meta["warnings"]


def test_sites_that_can_be_non_centred_are_of_location_and_scale_on_the_reals():
    assert hierarchical_sites(Density(groups, (None, None), points="held")) == ["effect", "slopes"]


def test_the_sites_that_the_verdict_names_go_first():
    slow = Check("rhat_function", "fail", "draws", 1.2, 1.01, numbers={"where": "effect[3]"})
    assert repairs._chosen(["effect", "slopes"], [slow]) == ["effect"]
    other = Check("rhat_function", "fail", "draws", 1.2, 1.01, numbers={"where": "scale"})
    assert repairs._chosen(["effect", "slopes"], [other]) == ["effect", "slopes"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_funnel_is_cured_by_other_coordinates_and_keeps_its_sites():
    sick = pb.NUTS(num_warmup=60, compile=False).fit(funnel, num_draws=200)
    mended = pb.repair(sick, seconds=300)
    assert mended.meta["repair"]["cured_by"] == "non_centred"
    assert {"v", "z"} == set(mended.draws) and mended.draws["z"].shape[2:] == (3,)
    # at least 400 effective draws: the sd is known to 4 %
    assert float(mended.draws["v"].std()) == pytest.approx(3.0, rel=0.15)
    assert mended.meta["non_centred"] == ["z"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_modes_get_their_weights_from_smc():
    sick = pb.NUTS(num_warmup=100, compile=False).fit(two_modes, num_draws=200)
    mended = pb.repair(sick, seconds=300)
    assert mended.meta["repair"]["cured_by"] == "tempered"
    share = float((mended.draws["where"] > 0).double().mean())
    assert share == pytest.approx(0.7, abs=0.08)


@pytest.mark.filterwarnings("ignore:the")
def test_where_nothing_helps_the_posterior_comes_back_with_a_warning(monkeypatch):
    sick = pb.NUTS(num_warmup=20, compile=False).fit(two_modes, num_draws=100)

    def no_help(case, seconds):
        return case.posterior

    def no_start(case, seconds):
        raise ValueError("no start\nfound")

    monkeypatch.setattr(repairs, "LADDER", (no_help, no_start, no_help))
    with pytest.warns(UserWarning, match=r"nothing that repair tried .*\(no_help, no_help\)"):
        same = pb.repair(sick)
    record = same.meta["repair"]
    assert record["cured_by"] is None and len(record["tried"]) == 2
    assert record["refused"] == {"no_start": "ValueError: no start"}
    assert record["tried"][0]["wrong"] == record["wrong"] != []
    assert same.draws["where"] is sick.draws["where"]
    assert same.meta["findings"][-1]["code"] == "not_repaired"


def test_what_cannot_be_repaired_is_refused(healthy):
    with pytest.raises(TypeError, match="'posterior'"):
        pb.repair(healthy.draws)
    with pytest.raises(ValueError, match="'seconds'"):
        pb.repair(healthy, seconds=0.0)

    def with_data(x, y):
        line(None, y["y"])

    fit = pb.NUTS(num_warmup=20, num_chains=2, compile=False).fit(
        with_data, None, {"y": torch.ones(3)}, num_draws=20
    )
    with pytest.raises(pb.Refused, match=r"repair\(posterior, x=x, y=y\)"):
        pb.repair(fit)
