from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import pyrobnn as pb
from pyrobnn.core.private_trace import trace
from pyrobnn.model.compile import CudaGraph, compiled, inductor
from pyrobnn.model.compile.code_folder import FOLDER
from pyrobnn.model.compile.graph_nodes import library_calls
from pyrobnn.model.compile.products import DECOMPOSITIONS
from pyrobnn.model.compile.right_code import Code, identity_of

SLOW = pytest.mark.slow


def _energy(z):
    return (torch.tanh(z) * torch.linspace(0.0, 1.0, 5)).pow(2).sum()


@pytest.mark.slow
def test_compiled_equals_eager_with_gradients():
    z = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    fn = vmap(grad_and_value(_energy))
    fast = compiled(fn, z)
    assert fast.mode == "inductor"
    assert fast.seconds > 0
    torch.testing.assert_close(fast(z), fn(z), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(7, 1, 4), (7, 3, 1), (1, 6, 4), (5, 3, 4), (9, 12, 11), (9, 40, 11)],
)
def test_small_batched_products(rows, inner, columns):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, rows, inner, generator=generator)
    b = torch.randn(2, inner, columns, generator=generator)
    torch.testing.assert_close(compiled(torch.bmm, a, b)(a, b), a @ b)
    c = torch.ones(columns)
    torch.testing.assert_close(compiled(torch.addmm, c, a[0], b[0])(c, a[0], b[0]), c + a[0] @ b[0])


@pytest.mark.slow
@pytest.mark.parametrize("units", [10, pytest.param(16, marks=SLOW)])
def test_tiny_products_read_what_was_stored(units):
    """One point, two layers of few units: inductor stored the activations in another order than they were read in."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(104, 1, generator=generator)
    z = torch.randn(units * (units + 4), generator=generator)

    def loss(z):
        a, b, c, d, e = z.split([units, units, units * units, units, units])
        h = torch.relu(x @ a[None] + b)
        h = torch.relu(h @ c.view(units, units).T + d)
        return (h @ e[:, None]).square().sum()

    fn = grad_and_value(loss)
    torch.testing.assert_close(
        compiled(fn, z)(z), fn(z), rtol=1e-5, atol=1e-2
    )  # of thousands; no warning either


@pytest.mark.slow
@pytest.mark.parametrize("chains", [1, 4, 40])
def test_a_linear_predictor_of_few_features_needs_no_library(chains):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 5, generator=generator)
    w = torch.randn(chains, 5, generator=generator)
    fn = vmap(grad_and_value(lambda w: (x @ w).cos().sum()))
    assert not library_calls(make_fx(fn, decomposition_table=DECOMPOSITIONS)(w))
    torch.testing.assert_close(compiled(fn, w)(w), fn(w), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_results_are_the_callers_and_in_place_functions_agree():
    """Intermediates may lie on the stack; what a call returned stays as it was when the function is called again."""
    from torch._inductor.codegen import common

    def fn(z):
        return torch.tanh(z).cumsum(0).exp() * z.sum(), z.softmax(0)

    def in_place(z, a, b):
        for mine, value in zip((a, b), fn(z), strict=True):
            mine.copy_(value)

    z = torch.linspace(-1, 1, 7)
    other = torch.linspace(0, 3, 7)
    fast = compiled(fn, z)
    a = torch.empty(7)
    b = torch.empty(7)
    writes = compiled(in_place, z, a, b)
    kept = fast(z)
    fast(other)
    torch.testing.assert_close(kept, fn(z))
    writes(other, a, b)
    torch.testing.assert_close((a, b), fn(other))
    assert "ArrayRef" not in common.device_codegens["cpu"].cpp_wrapper_codegen.__name__


@pytest.mark.slow
def test_nested_arguments_and_in_place_writes():
    def fn(params, buffer, slot):
        buffer.index_put_((torch.arange(2), slot), params["a"])
        return {"sum": params["a"] + params["b"]["c"]}

    params = {"a": torch.ones(2, 3), "b": {"c": torch.ones(2, 3)}}
    buffer = torch.zeros(2, 4, 3)
    fast = compiled(fn, params, buffer, torch.tensor([1, 2]))
    assert buffer.sum() == 0, "tracing must not write into the example"
    out = fast(params, buffer, torch.tensor([0, 3]))
    assert torch.equal(out["sum"], torch.full((2, 3), 2.0))
    assert buffer[0, 0].sum() == 3 and buffer[1, 3].sum() == 3 and buffer.sum() == 6


@pytest.mark.slow
def test_random_draws_agree_with_eager_and_the_generator_is_left_alone():
    def fn(z):
        return z + torch.randn_like(z)

    z = torch.zeros(4, 3)
    before = torch.get_rng_state()
    fast = compiled(fn, z)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drawn = fast(z), fast(z)
        torch.manual_seed(3)
        assert torch.equal(drawn[0], fn(z)) and torch.equal(drawn[1], fn(z))


def test_disabled_is_the_function_itself():
    fast = compiled(torch.sin, torch.ones(2), enabled=False)
    assert fast.mode == "eager" and fast.seconds == 0.0
    assert torch.equal(fast(torch.ones(2)), torch.ones(2).sin())


@pytest.mark.slow
def test_no_gradient_flows_through_the_result():
    z = torch.ones(2, requires_grad=True)
    assert not compiled(torch.sin, z)(z).requires_grad


def test_control_flow_on_values_falls_back_with_one_warning():
    def fn(z):
        return z if z.sum() > 0 else -z

    with pytest.warns(
        UserWarning,
        match=r"my model could not be traced \(its Python looks at .* assert.*torch.where",
    ) as seen:
        slow = compiled(fn, torch.ones(2), name="my model")
    assert len(seen) == 1
    assert slow.mode == "eager"
    assert torch.equal(slow(-torch.ones(2)), torch.ones(2))


def test_without_a_compiler_the_graph_is_interpreted_with_one_warning():
    import torch._inductor.config as config

    with (
        config.patch({"cpp.cxx": ("/nowhere/c++",), "force_disable_caches": True}),
        pytest.warns(UserWarning, match=r"could not be compiled \(NoCompiler: .* install") as seen,
    ):
        slow = compiled(lambda z: z.sin() * 1.2345, torch.ones(2))
    assert len(seen) == 1
    assert slow.mode == "graph"
    torch.testing.assert_close(slow(torch.ones(2)), torch.ones(2).sin() * 1.2345)


@pytest.mark.slow
def test_inductor_settings_are_left_as_they_were():
    import torch._inductor.config as config

    before = config.save_config()
    frozen = gc.get_freeze_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.cos, torch.ones(2))
    assert config.save_config() == before
    assert gc.get_freeze_count() <= frozen


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "vectorized"), [(100, False), (1000, True)])
def test_a_large_function_is_vectorized_and_a_small_one_soon_made(rows, vectorized):
    def write(z, out):
        out.copy_((z.exp() + rows).sin())

    tensors = [torch.ones(rows), torch.empty(rows)]
    library = Path(inductor.machine_code(write, tensors).call.path)
    assert ("at::vec" in library.with_suffix(".cpp").read_text()) == vectorized


def test_bad_arguments():
    with pytest.raises(TypeError, match="holds a int"):
        compiled(lambda z, k: z * k, torch.ones(2), 3)
    with pytest.raises(ValueError, match="every buffer on CUDA"):
        CudaGraph(torch.sin, torch.ones(2))


VIEWS = {
    "every other row": lambda x: x[::2],
    "some columns": lambda x: x[:, 1:4],
    "rows of the transpose": lambda x: x.mT[2:],
    "one row repeated": lambda x: x[3].expand(4, -1),
    "one row": lambda x: x[5:6],
}


@pytest.mark.parametrize(
    ("name", "enabled"),
    [
        pytest.param(name, enabled, marks=SLOW if enabled is True else ())
        for name in VIEWS
        for enabled in (True, "trace")
    ],
)
def test_views_with_gaps_are_read_where_they_lie(name, enabled):
    view = VIEWS[name]

    def step(x):
        return (x.sin() * x.sum(0)).sum(1)

    first = torch.arange(60.0).reshape(10, 6) / 60
    second = first.flip(0).contiguous()
    result = compiled(step, view(first), enabled=enabled, calls=1000)
    for base in (first, second):
        torch.testing.assert_close(result(view(base)), step(view(base)))


@pytest.mark.slow
def test_other_layouts_are_refused_before_memory_is_read():
    step = compiled(lambda a: 2 * a, torch.ones(3, 4))
    with pytest.raises(ValueError, match="compiled for other tensors"):
        step(torch.ones(4, 3).T)
    with pytest.raises(ValueError, match="compiled for other tensors"):
        step(torch.ones(3, 4), torch.ones(3))
    assert step(torch.ones(3, 4)).sum() == 24


@pytest.mark.slow
def test_the_first_compile_of_a_process_leaves_no_setting_to_the_others(tmp_path):
    """Inductor keeps what its settings are at its first registration: later results lay on the stack."""
    script = """
import torch
from pyrobnn.model.compile import compiled

z, out = torch.ones(3), torch.empty(3)
def write(z, out):
    out.copy_(z.exp())

compiled(write, z, out)
from torch._inductor.codegen import common
print(common.device_codegens["cpu"].cpp_wrapper_codegen.__name__)
"""
    env = os.environ | {FOLDER: str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env
    )
    assert "ArrayRef" not in done.stdout


def _normal(values):
    return -(values["z"] - torch.tensor([0.3, 0.7])).square().sum() / 1.7


SHORT = {"num_chains": 2, "num_warmup": 20, "max_tree_depth": 3, "compile": True}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "fits",
    [
        [
            (pb.NUTS(**SHORT), 30),
            (pb.NUTS(**SHORT), 300),
            (pb.NUTS(**SHORT | {"num_warmup": 40, "target_accept": 0.9}), 70),
        ],
        [
            (pb.MAP(num_steps=3, compile=True), None),
            (pb.MAP(num_steps=1100, lr=1e-3, compile=True), None),
        ],
        pytest.param(
            [
                (pb.SVI(num_steps=3, compile=True), 10),
                (pb.SVI(num_steps=1100, lr=1e-2, compile=True), 20),
            ],
            marks=SLOW,
        ),
        [
            (pb.SMC(num_particles=8, num_islands=2, compile=True), 8),
            (pb.SMC(num_particles=8, num_islands=2, ess=0.3, compile=True), 16),
        ],
    ],
    ids=["NUTS", "MAP", "SVI", "SMC"],
)
def test_fits_of_one_density_are_one_compiled_code(fits, monkeypatch):
    """Whatever their lengths, rates and seeds: another number of draws had taken ten seconds to compile."""
    found = []

    def graph_alone(fn, inputs):
        graph = trace(fn, inputs, DECOMPOSITIONS)
        found.append(identity_of(graph, inputs, {}))
        return Code(graph, lambda: graph, graph)

    monkeypatch.setattr("pyrobnn.model.compile.machine_code", graph_alone)
    support = {"z": dist.Normal(torch.zeros(2), 1.0)}
    for seed, (method, num_draws) in enumerate(fits):
        pb.sample(
            _normal,
            {"z": torch.zeros(2)},
            support=support,
            method=method,
            num_draws=num_draws,
            seed=seed,
        )
    assert len(found) == len(fits)
    assert len({*found}) == 1
