"""What may move in torch, and what a wrong pass would do: right numbers all the same, and machine code where possible.

Each test plants one change. ``compiled`` is given functions like those of the library: a batched gradient, and a step
that writes its state in place and returns nothing (which lies on the stack where our passes run).
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.func import grad_and_value, vmap
from torch.torch_version import TorchVersion

import pyrobnn as pb
from pyrobnn.core import private, private_trace
from pyrobnn.model import Density
from pyrobnn.model.compile import (
    agreement,
    code_folder,
    compiled,
    inductor,
    materialize,
    right_code,
)
from pyrobnn.model.compile.agreement import disagreement
from pyrobnn.model.gradient import batched_gradient
from pyrobnn.model.likelihoods.parameters import point

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pyrobnn"


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch, tmp_path):
    """Every graph is checked, also one that another test or an earlier run has compiled."""
    right_code.RIGHT.clear()
    monkeypatch.setattr(right_code, "_record", lambda identity: tmp_path / "right" / identity)


def gradient(z):
    """Loss and gradient of a small layer, three chains at once."""
    x = torch.linspace(-1.0, 1.0, 40).unsqueeze(1)

    def loss(w):
        return (torch.tanh(x @ w.unsqueeze(0)).sum(1) - x[:, 0].exp()).square().sum() / w[0].exp()

    return vmap(grad_and_value(loss))(z)


def step(z, out):
    """One descent, written in place."""
    slope, value = gradient(z)
    out.copy_(value)
    z.sub_(0.01 * slope)


def example():
    return torch.linspace(-1.0, 1.0, 18).reshape(3, 6), torch.zeros(3)


def assert_right(mode: str = "inductor") -> None:
    writes = compiled(step, *example())
    assert writes.mode == mode
    mine = example()
    exact = example()
    for _ in range(3):
        writes(*mine)
        step(*exact)
    torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_function_is_traced_once_also_where_rounding_has_to_be_weighed(monkeypatch):
    monkeypatch.setattr("pyrobnn.model.compile.agreement._PLAIN", 0)
    monkeypatch.setattr("pyrobnn.model.compile.agreement._OF_LARGEST", 0)
    weighed = []
    traces = []
    trace = private_trace.trace
    genuine = agreement._WithNoise
    monkeypatch.setattr(
        agreement, "_WithNoise", lambda *rest: (weighed.append(1), genuine(*rest))[1]
    )
    monkeypatch.setattr(private_trace, "trace", lambda *rest: (traces.append(1), trace(*rest))[1])
    assert compiled(gradient, example()[0]).mode == "inductor"
    assert weighed and len(traces) == 1


def test_a_graph_is_checked_once_whatever_its_data(monkeypatch):
    checked = []
    monkeypatch.setattr("pyrobnn.model.compile.disagreement", lambda *_: checked.append(1))
    # instead of the compiler
    monkeypatch.setattr(
        private, "compile_graph", lambda graph, *_: torch.fx.GraphModule(graph, graph.graph).forward
    )
    z = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)

    def times(factor, power=2, data=1.0):
        table = torch.full((4,), data)
        fn = lambda z: (factor * z.pow(power) * table).sum(1)  # noqa: E731
        torch.testing.assert_close(compiled(fn, z)(z), fn(z))
        return len(checked)

    assert times(0.5) == times(0.5, data=3.0) == 1
    assert times(0.25) == 2
    assert times(0.5, power=3) == 3
    assert times(0.5) == 3
    z = z.double()
    assert times(0.5) == 4
    z = z[:2]
    assert times(0.5) == 5
    z = z.T.contiguous().T
    assert times(0.5) == 6


@pytest.mark.slow
def test_the_next_process_loads_what_was_found_right_without_inductor(monkeypatch, tmp_path):
    assert_right()
    right_code.RIGHT.clear()  # as in a new process
    with monkeypatch.context() as without:
        for used in ("pyrobnn.core.private.compile_graph", "pyrobnn.model.compile.disagreement"):
            without.setattr(used, lambda *_: pytest.fail("a library is there"))
        assert_right()
    right_code.RIGHT.clear()
    for record in (tmp_path / "right").iterdir():
        record.write_text(str(tmp_path / "gone.so"))
    assert_right()  # and makes it again where the library is gone


def test_a_graph_is_traced_without_a_mode_for_its_shapes(monkeypatch):
    """Torch's own tracer makes one for every operation, each with the stack of calls: half of its time."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = []
    genuine = FakeTensorMode.__init__
    monkeypatch.setattr(
        FakeTensorMode, "__init__", lambda *a, **b: (made.append(1), genuine(*a, **b))[1]
    )
    graph = inductor.traced(gradient, [example()[0]])
    assert len(graph.graph.nodes) > 20
    assert not made


# -- names that may move ---------------------------------------------------------------------------------------------


def used(path: Path) -> set[str]:
    """The private names of torch and Pyro that a file says: imports, attributes, strings that are dotted names."""
    found = set()
    for node in ast.walk(ast.parse(source(path))):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = ["torch._version"] if node.attr == "_version" else [ast.unparse(node)]
        elif isinstance(node, ast.JoinedStr):
            names = ["".join(ast.unparse(part).strip("'\"") for part in node.values)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        for name in names:
            root, *rest = name.split(".")
            hidden = [
                p for p in rest if p in ("experimental", "prims") or re.match("_[^_]|inductor", p)
            ]
            if (
                root in {"torch", "nn", "pyro", "poutine", "tyxe"}
                and re.fullmatch(r"[\w.]+", name)
                and hidden
            ):
                found.add(name)
    return found


def source(path: Path) -> str:
    """The Python of a file; of a notebook its cells, without magics."""
    text = path.read_text("utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(
        line for cell in cells for line in "".join(cell).splitlines() if line[:1] not in "%!"
    )


PRIVATE = sorted((PACKAGE / "core").glob("private*.py"))
#: whose loss is told: nothing can be traced, or the compiler is that of torch.compile
TOLD = {"torch.fx.experimental.proxy_tensor.make_fx": "eager"}
#: names of what does the same, which go with it
TWINS = {
    "torch.fx.experimental.proxy_tensor.make_fx": "torch.utils._python_dispatch.TorchDispatchMode"
}
#: the names of torch; of ``torch._ops`` types alone
NAMES = sorted(
    name
    for name in set().union(*map(used, PRIVATE))
    if not name.endswith((".ir", ".compile_fx")) and not name.startswith("torch._ops")
)
KEYS = [*inductor._INDUCTOR, "cpp_wrapper", "cpp.threads", "aot_inductor.allow_stack_allocation"]


def remove(monkeypatch, names) -> list[str]:
    """Take names away, with all that a module of that name holds; returns those that were asked for, as it grows."""
    asked = []
    find = private.find

    def lacking(name):
        if any(name == missing or name.startswith(f"{missing}.") for missing in names):
            asked.append(name)
            return None
        return find(name)

    monkeypatch.setattr(private, "find", lacking)
    return asked


def looped(x, y):
    slope = pyro.sample("slope", dist.Normal(torch.zeros(()), 1.0))
    _, mean = pb.scan(lambda sum, each: (sum + slope * each, sum), torch.zeros(()), x)
    pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)


def test_private_names_of_torch_and_pyro_are_used_behind_the_gate_alone():
    outside = [path for path in PACKAGE.rglob("*.py") if path not in PRIVATE]
    users = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert len(users) > 15
    assert not {path.name: used(path) for path in (*outside, *users) if used(path)}
    assert len(NAMES) > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_costs_speed_alone(name, monkeypatch):
    asked = remove(monkeypatch, {name, TWINS.get(name, name)})
    mode = TOLD.get(name, "inductor")
    with (
        pytest.warns(UserWarning, match=re.escape(name))
        if name in TOLD
        else contextlib.nullcontext()
    ):
        assert_right(mode)
    density = Density(looped, (torch.arange(6.0), torch.zeros(6)))  # longer than what is unrolled
    z = torch.zeros(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = compiled(batched_gradient(density.log_joint, z)[0], z)
    exact = batched_gradient(density.log_joint, z + 0.5)[0](z + 0.5)
    torch.testing.assert_close(fast(z + 0.5), exact)
    materialize(z)
    with pyro.get_param_store().scope():
        point("w", torch.zeros(2))
    assert asked


@pytest.mark.parametrize("compile", [True, False])
def test_a_fit_with_every_name_gone_is_the_uncompiled_one(compile, monkeypatch):
    x = torch.linspace(-1.0, 1.0, 12)[:, None]
    net = pb.networks.mlp(1, (3,), seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))

    def draws(compile):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            method = pb.NUTS(num_chains=2, num_warmup=10, max_tree_depth=3, compile=compile)
            posterior = method.fit(model, x, x.sin(), num_draws=5, seed=0)
        return posterior.draws, [str(each.message) for each in told]

    expected, _ = draws(False)
    remove(monkeypatch, set(NAMES))
    found, told = draws(compile)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not any("its Python" in each for each in told), "the program is not to blame"


def fitted_guide():
    """A posterior whose guide holds fitted weights far from the initial ones, its model and inputs."""
    x = torch.linspace(-1.0, 1.0, 12)[:, None]
    net = pb.networks.mlp(1, (3,), seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian("learned"))
    with warnings.catch_warnings(action="ignore"):
        posterior = pb.SVI(num_steps=200, lr=0.05, compile=False).fit(
            model, x, x.sin(), num_draws=5, seed=0
        )
    return posterior, model, x


def replayed_scale(posterior, model, x) -> torch.Tensor:
    """The noise of the model that is replayed against the guide."""
    with torch.random.fork_rng(devices=[]), pyro.get_param_store().scope():
        trace = pyro.poutine.trace(posterior.guide).get_trace(x)
        data = (
            pyro.poutine.trace(pyro.poutine.replay(model, trace))
            .get_trace(x)
            .nodes["likelihood.data"]["fn"]
        )
    return data.base_dist.scale.flatten()[0]


@pytest.mark.usefixtures("few_rounds")
def test_a_guide_is_asked_without_private_names():
    posterior, model, x = fitted_guide()
    scale = posterior.draws["likelihood.scale"][0, 0].flatten()[0]
    torch.testing.assert_close(replayed_scale(posterior, model, x), scale)
    assert not any("_PYRO_STACK" in source(path) for path in PRIVATE)


@pytest.mark.usefixtures("few_rounds")
def test_handlers_that_cannot_be_asked_are_an_error_where_draws_are_handed_over_and_no_fit_stops(
    monkeypatch,
):
    expected, model, x = fitted_guide()
    monkeypatch.delattr("pyro.poutine.messenger.block_messengers")
    posterior, model, x = fitted_guide()
    torch.testing.assert_close(posterior.draws, expected.draws)
    assert posterior.predict(x).mean.isfinite().all()
    with pytest.raises(private.Gone, match="posterior.predict instead of"):
        replayed_scale(posterior, model, x)
    with pytest.raises(private.Gone), torch.random.fork_rng(devices=[]):
        pyro.infer.Predictive(model, guide=posterior.guide, num_samples=2)(x)


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize(
    "method", [pb.MAP(num_steps=20, compile=False), pb.NUTS(num_warmup=5, compile=False)]
)
def test_a_torch_that_checks_values_in_another_way_stops_no_fit(method, validated, monkeypatch):
    x = torch.linspace(-1.0, 1.0, 12)[:, None]
    net = pb.networks.mlp(1, (3,), seed=0)
    options = {} if method.kind == "point" else {"num_draws": 3}
    with pyro.validation_enabled(validated), warnings.catch_warnings(action="ignore"):
        # the priors keep the flag
        model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
        expected = method.fit(model, x, x.sin(), seed=0, **options)
        monkeypatch.delattr(torch.distributions.Distribution, "_validate_sample")
        posterior = method.fit(model, x, x.sin(), seed=0, **options)
    torch.testing.assert_close(posterior.draws, expected.draws)
    assert not hasattr(torch.distributions.Distribution, "_validate_sample")


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_a_missing_setting(key, monkeypatch):
    """It is done without, and all that is ours is used: a setting is speed alone."""
    import torch._inductor.config as config

    class Without:
        def __getattr__(self, name):
            if name == key:
                missed.append(key)
                raise AttributeError(f"torch._inductor.config.{key} does not exist")
            return getattr(config, name)

        @staticmethod
        def patch(settings):
            assert key not in settings
            return config.patch(settings)

    missed = []
    find = private.find
    monkeypatch.setattr(
        private, "find", lambda name: Without() if name == config.__name__ else find(name)
    )
    monkeypatch.setattr(inductor, "_publicly", lambda *_: pytest.fail("not ours"))
    assert_right()
    assert missed == [key], "asked for once"


@pytest.mark.slow
def test_an_older_torch_than_the_declared_one_has_the_public_way_alone(monkeypatch, caplog):
    monkeypatch.setattr(inductor, "_fused", lambda *_: pytest.fail("used"))
    monkeypatch.setattr(inductor, "OLDEST", "99.0")
    with caplog.at_level(logging.WARNING, "pyrobnn"):
        assert_right()
    assert f"torch {torch.__version__} is older than 99.0" in caplog.text


def test_the_oldest_torch_is_the_declared_one():
    declared = re.search(r"^ *torch>=([\d.]+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert declared is not None and declared[1] == inductor.OLDEST


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu", "2.14.1+cu130", "2.100.0", "3.0.0"])
def test_a_torch_that_no_list_knows_is_judged_by_the_check_alone(version, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(inductor, "_publicly", lambda *_: pytest.fail("not ours"))
    # instead of the compiler
    monkeypatch.setattr(
        private, "compile_graph", lambda graph, *_: torch.fx.GraphModule(graph, graph.graph).forward
    )
    assert_right()
    assert not caplog.text


@pytest.mark.slow
def test_the_public_way_runs_small_steps_on_one_thread(monkeypatch):
    """Every thread waits at each barrier: on a busy machine that takes longer than the step."""
    monkeypatch.setattr(inductor, "OLDEST", "99.0")
    settings = []
    genuine = torch.compile

    def recorded(function, options):
        settings.append(options)
        return genuine(function, options=options)

    monkeypatch.setattr(torch, "compile", recorded)
    assert_right()
    assert settings[-1]["cpp.threads"] == 1
    x = torch.zeros(2**17)
    assert compiled(torch.sin, x).mode == "inductor"
    assert "cpp.threads" not in settings[-1]


@pytest.mark.slow
def test_the_public_way_does_without_an_option_that_a_release_lacks(monkeypatch):
    monkeypatch.setattr(inductor, "OLDEST", "99.0")
    monkeypatch.setattr(inductor, "_INDUCTOR", {**inductor._INDUCTOR, "of_no_release": 1})
    monkeypatch.delattr(torch.compiler, "skip_all_guards_unsafe", raising=False)
    assert_right()


@pytest.mark.slow
def test_publicly_compiled_functions_that_differ_in_a_constant_alone_are_two(monkeypatch):
    """No guard tells one from the other."""
    monkeypatch.setattr(inductor, "OLDEST", "99.0")
    z = torch.linspace(-1.0, 1.0, 7)

    def times(factor, data):
        table = torch.full((7,), data)
        return lambda z: factor * z.exp() * table

    functions = [times(factor, data) for factor in (2.0, 3.0) for data in (1.0, 5.0)]
    calls = [compiled(fn, z) for fn in functions]
    for fn, call in zip([*functions, *functions], [*calls, *calls]):
        assert call.mode == "inductor"
        torch.testing.assert_close(call(2 * z), fn(2 * z))


def test_a_library_that_a_killed_compile_left_half_written_is_removed(monkeypatch, tmp_path):
    whole, torn, young = (tmp_path / "ab" / f"{name}.so" for name in ("whole", "torn", "young"))
    whole.parent.mkdir()
    shutil.copy(torch._C.__file__, whole)
    for path in (torn, young):
        path.write_bytes(whole.read_bytes()[:3000])
    for path in (whole, torn):
        os.utime(path, (0, 0))
    monkeypatch.setenv(code_folder.FOLDER, str(tmp_path))
    code_folder.remove_torn.__wrapped__()
    assert whole.exists() and young.exists() and not torn.exists()


@pytest.mark.slow
def test_a_decomposition_that_fails_costs_speed_alone(monkeypatch, caplog):
    def broken(graph):
        raise AttributeError("'OpOverload' object has no attribute '_schema'")

    monkeypatch.setattr(inductor, "library_calls", broken)
    assert_right()
    assert "_schema" in caplog.text


# -- wrong numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("public", ["right", "wrong"])
def test_a_wrong_decomposition_is_caught(public, monkeypatch, caplog):
    """The public way, checked as well, is the next; the graph the last."""
    wrong = {**inductor.DECOMPOSITIONS, torch.ops.aten.exp.default: lambda x: x.exp2()}
    monkeypatch.setattr(inductor, "DECOMPOSITIONS", wrong)
    if public == "right":
        monkeypatch.setattr(inductor, "_publicly", lambda graph, _: graph)
        assert_right("inductor")
        assert "the function is slower than it might be" in caplog.text
        assert "own compilation gave wrong numbers (a difference of" in caplog.text
        return
    monkeypatch.setattr(
        inductor, "_publicly", lambda graph, _: lambda z, out: graph(z, out.mul(2.0))
    )
    with pytest.warns(
        UserWarning,
        match=r"gives wrong numbers when compiled.*; by torch.compile alone.*report this",
    ):
        assert_right("graph")


@pytest.mark.parametrize("write", ["too little", "elsewhere"])
@pytest.mark.parametrize("length", [10, 2**22 + 1], ids=["copied", "large"])
def test_what_is_written_into_an_argument_is_compared(write, length):
    def fn(z, log):
        log[3].copy_(z)
        return z + 1

    def call(z, log):
        if write == "elsewhere":
            log[4].copy_(z)
        return z + 1

    def trace():
        return inductor.traced(fn, inputs)

    inputs = [torch.tensor(2.5), torch.zeros(length)]
    assert disagreement(fn, fn, inputs, trace) is None
    inputs = [torch.tensor(2.5), torch.zeros(length)]
    assert "difference of 2.5" in disagreement(fn, call, inputs, trace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_not_a_wrong_number(dtype):
    """A sum that all but cancels, a tie between branches, and NaN: what differs there differs by rounding."""
    x = torch.linspace(1.0, 2.0, 10_000, dtype=dtype).pow(3)

    def fn(z):
        residual = x * z - x.mean()
        total = (residual - residual.mean()).sum()
        return total, torch.where(total > 0, 1.0, -1.0), (z - 10).log()

    def otherwise(z):
        residual = (x * z - x.mean()).flip(0)
        total = -((residual.mean() - residual).cumsum(0)[-1])
        return total, torch.where(total > 0, 1.0, -1.0), (z - 10).log()

    z = torch.ones((), dtype=dtype)
    assert disagreement(fn, otherwise, [z], lambda: inductor.traced(fn, [z])) is None
    wrong = disagreement(
        fn, lambda z: (fn(z)[0] + 1, *fn(z)[1:]), [z], lambda: inductor.traced(fn, [z])
    )
    assert wrong is not None
    finite = disagreement(fn, lambda z: (*fn(z)[:2], z), [z], lambda: inductor.traced(fn, [z]))
    assert finite is not None


def one_by_one(terms):
    """A sum in the order of the rows, every step rounded, as machine code may add."""
    return torch.from_numpy(terms.numpy().cumsum(0)[-1])


@pytest.mark.parametrize("order", ["random", "sorted"])
@pytest.mark.parametrize("num", [1000, 30_000])
def test_what_a_sum_rounds_grows_with_its_terms(num, order):
    """Sums that cancel, densities of many rows, gradients at a mode: any order is right, a factor of 1.001 is not."""
    cases = {
        "cancels": lambda add: lambda x: add(torch.cat([x.abs(), -x.abs().flip(0)])),
        "gradient": lambda add: lambda x: add((x + 3 - add(x + 3) / num) * x.abs()),
        "centred": lambda add: lambda x: add(x + 3 - add(x + 3) / num),
        "inputs": lambda add: lambda x: add(x),
        "density": lambda add: lambda x: add(-0.5 * x.square() - 0.9189),
        "ratio": lambda add: lambda x: add(-0.5 * x.square()) + num / 2,
    }
    x = torch.randn(num, 6, generator=torch.Generator().manual_seed(num))
    x = x.sort(0).values if order == "sorted" else x
    adders = (lambda terms: terms.sum(0), lambda terms: terms.T @ torch.ones(len(terms)))
    for (name, case), add in itertools.product(cases.items(), adders):
        fn = case(add)
        wrong = case(lambda terms, add=add: 1.001 * add(terms))
        trace = lambda fn=fn: inductor.traced(fn, [x])  # noqa: E731
        assert disagreement(fn, case(one_by_one), [x], trace) is None, name
        if name not in ("cancels", "inputs"):  # those may come to nothing but rounding
            assert disagreement(fn, wrong, [x], trace) is not None, name


@pytest.mark.parametrize("refused", ["fails", "is wrong"])
def test_the_first_error_of_a_compiler_is_read_first(refused, monkeypatch):
    """Then that of the public way."""

    def fail(*_):
        raise RuntimeError("the first")

    def publicly(graph, inputs):
        if refused == "fails":
            raise RuntimeError("the second")
        return lambda z: graph(z) + 1.0

    monkeypatch.setattr(inductor, "_fused", fail)
    monkeypatch.setattr(inductor, "_publicly", publicly)
    second = "RuntimeError: the second" if refused == "fails" else "a difference of"
    both = rf"could not be compiled \(RuntimeError: the first; by torch.compile alone: {second}"
    with pytest.warns(UserWarning, match=both):
        assert compiled(torch.sin, torch.ones(3)).mode == "graph"
    monkeypatch.setattr(inductor, "OLDEST", "99.0")
    with pytest.warns(UserWarning, match=rf"is older than 99.0; by torch.compile alone: {second}"):
        assert compiled(torch.sin, torch.ones(3)).mode == "graph"


def test_a_sign_that_rounding_decides_is_no_wrong_number():
    """Adam's first update is the rate times the sign of a gradient, whatever is left of one that cancels."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(200, columns, generator=generator) for columns in (2000, 1))
    x[-1] = -(x[:-1].double() * y[:-1].double()).sum(0) / y[-1]

    def update(slope):
        return 0.003 * slope / (slope.abs() + 1e-8)

    def fn(x, y):
        return update((x * y).sum(0))

    def otherwise(x, y):  # the same sum in another order
        return update((x * y).reshape(25, 8, -1).sum(0).sum(0))

    def trace():
        return inductor.traced(fn, [x, y])

    assert int(((fn(x, y) - otherwise(x, y)).abs() > 0.001).sum()) > 500
    assert disagreement(fn, otherwise, [x, y], trace) is None
    x[-1, 7] += 0.1  # a gradient that rounding leaves alone
    wrong = disagreement(
        fn, lambda x, y: fn(x, y) * (1 - 2 * (torch.arange(2000) == 7)), [x, y], trace
    )
    assert "a difference of 0.006" in wrong


@pytest.mark.slow
def test_random_draws_are_compared_from_one_state():
    def fn(z):
        return z + torch.randn_like(z), torch.rand(3)

    before = torch.get_rng_state()
    assert compiled(fn, torch.zeros(4)).mode == "inductor"
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_import_needs_no_private_name():
    """With every module that the compile layer imports late taken away."""
    program = (
        "import sys, torch, pyro\n"
        "for name in list(sys.modules):\n"
        "    if name.startswith(('torch._inductor', 'torch._guards', 'torch._subclasses', 'torch._ops',\n"
        "                        'torch.fx.experimental', 'torch.utils._pytree')):\n"
        "        sys.modules[name] = None\n"
        "for name in ('torch._inductor', 'torch._inductor.config', 'torch._dynamo'):\n"
        "    sys.modules[name] = None\n"
        "import pyrobnn.model.compile, pyrobnn.model.compile.inductor, pyrobnn.inference.nuts\n"
        "assert pyrobnn.model.compile.compiled(torch.sin, torch.ones(2), enabled=False)(torch.ones(2)).shape == (2,)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_strides_of_indices_are_those_that_inductor_finds():
    from sympy import symbols
    from torch._inductor.codegen import cpp
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    x, y = symbols("x y", integer=True)
    affine = [4 * x + y, x, y, 3 * x - 3 * x + y, 4 * (x + 2 * y), x * y, x - x, x * (x + 1)]
    indices = [
        *affine,
        FloorDiv(x, 4),
        FloorDiv(x, 32) + x,
        FloorDiv(y, 3) + 2 * x,
        ModularIndexing(x, 1, 16),
    ]
    plainly = cpp.stride_at_vec_range
    with private._quick_lookups():
        assert cpp.stride_at_vec_range is not plainly
        for index in indices:
            for variable in (x, y):
                assert cpp.stride_at_vec_range(index, variable, 16) == plainly(
                    index, variable, 16
                ), index
        assert cpp.stride_at_vec_range(x < 3, y) == 0
    assert cpp.stride_at_vec_range is plainly


def test_no_instruction_set_is_tried_and_inductor_still_tries_for_others(monkeypatch):
    """Each trial is a run of the C++ compiler and a process: a third of a first compile."""
    from torch._inductor import cpu_vec_isa

    tried = []
    genuine = cpu_vec_isa.valid_vec_isa_list
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda *_: tried.append(1))
    assert_right()
    assert not tried
    assert cpu_vec_isa.valid_vec_isa_list is genuine
