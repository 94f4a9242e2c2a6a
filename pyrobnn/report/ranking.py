"""Methods ranked by log predictive density, with paired differences and stacking weights (ArviZ's ``compare``)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.utils import ELPDData

from pyrobnn.core.groups import PREDICTIONS
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.importance import good_k
from pyrobnn.diagnostics.leave_one_out import UNRELIABLE, elpd_data, loo, refit_points
from pyrobnn.diagnostics.points import same_data


@dataclass(frozen=True)
class Ranked:
    """One method in a ranking.

    Args:
        label: of the run. elpd, se: sum of log predictive densities over the data, and its standard error.
        below: by how much it is below the best. below_se: standard error of that paired difference.
        weight: of the stacked mixture; None where it could not be found.
    """

    label: str
    elpd: float
    se: float
    below: float
    below_se: float
    weight: float | None

    @property
    def close(self) -> bool:
        """Whether it is within two standard errors of the best."""
        return self.below <= 2.0 * self.below_se


@dataclass(frozen=True)
class Ranking:
    """A ranking on one set of data, best first.

    Args:
        title: what was predicted. num_data: how many points.
        rows: the methods. refused: why the others are not ranked, in sentences.
    """

    title: str
    num_data: int
    rows: tuple[Ranked, ...]
    refused: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain dicts and numbers: label → elpd, se, below, below_se, weight."""
        rows = {row.label: vars(row).copy() for row in self.rows}
        for row in rows.values():
            del row["label"]
        return {"num_data": self.num_data, "methods": rows, "refused": list(self.refused)}


def rankings(trees: Mapping[str, Evidence], floor: Mapping[str, Evidence]) -> dict[str, Ranking]:
    """The rankings that the trees allow: ``held_out``, with the baselines `floor`, and ``leave_one_out``.

    Only methods of one data set are ranked, and at least two. Of leave-one-out only those whose importance weights can
    be relied on: above the limit of Pareto k-hat at more than a tenth of the data, the estimate may be far off, and
    flatters.
    """
    if not same_data(trees.values()):
        return {}
    found = {"held_out": _held_out({**trees, **floor}), "leave_one_out": _leave_one_out(trees)}
    return {name: ranking for name, ranking in found.items() if ranking is not None}


def _held_out(trees: Mapping[str, Evidence]) -> Ranking | None:
    each = {label: evidence.values(PREDICTIONS, "log_prob") for label, evidence in trees.items()}
    flat = {k: np.ravel(v).astype(np.float64) for k, v in each.items() if v is not None and v.size > 1}
    wrong = [label for label, values in flat.items() if not np.isfinite(values).all()]
    elpds = {label: _elpd(values) for label, values in flat.items() if label not in wrong}
    refused = tuple(f"{label} is not ranked: a held-out log density is not finite" for label in wrong)
    return _ranking("Held-out data", elpds, refused)


def _leave_one_out(trees: Mapping[str, Evidence]) -> Ranking | None:
    elpds, refused = {}, []
    for label, evidence in trees.items():
        try:
            elpd = loo(evidence)
        except Exception:  # it stands among the checks that could not be made
            continue
        if elpd is None:
            continue
        bad, size = len(refit_points(elpd)), int(np.isfinite(elpd.pareto_k).sum())
        if bad > UNRELIABLE * size:
            refused.append(f"{label} is not ranked: k-hat is above its limit at {bad} of {size} data")
        else:
            elpds[label] = elpd
    return _ranking("Training data, each datum left out", elpds, tuple(refused))


def _ranking(title: str, elpds: Mapping[str, ELPDData], refused: tuple[str, ...]) -> Ranking | None:
    sizes = {int(elpd.n_data_points) for elpd in elpds.values()}
    if len(elpds) + len(refused) < 2 or len(sizes) != 1:
        return None
    if len(elpds) < 2:
        return Ranking(title, sizes.pop(), (), (*refused, "There are not two methods left to compare"))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        table: pd.DataFrame = arviz_stats.compare(dict(elpds))
    # the order and the weights are ArviZ's; from its release 1 on it rounds the rest, and turns the differences' sign
    found, rows = dict(elpds), []
    best = found[str(table.index[0])]
    for label, row in table.iterrows():
        one = found[str(label)]
        below = np.asarray(best.elpd_i - one.elpd_i, dtype=np.float64)
        error = float(np.sqrt(below.size * below.var()))
        weight = float(row["weight"]) if np.isfinite(row["weight"]) else None
        rows.append(Ranked(str(label), float(one.elpd), float(one.se), float(below.sum()), error, weight))
    return Ranking(title, sizes.pop(), tuple(rows), refused)


def _elpd(values: np.ndarray) -> ELPDData:
    """Log densities of held-out points in ArviZ's clothes."""
    return elpd_data(
        elpd=float(values.sum()),
        se=float(np.sqrt(values.size * values.var())),
        p=0.0,
        n_samples=1,
        n_data_points=values.size,
        scale="log",
        warning=False,
        good_k=good_k(1000),
        elpd_i=xr.DataArray(values, dims="obs"),
        pareto_k=xr.DataArray(np.zeros(values.size), dims="obs"),
    )
