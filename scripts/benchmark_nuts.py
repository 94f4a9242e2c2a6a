"""Time of one NUTS gradient per chain, and ESS per second: ours, NumPyro's vectorized chains, Pyro's NUTS.

    python scripts/benchmark_nuts.py                        # the peers that this Python has
    python scripts/benchmark_nuts.py --numpyro-python PATH   # NumPyro from another environment

Same model, same data, same kind of warm-up. Repeats of ours and NumPyro's alternate; medians and ratios are printed.
``--clock cpu`` counts processor time instead of wall time, for a machine that is busy (then use one thread).
A compile is never part of a time. Cost per gradient counts the leapfrogs that belong to a trajectory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

#: name -> inputs, hidden, points, activation, noise scale
CASES = {"1-50-1": (1, 50, 400, "tanh", 0.3), "13-50-1": (13, 50, 455, "relu", 0.3)}
NUM_WARMUP = 300
NUM_PROBES = 16


def data(case):
    """Inputs (N, inputs) and targets (N,) as NumPy arrays."""
    import numpy as np

    inputs, _, num_data, _, noise = CASES[case]
    generator = np.random.default_rng(0)
    x = generator.standard_normal((num_data, inputs)).astype("float32")
    return x, (np.sin(2 * x[:, 0]) + noise * generator.standard_normal(num_data)).astype("float32")


def clock(kind):
    return time.perf_counter if kind == "wall" else lambda: sum(os.times()[:2])


def ess_of(f):
    """Bulk ESS of the slowest function value; f (chain, draw, probe)."""
    from arviz_stats.base import array_stats

    return float(array_stats.ess(f, chain_axis=0, draw_axis=1, method="bulk").min())


# -- ours -----------------------------------------------------------------------------------------------------------


class Ours:
    """A warmed-up run of the compiled machine, its bare gradient, and what one fit of it gives."""

    def __init__(self, case, chains, num_draws, kind):
        import torch

        from pyrobnn.compile import compiled
        from pyrobnn.inference.base import prepare
        from pyrobnn.inference.hmc_machine import Machine
        from pyrobnn.inference.hmc_run import Run, batched_gradient
        from pyrobnn.inference.nuts import slowest_ess

        self.clock, self.chains = clock(kind), chains
        x, y = (torch.from_numpy(part) for part in data(case))
        problem = prepare(torch_model(case), x, y, points="held")
        z = problem.density.sample_prior(chains, seed=1)
        gradient, _ = batched_gradient(problem.density.log_joint, z)
        slots = max(num_draws, NUM_WARMUP)
        machine = Machine(gradient, chains, problem.density.dim, slots, z.dtype, z.device)
        self.run = Run(machine, seed=0, num_warmup=NUM_WARMUP)
        with torch.no_grad():
            self.run.begin(z)
            self.run.prepare()
            start = self.clock()
            draws = self.run.sample(num_draws)
            self.fit_seconds = self.clock() - start
            self.bare_gradient = compiled(gradient, z)
        self.ess = slowest_ess(problem, draws.z)
        self.compile_seconds = draws.compile_seconds
        self.steps_per_draw = float(draws.stats[..., 4].mean())
        self.z = z

    def machine(self, steps=None):
        """Seconds per gradient and chain of the machine."""
        steps = steps or max(50, 4000 // self.chains)
        start = self.clock()
        self.run.advance(steps)
        return (self.clock() - start) / steps / self.chains

    def bare(self, steps=None):
        """Seconds per gradient and chain of the gradient alone."""
        steps = steps or max(50, 4000 // self.chains)
        start = self.clock()
        for _ in range(steps):
            self.bare_gradient(self.z)
        return (self.clock() - start) / steps / self.chains


def torch_model(case):
    import pyro.distributions as dist
    import torch

    import pyrobnn as pb

    inputs, hidden, _, activation, noise = CASES[case]
    layer = torch.nn.Tanh() if activation == "tanh" else torch.nn.ReLU()
    with torch.random.fork_rng():
        net = torch.nn.Sequential(torch.nn.Linear(inputs, hidden), layer, torch.nn.Linear(hidden, 1))
    likelihood = pb.likelihoods.HomoskedasticGaussian(noise)
    return pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), likelihood)


def pyro_seconds(case, kind):
    """Seconds per gradient of Pyro's NUTS on the same Pyro program."""
    import pyro
    import torch
    from pyro.infer import NUTS

    model = torch_model(case)
    x, y = (torch.from_numpy(part) for part in data(case))
    now = clock(kind)
    kernel = NUTS(model.pyro_model, max_tree_depth=6)
    calls = 0
    with torch.random.fork_rng(), pyro.validation_enabled(False):
        torch.manual_seed(0)
        kernel.setup(2, x, y.unsqueeze(-1))
        potential = kernel.potential_fn

        def counting(z):
            nonlocal calls
            calls += 1
            return potential(z)

        kernel.potential_fn = counting
        start = now()
        params = kernel.initial_params
        for _ in range(4):
            params = kernel.sample(params)
        seconds = now() - start
    return seconds / max(calls, 1)


# -- NumPyro, in this or another Python -------------------------------------------------------------------------------


def numpyro_worker(case, chains, num_draws, kind):
    """Compile, then time one run for every line read; the first answer has the ESS."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS, init_to_sample

    inputs, hidden, _, activation, noise = CASES[case]
    x, y = (jnp.asarray(part) for part in data(case))
    act = jnp.tanh if activation == "tanh" else jax.nn.relu

    def forward(w1, b1, w2, b2, x):
        return act(x @ w1 + b1) @ w2 + b2

    def model(x, y):
        w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([inputs, hidden]).to_event(2))
        b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([hidden]).to_event(1))
        w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([hidden]).to_event(1))
        b2 = numpyro.sample("b2", dist.Normal(0, 1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(forward(w1, b1, w2, b2, x), noise), obs=y)

    now = clock(kind)
    mcmc = MCMC(
        NUTS(model, init_strategy=init_to_sample),
        num_warmup=NUM_WARMUP,
        num_samples=num_draws,
        num_chains=chains,
        chain_method="vectorized" if chains > 1 else "sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.PRNGKey(0), x, y)  # compiles
    start = now()
    mcmc.run(jax.random.PRNGKey(1), x, y)
    jax.block_until_ready(mcmc.get_samples())
    fit_seconds = now() - start
    s = mcmc.get_samples(group_by_chain=True)
    rows = jnp.linspace(0, len(x) - 1, NUM_PROBES).astype(int)
    f = jax.vmap(jax.vmap(lambda *p: forward(*p, x[rows])))(s["w1"], s["b1"], s["w2"], s["b2"])
    import numpy as np

    state = mcmc.last_state
    print(json.dumps({"fit": fit_seconds, "f": np.asarray(f, float).tolist()}), flush=True)
    for _ in sys.stdin:
        mcmc.post_warmup_state = state
        start = now()
        mcmc.run(jax.random.PRNGKey(2), x, y, extra_fields=("num_steps",))
        jax.block_until_ready(mcmc.get_samples())
        seconds = now() - start
        state = mcmc.last_state
        steps = int(mcmc.get_extra_fields()["num_steps"].sum())
        print(json.dumps({"seconds": seconds / steps}), flush=True)


class NumPyro:
    """NumPyro in a process of its own, which waits between repeats."""

    def __init__(self, python, case, chains, num_draws, kind):
        import numpy as np

        command = [python, __file__, "--worker", case, str(chains), str(num_draws), "--clock", kind]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        first = self._process.stdout.readline()
        if not first:
            raise RuntimeError("NumPyro did not start: install the 'bench' extra or pass --numpyro-python")
        answer = json.loads(first)
        self.fit_seconds, self.ess = answer["fit"], ess_of(np.array(answer["f"]))
        self.seconds()  # compiles the continued run

    def seconds(self):
        """Seconds per gradient and chain."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())["seconds"]

    def close(self):
        self._process.communicate()


# -- the table --------------------------------------------------------------------------------------------------------


def compare(case, chains, args):
    """One row: medians over alternating repeats, microseconds."""
    num_draws = max(50, args.draws // chains)
    ours = Ours(case, chains, num_draws, args.clock)
    try:
        peer = NumPyro(args.numpyro_python, case, chains, num_draws, args.clock)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        peer = None
    machine, bare, theirs = [], [], []
    for _ in range(args.repeats):
        machine.append(ours.machine())
        bare.append(ours.bare())
        if peer:
            theirs.append(peer.seconds())
    row = {
        "case": case,
        "chains": chains,
        "machine_us": statistics.median(machine) * 1e6,
        "bare_gradient_us": statistics.median(bare) * 1e6,
        "compile_s": ours.compile_seconds,
        "ess_per_s": ours.ess / ours.fit_seconds,
        "steps_per_draw": ours.steps_per_draw,
    }
    row["machine/bare"] = row["machine_us"] / row["bare_gradient_us"]
    if peer:
        peer.close()
        row["numpyro_us"] = statistics.median(theirs) * 1e6
        row["ours/numpyro"] = row["machine_us"] / row["numpyro_us"]
        row["numpyro_ess_per_s"] = peer.ess / peer.fit_seconds
        row["ess ratio"] = row["ess_per_s"] / row["numpyro_ess_per_s"]
    return row


def show(row):
    print(
        "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items()
        )
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--chains", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--draws", type=int, default=4000, help="over all chains")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--numpyro-python", default=sys.executable)
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        case, chains, num_draws = args.worker
        numpyro_worker(case, int(chains), int(num_draws), args.clock)
        return
    rows = []
    for case in args.cases:
        pyro_us = pyro_seconds(case, args.clock) * 1e6
        for chains in args.chains:
            row = compare(case, chains, args)
            row["pyro_us"] = pyro_us
            row["pyro/ours"] = pyro_us / row["machine_us"]
            rows.append(row)
            show(row)
            sys.stdout.flush()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
