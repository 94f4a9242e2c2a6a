"""Compiling ahead: another process leaves in the cache what the fits of a study will ask for."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from test_contract import X, Y

import pyrobnn as pb
from pyrobnn.compile import OnlyCompiled, only_compiling
from pyrobnn.core.checks import Refused
from pyrobnn.inference import ahead
from pyrobnn.studies import compare
from pyrobnn.studies.study import make_study

ROOT = Path(__file__).parents[2]


@pytest.fixture
def study():
    return make_study(pb.data.Dataset(X, Y, "toy", "regression"), hidden=[3])


@pytest.fixture
def compilations(monkeypatch) -> list[int]:
    """Number of arguments of every function that the compiler is handed; it compiles none of them."""
    seen: list[int] = []
    stub = lambda fn, inputs: (seen.append(len(inputs)), (fn, None, None))[1]  # noqa: E731
    monkeypatch.setattr("pyrobnn.compile.machine_code", stub)
    return seen


def test_a_fit_that_only_compiles_ends_before_its_first_step(study, compilations):
    with only_compiling(), pytest.raises(OnlyCompiled):
        pb.MAP().fit(study.model, X, Y, callbacks=[lambda *seen: pytest.fail("it took steps")])
    assert len(compilations) == 1


def test_of_two_processes_each_method_is_compiled_by_one(study, compilations, monkeypatch):
    monkeypatch.setattr(ahead.subprocess, "Popen", _Idle)
    broken = types.SimpleNamespace(compile=True)
    methods = {"broken": (broken, {}), "map": (pb.MAP(), {}), "svi": (pb.SVI(), {"num_draws": 3})}
    methods["mle"] = (pb.MLE(num_steps=2, compile=False), {})
    with ahead.Ahead(study.model, X, Y, methods, seed=0) as others:
        others.wait("svi")  # this process is there first
        ahead.main(others._path)
        assert len(compilations) == 1  # of MAP: the broken one is left to its fit
        assert not (others._path / "mle").exists()  # which compiles nothing: to run it would be in vain
        for name in ("map", "broken", "unknown"):
            others.wait(name)
    assert not others._path.exists()


class _Idle:
    def __init__(self, *args, **options): ...

    def poll(self): ...

    def terminate(self): ...

    def wait(self): ...


@pytest.mark.parametrize("case, order", [("two cores", "nuts svi map"), ("alone", "svi map nuts")])
def test_a_run_takes_the_chains_first_and_has_the_others_compiled(case, order, study, monkeypatch, tmp_path):
    begun, waited, asked = [], [], []

    class Ahead(_Idle):
        def __init__(self, model, x, y, methods, seed):
            asked.extend(methods)

        def __enter__(self):
            return self

        def __exit__(self, *error): ...

        def wait(self, name):
            waited.append(name)

    def fitted(name, *rest):
        begun.append(name)
        raise Refused("not now")

    monkeypatch.setattr(compare, "Ahead", Ahead)
    monkeypatch.setattr(compare, "_fitted", fitted)
    monkeypatch.setattr(compare, "cores", lambda: 1 if case == "alone" else 2)
    prepared = {"svi": (pb.SVI(), {}), "map": (pb.MAP(), {}), "nuts": (pb.NUTS(), {})}
    found = compare.run_study(study, prepared, tmp_path, progress=False)
    assert " ".join(name for name, _ in found) == " ".join(begun) == order
    assert (asked, waited) == ((["svi", "map"], begun) if case == "two cores" else ([], []))


SCRIPT = """
import sys, time, torch
from pathlib import Path
import pyrobnn as pb
from pyrobnn.inference.ahead import Ahead
from pyrobnn.studies.study import make_study
from torch._dynamo.utils import counters

x = torch.linspace(-1, 1, 30)[:, None]
study = make_study(pb.data.Dataset(x, x.sin(), "toy", "regression"), hidden=[3])
method = pb.MAP(num_steps=20, polish_steps=0)
with Ahead(study.model, x, study.train.y, {"map": (method, {})}, seed=0) as others:
    while not (others._path / "map").exists():
        time.sleep(0.05)
    others.wait("map")
    method.fit(study.model, study.train.x, study.train.y, seed=0)
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_what_another_process_compiled_is_found(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-2:] == ["1", "0"]
