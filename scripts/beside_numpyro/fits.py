"""One fit of a program, ours or NumPyro's: moments of every scalar, and what it took."""

from __future__ import annotations

import os
import resource
import tempfile
import time
import warnings
from typing import Any

import numpy as np
from beside_numpyro.made_data import made
from records import Record

#: NumPyro's NUTS, and methods of ours
METHODS = ("NumPyro", "NUTS", "SVI", "Laplace")
SEED = 0
NUM_CHAINS = 4
NUM_WARMUP = 1000
NUM_DRAWS = 1000
#: mean, sd, Monte-Carlo error of the mean, and of the sd
Moments = dict[str, tuple[float, float, float, float]]


def fitted_row(task: Record) -> dict[str, Any]:
    """The record of a program and a method, a key of :data:`METHODS`."""
    program, method = task["program"], task["method"]
    if method == "NumPyro":
        return {**task, **numpyro_row(program, SEED)}
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        return {**task, **our_row(program, method, SEED)}


def children_seconds() -> float:
    """CPU seconds of the processes that this one has started and that have ended, compilers among them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def moments(draws: dict[str, np.ndarray], independent: bool) -> Moments:
    """The moments of each scalar by draws (chain, draw, …) of sites; vectors are numbered from 0."""
    from arviz_stats.base import array_stats

    axes = {"chain_axis": 0, "draw_axis": 1}
    rows: Moments = {}
    for site, values in sorted(draws.items()):
        flat = np.asarray(values, dtype=float).reshape(*values.shape[:2], -1)
        for i in range(flat.shape[-1]):
            x = flat[..., i]
            sd = float(x.std(ddof=1))
            if independent:
                errors = [sd / x.size**0.5, sd / (2 * x.size) ** 0.5]
            else:
                errors = [float(array_stats.mcse(x, method=m, **axes)) for m in ("mean", "sd")]
            name = f"{site}[{i}]" if values.ndim > 2 else site
            rows[name] = tuple(float(f"{v:.5g}") for v in (x.mean(), sd, *errors))  # type: ignore[assignment]
    return rows


def numpyro_row(name: str, seed: int) -> dict[str, Any]:
    """NumPyro's NUTS, twice: with its compilation, and without."""
    import jax
    from beside_numpyro.numpyro_programs import PROGRAMS
    from numpyro.infer import MCMC, NUTS

    x, y = made(name)
    sampler = MCMC(
        NUTS(PROGRAMS[name]),
        num_warmup=NUM_WARMUP,
        num_samples=NUM_DRAWS,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    seconds = []
    leapfrogs = 0
    for key in (seed, seed + 1000):
        started = time.process_time()
        sampler.warmup(
            jax.random.PRNGKey(key), x, y, extra_fields=("num_steps",), collect_warmup=True
        )
        leapfrogs = int(sampler.get_extra_fields()["num_steps"].sum())
        sampler.run(jax.random.PRNGKey(key + 1), x, y, extra_fields=("num_steps", "diverging"))
        draws = {
            site: np.asarray(v) for site, v in sampler.get_samples(group_by_chain=True).items()
        }
        seconds.append(time.process_time() - started)
        if key == seed:
            fields = sampler.get_extra_fields()
            first = {
                "moments": moments(draws, independent=False),
                "leapfrogs": leapfrogs + int(fields["num_steps"].sum()),
                "divergences": int(fields["diverging"].sum()),
            }
    return first | {"cpu_cold": round(seconds[0], 1), "cpu_warm": round(seconds[1], 1)}


def our_row(name: str, method_name: str, seed: int) -> dict[str, Any]:
    """A method of ours at its defaults, twice, with its verdict."""
    import torch
    from beside_numpyro.pyro_programs import PROGRAMS

    import pyrobnn as pb

    x, y = (None if value is None else torch.as_tensor(value) for value in made(name))
    method = getattr(pb, method_name)()
    num_draws = NUM_DRAWS if method_name == "NUTS" else None
    seconds = []
    for key in (seed, seed + 1000):
        started = time.process_time() + children_seconds()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior = method.fit(PROGRAMS[name], x, y, num_draws=num_draws, seed=key)
        seconds.append(time.process_time() + children_seconds() - started)
        if key == seed:
            first = posterior
            told = [str(warning.message) for warning in caught]
    started = time.process_time()
    verdict = pb.diagnose(first.to_datatree(x, y))
    stats = first.sample_stats
    return {
        "moments": moments(
            {site: value.numpy() for site, value in first.draws.items()},
            independent=method_name != "NUTS",
        ),
        "leapfrogs": first.meta.get("num_gradients"),
        "divergences": int(stats["diverging"].sum()) if "diverging" in stats else None,
        "tier": first.meta["tier"]["tier"],
        "cpu_cold": round(seconds[0], 1),
        "cpu_warm": round(seconds[1], 1),
        "cpu_judged": round(time.process_time() - started, 1),
        "draws": verdict.draws,
        "model": verdict.model,
        "says": str(verdict),
        "warnings": told,
    }
