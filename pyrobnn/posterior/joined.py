"""Draws of several fits as those of one: chains side by side, or members one after another."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from pyrobnn.core.checks import Refused


class JoinedDraws(UserDict[str, Tensor]):
    """Draws by site that are read when they are asked for, and kept as long as somebody has them.

    Args:
        sources: site → its draws (chain, draw, …), or the function that reads them.
    """

    def __init__(self, sources: Mapping[str, Tensor | Callable[[], Tensor]]) -> None:
        super().__init__()
        self.data: dict[str, Any] = dict(sources)
        self._alive: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        # those of the first site say how many there are, and are asked for often
        self._first: Tensor | None = None

    def __getitem__(self, site: str) -> Tensor:
        source = self.data[site]
        if isinstance(source, Tensor):
            return source
        value = self._alive.get(site)
        if value is None:
            value = source()
            self._alive[site] = value
            if site == next(iter(self.data)):
                self._first = value
        return value

    def __copy__(self) -> JoinedDraws:
        return JoinedDraws(self.data)

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["data"])  # type: ignore[misc]


def joining_dim(meta: Mapping[str, Any]) -> int:
    """The dimension along which the draws of such fits are joined: chains, or independent draws.

    Raises:
        Refused: points, which are no draws.
    """
    if meta["kind"] == "point":
        raise Refused(
            f"posteriors of {meta['method']} are single points, which make no posterior together: use DeepEnsemble"
        )
    return 0 if meta["kind"] == "chains" else 1


def joined_meta(metas: Mapping[int, Mapping[str, Any]], dim: int) -> dict[str, Any]:
    """Entries of ``meta`` for fits by number: the longest timings, and everybody's warnings and findings."""
    timings: dict[str, float] = {}
    warnings: list[str] = []
    findings: list[dict[str, Any]] = []
    for number, meta in metas.items():
        for name, seconds in meta["timings"].items():
            timings[name] = max(seconds, timings.get(name, 0.0))
        warnings += [f"rank {number}: {warning}" for warning in meta["warnings"]]
        findings += meta["findings"]
    return {
        "shared": "members" if dim else "chains",
        "num_ranks": len(metas),
        "timings": timings,
        "warnings": warnings,
        "findings": findings,
    }
