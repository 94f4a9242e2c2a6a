"""What only a real GPU can show, and as much of it as can be shown without one.

The tests of the marker ``cuda`` run on a machine that has one (``make gpu``); beside each stands the same test on the
CPU, or with a stand-in for the one call that needs the driver.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from models import normal_prior, toy_net
from test_contract import METHODS, ONE_DRAW, X, Y, gaussian, num_draws

import pyrobnn as pb
from pyrobnn.core import memory
from pyrobnn.core.checks import check_device
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.hmc.machine import Machine
from pyrobnn.inference.hmc.run import Run
from pyrobnn.inference.hmc.run_state import Chains
from pyrobnn.inference.hmc.stepper import Stepper, replayed
from pyrobnn.model.compile import CudaGraph, compiled

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # fits this short are told so
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
COMPILED = [(False, "cpu"), pytest.param((True, "cuda"), marks=pytest.mark.cuda)]


def model_of(dtype: torch.dtype) -> pb.BNN:
    return pb.BNN(toy_net().to(dtype), normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.2))


class Replays:
    """A CUDA graph without CUDA: as it does, it runs the function before the capture and reads static memory."""

    def __init__(self, fn, *buffers, warmup=2):
        self.fn = fn
        self.buffers = buffers
        for _ in range(warmup):
            fn(*buffers)

    def replay(self):
        self.fn(*self.buffers)


class Waits(Replays):
    def __init__(self, fn, *buffers):
        super().__init__(fn, *buffers)
        raise RuntimeError("called a synchronizing CUDA operation\nand more")


def run_of() -> tuple[Run, Chains]:
    problem = prepare(gaussian(), X, Y, points="held")
    gradient = torch.func.vmap(torch.func.grad_and_value(problem.density.log_joint))
    machine = Machine(gradient, 2, problem.density.dim, 30, torch.float32, torch.device("cpu"), 2)
    run = Run(machine=machine, seed=1, num_warmup=20, compile=False)
    return run, run.begin(problem.density.sample_prior(2, seed=0))


@pytest.mark.parametrize("graph", [Replays, Waits])
def test_replays_of_the_step_draw_what_the_step_draws(graph, monkeypatch):
    """Through all phases of a warm-up, each of which hands over another state and metric."""
    monkeypatch.setattr("pyrobnn.inference.hmc.stepper.CudaGraph", graph)
    with torch.no_grad():
        plain, chains = run_of()
        expected = plain.sample(chains, plain.prepare(chains), 4)
        run, chains = run_of()
        if graph is Replays:
            advance = replayed(run.machine.step, chains, run.keys)
            stepper = Stepper(advance, 0.0, "inductor")
        else:
            # the calls before the capture have left nothing behind
            with pytest.raises(RuntimeError, match="synchronizing"):
                replayed(run.machine.step, chains, run.keys)
            stepper = run.prepare(chains)
        found = run.sample(chains, stepper, 4)
    torch.testing.assert_close(found.z, expected.z, rtol=0, atol=0)
    torch.testing.assert_close(found.stats, expected.stats, rtol=0, atol=0)


def test_a_step_that_cannot_be_captured_is_told(monkeypatch):
    prepare_run = Run.prepare

    def uncaptured(run, *arguments):
        # the name of what was done is enough
        stepper = prepare_run(dataclasses.replace(run, compile=False), *arguments)
        mode = "captured in a CUDA graph (RuntimeError: it waits)"
        return dataclasses.replace(stepper, mode=mode)

    monkeypatch.setattr(Run, "prepare", uncaptured)
    told: list[str] = []
    monkeypatch.setattr(
        "pyrobnn.inference.nuts.launches", lambda device, why: told.append(why) or []
    )
    dataclasses.replace(METHODS["NUTS"], compile=True).fit(gaussian(), X[:4], Y[:4], num_draws=4)
    assert told == ["the step could not be captured in a CUDA graph (RuntimeError: it waits)"]


def test_a_device_has_its_number(monkeypatch):
    """A tensor says cuda:0; a device without number is equal to none of them."""
    for name, found in {"is_available": True, "device_count": 3, "current_device": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    assert check_device("cuda") == torch.device("cuda", 2) and check_device("cuda:1").index == 1


def test_memory_that_torch_keeps_for_later_is_free(monkeypatch):
    for name, found in {
        "mem_get_info": (100, 1000),
        "memory_reserved": 700,
        "memory_allocated": 300,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert memory.free_bytes(torch.device("cuda")) == 100 + 400


# -- on a GPU, and on the CPU as far as that goes --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", COMPILED)
def test_the_first_draws_are_those_of_the_eager_step(how, dtype):
    """Random numbers are functions of seed, chain and transition: no generator can make the two differ."""
    compile, device = how
    x = X.to(dtype)
    y = Y.to(dtype)
    few = {"num_draws": 4, "seed": 3, "device": device}
    method = pb.NUTS(num_chains=3, num_warmup=0, step_size=0.01, max_tree_depth=3, compile=compile)
    found = method.fit(model_of(dtype), x, y, **few)
    eager = dataclasses.replace(method, compile=False).fit(model_of(dtype), x, y, **few)
    tol = 1e-3 if dtype == torch.float32 else 1e-8
    for name, value in found.draws.items():
        assert value.dtype == dtype and value.device.type == device
        torch.testing.assert_close(value[:, :2], eager.draws[name][:, :2], rtol=tol, atol=tol)
    told = [note for note in found.meta["warnings"] if "could not be" in note]
    assert told == []


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in METHODS if name != "NUTS-pyro"])
def test_every_method_compiles_for_a_gpu(name):
    search = {"map": None, "num_steps": 50} if name.startswith("Laplace") else {}
    method = dataclasses.replace(METHODS[name], compile=True, **search)
    posterior = method.fit(gaussian(), X, Y, seed=3, device="cuda", **num_draws(name))
    assert {value.device.type for value in posterior.draws.values()} == {"cuda"}
    assert all(bool(value.isfinite().all()) for value in posterior.draws.values())
    assert [note for note in posterior.meta["warnings"] if "launches every operation" in note] == []


@pytest.mark.cuda
def test_a_graph_replays_what_it_captured_and_refuses_what_waits():
    x = torch.arange(4.0, device="cuda")
    total = torch.zeros(4, device="cuda")
    step = compiled(lambda x, total: (total.add_(x.sin()), ())[1], x, total)
    graph = CudaGraph(step, x, total)
    total.zero_()
    graph.replay()
    graph.replay()
    torch.testing.assert_close(total, 2 * x.sin())
    with pytest.raises(RuntimeError, match="synchroniz"):
        CudaGraph(lambda x: float(x.sum()), x)
    with torch.random.fork_rng():
        torch.rand(3, device="cuda")  # the generator is not left in a capture that failed


@pytest.mark.parametrize("there", DEVICES)
@pytest.mark.parametrize("name", ["NUTS", "SVI", "MAP"])
def test_a_saved_posterior_is_read_on_another_device(name, there, tmp_path):
    model = gaussian()
    posterior = METHODS[name].fit(model, X, Y, seed=3, device=there, **num_draws(name))
    path = posterior.save(tmp_path / "p.nc")
    for device in dict.fromkeys(("cpu", there)):
        again = pb.Posterior.load(path, model.to(check_device(device)))
        assert {value.device.type for value in again.draws.values()} == {device}
        torch.testing.assert_close(again.predict(X).mean.cpu(), posterior.predict(X).mean.cpu())
    assert name in ONE_DRAW or again.num_draws == 6
