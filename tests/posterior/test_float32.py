"""Energies are computed in full float32 on a GPU, and the user's flags come back."""

from __future__ import annotations

import pytest
import torch
from global_state import GlobalState
from test_contract import METHODS, X, Y, gaussian, num_draws

import pyrobnn as pb
from pyrobnn.inference.fitting.floats import full_float32

CUDA = torch.device("cuda")
_BACKENDS = torch.backends
_NEWER = hasattr(_BACKENDS.cuda.matmul, "fp32_precision")


def newer(place: str, precision: str):
    return lambda: setattr(eval(f"torch.backends.{place}"), "fp32_precision", precision)  # noqa: S307


USERS = {
    "defaults": lambda: None,
    "no TF32": lambda: setattr(_BACKENDS.cudnn, "allow_tf32", False),
    "TF32": lambda: setattr(_BACKENDS.cuda.matmul, "allow_tf32", True),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
}
if _NEWER:
    USERS |= {
        "convolutions in ieee": newer("cudnn.conv", "ieee"),
        "products in TF32": newer("cuda.matmul", "tf32"),
        "cudnn in TF32": newer("cudnn", "tf32"),
    }


@pytest.fixture(autouse=True)
def restored():
    state = GlobalState()
    yield
    state.restore()


@pytest.mark.parametrize("user", USERS)
def test_full_inside_and_the_users_own_afterwards(user):
    USERS[user]()
    outside = GlobalState()
    with full_float32(CUDA):
        # the older getters raise where the two kinds of flags contradict each other
        assert not _BACKENDS.cudnn.allow_tf32 and not _BACKENDS.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"
        if _NEWER:
            places = _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn, _BACKENDS.cuda.matmul
            assert {place.fp32_precision for place in places} <= {"ieee", "none"}
    assert outside.leaks() == []
    with pytest.raises(ZeroDivisionError), full_float32(CUDA):
        raise ZeroDivisionError
    assert outside.leaks() == []


def test_nothing_changes_on_the_cpu():
    outside = GlobalState()
    with full_float32(torch.device("cpu")):
        assert outside.leaks() == []


@pytest.mark.filterwarnings("ignore::UserWarning")  # fits this short are told so
@pytest.mark.parametrize("name", ["NUTS", "NUTS-pyro", "Laplace", "SVI", "SWAG"])
def test_energies_and_curvature_are_computed_in_it(name, monkeypatch):
    for module in ("nuts", "laplace", "vi.guide_fit", "fitting.problem"):
        monkeypatch.setattr(
            f"pyrobnn.inference.{module}.full_float32", lambda device: full_float32(CUDA)
        )
    seen = {"log_joint": [], "log_parts": []}
    for owner, flags in seen.items():
        plain = getattr(pb.Density, owner)

        def call(*args, plain=plain, flags=flags, **kwargs):
            flags.append(_BACKENDS.cudnn.allow_tf32)
            return plain(*args, **kwargs)

        monkeypatch.setattr(pb.Density, owner, call)
    dict(
        METHODS[name].fit(gaussian(), X, Y, seed=3, **num_draws(name)).sample_stats
    )  # log p, computed now
    exact = name.startswith(
        ("NUTS", "Laplace")
    )  # SVI and SWAG search with the user's flags, and weigh in full
    flags = seen["log_joint" if exact else "log_parts"]
    assert flags and not (any(flags) if exact else flags[-1])
    assert _BACKENDS.cudnn.allow_tf32
