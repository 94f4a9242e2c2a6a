"""The law of progress bars: full after a whole fit, closed in any case, and in words why when they are not full.

Their time left is that of the steps, whatever was compiled before.
"""

from __future__ import annotations

import io
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import tqdm
from models import toy_model
from test_contract import FEW, METHODS, X, Y, num_draws, one_of_each_kind
from test_law_interrupt import EARLY

from pyrobnn.callbacks import ProgressBar
from pyrobnn.inference.optim.minimize import minimize
from pyrobnn.inference.optim.training import Training

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged|Ctrl-C|not a mode|not evaluated|no k-hat|differ in log density)"
)


class Bar:
    """What tqdm is told."""

    made: list[Bar] = []

    def __init__(self, total=None, desc=None, **options):
        self.total = total
        self.desc = desc
        self.n = 0
        self.closed = 0
        self.said = ""
        self.told = []
        self.lines = []
        Bar.made.append(self)

    def update(self, n=1):
        assert not self.closed and n >= 0
        self.n += n

    def set_postfix(self, *args, **kwargs):
        assert not self.closed

    def set_postfix_str(self, text, refresh=True):
        assert not self.closed
        self.said = text

    def set_description(self, text=None, refresh=True):
        assert not self.closed
        self.told.append(text)

    def refresh(self):
        assert not self.closed

    def write(self, text, file=None):
        self.lines.append(text)

    def close(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def bars(monkeypatch) -> list[Bar]:
    for name in ("CI", "PYTEST_XDIST_WORKER"):  # where Pyro's own bar stays off
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    monkeypatch.setattr("pyro.infer.mcmc.logger.tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    return Bar.made


@pytest.mark.parametrize("name", one_of_each_kind())
def test_a_whole_fit_fills_its_bars(name, bars):
    METHODS[name].fit(toy_model(), X, Y, progress=True, **num_draws(name))
    assert bars
    for bar in bars:
        assert (bar.n, bar.closed, bar.said) == (bar.total, 1, ""), bar.desc


@pytest.mark.parametrize("name", one_of_each_kind(EARLY, FEW - {"SVI", "SGLD"}))
@pytest.mark.parametrize("why", ["callback", "interrupt", "error"])
def test_a_bar_that_is_not_full_says_why(name, why, bars):
    def stop(step, metrics):
        early = (
            step >= EARLY[name] and metrics.get("phase") != "warm-up" and metrics.get("draws") != 0
        )
        if early and why != "callback":
            raise KeyboardInterrupt if why == "interrupt" else RuntimeError("stop")
        return early

    method = replace(METHODS[name], **({"num_steps": 300} if EARLY[name] == 100 else {}))
    options = {"callbacks": [stop], "progress": True} | num_draws(name)
    try:
        method.fit(toy_model(), X, Y, **options)
    except RuntimeError:
        assert why == "error"
    *before, bar = bars
    assert all(one.n == one.total and one.closed == 1 for one in before)
    assert bar.n < bar.total and bar.closed == 1
    assert {"callback": "by a callback", "interrupt": "interrupted", "error": "by an error"}[
        why
    ] in bar.said


def test_a_callback_that_stops_is_said(bars):
    training = Training(900, compile=False)
    stop = [lambda step, metrics: step >= 200]
    minimize(
        lambda theta: 0 * theta.sum(), torch.zeros(1), None, training, progress=True, callbacks=stop
    )
    [bar] = bars
    assert bar.said == "stopped early by a callback" and 0 < bar.n < bar.total and bar.closed == 1


@pytest.mark.slow
def test_a_warmup_that_goes_on_is_said_in_words(bars, monkeypatch):
    reasons = ["the log density was still rising"]
    monkeypatch.setattr("pyrobnn.inference.nuts.DEFAULT_WARMUP", 30)
    monkeypatch.setattr(
        "pyrobnn.inference.hmc.run.not_stationary", lambda *rest: reasons.pop() if reasons else ""
    )
    posterior = replace(METHODS["NUTS"], num_warmup=None).fit(
        toy_model(), X, Y, progress=True, num_draws=5
    )
    [bar] = bars
    warmup = posterior.meta["num_warmup"]
    assert warmup > 30 and (bar.n, bar.total) == (warmup + 5, warmup + 5)
    assert bar.lines == [
        f"NUTS: the warm-up goes on to {warmup} transitions: the log density was still rising"
    ]
    assert any("warm-up" in told for told in bar.told)


@pytest.mark.parametrize("name", ["MAP", "NUTS", "SGLD"])
def test_a_bar_says_at_once_what_is_done(name, bars, monkeypatch):
    monkeypatch.setattr("pyrobnn.model.compile._checked", lambda fn, *rest: (fn, "inductor"))
    method = replace(METHODS[name], compile=True, **({"num_steps": 300} if name == "MAP" else {}))
    method.fit(toy_model(), X, Y, progress=True, **num_draws(name))
    [bar] = bars
    assert "tracing" in bar.told[0]
    assert any("compiling" in told for told in bar.told)
    assert bar.told[-1] == bar.desc and bar.n == bar.total


# -- the time left ---------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Timed(tqdm.tqdm):
    """A real bar whose clock is the test's."""

    made: list[Timed] = []

    def __init__(self, *args, **options):
        super().__init__(*args, **options | {"file": io.StringIO()})
        Timed.made.append(self)

    @property
    def left(self) -> float:
        """Seconds left, as the bar writes them; infinite where it writes a question mark."""
        state = self.format_dict
        rate = state["rate"] or (state["n"] - state["initial"]) / max(state["elapsed"], 1e-9)
        return (self.total - self.n) / rate if rate else float("inf")


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    monkeypatch.setattr("tqdm.auto.tqdm", Timed)
    monkeypatch.setattr(Timed, "made", [])
    return clock


@pytest.mark.parametrize("compile_seconds", [0.0, 5.0, 1300.0])
def test_the_time_left_is_that_of_the_steps(compile_seconds, clock):
    with ProgressBar(100, "steps") as bar:
        bar.say("tracing and compiling")
        clock.now += compile_seconds
        for step in range(1, 51):
            bar(step, {})
            if step > 1:
                assert bar._bar.left == pytest.approx(0.5 * (100 - step))
            clock.now += 0.5
        bar.say("compiling for another shape")
        clock.now += compile_seconds
        for step in range(51, 80):
            bar(step, {})
            assert bar._bar.left == pytest.approx(0.5 * (100 - step))
            clock.now += 0.5
        # what was no step is not in the bar's clock
        assert bar._bar.format_dict["elapsed"] == pytest.approx(0.5 * 79, abs=1.0)


def test_a_question_mark_until_a_step_was_timed(clock):
    with ProgressBar(100, "steps") as bar:
        clock.now += 60.0
        bar(10, {})
        assert bar._bar.left == float("inf") and "<?" in str(bar._bar)


def test_steps_of_uneven_length(clock):
    """Transitions of a warm-up take 1 to 20 leapfrogs' time; the estimate is that of the latest dozen."""
    generator = torch.Generator().manual_seed(0)
    with ProgressBar(400, "NUTS") as bar:
        ratios = []
        for step in range(1, 301):
            bar(step, {"phase": "warm-up"})
            if step > 40:
                ratios.append(bar._bar.left / (10.5 * (400 - step)))
            clock.now += float(torch.randint(1, 21, (), generator=generator))
        assert 0.5 < min(ratios) and max(ratios) < 2.0


def test_a_bar_that_begins_again(clock, capsys):
    with ProgressBar(100, "NUTS") as bar:
        for step in range(1, 61):
            bar(step, {})
            clock.now += 9.0
        bar.restart("the run goes on in float64: a reason")
        bar.say("tracing and compiling")
        clock.now += 300.0
        for step in range(1, 100):
            bar(step, {})
            clock.now += 0.5
        assert bar._bar.n == 99 and bar.step == 99
        assert bar._bar.left < 1.5


#: long enough to have several reports
LONG = {"num_steps": 300}


@pytest.mark.parametrize("name", one_of_each_kind(fast={"MAP", "NUTS", "SMC"}))
def test_a_slow_compile_is_not_in_the_time_left(name, clock, monkeypatch):
    if name == "NUTS-pyro":
        pytest.skip("Pyro's own bar, of what is not compiled")

    def slow(fn, *rest):
        clock.now += 1300.0
        return fn, "inductor"

    monkeypatch.setattr("pyrobnn.model.compile._checked", slow)
    ratios = []
    seen = [0]

    def pass_time(step, metrics):
        bar = Timed.made[-1]
        if bar.n > bar.initial and bar.n < bar.total:
            ratios.append(bar.left / (bar.total - bar.n))
        clock.now += max(0, bar.n - seen[-1])  # a second for every step
        seen.append(bar.n)

    options = {key: value for key, value in LONG.items() if hasattr(METHODS[name], key)}
    if name.startswith("Laplace"):
        options["map"] = replace(METHODS[name].map, compile=True, **LONG)
    method = replace(METHODS[name], compile=True, **options)
    method.fit(toy_model(), X, Y, progress=True, callbacks=[pass_time], **num_draws(name))
    later = ratios[1:]  # after two intervals that were timed
    assert later and max(later) < 4.0 and min(later) > 0.25


def test_a_run_that_goes_on_in_float64_says_so(bars, monkeypatch):
    def program(x, y):
        mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(mean @ torch.eye(2), 0.1).to_event(1), obs=y)

    def coarse(density):
        return (lambda z, steps: "a reason") if density.dtype == torch.float32 else None

    monkeypatch.setattr("pyrobnn.inference.nuts.inspector", coarse)
    with pytest.warns(UserWarning, match="the run went on in float64"):
        replace(METHODS["NUTS"], num_warmup=60).fit(
            program, None, torch.ones(2), num_draws=5, progress=True
        )
    [bar] = bars
    assert bar.lines == [
        "NUTS: the run goes on in float64: float32 was too coarse for the positions: a reason"
    ]
    assert (bar.n, bar.total, bar.closed) == (65, 65, 1)
