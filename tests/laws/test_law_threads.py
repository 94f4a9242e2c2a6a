"""The law of threads: predictions from many threads, and fits, are bit for bit those of one thread."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from global_state import GlobalState
from helpers import seeded
from models import normal_prior, toy
from test_contract import FEW, METHODS, MODELS, WITH_Q, X, Y, fit, one_of_each_kind

import pyrobnn as pb
from pyrobnn.core.threads import (
    Shared,
    enter_large_step,
    enter_small_step,
    one_thread,
    process_state,
    threads_by_need,
)
from pyrobnn.model.gradient import at_each
from pyrobnn.model.handlers import in_float64

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode"
)

NUM_THREADS = 4
#: inputs of other numbers of rows and other values for each thread
INPUTS = [
    X[start:stop] + shift
    for start, stop, shift in zip(range(0, 8, 2), range(40, 24, -4), torch.linspace(0, 0.5, 4))
]


@pytest.fixture(autouse=True)
def threads_that_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(jobs: list[Callable[[], object]]) -> list[object]:
    """What the jobs return, each in a thread of its own, all begun at once."""
    gate = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> object:
        gate.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(run, job) for job in jobs]]


def assert_as_alone(jobs: list[Callable[[], object]]) -> None:
    """The jobs return in threads what they return one after another, and leave the process as it was."""
    alone = [job() for job in jobs]
    state = GlobalState()
    for expected, returned in zip(alone, together(jobs), strict=True):
        assert_same(expected, returned)
    assert_same(alone[0], jobs[0]())
    assert state.leaks() == []


def assert_same(expected: object, returned: object) -> None:
    if isinstance(expected, dict):
        assert expected.keys() == returned.keys()
        for name, value in expected.items():
            assert_same(value, returned[name])
    elif isinstance(expected, torch.Tensor):
        assert expected.dtype == returned.dtype and torch.equal(expected, returned)
    else:
        np.testing.assert_array_equal(expected, returned)


def predicted(posterior: pb.Posterior, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everything that a prediction says."""
    prediction = posterior.predict(x)
    values = {"f": prediction.f, "sample": prediction.sample(seed=1)}
    if prediction.likelihood.targets.classes:
        names = ("probs", "entropy", "aleatoric_entropy", "epistemic_entropy")
    else:
        names = ("mean", "var", "aleatoric_var", "epistemic_var")
        values["quantile"] = prediction.quantile(0.9)
        values["log_prob"] = prediction.log_prob(torch.zeros(len(x), 1))
        values["pit"] = prediction.pit(torch.zeros(len(x), 1))
    return values | {name: getattr(prediction, name) for name in names}


@pytest.mark.parametrize("name", one_of_each_kind())
def test_threads_predict_as_each_alone(name):
    posterior = fit(name)
    filters = list(warnings.filters)
    assert_as_alone([functools.partial(predicted, posterior, x) for x in INPUTS])
    assert warnings.filters == filters


@pytest.mark.parametrize(
    ("name", "kind"), [("Laplace", "inferred"), ("SVI", "heteroskedastic"), ("SWAG", "classes")]
)
def test_predictions_of_other_likelihoods(name, kind):
    posterior = fit(name, kind)
    assert_as_alone([functools.partial(predicted, posterior, x) for x in INPUTS])


def log_q(posterior: pb.Posterior) -> torch.Tensor:
    return posterior.log_q()


@pytest.mark.parametrize("name", one_of_each_kind(sorted(WITH_Q)))
def test_densities_and_statistics(name):
    posterior = fit(name)
    assert_as_alone([functools.partial(log_q, posterior)] * NUM_THREADS)
    first = METHODS[name].fit(*problem(), seed=3, num_draws=6)
    again = METHODS[name].fit(*problem(), seed=3, num_draws=6)
    expected = dict(first.sample_stats)
    for statistics in together(
        [lambda: dict(again.sample_stats)] * NUM_THREADS
    ):  # computed by the first that asks
        assert_same(expected, statistics)


@pytest.mark.parametrize("guide", ["flow", "AutoNormal", "AutoMultivariateNormal"])
def test_densities_of_other_guides(guide):
    kind = getattr(pyro.infer.autoguide, guide, guide)
    posterior = pb.SVI(guide=kind, num_steps=5, compile=False).fit(*problem(), num_draws=6)
    jobs = [functools.partial(log_q, posterior), functools.partial(predicted, posterior, X)]
    assert_as_alone(jobs * 3)


def problem() -> tuple[pb.BNN, torch.Tensor, torch.Tensor]:
    model, y = MODELS["inferred"]()
    return model, X, y


def tree(posterior: pb.Posterior, x: torch.Tensor) -> dict[str, np.ndarray]:
    made = posterior.to_datatree(X, Y, test=(x, torch.zeros(len(x), 1)), num_prior_draws=5)
    return {
        f"{part.path}/{name}": values.values
        for part in made.subtree
        for name, values in part.data_vars.items()
    }


@pytest.mark.usefixtures("few_moves")
@pytest.mark.filterwarnings("default")  # xarray swaps the filters of the process
@pytest.mark.parametrize("name", ["SVI", "NUTS", "Laplace"])
def test_threads_make_trees_as_each_alone(name):
    posterior = fit(name)
    assert_as_alone([functools.partial(tree, posterior, x) for x in INPUTS[:3]])


# -- nets --------------------------------------------------------------------------------------------------------------


class Attends(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(1, 4)
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        tokens = self.embed(torch.stack([x, x.square(), -x], 1))
        return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))


class Recurs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LSTM(1, 4, batch_first=True)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layer(torch.stack([x, x.square(), -x], 1))[0][:, -1])


class Remembers(torch.nn.Module):
    """Layers in a plain list beside their registration, tied weights, and a state that a call leaves behind."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(1, 4)
        self.inner = torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.inner.weight
        self.last = torch.nn.Linear(4, 1)
        self.steps = [self.inner, self.tied]
        self.centre = torch.tensor(0.5)

    def forward(self, x):
        self.seen = self.first(x - self.centre).tanh()
        for step in self.steps:
            self.seen = step(self.seen).tanh()
        return self.last(self.seen)


class Hooked(torch.nn.Module):
    """A hook that changes the output of a layer, and a layer whose weight is parametrised."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1, 4))
        self.last = torch.nn.Linear(4, 1)
        self.first.register_forward_hook(lambda module, inputs, out: out.tanh())

    def forward(self, x):
        return self.last(self.first(x))


NETS = {net.__name__: net for net in (Attends, Recurs, Remembers, Hooked)}


@functools.cache
def fitted(net: str, method: str) -> pb.Posterior:
    methods = {
        "DeepEnsemble": pb.DeepEnsemble(num_members=3, num_steps=5, compile=False),
        "Laplace": pb.Laplace(
            structure="diag", map=pb.MAP(num_steps=5, compile=False), compile=False
        ),
        "last layer": pb.Laplace(
            subset="last_layer", map=pb.MAP(num_steps=5, compile=False), compile=False
        ),
    }
    with seeded(0):
        model = pb.BNN(NETS[net](), normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.2))
    options = {} if method == "DeepEnsemble" else {"num_draws": 6}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return methods[method].fit(model, X, Y, **options)


@pytest.mark.parametrize("method", ["DeepEnsemble", "Laplace", "last layer"])
@pytest.mark.parametrize("net", NETS)
def test_predictions_of_other_nets(net, method):
    posterior = fitted(net, method)
    assert_as_alone([functools.partial(predicted, posterior, x) for x in INPUTS])


@pytest.mark.parametrize("net", NETS)
def test_a_thread_has_the_modules_of_its_own_and_the_tensors_of_all(net):
    model = fitted(net, "DeepEnsemble").bnn
    mine = model.eval_net
    theirs = together([lambda: model.eval_net])[0]
    assert model.eval_net is mine
    assert not {*mine.modules()} & {*theirs.modules()}
    for own, other in zip(
        mine.state_dict(keep_vars=True).values(), theirs.state_dict(keep_vars=True).values()
    ):
        assert own is other


def test_a_model_that_another_thread_runs_is_read_and_copied_as_it_is():
    """A fit puts the parameters of its program into a net for as long as a call takes: not into the model's own."""
    inside = threading.Event()
    done = threading.Event()

    class Waits(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                done.wait(60)
            return super().forward(x)

    with seeded(0):
        net = Waits(1, 1)
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.2))
    expected = model.initial_values()
    moved = {name: value + 1.0 for name, value in expected.items()}

    def run() -> torch.Tensor:
        with process_state(), seeded(0), pyro.condition(data=moved):
            return torch.func.vmap(model.pyro_model)(X[None], Y[None])

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            assert inside.wait(60)
            assert_same(expected, model.initial_values())
            assert_same(expected, copy.deepcopy(model).initial_values())
            assert_same(expected, model.to(torch.device("cpu")).initial_values())
            assert model.num_weights == 2 and not model.frozen
        finally:
            done.set()
        assert_same(X * moved["net.weight"] + moved["net.bias"], running.result()[0])


def test_threads_leave_nothing_in_copies_and_pickles():
    posterior = fit("SVI")
    together([functools.partial(predicted, posterior, x) for x in INPUTS])
    expected = predicted(posterior, X)
    for again in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        assert_same(expected, predicted(again, X))


# -- estimators --------------------------------------------------------------------------------------------------------

ROWS = X.numpy()


def line(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(slope * x[:, 0], 0.3), obs=y)


def regressor(seed: int = 0) -> pb.BNNRegressor:
    return pb.BNNRegressor(METHODS["SVI"], hidden=(8,), compile=False, random_state=seed)


def classifier(seed: int = 0) -> pb.BNNClassifier:
    return pb.BNNClassifier(METHODS["Laplace"], hidden=(8,), compile=False, random_state=seed)


def program(seed: int = 0) -> pb.PyroRegressor:
    return pb.PyroRegressor(line, METHODS["NUTS"], num_draws=6, random_state=seed)


def answers_of_regressor(model: pb.BNNRegressor, rows: np.ndarray) -> dict[str, np.ndarray]:
    mean, scale = model.predict(rows, return_std=True)
    interval = model.predict_interval(rows)
    return {
        "mean": mean,
        "scale": scale,
        "interval": interval,
        "functions": model.sample_functions(rows, 3),
    }


def answers_of_classifier(model: pb.BNNClassifier, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "label": model.predict(rows),
        "probability": model.predict_proba(rows),
        "set": model.predict_set(rows),
    }


def answers_of_program(model: pb.PyroRegressor, rows: np.ndarray) -> dict[str, np.ndarray]:
    mean, scale = model.predict(rows, return_std=True)
    return {"mean": mean, "scale": scale, "interval": model.predict_interval(rows)}


LABELS = np.digitize(ROWS[:, 0], [-0.5, 0.5])
ESTIMATORS = {
    "BNNRegressor": (regressor, Y[:, 0].numpy(), answers_of_regressor),
    "BNNClassifier": (classifier, LABELS, answers_of_classifier),
    "PyroRegressor": (program, Y[:, 0].numpy(), answers_of_program),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_threads_use_an_estimator_as_each_alone(name):
    make, targets, answers = ESTIMATORS[name]
    model = make().fit(ROWS, targets)
    assert_as_alone([functools.partial(answers, model, x.numpy()) for x in INPUTS])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_fits_of_estimators(name):
    make, targets, answers = ESTIMATORS[name]
    jobs = [lambda seed=seed: answers(make(seed).fit(ROWS, targets), ROWS) for seed in range(2)]
    assert_as_alone(jobs)


# -- fits --------------------------------------------------------------------------------------------------------------


def draws(method: pb.inference.Method, model: pb.BNN, seed: int) -> dict[str, torch.Tensor]:
    options = (
        {} if method.kind == "point" or isinstance(method, pb.DeepEnsemble) else {"num_draws": 6}
    )
    return method.fit(model, X, Y, seed=seed, **options).draws


@pytest.mark.parametrize("name", one_of_each_kind(fast=FEW))
def test_fits_of_one_model(name):
    model = MODELS["fixed"]()[0]
    assert_as_alone([functools.partial(draws, METHODS[name], model, seed) for seed in range(3)])


def test_fits_of_different_methods_and_models():
    names = ("MAP", "SVI", "NUTS", "Laplace", "SWAG", "SGLD")
    jobs = [functools.partial(draws, METHODS[name], MODELS["fixed"]()[0], 1) for name in names]
    assert_as_alone(jobs)


@pytest.mark.slow
def test_compiled_fits():
    methods = (
        pb.NUTS(num_chains=2, num_warmup=10, max_tree_depth=3, compile=True),
        pb.SVI(num_steps=20, compile=True),
    )
    jobs = [
        functools.partial(draws, method, MODELS["fixed"]()[0], seed)
        for method in methods
        for seed in range(2)
    ]
    assert_as_alone(jobs)


def test_a_fit_in_a_callback_of_a_fit():
    results = []

    def nested(step, metrics):
        if not results:
            results.append(draws(METHODS["MAP"], MODELS["fixed"]()[0], 1))

    outer = METHODS["SVI"].fit(*problem(), seed=2, num_draws=6, callbacks=[nested]).draws
    assert_same(METHODS["SVI"].fit(*problem(), seed=2, num_draws=6).draws, outer)
    assert_same(draws(METHODS["MAP"], MODELS["fixed"]()[0], 1), results[0])


@pytest.mark.parametrize("name", ["MAP", "SVI", "NUTS", "SGLD", "SWAG"])
def test_predictions_while_another_thread_fits_the_same_model(name):
    """A service that fits anew in the background."""
    model, x, y = problem()
    serving = METHODS["SVI"].fit(model, x, y, num_draws=6)
    expected = [predicted(serving, inputs) for inputs in INPUTS]
    alone = draws(METHODS[name], model, 5)
    fitting = threading.Event()
    fitting.set()

    def serve(number: int) -> int:
        served = 0
        while fitting.is_set() or not served:
            time.sleep(0.05)
            prediction = serving.predict(INPUTS[number])
            assert_same(expected[number]["mean"], prediction.mean)
            assert_same(expected[number]["quantile"], prediction.quantile(0.9))
            served += 1
        return served

    def refit() -> dict[str, torch.Tensor]:
        try:
            return draws(METHODS[name], model, 5)
        finally:
            fitting.clear()

    refitted, *served = together(
        [refit, *(functools.partial(serve, number) for number in range(2))]
    )
    assert_same(alone, refitted)
    assert sum(served) >= 2
    assert_same(expected[0], predicted(serving, INPUTS[0]))


def test_a_prediction_waits_for_no_fit():
    posterior = fit("SVI")
    expected = predicted(posterior, X)

    def job() -> dict[str, torch.Tensor]:
        return predicted(posterior, X)

    with ThreadPoolExecutor(1) as pool, process_state():
        assert_same(expected, pool.submit(job).result(timeout=60))


# -- what threads share ------------------------------------------------------------------------------------------------


def test_one_thread_at_a_time_and_again():
    inside = []
    most = []

    def job() -> None:
        with process_state(), process_state():
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.001)
            inside.pop()

    together([job] * NUM_THREADS)
    assert max(most) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("holder", ["another thread", "this thread"])
def test_a_forked_process_can_fit(holder):
    """Its other threads are gone, and with them whoever would have given the lock back."""
    held = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with process_state():
            held.set()
            done.wait()

    def fork() -> int:
        child = os.fork()
        if child == 0:
            try:
                with process_state():
                    os._exit(7)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    if holder == "this thread":
        with process_state():
            assert fork() == 7
        return
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert fork() == 7
    finally:
        done.set()
        thread.join()


def test_a_shared_change_is_made_once_and_taken_back_by_the_last():
    class Change:
        entered = left = 0

        def __enter__(self):
            Change.entered += 1

        def __exit__(self, *error):
            Change.left += 1

    shared = Shared(Change)
    overlap = threading.Barrier(NUM_THREADS)

    def job() -> int:
        with shared:
            overlap.wait()
            return Change.left

    assert together([job] * NUM_THREADS) == [0] * NUM_THREADS
    assert (Change.entered, Change.left) == (1, 1)
    with shared:
        assert (Change.entered, Change.left) == (2, 1)


def test_the_filters_of_warnings_survive_overlapping_predictions():
    x, y = toy(20)
    first = threading.Event()
    second = threading.Event()

    def waits(
        begun: threading.Event, other: threading.Event
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def function(point: torch.Tensor) -> torch.Tensor:
            begun.set()
            other.wait(10)
            return point * 2

        return function

    filters = list(warnings.filters)
    jobs = [lambda: at_each(waits(first, second), x), lambda: at_each(waits(second, first), y)]
    assert_same(x * 2, together(jobs)[0])
    assert warnings.filters == filters


def test_threads_that_compute_in_float64_leave_the_type_of_the_process():
    """The second enters before the first leaves, and leaves after it."""
    turns = threading.Barrier(2)
    types: list[torch.dtype] = []

    def earlier() -> None:
        with in_float64():
            turns.wait()
            turns.wait()
        turns.wait()

    def later() -> None:
        turns.wait()
        with in_float64():
            turns.wait()
            turns.wait()
            types.append(torch.zeros(1).dtype)

    before = torch.get_default_dtype()
    try:
        together([earlier, later])
        assert types == [torch.float64] and torch.get_default_dtype() == before
    finally:
        torch.set_default_dtype(before)


# -- threads of torch --------------------------------------------------------------------------------------------------

#: methods whose steps are compiled or traced one by one, few enough to be quick
STEPPING = {
    "MAP": pb.MAP(num_steps=60, compile=False),
    "SVI": pb.SVI(num_steps=60, compile=False),
    "NUTS": pb.NUTS(num_chains=2, num_warmup=2, compile=False),
    "SGHMC": pb.SGHMC(num_chains=2, num_warmup=4, compile=False),
    "SMC": pb.SMC(num_particles=16, compile=False),
}


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Threads:
    """A callback that looks how many threads torch computes on, here and in a thread that begins now.

    Where that is one here it stops the fit, or raises the error.
    """

    def __init__(self, error: type[BaseException] | None = None) -> None:
        self.here: list[int] = []
        self.elsewhere: list[int] = []
        self.error = error

    def __call__(self, step: int, metrics: dict) -> bool:
        self.here.append(torch.get_num_threads())
        with ThreadPoolExecutor(1) as pool:
            self.elsewhere.append(pool.submit(torch.get_num_threads).result())
        if self.error is not None and self.here[-1] == 1:
            raise self.error("in a callback")
        return self.here[-1] == 1


def wide_net(width: int) -> pb.BNN:
    """A net whose largest matrix product multiplies 40 × width × width numbers."""
    return pb.BNN(
        pb.networks.mlp(1, (width, width), seed=0),
        pb.priors.FanInNormal(),
        pb.likelihoods.HomoskedasticGaussian(0.3),
    )


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("name", STEPPING)
def test_small_steps_are_computed_in_one_thread(name):
    """On cores that others use as well, several wait for each other at every product: MAP took fifty times as long."""
    threads = Threads()
    num_draws = 1 if name == "MAP" else 4
    # stopped before there was a draw
    with contextlib.suppress(ValueError):
        STEPPING[name].fit(wide_net(8), *toy(40), callbacks=[threads], num_draws=num_draws)
    assert threads.here[-1] == 1 and set(threads.elsewhere) == {3}
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_large_steps_are_computed_in_all_threads():
    threads = Threads()
    pb.MLE(num_steps=3, compile=False).fit(wide_net(400), *toy(40), callbacks=[threads])
    assert set(threads.here) == {3}


@pytest.mark.usefixtures("three_threads")
@pytest.mark.filterwarnings("ignore:MAP was interrupted")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_fit_that_ends_early_leaves_the_threads_as_they_were(error):
    threads = Threads(error)
    with contextlib.suppress(error):
        STEPPING["MAP"].fit(wide_net(8), *toy(40), callbacks=[threads])
    assert threads.here[-1] == 1
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3


@pytest.mark.usefixtures("three_threads")
def test_a_loop_of_small_and_large_steps_changes_its_threads_once():
    def num_threads_after(*steps: Callable[[], None]) -> list[int]:
        with threads_by_need():
            numbers = []
            for step in steps:
                step()
                numbers.append(torch.get_num_threads())
            return numbers

    small, large = enter_small_step, enter_large_step
    assert num_threads_after(small, small) == [1, 1]
    assert num_threads_after(small, large, small) == [1, 3, 3]
    # a fit inside of a callback of a fit knows what is outside of both
    with threads_by_need():
        small()
        assert num_threads_after(large, small) == [3, 3]
        assert torch.get_num_threads() == 1
    small()
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_one_thread_is_that_of_the_caller_alone():
    with one_thread():
        assert torch.get_num_threads() == 1
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 3
    assert torch.get_num_threads() == 3
