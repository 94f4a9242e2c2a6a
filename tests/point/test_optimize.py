from __future__ import annotations

import functools
import itertools

import pytest
import torch

from pyrobnn.inference.optim.minimize import minimize
from pyrobnn.inference.optim.training import Optimizer, Training

CENTER = torch.tensor([1.0, -2.0, 3.0])


def _bowl(theta, center):
    return (torch.tensor([1.0, 10.0, 0.1]) * (theta - center).square()).sum(-1)


def _fit(start=None, **options):
    options = {"num_steps": 300, "lr": 0.1} | options
    made = {
        name: options.pop(name)
        for name in ("kind", "schedule", "clip_norm", "average")
        if name in options
    }
    if made:
        options["optimizer"] = Optimizer(**made)
    watching = {name: options.pop(name) for name in ("callbacks", "snapshot") if name in options}
    start = torch.zeros(3) if start is None else start
    return minimize(_bowl, start, itertools.repeat((CENTER,)), Training(**options), **watching)


def test_adam_is_torch_adam():
    for schedule in (None, "cosine", "hold_cosine", lambda step: 1 / (1 + step)):
        ours = _fit(schedule=schedule, compile=False)
        theirs = _fit(kind=lambda p: torch.optim.Adam(p, lr=0.1), schedule=schedule, compile=False)
        torch.testing.assert_close(ours.params, theirs.params, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.losses, theirs.losses, atol=1e-3, rtol=1e-3)


MOMENTUM = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.5)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param(MOMENTUM, marks=pytest.mark.slow)])
def test_compiled_equals_eager(optimizer):
    runs = [
        _fit(kind=optimizer, num_steps=60, clip_norm=2.0, average=0.5, compile=c)
        for c in (True, False)
    ]
    torch.testing.assert_close(runs[0].params, runs[1].params, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(runs[0].losses, runs[1].losses, atol=1e-4, rtol=1e-4)


def test_members_are_independent():
    starts = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    together = _fit(starts, num_steps=40, clip_norm=1.0, compile=False)
    assert together.losses.shape == (40, 4) and together.grad_norm.shape == (4,)
    for i, start in enumerate(starts):
        alone = _fit(start, num_steps=40, clip_norm=1.0, compile=False)
        torch.testing.assert_close(together.params[i], alone.params)
        torch.testing.assert_close(together.losses[:, i], alone.losses)


def test_average_is_the_mean_of_the_last_iterates():
    seen = []
    result = _fit(
        num_steps=20,
        average=0.25,
        look_every=1,
        compile=False,
        callbacks=[lambda step, metrics: seen.append(metrics["snapshot"]())],
        snapshot=lambda theta: theta,
    )
    iterates = []
    _fit(
        num_steps=20,
        look_every=1,
        compile=False,
        callbacks=[lambda step, metrics: iterates.append(metrics["snapshot"]())],
        snapshot=lambda theta: theta,
    )
    torch.testing.assert_close(result.params, torch.stack(iterates[-5:]).mean(0))
    torch.testing.assert_close(
        seen[14], iterates[14]
    )  # before averaging begins: the iterate itself


def test_a_callback_stops_and_sees_the_metrics():
    calls = []

    def callback(step, metrics):
        calls.append((step, sorted(metrics)))
        return step == 20

    result = minimize(
        lambda theta: (theta.square().sum(), theta.sum()[None]),
        torch.ones(2),
        None,
        Training(100, compile=False),
        tracked=("total",),
        callbacks=[callback],
    )
    assert calls == [
        (10, ["grad_norm", "loss", "lr", "total"]),
        (20, ["grad_norm", "loss", "lr", "total"]),
    ]
    assert result.stopped == "callback" and result.losses.shape == (20,)
    assert result.tracked["total"][0] == 2.0


def test_interrupt_keeps_what_is_trained():
    def batches():
        yield from itertools.repeat((CENTER,), 7)
        raise KeyboardInterrupt

    result = minimize(_bowl, torch.zeros(3), batches(), Training(100, compile=False))
    assert result.stopped == "interrupt" and result.losses.shape == (7,)


@pytest.mark.parametrize("members", [1, 3])
def test_divergence_names_step_loss_and_remedy(members):
    start = torch.ones(3) if members == 1 else torch.ones(members, 3)
    with pytest.raises(
        FloatingPointError, match=r"at step \d+ \(it was .* before\): use a smaller lr than 0.1"
    ):
        _fit(start, optimizer=lambda p: torch.optim.SGD(p, lr=5.0), num_steps=500, compile=False)


@pytest.mark.slow
def test_batches_of_two_shapes():
    batches = itertools.cycle([(torch.ones(4, 3),), (torch.ones(2, 3),)])
    result = minimize(
        lambda theta, x: (theta - x).square().mean(), torch.zeros(3), batches, Training(200, lr=0.1)
    )
    torch.testing.assert_close(result.params, torch.ones(3), atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"lr": -1.0}, "'lr'"),
        ({"optimizer": "adamw"}, "'optimizer'"),
        ({"schedule": "linear"}, "'schedule'"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"average": 2.0}, "average"),
    ],
)
def test_bad_options(option, message):
    with pytest.raises(ValueError, match=message):
        _fit(**option)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        _fit(optimizer=lambda p: None)


def test_weights_on_which_nothing_acts_come_to_zero_and_not_to_subnormals():
    small = torch.tensor(1e-40)
    assert float(small * 1) > 0  # numbers that a processor multiplies a hundred times slower
    seen = []
    start = torch.tensor([1.0, 1e-37])
    training = Training(400, lr=1e-39, compile=False)
    found = minimize(
        lambda theta: (theta - torch.tensor([2.0, 0.0])).square().sum(),
        start,
        None,
        training,
        callbacks=[lambda step, metrics: seen.append(float(small * 1))],
    )
    assert seen and set(seen) == {0.0} and float(small * 1) > 0  # the caller's setting is back
    assert found.params.isfinite().all()
