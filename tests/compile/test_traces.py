"""A trace has the operators that torch's own tracer finds, and takes nothing for constant that is not."""

from __future__ import annotations

import operator
import warnings

import pyro
import pytest
import torch
from test_tiers import FUNCTIONS
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import pyrobnn as pb
from pyrobnn.core.private_trace import trace
from pyrobnn.model.compile import compiled

NET = pb.networks.mlp(2, (3,), seed=0)
TOTAL = torch.zeros(3)
WEIGHTS = {name: value.detach() for name, value in NET.named_parameters()}


def loss(x):
    return functional_call(NET, WEIGHTS, (x,)).square().sum()


def several_results(z):
    values, places = z.max(0)
    return values + 1.0, places, torch.linalg.cholesky(z @ z.T + torch.eye(len(z)))


def written_constant(z):
    return (TOTAL.zero_() + z).mul_(2.0), TOTAL + 1.0


CASES = {
    **FUNCTIONS,
    "a net": (vmap(grad_and_value(loss)), (torch.ones(4, 2),)),
    "several results": (several_results, (torch.arange(9.0).reshape(3, 3),)),
    "a constant that is written into": (written_constant, (torch.ones(3),)),
}


def operators(graph) -> list:
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    return [node.target for node in calls if node.target is not operator.getitem]


@pytest.mark.parametrize("name", CASES)
def test_a_trace_has_the_operators_of_torchs_own(name):
    fn, example = CASES[name]
    with torch.random.fork_rng(), torch.no_grad():
        ours = trace(fn, [value.clone() for value in example])
        theirs = make_fx(fn)(*[value.clone() for value in example])
    assert operators(ours) == operators(theirs)
    others = [value + 1 for value in example]
    for one, other in zip(ours(*others), theirs(*[value + 1 for value in example]), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def untraced(fn, *example):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compiled(fn, *example, enabled=False, calls=100)


@pytest.fixture
def settings_of_pyro():
    """Dynamo turns the validation of distributions off."""
    settings = pyro.settings.get()
    yield
    pyro.settings.set(**settings)


@pytest.mark.usefixtures("settings_of_pyro")
def test_code_of_torch_compile_is_no_constant():
    """What it does is not seen by a trace: such a function is run as it is."""
    doubled = torch.compile(lambda z: z * 2.0, backend="eager")
    doubled(torch.ones(3))
    step = untraced(lambda z: doubled(z) + 1.0, torch.ones(3))
    assert step.tier == "eager"
    assert step(torch.full((3,), 2.0)).tolist() == [5.0] * 3


def test_both_branches_of_a_condition_are_in_a_trace():
    def fn(z):
        return torch.cond(z.sum() > 0, lambda z: z * 2.0, lambda z: z * 3.0, (z,))

    step = untraced(fn, torch.ones(2))
    assert step.tier == "trace"
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]
    assert step(-torch.ones(2)).tolist() == [-3.0, -3.0]


def test_python_may_look_at_numbers_that_are_the_same_at_every_call():
    def fn(z):
        return z * 2.0 if torch.tensor(2.0) * 3.0 > 5.0 else z

    assert untraced(fn, torch.ones(2)).tier == "trace"
    assert untraced(lambda z: z * float(z.sum()), torch.ones(2)).tier == "eager"


def test_an_operation_that_failed_is_not_in_a_trace():
    def fn(z):
        try:
            return z.reshape(5)
        except RuntimeError:
            return z + 1.0

    graph = trace(fn, [torch.ones(3)])
    assert graph(torch.ones(3)).tolist() == [2.0] * 3


def test_casts_of_autocast_are_made_at_every_call():
    weight = torch.nn.Parameter(torch.ones(2, 2))

    def fn(z):
        with torch.autocast("cpu", torch.bfloat16):
            return z @ weight

    with torch.autocast("cpu", torch.bfloat16):
        torch.ones(2, 2) @ weight  # the cast weight is kept
        graph = trace(fn, [torch.ones(2, 2)])
    with torch.no_grad():
        weight.fill_(2.0)
        assert graph(torch.ones(2, 2)).float().tolist() == [[4.0, 4.0]] * 2
    assert torch.is_autocast_cache_enabled()
