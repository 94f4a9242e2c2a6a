"""NUTS: time of one gradient per chain, and ESS per second; ours, NumPyro's vectorized chains, Pyro's NUTS.

    python scripts/speed/nuts.py                         # the peers that this Python has
    python scripts/speed/nuts.py --numpyro-python PATH    # NumPyro from another environment

Same model, data, warm-up and number of draws. Repeats of ours and NumPyro's alternate; medians and ratios are printed.
``--clock cpu`` counts processor time instead of wall time, for a machine that is busy (then use one thread).
A compile is never part of a time. Cost per gradient counts the leapfrogs that belong to a trajectory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

#: name -> what is fitted; a net has the prior N(0, 1/fan-in), biases N(0, 1)
CASES = {
    "1-50-1": {"inputs": 1, "hidden": 50, "num_data": 400, "activation": "tanh", "noise": 0.3},
    "13-50-1": {"inputs": 13, "hidden": 50, "num_data": 455, "activation": "relu", "noise": 0.3},
    "hierarchical": {"inputs": 5, "groups": 20, "num_data": 400, "noise": 0.5},
}
NUM_PROBES = 16
#: leapfrogs, over all chains, of a run that is timed
TIMED_LEAPFROGS = 30_000


def data(case):
    """Inputs (N, inputs), the last column a group number where there are groups, and targets (N,); NumPy arrays."""
    import numpy as np

    generator = np.random.default_rng(0)
    x = generator.standard_normal((case["num_data"], case["inputs"])).astype("float32")
    y = np.sin(2 * x[:, 0]) + case["noise"] * generator.standard_normal(case["num_data"])
    if "groups" in case:
        group = np.arange(case["num_data"]) % case["groups"]
        y = y + generator.standard_normal(case["groups"])[group]
        x = np.column_stack([x, group]).astype("float32")
    return x, y.astype("float32")


def clock(kind):
    """Seconds, of the wall or of the processor."""
    return time.perf_counter if kind == "wall" else lambda: sum(os.times()[:2])


def slowest(values):
    """Bulk ESS of the slowest of the values (chain, draw, value)."""
    from arviz_stats.base import array_stats

    return float(array_stats.ess(values, chain_axis=0, draw_axis=1, method="bulk").min())


def torch_data(case):
    """:func:`data` as tensors."""
    import torch

    return tuple(torch.from_numpy(part) for part in data(case))


# -- ours -----------------------------------------------------------------------------------------------------------


def torch_program(case):
    """The model as a pyrobnn model or a plain Pyro program."""
    import pyro
    import pyro.distributions as dist
    import torch

    import pyrobnn as pb

    if "groups" not in case:
        net = pb.networks.mlp(case["inputs"], (case["hidden"],), activation=case["activation"], seed=0)
        return pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(case["noise"]))

    def program(x, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        offset = pyro.sample("offset", dist.Normal(torch.zeros(case["groups"], device=x.device), 1.0).to_event(1))
        slope = pyro.sample("slope", dist.Normal(torch.zeros(case["inputs"], device=x.device), 1.0).to_event(1))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        loc = mean + spread * offset[x[:, -1].long()] + x[:, :-1] @ slope
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(loc, scale), obs=y)

    return program


class Ours:
    """Our NUTS by its public face: what a longer run takes more than a shorter one that begins alike."""

    def __init__(self, case, args):
        import pyrobnn as pb

        self.clock = clock(args["clock"])
        self.program, (self.x, self.y) = torch_program(case), torch_data(case)
        self.args = args
        options = {"num_chains": args["num_chains"], "max_tree_depth": args["max_tree_depth"]}
        self.method = pb.NUTS(num_warmup=args["num_warmup"], **options)
        self.first, _ = self.run(1)
        self.compile_seconds = self.first.meta["timings"]["compile"]

    def run(self, num_draws):
        """The posterior, and seconds of its fit."""
        start = self.clock()
        with warnings.catch_warnings(action="ignore"):
            found = self.method.fit(self.program, self.x, self.y, num_draws=num_draws, seed=0)
        return found, self.clock() - start

    def fit(self, num_draws):
        """Seconds of ``num_draws`` draws after the warm-up, ESS of the slowest function value, gradients per draw."""
        _, before = self.run(1)
        posterior, seconds = self.run(num_draws)
        if posterior.meta.get("input_shape") is None:
            import torch

            sites = [value.flatten(2) for name, value in posterior.draws.items() if value.dim() > 1]
            values = torch.cat(sites, -1)
        else:
            rows = self.x[:: max(1, len(self.x) // NUM_PROBES)]
            values = posterior.predict(rows).f[..., 0]
        gradients = posterior.meta["num_gradients"] - self.first.meta["num_gradients"]
        chains = self.args["num_chains"]
        return seconds - before, slowest(values.double().cpu().numpy()), gradients / num_draws / chains

    def gradient(self, num_draws=100):
        """Seconds per gradient and chain."""
        _, before = self.run(1)
        posterior, seconds = self.run(num_draws)
        return (seconds - before) / (posterior.meta["num_gradients"] - self.first.meta["num_gradients"])


def pyro_seconds(case, kind):
    """Seconds per gradient of Pyro's NUTS on the same Pyro program."""
    import torch
    from pyro.infer import NUTS

    import pyrobnn as pb

    program = torch_program(case)
    program = program.pyro_model if isinstance(program, pb.BNN) else program
    x, y = (torch.from_numpy(part) for part in data(case))
    now, calls = clock(kind), 0
    kernel = NUTS(program, max_tree_depth=6)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kernel.setup(2, x, y if "groups" in case else y.unsqueeze(-1))
        potential = kernel.potential_fn

        def counting(z):
            nonlocal calls
            calls += 1
            return potential(z)

        kernel.potential_fn = counting
        start, params = now(), kernel.initial_params
        for _ in range(4):
            params = kernel.sample(params)
        return (now() - start) / max(calls, 1)


# -- NumPyro, in this or another Python -------------------------------------------------------------------------------


def numpyro_program(case):
    """The same model, and a function of (samples, x) that gives the values whose ESS counts (chain, draw, value)."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    if "groups" in case:

        def program(x, y):
            mean = numpyro.sample("mean", dist.Normal(0, 1))
            spread = numpyro.sample("spread", dist.HalfNormal(1))
            offset = numpyro.sample("offset", dist.Normal(0, 1).expand([case["groups"]]).to_event(1))
            slope = numpyro.sample("slope", dist.Normal(0, 1).expand([case["inputs"]]).to_event(1))
            scale = numpyro.sample("scale", dist.HalfNormal(1))
            loc = mean + spread * offset[x[:, -1].astype(int)] + x[:, :-1] @ slope
            with numpyro.plate("data", len(x)):
                numpyro.sample("y", dist.Normal(loc, scale), obs=y)

        return program, lambda s, x: jnp.concatenate([v.reshape(*v.shape[:2], -1) for v in s.values()], -1)

    inputs, hidden = case["inputs"], case["hidden"]
    act = jnp.tanh if case["activation"] == "tanh" else jax.nn.relu

    def forward(w1, b1, w2, b2, x):
        return act(x @ w1 + b1) @ w2 + b2

    def program(x, y):
        w1 = numpyro.sample("w1", dist.Normal(0, inputs**-0.5).expand([inputs, hidden]).to_event(2))
        b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([hidden]).to_event(1))
        w2 = numpyro.sample("w2", dist.Normal(0, hidden**-0.5).expand([hidden]).to_event(1))
        b2 = numpyro.sample("b2", dist.Normal(0, 1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(forward(w1, b1, w2, b2, x), case["noise"]), obs=y)

    def values(s, x):
        rows = jnp.linspace(0, len(x) - 1, NUM_PROBES).astype(int)
        return jax.vmap(jax.vmap(lambda *p: forward(*p, x[rows])))(s["w1"], s["b1"], s["w2"], s["b2"])

    return program, values


def numpyro_worker(case, args):
    """Compile; then, for every line read, run what it asks: a whole fit, or a few draws from the last state."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from numpyro.infer import MCMC, NUTS, init_to_sample

    x, y = (jnp.asarray(part) for part in data(case))
    program, values = numpyro_program(case)
    now, compiling = clock(args["clock"]), [0.0]

    def listen(event, seconds, **_):
        if event.endswith(("backend_compile_duration", "jaxpr_to_mlir_module_duration")):
            compiling[0] += seconds

    jax.monitoring.register_event_duration_secs_listener(listen)  # NumPyro compiles at every run

    def sampler(num_draws):
        return MCMC(
            NUTS(program, init_strategy=init_to_sample, max_tree_depth=args["max_tree_depth"]),
            num_warmup=args["num_warmup"],
            num_samples=num_draws,
            num_chains=args["num_chains"],
            chain_method="vectorized" if args["num_chains"] > 1 else "sequential",
            progress_bar=False,
        )

    def run(mcmc, seed):
        start, compiling[0] = now(), 0.0
        mcmc.run(jax.random.PRNGKey(seed), x, y, extra_fields=("num_steps",))
        jax.block_until_ready(mcmc.get_samples())
        return now() - start - compiling[0], int(mcmc.get_extra_fields()["num_steps"].sum())

    whole = sampler(args["num_draws"])
    _, steps = run(whole, 0)  # compiles
    draws = max(2, round(TIMED_LEAPFROGS * args["num_draws"] / steps))

    @jax.jit
    def continued(state):
        def one(_, carry):
            state = whole.sampler.sample(carry[0], (x, y), {})
            return state, carry[1] + state.num_steps.sum()

        return jax.lax.fori_loop(0, draws, one, (state, 0))

    continued(whole.last_state)  # compiles
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "fit":
            seconds, _ = run(whole, 2)
            found = np.asarray(values(whole.get_samples(group_by_chain=True), x), float)
            print(json.dumps({"seconds": seconds, "values": found.tolist()}), flush=True)
        else:
            start = now()
            _, steps = jax.block_until_ready(continued(whole.last_state))
            print(json.dumps((now() - start) / int(steps)), flush=True)


class NumPyro:
    """NumPyro in a process of its own, which waits between repeats."""

    def __init__(self, python, case, args):
        worker = json.dumps({"case": case, "args": args})
        self._process = subprocess.Popen(
            [python, __file__, "--worker", worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if not self._process.stdout.readline():
            raise RuntimeError("NumPyro did not start: install the 'bench' extra or pass --numpyro-python")

    def ask(self, what):
        """The answer to ``"fit"`` or ``"time"``."""
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        """End the process."""
        self._process.communicate()


# -- the tables ------------------------------------------------------------------------------------------------------


def compare(name, num_chains, options):
    """One row: medians over alternating repeats, microseconds."""
    import numpy as np

    fit = num_chains <= options.fit_up_to
    num_draws = max(50, options.draws // num_chains) if fit else 10
    args = {"num_chains": num_chains, "num_warmup": options.warmup if fit else 20, "num_draws": num_draws}
    # the cost of a gradient doesn't depend on the depth of trees; a warm-up that isn't used need not be long
    args |= {"clock": options.clock, "max_tree_depth": 10 if fit else 6}
    ours, peer = Ours(CASES[name], args), None
    try:
        peer = NumPyro(options.numpyro_python, CASES[name], args)
    except RuntimeError as error:
        print(error, file=sys.stderr)
    row = {"case": name, "chains": num_chains}
    if fit:
        seconds, ess, steps = ours.fit(num_draws)
        row |= {"steps per draw": steps, "ess": ess, "fit_s": seconds}
        if peer:
            answer = peer.ask("fit")
            row |= {"numpyro_ess": slowest(np.array(answer["values"])), "numpyro_fit_s": answer["seconds"]}
            row["ess per s / numpyro"] = (ess / seconds) / (row["numpyro_ess"] / answer["seconds"])
    row |= timed(ours, peer, options.repeats)
    row["pyro_us"] = 1e6 * statistics.median(pyro_seconds(CASES[name], options.clock) for _ in range(3))
    row["pyro/ours"] = row["pyro_us"] / row["ours_us"]
    return row


def timed(ours, peer, repeats):
    """Alternating repeats; medians in microseconds per gradient and chain."""
    mine, theirs = [], []
    for _ in range(repeats):
        mine.append(1e6 * ours.gradient())
        if peer:
            theirs.append(1e6 * peer.ask("time"))
    row = {"ours_us": statistics.median(mine), "compile_s": ours.compile_seconds}
    if peer:
        peer.close()
        row["numpyro_us"] = statistics.median(theirs)
        row["ours/numpyro"] = row["ours_us"] / row["numpyro_us"]
    return row


def main():
    """Print the rows; write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--chains", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--draws", type=int, default=1000, help="over all chains, at least 50 in each")
    parser.add_argument("--fit-up-to", type=int, default=16, help="chains; with more, only gradients are timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--numpyro-python", default=sys.executable)
    parser.add_argument("--results", help="append the rows here, one JSON object a line")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        numpyro_worker(**json.loads(options.worker))
        return
    from records import append_record

    for case, chains in itertools.product(options.cases, options.chains):
        row = compare(case, chains, options)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        if options.results:
            append_record(options.results, row)


if __name__ == "__main__":
    main()
