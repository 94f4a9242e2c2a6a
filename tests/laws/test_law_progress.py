"""The law of progress bars: full after a whole fit, closed in any case, and in words why when they are not full."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import toy_model
from test_contract import FEW, METHODS, X, Y, num_draws, one_of_each_kind
from test_law_interrupt import EARLY

from pyrobnn.inference.optim.minimize import minimize
from pyrobnn.inference.optim.training import Training

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged|Ctrl-C|not a mode|not evaluated|no k-hat|have not arrived)"
)


class Bar:
    """What tqdm is told."""

    made: list[Bar] = []

    def __init__(self, total=None, desc=None, **options):
        self.total, self.desc, self.n, self.closed, self.said = total, desc, 0, 0, ""
        self.told, self.lines = [], []
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
        early = step >= EARLY[name] and metrics.get("phase") != "warm-up" and metrics.get("draws") != 0
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
    assert {"callback": "by a callback", "interrupt": "interrupted", "error": "by an error"}[why] in bar.said


def test_a_callback_that_stops_is_said(bars):
    training = Training(900, compile=False)
    stop = [lambda step, metrics: step >= 200]
    minimize(lambda theta: 0 * theta.sum(), torch.zeros(1), None, training, progress=True, callbacks=stop)
    [bar] = bars
    assert bar.said == "stopped early by a callback" and 0 < bar.n < bar.total and bar.closed == 1


@pytest.mark.slow
def test_a_warmup_that_goes_on_is_said_in_words(bars, monkeypatch):
    reasons = ["the log density was still rising"]
    monkeypatch.setattr("pyrobnn.inference.nuts.DEFAULT_WARMUP", 30)
    monkeypatch.setattr("pyrobnn.inference.hmc.run.not_stationary", lambda *rest: reasons.pop() if reasons else "")
    posterior = replace(METHODS["NUTS"], num_warmup=None).fit(toy_model(), X, Y, progress=True, num_draws=5)
    [bar] = bars
    warmup = posterior.meta["num_warmup"]
    assert warmup > 30 and (bar.n, bar.total) == (warmup + 5, warmup + 5)
    assert bar.lines == [f"NUTS: the warm-up goes on to {warmup} transitions: the log density was still rising"]
    assert any("warm-up" in told for told in bar.told)


@pytest.mark.parametrize("name", ["MAP", "NUTS", "SGLD"])
def test_a_bar_says_at_once_what_is_done(name, bars, monkeypatch):
    monkeypatch.setattr("pyrobnn.model.compile._checked", lambda fn, *rest: (fn, "inductor"))
    method = replace(METHODS[name], compile=True, **({"num_steps": 300} if name == "MAP" else {}))
    method.fit(toy_model(), X, Y, progress=True, **num_draws(name))
    [bar] = bars
    assert "tracing and compiling" in bar.told[0]
    assert bar.told[-1] == bar.desc and bar.n == bar.total
