"""Where a posterior comes from: what its ``meta`` says of the method, the data, the device and the versions."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import Distribution
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pyrobnn.inference.fitting.problem import Problem
    from pyrobnn.inference.method import Method


def provenance(
    problem: Problem,
    method: Method,
    seed: int,
    timings: Mapping[str, float],
) -> dict[str, Any]:
    """Where a posterior comes from: the method with its settings and facts, the data, the device, the versions."""
    return {
        "method": type(method).__name__,
        "settings": settings(method),
        "seed": seed,
        "num_data": problem.num_data,
        "input_shape": list(problem.x.shape[1:]) if problem.is_bnn else None,
        "timings": {name: round(value, 6) for name, value in timings.items()},
        "kind": method.kind,
        "claim": method.claim,
        "remedy": method.remedy,
        "iid": method.kind != "chains",
        "temperature": 1.0,
        "likelihood": problem.bnn.likelihood.task if problem.is_bnn else None,
        "noise": problem.bnn.likelihood.own.kinds if problem.is_bnn else None,
        "device": str(problem.device),
        "versions": {
            "python": platform.python_version(),
            "pyrobnn": import_module("pyrobnn").__version__,
        }
        | {name: version_of(name) for name in ("torch", "pyro-ppl", "tyxe", "arviz-stats")},
    }


def version_of(package: str) -> str:
    """The version that is installed; "unknown" of a package without its metadata, as PYTHONPATH may find one."""
    distribution = next(iter(Distribution.discover(name=package)), None)
    return "unknown" if distribution is None else distribution.version


def settings(method: Method) -> dict[str, Any]:
    """The configuration of a method as plain values that JSON can hold."""
    # a frozen dataclass, which the class that it derives from is not
    options = dataclasses.fields(cast(Any, method))
    return {option.name: _plain(getattr(method, option.name)) for option in options}


def _plain(value: object) -> object:
    """The value of an option, or its name where JSON has no such value."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__name__", None) or repr(value)
