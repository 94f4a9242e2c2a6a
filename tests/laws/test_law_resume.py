"""The law of checkpoints: a training that is killed and resumed gives the posterior of one that was not, to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior, toy_net
from test_contract import METHODS, MODELS, X, num_draws, one_of_each_kind
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.inference.fitting import checkpoints

#: Pyro's own engine has no checkpoints; NUTS has a law of its own, as it calls back at every look
NAMES = [name for name in METHODS if not name.startswith("NUTS")]


class Killed(RuntimeError):
    """What ends a fit here."""


class Kill:
    """A callback that ends the fit at its call of this number."""

    def __init__(self, number: int):
        self.number = number
        self.calls = 0

    def __call__(self, step, metrics):
        self.calls += 1
        if self.calls == self.number:
            raise Killed


def fit(method: pb.inference.method.Method, kind: str, **options) -> pb.Posterior:
    model, y = MODELS[kind]()
    with warnings.catch_warnings(action="ignore"):
        return method.fit(model, X, y, seed=3, **options)


def assert_same(posterior: pb.Posterior, other: pb.Posterior) -> None:
    assert posterior.draws.keys() == other.draws.keys()
    for site, draws in posterior.draws.items():
        assert torch.equal(draws, other.draws[site]), site
    for name, values in posterior.sample_stats.items():
        torch.testing.assert_close(values, other.sample_stats[name], rtol=0, atol=0, equal_nan=True)
    for name, values in posterior.history.items():
        torch.testing.assert_close(values, other.history[name], rtol=0, atol=0, equal_nan=True)
    assert posterior.log_evidence == other.log_evidence
    left_out = {"timings", "tier"}
    for name in posterior.meta.keys() - left_out:
        assert str(posterior.meta[name]) == str(other.meta[name]), name


def assert_resumes(
    whole,
    tmp_path: Path,
    moments: tuple[float, ...] = (0.1, 0.5, 1.0),
    repeated: int = 0,
) -> None:
    """``whole(**options)`` is a fit; it is killed at these shares of its calls back, and resumed.

    A method may call back ``repeated`` times from where it was killed.
    """
    count = Kill(0)
    expected = whole(callbacks=[count])
    for moment in moments:
        path = tmp_path / f"{moment}"
        with pytest.raises(Killed):
            whole(callbacks=[Kill(max(1, round(moment * count.calls)))], checkpoint=path)
        rest = Kill(0)
        assert_same(whole(callbacks=[rest], checkpoint=path), expected)
        before = max(1, round(moment * count.calls))
        assert 0 <= rest.calls - (count.calls - before) <= repeated
        # one that has ended is there at once
        done = Kill(0)
        assert_same(whole(callbacks=[done], checkpoint=path), expected)
        assert done.calls <= repeated


@pytest.mark.parametrize("name", one_of_each_kind(NAMES, {"MAP", "SVI", "SWAG", "SGLD", "SMC"}))
def test_killed_and_resumed_is_not_killed(name, tmp_path):
    def whole(**options):
        return fit(METHODS[name], "fixed", **num_draws(name), **options)

    # SMC asks whether there are draws enough before it makes more
    assert_resumes(whole, tmp_path, repeated=int(name == "SMC"))


BATCHES = {
    "MAP": pb.MAP(num_steps=30, batch_size=7, compile=False),
    "MLE with SGD": pb.MLE(
        num_steps=30,
        batch_size=7,
        optimizer=torch.optim.SGD,
        optimizer_options={"lr": 0.01, "momentum": 0.9},
        compile=False,
    ),
    "ensemble": pb.DeepEnsemble(num_members=3, num_steps=30, batch_size=7, compile=False),
    "SVI": pb.SVI(num_steps=80, batch_size=7, compile=False),
    "SVI of low rank": pb.SVI(guide="low_rank", num_steps=30, batch_size=7, compile=False),
    "flow": pb.SVI(guide="flow", num_steps=40, compile=False),
    "SWAG": pb.SWAG(num_steps=30, batch_size=7, collect_every=3, compile=False),
    "SWA with Adam": pb.SWA(num_steps=30, collect_every=3, optimizer="adam", compile=False),
    "SGLD": pb.SGLD(
        num_chains=2,
        num_warmup=40,
        batch_size=7,
        init_steps=20,
        preconditioner="rmsprop",
        compile=False,
    ),
    "dropout": pb.MCDropout(p=0.2, num_steps=30, batch_size=7, compile=False),
    "compiled": pb.MAP(num_steps=30, batch_size=7, compile=True),
}


#: methods that every run of the tests looks at; the others, whose loops are alike, the slow ones
EVERY_RUN = {"MAP", "ensemble", "SVI", "SWAG"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            pytest.param(name, "fixed", marks=() if name in EVERY_RUN else pytest.mark.slow)
            for name in BATCHES
        ),
        *(
            pytest.param(name, "inferred", marks=() if name in EVERY_RUN else pytest.mark.slow)
            for name in BATCHES
        ),
    ],
)
def test_batches_noise_and_several_loops(name, kind, tmp_path):
    method = BATCHES[name]
    count = {} if method.kind == "point" or name == "ensemble" else {"num_draws": 6}
    moments = (0.3, 0.8) if kind == "inferred" else (0.6,)
    assert_resumes(lambda **options: fit(method, kind, **count, **options), tmp_path, moments)


class Noisy(TensorDataset):
    """Augmented rows: what NumPy and torch draw for a row depends on when it is asked for."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.01 * torch.randn(x.shape), y


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize(
    "name",
    ["MAP", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SVI", "SWAG", "SGLD"))],
)
def test_a_loader_that_shuffles_goes_on_in_the_middle_of_an_epoch(name, own_generator, tmp_path):
    method = replace(BATCHES[name], batch_size=None)

    def whole(**options):
        model, y = MODELS["fixed"]()
        generator = torch.Generator().manual_seed(5) if own_generator else None
        loader = DataLoader(Noisy(X, y), 6, shuffle=True, generator=generator)
        count = {} if name == "MAP" else {"num_draws": 6}
        with warnings.catch_warnings(action="ignore"):
            return method.fit(model, loader, seed=3, **count, **options)

    assert_resumes(whole, tmp_path, (0.8,) if own_generator else (0.3,))


def test_a_net_in_training_mode(tmp_path):
    def whole(**options):
        with seeded(0):
            net = nn.Sequential(
                nn.Linear(1, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1)
            )
        model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.2))
        with warnings.catch_warnings(action="ignore"):
            return pb.MAP(num_steps=50, batch_size=7, compile=False).fit(
                model, X, MODELS["fixed"]()[1], **options
            )

    assert_resumes(whole, tmp_path, (0.5,))


def two_modes(x, y):
    import pyro

    place = pyro.sample("place", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    pyro.sample("y", dist.Normal(place.square().sum().expand([len(y)]), 0.3).to_event(1), obs=y)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(0.5, marks=pytest.mark.slow),
        0.8,
        pytest.param(0.95, marks=pytest.mark.slow),
    ],
)
def test_smc_between_its_ladders(moment, tmp_path, monkeypatch):
    monkeypatch.setattr("pyrobnn.inference.smc._BUDGET", 5)
    monkeypatch.setattr("pyrobnn.inference.smc._ADAPTATION_STEPS", 4)
    monkeypatch.setattr("pyrobnn.inference.smc.Signs.parted", property(lambda signs: True))
    method = pb.SMC(num_particles=24, num_islands=2, compile=False)

    def whole(**options):
        with warnings.catch_warnings(action="ignore"):
            posterior = method.fit(two_modes, None, torch.full((3,), 4.0), num_draws=60, **options)
        assert posterior.meta["exchange"]
        return posterior

    assert_resumes(whole, tmp_path, (moment,), repeated=1)


# -- files and signals -------------------------------------------------------------------------------------------------


SCRIPT = textwrap.dedent(
    """
    import sys, warnings, torch, pyrobnn as pb
    from pyrobnn.inference.fitting import checkpoints
    checkpoints.EVERY = 0.0
    warnings.simplefilter("ignore")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x = torch.linspace(-1, 1, 40)[:, None]
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
    def say(step, metrics):
        if step >= 100:
            print("at", step, flush=True)
    posterior = pb.MAP(num_steps=1000, batch_size=10, polish_steps=0, compile=False).fit(
        model, x, x.sin(), seed=1, checkpoint=sys.argv[1], callbacks=[say]
    )
    torch.save(posterior.draws, sys.argv[2])
    """
)


def run_script(tmp_path: Path, name: str, number: int | None = None) -> int:
    """The script's exit code; ended by this signal once it is on its way."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(tmp_path / name)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
    if number is not None:
        assert process.stdout.readline().startswith("at")
        process.send_signal(number)
    process.communicate(timeout=120)
    return process.returncode


@pytest.fixture(scope="module")
def draws_of_whole_script(tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("whole")
    assert run_script(folder, "whole") == 0
    return torch.load(folder / "whole")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_process_that_is_ended_goes_on(number, tmp_path, draws_of_whole_script):
    assert run_script(tmp_path, "none", number) == -number
    assert (tmp_path / "run").exists() and not (tmp_path / "none").exists()
    assert run_script(tmp_path, "again") == 0
    again = torch.load(tmp_path / "again")
    assert again.keys() == draws_of_whole_script.keys()
    assert all(torch.equal(again[site], draws) for site, draws in draws_of_whole_script.items())


def test_sigterm_is_handled_by_whom_it_was_handled_before(tmp_path):
    def handler(number, frame):
        raise Killed

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(Killed):
            fit(
                METHODS["MAP"],
                "fixed",
                checkpoint=tmp_path / "run",
                callbacks=[lambda step, metrics: signal.raise_signal(signal.SIGTERM)],
            )
        assert signal.getsignal(signal.SIGTERM) is handler
        assert (tmp_path / "run").exists()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_checkpoint_is_written_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    monkeypatch.setattr(checkpoints, "_SHARE", 1e9)
    seen = []
    path = tmp_path / "run"
    fit(
        METHODS["MAP"],
        "fixed",
        checkpoint=path,
        callbacks=[lambda step, metrics: seen.append(path.exists())],
    )
    assert seen[-1]


def test_another_run_is_refused(tmp_path):
    path = tmp_path / "run"
    fit(METHODS["MAP"], "fixed", checkpoint=path)
    with pytest.raises(ValueError, match="another model, data, seed or settings"):
        fit(replace(METHODS["MAP"], lr=0.5), "fixed", checkpoint=path)
    model = pb.BNN(
        toy_net(), pb.priors.IIDPrior(dist.Normal(0.0, 3.0)), MODELS["fixed"]()[0].likelihood
    )
    with pytest.raises(ValueError, match="another model"):
        METHODS["MAP"].fit(model, X, MODELS["fixed"]()[1], seed=3, checkpoint=path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged"):
        fit(METHODS["MAP"], "fixed", checkpoint=path)


def test_ctrl_c_says_that_the_fit_goes_on(tmp_path):
    def press(step, metrics):
        raise KeyboardInterrupt

    path = tmp_path / "run"
    posterior = fit(METHODS["MAP"], "fixed", checkpoint=path, callbacks=[press])
    assert any(f"checkpoint={str(path)!r} goes on" in note for note in posterior.meta["warnings"])
    whole = fit(METHODS["MAP"], "fixed")
    assert_same(fit(METHODS["MAP"], "fixed", checkpoint=path), whole)


def test_a_fit_that_fails_fails_again(tmp_path):
    method = replace(METHODS["MLE"], lr=1e30, num_steps=50)
    for _ in range(2):
        with pytest.raises((FloatingPointError, Refused)):
            fit(method, "fixed", checkpoint=tmp_path / "run")
