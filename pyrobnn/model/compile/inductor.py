"""The hand-over of a function to inductor, and the folder for compiled code.

Small products as arithmetic and the allocation on the stack rest on unwritten laws of inductor. They are tried on every
torch from :data:`OLDEST` on, and the check of the compiled function decides whether they are used: where it fails,
``torch.compile`` compiles the function.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import getpass
import hashlib
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyro
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pyrobnn.core import private

_ATEN = torch.ops.aten
_FEW_FEATURES = 8
_FEW_MULTIPLICATIONS = 2**17
#: a product of so few multiplications takes a library longer to begin than to do, and bars the stack to all the rest
_TINY = 2**15
_TINY_FEATURES = 16
_RANDOM = torch.Tag.nondeterministic_seeded
#: what leaves the fused loops for a library
_LIBRARY = {_ATEN.bmm, _ATEN.mm, _ATEN.addmm, _ATEN.convolution, _ATEN.convolution_backward}


def size(node: Node) -> int:
    """Elements of the tensor that a node computes; 0 where it is none."""
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return 0 if shape is None else shape.numel()


def library_calls(graph: GraphModule) -> list[Node]:
    """The matrix products and convolutions that remain."""
    return [
        node
        for node in graph.graph.nodes
        if getattr(node.target, "overloadpacket", None) in _LIBRARY
    ]


def materialize(tensor: Tensor) -> Tensor:
    """The same tensor, written to memory where inductor would otherwise compute it again in every loop that reads it.

    Weights that are cheap to compute, read once per datum, are the case in point. A view by ``as_strided`` would do so
    too, but reads what is not there where inductor has stored the tensor in another order than its strides.
    """
    # elsewhere the operator has not been tried: there the check of compiled code watches
    if tensor.device.type != "cpu":
        return torch.as_strided(tensor, tensor.shape, tensor.stride())
    return private.in_this_order(tensor, tensor.stride())


def _small_bmm(left: Tensor, right: Tensor) -> Tensor:
    """A batched product with an outer or inner dimension of one, as arithmetic that fuses with its neighbours.

    Under ``vmap`` every ``Linear`` becomes a ``bmm``; with one input or one output feature the library call costs more
    than the product, and separates the loops before and after it.
    """
    _, rows, inner = left.shape
    columns = right.shape[2]
    if inner == 1:
        return left * right
    if columns == 1:
        return (left * right.transpose(1, 2)).sum(2, keepdim=True)
    if rows == 1:
        return (left.transpose(1, 2) * right).sum(1, keepdim=True)
    return NotImplemented


def _small_mm(left: Tensor, right: Tensor) -> Tensor:
    """The same without a batch, tiny products, and products of few features with the data along memory.

    Under ``vmap`` a linear predictor of one set of inputs is a product (N, features) @ (features, chains), and its
    gradient (features, N) @ (N, chains): a library would store the few chains along memory.
    """
    rows, inner = left.shape
    columns = right.shape[1]
    product = _small_bmm(left[None], right[None])
    if product is not NotImplemented:
        return product[0]
    if rows * inner * columns > _FEW_MULTIPLICATIONS:
        return NotImplemented
    tiny = rows * inner * columns <= _TINY
    if inner <= (_TINY_FEATURES if tiny else _FEW_FEATURES):
        features = materialize(left.T.contiguous())
        terms = [features[i] * right[i].unsqueeze(1) for i in range(inner)]
        return sum(terms[1:], terms[0]).T
    if rows <= _FEW_FEATURES and right.stride(0) == 1:
        return (materialize(left.contiguous()).unsqueeze(1) * right.T).sum(2)
    if tiny:
        terms_of_product = materialize(left.contiguous()).unsqueeze(2) * materialize(
            right.contiguous()
        )
        return terms_of_product.sum(1)
    return NotImplemented


def _small_addmm(
    bias: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    product = _small_mm(left, right) if alpha == beta == 1 else NotImplemented
    return product if product is NotImplemented else bias + product


DECOMPOSITIONS = {
    _ATEN.bmm.default: _small_bmm,
    _ATEN.mm.default: _small_mm,
    _ATEN.addmm.default: _small_addmm,
}

#: the lower bound of setup.cfg: no older torch has run the small products and the allocation on the stack
OLDEST = "2.11"
#: what keeps a function from being traced, in a user's words
_LOOKS = (
    "its Python looks at the values of a tensor, of a site or of the data: if, while, assert, float() or .item(). "
    "Write it with torch.where, and check data before the fit"
)
# Inductor settings for our graphs only. The decomposed tanh costs half of the exact one (and is exact to one unit of
# float32 around 1); fallback_random makes compiled and eager draws agree; one compile thread starts no worker pool.
_INDUCTOR = {
    "fallback_random": True,
    "compile_threads": 1,
    "cpp.use_decompose_tanh": True,
    # shared scalars get a buffer sooner than by default: less is computed twice, and the code is a third shorter
    "realize_opcount_threshold": 12,
    # a tenth of a short step; Compiled checks its arguments itself, loops do so once
    "size_asserts": False,
    "alignment_asserts": False,
    "aot_inductor.enable_line_tables": False,  # a tenth of the C++ compiler's time
}
# Below this size of the largest tensor, threads cost more at their barriers than they save.
_PARALLEL_FROM = 2**16
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
#: identities of graphs whose machine code was found right in this process: with other data it is the same code
RIGHT: set[str] = set()


def provide_folder() -> None:
    """Set ``TORCHINDUCTOR_CACHE_DIR`` to a folder of this process where torch's is read-only, or its user has no name.

    ``torch._dynamo``, which ``torch.func.grad`` imports, makes the folder at its import.

    Warns:
        UserWarning: that compiled code is not kept for the next process.
    """
    try:
        # WORKAROUND(python<3.13): a user without a name, as in another's container, is a KeyError there; since then
        # it is an OSError, and on Windows an ImportError
        path = _folder()
        path.mkdir(parents=True, exist_ok=True)
        wrong = None if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written to"
    except (OSError, KeyError, ImportError) as error:
        wrong = f"it cannot be made: {error}"
    if wrong is not None:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="torchinductor_")
        warnings.warn(
            f"torch's folder for compiled code is of no use ({wrong}): what is compiled is lost when this process "
            f"ends; set {FOLDER} to a folder that can be written to",
            UserWarning,
            stacklevel=2,
        )


def _folder() -> Path:
    """Where torch keeps compiled code."""
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return Path(tempfile.gettempdir(), f"torchinductor_{user}")


@functools.cache
def remove_torn() -> None:
    """Remove libraries that a killed compile has left half written a minute ago or more: torch would load them."""
    for path in _folder().rglob("*.so"):
        with contextlib.suppress(OSError):  # of another process, which may remove it as well
            status = path.stat()
            if time.time() - status.st_mtime > 60 and status.st_size < _elf_size(path):
                path.unlink()


def _elf_size(path: Path) -> int:
    """Least size of a whole ELF file of 64 bits, by the table at its end; 64 without a header, 0 of others."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
        return 0 if len(head) == 64 else 64
    table = int.from_bytes(head[40:48], "little")
    size = int.from_bytes(head[58:60], "little")
    count = int.from_bytes(head[60:62], "little")
    return table + size * count


class Untraceable(RuntimeError):
    """A function whose control flow depends on the values of tensors."""


class NoCompiler(RuntimeError):
    """A machine without a C++ compiler."""


class OldTorch(RuntimeError):
    """A torch below the lower bound of the package."""


class Code(NamedTuple):
    """A compiled flat function; what gives its graph; what to compare it with; what identifies it."""

    call: Callable[..., Any]
    graph: Callable[[], GraphModule]
    origin: Callable[..., Any]
    identity: str | None = None


def machine_code(fn: Callable[..., Any], inputs: list[Tensor]) -> Code:
    """A flat function, compiled by inductor with small products as arithmetic and intermediates on the stack.

    It is called once, so that nothing is left to be set up lazily. Raises OldTorch, NoCompiler, and what torch raises
    where a private name or an unwritten law of it has changed.
    """
    remove_torn()
    if torch.__version__ < OLDEST:
        raise OldTorch(f"torch {torch.__version__} is older than {OLDEST}")
    return _fused(fn, inputs)


def public_code(fn: Callable[..., Any], inputs: list[Tensor]) -> Code:
    """A flat function, compiled by ``torch.compile`` and called once; each call costs several times as much.

    Raises Untraceable, NoCompiler, and what torch raises.
    """
    _need_compiler(inputs)
    graph = traced(fn, inputs)
    return Code(_publicly(graph, inputs), functools.partial(private.trace, fn, inputs), fn)


def _need_compiler(inputs: list[Tensor]) -> None:
    if _on_cpu(inputs) and private.lacks_compiler():
        remedies = {
            "darwin": "xcode-select --install",
            "win32": "Visual Studio's build tools for C++",
        }
        remedy = remedies.get(sys.platform, "apt install g++, or your system's counterpart")
        raise NoCompiler(f"there is no C++ compiler: {remedy}")


def _on_cpu(inputs: list[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in inputs)


def traced(fn: Callable[..., Any], inputs: list[Tensor]) -> GraphModule:
    """The flat graph of ATen operators that ``fn`` comes to; ``fn`` runs once and may write into the inputs."""
    try:
        return private.trace(fn, inputs)
    except private.Gone:
        raise
    except Exception as error:  # whatever a user's program may raise under tracing
        looks = "aten._local_scalar_dense" in str(error)  # how torch names it
        raise Untraceable(_LOOKS if looks else first_line(tolerable(error))) from error


def tolerable(error: Exception) -> Exception:
    """An error that slower code answers; MemoryError and TimeoutError, which are none of the compiler's, are raised."""
    origin = private.origin(error)
    if isinstance(origin, (MemoryError, TimeoutError)):
        raise origin
    return error


def first_line(error: Exception) -> str:
    """An error in one line: its type and the beginning of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _fused(fn: Callable[..., Any], inputs: list[Tensor]) -> Code:
    """Compiled with small products as arithmetic, calls in C++ and intermediates on the stack, or loaded from disk."""
    graph = private.trace(fn, inputs, DECOMPOSITIONS)
    _compute_indices(graph)
    untouched = GraphModule(graph, copy.deepcopy(graph.graph))
    on_cpu = _on_cpu(inputs)
    only_writes = not graph.graph.output_node().all_input_nodes
    looped = any("pyrobnn.loop" in str(node.target) for node in graph.graph.nodes)
    alone = on_cpu and sys.platform == "linux" and only_writes and not looped
    on_stack = alone and not library_calls(graph)
    identity = _identity(untouched, inputs)
    if identity and alone:
        library = _recorded_library(identity, graph)
        if library is not None:
            RIGHT.add(identity)
            return Code(library, lambda: untouched, fn, identity)
    _need_compiler(inputs)
    settings = _settings(graph, inputs)
    settings["cpp_wrapper"] = on_cpu
    settings["aot_inductor.allow_stack_allocation"] = on_stack
    # in so small a function vector code saves a fifth of a step at most, and takes a second longer to make
    scalar = _largest(graph) <= 512
    with warnings.catch_warnings(action="ignore"):  # inductor's remarks on its own internals
        call = private.compile_graph(graph, inputs, settings, on_stack, scalar)
    # a loop in Python takes its time at every step; its body was compared by itself
    return Code(call, lambda: untouched, untouched if looped else fn, identity)


def _settings(graph: GraphModule, inputs: list[Tensor]) -> dict[str, Any]:
    """Inductor's settings for a graph: one thread where all of its tensors are small."""
    settings: dict[str, Any] = dict(_INDUCTOR)
    if _on_cpu(inputs) and _largest(graph) < _PARALLEL_FROM:
        settings["cpp.threads"] = 1
    return settings


def _recorded_library(identity: str, graph: GraphModule) -> private.Library | None:
    """The library of such a graph that was found right in an earlier process; None where there is none to load."""
    # to import inductor takes as long as a small model
    with contextlib.suppress(OSError, *private.MOVED):
        return private.Library(_record(identity).read_text("utf-8"), graph)
    return None


def _largest(graph: GraphModule) -> int:
    """Elements of the largest tensor that a graph computes; what is only written into does not count."""
    schemas = _schemas(graph)
    computed = [node for node, schema in schemas.items() if schema and not schema.is_mutable]
    return max(map(size, computed), default=0)


def _schemas(graph: GraphModule) -> dict[Node, Any]:
    """The nodes of a graph in its order, each with the schema of its operator; None without one."""
    return {node: getattr(node.target, "_schema", None) for node in graph.graph.nodes}


def _constant(graph: GraphModule, node: Node) -> Any:
    """What a node takes from the graph's module: a tensor, or a graph inside of the graph."""
    return getattr(graph, str(node.target))


def _memory(graph: GraphModule, node: Node) -> int | None:
    """Where the tensor lies that a node takes from the graph's module."""
    constant = _constant(graph, node)
    return constant.untyped_storage().data_ptr() if isinstance(constant, Tensor) else None


def _compute_indices(graph: GraphModule) -> None:
    """Compute now what a graph makes of its constants in whole numbers and truth values: indices and masks of data.

    Left in the graph they are computed at every call, and loops that gather by them are not vectorized.
    """
    schemas = _schemas(graph)
    written = _written(schemas)
    memory = {node: _memory(graph, node) for node in schemas if node.op == "get_attr"}
    # each use of a constant is a node of its own
    changing = {memory[node] for node in written & memory.keys()}
    known = set[Node]()
    for node, schema in schemas.items():
        if node in written or (schema and _writes_or_draws(node, schema)):
            continue
        if node in memory:
            if memory[node] not in changing:
                known.add(node)
        elif schema and node.all_input_nodes and known >= {*node.all_input_nodes}:
            known.add(node)
            if _is_index(node):
                known.add(_replaced_by_constant(graph, node))
    graph.recompile()


def _written(schemas: dict[Node, Any]) -> set[Node]:
    """The nodes whose tensors an operation of the graph writes into; through a view what it is a view of is written."""
    written = set[Node]()
    for node, schema in reversed(schemas.items()):
        if schema is None:
            continue
        if schema.is_mutable or (node in written and _makes_view(schema)):
            written |= {*node.all_input_nodes}
    return written


def _writes_or_draws(node: Node, schema: Any) -> bool:
    return schema.is_mutable or _RANDOM in cast(Any, node.target).tags


def _makes_view(schema: Any) -> bool:
    return any(argument.alias_info for argument in schema.arguments)


def _is_index(node: Node) -> bool:
    """Whether it computes several whole numbers or truth values."""
    kind = getattr(node.meta.get("tensor_meta"), "dtype", torch.float32)
    return not kind.is_floating_point and size(node) > 1


def _replaced_by_constant(graph: GraphModule, node: Node) -> Node:
    """The node of a new constant, the value of ``node``, which takes the place of ``node`` in the graph."""
    name = f"_computed_{node.name}"
    graph.register_buffer(name, _value_of(graph, node))
    with graph.graph.inserting_before(node):
        constant = graph.graph.get_attr(name)
        node.replace_all_uses_with(constant)
    constant.meta = node.meta
    return constant


def _value_of(graph: GraphModule, node: Node) -> Any:
    """What a node computes from constants."""
    if node.op == "get_attr":
        return _constant(graph, node)
    value_of = functools.partial(_value_of, graph)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
    return cast(Any, node.target)(*args, **kwargs)


def _identity(graph: GraphModule, inputs: list[Tensor]) -> str | None:
    """What two graphs that differ in nothing but data have in common, and no others."""
    constants = [_constant(graph, node) for node in graph.graph.nodes if node.op == "get_attr"]
    # a graph inside of the graph
    if not all(isinstance(constant, Tensor) for constant in constants):
        return None
    tensors = [
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for tensor in (*inputs, *constants)
    ]
    machine = (
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        sys.version,
        torch.__version__,
    )
    return hashlib.sha256(f"{graph.code}{tensors}{machine}{_INDUCTOR}".encode()).hexdigest()


def _record(identity: str) -> Path:
    """Where the path of a library stands that was found right."""
    return _folder() / "pyrobnn" / identity


def keep(code: Code) -> None:
    """Remember that machine code is right, a library also for later processes."""
    if code.identity is None or code.identity in RIGHT:
        return
    RIGHT.add(code.identity)
    if isinstance(code.call, private.Library):
        record = _record(code.identity)
        draft = record.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk: the next process compiles again
            record.parent.mkdir(exist_ok=True)
            draft.write_text(code.call.path, "utf-8")
            draft.replace(record)


def _publicly(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """The graph, compiled by ``torch.compile``."""
    settings = _settings(graph, inputs)
    # Compiled checks its arguments itself, and every graph is a function of its own
    settings["guard_filter_fn"] = getattr(torch.compiler, "skip_all_guards_unsafe", None)
    before = pyro.settings.get()
    try:
        with warnings.catch_warnings(action="ignore"):
            settings = {name: value for name, value in settings.items() if _is_option(name, value)}
            # not the module: the hooks of modules would be looked for at every call
            call: Callable[..., Any] = torch.compile(graph.forward, options=settings)
            call(*inputs)
    finally:
        # WORKAROUND(torch<=2.13): Dynamo turns the validation of distributions off for good
        pyro.settings.set(**before)
    return call


def _is_option(name: str, value: Any) -> bool:
    """Whether this release of ``torch.compile`` takes an option; nothing is compiled."""
    try:
        torch.compile(torch.sin, options={name: value})
    except (RuntimeError, AttributeError, TypeError):
        return False
    return value is not None
