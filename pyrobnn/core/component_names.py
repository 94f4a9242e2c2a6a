"""Which sites may hold the components of a mixture, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

#: most components of a mixture that are put into an order
MOST_COMPONENTS = 20


def numbered_sites(shapes: Mapping[str, Sequence[int]]) -> list[tuple[str, ...]]:
    """The groups of sites of one shape whose names differ in one number, or in a last letter, alone.

    >>> numbered_sites({"slope_1": (), "slope_2": (), "noise": ()})
    [('slope_1', 'slope_2')]
    """
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        stem, count = re.subn(r"\d+|(?<=_)[A-Za-z]$", "#", name)
        if count == 1:
            groups.setdefault((stem, tuple(shape)), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]
