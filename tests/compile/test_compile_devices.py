"""The traced steps hold what CUDA takes: constants are no arguments, so that no call would show where they lie.

A fit on the stand-in device hands its steps to ``compiled``. Each is traced there as for inductor, and runs once more
on fake CUDA tensors, as inductor runs it to learn shapes.
"""

from __future__ import annotations

import pytest
import torch
from stand_in_device import CPU, NAME, ElsewhereTensor, stand_in_device
from test_contract import METHODS, num_draws
from test_law_device import X, everything, method_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pyrobnn.model.compile import Compiled
from pyrobnn.model.compile.inductor import DECOMPOSITIONS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # fits this short are told so
_CUDA = torch.device("cuda", 0)
#: operators that take tensors of the CPU of any size beside those of CUDA
_MIXED = {
    torch.ops.aten._to_copy,
    torch.ops.aten.copy_,
    torch.ops.aten.index,
    torch.ops.aten.index_put_,
}


def on_cuda(value):
    """The stand-in device is called CUDA."""
    there = isinstance(value, torch.device) and value.type == NAME
    return _CUDA if there else value


def replayed(graph: GraphModule, *inputs: torch.Tensor) -> None:
    """Run the graph on fake CUDA tensors; AssertionError where one of more than 0 dimensions on the CPU meets them."""
    with FakeTensorMode():

        def fake(value: torch.Tensor) -> torch.Tensor:
            device = _CUDA if isinstance(value, ElsewhereTensor) else value.device
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )

        values: dict[Node, object] = {}
        given = iter(inputs)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = fake(next(given))
            elif node.op == "get_attr":
                values[node] = fake(getattr(graph, node.target))
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.get)
                args, kwargs = pytree.tree_map(on_cuda, (args, kwargs))
                tensors = [
                    leaf
                    for leaf in pytree.tree_leaves((args, kwargs))
                    if isinstance(leaf, torch.Tensor)
                ]
                here = [
                    tuple(tensor.shape)
                    for tensor in tensors
                    if tensor.device == CPU and tensor.dim()
                ]
                mixed = here and len(here) < len(tensors)
                packet = getattr(node.target, "overloadpacket", None)
                assert not mixed or packet in _MIXED, (
                    f"{node.format_node()} takes {here} of the CPU"
                )
                values[node] = node.target(*args, **kwargs)


def views_of_the_cpu(graph: GraphModule) -> list[str]:
    """Scalars read from a longer tensor of the CPU: no literals to inductor, and no memory that CUDA can read."""
    constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
    long = [
        node
        for node in constants
        if getattr(graph, node.target).device == CPU and getattr(graph, node.target).dim()
    ]
    return [
        user.format_node() for node in long for user in node.users if user.op == "call_function"
    ]


class _Tracing(TorchDispatchMode):
    """The tracer, which torch puts below modes like the stand-in's, sees operators before they are taken apart."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tracer = proxy_tensor.get_proxy_mode()
        if tracer is None:
            return func(*args, **(kwargs or {}))
        with proxy_tensor.disable_proxy_modes_tracing(), self:
            return tracer.__torch_dispatch__(func, types, args, kwargs)


def traced(fn, *example) -> GraphModule:
    """The graph that inductor would be given."""
    leaves, spec = pytree.tree_flatten(example)
    inputs = [leaf.detach().clone() for leaf in leaves]
    with torch.no_grad(), _Tracing():
        graph = make_fx(
            lambda *flat: fn(*pytree.tree_unflatten(list(flat), spec)),
            decomposition_table=DECOMPOSITIONS,
        )(*inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


@pytest.fixture
def device(monkeypatch):
    # constants of the stand-in are traced like those of CUDA
    monkeypatch.setattr(
        proxy_tensor, "HANDLED_TYPES", (*proxy_tensor.HANDLED_TYPES, ElsewhereTensor)
    )
    monkeypatch.setattr(
        "pyrobnn.inference.fitting.problem.check_device",
        lambda given: given and torch.device(given),
    )
    with stand_in_device() as device:
        yield device


@pytest.fixture
def steps(monkeypatch):
    """The graph and the example of every step that is compiled."""
    seen: list[tuple[GraphModule, list[torch.Tensor]]] = []

    def compiled(fn, *example, **options):
        seen.append((traced(fn, *example), pytree.tree_leaves(example)))
        return Compiled(fn, "eager", 0.0)

    for module in ("hmc.stepper", "optim.minimize", "chain_steps", "tempering"):
        monkeypatch.setattr(f"pyrobnn.inference.{module}.compiled", compiled)
    return seen


def test_scalars_of_the_cpu_stay_literals(device):
    half = torch.tensor(0.5)
    three = torch.tensor(3.0)
    z = torch.ones(4, device=device)
    far = torch.arange(4.0, device=device)
    graph = traced(lambda z: z * (half + three) + three * far * far, z)
    assert views_of_the_cpu(graph) == []
    torch.testing.assert_close(graph(z).cpu(), 3.5 + 3 * torch.arange(4.0) ** 2)
    replayed(graph, z)


def test_a_constant_left_on_the_cpu_is_found(device):
    far = torch.arange(4.0, device=device)
    z = torch.ones(4, device=device)
    graph = traced(lambda z: z * far, z)
    name = next(node.target for node in graph.graph.nodes if node.op == "get_attr")
    setattr(graph, name, getattr(graph, name).cpu())
    assert views_of_the_cpu(graph)
    with pytest.raises((AssertionError, RuntimeError), match="of the CPU|device"):
        replayed(graph, z)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "SGLD" else pytest.mark.slow)
        for name in METHODS
        if name != "NUTS-pyro"  # compiles nothing
    ],
)
def test_the_steps_of_every_method_lie_on_one_device(name, steps, device):
    model, y = everything()
    method_of(name).fit(model, X, y, seed=3, device=device, **num_draws(name))
    assert steps
    for graph, inputs in steps:
        assert views_of_the_cpu(graph) == []
        replayed(graph, *inputs)
