"""The contract: every method obeys every law. Adding a method is one line in METHODS."""

from __future__ import annotations

import copy
import dataclasses

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior, toy, toy_net

import pyrobnn as pb
from pyrobnn.inference.fitting import problem
from pyrobnn.inference.vi import guide_fit as guides

# runs this short are told to be too short, as they should
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode"
)

# small enough that a fit takes half a second without a compiler
MODE = pb.MAP(num_steps=20, polish_steps=100, compile=False)
METHODS = {
    "MLE": pb.MLE(num_steps=20, compile=False),
    "MAP": pb.MAP(num_steps=20, polish_steps=10, compile=False),
    "DeepEnsemble": pb.DeepEnsemble(num_members=3, num_steps=20, compile=False),
    "SVI": pb.SVI(num_steps=20, compile=False),
    "SVI-low-rank": pb.SVI(guide="low_rank", num_steps=20, compile=False),
    "NUTS": pb.NUTS(num_chains=2, num_warmup=10, max_tree_depth=3, compile=False),
    "NUTS-pyro": pb.NUTS(
        num_chains=1, num_warmup=5, max_tree_depth=2, engine="pyro", compile=False
    ),
    "SGLD": pb.SGLD(num_chains=2, num_warmup=13, init_steps=20, compile=False),
    "SGHMC": pb.SGHMC(num_chains=2, num_warmup=10, init_steps=20, compile=False),
    "Laplace": pb.Laplace(map=MODE, compile=False),
    "Laplace-last-layer": pb.Laplace(subset="last_layer", map=MODE, compile=False),
    "Laplace-kron": pb.Laplace(structure="kron", map=MODE, compile=False),
    "Laplace-draws": pb.Laplace(predictive="draws", map=MODE, compile=False),
    "SWA": pb.SWA(num_steps=20, lr=1e-3, compile=False),
    "SWAG": pb.SWAG(rank=3, num_steps=20, lr=1e-3, compile=False),
    "MCDropout": pb.MCDropout(p=0.1, num_steps=20, compile=False),
    "SMC": pb.SMC(
        num_particles=8, num_islands=2, max_leapfrogs=2, max_moves=2, ess=0.5, compile=False
    ),
}
#: which infer all there is: a value without a prior is refused
NO_POINTS = {"SMC"}
#: one of each kind: the others share its code, and run with the slow tests where a law takes many fits
REPRESENTATIVES = {
    "MAP",
    "DeepEnsemble",
    "SVI",
    "NUTS",
    "SGLD",
    "Laplace",
    "SWAG",
    "MCDropout",
} | NO_POINTS
#: one of each way to fit, where a law takes longer still
FEW = {"MAP", "SVI", "NUTS", "SGLD", "Laplace", "SMC"}
ONE_DRAW = {name for name, method in METHODS.items() if method.kind == "point"}
WITH_Q = {name for name, method in METHODS.items() if method.has_density}
X, Y = toy()
FITTED: dict[tuple[str, str], pb.Posterior] = {}


def gaussian(scale=0.2) -> pb.BNN:
    return pb.BNN(toy_net(), normal_prior(), pb.likelihoods.HomoskedasticGaussian(scale))


MODELS = {
    "fixed": lambda: (gaussian(), Y),
    "inferred": lambda: (gaussian(dist.HalfNormal(1.0)), Y),
    "heteroskedastic": lambda: (
        pb.BNN(toy_net(out=2), normal_prior(), pb.likelihoods.HeteroskedasticGaussian()),
        Y,
    ),
    "classes": lambda: (
        pb.BNN(toy_net(out=3), normal_prior(), pb.likelihoods.Categorical()),
        (X[:, 0] > -1).long() + (X[:, 0] > 1).long(),
    ),
}


def one_of_each_kind(names=METHODS, fast=REPRESENTATIVES) -> list:
    """The names of methods, those that are no representatives as slow cases."""
    return [pytest.param(name, marks=[] if name in fast else [pytest.mark.slow]) for name in names]


def num_draws(name: str) -> dict[str, int]:
    return {} if name in ONE_DRAW or name == "DeepEnsemble" else {"num_draws": 6}


def fit(name: str, kind: str = "fixed") -> pb.Posterior:
    if (name, kind) not in FITTED:
        model, y = MODELS[kind]()
        FITTED[name, kind] = METHODS[name].fit(model, X, y, seed=3, **num_draws(name))
    return FITTED[name, kind]


@pytest.mark.parametrize("name", METHODS)
def test_draws_have_the_sites_shapes_and_are_finite(name, kind="fixed"):
    posterior = fit(name, kind)
    model = posterior.model
    shape = (posterior.num_chains, posterior.num_draws)
    for site, prior in model.priors.items():
        assert posterior.draws[site].shape == (*shape, *prior.shape())
    for values in (*posterior.draws.values(), *posterior.sample_stats.values()):
        assert values.shape[:2] == shape and bool(torch.isfinite(values).all())
    f = posterior.predict(X).f
    assert f.shape[:3] == (*shape, len(X)) and bool(torch.isfinite(f).all())
    if METHODS[name].kind == "point":
        assert shape == (1, 1)


@pytest.mark.parametrize("kind", ["inferred", "heteroskedastic", "classes"])
@pytest.mark.parametrize("name", one_of_each_kind())
def test_draws_of_other_likelihoods_have_the_sites_shapes_and_are_finite(name, kind):
    test_draws_have_the_sites_shapes_and_are_finite(name, kind)


def another(name: str) -> pb.Posterior:
    """With another seed, of a net, a model and data that stay as they were."""
    if (name, "another seed") not in FITTED:
        net = toy_net()
        model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.2))
        x = X.clone()
        y = Y.clone()
        before = copy.deepcopy(net.state_dict()), copy.deepcopy(model.net.state_dict())
        FITTED[name, "another seed"] = METHODS[name].fit(model, x, y, seed=4, **num_draws(name))
        for module, state in zip((net, model.net), before):
            assert type(module) is torch.nn.Sequential
            for key, value in module.state_dict().items():
                assert torch.equal(value, state[key])
        assert torch.equal(x, X) and torch.equal(y, Y)
    return FITTED[name, "another seed"]


@pytest.mark.parametrize("name", one_of_each_kind())
def test_the_net_the_model_and_the_data_stay_as_they_were(name):
    assert another(name).num_draws == fit(name).num_draws


@pytest.mark.parametrize("name", one_of_each_kind(sorted(METHODS.keys() - ONE_DRAW)))
def test_another_seed_other_draws(name):
    other = another(name)
    assert any(not torch.equal(other.draws[site], draws) for site, draws in fit(name).draws.items())


@pytest.mark.parametrize("name", one_of_each_kind())
def test_round_trip_through_netcdf(name, tmp_path):
    posterior = fit(name, "inferred")
    again = pb.Posterior.load(posterior.save(tmp_path / "p.nc"), posterior.model)
    for values, loaded in (
        (posterior.draws, again.draws),
        (posterior.sample_stats, again.sample_stats),
    ):
        assert values.keys() == loaded.keys()
        assert all(torch.equal(values[key], loaded[key]) for key in values)
    assert again.meta == posterior.meta and again.log_evidence == posterior.log_evidence
    torch.testing.assert_close(again.predict(X).mean, posterior.predict(X).mean)
    torch.testing.assert_close(again.predict(X).var, posterior.predict(X).var)
    if METHODS[name].has_density:
        torch.testing.assert_close(again.log_q(), posterior.log_q(), rtol=1e-5, atol=1e-5)


class Shared(torch.nn.Module):
    """A net with one layer in two places and one weight in two layers, after a layer that is frozen."""

    def __init__(self):
        super().__init__()
        with seeded(0):
            self.trunk = torch.nn.Linear(1, 2)
            self.one = torch.nn.Linear(2, 2)
            self.end = torch.nn.Linear(2, 1)
            self.tied = torch.nn.Linear(2, 2)
        self.again = self.one
        self.tied.weight = self.one.weight
        self.trunk.requires_grad_(False)

    def forward(self, x):
        return self.end(self.tied(self.again(self.one(self.trunk(x).tanh()).tanh()).tanh()).tanh())


@pytest.mark.usefixtures("few_moves")
@pytest.mark.filterwarnings(
    "ignore:.*(point parameters|standard deviations|the optimisation stopped)"
)
@pytest.mark.parametrize("name", one_of_each_kind(fast={"MAP", "Laplace", "SWAG", "MCDropout"}))
def test_shared_tied_and_frozen_parameters(name, tmp_path):
    """One site a tensor, the net in its place after each call, and what is frozen where it was."""
    net = Shared()
    free = [] if name in NO_POINTS else ["trunk.weight", "trunk.bias"]
    model = pb.BNN(
        net,
        pb.priors.IIDPrior(dist.Normal(0.0, 1.0), hide=free),
        pb.likelihoods.HomoskedasticGaussian(0.2),
    )
    assert {site.removeprefix("net.") for site in model.priors} == {
        n for n, _ in net.named_parameters()
    } - {*free}
    if name in (
        "Laplace-kron",
        "MCDropout",
    ):  # a Kronecker product, or a mask, of a weight in two places
        with pytest.raises(pb.Refused, match="used elsewhere|shares its weight"):
            METHODS[name].fit(model, X, Y, **num_draws(name))
        return
    first, again = (METHODS[name].fit(model, X, Y, seed=3, **num_draws(name)) for _ in range(2))
    assert all(torch.equal(first.draws[site], again.draws[site]) for site in first.draws)
    for site in free:
        held = net.get_parameter(site)
        assert torch.equal(first.draws[f"net.{site}"], held.expand_as(first.draws[f"net.{site}"]))
    assert first.to_datatree(X, Y).log_likelihood.sizes["draw"] == first.num_draws
    loaded = pb.Posterior.load(first.save(tmp_path / "p.nc"), model)
    torch.testing.assert_close(loaded.predict(X).f, first.predict(X).f)


@pytest.mark.usefixtures("few_moves")
@pytest.mark.parametrize("name", one_of_each_kind())
def test_trees_are_diagnosed_and_say_how_they_were_made(name):
    posterior = fit(name, "inferred")
    tree = posterior.to_datatree(X, Y, test=(X[:5], Y[:5]))
    assert tree.attrs["method"] == type(METHODS[name]).__name__ and tree.attrs["seed"] == 3
    verdict = pb.diagnose(tree)
    assert verdict.method == type(METHODS[name]).__name__ and verdict.summary
    assert {check.question for check in verdict.checks if check.decides} == {"draws", "model"}
    independent = bool(posterior.meta["iid"])
    assert independent == (METHODS[name].kind != "chains")
    assert tree.attrs["kind"] == METHODS[name].kind and tree.attrs["claim"] == METHODS[name].claim
    if independent:
        assert not any("rhat" in check.name and check.status != "info" for check in verdict.checks)


@pytest.mark.usefixtures("few_moves")
@pytest.mark.parametrize("name", one_of_each_kind())
def test_the_same_seed_has_the_same_draws_and_a_fit_spends_nothing_on_judging_them(
    name, monkeypatch
):
    """A pass over the data per draw is made when a statistic is first asked for, once, and not by predictions."""
    asked = []
    for module, function in ((problem, "log_importance"), (guides, "importance_stats")):
        weigh = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *args, weigh=weigh: asked.append(1) or weigh(*args)
        )
    posterior = METHODS[name].fit(gaussian(), X, Y, seed=3, **num_draws(name))
    torch.testing.assert_close(posterior.draws, fit(name).draws, rtol=0, atol=0)
    posterior.predict(X, num_draws=1)
    assert not asked
    stats = posterior.sample_stats
    assert ({"log_p", "log_q"} <= set(stats)) == METHODS[name].has_density == bool(asked)
    posterior.to_datatree(X, Y)
    assert len(asked) <= 1


@pytest.mark.parametrize("name", METHODS)
def test_approximations_have_a_density_and_a_guide(name):
    posterior = fit(name)
    if not METHODS[name].has_density:
        assert posterior.guide is None
        with pytest.raises(ValueError, match="no approximate density"):
            posterior.log_q()
        return
    assert posterior.log_q().shape == (1, 6)
    assert {"log_p", "log_q"} <= set(posterior.sample_stats)
    torch.testing.assert_close(
        posterior.sample_stats["log_q"], posterior.log_q().double(), rtol=1e-4, atol=1e-2
    )
    with torch.random.fork_rng():
        samples = pyro.infer.Predictive(posterior.model, guide=posterior.guide, num_samples=3)(X)
    assert samples["likelihood.data"].shape[:2] == (3, len(X))


@pytest.mark.parametrize("name", METHODS)
def test_bad_input_is_refused(name):
    method = METHODS[name]
    model, _ = MODELS["fixed"]()
    with pytest.raises(ValueError, match="'x' holds 40 NaN"):
        method.fit(model, X * torch.nan, Y)
    with pytest.raises(ValueError, match="same number of rows"):
        method.fit(model, X, Y[:3])
    with pytest.raises(ValueError, match="'num_draws' must be"):
        method.fit(model, X, Y, num_draws=0)
    with pytest.raises(TypeError, match="'seed' must be an integer"):
        method.fit(model, X, Y, seed="0")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="CUDA devices"):
            method.fit(model, X, Y, device="cuda")
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.compile = True


@pytest.mark.parametrize("name", one_of_each_kind())
def test_one_prediction_for_all(name):
    posterior = fit(name, "inferred")
    p = posterior.predict(X)
    assert p.mean.shape == p.aleatoric_var.shape == p.epistemic_var.shape == p.var.shape == Y.shape
    assert bool((p.aleatoric_var > 0).all()) and bool((p.epistemic_var >= 0).all())
    torch.testing.assert_close(p.var, p.aleatoric_var + p.epistemic_var)
    assert p.log_prob(Y).shape == (len(X),)
    if METHODS[name].kind == "point":
        assert float(p.epistemic_var.max()) == 0.0


@pytest.mark.parametrize("name", one_of_each_kind(fast=FEW))
def test_a_loader_is_as_good_as_tensors(name):
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X, Y), batch_size=10, shuffle=True
    )
    model, _ = MODELS["fixed"]()
    posterior = METHODS[name].fit(model, loader, seed=3, **num_draws(name))
    assert posterior.meta["num_data"] == len(X)
