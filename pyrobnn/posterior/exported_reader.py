"""Predictions of a file that ``Posterior.export`` of pyrobnn wrote, by torch alone.

``torch.export.load`` reads the same file; this needs none of its imports and answers in milliseconds. A copy of this
source lies in every file: ``unzip -p model.pt2 '*/extra/reader.py' > reader.py``, then

    model = reader.Exported("model.pt2")
    model(x)["mean"], model.meta["verdict"]
"""

from __future__ import annotations

import json
import operator
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: of Python's operators, arithmetic and comparisons of sizes, and an entry of several outputs; its others may run
#: whatever a file says
ARITHMETIC = frozenset(
    "abs add and_ eq floordiv ge getitem gt le lt mod mul ne neg not_ or_ pos pow sub truediv".split()
)

#: what reading raises of a file that is not as it was written
_SIGNS_OF_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    LookupError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
)

_Value = None | bool | float | str | list | dict
_Call = tuple[str, Callable[..., Any], list, dict, list[str]]


class Exported:
    """An exported posterior: called with rows of inputs it returns tensors by name.

    Attributes:
        meta: what the file says of itself: method, draws, units, ranges, verdict.
    """

    def __init__(self, path: str | os.PathLike[str]):
        try:
            self.meta, program, self._values = _contents(path)
        except _SIGNS_OF_DAMAGE as error:
            raise ValueError(
                f"{os.fspath(path)!r} is truncated, damaged or no export of pyrobnn "
                f"({str(error) or type(error).__name__}): take another copy of the file, or export again"
            ) from error
        self._input = program["input"]
        self._outputs = program["outputs"]
        self._calls: list[_Call] = [
            (name, _function(target), args, options, unused)
            for name, target, args, options, unused in program["calls"]
        ]
        self._dtype = getattr(torch, self.meta["input"]["dtype"])

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor | Sequence) -> dict[str, torch.Tensor]:
        x = torch.as_tensor(x, dtype=self._dtype)
        expected = self.meta["input"]["shape"]
        if x.dim() != len(expected) or list(x.shape[1:]) != expected[1:] or not len(x):
            raise ValueError(f"'x' has shape {tuple(x.shape)} but the model takes {expected}")
        values = self._values | {self._input: x}

        def filled(value: _Value) -> Any:
            if isinstance(value, list):
                return [filled(item) for item in value]
            if isinstance(value, dict):
                ((kind, name),) = value.items()
                return values[name] if kind == "node" else _constant(kind, name)
            return value

        for name, function, args, options, unused in self._calls:
            values[name] = function(
                *[filled(value) for value in args],
                **{key: filled(value) for key, value in options.items()},
            )
            for node in unused:
                del values[node]
        return {name: values[node] for name, node in self._outputs.items()}


def _contents(path: str | os.PathLike[str]) -> tuple[dict, dict, dict[str, torch.Tensor]]:
    """What the file says of itself, its program, and the tensors of that by node; zip has a checksum of each."""
    with zipfile.ZipFile(path) as archive:
        files = {name.partition("/")[2]: name for name in archive.namelist()}

        def read(name: str) -> bytes:
            return archive.read(files[name])

        meta = json.loads(read("extra/pyrobnn.json"))
        program = json.loads(read("extra/program.json"))
        layouts = {}
        for kind in ("weights", "constants"):
            config = json.loads(read(f"data/{kind}/model_{kind}_config.json"))["config"]
            for name, entry in config.items():
                layouts[name] = (f"data/{kind}/{entry['path_name']}", entry["tensor_meta"])
        values = {
            node: _tensor(read(layouts[name][0]), dtype, layouts[name][1])
            for node, (name, dtype) in program["tensors"].items()
        }
    return meta, program, values


def _tensor(data: bytes, dtype: str, layout: dict[str, Any]) -> torch.Tensor:
    sizes = [size["as_int"] for size in layout["sizes"]]
    strides = [stride["as_int"] for stride in layout["strides"]]
    if not data:
        return torch.empty(sizes, dtype=getattr(torch, dtype))
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    return flat.as_strided(sizes, strides, layout["storage_offset"]["as_int"])


def _function(target: str) -> Callable[..., Any]:
    """The operator that a file names: of torch's own (``aten``), or arithmetic of sizes; a file runs nothing else."""
    room, _, name = target.partition(".")
    if room == "operator" and name in ARITHMETIC:
        return getattr(operator, name)
    if room != "aten":
        raise ValueError(f"the file calls {target!r}, which is no operator of torch")
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _constant(kind: str, name: str) -> Any:
    value = torch.device(name) if kind == "device" else getattr(torch, name)
    if not isinstance(value, torch.device | torch.dtype | torch.layout | torch.memory_format):
        raise ValueError(f"the file has a constant {name!r}, which is none of torch's")
    return value
