"""NUTS beside NumPyro's and Pyro's: whole fits, and what a gradient costs."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from statistics import median
from typing import TYPE_CHECKING, Any

from speed.numpyro_models import NUM_PROBES, numpyro_program
from speed.torch_models import CASES, Case, data, slowest, torch_data, torch_program

if TYPE_CHECKING:
    import jax
    import torch
    from numpyro.infer.hmc import HMCState

    from pyrobnn.posterior import Posterior


def beside_peers(name: str, num_chains: int, repeats: int) -> dict[str, Any]:
    """One row: medians over alternating repeats, microseconds; with more than 16 chains gradients alone are timed."""
    case = CASES[name]
    whole = num_chains <= 16
    num_draws = max(50, 1000 // num_chains) if whole else 10
    # the cost of a gradient doesn't depend on the depth of trees; a warm-up that isn't used need not be long
    options = {
        "num_chains": num_chains,
        "num_warmup": 200 if whole else 20,
        "max_tree_depth": 10 if whole else 6,
    }
    row: dict[str, Any] = {"case": name, "chains": num_chains}
    ours = Ours(case, options)
    with Manager(ctx=get_context("spawn")) as manager:
        peer = None
        if importlib.util.find_spec("numpyro"):
            peer = manager.NumPyro(case, options, num_draws)
        if whole:
            row |= _whole_fits(ours, peer, num_draws)
        row |= _gradients(ours, peer, repeats)
    row["pyro_us"] = 1e6 * median(pyro_gradient(case) for _ in range(3))
    return row | {"pyro/ours": row["pyro_us"] / row["ours_us"]}


def _whole_fits(ours: Ours, peer: NumPyro | None, num_draws: int) -> dict[str, float]:
    """Seconds and ESS of a fit of each, and the ratio of effective draws a second."""
    seconds, ess, steps = ours.fit(num_draws)
    row = {
        "steps per draw": steps,
        "ess": ess,
        "fit_s": seconds,
    }
    if peer is not None:
        peer_seconds, peer_ess = peer.fit(2)
        row |= {"numpyro_ess": peer_ess, "numpyro_fit_s": peer_seconds}
        row["ess per s / numpyro"] = (ess / seconds) / (peer_ess / peer_seconds)
    return row


def _gradients(ours: Ours, peer: NumPyro | None, repeats: int) -> dict[str, float]:
    """Microseconds of a gradient of each, by repeats in turn."""
    mine = list[float]()
    theirs = list[float]()
    for _ in range(repeats):
        mine.append(1e6 * ours.gradient())
        if peer is not None:
            theirs.append(1e6 * peer.gradient())
    row = {"ours_us": median(mine), "compile_s": ours.first.meta["timings"]["compile"]}
    if theirs:
        row |= {"numpyro_us": median(theirs), "ours/numpyro": median(mine) / median(theirs)}
    return row


class Ours:
    """Our NUTS by its public face: what a longer run takes more than a shorter one that begins alike."""

    def __init__(self, case: Case, options: Mapping[str, int]) -> None:
        import pyrobnn as pb

        self.case = case
        self.program = torch_program(case)
        self.x, self.y = torch_data(case)
        self.method = pb.NUTS(**options)
        self.num_draws = 100
        self.first, _ = self.run(1)

    def run(self, num_draws: int) -> tuple[Posterior, float]:
        """The posterior, and seconds of its fit."""
        start = time.perf_counter()
        with warnings.catch_warnings(action="ignore"):
            posterior = self.method.fit(
                self.program,
                self.x,
                self.y,
                num_draws=num_draws,
                seed=0,
            )
        return posterior, time.perf_counter() - start

    def longer(self, num_draws: int) -> tuple[Posterior, float, int]:
        """The posterior; seconds and gradients of its draws but the first."""
        _, before = self.run(1)
        posterior, seconds = self.run(num_draws)
        gradients = posterior.meta["num_gradients"] - self.first.meta["num_gradients"]
        return posterior, seconds - before, gradients

    def fit(self, num_draws: int) -> tuple[float, float, float]:
        """Seconds of ``num_draws`` draws after the warm-up, ESS of the slowest function value, gradients per draw."""
        import torch

        posterior, seconds, gradients = self.longer(num_draws)
        if self.case.groups:
            values = torch.cat(
                [value.reshape(*value.shape[:2], -1) for value in posterior.draws.values()], -1
            )
        else:
            values = posterior.predict(self.x[:: max(1, len(self.x) // NUM_PROBES)]).f[..., 0]
        ess = slowest(values.double().cpu().numpy())
        return seconds, ess, gradients / num_draws / posterior.num_chains

    def gradient(self) -> float:
        """Seconds per gradient and chain, of so many draws that what a fit costs besides does not count."""
        _, seconds, gradients = self.longer(self.num_draws)
        while gradients < 300_000:
            self.num_draws = round(400_000 / gradients * self.num_draws)
            _, seconds, gradients = self.longer(self.num_draws)
        return seconds / gradients


def pyro_gradient(case: Case) -> float:
    """Seconds per gradient of Pyro's NUTS on the same Pyro program."""
    import torch
    from pyro.infer import NUTS

    import pyrobnn as pb

    program = torch_program(case)
    x, y = torch_data(case)
    calls = 0
    program = program.pyro_model if isinstance(program, pb.BNN) else program
    kernel = NUTS(program, max_tree_depth=6)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kernel.setup(2, x, y if case.groups else y.unsqueeze(-1))
        potential = kernel.potential_fn

        def counting(z: dict[str, torch.Tensor]) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return potential(z)

        kernel.potential_fn = counting
        start = time.perf_counter()
        params = kernel.initial_params
        for _ in range(4):
            params = kernel.sample(params)
        return (time.perf_counter() - start) / max(calls, 1)


class NumPyro:
    """NumPyro's NUTS of vectorized chains, compiled: whole fits, and draws that go on from the end of the first."""

    def __init__(
        self,
        case: Case,
        options: Mapping[str, int],
        num_draws: int,
    ) -> None:
        import jax
        import jax.numpy as jnp
        from numpyro.infer import MCMC, NUTS, init_to_sample

        self.data = tuple(jnp.asarray(array) for array in data(case))
        self.compiling = 0.0
        program, self.values = numpyro_program(case)
        # NumPyro compiles at every run
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        kernel = NUTS(
            program,
            init_strategy=init_to_sample,
            max_tree_depth=options["max_tree_depth"],
        )
        chains = options["num_chains"]
        self.whole = MCMC(
            kernel,
            num_warmup=options["num_warmup"],
            num_samples=num_draws,
            num_chains=chains,
            chain_method="vectorized" if chains > 1 else "sequential",
            progress_bar=False,
        )
        self.fit(0)  # compiles
        steps = int(self.whole.get_extra_fields()["num_steps"].sum())
        # so many leapfrogs, over all chains, are timed
        draws = max(2, round(30_000 * num_draws / steps))

        @jax.jit
        def continued(state: HMCState) -> tuple[HMCState, jax.Array]:
            def one(_: int, carry: tuple[HMCState, jax.Array]) -> tuple[HMCState, jax.Array]:
                state = kernel.sample(carry[0], self.data, {})
                return state, carry[1] + state.num_steps.sum()

            return jax.lax.fori_loop(0, draws, one, (state, 0))

        self.continued = lambda: jax.block_until_ready(continued(self.whole.last_state))
        self.continued()  # compiles

    def _listen(self, event: str, seconds: float, **_: str | int) -> None:
        if event.endswith(("backend_compile_duration", "jaxpr_to_mlir_module_duration")):
            self.compiling += seconds

    def fit(self, seed: int) -> tuple[float, float]:
        """Seconds of a fit but for compiling, and ESS of the slowest function value."""
        import jax
        import numpy as np

        start = time.perf_counter()
        self.compiling = 0.0
        self.whole.run(
            jax.random.PRNGKey(seed),
            *self.data,
            extra_fields=("num_steps",),
        )
        jax.block_until_ready(self.whole.get_samples())
        seconds = time.perf_counter() - start - self.compiling
        samples = self.whole.get_samples(group_by_chain=True)
        return seconds, slowest(np.asarray(self.values(samples, self.data[0]), float))

    def gradient(self) -> float:
        """Seconds per gradient and chain."""
        start = time.perf_counter()
        _, steps = self.continued()
        return (time.perf_counter() - start) / int(steps)


class Manager(BaseManager):
    """Holds NumPyro in a process of its own, which waits between repeats."""


Manager.register("NumPyro", NumPyro)
