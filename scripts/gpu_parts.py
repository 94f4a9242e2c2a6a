"""What benchmark_gpu.py measures, part by part; each part gives rows as it goes, so that a cut loses one row at most.

A part is a generator of rows (plain dicts), given a :class:`Task`. Every row has a ``key`` that says which measurement
it is; what is in ``task.done`` is not measured again.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What to measure.

    Attributes: ``device``; ``small`` sizes, for a rehearsal without a GPU; ``done`` keys; ``until`` when
        (``time.time()``) a part is to have ended; ``mnist``, a folder that may hold it; ``python`` that has NumPyro.
    """

    device: str
    small: bool = False
    done: frozenset[str] = frozenset()
    until: float = float("inf")
    mnist: str = ""
    python: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """Where to measure: the GPU first."""
        return tuple(dict.fromkeys((self.device, "cpu")))

    @property
    def compile(self) -> bool:
        """A rehearsal is over before a compiler would be."""
        return not self.small

    def measured(self, key: str, seconds: float, fn: Callable[..., Row], *args: Any) -> Iterator[Row]:
        """The row of a measurement that is not done yet and has time for the ``seconds`` it is expected to take.

        One that fails says so in its row: the others go on, unless the device itself is lost.
        """
        if key in self.done:
            return
        left = self.until - time.time()
        if seconds > left and not self.small:
            yield {
                "key": key,
                "left_out": f"expected to take {seconds:.0f} s, {max(left, 0):.0f} s were left",
            }
            return
        begun = time.perf_counter()
        try:
            row = fn(*args)
        except Exception as error:  # whatever a device that nobody has met may raise
            row = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        yield {"key": key, **row, "seconds": round(time.perf_counter() - begun, 3)}


def sibling(name: str) -> ModuleType:
    """Another script of this folder as a module."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {name}.py in {HERE}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def synchronize(device: str) -> None:
    """Wait until what was launched on a GPU has ended."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: str, fn: Callable[..., Any], *args: Any) -> float:
    """Seconds that one call takes, with all that it launches."""
    synchronize(device)
    begun = time.perf_counter()
    fn(*args)
    synchronize(device)
    return time.perf_counter() - begun


def per_step(device: str, advance: Callable[[int], Any], enough: float) -> float:
    """Seconds of one step: the median of three runs of as many steps as take ``enough`` seconds."""
    num, spent = 1, seconds_of(device, advance, 1)
    while spent < enough:
        num = max(2 * num, min(64 * num, int(1.2 * num * enough / max(spent, 1e-6))))
        spent = seconds_of(device, advance, num)
    return statistics.median(seconds_of(device, advance, num) for _ in range(3)) / num


# -- tests -----------------------------------------------------------------------------------------------------------


@dataclass
class _Outcomes:
    """A plugin of pytest: what became of each test."""

    task: Task
    rows: list[Row] = field(default_factory=list)
    tell: Callable[[Row], None] = print

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        kept = [item for item in items if item.nodeid not in self.task.done]
        items[:] = kept[:2] if self.task.small else kept

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            row = {"key": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
            if report.failed:
                row["error"] = str(report.longrepr)[-2000:]
            self.tell(row)


def tests(task: Task, tell: Callable[[Row], None]) -> None:
    """Every test that is marked ``cuda``; in a rehearsal two tests that need no GPU."""
    import pytest

    root = HERE.parent
    what = ["tests/hmc/test_units_rng.py", "-m", ""] if task.small else ["tests", "-m", "cuda"]
    options = ["-q", "--rootdir", str(root), "-p", "no:cacheprovider", str(root / what[0]), *what[1:]]
    code = pytest.main(options, plugins=[_Outcomes(task, tell=tell)])
    known = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if code not in known and not (task.done and code == pytest.ExitCode.NO_TESTS_COLLECTED):
        tell({"key": "pytest", "error": f"pytest ended with {code!r} before it could run the tests"})


# -- NUTS ------------------------------------------------------------------------------------------------------------

SIZES = (4, 16, 64, 256, 1024, 4096)
#: chains on the CPU, where a step of thousands takes seconds; and up to how many an effective sample size is worth it
CPU_SIZES, CPU_FITS = (4, 64, 1024), 64
NUMPYRO_SIZES = (4, 64, 1024)


def nuts(task: Task) -> Iterator[Row]:
    """Gradients per second and effective draws per second of 1-50-1 by number of chains, here and on the CPU."""
    bench = sibling("benchmark_nuts")
    for device in task.devices:
        sizes = (2,) if task.small else SIZES if device != "cpu" else CPU_SIZES
        for chains in sizes:
            fit = device != "cpu" or chains <= CPU_FITS
            yield from task.measured(f"{device} {chains}", 40, nuts_row, bench, task, device, chains, fit)
    for chains in () if task.small else NUMPYRO_SIZES:
        yield from task.measured(f"numpyro cpu {chains}", 30, numpyro_row, bench, task, chains)


def nuts_args(task: Task, device: str, chains: int, fit: bool) -> Row:
    """Settings of one measurement."""
    num_draws, warmup = (max(50, 1000 // chains), 200) if fit else (10, 20)
    if task.small:
        num_draws, warmup = 6, 4
    depth = 3 if task.small else 10 if fit else 6
    return {"num_chains": chains, "num_warmup": warmup, "num_draws": num_draws, "max_tree_depth": depth} | {
        "clock": "wall", "device": device, "compile": task.compile,
    }  # fmt: skip


def nuts_row(bench: ModuleType, task: Task, device: str, chains: int, fit: bool) -> Row:
    """Our machine: the seconds of a compile are in none of the rates."""
    ours = bench.Ours(bench.CASES["1-50-1"], nuts_args(task, device, chains, fit))
    row: Row = {"device": device, "chains": chains, "mode": ours.run.mode, "compile_s": ours.compile_seconds}
    if fit:
        num_draws = nuts_args(task, device, chains, fit)["num_draws"]
        seconds, ess, steps = ours.fit(num_draws)
        row |= {"fit_s": seconds, "ess": ess, "ess_per_s": ess / seconds, "steps_per_draw": steps}
    step = per_step(device, ours.run.advance, 0.02 if task.small else 1.0)
    return row | {"step_us": 1e6 * step, "gradients_per_s": chains / step}


def numpyro_row(bench: ModuleType, task: Task, chains: int) -> Row:
    """NumPyro's vectorised chains on the CPU of this machine, all its cores."""
    args = nuts_args(task, "cpu", chains, False)
    peer = bench.NumPyro(task.python, bench.CASES["1-50-1"], args)
    try:
        seconds = statistics.median(peer.ask("time") for _ in range(3))
    finally:
        peer.close()
    return {"device": "cpu", "chains": chains, "gradients_per_s": 1 / seconds}


# -- SVI, Laplace, prediction ----------------------------------------------------------------------------------------


def svi(task: Task) -> Iterator[Row]:
    """Time of a step, without compile, evaluation and draws."""
    bench = sibling("benchmark_svi")
    for case in list(bench.CASES)[: 1 if task.small else None]:
        for device in task.devices:
            yield from task.measured(f"{case}, {device}", 20, svi_row, bench, task, case, device)


def svi_row(bench: ModuleType, task: Task, case: str, device: str) -> Row:
    """The second fit of two is timed: whatever a first one sets up is done."""
    import torch

    import pyrobnn as pb

    with torch.random.fork_rng():
        model, x, y = bench.torch_model(case)
    steps = 5 if task.small else 2000
    method = pb.SVI(num_steps=steps, batch_size=bench.CASES[case][4], log_every=steps, compile=task.compile)
    found = [bench.train_only(method, model, x, y, seed, device) for seed in range(2)]
    return {
        "case": case,
        "device": device,
        "step_us": 1e6 * found[1]["fit"] / steps,
        "compile_s": found[0]["compile"],
    }


def laplace(task: Task) -> Iterator[Row]:
    """Seconds of the curvature with a tuned prior and of a linearised prediction, and the log evidence found."""
    bench = sibling("benchmark_laplace")
    if task.small:
        bench.CASES["small"] |= {"widths": (3, 4, 1), "num_data": 30, "num_test": 5}
    for case in ("small",) if task.small else tuple(bench.CASES):
        for structure in ("full", "kron", "diag"):
            if case == "classes" and structure == "full":
                continue  # 50,890 weights: 20 GB, refused
            for device in task.devices:
                key = f"{case} {structure}, {device}"
                yield from task.measured(key, 15, laplace_row, bench, case, structure, device)


def laplace_row(bench: ModuleType, case: str, structure: str, device: str) -> Row:
    """One fit to set up what is set up once, and one that is timed."""
    import pyro.distributions as dist
    import torch

    import pyrobnn as pb

    with torch.random.fork_rng():
        net, x, y, x_test = bench.problem(case)
    classes = not y.is_floating_point()
    likelihood = pb.likelihoods.Categorical() if classes else pb.likelihoods.HomoskedasticGaussian(0.3)
    model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), likelihood)
    method = pb.Laplace(
        structure=structure, predictive="linearized", importance=False, tune="marginal_likelihood"
    )
    found: list[Any] = []

    def fit() -> None:
        found[:] = [method.fit(model, x, y, init=net, num_draws=1, device=device)]

    fit()
    fit_s = seconds_of(device, fit)
    posterior = found[0]
    predict_s = seconds_of(device, posterior.predict, x_test)
    row = {"case": case, "structure": structure, "device": device, "fit_s": fit_s, "predict_s": predict_s}
    return row | {"log_evidence": float(posterior.log_evidence)}


def predict(task: Task) -> Iterator[Row]:
    """Draws times points per second of one posterior, moved in its file; and how far apart the means are."""
    cases = {"1-50-1": (1, 50, 1), "784-64-10": (784, 64, 10)}
    for case, widths in cases.items():
        yield from task.measured(case, 30, predict_row, task, widths)


def predict_row(task: Task, widths: tuple[int, int, int]) -> Row:
    """Each device in turn, with the mean on the CPU as the reference."""
    import tempfile

    import torch

    import pyrobnn as pb

    inputs, hidden, outputs = widths
    num_points, num_draws = (10, 3) if task.small else (10_000, 500)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_points, inputs, generator=generator)
    y = torch.randint(outputs, (num_points,), generator=generator) if outputs > 1 else torch.sin(x)
    likelihood = pb.likelihoods.Categorical() if outputs > 1 else pb.likelihoods.HomoskedasticGaussian(0.3)
    net = pb.networks.mlp(inputs, (hidden,), outputs, seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), likelihood)
    fitted = pb.SVI(num_steps=20, compile=False).fit(model, x[:100], y[:100], num_draws=num_draws, seed=0)
    row: Row = {"draws": num_draws, "points": num_points}
    with tempfile.TemporaryDirectory() as folder:
        path = fitted.save(Path(folder) / "posterior.nc")
        means = {}
        for device in reversed(task.devices):
            posterior = pb.Posterior.load(path, model.to(torch.device(device)))
            there = x.to(device)
            mean = predicted_mean(posterior, there)
            means[device] = mean.double().cpu()
            seconds = min(seconds_of(device, predicted_mean, posterior, there) for _ in range(3))
            row[f"{device}_s"] = seconds
            row[f"{device}_per_s"] = num_draws * num_points / seconds
            row[f"{device}_device"] = mean.device.type
    row["largest_difference"] = float((means[task.device] - means["cpu"]).abs().max())
    return row


def predicted_mean(posterior: Any, x: Any) -> Any:
    """The mean or the probabilities of the classes, which a prediction computes when it is asked for."""
    prediction = posterior.predict(x)
    return prediction.probs if posterior.model.likelihood.task == "categorical" else prediction.mean


# -- the study -------------------------------------------------------------------------------------------------------


def study(task: Task) -> Iterator[Row]:
    """A 784-64-10 net on handwritten digits, by every method that such a net allows: time, accuracy, log density."""
    train, test, source = images(task)
    for name in study_methods(task):
        yield from task.measured(name, 30, study_row, task, name, train, test, source)


def images(task: Task) -> tuple[tuple[Any, Any], tuple[Any, Any], str]:
    """Training data, test data and what they are: MNIST where it is, else the digits of scikit-learn made larger."""
    import torch

    import pyrobnn as pb

    if task.mnist:
        try:
            from torchvision.datasets import MNIST

            parts = [MNIST(task.mnist, train=train) for train in (True, False)]
            pairs = [(part.data.flatten(1).float() / 255, part.targets) for part in parts]
            return pairs[0], pairs[1], "MNIST"
        except (ImportError, RuntimeError) as error:
            why = f"no MNIST in {task.mnist}: {str(error)[:80]}"
    else:
        why = "no --mnist folder given"
    data = pb.data.digits()
    wide = torch.nn.functional.interpolate(data.x, size=(28, 28), mode="bilinear").flatten(1)
    order = torch.randperm(len(wide), generator=torch.Generator().manual_seed(0))
    if task.small:
        order = order[:60]
    rows, held = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return (wide[rows], data.y[rows]), (wide[held], data.y[held]), f"digits, 8 × 8 made 28 × 28 ({why})"


def study_methods(task: Task) -> dict[str, tuple[Any, Row]]:
    """The methods with what their ``fit`` is given."""
    import pyrobnn as pb

    steps, chains, few = (4, 2, 2) if task.small else (3000, 8, 5)
    walk: Row = {"num_steps": steps, "batch_size": None if task.small else 128, "compile": task.compile}
    short = {"num_warmup": 2, "max_tree_depth": 2} if task.small else {"num_warmup": 100, "max_tree_depth": 6}
    laplace = pb.Laplace(structure="kron", num_steps=steps, compile=task.compile)
    batches = {name: walk[name] for name in ("batch_size", "compile")}
    sghmc = pb.SGHMC(num_chains=chains, num_warmup=steps, init_steps=steps, **batches)
    draws = {"num_draws": 4 if task.small else 50}
    return {
        "MAP": (pb.MAP(polish_steps=0, **walk), {}),
        "ensemble": (pb.DeepEnsemble(num_members=few, **walk), {}),
        "SVI": (pb.SVI(**walk), draws),
        "Laplace": (laplace, draws),
        "SWAG": (pb.SWAG(init_steps=steps, rank=few, **walk), draws),
        "SGHMC": (sghmc, draws),
        "NUTS": (pb.NUTS(num_chains=chains, compile=task.compile, **short), draws),
    }


def study_row(task: Task, name: str, train: tuple[Any, Any], test: tuple[Any, Any], source: str) -> Row:
    """One fit, judged on the held-out images."""
    import warnings

    import pyrobnn as pb

    method, options = study_methods(task)[name]
    net = pb.networks.mlp(784, (64,), 10, activation="relu", seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.Categorical())
    found: list[Any] = []

    def fit() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are in the record
            found[:] = [method.fit(model, *train, seed=0, device=task.device, **options)]

    fit_s = seconds_of(task.device, fit)
    x, y = (part.to(task.device) for part in test)
    prediction = found[0].predict(x)
    right = prediction.probs.argmax(-1) == y
    return {
        "method": name,
        "data": source,
        "fit_s": fit_s,
        "compile_s": found[0].meta["timings"].get("compile", 0.0),
        "accuracy": float(right.double().mean()),
        "log_density": float(prediction.log_prob(y).mean()),
        "warnings": found[0].meta["warnings"],
    }


MEASURES: dict[str, Callable[[Task], Iterator[Row]]] = {
    "nuts": nuts,
    "svi": svi,
    "laplace": laplace,
    "predict": predict,
    "study": study,
}
