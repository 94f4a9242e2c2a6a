"""``pb.scan``: the loop's values and gradients, whatever compiles it, in a graph that does not grow with its length."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, grad_and_value, vmap

import pyrobnn as pb
from pyrobnn.core import private_trace
from pyrobnn.model.compile import compiled, inductor
from pyrobnn.model.compile.scan import _unrolled


def loss(z, length, scan=pb.scan):
    """A recurrence with a dict as carry, an integer in it, two outputs, and parameters from around it, used twice."""
    weights = z[:4].reshape(2, 2)
    data = torch.linspace(-1, 1, 2 * length, dtype=z.dtype).reshape(length, 2)

    def step(carry, x):
        h = torch.tanh(carry["h"] @ weights + x["x"])
        return {"h": h, "n": carry["n"] + 1}, (h.sum() * z[4], None, weights @ x["x"])

    start = {"h": z[4:6], "n": torch.tensor(0)}
    last, (a, _, b) = scan(step, start, {"x": data})
    again, _ = scan(lambda c, x: (c * z[0].cos() + x, None), last["h"].sum(), a)
    return last["h"].square().sum() + b.exp().sum() / length + last["n"] + again


def plainly(step, carry, xs):
    return _unrolled(
        step, carry, xs, range(len(next(iter(xs.values())) if isinstance(xs, dict) else xs))
    )


def points():
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("length", [1, 2, 5, 16, 37])
def test_values_and_gradients_are_those_of_the_loop(length):
    z, f = points(), vmap(grad_and_value(lambda z: loss(z, length)))
    exact = vmap(grad_and_value(lambda z: loss(z, length, plainly)))(z)
    torch.testing.assert_close(f(z), exact, rtol=0, atol=0)  # in eager mode it is the loop
    graph = private_trace.trace(f, [z])
    torch.testing.assert_close(graph(z), exact, rtol=1e-12, atol=1e-12)
    other = z.flip(0) * 1.5
    torch.testing.assert_close(graph(other), f(other), rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def bodies_are_interpreted(request, monkeypatch):
    """What a compiler would do to the bodies is tested by one test alone."""
    if "machine" not in request.node.name:
        kept = lambda fn, *example, **_: type("Kept", (), {"unchecked": staticmethod(fn)})  # noqa: E731
        monkeypatch.setattr("pyrobnn.model.compile.scan.compiled", kept)
    monkeypatch.setattr("pyrobnn.model.compile.scan._TURNS", {})


@pytest.mark.slow
def test_second_derivatives_and_points_inside_points():
    z = points()

    def second(z):
        return grad(lambda z: grad(lambda z: loss(z, 20))(z).square().sum())(z)

    torch.testing.assert_close(private_trace.trace(second, [z[0]])(z[0]), second(z[0]))
    nested = vmap(vmap(grad(lambda z: loss(z, 20))))
    many = torch.stack([z, -z])
    torch.testing.assert_close(private_trace.trace(nested, [many])(many), nested(many))


@pytest.mark.slow
def test_the_graph_does_not_grow_with_the_length():
    def nodes(length):
        return len(
            private_trace.trace(
                vmap(grad_and_value(lambda z: loss(z, length))), [points()]
            ).graph.nodes
        )

    assert nodes(80) == nodes(800)


@pytest.mark.parametrize(
    "oldest",
    [inductor.OLDEST, pytest.param("99.0", marks=pytest.mark.slow)],
    ids=["ours", "torch's"],
)
def test_machine_code_gives_what_the_loop_gives(oldest, monkeypatch):
    """Also where only ``torch.compile`` is left, which runs nothing inside of a trace."""
    monkeypatch.setattr(inductor, "OLDEST", oldest)

    def f(z):
        last, ys = pb.scan(
            lambda c, x: ((c * z[1] + x).tanh(), c * x), z[0], torch.linspace(-1, 1, 37)
        )
        return last + ys.square().sum()

    call = compiled(vmap(grad_and_value(f)), z := points().float())
    assert call.mode == "inductor"
    torch.testing.assert_close(call(z), vmap(grad_and_value(f))(z), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_machine_code_of_a_loop_with_one_result():
    """C++ that inductor writes would take a list of one tensor for the tensor."""
    f = vmap(
        lambda z: pb.scan(lambda c, x: (c * z[1] + x, None), z[0], torch.linspace(-1, 1, 37))[0]
    )
    call = compiled(f, z := points().float())
    assert call.mode == "inductor"
    torch.testing.assert_close(call(z), f(z), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_compile_takes_no_step_in_python_for_more_of_them():
    def steps(length):
        taken = []

        def f(z):
            return pb.scan(
                lambda c, x: (taken.append(1) or (c * z[1] + x).sin(), None),
                z[0],
                torch.ones(length),
            )[0]

        assert compiled(grad(f), points()[0].float()).mode == "inductor"
        return len(taken)

    assert steps(40) == steps(80) < 40


def test_few_steps_are_left_over_beside_the_loop():
    def nodes(operations, length):
        def step(c, x):
            for _ in range(operations):
                c = c.sin()
            return c + x, None

        return len(
            private_trace.trace(
                lambda z: pb.scan(step, z[0], torch.ones(length))[0], [points()[0]]
            ).graph.nodes
        )

    assert nodes(21, 27) == nodes(21, 28)  # three in a turn, four in a turn


@pytest.mark.parametrize("kind", ["noise", "transform", "nested", "lazy", "distribution", "named"])
def test_what_cannot_be_a_body_of_its_own_is_unrolled_and_right(kind):
    """A distribution that computes its logits at first use can be one."""

    def f(z):
        categorical = torch.distributions.Categorical(probs=z[:3].softmax(0), validate_args=False)

        def step(c, x):
            if kind == "noise":
                return c + 0 * torch.randn(()), c * x
            if kind == "transform":
                return c + grad(lambda v: (v * z[0]).sin())(x), c
            if kind == "nested":
                return pb.scan(lambda d, u: (d * u.cos() + z[1], None), c, x.expand(20))[0], c
            if kind == "distribution":  # asks for sizes, which are not tensors
                return torch.distributions.Normal(z[:3] * c, 1.0, validate_args=False).log_prob(
                    x
                ).sum().tanh(), c
            if kind == "named":  # results that are tuples with names
                return torch.linalg.slogdet(z[:4].reshape(2, 2) + c.square()).logabsdet + z.max(
                    0
                ).values * x, c
            return c + categorical.log_prob(torch.tensor(1)) * x, c

        last, ys = pb.scan(step, z[5], torch.linspace(0, 1, 20, dtype=z.dtype))
        return last + ys.square().sum()

    z = points()[0]
    with torch.random.fork_rng():
        graph = private_trace.trace(grad_and_value(f), [z])
        exact = grad_and_value(f)(z)
        found = graph(z)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    outer = [node for node in graph.graph.nodes if "pyrobnn.loop" in str(node.target)]
    assert bool(outer) == (kind not in ("noise", "transform"))


def test_a_wrong_carry_and_unequal_lengths_are_told():
    with pytest.raises(TypeError, match="must return a carry as it is given"):
        pb.scan(lambda c, x: (c + x, None), torch.tensor(0.0), torch.ones(3, 2))
    with pytest.raises(ValueError, match="one number of steps"):
        pb.scan(lambda c, x: (c, None), torch.tensor(0.0), (torch.ones(3), torch.ones(4)))
    with pytest.raises(ValueError, match="one number of steps"):
        pb.scan(lambda c, x: (c, None), torch.tensor(0.0))
    last, none = pb.scan(lambda c, x: (2 * c, None), 1.0, length=5)
    assert last == 32 and none is None
