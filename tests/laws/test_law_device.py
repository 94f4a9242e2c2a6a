"""The law of the device: every method computes where it was asked to, with whatever was made on the CPU before.

It runs on a stand-in that refuses mixed devices as CUDA does, and that checks the device's random state; where there is
a GPU, on that too.
"""

from __future__ import annotations

import dataclasses

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import toy_net
from stand_in_device import CPU, stand_in_device
from test_contract import METHODS, MODELS, NO_POINTS, WITH_Q, gaussian, num_draws
from test_contract import X as ALL_X

import pyrobnn as pb
from pyrobnn.core.seeding import seeded
from pyrobnn.model.compile import Compiled

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # fits this short are told so
X = ALL_X[::3]


def everything() -> tuple[pb.BNN, torch.Tensor]:
    """A hidden bias, inferred noise and units of the data."""
    y = 10 * torch.sin(X)
    data = pb.data.Dataset(name="toy", task="regression", x=X, y=y, feature_names=("x",))
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, hide=["2.bias"])
    likelihood = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    return pb.BNN(toy_net(), prior, likelihood, standardizer=pb.data.Standardizer.fit(data)), y


def mixture() -> tuple[pb.BNN, torch.Tensor]:
    model = pb.BNN(toy_net(), pb.priors.ScaleMixture(), pb.likelihoods.HomoskedasticGaussian(0.2))
    return model, torch.sin(X)


def others(kind: str):
    def case() -> tuple[pb.BNN, torch.Tensor]:
        model, y = MODELS[kind]()
        return model, y[::3]

    return case


CASES = {
    "everything": everything,
    "learned": lambda: (gaussian("learned"), torch.sin(X)),
    "mixture": mixture,
    **{kind: others(kind) for kind in MODELS},
}
WITH_POINTS = ("everything", "learned")
FAST = {"everything": ("SVI", "MCDropout"), "learned": ("NUTS", "Laplace"), "inferred": ("SMC",)}


def pairs(*kinds: str):
    return [
        pytest.param(kind, name, marks=[] if name in FAST.get(kind, ()) else pytest.mark.slow)
        for kind in kinds
        for name in METHODS
        if kind not in WITH_POINTS or name not in NO_POINTS
    ]


def method_of(name: str):
    """The method of the contract with the shortest of searches."""
    method = METHODS[name]
    search = pb.MAP(num_steps=10, polish_steps=1, compile=False)
    if isinstance(method, pb.Laplace):
        return dataclasses.replace(method, map=search)
    short = {
        "num_steps": 5,
        "collect_every": 1,
        "init_steps": 5,
        "num_warmup": 4,
        "max_tree_depth": 2,
    }
    known = {field.name for field in dataclasses.fields(method)}
    return (
        search
        if name == "MAP"
        else dataclasses.replace(method, **{k: v for k, v in short.items() if k in known})
    )


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request, monkeypatch):
    """The stand-in, and a real GPU where there is one, with two kinds of models for every method."""
    if request.param == "cuda":
        asked = getattr(request.node, "callspec", None)
        kind = asked.params.get("kind", "everything") if asked else "everything"
        if kind not in ("everything", "classes") and asked.params.get("name") not in FAST.get(
            kind, ()
        ):
            pytest.skip("on the stand-in")
        before = torch.cuda.get_rng_state()
        yield torch.device("cuda", torch.cuda.current_device())
        assert torch.equal(before, torch.cuda.get_rng_state()), (
            "the GPU's random state was left changed"
        )
        return
    monkeypatch.setattr(
        "pyrobnn.inference.fitting.problem.check_device",
        lambda given: given and torch.device(given),
    )
    # an operation of the stand-in takes a hundred times what one of the CPU takes
    monkeypatch.setattr("pyrobnn.inference.point_methods._VALLEY_ROUNDS", 2)
    monkeypatch.setattr("pyrobnn.inference.point_methods._ROUNDS_TO_REST", 2)
    with stand_in_device() as device:
        yield device


@pytest.mark.usefixtures("few_moves")
@pytest.mark.covering(3)
@pytest.mark.parametrize(("kind", "name"), pairs(*CASES))
def test_a_fit_and_all_that_follows_is_on_the_device(kind, name, device, tmp_path):
    model, y = CASES[kind]()
    posterior = method_of(name).fit(model, X, y, seed=3, device=device, **num_draws(name))
    tensors = {**posterior.draws, **posterior.sample_stats}
    assert {n: value.device for n, value in tensors.items()} == dict.fromkeys(tensors, device)
    assert model.device == CPU and posterior.model.device == device
    f = posterior.predict(X).f
    assert f.device == device
    if name in WITH_Q:
        assert posterior.log_q().device == device
        with seeded(0, device), pyro.get_param_store().scope():
            pyro.infer.Predictive(posterior.model, guide=posterior.guide, num_samples=2)(
                X.to(device)
            )
    tree = posterior.to_datatree(X, y, test=(X[:5], y[:5]))
    verdicts = {name: pb.diagnose(tree)}
    path = posterior.save(tmp_path / "p.nc")
    for known in (model, posterior.model):  # on the CPU and on the device
        again = pb.Posterior.load(path, known)
        torch.testing.assert_close(again.predict(X).f.cpu(), f.cpu())
    if kind == "everything":
        pb.write_report({name: tree}, tmp_path / "report.html", verdicts=verdicts)


@pytest.mark.parametrize(("kind", "name"), pairs("everything"))
def test_what_was_made_on_the_other_device_comes_along(kind, name, device):
    """The model on the device and the data on the CPU, the data on the device, an ``init``, a loader."""
    model, y = CASES[kind]()
    method = method_of(name)
    few = num_draws(name)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=5)
    there = model.to(device)
    start = pb.MLE(num_steps=2, compile=False).fit(model, X, y)
    init = (
        {"init": start}
        if "init" in method.uses and name not in ("DeepEnsemble", "MCDropout")
        else {}
    )
    fits = [
        (method.fit(there, X, y, **few), CPU),  # where x is
        (method.fit(model, X.to(device), y, **few), device),
        (method.fit(model, loader, device=device, **few), device),
        (method.fit(model, X, y, device=device, **init, **few), device),
    ]
    for posterior, where in fits:
        assert {value.device for value in posterior.draws.values()} == {where}


@pytest.mark.slow
@pytest.mark.parametrize("there_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_on_the_other_device(there_first, device, tmp_path):
    model, y = everything()
    config = dataclasses.replace(method_of("NUTS"), checkpoint_every=0.0)
    places = [device, CPU] if there_first else [CPU, device]
    one, two = (
        config.fit(model, X, y, device=place, checkpoint=tmp_path / "c", num_draws=9)
        for place in places
    )
    assert [next(iter(each.draws.values())).device for each in (one, two)] == places
    for name, value in one.draws.items():
        torch.testing.assert_close(value.cpu(), two.draws[name].cpu())


def numbers(x, y):
    """A program as it is usually written: the priors of plain numbers are drawn on the CPU."""
    noise = pyro.param("noise", torch.tensor(0.5), constraint=dist.constraints.positive)
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    group = pyro.sample("group", dist.Normal(torch.zeros(3, device=x.device), 1.0).to_event(1))
    loc = pyro.deterministic("loc", mean + spread * group[(x[:, 0] > 0).long()])
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(loc, noise), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NUTS", "SVI", "MAP", "SGHMC"])
def test_a_program_of_plain_numbers_computes_where_its_data_are(name, device):
    y = torch.sin(X[:, 0])
    posterior = method_of(name).fit(numbers, X, y, seed=3, device=device, **num_draws(name))
    assert {n: value.device.type for n, value in posterior.draws.items()} == dict.fromkeys(
        ("mean", "spread", "group", "noise", "loc"), device.type
    )
    x = X.to(device)
    y = y.to(device)
    closed = method_of(name).fit(lambda *_: numbers(x, y), seed=3, **num_draws(name))
    assert closed.draws["mean"].device.type == device.type


def test_data_that_a_program_closes_over_do_not_move(device):
    with pytest.raises(ValueError, match="the tensors of the program are on cpu.*make them there"):
        METHODS["NUTS"].fit(lambda *_: numbers(X, X[:, 0]), device=device)


@pytest.mark.parametrize("mode", ["inductor", "graph"])
def test_a_step_that_is_not_compiled_is_told(mode, device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("what is not compiled is not captured: on the stand-in")
    monkeypatch.setattr(
        "pyrobnn.inference.hmc.stepper.compiled",
        lambda fn, *example, **options: Compiled(fn, mode, 0.0, example),
    )
    method = dataclasses.replace(method_of("NUTS"), compile=True)
    posterior = method.fit(gaussian(), X, torch.sin(X), device=device, num_draws=3)
    told = [note for note in posterior.meta["warnings"] if "launches every operation" in note]
    assert len(told) == (mode == "graph")
