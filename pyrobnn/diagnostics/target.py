"""Whether draws are of the model's posterior at all: Stein's identities, which need no reference."""

from __future__ import annotations

import numpy as np
from scipy import stats

from pyrobnn.chains import ess
from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.verdict import Check, Status, grade_tested
from pyrobnn.groups import STEIN

_FEWEST_EFFECTIVE = 4.0
#: below which a ratio is so far off that its error needs no care
_LEAST_RATIO = 0.25


def check_virial(evidence: Evidence) -> Check | None:
    """Whether the draws spread as the density falls: −E[(z − z̄)·∇log p] is their dimension."""
    virial, size = evidence.draws(STEIN, "virial"), evidence.values(STEIN, "size")
    if virial is None or size is None or not np.isfinite(virial).all():
        return None
    names = [*_sites(evidence), "all weights"]
    ratio = np.concatenate([virial / size, virial.sum(-1, keepdims=True) / size.sum()], axis=-1)
    mean, p = _tested(ratio, 1.0, positive=True)
    gap = np.abs(np.log(np.maximum(mean, 1e-6)))
    worst = _worst(p, gap, thresholds.VIRIAL_WARN)
    status = _status(evidence, p[worst], gap[worst], thresholds.VIRIAL_WARN, thresholds.VIRIAL_FAIL)
    value = float(mean[worst])
    if (
        status == "info" and value < 1.0 and ratio[..., worst].any()
    ):  # held sites have none; no optimum is this narrow
        status = "warn"
    side = "narrower" if value < 1.0 else "wider"
    return Check(
        "virial",
        status,
        value,
        f"1; off by more than {np.expm1(thresholds.VIRIAL_WARN):.0%} and its Monte-Carlo error warns, more than "
        f"{np.expm1(thresholds.VIRIAL_FAIL):.0%} fails",
        thresholds.STEIN_SOURCE,
        f"The variance of the draws of {names[worst]} is {value:.2f} times what the model's density implies"
        + ("." if status == "pass" else f": they are {side} than its posterior."),
        _remedy(evidence) if status in ("warn", "fail") else "",
    )


def check_score(evidence: Evidence) -> Check | None:
    """Whether the draws lie where the density does: E[∇log p] = 0."""
    score, size = evidence.draws(STEIN, "score"), evidence.values(STEIN, "size")
    if score is None or size is None or not np.isfinite(score).all():
        return None
    sites, directions = score.shape[2:]
    columns = score.reshape(*score.shape[:2], -1)
    scale = columns.std(axis=(0, 1))
    columns = columns[:, :, scale > 0.0] / scale[scale > 0.0]
    names = np.repeat(_sites(evidence), directions)[scale > 0.0]
    if columns.shape[2] == 0:
        return None
    mean, p = _tested(columns, 0.0, chosen_of=int(size.sum()))
    gap = np.abs(mean)
    worst = _worst(p, gap, thresholds.SCORE_WARN)
    status = _status(evidence, p[worst], gap[worst], thresholds.SCORE_WARN, thresholds.SCORE_FAIL)
    return Check(
        "score",
        status,
        float(gap[worst]),
        f"0; more than {thresholds.SCORE_WARN} sd and its Monte-Carlo error warns, more than "
        f"{thresholds.SCORE_FAIL} sd fails",
        thresholds.STEIN_SOURCE,
        f"The mean gradient of the log density is at most {gap[worst]:.2f} of its sd from zero, for {names[worst]}"
        + ("." if status == "pass" else ": the draws lie beside the model's posterior."),
        _remedy(evidence) if status in ("warn", "fail") else "",
    )


def _tested(
    values: np.ndarray, expected: float, chosen_of: int = 0, positive: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Mean (quantity,) of values (chain, draw, quantity) and the p-value of its being the one expected.

    By Student's t with as many degrees of freedom as there are effective draws; Bonferroni over the quantities and
    over those that some of them were chosen of. A ``positive`` ratio's sd comes out low together with its mean: where
    that is below the one expected, its logarithm is tested.
    """
    total = values.shape[0] * values.shape[1]
    columns = np.moveaxis(values, 2, 0)
    worth = ess(columns, "mean")
    worth = np.clip(np.where(np.isfinite(worth), worth, total), _FEWEST_EFFECTIVE, total)
    mean, sd = columns.mean(axis=(1, 2)), columns.std(axis=(1, 2))
    if positive:
        sd = sd / np.clip(mean / expected, _LEAST_RATIO, 1.0)
    t = np.abs(mean - expected) * np.sqrt(worth) / np.maximum(sd, 1e-12)
    return mean, np.minimum(1.0, 2.0 * stats.t.sf(t, worth - 1.0) * (values.shape[2] + chosen_of))


def _worst(p: np.ndarray, gap: np.ndarray, least: float) -> int:
    """The largest effect among those that are no chance, else the largest of all."""
    sure = (p < thresholds.STEIN_RATE_WARN) & (gap > least)
    return int(np.argmax(np.where(sure, 1e6 + gap, gap)))


def _status(evidence: Evidence, p: float, gap: float, warns: float, fails: float) -> Status:
    status = grade_tested(p, gap, thresholds.STEIN_RATES, (warns, fails))
    if status == "pass" or not (evidence.is_iid and evidence.has_hidden_units):
        return status
    # a density made to be near the posterior of a net misses it in single weights, rightly for all that its functions
    # show; a variational one fulfils the identities at its optimum, and one that claims nothing is told all the same
    fulfils = evidence.text("log_evidence_kind") == "elbo" or evidence.claim == "none"
    return "warn" if fulfils else "info"


def _remedy(evidence: Evidence) -> str:
    if evidence.is_iid:
        return evidence.text("remedy") or "Fit for longer, or run NUTS and compare."
    return (
        "Check that data, prior and likelihood are those of the model (no datum counted twice, no temperature), then "
        "fit again with a smaller step size or a longer warm-up."
    )


def _sites(evidence: Evidence) -> list[str]:
    virial = evidence.variable(STEIN, "virial")
    size = virial.sizes["site"] if virial is not None else 0
    return (
        [str(name) for name in virial["site"].values]
        if virial is not None and "site" in virial.coords
        else ([f"site {index}" for index in range(size)])
    )
