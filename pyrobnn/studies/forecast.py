"""How long a comparison will take, said before it starts."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyrobnn.callbacks import duration
from pyrobnn.checks import check_device
from pyrobnn.gradient import batched_gradient
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.fitting.sizes import measure
from pyrobnn.inference.method import METHODS, Method
from pyrobnn.model import BNN
from pyrobnn.studies.study import QUICK_ROWS, Study

Prepared = Mapping[str, tuple[Method, dict[str, Any]]]
#: seconds from which a faster way is named
_LONG = 60.0
#: of the gradients that are timed: least and most rows, bytes that autograd keeps, sets of weights, and how often
_ROWS, _BYTES, _SETS, _TIMES = (16, 4096), 2**20, 4, 5


class Forecast:
    """What the methods of a study will take, from one measured gradient; without compiling, predicting and judging.

    Args:
        study: data and model.
        device: where it computes.
    """

    def __init__(self, study: Study, device: str | None) -> None:
        self._model = study.model if device is None else study.model.to(check_device(device))
        self._train = study.train
        self._per_datum = seconds_per_datum(self._model, study.train.x, study.train.y)

    def seconds(self, prepared: Prepared, rows: int | None = None) -> dict[str, float]:
        """Of each method that says how much it computes; of the first ``rows`` only, where given."""
        x, y = self._train.x[:rows], self._train.y[:rows]
        found = {
            name: expected_seconds(
                method, self._model, x, y, self._per_datum, num_draws=arguments.get("num_draws")
            )
            for name, (method, arguments) in prepared.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    def words(self, prepared: Prepared, others: Prepared, quick: Prepared) -> str:
        """One sentence; where it is long, what is faster.

        Args:
            prepared: the methods that are run, by name, with the arguments of their fits.
            others: all methods.
            quick: the same methods as in a quick run; empty if this is one.
        """
        own = self.seconds(prepared)
        each = ", ".join(f"{name} {duration(value)}" for name, value in own.items())
        total = sum(own.values())
        said = f"expected: about {duration(total)} beside compiling and judging ({each})"
        if total < _LONG:
            return said
        run = {type(method) for method, _ in prepared.values()}
        rest = {
            name: value for name, value in self.seconds(others).items()
            if METHODS[name].cls.claim == "approximate" and METHODS[name].cls not in run
        }  # fmt: skip
        if rest:
            name = min(rest, key=rest.__getitem__)
            said += f"; {METHODS[name].cls.__name__} takes about {duration(rest[name])} (--methods {name})"
        if quick:
            rows = min(QUICK_ROWS, len(self._train.x))
            shorter = duration(sum(self.seconds(quick, rows).values()))
            on = f"{rows:,} of the rows" if rows < len(self._train.x) else "all rows"
            said += f"; --quick about {shorter}, on {on}"
        return said


def seconds_per_datum(model: BNN, x: Tensor, y: Tensor) -> float:
    """Seconds that a gradient takes of one datum and one set of weights, measured on so many rows that it shows.

    What a call takes whatever its rows is left out: compiled, it is small.

    Args:
        model: on the device that is meant.
        x, y: the data.
    """
    spent = []
    datum = measure(None, model, x, y, 1, False).datum
    rows = max(_ROWS[0], min(_ROWS[1], _BYTES // (_SETS * datum)))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the fit says it
        for num in (rows, rows // 8):
            some = torch.arange(num) % len(x)
            density = prepare(model, x[some], y[some], points="free", device=model.device).density
            z = density.initial().expand(_SETS, -1).contiguous()
            gradient, _ = batched_gradient(density.log_joint, z)
            spent.append(min(_timed(gradient, z) for _ in range(_TIMES)) / _SETS)
    return max(0.0, spent[0] - spent[1]) / (rows - rows // 8)


def expected_seconds(
    method: Any, model: BNN, x: Tensor, y: Tensor, per_datum: float, *, num_draws: int | None = None
) -> float | None:
    """About how long ``method.fit(model, x, y, num_draws=num_draws)`` takes beside compiling.

    Args:
        method: any of the methods.
        model, x, y: what is fitted to what.
        per_datum: as measured by :func:`seconds_per_datum`.
        num_draws: as for ``fit``.

    Returns:
        Seconds; None for a method that does not say how much it computes.
    """
    if not hasattr(method, "work"):
        return None
    count = method.default_draws if num_draws is None else num_draws
    return per_datum * float(method.work(measure(method, model, x, y, count, False)))


def _timed(gradient: Any, z: Tensor) -> float:
    begun = time.perf_counter()
    float(gradient(z)[1].sum())  # a GPU has finished once the number is here
    return time.perf_counter() - begun
