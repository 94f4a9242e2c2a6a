"""Hygiene of every test: no global state left changed, no display, two threads at most."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# a test of one room may use the cases of another's
sys.path += [str(room) for room in Path(__file__).parent.iterdir() if room.is_dir()]
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch loads

import matplotlib  # noqa: E402, F401  (watched from the first test on)
import pytest  # noqa: E402
import sklearn.linear_model  # noqa: E402, F401  (its first import draws from Python's generator)
import torch  # noqa: E402
from global_state import GlobalState  # noqa: E402
from helpers import covering  # noqa: E402
from slow_cases import listed  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-grids",
        action="store_true",
        help="all slow cases of products, not a sample of them",
    )
    parser.addoption(
        "--cpu-seconds",
        metavar="FILE",
        help="append the CPU seconds of every case, and of the processes that it starts, as JSON lines",
    )


def pytest_configure() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.hookimpl(tryfirst=True)  # before -m and -k, so that the sample does not depend on them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    grids = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("cuda"):
            grids[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for grid in {} if config.getoption("whole_grids") else grids.values():
        (each,) = grid[0].get_closest_marker("covering").args
        slow = {
            item: [*item.callspec.params.values()]
            for item in grid
            if item.get_closest_marker("slow")
        }
        also = [[*item.callspec.params.values()] for item in grid if item not in slow]
        kept = covering({item.name: values for item, values in slow.items()}, each, also)
        left_out |= {item for item in slow if item.name not in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    slow_cases = listed()
    for item in items:
        if item.nodeid in slow_cases:
            item.add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):  # not by keyword: a folder may have the name
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    # what is imported and collected stays: the collector need not look at it again and again
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    path = item.config.getoption("cpu_seconds")
    before = _cpu_seconds()
    finished = yield
    if path is not None:
        line = {"case": item.nodeid, "seconds": round(_cpu_seconds() - before, 3)}
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return finished


def _cpu_seconds() -> float:
    """CPU seconds of this process and of those it has waited for."""
    return sum(os.times()[:4])


@pytest.fixture
def few_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chains beside an approximation in a tree take few steps: for tests that do not judge by them."""
    monkeypatch.setattr("pyrobnn.posterior.invariance._BUDGET", 0.1)
    monkeypatch.setattr("pyrobnn.posterior.invariance._FEWEST_LEAPFROGS", 1)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches with free noise end near the modes that they find: for tests of which any fit will do."""
    monkeypatch.setattr("pyrobnn.inference.point_methods._VALLEY_ROUNDS", 2)
    monkeypatch.setattr("pyrobnn.inference.point_methods._ROUNDS_TO_REST", 2)


@pytest.fixture(autouse=True)
def unchanged_global_state() -> Iterator[None]:
    """Fails a test that leaves a random state, flag, default, param store or figure changed.

    A test that needs random tensors or initial weights draws them inside ``helpers.seeded(0)`` or from a
    ``torch.Generator``.
    """
    state = GlobalState()
    yield
    if leaks := state.restore():
        pytest.fail(f"this test left changed: {', '.join(leaks)}", pytrace=False)


@pytest.fixture(autouse=True)
def compiled_by_its_own_way(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Fails a test in which the library could not compile a function by itself, unless it looks at the log."""
    yield
    if "caplog" in request.function.__code__.co_varnames:
        return
    messages = [record.getMessage() for record in caplog.get_records("call")]
    slower = [message for message in messages if "slower than it might be" in message]
    if slower:
        pytest.fail(slower[0], pytrace=False)
