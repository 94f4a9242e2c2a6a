"""The models of torch_models.py as NumPyro programs, each with the values whose ESS counts."""

from __future__ import annotations

from typing import Any

from speed.torch_models import Case

NUM_PROBES = 16


def numpyro_program(case: Case) -> tuple[Any, Any]:
    """The same model, and a function of (samples, x) that gives the values whose ESS counts (chain, draw, value)."""
    return numpyro_hierarchy(case) if case.groups else numpyro_net(case)


def numpyro_hierarchy(case: Case) -> tuple[Any, Any]:
    """A linear regression with an offset of each group, and all its samples."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    def program(x, y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        offset = numpyro.sample("offset", dist.Normal(0, 1).expand([case.groups]).to_event(1))
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([case.inputs]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        loc = mean + spread * offset[x[:, -1].astype(int)] + x[:, :-1] @ slope
        with numpyro.plate("data", len(x)):
            numpyro.sample(
                "y",
                dist.Normal(loc, scale),
                obs=y,
            )

    def values(samples, x):
        return jnp.concatenate([v.reshape(*v.shape[:2], -1) for v in samples.values()], -1)

    return program, values


def numpyro_net(case: Case) -> tuple[Any, Any]:
    """A net of one hidden layer, and its function at some of the inputs."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    inputs = case.inputs
    hidden = case.hidden
    act = jnp.tanh if case.activation == "tanh" else jax.nn.relu

    def forward(w1, b1, w2, b2, x):
        return act(x @ w1 + b1) @ w2 + b2

    def program(x, y):
        w1 = numpyro.sample("w1", dist.Normal(0, inputs**-0.5).expand([inputs, hidden]).to_event(2))
        b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([hidden]).to_event(1))
        w2 = numpyro.sample("w2", dist.Normal(0, hidden**-0.5).expand([hidden]).to_event(1))
        b2 = numpyro.sample("b2", dist.Normal(0, 1))
        with numpyro.plate("data", len(x)):
            numpyro.sample(
                "y",
                dist.Normal(forward(w1, b1, w2, b2, x), case.noise),
                obs=y,
            )

    def values(samples, x):
        rows = jnp.linspace(0, len(x) - 1, NUM_PROBES).astype(int)
        of_draws = jax.vmap(jax.vmap(lambda *weights: forward(*weights, x[rows])))
        return of_draws(samples["w1"], samples["b1"], samples["w2"], samples["b2"])

    return program, values
