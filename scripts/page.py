"""Write the tables of the claims, of the paper and of the headline page from the records. Numbers are never typed.

python scripts/page.py            # rewrites */claim.md, results/README.md and docs/paper.md
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
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
    return list({tuple(row.get(key) for key in keys): row for row in rows}.values())


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
    tables = zip((run.table, run.sbibm_table, run.gym_table), names, strict=True)
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
    tables = zip((run.table, run.beside_boosting, run.small_table), names, strict=True)
    return "\n\n".join(table(records_of("tables", name)) for table, name in tables)


def learning() -> str:
    """An updated posterior that chooses, beside Gaussian processes and chance."""
    return script("learning").table(list(records_of("learning")))


def uci() -> str:
    """The five small sets by every method, the large ones by those that finish; every cell is filled."""
    from uci.rules import RULES, claims, markdown, published

    rows = records_of("uci")
    parts = []
    small = ("boston", "concrete", "energy", "wine", "yacht")
    large = ("kin8nm", "naval", "power")
    for names in (small, large):
        own = [row for row in rows if row["dataset"] in names]
        ran = {(row["method"], row["dataset"]) for row in own}
        filled = [
            method for method in ("linear", *RULES) if {(method, name) for name in names} <= ran
        ]
        own = [row for row in own if row["method"] in filled]
        parts += [
            markdown(own, metric, filled, published())
            for metric in ("log_density", "rmse", "cpu_seconds")
        ]
    return "\n\n".join([*parts, "\n".join(f"- {claim}" for claim in claims(rows, published()))])


def judge() -> str:
    """What passes by fault and number of rows, beside the best test's misses; and regressors of packages on tables."""
    rows = records_of("judge")
    cases = [row for row in rows if "n" in row]
    tables = [row for row in rows if "table" in row]
    sizes = sorted({row["n"] for row in cases})
    lines = [
        f"| planted | {' | '.join(f'{n:,} rows' for n in sizes)} |",
        "|---" * (1 + len(sizes)) + "|",
    ]
    for kind, fault in dict.fromkeys((row["kind"], row["fault"]) for row in cases):
        own = [
            [row for row in cases if (row["kind"], row["fault"], row["n"]) == (kind, fault, n)]
            for n in sizes
        ]
        cells = []
        for each in own:
            counts = [
                sum(row["counts"].get(s, 0) for row in each) for s in ("pass", "warn", "fail")
            ]
            total = sum(counts)
            missed = 1.0 - sum(row["power"] * sum(row["counts"].values()) for row in each) / total
            right = f"{counts[1]} of {total} warn, {counts[2]} fail"
            cells.append(
                right if fault == "right" else f"{counts[0]} of {total} pass ({missed:.1%})"
            )
        lines.append(f"| {kind}: {fault} | {' | '.join(cells)} |")
    names = list(dict.fromkeys(row["table"] for row in tables))
    lines += ["", f"| regressor | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for regressor in dict.fromkeys(row["regressor"] for row in tables):
        of_table = {row["table"]: row for row in tables if row["regressor"] == regressor}
        scored = [of_table[name] for name in names]
        cells = [
            f"**{r['model']}**{': ' * bool(r['seen'])}{', '.join(r['seen'])} ({r['ratio']:.2f})"
            for r in scored
        ]
        lines.append(f"| {regressor} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict() -> str:
    """Status by kind of case."""
    lines = ["| cases | pass | warn | fail |", "|---|---|---|---|"]
    for name, rows in verdicts().items():
        counts = [
            sum(row["status"] == status for row in rows) for status in ("pass", "warn", "fail")
        ]
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
            row | {"status": max(row["status"], row["audit"], key=worse.__getitem__)}
            for row in sick
        ],
    }


def newest() -> str:
    """Versions, tests and times of the newest environment beside the pinned one."""
    return script("newest").table(records_of("newest"))


CLAIMS: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (
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


def headline() -> str:
    """Headline numbers, each linked to its claim."""
    from uci.rules import beats_floor, best_published, published

    ratios = [row["ours/numpyro"] for row in gradients()]
    pyro = [row["pyro/ours"] for row in gradients()]
    runs = records_of("posteriordb")
    right = sum(row["outcome"] == "right" for row in runs)
    silent = sum(row["outcome"] == "WRONG" for row in runs)
    exact = [
        row for row in records_of("evidence") if row["way"] == "SMC" and row["exact"] is not None
    ]
    off = max(abs(row["log_evidence"] - row["exact"]) for row in exact)
    cells = beats_floor(records_of("uci"))
    best = best_published(records_of("uci"), published())
    gaps = [
        row
        for row in records_of("svi_against_mcmc")
        if row["part"] == "gaps" and row["data"] == "two_clusters"
    ]
    opened = {
        m: [row["gap_ratio"] for row in gaps if row["method"] == m and row["gap_ratio"]]
        for m in ("nuts", "svi")
    }
    healthy, sick, audited = verdicts().values()
    by_table = last_of_each(
        [r for r in records_of("tables") if r["table"] == "airfoil" and "nll" in r], "seed"
    )
    nll = [
        row["nll"] for row in by_table
    ]  # of a normal with the predictive's mean and sd, as published
    rival = json.loads((HERE / "tables" / "published.json").read_text(encoding="utf-8"))["rows"]
    theirs = next(
        row["nll"] for row in rival if (row["table"], row["method"]) == ("airfoil", "BDE")
    )
    rows = [
        (
            "speed",
            "Time of a NUTS gradient, as a share of NumPyro's (median over models and chains; range)",
            f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
        ),
        ("speed", "Pyro's time of a gradient over ours", f"{min(pyro):.0f}–{max(pyro):.0f} ×"),
        (
            "posteriordb",
            "Reference posteriors (posteriordb, radon) right at the defaults; wrong without a warning",
            f"{right} of {len(runs)} runs; {silent}",
        ),
        (
            "evidence",
            f"Largest error of SMC's log evidence ({len(exact)} runs with an exact value)",
            f"{off:.2f} nats",
        ),
        (
            "verdict",
            "Right draws that fail; planted faults that pass; that pass `pb.audit` too",
            f"{sum(r['status'] == 'fail' for r in healthy)} of {len(healthy)}; "
            + "; ".join(
                f"{sum(r['status'] == 'pass' for r in rows)} of {len(rows)}"
                for rows in (sick, audited)
            ),
        ),
        (
            "uci",
            "UCI sets on which our best method reaches the best published log density; cells clearly above linear",
            f"{sum(ours >= theirs for _, ours, theirs in best.values())} of {len(best)}; "
            f"{sum(clear for _, clear in cells.values())} of {len(cells)}",
        ),
        (
            "svi_against_mcmc",
            f"Epistemic sd in a gap over that at the data, NUTS and mean-field SVI ({len(opened['nuts'])} data sets)",
            " and ".join(
                f"{fmean(v):.1f} ± {stdev(v) / len(v) ** 0.5:.1f}" for v in opened.values()
            ),
        ),
    ]
    if len(nll) > 1:
        text = f"{fmean(nll):.3f} ± {stdev(nll) / len(nll) ** 0.5:.3f} ({len(nll)} seeds; bde's {theirs})"
        rows.append(
            ("tables", "Negative log likelihood on the airfoil table", text.replace("-", "−"))
        )
    lines = ["| | measured | how |", "|---|---|---|"]
    lines += [
        f"| {what} | **{number}** | [claim](../{claim}/claim.md) |" for claim, what, number in rows
    ]
    return "\n".join(lines)


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


PAPER = {"nuts": readme, "posteriordb": right_of_all, "verdict": verdict, "gaps": gaps}


def written(path: Path, table: str, start: str = START) -> None:
    """Put a table between the marker ``start`` of a page and the end that follows."""
    before, marker, rest = path.read_text(encoding="utf-8").partition(start)
    _, end, after = rest.partition(END)
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
