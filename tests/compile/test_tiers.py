"""The tier of a step: what is forecast from its graph, and the interpreted graph, which gives the same bits."""

from __future__ import annotations

import copy
import inspect

import pyro.distributions as dist
import pytest
import torch
from stand_in_device import stand_in_device
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import pyrobnn as pb
from pyrobnn.core.private_trace import trace
from pyrobnn.model.compile import compiled, materialize
from pyrobnn.model.compile.forecast import Forecast, Work
from pyrobnn.model.compile.interpreted import _Rewriting, interpreted
from pyrobnn.model.compile.trees import leaves_of


def _draws(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _adam(theta, moment, step):
    slope = grad(lambda z: (z.tanh() * z.exp()).pow(2).sum(dtype=torch.float64))(theta)
    moment.copy_(0.9 * moment + 0.1 * slope)
    theta.sub_(0.1 * moment / (moment.square().sqrt() + 1e-8))
    step.add_(1)
    return theta.sum() * step, (step >> 3) & 7


def _bits(index):
    mixed = (index ^ (index >> 30)) * -4658895280553007687
    return (mixed & 0xFFFFFFFF).to(torch.float32) * 2.0**-32, mixed % 1024, index[None].expand(2, 3)


def _same_work_twice(x, w):
    ones = torch.ones(3)
    first = (x @ w + 2.0 * ones).relu()
    second = (x @ w + 2.0 * ones).relu()
    return first * second / 1.0, first.pow(1), torch.where(first > 0.5, first, 0.0).mean(0)


def _written_between(x):
    before = x * 2.0
    x.add_(1.0)
    table = torch.zeros(3)
    table[1] = x[0]
    return before, x * 2.0, table, torch.zeros(3)


def _written_after_a_product(x, w):
    inputs = x[None] + torch.zeros(2, 1, 1)
    plain, shifted = inputs @ w, inputs @ w
    shifted += 1.0
    columns, shifted_columns = x.T.reshape(-1), x.T.reshape(-1)
    shifted_columns.mul_(2.0)
    return plain, shifted, columns, shifted_columns


def _constant_choices(z):
    always = torch.tensor([True, True, True])
    seeds = torch.ones_like(z) / 3.0
    return torch.where(always, z * 2.0, -torch.inf) * seeds, torch.zeros_like(z), z.new_ones(2)


def _put_in_order(x):
    doubled = x * 2.0
    written = x + 1.0
    before = materialize(written) * 1.5
    copy_of_written = materialize(written)
    written.add_(1.0)
    return materialize(doubled).sin(), materialize(x.T * 3.0) + 1.0, before, copy_of_written + 0.5


FUNCTIONS = {
    "adam in place": (_adam, (_draws(5), torch.zeros(5), torch.tensor(40))),
    "random bits": (_bits, (torch.tensor([3, 5, 7]),)),
    "the same twice": (_same_work_twice, (_draws(4, 2), _draws(2, 3))),
    "written between": (_written_between, (_draws(3),)),
    "written after a product": (_written_after_a_product, (_draws(4, 2), _draws(2, 3))),
    "put in order": (_put_in_order, (_draws(4, 2),)),
    "zero dimensions": (lambda z: (z * 0.1 + 1.0, z**2, z > 0.3), (torch.tensor(0.3),)),
    "not finite": (lambda z: (z.log(), z / 0.0, z * 1.0), (_draws(4),)),
    "whole numbers": (lambda z: (z * 2, z + 0.5, z // 2, z**2), (torch.arange(4),)),
    "constant choices": (_constant_choices, (_draws(3),)),
    "batched": (vmap(grad(lambda z: torch.nn.functional.softplus(z).sum())), (_draws(3, 4),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_interpreted_graph_gives_the_same_bits(name):
    """At other arguments than those it was tried on, three times in a row: nothing is left from call to call."""
    fn, example = FUNCTIONS[name]
    graph = trace(fn, [value.clone() for value in example])
    traced_anew = trace(fn, [value.clone() for value in example])
    quick = interpreted(traced_anew, [value.clone() for value in example])
    ours, theirs = ([value.clone() for value in example] for _ in range(2))
    for _ in range(3):
        with torch.no_grad():
            results = quick(*ours), graph(*theirs)
        for one, other in zip((*results[0], *ours), (*results[1], *theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)
            assert one.stride() == other.stride()
        for value in (*ours, *theirs):
            value.add_(1)


class _Operations(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_what_depends_on_nothing_that_changes_is_not_computed_again():
    """A view of a whole tensor, asked for twice; the seed of a gradient; a choice that is always the same."""

    def function(z):
        whole = z.view(3) * z.view(3)
        return grad(lambda u: torch.where(torch.ones(3, dtype=torch.bool), u * whole, 0.0).sum())(z)

    z = _draws(3)
    quick = interpreted(trace(function, [z]), [z])
    with torch.no_grad(), _Operations() as operations:
        slope = quick(z)
    torch.testing.assert_close(slope, z.square())
    assert operations.names == ["mul", "mul"]  # the square, and that times the seed


def test_random_draws_stay_random():
    step = compiled(lambda z: z + torch.randn(3), torch.zeros(3), enabled="trace")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = step(torch.zeros(3)), step(torch.zeros(3))
        torch.manual_seed(0)
        again = step(torch.zeros(3))
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, again, rtol=0.0, atol=0.0)


def test_a_result_may_be_written_into():
    step = compiled(lambda z: (torch.zeros(2), z.view(2)), torch.zeros(2), enabled="trace")
    step(torch.zeros(2))[0].add_(5.0)
    assert step(torch.zeros(2))[0].tolist() == [0.0, 0.0]


def test_a_tensor_that_the_function_holds_may_be_written_into():
    """Here it is read before and after, by itself and through a view; the trace and the trial run write into it too."""
    counter = torch.zeros(2)
    first = counter[:1]

    def counted(z):
        before = counter * 2.0
        counter.add_(1.0)
        return torch.cat([z, before, counter * 2.0, first * 2.0])

    step = compiled(counted, torch.zeros(1), enabled="trace")
    counter.zero_()
    assert step(torch.zeros(1)).tolist() == [0.0, 0.0, 0.0, 2.0, 2.0, 2.0]
    assert step(torch.zeros(1)).tolist() == [0.0, 2.0, 2.0, 4.0, 4.0, 4.0]


def _made_numbers(z, counts, are_large):
    written = torch.zeros(2)
    written[0] = 1.0
    return z.sum(), written, torch.full((2,), 0.1) + counts, torch.rand(2) * 0.0


def _of_whole_numbers(z, counts, are_large):
    return z.sum(), counts / 3, counts.sqrt(), are_large * 0.1, 0.9**counts


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("numbers", [_made_numbers, _of_whole_numbers])
def test_numbers_have_the_type_that_they_had_when_traced(numbers, default):
    """Whatever torch's default is when the graph is interpreted and called, and whatever types its arguments have."""
    z = torch.ones(2, dtype=torch.float64)
    example = (z, torch.tensor([1, 2]), torch.tensor([True, False]))

    def in_its_floats(*arguments):
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            return numbers(*arguments)
        finally:
            torch.set_default_dtype(before)

    step = compiled(in_its_floats, *example, enabled="trace")
    assert step.tier == "trace"
    with torch.random.fork_rng():
        results = step(*example), in_its_floats(*example)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


def test_fewer_operations():
    fn, example = FUNCTIONS["the same twice"]
    graph = trace(fn, list(example))
    quick = interpreted(trace(fn, list(example)), list(example)).func.__self__
    numbers = [
        sum(node.op.startswith("call") for node in module.graph.nodes) for module in (graph, quick)
    ]
    assert numbers[1] <= 0.6 * numbers[0]


def test_what_nobody_asks_for_is_not_computed():
    def half_asked_for(z):
        (z * 3.0).exp()
        return z.sin()

    step = compiled(half_asked_for, torch.zeros(2), enabled="trace")
    assert "exp" not in inspect.unwrap(step.unchecked).func.__self__.code


def test_a_copy_into_the_order_of_its_original_is_left_out():
    step = compiled(lambda z: materialize(z * 3.0).sin(), torch.zeros(2, 3), enabled="trace")
    code = inspect.unwrap(step.unchecked).func.__self__.code
    assert "sin" in code and "stride_order" not in code


@pytest.mark.parametrize("power", [3, 0.5, -0.5, -2])
def test_an_example_at_which_all_powers_agree_is_no_trial(power):
    step = compiled(lambda z: z**power, torch.ones(50), enabled="trace")
    z = _draws(50).exp()
    torch.testing.assert_close(step(z), z**power, rtol=0.0, atol=0.0)


def test_work_is_counted_from_shapes():
    graph = trace(lambda x, w: (x @ w).sin().T, [torch.ones(7, 3), torch.ones(3, 5)])
    assert Work.of(graph) == Work(nodes=2, elements=70, products=105)
    image, filters = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)
    graph = trace(torch.nn.functional.conv2d, [image, filters])
    assert Work.of(graph).products == 2 * 4 * 6 * 6 * 27


def test_more_calls_and_more_work_are_worth_a_compile():
    small = Work(nodes=100, elements=1000, products=0)
    tiers = [Forecast(small, calls).tier for calls in (1, 1000, 10**6)]
    assert tiers[0] == "trace" and tiers[-1] == "compiled"
    assert Forecast(small, 10**6).seconds("trace") > Forecast(small, 10**6).seconds("compiled")
    assert Forecast(small, 10).seconds_to_compile() < Forecast(small, 10).seconds("compiled")


def _problem():
    x = _draws(30, 2)
    model = pb.BNN(
        pb.networks.mlp(2, (), 1, seed=0),
        pb.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        pb.likelihoods.HomoskedasticGaussian(0.1),
    )
    return model, x, x.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("method", "num_draws"),
    [
        (pb.MAP(num_steps=30), None),
        (pb.MLE(num_steps=30), None),
        (pb.DeepEnsemble(num_members=2, num_steps=30), None),
        (pb.SWAG(num_steps=30), 3),
        (pb.Laplace(num_steps=30), 3),
        (pb.SVI(num_steps=30), 3),
        (pb.SGHMC(num_chains=2, num_warmup=20), 3),
        (pb.NUTS(num_chains=2, num_warmup=5), 5),
        (pb.SMC(num_particles=8, num_islands=2), 8),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore")
def test_short_fits_start_at_once_and_say_so(method, num_draws, monkeypatch):
    monkeypatch.setattr("pyrobnn.model.compile._checked", pytest.fail)
    posterior = method.fit(*_problem(), num_draws=num_draws)
    tier = posterior.meta["tier"]
    assert tier["tier"] == "trace" and tier["calls"] > 0
    assert tier["seconds_traced"] < tier["seconds_compiled"]
    again = copy.deepcopy(method).fit(*_problem(), num_draws=num_draws)
    assert again.meta["tier"] == tier
    for name, values in posterior.draws.items():
        torch.testing.assert_close(again.draws[name], values, rtol=0.0, atol=0.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("compile", "mode"), [(True, 1), ("auto", 1), (False, 0)])
def test_long_fits_are_compiled_and_what_was_asked_for_is_done(compile, mode, monkeypatch):
    compiles = []

    def checked(fn, inputs, name):
        compiles.append(name)
        return fn, "inductor"

    monkeypatch.setattr("pyrobnn.model.compile._checked", checked)
    steps = 10**5 if compile == "auto" else 50
    stop = [lambda step, metrics: True]
    start = pb.Guide(init_loc="net")
    method = pb.SVI(start, num_steps=steps, compile=compile, optimizer=pb.Optimizer(average=0.0))
    posterior = method.fit(*_problem(), num_draws=2, callbacks=stop)
    assert len(compiles) == mode
    assert posterior.meta["tier"]["tier"] == ("compiled" if mode else "trace")


@pytest.mark.parametrize(
    ("enabled", "calls", "tier"),
    [
        (False, None, "eager"),
        (False, 10, "eager"),
        (False, 20, "trace"),
        ("auto", 10, "eager"),
        ("auto", 20, "trace"),
        ("trace", 1, "trace"),
    ],
)
def test_a_function_is_traced_where_its_calls_repay_that(enabled, calls, tier):
    step = compiled(lambda z: z * 2.0, torch.ones(3), enabled=enabled, calls=calls)
    assert step.tier == tier
    assert step(torch.ones(3)).tolist() == [2.0] * 3


@pytest.mark.parametrize("size", [8, 2**19])
def test_a_graph_is_made_quick_in_the_memory_of_a_call(size, monkeypatch):
    """All values of a step together take many times what a step takes: those that no later node asks for go."""
    held = []
    forget = _Rewriting._forget

    def noted(rewriting, nodes):
        forget(rewriting, nodes)
        held.append(sum(isinstance(value, torch.Tensor) for value in rewriting._values.values()))

    monkeypatch.setattr(_Rewriting, "_forget", noted)

    def fn(z):
        first = z.exp() * 0.5
        for _ in range(20):
            z = (z.tanh() + 0.1).sqrt()
        return z + first + z.exp() * 0.5 + (z.tanh() + 0.1).sqrt()

    z = _draws(size).abs()
    quick = interpreted(trace(fn, [z.clone()]), [z.clone()])
    assert torch.equal(quick(z), fn(z))
    assert max(held) <= 6


def test_what_is_computed_again_later_is_there_though_it_was_let_go():
    def fn(z):
        early = (z * 2.0).exp()
        total = early.sum()
        for _ in range(3):
            z = z.sin()
        return total + z.sum(), (z * 2.0).exp(), z.cos()

    def again(z):
        before = z.exp().sum()
        between = z.sin().sum() * before
        return between + z.exp().sum() + z.exp().mean()

    z = _draws(5)
    for function in (fn, again):
        quick = interpreted(trace(function, [z.clone()]), [z.clone()])
        for value, expected in zip(leaves_of(quick(z)), leaves_of(function(z)), strict=True):
            assert torch.equal(value, expected)


def test_a_trace_says_shapes_and_types_without_examples():
    graph = trace(lambda z: z.exp().sum(dtype=torch.float64), [torch.ones(3)])
    computed = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert [tuple(node.meta["tensor_meta"].shape) for node in computed] == [(3,), ()]
    assert computed[-1].meta["tensor_meta"].dtype == torch.float64
    assert all(node.meta.get("val") is None for node in graph.graph.nodes)


def test_what_looks_at_values_is_run_as_it_is_without_a_warning():
    step = compiled(lambda z: z if z.sum() > 0 else -z, torch.ones(2), enabled=False, calls=100)
    assert step.tier == "eager"
    assert step(torch.tensor([-1.0, -2.0])).tolist() == [1.0, 2.0]


def test_what_a_drawn_mask_picks_is_not_traced():
    def mean_of_some(z):
        picked = z[torch.rand(40) < 0.5]
        return picked.sum() / len(picked)

    step = compiled(mean_of_some, torch.ones(40), enabled=False, calls=100)
    with torch.random.fork_rng():
        assert [step(torch.ones(40)).item() for _ in range(5)] == [1.0] * 5


PICKS = [
    lambda x: x.unique(),
    lambda x: x.unique_consecutive(),
    lambda x: x.repeat_interleave(x),
]


@pytest.mark.parametrize("picked", PICKS)
def test_how_many_numbers_are_picked_is_not_traced(picked):
    step = compiled(lambda x: x * len(picked(x)), torch.tensor([1, 1]), enabled=False, calls=100)
    x = torch.tensor([1, 2])
    assert torch.equal(step(x), x * len(picked(x)))


def test_what_writes_into_tensors_elsewhere_goes_on():
    """A trace took the arguments for constants: a chain on such a device never moved."""
    with stand_in_device() as device:
        state = torch.zeros(3, device=device)
        step = compiled(lambda z: z.add_(1.0), state, enabled=False, calls=100)
        assert step.mode == "eager"
        for _ in range(3):
            step(state)
        assert state.cpu().tolist() == [3.0] * 3
