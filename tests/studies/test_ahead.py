"""Jobs that a second process does ahead, and the first steps of fits among them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models import normal_prior, toy, toy_net
from test_contract import METHODS, one_of_each_kind

import pyrobnn as pb
from pyrobnn.core import ahead
from pyrobnn.core.ahead import done_ahead
from pyrobnn.studies import compare
from pyrobnn.studies.compare import run_study
from pyrobnn.studies.study import make_study

#: for a process to start and do what takes no time
LONG = 60.0


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(ahead, "num_cores", lambda: 2)


def wait_until(condition) -> None:
    end = time.monotonic() + LONG
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def slow_copy(source: Path, target: Path):
    """A job that writes ``target`` as soon as ``source`` is there, pickled by name."""
    program = (
        "import pathlib, sys, time\n"
        "source, target = map(pathlib.Path, sys.argv[1:])\n"
        "while not source.exists(): time.sleep(.01)\n"
        "time.sleep(.2)\n"
        "target.write_text('done')\n"
    )
    words = [sys.executable, "-c", program, str(source), str(target)]
    return functools.partial(subprocess.run, words)


def test_a_job_under_way_is_waited_for_and_one_not_begun_is_left_out(tmp_path):
    go, first, second = (tmp_path / name for name in ("go", "first", "second"))
    begun = tmp_path / "begun"
    jobs = {
        "mark": functools.partial(begun.write_text, "begun"),
        "first": slow_copy(go, first),
        "second": functools.partial(second.write_text, "done"),
        "third": functools.partial((tmp_path / "third").write_text, "done"),
    }
    with done_ahead(jobs) as second_process:
        wait_until(begun.exists)
        second_process.wait_for("second")  # which has not been begun
        go.write_text("go")
        wait_until(lambda: second_process._underway == "first" or first.exists())
        second_process.wait_for("first")
        assert first.exists()
        wait_until((tmp_path / "third").exists)
    assert not second.exists()


def test_what_fails_or_ends_the_process_keeps_nobody_waiting(tmp_path):
    after = tmp_path / "after"
    jobs = {
        "fails": functools.partial(int, "no number"),
        "after": functools.partial(after.write_text, "done"),
        "ends": functools.partial(os._exit, 1),
        "never": functools.partial((tmp_path / "never").write_text, "done"),
    }
    with done_ahead(jobs) as second_process:
        wait_until(after.exists)
        for name in jobs:
            second_process.wait_for(name)
    assert not (tmp_path / "never").exists()


def test_a_job_ends_with_the_context(tmp_path):
    began = time.monotonic()
    begun = tmp_path / "begun"
    jobs = {
        "mark": functools.partial(begun.write_text, "begun"),
        "long": functools.partial(time.sleep, 10 * LONG),
    }
    with done_ahead(jobs):
        wait_until(begun.exists)
    assert time.monotonic() - began < LONG


def test_a_job_that_takes_too_long_is_no_longer_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "_LONGEST_WAIT", 0.2)
    begun = tmp_path / "begun"
    jobs = {
        "mark": functools.partial(begun.write_text, "begun"),
        "long": functools.partial(time.sleep, 10 * LONG),
    }
    with done_ahead(jobs) as second_process:
        wait_until(begun.exists)
        wait_until(lambda: second_process._underway == "long")
        second_process.wait_for("long")
        assert second_process._underway == "long"


@pytest.mark.parametrize("cores", [1, 2])
def test_nothing_is_done_ahead_that_cannot_be(cores, monkeypatch):
    monkeypatch.setattr(ahead, "num_cores", lambda: cores)
    jobs = {"job": (lambda: None) if cores > 1 else functools.partial(int, 1)}
    with done_ahead(jobs) as second_process:
        second_process.wait_for("job")


# Pyro's own sampler calls nobody back
@pytest.mark.parametrize("name", one_of_each_kind(sorted(METHODS.keys() - {"NUTS-pyro"})))
def test_the_first_step_of_every_method_can_be_taken_alone(name):
    x, y = toy()
    model = pb.BNN(toy_net(), normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.3))
    method = METHODS[name]
    with pytest.raises(compare._Stepped):
        method.fit(model, x, y, callbacks=[compare._stop])


def test_a_study_compiles_ahead_for_its_later_methods_only(tmp_path, monkeypatch):
    jobs = {}

    def recorded(steps):
        jobs.update(steps)
        return done_ahead({})

    monkeypatch.setattr(compare, "done_ahead", recorded)
    study = make_study(pb.data.sinusoid(num_data=30), hidden=[4])
    prepared = {
        "first": (pb.MAP(num_steps=20), {}),
        "uncompiled": (pb.MLE(num_steps=20, compile=False), {}),
        "later": (pb.SVI(num_steps=20), {"num_draws": 10}),
    }
    assert list(dict(run_study(study, prepared, tmp_path, progress=False))) == [*prepared]
    assert list(jobs) == ["later"]
    jobs["later"]()
