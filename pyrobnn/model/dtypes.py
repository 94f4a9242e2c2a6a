"""Programs that fail on their data: what to change in the data, in words, found by trying.

A cast where torch combines one type only; tensors in place of lists, NumPy arrays and tables; ``squeeze(-1)`` of one
column; data that were not passed; and names that are used twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyrobnn.core.checks import Refused, as_tensor
from pyrobnn.core.seeding import seeded, used_devices
from pyrobnn.model.compile.trees import Tree, leaves_of, mapped
from pyrobnn.model.density import Density, Program
from pyrobnn.model.nodes import Message, is_subsample

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_CASTS = {
    torch.float32: "float()",
    torch.float64: "double()",
    torch.int64: "long()",
}
#: the arguments of a program by their names
_Data: TypeAlias = Mapping[str, Tree]
#: words in torch's errors about an operation between types
_WORDS = ("dtype", "scalar type", "output type", "bool tensor", "not implemented for", "bias type")


@contextlib.contextmanager
def types_explained(program: Program, data: Mapping[str, Any]) -> Iterator[None]:
    """Inside, an error that a program's data cause is replaced by one that says what to change in them.

    Args:
        program: a plain Pyro program.
        data: its arguments by name, each a tensor, a tree of tensors, or anything else.

    Raises:
        TypeError: naming the data and their cast; or that it is tensors that the program itself holds.
        ValueError, RuntimeError: data of a wrong shape, a name that is used twice.
    """
    try:
        yield
    except Refused:
        raise
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError) as error:
        reason = _why_of_data(program, data, error)
        if reason:
            kind = ValueError if isinstance(error, (ValueError, RuntimeError)) else TypeError
            raise kind(reason) from error
        if isinstance(error, (RuntimeError, TypeError, IndexError)):
            reason = why_of_types(program, data, error)
        if not reason:
            raise
        raise TypeError(reason) from error


def _why_of_data(program: Program, data: _Data, error: Exception) -> str:
    """What to do about names, missing data, containers and shapes; empty where these are not what stops it."""
    message = str(error).strip().partition("\n")[0]
    if message.startswith("Multiple sample sites"):
        return _name_used_twice(program, tuple(data.values()))
    if "NoneType" in message and any(value is None for value in data.values()):
        missing = " and ".join(repr(name) for name, value in data.items() if value is None)
        return (
            f"the program was run without {missing} and stopped ({message}): pass the data, "
            f"fit(program, {', '.join(data)})"
        )
    tensors, advice = _as_tensors(data)
    if advice and _runs(program, tuple(tensors.values())):
        return advice
    return _why_of_columns(program, tensors, advice) or _why_of_lengths(program, tensors)


def _name_used_twice(program: Program, args: tuple[Tree, ...]) -> str:
    """The name that two sites or plates have, with the sizes of the plates."""
    names = _Names()
    with seeded(0, *used_devices()), torch.no_grad(), pyro.poutine.block(), names:
        program(*args)
    for name, sizes in names.sizes.items():
        if len(sizes) > 1:
            listed = " and ".join(map(str, sizes))
            return f"two plates are named {name!r}, of sizes {listed}: give each size a name of its own"
    return f"two sites are named {names.twice!r}: give each a name of its own"


class _Names(Messenger):
    """The sizes of the plates by their names, and the last name that a second site has."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = {}
        self.twice = ""
        self._seen: set[str] = set()

    def _pyro_sample(self, msg: Message) -> None:
        name = msg["name"]
        if name in self._seen:
            self.twice = name
        self._seen.add(name)
        if is_subsample(msg):
            self.sizes.setdefault(name, []).append(msg["fn"].size)


def _as_tensors(data: _Data) -> tuple[dict[str, Tree], str]:
    """The data with tensors in place of lists, arrays and tables of numbers, and what to pass, in words."""
    tensors = dict(data)
    kinds = []
    passed = []
    for name, value in data.items():
        if value is None or isinstance(value, Tensor) or not hasattr(value, "__len__"):
            continue
        with contextlib.suppress(TypeError, ValueError):
            tensor = as_tensor(name, cast("ArrayLike", value))
            if tensor.is_floating_point():
                tensor = tensor.to(torch.get_default_dtype())
            tensors[name] = tensor
            kinds.append(f"{name!r} holds a {type(value).__name__}")
            source = f"{name}.to_numpy()" if hasattr(value, "to_numpy") else name
            passed.append(f"torch.as_tensor({source}, dtype={tensor.dtype})")
    if not kinds:
        return tensors, ""
    reason = f"{' and '.join(kinds)}, and a Pyro program gets its data as they are"
    return tensors, f"{reason}: pass {' and '.join(passed)}"


def _why_of_columns(program: Program, data: _Data, advice: str) -> str:
    """Which columns (row, 1) to squeeze so that the program runs, after ``advice`` on tensors; empty if none helps."""
    columns = {name: value for name, value in data.items() if _is_column(value)}
    choices = [[name] for name in columns]
    if len(columns) > 1:
        choices.append([*columns])
    for names in choices:
        squeezed = {name: columns[name].squeeze(-1) for name in names}
        if _runs(program, tuple({**data, **squeezed}.values())):
            before = f"{advice}; " if advice else ""
            return before + _to_squeeze({name: columns[name] for name in names})
    return ""


def _to_squeeze(columns: Mapping[str, Tensor]) -> str:
    """What these columns (row, 1) are, and what to pass in their place."""
    shapes = " and ".join(f"{name!r} has shape {tuple(x.shape)}" for name, x in columns.items())
    passed = " and ".join(f"{name}.squeeze(-1)" for name in columns)
    return f"{shapes}, and the program computes with one number a row: pass {passed}"


def _is_column(value: Tree) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of several axes, the last of length one."""
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[-1] == 1


def _why_of_lengths(program: Program, data: _Data) -> str:
    """How many rows the data have, where they differ and the program runs with the fewest; else empty."""
    tensors = {name: value for name, value in data.items() if _has_rows(value)}
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(lengths.values())) < 2:
        return ""
    fewest = min(lengths.values())
    cut = {name: tensor[:fewest] for name, tensor in tensors.items()}
    if not _runs(program, tuple({**data, **cut}.values())):
        return ""
    counts = " and ".join(f"{name!r} {length}" for name, length in lengths.items())
    return f"the data have different numbers of rows, {counts}: pass as many of each"


def _has_rows(value: Tree) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 0


def why_of_types(program: Program, data: _Data, error: Exception) -> str:
    """What to cast so that the program runs, found by trying; empty where types are not what stops it."""
    advice = _cast_that_helps(program, data)
    if advice:
        return advice
    args = tuple(data.values())
    message = str(error).strip().partition("\n")[0]
    if any(word in message for word in _WORDS) or _runs(program, args, double=True):
        return (
            f"tensors of several types meet in the program, and torch combines one type only ({message}): give the "
            "tensors that the program itself holds, and the parameters of its priors, one type, by .float() or "
            ".double()"
        )
    return ""


def _cast_that_helps(program: Program, data: _Data) -> str:
    """The first cast of data with which the program runs, in words; empty where none is found."""
    args = tuple(data.values())
    names: list[str] = []
    for argument, value in data.items():
        names += _names(argument, value)
    leaves = leaves_of(args)
    for target in dict.fromkeys((torch.get_default_dtype(), *_CASTS)):
        for group in _groups(leaves, target):
            if group and _runs(program, _cast(args, group, target)):
                dtypes = [leaves[index].dtype for index in group]
                return _sentence([names[index] for index in group], dtypes, target)
    return ""


def _groups(leaves: list[Tree], target: torch.dtype) -> list[list[int]]:
    """The numbers of leaves to try to cast: one alone, then all that are floating, then all."""
    tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    castable = [index for index, tensor in tensors.items() if tensor.dtype != target]
    groups = [[index] for index in castable]
    if target.is_floating_point:
        groups.append([index for index in castable if tensors[index].is_floating_point()])
        groups.append(castable)
    return groups


def _names(name: str, tree: Tree) -> list[str]:
    """How a user writes each leaf of an argument, in the order of :func:`leaves_of`."""
    fields = getattr(tree, "_fields", None)
    if isinstance(tree, dict):
        branches = [(f"{name}[{key!r}]", value) for key, value in tree.items()]
    elif fields is not None:
        branches = [(f"{name}.{field}", getattr(tree, field)) for field in fields]
    elif isinstance(tree, list | tuple):
        branches = [(f"{name}[{index}]", value) for index, value in enumerate(tree)]
    else:
        return [name]
    names: list[str] = []
    for branch_name, branch in branches:
        names += _names(branch_name, branch)
    return names


def _cast(args: tuple[Tree, ...], group: list[int], target: torch.dtype) -> tuple[Tree, ...]:
    """The arguments with the leaves of these numbers cast."""
    numbers = iter(range(len(leaves_of(args))))

    def cast_leaf(leaf: Tree) -> Tree:
        is_chosen = next(numbers) in group
        return leaf.to(target) if is_chosen and isinstance(leaf, Tensor) else leaf

    changed: tuple[Tree, ...] = mapped(cast_leaf, args)
    return changed


def _runs(program: Program, args: tuple[Tree, ...], double: bool = False) -> bool:
    """Whether the program has a log density with these arguments."""
    try:
        density = Density(program, args, double=double)
        density.log_joint(density.sample_prior(1, seed=0)[0])
    except Exception:  # an error of another kind appears where the program is run
        return False
    return True


def _sentence(names: list[str], dtypes: list[torch.dtype], target: torch.dtype) -> str:
    """Which data are of which types, and how to cast them."""
    kinds = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    subject = " and ".join(f"{name!r} is {kind}" for name, kind in zip(names, kinds, strict=True))
    casts = " and ".join(f"{name}.{_CASTS[target]}" for name in names)
    needed = str(target).removeprefix("torch.")
    if target is torch.int64:
        return f"{subject}, and the program takes it as an index: pass {casts}"
    return (
        f"{subject}, but the sites of the program are {needed}, and torch combines one type only: pass {casts}, or "
        "give the priors parameters of the other type"
    )
