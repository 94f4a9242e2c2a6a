"""Write the tables of the README and of the results page from the results files. Numbers are never typed.

    python scripts/readme_tables.py            # rewrite README.md and results/README.md
    python scripts/readme_tables.py --check    # say whether they are up to date, change nothing

A marker is a line ``<!-- table: NAME -->``, its end ``<!-- end -->``; the names are in TABLES below.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from types import ModuleType

from scipy.stats import spearmanr
from scipy.stats import t as student_t

from pyrobnn.studies.uci import RULES, checks, compare_with_published, fits, read_published, read_records
from pyrobnn.studies.uci import tables as uci_tables

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
import sweeps  # noqa: E402

DOCS = HERE.parent / "docs"
PAGES = [
    HERE.parent / "README.md",
    HERE / "results" / "README.md",
    DOCS / "contributing.md",
    DOCS / "install.md",
    DOCS / "howto" / "scoringbench.md",
    DOCS / "references.md",
    DOCS / "paper.md",
]
#: of a cell: mark → what it says
STALE = {
    " †": "† measured with earlier settings than today's",
    " ‡": sweeps.OLDER,
}
#: of a cell of earlier code that random cells made again speak for
CHECKED = " §"
#: splits below which a claim says less than its standard errors
FEW = 5
#: checks whose values fall where something is wrong; cases of which a rank correlation is told
FALLING, FEWEST = ("ess_function", "bfmi", "log_likelihood_rows"), 20
MARKED = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def uci_table(metric: str, published: bool) -> str:
    """One metric of the UCI benchmark."""
    records = uci_records()
    datasets = sorted({record["dataset"] for record in records})
    columns = read_published(HERE / "published_uci.json") if published else None
    marks = uci_marks(records)
    table = uci_tables.markdown(records, metric, [fits.FLOOR, *RULES], datasets, columns, marks)
    told = [text for mark, text in STALE.items() if mark in marks.values()]
    if CHECKED in marks.values():
        told.append(f"{CHECKED.strip()} {checks.MEANING}")
    if counts := uci_checked(records):
        told.append(f"Cells that were made again by today's code: {'; '.join(counts)}.")
    return "\n\n".join([table, *told])


def uci_marks(records: list[dict]) -> dict[tuple[str, str], str]:
    """What is put behind a cell, by data set and method, where it is of another day."""
    marks = {}
    for record in records:
        method, cell = record["method"], (record["dataset"], record["method"])
        if record["rule"] != fits.rule_id(method):
            marks[cell] = " †"
        elif record.get("code") != fits.code_of(method):
            found = uci_evidence(record["dataset"], method)
            marks.setdefault(cell, CHECKED if found is not None and found.passed else " ‡")
    return marks


def uci_evidence(dataset: str, method: str) -> checks.Checked | None:
    """What cells of a method that were made again by today's code say about those of a data set."""
    recorded = read_records(HERE / "results" / "uci_checks.jsonl")
    return checks.evidence(recorded, dataset, method, fits.rule_id(method), fits.code_of(method))


def uci_checked(records: list[dict]) -> list[str]:
    """A line for each method of which today's code made cells again."""
    cells = dict.fromkeys((record["method"], record["dataset"]) for record in records)
    told = dict.fromkeys(
        found.describe(method)
        for method, dataset in cells
        if (found := uci_evidence(dataset, method)) is not None
    )
    return list(told)


def uci_records() -> list[dict]:
    """Results of today's settings; of a method and data set without any, those of the settings last measured with."""
    # of repeated work the last
    records = list({fits.key(r): r for r in read_records(HERE / "results" / "uci.jsonl")}.values())
    shown: dict[tuple[str, str], str] = {}
    for record in records:
        cell = record["dataset"], record["method"]
        if shown.get(cell) != fits.rule_id(record["method"]):
            shown[cell] = record["rule"]
    return [record for record in records if shown[record["dataset"], record["method"]] == record["rule"]]


def uci_targets() -> str:
    """What should hold on the UCI sets, and whether it does."""
    records = uci_records()
    every = compare_with_published(records, read_published(HERE / "published_uci.json"))
    targets, marks = [t for t in every if t.met is not None], uci_marks(records)
    floor = [t for t in targets if "linear floor" in t.claim]
    held = sum(bool(t.met) for t in floor)
    splits: dict[tuple[str, str], set[int]] = {}
    for record in records:
        splits.setdefault((record["dataset"], record["method"]), set()).add(record["split"])
    few = sum(len(splits[t.dataset, t.method] & splits[t.dataset, fits.FLOOR]) < FEW for t in floor)
    rows = [
        f"| all | a method beats the linear floor by more than 5 standard errors | | {held} of {len(floor)} pairs of "
        f"method and data that have {uci_tables.FEWEST} splits or more, {few} of them fewer than {FEW}; the others "
        "follow |"
    ]
    shown = [t for t in targets if t not in floor or not t.met]
    rows += [
        f"| {t.dataset} | {t.claim} | {'yes' if t.met else '**no**'} | "
        f"{t.evidence}{marks.get((t.dataset, t.method), '')} |"
        for t in shown
    ]
    used = {marks.get((t.dataset, t.method)) for t in shown}
    told = [text for mark, text in STALE.items() if mark in used]
    if CHECKED in used:
        told.append(
            f"{CHECKED.strip()} made by earlier code and checked by today's, as said below the first table"
        )
    told.append(
        "The best method has the best mean over the splits it has: where they are few, they may be easy ones."
    )
    if few:  # by Student's t
        once = 1 / student_t.sf(5, uci_tables.FEWEST - 1)
        told.append(
            f"Of {uci_tables.FEWEST} splits 5 standard errors are exceeded by chance once in {once:.0f} times."
        )
    if single := [t.dataset for t in every if t.met is None]:
        names = ", ".join(f"{single.count(name)} of {name}" for name in dict.fromkeys(single))
        told.append(
            f"{len(single)} claims rest on fewer than {uci_tables.FEWEST} splits so far and are not judged: {names}."
        )
    return "\n".join(
        ["| data | claim | holds | numbers |", "|---|---|---|---|", *rows, "", "\n\n".join(told)]
    )


def uci_heads() -> str:
    """Nets whose noise depends on the input, beside the published columns of that kind."""
    heads = _script("benchmark_heads")
    records = read_records(HERE / "results" / "heads.jsonl")
    code = {name: fits.code_of(name, heads.METHODS) for name in heads.METHODS}
    marks = {(r["dataset"], r["method"]): " ‡" for r in records if r["code"] != code[r["method"]]}
    return "\n\n".join([heads.tables(records, marks), *([STALE[" ‡"]] if marks else [])])


def uci_rest() -> str:
    """What is not run by today's settings, and what it would take."""
    records, gradients = (read_records(HERE / "results" / f"uci{end}.jsonl") for end in ("", "_gradients"))
    return _script("benchmark_uci").rest_table(records, gradients)


def uci_nuts() -> str:
    """What NUTS took or would take on every set."""
    gradients = read_records(HERE / "results" / "uci_gradients.jsonl")
    records = uci_records()
    return _script("benchmark_uci").chains_table(records, gradients, uci_marks(records))


def install_records() -> list[dict]:
    """The last run of each Python with each choice of versions."""
    records = {(r["python"], r["asked"]): r for r in read_records(HERE / "results" / "install.jsonl")}
    return [record for _, record in sorted(records.items())]


def install_table() -> str:
    """Where the wheel was installed and used."""
    tried = ("compare", "report", "predict", "estimator")
    lines = [
        f"| Python | versions | torch | NumPy | ArviZ | {' | '.join(tried)} | commit |",
        "|---" * 10 + "|",
    ]
    for record in install_records():
        has, used = record["versions"], " | ".join(record["used"][name] for name in tried)
        found = f"{has['torch']} | {has['numpy']} | {has['arviz-base']}"
        lines.append(
            f"| {record['python']} | {record['asked']} | {found} | {used} | {record['commit'][:7]} |"
        )
    return "\n".join(lines)


def download_table() -> str:
    """What an installation downloads, in MB, and takes on disk, and what it would have with former requirements."""
    lines = [
        "| Python | versions | download, MB | torch | GPU libraries | torchvision | no longer | disk, GB |"
    ]
    lines.append("|---" * 8 + "|")
    records = install_records()
    for record in records:
        parts = record["download_parts_mb"]
        cells = [f"{parts[name]:,.1f}" for name in ("torch", "GPU libraries", "torchvision")]
        cells += [f"{record['dropped_mb']:,.1f}", f"{record['megabytes'] / 1000:.1f}"]
        whole = f"{record['download_mb']:,.0f}"
        lines.append(f"| {record['python']} | {record['asked']} | {whole} | {' | '.join(cells)} |")
    sizes = records[-1]["built_bytes"]
    stored = sum(
        file.stat().st_size for file in (HERE.parent / "pyrobnn" / "references" / "stored").glob("*.npz")
    )
    lines += [
        "",
        f"The wheel itself has {sizes['wheel'] / 1e6:.1f} MB, of which the stored posteriors of `pb.references` are "
        f"{stored / 1e6:.1f} MB, the source archive {sizes['sdist'] / 1e6:.1f} MB.",
    ]
    return "\n".join(lines)


def verdict_rows() -> list[dict]:
    """Cases of the verdicts' own study."""
    return read_records(HERE / "results" / "verdicts.jsonl")


def verdict_table() -> str:
    """How verdicts end on healthy and on spoilt posteriors, by kind, and which check saw most of them."""
    lines = ["| | kind | cases | pass | warn | fail | seen by |", "|---|---|---|---|---|---|---|"]
    rows = verdict_rows()
    for healthy in (True, False):
        for kind in dict.fromkeys(row["kind"] for row in rows if row["healthy"] == healthy):
            cases = [row for row in rows if row["kind"] == kind]
            share = [fmean(row["status"] == status for row in cases) for status in ("pass", "warn", "fail")]
            seen = Counter(
                name
                for row in cases
                for name, (status, _) in row["checks"].items()
                if status in ("warn", "fail")
            )
            by = ", ".join(f"`{name}` {count / len(cases):.0%}" for name, count in seen.most_common(2))
            numbers = " | ".join(f"{each:.1%}" for each in share)
            lines.append(
                f"| {'healthy' if healthy else 'spoilt'} | {kind} | {len(cases)} | {numbers} | {by} |"
            )
    return "\n".join(lines)


def verdict_summary() -> str:
    """How verdicts end on all healthy and on all spoilt posteriors, and the kind of fault that passes most often."""
    lines = ["| | kinds | cases | pass | warn | fail |", "|---|---|---|---|---|---|"]
    rows = verdict_rows()
    for healthy, net in itertools.product((True, False), (False, True)):
        cases = [row for row in rows if row["healthy"] == healthy and row["kind"].startswith("net: ") == net]
        kinds = len({row["kind"] for row in cases})
        shares = [fmean(row["status"] == status for row in cases) for status in ("pass", "warn", "fail")]
        what = f"{'healthy' if healthy else 'spoilt'}, {'networks' if net else 'linear models'}"
        lines.append(f"| {what} | {kinds} | {len(cases)} | {' | '.join(f'{each:.1%}' for each in shares)} |")
    return "\n".join(lines)


def check_table() -> str:
    """Of each check that ever spoke: how often on healthy posteriors, and of which spoilt kinds it sees most."""
    rows = verdict_rows()
    names = sorted({name for row in rows for name in row["checks"]})
    lines = [
        "| check | healthy: warns | fails | kinds that it sees in half of the cases |",
        "|---|---|---|---|",
    ]
    for name in names:
        judged = [row for row in rows if row["healthy"] and name in row["checks"]]
        kinds = [
            kind
            for kind in dict.fromkeys(row["kind"] for row in rows if not row["healthy"])
            if fmean(_spoke(row, name) for row in rows if row["kind"] == kind) >= 0.5
        ]
        rates = [
            fmean(row["checks"][name][0] == status for row in judged) if judged else 0.0
            for status in ("warn", "fail")
        ]
        if kinds or any(rates):
            lines.append(f"| `{name}` | {rates[0]:.1%} | {rates[1]:.1%} | {', '.join(kinds)} |")
    return "\n".join(lines)


def _spoke(row: dict, name: str) -> bool:
    return row["checks"].get(name, ["pass"])[0] in ("warn", "fail")


def distance_table() -> str:
    """Of each check that needs no reference: how its value goes with the true distance of a net's function."""
    rows = [row for row in verdict_rows() if row.get("distance") is not None and "beside" not in row["kind"]]
    lines = ["| check | cases | rank correlation with the distance of the function |", "|---|---|---|"]
    found = []
    for name in sorted({name for row in rows for name in row["checks"]}):
        pairs = [
            (_badness(name, row["checks"][name][1]), row["distance"])
            for row in rows
            if row["checks"].get(name, [None, None])[1] is not None
        ]
        if len(pairs) >= FEWEST and len({value for value, _ in pairs}) > 1:
            found.append((float(spearmanr(*zip(*pairs, strict=True)).statistic), len(pairs), name))
    lines += [f"| `{name}` | {count} | {rho:+.2f} |" for rho, count, name in sorted(found, reverse=True)]
    return "\n".join(lines)


def _badness(name: str, value: float) -> float:
    """A check's value as a number that grows with what is wrong."""
    if name == "virial":  # 1 where nothing is; it may be negative
        return abs(math.log(max(value, 1e-3)))
    if name == "coverage_90":
        return abs(value - 0.9)
    return -value if name in FALLING else value


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    del sys.modules[name]
    return module


def references_table() -> str:
    """The stored reference posteriors."""
    return _script("make_references").table()


def nuts_table() -> str:
    """Cost of a gradient and effective draws per second, each from the last run that measured it."""
    latest: dict[tuple[str, int], dict] = {}
    for row in read_records(HERE / "results" / "nuts.jsonl"):
        latest.setdefault((row["case"], row["chains"]), {}).update(row)
    lines = [
        "| model | chains | pyrobnn µs | NumPyro µs | ratio | Pyro / pyrobnn | machine / bare gradient "
        "| ESS per s / NumPyro's | compile s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (case, chains), r in sorted(latest.items()):
        ess = f"{r['ess per s / numpyro']:.1f}" if "ess per s / numpyro" in r else ""
        lines.append(
            f"| {case} | {chains} | {r['machine_us']:.1f} | {r['numpyro_us']:.1f} | {r['ours/numpyro']:.2f} "
            f"| {r['pyro/ours']:.0f} | {r['machine/bare']:.2f} | {ess} | {r['compile_s']:.1f} |"
        )
    return "\n".join(lines)


def nuts_summary() -> str:
    """Ratios to NumPyro at the usual four chains."""
    lines = [
        "| model | time per gradient / NumPyro's | effective draws per second / NumPyro's |",
        "|---|---|---|",
    ]
    latest: dict[str, dict] = {}
    for row in read_records(HERE / "results" / "nuts.jsonl"):
        if row["chains"] == 4:
            latest.setdefault(row["case"], {}).update(row)
    for case, r in sorted(latest.items()):
        lines.append(f"| {case} | {r['ours/numpyro']:.2f} | {r['ess per s / numpyro']:.1f} |")
    return "\n".join(lines)


def warmup_table() -> str:
    """Thousands of gradients per chain until 400 effective draws, by length of the warm-up."""
    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for row in read_records(HERE / "results" / "warmup.jsonl"):
        found.setdefault((row["case"], row["chains"]), {}).setdefault(row["warmup"], []).append(
            row["steps_to_400"]
        )
    lengths = sorted({length for costs in found.values() for length in costs})
    lines = ["| model | chains | " + " | ".join(f"warm-up {length}" for length in lengths) + " |"]
    lines.append("|---|---|" + "---|" * len(lengths))
    for (case, chains), costs in sorted(found.items()):
        cells = [f"{fmean(costs[n]) / 1e3:.1f}" if n in costs else "" for n in lengths]
        lines.append(f"| {case} | {chains} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def metric_table() -> str:
    """Effective draws per gradient of each mass matrix, beside the diagonal's."""
    found: dict[str, dict[str, dict[int, dict]]] = {}
    for row in read_records(HERE / "results" / "metric.jsonl"):
        found.setdefault(row["case"], {}).setdefault(row["mass_matrix"], {})[row["seed"]] = row
    lines = [
        "| case | seeds | `diag`: effective draws per 1000 gradients | `low_rank` / `diag` | `auto` / `diag` "
        "| right, `diag` | right, `low_rank` | warm-up gradients / `diag`'s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    key = "ess per 1000 gradients"
    ratios: dict[str, float] = {}
    for case, forms in sorted(found.items()):
        shared = sorted(set.intersection(*map(set, forms.values())))
        diag, low, auto = (
            [forms[form][seed] for seed in shared] if form in forms else []
            for form in ("diag", "low_rank", "auto")
        )
        others = [rows for rows in (low, auto) if rows]
        if not (diag and others):
            continue
        base = median(row[key] for row in diag)
        ratios[case] = median(row[key] for row in others[0]) / base
        cells = [str(len(shared)), f"{base:.3g}"]
        cells += [f"{median(row[key] for row in rows) / base:.2f}" if rows else "" for rows in (low, auto)]
        for rows in (diag, low):
            judged = [row["right"] for row in rows if "right" in row]
            cells.append(f"{sum(judged)} of {len(judged)}" if judged else "")
        warmups = (median(row["warmup gradients"] for row in rows) for rows in (others[0], diag))
        lines.append(f"| {case} | {' | '.join(cells)} | {next(warmups) / next(warmups):.2f} |")
    worse = ", ".join(case for case, ratio in ratios.items() if ratio < 0.95)
    lines += [
        "",
        f"The median of {len(ratios)} ratios is {median(ratios.values()):.1f}. Below 0.95: {worse or 'none'}.",
    ]
    return "\n".join(lines)


def mams_table() -> str:
    """Effective draws per gradient of MAMS and of HMC at their best lengths, beside those of NUTS."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in read_records(HERE / "results" / "mams.jsonl"):
        for where in row["nuts"]:
            found.setdefault((row["case"], where), []).append(row)
    lines = [
        "| case | slowest value | seeds | NUTS: effective draws per 1000 gradients "
        "| MAMS / NUTS | at the share | HMC / NUTS | at the share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (case, where), rows in found.items():
        base = fmean(row["nuts"][where] for row in rows)
        cells = [case, where, str(len(rows)), f"{base:.3g}"]
        for sampler in ("mams", "hmc"):
            means = {share: fmean(row[sampler][share][where] for row in rows) for share in rows[0][sampler]}
            share = max(means, key=lambda each: means[each])
            cells += [f"{means[share] / base:.2f}", share]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def length_table() -> str:
    """Effective draws per gradient of HMC whose warm-up finds the length of its paths, beside those of NUTS."""
    found: dict[str, dict[str, list[dict]]] = {}
    for row in read_records(HERE / "results" / "length.jsonl"):
        found.setdefault(row["case"], {}).setdefault(row["sampler"], []).append(row)
    lines = [
        "| case | slowest value | seeds | NUTS: effective draws per 1000 gradients | HMC / NUTS | of squares "
        "| with the warm-up's gradients | leapfrogs a draw, NUTS | HMC | largest R-hat, NUTS | HMC |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, runs in found.items():
        if len(runs) < 2:
            continue
        nuts, hmc = runs["nuts"], runs["hmc"]
        for where in nuts[0]["ess"]:

            def rate(rows: list[dict], key: str, warmup: bool = False, where: str = where) -> float:
                costs = (row["gradients"] + warmup * row["warmup gradients"] for row in rows)
                return 1000 * fmean(row[key][where] / cost for row, cost in zip(rows, costs, strict=True))

            cells = [case, where, str(min(len(nuts), len(hmc))), f"{rate(nuts, 'ess'):.3g}"]
            for asked in (("ess",), ("ess of squares",), ("ess", True)):
                cells.append(f"{rate(hmc, *asked) / rate(nuts, *asked):.2f}")
            cells += [f"{fmean(row['leapfrogs'] for row in rows):.0f}" for rows in (nuts, hmc)]
            cells += [f"{max(row['rhat'][where] for row in rows):.3f}" for rows in (nuts, hmc)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def svi_table() -> str:
    """Cost of a step."""
    latest = {row["case"]: row for row in read_records(HERE / "results" / "svi.jsonl")}
    lines = [
        "| model | pyrobnn µs | NumPyro µs | ratio | TyXe / pyrobnn | compile s |",
        "|---|---|---|---|---|---|",
    ]
    for case, r in latest.items():
        lines.append(
            f"| {case} | {r['pyrobnn']:.0f} | {r['numpyro']:.0f} | {r['pyrobnn'] / r['numpyro']:.2f} "
            f"| {r['tyxe'] / r['pyrobnn']:.0f} | {r['compile']:.1f} |"
        )
    return "\n".join(lines)


def laplace_table() -> str:
    """Seconds and memory beside laplace-torch's."""
    found = json.loads((HERE / "results" / "laplace.json").read_text(encoding="utf-8"))
    lines = [
        "| case | fit s | fit and tune s | predict s | memory MB |",
        "|---|---|---|---|---|",
    ]
    for case, both in found.items():
        ours, theirs = both.get("pyrobnn") or {}, both.get("laplace-torch") or {}
        cells = []
        for name in ("fit", "fit_and_tune", "predict", "memory_mb"):
            if name not in ours:
                cells.append("")
                continue
            peer = f" / > {theirs['timeout']:.0f}" if "timeout" in theirs and name == "fit_and_tune" else ""
            if name in theirs:
                peer = f" / {theirs[name]:.3g} = {theirs[name] / ours[name]:.1f}×"
            cells.append(f"{ours[name]:.3g}{peer}")
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu_table() -> str:
    """What a GPU did beside the CPU of its machine, or that none has run it."""
    path = HERE / "results" / "gpu.json"
    if not path.exists():
        return "No GPU has run this yet: `make gpu` on a machine with CUDA writes `scripts/results/gpu.json`."
    return gpu_report(json.loads(path.read_text(encoding="utf-8")))


def gpu_report(record: dict) -> str:
    """One line on the machine, one per part, a table of NUTS by number of chains, and the target."""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    lines = [f"{record['device']}, {record['cpu_cores']} CPU cores; {versions}.", ""]
    lines += [
        "| part | status | measurements | failed or left out | seconds | commit |",
        "|---|---|---|---|---|---|",
    ]
    for name, part in record["parts"].items():
        bad = sum("error" in row or "left_out" in row for row in part["rows"])
        lines.append(
            f"| {name} | {part['status']} | {len(part['rows'])} | {bad} | {part['seconds']:.0f} | {part['commit']} |"
        )
    rows = record["parts"].get("nuts", {}).get("rows", [])
    measured = [row for row in rows if "gradients_per_s" in row]
    if measured:
        lines += ["", "| NUTS, 1-50-1 | gradients per s | ESS per s | compile s |", "|---|---|---|---|"]
    for row in measured:
        ess = f"{row['ess_per_s']:.1f}" if "ess_per_s" in row else ""
        seconds = f"{row['compile_s']:.1f}" if "compile_s" in row else ""
        lines.append(f"| {row['key']} chains | {row['gradients_per_s']:,.0f} | {ess} | {seconds} |")
    for name, keys in (
        ("svi", ("step_us",)),
        ("laplace", ("fit_s", "predict_s")),
        ("predict", ("cuda_per_s", "cpu_per_s", "largest_difference")),
        ("study", ("data", "fit_s", "accuracy", "log_density")),
    ):
        rows = [r for r in record["parts"].get(name, {}).get("rows", []) if keys[-1] in r]
        if rows:
            lines += ["", f"| {name} | " + " | ".join(keys) + " |", "|---" * (1 + len(keys)) + "|"]
        for row in rows:
            cells = [f"{row[k]:.4g}" if isinstance(row.get(k), float) else str(row.get(k, "")) for k in keys]
            lines.append(f"| {row['key']} | " + " | ".join(cells) + " |")
    word = {True: "holds", False: "**does not hold**", None: "was not measured"}
    for target in record["targets"]:
        ratio = "" if target["ratio"] is None else f" ({target['ratio']:.0f} ×)"
        lines += ["", f"Target: {target['claim']}: {word[target['met']]}{ratio}."]
    return "\n".join(lines)


def _of(script: str, records: str, function: str = "table") -> Callable[[], str]:
    """A table that a study's own script makes of its records."""
    return lambda: getattr(_script(script), function)(read_records(HERE / "results" / f"{records}.jsonl"))


TABLES: dict[str, Callable[[], str]] = {
    "gpu": gpu_table,
    "install": install_table,
    "download": download_table,
    "scoringbench": _of("benchmark_scoringbench", "scoringbench", "scoringbench"),
    "coverage": _of("record_coverage", "coverage"),
    "history": _of("benchmark_history", "history"),
    "peers": _of("benchmark_peers", "peers"),
    "uci-log-density": lambda: uci_table("log_density", published=True),
    "uci-rmse": lambda: uci_table("rmse", published=True),
    "uci-crps": lambda: uci_table("crps", published=False),
    "uci-coverage": lambda: uci_table("coverage", published=False),
    "uci-seconds": lambda: uci_table("cpu_seconds", published=False),
    "uci-targets": uci_targets,
    "uci-nuts": uci_nuts,
    "uci-rest": uci_rest,
    "uci-heads": uci_heads,
    "verdicts": verdict_table,
    "verdict-summary": verdict_summary,
    "verdict-checks": check_table,
    "verdict-distance": distance_table,
    "references": references_table,
    "scale": _of("benchmark_scale", "scale"),
    "ranks": _of("benchmark_ranks", "ranks"),
    "ranks-rows": _of("benchmark_ranks", "ranks", "table_of_rows"),
    "tables": _of("benchmark_tables", "tables"),
    "nuts": nuts_table,
    "nuts-summary": nuts_summary,
    "warmup": warmup_table,
    "posteriordb": _of("benchmark_posteriordb", "posteriordb"),
    "metric": metric_table,
    "mams": mams_table,
    "length": length_table,
    "modes": _of("benchmark_modes", "modes"),
    "evidence": _of("benchmark_evidence", "evidence"),
    "first-draw": _of("benchmark_first_draw", "first_draw"),
    "svi": svi_table,
    "laplace": laplace_table,
    "rows": _of("benchmark_rows", "rows"),
    "conformal": _of("benchmark_conformal", "conformal"),
    "conformal-uci": _of("benchmark_conformal", "conformal_uci", "uci_table"),
    "classification": _of("benchmark_classification", "classification"),
    "shift": _of("benchmark_classification", "classification", "shift_table"),
    "gap": _of("benchmark_gap", "gap"),
    "studies": _of("benchmark_studies", "studies"),
    "clusters-priors": _of("benchmark_clusters", "clusters", "prior_table"),
    "clusters-chains": _of("benchmark_clusters", "clusters", "chain_table"),
    "clusters-study": _of("benchmark_clusters", "clusters", "study_table"),
    "clusters-gaps": _of("benchmark_clusters", "clusters", "gap_table"),
    "clusters-methods": _of("benchmark_clusters", "clusters", "method_table"),
}


def fill(text: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """The text with every marked table written anew.

    Raises:
        ValueError: a marker with an unknown name.
    """

    def table(match: re.Match) -> str:
        name = match["name"]
        if name not in tables:
            raise ValueError(f"unknown table {name!r}: choose from {', '.join(tables)}")
        return f"<!-- table: {name} -->\n{tables[name]()}\n<!-- end -->"

    return MARKED.sub(table, text)


def main(argv: list[str] | None = None) -> int:
    """Fill the files; 1 with ``--check`` where one was out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=PAGES)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if tables are out of date"
    )
    options = parser.parse_args(argv)
    late = 0
    for file in options.files:
        text = file.read_text(encoding="utf-8")
        filled = fill(text)
        if filled == text:
            print(f"{len(MARKED.findall(text))} tables in {file}")
            continue
        late += 1
        if options.check:
            print(f"{file} is out of date: run python scripts/readme_tables.py")
        else:
            file.write_text(filled, encoding="utf-8")
            print(f"{len(MARKED.findall(text))} tables in {file}, rewritten")
    return int(options.check and late > 0)


if __name__ == "__main__":
    sys.exit(main())
