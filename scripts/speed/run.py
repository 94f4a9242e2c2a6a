"""Speed and scores beside those of an earlier commit, and NUTS beside its peers.

    python scripts/speed/run.py                   # beside the commit of the newest record; adds a record
    python scripts/speed/run.py --check           # the same, adds none; exit code 1 if something is worse
    python scripts/speed/run.py --against v0.2.0  # beside any commit
    python scripts/speed/run.py --peers           # NUTS beside NumPyro and Pyro

Both codes run here and now, in turn, on the same seeds: a time of another day or machine is never compared. Each
repeat is a process of its own; times are CPU seconds over those of a fixed computation in NumPy, timed in turn.
Beside its peers NUTS has the same model, data, warm-up and number of draws; repeats of ours and NumPyro's alternate,
wall time, no compile in it. A gradient is one of the leapfrogs that belong to a trajectory; ESS are of whole fits.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import math
import os
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from statistics import median, stdev
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from pyrobnn.data import Dataset

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from records import append_record, commit, peak_mb, read_records, versions  # noqa: E402

RESULTS = HERE / "records.jsonl"
PEERS = HERE / "nuts.jsonl"
#: fewest repeats; chance that an unchanged number is measured again; and that any number is then called worse
FEWEST = 3
SUSPECTED = 0.1
FALSE_ALARMS = 0.01
#: timings of one repeat, each in turn with the reference
TURNS = 4

#: name -> what is fitted; a net has the prior N(0, 1/fan-in), biases N(0, 1)
CASES = {
    "1-50-1": {
        "inputs": 1,
        "hidden": 50,
        "num_data": 400,
        "activation": "tanh",
        "noise": 0.3,
    },
    "13-50-1": {
        "inputs": 13,
        "hidden": 50,
        "num_data": 455,
        "activation": "relu",
        "noise": 0.3,
    },
    "hierarchical": {
        "inputs": 5,
        "groups": 20,
        "num_data": 400,
        "noise": 0.5,
    },
}
NUM_PROBES = 16

Record = Mapping[str, Any]
Case = Mapping[str, Any]


@dataclass(frozen=True)
class Number:
    """A number: its label, whether its changes are factors or differences, and which way is worse."""

    label: str
    kind: Literal["factor", "difference"]
    worse: Literal["higher", "lower"]

    def change(self, old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
        """Median over the seeds of the logarithm of a factor, or of a difference, and its standard error."""
        scaled = math.log if self.kind == "factor" else float
        changes = [scaled(after) - scaled(before) for before, after in zip(old, new, strict=True)]
        # that of a mean times √(π/2), as for normal changes
        return median(changes), math.sqrt(math.pi / 2) * stdev(changes) / math.sqrt(len(changes))


NUMBERS = {
    "nuts gradient": Number("NUTS, a gradient of 1-50-1", "factor", "higher"),
    "svi step": Number("SVI, a step of 1-50-1", "factor", "higher"),
    "laplace fit": Number("Laplace, a fit of 13-50-50-1", "factor", "higher"),
    "predict": Number("prediction by 400 draws", "factor", "higher"),
    "nuts ess": Number("NUTS, effective draws per 1000 gradients", "factor", "lower"),
    "laplace score": Number("Laplace, held-out log density", "difference", "lower"),
    "svi score": Number("SVI, held-out log density", "difference", "lower"),
}


def main(argv: list[str] | None = None) -> int:
    """Measure; record or check."""
    options = parse(argv)
    if options.peers:
        results = options.results or PEERS
        for name, chains in itertools.product(options.cases, options.chains):
            row = beside_peers(name, chains, options.repeats)
            append_record(results, row)
            print("  ".join(f"{key} {shown(number)}" for key, number in row.items()), flush=True)
        return 0
    results = options.results or RESULTS
    history = read_records(results)
    against = options.against or (history[-1]["commit"] if history else None)
    if against is None:
        print(f"{results} has no record yet: name a commit by --against")
        return 2
    with TemporaryDirectory() as folder:
        try:
            unpack(against, Path(folder))
        except subprocess.CalledProcessError as error:
            print(f"git does not give the code of {against}: {error.stderr.decode().strip()}")
            return 2
        now = measure_again_if_worse(against, options.repeats, Path(folder))
    print(table([now]))
    if not options.check:
        append_record(results, now)
        return 0
    losses = worse(now, FALSE_ALARMS / len(NUMBERS))
    for line in losses:
        print(line)
    print(f"{len(NUMBERS) - len(losses)} of {len(NUMBERS)} numbers are no worse than at {against}")
    return 1 if losses else 0


def shown(number: str | float | None) -> str:
    """A float to four digits, anything else as it is."""
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def measure_again_if_worse(against: str, repeats: int, folder: Path) -> dict[str, Any]:
    """Every number of both codes, by as many repeats again where one looks worse."""
    now = {"against": against, **measure(range(repeats), folder)}
    if worse(now, SUSPECTED):
        again = measure(range(repeats, 2 * repeats), folder)
        for name in NUMBERS:
            now["old"][name] += again["old"][name]
            now["new"][name] += again["new"][name]
    return now


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--check",
        action="store_true",
        help="compare, add no record; 1 where something is worse",
    )
    add(
        "--against",
        metavar="COMMIT",
        help="what to compare with; the commit of the newest record",
    )
    add(
        "--repeats",
        type=int,
        default=5,
        help=f"processes of each code, at least {FEWEST}",
    )
    add(
        "--peers",
        action="store_true",
        help="a gradient of NUTS and its ESS, beside NumPyro's and Pyro's",
    )
    add(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        help="of --peers",
    )
    add(
        "--chains",
        nargs="+",
        type=int,
        default=[4, 16, 64],
        help="of --peers",
    )
    add(
        "--results",
        type=Path,
        help="the file of the records",
    )
    options = parser.parse_args(argv)
    if options.repeats < FEWEST:
        parser.error(f"--repeats must be {FEWEST} or more, got {options.repeats}")
    return options


def worse(record: Record, level: float) -> list[str]:
    """Numbers worse than in the other code, by a t-test of the changes at this level each."""
    from scipy.stats import t

    losses = []
    for name, number in NUMBERS.items():
        old = record["old"][name]
        new = record["new"][name]
        change, error = number.change(old, new)
        change *= 1.0 if number.worse == "higher" else -1.0
        if change > error * t.isf(level, len(new) - 1):
            losses.append(
                f"{number.label}: {median(old):.3g} at {record['against']}, {median(new):.3g} now"
            )
    return losses


# -- measuring -------------------------------------------------------------------------------------------------------


def unpack(revision: str, folder: Path) -> None:
    """Write the package as it was at a commit."""
    command = ["git", "-C", str(HERE.parents[1]), "archive", revision, "pyrobnn"]
    archive = subprocess.run(
        command,
        capture_output=True,
        check=True,
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")


def measure(seeds: Sequence[int], old: Path) -> dict[str, Any]:
    """Every number of the package in ``old`` and of this one, in turn, each repeat in a process of its own."""
    folders = {"old": old, "new": HERE.parents[1]}
    values: dict[str, dict[str, list[float]]] = {}
    for code in folders:
        values[code] = {name: [] for name in NUMBERS}
    os.environ["OMP_NUM_THREADS"] = "1"
    for seed, turn in itertools.product(seeds, (0, 1)):
        code = ("old", "new")[(seed + turn) % 2]  # each goes first in every other repeat
        numbers = in_a_process(seed, folders[code])
        print(
            code,
            "  ".join(f"{name} {value:.4g}" for name, value in numbers.items()),
            flush=True,
        )
        for name, value in numbers.items():
            values[code][name].append(value)
    return {
        "peak_mb": peak_mb(children=True),
        "commit": commit() or "?",
        "versions": versions(),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **values,
    }


def in_a_process(seed: int, folder: Path) -> dict[str, float]:
    """Every number once, by the package in ``folder``."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        return processes.submit(repeat, seed, folder).result()


def repeat(seed: int, folder: Path) -> dict[str, float]:
    """Every number once, in a process that has not imported the package yet."""
    sys.path.insert(0, str(folder))
    import torch

    import pyrobnn as pb

    if not Path(pb.__file__).is_relative_to(folder):
        raise RuntimeError(f"the package was imported from {pb.__file__}, not from {folder}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of fits that are short on purpose
    return {
        **nuts(seed),
        **svi(seed),
        **laplace_and_predict(seed),
        **scores(seed),
    }


def reference() -> Callable[[], float]:
    """CPU seconds of the fixed computation: gradients of the squared error of four 1-50-1 nets, by hand in NumPy."""
    import numpy as np

    generator = np.random.default_rng(0)
    x = generator.standard_normal((400, 1))
    y = generator.standard_normal((400, 1))
    weight_in = generator.standard_normal((4, 1, 50))
    weight_out = generator.standard_normal((4, 50, 1))

    def gradients() -> None:
        for _ in range(200):
            hidden = np.tanh(x @ weight_in)
            error = hidden @ weight_out - y
            back = error @ weight_out.swapaxes(1, 2) * (1 - hidden**2)
            hidden.swapaxes(1, 2) @ error, x.T @ back

    return clocked(gradients)


def in_turn(seconds: Callable[[], float]) -> float:
    """Median of what is timed over the reference before and after it; the first turn, a warm-up, is dropped."""
    seconds_of_reference = reference()
    ratios = []
    before = seconds_of_reference()
    for _ in range(TURNS + 1):
        between = seconds()
        after = seconds_of_reference()
        ratios.append(2 * between / (before + after))
        before = after
    return median(ratios[1:])


def clocked(work: Callable[[], object]) -> Callable[[], float]:
    """CPU seconds of a call."""

    def run() -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    return run


def difference(short: Callable[[], object], long: Callable[[], object]) -> Callable[[], float]:
    """CPU seconds by which one call takes longer than another: what both share cancels."""
    seconds_of_short = clocked(short)
    seconds_of_long = clocked(long)
    return lambda: max(seconds_of_long() - seconds_of_short(), 1e-9)


def nuts(seed: int) -> dict[str, float]:
    """Thirty thousand gradients of one chain each, and what the draws of a short run are worth."""
    import pyrobnn as pb

    case = CASES["1-50-1"]
    program = torch_program(case)
    x, y = torch_data(case)
    method = pb.NUTS(num_chains=4, num_warmup=100)
    fits = [
        partial(
            method.fit,
            program,
            x,
            y,
            num_draws=draws,
            seed=seed,
        )
        for draws in (10, 60)
    ]
    short, long = (fit() for fit in fits)
    gradients = long.meta["num_gradients"] - short.meta["num_gradients"]
    cost = in_turn(difference(*fits))
    values = long.predict(x[:: len(x) // 16]).f[..., 0].numpy()
    return {
        "nuts gradient": cost * 30_000 / gradients,
        "nuts ess": 1000 * slowest(values) / long.meta["num_gradients"],
    }


def svi(seed: int) -> dict[str, float]:
    """A thousand steps of the compiled loop."""
    import pyro.distributions as dist
    import torch

    import pyrobnn as pb

    x, y = torch_data(CASES["1-50-1"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    model = pb.BNN(
        net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(0.1)
    )
    short, long = (
        partial(
            pb.SVI(num_steps=steps).fit,
            model,
            x,
            y[:, None],
            num_draws=1,
            seed=seed,
        )
        for steps in (1000, 11_000)
    )
    return {"svi step": in_turn(difference(short, long)) / 10}


def laplace_and_predict(seed: int) -> dict[str, float]:
    """A full Laplace fit at a given mode, and prediction by its draws."""
    import torch
    from torch import nn

    import pyrobnn as pb

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(13, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
        )
        x = torch.randn(506, 13)
        y = torch.tanh(x @ torch.randn(13, 1) / 13**0.5) + 0.3 * torch.randn(506, 1)
        optimizer = torch.optim.Adam(
            net.parameters(),
            lr=1e-2,
            weight_decay=1 / 455,
        )
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[:455]), y[:455]).backward()
            optimizer.step()
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
    method = pb.Laplace(
        map=pb.MAP(
            num_steps=1,
            polish_steps=0,
            compile=False,
        )
    )
    posterior = method.fit(
        model,
        x[:455],
        y[:455],
        init=net,
        num_draws=400,
        seed=seed,
    )
    fit = clocked(
        lambda: method.fit(
            model,
            x[:455],
            y[:455],
            init=net,
            num_draws=1,
            seed=seed,
        )
    )
    return {
        "laplace fit": in_turn(fit),
        "predict": in_turn(clocked(lambda: posterior.predict(x[455:]))),
    }


def scores(seed: int) -> dict[str, float]:
    """Mean log density of new rows of the gap data; short fits with the default options otherwise."""
    import torch

    import pyrobnn as pb

    train = pb.data.gap(seed=seed)
    test = outside_of_gap(train, 1000 + seed)
    methods = {
        "laplace": pb.Laplace(map=pb.MAP(num_steps=300, compile=False)),
        "svi": pb.SVI(num_steps=600, lr=0.02, compile=False),
    }
    log_densities = {}
    for name, method in methods.items():
        net = pb.networks.mlp(
            1,
            (50,),
            activation="tanh",
            seed=seed,
        )
        model = pb.BNN(net, pb.priors.FanInNormal(2.0), pb.likelihoods.HomoskedasticGaussian(0.2))
        prediction = method.fit(model, train.x, train.y, seed=seed).predict(test.x)
        normal = torch.distributions.Normal(prediction.loc, prediction.scale)
        of_draws = normal.log_prob(test.y).flatten(0, 1)
        of_mixture = of_draws.logsumexp(0) - math.log(len(of_draws))
        log_densities[f"{name} score"] = float(of_mixture.mean())
    return log_densities


def outside_of_gap(train: Dataset, seed: int) -> Dataset:
    """New rows of the gap data, without those in the gap."""
    import torch

    import pyrobnn as pb

    generator = torch.Generator().manual_seed(seed)
    x = (
        6
        * torch.rand(
            1200,
            1,
            generator=generator,
            dtype=torch.float64,
        )
        - 3
    ).to(train.x.dtype)
    noise = torch.randn(
        x.shape,
        generator=generator,
        dtype=x.dtype,
    )
    y = train.true_function(x) + train.true_noise.mean() * noise
    outside = (x[:, 0].abs() > 1).nonzero()[:, 0]
    return pb.data.Dataset(x, y, "gap", "regression").subset(outside)


def table(records: Sequence[Record]) -> str:
    """A row a comparison, the newest first: factors or differences of the numbers, ± their standard errors."""
    lines = [f"| commit | beside | {' | '.join(number.label for number in NUMBERS.values())} |"]
    lines += ["|---" * (2 + len(NUMBERS)) + "|"]
    for record in reversed(records):
        cells = []
        for name, number in NUMBERS.items():
            change, error = number.change(record["old"][name], record["new"][name])
            factor = math.exp(change)
            if number.kind == "factor":
                cells.append(f"× {factor:.2f} ± {factor * error:.2f}")
            else:
                cells.append(f"{change:+.3f} ± {error:.3f}")
        lines.append(f"| {record['commit']} | {record['against']} | {' | '.join(cells)} |")
    return "\n".join(lines)


# -- NUTS beside its peers ---------------------------------------------------------------------------------------------


def data(case: Case) -> tuple[Any, Any]:
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


def slowest(values: Any) -> float:
    """Bulk ESS of the slowest of the values (chain, draw, value)."""
    from arviz_stats.base import array_stats

    return float(
        array_stats.ess(
            values,
            chain_axis=0,
            draw_axis=1,
            method="bulk",
        ).min()
    )


def torch_data(case: Case) -> tuple[Any, ...]:
    """:func:`data` as tensors."""
    import torch

    return tuple(torch.from_numpy(array) for array in data(case))


def torch_program(case: Case) -> Any:
    """The model as a pyrobnn model or a plain Pyro program."""
    import pyro
    import pyro.distributions as dist
    import torch

    import pyrobnn as pb

    if "groups" not in case:
        net = pb.networks.mlp(
            case["inputs"],
            (case["hidden"],),
            activation=case["activation"],
            seed=0,
        )
        return pb.BNN(
            net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(case["noise"])
        )

    def program(x, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        offset = pyro.sample(
            "offset", dist.Normal(torch.zeros(case["groups"], device=x.device), 1.0).to_event(1)
        )
        slope = pyro.sample(
            "slope", dist.Normal(torch.zeros(case["inputs"], device=x.device), 1.0).to_event(1)
        )
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        loc = mean + spread * offset[x[:, -1].long()] + x[:, :-1] @ slope
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(loc, scale), obs=y)

    return program


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

    def run(self, num_draws: int) -> tuple[Any, float]:
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

    def longer(self, num_draws: int) -> tuple[Any, float, int]:
        """The posterior; seconds and gradients of its draws but the first."""
        _, before = self.run(1)
        posterior, seconds = self.run(num_draws)
        gradients = posterior.meta["num_gradients"] - self.first.meta["num_gradients"]
        return posterior, seconds - before, gradients

    def fit(self, num_draws: int) -> tuple[float, float, float]:
        """Seconds of ``num_draws`` draws after the warm-up, ESS of the slowest function value, gradients per draw."""
        import torch

        posterior, seconds, gradients = self.longer(num_draws)
        if "groups" in self.case:
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
        kernel.setup(2, x, y if "groups" in case else y.unsqueeze(-1))
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


def numpyro_program(case: Case) -> tuple[Any, Any]:
    """The same model, and a function of (samples, x) that gives the values whose ESS counts (chain, draw, value)."""
    return numpyro_hierarchy(case) if "groups" in case else numpyro_net(case)


def numpyro_hierarchy(case: Case) -> tuple[Any, Any]:
    """A linear regression with an offset of each group, and all its samples."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    def program(x, y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        offset = numpyro.sample("offset", dist.Normal(0, 1).expand([case["groups"]]).to_event(1))
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([case["inputs"]]).to_event(1))
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

    inputs = case["inputs"]
    hidden = case["hidden"]
    act = jnp.tanh if case["activation"] == "tanh" else jax.nn.relu

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
                dist.Normal(forward(w1, b1, w2, b2, x), case["noise"]),
                obs=y,
            )

    def values(samples, x):
        rows = jnp.linspace(0, len(x) - 1, NUM_PROBES).astype(int)
        of_draws = jax.vmap(jax.vmap(lambda *weights: forward(*weights, x[rows])))
        return of_draws(samples["w1"], samples["b1"], samples["w2"], samples["b2"])

    return program, values


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
        def continued(state: Any) -> Any:
            def one(_: int, carry: Any) -> Any:
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


def beside_peers(name: str, num_chains: int, repeats: int) -> dict[str, Any]:
    """One row: medians over alternating repeats, microseconds; with more than 16 chains gradients alone are timed."""
    case = CASES[name]
    fit = num_chains <= 16
    row: dict[str, Any] = {"case": name, "chains": num_chains}
    num_draws = max(50, 1000 // num_chains) if fit else 10
    # the cost of a gradient doesn't depend on the depth of trees; a warm-up that isn't used need not be long
    options = {
        "num_chains": num_chains,
        "num_warmup": 200 if fit else 20,
        "max_tree_depth": 10 if fit else 6,
    }
    ours = Ours(case, options)
    mine = list[float]()
    theirs = list[float]()
    with Manager(ctx=get_context("spawn")) as manager:
        peer = None
        if importlib.util.find_spec("numpyro"):
            peer = manager.NumPyro(case, options, num_draws)
        if fit:
            seconds, ess, steps = ours.fit(num_draws)
            row |= {
                "steps per draw": steps,
                "ess": ess,
                "fit_s": seconds,
            }
            if peer:
                its_seconds, its_ess = peer.fit(2)
                row |= {"numpyro_ess": its_ess, "numpyro_fit_s": its_seconds}
                row["ess per s / numpyro"] = (ess / seconds) / (its_ess / its_seconds)
        for _ in range(repeats):
            mine.append(1e6 * ours.gradient())
            if peer:
                theirs.append(1e6 * peer.gradient())
    row |= {"ours_us": median(mine), "compile_s": ours.first.meta["timings"]["compile"]}
    if theirs:
        row |= {"numpyro_us": median(theirs), "ours/numpyro": median(mine) / median(theirs)}
    row["pyro_us"] = 1e6 * median(pyro_gradient(case) for _ in range(3))
    return row | {"pyro/ours": row["pyro_us"] / row["ours_us"]}


if __name__ == "__main__":
    sys.exit(main())
