"""Everything process-wide that a call of the library could change, taken before a test and compared after."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyro
import torch


@dataclass(frozen=True)
class Watched:
    """One piece of state: its value at the start, how to read it now, how to put it back."""

    name: str
    before: object
    read: Callable[[], object]
    restore: Callable[[object], None]

    def changed(self) -> bool:
        return not _same(self.before, self.read())


class GlobalState:
    """A snapshot. ``leaks()`` names what has changed since; ``restore()`` puts it back, and names it too."""

    def __init__(self) -> None:
        self.watched = [
            Watched(name, read(), read, restore)
            for name, (read, restore) in {
                **_torch_state(),
                **_python_state(),
                **_loaded_state(),
            }.items()
        ]

    def leaks(self) -> list[str]:
        return [watched.name for watched in self.watched if watched.changed()]

    def restore(self) -> list[str]:
        changed = [watched for watched in self.watched if watched.changed()]
        for watched in changed:
            watched.restore(watched.before)
        return [watched.name for watched in changed]


Pair = tuple[Callable[[], object], Callable[[object], None]]


def _torch_state() -> dict[str, Pair]:
    return {
        "torch's global random state": (torch.get_rng_state, torch.set_rng_state),
        "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "torch's default device": (torch.get_default_device, _restore_device),
        "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
        "torch's deterministic mode": (
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
        "torch's float32 precision": (_float32, _restore_float32),
        "Pyro's settings (validation flags)": (
            pyro.settings.get,
            lambda before: pyro.settings.set(**before),
        ),
        "Pyro's param store": (_param_store, _restore_param_store),
    }


def _python_state() -> dict[str, Pair]:
    return {
        "NumPy's global random state": (
            lambda: np.random.get_state(legacy=False),
            np.random.set_state,
        ),
        "Python's global random state": (random.getstate, random.setstate),
    }


def _loaded_state() -> dict[str, Pair]:
    """State of modules that not every test imports: watched once something has imported them."""
    state: dict[str, Pair] = {}
    if matplotlib := sys.modules.get("matplotlib"):
        state["matplotlib's rcParams"] = (
            lambda: {  # lists as copies: they can be changed in place
                key: value.copy() if isinstance(value, list) else value
                for key, value in dict.items(matplotlib.rcParams)
                if key != "backend"
            },
            lambda before: matplotlib.rcdefaults(),
        )
    if inductor := sys.modules.get("torch._inductor.config"):
        state["inductor's use_decompose_tanh"] = (
            lambda: inductor.cpp.use_decompose_tanh,
            lambda before: setattr(inductor.cpp, "use_decompose_tanh", before),
        )
    # read lazily: a test that imports pyplot itself must close its figures too
    state["open matplotlib figures"] = (_open_figures, _close_figures)
    return state


def _float32() -> dict[str, object]:
    """The flags of GPUs, older and newer; None where torch refuses to be asked, for the two contradict each other."""
    backends = torch.backends
    found = {}
    for name, read in {
        "products": torch.get_float32_matmul_precision,
        "convolutions": lambda: backends.cudnn.allow_tf32,
    }.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = None
    return found | {name: place.fp32_precision for name, place in _float32_places().items()}


def _restore_float32(before: dict[str, object]) -> None:
    torch.set_float32_matmul_precision(before["products"] or "highest")
    torch.backends.cudnn.allow_tf32 = before["convolutions"] is not False
    for name, place in _float32_places().items():
        place.fp32_precision = before[name]


def _float32_places() -> dict[str, object]:
    backends = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        return {}
    return {
        "cudnn": backends.cudnn,
        "conv": backends.cudnn.conv,
        "rnn": backends.cudnn.rnn,
        "matmul": backends.cuda.matmul,
        "mkldnn": backends.mkldnn.matmul,
    }


def _restore_device(before: object) -> None:
    # setting "cpu" would leave a mode behind that slows every call and that torch.compile sees
    torch.set_default_device(None if str(before) == "cpu" else before)


def _open_figures() -> list[int]:
    pyplot = sys.modules.get("matplotlib.pyplot")
    return [] if pyplot is None else list(pyplot.get_fignums())


def _close_figures(before: object) -> None:
    for number in set(_open_figures()) - set(before):
        sys.modules["matplotlib.pyplot"].close(number)


def _param_store() -> dict[str, torch.Tensor]:
    store = pyro.get_param_store()
    return {name: store[name].detach().clone() for name in store.keys()}


def _restore_param_store(before: object) -> None:
    pyro.clear_param_store()
    for name, value in before.items():
        pyro.param(name, value)


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] or _same(a[key], b[key]) for key in a)
    return bool(a == b)
