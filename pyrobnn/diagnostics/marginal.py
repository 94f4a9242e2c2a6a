"""What a method's log evidence is off by, where another run has estimated it with an error."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.diagnostics.verdict import Check

#: standard errors within which two estimates agree: this library's convention
_SIGMAS = 3.0
_SOURCE = "Sequential Monte Carlo samplers (Del Moral et al., 2006) https://doi.org/10.1111/j.1467-9868.2006.00553.x"


def with_error(trees: Iterable[Evidence]) -> Evidence | None:
    """The first of the runs whose log evidence has an error: what the others' is measured against."""
    return next((each for each in trees if np.isfinite(each.number("log_evidence_error", np.nan))), None)


def check_log_evidence(evidence: Evidence, estimate: Evidence) -> Check | None:
    """By how many nats the log evidence differs from that of ``estimate``, as information."""
    mine, known = (each.number("log_evidence", np.nan) for each in (evidence, estimate))
    # of a part of the weights it is the evidence of another model
    if (
        evidence is estimate
        or not np.isfinite([mine, known]).all()
        or evidence.settings.get("subset", "all") != "all"
    ):
        return None
    error, gap = estimate.number("log_evidence_error", np.nan), mine - known
    tuned = evidence.settings.get("tune") is not None
    if abs(gap) <= _SIGMAS * error:
        found = "agrees with"
    else:
        found = f"is {abs(gap):.3g} nats {'above' if gap > 0 else 'below'}"
    return Check(
        "log_evidence",
        "info",
        float(gap),
        "",
        _SOURCE,
        f"The log evidence {mine:.2f} {found} {estimate.method}'s, {known:.2f} ± {error:.2g}"
        + (": this run tuned the prior, so that it is another model's." if tuned else "."),
    )
