"""What a type says of itself: dataclasses that hold arrays compare by identity, and the package carries its types."""

from __future__ import annotations

import dataclasses
import importlib.util
import pkgutil
import re

import pytest
import torch
from helpers import seeded
from torch import nn

import pyrobnn as pb

ARRAYS = re.compile(r"\b(Tensor|ndarray|DataArray|xr\.Dataset|Dataset|Standardizer)\b")

#: modules that import the library of an extra
OF_EXTRAS = {
    "pyrobnn.botorch": "botorch",
    "pyrobnn.bridges.botorch_fully_bayesian": "botorch",
    "pyrobnn.bridges.botorch_model": "botorch",
    "pyrobnn.mlflow": "mlflow",
    "pyrobnn.bridges.mlflow_flavour": "mlflow",
}


def dataclasses_of_the_package():
    for info in pkgutil.walk_packages(pb.__path__, "pyrobnn."):
        extra = OF_EXTRAS.get(info.name)
        without_extra = extra is not None and importlib.util.find_spec(extra) is None
        if info.name.endswith("__main__") or without_extra:
            continue
        for value in vars(importlib.import_module(info.name)).values():
            if (
                isinstance(value, type)
                and dataclasses.is_dataclass(value)
                and value.__module__ == info.name
            ):
                yield value


def holds_arrays(cls):
    # the arguments of a function are no values of the field
    types = [re.sub(r"Callable\[.*", "", str(field.type)) for field in dataclasses.fields(cls)]
    return any(ARRAYS.search(text) for text in types)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # at the import of an extra
def test_dataclasses_that_hold_arrays_compare_by_identity():
    every = list(dataclasses_of_the_package())
    assert len(every) > 50
    wrong = [cls.__qualname__ for cls in every if holds_arrays(cls) and cls.__dataclass_params__.eq]
    assert wrong == []  # "==" of two of them would ask a tensor of many elements whether it is true


def test_a_posterior_is_itself_and_no_other():
    x = torch.linspace(-1.0, 1.0, 6)[:, None]
    with seeded(0):
        net = nn.Linear(1, 1)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.5))
    one, other = (pb.MAP(num_steps=2, compile=False).fit(model, x, x) for _ in range(2))
    assert one == one
    assert one != other
    assert len({one, other}) == 2  # a key of a dict, a member of a set


@pytest.mark.parametrize("method", [pb.MAP, pb.NUTS, pb.SVI, pb.Laplace])
def test_configurations_compare_by_value(method):
    assert method() == method()
    assert len({method(), method()}) == 1
