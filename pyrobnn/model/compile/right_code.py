"""Compiled code that was found right: remembered in this process, a library also for later ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from pyrobnn.core import private
from pyrobnn.model.compile.code_folder import code_folder
from pyrobnn.model.compile.graph_nodes import constant_of
from pyrobnn.model.compile.trees import TensorFunction

#: identities of graphs whose machine code was found right in this process: with other data it is the same code
RIGHT: set[str] = set()


class Code(NamedTuple):
    """A compiled flat function, and what its check needs."""

    call: Callable[..., Any]
    #: returns the graph that it was compiled from
    graph: Callable[[], GraphModule]
    #: what its results are compared with
    origin: TensorFunction
    #: as of :func:`identity_of`; None: it is checked each time
    identity: str | None = None


def identity_of(
    graph: GraphModule,
    inputs: list[Tensor],
    settings: Mapping[str, bool | int],
) -> str | None:
    """What two graphs that differ in nothing but data have in common, and no others.

    Args:
        graph, inputs: the graph and its arguments; other values of theirs are the same identity.
        settings: those of inductor for all graphs.
    """
    constants = [constant_of(graph, node) for node in graph.graph.nodes if node.op == "get_attr"]
    tensors = [*inputs, *(constant for constant in constants if isinstance(constant, Tensor))]
    # a graph inside of the graph
    if len(tensors) < len(inputs) + len(constants):
        return None
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]
    machine = (
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        sys.version,
        torch.__version__,
    )
    return hashlib.sha256(f"{graph.code}{layouts}{machine}{settings}".encode()).hexdigest()


def _record(identity: str) -> Path:
    """The file that names the library found right for a graph."""
    return code_folder() / "pyrobnn" / identity


def recorded_library(identity: str, graph: GraphModule) -> private.Library | None:
    """The library of such a graph that was found right in an earlier process; None where there is none to load."""
    # to import inductor takes as long as a small model
    with contextlib.suppress(OSError, *private.MOVED):
        return private.Library(_record(identity).read_text("utf-8"), graph)
    return None


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
