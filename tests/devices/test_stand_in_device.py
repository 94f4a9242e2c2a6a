"""The stand-in device refuses what CUDA refuses, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from stand_in_device import stand_in_device


@pytest.fixture
def device():
    with stand_in_device() as device:
        yield device


REFUSED = {
    "a sum of two vectors": lambda a, b: a + b,
    "a product of matrices": lambda a, b: a[:, None] @ b[None],
    "a CPU scalar in a product": lambda a, b: a.dot(b[0].expand(3)),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack of scalars": lambda a, b: torch.stack([a[0], b[0]]),
    "writing into the CPU": lambda a, b: b.add_(a),
    "writing into a CPU scalar": lambda a, b: b[0].add_(a[0]),
    "out=": lambda a, b: torch.exp(a, out=b),
    "two CPU scalars": lambda a, b: torch.addcmul(a, b[0], b[1]),
    "gather with a CPU index": lambda a, b: a.gather(0, b.long()),
    "index_select with a CPU index": lambda a, b: a.index_select(0, b.long()),
    "a CPU mask on the CPU": lambda a, b: b[a > 0],
    "a gradient": lambda a, b: torch.func.grad(lambda z: (z * b).sum())(a),
    "a batch": lambda a, b: torch.func.vmap(lambda z: z + b)(a[None]),
    "numpy": lambda a, b: a.numpy(),
    "a CPU generator": lambda a, b: torch.randn(3, device=a.device, generator=torch.Generator()),
    "equal": lambda a, b: torch.equal(a, b),
}
TAKEN = {
    "a CPU scalar": lambda a, b: a + b[0],
    "a CPU index": lambda a, b: a[b.long()],
    "a number": lambda a, b: a * 2.0,
    "a write from the CPU": lambda a, b: a.clone().copy_(b),
    "where with CPU scalars": lambda a, b: torch.where(a > 0, b[0], b[1]),
    "a CPU scalar under vmap": lambda a, b: torch.func.vmap(lambda z: z + b[0])(a[None]),
    "a list": lambda a, b: torch.tensor([1.0, 2.0], device=a.device),
    "new_tensor": lambda a, b: a.new_tensor([1.0]),
    "as_tensor": lambda a, b: torch.as_tensor(b, device=a.device),
    "a factory": lambda a, b: torch.zeros(2, device=a.device),
    "like": lambda a, b: torch.zeros_like(a),
    "a module": lambda a, b: copy.deepcopy(torch.nn.Linear(3, 2, bias=False).to(a.device))(a),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_device_refuses_the_stand_in_refuses(what, device):
    here = torch.zeros(3)
    with pytest.raises((RuntimeError, TypeError)):
        REFUSED[what](torch.zeros(3, device=device), here)


@pytest.mark.parametrize("what", TAKEN)
def test_what_a_device_takes_the_stand_in_takes(what, device):
    with torch.random.fork_rng([]):
        assert TAKEN[what](torch.zeros(3, device=device), torch.zeros(3)).device == device


def test_values_gradients_and_the_random_state_are_the_cpus(device):
    x = torch.arange(3.0)
    there = x.to(device).requires_grad_()
    there.square().sum().backward()
    assert there.grad.device == device and torch.equal(there.grad.cpu(), 2 * x)
    assert there.tolist() == [0.0, 1.0, 2.0] and float(there.detach()[2]) == 2.0
    view = there.detach()[1:]
    view += 1
    assert there.tolist() == [0.0, 2.0, 3.0]
    before = torch.get_rng_state()
    with torch.random.fork_rng([device], device_type=device.type):
        torch.get_device_module(device).manual_seed(1)
        draws = torch.randn(2, device=device).cpu()
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(draws, torch.randn(2, generator=torch.Generator().manual_seed(1)))


def test_a_disturbed_random_state_is_told():
    with pytest.raises(AssertionError, match="random state"), stand_in_device() as device:
        torch.randn(2, device=device)
