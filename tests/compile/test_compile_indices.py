"""What a function makes of its data in whole numbers is computed before it is compiled."""

from __future__ import annotations

import torch

from pyrobnn.core import private_trace
from pyrobnn.model.compile import compiled
from pyrobnn.model.compile.indices import compute_indices


def test_indices_and_masks_of_data_are_constants_and_nothing_else_is():
    data = torch.tensor([2.0, 0.0, 1.0, 2.0])
    state = torch.tensor([1.0, 1.0, 1.0, 1.0])
    alias = state[:]

    def fn(z):
        state.view(2, 2).add_(1.0)  # a constant that is written into, by a view or not, is none
        kept = torch.where(data > 0.5, z[data.long()], state[(alias - 2.0).long().clamp(0, 3)])
        return kept * 2 * data.exp()

    z = torch.tensor([1.0, 10.0, 100.0])
    graph = private_trace.trace(fn, [z])
    compute_indices(graph)
    names = [name for name, _ in graph.named_buffers() if name.startswith("_computed")]
    assert len(names) == 2  # data.long() and data > .5
    again = torch.tensor([1.0, 1.0, 1.0, 1.0]) * 2  # the trace has added one
    expected = torch.tensor([200.0, 2 * float(again[0] + 1), 20.0, 200.0]) * data.exp()
    torch.testing.assert_close(graph(z), expected)


def test_a_copy_of_data_that_is_written_into_is_made_at_every_call():
    """Of a transposed table: torch lays the copy out anew, and its schema calls the result no view."""
    table = torch.arange(6).reshape(2, 3)

    def fn(z):
        numbers = table.T.reshape(-1)
        numbers.add_(1)
        return z + numbers.sum()

    graph = private_trace.trace(fn, [torch.zeros(())])
    compute_indices(graph)
    assert [graph(torch.zeros(())).item() for _ in range(3)] == [21.0, 21.0, 21.0]


def test_other_data_of_that_size_have_indices_of_their_own():
    z = torch.tensor([1.0, 10.0, 100.0])
    for values in ([2.0, 0.0, 1.0, 2.0], [0.0, 0.0, 2.0, 1.0]):
        data = torch.tensor(values)
        out = torch.zeros(4)
        step = compiled(
            lambda z, out, data=data: out.copy_(z[data.long()] * 2), z, out, clone=False
        )
        step(z, out)
        torch.testing.assert_close(out, z[data.long()] * 2)
