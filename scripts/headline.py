"""The headline numbers, each by the records of its claim."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from records import Records, read_records
from speed.claim_tables import gradients
from uci.beside_published import beats_floor, best_published, published
from verdict.claim_tables import verdicts

HERE = Path(__file__).parent
Number = tuple[str, str, str]  # the claim, what was measured, and the number


def headline() -> str:
    """Headline numbers, each linked to its claim."""
    numbers = [
        *_headline_of_speed(),
        _headline_of_posteriordb(),
        _headline_of_evidence(),
        _headline_of_verdict(),
        _headline_of_uci(),
        _headline_of_gaps(),
        *_headline_of_tables(),
    ]
    lines = ["| | measured | how |", "|---|---|---|"]
    for claim, label, number in numbers:
        lines.append(f"| {label} | **{number}** | [claim](../{claim}/claim.md) |")
    return "\n".join(lines)


def _records_of(claim: str) -> Records:
    """The records of a claim."""
    return read_records(HERE / claim / "records.jsonl")


def _headline_of_speed() -> list[Number]:
    ratios = [row["ours/numpyro"] for row in gradients()]
    pyro = [row["pyro/ours"] for row in gradients()]
    return [
        (
            "speed",
            "Time of a NUTS gradient, as a share of NumPyro's (median over models and chains; range)",
            f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
        ),
        ("speed", "Pyro's time of a gradient over ours", f"{min(pyro):.0f}–{max(pyro):.0f} ×"),
    ]


def _headline_of_posteriordb() -> Number:
    outcomes = [row["outcome"] for row in _records_of("posteriordb")]
    right = outcomes.count("right")
    silent = outcomes.count("WRONG")
    return (
        "posteriordb",
        "Reference posteriors (posteriordb, radon) right at the defaults; wrong without a warning",
        f"{right} of {len(outcomes)} runs; {silent}",
    )


def _headline_of_evidence() -> Number:
    exact = [
        row for row in _records_of("evidence") if row["way"] == "SMC" and row["exact"] is not None
    ]
    error = max(abs(row["log_evidence"] - row["exact"]) for row in exact)
    return (
        "evidence",
        f"Largest error of SMC's log evidence ({len(exact)} runs with an exact value)",
        f"{error:.2f} nats",
    )


def _headline_of_verdict() -> Number:
    healthy, sick, audited = verdicts().values()
    shares = [
        _share_of_status(healthy, "fail"),
        _share_of_status(sick, "pass"),
        _share_of_status(audited, "pass"),
    ]
    return (
        "verdict",
        "Right draws that fail; planted faults that pass; that pass `pb.audit` too",
        "; ".join(shares),
    )


def _share_of_status(rows: Records, status: str) -> str:
    return f"{sum(row['status'] == status for row in rows)} of {len(rows)}"


def _headline_of_uci() -> Number:
    cells = beats_floor(_records_of("uci"))
    best = best_published(_records_of("uci"), published())
    reached = sum(ours >= theirs for _, ours, theirs in best.values())
    clear = sum(is_clear for _, is_clear in cells.values())
    return (
        "uci",
        "UCI sets on which our best method reaches the best published log density; cells clearly above linear",
        f"{reached} of {len(best)}; {clear} of {len(cells)}",
    )


def _headline_of_gaps() -> Number:
    nuts = _gap_ratios("nuts")
    svi = _gap_ratios("svi")
    return (
        "svi_against_mcmc",
        f"Epistemic sd in a gap over that at the data, NUTS and mean-field SVI ({len(nuts)} data sets)",
        f"{_mean_and_error(nuts, 1)} and {_mean_and_error(svi, 1)}",
    )


def _gap_ratios(method: str) -> list[float]:
    """Epistemic sd in the gap of two clusters over that at the data, where it is known."""
    ratios = []
    for row in _records_of("svi_against_mcmc"):
        of_two_clusters = row["part"] == "gaps" and row["data"] == "two_clusters"
        if of_two_clusters and row["method"] == method and row["gap_ratio"]:
            ratios.append(row["gap_ratio"])
    return ratios


def _headline_of_tables() -> list[Number]:
    """One number, or none where there is a single seed."""
    scored = [r for r in _records_of("tables") if r["table"] == "airfoil" and "nll" in r]
    # of a normal with the predictive's mean and sd, as published
    latest = {row["seed"]: row for row in scored}
    nll = [row["nll"] for row in latest.values()]
    if len(nll) < 2:
        return []
    rival = json.loads((HERE / "tables" / "published.json").read_text(encoding="utf-8"))["rows"]
    theirs = next(
        row["nll"] for row in rival if (row["table"], row["method"]) == ("airfoil", "BDE")
    )
    text = f"{_mean_and_error(nll, 3)} ({len(nll)} seeds; bde's {theirs})"
    return [("tables", "Negative log likelihood on the airfoil table", text.replace("-", "−"))]


def _mean_and_error(values: Sequence[float], digits: int) -> str:
    """Mean ± standard error, to so many digits."""
    error = stdev(values) / len(values) ** 0.5
    return f"{fmean(values):.{digits}f} ± {error:.{digits}f}"
