"""``--help`` comes at once, a method costs little beside torch and Pyro: what one use needs, that use imports."""

from __future__ import annotations

import os
import pickle
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import pyrobnn as pb

ROOT = Path(__file__).parents[2]
#: libraries of reports, figures, trees, tables and tests of hypotheses, and what needs them
HEAVY = (
    "sklearn",
    "matplotlib",
    "pandas",
    "jinja2",
    "arviz_base",
    "arviz_stats",
    "arviz_plots",
    "xarray",
    "scipy",
)
#: of the time of ``import torch, pyro``
MOST = 1.15


def python(*arguments: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        # with bytecode, as installed
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def seconds(*arguments: str) -> float:
    """User CPU time of a fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    python(*arguments)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


STEPS = f"""
import contextlib, io, sys

def loaded(step):
    print(step, *sorted(set({HEAVY!r}) & set(sys.modules)))

import pyrobnn as pb
from pyrobnn.cli import main

def show_help(*commands):
    for command in commands:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
            main([*command.split(), "--help"])
        assert "usage: pyrobnn" in shown.getvalue(), command

show_help("", "predict", "report")
loaded("import, help")
assert set(sys.modules).isdisjoint(("torch", "pyro", "numpy"))
show_help("compare --methods nuts", "fit gap --method svi")
loaded("help of methods")
import torch
net, noise = pb.networks.mlp(1, (4,), seed=0), pb.likelihoods.HomoskedasticGaussian(0.1)
model = pb.BNN(net, pb.priors.FanInNormal(), noise)
x = torch.linspace(-1, 1, 20)[:, None]
method = pb.NUTS(num_chains=1, num_warmup=2, compile=False)
method.fit(model, x, x.square(), num_draws=2, progress=False).predict(x).mean
loaded("fit")
short = pb.MAP(num_steps=2, polish_steps=0, compile=False)
pb.BNNRegressor(short, hidden=(2,)).fit(x.numpy(), x[:, 0].square().numpy())
assert set(sys.modules).isdisjoint(("arviz_base", "matplotlib", "xarray"))
"""


def test_import_help_and_a_fit_bring_no_library_of_figures_tables_or_trees():
    assert python("-c", STEPS).splitlines() == ["import, help", "help of methods", "fit"]


@pytest.mark.slow
def test_time_beside_torch_and_pyro():
    commands = {
        "torch, pyro": ("-c", "import torch, pyro"),
        "pyrobnn": ("-c", "import pyrobnn; pyrobnn.NUTS"),
        "help of a method": ("-m", "pyrobnn", "compare", "--methods", "nuts", "--help"),
    }
    rounds = [{name: seconds(*command) for name, command in commands.items()} for _ in range(7)]
    median = {name: statistics.median(each[name] for each in rounds) for name in commands}
    ratios = {name: median[name] / median["torch, pyro"] for name in commands}
    assert max(ratios.values()) <= MOST, ratios


LATE = {
    "pyrobnn": (
        "BNNClassifier",
        "BNNRegressor",
        "plots",
        "report",
        "diagnostics",
        "diagnose",
        "Verdict",
        "to_datatree",
        "write_report",
        "write_summary",
    ),
    "pyrobnn.data": ("from_csv", "from_frame"),
}
FOUND = f"""
import importlib
import pyrobnn
for package, names in {LATE!r}.items():
    package = importlib.import_module(package)
    for name in names:
        assert name in dir(package), name
        value = getattr(package, name)
        assert value.__name__.rpartition(".")[2] == name, name
        assert vars(package)[name] is value, name
from pyrobnn import *
assert set(pyrobnn.__all__) <= set(globals())
assert diagnose is pyrobnn.diagnostics.diagnose
import pyrobnn.plots as wing
assert wing is plots is pyrobnn.plots
"""


@pytest.mark.slow
def test_late_names_are_found_in_each_way():
    python("-c", FOUND)


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(AttributeError, match="plotz"):
        pb.plotz  # noqa: B018


def test_a_late_class_is_pickled():
    assert pickle.loads(pickle.dumps(pb.Verdict)) is pb.Verdict
