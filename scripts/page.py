"""Write the tables of the claims, of the paper and of the headline page from the records. Numbers are never typed.

python scripts/page.py            # rewrites */claim.md, results/README.md and docs/paper.md
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from records import read_records  # noqa: E402

START = "<!-- table -->"
END = "<!-- end -->"
Records = Sequence[Mapping[str, Any]]


def script(claim: str) -> ModuleType:
    """The ``run.py`` of a claim."""
    spec = importlib.util.spec_from_file_location(f"{claim}_run", HERE / claim / "run.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{claim} has no run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def records_of(claim: str, name: str = "records.jsonl") -> Records:
    """The records of a claim."""
    return read_records(HERE / claim / name)


def last_of_each(rows: Records, *keys: str) -> Records:
    """Of repeated measurements the last."""
    latest = {}
    for row in rows:
        latest[tuple(row.get(key) for key in keys)] = row
    return list(latest.values())


# -- tables ----------------------------------------------------------------------------------------------------------


def speed() -> str:
    """A gradient of NUTS beside NumPyro's and Pyro's, and the numbers that are held from commit to commit."""
    lines = [
        "| model | chains | pyrobnn, µs | NumPyro, µs | ratio | Pyro / pyrobnn |",
        "|---|---|---|---|---|---|",
    ]
    for row in gradients():
        ours = row.get("ours_us", row.get("machine_us"))
        lines.append(
            f"| {row['case']} | {row['chains']} | {ours:.1f} | {row['numpyro_us']:.1f} | "
            f"{row['ours/numpyro']:.2f} | {row['pyro/ours']:.0f} |"
        )
    return "\n".join([*lines, "", script("speed").table(records_of("speed"))])


def gradients() -> Records:
    """The last comparison of each model and number of chains with both peers."""
    rows = [
        row
        for row in records_of("speed", "nuts.jsonl")
        if {"ours/numpyro", "pyro/ours"} <= row.keys()
    ]
    return last_of_each(rows, "case", "chains")


def posteriordb() -> str:
    """A row per reference posterior; sbibm's tasks by method; targets of inference-gym."""
    run = script("posteriordb")
    names = ("records.jsonl", "sbibm.jsonl", "gym.jsonl")
    tables = zip(
        (run.table, run.sbibm_table, run.gym_table),
        names,
        strict=True,
    )
    return "\n\n".join(table(records_of("posteriordb", name)) for table, name in tables)


def evidence() -> str:
    """Log evidence by SMC beside exact values."""
    return script("evidence").table(list(records_of("evidence")))


def svi_against_mcmc() -> str:
    """Whether chains converge on the study's points, and the uncertainty in the gap over fresh data."""
    run = script("svi_against_mcmc")
    rows = list(records_of("svi_against_mcmc"))
    return f"{run.chain_table(rows)}\n\n{run.gap_table(rows)}"


def tables() -> str:
    """Two tables beside bde's published numbers; the regressor's default beside CatBoost, and on small tables."""
    run = script("tables")
    names = ("records.jsonl", "boosting.jsonl", "small.jsonl")
    tables = zip(
        (run.table, run.beside_boosting, run.small_table),
        names,
        strict=True,
    )
    return "\n\n".join(table(records_of("tables", name)) for table, name in tables)


def learning() -> str:
    """An updated posterior that chooses, beside Gaussian processes and chance."""
    return script("learning").table(list(records_of("learning")))


def uci() -> str:
    """The five small sets by every method, the large ones by those that finish; every cell is filled."""
    from uci.rules import RULES, claims, markdown, published

    rows = records_of("uci")
    texts = []
    small = ("boston", "concrete", "energy", "wine", "yacht")
    large = ("kin8nm", "naval", "power")
    for names in (small, large):
        of_sets = [row for row in rows if row["dataset"] in names]
        filled = _methods_of_all(of_sets, names, ("linear", *RULES))
        of_methods = [row for row in of_sets if row["method"] in filled]
        for metric in ("log_density", "rmse", "cpu_seconds"):
            texts.append(markdown(of_methods, metric, filled, published()))
    texts.append("\n".join(f"- {claim}" for claim in claims(rows, published())))
    return "\n\n".join(texts)


def _methods_of_all(rows: Records, datasets: Sequence[str], methods: Sequence[str]) -> list[str]:
    """The methods that have a record of each of the data sets."""
    ran = {(row["method"], row["dataset"]) for row in rows}
    return [method for method in methods if ran.issuperset(product([method], datasets))]


def judge() -> str:
    """What passes by fault and number of rows, beside the best test's misses; and regressors of packages on tables."""
    rows = records_of("judge")
    faults = _faults_by_size([row for row in rows if "n" in row])
    packages = _regressors_by_table([row for row in rows if "table" in row])
    return "\n".join([*faults, "", *packages])


def _faults_by_size(cases: Records) -> list[str]:
    """Of right predictions those that do not pass, of each fault those that do, by number of rows."""
    sizes = sorted({row["n"] for row in cases})
    lines = [
        f"| planted | {' | '.join(f'{n:,} rows' for n in sizes)} |",
        "|---" * (1 + len(sizes)) + "|",
    ]
    for kind, fault in dict.fromkeys((row["kind"], row["fault"]) for row in cases):
        of_fault = [row for row in cases if (row["kind"], row["fault"]) == (kind, fault)]
        cells = []
        for n in sizes:
            of_size = [row for row in of_fault if row["n"] == n]
            cells.append(_judged(of_size, right=fault == "right"))
        lines.append(f"| {kind}: {fault} | {' | '.join(cells)} |")
    return lines


def _judged(rows: Records, right: bool) -> str:
    """Of right predictions how many warn or fail; of a fault how many pass, and what the best test would miss."""
    passed, warned, failed = _counts(rows)
    total = passed + warned + failed
    if right:
        return f"{warned} of {total} warn, {failed} fail"
    missed = 1.0 - sum(row["power"] * sum(row["counts"].values()) for row in rows) / total
    return f"{passed} of {total} pass ({missed:.1%})"


def _counts(rows: Records) -> tuple[int, int, int]:
    """How many predictions passed, warned and failed, over all rows."""
    passed = sum(row["counts"].get("pass", 0) for row in rows)
    warned = sum(row["counts"].get("warn", 0) for row in rows)
    failed = sum(row["counts"].get("fail", 0) for row in rows)
    return passed, warned, failed


def _regressors_by_table(rows: Records) -> list[str]:
    """A row per regressor and a column per table: status, the checks that spoke, and the ratio to the baseline."""
    names = list(dict.fromkeys(row["table"] for row in rows))
    lines = [f"| regressor | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for regressor in dict.fromkeys(row["regressor"] for row in rows):
        of_table = {row["table"]: row for row in rows if row["regressor"] == regressor}
        cells = []
        for name in names:
            row = of_table[name]
            reasons = f": {', '.join(row['seen'])}" if row["seen"] else ""
            cells.append(f"**{row['model']}**{reasons} ({row['ratio']:.2f})")
        lines.append(f"| {regressor} | {' | '.join(cells)} |")
    return lines


def verdict() -> str:
    """Status by kind of case."""
    lines = ["| cases | pass | warn | fail |", "|---|---|---|---|"]
    for name, rows in verdicts().items():
        statuses = [row["status"] for row in rows]
        counts = map(statuses.count, ("pass", "warn", "fail"))
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def verdicts() -> dict[str, Records]:
    """The cases of the verdict's study, right draws and planted faults."""
    rows = records_of("verdict")
    worse = {"pass": 0, "warn": 1, "fail": 2}
    sick = [row for row in rows if not row["healthy"]]
    return {
        "right draws": [row for row in rows if row["healthy"]],
        "planted faults": sick,
        "planted faults, with `pb.audit`": [
            row
            | {
                "status": max(
                    row["status"],
                    row["audit"],
                    key=worse.__getitem__,
                )
            }
            for row in sick
        ],
    }


def newest() -> str:
    """Versions, tests and times of the newest environment beside the pinned one."""
    return script("newest").table(records_of("newest"))


CLAIMS: dict[str, Callable[[], str]] = {
    claim.__name__: claim
    for claim in (
        speed,
        posteriordb,
        evidence,
        svi_against_mcmc,
        tables,
        learning,
        uci,
        verdict,
        judge,
        newest,
    )
}


# -- headline numbers ------------------------------------------------------------------------------------------------


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
    outcomes = [row["outcome"] for row in records_of("posteriordb")]
    right = outcomes.count("right")
    silent = outcomes.count("WRONG")
    return (
        "posteriordb",
        "Reference posteriors (posteriordb, radon) right at the defaults; wrong without a warning",
        f"{right} of {len(outcomes)} runs; {silent}",
    )


def _headline_of_evidence() -> Number:
    exact = [
        row for row in records_of("evidence") if row["way"] == "SMC" and row["exact"] is not None
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
    from uci.rules import beats_floor, best_published, published

    cells = beats_floor(records_of("uci"))
    best = best_published(records_of("uci"), published())
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
    for row in records_of("svi_against_mcmc"):
        of_two_clusters = row["part"] == "gaps" and row["data"] == "two_clusters"
        if of_two_clusters and row["method"] == method and row["gap_ratio"]:
            ratios.append(row["gap_ratio"])
    return ratios


def _headline_of_tables() -> list[Number]:
    """One number, or none where there is a single seed."""
    scored = [r for r in records_of("tables") if r["table"] == "airfoil" and "nll" in r]
    # of a normal with the predictive's mean and sd, as published
    nll = [row["nll"] for row in last_of_each(scored, "seed")]
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


def readme() -> str:
    """NUTS beside NumPyro with four chains."""
    lines = ["| model | time per gradient / NumPyro's | Pyro's / ours |", "|---|---|---|"]
    rows = [row for row in gradients() if row["chains"] == 4]
    lines += [
        f"| {row['case']} | {row['ours/numpyro']:.2f} | {row['pyro/ours']:.0f} |" for row in rows
    ]
    return "\n".join(lines)


def right_of_all() -> str:
    """Runs of NUTS on posteriordb by outcome."""
    runs = records_of("posteriordb")
    outcomes = [row["outcome"] for row in runs]
    names = {row["name"] for row in runs}
    counts = [len(names), len(runs), *map(outcomes.count, ("right", "warned", "WRONG"))]
    head = "| reference posteriors | runs | right | wrong, and warned of | wrong, and silent |\n|---|---|---|---|---|"
    return f"{head}\n| {' | '.join(map(str, counts))} |"


def gaps() -> str:
    """Epistemic sd in the gap over that at the data, on fresh data sets."""
    return script("svi_against_mcmc").gap_table(list(records_of("svi_against_mcmc")))


PAPER = {
    "nuts": readme,
    "posteriordb": right_of_all,
    "verdict": verdict,
    "gaps": gaps,
}


def written(path: Path, table: str, start: str = START) -> None:
    """Put a table between the marker ``start`` of a page and the end that follows."""
    before, marker, from_table = path.read_text(encoding="utf-8").partition(start)
    _, end, after = from_table.partition(END)
    if not end or start in after:
        raise ValueError(f"{path} needs one {start} and an {END} behind it")
    path.write_text(f"{before}{marker}\n{table}\n{end}{after}", encoding="utf-8")


def main() -> None:
    """Write every page."""
    for claim, table in CLAIMS.items():
        written(HERE / claim / "claim.md", table())
    written(HERE / "results" / "README.md", headline())
    written(HERE.parent / "README.md", readme())
    sentence = script("newest").sentence(records_of("newest"))
    written(HERE.parent / "README.md", sentence, "<!-- versions -->")
    for name, table in PAPER.items():
        written(HERE.parent / "docs" / "paper.md", table(), f"<!-- table: {name} -->")


if __name__ == "__main__":
    main()
