"""How close a posterior is to a reference run: the question that R-hat cannot answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xarray as xr
from scipy import stats

from pyrobnn.core.groups import FUNCTION, HELD_OUT, PREDICTIONS
from pyrobnn.diagnostics.convergence import convergence
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.grades import Found, Limits, by_kind, grade_by_kind
from pyrobnn.diagnostics.limits import RHAT_LIMITS

_MAX_COLUMNS = 512


@dataclass(frozen=True, eq=False)
class Fidelity:
    """Distances of one posterior from a reference.

    Args:
        per_point: Dataset over (point, output): ``wasserstein`` (1-Wasserstein distance of f), ``shift`` (distance of
            the means of f), both in reference sd, and ``sd_ratio`` (sd of f over the reference's).
        at: Where the points lie: "probes" or "held-out points".
    """

    per_point: xr.Dataset | None
    at: str


def fidelity(tree: xr.DataTree | Evidence, reference: xr.DataTree | Evidence) -> Fidelity:
    """Compare a posterior with a reference posterior (a long NUTS run) of the same model and data.

    Args:
        tree: The posterior to judge.
        reference: The reference; probes or held-out points must be those of `tree` to be compared.

    Returns:
        Every distance that the two trees allow.

    Caveat:
        One-dimensional distances per point: dependence between points is not compared. With S effective draws,
        1-Wasserstein has a floor of about 1/√S sd.

    References:
        What are Bayesian neural network posteriors really like? (Izmailov et al., 2021)
        https://arxiv.org/abs/2104.14421
    """
    return _fidelity(Evidence.of(tree), Evidence.of(reference, "reference"))


def against(evidence: Evidence, limits: Limits, reference: Evidence) -> Found:
    """How far the function lies from that of a reference run, and the ratio of their standard deviations."""
    comparison = _fidelity(evidence, reference)
    if comparison.per_point is None:
        return Found("info", None, "not_comparable")
    if not _can_judge(reference):
        return Found("info", None, "reference_undecided")
    distance = comparison.per_point["wasserstein"].values
    log_ratio = np.log(np.maximum(comparison.per_point["sd_ratio"].values, 1e-12))
    kinds = evidence.point_kinds(len(distance), comparison.at)
    status = grade_by_kind(distance, np.exp(-np.abs(log_ratio)), kinds, limits)
    median = max(float(np.median(distances)) for distances in by_kind(distance, kinds))
    median_log_ratios = [float(np.median(ratios)) for ratios in by_kind(log_ratio, kinds)]
    numbers = {
        "at": comparison.at,
        "distance": median,
        "ratio": float(np.exp(max(median_log_ratios, key=abs))),
        "remedy": _remedy(evidence),
    }
    return Found(status, median, "", numbers, limits[0])


def _remedy(evidence: Evidence) -> str:
    """What to do where a posterior differs from its reference, which two exact samplers never should."""
    if evidence.claim == "exact" and not evidence.is_iid:
        return "One of the two has missed a part: run both for longer, from new starts."
    return evidence.remedy


def _alike(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.shape == theirs.shape and np.allclose(
        ours,
        theirs,
        rtol=1e-4,
        atol=1e-6,
    )


@statistic
def _fidelity(evidence: Evidence, reference: Evidence) -> Fidelity:
    functions = _at_probes(evidence, reference)
    at = "probes"
    if functions is None:
        functions = _at_held_out_points(evidence, reference)
        at = "held-out points"
    if functions is None:
        return Fidelity(None, at)
    f, reference_f = (_draw_by_point(draws) for draws in functions)
    finite = np.isfinite(f).all() and np.isfinite(reference_f).all()
    if f.shape[1:] != reference_f.shape[1:] or not finite:
        return Fidelity(None, at)
    stride = -(-f.shape[1] * f.shape[2] // _MAX_COLUMNS)
    return Fidelity(_distances(f[:, ::stride], reference_f[:, ::stride]), at)


def _distances(f: np.ndarray, reference_f: np.ndarray) -> xr.Dataset | None:
    """`Fidelity.per_point` of draws (draw, point, output); NaN where the reference does not vary, None if nowhere."""
    scale = reference_f.std(axis=0)
    # a function may be held at a point, as that of a net without a bias is at zero
    varies = scale > 0.0
    if not varies.any():
        return None
    distance = np.full(scale.shape, np.nan)
    for point, output in zip(*np.nonzero(varies)):
        shift = stats.wasserstein_distance(f[:, point, output], reference_f[:, point, output])
        distance[point, output] = shift / scale[point, output]
    shift = np.abs(f.mean(axis=0) - reference_f.mean(axis=0))
    dims = ("point", "output")
    return xr.Dataset(
        {
            "wasserstein": (dims, distance),
            "shift": (dims, np.where(varies, shift / scale, np.nan)),
            "sd_ratio": (dims, np.where(varies, f.std(axis=0) / scale, np.nan)),
        }
    )


class Distance(NamedTuple):
    """How far a function lies from a reference run in one region, in the median of its points.

    Args:
        shift: of the mean, in sds of the reference.
        sd_ratio: of its sd over the reference's.
    """

    shift: float
    sd_ratio: float


#: kind of a probe → where that is, in words
REGIONS = {
    "train": "at the data",
    "between": "in the gaps",
    "outside": "outside",
}


def distances(
    tree: xr.DataTree | Evidence, reference: xr.DataTree | Evidence
) -> dict[str, Distance]:
    """Region in words → how far the function lies from the reference run's; none where they cannot be compared."""
    evidence = Evidence.of(tree)
    comparison = fidelity(evidence, reference)
    if comparison.per_point is None:
        return {}
    shift = comparison.per_point["shift"].values
    sd_ratio = comparison.per_point["sd_ratio"].values
    kinds = evidence.point_kinds(len(shift), comparison.at)
    by_region = {}
    for kind, words in REGIONS.items():
        here = kinds == kind
        known = np.isfinite(shift[here])
        if known.any():
            ratio = float(np.median(sd_ratio[here][known]))
            by_region[words] = Distance(float(np.median(shift[here][known])), ratio)
    return by_region


_Functions = tuple[np.ndarray, np.ndarray]


def _at_probes(evidence: Evidence, reference: Evidence) -> _Functions | None:
    """The draws of both functions at their probes; None unless these are the same."""
    x = evidence.values(FUNCTION, "probe_x")
    reference_x = reference.values(FUNCTION, "probe_x")
    if x is None or reference_x is None or not _alike(x, reference_x):
        return None
    if evidence.f is None or reference.f is None:
        return None
    return evidence.f, reference.f


def _at_held_out_points(evidence: Evidence, reference: Evidence) -> _Functions | None:
    """The draws of both functions at the held-out points; None where these are known to differ."""
    x = evidence.values(HELD_OUT, "x")
    reference_x = reference.values(HELD_OUT, "x")
    if x is not None and reference_x is not None and not _alike(x, reference_x):
        return None
    f = evidence.draws(PREDICTIONS, "f")
    reference_f = reference.draws(PREDICTIONS, "f")
    if f is None or reference_f is None:
        return None
    return f, reference_f


def _draw_by_point(f: np.ndarray) -> np.ndarray:
    """Draws of a function (draw, point, output), chains one after another."""
    return f.reshape(f.shape[0] * f.shape[1], f.shape[2], -1)


@statistic
def _can_judge(reference: Evidence) -> bool:
    """Whether the reference can judge: chains whose R-hat is known and not above 1.05."""
    chains = None if reference.is_iid else convergence(reference)
    if chains is None:
        return False
    return float(np.nan_to_num(chains.table["rhat"], nan=np.inf).max()) <= RHAT_LIMITS[1]
