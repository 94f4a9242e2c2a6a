"""How close a posterior is to a reference run: the question that R-hat cannot answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy import stats

from pyrobnn.core.groups import FUNCTION, HELD_OUT, PREDICTIONS
from pyrobnn.diagnostics.convergence import RHAT_LIMITS, convergence
from pyrobnn.diagnostics.evidence import Evidence, statistic
from pyrobnn.diagnostics.verdict import Found, Status, grade, worse

_MAX_COLUMNS = 512
#: share of the points that the looser limits are held against
MOST = 0.9


@dataclass(frozen=True, eq=False)
class Fidelity:
    """Distances of one posterior from a reference.

    Args:
        per_point: Dataset over (point, output): ``wasserstein`` (1-Wasserstein distance of f, in reference sd)
            and ``sd_ratio`` (sd of f over the reference's).
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


def by_kind(values: np.ndarray, evidence: Evidence, at: str) -> dict[str, np.ndarray]:
    """The values (point, output) of each kind of probe, named by where it lies; all as one elsewhere. Without NaN."""
    kinds = evidence.probe_kinds(len(values)) if at == "probes" else np.full(len(values), "train")
    words = {"train": "at the data", "between": "between the data", "outside": "outside the data"}
    found = {
        words.get(str(kind), "there"): values[kinds == kind].ravel() for kind in np.unique(kinds)
    }
    known = {kind: each[~np.isnan(each)] for kind, each in found.items()}
    return {kind: each for kind, each in known.items() if each.size}


def grade_by_kind(
    shift: np.ndarray, ratio: np.ndarray, evidence: Evidence, at: str, limits: tuple[float, ...]
) -> Status:
    """The grade of sizes of shifts (sd) and of ratios of sds, at most 1, (point, output) at each kind of point.

    In the median, and at nine in ten points: of these with twice the limits of the shift, and half those of the ratio.
    """
    near, far, alike, unlike = limits[:4]
    shifts, ratios = (by_kind(each, evidence, at).values() for each in (shift, ratio))
    return worse(
        *(grade(float(np.median(each)), near, far) for each in shifts),
        *(grade(float(np.quantile(each, MOST)), 2.0 * near, 2.0 * far) for each in shifts),
        *(grade(float(np.median(each)), alike, unlike, higher=True) for each in ratios),
        *(
            grade(float(np.quantile(each, 1.0 - MOST)), unlike, unlike / 2, higher=True)
            for each in ratios
        ),
    )


def against(evidence: Evidence, limits: tuple[float, ...], reference: Evidence) -> Found:
    """How far the function is from the reference's, and whether it is as uncertain."""
    found = _fidelity(evidence, reference)
    if found.per_point is None:
        return Found("info", None, "not_comparable")
    if not _can_judge(reference):
        return Found("info", None, "reference_undecided")
    remedy = evidence.remedy
    if evidence.claim == "exact" and not evidence.is_iid:
        remedy = "One of the two has missed a part: run both for longer, from new starts."
    distance, ratio = (found.per_point[name].values for name in ("wasserstein", "sd_ratio"))
    gap = np.log(np.maximum(ratio, 1e-12))
    status = grade_by_kind(distance, np.exp(-np.abs(gap)), evidence, found.at, limits)
    median = max(float(np.median(each)) for each in by_kind(distance, evidence, found.at).values())
    gaps = (float(np.median(each)) for each in by_kind(gap, evidence, found.at).values())
    numbers = {"at": found.at, "distance": median, "ratio": float(np.exp(max(gaps, key=abs)))}
    return Found(status, median, "", numbers | {"remedy": remedy}, limits[0])


def _alike(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@statistic
def _fidelity(evidence: Evidence, reference: Evidence) -> Fidelity:
    mine = evidence.values(FUNCTION, "probe_x")
    other = reference.values(FUNCTION, "probe_x")
    ours = evidence.f
    theirs = reference.f
    at = "probes"
    if ours is None or theirs is None or mine is None or other is None or not _alike(mine, other):
        ours, theirs = (each.draws(PREDICTIONS, "f") for each in (evidence, reference))
        at = "held-out points"
        mine, other = (each.values(HELD_OUT, "x") for each in (evidence, reference))
        if (
            ours is None
            or theirs is None
            or not (mine is None or other is None or _alike(mine, other))
        ):
            return Fidelity(None, at)
    ours, theirs = (f.reshape(f.shape[0] * f.shape[1], f.shape[2], -1) for f in (ours, theirs))
    if ours.shape[1:] != theirs.shape[1:] or not (
        np.isfinite(ours).all() and np.isfinite(theirs).all()
    ):
        return Fidelity(None, at)
    every = -(-ours.shape[1] * ours.shape[2] // _MAX_COLUMNS)
    ours = ours[:, ::every]
    theirs = theirs[:, ::every]
    scale = theirs.std(axis=0)
    moves = (
        scale > 0.0
    )  # a function may be held at a point, as that of a net without a bias is at zero
    if not moves.any():
        return Fidelity(None, at)
    distance = np.full(scale.shape, np.nan)
    for index in zip(*np.nonzero(moves)):
        column = (slice(None), *index)
        distance[index] = stats.wasserstein_distance(ours[column], theirs[column]) / scale[index]
    columns = {
        "wasserstein": distance,
        "sd_ratio": np.where(moves, ours.std(axis=0) / scale, np.nan),
    }
    return Fidelity(
        xr.Dataset({name: (("point", "output"), each) for name, each in columns.items()}), at
    )


@statistic
def _can_judge(reference: Evidence) -> bool:
    """Whether the reference can judge: chains whose R-hat is known and not above 1.05."""
    found = None if reference.is_iid else convergence(reference)
    return (
        found is not None
        and float(np.nan_to_num(found.table["rhat"], nan=np.inf).max()) <= RHAT_LIMITS[1]
    )
