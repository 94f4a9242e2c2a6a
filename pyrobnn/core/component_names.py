"""The components of a mixture: which sites hold them, and an exchange of them, of tensors or of arrays."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class Exchange(NamedTuple):
    """An exchange of components: in sites with axes of them, and in groups of sites.

    Args:
        num_components: how many components there are.
        axes: site → its axes of components; none for the share of the first of two, which becomes one minus it.
        numbered: groups of as many sites as there are components, one for each.
    """

    num_components: int
    axes: Mapping[str, Sequence[int]]
    numbered: Sequence[Sequence[str]]

    @property
    def sites(self) -> list[str]:
        """All sites that are exchanged."""
        return [*self.axes, *itertools.chain.from_iterable(self.numbered)]

    def applied(self, values: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
        """Values (draw, …) of sites, tensors or arrays, with the components in another order (component,)."""
        moved = dict(values)
        for name, axes in self.axes.items():
            for axis in axes:
                moved[name] = moved[name][(slice(None),) * (1 + axis) + (list(order),)]
            if not axes and order[0] != 0:
                moved[name] = 1.0 - moved[name]
        for names in self.numbered:
            for place, source in enumerate(order):
                moved[names[place]] = values[names[source]]
        return moved

    def to_json(self) -> str:
        """The sites and axes as text."""
        return json.dumps({"axes": self.axes, "numbered": self.numbered})

    @classmethod
    def from_json(cls, num_components: int, text: str) -> Exchange:
        """The exchange that :meth:`to_json` wrote."""
        what = json.loads(text)
        return cls(num_components, what["axes"], what["numbered"])
