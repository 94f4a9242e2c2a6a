"""The structure that a maintainer must hold: rooms, floors, arrows and circles; no size is capped."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import Counter

import pytest
from test_import_graph import MODULES, files_of, floors, rooms

CAPS = {
    "file names that stand in two rooms": 0,
    "rooms": 15,
    "floors": 8,
    "floors of files in diagnostics": 6,
    "arrows between rooms": 60,
    "rooms in circles": 0,
}


@functools.cache
def measured() -> dict[str, int]:
    names = Counter(path.name for path in MODULES.values() if not path.name.startswith("__"))
    return {
        "file names that stand in two rooms": sum(count > 1 for count in names.values()),
        "rooms": len(rooms()),
        "floors": len(floors(rooms())),
        "floors of files in diagnostics": len(floors(files_of("diagnostics"))),
        "arrows between rooms": sum(map(len, rooms().values())),
        "rooms in circles": len(rooms()) - len(set().union(*floors(rooms()))),
    }


@pytest.mark.parametrize("name", CAPS)
def test_the_house_holds_its_caps(name):
    assert measured()[name] <= CAPS[name]


MOVED = [
    ("pyrobnn.likelihoods.catalogue", "HomoskedasticGaussian"),
    ("pyrobnn.likelihoods.modes_and_bounds", "Beta"),
    ("pyrobnn.networks", "Exposed"),
    ("pyrobnn.networks", "Temperature"),
    ("pyrobnn.priors", "FanInNormal"),
    ("pyrobnn.priors", "SitePriors"),
]


@pytest.fixture(scope="module")
def names_unpickled() -> list[str]:
    """The name of each class, as a new process finds it, which imports nothing before."""
    by_name = [f"c{module}\n{name}\n.".encode() for module, name in MOVED]
    code = f"import pickle\nfor text in {by_name!r}: print(pickle.loads(text).__name__)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return output.stdout.split()


@pytest.mark.parametrize(("module", "name"), MOVED)
def test_pickles_of_0_3_0_find_their_classes(module, name, names_unpickled):
    """A pickle names a class by the module in which it stood when it was written."""
    assert names_unpickled[MOVED.index((module, name))] == name
