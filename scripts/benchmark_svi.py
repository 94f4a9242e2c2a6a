"""Time of one SVI step: ours, TyXe's VariationalBNN, NumPyro; the same model, guide (AutoNormal), ELBO and Adam.

    python scripts/benchmark_svi.py                        # the peers that this Python has
    python scripts/benchmark_svi.py --numpyro-python PATH   # NumPyro from another environment

Prints a table of medians and ratios; compile time is apart. NumPyro runs its steps inside one compiled scan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

#: name -> inputs, hidden, outputs, points, batch size, activation
CASES = {
    "1-50-1, N=400, full batch": (1, 50, 1, 400, None, "tanh"),
    "13-50-1, N=455, batch 32": (13, 50, 1, 455, 32, "relu"),
    "784-64-10, N=6000, batch 128": (784, 64, 10, 6000, 128, "relu"),
}
REPEATS = 5


def data(case):
    """Inputs and targets as NumPy arrays."""
    import numpy as np

    inputs, _, outputs, num_data, _, _ = CASES[case]
    generator = np.random.default_rng(0)
    x = generator.standard_normal((num_data, inputs)).astype("float32")
    if outputs > 1:
        return x, generator.integers(0, outputs, num_data)
    return x, (np.sin(x[:, :1]) + 0.1 * generator.standard_normal((num_data, 1))).astype("float32")


def pyrobnn_step(case):
    """Seconds per step (all repeats) and seconds of compilation."""
    import torch

    import pyrobnn as pb

    if CASES[case][0] < 100:
        torch.set_num_threads(1)  # a second thread only costs here
    model, x, y = torch_model(case)
    steps = 2000 if CASES[case][0] < 100 else 400
    method = pb.SVI(num_steps=steps, batch_size=CASES[case][4], log_every=steps)
    times, compile_seconds = [], 0.0
    for repeat in range(REPEATS + 1):
        with torch.random.fork_rng():
            timings = train_only(method, model, x, y, seed=repeat)
        compile_seconds = max(compile_seconds, timings["compile"])
        times.append(timings["fit"] / steps)
    return times[1:], compile_seconds


def train_only(method, model, x, y, seed, device=None):
    """A fit without its evaluation and its draws."""
    from pyrobnn.inference.fitting.problem import prepare
    from pyrobnn.inference.vi.fit import GuideFit
    from pyrobnn.seeding import seeded

    problem = prepare(model, x, y, points="free", device=device)
    with seeded(seed, problem.device):
        return GuideFit(method, problem, None, seed).train((), False).timings


def torch_model(case):
    """The case as a pyrobnn model with its data."""
    import pyro.distributions as dist
    import torch

    import pyrobnn as pb

    inputs, hidden, outputs, *_, activation = CASES[case]
    layers = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}
    net = torch.nn.Sequential(
        torch.nn.Linear(inputs, hidden), layers[activation](), torch.nn.Linear(hidden, outputs)
    )
    likelihood = pb.likelihoods.HomoskedasticGaussian(0.1) if outputs == 1 else pb.likelihoods.Categorical()
    x, y = (torch.from_numpy(value) for value in data(case))
    return pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), likelihood), x, y


def tyxe_step(case):
    """TyXe's own loop; its guides call a function that Pyro 1.9.2 has removed, put back here for the comparison."""
    from operator import attrgetter

    import pyro
    import pyro.distributions as dist
    import pyro.util

    pyro.util.deep_getattr = lambda value, name: attrgetter(name)(value)
    import tyxe

    pyro.clear_param_store()
    model, x, y = torch_model(case)
    num_data, batch = CASES[case][3], CASES[case][4] or CASES[case][3]
    if CASES[case][2] == 1:
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(num_data, scale=0.1)
    else:
        likelihood = tyxe.likelihoods.Categorical(num_data)
    bnn = tyxe.VariationalBNN(
        model.net, tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0)), likelihood, tyxe.guides.AutoNormal
    )
    batches = [(a, b) for a, b in zip(x.split(batch), y.split(batch), strict=True) if len(a) == batch]
    optimizer = pyro.optim.Adam({"lr": 1e-2})
    bnn.fit(batches, optimizer, 3, num_particles=1)
    epochs = max(1, 60 // len(batches))
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        bnn.fit(batches, optimizer, epochs, num_particles=1)
        times.append((time.perf_counter() - begun) / (epochs * len(batches)))
    pyro.clear_param_store()
    return times, 0.0


def numpyro_step(case):
    """NumPyro: AutoNormal, TraceMeanField_ELBO and Adam inside one jitted scan, batches gathered on the device."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, TraceMeanField_ELBO
    from numpyro.infer.autoguide import AutoNormal

    inputs, hidden, outputs, num_data, batch, activation = CASES[case]
    x, y = (jnp.asarray(value) for value in data(case))
    act = {"tanh": jnp.tanh, "relu": jax.nn.relu}[activation]

    def model(x, y):
        def weight(name, *shape):
            return numpyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))

        h = act(x @ weight("w1", inputs, hidden) + weight("b1", hidden))
        f = h @ weight("w2", hidden, outputs) + weight("b2", outputs)
        with numpyro.plate("data", num_data, subsample_size=len(x)):
            if outputs == 1:
                numpyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)
            else:
                numpyro.sample("y", dist.Categorical(logits=f), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), TraceMeanField_ELBO())
    size = batch or num_data
    state = svi.init(jax.random.PRNGKey(0), x[:size], y[:size])
    steps = 2000 if inputs < 100 else 400

    def step(state, rows):
        if batch is None:
            return svi.update(state, x, y)
        return svi.update(state, x[rows], y[rows])

    run = jax.jit(lambda state, rows: jax.lax.scan(step, state, rows))
    per_epoch = num_data // size
    epochs = -(-steps // per_epoch)
    keys = jax.random.split(jax.random.PRNGKey(1), epochs)
    orders = [jax.random.permutation(key, num_data)[: per_epoch * size].reshape(-1, size) for key in keys]
    rows = jnp.concatenate(orders)[:steps] if batch else jnp.zeros((steps, 1), dtype=int)
    begun = time.perf_counter()
    jax.block_until_ready(run(state, rows))
    compile_seconds = time.perf_counter() - begun
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(run(state, rows))
        times.append((time.perf_counter() - begun) / steps)
    return times, compile_seconds


PEERS = {"pyrobnn": pyrobnn_step, "tyxe": tyxe_step, "numpyro": numpyro_step}


def measure(peer: str, case: str, python: str = sys.executable) -> dict[str, float]:
    """Median microseconds per step and compile seconds, in a process of its own."""
    done = subprocess.run(
        [python, __file__, "--one", peer, case], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{peer} failed on {case}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def svi_table(
    numpyro_python: str | None = None, peers: tuple[str, ...] = tuple(PEERS)
) -> Iterator[dict[str, float | str]]:
    """One row per case: microseconds of each peer, and seconds of our compile."""
    for case in CASES:
        row: dict = {"case": case}
        for peer in peers:
            python = numpyro_python if peer == "numpyro" and numpyro_python else sys.executable
            result = measure(peer, case, python)
            row[peer] = result["us"]
            if peer == "pyrobnn":
                row["compile"] = result["compile"]
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", nargs=2, metavar=("PEER", "CASE"), help="measure one, print JSON")
    parser.add_argument("--numpyro-python", help="the Python that has NumPyro")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--results", help="append the rows here, one JSON object a line")
    args = parser.parse_args()
    if args.one:
        times, compile_seconds = PEERS[args.one[0]](args.one[1])
        print(json.dumps({"us": 1e6 * statistics.median(times), "compile": compile_seconds}))
        return
    for row in svi_table(args.numpyro_python, tuple(args.peers)):
        parts = [f"{peer} {row[peer]:8.1f} us" for peer in args.peers]
        if "tyxe" in row:
            parts.append(f"tyxe/ours {row['tyxe'] / row['pyrobnn']:5.1f}x")
        if "numpyro" in row:
            parts.append(f"ours/numpyro {row['pyrobnn'] / row['numpyro']:5.2f}")
        print(
            f"{row['case']:30s} " + "  ".join(parts) + f"  compile {row.get('compile', 0):.1f} s", flush=True
        )
        if args.results:
            from pyrobnn.studies.uci import append_record

            append_record(args.results, row)


if __name__ == "__main__":
    main()
