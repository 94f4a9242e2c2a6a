"""The law of progress bars: full after a whole fit, closed in any case, and in words why when they are not full."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import toy_model
from test_contract import METHODS, X, Y, num_draws
from test_law_interrupt import EARLY

from pyrobnn.inference.optim.minimize import minimize

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged|Ctrl-C|not a mode|not evaluated|no k-hat)"
)


class Bar:
    """What tqdm is told."""

    made: list[Bar] = []

    def __init__(self, total=None, desc=None, **options):
        self.total, self.desc, self.n, self.closed, self.said = total, desc, 0, 0, ""
        Bar.made.append(self)

    def update(self, n=1):
        assert not self.closed and n >= 0
        self.n += n

    def set_postfix(self, *args, **kwargs):
        assert not self.closed

    def set_postfix_str(self, text, refresh=True):
        assert not self.closed
        self.said = text

    def set_description(self, *args, **kwargs): ...

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


@pytest.mark.parametrize("name", METHODS)
def test_a_whole_fit_fills_its_bars(name, bars):
    METHODS[name].fit(toy_model(), X, Y, progress=True, **num_draws(name))
    assert bars
    for bar in bars:
        assert (bar.n, bar.closed, bar.said) == (bar.total, 1, ""), bar.desc


@pytest.mark.parametrize("name", EARLY)
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


def test_plateaus_and_enough_draws_are_said(bars):
    options = {"num_steps": 900, "patience": 100, "compile": False, "progress": True}
    minimize(lambda theta: 0 * theta.sum(), torch.zeros(1), **options)
    replace(METHODS["NUTS"], num_chains=8).fit(toy_model(), X, Y, progress=True, num_draws=300, until_ess=10)
    assert [bar.said for bar in bars] == [
        "stopped early: the loss no longer falls",
        "stopped early: enough effective draws",
    ]
    assert all(0 < bar.n < bar.total and bar.closed == 1 for bar in bars)
