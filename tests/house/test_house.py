"""The structure that a maintainer must hold: rooms, floors, arrows and circles; no size is capped."""

from __future__ import annotations

from collections import Counter

import pytest
from test_import_graph import MODULES, floors, rooms

CAPS = {
    "file names that stand in two rooms": 0,
    "rooms": 15,
    "floors": 8,
    "arrows between rooms": 60,
    "rooms in circles": 0,
}


def measured() -> dict[str, int]:
    names = Counter(path.name for path in MODULES.values() if not path.name.startswith("__"))
    return {
        "file names that stand in two rooms": sum(count > 1 for count in names.values()),
        "rooms": len(rooms()),
        "floors": len(floors(rooms())),
        "arrows between rooms": sum(map(len, rooms().values())),
        "rooms in circles": len(rooms()) - len(set().union(*floors(rooms()))),
    }


@pytest.mark.parametrize("name", CAPS)
def test_the_house_holds_its_caps(name):
    assert measured()[name] <= CAPS[name]
